"""Merge: the states that segments start from, in fp32, one after the other.

    S^T <- S^T transition + local

from the sequence's initial state, or zero, over the segments that do not end it. Rows of S^T never meet, so a thread
block owns some of a head's. The products are those of fp32 operands: a state may have decayed little in a whole
sequence, and what is rounded here stays in it.
Source: derived in fwd_segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Config, Cost, Stage, axis, prefer
from kda_tl.templates._recurrence import read_state
from kda_tl.templates._tile import FP32_TOLERANCE, Tile, annotate

INPUTS = {
    "local": "NC HV VP KP : f32",
    "transition": "NC HV KP KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "seq_segments": "N 3 : i32",
}
OUTPUTS = {"starts": "NS HV VP KP : f32"}


def reference(
    case: Case,
    *,
    local: torch.Tensor,
    transition: torch.Tensor,
    h0: torch.Tensor | None,
    seq_segments: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of local."""
    p, rows = case.problem, seq_segments.tolist()
    starts = local.new_zeros((sum(count + 1 for _, count, _ in rows), p.HV, p.VP, p.KP))
    for n, (first, count, last) in enumerate(rows):
        state = torch.nn.functional.pad(read_state(case, h0, n, local), (0, 0, 0, p.VP - p.V))
        for i_s in range(first, first + count):
            starts[i_s] = state
            state = state @ transition[i_s] + local[i_s]
        starts[last] = state
    return {"starts": starts}


@dataclass(frozen=True, kw_only=True)
class FwdMergeConfig(Config):
    """BV: rows a thread block owns; num_stages: segments loaded ahead; threads a block."""

    BV: int = axis(16, 16, 32, 64)
    num_stages: int = axis(2, 1, 2)
    threads: int = axis(128, 128, 256)

    def reject(self, case: Case) -> str | None:
        """BV divides, every warp has rows of products, and the tiles and their rests fit shared memory."""
        p = case.problem
        if p.VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {p.VP}"
        if case.device.kind == "cpu":
            only = (self.num_stages, self.threads) == (2, 128)
            return None if only else "num_stages and threads have no meaning on the CPU target"
        if self.threads == 256 and self.num_stages > 1:
            return "threads=256 are refused beside loads ahead: two warpgroups would share a pipeline"
        if self.threads == 256 and self.BV == 16:
            return "BV=16 leaves 8 warps less than a 16 x 16 tile each"
        tile, square = self.BV * p.KP, p.KP * p.KP
        smem = 4 * (self.num_stages * (square + tile) + square + 2 * tile)
        if smem > case.device.smem_bytes:
            return f"BV={self.BV}, num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        return None


def build(case: Case, config: FwdMergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in order."""
    p, BV = case.problem, config.BV
    HV, K, V, KP, VB = p.HV, p.K, p.V, p.KP, p.VP // BV
    tile = Tile.of(case)
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")
    state_shape = "N HV V K" if p.state_v_first else "N HV K V"

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @T.prim_func
    def fwd_merge(
        local: annotate(case, INPUTS["local"], NC=NC),
        transition: annotate(case, INPUTS["transition"], NC=NC),
        h0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
        seq_segments: annotate(case, INPUTS["seq_segments"], N=N),
        starts: annotate(case, OUTPUTS["starts"], NS=NS),
    ):
        with tile.kernel(N * HV * VB, threads=config.threads) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first = seq_segments[i_n, 0]
            last = seq_segments[i_n, 2]
            state = tile.fragment((BV, KP))
            state_shared = tile.shared((BV, KP), "float32")
            local_shared = tile.shared((BV, KP), "float32")
            transition_shared = tile.shared((KP, KP), "float32")
            if p.initial_state:
                for i, j in tile.parallel(BV, KP):
                    state[i, j] = T.if_then_else((v0 + i < V) & (j < K), state_at(h0, i_n, i_h, j, v0 + i), 0.0)
            else:
                T.clear(state)
            for i_s in tile.pipelined(seq_segments[i_n, 1], num_stages=config.num_stages):
                T.copy(transition[first + i_s, i_h, :, :], transition_shared)
                T.copy(local[first + i_s, i_h, v0 : v0 + BV, :], local_shared)
                T.copy(state, state_shared)
                T.copy(state_shared, starts[first + i_s, i_h, v0 : v0 + BV, :])
                for i, j in tile.parallel(BV, KP):
                    state[i, j] = local_shared[i, j]
                tile.gemm(state_shared, transition_shared, state)
            T.copy(state, state_shared)
            T.copy(state_shared, starts[last, i_h, v0 : v0 + BV, :])

    return fwd_merge


def default(case: Case) -> FwdMergeConfig:
    """Many thread blocks with few rows each, the next segment on its way; one where shared memory is short."""
    return prefer(case, FwdMergeConfig(), FwdMergeConfig(num_stages=1))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """local, transition and initial states in; a state a segment out; one product for each that ends no sequence."""
    p, NC = case.problem, sizes["NC"]
    states = (NC + sizes["NS"]) * p.HV * p.VP * p.KP + sizes["N"] * p.HV * p.K * p.V * p.initial_state
    moved = states + NC * p.HV * p.KP * p.KP
    return Cost(bytes=4 * moved, flops=2 * NC * p.HV * p.V * p.K * p.K)


STAGE = Stage(
    name="fwd_merge",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=FwdMergeConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # all is fp32 whatever io is; sums over K channels, a segment after the other
    tolerance=dict.fromkeys(("bf16", "fp16", "fp32"), FP32_TOLERANCE),
)
