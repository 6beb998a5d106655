"""Parts of fwd_prep: gates in few instructions, pairs of rows for gates of any size, the inverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.problem import Problem
from kda_tl.templates._tile import RCP_LN2
from kda_tl.templates.fwd_gate import FORGOTTEN

# log1p(t) / t on [0, 1], interpolated at the Chebyshev nodes: 2.8e-7 off in fp32; lowest power first
LOG1P = (0.999999781, -0.499971745, 0.332719284, -0.244747742, 0.176874767, -0.106850029, 0.0434938998, -0.00837115255)
PART = 64  # channels whose pairs are taken exactly at once


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
        return {"log": RCP_LN2, "safe": lower_bound * RCP_LN2, "softplus": slope}[self.p.gate]

    def log2_decay(self, x: Any, unit: Any, slope: Any, bias: Any) -> Any:
        """Of a raw gate; log1p is a polynomial."""
        if self.p.gate == "log":
            return x * unit
        if self.p.gate == "safe":
            return unit / (1.0 + T.exp2(slope * x + slope * bias))
        z = x + bias
        t = T.exp2(-RCP_LN2 * T.max(z, -z))
        ratio = LOG1P[-1]
        for coefficient in LOG1P[-2::-1]:
            ratio = ratio * t + coefficient
        return unit * (T.max(z, 0.0) + t * ratio)


@T.macro
def take_exactly(gate, tensors, at, factors, both, tilde, scalars):
    """A chunk's factors and pairs for decays of any size, in place of what overflowed: no exponent above 0, no anchor.

    Every pair of rows has its own exponentials: slow, for the rare chunk that decays below 2^-110 within eight tokens.

    Args:
        gate: the problem's.
        tensors: q, k, g, dt_bias; qg, kg and decay, which are written.
        at: chunk, value head, head, first token and number of tokens.
        factors: of rows of q and k, and beta, in shared memory.
        both: rows of Aqk above rows of L, sub-chunk by sub-chunk; written.
        tilde: k 2^G; written.
        scalars: unit and slope of the gate.
    """
    q, k, g, dt_bias, qg, kg, decay = tensors
    i_t, i_hv, i_h, start, count = at
    q_factor, k_factor, b_factor = factors
    unit, slope = scalars
    K, (BT, KP) = gate.p.K, tilde.shape
    BC = 16
    io = tilde.dtype
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
                raw = T.cast(T.if_then_else((i < count) & (c < K), g[start + i, i_hv, c], 0), "float32")
                step = gate.log2_decay(raw, unit, slope, gate.bias(dt_bias, i_hv, c))
                clamped = T.if_then_else(step < FORGOTTEN, FORGOTTEN, step)
                run[j] = run[j] + T.if_then_else((i < count) & (c < K), clamped, 0.0)
                total[i, j] = run[j]
        for j in T.Parallel(PART):
            decay[i_t, i_hv, part * PART + j] = T.exp2(total[BT - 1, j])
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            row = T.cast(T.if_then_else((i < count) & (c < K), q[start + i, i_h, c], 0), "float32") * q_factor[i]
            qg[i_t, i_hv, i, c] = T.cast(row * T.exp2(total[i, j]), io)
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            row = T.cast(T.if_then_else((i < count) & (c < K), k[start + i, i_h, c], 0), "float32") * k_factor[i]
            kg[i_t, i_hv, i, c] = T.cast(row * T.exp2(total[BT - 1, j] - total[i, j]), io)
            tilde[i, c] = T.cast(row * T.exp2(total[i, j]), io)
        for n in T.serial(BT):
            for i, j in T.Parallel(BT, PART):
                c = part * PART + j
                key = T.cast(T.if_then_else((n < count) & (c < K), k[start + n, i_h, c], 0), "float32") * k_factor[n]
                weight[i, j] = key * T.exp2(T.min(total[i, j] - total[n, j], 0.0))
            for i, j in T.Parallel(BT, PART):
                c = part * PART + j
                product[i, j] = (
                    T.cast(T.if_then_else((i < count) & (c < K), q[start + i, i_h, c], 0), "float32") * weight[i, j]
                )
            T.reduce_sum(product, dot, dim=1)
            for i in T.Parallel(BT):
                both[i // BC * 2 * BC + i % BC, n] = T.if_then_else(i >= n, dot[i] * q_factor[i], 0.0) + T.if_then_else(
                    part > 0, both[i // BC * 2 * BC + i % BC, n], 0.0
                )
            for i, j in T.Parallel(BT, PART):
                c = part * PART + j
                product[i, j] = (
                    T.cast(T.if_then_else((i < count) & (c < K), k[start + i, i_h, c], 0), "float32") * weight[i, j]
                )
            T.reduce_sum(product, dot, dim=1)
            for i in T.Parallel(BT):
                own = T.if_then_else(i // BC == n // BC, b_factor[i], 1.0)
                both[i // BC * 2 * BC + BC + i % BC, n] = dot[i] * k_factor[i] * own + T.if_then_else(
                    part > 0, both[i // BC * 2 * BC + BC + i % BC, n], 0.0
                )


@T.macro
def invert(both, below, b_factor, inverse):
    """(I + L)^-1 diag(beta): blocks of the diagonal by substitution, the rest as a series of products.

    Args:
        both: rows of L lie below 16 rows of something else, 16 by 16; blocks of the diagonal are read.
        below: L without them, in shared memory; overwritten.
        b_factor: beta.
        inverse: result, in shared memory.
    """
    BC, (BT, _), io = 16, below.shape, below.dtype
    diagonal = T.alloc_shared((BT, BT), io)
    power = T.alloc_shared((BT, BT), io)
    column = T.alloc_local((BC,), "float32")
    series = T.alloc_fragment((BT, BT), "float32")
    square = T.alloc_fragment((BT, BT), "float32")
    T.clear(diagonal)
    for c in T.Parallel(BT):  # forward substitution, a thread a column of its block
        for r in T.unroll(BC):
            column[r] = T.if_then_else(r == c % BC, 1.0, 0.0)
            for m in T.unroll(r):
                column[r] = column[r] - both[c // BC * 2 * BC + BC + r, c // BC * BC + m] * column[m]
        for r in T.unroll(BC):
            diagonal[c // BC * BC + r, c] = T.cast(column[r], io)
    T.gemm(diagonal, below, square, clear_accum=True)
    T.copy(square, power)
    for i, j in T.Parallel(BT, BT):
        series[i, j] = T.if_then_else(i == j, 1.0, 0.0) - square[i, j]
    T.gemm(power, power, square, clear_accum=True)
    for i, j in T.Parallel(BT, BT):
        series[i, j] = series[i, j] + square[i, j]
    T.copy(square, below)
    T.gemm(power, below, square, clear_accum=True)
    for i, j in T.Parallel(BT, BT):
        series[i, j] = series[i, j] - square[i, j]
    T.copy(series, power)
    T.gemm(power, diagonal, square, clear_accum=True)
    for i, j in T.Parallel(BT, BT):
        square[i, j] = square[i, j] * b_factor[j]
    T.copy(square, inverse)
