"""Recurrence on Hopper: what the stages share that walk chunks with the transposed state in registers.

A warp keeps chunks coming through the tensor memory accelerator, one or two warpgroups multiply. Values are

    V'^T = (V^T + S^T k_neg^T) A^T

in the registers of those that multiply, which spares prep a product: 490 -> 461 us there (T8192 H96, H200).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch
from tilelang.layout import make_half_bank_swizzled_layout

from kda_tl.stage import Case, Config, Cost, axis
from kda_tl.templates._chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates._tile import TL_DTYPE

WARPGROUP = 128
ROWS = 64  # of the transposed state that a warpgroup multiplies
PRODUCER = 32  # threads of the warp that loads
REGISTERS = 232  # a multiplying thread's: two groups with it and a loader's have what a multiprocessor has
LOADER_REGISTERS = 40
OUTPUT_PAD = 8  # elements a row of the transposed output: banks of four rows differ


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(Config):
    """BV: rows of the transposed state a block owns, 64 a multiplying warpgroup; num_stages: chunks loaded ahead."""

    BV: int = axis(64, 64, 128)
    num_stages: int = axis(2, 2, 3)

    def reject(self, case: Case) -> str | None:
        """Hopper, 16-bit operands, dimensions in whole tiles of the matrix unit, and shared memory."""
        p = case.problem
        if case.device.sm != 90:
            return f"its products are instructions of sm_90, the device is {case.device.arch}"
        if case.BT != 64:
            return f"it is written for BT=64, not BT={case.BT}"
        if p.dtype == "fp32":
            return "fp32 operands are refused: the matrix unit would round them to tf32"
        if p.KP not in (64, 128):
            return f"K={p.K} is not 64 or 128 channels, which its tiles are"
        if p.V % self.BV:
            return f"BV={self.BV} does not divide V={p.V}"
        smem = self.smem_bytes(case)
        if smem > case.device.smem_bytes:
            return f"BV={self.BV}, num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        return None

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.BV // ROWS

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, the output's, a unit matrix, and three barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 24
        return self.num_stages * stage + BT * (self.BV + OUTPUT_PAD * self.BV // ROWS + BT) * 2


@dataclass(frozen=True, kw_only=True)
class OutputConfig(RecurrenceConfig):
    """Of a stage with output. early: whether values are multiplied before all of their chunk has come."""

    early: bool = axis(True, True, False)

    def smem_bytes(self, case: Case) -> int:
        """The same, and a tile for the states between chunks where they are asked for."""
        states = case.problem.KP * (self.BV + OUTPUT_PAD * self.BV // ROWS) * 2
        return super().smem_bytes(case) + states * case.problem.intermediate_states


def walk_reference(
    values: torch.Tensor, state: torch.Tensor, first: int, count: int, factors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The transposed state [HV, rows, KP] after ``count`` chunks; and their outputs, if the factors are those of one.

    Args:
        values: [NT, HV, BT, rows], in the dtype of the state.
        state: before the first chunk.
        first: the first chunk.
        count: of chunks.
        factors: what prep made, by name.
    """
    outputs = []
    for t in range(first, first + count):
        x = {name: factor[t].to(state.dtype) for name, factor in factors.items()}
        x |= {name: unpack_lower(x[name]) for name in ("A", "Aqk") if name in x}
        v_new = x["A"] @ (values[t] + x["k_neg"] @ state.mT)
        if "qg" in x:
            outputs.append(x["qg"] @ state.mT + x["Aqk"] @ v_new)
        state = state * x["decay"][:, None] + v_new.mT @ x["kg"]
    return state, outputs


def recurrence_reference(
    case: Case,
    starts: Sequence[torch.Tensor],
    v: torch.Tensor,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
    factors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What segments make that start from given states [HV, V, KP]: output, final states and those before each chunk."""
    p, rows = case.problem, segments.tolist()
    dtype = factors["decay"].dtype
    values = split_chunks(v.to(dtype), chunk_tokens, case.BT)
    outputs, ht = values.clone(), {}
    h = values.new_zeros((values.shape[0], p.HV, p.KP, p.VP))
    for state, (first, count, _, ends) in zip(starts, rows, strict=True):
        for t in range(first, first + count):
            h[t, ..., : p.V] = state.mT
            state, (outputs[t],) = walk_reference(values, state, t, 1, factors)
        if ends >= 0:
            ht[ends] = state[..., : p.K] if p.state_v_first else state[..., : p.K].mT
    found = {"o": join_chunks(outputs, chunk_tokens, v.shape[0], p.V)}
    found |= {"h": h} if p.intermediate_states else {}
    return found | ({"ht": torch.stack([ht[n] for n in sorted(ht)])} if p.final_state else {})


def read_state(case: Case, h0: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """The transposed state [HV, V, KP] that a sequence starts from, of the dtype and on the device of ``like``."""
    p = case.problem
    if h0 is None:
        return like.new_zeros((p.HV, p.V, p.KP))
    given = h0[n] if p.state_v_first else h0[n].mT
    return torch.nn.functional.pad(given.to(like.dtype), (0, p.KP - p.K))


@T.macro
def find_chunks(segments, chunk_tokens, i_s):
    """A segment's first chunk, their number, its first token and the one past its end."""
    first = segments[i_s, 0]
    chunks = segments[i_s, 1]
    last = T.max(first + chunks - 1, 0)
    start = chunk_tokens[T.min(first, last), 0]
    end = chunk_tokens[last, 0] + chunk_tokens[last, 1]
    return first, chunks, start, end


@T.macro
def load_values(v, v_shared, ready, slot, first, end, i_h, v0):
    """Values of a chunk to shared memory by one warp, zeros past the sequence's end."""
    _, BT, BV = v_shared.shape
    if first + BT <= end:
        T.tma_copy(v[first : first + BT, i_h, v0 : v0 + BV], v_shared[slot, :, :], barrier=ready[slot])
    else:  # rows of the next sequence would enter as 0 * v, and may be infinite
        for i, j in T.Parallel(BT, BV):
            v_shared[slot, i, j] = T.if_then_else(first + i < end, v[first + i, i_h, v0 + j], 0)
        T.fence_proxy_async()


def layout_lower(*tiles: Any) -> dict[Any, Any]:
    """Layouts of tiles ``[stages, BT, BT]`` whose halves are loaded apart: each is 32 columns of 64 bytes a row."""
    return {tile: make_half_bank_swizzled_layout(tile) for tile in tiles}


@T.macro
def load_lower(x, i_t, i_h, tile, slot, ready):
    """A lower triangular matrix to shared memory. What lies above its left half's diagonal block is never written."""
    half = tile.shape[1] // 2
    T.tma_copy(x[i_t, i_h, : 2 * half, :], tile[slot, :, :half], barrier=ready[slot])
    T.tma_copy(x[i_t, i_h, 2 * half :, :], tile[slot, half:, half:], barrier=ready[slot])


@T.macro
def put_constants(triangles, units=()):
    """Zeros where triangles are never loaded, and unit matrices, in shared memory, by all threads."""
    for tile in triangles:
        stages, BT, _ = tile.shape
        for s, i, j in T.Parallel(stages, BT // 2, BT // 2):
            tile[s, i, BT // 2 + j] = 0
    for unit in units:
        for i, j in T.Parallel(*unit.shape):
            unit[i, j] = T.if_then_else(i == j, 1.0, 0.0)
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def ask_values(v_shared, n_shared, unit, slot, state_io, value):
    """V^T + S^T k_neg^T of the chunk in a slot, under way: V^T, which shared memory holds transposed, times one."""
    rows = T.GemmWarpPolicy.FullRow
    T.wgmma_gemm(v_shared[slot, :, :], unit, value, transpose_A=True, transpose_B=True, clear_accum=True, policy=rows)
    T.wgmma_gemm(state_io, n_shared[slot, :, :], value, transpose_B=True, policy=rows)


@T.macro
def finish_values(value, value_io):
    """Waits for all products, and rounds the values."""
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(value, num_regs=value.shape[1] // 2)
    T.copy(value, value_io)


@T.macro
def put_output(output, o_shared, o, first, start, end, i_h, v0):
    """Rows of the chunk that begins at token ``first``, if they lie between ``start`` and ``end``.

    It is called a chunk later, while values are multiplied: H96 322 -> 289 us with the padding of ``o_shared`` (H200).
    """
    BV, BT = output.shape
    for i, j in T.Parallel(BV, BT):
        o_shared[j, i] = T.cast(output[i, j], o.dtype)
    for i, j in T.Parallel(BT, BV):
        if (first + i >= start) & (first + i < end):
            o[first + i, i_h, v0 + j] = o_shared[i, j]


@T.macro
def put_state(state, h_shared, h, i_t, i_h, v0):
    """The state before a chunk, as it was multiplied, by way of shared memory, which transposes it."""
    BV, KP = state.shape
    for i, j in T.Parallel(BV, KP):
        h_shared[j, i] = state[i, j]
    for j, i in T.Parallel(KP, BV):
        h[i_t, i_h, j, v0 + i] = h_shared[j, i]


def build_recurrence(case: Case, config: OutputConfig, load_state: Any) -> Any:
    """A macro: a thread block takes every ``blocks``-th triple of segment, value head and BV channels.

    What a block loads runs ahead of what it multiplies, from one triple into the next.

    Args:
        case: what it is built for.
        config: of the stage.
        load_state: macro of the fragment to fill, the tensor of states, the segment, its row of ``segments`` and the
            head and first channel.
    """
    p, BT, stages, groups = case.problem, case.BT, config.num_stages, config.BV // ROWS
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply(group, i_block, blocks, tensors, tiles, barriers):
        """A warpgroup's part: ROWS channels."""
        states, segments, chunk_tokens, o, ht, h = tensors
        v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared, unit, o_shared, h_shared = tiles
        early, ready, free = barriers
        state = T.alloc_fragment((ROWS, KP), f32)
        state_io = T.alloc_fragment((ROWS, KP), io)
        value = T.alloc_fragment((ROWS, BT), f32)
        value_io = T.alloc_fragment((ROWS, BT), io)
        output = T.alloc_fragment((ROWS, BT), f32)
        step = T.alloc_var("int32")
        T.set_max_nreg(REGISTERS, 1)
        step = 0
        for n in T.serial(T.ceildiv(segments.shape[0] * HV * VB - i_block, blocks)):
            i = i_block + n * blocks
            i_s = i // (HV * VB)
            i_h = i // VB % HV
            v0 = i % VB * config.BV + group * ROWS
            _, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
            load_state(state, states, i_s, segments, i_h, v0)
            T.copy(state, state_io)
            T.clear(output)
            for c in T.serial(chunks):
                slot = step % stages
                turn = step // stages % 2
                T.barrier_wait(early[slot], turn)
                ask_values(v_shared[group], n_shared, unit, slot, state_io, value)
                if p.intermediate_states:
                    put_state(state_io, h_shared[group], h, segments[i_s, 0] + c, i_h, v0)
                put_output(output, o_shared[group], o, start + (c - 1) * BT, start, end, i_h, v0)
                finish_values(value, value_io)
                if config.early:
                    T.barrier_wait(ready[slot], turn)
                T.wgmma_gemm(value_io, A_shared[slot, :, :], value, transpose_B=True, clear_accum=True, policy=rows)
                T.wgmma_gemm(state_io, q_shared[slot, :, :], output, transpose_B=True, clear_accum=True, policy=rows)
                for i, j in T.Parallel(ROWS, KP):
                    state[i, j] = state[i, j] * decay_shared[slot, j]
                T.wait_wgmma(1)
                T.warpgroup_fence_operand(value, num_regs=BT // 2)
                T.copy(value, value_io)
                T.wgmma_gemm(value_io, k_shared[slot, :, :], state, policy=rows)
                T.wgmma_gemm(value_io, Aqk_shared[slot, :, :], output, transpose_B=True, policy=rows)
                # Products may not stay under way across the loop's end: ptxas (CUDA 13.0) then waits after every
                # single one, 200 -> 268 us (B1 T8192 H64, H200).
                T.wait_wgmma(1)
                T.warpgroup_fence_operand(state, num_regs=KP // 2)
                T.copy(state, state_io)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(output, num_regs=BT // 2)
                T.barrier_arrive(free[slot])
                step = step + 1
            put_output(output, o_shared[group], o, start + (chunks - 1) * BT, start, end, i_h, v0)
            if p.final_state:
                ends = segments[i_s, 3]
                for i, j in T.Parallel(ROWS, KP):
                    if (ends >= 0) & (j < K):
                        if p.state_v_first:
                            ht[ends, i_h, v0 + i, j] = state[i, j]
                        else:
                            ht[ends, i_h, j, v0 + i] = state[i, j]

    @T.macro
    def load(i_block, blocks, tensors, factors, tiles, barriers):
        """The part of the warp that loads."""
        v, segments, chunk_tokens = tensors
        A, Aqk, k_neg, qg, kg, decay = factors
        v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared = tiles
        early, ready, free = barriers
        step = T.alloc_var("int32")
        T.set_max_nreg(LOADER_REGISTERS, 0)
        if T.get_thread_binding() < config.consumers + PRODUCER:
            step = 0
            for n in T.serial(T.ceildiv(segments.shape[0] * HV * VB - i_block, blocks)):
                i = i_block + n * blocks
                i_s = i // (HV * VB)
                i_h = i // VB % HV
                first, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
                for c in T.serial(chunks):
                    slot = step % stages
                    turn = (step // stages + 1) % 2
                    i_t = first + c
                    T.barrier_wait(free[slot], turn)
                    T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=early[slot])
                    for group, tile in enumerate(v_shared):
                        v0 = i % VB * config.BV + group * ROWS
                        load_values(v, tile, early, slot, start + c * BT, end, i_h, v0)
                    if config.early:
                        T.barrier_arrive(early[slot])
                    load_lower(A, i_t, i_h, A_shared, slot, ready)
                    T.tma_copy(qg[i_t, i_h, :, :], q_shared[slot, :, :], barrier=ready[slot])
                    T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
                    load_lower(Aqk, i_t, i_h, Aqk_shared, slot, ready)
                    T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
                    T.barrier_arrive(ready[slot])
                    step = step + 1

    @T.macro
    def recur(i_block, blocks, v, A, Aqk, k_neg, qg, kg, decay, states, segments, chunk_tokens, o, ht, h):
        v_shared = [T.alloc_shared((stages, BT, ROWS), io) for _ in range(groups)]
        o_shared = [T.alloc_shared((BT, ROWS + OUTPUT_PAD), io) for _ in range(groups)]
        h_shared = [T.alloc_shared((KP, ROWS + OUTPUT_PAD), io) for _ in range(groups * p.intermediate_states)]
        A_shared = T.alloc_shared((stages, BT, BT), io)
        n_shared = T.alloc_shared((stages, BT, KP), io)
        q_shared = T.alloc_shared((stages, BT, KP), io)
        Aqk_shared = T.alloc_shared((stages, BT, BT), io)
        k_shared = T.alloc_shared((stages, BT, KP), io)
        decay_shared = T.alloc_shared((stages, KP), f32)
        unit = T.alloc_shared((BT, BT), io)
        ready = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
        early = T.alloc_barrier(arrive_count=[PRODUCER] * stages) if config.early else ready  # what is multiplied first
        free = T.alloc_barrier(arrive_count=[config.consumers] * stages)
        thread = T.get_thread_binding()
        T.annotate_layout(layout_lower(A_shared, Aqk_shared))
        put_constants([A_shared, Aqk_shared], [unit])

        tensors = (states, segments, chunk_tokens, o, ht, h)
        factors = (A, Aqk, k_neg, qg, kg, decay)
        loaded = (v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared)
        tiles = (*loaded, unit, o_shared, h_shared)
        barriers = (early, ready, free)
        if thread < WARPGROUP:
            multiply(0, i_block, blocks, tensors, tiles, barriers)
        elif groups == 2 and thread < config.consumers:
            multiply(1, i_block, blocks, tensors, tiles, barriers)
        else:
            load(i_block, blocks, (v, segments, chunk_tokens), factors, loaded, barriers)

    return recur


def recurrence_cost(case: Case, sizes: Mapping[str, int], states: int) -> Cost:
    """v and what prep made in, o and h out, and some elements of states in fp32; six products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = 2 * sizes["tokens"] * p.HV * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    moved += chunks * p.KP * p.VP * io * p.intermediate_states
    return Cost(bytes=moved + states * 4, flops=chunks * BT * p.V * (6 * p.K + 4 * BT))
