"""(I + L)^-1 diag(beta) of a chunk by all warps, from L in blocks of 16 x 16.

Each warp inverts its own block on the diagonal, in fp32 and products of tf32, and all join them with those below as
warp.invert does, from rounded ones. Every operand is read by one instruction (ldmatrix), since L has its step sizes, is
rounded, and lies in rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.blocks import COLUMN, PAD, store_block
from kda_tl.templates.sm90.rows import BC
from kda_tl.templates.sm90.warp import multiply

ROUND = 1 + 2**-11  # tf32 products cut off bits: of what is half of the last kept one larger they round


@dataclass(frozen=True)
class Inverse:
    """The inverse of a chunk in shared memory, and those of its blocks on the diagonal: rows, and columns."""

    tile: Any
    rows: Any
    columns: Any

    @staticmethod
    def size(BT: int) -> int:
        """Bytes, with those of what joins blocks."""
        return BT * (BT + PAD + 2 * (BC + PAD)) * 2 + 2 * BC * (BC + PAD) * 2


@T.macro
def begin_inverse(BT, io):
    """Tiles, and zeros above the diagonal's blocks."""
    inverse = T.alloc_shared((BT, BT + PAD), io)
    block_rows = T.alloc_shared((BT, BC + PAD), io)
    block_columns = T.alloc_shared((BT, BC + PAD), io)
    for i, j in T.Parallel(BT, BT):
        if i // BC < j // BC:
            inverse[i, j] = 0
    return Inverse(inverse, block_rows, block_columns)


def _multiply_halves(left: Any, right: Any, sums: Any) -> Any:
    """sums += left right: 16 x 8 by 8 x 8 in the registers of a warp."""
    types = ("float32", "m16n8k8", "row", "col", "tf32", "tf32", "fp32")
    return T.ptx_mma(*types, left.data, 0, right.data, 0, sums.data, 0, T.bool(False))


@T.macro
def invert_block(keys, b_factor, inverse, warp):
    """The inverse of a warp's block of I + L on the diagonal, by this warp: rows, columns, and with beta.

    Of both halves on the block's own diagonal by forward substitution, a lane a column; then, with products of tf32,

        [Ia 0; L Ib]^-1 = [Da 0; X Db],    X = -Db L Da

    in the order of registers of warp.invert.
    """
    lane = T.get_thread_binding() % 32
    c, g, t = lane % BC, lane // 4, lane % 4
    half = T.alloc_var("int32")
    half = c // 8 * 8
    column = T.alloc_local((8,), "float32")
    T.sync_warp()  # the block is written
    for r in T.unroll(8):
        column[r] = T.if_then_else(r == c % 8, 1.0, 0.0)
        for m in T.unroll(r):
            column[r] = column[r] - keys.of_key(warp * BC + half + r, half + m) * column[m]
    if lane < BC:
        for n in T.unroll(2):
            for e in T.vectorized(4):
                keys.solved[(warp * BC + c) * COLUMN + 4 * n + e] = column[4 * n + e]
    T.sync_warp()
    left = T.alloc_local((4,), "float32")
    right = T.alloc_local((2,), "float32")
    inner = T.alloc_local((4,), "float32")
    outer = T.alloc_local((4,), "float32")
    first = T.alloc_local((2,), "float32")
    second = T.alloc_local((2,), "float32")
    values = T.alloc_local((8,), "bfloat16")
    T.clear(left)
    T.clear(inner)
    T.clear(outer)
    for e in T.unroll(2):
        left[2 * e] = keys.solved[(warp * BC + g) * COLUMN + t + 4 * e] * ROUND
        right[e] = keys.of_key(warp * BC + 8 + g, t + 4 * e) * ROUND
    _multiply_halves(left, right, inner)
    for e in T.unroll(2):
        first[e] = keys.solved[(warp * BC + 2 * t + e) * COLUMN + g]
        second[e] = keys.solved[(warp * BC + 8 + 2 * t + e) * COLUMN + g]
        left[2 * e] = second[e] * ROUND
        right[e] = inner[e] * ROUND
    _multiply_halves(left, right, outer)
    for e in list(range(2)):
        values[e] = T.cast(first[e], "bfloat16")
        values[2 + e] = T.cast(-outer[e], "bfloat16")
        values[4 + e] = T.cast(0.0, "bfloat16")
        values[6 + e] = T.cast(second[e], "bfloat16")
    store_block(values, inverse.rows, warp, 0)
    place = inverse.columns[warp * BC + lane // BC * 8 + lane % 8, lane // 8 % 2 * 8]
    T.call_extern("handle", "store_block_transposed", T.access_ptr(place, "r", extent=8), T.address_of(values[0]))
    for e in list(range(2)):
        step = b_factor[warp * BC + 2 * t + e]
        values[e] = T.cast(first[e] * step, "bfloat16")
        values[2 + e] = T.cast(-outer[e] * step, "bfloat16")
        values[6 + e] = T.cast(second[e] * b_factor[warp * BC + 8 + 2 * t + e], "bfloat16")
    store_block(values, inverse.tile, warp, warp)


def _take(tile: Any, first: Any, column: Any, taken: Any) -> Any:
    """16 x 16 of a tile in shared memory: as a left operand, or of 16 rows of two right ones."""
    lane = T.get_thread_binding() % 32
    place = tile[first + lane % BC, column + lane // BC * 8]
    return T.ptx_ldmatrix(T.bool(False), 4, T.access_ptr(place, "r", extent=8), T.access_ptr(taken[0], "w", extent=8))


@T.macro
def _take_rights(keys, first, column, right):
    """Two right operands, one behind the other: 16 rows of L transposed, 16 columns."""
    lane = T.get_thread_binding() % 32
    place = keys.lower[first + lane // BC * 8 + lane % 8, column + lane // 8 % 2 * 8]
    T.ptx_ldmatrix(T.bool(False), 4, T.access_ptr(place, "r", extent=8), T.access_ptr(right[0], "w", extent=8))


@T.macro
def _join_sixteens(keys, b_factor, inverse, below, across, pair, half):
    """Blocks of 16 rows: two warps a pair, each takes half of the columns of X."""
    lane = T.get_thread_binding() % 32
    g, t = lane // 4, lane % 4 * 2
    left = T.alloc_local((8,), "bfloat16")
    rights = T.alloc_local((8,), "bfloat16")
    right = T.alloc_local((4,), "bfloat16")
    inner = T.alloc_local((8,), "float32")
    outer = T.alloc_local((4,), "float32")
    two = T.alloc_local((2,), "bfloat16")
    T.clear(inner)
    T.clear(outer)
    _take(inverse.columns, pair * 2 * BC, 0, left)
    _take_rights(keys, pair * 2 * BC + BC, pair * 2 * BC, rights)
    for n in list(range(2)):
        multiply(left, rights, inner, 4 * n, 4 * n)
    for n in list(range(2)):
        for e in list(range(2)):
            kept = T.if_then_else(half == 0, inner[4 * n + e], inner[4 * n + 2 + e])
            right[2 * n + e] = T.cast(kept, "bfloat16")
    _take(inverse.rows, pair * 2 * BC + BC, 0, left)
    multiply(left, right, outer, 0, 0)
    for n in list(range(2)):
        for _ in T.serial(pair):  # those of the later pair alone are read again by rows, of the earlier by columns
            for e in list(range(2)):
                two[e] = T.cast(-outer[2 * n + e], "bfloat16")
            for e in T.vectorized(2):
                below[8 * n + g, 8 * half + t + e] = two[e]
        for _ in T.serial(1 - pair):
            for e in list(range(2)):
                across[8 * half + t + e, 8 * n + g] = T.cast(-outer[2 * n + e], "bfloat16")
    for n in list(range(2)):
        for e in list(range(2)):
            two[e] = T.cast(-outer[2 * n + e] * b_factor[pair * 2 * BC + 8 * half + t + e], "bfloat16")
        for e in T.vectorized(2):
            inverse.tile[pair * 2 * BC + BC + 8 * n + g, pair * 2 * BC + 8 * half + t + e] = two[e]


@T.macro
def _join_halves(keys, b_factor, inverse, below, across, pair, half):
    """Blocks of 32 rows: a warp takes 16 rows and 16 columns of X."""
    t = T.get_thread_binding() % 4 * 2
    left = T.alloc_local((8,), "bfloat16")
    rights = T.alloc_local((8,), "bfloat16")
    right = T.alloc_local((4,), "bfloat16")
    inner = T.alloc_local((16,), "float32")
    outer = T.alloc_local((8,), "float32")
    values = T.alloc_local((8,), "bfloat16")
    T.clear(inner)
    T.clear(outer)
    for _ in T.serial(1 - half):  # columns of L; later columns of X have none of the first 16
        _take(inverse.columns, 0, 0, left)
        for m in list(range(2)):
            _take_rights(keys, 2 * BC + BC * m, 0, rights)
            for n in list(range(2)):
                multiply(left, rights, inner, 4 * n, 8 * m + 4 * n)
        _take(across, 0, 0, left)
    for _ in T.serial(half):
        _take(inverse.columns, BC, 0, left)
    for m in list(range(2)):
        _take_rights(keys, 2 * BC + BC * m, BC, rights)
        for n in list(range(2)):
            multiply(left, rights, inner, 4 * n, 8 * m + 4 * n)
    for _ in T.serial(pair):  # rows of Y; earlier rows of X have none of the last 16
        _take(inverse.rows, 3 * BC, 0, left)
        for h in list(range(2)):
            _round_right(inner, 1, h, right)
            multiply(left, right, outer, 0, 4 * h)
        _take(below, 0, 0, left)
    for _ in T.serial(1 - pair):
        _take(inverse.rows, 2 * BC, 0, left)
    for h in list(range(2)):
        _round_right(inner, 0, h, right)
        multiply(left, right, outer, 0, 4 * h)
    for h in list(range(2)):
        for n in list(range(2)):
            for e in list(range(2)):
                scaled = -outer[4 * h + 2 * n + e] * b_factor[half * BC + 8 * h + t + e]
                values[4 * h + 2 * n + e] = T.cast(scaled, "bfloat16")
    store_block(values, inverse.tile, 2 + pair, half)


@T.macro
def _round_right(inner, n, h, right):
    """16 rows of Y, 8 of the columns of X, from Y^T."""
    for m in list(range(2)):
        for e in list(range(2)):
            right[2 * m + e] = T.cast(inner[4 * (2 * n + m) + 2 * h + e], "bfloat16")


@T.macro
def join_blocks(keys, b_factor, inverse):
    """What lies below the diagonal's blocks in (I + L)^-1 diag(beta), by all warps, as warp.invert does it.

    L has its step sizes, is rounded, and lies in rows that operands are read from at once.
    """
    below = T.alloc_shared((BC, BC + PAD), "bfloat16")  # rows of X of the later pair, and columns of the earlier one's
    across = T.alloc_shared((BC, BC + PAD), "bfloat16")
    pair, half = T.alloc_var("int32"), T.alloc_var("int32")
    pair = T.get_thread_binding() // 64
    half = T.get_thread_binding() // 32 % 2
    _join_sixteens(keys, b_factor, inverse, below, across, pair, half)
    T.sync_threads()
    _join_halves(keys, b_factor, inverse, below, across, pair, half)


@T.macro
def store_lower(tile, at, to):
    """A tile, but for later keys of earlier rows, to where it belongs, by all threads.

    Four threads take half of a row. Neighbouring rows of 144 bytes would share banks, every fourth do not.
    """
    LOWER, HALF = to.shape[2:]
    quad = T.get_thread_binding() // 4
    i = T.alloc_var("int32")
    i = quad // 8 * 8 + quad % 2 * 4 + quad % 8 // 2
    T.assume((i >= 0) & (i < HALF))
    j = T.get_thread_binding() % 4 * 8
    for n in T.unroll(LOWER // HALF):
        later = n // 2 * HALF  # rows that have no earlier keys here
        for e in T.vectorized(8):
            to[at.i_t, at.i_hv, n * HALF + i, j + e] = tile[n * HALF - later + i, later + j + e]


@T.macro
def finish_inverse(keys, b_factor, inverse, at, A):
    """A of a chunk, once all threads know its blocks on the diagonal."""
    join_blocks(keys, b_factor, inverse)
    T.sync_threads()
    store_lower(inverse.tile, at, A)
