"""First states by slices, through shared memory.

A thread that multiplies holds 64 elements of a state, and no four of them lie side by side in memory. Here it asks for
16 times four elements at once, and a warpgroup's threads give them to each other slice by slice.
"""

from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import at_state
from kda_tl.templates.sm90.recurrence import ROWS, WARPGROUP, name_tiles

SLICE = 16  # channels of keys


def slice_shape(p: Problem) -> tuple[int, int]:
    """As in memory, and padded: what a warp reads at once, as a product's result, lies in banks of its own."""
    return (ROWS, SLICE + 8) if p.state_v_first else (SLICE, ROWS + 4)


def slice_bytes(case: Case, groups: int) -> int:
    """Of the tiles of some warpgroups, if there are states to load."""
    rows, width = slice_shape(case.problem)
    return groups * rows * width * 4 * case.problem.initial_state


@T.macro
def alloc_slices(z):
    """A tile a warpgroup, none if there are no states to load."""
    if not z.case.problem.initial_state:
        return [None] * z.groups
    return name_tiles("start", [T.alloc_shared(slice_shape(z.case.problem), "float32") for _ in range(z.groups)])


def load_slices(p: Problem) -> Any:
    """A macro as fwd_recurrence.start_from gives it, for keys whose channels need no padding."""

    @T.macro
    def load_state(state, start, k0):
        if p.initial_state:
            h0, v0 = start.states, start.v0
            i_n = start.segments[start.i_s, 2]
            shape = (ROWS, SLICE) if p.state_v_first else (SLICE, ROWS)
            taken = [T.alloc_fragment(shape, "float32") for _ in range(p.K // SLICE)]
            for m in list(range(len(taken))):
                for i, j in T.Parallel(*shape):
                    i_v, i_k = (i, j) if p.state_v_first else (j, i)
                    taken[m][i, j] = h0[at_state(p, i_n, start.i_h, m * SLICE + i_k, v0 + i_v)]
            T.sync_threads(start.barrier, WARPGROUP)  # the last slice of the state before has been read
            for m in list(range(len(taken))):
                for i, j in T.Parallel(*shape):
                    start.tile[i, j] = taken[m][i, j]
                for i, j in T.Parallel(ROWS, SLICE):
                    state[i, m * SLICE + j] = start.tile[(i, j) if p.state_v_first else (j, i)]
            T.fence_proxy_async()  # or TileLang 0.1.15 has one before the products of each chunk, which do not read it
        else:
            T.clear(state)

    return load_state
