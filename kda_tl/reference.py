"""The judge of every kernel: Kimi Delta Attention token by token, in plain PyTorch, float64 and autograd.

    S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T        S: [K, V]
    o_t = scale * q_t^T S_t

Gated DeltaNet is the case of one g a value head instead of one a key channel. A token of rank r corrects the state with
r keys and values at once, none of which sees the others:

    S_t = D + sum_m beta_tm k_tm (v_tm - k_tm^T D)^T                             D = diag(exp g_t) S_{t-1},  m = 1 .. r

Slow on purpose: no chunking, no log2 units, no clamping, nothing written in place. Gradients of the operators are
judged by autograd through these functions.

Source: Kimi Linear, arXiv:2510.26692 (recurrence); gates, l2norm and head grouping mean what they mean in
flash-linear-attention v0.6.0 (``fla/ops/kda/{naive,gate,chunk}.py``, ``fla/modules/norm/l2norm.py``).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kda_tl.core.problem import BETAS, GATES
from kda_tl.errors import InputError


def activate_gate(
    g: Tensor,
    *,
    gate: str,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Log decay of every token, in nats.

    "log": ``g``; "softplus": ``-exp(A_log) * log(1 + exp(g + dt_bias))``;
    "safe": ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.

    Args:
        g: raw gate, [..., HV, K], any float dtype; computed in the dtype it promotes to with the parameters. K is 1
            here and below if a head has one gate.
        gate: "log", "softplus" or "safe". "log" ignores the parameters, "softplus" ignores lower_bound.
        A_log: [HV], log of the gate's slope. Required by "softplus"; None means a slope of 1 in "safe".
        dt_bias: [HV * K] or [HV, K], added to g; None means 0.
        lower_bound: nats a token, required by "safe".

    Returns:
        [..., HV, K], nats a token.

    Raises:
        InputError: the gate is unknown, a parameter it needs is missing, or has the wrong number of elements.

    Source: ``naive_kda_gate`` and ``naive_kda_lowerbound_gate`` in fla/ops/kda/gate.py at v0.6.0.
    """
    if gate not in GATES:
        raise InputError(f"gate must be one of {', '.join(GATES)}, got {gate!r}.")
    if gate == "log":
        return g
    HV, K = g.shape[-2:]
    x = g
    if dt_bias is not None:
        _check_numel("dt_bias", dt_bias, HV * K)
        x = x + dt_bias.reshape(HV, K)
    slope = None
    if A_log is not None:
        _check_numel("A_log", A_log, HV)
        slope = A_log.exp().reshape(HV, 1)
    if gate == "softplus":
        if slope is None:
            raise InputError("the softplus gate needs A_log: pass A_log of shape [HV].")
        # logaddexp is exact everywhere; F.softplus drops log1p(exp(-x)) above x = 20, 2e-9 absolute
        return -slope * torch.logaddexp(x, torch.zeros_like(x))
    if lower_bound is None:
        raise InputError("the safe gate needs lower_bound: pass a negative number of nats a token, such as -5.0.")
    return lower_bound * torch.sigmoid(x if slope is None else slope * x)


def activate_beta(beta: Tensor, mode: str) -> Tensor:
    """Step size of the delta rule: ``beta``, ``sigmoid(beta)`` or ``2 * sigmoid(beta)``.

    Args:
        beta: raw step size, any shape and float dtype.
        mode: "plain", "sigmoid" or "sigmoid2".

    Returns:
        The shape and dtype of beta, unitless.

    Raises:
        InputError: the mode is unknown.

    Source: ``use_beta_sigmoid_in_kernel`` and ``allow_neg_eigval`` in fla/ops/kda/chunk.py at v0.6.0.
    """
    if mode not in BETAS:
        raise InputError(f"beta mode must be one of {', '.join(BETAS)}, got {mode!r}.")
    if mode == "plain":
        return beta
    return torch.sigmoid(beta) * (2 if mode == "sigmoid2" else 1)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scales the last dimension to unit length: ``x / sqrt(sum(x^2) + eps)``, with eps inside the root.

    Args:
        x: [..., K], any float dtype.
        eps: added to the squared length, so a zero vector stays zero and has finite gradients.

    Returns:
        The shape and dtype of x.

    Source: fla/modules/norm/l2norm.py at v0.6.0.
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    gate: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_mode: str = "plain",
    use_l2norm: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    rank: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, one token after the other (formula: this module's first lines).

    Every float input is cast to ``dtype`` first, and the results stay in it. Gradients flow to every float input.

    Args:
        q: queries, [B, T, H, K].
        k: keys, [B, T, H, K].
        v: values, [B, T, HV, V]; HV is a multiple of H, and value head j uses query/key head ``j // (HV // H)``.
        g: raw gate, [B, T, HV, K], or [B, T, HV, 1] for all channels; the log decay in nats a token if gate is "log".
        beta: raw step size, [B, T, HV].
        scale: factor on o; None means ``K ** -0.5``.
        initial_state: state before the first token of each of N sequences, [N, HV, K, V], or [N, HV, V, K] if
            state_v_first; None means zeros. N is B, or ``len(cu_seqlens) - 1``.
        gate: see :func:`activate_gate`, as for A_log [HV], dt_bias [HV * K] or [HV, K], and lower_bound.
        A_log: see gate.
        dt_bias: see gate.
        lower_bound: see gate.
        beta_mode: see :func:`activate_beta`.
        use_l2norm: q and k go through :func:`l2norm`.
        state_v_first: states are [V, K] instead of [K, V].
        cu_seqlens: [N + 1], integers from 0 to T, never decreasing: sequence n is the tokens from cu_seqlens[n] up to
            but not including cu_seqlens[n + 1] of a batch of one. Empty sequences keep their initial state.
        rank: rows a token. T, the tensors and cu_seqlens count rows, those of a token following each other. Its decay
            comes before all of them: g is read in its first row only. A query sees the rows of its token up to its
            own, so o_t above is what the query in the last row reads.
        dtype: what everything is computed in. With float32 on a GPU, leave TF32 off.

    Returns:
        ``(o, final_state)``: o is [B, T, HV, V]; final_state has the shape of initial_state. Both in dtype.

    Raises:
        InputError: a shape, a mode or cu_seqlens does not fit.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    if HV % H:
        raise InputError(f"HV={HV} value heads cannot share H={H} query/key heads: make HV a multiple of H.")
    lengths = [T] if cu_seqlens is None else _sequence_lengths(cu_seqlens, B, T)
    N = B if cu_seqlens is None else len(lengths)
    _check_shape("k", k, (B, T, H, K))
    _check_shape("v", v, (B, T, HV, V))
    _check_shape("g", g, (B, T, HV, 1 if g.shape[-1] == 1 else K))
    _check_shape("beta", beta, (B, T, HV))
    if any(length % rank for length in lengths):
        raise InputError(f"sequences of {lengths} rows cannot be tokens of {rank} rows each.")

    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
    if use_l2norm:
        q, k = l2norm(q), l2norm(k)
    q = q.repeat_interleave(HV // H, dim=2) * (K**-0.5 if scale is None else scale)
    k = k.repeat_interleave(HV // H, dim=2)
    decay = activate_gate(g, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound).exp()
    beta = activate_beta(beta, beta_mode)

    if initial_state is None:
        state = v.new_zeros(N, HV, K, V)
    else:
        _check_shape("initial_state", initial_state, (N, HV, V, K) if state_v_first else (N, HV, K, V))
        state = initial_state.to(dtype)
        state = state.transpose(-1, -2) if state_v_first else state

    states = [state] if cu_seqlens is None else torch.split(state, 1)
    pieces = zip(*(torch.split(x, lengths, dim=1) for x in (q, k, v, decay, beta)), states, strict=True)
    results = [_scan(rank, *piece) for piece in pieces]
    o = torch.cat([o for o, _ in results], dim=1)
    final_state = torch.cat([state for _, state in results])
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state


def gradient_name(tensor: str) -> str:
    """What the gradient of a tensor argument is called: d before its name, ``dh0`` for initial_state."""
    return "dh0" if tensor == "initial_state" else f"d{tensor}"


def recurrent_gradients(arguments: Mapping[str, Any], do: Tensor, dht: Tensor | None = None) -> dict[str, Tensor]:
    """Autograd through :func:`recurrent_kda` in float64; every token's state is kept for it.

    Args:
        arguments: of recurrent_kda, by name.
        do: gradient of o, [B, T, HV, V].
        dht: gradient of the final state, in its shape; None if nothing depends on it.

    Returns:
        The gradient of every float tensor among the arguments, in its shape, by :func:`gradient_name`.
    """
    leaf = {
        name: x.detach().double().requires_grad_()
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    with torch.enable_grad():
        o, ht = recurrent_kda(**{**arguments, **leaf})
    outputs, seeds = ([o], [do]) if dht is None else ([o, ht], [do, dht])
    found = torch.autograd.grad(outputs, list(leaf.values()), [x.double() for x in seeds], materialize_grads=True)
    return {gradient_name(name): gradient for name, gradient in zip(leaf, found, strict=True)}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """How far a result is from the truth: ``||actual - expected|| / ||expected||`` over the whole tensor, in float64.

    Args:
        actual: the result to judge, any shape, dtype and device.
        expected: the truth, same shape.

    Returns:
        A number that is never NaN: inf if anything is NaN or infinite, in either tensor; 0.0 if both are empty;
        ``||actual||`` if expected is all zeros.

    Raises:
        InputError: the shapes differ (they are never broadcast).
    """
    _check_shape("actual", actual, tuple(expected.shape))
    expected = expected.detach().to(torch.float64)
    actual = actual.detach().to(expected)
    distance = float(torch.linalg.vector_norm(actual - expected))
    length = float(torch.linalg.vector_norm(expected))
    error = distance / length if length else distance
    return error if math.isfinite(error) else math.inf


def _scan(
    rank: int, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over T rows of B sequences with HV heads; decay and beta are activated, q is scaled."""
    outputs: list[Tensor] = []
    # unbind, not x[:, t]: the backward of T selects would each write a full-size gradient, T^2 in all
    for q_t, k_t, v_t, decay_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v, decay, beta)), strict=True):
        if len(outputs) % rank == 0:
            state = seen = decay_t[..., None] * state
        correction = beta_t[..., None] * (v_t - torch.einsum("bhk,bhkv->bhv", k_t, seen))
        state = state + k_t[..., :, None] * correction[..., None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q_t, state))
    return torch.stack(outputs, dim=1) if outputs else v, state


def _sequence_lengths(cu_seqlens: Tensor, B: int, T: int) -> list[int]:
    if B != 1:
        raise InputError(f"cu_seqlens needs packed sequences, B=1, got B={B}: flatten the batch into the tokens.")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise InputError("cu_seqlens must be a 1-D integer tensor of at least 2 elements.")
    lengths: list[int] = cu_seqlens.diff().tolist()
    if int(cu_seqlens[0]) or int(cu_seqlens[-1]) != T or min(lengths) < 0:
        raise InputError(f"cu_seqlens must start at 0, never decrease and end at T={T}, got {cu_seqlens.tolist()}.")
    return lengths


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InputError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}.")


def _check_numel(name: str, tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise InputError(f"{name} must have {numel} elements, got {tensor.numel()}.")
