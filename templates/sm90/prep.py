"""Phases of fwd_prep: what is loaded, sums, links between anchors, norms, operands, pairs of rows, the inverse.

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

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.gates import find_anchors, find_steepest, find_step, sum_gates
from kda_tl.templates.sm90.rows import BC, LATER_FIRST, NB
from kda_tl.templates.sm90.warp import find_norms, invert, substitute

WARPGROUP = 128
ROWS_AT_ONCE = 8  # of a sub-chunk, whose q and k a thread holds


@T.macro
def load_rows(x, start, count, i_head, rows, below):
    """Rows of q or k to their places, ``below`` those of q; those past the chunk's end are another sequence's, or 0."""
    BT, K, KP, own = rows.shape[0] // 2, x.shape[2], rows.shape[1], HeadRows.of(x, start, i_head)
    if K == KP:
        for n in T.unroll(BT // BC):
            first = LATER_FIRST.first_row(n) + below
            T.async_copy(own.rows[n * BC : (n + 1) * BC, :], rows[first : first + BC, :])
    else:
        for i, j in T.Parallel(BT, KP):
            rows[LATER_FIRST.first_row(i // BC) + below + i % BC, j] = T.if_then_else(
                (i < count) & (j < K), own.rows[i, j], 0
            )


@dataclass(frozen=True)
class Sums:
    """Cumsums of a chunk's gates, in registers but for what is said."""

    local: Any  # from the start of each sub-chunk
    middle: Any  # anchors, from the start of each
    total: Any  # of sub-chunks
    anchors: Any  # from the chunk's start, in shared memory
    anchor: Any  # the same
    last: Any  # of the chunk
    steepest: Any  # least exponents, in shared memory, of a gate without a bound; or None


@dataclass(frozen=True)
class Links:
    """Powers of two that take operands from anchors elsewhere, in registers."""

    ahead: Any  # to the chunk's start
    ahead_neg: Any  # the same, negative
    behind: Any  # to the chunk's end
    out: Any  # to their sub-chunk's end, of a gate without a bound
    nexts: list[Any]  # from there, or from the anchor, to the anchors of the sub-chunks that follow


@T.macro
def sum_chunk(gate, raw, at, slope, decay_scale, bias, decay):
    """Cumsums from the start of a sub-chunk, then anchors from the chunk's, and the chunk's decay."""
    KP, f32 = raw.shape[2], "float32"
    local = T.alloc_fragment((BC, NB, KP), f32)
    middle = T.alloc_fragment((NB, KP), f32)
    total = T.alloc_fragment((NB, KP), f32)
    sums = T.alloc_shared((NB, KP), f32)
    anchors = T.alloc_shared((NB, KP), f32)
    steepest = None
    sum_gates(gate, raw, at.count, slope[0], decay_scale[0], bias, local, middle, total)
    if not gate.p.bounded_gate:
        steepest = T.alloc_shared((NB,), f32)
        find_steepest(middle, total, steepest)
    before = T.alloc_fragment((NB, KP), f32)
    last = T.alloc_fragment((NB, KP), f32)
    anchor = T.alloc_fragment((NB, KP), f32)
    find_anchors(gate, middle, total, sums, before, last, anchor)
    T.copy(anchor, anchors)
    for j in T.Parallel(KP):
        decay[at.i_t, at.i_hv, j] = T.exp2(sums[0, j] + sums[1, j] + sums[2, j] + sums[3, j])
    T.sync_threads()
    return Sums(local, middle, total, anchors, anchor, last, steepest)


@T.macro
def find_links(p, x):
    """Links of a chunk's sums, of which totals and anchors are overwritten if the gate has no bound."""
    KP, io = x.anchor.shape[1], "bfloat16"
    anchor, total = x.anchor, x.total
    ahead = T.alloc_fragment((NB, KP), io)
    ahead_neg = T.alloc_fragment((NB, KP), io)
    behind = T.alloc_fragment((NB, KP), "float32")
    out = T.alloc_fragment((NB, KP), io)
    nexts = [T.alloc_fragment((NB, KP), io) for _ in range(1, NB)]
    for s, j in T.Parallel(NB, KP):
        ahead[s, j] = T.cast(T.exp2(anchor[s, j]), io)
        ahead_neg[s, j] = T.cast(-T.exp2(anchor[s, j]), io)
        behind[s, j] = T.exp2(x.last[s, j] - anchor[s, j])
    if not p.bounded_gate:  # keys leave their sub-chunk by way of its end, where they are no larger than k
        for s, j in T.Parallel(NB, KP):
            total[s, j] = T.round(total[s, j] - x.middle[s, j])
        for s, j in T.Parallel(NB, KP):
            out[s, j] = T.cast(T.exp2(total[s, j]), io)
        for s, j in T.Parallel(NB, KP):
            anchor[s, j] = anchor[s, j] + total[s, j]
    for n, into in enumerate(nexts):
        for s, j in T.Parallel(NB, KP):
            into[s, j] = T.cast(T.exp2(x.anchors[T.min(s + n + 1, NB - 1), j] - anchor[s, j]), io)
    return Links(ahead, ahead_neg, behind, out, nexts)


@T.macro
def normalise(p, rows, raw_beta, b_factor, factor, scale, count, threads):
    """What rows are multiplied with, and step sizes, once the rows have come; rows past the end become zeros."""
    BT, KP = rows.shape[0] // 2, rows.shape[1]
    thread = T.get_thread_binding()
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
        if threads > WARPGROUP:
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


@T.macro
def store_operands(p, x, links, rows, factor, keys, at, k_neg, qg, kg, threads):
    """Operands, where a thread reads and overwrites its own rows, and the three factors of a chunk, to memory.

    ``x`` are sums, whose local ones are overwritten; ``rows`` of q and k, to be multiplied with ``factor``, become
    operands, and ``keys`` others, a tile for each distance between sub-chunks.
    """
    thread, KP, io, f32 = T.get_thread_binding(), rows.shape[1], rows.dtype, "float32"
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
                above = x.local[r, s, j] - x.middle[s, j]
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
                    key_io[s, j] = key_io[s, j] * links.out[s, j]
            for n, into in enumerate(links.nexts):
                for s, j in T.Parallel(NB, KP):
                    scaled[s, j] = key_io[s, j] * into[s, j]
                for s, j in T.Parallel(NB, KP):
                    if s < NB - 1 - n:
                        keys[n + 1][s * BC + i, j] = scaled[s, j]
            for s, j in T.Parallel(NB, KP):
                kg[at.i_t, at.i_hv, s * BC + i, j] = T.cast(key[s, j] * links.behind[s, j], io)
            for s, j in T.Parallel(NB, KP):
                scaled[s, j] = query_io[s, j] * links.ahead[s, j]
            for s, j in T.Parallel(NB, KP):
                qg[at.i_t, at.i_hv, s * BC + i, j] = scaled[s, j]
            for s, j in T.Parallel(NB, KP):
                scaled[s, j] = row_io[s, j] * links.ahead_neg[s, j]
            for s, j in T.Parallel(NB, KP):
                k_neg[at.i_t, at.i_hv, s * BC + i, j] = scaled[s, j]
        for r in T.unroll(BC - ROWS_AT_ONCE):  # a loop half as long, for the instruction cache
            for s, j in T.Parallel(NB, KP):
                shrink[s, j] = x.local[r + ROWS_AT_ONCE, s, j]
            for s, j in T.Parallel(NB, KP):
                x.local[r, s, j] = shrink[s, j]


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
def store_pairs(tile, first, left, both):
    """Blocks of a product whose rows and keys belong together."""
    rows, columns = tile.shape
    for r, c in T.Parallel(rows, columns):
        if (r // (2 * BC) == c // BC) if columns > BC else (r >= 2 * BC):
            both[first * 2 * BC + r, left * BC + c] = tile[r, c]


@T.macro
def compute_pairs(own, others, b_factor, both):
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
        store_pairs(tile, first, first, both)
    for first, left, tile in others:
        store_pairs(tile, first, left, both)


@T.macro
def multiply_pairs(rows, keys, b_factor, both, threads):
    """All pairs of a chunk; arguments as of :func:`compute_pairs`, and the operands."""
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
            compute_pairs([(2, own_2)], [(2, 1, next_2), (2, 0, second), (2, 0, third)], b_factor, both)
        else:
            compute_pairs([(0, own_0)], [(0, 0, next_0)], b_factor, both)
    else:
        multiply_later(rows, keys, own_2, next_2, second, third)
        multiply_first(rows, keys, own_0, next_0)
        T.wait_wgmma(0)
        T.sync_threads()
        nearest = [(0, own_0), (2, own_2)]
        compute_pairs(nearest, [(0, 0, next_0), (2, 1, next_2), (2, 0, second), (2, 0, third)], b_factor, both)
    T.sync_threads()


@T.macro
def store_queries(both, thread, i_t, i_hv, Aqk, inverse):
    """Aqk to where it belongs, and zeros above the inverse's diagonal, by 64 threads."""
    HALF = Aqk.shape[3]
    pairs = T.alloc_local((8,), "float32")
    for n in T.unroll(8):
        i = n * 8 + thread // 8
        j = thread % 8 * 8
        for e in T.vectorized(8):
            pairs[e] = both.tile[n // 2 * 2 * BC + i % BC, j + e]
        if (n >= 4) | (j < HALF):
            for e in T.vectorized(8):
                kept = T.if_then_else(n // 2 >= thread % 8 // 2, pairs[e], 0.0)
                Aqk[i_t, i_hv, i + j // HALF * HALF, j % HALF + e] = T.cast(kept, Aqk.dtype)
            if thread % 8 // 2 > n // 2:
                for e in T.vectorized(8):
                    inverse[i, j + e] = T.cast(0.0, inverse.dtype)


@T.macro
def store_inverse(both, b_factor, at, A, Aqk, threads):
    """Aqk and A of a chunk from its pairs; these have been written by all threads."""
    BT, io, thread = b_factor.shape[0], A.dtype, T.get_thread_binding()
    inverse = T.alloc_shared((BT, BT), io)
    block_rows = T.alloc_shared((BT, BC + 8), io)
    block_columns = T.alloc_shared((BT, BC + 8), io)
    if thread < BT:
        substitute(both, b_factor, block_rows, block_columns, inverse, thread)
    elif threads == WARPGROUP or thread < WARPGROUP:
        store_queries(both, thread - BT, at.i_t, at.i_hv, Aqk, inverse)
    T.sync_threads()
    invert(both, b_factor, block_rows, block_columns, inverse, threads)
    T.sync_threads()
    LOWER, HALF = A.shape[2:]
    for i, j in T.Parallel(LOWER, HALF):
        A[at.i_t, at.i_hv, i, j] = inverse[i - i // BT * HALF, i // BT * HALF + j]
