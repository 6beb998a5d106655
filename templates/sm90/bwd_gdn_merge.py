"""Merge of Gated DeltaNet backwards: gradients of states between segments, in fp32, one after the other.

    dS^T <- dS^T transition + dlocal

from a sequence's last cut segment to its first, with the transition of the segment that follows each, transposed as
fwd_gdn_segment leaves it. The first of them is what the caller's gradient has become already. Nothing is merged where
walks find their own start, see reach, and zeros are left. See gdn_merge for the operands.
Source: derived in bwd_segment.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.bwd_gdn_segment import OUTPUTS as ADDED
from kda_tl.templates.sm90.gdn_merge import GdnMergeConfig, merge_far, merge_reference
from kda_tl.templates.sm90.hopper import BOUNDS, ENDS, TABLES
from kda_tl.templates.sm90.merge import MOVED, TOLERANCE, merge_cost
from kda_tl.templates.sm90.reach import CUTS, OWNERS

INPUTS = {**ADDED, **MOVED, **BOUNDS, **OWNERS, **CUTS, "segments": TABLES["segments"]}
OUTPUTS = ENDS


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of dlocal."""
    return {"ends": merge_reference(case, x, None, x.dlocal, 1)}


def build(case: Case, config: GdnMergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments from the last to the first."""
    p, BV, heads = case.problem, config.BV, Heads.of(case.problem)
    VB = p.V // BV
    N, NS, NC, NT = (T.dynamic(name) for name in ("N", "NS", "NC", "NT"))

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, NS=NS, NC=NC, N=N, **heads.sizes)
    def bwd_gdn_merge(dlocal, transition, bounds, segment_sequences, seq_segments, segments, ends):
        with T.Kernel(N * heads.HV * VB, threads=config.threads) as i_block:
            i_n, i_h, i_v = split_block(i_block, (N, heads.HV), VB)
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            x = SimpleNamespace(transition=transition, bounds=bounds, **tables)
            merge_far(p, config, 1, (i_n, i_h, i_v * BV), NS == N, x, None, False, dlocal, ends)

    return bwd_gdn_merge


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; a product a segment."""
    return merge_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "bwd_gdn_merge",
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
