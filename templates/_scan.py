"""Scans on Hopper: what the stages share that walk chunks back, or both ways, with a transposed state in registers.

The two directions are two halves of one grid; what they pass through goes to memory a chunk at a time, by way of shared
memory. See bwd_scan for the formulas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Cost
from kda_tl.templates._chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates._recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    RecurrenceConfig,
    ask_values,
    find_chunks,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    put_constants,
    put_output,
)
from kda_tl.templates._tile import TL_DTYPE, at_state

BARRIER = 1  # a named one, of the threads that multiply


@dataclass(frozen=True, kw_only=True)
class ScanConfig(RecurrenceConfig):
    """Of a stage that scans both ways and keeps what it passes through."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * (KP + BT) + BT * (self.BV + OUTPUT_PAD)) * 2


def walk_back_reference(
    d_o: torch.Tensor, dstate: torch.Tensor, first: int, count: int, factors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The gradient of the transposed state [HV, rows, KP] before ``count`` chunks; of it after each, and of values.

    Args:
        d_o: [NT, HV, BT, rows], in the dtype of dstate.
        dstate: after the last chunk.
        first: the first chunk.
        count: of chunks.
        factors: what prep made, by name.
    """
    dstates, dx = [], []
    for t in reversed(range(first, first + count)):
        x = {name: factor[t].to(dstate.dtype) for name, factor in factors.items()}
        dstates.append(dstate)
        dx.append(unpack_lower(x["A"]).mT @ (unpack_lower(x["Aqk"]).mT @ d_o[t] + x["kg"] @ dstate.mT))
        dstate = dstate * x["decay"][:, None] + d_o[t].mT @ x["qg"] + dx[-1].mT @ x["k_neg"]
    return dstate, dstates[::-1], dx[::-1]


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
def _begin(threads):
    """Until the last chunk's tiles have been read."""
    T.tma_store_wait(0)
    T.sync_threads(BARRIER, threads)


@T.macro
def _copy(tile, shared):
    T.copy(tile, shared)


@T.macro
def _publish(threads):
    T.fence_proxy_async()
    T.sync_threads(BARRIER, threads)


@T.macro
def _store(shared, x, i_t, i_h, v0, threads):
    T.tma_copy(shared, x[i_t, i_h, v0 : v0 + shared.shape[0], :], leader_scope_threads=threads)


def put_tiles(
    tiles: Sequence[Any], shared: Sequence[Any], tensors: Sequence[Any], i_t: Any, i_h: Any, v0: Any, threads: int
) -> None:
    """Fragments ``[BV, width]`` to their rows of a chunk, by way of shared memory; does not wait for the stores.

    No macro: in one, a loop over tensors gives all of them the loop variable's name (TileLang 0.1.15).

    Args:
        tiles: fragments.
        shared: a tile in shared memory for each.
        tensors: where they go, ``[NT, HV, V, width]``.
        i_t: the chunk.
        i_h: the head.
        v0: the first row.
        threads: that hold the fragments, from the block's first on.
    """
    _begin(threads)
    for tile, to in zip(tiles, shared, strict=True):
        _copy(tile, to)
    _publish(threads)
    for to, x in zip(shared, tensors, strict=True):
        _store(to, x, i_t, i_h, v0, threads)


@T.macro
def load_chunk(x, factors, tiles, barriers, c, i_t, row, end, i_h, v0, backwards):
    """What a direction needs of a chunk, what is multiplied first before the rest."""
    A, Aqk, k_neg, qg, kg, decay = factors
    x_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared = tiles
    ready, free = barriers
    stages = A_shared.shape[0]
    slot = c % stages
    T.barrier_wait(free[slot], (c // stages + 1) % 2)
    load_values(x, x_shared, ready, slot, row, end, i_h, v0)
    if backwards:
        load_lower(Aqk, i_t, i_h, Aqk_shared, slot, ready)
        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
        load_lower(A, i_t, i_h, A_shared, slot, ready)
        T.tma_copy(qg[i_t, i_h, :, :], q_shared[slot, :, :], barrier=ready[slot])
        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=ready[slot])
    else:
        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=ready[slot])
        load_lower(A, i_t, i_h, A_shared, slot, ready)
        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
    T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
    T.barrier_arrive(ready[slot])


def build_backwards(case: Case, config: RecurrenceConfig, load_state: Any, put_state: Any, keep: bool) -> Any:
    """A macro: what multiplies of the walk from a segment's last chunk to its first.

    Args:
        case: what it is built for.
        config: of the stage.
        load_state: macro of the fragment to fill, the tensor of states, whether that is there, and where: segment,
            its sequence, head and first channel.
        put_state: macro of the fragment at the end, the tensor it goes to, and where.
        keep: whether gradients of each chunk are stored, which takes tiles in shared memory for them.
    """
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    KP, consumers = p.KP, config.consumers
    io, f32 = TL_DTYPE[p.dtype], "float32"
    policy = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply_backwards(first, chunks, start, end, at, ends, tensors, tiles, kept, barriers):
        """Gradients of states and values from the last chunk to the first."""
        _, _, i_h, v0 = at
        do_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared = tiles
        ready, free = barriers
        state = T.alloc_fragment((BV, KP), f32)
        state_io = T.alloc_fragment((BV, KP), io)
        value = T.alloc_fragment((BV, BT), f32)
        value_io = T.alloc_fragment((BV, BT), io)
        load_state(state, ends, p.final_state, at)
        T.copy(state, state_io)
        for c in T.serial(chunks):
            slot = c % stages
            i_c = chunks - 1 - c
            T.barrier_wait(ready[slot], c // stages % 2)
            T.wgmma_gemm(
                do_shared[slot, :, :],
                Aqk_shared[slot, :, :],
                value,
                transpose_A=True,
                clear_accum=True,
                policy=policy,
            )
            T.wgmma_gemm(state_io, k_shared[slot, :, :], value, transpose_B=True, policy=policy)
            finish_values(value, value_io)
            T.wgmma_gemm(value_io, A_shared[slot, :, :], value, clear_accum=True, policy=policy)
            if keep:
                put_tiles((state_io,), kept[:1], tensors[:1], first + i_c, i_h, v0, consumers)
            for i, j in T.Parallel(BV, KP):
                state[i, j] = state[i, j] * decay_shared[slot, j]
            T.wgmma_gemm(do_shared[slot, :, :], q_shared[slot, :, :], state, transpose_A=True, policy=policy)
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(value, num_regs=BT // 2)
            T.copy(value, value_io)
            T.wgmma_gemm(value_io, n_shared[slot, :, :], state, policy=policy)
            if keep:
                put_output(value_io, kept[1], tensors[1], start + i_c * BT, start, end, i_h, v0)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(state, num_regs=KP // 2)
            T.barrier_arrive(free[slot])
            T.copy(state, state_io)
        if keep:
            T.tma_store_wait(0)
        put_state(state, tensors[-1], at)

    return multiply_backwards


def build_scan(case: Case, config: ScanConfig, load_state: Any, registers: tuple[int, int], cut: bool) -> Any:
    """A macro: a thread block takes one direction of a (segment, value head, BV channels), backwards in the first half.

    Args:
        case: what it is built for.
        config: of the stage.
        load_state: as in :func:`build_backwards`, of states and of their gradients.
        registers: of a thread that multiplies, and of one that loads.
        cut: whether segments may be parts of a sequence: then only the first has the gradient of its initial state.
    """
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    policy = T.GemmWarpPolicy.FullRow

    def has_gradient(i_n, j):
        return (i_n >= 0) & (j < K) if cut else j < K

    @T.macro
    def put_state(state, dh0, at):
        """The gradient of an initial state."""
        _, i_n, i_h, v0 = at
        if p.initial_state:
            for i, j in T.Parallel(BV, KP):
                if has_gradient(i_n, j):
                    dh0[at_state(p, i_n, i_h, j, v0 + i)] = state[i, j]

    multiply_backwards = build_backwards(case, config, load_state, put_state, keep=True)

    @T.macro
    def multiply_forwards(first, chunks, at, starts, tensors, tiles, kept, barriers):
        """Values and states from the first chunk to the last."""
        _, _, i_h, v0 = at
        v_shared, A_shared, unit_shared, n_shared, _, k_shared, decay_shared = tiles
        ready, free = barriers
        state = T.alloc_fragment((BV, KP), f32)
        state_io = T.alloc_fragment((BV, KP), io)
        value = T.alloc_fragment((BV, BT), f32)
        value_io = T.alloc_fragment((BV, BT), io)
        load_state(state, starts, p.initial_state, at)
        T.copy(state, state_io)
        for c in T.serial(chunks):
            slot = c % stages
            T.barrier_wait(ready[slot], c // stages % 2)
            ask_values(v_shared, n_shared, unit_shared[0, :, :], slot, state_io, value)
            finish_values(value, value_io)
            T.wgmma_gemm(value_io, A_shared[slot, :, :], value, transpose_B=True, clear_accum=True, policy=policy)
            for i, j in T.Parallel(BV, KP):
                state[i, j] = state[i, j] * decay_shared[slot, j]
            finish_values(value, value_io)
            T.wgmma_gemm(value_io, k_shared[slot, :, :], state, policy=policy)
            put_tiles((state_io, value_io), kept, tensors, first + c, i_h, v0, consumers)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(state, num_regs=KP // 2)
            T.barrier_arrive(free[slot])
            T.copy(state, state_io)
        T.tma_store_wait(0)

    @T.macro
    def scan(i_block, NS, inputs, starts, ends, factors, segments, chunk_tokens, outputs):
        v, d_o = inputs
        values, states, dv, dstates, dh0 = outputs
        back = i_block < NS * HV * VB  # first: it loads more
        i_s = i_block // (HV * VB) % NS
        i_h = i_block // VB % HV
        v0 = i_block % VB * BV
        first, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
        i_n = segments[i_s, 2]
        x_shared = T.alloc_shared((stages, BT, BV), io)  # V or dO
        A_shared = T.alloc_shared((stages, BT, BT), io)
        Aqk_shared = T.alloc_shared((stages, BT, BT), io)  # forwards, the first one is a unit matrix
        n_shared = T.alloc_shared((stages, BT, KP), io)
        q_shared = T.alloc_shared((stages, BT, KP), io)
        k_shared = T.alloc_shared((stages, BT, KP), io)
        decay_shared = T.alloc_shared((stages, KP), f32)
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
        put_constants([A_shared, Aqk_shared])

        at = (i_s, i_n, i_h, v0)
        tiles = (x_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared)
        barriers = (ready, free)
        if thread < consumers:
            T.set_max_nreg(registers[0], 1)
            if back:
                stored, kept = (dstates, dv, dh0), (state_shared, dv_shared)
                multiply_backwards(first, chunks, start, end, at, ends, stored, tiles, kept, barriers)
            else:
                stored, kept = (states, values), (state_shared, value_shared)
                multiply_forwards(first, chunks, at, starts, stored, tiles, kept, barriers)
        else:
            T.set_max_nreg(registers[1], 0)
            if thread < consumers + PRODUCER:
                if back:
                    for c in T.serial(chunks):
                        i_c = chunks - 1 - c
                        row = start + i_c * BT
                        load_chunk(d_o, factors, tiles, barriers, c, first + i_c, row, end, i_h, v0, True)
                else:
                    for c in T.serial(chunks):
                        row = start + c * BT
                        load_chunk(v, factors, tiles, barriers, c, first + c, row, end, i_h, v0, False)

    return scan


def scan_cost(case: Case, sizes: Mapping[str, int], elements: int) -> Cost:
    """v, do and what prep made in; values, states and gradients out; some elements of fp32; ten products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks, rows = sizes["NT"] * p.HV, sizes["tokens"] * p.HV
    moved = 3 * rows * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    kept = chunks * p.V * (BT + 2 * p.KP) * io
    return Cost(bytes=moved + kept + elements * 4, flops=chunks * BT * p.V * (10 * p.K + 6 * BT))
