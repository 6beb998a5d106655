"""A step of the walk back over chunks for which tiles wait in rings of their own, each as long as the step needs it.

    ring     slots    holds                 is released when
    rows     2        k, dO, powers         the chunk ends
    queries  1        q                     the chunk ends
    pairs    1        A, Aqk                dX is known

What bwd_gdn_states, bwd_gdn_segment and bwd_gdn_walk share, and tiles and starts of fwd_gdn_resume and bwd_gdn_resume;
the products are bwd_gdn_scan's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, at_state
from kda_tl.templates.sm90.bwd_gdn_scan import find_gradients, take_gradients
from kda_tl.templates.sm90.powers import MULTIPLIED
from kda_tl.templates.sm90.recurrence import load_lower, load_values

# Of a thread that multiplies and of one that loads, where nothing but a chain is walked: on average 128, so that two
# blocks of 256 threads share a multiprocessor
REGISTERS = (216, 40)


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


@T.macro
def alloc_tiles(case, config):
    """The slots of the rings, by the names of what they hold; x is V or dO, and backwards a slot of A is Aqk's."""
    stages, BT, K, io = config.num_stages, case.BT, case.problem.K, TL_DTYPE[case.problem.dtype]
    x_shared = T.alloc_shared((stages, BT, config.BV), io)
    A_shared = T.alloc_shared((stages, BT, BT), io)
    k_shared = T.alloc_shared((stages, BT, K), io)
    powers = T.alloc_shared((stages, MULTIPLIED, BT), "float32")
    q_shared = T.alloc_shared((1, BT, K), io)
    return SimpleNamespace(x=x_shared, A=A_shared, k=k_shared, powers=powers, q=q_shared)


def lay_back(tiles: Any) -> Any:
    """The same tiles as the walk back has them."""
    pairs = {"A": Slot(tiles.A, 0), "Aqk": Slot(tiles.A, 1)}
    return SimpleNamespace(x=tiles.x, k=tiles.k, powers=tiles.powers, q=Slot(tiles.q), **pairs)


def start_from(p: Any) -> Any:
    """A macro that reads the state a walk begins with: that of its sequence, if it begins there, else zero."""

    @T.macro
    def load_state(state, given, there, w):
        T.clear(state)
        if there:
            if w.i_n >= 0:
                for i, j in T.Parallel(*state.shape):
                    state[i, j] = given[at_state(p, w.i_n, w.i_h, j, w.v0 + i)]

    return load_state


def start_between(p: Any) -> Any:
    """A macro that reads the state a walk begins with: that of its sequence, or one known between segments, or
    zero."""

    @T.macro
    def load_state(state, given, there, w):
        T.clear(state)
        if given.edge >= 0:
            for i, j in T.Parallel(*state.shape):
                state[i, j] = given.edges[given.edge, w.i_h, w.v0 + i, j]
        if there:
            if w.i_n >= 0:
                for i, j in T.Parallel(*state.shape):
                    state[i, j] = given.h0[at_state(p, w.i_n, w.i_h, j, w.v0 + i)]

    return load_state


@T.macro
def load_step(x, tiles, rings, step, i_t, row, w):
    """Producer: all of a chunk."""
    load_rows(x, tiles, rings.rows, step, i_t, row, w)
    load_pairs(x, tiles, rings.pairs, step, i_t, w)
    load_queries(x, tiles, rings.queries, step, row, w)


@T.macro
def step_back(p, r, tiles, rings, step):
    """Consumer: the gradient of the state before a chunk."""
    slot, phase = rings.rows.place_to_read(step)
    one, turn = rings.pairs.place_to_read(step)
    rings.rows.wait(slot, phase)
    rings.pairs.wait(one, turn)
    find_gradients(r, tiles, slot)
    T.wgmma_gemm(r.value_io, tiles.A[0, :, :], r.value, clear_accum=True, policy=T.BY_ROWS)
    rings.queries.wait(one, turn)
    take_gradients(r, tiles, slot)
    rings.pairs.release(one)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.state, num_regs=p.K // 2)
    rings.rows.release(slot)
    rings.queries.release(one)
    T.copy(r.state, r.state_io)
