"""Tokens of decode_rows: what a thread reads of one, what it makes of that, and what it does to its rows."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.templates.common.decays import log2_decay
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import L2NORM_EPS, RCP_LN2, beta_factor
from kda_tl.templates.sm90.lanes import (
    CHUNK,
    WARP,
    Lanes,
    Part,
    alloc,
    find_first,
    load_channels,
    load_values,
    stage_channels,
    sum_rows,
    take_chunk,
)

SUMS = 4  # k . q, k . k, q . q, and none
NUMBERS = 2  # the step, and the decay that all channels share


@dataclass(frozen=True)
class Place:
    """Where a thread works: a lane of a group, which has rows of a value head from ``row`` on."""

    p: Problem
    lanes: Lanes
    i_hv: Any
    i_h: Any
    lane: Any
    row: Any

    def has(self, option: str) -> bool:
        """Whether the problem has an option."""
        return option in self.p.options

    @property
    def state(self) -> Any:
        """The group's first row in a slot, in vectors."""
        return (self.i_hv * self.p.V + self.row) * (self.p.K // self.lanes.width)

    @property
    def value(self) -> Any:
        """The first value channel whose result the lane has, in a token's."""
        return self.i_hv * self.p.V + self.row + self.lane // self.lanes.alike * self.lanes.results


def makers_of(p: Problem) -> Lanes:
    """How the channels of a token lie in the warp that prepares it; rows are the sums that it takes."""
    return Lanes(p.K, CHUNK, SUMS)


def alloc_token(p: Problem, given: SimpleNamespace) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Registers for what a thread is given of a token that it prepares, and for a gate's parameters."""
    C = makers_of(p).channels
    gates = 1 if p.scalar_gate else C
    sizes = {"q": C, "k": C, "g": gates, "gk": C, "beta": 1}
    raw = {name: alloc(size, getattr(given, name).dtype) for name, size in sizes.items()}
    return SimpleNamespace(**raw), SimpleNamespace(rate=alloc(1), bias=alloc(gates))


def alloc_values(lanes: Lanes, given: SimpleNamespace) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Registers for what a lane is given of a token's values, and for what it uses of a token."""
    C, results = lanes.channels, lanes.results
    raw = {name: alloc(results, getattr(given, name).dtype) for name in ("v", "gv", "beta")}
    sizes = {"q": CHUNK, "k": C, "decay": CHUNK, "numbers": NUMBERS, "factors": SUMS}
    sizes |= {"v": results, "step": results, "fade": results}
    return SimpleNamespace(**raw), SimpleNamespace(**{name: alloc(size) for name, size in sizes.items()})


def alloc_staged(p: Problem, tokens: int) -> SimpleNamespace:
    """Shared memory for what all rows need of some tokens: channels of k, q and decays, sums, and two numbers."""
    channels = (tokens, 3 if has_decays(p) else 2, p.K)
    shapes = {"channels": channels, "sums": (tokens, SUMS), "numbers": (tokens, NUMBERS)}
    return SimpleNamespace(**{name: T.alloc_shared(shape, "float32") for name, shape in shapes.items()})


def has_decays(p: Problem) -> bool:
    """Whether each key channel has a decay of its own."""
    return "key_gate" in p.options or ("has_g" in p.options and not p.scalar_gate)


@T.macro
def load_gate(at, A_log, dt_bias, gate):
    """A gate's parameters, of the rate its logarithm: what is asked for first is not waited for here."""
    p = at.p
    gate.rate[0] = A_log[at.i_hv] if p.has_A_log else 0.0
    if not p.has_dt_bias:
        T.clear(gate.bias)
    elif p.scalar_gate:
        gate.bias[0] = dt_bias[at.i_hv, 0]
    else:
        load_channels(at.lanes, at.lane, dt_bias, at.i_hv, 0, gate.bias, 4)


@T.macro
def load_token(at, given, token, raw):
    """What is given of a token, as it is, but for what each row has of its own."""
    p, has, lanes = at.p, at.has, at.lanes
    load_channels(lanes, at.lane, given.k, token, at.i_h, raw.k)
    load_channels(lanes, at.lane, given.q, token, at.i_h, raw.q)
    if has("has_g"):
        if p.scalar_gate:
            load_values(given.g, token, at.i_hv, raw.g)
        else:
            load_channels(lanes, at.lane, given.g, token, at.i_hv, raw.g)
    if has("key_gate"):
        load_channels(lanes, at.lane, given.gk, token, at.i_hv, raw.gk)
    if has("has_beta") and not has("wide_beta"):
        load_values(given.beta, token, at.i_hv, raw.beta)


@T.macro
def load_row_values(at, given, token, raw):
    """What is given of a token for each row."""
    load_values(given.v, token, at.value, raw.v)
    if at.has("value_gate"):
        load_values(given.gv, token, at.value, raw.gv)
    if at.has("wide_beta"):
        load_values(given.beta, token, at.value, raw.beta)


@T.macro
def log1p(x):
    """ln(1 + x) of 0 to 1 to 3e-7 of it, 2 atanh(x / (2 + x)): without a branch, unlike CUDA's."""
    ratio, square = T.alloc_var("float32"), T.alloc_var("float32")
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = 2.0 / 13.0
    for n in (11, 9, 7, 5, 3, 1):
        series = series * square + 2.0 / n
    return ratio * series


@T.macro
def prepare(at, raw, gate, lower_bound, width, staged, i):
    """What all rows need of a token, by a warp. Norms are told by the sums that they are of."""
    p, has, lanes = at.p, at.has, at.lanes
    C, scalar, member = lanes.channels, not has_decays(p), T.get_thread_binding() % WARP
    k, q, decay, rate = alloc(C), alloc(C), alloc(1 if scalar else C), alloc(1)
    sums, given = alloc(SUMS), alloc(SUMS)
    for m in T.unroll(SUMS):
        sums[m] = 0.0
    for j in T.unroll(C):
        k[j] = T.cast(raw.k[j], "float32")
        q[j] = T.cast(raw.q[j], "float32")
        sums[0] = sums[0] + k[j] * q[j]
        sums[1] = sums[1] + k[j] * k[j]
        sums[2] = sums[2] + q[j] * q[j]
    rate[0] = T.exp(gate.rate[0]) if p.has_A_log else 1.0
    for j in T.unroll(decay.shape[0]):
        decay[j] = 0.0
        if has("has_g"):
            m = 0 if p.scalar_gate else j
            decay[j] = log2_decay(p, raw.g[m], rate[0], gate.bias[m], lower_bound, log1p)
        if has("key_gate"):
            decay[j] = decay[j] + RCP_LN2 * T.cast(raw.gk[j], "float32")
        decay[j] = T.exp2(decay[j])
    if member < lanes.count:
        stage_channels(lanes, at.lane, k, width, staged.channels, i, 0)
        stage_channels(lanes, at.lane, q, width, staged.channels, i, 1)
        if has_decays(p):
            stage_channels(lanes, at.lane, decay, width, staged.channels, i, 2)
    sum_rows(lanes, at.lane, sums, given)
    if member < lanes.count:
        if member % lanes.alike == 0:
            for m in T.unroll(lanes.results):
                staged.sums[i, member // lanes.alike * lanes.results + m] = sums[m]
        if member == 0:
            staged.numbers[i, 0] = beta_factor(p, raw.beta[0]) if has("has_beta") and not has("wide_beta") else 1.0
            staged.numbers[i, 1] = decay[0]


@T.macro
def take_values(at, raw, scale, staged, i, now):
    """What a lane uses of a token, but for its channels. Rows are summed with q and k as they are."""
    p, has = at.p, at.has
    for e in T.vectorized(NUMBERS):
        now.numbers[e] = staged.numbers[i, e]
    for e in T.vectorized(SUMS):
        now.factors[e] = staged.sums[i, e]
    now.factors[1] = T.rsqrt(now.factors[1] + L2NORM_EPS) if p.l2norm else 1.0
    now.factors[2] = T.rsqrt(now.factors[2] + L2NORM_EPS) * scale if p.l2norm else scale
    for j in T.unroll(at.lanes.results):
        now.v[j] = T.cast(raw.v[j], "float32")
        now.step[j] = beta_factor(p, raw.beta[j]) if has("wide_beta") else now.numbers[0]
        now.fade[j] = T.exp2(RCP_LN2 * T.cast(raw.gv[j], "float32")) if has("value_gate") else 1.0


@T.macro
def store_values(at, results, o, token):
    """Results of a token to memory: a lane of those alike writes them."""
    if at.lane % at.lanes.alike == 0:
        own = Part.of(o, find_first(token, (o.shape[1] * o.shape[2],), 1, at.value), at.lanes.results)
        for i in T.unroll(at.lanes.results):
            own.x[i] = T.cast(results[i], o.dtype)


@T.macro
def advance(at, now, staged, i, state, by_k, by_q, given, corrects):
    """A token of the rows of a group. Its results are then in by_q; by_k and given are other numbers a row.

    The state need not be corrected where nobody reads it again.
    """
    lanes, has = at.lanes, at.has
    C, decayed = lanes.channels, has_decays(at.p)
    written = alloc(lanes.results)
    for r in T.unroll(lanes.rows):
        by_k[r] = 0.0
        by_q[r] = 0.0
    for c in T.unroll(C // CHUNK):
        take_chunk(lanes, at.lane, staged.channels, i, 0, c, now.k, c * CHUNK)
        take_chunk(lanes, at.lane, staged.channels, i, 1, c, now.q, 0)
        if decayed:
            take_chunk(lanes, at.lane, staged.channels, i, 2, c, now.decay, 0)
        for r in T.unroll(lanes.rows):
            for e in T.unroll(CHUNK):
                j = r * C + c * CHUNK + e
                if has("has_g") or has("key_gate"):
                    state[j] = state[j] * (now.decay[e] if decayed else now.numbers[1])
                by_k[r] = by_k[r] + state[j] * now.k[c * CHUNK + e]
                by_q[r] = by_q[r] + state[j] * now.q[e]
    sum_rows(lanes, at.lane, by_k, given)
    sum_rows(lanes, at.lane, by_q, given)
    for m in T.unroll(lanes.results):
        value = now.v[m] - now.fade[m] * now.factors[1] * by_k[m]
        written[m] = now.step[m] * now.factors[1] * value  # v_new, and the norm of the k that it is multiplied with
        by_q[m] = now.factors[2] * (now.fade[m] * by_q[m] + written[m] * now.factors[0])
    if corrects:
        for r in T.unroll(lanes.rows):
            lane = r // lanes.results * lanes.alike
            by_k[r] = T.shfl_sync(written[r % lanes.results], lane, lanes.count)
            if has("value_gate"):
                given[r] = T.shfl_sync(now.fade[r % lanes.results], lane, lanes.count)
        for r in T.unroll(lanes.rows):
            for j in T.unroll(C):
                kept = state[r * C + j] * given[r] if has("value_gate") else state[r * C + j]
                state[r * C + j] = kept + by_k[r] * now.k[j]
