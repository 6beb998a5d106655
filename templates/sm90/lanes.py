"""Rows in the registers of groups of lanes: how they lie, how they come from memory and go back, and their sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T

WARP = 32
VECTOR = 16  # bytes of the widest access
CHUNK = 4  # channels that lie together in shared memory, in fp32 the widest access


@dataclass(frozen=True)
class Lanes:
    """A group of lanes that shares rows of K channels. Vector i of a lane is vector i * count + lane of a row."""

    K: int
    width: int  # channels of a vector
    rows: int  # that a group holds
    most: int = WARP  # lanes of a group

    @property
    def count(self) -> int:
        """Lanes of a group: as many as have equally many vectors of a row, or ``most``."""
        vectors = self.K // self.width
        return min(self.most, vectors & -vectors)

    @property
    def channels(self) -> int:
        """Of a row, in a lane."""
        return self.K // self.count

    @property
    def vectors(self) -> int:
        """Of a row, in a lane."""
        return self.channels // self.width

    @property
    def results(self) -> int:
        """Rows whose sums a lane has: those of a group are shared out among its lanes."""
        return max(1, self.rows // self.count)

    @property
    def alike(self) -> int:
        """Lanes with the same sums."""
        return self.count * self.results // self.rows

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return WARP // self.count * self.rows

    def steps(self) -> Iterator[tuple[int, int]]:
        """Distances of lanes over which sums are taken, and how many a lane then keeps, giving as many away."""
        for n in range(1, self.count.bit_length()):
            yield self.count >> n, self.rows >> n


@dataclass(frozen=True)
class Part:
    """Elements of a tensor from one on: accesses are not guarded, and the address is computed once."""

    x: Any  # an attribute, since a variable would give its name to the kernel's parameter

    @classmethod
    def of(cls, x: Any, first: Any, *shape: int) -> Part:
        """Of one axis or two."""
        return cls(T.decl_buffer(shape, x.dtype, data=x.data, strides=[*shape[1:], 1], elem_offset=first))


def alloc(count: int, dtype: str = "float32") -> Any:
    """Registers of a thread."""
    return T.alloc_local((count,), dtype)


@T.macro
def find_first(outer, stride, width, inner):
    """outer * stride / width + inner, in 64 bits: where something begins, in vectors of ``width`` elements.

    TileLang 0.1.15 makes one access of a vector only if it sees that the address is a multiple: as first * width it is.
    """
    first = T.alloc_var("int64")
    first = T.cast(outer, "int64") * T.truncdiv(stride[0], width) + inner
    return first


@T.macro
def load_rows(lanes, lane, x, first, out):
    """Rows that begin with vector ``first`` of x."""
    own = Part.of(x, first * lanes.width, lanes.rows, lanes.K)
    for r in T.unroll(lanes.rows):
        for i in T.unroll(lanes.vectors):
            for e in T.vectorized(lanes.width):
                out[r * lanes.channels + i * lanes.width + e] = own.x[r, (i * lanes.count + lane) * lanes.width + e]


@T.macro
def store_rows(lanes, lane, rows, x, first, width):
    """Rows to where vector ``first`` of x is, ``width`` channels at once."""
    own = Part.of(x, first * lanes.width, lanes.rows, lanes.K)
    packed = alloc(width, x.dtype)
    for r in T.unroll(lanes.rows):
        for i in T.unroll(lanes.vectors):
            for m in T.unroll(lanes.width // width):
                for e in T.vectorized(width):
                    packed[e] = T.cast(rows[r * lanes.channels + i * lanes.width + m * width + e], x.dtype)
                for e in T.vectorized(width):
                    own.x[r, (i * lanes.count + lane) * lanes.width + m * width + e] = packed[e]


@T.macro
def load_channels(lanes, lane, x, row, head, out, vector=VECTOR):
    """A lane's channels of a head, which is K elements of a row of x, ``vector`` bytes at once or fewer."""
    width = min(lanes.width, vector * 8 // T.dtype(x.dtype).bits)
    own = Part.of(x, find_first(row, x.shape[1:], width, head * (lanes.K // width)) * width, lanes.K)
    for i in T.unroll(lanes.vectors):
        for m in T.unroll(lanes.width // width):
            for e in T.vectorized(width):
                channel = (i * lanes.count + lane) * lanes.width + m * width + e
                out[i * lanes.width + m * width + e] = own.x[channel]


@T.macro
def load_values(x, row, first, out):
    """Elements of a row of x from one on."""
    own = Part.of(x, find_first(row, x.shape[1:], 1, first), *out.shape)
    for i in T.unroll(out.shape[0]):
        out[i] = own.x[i]


@T.macro
def stage_channels(lanes, lane, x, width, staged, i, j):
    """A lane's channels to staged[i, j], where chunks that lanes read at once lie side by side: see take_chunk.

    ``width`` is that of the vectors of those who read, the lane's own are chunks or parts of these.
    """
    each = width // CHUNK
    for m in T.unroll(lanes.vectors):
        for e in T.vectorized(lanes.width):
            channel = (m * lanes.count + lane) * lanes.width
            place = channel // CHUNK % each * (lanes.K // width) + channel // (CHUNK * each)
            staged[i, j, place * CHUNK + channel % CHUNK + e] = x[m * lanes.width + e]


@T.macro
def take_chunk(lanes, lane, staged, i, j, c, out, first):
    """Chunk c of a lane's channels from staged[i, j]."""
    each = lanes.width // CHUNK
    for e in T.vectorized(CHUNK):
        place = c % each * (lanes.K // lanes.width) + c // each * lanes.count + lane
        out[first + e] = staged[i, j, place * CHUNK + e]


@T.macro
def sum_rows(lanes, lane, x, given):
    """A number a row summed over the lanes of a group, for a few of them: at each step a lane gives half of them away.

    The sum of row r comes to lane r // results * alike and those alike, as x[r % results]. The order in which lanes are
    added does not depend on the number of rows.
    """
    for distance, kept in lanes.steps():
        if kept:
            for m in T.unroll(kept):
                given[m] = T.if_then_else(lane & distance != 0, x[m], x[kept + m])
                x[m] = T.if_then_else(lane & distance != 0, x[kept + m], x[m])
            for m in T.unroll(kept):
                x[m] = x[m] + T.shfl_xor(given[m], distance)
        else:
            x[0] = x[0] + T.shfl_xor(x[0], distance)
