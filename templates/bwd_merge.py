"""Merge in reverse: the gradients of the states that segments end with, in fp32, from a sequence's last segment on.

    dS^T <- dS^T transition^T + dlocal

from the gradient of the final state, or zero. What the last segment makes of that is its dlocal alone, see bwd_segment;
the segments before it add what they make of zero. Rows of dS^T never meet, so a thread block owns some of a head's.
Operands are split in two of 16 bits, as in fwd_merge.
Source: derived in bwd_segment.
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
    "dlocal": "NS HV VP KP : f32",
    "transition": "NC HV KP KP : f32",
    "dht": "N HV K V : f32 ? final_state",
    "seq_segments": "N 3 : i32",
}
OUTPUTS = {"ends": "NS HV VP KP : f32"}


def reference(
    case: Case,
    *,
    dlocal: torch.Tensor,
    transition: torch.Tensor,
    dht: torch.Tensor | None,
    seq_segments: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of dlocal."""
    p = case.problem
    ends = torch.zeros_like(dlocal)
    for n, (first, count, last) in enumerate(seq_segments.tolist()):
        ends[last, :, : p.V] = read_state(case, dht, n, dlocal)
        dstate = dlocal[last]
        for i_s in reversed(range(first, first + count)):
            ends[i_s] = dstate
            dstate = dstate @ transition[i_s].mT + dlocal[i_s]
    return {"ends": ends}


@dataclass(frozen=True, kw_only=True)
class BwdMergeConfig(Config):
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


def build(case: Case, config: BwdMergeConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV rows), segments in reverse."""
    p, BV, io, f32 = case.problem, config.BV, "bfloat16", "float32"
    HV, K, V, KP, VB = p.HV, p.K, p.V, p.KP, p.VP // BV
    N, NS, NC = T.dynamic("N"), T.dynamic("NS"), T.dynamic("NC")

    @T.prim_func
    def bwd_merge(
        dlocal: annotate(case, INPUTS["dlocal"], NS=NS),
        transition: annotate(case, INPUTS["transition"], NC=NC),
        dht: annotate(case, INPUTS["dht"], N=N),
        seq_segments: annotate(case, INPUTS["seq_segments"], N=N),
        ends: annotate(case, OUTPUTS["ends"], NS=NS),
    ):
        with T.Kernel(N * HV * VB, threads=config.threads) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first = seq_segments[i_n, 0]
            count = seq_segments[i_n, 1]
            last = seq_segments[i_n, 2]
            loaded = T.alloc_shared((2, KP, KP), f32)
            dstate_high = T.alloc_shared((BV, KP), io)
            dstate_low = T.alloc_shared((BV, KP), io)
            transition_high = T.alloc_shared((KP, KP), io)
            transition_low = T.alloc_shared((KP, KP), io)
            dstate = T.alloc_fragment((BV, KP), f32)
            own = T.alloc_fragment((BV, KP), f32)
            if count > 1:
                T.async_copy(transition[first + count - 1, i_h, :, :], loaded[0, :, :])
            if p.final_state:
                for i, j in T.Parallel(BV, KP):
                    dstate[i, j] = T.if_then_else((v0 + i < V) & (j < K), dht[at_state(p, i_n, i_h, j, v0 + i)], 0.0)
            else:
                T.clear(dstate)
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
                    for i, j in T.Parallel(BV, KP):
                        dstate_high[i, j] = T.cast(dstate[i, j], io)
                    for i, j in T.Parallel(BV, KP):
                        dstate_low[i, j] = T.cast(dstate[i, j] - T.cast(T.cast(dstate[i, j], io), f32), io)
                    for i, j in T.Parallel(KP, KP):
                        transition_high[i, j] = T.cast(loaded[n % 2, i, j], io)
                    for i, j in T.Parallel(KP, KP):
                        x = loaded[n % 2, i, j]
                        transition_low[i, j] = T.cast(x - T.cast(T.cast(x, io), f32), io)
                    T.copy(own, dstate)
                    T.gemm(dstate_high, transition_high, dstate, transpose_B=True)
                    T.gemm(dstate_low, transition_high, dstate, transpose_B=True)
                    T.gemm(dstate_high, transition_low, dstate, transpose_B=True)
                T.copy(dstate, ends[first, i_h, v0 : v0 + BV, :])

    return bwd_merge


def default(case: Case) -> BwdMergeConfig:
    """Many thread blocks with few rows each."""
    return prefer(case, BwdMergeConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """dlocal, transition and gradients of final states in; one of a state a segment out; a product a segment."""
    p, NC = case.problem, sizes["NC"]
    states = 2 * sizes["NS"] * p.HV * p.VP * p.KP + sizes["N"] * p.HV * p.K * p.V * p.final_state
    moved = states + NC * p.HV * p.KP * p.KP
    return Cost(bytes=4 * moved, flops=2 * NC * p.HV * p.V * p.K * p.K)


STAGE = Stage(
    name="bwd_merge",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=BwdMergeConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # all is fp32 whatever io is; sums over K channels, a segment after the other
    tolerance=dict.fromkeys(("bf16", "fp16", "fp32"), FP32_TOLERANCE),
)
