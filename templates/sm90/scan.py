"""Scans in both directions on Hopper: the body of bwd_scan and bwd_resume. See bwd_scan for the formulas.

The two directions are two halves of one grid; what they pass through goes to memory a chunk at a time, by way of shared
memory. Roles, rings and tiles are those of walk.py, which walks back; the walk forwards holds S^T and V'^T, reads
V through the same ring, and finds the identity in the first slot of Aqk, which it does not load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.core.stage import Case, Cost
from kda_tl.templates.common.chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates.common.tile import TL_DTYPE, at_state
from kda_tl.templates.sm90.recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    Factors,
    RecurrenceConfig,
    find_chunks,
    finish_values,
    issue_values,
    layout_lower,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import (
    BY_ROWS,
    Kept,
    Tiles,
    Walk,
    decay_state,
    load_backwards,
    load_chunk,
    store_tiles,
    walk_back_reference,
    walk_backwards,
)

# What both scans leave
SCANNED = {
    "values": "NT HV V BT : io",
    "states": "NT HV V KP : io",
    "dv": "tokens HV V : io",
    "dstates": "NT HV V KP : io",
    "dh0": "N HV K V : f32 ? initial_state",
}


@dataclass(frozen=True, kw_only=True)
class ScanConfig(RecurrenceConfig):
    """Of a stage that scans both ways and keeps what it passes through."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * (KP + BT) + BT * (self.BV + OUTPUT_PAD)) * 2


def scan_reference(
    case: Case,
    starts: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor],
    v: torch.Tensor,
    do: torch.Tensor,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
    factors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Both scans of segments from given states, and back from given gradients, [HV, V, KP], in the dtype of these."""
    p, rows = case.problem, segments.tolist()
    dtype = factors["decay"].dtype
    given, d_o = (split_chunks(x.to(dtype), chunk_tokens, case.BT) for x in (v, do))
    values, dx = torch.zeros_like(given.mT), torch.zeros_like(d_o)
    states = given.new_zeros((*given.shape[:2], p.V, p.KP))
    dstates, dh0 = torch.zeros_like(states), {}
    for state, dstate, (first, count, begins, _) in zip(starts, ends, rows, strict=True):
        for t in range(first, first + count):
            x = {name: factors[name][t].to(dtype) for name in ("k_neg", "kg", "decay")}
            states[t] = state
            values[t] = (given[t].mT + state @ x["k_neg"].mT) @ unpack_lower(factors["A"][t].to(dtype)).mT
            state = state * x["decay"][:, None] + values[t] @ x["kg"]
        dstate, passed, dvalues = walk_back_reference(d_o, dstate, first, count, factors)
        for t, (dstate_after, dvalue) in enumerate(zip(passed, dvalues, strict=True), first):
            dstates[t], dx[t] = dstate_after, dvalue
        if begins >= 0:
            dh0[begins] = dstate[..., : p.K] if p.state_v_first else dstate[..., : p.K].mT
    dv = join_chunks(dx, chunk_tokens, do.shape[0], p.V)
    found = {"values": values, "states": states, "dv": dv, "dstates": dstates}
    return found | ({"dh0": torch.stack([dh0[n] for n in sorted(dh0)])} if p.initial_state else {})


@T.macro
def load_forwards(case, v, factors, tiles, ring, w):
    """Producer: the chunks of a segment from the first to the last."""
    for c in T.serial(w.chunks):
        row = w.start + c * case.BT
        load_chunk(v, factors, tiles, ring, c, w.first + c, row, w.end, w.i_h, w.v0, False)


@T.macro
def walk_forwards(case, config, load_state, starts, tiles, ring, w, kept):
    """Consumer: values and states from the first chunk to the last; arguments as of :func:`walk_backwards`."""
    p, BT, BV, held = case.problem, case.BT, config.BV, tiles.factors
    io, f32 = TL_DTYPE[p.dtype], "float32"
    state = T.alloc_fragment((BV, p.KP), f32)
    state_io = T.alloc_fragment((BV, p.KP), io)
    value = T.alloc_fragment((BV, BT), f32)
    value_io = T.alloc_fragment((BV, BT), io)
    load_state(state, starts, p.initial_state, w)
    T.copy(state, state_io)
    for c in T.serial(w.chunks):
        slot, phase = ring.place_to_read(c)
        ring.wait(slot, phase)
        issue_values(tiles.x, held.k_neg, held.Aqk[0, :, :], slot, state_io, value)
        finish_values(value, value_io)
        T.wgmma_gemm(value_io, held.A[slot, :, :], value, transpose_B=True, clear_accum=True, policy=BY_ROWS)
        decay_state(state, held.decay, slot)
        finish_values(value, value_io)
        T.wgmma_gemm(value_io, held.kg[slot, :, :], state, policy=BY_ROWS)
        stored = (kept.state_shared, kept.value_shared), (kept.state, kept.value)
        store_tiles((state_io, value_io), *stored, w.first + c, w.i_h, w.v0, config.consumers)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(state, num_regs=p.KP // 2)
        ring.release(slot)
        T.copy(state, state_io)
    T.tma_store_wait(0)


@T.macro
def store_gradient(p, state, dh0, cut, w):
    """The gradient of an initial state; where sequences are cut only their first segments have one."""
    if p.initial_state:
        for i, j in T.Parallel(*state.shape):
            if (w.i_n >= 0) & (j < p.K) if cut else j < p.K:
                dh0[at_state(p, w.i_n, w.i_h, j, w.v0 + i)] = state[i, j]


@dataclass(frozen=True)
class Tensors:
    """The kernel's, in memory; starts and ends are states, and gradients of states, that segments start from."""

    v: Any
    d_o: Any
    factors: Factors
    starts: Any
    ends: Any
    segments: Any
    chunk_tokens: Any
    values: Any
    states: Any
    dv: Any
    dstates: Any
    dh0: Any


@T.macro
def scan(case, config, load_state, registers, cut, i_block, NS, x):
    """A kernel's body: a block takes one direction of a (segment, value head, BV rows), backwards in the first half.

    Args:
        case: what the kernel is built for.
        config: of the stage.
        load_state: as of :func:`walk_backwards`, of states and of their gradients.
        registers: of a thread that multiplies, and of one that loads.
        cut: whether segments may be parts of a sequence.
        i_block: the thread block.
        NS: number of segments.
        x: the tensors.
    """
    p, BT, BV, stages, consumers = case.problem, case.BT, config.BV, config.num_stages, config.consumers
    HV, KP, VB, io = p.HV, p.KP, p.V // config.BV, TL_DTYPE[p.dtype]
    back = i_block < NS * HV * VB  # first: it loads more
    i_s = i_block // (HV * VB) % NS
    i_h = i_block // VB % HV
    v0 = i_block % VB * BV
    first, chunks, start, end = find_chunks(x.segments, x.chunk_tokens, i_s)
    i_n = x.segments[i_s, 2]
    x_shared = T.alloc_shared((stages, BT, BV), io)
    A_shared = T.alloc_shared((stages, BT, BT), io)
    Aqk_shared = T.alloc_shared((stages, BT, BT), io)  # forwards, the first one is a unit matrix
    n_shared = T.alloc_shared((stages, BT, KP), io)
    q_shared = T.alloc_shared((stages, BT, KP), io)
    k_shared = T.alloc_shared((stages, BT, KP), io)
    decay_shared = T.alloc_shared((stages, KP), "float32")
    state_shared = T.alloc_shared((BV, KP), io)
    value_shared = T.alloc_shared((BV, BT), io)
    dv_shared = T.alloc_shared((BT, BV + OUTPUT_PAD), io)
    ready = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
    free = T.alloc_barrier(arrive_count=[consumers] * stages)
    thread = T.get_thread_binding()
    T.annotate_layout(layout_lower(A_shared, Aqk_shared))
    for i, j in T.Parallel(BT, BT):
        if T.Not(back):
            Aqk_shared[0, i, j] = T.if_then_else(i == j, 1.0, 0.0)
    triangles = [A_shared, Aqk_shared]
    store_constants(triangles)
    A_shared, Aqk_shared = triangles  # names again, see outputs.py

    w = Walk(i_s, i_n, i_h, v0, first, chunks, start, end)
    tiles = Tiles(x_shared, Factors(A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared))
    ring = Ring(ready, free)
    if thread < consumers:
        T.set_max_nreg(registers[0], 1)
        if back:
            kept = Kept(x.dstates, x.dv, state_shared, dv_shared)
            state = walk_backwards(case, config, load_state, x.ends, tiles, ring, w, kept)
            store_gradient(p, state, x.dh0, cut, w)
        else:
            kept = Kept(x.states, x.values, state_shared, value_shared)
            walk_forwards(case, config, load_state, x.starts, tiles, ring, w, kept)
    else:
        T.set_max_nreg(registers[1], 0)
        if thread < consumers + PRODUCER:
            if back:
                load_backwards(case, x.d_o, x.factors, tiles, ring, w)
            else:
                load_forwards(case, x.v, x.factors, tiles, ring, w)


def scan_cost(case: Case, sizes: Mapping[str, int], elements: int) -> Cost:
    """v, do and what prep made in; values, states and gradients out; some elements of fp32; ten products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks, rows = sizes["NT"] * p.HV, sizes["tokens"] * p.HV
    moved = 3 * rows * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    kept = chunks * p.V * (BT + 2 * p.KP) * io
    return Cost(bytes=moved + kept + elements * 4, flops=chunks * BT * p.V * (10 * p.K + 6 * BT))
