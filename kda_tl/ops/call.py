"""One call of an operator: from its arguments to the launches of a pass, and what earlier calls spare it."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from kda_tl.core.device import Device, cpu_device, cuda_device
from kda_tl.core.layout import make_layout
from kda_tl.core.pipeline import operand_shapes
from kda_tl.core.plain import Signature, align, check_gradient, check_memory, describe
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.ops.operator import Args, Bounds, Operator
from kda_tl.reference import recurrent_kda
from kda_tl.runtime.defaults import DEFAULT_BT, find_keeper
from kda_tl.runtime.dispatch import PlanSelection, build_program, context, load_program, select_cached
from kda_tl.runtime.program import Compute, Program

Tensor = torch.Tensor


class BoundCall(NamedTuple):
    """What a call needs besides its tensors; the same for all calls of one signature."""

    operator: Operator
    signature: Signature
    problem: Problem
    device: Device
    where: torch.device
    gpu: int | None  # its index
    chunk_size: int | None
    choice: PlanSelection
    compute: Compute | None  # None: the reference path
    bounds: Bounds
    operands: tuple[str, ...]  # those that are there, as pipelines name them
    pick: Callable[[Args], tuple[Tensor, ...]]  # takes these of the arguments
    widened: tuple[str, ...]  # of these, those that come in other dtypes than pipelines take
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of these on the CPU, as pipelines take them
    constants: dict[str, Any]  # what pipelines take besides the caller's tensors
    like: tuple[tuple[int, ...], torch.dtype]  # shape and dtype of o


_WIDE = ("A_log", "dt_bias", "h0")  # pipelines take them as fp32
_bound_calls: dict[tuple[Any, ...], BoundCall] = {}
_BOUND_LIMIT = 4096
_pick_arguments = functools.cache(attrgetter)


def bind_call(operator: Operator, a: Args) -> BoundCall:
    """Validates and plans a call, or finds the plan of an earlier call with the same signature."""
    try:
        signature = describe(operator.pick_operands(a))
        packed = a.cu_seqlens is not None
        key = (operator, signature, operator.pick_flags(a), packed, operator.find_bounds(a), context())
        found = _bound_calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, not hashable, no sizes: let the checks say it
        operator.check(a)
        raise
    if found is None:
        found = _bind_new(operator, a, signature, key[-2])
        if len(_bound_calls) >= _BOUND_LIMIT:
            _bound_calls.clear()
        _bound_calls[key] = found
    return found


def pose(operator: Operator, a: Args, bounds: Bounds) -> tuple[Problem, Device, int | None]:
    """The problem of a call, its device and the chunk size it asks for. Raises InputError for what cannot be used."""
    problem, first = operator.pose(a, bounds), operator.pick_operands(a)[0]
    device = cuda_device(first.device.index or 0) if first.is_cuda else cpu_device()
    return problem, device, a.chunk_size or (DEFAULT_BT if problem.intermediate_states else None)


def _bind_new(operator: Operator, a: Args, signature: Signature, bounds: Bounds) -> BoundCall:
    """Chooses a plan and compiles it."""
    problem, device, chunk_size = pose(operator, a, bounds)
    choice, program = load_program(problem, device, chunk_size)
    where, shape = a.v.device, tuple(a.v.shape)
    given = {name: x for name, x in zip(operator.operands, signature, strict=True) if x and problem.has(name)}
    constants: dict[str, Any] = dict.fromkeys(operator.operands.keys() - given.keys())
    constants |= operator.numbers(a)
    compute: Compute | None = None
    if program is not None and problem.tokens:
        compute, tables = _bind(program, bounds, where, views=(("o", shape),))
        constants |= tables
    return BoundCall(
        operator=operator,
        signature=signature,
        problem=problem,
        device=device,
        where=where,
        gpu=where.index if where.type == "cuda" else None,
        chunk_size=chunk_size,
        choice=choice,
        compute=compute,
        bounds=bounds,
        operands=tuple(given),
        pick=_pick_arguments(*(operator.operands[name] for name in given)),
        widened=tuple(name for name in _WIDE if name in given and given[name][1] != torch.float32),
        shapes=tuple((name, shape) for name, shape in operand_shapes(problem).items() if name in given),
        constants=constants,
        like=(shape, a.v.dtype),
    )


def _bind(
    program: Program,
    bounds: Bounds,
    where: torch.device,
    results: tuple[str, ...] | None = None,
    views: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> tuple[Compute, dict[str, Any]]:
    """A program for the lengths of a call, and the chunk tables it takes."""
    layout = make_layout(bounds, program.plan.BT, where, program.pipeline.segments)
    return program.bind(layout.sizes, where, results, views), layout.tables


def _find_operands(bound: BoundCall, a: Args, **more: Tensor | None) -> dict[str, Any]:
    """The caller's tensors as pipelines take them."""
    tensors: dict[str, Any] = dict(zip(bound.operands, bound.pick(a)))  # noqa: B905 (0.1 us)
    if more:
        tensors.update(more)
    for name in bound.widened:
        check_memory(name, tensors[name])
        tensors[name] = tensors[name].float()
    if bound.gpu is not None:  # replays read addresses, for which all of this has its shape already
        return align(tensors)
    for name, x in tensors.items():
        if x is not None:  # a read beyond a tensor's memory would end the process
            check_memory(name, x)
    tensors = align(tensors)
    for name, shape in bound.shapes:
        tensors[name] = tensors[name].view(shape)
    if "do" in more:
        tensors["do"] = tensors["do"].flatten(0, 1)
    return tensors


def run_forward(bound: BoundCall, compute: Compute, a: Args) -> Any:
    """Launches the kernels; nothing here waits for the device."""
    tensors = _find_operands(bound, a)
    tensors.update(bound.constants)
    return _view_results(bound, compute(tensors))


class Backward(NamedTuple):
    """How a call's backward runs: its plan, and what the forward keeps for it, if it does, and by which plan."""

    choice: PlanSelection
    residuals: tuple[str, ...] = ()
    forward: Plan | None = None


def run_with_residuals(bound: BoundCall, backward: Backward, a: Args) -> tuple[Any, dict[str, Tensor | None]]:
    """:func:`run_forward`, and the residuals for a backward that has some."""
    names, plan = backward.residuals, backward.forward or bound.choice.plan
    p = replace(bound.problem, direction="bwd")  # what it makes must be what a backward would make again
    program = build_program(plan, p.without_lengths(), bound.device)
    compute, _ = _bind(program, bound.bounds, bound.where, (*program.flow().results, *names))
    out = compute(_find_operands(bound, a) | bound.constants)
    return _view_results(bound, out), {name: out[name] for name in names}


def _view_results(bound: BoundCall, out: Mapping[str, Any]) -> Any:
    """A pass's results as the operator returns them."""
    (shape, dtype), p, o = bound.like, bound.problem, out["o"]
    if o.shape != shape:  # a view is 2.5 us of the host's time
        o = o.view(shape)
    if o.dtype != dtype:  # the CPU target computes in fp32
        o = o.to(dtype)
    if not p.intermediate_states:
        return o, out["ht"]
    h = out["h"].to(dtype).unflatten(0, (shape[0], -1))[..., : p.K, : p.V]
    return o, out["ht"], h.transpose(-1, -2) if p.state_v_first else h


def choose_backward(bound: BoundCall, keep: bool = False) -> Backward:
    """The backward of a call, chosen with its forward: see :func:`choose_backward_of`."""
    return choose_backward_of(bound.problem, bound.device, bound.chunk_size, bound.choice.plan, keep)


def choose_backward_of(
    problem: Problem, device: Device, chunk_size: int | None, forward: Plan | None, keep: bool = False
) -> Backward:
    """The backward of a problem, chosen with its forward: pins and overlays hold where the operator is called.

    With ``keep`` it begins from the forward's residuals, if a plan can that cuts the same chunks. A plan may say so
    itself. Raises InputError if the pinned plan cuts others.
    """
    posed, problem = problem, _reverse(problem)
    asked = chunk_size and _choose_chunks(problem, device, chunk_size, context())
    choice = asked or select_cached(problem, device)  # a hint: the backward may have room for shorter chunks only
    if forward is None or choice.plan is None or not (keep or choice.plan.kept):
        return Backward(choice)
    resumable: PlanSelection | None = choice
    if choice.plan.BT != forward.BT:
        if not keep:  # the plan would have them, the caller does not insist
            return Backward(choice)
        if choice.step == "pinned":
            raise InputError(
                f"disable_recompute=True needs one BT in both passes, but the pinned backward has BT={choice.plan.BT}"
                f" and the forward BT={forward.BT}: pass chunk_size={choice.plan.BT}, pin plans of one BT, or leave"
                " disable_recompute out."
            )
        resumable = _choose_chunks(problem, device, forward.BT, context())
    if resumable is None or resumable.plan is None:
        return Backward(choice)
    from kda_tl.templates.pipelines import PIPELINES

    pipeline = PIPELINES[resumable.plan.pipeline]
    forward = find_keeper(forward, posed, device)
    found = pipeline.finds_residuals(PIPELINES[forward.pipeline])
    return Backward(resumable, pipeline.residuals, forward) if found else Backward(choice)


@functools.lru_cache(maxsize=512)
def _choose_chunks(problem: Problem, device: Device, BT: int, _context: tuple[Any, ...]) -> PlanSelection | None:
    """The choice among plans of one BT; None where the device has no room, or a pinned numerics class no plan."""
    try:
        return select_cached(problem, device, BT)
    except InputError:
        return None


def run_backward(
    bound: BoundCall,
    backward: Backward,
    a: Args,
    do: Tensor | None,
    dht: Tensor | None,
    residuals: Mapping[str, Tensor | None] | None = None,
) -> list[Tensor | None]:
    """Gradients of the differentiable arguments in their order, shapes and dtypes; None for absent ones.

    A ``do`` of None stands for zeros, without ``dht`` nothing depends on the final state, and without residuals, those
    of :func:`run_with_residuals`, they are computed again.
    """
    p, (shape, dtype), where = backward_problem(bound.problem, dht is not None), bound.like, bound.where
    program = build_program(backward.choice.plan, p, bound.device, from_residuals=residuals is not None)
    compute, tables = _bind(program, bound.bounds, where)
    if do is None:
        do = torch.zeros(shape, dtype=dtype, device=where)
    else:
        do = check_gradient("o", do, shape, where).to(dtype)
    if dht is not None:
        state = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        dht = check_gradient("the final state", dht, (len(bound.bounds) - 1, p.HV, *state), where).float()
    tensors = _find_operands(bound, a, do=do, dht=dht, **residuals or {})
    out = compute(tensors | bound.constants | tables)
    found = zip((out[f"d{name}"] for name in bound.operator.operands), bound.signature, strict=True)
    return [None if x is None or of is None else x.view(of[0]).to(of[1]) for x, of in found]


@functools.lru_cache(maxsize=512)
def backward_problem(problem: Problem, final_state: bool) -> Problem:
    """What a backward's kernels are compiled for."""
    return replace(_reverse(problem), final_state=final_state).without_lengths()


@functools.lru_cache(maxsize=512)
def _reverse(problem: Problem) -> Problem:
    """The problem of a call's backward: remembered, since to make it takes the host 15 us."""
    return replace(problem, direction="bwd", intermediate_states=False)


def run_reference(bound: BoundCall, a: Args) -> Any:
    """The recurrence in plain PyTorch: where no compiler was found, and for calls without tokens."""
    p, (shape, dtype) = bound.problem, bound.like
    for name in bound.operator.tensors:
        if (x := getattr(a, name)) is not None:
            check_memory(name, x)
    if bound.choice.plan is None:
        _warn_reference(bound.operator.name, bound.choice.reason)
    if p.intermediate_states and p.tokens:
        raise UnsupportedError(
            "the reference path has no chunks, so no intermediate states: install a compiler (see `kda-tl doctor`)."
        )
    arguments = bound.operator.recurrence(a) | {"cu_seqlens": torch.tensor(bound.bounds) if p.varlen else None}
    with torch.autocast(bound.where.type, enabled=False):  # kernels do not see it either
        o, state = recurrent_kda(**arguments, dtype=torch.float32)
    o, ht = o.to(dtype), state if p.final_state else None
    if not p.intermediate_states:
        return o, ht
    return o, ht, o.new_empty((shape[0], 0, *state.shape[1:]))


@functools.cache
def _warn_reference(name: str, reason: str) -> None:
    warnings.warn(f"{name} is slow here: {reason}.", KdaTlWarning, stacklevel=5)
