"""Phases of fwd_prep: what is loaded, gates in few instructions, norms, operands, pairs of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.problem import Problem
from kda_tl.stage import Case
from kda_tl.templates._rows import BC, LATER_FIRST, NB
from kda_tl.templates._tile import RCP_LN2, beta_factor
from kda_tl.templates._warp import find_norms

WARPGROUP = 128
ROWS_AT_ONCE = 8  # of a sub-chunk, whose q and k a thread holds
WARP_CHANNELS = 128  # of a sub-chunk that a warp has
LIMIT = 110.0  # of half a sub-chunk's decay, in powers of two: fp32 and bf16 hold 2^127, and keys may be larger than 1
OVERFLOW = 1e38  # of decays that may be infinite


def reject_chunk(case: Case) -> str | None:
    """What kernels of whole chunks with anchors cannot run: all but Hopper, bf16 and a gate a channel."""
    p = case.problem
    if case.device.sm != 90:
        return f"its products are instructions of sm_90, the device is {case.device.arch}"
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

    def unit(self, slope: Any, lower_bound: Any) -> Any:
        """What every decay of a head is a multiple of: with 0 in its place a row adds nothing."""
        return {"log": RCP_LN2, "safe": lower_bound * RCP_LN2, "softplus": slope / RCP_LN2}[self.p.gate]

    def log2_decay(self, x: Any, unit: Any, slope: Any, bias: Any, overflow: bool = False) -> Any:
        """Of a raw gate. Fast log2 of 1 + t is off by 2^-22: 2.5e-4 of a decay of 2^-10.

        With ``overflow`` that of softplus is infinite where its exponential is, from 88 on, or no number where the unit
        is 0: two instructions less.
        """
        if self.p.gate == "log":
            return x * unit
        if self.p.gate == "safe":
            return unit * (1.0 / (1.0 + T.exp2(slope * x + slope * bias)))  # the product becomes part of the sum
        z = RCP_LN2 * x + RCP_LN2 * bias
        if overflow:
            return unit * T.log2(1.0 + T.exp2(z))
        return unit * (T.max(z, 0.0) + T.log2(1.0 + T.exp2(T.min(z, -z))))

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
def load_rows(x, start, count, i_head, rows, below):
    """Rows of q or k to their places, ``below`` those of q; those past the chunk's end are another sequence's, or 0."""
    BT, (_, _, K), KP = rows.shape[0] // 2, x.shape, rows.shape[1]
    if K == KP:
        for n in T.unroll(BT // BC):
            first = LATER_FIRST.first_row(n) + below
            T.async_copy(x[start + n * BC : start + (n + 1) * BC, i_head, :], rows[first : first + BC, :])
    else:
        for i, j in T.Parallel(BT, KP):
            rows[LATER_FIRST.first_row(i // BC) + below + i % BC, j] = T.if_then_else(
                (i < count) & (j < K), x[start + i, i_head, j], 0
            )


@T.macro
def load_gates(g, K, start, count, i_hv, raw):
    """Raw gates to registers, row by row of all sub-chunks."""
    KP = raw.shape[2]
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            inside = (s * BC + i < count) & (j < K)
            raw[i, s, j] = T.if_then_else(inside, g[start + s * BC + i, i_hv, j], 0)


@T.macro
def sum_gates(gate, raw, count, slope, unit, bias, local, middle, total):
    """Cumsums inside the sub-chunks. Rows past the end and padded channels add nothing."""
    KP = raw.shape[2]
    step = T.alloc_fragment((NB, KP), "float32")
    T.clear(total)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            own_unit = T.if_then_else((s * BC + i < count) & (j < gate.p.K), unit, 0.0)
            step[s, j] = gate.log2_decay(T.cast(raw[i, s, j], "float32"), own_unit, slope, bias[s, j], overflow=True)
        for s, j in T.Parallel(NB, KP):
            total[s, j] = total[s, j] + step[s, j]
        for s, j in T.Parallel(NB, KP):
            local[i, s, j] = total[s, j]
        if i == BC // 2 - 1:
            for s, j in T.Parallel(NB, KP):
                middle[s, j] = total[s, j]


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


def is_wild(steepest: Any) -> Any:
    """Whether some rows lie too far from their anchor."""
    return T.min(T.min(steepest[0], steepest[1]), T.min(steepest[2], steepest[3])) < -LIMIT


@T.macro
def find_anchors(gate, middle, total, sums, before, last, anchor):
    """Sums before each sub-chunk and of all; its anchor, from the chunk's start and, in place of the middle, its own.

    Args:
        gate: the problem's.
        middle: sums at the middles of sub-chunks; becomes the anchors, from the start of each.
        total: sums of sub-chunks.
        sums: the same in shared memory; written.
        before: sums of all sub-chunks before each; written.
        last: of all sub-chunks; written.
        anchor: the integer nearest to the middle's sum, see Gate.anchor, from the chunk's start; written.
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


@dataclass(frozen=True)
class Sums:
    """Cumsums of a chunk's gates, in registers but for what is said.

    Attributes:
        local: from the start of each sub-chunk.
        middle: anchors, from the start of each.
        total: of sub-chunks.
        anchors: from the chunk's start, in shared memory.
        anchor: the same.
        last: of the chunk.
        wild: least exponents, in shared memory, of a gate without a bound; or None.
    """

    local: Any
    middle: Any
    total: Any
    anchors: Any
    anchor: Any
    last: Any
    wild: Any


@dataclass(frozen=True)
class Links:
    """Powers of two that take operands from anchors elsewhere, in registers.

    Attributes:
        ahead: to the chunk's start.
        ahead_neg: the same, negative.
        behind: to the chunk's end.
        out: to their sub-chunk's end, of a gate without a bound.
        nexts: from there, or from the anchor, to the anchors of the sub-chunks that follow.
    """

    ahead: Any
    ahead_neg: Any
    behind: Any
    out: Any
    nexts: list[Any]


@T.macro
def sum_chunk(gate, raw, at, slope, unit, bias, decay):
    """Cumsums from the start of a sub-chunk, then anchors from the chunk's, and the chunk's decay."""
    KP, f32 = raw.shape[2], "float32"
    local = T.alloc_fragment((BC, NB, KP), f32)
    middle = T.alloc_fragment((NB, KP), f32)
    total = T.alloc_fragment((NB, KP), f32)
    sums = T.alloc_shared((NB, KP), f32)
    anchors = T.alloc_shared((NB, KP), f32)
    wild = None
    sum_gates(gate, raw, at.count, slope[0], unit[0], bias, local, middle, total)
    if not gate.p.bounded_gate:
        wild = T.alloc_shared((NB,), f32)
        find_steepest(middle, total, wild)
    before = T.alloc_fragment((NB, KP), f32)
    last = T.alloc_fragment((NB, KP), f32)
    anchor = T.alloc_fragment((NB, KP), f32)
    find_anchors(gate, middle, total, sums, before, last, anchor)
    T.copy(anchor, anchors)
    for j in T.Parallel(KP):
        decay[at.i_t, at.i_hv, j] = T.exp2(sums[0, j] + sums[1, j] + sums[2, j] + sums[3, j])
    T.sync_threads()
    return Sums(local, middle, total, anchors, anchor, last, wild)


@T.macro
def find_links(p, x):
    """Links of a chunk's sums, of which totals and anchors are overwritten if the gate has no bound."""
    KP, io = x.anchor.shape[1], "bfloat16"
    anchor, total = x.anchor, x.total
    ahead = T.alloc_fragment((NB, KP), io)
    ahead_neg = T.alloc_fragment((NB, KP), io)
    behind = T.alloc_fragment((NB, KP), "float32")
    out = T.alloc_fragment((NB, KP), io)
    nexts = [T.alloc_fragment((NB, KP), io) for _ in range(1, NB)]
    for s, j in T.Parallel(NB, KP):
        ahead[s, j] = T.cast(T.exp2(anchor[s, j]), io)
        ahead_neg[s, j] = T.cast(-T.exp2(anchor[s, j]), io)
        behind[s, j] = T.exp2(x.last[s, j] - anchor[s, j])
    if not p.bounded_gate:  # keys leave their sub-chunk by way of its end, where they are no larger than k
        for s, j in T.Parallel(NB, KP):
            total[s, j] = T.round(total[s, j] - x.middle[s, j])
        for s, j in T.Parallel(NB, KP):
            out[s, j] = T.cast(T.exp2(total[s, j]), io)
        for s, j in T.Parallel(NB, KP):
            anchor[s, j] = anchor[s, j] + total[s, j]
    for n, into in enumerate(nexts):
        for s, j in T.Parallel(NB, KP):
            into[s, j] = T.cast(T.exp2(x.anchors[T.min(s + n + 1, NB - 1), j] - anchor[s, j]), io)
    return Links(ahead, ahead_neg, behind, out, nexts)


@T.macro
def normalise(p, rows, raw_beta, b_factor, factor, scale, count, threads):
    """What rows are multiplied with, and step sizes, once the rows have come; rows past the end become zeros."""
    BT, KP = rows.shape[0] // 2, rows.shape[1]
    thread = T.get_thread_binding()
    T.ptx_wait_group(0)
    T.sync_threads()
    if count < BT:  # another sequence's rows may be infinite
        for i, j in T.Parallel(2 * BT, KP):
            if LATER_FIRST.token_of(i) >= count:
                rows[i, j] = 0
        T.sync_threads()
    for i in T.Parallel(BT):
        b_factor[i] = T.if_then_else(i < count, find_step(p, raw_beta[i]), 0.0)
    if p.l2norm:
        if threads > WARPGROUP:
            if thread < WARPGROUP:
                find_norms(rows, LATER_FIRST.first_row(thread // 32), factor, scale)
            T.sync_threads()
        else:
            find_norms(rows, LATER_FIRST.first_row(thread // 32), factor, scale)
            T.sync_warp()
    else:
        for r in T.Parallel(2 * BT):
            factor[r] = T.if_then_else(r // BC % 2 == 0, scale, 1.0)
        T.sync_threads()


@T.macro
def put_operands(p, x, links, rows, factor, keys, at, k_neg, qg, kg, threads):
    """Operands, where a thread reads and overwrites its own rows, and the three factors of a chunk, to memory.

    Args:
        p: the problem.
        x: sums; local ones are overwritten.
        links: powers of two.
        rows: of q and k; become operands.
        factor: what they are multiplied with.
        keys: operands, a tile for each distance between sub-chunks; written.
        at: the chunk.
        k_neg: written.
        qg: written.
        kg: written.
        threads: of the block.
    """
    thread, KP, io, f32 = T.get_thread_binding(), rows.shape[1], rows.dtype, "float32"
    q_raw = T.alloc_fragment((ROWS_AT_ONCE, NB, KP), io)
    k_raw = T.alloc_fragment((ROWS_AT_ONCE, NB, KP), io)
    row = T.alloc_fragment((NB, KP), f32)
    key = T.alloc_fragment((NB, KP), f32)
    query = T.alloc_fragment((NB, KP), f32)
    shrink = T.alloc_fragment((NB, KP), f32)
    query_io = T.alloc_fragment((NB, KP), io)
    row_io = T.alloc_fragment((NB, KP), io)
    key_io = T.alloc_fragment((NB, KP), io)
    scaled = T.alloc_fragment((NB, KP), io)
    q_factor = T.alloc_local((ROWS_AT_ONCE,), f32)
    k_factor = T.alloc_local((ROWS_AT_ONCE,), f32)
    for part in T.serial(BC // ROWS_AT_ONCE):
        for r in T.unroll(ROWS_AT_ONCE):
            for s, j in T.Parallel(NB, KP):
                q_raw[r, s, j] = rows[LATER_FIRST.first_row(s) + part * ROWS_AT_ONCE + r, j]
            for s, j in T.Parallel(NB, KP):
                k_raw[r, s, j] = rows[LATER_FIRST.first_row(s) + BC + part * ROWS_AT_ONCE + r, j]
        for r in T.vectorized(ROWS_AT_ONCE):
            q_factor[r] = factor[thread // (threads // NB) * 2 * BC + part * ROWS_AT_ONCE + r]
        for r in T.vectorized(ROWS_AT_ONCE):
            k_factor[r] = factor[thread // (threads // NB) * 2 * BC + BC + part * ROWS_AT_ONCE + r]
        for r in T.unroll(ROWS_AT_ONCE):
            i = part * ROWS_AT_ONCE + r
            for s, j in T.Parallel(NB, KP):
                above = x.local[r, s, j] - x.middle[s, j]
                shrink[s, j] = T.exp2(above)
                row[s, j] = T.cast(k_raw[r, s, j], f32) * k_factor[r]
                query[s, j] = T.cast(q_raw[r, s, j], f32) * q_factor[r] * shrink[s, j]
                key[s, j] = T.exp2(-above) * row[s, j]
                row[s, j] = row[s, j] * shrink[s, j]
            for s, j in T.Parallel(NB, KP):
                query_io[s, j] = T.cast(query[s, j], io)
            for s, j in T.Parallel(NB, KP):
                row_io[s, j] = T.cast(row[s, j], io)
            for s, j in T.Parallel(NB, KP):
                key_io[s, j] = T.cast(key[s, j], io)
            for s, j in T.Parallel(NB, KP):
                rows[LATER_FIRST.first_row(s) + i, j] = query_io[s, j]
            for s, j in T.Parallel(NB, KP):
                rows[LATER_FIRST.first_row(s) + BC + i, j] = row_io[s, j]
            for s, j in T.Parallel(NB, KP):
                keys[0][s * BC + i, j] = key_io[s, j]
            if not p.bounded_gate:
                for s, j in T.Parallel(NB, KP):
                    key_io[s, j] = key_io[s, j] * links.out[s, j]
            for n, into in enumerate(links.nexts):
                for s, j in T.Parallel(NB, KP):
                    scaled[s, j] = key_io[s, j] * into[s, j]
                for s, j in T.Parallel(NB, KP):
                    if s < NB - 1 - n:
                        keys[n + 1][s * BC + i, j] = scaled[s, j]
            for s, j in T.Parallel(NB, KP):
                kg[at.i_t, at.i_hv, s * BC + i, j] = T.cast(key[s, j] * links.behind[s, j], io)
            for s, j in T.Parallel(NB, KP):
                scaled[s, j] = query_io[s, j] * links.ahead[s, j]
            for s, j in T.Parallel(NB, KP):
                qg[at.i_t, at.i_hv, s * BC + i, j] = scaled[s, j]
            for s, j in T.Parallel(NB, KP):
                scaled[s, j] = row_io[s, j] * links.ahead_neg[s, j]
            for s, j in T.Parallel(NB, KP):
                k_neg[at.i_t, at.i_hv, s * BC + i, j] = scaled[s, j]
        for r in T.unroll(BC - ROWS_AT_ONCE):  # a loop half as long, for the instruction cache
            for s, j in T.Parallel(NB, KP):
                shrink[s, j] = x.local[r + ROWS_AT_ONCE, s, j]
            for s, j in T.Parallel(NB, KP):
                x.local[r, s, j] = shrink[s, j]
