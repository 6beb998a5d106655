"""Gradients of a chunk for Hopper: from states and values on either side to those of q, k, the gate and the step size.

With K~ = k 2^G, X = V - K~ S, V' = A X, and what the scans know: S, dS' (of the state after the chunk), V', dX,

    dAqk = lower(dO V'^T)       dKK = -strict_lower(dX V'^T)      KK[i, j] = <k_i 2^(G_i - G_j), k_j>
    dq_i = scale 2^G_i (dO S^T)_i + scale sum_j dAqk[i, j] 2^(G_i - G_j) k_j
    dk_i = [row]  -2^G_i (dX S^T)_i + sum_j dKK[i, j] 2^(G_i - G_j) k_j
         + [key]  2^(G_last - G_i) (V' dS'^T)_i + sum_j 2^(G_j - G_i) (scale dAqk[j, i] q_j + dKK[j, i] k_j)
    dG_i = q_i dq_i + k_i (row - key);  the last also  sum_i k_i 2^(G_last - G_i) (V' dS'^T)_i + 2^G_last <S, dS'>
    dbeta_i = <dX_i, V'_i> / beta_i^2

and then the reverse cumsum of dG, the gate's, the sigmoid's and the norms' own derivatives. The last two lines hold
since V'_i = beta_i (X - KK V')_i and dX_i = beta_i (dV' - KK^T dX)_i; prep keeps beta from 0.

Sums over j are taken sub-chunk by sub-chunk with anchors m, as in fwd_prep, and chained: what is summed relative to one
anchor is multiplied with 2^(m_next - m) <= 1, and the product with the state is the first link.

    row:  (2^m_0 dO S^T + P_0 k_0) 2^(m_1 - m_0) + P_1 k_1 ...      P_a: 16 columns of dAqk, k_a = k 2^(m_a - G)
    key:  (2^(G_last - m_3) V' dS'^T + P_3^T q_3) 2^(m_3 - m_2) + ...                    q_b = q 2^(G - m_b)

Of heads that value heads share, every value head has its part, see bwd_heads.

Rows of q and k are one tile of 128, 8 by 8: a thread's rows belong to one token, a warp's leave the chain together.

    phase            what all 8 (or 16) warps do
    load, cumsums    all is asked for, gates first; they are summed, a thread a channel of a sub-chunk, meanwhile
    store_operands     norms; rows 8 by 8, keys and exponents, relative to anchors
    compute_pairs    dAqk, dKK = (dO, dX) V'^T; dbeta
    sum_rows, _keys  (dO, dX) S^T and V' dS'^T, with all keys before and rows after, from anchor to anchor
    sum_gradients    dG of rows, products with the norms' gradients; the exact path overwrites all sums
    sum_rows_after   the reverse cumsum; compute_gate: dg, parts of dA_log and ddt_bias; store_gradients: dq, dk

    tensor              exponent                    dtype  where it lives
    rows: q, k          from their own anchor       bf16   shared memory, BY_EIGHT
    keys: k             to their own anchor         bf16   shared memory
    above               from their own anchor       fp32   shared memory
    links, tails        powers between anchors      fp32   shared memory
    outer: dO, dX       none                        bf16   shared memory, BY_EIGHT
    V', S, dS'          none                        bf16   shared memory
    pairs: dAqk, dKK    none                        bf16   shared memory, and 16 columns each in registers
    row_sum, key_sum    relative to anchors         fp32   registers
    dG_row, of_key      none, relative to anchors   fp32   shared memory
    suffix              none                        fp32   registers
    gates: g, then dg   none                        as g   shared memory, where pairs were

Gradients of G are products of the very operands that were multiplied, so what cancels in the cumsum cancels exactly.
Source: autograd of Kimi Linear, arXiv:2510.26692, section 3; derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.reference import activate_beta
from kda_tl.templates.common.chunks import keep_seen, share_heads, split_chunks
from kda_tl.templates.common.heads import HeadRows, Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.slopes import Slopes
from kda_tl.templates.common.tile import FP32_TOLERANCE, L2NORM_EPS, prim_func
from kda_tl.templates.portable import bwd_gate, bwd_intra, bwd_qk, fwd_gate
from kda_tl.templates.sm90.exact import exact_gradients
from kda_tl.templates.sm90.gate_gradients import compute_gate, sum_rows_after
from kda_tl.templates.sm90.gates import LEAST_STEP, Chunk, Gate, find_step, needs_exact_path, reject_chunk
from kda_tl.templates.sm90.gradients import (
    HALF,
    PAD,
    Rows,
    compute_pairs,
    issue_rows,
    store_gradients,
    store_operands,
    sum_chunk,
    sum_gradients,
    sum_keys,
    sum_rows,
)
from kda_tl.templates.sm90.hopper import GIVEN, SCALARS, TABLES, HopperConfig, count_bytes
from kda_tl.templates.sm90.rows import BC, BY_EIGHT, NB
from kda_tl.templates.sm90.warp import find_norms

INPUTS = {
    **GIVEN,
    "values": "NT HV V BT : io",
    "states": "NT HV V KP : io",
    "do": "tokens HV V : io",
    "dv": "tokens HV V : io",
    "dstates": "NT HV V KP : io",
    "chunk_tokens": TABLES["chunk_tokens"],
}
OUTPUTS = {
    "dq": "tokens H K : io ? not grouped",
    "dk": "tokens H K : io ? not grouped",
    "dq_part": "tokens HV K : io ? grouped",
    "dk_part": "tokens HV K : io ? grouped",
    "dg": "tokens HV G : g",
    "dbeta": "tokens HV : beta",
    "dA_log_part": "NT HV : f32 ? has_A_log",
    "ddt_bias_part": "NT HV GP : f32 ? has_dt_bias",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: what the states add, then the references of intra, gate and qk, all in the dtype of g."""
    p, BT = case.problem, case.BT
    G = fwd_gate.reference(case, x)["g_cumsum"]
    dtype = G.dtype
    q_hat, k_hat = (share_heads(split_chunks(y.to(dtype), x.chunk_tokens, BT, width=p.KP), p.group) for y in (x.q, x.k))
    rstd = None
    if p.l2norm:
        rstd = torch.stack([(y.square().sum(-1) + L2NORM_EPS).rsqrt() for y in (q_hat, k_hat)], 2)
        q_hat, k_hat = q_hat * rstd[:, :, 0, :, None], k_hat * rstd[:, :, 1, :, None]
    dO, dX = (split_chunks(y.to(dtype), x.chunk_tokens, BT) for y in (x.do, x.dv))
    V, S, dS = x.values.to(dtype), x.states.to(dtype), x.dstates.to(dtype)
    steps = split_chunks(activate_beta(x.beta.to(dtype), p.beta), x.chunk_tokens, BT)
    steps = torch.where(steps.abs() < LEAST_STEP, LEAST_STEP, steps)[..., None]
    last = G[:, :, -1:]
    dq = x.scale * torch.exp2(G) * (dO @ S)
    row, key = -torch.exp2(G) * (dX @ S), torch.exp2(last - G) * (V.mT @ dS)
    dG = q_hat * dq + k_hat * (row - key)
    dG[:, :, -1] += (k_hat * key).sum(2) + torch.exp2(last[:, :, 0]) * (S * dS).sum(2)
    dKK = -(dX @ V)
    pairs = {"dAqk": (dO @ V).tril(), "dL": keep_seen(dKK, p.rank) / steps, "db_inter": torch.zeros_like(dq[..., 0])}
    outside = {"dq_inter": dq, "dk_inter": row + key, "dG_inter": dG.sum(-1, keepdim=True) if p.scalar_gate else dG}
    inner = bwd_intra.reference(case, Operands(**vars(x), g_cumsum=G, rstd=rstd, **pairs, **outside))
    db = -dKK.diagonal(dim1=-2, dim2=-1) / steps[..., 0].square()
    gate = bwd_gate.reference(case, Operands(**vars(x), dG=inner["dG"], db=db))
    alone = Case(problem=replace(p, H=p.HV), device=case.device, BT=BT, BC=case.BC)
    q, k = (share_heads(y, p.group) for y in (x.q, x.k))
    found = bwd_qk.reference(alone, Operands(**vars(x) | inner | {"q": q, "k": k, "rstd": rstd}))
    return {f"{name}_part" if p.grouped else name: y for name, y in found.items()} | gate


@dataclass(frozen=True, kw_only=True)
class BwdGradientsConfig(HopperConfig):
    """threads: of a block, which has a multiprocessor alone."""

    threads: int = tunable(256, 256, 512)

    def reject(self, case: Case) -> str | None:
        """Hopper, a gate a channel, 16-bit operands of fp32's range, and shared memory."""
        p = case.problem
        if reason := super().reject(case) or reject_chunk(case):
            return reason
        if p.K not in (64, 128) or p.V not in (64, 128):  # padded K: TileLang 0.1.15 places its tiles in more memory
            return f"K={p.K}, V={p.V} are not 64 or 128 channels, which its tiles are"
        smem = self.smem_bytes(case)
        if smem > case.device.smem_bytes:
            return f"K={p.K}, V={p.V} need {smem} bytes of shared memory, the device has {case.device.smem_bytes}"
        return None

    def smem_bytes(self, case: Case) -> int:
        """Operands, pairs and exponents, and in turn tiles of both states, values, dO and dX, and sums in fp32."""
        p, BT, V = case.problem, case.BT, case.problem.V
        gates = BT * p.K * (4 if p.g_dtype == "fp32" else 2)
        kept = 3 * BT * p.K * 2 + 2 * BT * BT * 2 + BT * (p.K + PAD) * 4 + max(gates, 22 * p.K * 4 + 8 * BT * 4)
        tiles, one = (2 * V * p.K + V * BT + 2 * BT * V) * 2, BT * (p.K + PAD) * 4
        if p.bounded_gate:
            return kept + max(tiles, 3 * one)
        return kept + tiles + max(0, 3 - tiles // one) * one  # its exact path needs the pairs to the end: a gap is left


def build(case: Case, config: BwdGradientsConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    p, BT = case.problem, case.BT
    K, V, KP, heads = p.K, p.V, p.KP, Heads.of(p)
    f32, io = "float32", "bfloat16"
    gate, slopes = Gate(p), Slopes(p)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def bwd_gradients(
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
        with T.Kernel(NT * heads.HV, threads=config.threads) as i_block:
            T.annotate_min_blocks_per_sm(1)
            i_t, i_hv, _ = split_block(i_block, (NT, heads.HV))
            i_h = heads.of_keys(i_hv)
            start = chunk_tokens[i_t, 0]
            count = chunk_tokens[i_t, 1]
            at = Chunk(i_t, i_hv, i_h, start, count)
            thread = T.get_thread_binding()
            written = (dq_part, dk_part) if p.grouped else (dq, dk)

            # everything is asked for at once: gates are summed while tiles are on their way
            rows = T.alloc_shared((NB, 2 * BC, KP), io)  # of q above those of k, sub-chunk by sub-chunk
            outer = T.alloc_shared((2 * BT, V), io)  # of dO above those of dX, 8 by 8
            value_shared = T.alloc_shared((V, BT), io)
            state_shared = T.alloc_shared((V, KP), io)
            dstate_shared = T.alloc_shared((V, KP), io)
            g_shared = T.alloc_shared((BT, K), g.dtype)
            bias = T.alloc_fragment((NB, KP), f32)
            slope = T.alloc_fragment((1,), f32)
            decay_scale = T.alloc_fragment((1,), f32)
            raw = T.alloc_fragment((BC, NB, KP), g.dtype)
            slope[0] = gate.slope(A_log, i_hv)
            decay_scale[0] = gate.decay_scale(slope[0], lower_bound)
            for s, j in T.Parallel(NB, KP):
                bias[s, j] = gate.bias(dt_bias, i_hv, j)
            issue_rows(g, start, count, i_hv, g_shared, lambda i: (i,))
            T.ptx_commit_group()
            issue_rows(q, start, count, i_h, rows, lambda i: (i // BC, i % BC))
            issue_rows(k, start, count, i_h, rows, lambda i: (i // BC, BC + i % BC))
            issue_rows(d_o, start, count, i_hv, outer, lambda i: (BY_EIGHT.row_of(i),))
            issue_rows(dv, start, count, i_hv, outer, lambda i: (BY_EIGHT.row_of(i) + HALF,))
            T.async_copy(values[i_t, i_hv, :, :], value_shared)
            T.async_copy(states[i_t, i_hv, :, :], state_shared)
            T.async_copy(dstates[i_t, i_hv, :, :], dstate_shared)
            T.ptx_wait_group(3)
            T.sync_threads()
            for i in T.unroll(BC):
                for s, j in T.Parallel(NB, KP):
                    raw[i, s, j] = g_shared[s * BC + i, j]

            local, middle, last, above, links, tails, steepest = sum_chunk(gate, raw, count, slope, decay_scale, bias)

            # norms
            factor = T.alloc_shared((2 * BT,), f32)
            b_factor = T.alloc_shared((BT,), f32)
            T.ptx_wait_group(0)
            T.sync_threads()
            for i in T.Parallel(BT):
                b_factor[i] = T.if_then_else(i < count, find_step(p, beta[start + i, i_hv]), 1.0)
            if p.l2norm:
                T.sync_threads()
                if thread < 2 * BT:
                    find_norms(Rows(rows), thread // 32 * 32, factor, scale)
            else:
                for r in T.Parallel(2 * BT):
                    factor[r] = T.if_then_else(r // BC % 2 == 0, scale, 1.0)

            # operands; those that are sliced have one dimension more: of rows of a tile that warpgroups multiply, each
            # with some of its columns, TileLang 0.1.15 gives all but the first the wrong address
            keys = T.alloc_shared((NB, BC, KP), io)
            store_operands(factor, local, middle, above, rows, keys)

            pairs = T.alloc_shared((2 * BT, BT), io)
            columns = [T.alloc_fragment((2 * BT, BC), io) for _ in range(NB)]
            compute_pairs(slopes, outer, value_shared, pairs, columns, b_factor, beta, dbeta, at)

            row_sum = T.alloc_fragment((2 * BT, KP), f32)
            sum_rows(gate, outer, state_shared, columns, keys, links, row_sum)

            key_sum = T.alloc_fragment((BT, KP), f32)
            of_keys = T.alloc_fragment((NB, KP), f32)  # what the last row of dG gets in addition, from kg and states
            of_states = T.alloc_fragment((NB, KP), f32)
            known = SimpleNamespace(values=value_shared, state=state_shared, dstate=dstate_shared)
            grown = sum_keys(gate, known, pairs, rows, keys, links, tails, key_sum, of_keys, of_states)

            of_key = T.alloc_shared((BT, KP + PAD), f32)
            dG_row = T.alloc_shared((BT, KP + PAD), f32)
            dot = sum_gradients(p, rows, keys, row_sum, key_sum, of_key, dG_row)
            if not p.bounded_gate:
                if needs_exact_path(steepest):
                    read, factors = (q, k, g, dt_bias, values, states, d_o, dv, dstates), (factor, pairs)
                    sums = (above, last, dG_row, keys, grown, of_key, of_keys, written)
                    exact_gradients(gate, read, at, (*factors, decay_scale[0], slope[0], scale), sums, config.threads)

            # the gate; its rows come again, and go, by way of shared memory
            suffix = T.alloc_fragment((BC, NB, KP), f32)
            totals = T.alloc_shared((NB, KP), f32)
            gates = T.alloc_shared((BT, K), g.dtype)
            if p.gate != "log":
                T.sync_threads()
                issue_rows(g, start, count, i_hv, gates, lambda i: (i,))
                T.ptx_commit_group()
            sum_rows_after(dG_row, keys, of_key, of_keys, of_states, last, totals, suffix)
            if p.gate != "log":
                T.ptx_wait_group(0)
                T.sync_threads()
                compute_gate(p, gates, raw, bias, A_log, lower_bound, at, totals, suffix, dA_log_part, ddt_bias_part)
            elif p.has_dt_bias:
                for j in T.Parallel(KP):
                    ddt_bias_part[i_t, i_hv, j] = 0.0
            for i in T.unroll(BC):
                for s, j in T.Parallel(NB, KP):
                    gates[s * BC + i, j] = T.cast(suffix[i, s, j], dg.dtype)
            T.sync_threads()
            own_dg = HeadRows.of(dg, start, i_hv)
            for i, j in T.Parallel(BT, K):
                if i < count:
                    own_dg.rows[i, j] = gates[i, j]

            # q and k
            if True if p.bounded_gate else T.Not(needs_exact_path(steepest)):
                store_gradients(p, rows, above, of_key, row_sum, factor, dot, scale, at, written)

    return bwd_gradients


default = BwdGradientsConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; eight products of 64 rows."""
    p, BT = case.problem, case.BT
    products = BT * (2 * p.V * BT + 3 * p.V * p.KP + 4 * BT * p.KP // 2)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=sizes["NT"] * p.HV * 2 * products)


# Pairs and anchored operands rounded to 2^-9 each; what cancels in dg was summed from the same roundings
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
DEPENDS = ("gate", "beta", "l2norm", "direction")
STAGE = Stage(
    "bwd_gradients",
    INPUTS,
    OUTPUTS,
    BwdGradientsConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
)
