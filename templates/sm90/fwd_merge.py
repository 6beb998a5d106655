"""Merge: the states that segments start from, in fp32, one after the other.

    S^T <- S^T transition + local

from the sequence's initial state, or zero, over the segments that do not end it. See merge.py for the operands.
Source: derived in fwd_segment.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.merge import SPLIT, TOLERANCE, Halves, MergeConfig, load_given, merge_cost, merge_segment
from kda_tl.templates.sm90.recurrence import read_state

INPUTS = {
    "local": "NC HV VP KP : f32",
    "transition": "NC HV KP KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "seq_segments": "N 3 : i32",
}
OUTPUTS = {"starts": "NS HV VP KP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of local."""
    p, rows = case.problem, x.seq_segments.tolist()
    starts = x.local.new_zeros((sum(count + 1 for _, count, _ in rows), p.HV, p.VP, p.KP))
    for n, (first, count, last) in enumerate(rows):
        state = torch.nn.functional.pad(read_state(case, x.h0, n, x.local), (0, 0, 0, p.VP - p.V))
        for i_s in range(first, first + count):
            starts[i_s] = state
            state = state @ x.transition[i_s] + x.local[i_s]
        starts[last] = state
    return {"starts": starts}


def build(case: Case, config: MergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in order."""
    p, BV, f32 = case.problem, config.BV, "float32"
    KP, VB, heads = p.KP, p.VP // BV, Heads.of(p)
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @prim_func(case, INPUTS | OUTPUTS, NC=NC, N=N, NS=NS, **heads.sizes)
    def fwd_merge(local, transition, h0, seq_segments, starts):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            v0 = i_v * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            loaded = T.alloc_shared((2, KP, KP), f32)
            state_high = T.alloc_shared((BV, KP), SPLIT)
            state_low = T.alloc_shared((BV, KP), SPLIT)
            transition_high = T.alloc_shared((KP, KP), SPLIT)
            transition_low = T.alloc_shared((KP, KP), SPLIT)
            state = T.alloc_fragment((BV, KP), f32)
            own = T.alloc_fragment((BV, KP), f32)
            states = Halves(state_high, state_low)
            transitions = Halves(transition_high, transition_low)
            if count > 0:
                T.async_copy(transition[first, i_h, :, :], loaded[0, :, :])
            load_given(p, h0, p.initial_state, i_n, i_h, v0, state)
            for n in T.serial(count):
                T.ptx_wait_group(0)
                T.sync_threads()
                if n + 1 < count:
                    T.async_copy(transition[first + n + 1, i_h, :, :], loaded[(n + 1) % 2, :, :])
                for i, j in T.Parallel(BV, KP):
                    own[i, j] = local[first + n, i_h, v0 + i, j]
                T.copy(state, starts[first + n, i_h, v0 : v0 + BV, :])
                merge_segment(state, own, loaded, n % 2, states, transitions)
            T.copy(state, starts[last, i_h, v0 : v0 + BV, :])

    return fwd_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """local, transition and initial states in; a state a segment out."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_merge", INPUTS, OUTPUTS, MergeConfig, build, reference, MergeConfig.default, cost, TOLERANCE, depends=()
)
