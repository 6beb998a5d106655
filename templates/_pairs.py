"""Pairs of rows of fwd_prep: products of anchored operands by warpgroups, and where they belong.

Rows of two sub-chunks, 64 with q and k, are a tile of the matrix unit; half of a product is unused. Of 256 channels
there are two warpgroups, one for each half of a chunk.

    product    rows of    keys of              where it lives
    own_0      0, 1       their own            fp32 registers
    next_0     0, 1       the one before       until all are taken to both: rows of Aqk above rows of L, fp32,
    own_2      2, 3       their own            in shared memory
    next_2     2, 3       the one before
    second     2, 3       the second before
    third      3          the third before
"""

from __future__ import annotations

import tilelang.language as T

from kda_tl.templates._prep import WARPGROUP
from kda_tl.templates._rows import BC


@T.macro
def multiply_later(rows, keys, own_2, next_2, second, third):
    """Products of the later half of a chunk, from registers."""
    BT, KP = rows.shape[0] // 2, rows.shape[1]
    later = T.alloc_fragment((BT, KP), rows.dtype)
    T.copy(rows[:BT, :], later)
    T.wgmma_gemm(later, keys[0][2 * BC : 4 * BC, :], own_2, transpose_B=True, clear_accum=True)
    T.wgmma_gemm(later, keys[1][BC : 3 * BC, :], next_2, transpose_B=True, clear_accum=True)
    T.wgmma_gemm(later, keys[2][:, :], second, transpose_B=True, clear_accum=True)
    T.wgmma_gemm(later, keys[3][:, :], third, transpose_B=True, clear_accum=True)


@T.macro
def multiply_first(rows, keys, own_0, next_0):
    """Products of its first half."""
    BT = rows.shape[0] // 2
    T.wgmma_gemm(rows[BT : 2 * BT, :], keys[0][: 2 * BC, :], own_0, transpose_B=True, clear_accum=True)
    T.wgmma_gemm(rows[BT : 2 * BT, :], keys[1][:BC, :], next_0, transpose_B=True, clear_accum=True)


@T.macro
def put_pairs(tile, first, left, both):
    """Blocks of a product whose rows and keys belong together."""
    rows, columns = tile.shape
    for r, c in T.Parallel(rows, columns):
        if (r // (2 * BC) == c // BC) if columns > BC else (r >= 2 * BC):
            both[first * 2 * BC + r, left * BC + c] = tile[r, c]


@T.macro
def take_pairs(own, others, b_factor, both):
    """Products to where their pairs belong, those of a sub-chunk with itself masked, L's with beta.

    Args:
        own: of sub-chunks with themselves: the first sub-chunk of the rows, the product.
        others: of other pairs: the first sub-chunks of rows and of keys, the product.
        b_factor: beta.
        both: rows of Aqk above rows of L, sub-chunk by sub-chunk; written.
    """
    for tile in [*(tile for _, tile in own), *(tile for _, _, tile in others)]:
        T.warpgroup_fence_operand(tile, num_regs=tile.shape[1] // 2)
    for first, tile in own:
        for r, c in T.Parallel(*tile.shape):
            step_size = b_factor[(first + r // (2 * BC)) * BC + r % BC]
            above = T.if_then_else(r % BC >= c % BC, tile[r, c], 0.0)
            tile[r, c] = T.if_then_else(r % (2 * BC) >= BC, tile[r, c] * step_size, above)
    for first, tile in own:
        put_pairs(tile, first, first, both)
    for first, left, tile in others:
        put_pairs(tile, first, left, both)


@T.macro
def multiply_pairs(rows, keys, b_factor, both, threads):
    """All pairs of a chunk; arguments as of :func:`take_pairs`, and the operands."""
    BT, thread, f32 = rows.shape[0] // 2, T.get_thread_binding(), "float32"
    own_0 = T.alloc_fragment((BT, 2 * BC), f32)
    own_2 = T.alloc_fragment((BT, 2 * BC), f32)
    next_0 = T.alloc_fragment((BT, BC), f32)
    next_2 = T.alloc_fragment((BT, 2 * BC), f32)
    second = T.alloc_fragment((BT, 2 * BC), f32)
    third = T.alloc_fragment((BT, BC), f32)
    T.fence_proxy_async()
    T.sync_threads()
    if threads > WARPGROUP:  # warpgroups share what follows
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


@T.macro
def put_queries(both, thread, i_t, i_hv, Aqk, inverse):
    """Aqk to where it belongs, and zeros above the inverse's diagonal, by 64 threads."""
    HALF = Aqk.shape[3]
    pairs = T.alloc_local((8,), "float32")
    for n in T.unroll(8):
        i = n * 8 + thread // 8
        j = thread % 8 * 8
        for e in T.vectorized(8):
            pairs[e] = both[n // 2 * 2 * BC + i % BC, j + e]
        if (n >= 4) | (j < HALF):
            for e in T.vectorized(8):
                kept = T.if_then_else(n // 2 >= thread % 8 // 2, pairs[e], 0.0)
                Aqk[i_t, i_hv, i + j // HALF * HALF, j % HALF + e] = T.cast(kept, Aqk.dtype)
            if thread % 8 // 2 > n // 2:
                for e in T.vectorized(8):
                    inverse[i, j + e] = T.cast(0.0, inverse.dtype)
