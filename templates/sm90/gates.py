"""Gates of a chunk, for fwd_prep and bwd_gradients: decays in few instructions, their sums, and anchors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FORGOTTEN, RCP_LN2, beta_factor
from kda_tl.templates.sm90.rows import BC, NB
from kda_tl.templates.sm90.warp import sum_before

WARP_CHANNELS = 128  # of a sub-chunk that a warp has
LIMIT = 110.0  # of half a sub-chunk's decay, in powers of two: fp32 and bf16 hold 2^127, and keys may be larger than 1
OVERFLOW = 1e38  # of decays that may be infinite


def reject_chunk(case: Case) -> str | None:
    """What kernels of whole chunks with anchors cannot run on Hopper: all but bf16 and a gate a channel."""
    p = case.problem
    if (case.BT, case.BC) != (64, 16):
        return f"it is written for BT=64, BC=16, not BT={case.BT}, BC={case.BC}"
    if p.dtype != "bf16":
        return f"{p.dtype} operands are refused: only bf16 holds anchored factors on the matrix unit"
    if p.scalar_gate or p.rank > 1:
        return "it takes one gate a channel and one row a token"
    return None


@dataclass(frozen=True)
class Gate:
    """The decays of a problem as expressions: fwd_gate's, for fewer instructions."""

    p: Problem

    def slope(self, A_log: Any, i_hv: Any) -> Any:
        """-exp(A_log) / ln 2."""
        return -RCP_LN2 * T.exp(A_log[i_hv]) if self.p.has_A_log else -RCP_LN2

    def bias(self, dt_bias: Any, i_hv: Any, j: Any) -> Any:
        """dt_bias, 0 in padded channels."""
        if not self.p.has_dt_bias:
            return 0.0
        return T.if_then_else(j < self.p.K, dt_bias[i_hv, j], 0.0) if self.p.KP > self.p.K else dt_bias[i_hv, j]

    def decay_scale(self, slope: Any, lower_bound: Any) -> Any:
        """What every decay of a head is a multiple of: with 0 in its place a row adds nothing."""
        return {"log": RCP_LN2, "safe": lower_bound * RCP_LN2, "softplus": slope / RCP_LN2}[self.p.gate]

    def log2_decay(self, x: Any, decay_scale: Any, slope: Any, bias: Any, overflow: bool = False) -> Any:
        """Of a raw gate. Fast log2 of 1 + t is off by 2^-22: 2.5e-4 of a decay of 2^-10.

        With ``overflow`` that of softplus is infinite where its exponential is, from 88 on, or no number where the
        scale is 0: two instructions less.
        """
        if self.p.gate == "log":
            return x * decay_scale
        if self.p.gate == "safe":
            return decay_scale * (1.0 / (1.0 + T.exp2(slope * x + slope * bias)))  # the product becomes part of the sum
        z = RCP_LN2 * x + RCP_LN2 * bias
        if overflow:
            return decay_scale * T.log2(1.0 + T.exp2(z))
        return decay_scale * (T.max(z, 0.0) + T.log2(1.0 + T.exp2(T.min(z, -z))))

    def anchor(self, x: Any) -> Any:
        """The integer nearest to x; the even one if the gate has no bound: then half of a distance is an integer too.

        Neighbouring anchors may lie 2 LIMIT apart, a power of two that fp32 and bf16 take for 0 while rows and keys on
        either side of what decays steeply belong together. Keys go by way of their sub-chunk's end, which is an
        integer's distance, sums of gradients half of the way, twice.
        """
        return T.round(x) if self.p.bounded_gate else 2.0 * T.round(0.5 * x)

    def link(self, distance: Any) -> Any:
        """The power of two that takes a number to a later anchor; half of the way if the gate has no bound."""
        return T.exp2(distance if self.p.bounded_gate else 0.5 * distance)

    def move(self, x: Any, link: Any) -> Any:
        """A number all of its way."""
        return x * link if self.p.bounded_gate else x * link * link


LEAST_STEP = 2.0**-40


def find_step(p: Problem, raw: Any) -> Any:
    """beta_factor; not below 2^-40 before a backward, which divides by it: no output shows the difference."""
    step = beta_factor(p, raw)
    return step if p.direction == "fwd" else T.if_then_else(T.abs(step) < LEAST_STEP, LEAST_STEP, step)


@T.macro
def load_gates(g, K, start, count, i_hv, raw):
    """Raw gates to registers, row by row of all sub-chunks."""
    KP, own = raw.shape[2], HeadRows.of(g, start, i_hv)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            inside = (s * BC + i < count) & (j < K)
            raw[i, s, j] = T.if_then_else(inside, own.rows[s * BC + i, j], 0)


@T.macro
def sum_gates(gate, raw, count, slope, decay_scale, bias, local, middle, total):
    """Cumsums inside the sub-chunks. Rows past the end and padded channels add nothing."""
    KP = raw.shape[2]
    step = T.alloc_fragment((NB, KP), "float32")
    T.clear(total)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            own_scale = T.if_then_else((s * BC + i < count) & (j < gate.p.K), decay_scale, 0.0)
            step[s, j] = gate.log2_decay(T.cast(raw[i, s, j], "float32"), own_scale, slope, bias[s, j], overflow=True)
        for s, j in T.Parallel(NB, KP):
            total[s, j] = total[s, j] + step[s, j]
        for s, j in T.Parallel(NB, KP):
            local[i, s, j] = total[s, j]
        if i == BC // 2 - 1:
            for s, j in T.Parallel(NB, KP):
                middle[s, j] = total[s, j]


@T.macro
def sum_decays(gate, raw, A_log, dt_bias, lower_bound, at, i, total):
    """A token's log2 decay, of token ``i`` for this thread, summed over its warp from the first token to it.

    A token that forgets everything counts as fwd_gate counts it: its size would blur what comes after it.
    """
    slope = T.alloc_local((2,), "float32")
    slope[0] = gate.slope(A_log, at.i_hv)
    slope[1] = gate.decay_scale(slope[0], lower_bound)
    step = gate.log2_decay(
        T.cast(raw, "float32"), slope[1], slope[0], dt_bias[at.i_hv, 0] if gate.p.has_dt_bias else 0.0
    )
    total[0] = T.if_then_else(i < at.count, T.if_then_else(step < FORGOTTEN, FORGOTTEN, step), 0.0)
    sum_before(total)


@T.macro
def sum_head_gates(gate, g, A_log, dt_bias, lower_bound, at, half, G):
    """Sums ``G`` of a chunk's log2 decays, of a gate that channels share, a thread a token.

    Past the end nothing is added. ``G`` and ``half``, room for the sum of 32 tokens, lie in shared memory.
    """
    BT, thread = G.shape[0], T.get_thread_binding()
    total = T.alloc_local((1,), "float32")
    if thread < BT:
        raw = T.if_then_else(thread < at.count, g[at.start + thread, at.i_hv, 0], 0)
        sum_decays(gate, raw, A_log, dt_bias, lower_bound, at, thread, total)
        if thread == 31:
            half[0] = total[0]
    T.sync_threads()
    if thread < BT:
        G[thread] = total[0] + T.if_then_else(thread >= 32, half[0], 0.0)
    T.sync_threads()


@T.macro
def find_steepest(middle, total, steepest):
    """The least exponent of any half of a sub-chunk; least of all where a decay is infinite or no number."""
    KP = middle.shape[1]
    halves = T.alloc_fragment((NB, KP), "float32")
    least = T.alloc_fragment((NB,), "float32")
    for s, j in T.Parallel(NB, KP):
        half = T.min(middle[s, j], total[s, j] - middle[s, j])
        halves[s, j] = T.if_then_else(total[s, j] > -OVERFLOW, half, -OVERFLOW)
    T.reduce_min(halves, least, dim=1)
    if KP > WARP_CHANNELS:  # warps meet in shared memory, which what follows may take
        T.sync_threads()
    for s in T.Parallel(NB):
        steepest[s] = least[s]


def needs_exact_path(steepest: Any) -> Any:
    """Whether some rows lie too far from their anchor."""
    return T.min(T.min(steepest[0], steepest[1]), T.min(steepest[2], steepest[3])) < -LIMIT


@T.macro
def find_anchors(gate, middle, total, sums, before, last, anchor):
    """Sums before each sub-chunk and of all; its anchor, from the chunk's start and, in place of the middle, its own.

    The anchor is the integer nearest to the middle's sum, see Gate.anchor. ``middle`` and ``total`` are sums at the
    middles and the ends of sub-chunks, ``sums`` is room for the latter in shared memory.
    """
    KP = middle.shape[1]
    for s, j in T.Parallel(NB, KP):
        sums[s, j] = total[s, j]
    T.sync_threads()
    T.clear(before)
    T.clear(last)
    for n in T.unroll(NB):
        for s, j in T.Parallel(NB, KP):
            last[s, j] = last[s, j] + sums[n, j]
            before[s, j] = before[s, j] + T.if_then_else(n < s, sums[n, j], 0.0)
    for s, j in T.Parallel(NB, KP):
        anchor[s, j] = gate.anchor(before[s, j] + middle[s, j])
    for s, j in T.Parallel(NB, KP):
        middle[s, j] = anchor[s, j] - before[s, j]


@dataclass(frozen=True)
class Chunk:
    """A thread block's chunk: its number, value head, head, first token and number of tokens."""

    i_t: Any
    i_hv: Any
    i_h: Any
    start: Any
    count: Any
