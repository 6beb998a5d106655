"""``packed_decode``: one token a sequence, from the output of a layer's projections to the slots of the pool."""

from __future__ import annotations

from typing import Any

import torch

from kda_tl.errors import InputError
from kda_tl.ops.recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule
from kda_tl.ops.recurrent_kda import fused_recurrent_kda

Tensor = torch.Tensor
_TENSORS = ("mixed_qkv", "a", "b", "initial_state", "out", "ssm_state_indices")


def packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    scale: float | None,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
    *,
    pad_slot_id: int = -1,
) -> Tensor:
    """A decode step of Kimi Delta Attention or Gated DeltaNet on the packed output of a projection.

    It is :func:`kda_tl.fused_recurrent_kda` if ``a`` has a gate a key channel, and
    :func:`kda_tl.fused_recurrent_gated_delta_rule` if it has one a value head, with the gate and the sigmoid of the
    step size in the kernel and states that change in place. Nothing is copied.

    Args:
        mixed_qkv: [B, 2 * H * K + HV * V], queries, keys and values of a token a sequence, bf16, fp16 or fp32; rows
            may lie further apart.
        a: raw gate, [B, HV * K] or [B, HV].
        b: logit of the step size, [B, HV].
        A_log: [HV] float.
        dt_bias: [HV * K] or [HV] float, as ``a``; zero if None.
        scale: factor of q, K ** -0.5 if None.
        initial_state: the pool, [slots, HV, V, K], fp32, bf16 or fp16, any stride between slots.
        out: [B, 1, HV, V], dtype of mixed_qkv, where the result goes.
        ssm_state_indices: [B], the slot of each sequence.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        lower_bound: nats a token, in [-5, 0), for KDA's gate with a bound.
        pad_slot_id: an index at or below it stands for no slot: -1 or 0 for example.

    Returns:
        out.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: a gradient is asked for.
        CompileError: a kernel does not compile on this device.

    Source: the interface of vLLM's ``fused_recurrent_gated_delta_rule_packed_decode`` (v0.33.0).
    """
    for i, x in enumerate((mixed_qkv, a, b, initial_state, out, ssm_state_indices)):
        if not isinstance(x, Tensor):
            raise InputError(f"{_TENSORS[i]} must be a torch.Tensor, got {type(x).__name__}.")
    if initial_state.dim() != 4 or mixed_qkv.dim() != 2 or a.dim() != 2 or b.dim() != 2:
        raise InputError(
            "packed_decode needs mixed_qkv [B, 2 * H * K + HV * V], a and b of two dimensions, and initial_state"
            f" [slots, HV, V, K]; got {[list(x.shape) for x in (mixed_qkv, a, b, initial_state)]}."
        )
    B, (HV, V, K) = len(mixed_qkv), initial_state.shape[1:]
    keys, rest = divmod(mixed_qkv.shape[1] - HV * V, 2 * K)
    if keys < 1 or rest:
        raise InputError(
            f"mixed_qkv has {mixed_qkv.shape[1]} columns, which are not 2 * H * K + HV * V: initial_state has HV={HV},"
            f" K={K} and V={V}."
        )
    q, k, v = mixed_qkv.split_with_sizes((keys * K, keys * K, HV * V), -1)
    channels = a.shape[1] != HV or dt_bias is not None and dt_bias.numel() != HV
    if a.shape[1] != (HV * K if channels else HV):
        raise InputError(f"a must be {[B, HV * K]} or {[B, HV]}, got {list(a.shape)}.")
    heads: dict[str, Any] = {
        "q": q.view(B, 1, keys, K),  # of methods that are C all the way: a call's host time counts here
        "k": k.view(B, 1, keys, K),
        "v": v.view(B, 1, HV, V),
    }
    shared: dict[str, Any] = {
        "beta": b[:, None],
        "A_log": A_log,
        "dt_bias": dt_bias,
        "scale": scale,
        "initial_state": initial_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
        "inplace_final_state": True,
        "ssm_state_indices": ssm_state_indices,
        "pad_slot_id": pad_slot_id,
        "out": out,
    }
    if channels:
        fused_recurrent_kda(**heads, **shared, g=a.view(B, 1, HV, K), lower_bound=lower_bound)
    elif lower_bound is not None:
        raise InputError("lower_bound is of KDA's gate, which has one a key channel: pass a [B, HV * K].")
    else:
        fused_recurrent_gated_delta_rule(**heads, **shared, g=a[:, None])
    return out
