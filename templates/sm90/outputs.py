"""The recurrence with output on Hopper: the kernel of fwd_recurrence, and of fwd_resume, whose states are known before.

Thread blocks take (segment, value head, BV channels) in turn, a block a multiprocessor; what a block loads runs ahead
of what it multiplies, from one triple into the next.

    warps                        registers    produce                          consume
    4, or twice 4: multiply      232 or 248   o, h, ht; ROWS channels a group  both rings
    4: fwd_gdn_attend's          64           pairs of queries                 the ring of the rest
    1: loads                     40           both rings                       tensors in memory
    3: idle                      40           o, where each group has a sender, see sender

    ring    slots         tiles
    first   num_stages    v and k_neg (and qg of a state of 256 channels): what is multiplied first
    rest    rest_stages   A, qg, kg, Aqk, decay

With early=False one barrier a slot tells that all of a chunk has come. A state of 256 channels leaves shared memory for
one slot of the rest alone; of others the rings share the barriers that tell when a slot is empty.

    tensor        tile                     dtype   where it lives
    S^T           [ROWS, KP], in parts     fp32    registers
    S^T rounded   [ROWS, KP] or one part   io      registers, the left operand
    V'^T          [ROWS, BT]               fp32    registers, and rounded beside it
    O^T           [ROWS, BT]               fp32    registers, a chunk longer than all others
    identity      [BT, BT]                 io      shared memory: V^T is what is read transposed, times one

A state of more than 128 channels leaves no registers for its rounded copy: its parts are rounded one after the other,
each for two products.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from kda_tl.core.stage import Case, tunable
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90.hopper import FACTORS, TABLES
from kda_tl.templates.sm90.recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    ROWS,
    STORES,
    WARPGROUP,
    Output,
    RecurrenceConfig,
    Start,
    find_chunks,
    finish_values,
    issue_transposed,
    layout_lower,
    layout_values,
    load_lower,
    load_parts,
    load_values,
    name_tiles,
    round_output,
    store_constants,
    store_final,
    store_last,
    store_output,
    store_state,
)
from kda_tl.templates.sm90.ring import Ring

OUTPUTS = {
    "o": "tokens HV V : io",
    "ht": "N HV K V : f32 ? final_state",
    "h": "NT HV KP VP : io ? intermediate_states",
}
WIDEST = 128  # channels of a state whose rounded copy has registers beside it
PART = 64  # channels of a wider state that are rounded at once
REGISTERS = 232  # a multiplying thread's: two groups with it and a loader's have what a multiprocessor has
WIDE_REGISTERS = 248  # of one group: with 232, ptxas (CUDA 13.0) waits after each product of a state of 256 channels
LOADER_REGISTERS = 40
OUTPUT_BARRIER = 12  # and 13: of a warpgroup each, as the next and those of sender; TileLang counts its own from 3
STATES_BARRIER = 14


def part_width(KP: int) -> int:
    """Channels of a state that are rounded at once."""
    return KP if KP <= WIDEST else PART


def states_bytes(case: Case, BV: int) -> int:
    """Of the tile that transposes states between chunks, if they are asked for."""
    return part_width(case.problem.KP) * (BV + OUTPUT_PAD * BV // ROWS) * 2 * case.problem.intermediate_states


@dataclass(frozen=True, kw_only=True)
class OutputConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; early:
    whether values are multiplied before all of their chunk has come.
    """

    WIDTHS: ClassVar[tuple[int, ...]] = (64, 128, 256)
    early: bool = tunable(True, True, False)

    def rest_stages(self, case: Case) -> int:
        """Chunks of which all is loaded ahead; of wide ones only what comes first is, for lack of shared memory."""
        return 1 if self.early and case.problem.KP > WIDEST else self.num_stages

    def smem_bytes(self, case: Case) -> int:
        """The same without what is not loaded ahead, and a tile for the states between chunks if they are asked for."""
        BT, KP = case.BT, case.problem.KP
        rest = BT * (2 * BT + KP) * 2 + KP * 4
        states = states_bytes(case, self.BV)
        return super().smem_bytes(case) - (self.num_stages - self.rest_stages(case)) * rest + states


@dataclass(frozen=True)
class Products:
    """How what is loaded of a chunk becomes its values, its output and the state after it, as macros in this order."""

    await_chunk: Any  # before anything of a chunk is loaded
    load_first: Any  # what is multiplied first beside v
    load_rest: Any
    alloc_tiles: Any  # for all that is loaded beside v
    issue_values: Any  # everything that the rounded state is multiplied with at once, on its way
    finish_values: Any  # what the inverse is multiplied with, rounded
    finish_chunk: Any  # the output, the state after the chunk, and its rounded copy
    store_output: Any = store_output  # of the chunk before
    store_last: Any = store_last
    send: Any = None  # the part of a warp for each warpgroup, if outputs are sent by others than who makes them
    make: Any = None  # the part of a warpgroup more, if something that is multiplied is made of what is loaded
    triangles: tuple[str, ...] = ("A", "Aqk")  # that are loaded in halves


class Sizes:
    """What is known of a kernel when it is built."""

    def __init__(self, case: Case, config: Any, products: Products) -> None:
        p = case.problem
        self.case, self.config, self.io, self.products = case, config, TL_DTYPE[p.dtype], products
        self.groups = config.BV // ROWS  # warpgroups that multiply
        self.VB = p.V // config.BV  # blocks of BV channels
        self.width = part_width(p.KP)  # channels of a part of the state
        self.parts = p.KP // self.width
        self.rounds_whole = self.parts == 1  # whether a rounded copy of the whole state has registers
        self.registers = config.registers or (REGISTERS if self.rounds_whole else WIDE_REGISTERS)
        self.loader_registers = config.loader_registers or LOADER_REGISTERS
        self.readers = config.consumers + (WARPGROUP if products.make is not None else 0)  # threads
        self.rest_stages = config.rest_stages(case)  # slots of the ring of the rest
        self.shares_empty = self.rest_stages == config.num_stages  # whether the slots of both rings are empty at once

    def first_channel(self, i: Any, group: int) -> Any:
        """Of a warpgroup and the i-th triple of segment, value head and BV channels."""
        return i % self.VB * self.config.BV + group * ROWS


@T.macro
def issue_values(z, r, tiles, group, slot):
    """V^T, and where the state is rounded whole S^T k_neg^T, on their way."""
    issue_transposed(tiles.v[group], tiles.identity, slot, r.value)
    if z.rounds_whole:
        T.wgmma_gemm(r.state_io, tiles.k_neg[0][slot, :, :], r.value, transpose_B=True, policy=T.BY_ROWS)


@T.macro
def multiply_parts(r, k_neg, qg, slot):
    """Adds S^T k_neg^T to the values and makes S^T qg^T, part by part: what is rounded once is multiplied twice."""
    for m, part in enumerate(r.state):
        T.wait_wgmma(0)  # the registers of the part before are free
        T.copy(part, r.state_io)
        T.wgmma_gemm(r.state_io, k_neg[m][slot, :, :], r.value, transpose_B=True, policy=T.BY_ROWS)
        T.wgmma_gemm(r.state_io, qg[m][slot, :, :], r.output, transpose_B=True, clear_accum=m == 0, policy=T.BY_ROWS)


@T.macro
def compute_values(z, r, tiles, rest_slot):
    """V'^T, rounded, while the state decays and S^T qg^T is on its way."""
    T.wgmma_gemm(r.value_io, tiles.A[rest_slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    if z.rounds_whole:
        T.wgmma_gemm(
            r.state_io, tiles.qg[0][rest_slot, :, :], r.output, transpose_B=True, clear_accum=True, policy=T.BY_ROWS
        )
    for m, part in enumerate(r.state):
        for i, j in T.Parallel(ROWS, z.width):
            part[i, j] = part[i, j] * tiles.decay[rest_slot, m * z.width + j]
    T.wait_wgmma(1 if z.rounds_whole else 0)
    T.warpgroup_fence_operand(r.value, num_regs=z.case.BT // 2)
    T.copy(r.value, r.value_io)


@T.macro
def compute_output(z, r, tiles, rest_slot):
    """The state after the chunk, and its output."""
    for m, part in enumerate(r.state):
        T.wgmma_gemm(r.value_io, tiles.kg[m][rest_slot, :, :], part, policy=T.BY_ROWS)
    T.wgmma_gemm(r.value_io, tiles.Aqk[rest_slot, :, :], r.output, transpose_B=True, policy=T.BY_ROWS)
    # Products may not stay under way across the loop's end: ptxas (CUDA 13.0) then waits after every single one.
    T.wait_wgmma(1)
    for part in r.state:
        T.warpgroup_fence_operand(part, num_regs=z.width // 2)
    if z.rounds_whole:
        T.copy(r.state[0], r.state_io)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.output, num_regs=z.case.BT // 2)


@T.macro
def finish_chunk(z, r, tiles, slot, step):
    """Values, state and output."""
    compute_values(z, r, tiles, slot)
    compute_output(z, r, tiles, slot)


@T.macro
def finish_rounded(z, r, tiles, group, slot):
    """Values of which nothing is left to do but to round them."""
    finish_values(r.value, r.value_io)


@T.macro
def await_nothing(x, i_t, i_h):
    """All chunks are in memory."""


@T.macro
def load_first(z, x, i_t, i_h, tiles, slot, full):
    """Rows that are multiplied first; of wide states all rows that states are multiplied with."""
    load_parts(x.k_neg, i_t, i_h, tiles.k_neg, slot, full)
    if not z.rounds_whole:
        load_parts(x.qg, i_t, i_h, tiles.qg, slot, full)


@T.macro
def load_rest(z, x, i_t, i_h, tiles, slot, full, first, end):
    """All other factors of a chunk."""
    load_lower(x.A, i_t, i_h, tiles.A, slot, full)
    if z.rounds_whole:
        load_parts(x.qg, i_t, i_h, tiles.qg, slot, full)
    load_parts(x.kg, i_t, i_h, tiles.kg, slot, full)
    load_lower(x.Aqk, i_t, i_h, tiles.Aqk, slot, full)
    T.tma_copy(x.decay[i_t, i_h, :], tiles.decay[slot, :], barrier=full[slot])


@T.macro
def alloc_tiles(z):
    """Of factors, by the names of what they hold; k_neg, qg and kg in parts of the state's channels."""
    p, BT, io, stages, rest_stages, parts = z.case.problem, z.case.BT, z.io, z.config.num_stages, z.rest_stages, z.parts
    q_stages = rest_stages if z.rounds_whole else stages
    A_shared = T.alloc_shared((rest_stages, BT, BT), io)
    n_shared = name_tiles("k_neg", [T.alloc_shared((stages, BT, z.width), io) for _ in range(parts)])
    q_shared = name_tiles("qg", [T.alloc_shared((q_stages, BT, z.width), io) for _ in range(parts)])
    Aqk_shared = T.alloc_shared((rest_stages, BT, BT), io)
    k_shared = name_tiles("kg", [T.alloc_shared((rest_stages, BT, z.width), io) for _ in range(parts)])
    decay_shared = T.alloc_shared((rest_stages, p.KP), "float32")
    identity = T.alloc_shared((BT, BT), io)
    factors = {"A": A_shared, "Aqk": Aqk_shared, "k_neg": n_shared, "qg": q_shared, "kg": k_shared}
    return {**factors, "decay": decay_shared, "identity": identity}


FACTOR_PRODUCTS = Products(
    await_nothing, load_first, load_rest, alloc_tiles, issue_values, finish_rounded, finish_chunk
)


@T.macro
def multiply(z, load_state, group, i_block, blocks, x, tiles, first_ring, rest_ring):
    """A warpgroup's part: ROWS channels."""
    p, BT, io, f32 = z.case.problem, z.case.BT, z.io, "float32"
    state = [T.alloc_fragment((ROWS, z.width), f32) for _ in range(z.parts)]
    state_io = T.alloc_fragment((ROWS, z.width), io)
    value = T.alloc_fragment((ROWS, BT), f32)
    value_io = T.alloc_fragment((ROWS, BT), io)
    output = T.alloc_fragment((ROWS, BT), f32)
    step = T.alloc_var("int32")
    r = SimpleNamespace(state=state, state_io=state_io, value=value, value_io=value_io, output=output)
    segments, chunk_tokens, o, h, HV = x.segments, x.chunk_tokens, x.o, x.h, x.v.shape[1]
    T.set_max_nreg(z.registers, 1)
    step = 0
    for n in T.serial(T.ceildiv(segments.shape[0] * HV * z.VB - i_block, blocks)):
        i = i_block + n * blocks
        i_s, i_h, _ = split_block(i, (segments.shape[0], HV), z.VB)
        v0, barrier = z.first_channel(i, group), STATES_BARRIER + group
        _, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
        for m, part in enumerate(state):
            load_state(part, Start(x.states, segments, i_s, i_h, v0, tiles.start[group], barrier), m * z.width)
        if z.rounds_whole:
            T.copy(state[0], state_io)
        T.clear(output)
        for c in T.serial(chunks):
            slot, phase = first_ring.place_to_read(step)
            rest_slot, rest_phase = rest_ring.place_to_read(step)
            rounded = round_output(output, io)
            first_ring.wait(slot, phase)
            z.products.issue_values(z, r, tiles, group, slot)
            if p.intermediate_states:
                store_state([state_io] if z.rounds_whole else state, tiles.h[group], h, segments[i_s, 0] + c, i_h, v0)
            row = start + (c - 1) * BT
            own = Output(tiles.o[group], o, row, start, end, i_h, v0, OUTPUT_BARRIER + group)
            z.products.store_output(rounded, own)
            if not z.rounds_whole:
                multiply_parts(r, tiles.k_neg, tiles.qg, slot)
            z.products.finish_values(z, r, tiles, group, slot)
            if not z.shares_empty:
                first_ring.release(slot)
            if z.config.early:
                rest_ring.wait(rest_slot, rest_phase)
            z.products.finish_chunk(z, r, tiles, rest_slot, step)
            rest_ring.release(rest_slot)
            step = step + 1
        if p.intermediate_states and not p.final_state:  # or TileLang 0.1.15 wants its barrier where threads diverge
            T.sync_threads(STATES_BARRIER + group, WARPGROUP)
        rounded = round_output(output, io)
        row = start + (chunks - 1) * BT
        own = Output(tiles.o[group], o, row, start, end, i_h, v0, OUTPUT_BARRIER + group)
        z.products.store_last(rounded, own)
        if p.final_state:
            store_final(p, state, x.ht, segments, i_s, i_h, v0)
    T.tma_store_wait(0)


@T.macro
def load(z, i_block, blocks, x, tiles, first_ring, rest_ring):
    """The part of the warp that loads, and of those that send."""
    BT = z.case.BT
    segments, chunk_tokens, HV = x.segments, x.chunk_tokens, x.v.shape[1]
    step = T.alloc_var("int32")
    T.set_max_nreg(z.loader_registers, 0)
    if T.get_thread_binding() < z.readers + PRODUCER:
        step = 0
        for n in T.serial(T.ceildiv(segments.shape[0] * HV * z.VB - i_block, blocks)):
            i = i_block + n * blocks
            i_s, i_h, _ = split_block(i, (segments.shape[0], HV), z.VB)
            first, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
            for c in T.serial(chunks):
                slot, phase = first_ring.place_to_fill(step)
                rest_slot, rest_phase = rest_ring.place_to_fill(step)
                i_t = first + c
                z.products.await_chunk(x, i_t, i_h)
                first_ring.acquire(slot, phase)
                z.products.load_first(z, x, i_t, i_h, tiles, slot, first_ring.full)
                for group in list(range(z.groups)):
                    v0 = z.first_channel(i, group)
                    load_values(x.v, tiles.v[group], first_ring.full, slot, start + c * BT, end, i_h, v0)
                if z.config.early:
                    first_ring.commit(slot)
                if not z.shares_empty:
                    rest_ring.acquire(rest_slot, rest_phase)
                z.products.load_rest(z, x, i_t, i_h, tiles, rest_slot, rest_ring.full, start + c * BT, end)
                rest_ring.commit(rest_slot)
                step = step + 1
    elif z.products.send is not None:
        for group in list(range(z.groups)):
            if T.get_thread_binding() // PRODUCER == z.readers // PRODUCER + 1 + group:
                z.products.send(z, group, i_block, blocks, x, tiles.o[group])


@T.macro
def recur(z, load_state, i_block, blocks, x):
    """The kernel's body: tiles, rings and roles."""
    p, config, BT, io = z.case.problem, z.config, z.case.BT, z.io
    stages, rest_stages, groups = config.num_stages, z.rest_stages, z.groups
    v_shared = name_tiles("v", [T.alloc_shared((stages, BT, ROWS), io) for _ in range(groups)])
    o_shared = name_tiles("o", [T.alloc_shared((BT, ROWS), io) for _ in range(groups)])
    states = groups * p.intermediate_states
    h_shared = name_tiles("h", [T.alloc_shared((z.width, ROWS + OUTPUT_PAD), io) for _ in range(states)])
    found = z.products.alloc_tiles(z)
    rest_full = T.alloc_barrier(arrive_count=[PRODUCER] * rest_stages)
    first_full = T.alloc_barrier(arrive_count=[PRODUCER] * stages) if config.early else rest_full
    first_empty = T.alloc_barrier(arrive_count=[z.readers] * stages)
    rest_empty = first_empty if z.shares_empty else T.alloc_barrier(arrive_count=[z.readers] * rest_stages)
    thread = T.get_thread_binding()
    triangles = [found[name] for name in z.products.triangles]
    T.annotate_layout(layout_lower(*triangles) | layout_values(*v_shared, *o_shared))
    store_constants(triangles, found.get("identity"), found["Aqk"] if z.products.make is not None else None)

    found = {"start": [None] * groups} | found
    tiles = SimpleNamespace(v=v_shared, o=o_shared, h=h_shared, **found)  # v, o, h and start one a warpgroup
    first_ring, rest_ring = Ring(first_full, first_empty), Ring(rest_full, rest_empty)
    if thread < WARPGROUP:
        multiply(z, load_state, 0, i_block, blocks, x, tiles, first_ring, rest_ring)
    elif groups == 2 and thread < config.consumers:
        multiply(z, load_state, 1, i_block, blocks, x, tiles, first_ring, rest_ring)
    elif z.products.make is not None and thread < z.readers:
        z.products.make(z, i_block, blocks, x, tiles, rest_ring)
    else:
        load(z, i_block, blocks, x, tiles, first_ring, rest_ring)


def build_recurrence(name: str, case: Case, config: OutputConfig, start: str, load_state: Any) -> Any:
    """The kernel of the stage ``name``, whose segments start from a tensor of states with the spec ``start``.

    ``load_state`` is a macro of the fragment to fill, the :class:`Start`, and the first channel of keys.
    """
    z, heads = Sizes(case, config, FACTOR_PRODUCTS), Heads.of(case.problem)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")
    inputs = {"v": "tokens HV V : io", **FACTORS, "states": start, **TABLES}

    @prim_func(case, inputs | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def recurrence(v, A, Aqk, k_neg, qg, kg, decay, states, segments, chunk_tokens, o, ht, h):
        blocks = T.min(NS * heads.HV * z.VB, case.device.num_sms)
        with T.Kernel(blocks, threads=config.consumers + WARPGROUP, prelude=STORES) as i_block:
            read = {"v": v, "A": A, "Aqk": Aqk, "k_neg": k_neg, "qg": qg, "kg": kg, "decay": decay, "states": states}
            tables, written = {"segments": segments, "chunk_tokens": chunk_tokens}, {"o": o, "ht": ht, "h": h}
            recur(z, load_state, i_block, blocks, SimpleNamespace(**read, **tables, **written))

    return recurrence.with_attr("global_symbol", name)
