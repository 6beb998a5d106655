"""The operator ``fused_recurrent_gated_delta_rule``: Gated DeltaNet, a few tokens at a time."""

from __future__ import annotations

import torch

from kda_tl.ops.operator import FlaEntry
from kda_tl.ops.recurrent_entry import publish_recurrent

Tensor = torch.Tensor


# FLA 0.6.0 asks no backend about its own
_FLA = FlaEntry(module="fla.ops.gated_delta_rule", asks=False)


@publish_recurrent(scalar_gate=True, fla=_FLA)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1,
    disable_state_update: bool = False,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated DeltaNet token by token, for decoding: states stay in a pool and change in place.

        S_t = (I - beta_t k_t k_t^T) D_t S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

    The decay D_t multiplies element (k, v) of the state by exp(g_t + gk_t[k] + gv_t[v]).

    Args:
        q: queries, [B, T, H, K], bf16, fp16 or fp32; K at most 256. q, k, v and gates may be views of one projection:
            tokens lie as far apart as they like.
        k: keys, like q.
        v: values, [B, T, HV, V], bf16, fp16 or fp32; V at most 512, HV a multiple of H. q and k of another dtype are
            converted to it at each call.
        g: log decay in nats, [B, T, HV], bf16, fp16 or fp32, 0 unless given; with ``use_gate_in_kernel`` the raw gate.
        gk: log decay of key channels, [B, T, HV, K], dtype of g, 0 unless given.
        gv: log decay of value channels, [B, T, HV, V], dtype of g, 0 unless given.
        beta: step size, [B, T, HV], or [B, T, HV, V] for one a value channel, 1 unless given; with
            ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor of q, a finite number, K ** -0.5 unless given.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), a sequence's state, zeros if None; or the
            pool, [slots, HV, ...], of which ``ssm_state_indices`` says who has which. fp32, bf16 or fp16; computed in
            fp32.
        output_final_state: also return the states after the last token, in new memory.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: log decay = -exp(A_log) * softplus(g + dt_bias).
        use_beta_sigmoid_in_kernel: step size = sigmoid(beta).
        allow_neg_eigval: step size = 2 * sigmoid(beta).
        A_log: [HV] float, needed by ``use_gate_in_kernel``.
        dt_bias: [HV] float, zero unless given.
        state_v_first: states are [V, K].
        cu_seqlens: int32 or int64 [N + 1], bounds of packed sequences, which may be empty; B must be 1.
        inplace_final_state: write the states back to where they came from, and return ``initial_state``.
        ssm_state_indices: [N] or [N, W]; this and what follows are those of :func:`kda_tl.fused_recurrent_kda`.
        output_state_indices: [N] or [N, W].
        num_accepted_tokens: [N].
        pad_slot_id: a whole number, -1 or 0 for example.
        disable_state_update: write no state back.
        intermediate_states: [rows, steps, HV, ...] like the pool.
        intermediate_state_indices: [N].
        retrieve_parent_token: [N, T].
        out: [B, T, HV, V], dtype of v, where o goes; new memory unless given.

    Returns:
        (o, final_state). o: [B, T, HV, V], dtype of v. final_state: fp32, of the shape of a state a sequence;
        ``initial_state`` itself with ``inplace_final_state``, or None.

    What :func:`kda_tl.fused_recurrent_kda` says of indices, and of captured calls, holds here too.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: a gradient is asked for, or a transform of PyTorch's that kernels do not have.
        CompileError: a kernel does not compile on this device.

    Source: Gated Delta Networks, arXiv:2412.06464; names of FLA v0.6.0
    ``fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule`` and of vLLM's and SGLang's decode.
    """
    raise NotImplementedError  # never runs: `publish_recurrent` writes the body


fused_recurrent_gdn = fused_recurrent_gated_delta_rule
