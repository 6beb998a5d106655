"""A step of the walk back over chunks for which tiles wait in rings of their own, each as long as the step needs it.

    ring     slots    holds                 is released when
    rows     2        k, dO, powers         the chunk ends
    queries  1        q                     the chunk ends
    pairs    1        A, Aqk                dX is known

What bwd_gdn_states and bwd_gdn_walk share; the products are bwd_gdn_scan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.recurrence import load_lower, load_values


@dataclass(frozen=True)
class Slot:
    """One slot of a tile under any slot's number: of a ring that has only one."""

    tile: Any
    number: int = 0

    def __getitem__(self, at: tuple[Any, ...]) -> Any:
        return self.tile[(self.number, *at[1:])]


@T.macro
def load_rows(x, tiles, ring, c, i_t, row, w):
    """Producer: k, dO and powers of a chunk, as many of these as tiles hold."""
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    load_values(x.k, tiles.k, ring.full, slot, row, w.end, x.heads.of_keys(w.i_h), 0)
    load_values(x.d_o, tiles.x, ring.full, slot, row, w.end, w.i_h, w.v0)
    of_chunk = x.powers[i_t, w.i_h, : tiles.powers.shape[1], :]
    T.tma_copy(of_chunk, tiles.powers[slot, :, :], barrier=ring.full[slot])
    ring.commit(slot)


@T.macro
def load_pairs(x, tiles, ring, c, i_t, w):
    """Producer: A and Aqk of a chunk."""
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    for name in ("Aqk", "A"):
        of = getattr(tiles, name)
        load_lower(getattr(x, name), i_t, w.i_h, of.tile, of.number, {of.number: ring.full[slot]})
    ring.commit(slot)


@T.macro
def load_queries(x, tiles, ring, c, row, w):
    """Producer: q of a chunk."""
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    load_values(x.q, tiles.q.tile, ring.full, slot, row, w.end, x.heads.of_keys(w.i_h), 0)
    ring.commit(slot)
