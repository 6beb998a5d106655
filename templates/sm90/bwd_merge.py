"""Merge in reverse: the gradients of the states that segments end with, in fp32, from a sequence's last segment on.

    dS^T <- dS^T transition + dlocal

from the gradient of the final state, or zero, with transitions transposed as fwd_segment leaves them. What the last
segment makes of that is its dlocal alone, see bwd_segment; the segments before it add what they make of zero. See
merge.py for the operands.
Source: derived in bwd_segment.
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
    "dlocal": "NS HV VP KP : f32",
    **MOVED,
    "dht": "N HV K V : f32 ? final_state",
    "seq_segments": "N 3 : i32",
}
OUTPUTS = {"ends": "NS HV VP KP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of dlocal."""
    p = case.problem
    ends = torch.zeros_like(x.dlocal)
    for n, (first, count, last) in enumerate(x.seq_segments.tolist()):
        ends[last, :, : p.V] = read_state(case, x.dht, n, x.dlocal)
        dstate = x.dlocal[last]
        for i_s in reversed(range(first, first + count)):
            ends[i_s] = dstate
            dstate = dstate @ x.transition[i_s].sum(1) + x.dlocal[i_s]
    return {"ends": ends}


def build(case: Case, config: MergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in reverse."""
    p, BV, heads = case.problem, config.BV, Heads.of(case.problem)
    VB = p.VP // BV
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @prim_func(case, INPUTS | OUTPUTS, NS=NS, NC=NC, N=N, **heads.sizes)
    def bwd_merge(dlocal, transition, dht, seq_segments, ends):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            v0 = i_v * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            dstate = T.alloc_fragment((BV, p.KP), "float32")
            load_given(p, dht, p.final_state, i_n, i_h, v0, dstate)
            T.copy(dstate, ends[last, i_h, v0 : v0 + BV, :])
            cut = lambda n: first + count - 1 - n  # noqa: E731
            order = Order(cut, cut, lambda n: cut(n) - 1)
            if count > 0:
                for i, j in T.Parallel(BV, p.KP):
                    dstate[i, j] = dlocal[last, i_h, v0 + i, j]
                T.copy(dstate, ends[first + count - 1, i_h, v0 : v0 + BV, :])
            if count > 1:
                merge((i_h, v0), order, count - 1, dstate, transition, dlocal, ends, transpose_B=False)

    return bwd_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """dlocal, transition and gradients of final states in; one of a state a segment out."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "bwd_merge", INPUTS, OUTPUTS, MergeConfig, build, reference, MergeConfig.default, cost, TOLERANCE, depends=()
)
