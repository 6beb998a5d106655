"""One call of a recurrent operator: from its arguments to a launch, and what earlier calls spare it."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kda_tl.core.device import Device, cpu_device, cuda_device
from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.plain import check_memory
from kda_tl.core.problem import Problem
from kda_tl.errors import InputError, KdaTlWarning
from kda_tl.ops.operator import Args
from kda_tl.ops.recurrent import RecurrentOperator, count_sequences, pose, state_shape, writes_pool
from kda_tl.ops.recurrent_check import check_values
from kda_tl.reference_decode import decode_reference
from kda_tl.runtime.dispatch import PlanSelection, context, load_program, select_cached
from kda_tl.runtime.program import Compute

Tensor = torch.Tensor
# Names of the tensors by those that stages know them under
OPERANDS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "g": "g",
    "gk": "gk",
    "gv": "gv",
    "beta": "beta",
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "bounds": "cu_seqlens",
    "pool": "initial_state",
    "slots": "ssm_state_indices",
    "accepted": "num_accepted_tokens",
    "targets": "output_state_indices",
    "snapshots": "intermediate_states",
    "snapshot_rows": "intermediate_state_indices",
    "parents": "retrieve_parent_token",
}
_KEYS = ("q", "k")  # they get the dtype of v
_ROWS = ("q", "k", "v", "g", "gk", "gv", "beta")  # [B, T, ...]: a row a token
_WORDS = ("slots", "accepted", "targets", "snapshot_rows", "parents", "bounds")
_STATES = ("pool", "snapshots")
_BOUND_LIMIT = 4096


class BoundStep(NamedTuple):
    """What a call needs besides its tensors; the same for all calls of one signature."""

    problem: Problem
    choice: PlanSelection
    compute: Compute | None  # None: the reference path
    sizes: dict[str, int]
    constants: dict[str, Any]  # numbers, and None for tensors that are absent
    given: tuple[tuple[str, str], ...]  # tensors of the stage and the arguments they are
    copied: tuple[str, ...]  # of these, those that kernels cannot read where they lie
    gpu: int | None


_bound: dict[tuple[Any, ...], BoundStep] = {}


def new_results(a: Args) -> tuple[Tensor, Tensor | None]:
    """Memory for what a call returns: o, unless the caller gives it, and the final state if there is a new one."""
    o = a.v.new_empty(a.v.shape) if a.out is None else a.out
    if not a.output_final_state or a.inplace_final_state:
        return o, None
    return o, a.v.new_empty((count_sequences(a), *state_shape(a)), dtype=torch.float32)


def run_step(operator: RecurrentOperator, a: Args, o: Tensor, ht: Tensor | None) -> None:
    """Writes o, the final state and what of the pool and of the intermediate states the call changes."""
    bound = bind_step(operator, a)
    if _checks():
        check_values(a)
    if not bound.problem.sequences:
        o.zero_()  # of tokens that no sequence has
        return
    compute = bound.compute
    if compute is None:
        _run_reference(bound, a, o, ht)
    elif bound.gpu is None:
        _run_on_cpu(bound, compute, a, o, ht)
    elif torch.cuda.current_device() != bound.gpu:
        with torch.cuda.device(bound.gpu):
            compute(_find_operands(bound, a, o, ht))
    else:
        compute(_find_operands(bound, a, o, ht))


def bind_step(operator: RecurrentOperator, a: Args) -> BoundStep:
    """Validates and plans a call, or finds the plan of an earlier call with the same signature."""
    try:
        signature = tuple([None if x is None else _describe(x) for x in operator.pick_tensors(a)])
        key = operator, signature, operator.pick_flags(a), context()
        found = _bound.get(key)
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, not hashable, no memory: let the checks say it
        pose(operator, a)
        _check_memory(operator, a)
        raise
    if found is None:
        found = _bind_new(operator, a)
        if len(_bound) >= _BOUND_LIMIT:
            _bound.clear()
        _bound[key] = found
    return found


def _check_memory(operator: RecurrentOperator, a: Args) -> None:
    """Raises InputError for a tensor without memory, or one that is written and has its signs elsewhere."""
    for name in operator.tensors:
        if (x := getattr(a, name)) is None:
            continue
        written = name in ("intermediate_states", "out") or (name == "initial_state" and writes_pool(a))
        if written and x.is_neg():
            raise InputError(f"{name} has its negative bit set: pass {name}.resolve_neg(), which it can be kept in.")
        check_memory(name, x)


def _describe(x: Tensor) -> Any:
    """What decides how a kernel reads a tensor: where it lies counts only as far as vectors of 16 bytes need it."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, x.is_neg()


class PosedStep(NamedTuple):
    """What a call asks for, and what of it kernels cannot read where it lies."""

    problem: Problem
    device: Device
    given: tuple[tuple[str, str], ...]
    copied: tuple[str, ...]


def pose_step(operator: RecurrentOperator, a: Args) -> PosedStep:
    """The problem of a call and its device. Raises InputError for what cannot be used."""
    problem = pose(operator, a)
    _check_memory(operator, a)
    on_gpu = a.q.is_cuda
    device = cuda_device(a.q.device.index or 0) if on_gpu else cpu_device()
    given = tuple((name, argument) for name, argument in OPERANDS.items() if _plays_a_part(problem, name, a, argument))
    other = [name for name in _KEYS if getattr(a, name).dtype != a.v.dtype]
    copied = tuple(name for name, argument in given if name in other or _must_copy(name, getattr(a, argument)))
    if on_gpu and any(_is_unaligned(name, getattr(a, argument)) for name, argument in given if name not in copied):
        problem = replace(problem, options=(*problem.options, "unaligned"))
    return PosedStep(problem, device, given, copied)


def explain_step(operator: RecurrentOperator, a: Args) -> PlanSelection:
    """Which plan a call runs, where it comes from and why; and what costs it time."""
    problem, device, given, copied = pose_step(operator, a)
    choice = select_cached(problem, device)
    slow = [
        f"{dict(given)[name]} is copied at every call: its dtype, strides or address do not suit kernels."
        for name in copied
    ]
    if "unaligned" in problem.options:
        slow.append("States do not lie on boundaries of 16 bytes, slot by slot: a slower kernel reads them.")
    return replace(choice, passed_over=(*choice.passed_over, *slow))


def _bind_new(operator: RecurrentOperator, a: Args) -> BoundStep:
    problem, device, given, copied = pose_step(operator, a)
    on_gpu = device.kind == "cuda"
    choice, program = load_program(problem, device, None)
    sizes = _find_sizes(problem, {name: getattr(a, argument) for name, argument in given}, copied if on_gpu else None)
    compute = None if program is None else program.bind(sizes, a.q.device)
    return BoundStep(
        problem=problem,
        choice=choice,
        compute=compute,
        sizes=sizes,
        constants=_find_constants(problem, a),
        given=given,
        copied=copied,
        gpu=(a.q.device.index or 0) if on_gpu else None,
    )


def _find_constants(problem: Problem, a: Args) -> dict[str, Any]:
    """The numbers that stages take, and None for all tensors."""
    width = 1 if a.ssm_state_indices is None else a.ssm_state_indices.shape[-1]
    return dict.fromkeys(OPERANDS) | {
        "scale": problem.K**-0.5 if a.scale is None else float(a.scale),
        "lower_bound": -5.0 if a.lower_bound is None else float(a.lower_bound),
        "group": float(problem.group),
        "steps": float(problem.longest),
        "pad_slot_id": float(a.pad_slot_id),
        "slots_width": float(width),
    }


def lay_out(a: Args, problem: Problem, BT: int, segments: int) -> tuple[dict[str, Any], dict[str, int]]:
    """What stages take in dense memory, and the sizes; there are no chunks. States stay the caller's where they can."""
    given = {name: argument for name, argument in OPERANDS.items() if _plays_a_part(problem, name, a, argument)}
    tensors = _find_constants(problem, a)
    tensors |= {name: _flatten(problem, name, getattr(a, argument)) for name, argument in given.items()}
    if tensors["bounds"] is None:
        tensors["bounds"] = torch.zeros((problem.sequences + 1, 1), dtype=torch.int32, device=a.q.device)
    return tensors, _find_sizes(problem, {name: getattr(a, argument) for name, argument in given.items()}, None)


def judge_step(operator: RecurrentOperator, a: Args) -> dict[str, Tensor]:
    """What a call computes, in float64, by the names of stages; states that it does not change among them."""
    found = decode_reference(**describe_recurrence(pose(operator, a), a))
    expected = {"o": found.o, "ht": found.final_state, "pool": found.pool, "snapshots": found.intermediate_states}
    if not a.output_final_state or a.inplace_final_state:
        del expected["ht"]
    return {name: x for name, x in expected.items() if x is not None}


def name_results(a: Args, returned: Any) -> dict[str, Tensor | None]:
    """What a call returned and wrote, by the names of stages."""
    o, state = returned
    written = a.initial_state if writes_pool(a) else None
    return {"o": o, "ht": None if a.inplace_final_state else state, "pool": written, "snapshots": a.intermediate_states}


def _flatten(p: Problem, name: str, x: Tensor) -> Tensor:
    """A tensor as a stage takes it, in dense memory; on the CPU numbers are fp32."""
    if name in _WORDS:
        x = x.to(torch.int32).contiguous()
        return x.view(len(x), -1, 1) if name in ("slots", "targets", "parents") else x[:, None]
    x = x.float() if not x.is_cuda else x.to(TORCH_DTYPE[p.dtype]) if name in _KEYS else x
    if name in _ROWS:
        x = x.reshape(p.tokens, x.shape[2:].numel())
    elif name in _STATES:
        x = x.reshape(len(x), x.shape[1:].numel())
    elif name == "dt_bias":
        x = x.reshape(p.HV, p.G)
    return x.contiguous().resolve_neg()


def _plays_a_part(problem: Problem, name: str, a: Args, argument: str) -> bool:
    x = getattr(a, argument, None)
    if name in ("A_log", "dt_bias"):
        return problem.has(name)
    return x is not None and (name != "targets" or writes_pool(a))


def _find_row(x: Tensor) -> int | None:
    """The stride between the tokens of a tensor [B, T, ...] whose rows are dense; None if there is no such one."""
    size, dims = 1, list(zip(x.shape, x.stride(), strict=True))
    for length, stride in reversed(dims[2:]):
        if length > 1 and stride != size:
            return None
        size *= length
    (B, from_sequence), (T, from_token) = dims[:2]
    row = from_token if T > 1 else from_sequence if B > 1 else size
    return row if row >= size and (B < 2 or T < 2 or from_sequence == T * from_token) else None


def _must_copy(name: str, x: Tensor) -> bool:
    """Whether a kernel cannot read a tensor where it lies: strides it does not take, or vectors off their boundary."""
    if name in _ROWS:
        row, dense = _find_row(x), x.shape[2:].numel() * x.element_size()
        off = row is not None and (x.data_ptr() | row * x.element_size()) % 16 != 0
        return row is None or x.is_neg() or (off and x.dim() == 4 and dense % 16 == 0)
    if name in _STATES:
        return x.dim() == 4 and (x.is_neg() or not _is_dense(x))
    if name in _WORDS:
        apart = x.dim() < 2 or len(x) < 2 or x.stride(0) >= x.shape[1]  # a kernel takes what is beyond a row for none
        return not apart or (x.stride(-1) != 1 and x.shape[-1] > 1)
    return x.dtype != torch.float32 or not x.is_contiguous() or x.is_neg()


def _is_dense(x: Tensor) -> bool:
    return x[:1].is_contiguous() and (len(x) < 2 or x.stride(0) >= x[0].numel())


def _is_unaligned(name: str, x: Tensor) -> bool:
    stride = x.stride(0) if len(x) > 1 else 0
    return name in _STATES and (x.data_ptr() | stride * x.element_size()) % 16 != 0


def _find_sizes(problem: Problem, tensors: dict[str, Tensor], copied: tuple[str, ...] | None) -> dict[str, int]:
    """What kernels are launched with; on the CPU (``copied`` is None) every tensor is dense."""
    sizes = {"tokens": problem.tokens, "N": problem.sequences}
    sizes |= dict.fromkeys(("bounds_step", "slots_step", "accepted_step", "targets_step", "placed_step"), 1)
    sizes |= dict.fromkeys(("parents_step", "slots_row", "targets_row", "parents_row"), 1)
    for name, x in tensors.items():
        dense = copied is None or name in copied
        if name in _ROWS:
            sizes[f"{name}_row"] = x.shape[2:].numel() if dense else _find_row(x) or 0
        elif name in _STATES:
            count, row = ("pool_slots", "pool_row") if name == "pool" else ("buffer_rows", "snapshot_row")
            sizes[count], size = len(x), x.shape[1:].numel()
            sizes[row] = size if dense or len(x) < 2 else x.stride(0)
        elif name in _WORDS:
            step = 1 if dense or x.dtype == torch.int32 else 2
            sizes[f"{'placed' if name == 'snapshot_rows' else name}_step"] = step
            if name in ("slots", "targets", "parents"):
                sizes[f"{name}_row"] = x.shape[1:].numel() if dense or len(x) < 2 else x.stride(0)
    return sizes


def _find_operands(bound: BoundStep, a: Args, o: Tensor, ht: Tensor | None) -> dict[str, Any]:
    """The caller's tensors as kernels on a GPU read them."""
    tensors = dict(bound.constants)
    for name, argument in bound.given:
        tensors[name] = getattr(a, argument)
    for name in bound.copied:
        x = tensors[name]
        x = x.to(torch.int32) if name in _WORDS else x.float() if name in ("A_log", "dt_bias") else x
        x = x.to(o.dtype) if name in _KEYS else x
        tensors[name] = x.clone(memory_format=torch.contiguous_format).resolve_neg()
    if tensors["bounds"] is None:
        tensors["bounds"] = tensors["q"]  # never read: its shape alone says how many sequences there are
    tensors["o"], tensors["ht"] = o, ht
    return tensors


def _run_on_cpu(bound: BoundStep, compute: Compute, a: Args, o: Tensor, ht: Tensor | None) -> None:
    """Kernels there take fp32 in dense tensors: states are copied back into those that they came from."""
    p, tensors = bound.problem, dict(bound.constants)
    for name, argument in bound.given:
        x: Tensor = getattr(a, argument)
        check_memory(argument, x)
        tensors[name] = _flatten(p, name, x)
    if tensors["bounds"] is None:
        tensors["bounds"] = torch.zeros((p.sequences + 1, 1), dtype=torch.int32)
    out = compute(tensors)
    o.copy_(out["o"].view(o.shape))
    if ht is not None:
        ht.copy_(out["ht"])
    for name, written in (("pool", "updates" in p.options), ("snapshots", True)):
        if written and tensors[name] is not None:
            into = getattr(a, OPERANDS[name])
            if tensors[name].data_ptr() != into.data_ptr():
                into.copy_(tensors[name].view(into.shape))


def _run_reference(bound: BoundStep, a: Args, o: Tensor, ht: Tensor | None) -> None:
    """The recurrence in plain PyTorch: where no compiler was found."""
    _warn_reference(bound.problem.operator, bound.choice.reason)
    with torch.autocast(o.device.type, enabled=False):  # kernels do not see it either
        found = decode_reference(**describe_recurrence(bound.problem, a), dtype=torch.float32)
    o.copy_(found.o)
    if ht is not None:
        ht.copy_(found.final_state)
    for into, values in ((a.initial_state, found.pool), (a.intermediate_states, found.intermediate_states)):
        if into is not None and values is not None:
            into.copy_(values)


@functools.cache
def _warn_reference(name: str, reason: str) -> None:
    warnings.warn(f"{name} is slow here: {reason}.", KdaTlWarning, stacklevel=6)


def describe_recurrence(problem: Problem, a: Args) -> dict[str, Any]:
    """Arguments of :func:`kda_tl.reference_decode.decode_reference` that compute the same."""
    same = (
        "q",
        "k",
        "v",
        "g",
        "beta",
        "gk",
        "gv",
        "scale",
        "A_log",
        "dt_bias",
        "lower_bound",
        "initial_state",
        "state_v_first",
        "cu_seqlens",
        "ssm_state_indices",
        "output_state_indices",
        "num_accepted_tokens",
        "pad_slot_id",
        "intermediate_states",
        "intermediate_state_indices",
        "retrieve_parent_token",
    )
    return {name: getattr(a, name) for name in same} | {
        "gate": problem.gate,
        "beta_mode": problem.beta,
        "use_l2norm": problem.l2norm,
        "update": writes_pool(a),
    }


@functools.cache
def _checks() -> bool:
    """KDA_TL_CHECK, read once a process."""
    return os.environ.get("KDA_TL_CHECK", "0") not in ("", "0")
