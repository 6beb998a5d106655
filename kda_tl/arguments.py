"""What :func:`kda_tl.chunk_kda` may be called with: every refusal, and the problem that a valid call poses.

All functions take the operator's arguments by name, as its ``locals()``.
"""

from __future__ import annotations

import numbers
from operator import itemgetter
from typing import Any

import torch

from kda_tl.device import Device, cpu_device, cuda_device
from kda_tl.dispatch import DEFAULT_BT
from kda_tl.errors import InputError
from kda_tl.kernel import NAME_OF_DTYPE
from kda_tl.layout import dense_bounds, packed_bounds
from kda_tl.plain import check_kind
from kda_tl.problem import LOWER_BOUND_RANGE, Problem
from kda_tl.stage import BT_CHOICES

Tensor = torch.Tensor
MAX_FP32 = torch.finfo(torch.float32).max
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
pick_tensors = itemgetter(*TENSORS)


def parse_problem(a: dict[str, Any], bounds: tuple[int, ...]) -> tuple[Problem, Device, int | None]:
    """Validates the arguments of chunk_kda; see there. Returns the problem, its device and the chunk size asked for."""
    problem, q = _pose_problem(a, bounds), a["q"]
    device = cuda_device(q.device.index or 0) if q.is_cuda else cpu_device()
    return problem, device, a["chunk_size"] or (DEFAULT_BT if a["return_intermediate_states"] else None)


def check_call(a: dict[str, Any]) -> None:
    """Raises InputError for what :func:`parse_problem` refuses, without looking for the device.

    Values are not read, and of symbolic sizes nothing is asked: the call is checked again when it runs.
    """
    check_tensors(a)
    check_flags(a)
    if all(isinstance(size, int) for name in ("q", "v") for size in a[name].shape):
        _pose_problem(a, assume_bounds(a))


def token_bounds(a: dict[str, Any]) -> tuple[int, ...]:
    """Where sequences begin and end among the flattened tokens."""
    if a["cu_seqlens"] is None:
        if a["cu_seqlens_cpu"] is not None:
            raise InputError("cu_seqlens_cpu is only the host's copy: pass cu_seqlens too.")
        shape = a["q"].shape
        return dense_bounds(shape[0], shape[1])
    check_tensors(a)
    if a["q"].shape[0] != 1:
        raise InputError(f"cu_seqlens needs B=1, got B={a['q'].shape[0]}: flatten the batch into the tokens.")
    return packed_bounds(a["cu_seqlens"], a["cu_seqlens_cpu"], a["q"].shape[1])


def assume_bounds(a: dict[str, Any]) -> tuple[int, ...]:
    """As many sequences as the call has; their lengths may be on the device, where only the call itself reads them."""
    if a["cu_seqlens"] is None:
        return token_bounds(a)
    return *[0] * max(a["cu_seqlens"].numel() - 1, 1), a["q"].shape[1]


def _pose_problem(a: dict[str, Any], bounds: tuple[int, ...]) -> Problem:
    check_tensors(a)
    check_flags(a)
    _check_shapes(a)
    q, v, packed = a["q"], a["v"], a["cu_seqlens"] is not None
    use_gate = a["use_gate_in_kernel"]
    problem = Problem(
        H=q.shape[2],
        HV=v.shape[2],
        K=q.shape[3],
        V=v.shape[3],
        tokens=q.shape[0] * q.shape[1],
        sequences=len(bounds) - 1,
        longest=max(end - begin for begin, end in zip(bounds, bounds[1:], strict=False)),
        dtype=NAME_OF_DTYPE[q.dtype],
        g_dtype=NAME_OF_DTYPE[a["g"].dtype],
        beta_dtype=NAME_OF_DTYPE[a["beta"].dtype],
        gate="log" if not use_gate else "softplus" if a["lower_bound"] is None else "safe",
        has_A_log=use_gate and a["A_log"] is not None,
        has_dt_bias=use_gate and a["dt_bias"] is not None,
        beta=("sigmoid2" if a["allow_neg_eigval"] else "sigmoid") if a["use_beta_sigmoid_in_kernel"] else "plain",
        l2norm=bool(a["use_qk_l2norm_in_kernel"]),
        varlen=packed,
        initial_state=a["initial_state"] is not None,
        final_state=bool(a["output_final_state"]),
        intermediate_states=bool(a["return_intermediate_states"]),
        state_v_first=bool(a["state_v_first"]),
    )
    _check_state(a["initial_state"], problem)
    return problem


def check_tensors(a: dict[str, Any]) -> None:
    """Types, kinds, ranks, dtypes and devices. Raises InputError."""
    q = a["q"]
    for name, rank in (("q", 4), ("k", 4), ("v", 4), ("g", 4), ("beta", 3)):
        x = a[name]
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        check_kind(name, x)
        if x.dim() != rank:
            shape = "[B, T, HV]" if name == "beta" else "[B, T, heads, channels]"
            raise InputError(f"{name} must have {rank} dimensions, {shape}; got shape {list(x.shape)}.")
        if x.dtype not in NAME_OF_DTYPE:
            raise InputError(
                f"{name} must be bfloat16, float16 or float32, got {x.dtype}"
                " (kda_tl.reference.recurrent_kda computes in float64)."
            )
    for name in ("k", "v"):
        if a[name].dtype != q.dtype:
            raise InputError(f"{name} must have the dtype of q, {q.dtype}, got {a[name].dtype}: cast it.")
    if q.device.type not in ("cpu", "cuda"):
        raise InputError(f"tensors must be on a CUDA device or the CPU, got {q.device}.")
    for name in ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu"):
        if a[name] is not None:
            if not isinstance(a[name], Tensor):
                raise InputError(f"{name} must be a torch.Tensor, got {type(a[name]).__name__}.")
            check_kind(name, a[name])
    for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
        x = a[name]
        if x is not None and x.device != q.device:
            raise InputError(f"{name} is on {x.device} but q is on {q.device}: move them to one device.")


def needs_gradients(a: dict[str, Any]) -> bool:
    """Whether autograd must record the call."""
    if torch.is_grad_enabled():
        for x in pick_tensors(a):
            if x is not None and x.requires_grad:
                return True
    return False


def cast_as_autocast(a: dict[str, Any]) -> dict[str, Any]:
    """The arguments under ``torch.autocast``: q, k and v of different dtypes get autocast's, as a product's would.

    q, k and v of one dtype stay as they are, and so does everything else: the kernels take any mixture of those.
    Gradients come back in the dtype that was given.
    """
    q, k, v = (a[name] for name in ("q", "k", "v"))
    if not all(isinstance(x, Tensor) and x.dtype in NAME_OF_DTYPE for x in (q, k, v)) or q.dtype == k.dtype == v.dtype:
        return a
    if q.device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(q.device.type):
        return a
    dtype = torch.get_autocast_dtype(q.device.type)
    return {**a, "q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}


def find_state_layout(old: bool | None, new: bool) -> bool:
    """What ``state_v_first`` is, by its old name where that is given. Raises InputError if both are."""
    if old is not None and new:
        raise InputError("pass state_v_first without transpose_state_layout, its old name.")
    return new if old is None else old


def check_flags(a: dict[str, Any]) -> None:
    """Flags and numbers that contradict each other. Raises InputError."""
    use_gate, lower_bound = a["use_gate_in_kernel"], a["lower_bound"]
    low, high = LOWER_BOUND_RANGE
    for name in ("scale", "lower_bound"):
        if a[name] is not None and not isinstance(a[name], numbers.Real):
            raise InputError(f"{name} must be a number or None, got {type(a[name]).__name__}.")
    scale = a["scale"]
    if scale is not None and not -MAX_FP32 <= scale <= MAX_FP32:
        raise InputError(f"scale must be a finite fp32 number, got {scale}: leave it out for K ** -0.5.")
    if use_gate and a["safe_gate"] and lower_bound is None:
        raise InputError("safe_gate=True with use_gate_in_kernel=True needs lower_bound, for example -5.0.")
    if lower_bound is not None and not low <= lower_bound < high:
        raise InputError(f"lower_bound must be in [{low:g}, {high:g}), got {lower_bound}: pass for example -5.0.")
    if use_gate and lower_bound is None and a["A_log"] is None:
        raise InputError("use_gate_in_kernel=True needs A_log of shape [HV], or a lower_bound.")
    if a["allow_neg_eigval"] and not a["use_beta_sigmoid_in_kernel"]:
        raise InputError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles that sigmoid.")
    chunk_size = a["chunk_size"]
    if chunk_size is not None and not (isinstance(chunk_size, int) and chunk_size in BT_CHOICES):
        raise InputError(f"chunk_size must be one of {sorted(BT_CHOICES)} or None, got {chunk_size!r}.")


def _check_shapes(a: dict[str, Any]) -> None:
    B, T, H, K = a["q"].shape
    HV, V = a["v"].shape[2:]
    if B < 1:
        raise InputError("the batch must hold at least one sequence, which may be empty, got B=0.")
    for name, shape in (("k", (B, T, H, K)), ("v", (B, T, HV, V)), ("g", (B, T, HV, K)), ("beta", (B, T, HV))):
        if tuple(a[name].shape) != shape:
            raise InputError(f"{name} must have the shape {list(shape)}, got {list(a[name].shape)}.")
    for name, numel, shape_text in (("A_log", HV, "[HV]"), ("dt_bias", HV * K, "[HV * K]")):
        x = a[name]
        if x is not None and (x.numel() != numel or not x.is_floating_point()):
            raise InputError(f"{name} must be a float tensor {shape_text} of {numel} elements, got {list(x.shape)}.")


def _check_state(state: Tensor | None, p: Problem) -> None:
    if state is None:
        return
    shape = (p.sequences, p.HV, *((p.V, p.K) if p.state_v_first else (p.K, p.V)))
    if tuple(state.shape) != shape or state.dtype != torch.float32:
        layout = "[N, HV, V, K]" if p.state_v_first else "[N, HV, K, V]"
        raise InputError(
            f"initial_state must be float32 {layout} = {list(shape)}, got {state.dtype} {list(state.shape)}."
        )
