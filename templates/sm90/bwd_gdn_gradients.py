"""Gradients of a chunk of Gated DeltaNet for Hopper: bwd_gradients for a gate that all channels of a value head share.

With D_ij = 2^(G_i - G_j), X = V - K~ S, V' = A X, and what the scans know, S, dS' (of the state after the chunk), V'
and dX:

    P_ij = scale D_ij <dO_i, V'_j>   j <= i          R_ij = -D_ij <dX_i, V'_j>   j < i
    dq = scale 2^G (dO S^T) + P k
    dk = [row] -2^G (dX S^T) + R k   + [key] 2^(G_last - G) (V' dS'^T) + P^T q + R^T k
    dG_i = <q_i, dq_i> + <k_i, row_i> - <k_i, key_i>
    the last also  sum_i <k_i, 2^(G_last - G_i) (V' dS'^T)_i> + 2^G_last <S, dS'>
    dbeta_i = <dX_i, V'_i> / beta_i^2

The gate is a number a token: products are of the caller's very rows, and powers of two, norms and step sizes multiply
what comes out. Of normalised rows r x, with r = 1 / |x|, the gradients of x for a constant r are found first, y; then
dx = y - r^2 <x, y> x. <x, y> is also what dG takes. dG is summed from the same P and R on both sides of a pair, so what
cancels in its cumsum cancels exactly.

    phase              what all 8 warps do
    load               all but dS' is asked for; gates are summed meanwhile, a thread a token; norms by mma
    multiply_states    dO S^T and dX S^T, in registers to the end
    multiply_values    (dO, dX) V'^T become P and R, dbeta; P and R lie where dO and dX were, dS' where S was
    add rows           P k, R k; P in two parts, rounded and what it loses by that
    add keys           V' dS'^T, P^T q, R^T k
    the end            dG, dq, dk by way of shared memory, where q and k were; the gate's, a thread a token

    tensor              exponent     dtype  where it lives
    q, k                none         bf16   shared memory, as they came; then their gradients
    G, up               from start   fp32   shared memory
    dO, dX; then pairs  none, all    bf16   shared memory: P, R, and what P loses by its rounding
    S; then dS'         none         bf16   shared memory
    V'                  none         bf16   shared memory
    dq, row, key        all          fp32   registers
Source: autograd of Gated Delta Networks, arXiv:2412.06464, section 3.3; derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90 import bwd_gradients
from kda_tl.templates.sm90.bwd_gradients import DEPENDS, OUTPUTS, TOLERANCE
from kda_tl.templates.sm90.bwd_gradients import INPUTS as SCANNED
from kda_tl.templates.sm90.gates import Chunk, Gate, sum_head_gates
from kda_tl.templates.sm90.gdn_gradients import (
    GROUPS,
    ROWS_AT_ONCE,
    Interleaved,
    at_k,
    at_q,
    dot,
    dot_states,
    issue_rows,
    multiply_values,
    round_rows,
    store_beta,
    store_gate,
    store_lost,
    store_rows,
    take_norms,
    wait_for,
)
from kda_tl.templates.sm90.hopper import SCALARS, HopperConfig, count_bytes
from kda_tl.templates.sm90.warp import find_norms

INPUTS = SCANNED
RESERVED = 1024  # bytes of shared memory a block, for the device


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: bwd_gradients', which takes any gate."""
    return bwd_gradients.reference(case, x)


@dataclass(frozen=True, kw_only=True)
class GdnGradientsConfig(HopperConfig):
    """blocks: that share a multiprocessor's registers and shared memory."""

    blocks: int = tunable(2, 1, 2)

    def reject(self, case: Case) -> str | None:
        """Hopper, one gate a head, bf16, channels in whole tiles, and shared memory."""
        p = case.problem
        if reason := super().reject(case):
            return reason
        if case.BT != 64:
            return f"it is written for BT=64, not BT={case.BT}"
        if p.dtype != "bf16":
            return f"{p.dtype} operands are refused: only bf16 holds keys that are not normalised"
        if not p.scalar_gate or p.rank > 1:
            return "it takes one gate a head and one row a token"
        if p.K not in (64, 128) or p.V not in (64, 128):
            return f"K={p.K}, V={p.V} are not 64 or 128 channels, which its tiles are"
        needed, shared = self.blocks * (self.smem_bytes(case) + RESERVED), case.device.smem_bytes + RESERVED
        if needed > shared:
            return f"blocks={self.blocks} with K={p.K}, V={p.V} need {needed} bytes of {shared} shared"
        return None

    def smem_bytes(self, case: Case) -> int:
        """q and k, dO and dX, in whose place are pairs, values, a state, and numbers of rows."""
        p, BT = case.problem, case.BT
        return (2 * BT * p.K + BT * max(2 * p.V, 3 * BT) + p.V * BT + p.V * p.K) * 2 + 4 * BT * 4


def norm_of(factor: Any, n: int) -> Any:
    """The norm of q, or k, of a token, as a function of it."""
    return lambda i: factor[(at_q, at_k)[n](i)]


def build(case: Case, config: GdnGradientsConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    p, BT = case.problem, case.BT
    K, V, heads = p.K, p.V, Heads.of(p)
    f32, io = "float32", "bfloat16"
    gate = Gate(p)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def bwd_gdn_gradients(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        values,
        states,
        d_o,
        dv,
        dstates,
        chunk_tokens,
        dq,
        dk,
        dq_part,
        dk_part,
        dg,
        dbeta,
        dA_log_part,
        ddt_bias_part,
        scale,
        lower_bound,
    ):
        with T.Kernel(NT * heads.HV, threads=256) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            i_t, i_hv, _ = split_block(i_block, (NT, heads.HV))
            i_h = heads.of_keys(i_hv)
            start = chunk_tokens[i_t, 0]
            count = chunk_tokens[i_t, 1]
            at = Chunk(i_t, i_hv, i_h, start, count)
            thread = T.get_thread_binding()

            rows = T.alloc_shared((2, BT, K), io)  # q, k
            outer = T.alloc_shared((2, BT, V), io)  # dO, dX
            state = T.alloc_shared((V, K), io)  # S, then dS'
            value_shared = T.alloc_shared((V, BT), io)
            issue_rows(q, start, count, i_h, rows, 0)
            issue_rows(k, start, count, i_h, rows, 1)
            T.ptx_commit_group()
            issue_rows(d_o, start, count, i_hv, outer, 0)
            issue_rows(dv, start, count, i_hv, outer, 1)
            T.async_copy(states[i_t, i_hv, :, :], state)
            T.async_copy(values[i_t, i_hv, :, :], value_shared)
            G = T.alloc_shared((BT,), f32)
            factor = T.alloc_shared((2 * BT,), f32)
            sum_head_gates(gate, g, A_log, dt_bias, lower_bound, at, factor, G)

            T.ptx_wait_group(2)
            T.sync_threads()
            if p.l2norm:
                if thread < 2 * BT:
                    find_norms(Interleaved(rows), thread // 32 * 32, factor, 1.0)
            else:
                for r in T.Parallel(2 * BT):
                    factor[r] = 1.0
            T.ptx_wait_group(0)
            T.sync_threads()

            db = T.alloc_shared((BT,), f32)
            store_lost(p, rows, factor, scale, beta, at, db)
            T.fence_proxy_async()
            found = multiply_values(outer, value_shared, G, factor, scale, db)
            of_q = T.alloc_fragment((BT, K), f32)
            of_row = T.alloc_fragment((BT, K), f32)
            T.wgmma_gemm(outer[0, :, :], state, of_q, clear_accum=True, policy=T.BY_COLUMNS)
            T.wgmma_gemm(outer[1, :, :], state, of_row, clear_accum=True, policy=T.BY_COLUMNS)
            wait_for(of_q, of_row)
            T.sync_threads()
            T.async_copy(dstates[i_t, i_hv, :, :], state)
            pairs = T.alloc_shared((len(found), BT, BT), io)
            for n, tile in enumerate(found):
                for i, j in T.Parallel(BT, BT):
                    pairs[n, i, j] = tile[i, j]
            for i, c in T.Parallel(BT, K):
                of_q[i, c] = of_q[i, c] * (scale * factor[at_q(i)] * T.exp2(G[i]))
            for i, c in T.Parallel(BT, K):
                of_row[i, c] = of_row[i, c] * (-factor[at_k(i)] * T.exp2(G[i]))
            T.fence_proxy_async()
            T.sync_threads()
            store_beta(p, beta, dbeta, db, at)
            sums = T.alloc_shared((4, GROUPS, BT), f32)
            T.wgmma_gemm(pairs[0, :, :], rows[1, :, :], of_q, policy=T.BY_COLUMNS)
            T.wgmma_gemm(pairs[2, :, :], rows[1, :, :], of_q, policy=T.BY_COLUMNS)
            T.wgmma_gemm(pairs[1, :, :], rows[1, :, :], of_row, policy=T.BY_COLUMNS)
            wait_for(of_q, of_row)

            of_key = T.alloc_fragment((BT, K), f32)
            T.ptx_wait_group(0)
            T.fence_proxy_async()
            T.sync_threads()
            T.wgmma_gemm(value_shared, state, of_key, transpose_A=True, clear_accum=True, policy=T.BY_COLUMNS)
            wait_for(of_key)
            for i, c in T.Parallel(BT, K):
                of_key[i, c] = of_key[i, c] * (factor[at_k(i)] * T.exp2(G[BT - 1] - G[i]))
            dot(rows, 1, of_key, sums, 3)
            T.wgmma_gemm(pairs[0, :, :], rows[0, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
            T.wgmma_gemm(pairs[2, :, :], rows[0, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
            T.wgmma_gemm(pairs[1, :, :], rows[1, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
            wait_for(of_key)
            parts = T.alloc_shared((ROWS_AT_ONCE,), f32)
            dot_states(states, at, state, parts)
            dot(rows, 0, of_q, sums, 0)
            dot(rows, 1, of_row, sums, 1)
            dot(rows, 1, of_key, sums, 2)
            for i, c in T.Parallel(BT, K):
                of_key[i, c] = of_key[i, c] + of_row[i, c]
            T.sync_threads()
            x = SimpleNamespace(
                g=g, A_log=A_log, dt_bias=dt_bias, dg=dg, dA_log_part=dA_log_part, ddt_bias_part=ddt_bias_part
            )
            for n, (tile, written) in enumerate(
                ((of_q, dq_part if p.grouped else dq), (of_key, dk_part if p.grouped else dk))
            ):
                take_norms(p, rows, n, tile, sums, n, norm_of(factor, n))
                if p.l2norm:
                    T.sync_threads()
                round_rows(tile, rows, n)
                store_rows(rows, n, at, written)
            store_gate(p, x, lower_bound, at, sums, parts, T.exp2(G[BT - 1]))

    return bwd_gdn_gradients


default = GdnGradientsConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; eleven products of 64 rows."""
    p, BT = case.problem, case.BT
    products = BT * (2 * p.V * BT + 3 * p.V * p.K + 6 * BT * p.K)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=sizes["NT"] * p.HV * 2 * products)


STAGE = Stage(
    "bwd_gdn_gradients",
    INPUTS,
    OUTPUTS,
    GdnGradientsConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
)
