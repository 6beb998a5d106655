"""A few tokens a sequence through its state at the speed of memory: V-first states, row by row in registers.

    S <- exp(g + gk + gv) S        v_new = step (v - S^T k)        S <- S + k v_new^T        o = scale S^T q

A row of a state, its key channels of one value channel, lies in the lanes of a warp or of a part of one: fewer lanes
take fewer steps for its sums. A warp asks for a token, then for what it will have of several rows, and makes of the
token what all rows of the block need while the rows are on their way: of several tokens each warp prepares one, and
leaves it in shared memory. Both sums over K are taken before the row is corrected, in one go, as

    S^T q = (decayed S)^T q + v_new (k . q)

Rows never meet: barriers are there for tokens alone. Norms are numbers that sums are multiplied with.
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
    is_null,
)
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.portable.decode_step import TOLERANCE, cost, reference
from kda_tl.templates.sm90.hopper import HopperConfig
from kda_tl.templates.sm90.lanes import CHUNK, VECTOR, WARP, Lanes, alloc, find_first, load_rows, store_rows
from kda_tl.templates.sm90.tokens import (
    Place,
    advance,
    alloc_staged,
    alloc_token,
    alloc_values,
    load_gate,
    load_row_values,
    load_token,
    makers_of,
    prepare,
    store_values,
    take_values,
)

FILE = 65536  # registers of a multiprocessor


def size_of(dtype: str) -> int:
    """Bytes of an element, by the name of a problem's dtype."""
    return TORCH_DTYPE[dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class DecodeRowsConfig(HopperConfig):
    """threads a block; rows that a group of lanes holds; vector: bytes of an access to states; lanes: of a group at
    most; blocks: whose registers a multiprocessor has."""

    NEEDS = "it was written for sm_90's memory"
    threads: int = tunable(128, 64, 128, 256)
    rows: int = tunable(8, 1, 2, 4, 8, 16)
    vector: int = tunable(16, 8, 16)
    lanes: int = tunable(16, 8, 16, 32)
    blocks: int = tunable(4, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12)

    def lie(self, case: Case) -> Lanes:
        """How rows lie in registers."""
        return Lanes(case.problem.K, self.vector // size_of(case.problem.state_dtype), self.rows, self.lanes)

    def parts(self, case: Case) -> int:
        """Blocks of a head."""
        return -(-case.problem.V // (self.threads // WARP * self.lie(case).warp_rows))

    def registers(self, case: Case) -> int:
        """Of a thread, about: the state, keys of a token, sums, and what is used at once of the rest."""
        p, lanes = case.problem, self.lie(case)
        a_row = 3 if "value_gate" in p.options else 2
        return lanes.channels * (self.rows + 1) + a_row * self.rows + 32

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
        if self.vector // size_of(p.state_dtype) < CHUNK:
            return f"vector={self.vector} bytes are fewer than {CHUNK} channels of {p.state_dtype}"
        if p.V % (rows := self.lie(case).warp_rows):
            return f"rows={self.rows} make {rows} a warp, which do not divide V={p.V}"
        room = min(255, FILE // (self.threads * self.blocks) // 8 * 8)
        if (needed := self.registers(case)) > room:
            return f"rows={self.rows} need {needed} registers, blocks={self.blocks} leave {room}"
        return None

    @classmethod
    def default(cls, case: Case) -> DecodeRowsConfig:
        """Many rows a thread: fewer in fp32 where there is one token of so many sequences that blocks take turns.

        Groups are as wide for all numbers of tokens and sequences, so that fp32 states are the same to the bit.
        """
        p = case.problem
        # rows, vector, blocks: the first two were the fastest on an H200 with 32 heads and 1 to 256 sequences
        shapes = [(8, 16, 4), (4, 16, 6), (4, 16, 4), (2, 16, 6), (2, 16, 4), (1, 16, 6), (1, 16, 4)]
        shapes += [(8, 8, 4), (4, 8, 6), (2, 8, 6), (1, 8, 6), (1, 8, 4)]
        configs = [cls(rows=rows, vector=vector, blocks=blocks) for rows, vector, blocks in shapes]
        first, one = configs[0], p.state_dtype == "fp32" and p.longest < 2
        if one and first.reject(case) is None:
            many = p.sequences * p.HV * first.parts(case) > 2 * first.blocks * case.device.num_sms
            configs = configs[many:]
        return first_valid(case, *configs)


def build(case: Case, config: DecodeRowsConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, part of the rows), tokens in order."""
    p, has, lanes, parts = case.problem, case.problem.options.__contains__, config.lie(case), config.parts(case)
    R, size, narrow = lanes.rows, lanes.rows * lanes.channels, p.state_dtype != "fp32"
    in_block = config.threads // WARP * lanes.warp_rows
    edges, HV = T.dynamic("edges"), T.dynamic("HV")  # sizes may not have names of tensors
    N = edges - 1
    makers, together = makers_of(p), config.threads // WARP  # a token a warp is staged at once
    keeps = p.final_state or not {"updates", "snapshots"}.isdisjoint(p.options)  # a state after the last token
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
            slot, _ = find_source(p, i_n, slots, accepted, pad_slot_id, slots_width)
            row = find_snapshot_row(p, i_n, snapshot_rows)
            i_h, _ = divide(i_hv + 0, (T.cast(group, "int32"),))
            first_row = i_block % parts * in_block + thread // lanes.count * R
            state = alloc(size)
            packed = alloc(size, TL_DTYPE[p.state_dtype]) if narrow else state
            given = SimpleNamespace(q=q, k=k, v=v, g=g, gk=gk, gv=gv, beta=beta)
            raw, gate = alloc_token(p, given)
            raw_values, now = alloc_values(lanes, given)
            staged = alloc_staged(p, together)
            by_k, by_q, spare = alloc(R), alloc(R), alloc(R)
            at = Place(p, lanes, i_hv, i_h, thread % lanes.count, first_row)
            maker = replace(at, lanes=makers, lane=thread % makers.count)
            inside = first_row < p.V if p.V % in_block else T.bool(True)
            own = T.alloc_var("int32")  # which of the tokens that are staged at once the warp prepares
            own = T.get_warp_idx_sync()
            if own < count:  # asked for before it is known where the state is
                load_gate(maker, A_log, dt_bias, gate)
                load_token(maker, given, start + own, raw)
            if inside & (count > 0):
                load_row_values(at, given, start, raw_values)
            # After the loads, or ptxas lets these wait for the slot
            target = find_target(p, i_n, 0, slots, targets, pad_slot_id)
            absent = is_null(p, slot, pad_slot_id) | outside(pool, slot, snapshots, row)
            if (count > 0) & T.Not(absent):
                if inside:
                    load_first(at, pool, slot, packed)
                if own < count:
                    prepare(maker, raw, gate, lower_bound, lanes.width, staged, own)
                T.sync_threads()
                if inside:
                    widen(packed, state)
                for i in T.serial(T.ceildiv(count, together)):
                    if i > 0:
                        T.sync_threads()
                        if i * together + own < count:
                            load_gate(maker, A_log, dt_bias, gate)
                            load_token(maker, given, start + i * together + own, raw)
                            prepare(maker, raw, gate, lower_bound, lanes.width, staged, own)
                        T.sync_threads()
                    if inside:
                        for m in T.serial(T.min(together, count - i * together)):
                            t = i * together + m
                            take_values(at, raw_values, scale, staged, m, now)
                            if t + 1 < count:  # on its way while this one is computed
                                load_row_values(at, given, start + t + 1, raw_values)
                            if has("tree"):
                                if t > 0:
                                    parent = parents[i_n, t, 0]
                                    if (parent >= 0) & (parent < t):
                                        load(at, snapshots, row, parent * states, packed)
                                    else:
                                        load_first(at, pool, slot, packed)
                                    widen(packed, state)
                            advance(at, now, staged, m, state, by_k, by_q, spare, keeps or t + 1 < count)
                            store_values(at, by_q, o, start + t)
                            if has("snapshots"):
                                if (t + 1) * states * lanes.width <= snapshots.shape[1]:
                                    store(at, state, snapshots, row, t * states)
                            if has("each_token"):
                                store(at, state, pool, find_target(p, i_n, t, slots, targets, pad_slot_id), 0)
                if inside:
                    store_last(at, state, pool, target)
                    store_final(at, state, ht, i_n)
            elif inside:
                T.clear(packed)
                if absent:
                    T.clear(by_q)
                    for t in T.serial(count):
                        store_values(at, by_q, o, start + t)
                else:  # a sequence of no tokens
                    load_first(at, pool, slot, packed)
                    store_last(at, packed, pool, target)
                store_final(at, packed, ht, i_n)
            if has("ragged"):
                if inside & (i_n == N - 1):  # tokens after the last sequence, with which captured calls are filled up
                    T.clear(by_q)
                    for t in T.serial(o.shape[0] - (start + count)):
                        store_values(at, by_q, o, start + count + t)

    return decode_rows


def passes(case: Case) -> dict[str, Any]:
    """Settings of TileLang's passes: the kernel sets its own barriers."""
    return {"tl.disable_thread_storage_sync": True}


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
    passes=passes,
)
