"""Recurrence of Gated DeltaNet for Hopper over segments, which run side by side, on the caller's q and k.

    V'^T = (V^T - (S^T K^T) diag(rk 2^G)) A^T           O^T = (S^T Q^T) diag(scale rq 2^G) + V'^T Aqk^T
    S^T <- 2^G_last S^T + (V'^T diag(rk 2^(G_last - G))) K

The products are fwd_gdn_recurrence's. A segment that does not begin its sequence finds its own start: it begins as many
chunks earlier as gates remember, and takes nothing of them but the state; if these are many, with the state that
fwd_gdn_merge found. See reach. Two blocks share a multiprocessor, each with rings as long as its tiles are needed:

    ring     slots    holds              is released when
    rows     2        v, k, A, powers    the chunk ends
    outputs  1        q, Aqk             the chunk ends; of chunks with an output alone

    warps             registers  produce     consume
    4 multiply        216        o, ht, h    both rings
    1 loads           40         both rings  tensors in memory
Source: as fwd_gdn_recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90 import fwd_recurrence
from kda_tl.templates.sm90.bwd_gdn_scan import find_values, take_values
from kda_tl.templates.sm90.chain import REGISTERS, Slot, alloc_tiles, start_between
from kda_tl.templates.sm90.fwd_gdn_recurrence import Queries, finish_chunk, finish_values, issue_values
from kda_tl.templates.sm90.fwd_recurrence import recurrence_cost
from kda_tl.templates.sm90.hopper import BOUNDS, PAIRS, TABLES
from kda_tl.templates.sm90.outputs import OUTPUTS, states_bytes
from kda_tl.templates.sm90.powers import GIVEN_ROWS, MULTIPLIED, make_factors, reject_rows
from kda_tl.templates.sm90.reach import CUTS, EDGES, OWNERS, find_forwards, join_segments
from kda_tl.templates.sm90.recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    ROWS,
    STORES,
    TOLERANCE,
    WARPGROUP,
    Output,
    RecurrenceConfig,
    layout_lower,
    layout_values,
    load_lower,
    load_values,
    round_output,
    store_constants,
    store_final,
    store_last,
    store_output,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import BARRIER, Walk

INPUTS = {
    **GIVEN_ROWS,
    "v": "tokens HV V : io",
    **PAIRS,
    **BOUNDS,
    **EDGES,
    "h0": "N HV K V : f32 ? initial_state",
    **OWNERS,
    **CUTS,
    **TABLES,
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: sequences from their start, whatever they are cut into."""
    return fwd_recurrence.reference(case, make_factors(case, join_segments(x)))


@dataclass(frozen=True, kw_only=True)
class GdnResumeConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, one warpgroup, and channels that lie in whole tiles."""
        if self.BV > ROWS:
            return f"it is written for BV={ROWS}, not BV={self.BV}"
        return super().reject(case) or reject_rows(case, self.WIDTHS)

    def smem_bytes(self, case: Case) -> int:
        """The tiles of both rings and their barriers, the output's, and that of states between chunks."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        output = BT * self.BV * 2
        return self.num_stages * stage + BT * (BT + K) * 2 + 16 + output + states_bytes(case, self.BV)


@T.macro
def load(case, x, tiles, rows, outputs, w):
    """Producer: the chunks of a walk from the first to the last, and what outputs take beside them."""
    i_k = x.heads.of_keys(w.i_h)
    for c in T.serial(w.chunks):
        i_t, row = w.first + c, w.start + c * case.BT
        slot, phase = rows.place_to_fill(c)
        rows.acquire(slot, phase)
        load_values(x.k, tiles.k, rows.full, slot, row, w.end, i_k, 0)
        load_values(x.v, tiles.v[0], rows.full, slot, row, w.end, w.i_h, w.v0)
        load_lower(x.A, i_t, w.i_h, tiles.A, slot, rows.full)
        T.tma_copy(x.powers[i_t, w.i_h, :MULTIPLIED, :], tiles.powers[slot, :, :], barrier=rows.full[slot])
        rows.commit(slot)
        if c >= w.passed:
            one, turn = outputs.place_to_fill(c - w.passed)
            outputs.acquire(one, turn)
            load_values(x.q, tiles.q.tile, outputs.full, one, row, w.end, i_k, 0)
            load_lower(x.Aqk, i_t, w.i_h, tiles.queries.Aqk.tile, one, outputs.full)
            outputs.commit(one)


@T.macro
def transpose(values, shared, threads):
    """A fragment to shared memory, transposed, by the block's first ``threads``, when they have read what was there."""
    T.sync_threads(BARRIER, threads)
    for i, j in T.Parallel(*values.shape):
        shared[j, i] = T.cast(values[i, j], shared.dtype)
    T.sync_threads(BARRIER, threads)


@T.macro
def multiply(case, config, load_state, starts, x, tiles, rows, outputs, w):
    """Consumer: the state of the first chunk that has an output, then all outputs, each stored a chunk later."""
    p, BT, BV, io, f32 = case.problem, case.BT, config.BV, TL_DTYPE[case.problem.dtype], "float32"
    z, threads = SimpleNamespace(case=case, io=io), config.consumers
    state = T.alloc_fragment((BV, p.K), f32)
    state_io = T.alloc_fragment((BV, p.K), io)
    value = T.alloc_fragment((BV, BT), f32)
    value_io = T.alloc_fragment((BV, BT), io)
    output = T.alloc_fragment((BV, BT), f32)
    passed = SimpleNamespace(state=state, state_io=state_io, value=value, value_io=value_io)
    r = SimpleNamespace(state=[state], state_io=state_io, value=value, value_io=value_io, output=output)
    load_state(state, starts, p.initial_state, w)
    T.copy(state, state_io)
    for c in T.serial(w.passed):
        slot, phase = rows.place_to_read(c)
        rows.wait(slot, phase)
        find_values(passed, tiles, slot)
        T.wgmma_gemm(value_io, tiles.A[slot, :, :], value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
        take_values(passed, tiles, slot)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(state, num_regs=p.K // 2)
        rows.release(slot)
        T.copy(state, state_io)
    own = w.start + w.passed * BT
    T.clear(output)
    for n in T.serial(w.chunks - w.passed):
        slot, phase = rows.place_to_read(w.passed + n)
        one, turned = outputs.place_to_read(n)
        rounded = round_output(output, io)
        rows.wait(slot, phase)
        issue_values(z, r, tiles, 0, slot)
        if p.intermediate_states:
            transpose(state_io, tiles.h, threads)
            for j, i in T.Parallel(p.K, BV):
                x.h[w.first + w.passed + n, w.i_h, j, w.v0 + i] = tiles.h[j, i]
        store_output(rounded, Output(tiles.o, x.o, own + (n - 1) * BT, own, w.end, w.i_h, w.v0, BARRIER))
        finish_values(z, r, tiles, 0, slot)
        outputs.wait(one, turned)
        finish_chunk(z, r, tiles, slot, n)
        outputs.release(one)
        rows.release(slot)
    rounded = round_output(output, io)
    last = own + (w.chunks - w.passed - 1) * BT
    store_last(rounded, Output(tiles.o, x.o, last, own, w.end, w.i_h, w.v0, BARRIER))
    if p.final_state:
        store_final(p, [state], x.ht, x.segments, w.i_s, w.i_h, w.v0)
    T.tma_store_wait(0)


def build(case: Case, config: GdnResumeConfig) -> Any:
    """The kernel: one thread block a (segment, value head, BV channels)."""
    p, BT, BV, consumers, io = case.problem, case.BT, config.BV, config.consumers, TL_DTYPE[case.problem.dtype]
    VB, heads, load_state, stages = p.V // BV, Heads.of(p), start_between(p), config.num_stages
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def fwd_gdn_resume(
        q,
        k,
        v,
        A,
        Aqk,
        powers,
        bounds,
        edges,
        h0,
        segment_sequences,
        seq_segments,
        segments,
        chunk_tokens,
        o,
        ht,
        h,
    ):
        with T.Kernel(NS * heads.HV * VB, threads=consumers + WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(2 if BV == ROWS else 1)
            i_s, i_h, i_v = split_block(i_block, (NS, heads.HV), VB)
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"q": q, "k": k, "v": v, "A": A, "Aqk": Aqk, "powers": powers, "bounds": bounds}
            written = {"o": o, "ht": ht, "h": h}
            x = SimpleNamespace(**given, **tables, **written, chunk_tokens=chunk_tokens, heads=heads)
            of_rows = alloc_tiles(case, config)
            Aqk_shared = T.alloc_shared((1, BT, BT), io)
            o_shared = T.alloc_shared((BT, BV), io)
            h_shared = T.alloc_shared((p.K, BV + OUTPUT_PAD), io) if p.intermediate_states else None
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            outputs_full = T.alloc_barrier(arrive_count=[PRODUCER])
            outputs_empty = T.alloc_barrier(arrive_count=[consumers])
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(of_rows.A, Aqk_shared) | layout_values(o_shared))
            store_constants([of_rows.A, Aqk_shared])
            queries = Queries(Slot(Aqk_shared))
            beside = {"q": Slot(of_rows.q), "queries": queries, "o": o_shared, "h": h_shared}
            tiles = SimpleNamespace(**{**vars(of_rows), **beside}, v=[of_rows.x])
            rows, outputs = Ring(full, empty), Ring(outputs_full, outputs_empty)

            first, chunks, passed, start, end, i_n, edge = find_forwards(x, i_s, i_h, True)
            w = Walk(i_s, i_n, i_h, i_v * BV, first, chunks, start, end, passed)
            if thread < consumers:
                T.set_max_nreg(REGISTERS[0], 1)
                starts = SimpleNamespace(h0=h0, edges=edges, edge=edge)
                multiply(case, config, load_state, starts, x, tiles, rows, outputs, w)
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < consumers + PRODUCER:
                    load(case, x, tiles, rows, outputs, w)

    return fwd_gdn_resume


def default(case: Case) -> Config:
    """Two blocks of a warpgroup share a multiprocessor."""
    return first_valid(case, GdnResumeConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """q, k, v, what is known of chunks, and states to start from in; o, final states and those between chunks out."""
    return recurrence_cost(case, sizes, INPUTS | OUTPUTS)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written: TileLang 0.1.15 wants another where two tensors may give a state."""
    return {"tl.disable_thread_storage_sync": True}


STAGE = Stage(
    "fwd_gdn_resume",
    INPUTS,
    OUTPUTS,
    GdnResumeConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    passes=passes,
)
