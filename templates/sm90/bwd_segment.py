"""Segments in reverse for Hopper: what a stretch of chunks makes of the gradient of the state after it, from zero on.

    dX^T = (dO^T Aqk + dS^T kg^T) A        dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg

This is affine in dS, with the transition that fwd_segment leaves: dS_start^T = dS_end^T transition + dlocal. A segment
that ends its sequence is walked from the gradient of the final state instead of zero, so that its transition is never
asked for. Nothing asks for what comes before a segment that begins its sequence: it is not walked, and zero.
Source: the transpose of fwd_segment's affine form; the walk is that of bwd_scan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import at_state, prim_func
from kda_tl.templates.sm90.hopper import FACTORS, TABLES, count_bytes
from kda_tl.templates.sm90.recurrence import (
    PRODUCER,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    find_chunks,
    layout_lower,
    read_state,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import (
    FACTOR_PRODUCTS,
    Walk,
    alloc_tiles,
    load_backwards,
    step_back_reference,
    walk_backwards,
)

WALKED = {"do": "tokens HV V : io", **FACTORS}
INPUTS = {**WALKED, "dht": "N HV K V : f32 ? final_state", **TABLES}
OUTPUTS = {"dlocal": "NS HV VP KP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    p, rows = case.problem, x.segments.tolist()
    d_o = split_chunks(x.do.to(x.decay.dtype), x.chunk_tokens, case.BT)
    dlocal = x.decay.new_zeros((len(rows), p.HV, p.VP, p.KP))
    for i_s, (first, count, begins, ends) in enumerate(rows):
        if begins < 0:
            dstate = read_state(case, x.dht if ends >= 0 else None, ends, x.decay)
            for t in reversed(range(first, first + count)):
                _, dstate = step_back_reference(x, t, d_o, dstate)
            dlocal[i_s, :, : p.V] = dstate
    return {"dlocal": dlocal}


@dataclass(frozen=True, kw_only=True)
class BwdSegmentConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        return self.num_stages * (BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16)


# A thread's: what multiplies stores nothing of a chunk and needs fewer than in bwd_scan.
REGISTERS, LOADER_REGISTERS = 216, 72


def build(case: Case, config: BwdSegmentConfig) -> Any:
    """The kernel: one thread block a (segment, value head, BV channels), chunks in reverse."""
    p, BV, stages = case.problem, config.BV, config.num_stages
    KP, VB, heads = p.KP, p.VP // config.BV, Heads.of(p)
    consumers = config.consumers
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @T.macro
    def load_state(state, dht, there, w):
        T.clear(state)
        if there:
            if w.i_n >= 0:
                for i, j in T.Parallel(BV, KP):
                    state[i, j] = T.if_then_else(
                        (w.v0 + i < p.V) & (j < p.K), dht[at_state(p, w.i_n, w.i_h, j, w.v0 + i)], 0.0
                    )

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def bwd_segment(d_o, A, Aqk, k_neg, qg, kg, decay, dht, segments, chunk_tokens, dlocal):
        with T.Kernel(NS * heads.HV * VB, threads=consumers + WARPGROUP) as i_block:
            i_s, i_h, i_v = split_block(i_block, (NS, heads.HV), VB)
            v0 = i_v * BV
            first, count, start, end = find_chunks(segments, chunk_tokens, i_s)
            begins = segments[i_s, 2] >= 0
            chunks = T.if_then_else(begins, 0, count)
            i_n = T.if_then_else(begins, -1, segments[i_s, 3])
            tiles = alloc_tiles(case, config)
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tiles.A, tiles.Aqk))
            store_constants([tiles.A, tiles.Aqk])

            w = Walk(i_s, i_n, i_h, v0, first, chunks, start, end)
            ring = Ring(full, empty)
            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                state = walk_backwards(case, config, FACTOR_PRODUCTS, load_state, dht, tiles, ring, w, None)
                for i, j in T.Parallel(BV, KP):
                    dlocal[i_s, i_h, v0 + i, j] = state[i, j]
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    x = SimpleNamespace(d_o=d_o, A=A, Aqk=Aqk, k_neg=k_neg, qg=qg, kg=kg, decay=decay)
                    load_backwards(case, FACTOR_PRODUCTS, x, tiles, ring, w)

    return bwd_segment


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """do and what prep made of the chunks that are walked in, a gradient a segment out; six products a chunk.

    Segments are about as long as each other, and those that begin a sequence are not walked.
    """
    p, BT, NC = case.problem, case.BT, sizes["NC"]
    share = NC / max(sizes["NS"], NC)
    walked, every = (count_bytes(case, sizes, tensors) for tensors in (WALKED, INPUTS | OUTPUTS))
    products = sizes["NT"] * p.HV * BT * p.V * (6 * p.K + 4 * BT)
    return Cost(bytes=int(share * walked) + every - walked, flops=int(share * products))


STAGE = Stage(
    "bwd_segment",
    INPUTS,
    OUTPUTS,
    BwdSegmentConfig,
    build,
    reference,
    BwdSegmentConfig.default,
    cost,
    TOLERANCE,
    depends=(),
)
