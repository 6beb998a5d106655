"""Prep: all of a chunk that does not need the state, in one kernel for Hopper.

    k_neg = -k 2^G      qg = scale q 2^G      kg = k 2^(G_last - G)      decay = 2^G_last
    G as in fwd_gate, q and k normalised
    Aqk[i, j] = scale <q_i 2^(G_i - G_j), k_j>   j <= i
    A = (I + L)^-1 diag(beta),   L[i, j] = beta_i <k_i 2^(G_i - G_j), k_j>   j < i

A thread owns four neighbouring channels of one sub-chunk and walks down its rows, so gates, cumsums and exponentials
stay in registers. Pairs of rows are products of anchored operands: rows of a sub-chunk relative to its middle row,
keys relative to the middle of the sub-chunk whose rows they meet, which lies below them:

    <q_i 2^(G_i - m_b), k_j 2^(m_b - G_j)>      i in sub-chunk b, j in sub-chunk a <= b

Anchors m are integers, so rounded operands move from one to another, or to none, by exact products of two bf16 a time;
without a bound of the gate even ones, and in two halves, since 2^(m_b - m_a) may be less than any bf16 while what it
links is not.
A token alone in its chunk has one pair, and no others to average what rounding does: it is taken in fp32.
A bounded gate keeps these exponents below 2^58. Where an unbounded gate decays below 2^-110 within half a sub-chunk,
the thread block then takes all of its chunk's factors and pairs once more, without anchors.

The inverse: forward substitution gives the blocks of 16 rows on the diagonal, products of single warps what lies below
them (see _warp). Chunks run from the last to the first, since the recurrence begins with the first: 549 -> 543 us for a
whole call (B1 T8192 H64, H200).
Source: Kimi Linear, arXiv:2510.26692, section 3; anchors are derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.reference import activate_beta
from kda_tl.stage import Case, Config, Cost, Stage, axis, prefer
from kda_tl.templates import fwd_gate, fwd_intra
from kda_tl.templates._chunks import pack_lower, share_heads, split_chunks
from kda_tl.templates._prep import (
    PART,
    Gate,
    find_anchors,
    find_steepest,
    find_step,
    is_wild,
    load_gates,
    load_rows,
    put_queries,
    sum_gates,
    take_exactly,
    take_lone,
    take_pairs,
)
from kda_tl.templates._rows import BC, LATER_FIRST, NB
from kda_tl.templates._tile import FP32_TOLERANCE, annotate
from kda_tl.templates._warp import find_norms, invert, substitute

INPUTS = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "g": "tokens HV G : g",
    "beta": "tokens HV : beta",
    "A_log": "HV : f32 ? has_A_log",
    "dt_bias": "HV G : f32 ? has_dt_bias",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
}


def reference(
    case: Case,
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    chunk_tokens: torch.Tensor,
    scale: float,
    lower_bound: float,
) -> dict[str, torch.Tensor]:
    """PyTorch twin: the references of gate and intra, then factors, all in the dtype of g."""
    p, BT = case.problem, case.BT
    gated = fwd_gate.reference(
        case, g=g, A_log=A_log, dt_bias=dt_bias, chunk_tokens=chunk_tokens, lower_bound=lower_bound
    )
    G = gated["g_cumsum"]
    intra = fwd_intra.reference(case, q=q, k=k, g_cumsum=G, beta=beta, chunk_tokens=chunk_tokens, scale=scale)
    q_tile, k_tile = (share_heads(split_chunks(x.to(G.dtype), chunk_tokens, BT, width=p.KP), p.group) for x in (q, k))
    if p.l2norm:
        q_rstd, k_rstd = intra["rstd"].unbind(2)
        q_tile, k_tile = q_tile * q_rstd[..., None], k_tile * k_rstd[..., None]
    steps = split_chunks(activate_beta(beta.to(G.dtype), p.beta), chunk_tokens, BT)
    A = intra["Akk"] * steps[:, :, None, :]
    last = G[:, :, -1:]
    return {
        "A": pack_lower(A),
        "Aqk": pack_lower(intra["Aqk"]),
        "k_neg": -k_tile * torch.exp2(G),
        "qg": scale * q_tile * torch.exp2(G),
        "kg": k_tile * torch.exp2(last - G),
        "decay": torch.exp2(last[:, :, 0]).expand(-1, -1, p.KP).contiguous(),
    }


WARPGROUP = 128
WIDTHS = (64, 128, 256)  # channels that kernels are written for
RESERVED = 1024  # bytes of shared memory that CUDA takes of each block
ROWS_AT_ONCE = 8  # of a sub-chunk, whose q and k a thread holds


@dataclass(frozen=True, kw_only=True)
class FwdPrepConfig(Config):
    """blocks: that share a multiprocessor's registers and shared memory."""

    blocks: int = axis(3, 1, 2, 3)

    def reject(self, case: Case) -> str | None:
        """Hopper, one gate a channel, 16-bit operands whose range is that of fp32, and shared memory."""
        p = case.problem
        if case.device.sm != 90:
            return f"its products are instructions of sm_90, the device is {case.device.arch}"
        if (case.BT, case.BC) != (64, 16):
            return f"it is written for BT=64, BC=16, not BT={case.BT}, BC={case.BC}"
        if p.dtype != "bf16":
            return f"{p.dtype} operands are refused: only bf16 holds anchored factors on the matrix unit"
        if p.scalar_gate or p.rank > 1:
            return "it takes one gate a channel and one row a token"
        if p.KP not in WIDTHS:
            return f"K={p.K} is not {' or '.join(map(str, WIDTHS))} channels, which its tiles are"
        needed, shared = self.blocks * (self.smem_bytes(case) + RESERVED), case.device.smem_bytes + RESERVED
        if needed > shared:
            return f"blocks={self.blocks} with K={p.K} need {needed} bytes of {shared} shared"
        return None

    def smem_bytes(self, case: Case) -> int:
        """Operands of the pairs; then the pairs, and what the inverse is made of."""
        BT, KP = case.BT, case.problem.KP
        operands = (2 * BT + BC * NB * (NB + 1) // 2) * KP * 2
        pairs = 2 * BT * (BT + 4) * 4 + BT * 3 * BT * 2 + (0 if case.problem.bounded_gate else BT * PART * 4)
        return max(operands, pairs) + 4 * BT * 4


def build(case: Case, config: FwdPrepConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    p, BT = case.problem, case.BT
    HV, K, KP, group = p.HV, p.K, p.KP, p.group
    HALF, LOWER = BT // 2, BT + BT // 2
    threads = max(KP, WARPGROUP)
    wide = threads > WARPGROUP  # the warps of a sub-chunk are two, and warpgroups share what follows
    f32, io = "float32", "bfloat16"
    gate = Gate(p)

    @T.macro
    def multiply_later(rows, keys, own_2, next_2, second, third):
        """Products of the later half of a chunk, from registers."""
        later = T.alloc_fragment((BT, KP), io)
        T.copy(rows[:BT, :], later)
        T.wgmma_gemm(later, keys[0][2 * BC : 4 * BC, :], own_2, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(later, keys[1][BC : 3 * BC, :], next_2, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(later, keys[2][:, :], second, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(later, keys[3][:, :], third, transpose_B=True, clear_accum=True)

    @T.macro
    def multiply_first(rows, keys, own_0, next_0):
        """Products of its first half."""
        T.wgmma_gemm(rows[BT : 2 * BT, :], keys[0][: 2 * BC, :], own_0, transpose_B=True, clear_accum=True)
        T.wgmma_gemm(rows[BT : 2 * BT, :], keys[1][:BC, :], next_0, transpose_B=True, clear_accum=True)

    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @T.prim_func
    def fwd_prep(
        q: annotate(case, INPUTS["q"], tokens=tokens),
        k: annotate(case, INPUTS["k"], tokens=tokens),
        g: annotate(case, INPUTS["g"], tokens=tokens),
        beta: annotate(case, INPUTS["beta"], tokens=tokens),
        A_log: annotate(case, INPUTS["A_log"]),
        dt_bias: annotate(case, INPUTS["dt_bias"]),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        A: annotate(case, OUTPUTS["A"], NT=NT),
        Aqk: annotate(case, OUTPUTS["Aqk"], NT=NT),
        k_neg: annotate(case, OUTPUTS["k_neg"], NT=NT),
        qg: annotate(case, OUTPUTS["qg"], NT=NT),
        kg: annotate(case, OUTPUTS["kg"], NT=NT),
        decay: annotate(case, OUTPUTS["decay"], NT=NT),
        scale: T.float32,
        lower_bound: T.float32,
    ):
        with T.Kernel(NT * HV, threads=threads) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            # variables: written out in every address, a number of heads that is no power of two costs 660 instructions
            i_t = T.alloc_var("int32")
            i_hv = T.alloc_var("int32")
            i_t = NT - 1 - i_block // HV
            i_hv = i_block % HV
            i_h = i_hv // group
            thread = T.get_thread_binding()  # a warp has channels of one sub-chunk: all, or of 256 half
            start = chunk_tokens[i_t, 0]
            count = chunk_tokens[i_t, 1]

            # everything is asked for at once: gates are summed while q and k are on their way
            bias = T.alloc_fragment((NB, KP), f32)
            slope = T.alloc_fragment((1,), f32)
            unit = T.alloc_fragment((1,), f32)
            raw = T.alloc_fragment((BC, NB, KP), g.dtype)
            rows = T.alloc_shared((2 * BT, KP), io)  # of q above those of k, by sub-chunk, see first_row
            b_factor = T.alloc_shared((BT,), f32)
            raw_beta = T.alloc_fragment((BT,), beta.dtype)
            slope[0] = gate.slope(A_log, i_hv)
            unit[0] = gate.unit(slope[0], lower_bound)
            for s, j in T.Parallel(NB, KP):
                bias[s, j] = gate.bias(dt_bias, i_hv, j)
            for i in T.Parallel(BT):
                raw_beta[i] = T.if_then_else(i < count, beta[start + i, i_hv], 0)
            load_gates(g, K, start, count, i_hv, raw)
            load_rows(q, start, count, i_h, rows, 0)
            load_rows(k, start, count, i_h, rows, BC)

            # cumsums from the start of a sub-chunk, then anchors from the chunk's
            local = T.alloc_fragment((BC, NB, KP), f32)
            middle = T.alloc_fragment((NB, KP), f32)
            total = T.alloc_fragment((NB, KP), f32)
            sums = T.alloc_shared((NB, KP), f32)
            anchors = T.alloc_shared((NB, KP), f32)
            sum_gates(gate, raw, count, slope[0], unit[0], bias, local, middle, total)
            if not p.bounded_gate:
                wild = T.alloc_shared((NB,), f32)
                find_steepest(middle, total, wild)
            before = T.alloc_fragment((NB, KP), f32)
            last = T.alloc_fragment((NB, KP), f32)
            anchor = T.alloc_fragment((NB, KP), f32)
            find_anchors(gate, middle, total, sums, before, last, anchor)
            T.copy(anchor, anchors)
            for j in T.Parallel(KP):
                decay[i_t, i_hv, j] = T.exp2(sums[0, j] + sums[1, j] + sums[2, j] + sums[3, j])
            T.sync_threads()
            ahead = T.alloc_fragment((NB, KP), io)
            ahead_neg = T.alloc_fragment((NB, KP), io)
            behind = T.alloc_fragment((NB, KP), f32)
            out = T.alloc_fragment((NB, KP), io)
            nexts = [T.alloc_fragment((NB, KP), io) for _ in range(1, NB)]
            for s, j in T.Parallel(NB, KP):
                ahead[s, j] = T.cast(T.exp2(anchor[s, j]), io)
                ahead_neg[s, j] = T.cast(-T.exp2(anchor[s, j]), io)
                behind[s, j] = T.exp2(last[s, j] - anchor[s, j])
            if not p.bounded_gate:  # keys leave their sub-chunk by way of its end, where they are no larger than k
                for s, j in T.Parallel(NB, KP):
                    total[s, j] = T.round(total[s, j] - middle[s, j])
                for s, j in T.Parallel(NB, KP):
                    out[s, j] = T.cast(T.exp2(total[s, j]), io)
                for s, j in T.Parallel(NB, KP):
                    anchor[s, j] = anchor[s, j] + total[s, j]
            for n, into in enumerate(nexts):
                for s, j in T.Parallel(NB, KP):
                    into[s, j] = T.cast(T.exp2(anchors[T.min(s + n + 1, NB - 1), j] - anchor[s, j]), io)

            # norms
            factor = T.alloc_shared((2 * BT,), f32)
            T.ptx_wait_group(0)
            T.sync_threads()
            if count < BT:  # another sequence's rows may be infinite
                for i, j in T.Parallel(2 * BT, KP):
                    if LATER_FIRST.token_of(i) >= count:
                        rows[i, j] = 0
                T.sync_threads()
            for i in T.Parallel(BT):
                b_factor[i] = T.if_then_else(i < count, find_step(p, raw_beta[i]), 0.0)
            if p.l2norm:
                if wide:
                    if thread < WARPGROUP:
                        find_norms(rows, LATER_FIRST.first_row(thread // 32), factor, scale)
                    T.sync_threads()
                else:
                    find_norms(rows, LATER_FIRST.first_row(thread // 32), factor, scale)
                    T.sync_warp()
            else:
                for r in T.Parallel(2 * BT):
                    factor[r] = T.if_then_else(r // BC % 2 == 0, scale, 1.0)
                T.sync_threads()

            # operands, where a thread reads and overwrites its own; a tile for each distance between sub-chunks
            keys = [T.alloc_shared(((NB - n) * BC, KP), io) for n in range(NB)]
            q_raw = T.alloc_fragment((ROWS_AT_ONCE, NB, KP), io)
            k_raw = T.alloc_fragment((ROWS_AT_ONCE, NB, KP), io)
            row = T.alloc_fragment((NB, KP), f32)
            key = T.alloc_fragment((NB, KP), f32)
            query = T.alloc_fragment((NB, KP), f32)
            shrink = T.alloc_fragment((NB, KP), f32)
            query_io = T.alloc_fragment((NB, KP), io)
            row_io = T.alloc_fragment((NB, KP), io)
            key_io = T.alloc_fragment((NB, KP), io)
            scaled = T.alloc_fragment((NB, KP), io)
            q_factor = T.alloc_local((ROWS_AT_ONCE,), f32)
            k_factor = T.alloc_local((ROWS_AT_ONCE,), f32)
            for part in T.serial(BC // ROWS_AT_ONCE):
                for r in T.unroll(ROWS_AT_ONCE):
                    for s, j in T.Parallel(NB, KP):
                        q_raw[r, s, j] = rows[LATER_FIRST.first_row(s) + part * ROWS_AT_ONCE + r, j]
                    for s, j in T.Parallel(NB, KP):
                        k_raw[r, s, j] = rows[LATER_FIRST.first_row(s) + BC + part * ROWS_AT_ONCE + r, j]
                for r in T.vectorized(ROWS_AT_ONCE):
                    q_factor[r] = factor[thread // (threads // NB) * 2 * BC + part * ROWS_AT_ONCE + r]
                for r in T.vectorized(ROWS_AT_ONCE):
                    k_factor[r] = factor[thread // (threads // NB) * 2 * BC + BC + part * ROWS_AT_ONCE + r]
                for r in T.unroll(ROWS_AT_ONCE):
                    i = part * ROWS_AT_ONCE + r
                    for s, j in T.Parallel(NB, KP):
                        above = local[r, s, j] - middle[s, j]
                        shrink[s, j] = T.exp2(above)
                        row[s, j] = T.cast(k_raw[r, s, j], f32) * k_factor[r]
                        query[s, j] = T.cast(q_raw[r, s, j], f32) * q_factor[r] * shrink[s, j]
                        key[s, j] = T.exp2(-above) * row[s, j]
                        row[s, j] = row[s, j] * shrink[s, j]
                    for s, j in T.Parallel(NB, KP):
                        query_io[s, j] = T.cast(query[s, j], io)
                    for s, j in T.Parallel(NB, KP):
                        row_io[s, j] = T.cast(row[s, j], io)
                    for s, j in T.Parallel(NB, KP):
                        key_io[s, j] = T.cast(key[s, j], io)
                    for s, j in T.Parallel(NB, KP):
                        rows[LATER_FIRST.first_row(s) + i, j] = query_io[s, j]
                    for s, j in T.Parallel(NB, KP):
                        rows[LATER_FIRST.first_row(s) + BC + i, j] = row_io[s, j]
                    for s, j in T.Parallel(NB, KP):
                        keys[0][s * BC + i, j] = key_io[s, j]
                    if not p.bounded_gate:
                        for s, j in T.Parallel(NB, KP):
                            key_io[s, j] = key_io[s, j] * out[s, j]
                    for n, into in enumerate(nexts):
                        for s, j in T.Parallel(NB, KP):
                            scaled[s, j] = key_io[s, j] * into[s, j]
                        for s, j in T.Parallel(NB, KP):
                            if s < NB - 1 - n:
                                keys[n + 1][s * BC + i, j] = scaled[s, j]
                    for s, j in T.Parallel(NB, KP):
                        kg[i_t, i_hv, s * BC + i, j] = T.cast(key[s, j] * behind[s, j], io)
                    for s, j in T.Parallel(NB, KP):
                        scaled[s, j] = query_io[s, j] * ahead[s, j]
                    for s, j in T.Parallel(NB, KP):
                        qg[i_t, i_hv, s * BC + i, j] = scaled[s, j]
                    for s, j in T.Parallel(NB, KP):
                        scaled[s, j] = row_io[s, j] * ahead_neg[s, j]
                    for s, j in T.Parallel(NB, KP):
                        k_neg[i_t, i_hv, s * BC + i, j] = scaled[s, j]
                for r in T.unroll(BC - ROWS_AT_ONCE):  # a loop half as long, for the instruction cache
                    for s, j in T.Parallel(NB, KP):
                        shrink[s, j] = local[r + ROWS_AT_ONCE, s, j]
                    for s, j in T.Parallel(NB, KP):
                        local[r, s, j] = shrink[s, j]

            # pairs: rows of two sub-chunks, 64 with q and k, are a tile of the matrix unit; half of a product is unused
            both = T.alloc_shared((2 * BT, BT + 4), f32)
            own_0 = T.alloc_fragment((BT, 2 * BC), f32)
            own_2 = T.alloc_fragment((BT, 2 * BC), f32)
            next_0 = T.alloc_fragment((BT, BC), f32)
            next_2 = T.alloc_fragment((BT, 2 * BC), f32)
            second = T.alloc_fragment((BT, 2 * BC), f32)
            third = T.alloc_fragment((BT, BC), f32)
            T.fence_proxy_async()
            T.sync_threads()
            if wide:
                if thread < WARPGROUP:
                    multiply_later(rows, keys, own_2, next_2, second, third)
                    T.wait_wgmma(0)
                else:
                    multiply_first(rows, keys, own_0, next_0)
                    T.wait_wgmma(0)
                T.sync_threads()
                if thread < WARPGROUP:
                    take_pairs([(2, own_2)], [(2, 1, next_2), (2, 0, second), (2, 0, third)], b_factor, both)
                else:
                    take_pairs([(0, own_0)], [(0, 0, next_0)], b_factor, both)
            else:
                multiply_later(rows, keys, own_2, next_2, second, third)
                multiply_first(rows, keys, own_0, next_0)
                T.wait_wgmma(0)
                T.sync_threads()
                nearest = [(0, own_0), (2, own_2)]
                take_pairs(nearest, [(0, 0, next_0), (2, 1, next_2), (2, 0, second), (2, 0, third)], b_factor, both)
            T.sync_threads()
            if not p.bounded_gate:
                if is_wild(wild):
                    take_exactly(
                        gate,
                        (q, k, g, dt_bias, k_neg, qg, kg, decay),
                        (i_t, i_hv, i_h, start, count),
                        (factor, b_factor),
                        both,
                        (unit[0], slope[0]),
                    )
                    T.sync_threads()
            inverse = T.alloc_shared((BT, BT), io)
            block_rows = T.alloc_shared((BT, BC + 8), io)
            block_columns = T.alloc_shared((BT, BC + 8), io)
            if thread < BT:
                substitute(both, b_factor, block_rows, block_columns, inverse, thread)
            elif not wide or thread < WARPGROUP:
                put_queries(both, thread - BT, i_t, i_hv, Aqk, inverse)
            T.sync_threads()
            invert(both, b_factor, block_rows, block_columns, inverse, threads)
            T.sync_threads()
            for i, j in T.Parallel(LOWER, HALF):
                A[i_t, i_hv, i, j] = inverse[i - i // BT * HALF, i // BT * HALF + j]
            if count == 1:
                take_lone(q, k, KP, start, i_h, factor, i_t, i_hv, Aqk)

    return fwd_prep


def default(case: Case) -> FwdPrepConfig:
    """Three blocks a multiprocessor."""
    return prefer(case, FwdPrepConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """q, k, g and beta in; two triangles, three tiles and a row out; two products over K, an inverse."""
    p, BT = case.problem, case.BT
    width = {"bf16": 2, "fp16": 2, "fp32": 4}
    chunks, tokens = sizes["NT"] * p.HV, sizes["tokens"]
    io = width[p.dtype]
    read = tokens * (2 * p.H * p.K * io + p.HV * (p.G * width[p.g_dtype] + width[p.beta_dtype]))
    written = chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    return Cost(bytes=read + written, flops=chunks * (2 * BT * BT * p.K + 2 * BT**3 // 3))


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written; so are guards, but where gates are bounded or channels padded.

    TileLang 0.1.15 would set six more barriers: it cannot tell that a thread's part of a tile is its own where rows are
    counted by a loop, nor what ldmatrix reads. Nor can it tell that a chunk's tokens are among all tokens: it guards
    every row twice, 200 instructions before a block has asked for its rows. Without these guards ptxas (CUDA 13.0)
    spills 16 bytes of the kernel for bounded gates: 8 x 1024 tokens of 96 heads take 734 us instead of 720. And a guard
    that differs between channels is no guard without them: what it chooses from is loaded in either case.
    """
    p = case.problem
    unguarded = {} if p.bounded_gate or p.KP > p.K else {"tl.disable_safe_memory_legalize": True}
    return {"tl.disable_thread_storage_sync": True} | unguarded


STAGE = Stage(
    name="fwd_prep",
    inputs=INPUTS,
    outputs=OUTPUTS,
    scalars=("scale", "lower_bound"),
    config=FwdPrepConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    passes=passes,
    # Roundings of 2^-9 each: pairs see two operands, A the inverse's factors and itself
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
