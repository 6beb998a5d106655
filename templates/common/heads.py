"""Numbers of heads, which kernels are told at the launch, and what part of the work a thread block has.

Coordinates of a block are variables, computed once: TileLang 0.1.15 writes expressions out in every address, where a
division by a number of heads took 660 instructions. It cannot tell what range a variable has, so that is said, or it
would guard every access.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.templates.common.language import T


@dataclass(frozen=True)
class Heads:
    """Numbers of query/key heads and of value heads; one variable where both are the same by construction."""

    H: Any
    HV: Any

    @classmethod
    def of(cls, problem: Problem) -> Heads:
        """Variables of one kernel."""
        HV = T.dynamic("HV")
        return cls(T.dynamic("H") if problem.grouped else HV, HV)

    @property
    def sizes(self) -> dict[str, Any]:
        """For :func:`kda_tl.templates.common.tile.prim_func`."""
        return {"H": self.H, "HV": self.HV}

    def of_keys(self, i_hv: Any) -> Any:
        """The query/key head of a value head."""
        return i_hv if self.H is self.HV else _find_shared(i_hv, self)

    def of_values(self, i_h: Any) -> tuple[Any, Any]:
        """The first value head of a query/key head, and how many there are."""
        return (i_h, 1) if self.H is self.HV else _find_group(i_h, self)


@dataclass(frozen=True)
class HeadRows:
    """A head's rows of a tensor ``[tokens, heads, D]`` from a token on.

    The address of the first row is computed once, those of others are constant numbers of strides away. Written as
    ``x[start + i, i_head, :]`` each row takes a product in 64 bits, six instructions.
    """

    rows: Any  # [tokens - start, D]; not a tensor by itself, since a variable would give its name to x

    @classmethod
    def of(cls, x: Any, start: Any, i_head: Any) -> HeadRows:
        """The rows from token ``start`` on."""
        tokens, heads, width = x.shape
        first = _find_first(start, i_head, (heads, width))
        shape, strides = (tokens - start, width), [heads * width, 1]
        return cls(T.decl_buffer(shape, x.dtype, data=x.data, strides=strides, elem_offset=first))


@T.macro
def _find_first(start, i_head, extents):
    first = T.alloc_var("int64")
    first = (T.cast(start, "int64") * extents[0] + i_head) * extents[1]
    return first


# Sizes are given to macros in tuples and records: as a parameter a size would get the parameter's name in the CUDA.


@T.macro
def divide(a, by):
    """Quotient and remainder of what is not negative, in variables."""
    quotient = T.alloc_var("int32")
    rest = T.alloc_var("int32")
    quotient = T.truncdiv(a, by[0])
    rest = a - quotient * by[0]
    return quotient, rest


@T.macro
def _find_shared(i_hv, heads):
    i_h, _ = divide(i_hv * heads.H, (heads.HV,))
    T.assume(0 <= i_h)
    T.assume(i_h < heads.H)
    return i_h


@T.macro
def _find_group(i_h, heads):
    count, _ = divide(heads.HV + 0, (heads.H,))
    T.assume((i_h + 1) * count <= heads.HV)
    return i_h * count, count


@T.macro
def split_block(i_block, extents, inner=1, backwards=False):
    """Which of extents[0] chunks, sequences or segments a block has, which of extents[1] heads, and which inner part.

    Parts lie side by side, then heads; with ``backwards`` the last chunk comes first.
    """
    quotient, i_head = divide(i_block // inner, extents[1:])
    i_outer = extents[0] - 1 - quotient if backwards else quotient
    T.assume(0 <= i_outer)
    T.assume(i_outer < extents[0])
    T.assume(0 <= i_head)
    T.assume(i_head < extents[1])
    return i_outer, i_head, i_block % inner
