"""Prep of Gated DeltaNet: fwd_prep's factors for a gate that all channels of a value head share.

    k_neg = -k 2^G      qg = scale q 2^G      kg = k 2^(G_last - G)      decay = 2^G_last
    Aqk[i, j] = scale 2^(G_i - G_j) <q_i, k_j>   j <= i
    A = (I + L)^-1 diag(beta),   L[i, j] = beta_i 2^(G_i - G_j) <k_i, k_j>   j < i

The gate is a number a token, so pairs are products of the caller's very rows, and it multiplies them afterwards, with
norms and step sizes: no operand is rounded, nothing is anchored, and since G falls no power of two is above 1. Norms
and the inverse are fwd_prep's.

    phase            warps of 4                               barrier before it
    load_rows        q and k async, by all
    sum_head_gates   two: a thread a token, from all before
    await_rows       four: norms of their rows, by mma        q and k have come
    issue_pairs      all, by wgmma                            norms written
    store_factors    all
    scale_pairs      all                                      rows have been read
    write_pairs      each its 16 rows, no later keys
    invert_block     each its block on the diagonal           G has been read
    store_queries    each its rows: Aqk to memory
    join_blocks      all, by mma                              blocks inverted
    store_lower      all: A to memory                         inverse written

    tensor             exponent               dtype     where it lives
    G, up, down        from the chunk's ends  fp32      shared memory
    rows: q, k         none                   bf16      shared memory, as they came
    queries: Aqk       none                   bf16      shared memory, in the place of rows
    keys: L            none                   fp32      the same, blocks on the diagonal
    keys: L            none                   bf16      the same, blocks below it
    inverse            none                   bf16      shared memory

Both products of a token with an earlier one lie in the same place of one thread, so their power is computed once. What
a warp writes and inverts is its own, see blocks: it waits for others where their blocks are joined.
Source: Gated Delta Networks, arXiv:2412.06464, section 3.3; D_ij = 2^(G_i - G_j) is taken out of the products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.templates.common.heads import HeadRows, Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90 import fwd_prep
from kda_tl.templates.sm90.blocks import PAD, STORES, Blocks, gather_near, layout_product, put_far, put_near
from kda_tl.templates.sm90.factors import KEYS, QUERIES, Factors, await_rows, find_key_norms
from kda_tl.templates.sm90.fwd_prep import DEPENDS, RESERVED, TOLERANCE, WIDTHS
from kda_tl.templates.sm90.gates import Chunk, Gate, find_step, sum_head_gates
from kda_tl.templates.sm90.gdn_gradients import issue_rows
from kda_tl.templates.sm90.hopper import FACTORS, GIVEN, SCALARS, TABLES, HopperConfig, count_bytes
from kda_tl.templates.sm90.inverse import Inverse, begin_inverse, finish_inverse, invert_block
from kda_tl.templates.sm90.prep import WARPGROUP
from kda_tl.templates.sm90.rows import BC, NB

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
        """Rows, or in their place pairs and the inverse, and numbers of rows."""
        BT = case.BT
        pairs = BT * (BT + PAD) * 2 + Blocks.size(BT)
        return max(2 * BT * case.problem.KP * 2, pairs + Inverse.size(BT)) + 9 * BT * 4


@dataclass(frozen=True)
class Part:
    """Numbers of a chunk's tokens, in one tensor with others.

    By themselves they would not outlive their last use, while other warps still read them: TileLang 0.1.15 then gives
    their place to another tensor, in a loop's body too, though the body's next turn reads them.
    """

    tile: Any
    first: Any  # where they begin
    tokens: int

    @property
    def shape(self) -> tuple[int]:
        """Tokens."""
        return (self.tokens,)

    def __getitem__(self, i: Any) -> Any:
        return self.tile[self.first + i]


@T.macro
def issue_pairs(rows, of):
    """Products of the rows ``of`` queries, keys or both with halves of the keys, on their way; None of others.

    ``rows`` may hold both, or keys alone.
    """
    BT, last = rows.shape[1], rows.shape[0] - 1
    HALF = BT // 2
    tiles = [[T.alloc_fragment((BT, HALF), "float32") for _ in range(2)] if m in of else None for m in (QUERIES, KEYS)]
    for m in of:
        T.annotate_layout(layout_product(*tiles[m]))
        for h in list(range(2)):
            T.wgmma_gemm(
                rows[m if m == QUERIES else last, :, :],
                rows[last, h * HALF : (h + 1) * HALF, :],
                tiles[m][h],
                transpose_B=True,
                clear_accum=True,
                policy=T.BY_ROWS,
            )
    return tiles


@T.macro
def await_pairs(tiles, factors):
    """Until products of rows are there, with norms of keys if these are not early, and rows have been read."""
    T.wait_wgmma(0)
    for m in list(range(2)):
        if tiles[m] is not None:
            for h in list(range(2)):
                T.warpgroup_fence_operand(tiles[m][h], num_regs=tiles[m][h].shape[1] // 2)
    if factors.norms and not factors.early:
        find_key_norms(tiles[KEYS], factors)
    T.sync_threads()


@T.macro
def scale_half(pairs, first, of_row, factors):
    """Norms and the scale of half of the keys, from ``first`` on; ``of_row`` gives a row's."""
    for i, j in T.Parallel(*pairs.shape):
        pairs[i, j] = pairs[i, j] * (of_row(i) * factors.of_key(j + first))


@T.macro
def scale_pairs(tiles, factors):
    """What value heads that share rows share of their pairs, but for the half that write_pairs passes over."""
    half, warp = T.alloc_var("int32"), T.alloc_var("int32")
    half = T.get_thread_binding() // (WARPGROUP // 2)
    warp = T.get_thread_binding() // 32
    for m in list(range(2)):
        if tiles[m] is not None:
            of_row = (factors.of_query, factors.of_key)[m]
            if not factors.known:
                scale_half(tiles[m][0], 0, of_row, factors)
                if half > 0:
                    scale_half(tiles[m][1], tiles[m][1].shape[1], of_row, factors)
            gather_near(tiles[m], warp)


@T.macro
def write_pairs(tiles, G, b_factor, queries, keys):
    """Aqk, rounded, and L of a value head, from scaled products, which stay.

    Later keys of earlier rows are never read, nor what of L lies above the diagonal.
    """
    of_q, of_k = tiles
    steps = T.alloc_local((2,), "float32")
    warp = T.alloc_var("int32")
    warp = T.get_thread_binding() // 32
    for h in T.unroll(2):
        steps[h] = b_factor[warp * BC + 8 * h + T.get_thread_binding() % 32 // 4]
    put_near(of_q, of_k, warp, G, steps, queries, keys)
    for m in list(range(NB - 1)):
        for _ in T.serial(T.min(warp // (m + 1), 1)):  # a condition, but TileLang 0.1.15 parts bodies of those
            put_far(of_q, of_k, m, warp, G, steps, queries, keys)


@T.macro
def store_factors(rows, G, factors, at, written):
    """The factors of a chunk's rows, to memory."""
    BT, KP, io, f32 = G.shape[0], rows.shape[2], rows.dtype, "float32"
    last = G[BT - 1]
    for i, j in T.Parallel(BT, KP):
        query = factors.of_query(i) * T.exp2(G[i])
        written.qg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[0, i, j], f32) * query, io)
    for i, j in T.Parallel(BT, KP):
        key = factors.of_key(i) * -T.exp2(G[i])
        written.k_neg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[1, i, j], f32) * key, io)
    for i, j in T.Parallel(BT, KP):
        key = factors.of_key(i) * T.exp2(last - G[i])
        written.kg[at.i_t, at.i_hv, i, j] = T.cast(T.cast(rows[1, i, j], f32) * key, io)
    for j in T.Parallel(KP):
        written.decay[at.i_t, at.i_hv, j] = T.exp2(last)


@T.macro
def load_rows(x, start, count, i_head, rows, n):
    """A chunk's rows on their way to tile n; 0 past the end and in channels that pad them."""
    if x.shape[2] == rows.shape[2]:
        issue_rows(x, start, count, i_head, rows, n)
    else:
        own = HeadRows.of(x, start, i_head)
        for i, j in T.Parallel(*rows.shape[1:]):
            rows[n, i, j] = T.if_then_else((i < count) & (j < x.shape[2]), own.rows[i, j], 0)


@T.macro
def alloc_pairs(BT, of):
    """Aqk, if it is made, padded so that its tokens lie in different banks, and L."""
    queries = T.alloc_shared((BT, BT + PAD), "bfloat16") if QUERIES in of else None
    return queries, Blocks.alloc(BT)


@T.macro
def store_queries(queries, at, Aqk):
    """Aqk, by each warp its own rows: four lanes take half of a row. Neighbouring rows would share banks, see
    store_lower.
    """
    HALF = Aqk.shape[3]
    warp, lane = T.get_thread_binding() // 32, T.get_thread_binding() % 32
    i = T.alloc_var("int32")
    i = lane // 4 % 2 * 4 + lane // 8
    j = lane % 4 * 8
    T.sync_warp()
    for h in T.serial(1 + warp // (NB // 2)):  # earlier rows have no later keys
        for n in T.unroll(2):
            row = warp * BC + 8 * n + i
            for e in T.vectorized(8):
                Aqk[at.i_t, at.i_hv, h * HALF + row, j + e] = queries[row, h * HALF + j + e]


@T.macro
def prepare(case, x, at, scalars, store, written):
    """A kernel's body. ``x`` are the tensors that are given, ``scalars`` the scale and the gate's lower bound.

    ``store`` is a macro that writes to some of ``written`` what is known of rows when their norms and gates are.
    """
    p, BT, KP, f32 = case.problem, case.BT, case.problem.KP, "float32"
    scale, lower_bound = scalars
    rows = T.alloc_shared((2, BT, KP), "bfloat16")
    load_rows(x.q, at.start, at.count, at.i_h, rows, 0)
    load_rows(x.k, at.start, at.count, at.i_h, rows, 1)
    raw_beta = T.alloc_fragment((BT,), x.beta.dtype)
    for i in T.Parallel(BT):
        raw_beta[i] = T.if_then_else(i < at.count, x.beta[at.start + i, at.i_hv], 0)
    half = T.alloc_shared((1,), f32)
    G = T.alloc_shared((BT,), f32)
    sum_head_gates(Gate(p), x.g, x.A_log, x.dt_bias, lower_bound, at, half, G)
    numbers = T.alloc_shared((3 * BT,), f32)
    factors, b_factor = Factors(numbers, scale, p.l2norm), Part(numbers, 2 * BT, BT)
    for i in T.Parallel(BT):
        numbers[b_factor.first + i] = T.if_then_else(i < at.count, find_step(p, raw_beta[i]), 0.0)
    await_rows(rows, factors)
    tiles = issue_pairs(rows, (QUERIES, KEYS))
    store(rows, G, factors, at, written)
    queries, keys = alloc_pairs(BT, (QUERIES, KEYS))  # in the place of rows
    await_pairs(tiles, factors)
    scale_pairs(tiles, factors)
    write_pairs(tiles, G, b_factor, queries, keys)
    T.sync_threads()  # the inverse may come where G is read
    inverse = begin_inverse(BT, written.A.dtype)
    invert_block(keys, b_factor, inverse, T.get_thread_binding() // 32)
    store_queries(queries, at, written.Aqk)
    T.sync_threads()
    keys.keep()
    finish_inverse(keys, b_factor, inverse, at, written.A)


def build(case: Case, config: GdnPrepConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    heads = Heads.of(case.problem)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_gdn_prep(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, Aqk, k_neg, qg, kg, decay, scale, lower_bound):
        with T.Kernel(NT * heads.HV, threads=WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            i_t, i_hv, _ = split_block(i_block, (NT, heads.HV), backwards=True)
            at = Chunk(i_t, i_hv, heads.of_keys(i_hv), chunk_tokens[i_t, 0], chunk_tokens[i_t, 1])
            given = SimpleNamespace(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
            written = SimpleNamespace(A=A, Aqk=Aqk, k_neg=k_neg, qg=qg, kg=kg, decay=decay)
            prepare(case, given, at, (scale, lower_bound), store_factors, written)

    return fwd_gdn_prep


default = GdnPrepConfig.default


def prepare_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str], products: int = 2) -> Cost:
    """Every tensor once; so many triangular products over K, an inverse."""
    BT, chunks = case.BT, sizes["NT"] * case.problem.HV
    flops = chunks * (products * BT * BT * case.problem.K + 2 * BT**3 // 3)
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """See :func:`prepare_cost`."""
    return prepare_cost(case, sizes, INPUTS | OUTPUTS)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written, see fwd_prep. TileLang 0.1.15 sees no write of store_block."""
    return {"tl.disable_thread_storage_sync": True, "tl.disable_buffer_init_check": True}


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
