"""For the walk back of Gated DeltaNet's backward: states and values again, and gradients of states where segments end.

    V'^T = (V^T - (S^T K^T) diag(start)) A^T         S^T <- last S^T + (V'^T diag(end)) K                  forwards
    dV'^T = dO^T Aqk + (dS^T K^T) diag(end)          dX^T = dV'^T A
    dS^T <- last dS^T + (dO^T diag(query)) Q - (dX^T diag(start)) K                                        backwards

Forwards a segment that does not begin its sequence finds its own start: it begins as many chunks earlier as gates
remember, see reach, and keeps nothing of them. Backwards a block takes a whole sequence, from its end to the first
segment that needs what is known there, and keeps nothing but gradients at segments' ends; most heads need none.
Neither waits for the other.

    warps             registers  forwards    backwards
    4 or 8 multiply   216        V', S       dX, dS
    1 loads           40         one ring    the rings of chain

Source: as bwd_gdn_scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.chunks import join_chunks, split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90.bwd_gdn_scan import ROW_PRODUCTS
from kda_tl.templates.sm90.chain import REGISTERS, alloc_tiles, lay_back, load_step, start_from, step_back
from kda_tl.templates.sm90.hopper import BOUNDS, ENDS, PAIRS, TABLES, VALUES, count_bytes
from kda_tl.templates.sm90.powers import GIVEN_ROWS, MULTIPLIED, make_factors, reject_rows
from kda_tl.templates.sm90.reach import CUTS, FAR, OWNERS, count_reach, find_far, find_forwards
from kda_tl.templates.sm90.recurrence import (
    PRODUCER,
    ROWS,
    STORES,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    layout_lower,
    layout_values,
    read_state,
    step_reference,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.scan import SCANNED, load_forwards, walk_forwards
from kda_tl.templates.sm90.walk import Walk, alloc_registers, step_back_reference

INPUTS = {
    **GIVEN_ROWS,
    "v": "tokens HV V : io",
    "do": "tokens HV V : io",
    **PAIRS,
    **BOUNDS,
    "h0": "N HV K V : f32 ? initial_state",
    "dht": "N HV K V : f32 ? final_state",
    **OWNERS,
    **CUTS,
    **TABLES,
}
OUTPUTS = {**VALUES, "states": SCANNED["states"], **ENDS}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: sequences from their start and end, whatever they are cut into."""
    p, x = case.problem, make_factors(case, x)
    given, d_o = (split_chunks(y.to(x.powers.dtype), x.chunk_tokens, case.BT) for y in (x.v, x.do))
    values, states = torch.zeros_like(given), given.new_zeros((*given.shape[:2], p.V, p.KP))
    rows, bounds = x.segments.tolist(), x.bounds.tolist()
    ends = states.new_zeros((max(1, len(rows) - len(x.seq_segments)), *states.shape[1:]))
    for n, (i_s, count, last) in enumerate(x.seq_segments.tolist()):
        _, first, end = x.segment_sequences[last].tolist()
        state = read_state(case, x.h0, n, x.powers)
        for t in range(first, end):
            states[t] = state
            values[t], state = step_reference(x, t, given, state)
        dstate, edges = read_state(case, x.dht, n, x.powers), {sum(rows[i_s + m][:2]): i_s + m for m in range(count)}
        for t in reversed(range(first, end)):
            _, dstate = step_back_reference(x, t, d_o, dstate)
            if t in edges:
                ends[edges[t]] = dstate
        for i_h in range(p.HV):
            reach = [count_reach([row[i_h] for row in bounds[t:end]]) for t in edges]
            near = next((m for m in range(count) if reach[m] > FAR), count)
            ends[i_s : i_s + near, i_h] = 0
    return {"values": join_chunks(values, x.chunk_tokens, x.v.shape[0], p.V), "states": states, "ends": ends}


@dataclass(frozen=True, kw_only=True)
class StatesConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, channels that lie in whole tiles, and two slots, of which the walk back takes one for Aqk."""
        if reason := super().reject(case) or reject_rows(case, self.WIDTHS):
            return reason
        return None if self.num_stages > 1 else "num_stages=1 leaves no slot for Aqk, where the walk back expects it"

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, q, two barriers a stage, and those of the smaller rings."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        return self.num_stages * stage + self.BV * (K + BT) * 2 + BT * K * 2 + 32


@T.macro
def load_back(x, tiles, rings, w, far):
    """Producer: a sequence's chunks from its last to the first of those that follow the segment ``far``."""
    step = T.alloc_var("int32")
    step = 0
    begins, cuts = x.cuts[w.i_n, 0], x.cuts[w.i_n, 1]
    for m in T.serial(cuts - far):
        i_s = T.if_then_else(m == 0, x.cuts[w.i_n, 2], begins + cuts - m)
        first, chunks = x.segments[i_s, 0], x.segments[i_s, 1]
        for c in T.serial(chunks):
            i_t = first + chunks - 1 - c
            row = x.chunk_tokens[i_t, 0]
            load_step(x, tiles, rings, step, i_t, row, w)
            step = step + 1


@T.macro
def walk_back(case, config, load_state, x, tiles, rings, w, far, NS, N):
    """Consumer: gradients of states where segments end, from the segment ``far`` on; zeros for those before it."""
    p = case.problem
    r = alloc_registers(case, config)
    begins, cuts = x.cuts[w.i_n, 0], x.cuts[w.i_n, 1]
    for m in T.serial(T.if_then_else((NS == N) & (w.i_n == 0), 1, far)):  # where nothing is cut there is one row
        for i, j in T.Parallel(*r.state.shape):
            x.ends[begins + m, w.i_h, w.v0 + i, j] = 0.0
    step = T.alloc_var("int32")
    step = 0
    load_state(r.state, x.dht, p.final_state, w)
    T.copy(r.state, r.state_io)
    for m in T.serial(cuts - far):
        for _ in T.serial(x.segments[T.if_then_else(m == 0, x.cuts[w.i_n, 2], begins + cuts - m), 1]):
            step_back(p, r, tiles, rings, step)
            step = step + 1
        for i, j in T.Parallel(*r.state.shape):
            x.ends[begins + cuts - 1 - m, w.i_h, w.v0 + i, j] = r.state[i, j]


def build(case: Case, config: StatesConfig) -> Any:
    """The kernel: one thread block a (value head, BV channels) of a sequence backwards, then of a segment forwards."""
    p, BV, consumers, io = case.problem, config.BV, config.consumers, TL_DTYPE[case.problem.dtype]
    VB, heads, load_state, stages = p.V // BV, Heads.of(p), start_from(p), config.num_stages
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def bwd_gdn_states(
        q,
        k,
        v,
        d_o,
        A,
        Aqk,
        powers,
        bounds,
        h0,
        dht,
        segment_sequences,
        seq_segments,
        segments,
        chunk_tokens,
        values,
        states,
        ends,
    ):
        with T.Kernel((N + NS) * heads.HV * VB, threads=consumers + WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(2 if BV == ROWS else 1)
            back = i_block < N * heads.HV * VB  # first: it may be a whole sequence
            i_s, i_h, i_v = split_block(
                i_block - T.if_then_else(back, 0, N * heads.HV * VB), (T.if_then_else(back, N, NS), heads.HV), VB
            )
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"q": q, "k": k, "v": v, "d_o": d_o, "dht": dht}
            found = {"A": A, "Aqk": Aqk, "powers": powers, "bounds": bounds}
            x = SimpleNamespace(**given, **found, **tables, chunk_tokens=chunk_tokens, ends=ends, heads=heads)
            tiles = alloc_tiles(case, config)
            state_shared = T.alloc_shared((BV, p.K), io)
            value_shared = T.alloc_shared((BV // ROWS, case.BT, ROWS), io)
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            pairs_full = T.alloc_barrier(arrive_count=[PRODUCER])
            pairs_empty = T.alloc_barrier(arrive_count=[consumers])
            queries_full = T.alloc_barrier(arrive_count=[PRODUCER])
            queries_empty = T.alloc_barrier(arrive_count=[consumers])
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tiles.A) | layout_values(value_shared))
            store_constants([tiles.A])

            ring = Ring(full, empty)
            rings = SimpleNamespace(
                rows=ring, pairs=Ring(pairs_full, pairs_empty), queries=Ring(queries_full, queries_empty)
            )
            if back:
                far = find_far(x, i_s, i_h)
                edge = segment_sequences[seq_segments[i_s, 2], 2] - 1
                end = chunk_tokens[T.max(edge, 0), 0] + chunk_tokens[T.max(edge, 0), 1]
                w = Walk(i_s, i_s, i_h, i_v * BV, 0, 0, 0, end)
                if thread < consumers:
                    T.set_max_nreg(REGISTERS[0], 1)
                    walk_back(case, config, load_state, x, lay_back(tiles), rings, w, far, NS, N)
                else:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if thread < consumers + PRODUCER:
                        load_back(x, lay_back(tiles), rings, w, far)
            else:
                first, chunks, passed, start, end, i_n, _ = find_forwards(x, i_s, i_h, False)
                w = Walk(i_s, i_n, i_h, i_v * BV, first, chunks, start, end, passed)
                if thread < consumers:
                    T.set_max_nreg(REGISTERS[0], 1)
                    kept = SimpleNamespace(
                        state=states, value=values, state_shared=state_shared, value_shared=value_shared
                    )
                    walk_forwards(case, config, ROW_PRODUCTS, load_state, h0, tiles, ring, w, kept)
                else:
                    T.set_max_nreg(REGISTERS[1], 0)
                    if thread < consumers + PRODUCER:
                        load_forwards(case, ROW_PRODUCTS, x, tiles, ring, w)

    return bwd_gdn_states


def default(case: Case) -> Config:
    """Two blocks of a warpgroup share a multiprocessor."""
    return first_valid(case, StatesConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; the products of one walk forwards."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * p.V * (4 * p.K + 2 * BT)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


STAGE = Stage("bwd_gdn_states", INPUTS, OUTPUTS, StatesConfig, build, reference, default, cost, TOLERANCE, depends=())
