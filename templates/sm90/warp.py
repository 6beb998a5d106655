"""What single warps do in their registers: sums, and as products norms of rows and the inverse."""

from __future__ import annotations

from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import L2NORM_EPS


def multiply(left: Any, right: Any, sums: Any, first: Any, sums_first: Any) -> Any:
    """sums[sums_first:] += left right[first:]: 16 x 16 by 16 x 8 in the registers of a warp."""
    types = ("float32", "m16n8k16", "row", "col", "bf16", "bf16", "fp32")
    return T.ptx_mma(*types, left.data, 0, right.data, first, sums.data, sums_first, T.bool(False))


@T.macro
def sum_before(x):
    """x[0] summed over the threads of a warp from the first to each."""
    lane, other = T.get_thread_binding() % 32, T.alloc_local((1,), "float32")
    for n in T.unroll(5):
        other[0] = T.shfl_up(x[0], 1 << n)
        x[0] = x[0] + T.if_then_else(lane >= 1 << n, other[0], 0.0)


@T.macro
def sum_following(x):
    """x[0] summed over the threads of a warp from each to the last."""
    lane, other = T.get_thread_binding() % 32, T.alloc_local((1,), "float32")
    for n in T.unroll(5):
        other[0] = T.shfl_down(x[0], 1 << n)
        x[0] = x[0] + T.if_then_else(lane + (1 << n) < 32, other[0], 0.0)


@T.macro
def sum_warp(x, m):
    """x[m] summed over the threads of a warp."""
    for n in T.unroll(5):
        x[m] = x[m] + T.shfl_xor(x[m], 1 << n)


@T.macro
def _take_left(tile, first, column, left):
    """16 x 16 of a tile in shared memory, whose rows are multiples of 16 bytes, as a left operand."""
    lane = T.get_thread_binding() % 32
    place = tile[first + lane % 16, column + lane // 16 * 8]
    T.ptx_ldmatrix(T.bool(False), 4, T.access_ptr(place, "r", extent=8), T.access_ptr(left[0], "w", extent=8))


@T.macro
def _take_either(choice, one, first, other, second, g, t, left):
    """16 rows of one tile, from ``first`` on, or of another, from ``second`` on, as a left operand."""
    for m in T.unroll(4):
        for e in T.vectorized(2):
            left[2 * m + e] = T.if_then_else(
                choice,
                one[first + m % 2 * 8 + g, m // 2 * 8 + t + e],
                other[second + m % 2 * 8 + g, m // 2 * 8 + t + e],
            )


@T.macro
def _take_right(both, row, column, factor, two, right):
    """L^T as a right operand: of a row of L 16 columns."""
    for n in T.unroll(2):
        for e in T.vectorized(2):
            two[e] = both.of_key(row, column + 8 * n + e)
        for e in T.unroll(2):
            two[e] = two[e] * factor
        for e in T.vectorized(2):
            right[2 * n + e] = T.cast(two[e], right.dtype)


@T.macro
def square_rows(rows, first, sums, at):
    """Adds products of 16 rows of a tile with each other, in the matrix unit's order: of columns 0 to 7 to sums[at:],
    and behind them of the others. Squares of rows are the diagonal.
    """
    left = T.alloc_local((8,), rows.dtype)
    right = T.alloc_local((4,), rows.dtype)
    for c in T.unroll(rows.shape[1] // 16):
        _take_left(rows, first, c * 16, left)
        for n in T.unroll(2):
            for m in T.unroll(2):
                for e in T.vectorized(2):
                    right[2 * m + e] = left[4 * m + 2 * n + e]
            multiply(left, right, sums, 0, at + 4 * n)


@T.macro
def find_norms(rows, first, factor, scale):
    """What rows of q and k are multiplied with, q's with scale too: norms are the diagonal of rows times rows.

    Rows are 16 of q, 16 of k and so on, in shared memory; a warp takes 32, from ``first`` on, and its factors lie warp
    by warp.
    """
    thread = T.get_thread_binding()
    g = thread % 32 // 4
    t = thread % 4 * 2
    sums = T.alloc_local((16,), "float32")
    T.clear(sums)
    for h in T.unroll(2):  # q, then k
        square_rows(rows, first + h * 16, sums, 8 * h)
    if t // 2 == g // 2:
        for h in T.unroll(2):
            for n in T.unroll(2):
                square = T.if_then_else(g % 2 == 0, sums[8 * h + 6 * n], sums[8 * h + 6 * n + 1])
                row = thread // 32 * 32 + h * 16 + 8 * n + g
                factor[row] = T.rsqrt(square + L2NORM_EPS) * T.if_then_else(h == 0, scale, 1.0)


@T.macro
def substitute(both, b_factor, rows, columns, inverse, c):
    """Forward substitution: column c of 64 of the inverse of its block of L, which has 16 rows.

    16 rows of L lie in ``both`` below 16 of something else. The blocks' inverses go to ``rows``, transposed to
    ``columns``, and with beta to the diagonal of ``inverse``.
    """
    BC, io = 16, inverse.dtype
    column = T.alloc_local((BC,), "float32")
    for r in T.unroll(BC):
        column[r] = T.if_then_else(r == c % BC, 1.0, 0.0)
        for m in T.unroll(r):
            column[r] = column[r] - both.of_key(c // BC * BC + r, c // BC * BC + m) * column[m]
    for r in T.unroll(BC):
        rows[c // BC * BC + r, c % BC] = T.cast(column[r], io)
    for r in T.unroll(BC):
        columns[c, r] = T.cast(column[r], io)
    for r in T.unroll(BC):
        inverse[c // BC * BC + r, c] = T.cast(column[r] * b_factor[c], io)


@T.macro
def _invert_sixteens(both, b_factor, rows, columns, inverse, below, across, left, right, two, inner, outer):
    """Blocks of 16 rows: two warps a pair, each takes half of the columns of X."""
    BC, io = 16, inverse.dtype
    thread = T.get_thread_binding()
    pair = thread // 64
    half = thread // 32 % 2
    g = thread % 32 // 4
    t = thread % 4 * 2
    T.clear(inner)
    T.clear(outer)
    _take_left(columns, pair * 2 * BC, 0, left)
    for n in T.unroll(2):
        r = pair * 2 * BC + BC + 8 * n + g
        _take_right(both, pair * 2 * BC + BC + 8 * n + g, pair * 2 * BC + t, b_factor[r], two, right)
        multiply(left, right, inner, 0, 4 * n)
    for n in T.unroll(2):
        for e in T.unroll(2):
            two[e] = T.if_then_else(half == 0, inner[4 * n + e], inner[4 * n + 2 + e])
        for e in T.vectorized(2):
            right[2 * n + e] = T.cast(two[e], io)
    _take_left(rows, pair * 2 * BC + BC, 0, left)
    multiply(left, right, outer, 0, 0)
    for n in T.unroll(2):
        r = 8 * n + g
        for e in T.vectorized(2):
            below[pair * BC + r, 8 * half + t + e] = T.cast(-outer[2 * n + e], io)
        for e in T.unroll(2):
            across[pair * BC + 8 * half + t + e, r] = T.cast(-outer[2 * n + e], io)
        for e in T.unroll(2):
            two[e] = -outer[2 * n + e] * b_factor[pair * 2 * BC + 8 * half + t + e]
        for e in T.vectorized(2):
            inverse[pair * 2 * BC + BC + r, pair * 2 * BC + 8 * half + t + e] = T.cast(two[e], io)


@T.macro
def _invert_halves(both, b_factor, rows, columns, inverse, below, across, left, right, two, inner, outer):
    """Blocks of 32 rows: a warp takes 16 rows and 16 columns of X."""
    BC, io = 16, inverse.dtype
    thread = T.get_thread_binding()
    pair = thread // 64
    half = thread // 32 % 2
    g = thread % 32 // 4
    t = thread % 4 * 2
    T.clear(inner)
    T.clear(outer)
    for n in T.unroll(2):  # 16 columns of L
        if n == 0:
            _take_left(columns, 0, 0, left)
            for e in T.unroll(8):
                left[e] = T.if_then_else(half == 0, left[e], T.cast(0.0, io))
        else:
            _take_either(half == 0, across, 0, columns, BC, g, t, left)
        for m in T.unroll(4):  # 8 rows of L
            r = 2 * BC + 8 * m + g
            _take_right(both, 2 * BC + 8 * m + g, 16 * n + t, b_factor[r], two, right)
            multiply(left, right, inner, 0, 4 * m)
    for n in T.unroll(2):  # 16 rows of Y
        if n == 0:
            _take_either(pair == 0, rows, 2 * BC, below, BC, g, t, left)
        else:
            _take_left(rows, 3 * BC, 0, left)
            for e in T.unroll(8):
                left[e] = T.if_then_else(pair == 1, left[e], T.cast(0.0, io))
        for h in T.unroll(2):  # 8 of the columns of X
            for m in T.unroll(2):
                for e in T.vectorized(2):
                    right[2 * m + e] = T.cast(inner[4 * (2 * n + m) + 2 * h + e], io)
            multiply(left, right, outer, 0, 4 * h)
    for h in T.unroll(2):
        for n in T.unroll(2):
            c = half * BC + 8 * h + t
            for e in T.unroll(2):
                two[e] = -outer[4 * h + 2 * n + e] * b_factor[c + e]
            for e in T.vectorized(2):
                inverse[2 * BC + pair * BC + 8 * n + g, c + e] = T.cast(two[e], io)


@T.macro
def invert(both, b_factor, rows, columns, inverse, threads=128):
    """What lies below the diagonal's blocks in (I + L)^-1 diag(beta), L strictly lower triangular of 64 rows, by the
    first 128 threads.

    For pairs of blocks of 16 rows, and then of 32,

        [Ia 0; L Ib]^-1 = [Da 0; X Db],    X = -Db L Da

    A warp takes the inner product transposed, Y^T = Da^T L^T: in the order in which its registers then hold Y, it is
    the right operand of Db Y, so nothing goes through shared memory in between.

    Args:
        both: 16 rows of L lie below 16 of something else, and lack beta.
        b_factor: beta.
        rows: of the inverses of the blocks on the diagonal, in shared memory.
        columns: of the same.
        inverse: result, in shared memory.
        threads: of the block.
    """
    BC, io = 16, inverse.dtype
    below = T.alloc_shared((2 * BC, BC + 8), io)  # rows of X, and its columns, of both pairs
    across = T.alloc_shared((2 * BC, BC + 8), io)
    left = T.alloc_local((8,), io)
    right = T.alloc_local((4,), io)
    two = T.alloc_local((2,), "float32")
    inner = T.alloc_local((16,), "float32")
    outer = T.alloc_local((8,), "float32")
    if True if threads == 128 else T.get_thread_binding() < 128:
        _invert_sixteens(both, b_factor, rows, columns, inverse, below, across, left, right, two, inner, outer)
    T.sync_threads()
    if True if threads == 128 else T.get_thread_binding() < 128:
        _invert_halves(both, b_factor, rows, columns, inverse, below, across, left, right, two, inner, outer)
