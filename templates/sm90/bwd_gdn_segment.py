"""Segments of Gated DeltaNet's backward for Hopper: what they make of their gradients of outputs alone.

    dS_before = transition^T dS_after + dlocal

of S^T and dS^T, with a state's rows on the right; the transition is fwd_gdn_segment's. A thread block walks back over
a segment's chunks with 64 rows of dS^T, by the products of bwd_gdn_scan, from dht at a sequence's end and from zero
elsewhere, and keeps nothing on its way. dlocal is of the gradient after each cut segment, which is one that does not
end its sequence: of the walk over the segment that follows it. Where gates forget, walks find their own start, see
reach, so a block whose head has no end of a segment that is far walks over nothing, and leaves zeros.

    warps             registers  produce          consume
    4 multiply        216        dX, dS, dlocal   the rings of chain
    1 loads           40         the rings        tensors in memory
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
from kda_tl.templates.sm90.chain import REGISTERS, alloc_tiles, lay_back, load_step, start_from, step_back
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
    read_state,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import Walk, alloc_registers, step_back_reference

INPUTS = {
    **GIVEN_ROWS,
    "do": "tokens HV V : io",
    **PAIRS,
    **BOUNDS,
    "dht": "N HV K V : f32 ? final_state",
    **OWNERS,
    **CUTS,
    **TABLES,
}
OUTPUTS = {"dlocal": "NC HV V KP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers."""
    p, x, rows = case.problem, make_factors(case, x), x.segments.tolist()
    d_o = split_chunks(x.do.to(x.powers.dtype), x.chunk_tokens, case.BT)
    dlocal = d_o.new_zeros((max(1, len(rows) - len(x.seq_segments)), p.HV, p.V, p.KP))
    for n, (begun, count, last) in enumerate(x.seq_segments.tolist()):
        far = far_reference(x, n, 1)[:, None, None]
        for i_s in range(begun, begun + count):
            first, chunks, _, ends = rows[i_s + 1 if i_s + 1 < begun + count else last]
            dstate = read_state(case, x.dht if ends >= 0 else None, ends, d_o)
            for t in reversed(range(first, first + chunks)):
                dstate = step_back_reference(x, t, d_o, dstate)[1]
            dlocal[i_s] = dstate * far
    return {"dlocal": dlocal}


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(RecurrenceConfig):
    """BV: rows a block owns; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, channels that lie in whole tiles, and two slots, of which the walk back takes one for Aqk."""
        if reason := super().reject(case) or reject_rows(case, self.WIDTHS):
            return reason
        return None if self.num_stages > 1 else "num_stages=1 leaves no slot for Aqk, where the walk back expects it"

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, q, two barriers a stage, and those of the smaller rings."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        return self.num_stages * stage + BT * K * 2 + 32


@T.macro
def load(case, x, tiles, rings, w):
    """Producer: a segment's chunks from the last to the first."""
    for c in T.serial(w.chunks):
        i_t, row = w.first + w.chunks - 1 - c, w.start + (w.chunks - 1 - c) * case.BT
        load_step(x, tiles, rings, c, i_t, row, w)


@T.macro
def walk(case, config, load_state, x, tiles, rings, w):
    """Consumer: rows of the gradient of the state before the segment."""
    p = case.problem
    r = alloc_registers(case, config)
    load_state(r.state, x.dht, p.final_state, w)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        step_back(p, r, tiles, rings, c)
    return r.state


def build(case: Case, config: SegmentConfig) -> Any:
    """The kernel: one thread block a (cut segment, value head, BV rows)."""
    p, BV, consumers, stages = case.problem, config.BV, config.consumers, config.num_stages
    VB, heads, load_state = p.V // BV, Heads.of(p), start_from(p)
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def bwd_gdn_segment(
        q, k, d_o, A, Aqk, powers, bounds, dht, segment_sequences, seq_segments, segments, chunk_tokens, dlocal
    ):
        with T.Kernel(NC * heads.HV * VB, threads=consumers + WARPGROUP) as i_block:
            T.annotate_min_blocks_per_sm(2 if BV == ROWS else 1)
            i_c, i_h, i_v = split_block(i_block, (NC, heads.HV), VB)
            v0, i_n = i_v * BV, segment_sequences[i_c, 0]
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"q": q, "k": k, "d_o": d_o, "dht": dht}
            found = {"A": A, "Aqk": Aqk, "powers": powers, "bounds": bounds}
            x = SimpleNamespace(**given, **found, **tables, chunk_tokens=chunk_tokens, heads=heads)
            far, given_by, first, chunks, start, end = (T.alloc_var("int32") for _ in range(6))
            far = 0
            given_by = -1
            first = 0
            chunks = 0
            start = 0
            end = 0
            i_s = T.if_then_else(i_c + 1 < seq_segments[i_n, 0] + seq_segments[i_n, 1], i_c + 1, seq_segments[i_n, 2])
            if segments[i_c, 3] < 0:
                far = has_far(x, i_n, i_h, 1)
            if far > 0:
                first = segments[i_s, 0]
                chunks = segments[i_s, 1]
                start = chunk_tokens[first, 0]
                end = chunk_tokens[first + chunks - 1, 0] + chunk_tokens[first + chunks - 1, 1]
                given_by = segments[i_s, 3]
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
            store_constants([tiles.A])
            others = {"pairs": Ring(pairs_full, pairs_empty), "queries": Ring(queries_full, queries_empty)}
            rings = SimpleNamespace(rows=Ring(full, empty), **others)
            if thread < consumers:
                T.set_max_nreg(REGISTERS[0], 1)
                dstate = walk(case, config, load_state, x, lay_back(tiles), rings, w)
                for i, j in T.Parallel(*dstate.shape):
                    dlocal[i_c, i_h, v0 + i, j] = dstate[i, j]
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < consumers + PRODUCER:
                    load(case, x, lay_back(tiles), rings, w)

    return bwd_gdn_segment


def default(case: Case) -> Config:
    """Two blocks of a warpgroup share a multiprocessor."""
    return first_valid(case, SegmentConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; the products of a walk back."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * p.V * (6 * p.K + 4 * BT)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


STAGE = Stage("bwd_gdn_segment", INPUTS, OUTPUTS, SegmentConfig, build, reference, default, cost, TOLERANCE, depends=())
