"""Merges of segments of Gated DeltaNet, where some gate remembers: what fwd_gdn_merge and bwd_gdn_merge share.

As merge, but transitions are transposed, and lie in memory in halves, see fwd_gdn_segment:

    tile          name          dtype                     where it lives
    state, own    state, added  fp32                      registers; the next own is on its way
    transition    moved         bf16, and what it rounds  shared memory, slots that fill while others are multiplied
    state, split  Halves        bf16, and what it rounds  shared memory
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kda_tl.core.stage import Case, Operands, tunable
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.fwd_gdn_segment import round_rest
from kda_tl.templates.sm90.merge import SPLIT, Halves, MergeConfig, load_given
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


COPIES = 2  # groups of copies of a transition


@dataclass(frozen=True, kw_only=True)
class GdnMergeConfig(MergeConfig):
    """As the base; num_stages: transitions in shared memory."""

    num_stages: int = tunable(3, 2, 3)

    def reject(self, case: Case) -> str | None:
        """As the base, what the stages around it take, and shared memory for all slots."""
        if reason := super().reject(case) or reject_rows(case, (64, 128)):
            return reason
        KP = case.problem.KP
        smem = 4 * KP * (self.num_stages * KP + self.BV)
        if smem > case.device.smem_bytes:
            return f"num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        return None


@T.macro
def split(values, halves):
    """A fragment as two tiles."""
    for i, j in T.Parallel(*values.shape):
        halves.high[i, j] = T.cast(values[i, j], SPLIT)
    for i, j in T.Parallel(*values.shape):
        halves.low[i, j] = round_rest(values[i, j])


@T.macro
def load_transition(x, step, i_s, i_h, last, moved, slot):
    """The transition that leads to a segment's edge, its own or that of the segment that follows, on its way, as
    COPIES groups.
    """
    i_m = i_s if step < 0 else T.min(i_s + 1, last)
    T.async_copy(x.transition[i_m, i_h, 0, :, :], moved.high[slot, :, :])
    T.async_copy(x.transition[i_m, i_h, 1, :, :], moved.low[slot, :, :])


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
    KP, BV, stages, f32 = p.KP, config.BV, config.num_stages, "float32"
    i_n, i_h, v0 = place
    begun, count = x.cuts[i_n, 0], x.cuts[i_n, 1]
    last = begun + count - 1
    state_high = T.alloc_shared((BV, KP), SPLIT)
    state_low = T.alloc_shared((BV, KP), SPLIT)
    moved_high = T.alloc_shared((stages, KP, KP), SPLIT)
    moved_low = T.alloc_shared((stages, KP, KP), SPLIT)
    state = T.alloc_fragment((BV, KP), f32)
    added = T.alloc_fragment((BV, KP), f32)
    halves, moved = Halves(state_high, state_low), Halves(moved_high, moved_low)
    if has_far(x, i_n, i_h, step) > 0:
        begin = begun if step < 0 else last
        for n in list(range(stages - 1)):  # so many are on their way, or what stands for those that are not there
            load_transition(x, step, begin - step * T.min(n, count - 1), i_h, last, moved, n)
        load_given(p, given, is_given, i_n, i_h, v0, state)
        T.copy(own[begin, i_h, v0 : v0 + BV, :], added)
        for n in T.serial(count):
            i_s = begin - step * n
            T.ptx_wait_group(COPIES * (stages - 2))
            T.sync_threads()
            if n + stages - 1 < count:
                load_transition(x, step, i_s - step * (stages - 1), i_h, last, moved, (n + stages - 1) % stages)
            else:
                for _ in list(range(COPIES)):  # of nothing, so that as many groups are younger than the next
                    T.ptx_commit_group()
            split(state, halves)
            T.copy(added, state)
            if n + 1 < count:
                T.copy(own[i_s - step, i_h, v0 : v0 + BV, :], added)
            slot = n % stages
            T.gemm(state_high, moved_high[slot, :, :], state, transpose_B=step < 0)
            T.gemm(state_low, moved_high[slot, :, :], state, transpose_B=step < 0)
            T.gemm(state_high, moved_low[slot, :, :], state, transpose_B=step < 0)
            T.copy(state, edges[i_s, i_h, v0 : v0 + BV, :])
    else:
        T.clear(state)
        for n in T.serial(T.if_then_else(whole & (i_n == 0), 1, count)):
            T.copy(state, edges[begun + n, i_h, v0 : v0 + BV, :])
