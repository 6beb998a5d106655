"""The operator ``chunk_kda``: Kimi Delta Attention."""

from __future__ import annotations

import functools

import torch

from kda_tl.ops.delta_rule import declare
from kda_tl.ops.entry import publish
from kda_tl.ops.operator import FlaEntry

Tensor = torch.Tensor
_FLA = FlaEntry(
    module="fla.ops.kda.chunk",
    declined={
        "cp_context": "kda_tl has no context parallelism: leave cp_context out.",
        "use_graph": "kda_tl makes its chunk tables on the host, so a captured call cannot follow another cu_seqlens:"
        " use_graph=True is FLA's own.",
        "max_num_seqs": "",  # goes with use_graph
    },
)


@publish(functools.partial(declare, fla=_FLA))
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    disable_recompute: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    return_intermediate_states: bool = False,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, chunk by chunk.

        S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

    Args:
        q: queries, [B, T, H, K], bf16, fp16 or fp32; K at most 256.
        k: keys, like q.
        v: values, [B, T, HV, V], dtype of q; V at most 512, HV a multiple of H.
        g: log decay in nats, [B, T, HV, K], bf16, fp16 or fp32; with ``use_gate_in_kernel`` the raw gate.
        beta: step size, [B, T, HV], bf16, fp16 or fp32; with ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor of q, a finite number, K ** -0.5 unless given.
        initial_state: [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), N sequences, fp32 or cast to it, zeros
            unless given.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: log decay = -exp(A_log) * softplus(g + dt_bias), or, with ``lower_bound``,
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        use_beta_sigmoid_in_kernel: step size = sigmoid(beta).
        allow_neg_eigval: step size = 2 * sigmoid(beta).
        safe_gate: the caller promises log decays in [-5, 0); needs ``lower_bound`` if the gate is computed here.
        lower_bound: of the log decay in nats, in [-5, 0).
        disable_recompute: keep the intermediates of the forward for the backward, which else computes them again, for
            more memory. They are computed again all the same inside ``torch.compile``, where the backward's plan
            begins with other stages than the forward's, and where it has no room for the forward's chunks.
        A_log: [HV] float; may be missing if ``lower_bound`` is given.
        dt_bias: [HV * K] or [HV, K] float, zero unless given.
        state_v_first: states are [V, K].
        cu_seqlens: int32 or int64 [N + 1], bounds of packed sequences, which may be empty; B must be 1.
        cu_seqlens_cpu: the same on the host; without it, a device ``cu_seqlens`` is read back once, when first seen.
            With it, a device ``cu_seqlens`` is never read, so the two are compared only where both are on the host.
        return_intermediate_states: also return the state before each chunk, in the dtype of q, with chunks of
            ``chunk_size`` (64 unless given) tokens. Plans that keep no states are passed over.
        chunk_size: tokens a chunk, 16, 32 or 64; the plan decides unless given. The backward cuts its chunks so too
            where it can.
        transpose_state_layout: old name of ``state_v_first``.

    Returns:
        (o, final_state), and the intermediate states third if asked for. o: [B, T, HV, V], dtype of q.
        final_state: fp32, of the shape of initial_state, or None. Intermediate states: [B, chunks, HV, K, V]
        ([B, chunks, HV, V, K] with ``state_v_first``), B = 1 and all sequences' chunks in order if packed.

    Tensors: plain ones, and parameters, go straight to the kernels. Calls on subclasses, fake tensors and under modes
    of PyTorch's dispatch (``make_fx``, FLOP counters) are one call of the operator ``torch.ops.kda_tl.chunk_kda``.
    Refused are DTensors, sparse and nested tensors, tensors without memory, and calls inside the transforms of
    ``torch.func``, forward mode or ``torch.jit.trace``.

    Autocast: q, k and v of different dtypes are cast to autocast's dtype, and their gradients come back in their own.
    If they have one dtype they keep it, fp32 too; g, beta, parameters and states are never cast.

    Numerics: a NaN in k, v, g or beta, or an infinity in v, reaches not only the tokens after it but also back to the
    start of its chunk, since products over a whole chunk multiply it by zero. Other sequences, and heads that do not
    share it, stay clean. A plan that cuts sequences into segments leaves out what gates let vanish before a segment's
    end (below 2^-64 of it is left), so a NaN that far back may not reach the segments after its own.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: a second derivative is needed, or a transform of PyTorch's that kernels do not have.
        CompileError: a kernel does not compile on this device.

    Source: Kimi Linear, arXiv:2510.26692; names and semantics of FLA v0.6.0 ``fla.ops.kda.chunk_kda``.
    """
    raise NotImplementedError  # never runs: `publish` writes the body
