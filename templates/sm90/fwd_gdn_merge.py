"""Merge of Gated DeltaNet: states between segments, in fp32, one after the other.

    S^T <- S^T transition^T + local

from the sequence's initial state, or zero, over the segments that do not end it. Nothing is merged where walks find
their own start, see reach, and zeros are left. See gdn_merge for the operands.
Source: derived in fwd_segment.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.fwd_gdn_segment import OUTPUTS as MADE
from kda_tl.templates.sm90.gdn_merge import GdnMergeConfig, merge_far, merge_reference
from kda_tl.templates.sm90.hopper import BOUNDS, TABLES
from kda_tl.templates.sm90.merge import TOLERANCE, merge_cost
from kda_tl.templates.sm90.reach import CUTS, EDGES, OWNERS

INPUTS = {
    **MADE,
    **BOUNDS,
    "h0": "N HV K V : f32 ? initial_state",
    **OWNERS,
    **CUTS,
    "segments": TABLES["segments"],
}
OUTPUTS = EDGES


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of local."""
    return {"edges": merge_reference(case, x, x.h0, x.local, -1)}


def build(case: Case, config: GdnMergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in order."""
    p, BV, heads = case.problem, config.BV, Heads.of(case.problem)
    VB = p.V // BV
    N, NS, NC, NT = (T.dynamic(name) for name in ("N", "NS", "NC", "NT"))

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, NS=NS, NC=NC, N=N, **heads.sizes)
    def fwd_gdn_merge(local, transition, bounds, h0, segment_sequences, seq_segments, segments, edges):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            x = SimpleNamespace(transition=transition, bounds=bounds, **tables)
            merge_far(p, config, -1, (i_n, i_h, i_v * BV), NS == N, x, h0, p.initial_state, local, edges)

    return fwd_gdn_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; a product a segment."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_gdn_merge",
    INPUTS,
    OUTPUTS,
    GdnMergeConfig,
    build,
    reference,
    GdnMergeConfig.default,
    cost,
    TOLERANCE,
    depends=(),
)
