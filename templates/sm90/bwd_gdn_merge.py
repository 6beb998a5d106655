"""Merges of Gated DeltaNet in both directions: states, and gradients of states, between segments, in fp32.

    S^T <- S^T transition + local                  from a sequence's first cut segment to its last
    dS^T <- dS^T transition^T + dlocal             from its last to its first, of the segment that follows each

of what bwd_gdn_segment made. The first of either is what the caller's state has become already. Nothing is merged
where walks find their own start, see reach, and zeros are left. See merge.py for the operands.
Source: derived in fwd_segment and bwd_segment.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.bwd_gdn_segment import OUTPUTS as MADE
from kda_tl.templates.sm90.hopper import BOUNDS, ENDS, TABLES, count_bytes
from kda_tl.templates.sm90.merge import SPLIT, TOLERANCE, Halves, MergeConfig, merge_segment
from kda_tl.templates.sm90.reach import CUTS, EDGES, OWNERS, far_reference, has_far

INPUTS = {**MADE, **BOUNDS, **OWNERS, **CUTS, "segments": TABLES["segments"]}
OUTPUTS = {**EDGES, **ENDS}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of local."""
    edges, ends = torch.zeros_like(x.local), torch.zeros_like(x.dlocal)
    for n, (begun, count, _) in enumerate(x.seq_segments.tolist()):
        before, after = (far_reference(x, n, step)[:, None, None] for step in (-1, 1))
        state, dstate = (torch.zeros_like(y[0]) for y in (x.local, x.dlocal))
        for i_s in range(begun, begun + count):
            state = (state @ x.transition[i_s] if i_s > begun else 0) + x.local[i_s]
            edges[i_s] = state * before
        for i_s in reversed(range(begun, begun + count)):
            dstate = (dstate @ x.transition[i_s + 1].mT if i_s + 1 < begun + count else 0) + x.dlocal[i_s]
            ends[i_s] = dstate * after
    return {"edges": edges, "ends": ends}


def build(case: Case, config: MergeConfig) -> Any:
    """The kernel: one thread block a (direction, sequence, value head, BV rows)."""
    p, BV, f32 = case.problem, config.BV, "float32"
    KP, VB, heads = p.KP, p.V // BV, Heads.of(p)
    N, NS, NC, NT = (T.dynamic(name) for name in ("N", "NS", "NC", "NT"))

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, NS=NS, NC=NC, N=N, **heads.sizes)
    def bwd_gdn_merge(local, transition, dlocal, bounds, segment_sequences, seq_segments, segments, edges, ends):
        with T.Kernel(2 * N * heads.HV * VB, threads=config.threads) as i_block:
            back = i_block < N * heads.HV * VB
            i_n, i_h, i_v = split_block(i_block - T.if_then_else(back, 0, N * heads.HV * VB), (N, heads.HV), VB)
            v0, begun, count = i_v * BV, seq_segments[i_n, 0], seq_segments[i_n, 1]
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            x = SimpleNamespace(bounds=bounds, **tables)
            loaded = T.alloc_shared((2, KP, KP), f32)
            state_high = T.alloc_shared((BV, KP), SPLIT)
            state_low = T.alloc_shared((BV, KP), SPLIT)
            transition_high = T.alloc_shared((KP, KP), SPLIT)
            transition_low = T.alloc_shared((KP, KP), SPLIT)
            state = T.alloc_fragment((BV, KP), f32)
            own = T.alloc_fragment((BV, KP), f32)
            states = Halves(state_high, state_low)
            transitions = Halves(transition_high, transition_low)
            merged = T.alloc_var("int32")
            merged = 0
            if has_far(x, i_n, i_h, T.if_then_else(back, 1, -1)) > 0:
                merged = count
            T.clear(state)
            rows = T.if_then_else((NS == N) & (i_n == 0), 1, count)  # where nothing is cut there is one
            for n in T.serial(T.if_then_else(merged > 0, 0, rows)):
                if back:
                    T.copy(state, ends[begun + n, i_h, v0 : v0 + BV, :])
                else:
                    T.copy(state, edges[begun + n, i_h, v0 : v0 + BV, :])
            if merged > 1:
                T.async_copy(transition[T.if_then_else(back, begun + count - 1, begun + 1), i_h, :, :], loaded[1, :, :])
            for n in T.serial(merged):
                i_s = T.if_then_else(back, begun + count - 1 - n, begun + n)
                if n > 0:
                    T.ptx_wait_group(0)
                    T.sync_threads()
                    if n + 1 < merged:
                        T.async_copy(
                            transition[T.if_then_else(back, i_s, i_s + 1), i_h, :, :], loaded[(n + 1) % 2, :, :]
                        )
                if back:
                    for i, j in T.Parallel(BV, KP):
                        own[i, j] = dlocal[i_s, i_h, v0 + i, j]
                    if n == 0:
                        T.copy(own, state)
                    else:
                        merge_segment(state, own, loaded, n % 2, states, transitions, transpose_B=True)
                    T.copy(state, ends[i_s, i_h, v0 : v0 + BV, :])
                else:
                    for i, j in T.Parallel(BV, KP):
                        own[i, j] = local[i_s, i_h, v0 + i, j]
                    if n == 0:
                        T.copy(own, state)
                    else:
                        merge_segment(state, own, loaded, n % 2, states, transitions)
                    T.copy(state, edges[i_s, i_h, v0 : v0 + BV, :])

    return bwd_gdn_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; a product a segment in either direction."""
    p = case.problem
    flops = 2 * 2 * sizes["NC"] * p.HV * p.V * p.K * p.K
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


STAGE = Stage(
    "bwd_gdn_merge", INPUTS, OUTPUTS, MergeConfig, build, reference, MergeConfig.default, cost, TOLERANCE, depends=()
)
