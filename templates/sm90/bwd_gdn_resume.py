"""For the walk back of Gated DeltaNet's backward over many segments: values and states again.

    V'^T = (V^T - (S^T K^T) diag(start)) A^T         S^T <- last S^T + (V'^T diag(end)) K

A segment that does not begin its sequence finds its own start: it begins as many chunks earlier as gates remember, and
keeps nothing of them; if these are many, with the state that fwd_gdn_merge found. See reach. Roles and ring are those
of scan's walk forwards.

    warps             registers  produce   consume
    4 or 8 multiply   216        V', S     the ring
    1 loads           40         the ring  tensors in memory
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
from kda_tl.templates.sm90.chain import REGISTERS, alloc_tiles, start_between
from kda_tl.templates.sm90.hopper import BOUNDS, PAIRS, TABLES, VALUES, count_bytes
from kda_tl.templates.sm90.powers import GIVEN_ROWS, MULTIPLIED, make_factors, reject_rows
from kda_tl.templates.sm90.reach import CUTS, EDGES, OWNERS, find_forwards
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
from kda_tl.templates.sm90.walk import Walk

INPUTS = {
    "k": GIVEN_ROWS["k"],
    "v": "tokens HV V : io",
    "A": PAIRS["A"],
    "powers": PAIRS["powers"],
    **BOUNDS,
    **EDGES,
    "h0": "N HV K V : f32 ? initial_state",
    **OWNERS,
    **CUTS,
    **TABLES,
}
OUTPUTS = {**VALUES, "states": SCANNED["states"]}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: sequences from their start, whatever they are cut into."""
    p, x = case.problem, make_factors(case, x)
    given = split_chunks(x.v.to(x.powers.dtype), x.chunk_tokens, case.BT)
    values, states = torch.zeros_like(given), given.new_zeros((*given.shape[:2], p.V, p.KP))
    for n, (_, _, last) in enumerate(x.seq_segments.tolist()):
        _, first, end = x.segment_sequences[last].tolist()
        state = read_state(case, x.h0, n, x.powers)
        for t in range(first, end):
            states[t] = state
            values[t], state = step_reference(x, t, given, state)
    return {"values": join_chunks(values, x.chunk_tokens, x.v.shape[0], p.V), "states": states}


@dataclass(frozen=True, kw_only=True)
class ResumeConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, and channels that lie in whole tiles."""
        return super().reject(case) or reject_rows(case, self.WIDTHS)

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        return self.num_stages * stage + self.BV * (K + BT) * 2


def build(case: Case, config: ResumeConfig) -> Any:
    """The kernel: one thread block a (segment, value head, BV channels)."""
    p, BV, consumers, io = case.problem, config.BV, config.consumers, TL_DTYPE[case.problem.dtype]
    VB, heads, load_state, stages = p.V // BV, Heads.of(p), start_between(p), config.num_stages
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def bwd_gdn_resume(
        k, v, A, powers, bounds, edges, h0, segment_sequences, seq_segments, segments, chunk_tokens, values, states
    ):
        with T.Kernel(NS * heads.HV * VB, threads=consumers + WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(2 if BV == ROWS else 1)
            i_s, i_h, i_v = split_block(i_block, (NS, heads.HV), VB)
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"k": k, "v": v, "A": A, "powers": powers, "bounds": bounds}
            x = SimpleNamespace(**given, **tables, chunk_tokens=chunk_tokens, heads=heads)
            tiles = alloc_tiles(case, config)
            state_shared = T.alloc_shared((BV, p.K), io)
            value_shared = T.alloc_shared((BV // ROWS, case.BT, ROWS), io)
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tiles.A) | layout_values(value_shared))
            store_constants([tiles.A])

            first, chunks, passed, start, end, i_n, edge = find_forwards(x, i_s, i_h, True)
            w = Walk(i_s, i_n, i_h, i_v * BV, first, chunks, start, end, passed)
            if thread < consumers:
                T.set_max_nreg(REGISTERS[0], 1)
                starts = SimpleNamespace(h0=h0, edges=edges, edge=edge)
                kept = SimpleNamespace(state=states, value=values, state_shared=state_shared, value_shared=value_shared)
                walk_forwards(case, config, ROW_PRODUCTS, load_state, starts, tiles, Ring(full, empty), w, kept)
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < consumers + PRODUCER:
                    load_forwards(case, ROW_PRODUCTS, x, tiles, Ring(full, empty), w)

    return bwd_gdn_resume


def default(case: Case) -> Config:
    """Two blocks of a warpgroup share a multiprocessor."""
    return first_valid(case, ResumeConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; four products a chunk."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * p.V * (4 * p.K + 2 * BT)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written: TileLang 0.1.15 wants another where two tensors may give a state."""
    return {"tl.disable_thread_storage_sync": True}


STAGE = Stage(
    "bwd_gdn_resume",
    INPUTS,
    OUTPUTS,
    ResumeConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    passes=passes,
)
