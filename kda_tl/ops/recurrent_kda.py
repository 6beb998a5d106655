"""The operator ``fused_recurrent_kda``: Kimi Delta Attention, a few tokens at a time."""

from __future__ import annotations

import torch

from kda_tl.ops.operator import FlaEntry
from kda_tl.ops.recurrent_entry import publish_recurrent

Tensor = torch.Tensor

# FLA's fused_recurrent_kda calls it with keywords, and engines call it themselves
_FLA = FlaEntry(
    module="fla.ops.kda.fused_recurrent",
    name="fused_recurrent_kda_fwd",
    registry="kda",
    defaults={"inplace_final_state": True},
)


@publish_recurrent(scalar_gate=False, fla=_FLA)
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
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
    """Kimi Delta Attention token by token, for decoding: states stay in a pool and change in place.

        S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

    Args:
        q: queries, [B, T, H, K], bf16, fp16 or fp32; K at most 256. q, k, v and gates may be views of one projection:
            tokens lie as far apart as they like.
        k: keys, like q.
        v: values, [B, T, HV, V], bf16, fp16 or fp32; V at most 512, HV a multiple of H. q and k of another dtype are
            converted to it at each call.
        g: log decay in nats, [B, T, HV, K], bf16, fp16 or fp32; with ``use_gate_in_kernel`` the raw gate.
        beta: step size, [B, T, HV], or [B, T, HV, V] for one a value channel; with ``use_beta_sigmoid_in_kernel`` its
            logit.
        scale: factor of q, a finite number, K ** -0.5 unless given.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), a sequence's state, zeros if None; or the
            pool, [slots, HV, ...], of which ``ssm_state_indices`` says who has which. fp32, bf16 or fp16; computed in
            fp32.
        output_final_state: also return the states after the last token, in new memory.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: log decay = -exp(A_log) * softplus(g + dt_bias), or with a ``lower_bound``
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        use_beta_sigmoid_in_kernel: step size = sigmoid(beta).
        allow_neg_eigval: step size = 2 * sigmoid(beta).
        A_log: [HV] float, needed by ``use_gate_in_kernel`` without a ``lower_bound``.
        dt_bias: [HV * K] float, zero unless given.
        lower_bound: nats a token, in [-5, 0).
        state_v_first: states are [V, K].
        cu_seqlens: int32 or int64 [N + 1], bounds of packed sequences, which may be empty; B must be 1.
        inplace_final_state: write the states back to where they came from, and return ``initial_state``.
        ssm_state_indices: [N], the slot of each sequence; or [N, W], then the state after token t goes to slot [n, t].
        output_state_indices: the same, of slots to write to instead.
        num_accepted_tokens: [N], how many tokens of the last call hold: the state is read from column
            ``num_accepted_tokens - 1`` of ``ssm_state_indices`` [N, W], the first or the last one if there is none.
        pad_slot_id: an index at or below it stands for no slot, -1 or 0 for example. A sequence that reads no slot
            writes zeros to o and touches no state; what would go to no slot is not written.
        disable_state_update: write no state back, to verify drafts.
        intermediate_states: [rows, steps, HV, ...] like the pool: the state after token t goes to [row, t].
        intermediate_state_indices: [N], the row of each sequence, its number unless given; below 0 nothing is written.
        retrieve_parent_token: [N, T], the token that each follows, -1 for none: drafts as trees. It reads states from
            ``intermediate_states``, and needs ``disable_state_update``.
        out: [B, T, HV, V], dtype of v, where o goes; new memory unless given.

    Returns:
        (o, final_state). o: [B, T, HV, V], dtype of v. final_state: fp32, of the shape of a state a sequence;
        ``initial_state`` itself with ``inplace_final_state``, or None.

    Nothing of index tensors or ``cu_seqlens`` is read by the host, so a captured call follows what they hold. An index
    beyond the pool is no slot either; with ``KDA_TL_CHECK=1`` it raises, and calls wait for the device.
    Two sequences of a call may not write to one slot, nor one to a slot that another reads.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: a gradient is asked for, or a transform of PyTorch's that kernels do not have.
        CompileError: a kernel does not compile on this device.

    Source: Kimi Linear, arXiv:2510.26692; names of FLA v0.6.0 ``fla.ops.kda.fused_recurrent_kda`` and of vLLM's and
    SGLang's decode.
    """
    raise NotImplementedError  # never runs: `publish_recurrent` writes the body
