"""Prep of Gated DeltaNet: fwd_prep's factors for a gate that all channels of a value head share.

    k_neg = -k 2^G      qg = scale q 2^G      kg = k 2^(G_last - G)      decay = 2^G_last
    Aqk[i, j] = scale 2^(G_i - G_j) <q_i, k_j>   j <= i
    A = (I + L)^-1 diag(beta),   L[i, j] = beta_i 2^(G_i - G_j) <k_i, k_j>   j < i

The gate is a number a token, so pairs are products of the caller's very rows, and it multiplies them afterwards, with
norms and step sizes: no operand is rounded, nothing is anchored, and since G falls no power of two is above 1. Norms,
the inverse and the order of rows are fwd_prep's.

    phase            warps of 4                               barrier before it
    load_rows        q and k async, by all
    sum_head_gates   two: a thread a token, from all before
    normalise        four: a sub-chunk's rows each, by mma    q and k have come
    issue_pairs      all, by wgmma                            norms written
    store_factors    all
    store_pairs      all                                      rows have been read
    substitute       two: a thread a column                   pairs written
    store_queries    two more: Aqk to memory                    the same
    invert           four, by mma                             blocks written
    the end          all: A to memory                         inverse written

    tensor             exponent               dtype   where it lives
    G, up, down        from the chunk's ends  fp32    shared memory
    rows: q, k         none                   bf16    shared memory, as they came, LATER_FIRST
    both: Aqk above L  none                   fp32    shared memory, BY_SUB_CHUNK, in the place of rows
    inverse            none                   bf16    shared memory
Source: Gated Delta Networks, arXiv:2412.06464, section 3.3; D_ij = 2^(G_i - G_j) is taken out of the products.
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
from kda_tl.templates.sm90 import fwd_prep
from kda_tl.templates.sm90.fwd_prep import DEPENDS, RESERVED, TOLERANCE, WIDTHS
from kda_tl.templates.sm90.gates import Chunk, Gate, sum_head_gates
from kda_tl.templates.sm90.hopper import FACTORS, GIVEN, SCALARS, TABLES, HopperConfig, count_bytes
from kda_tl.templates.sm90.prep import WARPGROUP, load_rows, normalise, store_inverse
from kda_tl.templates.sm90.rows import BC, BY_SUB_CHUNK, LATER_FIRST, NB

INPUTS = {**GIVEN, "chunk_tokens": TABLES["chunk_tokens"]}
OUTPUTS = FACTORS


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: fwd_prep's, which takes any gate. A test holds the formula above against it."""
    return fwd_prep.reference(case, x)


@dataclass(frozen=True, kw_only=True)
class GdnPrepConfig(HopperConfig):
    """blocks: that share a multiprocessor's registers and shared memory."""

    blocks: int = tunable(3, 1, 2, 3, 4)

    def reject(self, case: Case) -> str | None:
        """Hopper, one gate a head, bf16, and shared memory."""
        p = case.problem
        if reason := super().reject(case):
            return reason
        if (case.BT, case.BC) != (64, 16):
            return f"it is written for BT=64, BC=16, not BT={case.BT}, BC={case.BC}"
        if p.dtype != "bf16":
            return f"{p.dtype} operands are refused: only bf16 holds keys that are not normalised"
        if not p.scalar_gate or p.rank > 1:
            return "it takes one gate a head and one row a token"
        if p.KP not in WIDTHS:
            return f"K={p.K} is not {' or '.join(map(str, WIDTHS))} channels, which its tiles are"
        needed, shared = self.blocks * (self.smem_bytes(case) + RESERVED), case.device.smem_bytes + RESERVED
        if needed > shared:
            return f"blocks={self.blocks} with K={p.K} need {needed} bytes of {shared} shared"
        return None

    def smem_bytes(self, case: Case) -> int:
        """Rows, in whose place the inverse is made, pairs, and numbers of rows."""
        BT = case.BT
        return max(2 * BT * case.problem.KP, 3 * BT * BT) * 2 + 2 * BT * (BT + 4) * 4 + 9 * BT * 4


@T.macro
def issue_pairs(rows, first):
    """Products of half a chunk, from sub-chunk ``first`` on, on their way: rows of q and k with keys, by sub-chunk."""
    BT = rows.shape[0] // 2
    top = LATER_FIRST.first_row(first)
    tiles = [T.alloc_fragment((BT, BC), "float32") for _ in range(first + 2)]
    for a, tile in enumerate(tiles):
        below = LATER_FIRST.first_row(a) + BC
        T.wgmma_gemm(rows[top : top + BT, :], rows[below : below + BC, :], tile, transpose_B=True, clear_accum=True)
    return tiles


@T.macro
def store_pairs(tiles, first, G, factor, b_factor, both):
    """Rows of Aqk and of L from such products."""
    BT = G.shape[0]
    for a, tile in enumerate(tiles):
        for r, c in T.Parallel(BT, BC):
            i, j, k_row = first * BC + BY_SUB_CHUNK.token_of(r), a * BC + c, BY_SUB_CHUNK.is_key(r)
            decay = T.if_then_else(i - j >= k_row, T.exp2(G[i] - G[j]), 0.0)
            step = T.if_then_else((k_row == 1) & (i // BC == a), b_factor[i], 1.0)  # of others invert takes care
            norms = factor[first * 2 * BC + r] * factor[BY_SUB_CHUNK.row_of(j) + BC]
            both[first * 2 * BC + r, j] = tile[r, c] * norms * (decay * step)


@T.macro
def store_factors(rows, G, factor, at, written):
    """The factors of a chunk's rows, to memory."""
    BT, KP, io, f32 = G.shape[0], rows.shape[1], rows.dtype, "float32"
    last = G[BT - 1]
    for i, j in T.Parallel(BT, KP):
        query = factor[BY_SUB_CHUNK.row_of(i)] * T.exp2(G[i])
        written.qg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[LATER_FIRST.row_of(i), j], f32) * query, io)
    for i, j in T.Parallel(BT, KP):
        key = factor[BY_SUB_CHUNK.row_of(i) + BC] * -T.exp2(G[i])
        written.k_neg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[LATER_FIRST.row_of(i) + BC, j], f32) * key, io)
    for i, j in T.Parallel(BT, KP):
        key = factor[BY_SUB_CHUNK.row_of(i) + BC] * T.exp2(last - G[i])
        written.kg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[LATER_FIRST.row_of(i) + BC, j], f32) * key, io)
    for j in T.Parallel(KP):
        written.decay[at.i_t, at.i_hv, j] = T.exp2(last)


@T.macro
def prepare(case, x, at, scalars, store, written):
    """A kernel's body. ``x`` are the tensors that are given, ``scalars`` the scale and the gate's lower bound.

    ``store`` is a macro that writes what is known of rows when their norms and gates are, to some of ``written``.
    """
    p, BT, KP, f32 = case.problem, case.BT, case.problem.KP, "float32"
    scale, lower_bound = scalars
    rows = T.alloc_shared((2 * BT, KP), "bfloat16")  # in the order LATER_FIRST
    load_rows(x.q, at.start, at.count, at.i_h, rows, 0)
    load_rows(x.k, at.start, at.count, at.i_h, rows, BC)
    raw_beta = T.alloc_fragment((BT,), x.beta.dtype)
    for i in T.Parallel(BT):
        raw_beta[i] = T.if_then_else(i < at.count, x.beta[at.start + i, at.i_hv], 0)
    half = T.alloc_shared((1,), f32)
    G = T.alloc_shared((BT,), f32)
    sum_head_gates(Gate(p), x.g, x.A_log, x.dt_bias, lower_bound, at, half, G)
    factor = T.alloc_shared((2 * BT,), f32)
    b_factor = T.alloc_shared((BT,), f32)
    normalise(p, rows, raw_beta, b_factor, factor, scale, at.count, WARPGROUP)
    T.fence_proxy_async()
    T.sync_threads()

    halves = [(first, issue_pairs(rows, first)) for first in (0, NB // 2)]
    store(rows, G, factor, at, written)
    T.wait_wgmma(0)
    for _, tiles in halves:
        for tile in tiles:
            T.warpgroup_fence_operand(tile, num_regs=BC // 2)
    T.sync_threads()
    both = T.alloc_shared((2 * BT, BT + 4), f32)  # in the place of rows
    for first, tiles in halves:
        store_pairs(tiles, first, G, factor, b_factor, both)
    T.sync_threads()
    store_inverse(both, b_factor, at, written.A, written.Aqk, WARPGROUP)


def build(case: Case, config: GdnPrepConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    heads = Heads.of(case.problem)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_gdn_prep(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, Aqk, k_neg, qg, kg, decay, scale, lower_bound):
        with T.Kernel(NT * heads.HV, threads=WARPGROUP) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            i_t, i_hv, _ = split_block(i_block, (NT, heads.HV), backwards=True)
            at = Chunk(i_t, i_hv, heads.of_keys(i_hv), chunk_tokens[i_t, 0], chunk_tokens[i_t, 1])
            given = SimpleNamespace(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
            written = SimpleNamespace(A=A, Aqk=Aqk, k_neg=k_neg, qg=qg, kg=kg, decay=decay)
            prepare(case, given, at, (scale, lower_bound), store_factors, written)

    return fwd_gdn_prep


default = GdnPrepConfig.default


def prepare_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> Cost:
    """Every tensor once; two products over K, an inverse."""
    BT, chunks = case.BT, sizes["NT"] * case.problem.HV
    flops = chunks * (2 * BT * BT * case.problem.K + 2 * BT**3 // 3)
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """See :func:`prepare_cost`."""
    return prepare_cost(case, sizes, INPUTS | OUTPUTS)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written, see fwd_prep."""
    return {"tl.disable_thread_storage_sync": True}


STAGE = Stage(
    "fwd_gdn_prep",
    INPUTS,
    OUTPUTS,
    GdnPrepConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
    passes=passes,
)
