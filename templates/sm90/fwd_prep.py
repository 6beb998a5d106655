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
them (see warp.py). Chunks run from the last to the first, since the recurrence begins with the first.

    phase              warps of 4, of 256 channels 8                     barrier before it
    load_gates, _rows  all ask for all: gates to registers, q, k async
    sum_chunk          a warp has channels of one sub-chunk              one inside: sub-chunks meet
    find_links         the same
    normalise          four: a sub-chunk's rows each, by mma             q and k have come
    store_operands       a thread its own rows, which it overwrites
    multiply_pairs     a warpgroup 64 rows, by wgmma; of two a half each operands written
    exact_pairs       all; only where a gate without a bound is too steep for anchors
    substitute         two: a thread a column                            pairs written
    store_queries        two more: Aqk to memory                           the same
    invert             four, by mma                                      blocks written
    the end            all: A to memory                                  inverse written

    tensor                   exponent                       dtype        where it lives
    raw, bias                -                              as they came registers
    local, middle, total     from the sub-chunk's start     fp32         registers
    anchors                  from the chunk's start         fp32         shared memory and registers
    rows: q, k 2^(G - m)     from their own anchor          bf16         shared memory, over what came, LATER_FIRST
    keys[n]: k 2^(m' - G)    to the n-th following anchor   bf16         shared memory
    both: Aqk above L        none                           fp32         shared memory, BY_SUB_CHUNK
    inverse                  none                           bf16         shared memory
    k_neg, qg, kg            from the chunk's start, end    bf16         straight to memory
Source: Kimi Linear, arXiv:2510.26692, section 3; anchors are derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.reference import activate_beta
from kda_tl.templates.common.chunks import pack_lower, share_heads, split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FP32_TOLERANCE, prim_func
from kda_tl.templates.portable import fwd_gate, fwd_intra
from kda_tl.templates.sm90.exact import PART, compute_lone, exact_pairs
from kda_tl.templates.sm90.gates import Chunk, Gate, load_gates, needs_exact_path, reject_chunk
from kda_tl.templates.sm90.hopper import FACTORS, GIVEN, SCALARS, TABLES, HopperConfig, count_bytes
from kda_tl.templates.sm90.prep import (
    WARPGROUP,
    find_links,
    load_rows,
    multiply_pairs,
    normalise,
    store_inverse,
    store_operands,
    sum_chunk,
)
from kda_tl.templates.sm90.rows import BC, NB, Pairs

INPUTS = {**GIVEN, "chunk_tokens": TABLES["chunk_tokens"]}
OUTPUTS = FACTORS


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: the references of gate and intra, then factors, all in the dtype of g."""
    p, BT = case.problem, case.BT
    G = fwd_gate.reference(case, x)["g_cumsum"]
    intra = fwd_intra.reference(case, Operands(**vars(x), g_cumsum=G))
    q_tile, k_tile = (
        share_heads(split_chunks(y.to(G.dtype), x.chunk_tokens, BT, width=p.KP), p.group) for y in (x.q, x.k)
    )
    if p.l2norm:
        q_rstd, k_rstd = intra["rstd"].unbind(2)
        q_tile, k_tile = q_tile * q_rstd[..., None], k_tile * k_rstd[..., None]
    steps = split_chunks(activate_beta(x.beta.to(G.dtype), p.beta), x.chunk_tokens, BT)
    A = intra["Akk"] * steps[:, :, None, :]
    last = G[:, :, -1:]
    return {
        "A": pack_lower(A),
        "Aqk": pack_lower(intra["Aqk"]),
        "k_neg": -k_tile * torch.exp2(G),
        "qg": x.scale * q_tile * torch.exp2(G),
        "kg": k_tile * torch.exp2(last - G),
        "decay": torch.exp2(last[:, :, 0]).expand(-1, -1, p.KP).contiguous(),
    }


WIDTHS = (64, 128, 256)  # channels that kernels are written for
RESERVED = 1024  # bytes of shared memory that CUDA takes of each block


@dataclass(frozen=True, kw_only=True)
class PrepConfig(HopperConfig):
    """blocks: that share a multiprocessor's registers and shared memory."""

    blocks: int = tunable(3, 1, 2, 3)

    def reject(self, case: Case) -> str | None:
        """Hopper, one gate a channel, 16-bit operands whose range is that of fp32, and shared memory."""
        p = case.problem
        if reason := super().reject(case) or reject_chunk(case):
            return reason
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


def build(case: Case, config: PrepConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    p, BT = case.problem, case.BT
    K, KP, heads = p.K, p.KP, Heads.of(p)
    threads = max(KP, WARPGROUP)
    f32, io = "float32", "bfloat16"
    gate = Gate(p)

    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_prep(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, Aqk, k_neg, qg, kg, decay, scale, lower_bound):
        with T.Kernel(NT * heads.HV, threads=threads) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            i_t, i_hv, _ = split_block(i_block, (NT, heads.HV), backwards=True)
            i_h = heads.of_keys(i_hv)
            start = chunk_tokens[i_t, 0]
            count = chunk_tokens[i_t, 1]
            at = Chunk(i_t, i_hv, i_h, start, count)

            # everything is asked for at once: gates are summed while q and k are on their way
            bias = T.alloc_fragment((NB, KP), f32)
            slope = T.alloc_fragment((1,), f32)
            decay_scale = T.alloc_fragment((1,), f32)
            raw = T.alloc_fragment((BC, NB, KP), g.dtype)
            rows = T.alloc_shared((2 * BT, KP), io)  # in the order LATER_FIRST
            b_factor = T.alloc_shared((BT,), f32)
            raw_beta = T.alloc_fragment((BT,), beta.dtype)
            slope[0] = gate.slope(A_log, i_hv)
            decay_scale[0] = gate.decay_scale(slope[0], lower_bound)
            for s, j in T.Parallel(NB, KP):
                bias[s, j] = gate.bias(dt_bias, i_hv, j)
            for i in T.Parallel(BT):
                raw_beta[i] = T.if_then_else(i < count, beta[start + i, i_hv], 0)
            load_gates(g, K, start, count, i_hv, raw)
            load_rows(q, start, count, i_h, rows, 0)
            load_rows(k, start, count, i_h, rows, BC)

            sums = sum_chunk(gate, raw, at, slope, decay_scale, bias, decay)
            links = find_links(p, sums)
            factor = T.alloc_shared((2 * BT,), f32)
            normalise(p, rows, raw_beta, b_factor, factor, scale, count, threads)

            # a tile for each distance between sub-chunks
            keys = [T.alloc_shared(((NB - n) * BC, KP), io) for n in range(NB)]
            store_operands(p, sums, links, rows, factor, keys, at, k_neg, qg, kg, threads)
            both = T.alloc_shared((2 * BT, BT + 4), f32)
            multiply_pairs(rows, keys, b_factor, both, threads)
            if not p.bounded_gate:
                if needs_exact_path(sums.steepest):
                    tensors, factors = (q, k, g, dt_bias, k_neg, qg, kg, decay), (factor, b_factor)
                    exact_pairs(gate, tensors, at, factors, both, (decay_scale[0], slope[0]))
                    T.sync_threads()
            store_inverse(Pairs(both), b_factor, at, A, Aqk, threads)
            if count == 1:
                compute_lone(q, k, KP, start, i_h, factor, i_t, i_hv, Aqk)

    return fwd_prep


default = PrepConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; two products over K, an inverse."""
    BT, chunks = case.BT, sizes["NT"] * case.problem.HV
    flops = chunks * (2 * BT * BT * case.problem.K + 2 * BT**3 // 3)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written; so are guards, but where gates are bounded or channels padded.

    TileLang 0.1.15 would set six more barriers: it cannot tell that a thread's part of a tile is its own where rows are
    counted by a loop, nor what ldmatrix reads. Nor can it tell that a chunk's tokens are among all tokens: it guards
    every row twice, 200 instructions before a block has asked for its rows. Without these guards ptxas (CUDA 13.0)
    spills 16 bytes of the kernel for bounded gates. And a guard that differs between channels is no guard without them:
    what it chooses from is loaded in either case.
    """
    p = case.problem
    unguarded = {} if p.bounded_gate or p.KP > p.K else {"tl.disable_safe_memory_legalize": True}
    return {"tl.disable_thread_storage_sync": True} | unguarded


# Roundings of 2^-9 each: pairs see two operands, A the inverse's factors and itself
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
DEPENDS = ("gate", "beta", "l2norm", "direction")
STAGE = Stage(
    "fwd_prep",
    INPUTS,
    OUTPUTS,
    PrepConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
    passes=passes,
)
