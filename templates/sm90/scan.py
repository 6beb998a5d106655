"""Scans in both directions on Hopper: the body of bwd_scan, bwd_gdn_scan and bwd_resume. See bwd_scan for the formulas.

The two directions are two halves of one grid; what they pass through goes to memory a chunk at a time, by way of shared
memory. Roles, rings and tiles are those of walk.py, which walks back; the walk forwards holds S^T and V'^T, reads
V through the same ring, and finds the identity in the first slot of Aqk, which it does not load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kda_tl.core.stage import Case, Cost, Operands
from kda_tl.templates.common.chunks import join_chunks, split_chunks
from kda_tl.templates.common.heads import split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, at_state
from kda_tl.templates.sm90.hopper import count_bytes
from kda_tl.templates.sm90.recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    RecurrenceConfig,
    find_chunks,
    layout_lower,
    step_reference,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import (
    Walk,
    alloc_registers,
    load_backwards,
    step_back_reference,
    store_found,
    store_tiles,
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
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * (KP + BT) + BT * (self.BV + OUTPUT_PAD)) * 2


def scan_reference(
    case: Case, x: Operands, starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Both scans of segments from given states, and back from given gradients, [HV, V, KP], in the dtype of these."""
    p, dtype = case.problem, x.decay.dtype
    given, d_o = (split_chunks(y.to(dtype), x.chunk_tokens, case.BT) for y in (x.v, x.do))
    values, dx = torch.zeros_like(given.mT), torch.zeros_like(d_o)
    states = given.new_zeros((*given.shape[:2], p.V, p.KP))
    dstates, dh0 = torch.zeros_like(states), {}
    for state, dstate, (first, count, begins, _) in zip(starts, ends, x.segments.tolist(), strict=True):
        for t in range(first, first + count):
            states[t] = state
            v_new, state = step_reference(x, t, given, state)
            values[t] = v_new.mT
        for t in reversed(range(first, first + count)):
            dstates[t] = dstate
            dx[t], dstate = step_back_reference(x, t, d_o, dstate)
        if begins >= 0:
            dh0[begins] = dstate[..., : p.K] if p.state_v_first else dstate[..., : p.K].mT
    dv = join_chunks(dx, x.chunk_tokens, x.do.shape[0], p.V)
    found = {"values": values, "states": states, "dv": dv, "dstates": dstates}
    return found | ({"dh0": torch.stack([dh0[n] for n in sorted(dh0)])} if p.initial_state else {})


@T.macro
def load_forwards(case, products, x, tiles, ring, w):
    """Producer: the chunks of a segment from the first to the last."""
    for c in T.serial(w.chunks):
        row = w.start + c * case.BT
        products.load_chunk(x.v, x, tiles, ring, c, w.first + c, row, w, False)


@T.macro
def walk_forwards(case, config, products, load_state, starts, tiles, ring, w, kept):
    """Consumer: values and states from the first chunk to the last; arguments as of :func:`walk_backwards`.

    Where some chunks are passed values go to the rows of their tokens, and to tiles of chunks otherwise.
    """
    p = case.problem
    r = alloc_registers(case, config)
    load_state(r.state, starts, p.initial_state, w)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        slot, phase = ring.place_to_read(c)
        ring.wait(slot, phase)
        products.find_values(r, tiles, slot)
        T.wgmma_gemm(r.value_io, tiles.A[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
        products.take_values(r, tiles, slot)
        if w.passed is None:
            stored = (kept.state_shared, kept.value_shared), (kept.state, kept.value)
            store_tiles((r.state_io, r.value_io), *stored, w.first + c, w.i_h, w.v0, config.consumers)
        elif c >= w.passed:
            store_found(r, kept, w.first + c, w.start + c * case.BT, w, config.consumers)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(r.state, num_regs=p.KP // 2)
        ring.release(slot)
        T.copy(r.state, r.state_io)
    T.tma_store_wait(0)


@T.macro
def store_gradient(p, state, dh0, cut, w):
    """The gradient of an initial state; where sequences are cut only their first segments have one."""
    if p.initial_state:
        for i, j in T.Parallel(*state.shape):
            if (w.i_n >= 0) & (j < p.K) if cut else j < p.K:
                dh0[at_state(p, w.i_n, w.i_h, j, w.v0 + i)] = state[i, j]


@T.macro
def scan(case, config, products, load_state, registers, cut, i_block, NS, HV, x):
    """A kernel's body: a block takes one direction of a (segment, value head, BV rows), backwards in the first half.

    Args:
        case: what the kernel is built for.
        config: of the stage.
        products: see :class:`kda_tl.templates.sm90.walk.Products`.
        load_state: as of :func:`walk_backwards`, of states and of their gradients.
        registers: of a thread that multiplies, and of one that loads.
        cut: whether segments may be parts of a sequence.
        i_block: the thread block.
        NS: number of segments.
        HV: number of value heads.
        x: the tensors; starts and ends are states, and gradients of states, that segments start from.
    """
    p, BT, BV, stages, consumers = case.problem, case.BT, config.BV, config.num_stages, config.consumers
    KP, VB, io = p.KP, p.V // config.BV, TL_DTYPE[p.dtype]
    back = i_block < NS * HV * VB  # first: it loads more
    i_s, i_h, i_v = split_block(i_block - T.if_then_else(back, 0, NS * HV * VB), (NS, HV), VB)
    v0 = i_v * BV
    first, chunks, start, end = find_chunks(x.segments, x.chunk_tokens, i_s)
    i_n = x.segments[i_s, 2]
    tiles = products.alloc_tiles(case, config)  # forwards, the first slot of Aqk is the identity
    state_shared = T.alloc_shared((BV, KP), io)
    value_shared = T.alloc_shared((BV, BT), io)
    dv_shared = T.alloc_shared((BT, BV + OUTPUT_PAD), io)
    full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
    empty = T.alloc_barrier(arrive_count=[consumers] * stages)
    thread = T.get_thread_binding()
    T.annotate_layout(layout_lower(tiles.A, tiles.Aqk))
    for i, j in T.Parallel(BT, BT):
        if T.Not(back):
            tiles.Aqk[0, i, j] = T.if_then_else(i == j, 1.0, 0.0)
    store_constants([tiles.A, tiles.Aqk])

    w = Walk(i_s, i_n, i_h, v0, first, chunks, start, end)
    ring = Ring(full, empty)
    if thread < consumers:
        T.set_max_nreg(registers[0], 1)
        if back:
            kept = SimpleNamespace(state=x.dstates, value=x.dv, state_shared=state_shared, value_shared=dv_shared)
            state = walk_backwards(case, config, products, load_state, x.ends, tiles, ring, w, kept)
            store_gradient(p, state, x.dh0, cut, w)
        else:
            kept = SimpleNamespace(state=x.states, value=x.values, state_shared=state_shared, value_shared=value_shared)
            walk_forwards(case, config, products, load_state, x.starts, tiles, ring, w, kept)
    else:
        T.set_max_nreg(registers[1], 0)
        if thread < consumers + PRODUCER:
            if back:
                load_backwards(case, products, x, tiles, ring, w)
            else:
                load_forwards(case, products, x, tiles, ring, w)


def scan_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> Cost:
    """Every tensor once; ten products a chunk."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * p.V * (10 * p.K + 6 * BT)
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)
