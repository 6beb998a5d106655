"""What operators of the delta rule share: arguments that mean the same, every refusal, and the recurrence they compute.

Their arguments have the names and the meaning of flash-linear-attention's. One of them, such as a lower bound, an
operator may lack. The argument ``a`` of a function here is the record of a call's arguments.
"""

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import torch

from kda_tl.core.dtypes import NAME_OF_DTYPE
from kda_tl.core.layout import dense_bounds, make_layout, packed_bounds
from kda_tl.core.pipeline import operand_shapes
from kda_tl.core.plain import check_kind
from kda_tl.core.problem import DIRECTIONS, GATES, LOWER_BOUND_RANGE, Problem
from kda_tl.core.stage import BT_CHOICES
from kda_tl.errors import InputError
from kda_tl.ops.draws import draw_inputs, prepare_before, trim_tokens
from kda_tl.ops.operator import Args, Bounds, FlaEntry, Operator
from kda_tl.reference import recurrent_kda

Tensor = torch.Tensor
MAX_FP32 = torch.finfo(torch.float32).max
_OPERANDS = {x: x for x in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias")} | {"h0": "initial_state"}


def declare(function: Callable[..., Any], *, fla: FlaEntry, scalar_gate: bool = False) -> Operator:
    """The operator of a function's signature.

    It has the arguments q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens and others of theirs. With
    ``scalar_gate`` a value head has one gate for all its key channels.
    """
    bounded = "lower_bound" in inspect.signature(function).parameters
    return Operator(
        function=function,
        operands=_OPERANDS,
        same_dtype=("q", "k", "v"),
        renamed={"transpose_state_layout": "state_v_first"},
        check=functools.partial(_check, scalar_gate=scalar_gate),
        find_bounds=functools.partial(_find_bounds, scalar_gate),
        assume_bounds=functools.partial(_assume_bounds, scalar_gate),
        pose=functools.partial(_pose, name=function.__name__, scalar_gate=scalar_gate),
        numbers=_find_numbers,
        shapes=_find_shapes,
        recurrence=functools.partial(_describe_recurrence, scalar_gate=scalar_gate),
        scalar_gate=scalar_gate,
        gates=tuple(gate for gate in GATES if bounded or gate != "safe"),
        directions=DIRECTIONS,
        modes=_find_modes,
        trim=trim_tokens,
        lay_out=functools.partial(_lay_out, scalar_gate=scalar_gate),
        sizes=_find_sizes,
        judge=functools.partial(_judge, scalar_gate=scalar_gate),
        name_results=_name_results,
        bare=prepare_before,
        draw=functools.partial(draw_inputs, scalar_gate=scalar_gate, bounded=bounded),
        fla=fla,
    )


def _find_bounds(scalar_gate: bool, a: Args) -> Bounds:
    if a.cu_seqlens is None:
        if a.cu_seqlens_cpu is not None:
            raise InputError("cu_seqlens_cpu is only the host's copy: pass cu_seqlens too.")
        shape = a.q.shape
        return dense_bounds(shape[0], shape[1])
    _check_kinds(a, scalar_gate)
    if a.q.shape[0] != 1:
        raise InputError(f"cu_seqlens needs B=1, got B={a.q.shape[0]}: flatten the batch into the tokens.")
    return packed_bounds(a.cu_seqlens, a.cu_seqlens_cpu, a.q.shape[1])


def _assume_bounds(scalar_gate: bool, a: Args) -> Bounds:
    """As many sequences as the call has; their lengths may be on the device, where only the call itself reads them."""
    if a.cu_seqlens is None:
        return _find_bounds(scalar_gate, a)
    return *[0] * max(a.cu_seqlens.numel() - 1, 1), a.q.shape[1]


def _pose(a: Args, bounds: Bounds, *, name: str, scalar_gate: bool) -> Problem:
    _check(a, scalar_gate=scalar_gate)
    _check_shapes(a, scalar_gate)
    q, v, use_gate = a.q, a.v, a.use_gate_in_kernel
    problem = Problem(
        H=q.shape[2],
        HV=v.shape[2],
        K=q.shape[3],
        V=v.shape[3],
        tokens=q.shape[0] * q.shape[1],
        sequences=len(bounds) - 1,
        longest=max(end - begin for begin, end in zip(bounds, bounds[1:], strict=False)),
        dtype=NAME_OF_DTYPE[q.dtype],
        g_dtype=NAME_OF_DTYPE[a.g.dtype],
        beta_dtype=NAME_OF_DTYPE[a.beta.dtype],
        gate=_find_gate(a),
        has_A_log=use_gate and a.A_log is not None,
        has_dt_bias=use_gate and a.dt_bias is not None,
        beta=_find_beta(a),
        l2norm=bool(a.use_qk_l2norm_in_kernel),
        varlen=a.cu_seqlens is not None,
        initial_state=a.initial_state is not None,
        final_state=bool(a.output_final_state),
        intermediate_states=bool(a.return_intermediate_states),
        state_v_first=bool(a.state_v_first),
        scalar_gate=scalar_gate,
        operator=name,
    )
    _check_state(a.initial_state, problem)
    return problem


def _find_gate(a: Args) -> str:
    return "log" if not a.use_gate_in_kernel else "softplus" if a.lower_bound is None else "safe"


def _find_beta(a: Args) -> str:
    return ("sigmoid2" if a.allow_neg_eigval else "sigmoid") if a.use_beta_sigmoid_in_kernel else "plain"


def _check(a: Args, *, scalar_gate: bool) -> None:
    _check_kinds(a, scalar_gate)
    _check_flags(a)


def _check_kinds(a: Args, scalar_gate: bool) -> None:
    """Types, kinds, ranks, dtypes and devices. Raises InputError."""
    q = a.q
    for name, rank in (("q", 4), ("k", 4), ("v", 4), ("g", 3 if scalar_gate else 4), ("beta", 3)):
        x = getattr(a, name)
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        check_kind(name, x)
        if x.dim() != rank:
            shape = "[B, T, HV]" if rank == 3 else "[B, T, heads, channels]"
            raise InputError(f"{name} must have {rank} dimensions, {shape}; got shape {list(x.shape)}.")
        if x.dtype not in NAME_OF_DTYPE:
            raise InputError(
                f"{name} must be bfloat16, float16 or float32, got {x.dtype}"
                " (kda_tl.reference.recurrent_kda computes in float64)."
            )
    for name in ("k", "v"):
        if getattr(a, name).dtype != q.dtype:
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {getattr(a, name).dtype}: cast it.")
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(f"tensors must be on a CUDA device or the CPU, got {q.device}.")
    for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu"):
        if (x := getattr(a, name)) is not None:
            if not isinstance(x, Tensor):
                raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
            check_kind(name, x)
    for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
        x = getattr(a, name)
        if x is not None and x.device != q.device:
            raise InputError(f"{name} is on {x.device} but q is on {q.device}: move them to one device.")


def _check_flags(a: Args) -> None:
    """Flags and numbers that contradict each other. Raises InputError."""
    use_gate, lower_bound, (low, high) = a.use_gate_in_kernel, a.lower_bound, LOWER_BOUND_RANGE
    for name in ("scale", "lower_bound"):
        if (number := getattr(a, name)) is not None and not isinstance(number, numbers.Real):
            raise InputError(f"{name} must be a number or None, got {type(number).__name__}.")
    if a.scale is not None and not -MAX_FP32 <= a.scale <= MAX_FP32:
        raise InputError(f"scale must be a finite fp32 number, got {a.scale}: leave it out for K ** -0.5.")
    if use_gate and a.safe_gate and lower_bound is None:
        raise InputError("safe_gate=True with use_gate_in_kernel=True needs lower_bound, for example -5.0.")
    if lower_bound is not None and not low <= lower_bound < high:
        raise InputError(f"lower_bound must be in [{low:g}, {high:g}), got {lower_bound}: pass for example -5.0.")
    if use_gate and lower_bound is None and a.A_log is None:
        raise InputError("use_gate_in_kernel=True needs A_log of shape [HV], or a lower_bound.")
    if a.allow_neg_eigval and not a.use_beta_sigmoid_in_kernel:
        raise InputError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles that sigmoid.")
    if a.chunk_size is not None and not (isinstance(a.chunk_size, int) and a.chunk_size in BT_CHOICES):
        raise InputError(f"chunk_size must be one of {sorted(BT_CHOICES)} or None, got {a.chunk_size!r}.")


def _check_shapes(a: Args, scalar_gate: bool) -> None:
    B, T, H, K = a.q.shape
    HV, V = a.v.shape[2:]
    if B < 1:
        raise InputError("the batch must hold at least one sequence, which may be empty, got B=0.")
    gate: tuple[int, ...] = (B, T, HV) if scalar_gate else (B, T, HV, K)
    for name, shape in (("k", (B, T, H, K)), ("v", (B, T, HV, V)), ("g", gate), ("beta", (B, T, HV))):
        if tuple(getattr(a, name).shape) != shape:
            raise InputError(f"{name} must have the shape {list(shape)}, got {list(getattr(a, name).shape)}.")
    biases = (HV, "[HV]") if scalar_gate else (HV * K, "[HV * K]")
    for name, numel, shape_text in (("A_log", HV, "[HV]"), ("dt_bias", *biases)):
        x = getattr(a, name)
        if x is not None and (x.numel() != numel or not x.is_floating_point()):
            raise InputError(f"{name} must be a float tensor {shape_text} of {numel} elements, got {list(x.shape)}.")


def _check_state(state: Tensor | None, p: Problem) -> None:
    if state is None:
        return
    shape = (p.sequences, p.HV, *((p.V, p.K) if p.state_v_first else (p.K, p.V)))
    if tuple(state.shape) != shape or state.dtype not in NAME_OF_DTYPE:
        layout = "[N, HV, V, K]" if p.state_v_first else "[N, HV, K, V]"
        raise InputError(
            f"initial_state must be a float tensor {layout} = {list(shape)}, got {state.dtype} {list(state.shape)}."
        )


def _find_numbers(a: Args) -> dict[str, float]:
    return {
        "scale": a.q.shape[-1] ** -0.5 if a.scale is None else float(a.scale),
        "lower_bound": -5.0 if a.lower_bound is None else float(a.lower_bound),
    }


def _find_shapes(a: Args, BT: int) -> dict[str, tuple[Any, ...]]:
    (B, T, _, K), (HV, V) = a.q.shape, a.v.shape[2:]
    state, packed = ((HV, V, K) if a.state_v_first else (HV, K, V)), a.cu_seqlens is not None
    N, chunks = (a.cu_seqlens.shape[0] - 1, None) if packed else (B, -(-T // BT))
    return {"o": (B, T, HV, V), "ht": (N, *state), "h": (B, chunks, *state)}


def _describe_recurrence(a: Args, *, scalar_gate: bool) -> dict[str, Any]:
    same = ("q", "k", "v", "beta", "initial_state", "A_log", "dt_bias", "scale", "lower_bound", "state_v_first")
    return {
        **{name: getattr(a, name) for name in same},
        "g": a.g[..., None] if scalar_gate else a.g,
        "gate": _find_gate(a),
        "beta_mode": _find_beta(a),
        "use_l2norm": a.use_qk_l2norm_in_kernel,
        "cu_seqlens": a.cu_seqlens if a.cu_seqlens_cpu is None else a.cu_seqlens_cpu,
    }


def _find_modes(workload: Any) -> dict[str, Any]:
    computed = workload.gate != "log"
    return {"has_A_log": computed, "has_dt_bias": computed, "l2norm": True, "final_state": True}


def _lay_out(
    a: Args, problem: Problem, BT: int, segments: int, *, scalar_gate: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    layout = make_layout(_find_bounds(scalar_gate, a), BT, a.q.device, segments)
    tensors: dict[str, Any] = {name: getattr(a, argument) for name, argument in _OPERANDS.items()}
    for name, shape in operand_shapes(problem).items():
        if tensors.get(name) is not None:
            tensors[name] = tensors[name].view(shape)
    return tensors | _find_numbers(a) | layout.tables, layout.sizes


def _find_sizes(workload: Any, BT: int, segments: int) -> dict[str, int]:
    return make_layout(workload.bounds, BT, torch.device("cpu"), segments).sizes


def _judge(a: Args, *, scalar_gate: bool) -> dict[str, Tensor]:
    o, ht = recurrent_kda(**_describe_recurrence(a, scalar_gate=scalar_gate))
    return {"o": o, "ht": ht}


def _name_results(a: Args, returned: Any) -> dict[str, Tensor | None]:
    return {"o": returned[0], "ht": returned[1]}
