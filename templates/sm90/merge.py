"""Merges on Hopper: what the stages share that take a state, or its gradient, from segment to segment.

    state <- state transition + own        state: BV rows of [V, K], in fp32 registers

Rows never meet, so a thread block owns some of a head's. A state may have decayed little in a whole sequence, and what
is rounded here stays in it: both operands are split in two of 16 bits, x = x' + r, and x' y' + r y' + x' s leaves out
2^-17 of the product. Transitions come transposed and in halves from the segments' walks.

    tile          name          dtype                     where it lives
    state, own    state, added  fp32                      registers; the next own is on its way
    transition    moved         bf16, and what it rounds  shared memory, slots that fill while others are multiplied
    state, split  Halves        bf16, and what it rounds  shared memory
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kda_tl.core.stage import Case, Cost, tunable
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FP32_TOLERANCE, at_state
from kda_tl.templates.sm90.hopper import HopperConfig, count_bytes
from kda_tl.templates.sm90.recurrence import PRODUCER

SPLIT = "bfloat16"  # has the range of fp32
# Of a segment, transposed: rounded, and what that leaves out
MOVED = {"transition": "NC HV 2 KP KP : bf16"}
# all is fp32 whatever io is; sums over K channels, a segment after the other
TOLERANCE = dict.fromkeys(("bf16", "fp16", "fp32"), FP32_TOLERANCE)
SLOTS = 3  # transitions in shared memory: a slot is multiplied while the next are on their way
ROW_PAD = 8  # elements, so that rows begin in different banks


@dataclass(frozen=True, kw_only=True)
class MergeConfig(HopperConfig):
    """BV: rows a thread block owns, few so that there are many; threads a block."""

    NEEDS: ClassVar[str] = "it merges what instructions of sm_90 made"
    BV: int = tunable(16, 16, 32)
    threads: int = tunable(256, 128, 256)

    def reject(self, case: Case) -> str | None:
        """The device of the stages around it, and shared memory for all slots."""
        if reason := super().reject(case):
            return reason
        K, KP, VP = case.problem.K, case.problem.KP, case.problem.VP
        if KP not in (64, 128):
            return f"K={K} is not 64 or 128 channels, which its tiles are"
        if VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {VP}"
        smem = 4 * KP * (SLOTS * KP + self.BV) + 8 * SLOTS
        if smem > case.device.smem_bytes:
            return f"K={K} needs {smem} bytes of shared memory, the device has {case.device.smem_bytes}"
        return None


def merge_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> Cost:
    """Every tensor once; a product for each segment that has a transition."""
    p = case.problem
    flops = 2 * sizes["NC"] * p.HV * p.V * p.K * p.K
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)


def split_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in halves, the second of which is exact here."""
    high = x.bfloat16().to(x.dtype)
    return high, x - high


@dataclass(frozen=True)
class Halves:
    """A tile in fp32 as the sum of two of 16 bits, in shared memory."""

    high: Any
    low: Any


@dataclass(frozen=True)
class Order:
    """Of the n-th merge, by n: the segment whose transition it takes, the one whose own it adds, and the row of what
    is merged that it leads to.
    """

    moved: Callable[[Any], Any]
    own: Callable[[Any], Any]
    merged: Callable[[Any], Any]


def round_rest(x: Any) -> Any:
    """What rounding leaves out of a number, rounded."""
    return T.cast(x - T.cast(T.cast(x, SPLIT), "float32"), SPLIT)


@T.macro
def split(values, halves):
    """A fragment as two tiles."""
    for i, j in T.Parallel(*values.shape):
        halves.high[i, j] = T.cast(values[i, j], SPLIT)
    for i, j in T.Parallel(*values.shape):
        halves.low[i, j] = round_rest(values[i, j])


@T.macro
def store_transition(rows, rows_shared, transition, i_s, i_h, k0):
    """Rows of a segment's transposed transition, a half after the other by way of shared memory: from registers a
    sector of memory would be written in two parts.
    """
    for half in list(range(2)):
        for i, j in T.Parallel(*rows.shape):
            rows_shared[i, j] = T.cast(rows[i, j], SPLIT) if half == 0 else round_rest(rows[i, j])
        for i, j in T.Parallel(*rows.shape):
            transition[i_s, i_h, half, k0 + i, j] = rows_shared[i, j]


@T.macro
def load_given(p, given, is_given, i_n, i_h, v0, state):
    """Rows of the caller's state of a sequence, zero if there is none."""
    if is_given:
        for i, j in T.Parallel(*state.shape):
            state[i, j] = T.if_then_else((v0 + i < p.V) & (j < p.K), given[at_state(p, i_n, i_h, j, v0 + i)], 0.0)
    else:
        T.clear(state)


@T.macro
def load_transition(transition, i_s, i_h, moved, slot, full):
    """Producer: a transition on its way, by the first warp."""
    if T.get_thread_binding() < PRODUCER:
        T.tma_copy(transition[i_s, i_h, 0, :, :], moved.high[slot, :, :], barrier=full[slot])
        T.tma_copy(transition[i_s, i_h, 1, :, :], moved.low[slot, :, :], barrier=full[slot])
        T.barrier_arrive(full[slot])


@T.macro
def merge(place, order, count, state, transition, own, merged, transpose_B):
    """state <- state transition + own in fp32, ``count`` times, at least once, without products of lower halves.

    Args:
        place: the value head and the first row of the block.
        order: what each merge takes, and where its result is written.
        count: of merges.
        state: a fragment of BV rows that holds what the first one begins with.
        transition: transposed, of all segments, in halves.
        own: what segments add.
        merged: written, after each merge.
        transpose_B: whether states are merged; their gradients are multiplied by the transposed transition.
    """
    (BV, KP), (i_h, v0) = state.shape, place
    state_high = T.alloc_shared((BV, KP), SPLIT)
    state_low = T.alloc_shared((BV, KP), SPLIT)
    moved_high = T.alloc_shared((SLOTS, KP, KP), SPLIT)
    moved_low = T.alloc_shared((SLOTS, KP, KP), SPLIT)
    added = T.alloc_fragment((BV, KP), "float32")
    halves, moved = Halves(state_high, state_low), Halves(moved_high, moved_low)
    full = T.alloc_barrier(arrive_count=[PRODUCER] * SLOTS)
    for n in list(range(SLOTS - 1)):
        if n < count:
            load_transition(transition, order.moved(n), i_h, moved, n, full)
    T.copy(own[order.own(0), i_h, v0 : v0 + BV, :], added)
    for n in T.serial(count):
        slot = n % SLOTS
        T.sync_threads()  # the slot of the merge before has been read
        split(state, halves)
        if n + SLOTS - 1 < count:
            load_transition(transition, order.moved(n + SLOTS - 1), i_h, moved, (n + SLOTS - 1) % SLOTS, full)
        T.copy(added, state)
        if n + 1 < count:
            T.copy(own[order.own(n + 1), i_h, v0 : v0 + BV, :], added)
        T.barrier_wait(full[slot], n // SLOTS % 2)
        T.gemm(state_high, moved_high[slot, :, :], state, transpose_B=transpose_B)
        T.gemm(state_low, moved_high[slot, :, :], state, transpose_B=transpose_B)
        T.gemm(state_high, moved_low[slot, :, :], state, transpose_B=transpose_B)
        T.copy(state, merged[order.merged(n), i_h, v0 : v0 + BV, :])
