"""A few tokens a sequence through its state at the speed of memory: V-first states, row by row in registers.

    S <- exp(g + gk + gv) S        v_new = step (v - S^T k)        S <- S + k v_new^T        o = scale S^T q

A row of a state, its key channels of one value channel, lies in the lanes of a warp or of a part of one. A thread first
asks for what it will have of several rows, then for the token, and makes of that what all rows need while the rows are
on their way. Both sums over K are taken before the row is corrected, in one go, as

    S^T q = (decayed S)^T q + v_new (k . q)

Rows never meet, so there is neither shared memory nor a barrier. Norms are numbers that sums are multiplied with.
Source: as decode_step. The design, a row a vector load of a warp, is that of SGLang 0.5's KDA decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.stage import Case, Stage, first_valid, tunable
from kda_tl.templates.common.heads import divide
from kda_tl.templates.common.language import T
from kda_tl.templates.common.states import (
    DEPENDS,
    INPUTS,
    OUTPUTS,
    SCALARS,
    find_snapshot_row,
    find_source,
    find_target,
    find_tokens,
)
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.portable.decode_step import TOLERANCE, cost, reference
from kda_tl.templates.sm90.hopper import HopperConfig
from kda_tl.templates.sm90.lanes import VECTOR, WARP, Lanes, alloc, find_first, load_rows, store_rows
from kda_tl.templates.sm90.tokens import Place, advance, alloc_token, load_gate, load_token, prepare, store_values

FILE = 65536  # registers of a multiprocessor


def size_of(dtype: str) -> int:
    """Bytes of an element, by the name of a problem's dtype."""
    return TORCH_DTYPE[dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class DecodeRowsConfig(HopperConfig):
    """threads a block; rows that a group of lanes holds; vector: bytes of an access to states; blocks: whose registers
    a multiprocessor has."""

    NEEDS = "it was written for sm_90's memory"
    threads: int = tunable(128, 64, 128, 256)
    rows: int = tunable(8, 1, 2, 4, 8, 16)
    vector: int = tunable(16, 8, 16)
    blocks: int = tunable(6, 1, 2, 3, 4, 5, 6, 7, 8, 12)

    def lanes(self, case: Case) -> Lanes:
        """How rows lie in registers."""
        return Lanes(case.problem.K, self.vector // size_of(case.problem.state_dtype), self.rows)

    def parts(self, case: Case) -> int:
        """Blocks of a head."""
        return -(-case.problem.V // (self.threads // WARP * self.lanes(case).warp_rows))

    def registers(self, case: Case) -> int:
        """Of a thread, about: the state, a token as it is used and the next as it is loaded, sums, addresses."""
        p, lanes = case.problem, self.lanes(case)
        a_channel = self.rows + 4 + (p.has_dt_bias and not p.scalar_gate) + 2 * ("key_gate" in p.options)
        a_row = 3 if "value_gate" in p.options else 2
        return lanes.channels * a_channel + lanes.channels // 2 + a_row * self.rows + 8

    def reject(self, case: Case) -> str | None:
        """Rows of whole vectors on their boundaries, warps of whole rows, and what a thread keeps fits registers."""
        p = case.problem
        if found := super().reject(case):
            return found
        if not p.state_v_first:
            return "it reads rows of key channels: use state_v_first=True"
        if "unaligned" in p.options:
            return "it reads states on boundaries of 16 bytes: give the pool such ones, in its slots too"
        if p.K * size_of(p.state_dtype) % self.vector:
            return f"vector={self.vector} bytes do not divide a row of K={p.K} {p.state_dtype}"
        if p.K * min(size_of(p.dtype), size_of(p.g_dtype)) % VECTOR:
            return f"it reads q, k and gates by {VECTOR} bytes, which do not divide those of K={p.K} channels"
        if p.V % (rows := self.lanes(case).warp_rows):
            return f"rows={self.rows} make {rows} a warp, which do not divide V={p.V}"
        room = min(255, FILE // (self.threads * self.blocks) // 8 * 8)
        if (needed := self.registers(case)) > room:
            return f"rows={self.rows} need {needed} registers, blocks={self.blocks} leave {room}"
        return None

    @classmethod
    def default(cls, case: Case) -> DecodeRowsConfig:
        """Many rows a thread, but fewer where blocks would leave multiprocessors idle: three for every two of these."""
        p = case.problem
        # rows, vector, blocks: the first was the fastest on an H100 with 32 heads and 8 to 256 sequences
        shapes = [(16, 16, 4)] if p.longest > 3 or p.state_dtype == "fp32" else [(8, 8, 6)]
        shapes += [(8, 16, 6), (8, 16, 4), (16, 8, 4), (8, 8, 6), (8, 16, 3), (4, 16, 8), (4, 8, 8), (4, 16, 5)]
        shapes += [(2, 16, 8), (2, 16, 5), (2, 16, 4), (2, 8, 4), (1, 16, 8), (1, 16, 5)]
        configs = [cls(rows=rows, vector=vector, blocks=blocks) for rows, vector, blocks in shapes]
        valid = [config for config in configs if config.reject(case) is None]
        full = [c for c in valid if 2 * p.sequences * p.HV * c.parts(case) >= 3 * case.device.num_sms]
        return first_valid(case, *full, *reversed(configs))


def build(case: Case, config: DecodeRowsConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, part of the rows), tokens in order."""
    p, has, lanes, parts = case.problem, case.problem.options.__contains__, config.lanes(case), config.parts(case)
    R, size, narrow = lanes.rows, lanes.rows * lanes.channels, p.state_dtype != "fp32"
    in_block = config.threads // WARP * lanes.warp_rows
    edges, HV = T.dynamic("edges"), T.dynamic("HV")  # sizes may not have names of tensors
    N = edges - 1
    states = T.cast(HV, "int64") * (p.V * p.K // lanes.width)  # vectors of a sequence's

    def outside(pool, slot, snapshots, row):
        beyond = slot >= pool.shape[0] if has("pooled") else T.bool(False)
        return beyond | (row < 0) | (row >= snapshots.shape[0]) if has("tree") else beyond

    @T.macro
    def load(at, x, row, inner, out):
        load_rows(lanes, at.lane, x, find_first(row, x.shape[1:], lanes.width, inner + at.state), out)

    @T.macro
    def load_first(at, pool, slot, out):
        if p.initial_state:
            load(at, pool, slot, 0, out)
        else:
            T.clear(out)

    @T.macro
    def store(at, state, x, row, inner):
        if (row >= 0) & (row < x.shape[0]):
            first = find_first(row, x.shape[1:], lanes.width, inner + at.state)
            store_rows(lanes, at.lane, state, x, first, lanes.width)

    @T.macro
    def store_last(at, state, pool, target):
        if has("updates") and not has("each_token"):
            store(at, state, pool, target, 0)

    @T.macro
    def store_final(at, state, ht, i_n):
        if p.final_state:
            first = find_first(i_n, (states * lanes.width,), lanes.width, at.state)
            store_rows(lanes, at.lane, state, ht, first, min(4, lanes.width))

    @T.macro
    def widen(packed, state):
        if narrow:
            for j in T.unroll(size):
                state[j] = T.cast(packed[j], "float32")

    @prim_func(case, INPUTS | OUTPUTS, N=N, HV=HV, **{"N+1": edges})
    def decode_rows(
        q, k, v, g, gk, gv, beta, A_log, dt_bias, bounds, pool, slots, accepted, targets, snapshots, snapshot_rows,
        parents, o, ht, scale, lower_bound, group, steps, pad_slot_id, slots_width,
    ):  # fmt: skip
        # Blocks of a sequence follow each other, as their states do in memory
        with T.Kernel(HV * parts, N, threads=config.threads) as (i_block, i_n):
            T.annotate_min_blocks_per_sm(config.blocks)
            i_hv, thread = i_block // parts, T.get_thread_binding()
            start, count = find_tokens(p, i_n, bounds, steps)
            slot, null = find_source(p, i_n, slots, accepted, pad_slot_id, slots_width)
            target = find_target(p, i_n, 0, slots, targets, pad_slot_id)
            row = find_snapshot_row(p, i_n, snapshot_rows)
            first_row = i_block % parts * in_block + thread // lanes.count * R
            state = alloc(size)
            packed = alloc(size, TL_DTYPE[p.state_dtype]) if narrow else state
            given = SimpleNamespace(q=q, k=k, v=v, g=g, gk=gk, gv=gv, beta=beta)
            raw, now, gate = alloc_token(p, lanes, given)
            by_k, by_q, spare = alloc(R), alloc(R), alloc(R)
            if first_row < p.V if p.V % in_block else True:
                head = Place(p, lanes, i_hv, None, thread % lanes.count, first_row)
                absent = null | outside(pool, slot, snapshots, row)
                if (count > 0) & T.Not(absent):
                    load_first(head, pool, slot, packed)
                    i_h, _ = divide(i_hv + 0, (T.cast(group, "int32"),))
                    at = replace(head, i_h=i_h)
                    load_gate(at, A_log, dt_bias, gate)
                    load_token(at, given, start, raw)
                    prepare(at, raw, gate, scale, lower_bound, now)
                    widen(packed, state)
                    for t in T.serial(count):
                        if t + 1 < count:  # on its way while this one is computed
                            load_token(at, given, start + t + 1, raw)
                        if has("tree"):
                            if t > 0:
                                parent = parents[i_n, t, 0]
                                if (parent >= 0) & (parent < t):
                                    load(at, snapshots, row, parent * states, packed)
                                else:
                                    load_first(at, pool, slot, packed)
                                widen(packed, state)
                        advance(at, now, state, by_k, by_q, spare)
                        store_values(at, by_q, o, start + t)
                        if has("snapshots"):
                            if (t + 1) * states * lanes.width <= snapshots.shape[1]:
                                store(at, state, snapshots, row, t * states)
                        if has("each_token"):
                            store(at, state, pool, find_target(p, i_n, t, slots, targets, pad_slot_id), 0)
                        if t + 1 < count:
                            prepare(at, raw, gate, scale, lower_bound, now)
                    store_last(at, state, pool, target)
                    store_final(at, state, ht, i_n)
                else:
                    T.clear(packed)
                    if absent:
                        T.clear(by_q)
                        for t in T.serial(count):
                            store_values(head, by_q, o, start + t)
                    else:  # a sequence of no tokens
                        load_first(head, pool, slot, packed)
                        store_last(head, packed, pool, target)
                    store_final(head, packed, ht, i_n)
                if has("ragged"):
                    if i_n == N - 1:  # tokens after the last sequence, with which captured calls are filled up
                        T.clear(by_q)
                        for t in T.serial(o.shape[0] - (start + count)):
                            store_values(head, by_q, o, start + count + t)

    return decode_rows


STAGE = Stage(
    "decode_rows",
    INPUTS,
    OUTPUTS,
    DecodeRowsConfig,
    build,
    reference,
    DecodeRowsConfig.default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
)
