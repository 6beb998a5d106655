"""Merges of segments of Gated DeltaNet, where some gate remembers: what fwd_gdn_merge and bwd_gdn_merge share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_tl.core.stage import Case, Operands
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.merge import MergeConfig, Order, load_given, merge
from kda_tl.templates.sm90.powers import reject_rows
from kda_tl.templates.sm90.reach import far_reference, has_far
from kda_tl.templates.sm90.recurrence import read_state


def merge_reference(case: Case, x: Operands, given: torch.Tensor | None, own: torch.Tensor, step: int) -> torch.Tensor:
    """PyTorch twin, in the dtype of ``own``; arguments as of :func:`merge_far`."""
    edges = torch.zeros_like(own)
    for n, (begun, count, _) in enumerate(x.seq_segments.tolist()):
        far, state = far_reference(x, n, step)[:, None, None], read_state(case, given, n, own)
        for i_s in range(begun, begun + count)[::-step]:
            moved = x.transition[i_s if step < 0 else min(i_s + 1, begun + count - 1)].sum(1)
            moved = moved.mT if step < 0 else moved
            state = state @ moved + own[i_s]
            edges[i_s] = state * far
    return edges


@dataclass(frozen=True, kw_only=True)
class GdnMergeConfig(MergeConfig):
    """As the base."""

    def reject(self, case: Case) -> str | None:
        """As the base, and what the stages around it take."""
        return super().reject(case) or reject_rows(case, (64, 128))


@T.macro
def merge_far(p, config, step, place, whole, x, given, is_given, own, edges):
    """A kernel's body: BV rows of a (sequence, value head), from one cut segment to the next.

    Args:
        p: the problem.
        config: of the stage.
        step: -1 for states, which walks forwards begin with; 1 for their gradients, which walks back begin with.
        place: the sequence, the value head and the first row.
        whole: whether nothing is cut, so that there is one row of what is merged.
        x: tables, bounds and transitions.
        given: the caller's state of a sequence; gradients begin with zero, since the last one's own has the caller's.
        is_given: whether there is one.
        own: what segments add.
        edges: written, after each cut segment.
    """
    i_n, i_h, v0 = place
    begun, count = x.cuts[i_n, 0], x.cuts[i_n, 1]
    last = begun + count - 1
    state = T.alloc_fragment((config.BV, p.KP), "float32")
    if has_far(x, i_n, i_h, step) > 0:
        cut = lambda n: (begun if step < 0 else last) - step * n  # noqa: E731
        moved = cut if step < 0 else lambda n: T.min(cut(n) + 1, last)
        load_given(p, given, is_given, i_n, i_h, v0, state)
        order = Order(moved, cut, cut)
        merge((i_h, v0), order, count, state, x.transition, own, edges, transpose_B=step < 0)
    else:
        T.clear(state)
        for n in T.serial(T.if_then_else(whole & (i_n == 0), 1, count)):
            T.copy(state, edges[begun + n, i_h, v0 : v0 + config.BV, :])
