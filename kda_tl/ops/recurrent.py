"""What recurrent operators share: arguments that mean the same, every refusal, and what of a call decides its kernels.

They take a few tokens a sequence through states that lie in a pool of slots, which they change in place. What the
device alone knows, such as indices, is never read here: a call does not wait for the device.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from kda_tl.core.dtypes import NAME_OF_DTYPE
from kda_tl.core.plain import check_kind
from kda_tl.core.problem import LOWER_BOUND_RANGE, Problem
from kda_tl.errors import InputError
from kda_tl.ops.operator import Args, Declaration

Tensor = torch.Tensor
MAX_FP32 = torch.finfo(torch.float32).max
TENSORS = ("q", "k", "v", "g", "gk", "gv", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")
INDICES = (
    "ssm_state_indices",
    "num_accepted_tokens",
    "output_state_indices",
    "intermediate_state_indices",
    "retrieve_parent_token",
)
ALL_TENSORS = (*TENSORS, *INDICES, "intermediate_states", "out")
_FLOATS = "bfloat16, float16 or float32"


class Lacking:
    """What arguments are that not every recurrent operator has, for one without them."""

    __slots__ = ()
    gk = gv = lower_bound = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentOperator(Declaration):
    """One recurrent operator."""

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments."""
        return tuple(self.signature.parameters)

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors."""
        return tuple(name for name in ALL_TENSORS if name in self.arguments)

    @functools.cached_property
    def pick_tensors(self) -> Callable[[Args], tuple[Tensor | None, ...]]:
        """Those of a call, in the order of their names."""
        return attrgetter(*self.tensors)

    @functools.cached_property
    def pick_flags(self) -> Callable[[Args], tuple[Any, ...]]:
        """The others: with what tensors are like they decide how a call is planned."""
        return attrgetter(*(name for name in self.arguments if name not in ALL_TENSORS))

    @functools.cached_property
    def Arguments(self) -> type[Any]:
        """The class that carries the arguments of a call."""
        defaults = {name: None if p.default is p.empty else p.default for name, p in self.signature.parameters.items()}
        fields = [(name, Any, dataclasses.field(default=value)) for name, value in defaults.items()]
        return dataclasses.make_dataclass(f"{self.name}_arguments", fields, bases=(Lacking,), slots=True, eq=False)


def count_sequences(a: Args) -> int:
    """How many sequences a call has."""
    return a.q.shape[0] if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1


def writes_pool(a: Args) -> bool:
    """Whether a call changes the states that it is given."""
    return not a.disable_state_update and bool(a.inplace_final_state or a.output_state_indices is not None)


def state_shape(a: Args) -> tuple[int, ...]:
    """Of one sequence: [HV, K, V] or [HV, V, K]."""
    K, (HV, V) = a.q.shape[3], a.v.shape[2:]
    return (HV, V, K) if a.state_v_first else (HV, K, V)


def pose(operator: RecurrentOperator, a: Args) -> Problem:
    """The problem of a call. Raises InputError for what cannot be used."""
    _check_tensors(a, operator.scalar_gate)
    _check_flags(a, operator.scalar_gate)
    _check_shapes(a, operator.scalar_gate)
    _check_states(a)
    _check_indices(a)
    B, T, H, K = a.q.shape
    HV, V = a.v.shape[2:]
    gate = "log" if not a.use_gate_in_kernel else "softplus" if a.lower_bound is None else "safe"
    beta = "sigmoid2" if a.allow_neg_eigval else "sigmoid" if a.use_beta_sigmoid_in_kernel else "plain"
    gates = [x for x in (a.g, a.gk, a.gv) if x is not None]
    return Problem(
        H=H,
        HV=HV,
        K=K,
        V=V,
        tokens=B * T,
        sequences=count_sequences(a),
        longest=T if a.cu_seqlens is None else -(-T // max(1, count_sequences(a))),  # lengths are on the device
        dtype=NAME_OF_DTYPE[a.v.dtype],
        g_dtype=NAME_OF_DTYPE[gates[0].dtype] if gates else "",
        beta_dtype="" if a.beta is None else NAME_OF_DTYPE[a.beta.dtype],
        gate=gate,
        has_A_log=gate != "log" and a.A_log is not None,
        has_dt_bias=gate != "log" and a.dt_bias is not None,
        beta=beta,
        l2norm=bool(a.use_qk_l2norm_in_kernel),
        varlen=a.cu_seqlens is not None,
        initial_state=a.initial_state is not None,
        final_state=bool(a.output_final_state) and not a.inplace_final_state,
        state_v_first=bool(a.state_v_first),
        scalar_gate=operator.scalar_gate,
        state_dtype="fp32" if (state := _find_states(a)) is None else NAME_OF_DTYPE[state.dtype],
        options=_find_options(a),
        operator=operator.name,
        direction="step",
    )


def _find_states(a: Args) -> Tensor | None:
    return a.intermediate_states if a.initial_state is None else a.initial_state


def _find_options(a: Args) -> tuple[str, ...]:
    destination = a.ssm_state_indices if a.output_state_indices is None else a.output_state_indices
    writes = writes_pool(a)
    options = {
        "has_g": a.g is not None,
        "key_gate": a.gk is not None,
        "value_gate": a.gv is not None,
        "has_beta": a.beta is not None,
        "wide_beta": a.beta is not None and a.beta.dim() == 4,
        "ragged": a.cu_seqlens is not None,
        "pooled": a.ssm_state_indices is not None,
        "accepted": a.num_accepted_tokens is not None,
        "separate": writes and a.output_state_indices is not None,
        "updates": writes,
        "each_token": writes and destination is not None and destination.dim() == 2,
        "snapshots": a.intermediate_states is not None,
        "placed": a.intermediate_state_indices is not None,
        "tree": a.retrieve_parent_token is not None,
    }
    return tuple(name for name, there in options.items() if there)


def _check_tensors(a: Args, scalar_gate: bool) -> None:
    """Types, kinds, ranks, dtypes and devices."""
    ranks = {"q": 4, "k": 4, "v": 4, "g": 3 if scalar_gate else 4, "gk": 4, "gv": 4}
    for name in ALL_TENSORS:
        x = getattr(a, name, None)
        if x is None and name not in ("q", "k", "v") and (name != "g" or scalar_gate) and name != "beta":
            continue
        if x is None and name == "beta" and scalar_gate:
            continue
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        check_kind(name, x)
        if name in ranks and x.dim() != ranks[name]:
            shape = "[B, T, HV]" if ranks[name] == 3 else "[B, T, heads, channels]"
            raise InputError(f"{name} must have {ranks[name]} dimensions, {shape}; got shape {list(x.shape)}.")
        if (name in INDICES or name == "cu_seqlens") and x.dtype not in (torch.int32, torch.int64):
            raise InputError(f"{name} must be int32 or int64, got {x.dtype}: cast it once, outside of the loop.")
        if name in (*ranks, "beta", "initial_state", "intermediate_states", "out") and x.dtype not in NAME_OF_DTYPE:
            raise InputError(f"{name} must be {_FLOATS}, got {x.dtype}.")
        if x.device != a.q.device:
            raise InputError(f"{name} is on {x.device} but q is on {a.q.device}: move them to one device.")
    if a.q.device.type not in ("cpu", "cuda"):
        raise InputError(f"tensors must be on a CUDA device or the CPU, got {a.q.device}.")
    for name, like in (("out", "v"), ("gk", "g"), ("gv", "g"), ("gv", "gk")):
        x, y = getattr(a, name), getattr(a, like)
        if x is not None and y is not None and x.dtype != y.dtype:
            raise InputError(f"{name} must have the dtype of {like}, {y.dtype}, got {x.dtype}: cast it.")


def _check_flags(a: Args, scalar_gate: bool) -> None:
    """Flags and numbers that contradict each other."""
    low, high = LOWER_BOUND_RANGE
    for name in ("scale", "lower_bound"):
        if (number := getattr(a, name)) is not None and not isinstance(number, numbers.Real):
            raise InputError(f"{name} must be a number or None, got {type(number).__name__}.")
    if a.scale is not None and not -MAX_FP32 <= a.scale <= MAX_FP32:
        raise InputError(f"scale must be a finite fp32 number, got {a.scale}: leave it out for K ** -0.5.")
    if a.lower_bound is not None and not low <= a.lower_bound < high:
        raise InputError(f"lower_bound must be in [{low:g}, {high:g}), got {a.lower_bound}: pass for example -5.0.")
    if a.use_gate_in_kernel and a.g is None:
        raise InputError("use_gate_in_kernel=True needs g, the raw gate.")
    if a.use_gate_in_kernel and a.lower_bound is None and a.A_log is None:
        also = "" if scalar_gate else ", or a lower_bound"
        raise InputError(f"use_gate_in_kernel=True needs A_log of shape [HV]{also}.")
    if a.allow_neg_eigval and not a.use_beta_sigmoid_in_kernel:
        raise InputError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles that sigmoid.")
    if a.beta is None and a.use_beta_sigmoid_in_kernel:
        raise InputError("use_beta_sigmoid_in_kernel=True needs beta, the logit of the step size.")
    if not isinstance(a.pad_slot_id, int) or abs(a.pad_slot_id) > 1 << 24:
        raise InputError(f"pad_slot_id must be a small whole number, -1 or 0 for example, got {a.pad_slot_id!r}.")


def _check_shapes(a: Args, scalar_gate: bool) -> None:
    B, T, H, K = a.q.shape
    HV, V = a.v.shape[2:]
    gate: tuple[int, ...] = (B, T, HV) if scalar_gate else (B, T, HV, K)
    shapes = {"k": (B, T, H, K), "v": (B, T, HV, V), "g": gate, "gk": (B, T, HV, K), "gv": (B, T, HV, V)}
    for name, shape in (shapes | {"out": (B, T, HV, V)}).items():
        x = getattr(a, name)
        if x is not None and tuple(x.shape) != shape:
            raise InputError(f"{name} must have the shape {list(shape)}, got {list(x.shape)}.")
    if a.beta is not None and tuple(a.beta.shape) not in ((B, T, HV), (B, T, HV, V)):
        raise InputError(f"beta must have the shape {[B, T, HV]}, or {[B, T, HV, V]}, got {list(a.beta.shape)}.")
    biases = HV if scalar_gate else HV * K
    for name, numel in (("A_log", HV), ("dt_bias", biases)):
        x = getattr(a, name)
        if x is not None and (x.numel() != numel or not x.is_floating_point()):
            raise InputError(f"{name} must be a float tensor of {numel} elements, got {x.dtype} {list(x.shape)}.")
    if a.cu_seqlens is not None:
        if B != 1:
            raise InputError(f"cu_seqlens needs B=1, got B={B}: flatten the batch into the tokens.")
        if a.cu_seqlens.dim() != 1 or len(a.cu_seqlens) < 1:
            raise InputError(f"cu_seqlens must be [N + 1], got {list(a.cu_seqlens.shape)}.")
    if a.out is not None and not a.out.is_contiguous():
        raise InputError("out must be contiguous: kernels write it as it lies in memory.")


def _check_states(a: Args) -> None:
    state, buffer, shape = a.initial_state, a.intermediate_states, state_shape(a)
    layout = "HV, V, K" if a.state_v_first else "HV, K, V"
    if state is not None:
        if state.dim() != 4 or tuple(state.shape[1:]) != shape:
            raise InputError(
                f"initial_state must be [slots, {layout}] = [slots, {', '.join(map(str, shape))}], got"
                f" {list(state.shape)}: state_v_first says in which order K and V lie."
            )
        if a.ssm_state_indices is None and len(state) != count_sequences(a):
            raise InputError(
                f"initial_state must have a state for each of {count_sequences(a)} sequences, got {len(state)}: pass"
                " ssm_state_indices if it is a pool."
            )
        if writes_pool(a) and not _lies_dense(state, 1):
            raise InputError(
                f"a pool must be contiguous but for the stride between its slots, got strides {list(state.stride())}:"
                " it is written in place."
            )
    elif a.inplace_final_state or a.ssm_state_indices is not None or a.output_state_indices is not None:
        raise InputError("inplace_final_state and indices of slots need initial_state, the pool.")
    if buffer is None:
        for name in ("intermediate_state_indices", "retrieve_parent_token"):
            if getattr(a, name) is not None:
                raise InputError(f"{name} needs intermediate_states, the buffer that it is about.")
        return
    if buffer.dim() != 5 or tuple(buffer.shape[2:]) != shape or buffer.shape[1] < a.q.shape[1] * (a.cu_seqlens is None):
        raise InputError(
            f"intermediate_states must be [rows, steps, {layout}] with a step for each of {a.q.shape[1]} tokens, got"
            f" {list(buffer.shape)}."
        )
    if not _lies_dense(buffer, 1):
        raise InputError("intermediate_states must be contiguous but for the stride between its rows.")
    if state is not None and state.dtype != buffer.dtype:
        raise InputError(f"intermediate_states must have the dtype of the pool, {state.dtype}, got {buffer.dtype}.")
    if a.intermediate_state_indices is None and len(buffer) < count_sequences(a):
        raise InputError(f"intermediate_states must have a row for each of {count_sequences(a)} sequences.")


def _check_indices(a: Args) -> None:
    N, T = count_sequences(a), a.q.shape[1]
    for name in INDICES:
        x = getattr(a, name)
        wide = name in ("ssm_state_indices", "output_state_indices")
        ranks = (1, 2) if wide else (2,) if name == "retrieve_parent_token" else (1,)
        if x is not None and (x.dim() not in ranks or len(x) != N or x.numel() < N):
            shape = "[N] or [N, W]" if wide else "[N, T]" if ranks == (2,) else "[N]"
            raise InputError(f"{name} must be {shape} with N={N} sequences, got {list(x.shape)}.")
    slots, targets = a.ssm_state_indices, a.output_state_indices
    if a.num_accepted_tokens is not None and (slots is None or slots.dim() != 2):
        raise InputError("num_accepted_tokens needs ssm_state_indices [N, W]: it says which column holds the state.")
    if targets is not None and a.disable_state_update:
        raise InputError("output_state_indices has no meaning with disable_state_update=True: leave one of them out.")
    destination = slots if targets is None else targets
    wide = writes_pool(a) and destination is not None and destination.dim() == 2 and a.cu_seqlens is None
    if wide and destination.shape[1] < T:
        raise InputError(f"slots of {T} tokens need as many columns of indices, got {list(destination.shape)}.")
    if (parents := a.retrieve_parent_token) is not None:
        if a.cu_seqlens is not None or not a.disable_state_update:
            raise InputError("retrieve_parent_token needs disable_state_update=True and no cu_seqlens.")
        if parents.shape[1] != T:
            raise InputError(f"retrieve_parent_token must be {[N, T]}, got {list(parents.shape)}.")


def _lies_dense(x: Tensor, lead: int) -> bool:
    """Whether a tensor is contiguous but for the strides of its first dimensions, which do not fold it."""
    size = 1
    for length, stride in zip(reversed(x.shape[lead:]), reversed(x.stride()[lead:]), strict=True):
        if length > 1 and stride != size:
            return False
        size *= length
    return len(x) < 2 or x.stride(0) >= size
