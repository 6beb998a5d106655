"""Merges of segments of Gated DeltaNet, where some gate remembers: what fwd_gdn_merge and bwd_gdn_merge share.

As merge, but transitions are transposed, and go through registers, which split them on their way to shared memory.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kda_tl.core.stage import Case, Operands
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.merge import SPLIT, Halves, load_given
from kda_tl.templates.sm90.reach import far_reference, has_far
from kda_tl.templates.sm90.recurrence import read_state


def merge_reference(case: Case, x: Operands, given: torch.Tensor | None, own: torch.Tensor, step: int) -> torch.Tensor:
    """PyTorch twin, in the dtype of ``own``; arguments as of :func:`merge_far`."""
    edges = torch.zeros_like(own)
    for n, (begun, count, _) in enumerate(x.seq_segments.tolist()):
        far, state = far_reference(x, n, step)[:, None, None], read_state(case, given, n, own)
        for i_s in range(begun, begun + count)[::-step]:
            moved = x.transition[i_s].mT if step < 0 else x.transition[min(i_s + 1, begun + count - 1)]
            state = state @ moved + own[i_s]
            edges[i_s] = state * far
    return edges


@T.macro
def split(values, halves):
    """A fragment as two tiles."""
    for i, j in T.Parallel(*values.shape):
        halves.high[i, j] = T.cast(values[i, j], SPLIT)
    for i, j in T.Parallel(*values.shape):
        halves.low[i, j] = T.cast(values[i, j] - T.cast(T.cast(values[i, j], SPLIT), "float32"), SPLIT)


@T.macro
def load_segment(x, own, step, i_s, place, last, added, moved):
    """What a segment adds, and the transition that leads to its edge: its own, or of the segment that follows; both are
    on their way to registers while others are multiplied.
    """
    (i_h, v0), BV = place, added.shape[0]
    T.copy(own[i_s, i_h, v0 : v0 + BV, :], added)
    T.copy(x.transition[i_s if step < 0 else T.min(i_s + 1, last), i_h, :, :], moved)


@T.macro
def merge_far(p, BV, step, place, whole, x, given, is_given, own, edges):
    """A kernel's body: BV rows of a (sequence, value head), from one cut segment to the next.

    Args:
        p: the problem.
        BV: rows a block owns.
        step: -1 for states, which walks forwards begin with; 1 for their gradients, which walks back begin with.
        place: the sequence, the value head and the first row.
        whole: whether nothing is cut, so that there is one row of what is merged.
        x: tables, bounds and transitions.
        given: the caller's state of a sequence; gradients begin with zero, since the last one's own has the caller's.
        is_given: whether there is one.
        own: what segments add.
        edges: written, after each cut segment.
    """
    KP, f32 = p.KP, "float32"
    i_n, i_h, v0 = place
    begun, count = x.cuts[i_n, 0], x.cuts[i_n, 1]
    last = begun + count - 1
    state_high = T.alloc_shared((BV, KP), SPLIT)
    state_low = T.alloc_shared((BV, KP), SPLIT)
    moved_high = T.alloc_shared((KP, KP), SPLIT)
    moved_low = T.alloc_shared((KP, KP), SPLIT)
    state = T.alloc_fragment((BV, KP), f32)
    added = T.alloc_fragment((BV, KP), f32)
    moved = T.alloc_fragment((KP, KP), f32)
    halves = SimpleNamespace(state=Halves(state_high, state_low), moved=Halves(moved_high, moved_low))
    if has_far(x, i_n, i_h, step) > 0:
        begin = begun if step < 0 else last
        load_given(p, given, is_given, i_n, i_h, v0, state)
        load_segment(x, own, step, begin, (i_h, v0), last, added, moved)
        for n in T.serial(count):
            i_s = begin - step * n
            split(moved, halves.moved)
            split(state, halves.state)
            T.copy(added, state)
            if n + 1 < count:
                load_segment(x, own, step, i_s - step, (i_h, v0), last, added, moved)
            T.gemm(state_high, moved_high, state, transpose_B=step < 0)
            T.gemm(state_low, moved_high, state, transpose_B=step < 0)
            T.gemm(state_high, moved_low, state, transpose_B=step < 0)
            T.copy(state, edges[i_s, i_h, v0 : v0 + BV, :])
    else:
        T.clear(state)
        for n in T.serial(T.if_then_else(whole & (i_n == 0), 1, count)):
            T.copy(state, edges[begun + n, i_h, v0 : v0 + BV, :])
