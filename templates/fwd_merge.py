"""Merge: the states that segments start from, in fp32, one after the other.

    S^T <- S^T transition + local

from the sequence's initial state, or zero, over the segments that do not end it. Rows of S^T never meet, so a thread
block owns some of a head's. A state may have decayed little in a whole sequence, and what is rounded here stays in it:
both operands are split in two of 16 bits, x = x' + r, and x' y' + r y' + x' s leaves out 2^-17. (In tf32, split as
well, a step took 6.7 us instead of 2.8: B1 T32768 H8, 8 segments, H200.)
Source: derived in fwd_segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Config, Cost, Stage, axis, prefer
from kda_tl.templates._recurrence import read_state
from kda_tl.templates._tile import FP32_TOLERANCE, annotate, at_state

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
    """BV: rows a thread block owns; threads a block."""

    BV: int = axis(16, 16, 32)
    threads: int = axis(256, 128, 256)

    def reject(self, case: Case) -> str | None:
        """The device of the stages around it, and shared memory."""
        if case.device.sm != 90:
            return f"it merges what instructions of sm_90 made, the device is {case.device.arch}"
        K, KP, VP = case.problem.K, case.problem.KP, case.problem.VP
        if KP not in (64, 128):
            return f"K={K} is not 64 or 128 channels, which its tiles are"
        if VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {VP}"
        smem = 4 * KP * (3 * KP + self.BV)
        if smem > case.device.smem_bytes:
            return f"K={K} needs {smem} bytes of shared memory, the device has {case.device.smem_bytes}"
        return None


def build(case: Case, config: FwdMergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in order."""
    p, BV, io, f32 = case.problem, config.BV, "bfloat16", "float32"
    HV, K, V, KP, VB = p.HV, p.K, p.V, p.KP, p.VP // BV
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @T.prim_func
    def fwd_merge(
        local: annotate(case, INPUTS["local"], NC=NC),
        transition: annotate(case, INPUTS["transition"], NC=NC),
        h0: annotate(case, INPUTS["h0"], N=N),
        seq_segments: annotate(case, INPUTS["seq_segments"], N=N),
        starts: annotate(case, OUTPUTS["starts"], NS=NS),
    ):
        with T.Kernel(N * HV * VB, threads=config.threads) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            loaded = T.alloc_shared((2, KP, KP), f32)
            state_high = T.alloc_shared((BV, KP), io)
            state_low = T.alloc_shared((BV, KP), io)
            transition_high = T.alloc_shared((KP, KP), io)
            transition_low = T.alloc_shared((KP, KP), io)
            state = T.alloc_fragment((BV, KP), f32)
            own = T.alloc_fragment((BV, KP), f32)
            if count > 0:
                T.async_copy(transition[first, i_h, :, :], loaded[0, :, :])
            if p.initial_state:
                for i, j in T.Parallel(BV, KP):
                    state[i, j] = T.if_then_else((v0 + i < V) & (j < K), h0[at_state(p, i_n, i_h, j, v0 + i)], 0.0)
            else:
                T.clear(state)
            for n in T.serial(count):
                T.ptx_wait_group(0)
                T.sync_threads()
                if n + 1 < count:
                    T.async_copy(transition[first + n + 1, i_h, :, :], loaded[(n + 1) % 2, :, :])
                for i, j in T.Parallel(BV, KP):
                    own[i, j] = local[first + n, i_h, v0 + i, j]
                T.copy(state, starts[first + n, i_h, v0 : v0 + BV, :])
                for i, j in T.Parallel(BV, KP):
                    state_high[i, j] = T.cast(state[i, j], io)
                for i, j in T.Parallel(BV, KP):
                    state_low[i, j] = T.cast(state[i, j] - T.cast(T.cast(state[i, j], io), f32), io)
                for i, j in T.Parallel(KP, KP):
                    transition_high[i, j] = T.cast(loaded[n % 2, i, j], io)
                for i, j in T.Parallel(KP, KP):
                    x = loaded[n % 2, i, j]
                    transition_low[i, j] = T.cast(x - T.cast(T.cast(x, io), f32), io)
                T.copy(own, state)
                T.gemm(state_high, transition_high, state)
                T.gemm(state_low, transition_high, state)
                T.gemm(state_high, transition_low, state)
            T.copy(state, starts[last, i_h, v0 : v0 + BV, :])

    return fwd_merge


def default(case: Case) -> FwdMergeConfig:
    """Many thread blocks with few rows each."""
    return prefer(case, FwdMergeConfig())


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
