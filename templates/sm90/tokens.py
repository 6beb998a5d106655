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
    Lanes,
    Part,
    alloc,
    find_first,
    load_channels,
    load_values,
    sum_lanes,
    sum_rows,
)


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


def alloc_token(p: Problem, lanes: Lanes, given: SimpleNamespace) -> tuple[SimpleNamespace, ...]:
    """Registers for what is given of a token, for what is made of that, and for a gate's parameters."""
    C, results = lanes.channels, lanes.results
    gates = 1 if p.scalar_gate else C
    sizes = {"q": C, "k": C, "v": results, "g": gates, "gk": C, "gv": results}
    sizes["beta"] = results if "wide_beta" in p.options else 1
    raw = {name: alloc(size, getattr(given, name).dtype) for name, size in sizes.items()}
    decays = C if "key_gate" in p.options else gates
    sizes = {"q": C, "k": C, "decay": decays, "v": results, "step": results, "fade": results, "factor": 3}
    now = {name: alloc(size) for name, size in sizes.items()}
    return SimpleNamespace(**raw), SimpleNamespace(**now), SimpleNamespace(rate=alloc(1), bias=alloc(gates))


@T.macro
def load_gate(at, A_log, dt_bias, gate):
    """A gate's parameters."""
    p = at.p
    gate.rate[0] = T.exp(A_log[at.i_hv]) if p.has_A_log else 1.0
    if not p.has_dt_bias:
        T.clear(gate.bias)
    elif p.scalar_gate:
        gate.bias[0] = dt_bias[at.i_hv, 0]
    else:
        load_channels(at.lanes, at.lane, dt_bias, at.i_hv, 0, gate.bias, 4)


@T.macro
def load_token(at, given, token, raw):
    """What is given of a token, as it is."""
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
    load_values(given.v, token, at.value, raw.v)
    if has("value_gate"):
        load_values(given.gv, token, at.value, raw.gv)
    if has("has_beta"):
        load_values(given.beta, token, at.value if has("wide_beta") else at.i_hv, raw.beta)


@T.macro
def prepare(at, raw, gate, scale, lower_bound, now):
    """What all rows need of a token. Rows are summed with q and k as they are, factors of norms come after."""
    p, has = at.p, at.has
    sums = alloc(3)  # k . q, k . k, q . q
    for m in T.unroll(3):
        sums[m] = 0.0
    for j in T.unroll(at.lanes.channels):
        now.k[j] = T.cast(raw.k[j], "float32")
        now.q[j] = T.cast(raw.q[j], "float32")
        sums[0] = sums[0] + now.k[j] * now.q[j]
        if p.l2norm:
            sums[1] = sums[1] + now.k[j] * now.k[j]
            sums[2] = sums[2] + now.q[j] * now.q[j]
    for j in T.unroll(now.decay.shape[0]):
        now.decay[j] = 0.0
        if has("has_g"):
            m = 0 if p.scalar_gate else j
            now.decay[j] = log2_decay(p, raw.g[m], gate.rate[0], gate.bias[m], lower_bound)
        if has("key_gate"):
            now.decay[j] = now.decay[j] + RCP_LN2 * T.cast(raw.gk[j], "float32")
        now.decay[j] = T.exp2(now.decay[j])
    for i in T.unroll(at.lanes.results):
        now.v[i] = T.cast(raw.v[i], "float32")
        now.step[i] = beta_factor(p, raw.beta[i if has("wide_beta") else 0]) if has("has_beta") else 1.0
        now.fade[i] = T.exp2(RCP_LN2 * T.cast(raw.gv[i], "float32")) if has("value_gate") else 1.0
    sum_lanes(at.lanes, sums, 3 if p.l2norm else 1)
    now.factor[0] = sums[0]
    now.factor[1] = T.rsqrt(sums[1] + L2NORM_EPS) if p.l2norm else 1.0
    now.factor[2] = T.rsqrt(sums[2] + L2NORM_EPS) * scale if p.l2norm else scale


@T.macro
def store_values(at, results, o, token):
    """Results of a token to memory: a lane of those alike writes them."""
    if at.lane % at.lanes.alike == 0:
        own = Part.of(o, find_first(token, (o.shape[1] * o.shape[2],), 1, at.value), at.lanes.results)
        for i in T.unroll(at.lanes.results):
            own.x[i] = T.cast(results[i], o.dtype)


@T.macro
def advance(at, now, state, by_k, by_q, given):
    """A token of the rows of a group. Its results are then in by_q; by_k and given are other numbers a row."""
    lanes, has, decays = at.lanes, at.has, now.decay.shape[0]
    C = lanes.channels
    written = alloc(lanes.results)
    for r in T.unroll(lanes.rows):
        by_k[r] = 0.0
        by_q[r] = 0.0
        for j in T.unroll(C):
            if has("has_g") or has("key_gate"):
                state[r * C + j] = state[r * C + j] * now.decay[0 if decays == 1 else j]
            by_k[r] = by_k[r] + state[r * C + j] * now.k[j]
            by_q[r] = by_q[r] + state[r * C + j] * now.q[j]
    sum_rows(lanes, at.lane, by_k, given)
    sum_rows(lanes, at.lane, by_q, given)
    for i in T.unroll(lanes.results):
        value = now.v[i] - now.fade[i] * now.factor[1] * by_k[i]
        written[i] = now.step[i] * now.factor[1] * value  # v_new, and the norm of the k that it is multiplied with
        by_q[i] = now.factor[2] * (now.fade[i] * by_q[i] + written[i] * now.factor[0])
    for r in T.unroll(lanes.rows):
        lane = r // lanes.results * lanes.alike
        by_k[r] = T.shfl_sync(written[r % lanes.results], lane, lanes.count)
        if has("value_gate"):
            given[r] = T.shfl_sync(now.fade[r % lanes.results], lane, lanes.count)
    for r in T.unroll(lanes.rows):
        for j in T.unroll(C):
            kept = state[r * C + j] * given[r] if has("value_gate") else state[r * C + j]
            state[r * C + j] = kept + by_k[r] * now.k[j]
