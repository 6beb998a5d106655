"""What rows of q and k of a chunk of Gated DeltaNet are multiplied with: their norms, and the scale.

Norms are the diagonal of products of rows with themselves. Where the pairs of queries are made of rows, too, all are
there before products; else those of keys come with the pairs of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import L2NORM_EPS
from kda_tl.templates.sm90.blocks import pair_of
from kda_tl.templates.sm90.gdn_gradients import Interleaved, at_k, at_q
from kda_tl.templates.sm90.ring import Slot
from kda_tl.templates.sm90.rows import BC, NB
from kda_tl.templates.sm90.warp import find_norms, square_rows

QUERIES, KEYS = range(2)  # whose rows are multiplied with keys


@dataclass(frozen=True)
class Factors:
    """What rows are multiplied with: those of q with the scale and their norms, those of k with their norms."""

    tile: Any  # in shared memory
    scale: Any
    norms: bool  # whether rows are normalised here
    early: bool = True  # whether all lie in the tile before products; else norms of keys come with these

    @property
    def known(self) -> bool:
        """Whether they are the scale and one, and not in the tile."""
        return not (self.early or self.norms)

    def of_query(self, i: Any) -> Any:
        """That of token i's."""
        return self.scale if self.known else self.tile[at_q(i)]

    def of_key(self, i: Any) -> Any:
        """That of token i's."""
        return 1.0 if self.known else self.tile[at_k(i)]


@T.macro
def await_rows(rows, factors):
    """Until all rows have come, and have their factors if these are early.

    Then constants lie in the tile, too: with the scale in a register fwd_gdn_pairs spills others, 84 us instead of 80.
    """
    T.ptx_wait_group(0)
    if factors.early:
        T.sync_threads()
        if factors.norms:
            find_norms(Interleaved(rows), T.get_thread_binding() // 32 * 32, factors.tile, factors.scale)
        else:
            for r in T.Parallel(2 * rows.shape[1]):
                factors.tile[r] = T.if_then_else(r // BC % 2 == 0, factors.scale, 1.0)
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def _take_norms(squares, place, factor, tile):
    """Norms of a warp's rows, times ``factor``, from those of their products in which the diagonal lies."""
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() // 32
    if lane % 4 == lane // 8:
        for h in T.unroll(2):
            square = T.if_then_else(lane // 4 % 2 == 0, squares[2 * h], squares[2 * h + 1])
            tile[place(warp * BC + 8 * h + lane // 4)] = T.rsqrt(square + L2NORM_EPS) * factor


@T.macro
def find_key_norms(pairs, factors):
    """Factors of keys: norms are the diagonal of their pairs with each other."""
    warp = T.get_thread_binding() // 32
    squares = T.alloc_local((4,), "float32")
    for h in list(range(2)):
        for e in list(range(2)):
            squares[2 * h + e] = pair_of(pairs, warp, 0, h, h, e)
            for m in list(range(1, NB)):
                squares[2 * h + e] = T.if_then_else(warp == m, pair_of(pairs, warp, m, h, h, e), squares[2 * h + e])
    _take_norms(squares, at_k, 1.0, factors.tile)


@T.macro
def find_query_norms(rows, factors):
    """Factors of queries, by each warp its rows."""
    sums = T.alloc_local((8,), "float32")
    squares = T.alloc_local((4,), "float32")
    T.clear(sums)
    square_rows(Slot(rows, QUERIES), T.get_thread_binding() // 32 * BC, sums, 0)
    for h in T.unroll(2):
        for e in T.unroll(2):
            squares[2 * h + e] = sums[6 * h + e]
    _take_norms(squares, at_q, factors.scale, factors.tile)
