"""Pairs of a chunk's rows with its keys, from a product's registers to shared memory, by blocks of 16 x 16.

A warp has 16 rows i of the product, and with them four blocks of 16 keys j. Of G, which falls from token to token,

    far      keys of earlier blocks         2^(G_i - G_first) 2^(G_first - G_j), first: the warp's first row
    near     keys of the block of the rows  2^(G_i - G_j)

so a power of a far pair is a factor of its row times one of its key, neither of them above 1: six powers a thread and
block instead of eight. Blocks are rounded, and stored by one instruction each (stmatrix); those of L on the diagonal,
which are solved, are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.recurrence import name_tiles
from kda_tl.templates.sm90.rows import BC, NB

PAD = 8  # elements: eight rows of as many lie in banks of their own
COLUMN = BC // 2 + 4  # numbers from one column of a half of a block to the next, in shared memory
_ROW, _BLOCK = BC + PAD, BC * (BC + PAD) + BC  # numbers a row of the diagonal's blocks has, and a block

# A prelude, see recurrence.STORES
STORES = r"""
static __device__ __forceinline__ void store_block(void* shared, const void* values) {
  const unsigned* pairs = reinterpret_cast<const unsigned*>(values);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                  "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}
static __device__ __forceinline__ void store_block_transposed(void* shared, const void* values) {
  const unsigned* pairs = reinterpret_cast<const unsigned*>(values);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                  "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}
static __device__ __forceinline__ void keep(const void*, const void*) {}
"""


@dataclass(frozen=True)
class Blocks:
    """L of a chunk in shared memory, with step sizes."""

    diagonal: Any  # blocks on it, fp32
    lower: Any  # [BT, BT], some columns more: those below it, rounded
    solved: Any  # columns of the inverses of halves of blocks, eight numbers each, until their warp has the whole ones

    @classmethod
    def alloc(cls, BT: int) -> Blocks:
        """The tiles. TileLang 0.1.15 finds layouts by names, too."""
        diagonal, solved = (T.alloc_shared((n,), "float32") for n in (NB * _BLOCK, BT * COLUMN))
        lower = T.alloc_shared((BT, BT + PAD), "bfloat16")
        return cls(*name_tiles("blocks", [diagonal, lower, solved]))

    @staticmethod
    def size(BT: int) -> int:
        """Bytes."""
        return (NB * _BLOCK + BT * COLUMN) * 4 + BT * (BT + PAD) * 2

    def of_key(self, i: Any, j: Any) -> Any:
        """Of token i with the key of token j, of the same block."""
        return self.diagonal[self.place(i, j)]

    def place(self, i: Any, j: Any) -> Any:
        """Where that lies."""
        return i // BC * _BLOCK + i % BC * _ROW + j % BC

    def keep(self) -> Any:
        """Here other threads may still read the diagonal's blocks and what is solved of them.

        TileLang 0.1.15 would give their places to what is written behind the last lines that read them.
        """
        places = (T.access_ptr(tile[0], "r", extent=1) for tile in (self.diagonal, self.solved))
        return T.call_extern("handle", "keep", *places)


def layout_product(*tiles: Any) -> dict[Any, Any]:
    """Layouts of the registers that hold a product's result, for those who take its elements one by one."""
    from tilelang.layout import Fragment

    def place(i: Any, j: Any) -> Any:
        return i // 16 * 32 + i % 8 * 4 + j % 8 // 2

    def count(i: Any, j: Any) -> Any:
        return j // 8 * 4 + i % 16 // 8 * 2 + j % 2

    return {tile: Fragment(tile.shape, forward_thread_fn=place, forward_index_fn=count) for tile in tiles}


def pair_of(pairs: Any, warp: Any, m: int, h: int, n: int, e: int) -> Any:
    """A thread's pair: of row h with key (n, e) of the m-th block. ``pairs`` are parts of the keys, side by side."""
    lane, each = T.get_thread_binding() % 32, int(pairs[0].shape[1]) // BC
    return pairs[m // each][warp * BC + 8 * h + lane // 4, m % each * BC + 8 * n + lane % 4 * 2 + e]


EIGHT = [(n, h, e) for n in range(2) for h in range(2) for e in range(2)]  # pairs of a thread and block, as registers


@T.macro
def gather_near(pairs, warp):
    """Pairs with keys of a warp's own block, which is another one for each warp, to the place of the last block.

    Earlier rows have no use for it. So what follows is the same for all warps.
    """
    lane = T.get_thread_binding() % 32
    own = T.alloc_local((8,), "float32")
    for n, h, e in EIGHT:
        own[4 * n + 2 * h + e] = pair_of(pairs, warp, 0, h, n, e)
    for m in list(range(1, NB)):
        for n, h, e in EIGHT:
            own[4 * n + 2 * h + e] = T.if_then_else(warp == m, pair_of(pairs, warp, m, h, n, e), own[4 * n + 2 * h + e])
    for n, h, e in EIGHT:
        pairs[1][warp * BC + 8 * h + lane // 4, BC + 8 * n + lane % 4 * 2 + e] = own[4 * n + 2 * h + e]


@T.macro
def store_block(values, tile, warp, m):
    """Of 8 numbers a thread, to the m-th block of the warp's rows.

    TileLang 0.1.15 does not know that it is written: it has no barrier for it where warps part.
    """
    lane = T.get_thread_binding() % 32
    place = tile[warp * BC + lane % BC, m * BC + lane // BC * 8]
    T.call_extern("handle", "store_block", T.access_ptr(place, "r", extent=8), T.address_of(values[0]))


@T.macro
def _put_queries(of_q, m, place, warp, decay, queries):
    """Pairs of queries in the m-th place, of the block ``place``."""
    values = T.alloc_local((8,), "bfloat16")
    for n, h, e in EIGHT:
        values[4 * n + 2 * h + e] = T.cast(pair_of(of_q, warp, m, h, n, e) * decay[4 * n + 2 * h + e], "bfloat16")
    store_block(values, queries, warp, place)


@T.macro
def put_near(of_q, of_k, warp, G, steps, queries, keys):
    """Pairs of a warp's rows with keys of their own block; and zeros of Aqk behind it, if those are read."""
    lane = T.get_thread_binding() % 32
    i, j = lane // 4, lane % 4 * 2
    decay = T.alloc_local((8,), "float32")
    zeros = T.alloc_local((8,), "bfloat16")
    for n, h, e in EIGHT:
        power = T.exp2(G[warp * BC + 8 * h + i] - G[warp * BC + 8 * n + j + e])
        decay[4 * n + 2 * h + e] = T.if_then_else(8 * h + i >= 8 * n + j + e, power, 0.0)
    if of_q is not None:
        _put_queries(of_q, NB - 1, warp, warp, decay, queries)
        if warp % 2 == 0:
            for n in T.unroll(8):
                zeros[n] = T.cast(0.0, "bfloat16")
            store_block(zeros, queries, warp, warp + 1)
    for n, h, e in EIGHT:
        decay[4 * n + 2 * h + e] = pair_of(of_k, warp, NB - 1, h, n, e) * (steps[h] * decay[4 * n + 2 * h + e])
    for n in list(range(2)):
        for h in list(range(2)):
            for e in T.vectorized(2):
                keys.diagonal[keys.place(warp * BC + 8 * h + i, 8 * n + j) + e] = decay[4 * n + 2 * h + e]


@T.macro
def put_far(of_q, of_k, m, warp, G, steps, queries, keys):
    """Pairs of a warp's rows with keys of an earlier block, the m-th."""
    lane = T.get_thread_binding() % 32
    i, j = lane // 4, lane % 4 * 2
    decay = T.alloc_local((8,), "float32")
    rows = T.alloc_local((2,), "float32")
    columns = T.alloc_local((4,), "float32")
    values = T.alloc_local((8,), "bfloat16")
    first = G[warp * BC]
    for h in list(range(2)):
        rows[h] = T.exp2(G[warp * BC + 8 * h + i] - first)
    for n in list(range(2)):
        for e in list(range(2)):
            columns[2 * n + e] = T.exp2(first - G[m * BC + 8 * n + j + e])
    for n, h, e in EIGHT:
        decay[4 * n + 2 * h + e] = rows[h] * columns[2 * n + e]
    if of_q is not None:
        _put_queries(of_q, m, m, warp, decay, queries)
    for n, h, e in EIGHT:
        scaled = pair_of(of_k, warp, m, h, n, e) * (steps[h] * decay[4 * n + 2 * h + e])
        values[4 * n + 2 * h + e] = T.cast(scaled, "bfloat16")
    store_block(values, keys.lower, warp, m)
