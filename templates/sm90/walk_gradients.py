"""Gradients of a chunk in bwd_gdn_walk, whose dX and gradient of the state are in shared memory."""

from __future__ import annotations

from typing import Any

from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.gdn_gradients import (
    GROUPS,
    ROWS_AT_ONCE,
    dot,
    round_rows,
    store_beta,
    store_gate,
    store_rows,
    take_norms,
    wait_for,
)
from kda_tl.templates.sm90.powers import END, GATE, KEY_NORM, LAST, QUERY, QUERY_NORM, START
from kda_tl.templates.sm90.recurrence import WARPGROUP
from kda_tl.templates.sm90.walk import BARRIER

CONSUMERS = GROUPS * WARPGROUP


# Sums of two rounded numbers are the same in either order, and zeros do not change the first
ADDS = r"""
static __device__ __forceinline__ void add_pairs(void* to, const void* from) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  asm volatile("red.global.add.noftz.v4.bf16x2 [%0], {%1, %2, %3, %4};"
               :: "l"(__cvta_generic_to_global(to)), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
"""


def norm_of(powers: Any, slot: Any, m: int, unscale: Any) -> Any:
    """The norm of a token's row, as a function of it: that of q comes with scale."""
    return lambda i: powers[slot, m, i] * unscale


@T.macro
def meet():
    """All threads that multiply."""
    T.sync_threads(BARRIER, CONSUMERS)


@T.macro
def add_rows(rows, slot, at, to):
    """Rows of a chunk from shared memory to those of the heads that two value heads share, which began as zeros."""
    BT, K = rows.shape[1:]
    thread = T.get_thread_binding()
    for n in T.unroll(BT * K // 8 // CONSUMERS):
        i, c = (n * CONSUMERS + thread) // (K // 8), (n * CONSUMERS + thread) % (K // 8) * 8
        if i < at.count:
            T.call_extern(
                "handle", "add_pairs", T.address_of(to[at.start + i, at.i_h, c]), T.address_of(rows[slot, i, c])
            )


@T.macro
def store_dx(value_io, dx):
    """dX, whose transpose is in registers, to shared memory."""
    for i, j in T.Parallel(*value_io.shape):
        dx[j, i] = value_io[i, j]


@T.macro
def store_rest(value, value_io, rest):
    """What dX loses by its rounding."""
    for i, j in T.Parallel(*value.shape):
        rest[j, i] = T.cast(value[i, j] - T.cast(value_io[i, j], "float32"), rest.dtype)


@T.macro
def dot_tiles(tiles):
    """The product of a chunk's state with its gradient, in parts."""
    V, K = tiles.state.shape
    product = T.alloc_fragment((ROWS_AT_ONCE, K), "float32")
    total = T.alloc_fragment((ROWS_AT_ONCE,), "float32")
    T.clear(product)
    for n in T.serial(V // ROWS_AT_ONCE):
        for s, j in T.Parallel(ROWS_AT_ONCE, K):
            own = T.cast(tiles.state[n * ROWS_AT_ONCE + s, j], "float32")
            product[s, j] = product[s, j] + own * T.cast(tiles.dstate[n * ROWS_AT_ONCE + s, j], "float32")
    T.reduce_sum(product, total, dim=1)
    for s in T.Parallel(ROWS_AT_ONCE):
        tiles.parts[s] = total[s]


@T.macro
def compute_pairs(of_q, of_k, tiles, slot):
    """P and R, rounded, to shared memory, what P loses by that to dX's, and what dX has of its own value."""
    BT, powers, pairs = of_q.shape[0], tiles.powers, tiles.pairs
    for i, j in T.Parallel(BT, BT):
        if i == j:
            tiles.db[i] = of_k[i, j]
    for i, j in T.Parallel(BT, BT):
        decay = T.if_then_else(i >= j, T.exp2(powers[slot, GATE, i] - powers[slot, GATE, j]), 0.0)
        of_q[i, j] = of_q[i, j] * (powers[slot, QUERY_NORM, i] * powers[slot, KEY_NORM, j] * decay)
        seen = T.if_then_else(i > j, decay, 0.0)
        of_k[i, j] = of_k[i, j] * (-powers[slot, KEY_NORM, i] * powers[slot, KEY_NORM, j] * seen)
    for i, j in T.Parallel(BT, BT):
        pairs[i, j] = T.cast(of_q[i, j], pairs.dtype)
    for i, j in T.Parallel(BT, BT):
        tiles.dx[i, j] = T.cast(of_q[i, j] - T.cast(T.cast(of_q[i, j], pairs.dtype), "float32"), pairs.dtype)
    for i, j in T.Parallel(BT, BT):
        pairs[i, BT + j] = T.cast(of_k[i, j], pairs.dtype)


@T.macro
def finish_chunk(case, x, tiles, rings, slot, own, turn, at, scalars):
    """Gradients of a chunk whose dX is in shared memory."""
    p, BT, f32 = case.problem, case.BT, "float32"
    K, powers = p.K, tiles.powers
    scale, lower_bound = scalars
    of_q = T.alloc_fragment((BT, K), f32)
    of_row = T.alloc_fragment((BT, K), f32)
    of_key = T.alloc_fragment((BT, K), f32)
    pair_q = T.alloc_fragment((BT, BT), f32)
    pair_k = T.alloc_fragment((BT, BT), f32)
    rings.states.wait(own, turn)
    values = tiles.values[0, :, :]
    T.wgmma_gemm(tiles.x[slot, :, :], values, pair_q, transpose_B=True, clear_accum=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.dx, values, pair_k, transpose_B=True, clear_accum=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.pairs, values, pair_k, transpose_B=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.x[slot, :, :], tiles.state, of_q, clear_accum=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.dx, tiles.state, of_row, clear_accum=True, policy=T.BY_COLUMNS)
    gradient = HeadRows.of(x.dv, at.start, at.i_hv)
    for i, c in T.Parallel(*tiles.dx.shape):
        if i < at.count:
            gradient.rows[i, c] = tiles.dx[i, c]
    dot_tiles(tiles)
    wait_for(pair_q, pair_k, of_q, of_row)
    meet()  # the other warpgroup's products have read dX and its rest
    compute_pairs(pair_q, pair_k, tiles, slot)
    for i, c in T.Parallel(BT, K):
        of_q[i, c] = of_q[i, c] * powers[slot, QUERY, i]
    for i, c in T.Parallel(BT, K):
        of_row[i, c] = of_row[i, c] * -powers[slot, START, i]
    T.fence_proxy_async()
    meet()
    T.wgmma_gemm(tiles.values[0, :, :], tiles.dstate, of_key, clear_accum=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.pairs[:, 0:BT], tiles.k[slot, :, :], of_q, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.dx[:, 0:BT], tiles.k[slot, :, :], of_q, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.pairs[:, BT : 2 * BT], tiles.k[slot, :, :], of_row, policy=T.BY_COLUMNS)
    store_beta(p, x.beta, x.dbeta, tiles.db, at)
    wait_for(of_q, of_row, of_key)
    rings.states.release(own)
    for i, c in T.Parallel(BT, K):
        of_key[i, c] = of_key[i, c] * powers[slot, END, i]
    dot(tiles.k, slot, of_key, tiles.sums, 3)
    T.wgmma_gemm(tiles.pairs[:, 0:BT], tiles.q[0, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.dx[:, 0:BT], tiles.q[0, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(tiles.pairs[:, BT : 2 * BT], tiles.k[slot, :, :], of_key, transpose_A=True, policy=T.BY_COLUMNS)
    dot(tiles.q.tile, 0, of_q, tiles.sums, 0)
    dot(tiles.k, slot, of_row, tiles.sums, 1)
    wait_for(of_key)
    dot(tiles.k, slot, of_key, tiles.sums, 2)
    for i, c in T.Parallel(BT, K):
        of_key[i, c] = of_key[i, c] + of_row[i, c]
    meet()
    unscale = T.if_then_else(scale == 0.0, 0.0, 1.0 / scale)
    take_norms(p, tiles.q.tile, 0, of_q, tiles.sums, 0, norm_of(powers, slot, QUERY_NORM, unscale))
    round_rows(of_q, tiles.q.tile, 0)
    take_norms(p, tiles.k, slot, of_key, tiles.sums, 1, norm_of(powers, slot, KEY_NORM, 1.0))
    round_rows(of_key, tiles.k, slot)
    store_gate(p, x, lower_bound, at, tiles.sums, tiles.parts, powers[slot, LAST, 0])
    meet()
    if p.paired:
        add_rows(tiles.q.tile, 0, at, x.dq)
        add_rows(tiles.k, slot, at, x.dk)
    else:
        store_rows(tiles.q.tile, 0, at, x.dq)
        store_rows(tiles.k, slot, at, x.dk)
    T.fence_proxy_async()
