"""Merges on Hopper: what the two stages share that take a state, or its gradient, from segment to segment.

    state <- state transition + own        state: BV rows of [V, K], in fp32 registers

Rows never meet, so a thread block owns some of a head's. A state may have decayed little in a whole sequence, and what
is rounded here stays in it: both operands are split in two of 16 bits, x = x' + r, and x' y' + r y' + x' s leaves out
2^-17 of the product.

    tile          name         dtype                      where it lives
    state, own    state, own   fp32                       registers
    transition    loaded       fp32, two slots            shared memory, the next one is on its way
    both, split   Halves       bf16, and what it rounds   shared memory
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kda_tl.core.stage import Case, Cost, tunable
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FP32_TOLERANCE, at_state
from kda_tl.templates.sm90.hopper import HopperConfig, count_bytes

SPLIT = "bfloat16"  # has the range of fp32
# all is fp32 whatever io is; sums over K channels, a segment after the other
TOLERANCE = dict.fromkeys(("bf16", "fp16", "fp32"), FP32_TOLERANCE)


@dataclass(frozen=True, kw_only=True)
class MergeConfig(HopperConfig):
    """BV: rows a thread block owns, few so that there are many; threads a block."""

    NEEDS: ClassVar[str] = "it merges what instructions of sm_90 made"
    BV: int = tunable(16, 16, 32)
    threads: int = tunable(256, 128, 256)

    def reject(self, case: Case) -> str | None:
        """The device of the stages around it, and shared memory."""
        if reason := super().reject(case):
            return reason
        K, KP, VP = case.problem.K, case.problem.KP, case.problem.VP
        if KP not in (64, 128):
            return f"K={K} is not 64 or 128 channels, which its tiles are"
        if VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {VP}"
        smem = 4 * KP * (3 * KP + self.BV)
        if smem > case.device.smem_bytes:
            return f"K={K} needs {smem} bytes of shared memory, the device has {case.device.smem_bytes}"
        return None


def merge_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> Cost:
    """Every tensor once; a product for each segment that has a transition."""
    p = case.problem
    flops = 2 * sizes["NC"] * p.HV * p.V * p.K * p.K
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)


@dataclass(frozen=True)
class Halves:
    """A tile in fp32 as the sum of two of 16 bits, in shared memory."""

    high: Any
    low: Any


@T.macro
def load_given(p, given, is_given, i_n, i_h, v0, state):
    """Rows of the caller's state of a sequence, zero if there is none."""
    if is_given:
        for i, j in T.Parallel(*state.shape):
            state[i, j] = T.if_then_else((v0 + i < p.V) & (j < p.K), given[at_state(p, i_n, i_h, j, v0 + i)], 0.0)
    else:
        T.clear(state)


@T.macro
def _split_state(state, halves):
    """A state in registers as two tiles."""
    for i, j in T.Parallel(*state.shape):
        halves.high[i, j] = T.cast(state[i, j], SPLIT)
    for i, j in T.Parallel(*state.shape):
        halves.low[i, j] = T.cast(state[i, j] - T.cast(T.cast(state[i, j], SPLIT), "float32"), SPLIT)


@T.macro
def _split_transition(loaded, slot, halves):
    """A transition in shared memory as two tiles."""
    for i, j in T.Parallel(*loaded.shape[1:]):
        halves.high[i, j] = T.cast(loaded[slot, i, j], SPLIT)
    for i, j in T.Parallel(*loaded.shape[1:]):
        x = loaded[slot, i, j]
        halves.low[i, j] = T.cast(x - T.cast(T.cast(x, SPLIT), "float32"), SPLIT)


@T.macro
def merge_segment(state, own, loaded, slot, states, transitions, transpose_B=False):
    """state <- state transition + own, in fp32 in registers, without the product of the two lower halves.

    The transition, in shared memory, is ``loaded[slot]``, or with transpose_B its transpose. ``states`` and
    ``transitions`` are room for the split operands.
    """
    _split_state(state, states)
    _split_transition(loaded, slot, transitions)
    T.copy(own, state)
    T.gemm(states.high, transitions.high, state, transpose_B=transpose_B)
    T.gemm(states.low, transitions.high, state, transpose_B=transpose_B)
    T.gemm(states.high, transitions.low, state, transpose_B=transpose_B)
