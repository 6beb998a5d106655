"""Turns that resident thread blocks take: which chunk, query/key head and value heads a block has, and has next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.heads import divide, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.gates import Chunk

BOARD_BYTES = 1056  # that a board takes at most: rows behind it begin at a multiple of 1024
FINDS = 64  # the thread that finds a block's next turn: of a warp that does not sum gates


@dataclass(frozen=True)
class Work:
    """A chunk, a query/key head, the first value head and how many."""

    i_t: Any
    i_h: Any
    first: Any
    count: Any


@dataclass(frozen=True)
class Shares:
    """Chunks, query/key heads, parts of a head's value heads, none without groups, and how many value heads each has.

    All parts have the same number: of one of its own each thread would keep a copy, for which there is no register.
    """

    NT: Any
    heads: Any
    each: Any = 1
    parts: Any = None

    @property
    def units(self) -> Any:
        """Of a chunk."""
        return self.heads if self.parts is None else self.heads * self.parts

    def find(self, i: Any) -> Work:
        """Macro: what is done in a turn."""
        return _find_head(i, self) if self.parts is None else _find_part(i, self)


@T.macro
def share_work(heads, NT, blocks):
    """Parts as many as blocks have work for and the value heads divide by, one if there is enough."""
    total = T.alloc_var("int32")
    total = heads.HV  # or the size would get the name of divide's parameter
    group, _ = divide(total, (heads.H,))
    share, _ = divide(blocks + 0, (NT * heads.H,))
    parts = T.alloc_var("int32")
    parts = T.max(1, T.min(share, group))
    while group % parts != 0:
        parts = parts - 1
    each, _ = divide(group, (parts,))
    return Shares(NT, heads.H, each, parts)


@T.macro
def _find_head(i, shares):
    i_t, i_h, _ = split_block(i, (shares.NT, shares.heads))
    return Work(i_t, i_h, i_h, 1)


@T.macro
def _find_part(i, shares):
    i_t, i_unit, _ = split_block(i, (shares.NT, shares.units))
    i_h, _ = divide(i_unit, (shares.parts,))
    return Work(i_t, i_h, i_unit * shares.each, shares.each)


@dataclass(frozen=True)
class Turns:
    """What a block does in its turn, and what it has read ahead.

    The next turn is found by one thread, and waits in shared memory: in registers it would be spilt, and to read that
    back takes as long as from the L2.
    """

    board: Any  # of the next turn: chunk, query/key head, first value head, first token, number of tokens, its number
    here: Any  # the same of this one
    gate: Any  # of a token a thread, and a value head
    step: Any

    @classmethod
    def alloc(cls, x: Any) -> Turns:
        """Shared memory and registers."""
        board, here = T.alloc_shared((6,), "int32"), T.alloc_local((6,), "int32")
        return cls(board, here, T.alloc_local((1,), x.g.dtype), T.alloc_local((1,), x.beta.dtype))


@T.macro
def chunk_of(place, m, x):
    """The chunk of a turn's m-th value head."""
    i_h = place[1]
    i_hv = place[2] + m
    T.assume(0 <= i_h)
    T.assume(i_h < x.k.shape[1])
    T.assume(0 <= i_hv)
    T.assume(i_hv < x.g.shape[1])
    return Chunk(place[0], i_hv, i_h, place[3], place[4])


@T.macro
def find_turn(shares, chunk_tokens, i, board):
    """A turn of the grid's, by one thread; what lies beyond the last is that again, with a number below 0."""
    if T.get_thread_binding() == FINDS:
        end = shares.NT * shares.units
        work = shares.find(T.min(i, end - 1))
        board[0] = work.i_t
        board[1] = work.i_h
        board[2] = work.first
        board[3] = chunk_tokens[work.i_t, 0]
        board[4] = chunk_tokens[work.i_t, 1]
        board[5] = T.if_then_else(i < end, i, -1)


@T.macro
def take_turn(turns):
    """The next turn becomes this one."""
    for n in T.unroll(6):
        turns.here[n] = turns.board[n]
