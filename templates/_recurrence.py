"""Recurrence on Hopper: what the stages share that walk chunks with the transposed state in registers.

A warp keeps chunks coming through the tensor memory accelerator, one or two warpgroups multiply. Values are

    V'^T = (V^T + S^T k_neg^T) A^T

in the registers of those that multiply, which spares prep a product: 490 -> 461 us there (T8192 H96, H200).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tilelang.language as T
import torch
from tilelang.layout import make_half_bank_swizzled_layout

from kda_tl.stage import Case, Config, Cost, axis
from kda_tl.templates._chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates._tile import TL_DTYPE, at_state

WARPGROUP = 128
ROWS = 64  # of the transposed state that a warpgroup multiplies
WIDEST = 128  # channels of a state whose rounded copy has registers beside it
PART = 64  # channels of a wider state that are rounded at once
PRODUCER = 32  # threads of the warp that loads
REGISTERS = 232  # a multiplying thread's: two groups with it and a loader's have what a multiprocessor has
WIDE_REGISTERS = 248  # of one group: with 232, ptxas (CUDA 13.0) waits after each product of a state of 256 channels
LOADER_REGISTERS = 40
OUTPUT_PAD = 8  # elements a row of the transposed output: banks of four rows differ


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(Config):
    """BV: rows of the transposed state a block owns, 64 a multiplying warpgroup; num_stages: chunks loaded ahead."""

    WIDTHS: ClassVar[tuple[int, ...]] = (64, 128)  # channels of a key that the stage is written for
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
        if p.KP not in self.WIDTHS:
            return f"K={p.K} is not {' or '.join(map(str, self.WIDTHS))} channels, which its tiles are"
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


def part_width(KP: int) -> int:
    """Channels of a state that are rounded at once."""
    return KP if KP <= WIDEST else PART


@dataclass(frozen=True, kw_only=True)
class OutputConfig(RecurrenceConfig):
    """Of a stage with output. early: whether values are multiplied before all of their chunk has come."""

    WIDTHS: ClassVar[tuple[int, ...]] = (64, 128, 256)
    early: bool = axis(True, True, False)

    def late_stages(self, case: Case) -> int:
        """Chunks of which all is loaded ahead; of wide ones only what comes first is, for lack of shared memory."""
        return 1 if self.early and case.problem.KP > WIDEST else self.num_stages

    def smem_bytes(self, case: Case) -> int:
        """The same without what is not loaded ahead, and a tile for the states between chunks if they are asked for."""
        BT, KP = case.BT, case.problem.KP
        late = BT * (2 * BT + KP) * 2 + KP * 4
        states = part_width(KP) * (self.BV + OUTPUT_PAD * self.BV // ROWS) * 2 * case.problem.intermediate_states
        return super().smem_bytes(case) - (self.num_stages - self.late_stages(case)) * late + states


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
def load_parts(x, i_t, i_h, tiles, slot, ready):
    """A chunk's rows to shared memory, some channels a tile."""
    for m, tile in enumerate(tiles):
        k0 = m * tile.shape[2]
        T.tma_copy(x[i_t, i_h, :, k0 : k0 + tile.shape[2]], tile[slot, :, :], barrier=ready[slot])


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
def ask_transposed(v_shared, unit, slot, value):
    """V^T of the chunk in a slot, under way: what shared memory holds, read transposed, times one."""
    rows = T.GemmWarpPolicy.FullRow
    T.wgmma_gemm(v_shared[slot, :, :], unit, value, transpose_A=True, transpose_B=True, clear_accum=True, policy=rows)


@T.macro
def ask_values(v_shared, n_shared, unit, slot, state_io, value):
    """V^T + S^T k_neg^T of the chunk in a slot, under way."""
    ask_transposed(v_shared, unit, slot, value)
    T.wgmma_gemm(state_io, n_shared[slot, :, :], value, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)


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
def put_state(parts, h_shared, h, i_t, i_h, v0):
    """The state before a chunk, as it was multiplied, by way of shared memory, which transposes it."""
    for m, part in enumerate(parts):
        BV, width = part.shape
        for i, j in T.Parallel(BV, width):
            h_shared[j, i] = T.cast(part[i, j], h.dtype)
        for j, i in T.Parallel(width, BV):
            h[i_t, i_h, m * width + j, v0 + i] = h_shared[j, i]


def build_recurrence(case: Case, config: OutputConfig, load_state: Any) -> Any:
    """A macro: a thread block takes every ``blocks``-th triple of segment, value head and BV channels.

    What a block loads runs ahead of what it multiplies, from one triple into the next. A state of more than 128
    channels leaves no registers for its rounded copy: its parts are rounded one after the other, each for two products.

    Args:
        case: what it is built for.
        config: of the stage.
        load_state: macro of the fragment to fill, the tensor of states, the segment, its row of ``segments``, the head
            and the first channels of value and key.
    """
    p, BT, stages, groups = case.problem, case.BT, config.num_stages, config.BV // ROWS
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    late_stages, width = config.late_stages(case), part_width(KP)
    parts = KP // width
    held = parts == 1  # is a rounded copy of the whole state
    io, f32 = TL_DTYPE[p.dtype], "float32"
    rows = T.GemmWarpPolicy.FullRow

    @T.macro
    def multiply_parts(state, part_io, n_shared, q_shared, slot, value, output):
        """Adds S^T k_neg^T to the values and makes S^T qg^T, part by part: what is rounded once is multiplied twice."""
        for m, part in enumerate(state):
            T.wait_wgmma(0)  # the registers of the part before are free
            T.copy(part, part_io)
            T.wgmma_gemm(part_io, n_shared[m][slot, :, :], value, transpose_B=True, policy=rows)
            T.wgmma_gemm(part_io, q_shared[m][slot, :, :], output, transpose_B=True, clear_accum=m == 0, policy=rows)

    @T.macro
    def multiply(group, i_block, blocks, tensors, tiles, barriers):
        """A warpgroup's part: ROWS channels."""
        states, segments, chunk_tokens, o, ht, h = tensors
        v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared, unit, o_shared, h_shared = tiles
        early, ready, free, late_free = barriers
        state = [T.alloc_fragment((ROWS, width), f32) for _ in range(parts)]
        state_io = T.alloc_fragment((ROWS, width), io)
        value = T.alloc_fragment((ROWS, BT), f32)
        value_io = T.alloc_fragment((ROWS, BT), io)
        output = T.alloc_fragment((ROWS, BT), f32)
        step = T.alloc_var("int32")
        T.set_max_nreg(REGISTERS if held else WIDE_REGISTERS, 1)
        step = 0
        for n in T.serial(T.ceildiv(segments.shape[0] * HV * VB - i_block, blocks)):
            i = i_block + n * blocks
            i_s = i // (HV * VB)
            i_h = i // VB % HV
            v0 = i % VB * config.BV + group * ROWS
            _, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
            for m, part in enumerate(state):
                load_state(part, states, i_s, segments, i_h, v0, m * width)
            if held:
                T.copy(state[0], state_io)
            T.clear(output)
            for c in T.serial(chunks):
                slot = step % stages
                turn = step // stages % 2
                late = step % late_stages
                late_turn = step // late_stages % 2
                T.barrier_wait(early[slot], turn)
                ask_transposed(v_shared[group], unit, slot, value)
                if held:
                    T.wgmma_gemm(state_io, n_shared[0][slot, :, :], value, transpose_B=True, policy=rows)
                if p.intermediate_states:
                    put_state([state_io] if held else state, h_shared[group], h, segments[i_s, 0] + c, i_h, v0)
                put_output(output, o_shared[group], o, start + (c - 1) * BT, start, end, i_h, v0)
                if not held:
                    multiply_parts(state, state_io, n_shared, q_shared, slot, value, output)
                finish_values(value, value_io)
                if late_stages < stages:
                    T.barrier_arrive(free[slot])
                if config.early:
                    T.barrier_wait(ready[late], late_turn)
                T.wgmma_gemm(value_io, A_shared[late, :, :], value, transpose_B=True, clear_accum=True, policy=rows)
                if held:
                    T.wgmma_gemm(
                        state_io, q_shared[0][late, :, :], output, transpose_B=True, clear_accum=True, policy=rows
                    )
                for m, part in enumerate(state):
                    for i, j in T.Parallel(ROWS, width):
                        part[i, j] = part[i, j] * decay_shared[late, m * width + j]
                T.wait_wgmma(1 if held else 0)
                T.warpgroup_fence_operand(value, num_regs=BT // 2)
                T.copy(value, value_io)
                for m, part in enumerate(state):
                    T.wgmma_gemm(value_io, k_shared[m][late, :, :], part, policy=rows)
                T.wgmma_gemm(value_io, Aqk_shared[late, :, :], output, transpose_B=True, policy=rows)
                # Products may not stay under way across the loop's end: ptxas (CUDA 13.0) then waits after every
                # single one, 200 -> 268 us (B1 T8192 H64, H200).
                T.wait_wgmma(1)
                for part in state:
                    T.warpgroup_fence_operand(part, num_regs=width // 2)
                if held:
                    T.copy(state[0], state_io)
                T.wait_wgmma(0)
                T.warpgroup_fence_operand(output, num_regs=BT // 2)
                T.barrier_arrive(late_free[late])
                step = step + 1
            put_output(output, o_shared[group], o, start + (chunks - 1) * BT, start, end, i_h, v0)
            if p.final_state:
                ends = segments[i_s, 3]
                for m, part in enumerate(state):
                    for i, j in T.Parallel(ROWS, width):
                        if (ends >= 0) & (m * width + j < K):
                            ht[at_state(p, ends, i_h, m * width + j, v0 + i)] = part[i, j]

    @T.macro
    def load(i_block, blocks, tensors, factors, tiles, barriers):
        """The part of the warp that loads."""
        v, segments, chunk_tokens = tensors
        A, Aqk, k_neg, qg, kg, decay = factors
        v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared = tiles
        early, ready, free, late_free = barriers
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
                    late = step % late_stages
                    late_turn = (step // late_stages + 1) % 2
                    i_t = first + c
                    T.barrier_wait(free[slot], turn)
                    load_parts(k_neg, i_t, i_h, n_shared, slot, early)
                    if not held:
                        load_parts(qg, i_t, i_h, q_shared, slot, early)
                    for group, tile in enumerate(v_shared):
                        v0 = i % VB * config.BV + group * ROWS
                        load_values(v, tile, early, slot, start + c * BT, end, i_h, v0)
                    if config.early:
                        T.barrier_arrive(early[slot])
                    if late_stages < stages:
                        T.barrier_wait(late_free[late], late_turn)
                    load_lower(A, i_t, i_h, A_shared, late, ready)
                    if held:
                        load_parts(qg, i_t, i_h, q_shared, late, ready)
                    load_parts(kg, i_t, i_h, k_shared, late, ready)
                    load_lower(Aqk, i_t, i_h, Aqk_shared, late, ready)
                    T.tma_copy(decay[i_t, i_h, :], decay_shared[late, :], barrier=ready[late])
                    T.barrier_arrive(ready[late])
                    step = step + 1

    @T.macro
    def recur(i_block, blocks, v, A, Aqk, k_neg, qg, kg, decay, states, segments, chunk_tokens, o, ht, h):
        v_shared = [T.alloc_shared((stages, BT, ROWS), io) for _ in range(groups)]
        o_shared = [T.alloc_shared((BT, ROWS + OUTPUT_PAD), io) for _ in range(groups)]
        h_shared = [T.alloc_shared((width, ROWS + OUTPUT_PAD), io) for _ in range(groups * p.intermediate_states)]
        A_shared = T.alloc_shared((late_stages, BT, BT), io)
        n_shared = [T.alloc_shared((stages, BT, width), io) for _ in range(parts)]
        q_shared = [T.alloc_shared((late_stages if held else stages, BT, width), io) for _ in range(parts)]
        Aqk_shared = T.alloc_shared((late_stages, BT, BT), io)
        k_shared = [T.alloc_shared((late_stages, BT, width), io) for _ in range(parts)]
        decay_shared = T.alloc_shared((late_stages, KP), f32)
        unit = T.alloc_shared((BT, BT), io)
        ready = T.alloc_barrier(arrive_count=[PRODUCER] * late_stages)
        early = T.alloc_barrier(arrive_count=[PRODUCER] * stages) if config.early else ready  # what is multiplied first
        free = T.alloc_barrier(arrive_count=[config.consumers] * stages)
        late_free = T.alloc_barrier(arrive_count=[config.consumers] * late_stages) if late_stages < stages else free
        thread = T.get_thread_binding()
        T.annotate_layout(layout_lower(A_shared, Aqk_shared))
        put_constants([A_shared, Aqk_shared], [unit])

        tensors = (states, segments, chunk_tokens, o, ht, h)
        factors = (A, Aqk, k_neg, qg, kg, decay)
        loaded = (v_shared, n_shared, A_shared, q_shared, k_shared, Aqk_shared, decay_shared)
        tiles = (*loaded, unit, o_shared, h_shared)
        barriers = (early, ready, free, late_free)
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
