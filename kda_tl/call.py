"""One call of ``chunk_kda``: from its arguments to the launches of a pass, and what earlier calls spare it.

All functions take the operator's arguments by name, as its ``locals()``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from kda_tl.arguments import TENSORS, check_flags, check_tensors, parse_problem, pick_tensors, token_bounds
from kda_tl.device import Device
from kda_tl.dispatch import Choice, build_program, choose, context, prepare
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.layout import make_layout
from kda_tl.plain import Signature, align, check_gradient, check_memory, describe
from kda_tl.problem import Problem
from kda_tl.program import Compute, Program
from kda_tl.reference import gradient_name, recurrent_kda

Tensor = torch.Tensor


class Ready(NamedTuple):
    """What a call needs besides its tensors; the same for all calls of one signature."""

    signature: Signature
    problem: Problem
    device: Device
    chunk_size: int | None
    choice: Choice
    compute: Compute | None  # None: the reference path
    bounds: tuple[int, ...]
    constants: dict[str, Any]  # what pipelines take besides the caller's tensors


_pick_flags = itemgetter(
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "state_v_first",
    "return_intermediate_states",
    "chunk_size",
)
_ready: dict[tuple[Any, ...], Ready] = {}
_READY_LIMIT = 4096


def find_ready(a: dict[str, Any]) -> Ready:
    """Validates and plans a call, or finds the plan of an earlier call with the same signature."""
    try:
        signature = describe(pick_tensors(a))
        key = (signature, _pick_flags(a), a["cu_seqlens"] is None, token_bounds(a), context())
        found = _ready.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, not hashable, no sizes: let the checks say it
        check_tensors(a)
        check_flags(a)
        raise
    if found is None:
        problem, device, chunk_size = parse_problem(a, key[-2])
        found = _make_ready(a, signature, problem, device, chunk_size, key[-2])
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = found
    return found


def _make_ready(
    a: dict[str, Any],
    signature: Signature,
    problem: Problem,
    device: Device,
    chunk_size: int | None,
    bounds: tuple[int, ...],
) -> Ready:
    """Chooses a plan and compiles it."""
    choice, program = prepare(problem, device, chunk_size)
    scale = problem.K**-0.5 if a["scale"] is None else float(a["scale"])
    lower_bound = -5.0 if a["lower_bound"] is None else float(a["lower_bound"])
    constants: dict[str, Any] = {"scale": scale, "lower_bound": lower_bound}
    compute: Compute | None = None
    if program is not None and problem.tokens:
        compute, tables = _bind(program, bounds, a["q"].device, views=(("o", tuple(a["v"].shape)),))
        constants |= tables
    return Ready(signature, problem, device, chunk_size, choice, compute, bounds, constants)


def _bind(
    program: Program,
    bounds: tuple[int, ...],
    where: torch.device,
    results: tuple[str, ...] | None = None,
    views: tuple[tuple[str, tuple[int, ...]], ...] = (),
) -> tuple[Compute, dict[str, Any]]:
    """A program for the lengths of a call, and the chunk tables it takes."""
    layout = make_layout(bounds, program.plan.BT, where, program.pipeline.segments)
    return program.bind(layout.sizes, where, results, views), layout.tables


def _operands(p: Problem, a: dict[str, Any], **more: Tensor | None) -> dict[str, Any]:
    """The caller's tensors as pipelines take them."""
    tensors: dict[str, Any] = {
        "q": a["q"],
        "k": a["k"],
        "v": a["v"],
        "g": a["g"],
        "beta": a["beta"],
        "A_log": _parameter("A_log", a["A_log"]) if p.has_A_log else None,
        "dt_bias": _parameter("dt_bias", a["dt_bias"]) if p.has_dt_bias else None,
        "h0": a["initial_state"],
        **more,
    }
    if a["q"].is_cuda:  # replays read addresses, for which all of this has its shape already
        return align(tensors)
    for name, x in tensors.items():
        if x is not None:  # a read beyond a tensor's memory would end the process
            check_memory(name, x)
    tensors = align(tensors)
    for name in ("q", "k", "v", "g", "beta", "do"):
        if name in tensors:
            tensors[name] = tensors[name].flatten(0, 1)
    for name, shape in (("A_log", (p.HV,)), ("dt_bias", (p.HV, p.K))):
        if tensors[name] is not None:
            tensors[name] = tensors[name].view(shape)
    return tensors


def run_forward(ready: Ready, compute: Compute, a: dict[str, Any]) -> Any:
    """Launches the kernels; nothing here waits for the device."""
    tensors = _operands(ready.problem, a)
    tensors.update(ready.constants)
    return _view_results(ready, a, compute(tensors))


def run_keeping(ready: Ready, names: tuple[str, ...], a: dict[str, Any]) -> tuple[Any, dict[str, Tensor | None]]:
    """:func:`run_forward`, and the residuals of these names for the backward."""
    p = replace(ready.problem, direction="bwd")  # what it makes must be what a backward would make again
    program = build_program(ready.choice.plan, p.without_lengths(), ready.device)
    compute, _ = _bind(program, ready.bounds, a["q"].device, (*program.flow().results, *names))
    out = compute(_operands(ready.problem, a) | ready.constants)
    return _view_results(ready, a, out), {name: out[name] for name in names}


def _view_results(ready: Ready, a: dict[str, Any], out: Mapping[str, Any]) -> Any:
    """A pass's results as the operator returns them."""
    q, p = a["q"], ready.problem
    o = out["o"]
    if o.shape != a["v"].shape:  # a view is 2.5 us of the host's time
        o = o.view(a["v"].shape)
    if o.dtype != q.dtype:  # the CPU target computes in fp32
        o = o.to(q.dtype)
    if not a["return_intermediate_states"]:
        return o, out["ht"]
    h = out["h"].to(q.dtype).unflatten(0, (q.shape[0], -1))[..., : p.K, : p.V]
    return o, out["ht"], h.transpose(-1, -2) if p.state_v_first else h


class Backward(NamedTuple):
    """How a call's backward runs.

    Attributes:
        choice: its plan, and why.
        residuals: names of what the forward keeps for it; empty if it computes them again.
    """

    choice: Choice
    residuals: tuple[str, ...] = ()


def choose_backward(ready: Ready, keep: bool = False) -> Backward:
    """The backward of a call, chosen with its forward: pins and overlays hold where the operator is called.

    Args:
        ready: of the forward call.
        keep: begin from the forward's residuals, if a plan can that cuts the same chunks. A plan may say so itself.

    Raises:
        InputError: ``keep``, and the pinned plan cuts other chunks.
    """
    problem, forward = replace(ready.problem, direction="bwd", intermediate_states=False), ready.choice.plan
    asked = ready.chunk_size and _choose_chunks(problem, ready.device, ready.chunk_size, context())
    choice = asked or choose(problem, ready.device)  # a hint: the backward may have room for shorter chunks only
    if forward is None or choice.plan is None or not (keep or choice.plan.kept):
        return Backward(choice)
    resumable: Choice | None = choice
    if choice.plan.BT != forward.BT:
        if not keep:  # the plan would have them, the caller does not insist
            return Backward(choice)
        if choice.step == "pinned":
            raise InputError(
                f"disable_recompute=True needs one BT in both passes, but the pinned backward has BT={choice.plan.BT}"
                f" and the forward BT={forward.BT}: pass chunk_size={choice.plan.BT}, pin plans of one BT, or leave"
                " disable_recompute out."
            )
        resumable = _choose_chunks(problem, ready.device, forward.BT, context())
    if resumable is None or resumable.plan is None:
        return Backward(choice)
    from kda_tl.templates.pipelines import PIPELINES

    pipeline = PIPELINES[resumable.plan.pipeline]
    found = pipeline.finds_residuals(PIPELINES[forward.pipeline])
    return Backward(resumable, pipeline.residuals) if found else Backward(choice)


@functools.lru_cache(maxsize=512)
def _choose_chunks(problem: Problem, device: Device, BT: int, _context: tuple[Any, ...]) -> Choice | None:
    """The choice among plans of one BT; None where the device has no room, or a pinned numerics class no plan."""
    try:
        return choose(problem, device, BT)
    except InputError:
        return None


def run_backward(
    ready: Ready,
    backward: Backward,
    a: dict[str, Any],
    do: Tensor | None,
    dht: Tensor | None,
    residuals: Mapping[str, Tensor | None] | None = None,
) -> dict[str, Tensor | None]:
    """Gradients of the tensor arguments by name, in their shapes and dtypes; None for absent ones.

    Args:
        ready: of the forward call.
        backward: of :func:`choose_backward`.
        a: the arguments of the forward call.
        do: gradient of o, zeros if None.
        dht: gradient of the final state, absent if None.
        residuals: of :func:`run_keeping`; computed again if None.
    """
    p, v = _backward_problem(ready.problem, dht is not None), a["v"]
    program = build_program(backward.choice.plan, p, ready.device, from_residuals=residuals is not None)
    compute, tables = _bind(program, ready.bounds, v.device)
    do = torch.zeros_like(v) if do is None else check_gradient("o", do, v.shape, v.device).to(v.dtype)
    if dht is not None:
        state = (p.V, p.K) if p.state_v_first else (p.K, p.V)
        dht = check_gradient("the final state", dht, (len(ready.bounds) - 1, p.HV, *state), v.device).float()
    tensors = _operands(p, a, do=do, dht=dht, **residuals or {})
    out = compute(tensors | ready.constants | tables)
    found = {name: out[gradient_name(name)] for name in TENSORS}
    return {name: None if x is None else x.view(a[name].shape).to(a[name].dtype) for name, x in found.items()}


@functools.lru_cache(maxsize=512)
def _backward_problem(problem: Problem, final_state: bool) -> Problem:
    """What a backward's kernels are compiled for."""
    return replace(problem, direction="bwd", final_state=final_state, intermediate_states=False).without_lengths()


def run_reference(ready: Ready, a: dict[str, Any]) -> Any:
    """The recurrence in plain PyTorch: where no compiler was found, and for calls without tokens."""
    p = ready.problem
    for name in TENSORS:
        if a[name] is not None:
            check_memory(name, a[name])
    if ready.choice.plan is None:
        _warn_reference(ready.choice.reason)
    if a["return_intermediate_states"] and p.tokens:
        raise UnsupportedError(
            "the reference path has no chunks, so no intermediate states: install a compiler (see `kda-tl doctor`)."
        )
    with torch.autocast(a["q"].device.type, enabled=False):  # kernels do not see it either
        o, state = recurrent_kda(
            *(a[name] for name in ("q", "k", "v", "g", "beta")),
            scale=ready.constants["scale"],
            initial_state=a["initial_state"],
            gate=p.gate,
            A_log=a["A_log"] if p.has_A_log else None,
            dt_bias=a["dt_bias"] if p.has_dt_bias else None,
            lower_bound=ready.constants["lower_bound"],
            beta_mode=p.beta,
            use_l2norm=p.l2norm,
            state_v_first=p.state_v_first,
            cu_seqlens=torch.tensor(ready.bounds) if p.varlen else None,
            dtype=torch.float32,
        )
    o, ht = o.to(a["q"].dtype), state if p.final_state else None
    if not a["return_intermediate_states"]:
        return o, ht
    return o, ht, o.new_empty((a["q"].shape[0], 0, *state.shape[1:]))


_warned: set[str] = set()


def _warn_reference(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"chunk_kda is slow here: {reason}.", KdaTlWarning, stacklevel=4)


def _parameter(name: str, x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return x
    check_memory(name, x)
    return x.float()
