"""What segments make of any state, and of any gradient of one, where gates of Gated DeltaNet remember, for Hopper.

    S_after = transition S_before + local        dS_before = transition^T dS_after + dlocal

of S^T and dS^T, with a state's rows on the right: X <- X M + ..., as in fwd_segment. A thread block walks over a
segment's chunks with 64 rows, by the products of bwd_gdn_scan, and keeps nothing on its way:

    rows               walk       from                        leave
    of S^T             forwards   h0, zero in later segments  local, of the state after each cut segment
    of the identity    forwards   without values              transition, of segments that follow and precede others
    of dS^T            backwards  dht, zero in earlier ones   dlocal, of the gradient after each cut segment

A cut segment is one that does not end its sequence. Where gates forget, walks find their own start, see reach, so a
block whose head has no end of a segment that is far walks over nothing, and leaves zeros.

    warps             registers  forwards   backwards
    4 multiply        216        V', S      dX, dS
    1 loads           40         one ring   the rings of chain
Source: as bwd_gdn_scan, in the affine form of fwd_segment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.bwd_gdn_scan import find_values, take_values
from kda_tl.templates.sm90.chain import REGISTERS, alloc_tiles, lay_back, load_step, start_from, step_back
from kda_tl.templates.sm90.fwd_segment import FLOOR
from kda_tl.templates.sm90.hopper import BOUNDS, PAIRS, TABLES, count_bytes
from kda_tl.templates.sm90.powers import GIVEN_ROWS, MULTIPLIED, make_factors, reject_rows
from kda_tl.templates.sm90.reach import CUTS, OWNERS, far_reference, has_far
from kda_tl.templates.sm90.recurrence import (
    PRODUCER,
    ROWS,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    layout_lower,
    load_lower,
    load_values,
    read_state,
    step_reference,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
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
OUTPUTS = {"local": "NC HV V KP : f32", "transition": "NC HV KP KP : f32", "dlocal": "NC HV V KP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers."""
    p, x = case.problem, make_factors(case, x)
    given, d_o = (split_chunks(y.to(x.powers.dtype), x.chunk_tokens, case.BT) for y in (x.v, x.do))
    nothing = given.new_zeros((*given.shape[:3], p.KP))
    rows = x.segments.tolist()
    cuts = max(1, len(rows) - len(x.seq_segments))
    local, dlocal = (given.new_zeros((cuts, p.HV, p.V, p.KP)) for _ in range(2))
    transition = given.new_zeros((cuts, p.HV, p.KP, p.KP))
    for n, (begun, count, last) in enumerate(x.seq_segments.tolist()):
        before, after = (far_reference(x, n, step) for step in (-1, 1))
        for i_s in range(begun, begun + count):
            follower = i_s + 1 if i_s + 1 < begun + count else last
            (first, chunks, begins, _), (next_first, next_chunks, _, ends) = rows[i_s], rows[follower]
            state = read_state(case, x.h0 if begins >= 0 else None, begins, nothing)
            dstate = read_state(case, x.dht if ends >= 0 else None, ends, nothing)
            moved = torch.eye(p.KP, dtype=state.dtype, device=state.device).expand(p.HV, -1, -1)
            for t in range(first, first + chunks):
                state, moved = (step_reference(x, t, y, s)[1] for y, s in ((given, state), (nothing, moved)))
            for t in reversed(range(next_first, next_first + next_chunks)):
                dstate = step_back_reference(x, t, d_o, dstate)[1]
            local[i_s], dlocal[i_s] = state * before[:, None, None], dstate * after[:, None, None]
            if begins < 0:
                transition[i_s] = moved * (before | after)[:, None, None]
    return {"local": local, "transition": transition, "dlocal": dlocal}


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(RecurrenceConfig):
    """BV: rows a block owns; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, channels that lie in whole tiles, and rows that both states and transitions have."""
        if reason := super().reject(case) or reject_rows(case, self.WIDTHS):
            return reason
        return None if case.problem.KP % self.BV == 0 else f"BV={self.BV} does not divide K={case.problem.K}"

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, q, two barriers a stage, and those of the smaller rings."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        return self.num_stages * stage + BT * K * 2 + 32


@T.macro
def load_forwards(case, x, tiles, ring, w, moved):
    """Producer: a segment's chunks from the first to the last; nothing has values but states."""
    for c in T.serial(w.chunks):
        i_t, row = w.first + c, w.start + c * case.BT
        slot, phase = ring.place_to_fill(c)
        ring.acquire(slot, phase)
        load_values(x.k, tiles.k, ring.full, slot, row, w.end, x.heads.of_keys(w.i_h), 0)
        if T.Not(moved):
            load_values(x.v, tiles.x, ring.full, slot, row, w.end, w.i_h, w.v0)
        load_lower(x.A, i_t, w.i_h, tiles.A, slot, ring.full)
        T.tma_copy(x.powers[i_t, w.i_h, :MULTIPLIED, :], tiles.powers[slot, :, :], barrier=ring.full[slot])
        ring.commit(slot)


@T.macro
def walk_forwards(case, config, load_state, x, tiles, ring, w, moved, wanted):
    """Consumer: rows of a state, or of a unit one, after the segment."""
    p = case.problem
    r = alloc_registers(case, config)
    load_state(r.state, x.h0, p.initial_state, w)
    if moved & wanted:
        for i, j in T.Parallel(*r.state.shape):
            r.state[i, j] = T.if_then_else(w.v0 + i == j, 1.0, 0.0)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        slot, phase = ring.place_to_read(c)
        ring.wait(slot, phase)
        find_values(r, tiles, slot)
        T.wgmma_gemm(r.value_io, tiles.A[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
        take_values(r, tiles, slot)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(r.state, num_regs=p.K // 2)
        ring.release(slot)
        T.copy(r.state, r.state_io)
    return r.state


@T.macro
def load_backwards(case, x, tiles, rings, w):
    """Producer: a segment's chunks from the last to the first."""
    for c in T.serial(w.chunks):
        i_t, row = w.first + w.chunks - 1 - c, w.start + (w.chunks - 1 - c) * case.BT
        load_step(x, tiles, rings, c, i_t, row, w)


@T.macro
def walk_backwards(case, config, load_state, x, tiles, rings, w):
    """Consumer: rows of the gradient of the state before the segment."""
    p = case.problem
    r = alloc_registers(case, config)
    load_state(r.state, x.dht, p.final_state, w)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        step_back(p, r, tiles, rings, c)
    return r.state


def build(case: Case, config: SegmentConfig) -> Any:
    """The kernel: one thread block a (cut segment, value head, BV rows of one of the outputs)."""
    p, BV, consumers, stages = case.problem, config.BV, config.consumers, config.num_stages
    VB, KB, heads, load_state = p.V // BV, p.KP // BV, Heads.of(p), start_from(p)
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def bwd_gdn_segment(
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
        local,
        transition,
        dlocal,
    ):
        with T.Kernel(NC * heads.HV * (2 * VB + KB), threads=consumers + WARPGROUP) as i_block:
            T.annotate_min_blocks_per_sm(2 if BV == ROWS else 1)
            i_c, i_h, i_part = split_block(i_block, (NC, heads.HV), 2 * VB + KB)
            back, moved = i_part < VB, i_part >= 2 * VB
            v0 = (i_part - T.if_then_else(back, 0, T.if_then_else(moved, 2 * VB, VB))) * BV
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"q": q, "k": k, "v": v, "d_o": d_o, "h0": h0, "dht": dht}
            found = {"A": A, "Aqk": Aqk, "powers": powers, "bounds": bounds}
            x = SimpleNamespace(**given, **found, **tables, chunk_tokens=chunk_tokens, heads=heads)
            i_n = segment_sequences[i_c, 0]
            wanted, i_s, given_by, first, chunks, start, end = (T.alloc_var("int32") for _ in range(7))
            wanted = 0
            given_by = -1
            first = 0
            chunks = 0
            start = 0
            end = 0
            i_s = i_c
            if back:
                i_s = T.if_then_else(
                    i_c + 1 < seq_segments[i_n, 0] + seq_segments[i_n, 1], i_c + 1, seq_segments[i_n, 2]
                )
            if (segments[i_c, 3] < 0) & (T.Not(moved) | (segments[i_c, 2] < 0)):
                wanted = has_far(x, i_n, i_h, T.if_then_else(back, 1, -1))
                if moved & (wanted == 0):
                    wanted = has_far(x, i_n, i_h, 1)
            if wanted > 0:
                first = segments[i_s, 0]
                chunks = segments[i_s, 1]
                start = chunk_tokens[first, 0]
                end = chunk_tokens[first + chunks - 1, 0] + chunk_tokens[first + chunks - 1, 1]
                if back:
                    given_by = segments[i_s, 3]
                elif T.Not(moved):
                    given_by = segments[i_s, 2]
            w = Walk(i_s, given_by, i_h, v0, first, chunks, start, end)
            tiles = alloc_tiles(case, config)
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            pairs_full = T.alloc_barrier(arrive_count=[PRODUCER])
            pairs_empty = T.alloc_barrier(arrive_count=[consumers])
            queries_full = T.alloc_barrier(arrive_count=[PRODUCER])
            queries_empty = T.alloc_barrier(arrive_count=[consumers])
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tiles.A))
            if moved:  # by all threads, before they meet
                for s, i, j in T.Parallel(*tiles.x.shape):
                    tiles.x[s, i, j] = 0
            store_constants([tiles.A])
            ring = Ring(full, empty)
            rings = SimpleNamespace(
                rows=ring, pairs=Ring(pairs_full, pairs_empty), queries=Ring(queries_full, queries_empty)
            )
            if thread < consumers:
                T.set_max_nreg(REGISTERS[0], 1)
                if back:
                    dstate = walk_backwards(case, config, load_state, x, lay_back(tiles), rings, w)
                    for i, j in T.Parallel(*dstate.shape):
                        dlocal[i_c, i_h, v0 + i, j] = dstate[i, j]
                else:
                    state = walk_forwards(case, config, load_state, x, tiles, ring, w, moved, wanted > 0)
                    if moved:
                        for i, j in T.Parallel(*state.shape):
                            transition[i_c, i_h, v0 + i, j] = state[i, j]
                    else:
                        for i, j in T.Parallel(*state.shape):
                            local[i_c, i_h, v0 + i, j] = state[i, j]
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < consumers + PRODUCER:
                    if back:
                        load_backwards(case, x, lay_back(tiles), rings, w)
                    else:
                        load_forwards(case, x, tiles, ring, w, moved)

    return bwd_gdn_segment


def default(case: Case) -> Config:
    """Two blocks of a warpgroup share a multiprocessor."""
    return first_valid(case, SegmentConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; the products of a walk in either direction, and of
    the transition's.
    """
    p, BT = case.problem, case.BT
    rows = p.V * (4 * p.K + 2 * BT) + p.V * (6 * p.K + 4 * BT) + p.KP * (4 * p.K + 2 * BT)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=sizes["NT"] * p.HV * BT * rows)


STAGE = Stage(
    "bwd_gdn_segment",
    INPUTS,
    OUTPUTS,
    SegmentConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    rms_floor=FLOOR,
)
