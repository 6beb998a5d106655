"""Merge in reverse: the gradients of the states that segments end with, in fp32, from a sequence's last segment on.

    dS^T <- dS^T transition^T + dlocal

from the gradient of the final state, or zero. What the last segment makes of that is its dlocal alone, see bwd_segment;
the segments before it add what they make of zero. See merge.py for the operands.
Source: derived in bwd_segment.
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
    "dlocal": "NS HV VP KP : f32",
    "transition": "NC HV KP KP : f32",
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
            dstate = dstate @ x.transition[i_s].mT + x.dlocal[i_s]
    return {"ends": ends}


def build(case: Case, config: MergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in reverse."""
    p, BV, f32 = case.problem, config.BV, "float32"
    KP, VB, heads = p.KP, p.VP // BV, Heads.of(p)
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @prim_func(case, INPUTS | OUTPUTS, NS=NS, NC=NC, N=N, **heads.sizes)
    def bwd_merge(dlocal, transition, dht, seq_segments, ends):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            v0 = i_v * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            loaded = T.alloc_shared((2, KP, KP), f32)
            dstate_high = T.alloc_shared((BV, KP), SPLIT)
            dstate_low = T.alloc_shared((BV, KP), SPLIT)
            transition_high = T.alloc_shared((KP, KP), SPLIT)
            transition_low = T.alloc_shared((KP, KP), SPLIT)
            dstate = T.alloc_fragment((BV, KP), f32)
            own = T.alloc_fragment((BV, KP), f32)
            dstates = Halves(dstate_high, dstate_low)
            transitions = Halves(transition_high, transition_low)
            if count > 1:
                T.async_copy(transition[first + count - 1, i_h, :, :], loaded[0, :, :])
            load_given(p, dht, p.final_state, i_n, i_h, v0, dstate)
            T.copy(dstate, ends[last, i_h, v0 : v0 + BV, :])
            if count > 0:
                for i, j in T.Parallel(BV, KP):
                    dstate[i, j] = dlocal[last, i_h, v0 + i, j]
                for n in T.serial(count - 1):
                    i_s = first + count - 1 - n
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    if n + 2 < count:
                        T.async_copy(transition[i_s - 1, i_h, :, :], loaded[(n + 1) % 2, :, :])
                    for i, j in T.Parallel(BV, KP):
                        own[i, j] = dlocal[i_s, i_h, v0 + i, j]
                    T.copy(dstate, ends[i_s, i_h, v0 : v0 + BV, :])
                    merge_segment(dstate, own, loaded, n % 2, dstates, transitions, transpose_B=True)
                T.copy(dstate, ends[first, i_h, v0 : v0 + BV, :])

    return bwd_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """dlocal, transition and gradients of final states in; one of a state a segment out."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "bwd_merge", INPUTS, OUTPUTS, MergeConfig, build, reference, MergeConfig.default, cost, TOLERANCE, depends=()
)
