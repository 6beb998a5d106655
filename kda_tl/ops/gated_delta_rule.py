"""The operator ``chunk_gated_delta_rule``: Gated DeltaNet."""

from __future__ import annotations

import functools

import torch

from kda_tl.ops.delta_rule import declare
from kda_tl.ops.entry import publish
from kda_tl.ops.operator import FlaEntry

Tensor = torch.Tensor
_FLA = FlaEntry(
    module="fla.ops.gated_delta_rule.chunk",
    registry="gated_delta_rule",
    declined={
        "chunk_indices": "",  # FLA's table of chunks, made once for several layers; ours are remembered anyway
        "cp_context": "kda_tl has no context parallelism: leave cp_context out.",
    },
)


@publish(functools.partial(declare, fla=_FLA, scalar_gate=True))
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Gated DeltaNet over whole sequences, chunk by chunk: one gate a value head.

        S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

    Args:
        q: queries, [B, T, H, K], bf16, fp16 or fp32; K at most 256.
        k: keys, like q.
        v: values, [B, T, HV, V], dtype of q; V at most 512, HV a multiple of H.
        g: log decay in nats, [B, T, HV], bf16, fp16 or fp32; with ``use_gate_in_kernel`` the raw gate.
        beta: step size, [B, T, HV], bf16, fp16 or fp32; with ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor of q, a finite number, K ** -0.5 unless given.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), N sequences, fp32 or cast to it, zeros
            unless given.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        use_beta_sigmoid_in_kernel: step size = sigmoid(beta).
        allow_neg_eigval: step size = 2 * sigmoid(beta).
        state_v_first: states are [V, K].
        cu_seqlens: int32 or int64 [N + 1], bounds of packed sequences, which may be empty; B must be 1.
        cu_seqlens_cpu: the same on the host; without it, a device ``cu_seqlens`` is read back once, when first seen.
        use_gate_in_kernel: log decay = -exp(A_log) * softplus(g + dt_bias).
        A_log: [HV] float, needed by ``use_gate_in_kernel``.
        dt_bias: [HV] float, zero unless given.
        disable_recompute: keep the intermediates of the forward for the backward, as :func:`kda_tl.chunk_kda` does.
        return_intermediate_states: also return the state before each chunk, as :func:`kda_tl.chunk_kda` does.
        chunk_size: tokens a chunk, 16, 32 or 64; the plan decides unless given.
        transpose_state_layout: old name of ``state_v_first``.

    Returns:
        (o, final_state), and the intermediate states third if asked for, [B, chunks, HV, K, V] in the dtype of q.
        o: [B, T, HV, V], dtype of q. final_state: fp32, of the shape of initial_state, or None.

    What :func:`kda_tl.chunk_kda` says of tensors that are not plain, of autocast and of a NaN holds here too.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: a second derivative is needed, or a transform of PyTorch's that kernels do not have.
        CompileError: a kernel does not compile on this device.

    Source: Gated Delta Networks, arXiv:2412.06464; names and semantics of FLA v0.6.0
    ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``.
    """
    raise NotImplementedError  # never runs: `publish` writes the body


chunk_gdn = chunk_gated_delta_rule
