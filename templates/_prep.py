"""Parts of fwd_prep: what is loaded, gates in few instructions, pairs of rows, these for gates of any size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.problem import Problem
from kda_tl.templates._rows import BC, BY_SUB_CHUNK, LATER_FIRST, NB
from kda_tl.templates._tile import FORGOTTEN, RCP_LN2, beta_factor

WARP_CHANNELS = 128  # of a sub-chunk that a warp has
PART = 64  # channels whose pairs are taken exactly at once
LIMIT = 110.0  # of half a sub-chunk's decay, in powers of two: fp32 and bf16 hold 2^127, and keys may be larger than 1
OVERFLOW = 1e38  # of decays that may be infinite
row_of_q = BY_SUB_CHUNK.row_of


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


@T.macro
def put_pairs(tile, first, left, both):
    """Blocks of a product whose rows and keys belong together."""
    rows, columns = tile.shape
    for r, c in T.Parallel(rows, columns):
        if (r // (2 * BC) == c // BC) if columns > BC else (r >= 2 * BC):
            both[first * 2 * BC + r, left * BC + c] = tile[r, c]


@T.macro
def take_pairs(own, others, b_factor, both):
    """Products to where their pairs belong, those of a sub-chunk with itself masked, L's with beta.

    Args:
        own: of sub-chunks with themselves: the first sub-chunk of the rows, the product.
        others: of other pairs: the first sub-chunks of rows and of keys, the product.
        b_factor: beta.
        both: rows of Aqk above rows of L, sub-chunk by sub-chunk; written.
    """
    for tile in [*(tile for _, tile in own), *(tile for _, _, tile in others)]:
        T.warpgroup_fence_operand(tile, num_regs=tile.shape[1] // 2)
    for first, tile in own:
        for r, c in T.Parallel(*tile.shape):
            step_size = b_factor[(first + r // (2 * BC)) * BC + r % BC]
            above = T.if_then_else(r % BC >= c % BC, tile[r, c], 0.0)
            tile[r, c] = T.if_then_else(r % (2 * BC) >= BC, tile[r, c] * step_size, above)
    for first, tile in own:
        put_pairs(tile, first, first, both)
    for first, left, tile in others:
        put_pairs(tile, first, left, both)


@T.macro
def put_queries(both, thread, i_t, i_hv, Aqk, inverse):
    """Aqk to where it belongs, and zeros above the inverse's diagonal, by 64 threads."""
    HALF = Aqk.shape[3]
    pairs = T.alloc_local((8,), "float32")
    for n in T.unroll(8):
        i = n * 8 + thread // 8
        j = thread % 8 * 8
        for e in T.vectorized(8):
            pairs[e] = both[n // 2 * 2 * BC + i % BC, j + e]
        if (n >= 4) | (j < HALF):
            for e in T.vectorized(8):
                kept = T.if_then_else(n // 2 >= thread % 8 // 2, pairs[e], 0.0)
                Aqk[i_t, i_hv, i + j // HALF * HALF, j % HALF + e] = T.cast(kept, Aqk.dtype)
            if thread % 8 // 2 > n // 2:
                for e in T.vectorized(8):
                    inverse[i, j + e] = T.cast(0.0, inverse.dtype)


def read_row(x: Any, start: Any, count: Any, i: Any, head: Any, c: Any, K: int) -> Any:
    """Channel c of the chunk's row i in fp32, 0 past its end and in padded channels."""
    return T.cast(T.if_then_else((i < count) & (c < K), x[start + i, head, c], 0), "float32")


@T.macro
def take_exactly(gate, tensors, at, factors, both, scalars):
    """A chunk's factors and pairs for decays of any size, in place of what overflowed: no exponent above 0, no anchor.

    Every pair of rows has its own exponentials: slow, for the rare chunk that decays below 2^-110 within eight tokens.

    Args:
        gate: the problem's.
        tensors: q, k, g, dt_bias; k_neg, qg, kg and decay, which are written.
        at: chunk, value head, head, first token and number of tokens.
        factors: of rows of q and k, sub-chunk by sub-chunk, and beta, in shared memory.
        both: rows of Aqk above rows of L, sub-chunk by sub-chunk; written.
        scalars: unit and slope of the gate.
    """
    q, k, g, dt_bias, k_neg, qg, kg, decay = tensors
    i_t, i_hv, i_h, start, count = at
    factor, b_factor = factors
    unit, slope = scalars
    K, (_, _, BT, KP) = gate.p.K, kg.shape
    io = kg.dtype
    total = T.alloc_shared((BT, PART), "float32")
    run = T.alloc_fragment((PART,), "float32")
    weight = T.alloc_fragment((BT, PART), "float32")
    product = T.alloc_fragment((BT, PART), "float32")
    dot = T.alloc_fragment((BT,), "float32")
    for part in T.serial(KP // PART):
        T.clear(run)
        for i in T.serial(BT):
            for j in T.Parallel(PART):
                c = part * PART + j
                raw, bias = read_row(g, start, count, i, i_hv, c, K), gate.bias(dt_bias, i_hv, c)
                step = gate.log2_decay(raw, unit, slope, bias)
                clamped = T.if_then_else(step < FORGOTTEN, FORGOTTEN, step)
                run[j] = run[j] + T.if_then_else((i < count) & (c < K), clamped, 0.0)
                total[i, j] = run[j]
        T.sync_threads()
        for j in T.Parallel(PART):
            decay[i_t, i_hv, part * PART + j] = T.exp2(total[BT - 1, j])
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            qg[i_t, i_hv, i, c] = T.cast(
                read_row(q, start, count, i, i_h, c, K) * factor[row_of_q(i)] * T.exp2(total[i, j]), io
            )
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            row = read_row(k, start, count, i, i_h, c, K) * factor[row_of_q(i) + BC]
            kg[i_t, i_hv, i, c] = T.cast(row * T.exp2(total[BT - 1, j] - total[i, j]), io)
            k_neg[i_t, i_hv, i, c] = T.cast(-row * T.exp2(total[i, j]), io)
        for n in T.serial(BT):
            for i, j in T.Parallel(BT, PART):
                key = read_row(k, start, count, n, i_h, part * PART + j, K) * factor[row_of_q(n) + BC]
                weight[i, j] = key * T.exp2(T.min(total[i, j] - total[n, j], 0.0))
            for x, below in ((q, 0), (k, BC)):
                for i, j in T.Parallel(BT, PART):
                    product[i, j] = read_row(x, start, count, i, i_h, part * PART + j, K) * weight[i, j]
                T.reduce_sum(product, dot, dim=1)
                T.sync_threads()
                for i in T.Parallel(BT):
                    beta = T.if_then_else(i // BC == n // BC, b_factor[i], 1.0)
                    keep = beta if below else T.if_then_else(i >= n, 1.0, 0.0)
                    before = T.if_then_else(part > 0, both[row_of_q(i) + below, n], 0.0)
                    both[row_of_q(i) + below, n] = before + dot[i] * factor[row_of_q(i) + below] * keep
                T.sync_threads()


@T.macro
def take_lone(q, k, KP, start, i_h, factor, i_t, i_hv, Aqk):
    """The pair of a token that is alone in its chunk, from q and k as they came."""
    K = q.shape[2]
    product = T.alloc_fragment((1, KP), "float32")
    dot = T.alloc_fragment((1,), "float32")
    for i, c in T.Parallel(1, KP):
        product[i, c] = read_row(q, start, 1, i, i_h, c, K) * read_row(k, start, 1, i, i_h, c, K)
    T.reduce_sum(product, dot, dim=1)
    for i in T.Parallel(1):
        Aqk[i_t, i_hv, i, 0] = T.cast(dot[i] * factor[0] * factor[BC], Aqk.dtype)
