"""Merge: the states that segments start from, in fp32, one after the other.

    S^T <- S^T transition^T + local

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
from kda_tl.templates.sm90.merge import MOVED, TOLERANCE, MergeConfig, Order, load_given, merge, merge_cost
from kda_tl.templates.sm90.recurrence import read_state

INPUTS = {
    "local": "NC HV VP KP : f32",
    **MOVED,
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
            state = state @ x.transition[i_s].sum(1).mT + x.local[i_s]
        starts[last] = state
    return {"starts": starts}


def build(case: Case, config: MergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in order."""
    p, BV, heads = case.problem, config.BV, Heads.of(case.problem)
    VB = p.VP // BV
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @prim_func(case, INPUTS | OUTPUTS, NC=NC, N=N, NS=NS, **heads.sizes)
    def fwd_merge(local, transition, h0, seq_segments, starts):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            v0 = i_v * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            state = T.alloc_fragment((BV, p.KP), "float32")
            load_given(p, h0, p.initial_state, i_n, i_h, v0, state)
            T.copy(state, starts[T.if_then_else(count > 0, first, last), i_h, v0 : v0 + BV, :])
            cut = lambda n: first + n  # noqa: E731
            order = Order(cut, cut, lambda n: T.if_then_else(n + 1 < count, first + n + 1, last))
            if count > 0:
                merge((i_h, v0), order, count, state, transition, local, starts, transpose_B=True)

    return fwd_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """local, transition and initial states in; a state a segment out."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_merge", INPUTS, OUTPUTS, MergeConfig, build, reference, MergeConfig.default, cost, TOLERANCE, depends=()
)
