"""All gradients of Gated DeltaNet in one walk back over a segment's chunks, for Hopper.

    dV'^T = dO^T Aqk + (dS'^T K^T) diag(end)      dX^T = dV'^T A
    dS^T  = last dS'^T + (dO^T diag(query)) Q - (dX^T diag(start)) K

    P_ij = scale D_ij <dO_i, V'_j>   j <= i       R_ij = -D_ij <dX_i, V'_j>   j < i
    dq = diag(query) (dO S) + P k      row = -diag(start) (dX S) + R k      key = diag(end) (V' dS') + P^T q + R^T k

as bwd_gdn_scan and bwd_gdn_gradients derive them. The gradient of the state stays in registers from chunk to chunk, so
neither it nor dX comes back from memory. A segment finds its own start: it begins as many chunks later as gates
remember, and keeps nothing of them; if these are many, with what bwd_gdn_states found at its end. See reach. Two value
heads of a query/key head add their rounded dq and dk to zeros; of more each has a part of its own, for bwd_heads. dv
may lie where V' lies: a chunk's V' is read before its dv is written, by the same block, and by no other.

    warps             registers  produce                           consume
    8 multiply        232        dX, dS, then a chunk's gradients  the rings
    1 loads           40         the rings                         tensors in memory

    ring     slots    holds                 is released when
    rows     2        k, dO, powers         the chunk ends
    queries  1        q                     the chunk ends, dq has left by way of it
    pairs    1        A, Aqk                dX is known
    states   1        S, V'                 keys have what states add

    tensor            dtype  where it lives
    dS^T              fp32   registers, and rounded beside it, and in shared memory
    dX                bf16   shared memory; what it loses by that, where P and R will be, for dbeta
    P, R              bf16   shared memory; what P loses by that, where dX was
    dq, row, key      fp32   registers
Source: autograd of Gated Delta Networks, arXiv:2412.06464, section 3.3.
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
from kda_tl.templates.common.tile import at_state, prim_func
from kda_tl.templates.sm90 import bwd_gdn_gradients, bwd_heads, bwd_scan
from kda_tl.templates.sm90.bwd_gdn_scan import find_gradients, multiply_gradients, take_gradients
from kda_tl.templates.sm90.bwd_gradients import DEPENDS, TOLERANCE
from kda_tl.templates.sm90.bwd_gradients import OUTPUTS as GRADIENTS
from kda_tl.templates.sm90.chain import Slot, load_pairs, load_queries, load_rows
from kda_tl.templates.sm90.gates import Chunk
from kda_tl.templates.sm90.gdn_gradients import GROUPS, ROWS_AT_ONCE
from kda_tl.templates.sm90.hopper import BOUNDS, ENDS, GIVEN, PAIRS, SCALARS, TABLES, VALUES, HopperConfig, count_bytes
from kda_tl.templates.sm90.powers import make_factors, reject_rows
from kda_tl.templates.sm90.reach import FAR, OWNERS, find_backwards, join_segments
from kda_tl.templates.sm90.recurrence import PRODUCER, WARPGROUP, layout_lower, load_values, store_constants
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.scan import SCANNED
from kda_tl.templates.sm90.walk import Walk, alloc_registers
from kda_tl.templates.sm90.walk_gradients import ADDS, CONSUMERS, finish_chunk, meet, store_dx, store_rest

INPUTS = {
    **GIVEN,
    **VALUES,
    "states": SCANNED["states"],
    "do": "tokens HV V : io",
    **PAIRS,
    **BOUNDS,
    **ENDS,
    "dht": "N HV K V : f32 ? final_state",
    **OWNERS,
    **TABLES,
}
SHARED = {
    **dict.fromkeys(("dq", "dk"), "tokens H K : io ? not parted"),
    **dict.fromkeys(("dq_part", "dk_part"), "tokens HV K : io ? parted"),
}
OUTPUTS = {**GRADIENTS, **SHARED, "dv": SCANNED["dv"], "dh0": SCANNED["dh0"]}
REGISTERS = (232, 40)


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: the scan back over whole sequences, then bwd_gdn_gradients'."""
    given = Operands(**vars(x) | {"v": x.do, "h0": None})
    scanned = bwd_scan.reference(case, make_factors(case, join_segments(given)))
    taken = {name: scanned[name] for name in ("dv", "dstates")}
    taken["values"] = split_chunks(x.values, x.chunk_tokens, case.BT).mT
    found = bwd_gdn_gradients.reference(case, Operands(**vars(x) | taken))
    if case.problem.paired:
        parts = Operands(**{name: found.pop(name) for name in ("dq_part", "dk_part")})
        found |= bwd_heads.reference(case, parts)
    return found | {name: scanned[name] for name in ("dv", "dh0") if name in scanned}


@dataclass(frozen=True, kw_only=True)
class WalkConfig(HopperConfig):
    """It has one shape: registers and shared memory are a block's that has a multiprocessor alone."""

    BV = CONSUMERS // 2

    def reject(self, case: Case) -> str | None:
        """Hopper, one gate a head, bf16, K = V = 128."""
        p = case.problem
        if reason := super().reject(case):
            return reason
        if case.BT != 64:
            return f"it is written for BT=64, not BT={case.BT}"
        if p.dtype != "bf16":
            return f"{p.dtype} operands are refused: only bf16 holds keys that are not normalised"
        if (p.K, p.V) != (128, 128):
            return f"K={p.K}, V={p.V} are not 128 channels, which its tiles are"
        smem = self.smem_bytes(case)
        if smem > case.device.smem_bytes:
            return f"its tiles need {smem} bytes of {case.device.smem_bytes} shared"
        return reject_rows(case, (128,))

    def smem_bytes(self, case: Case) -> int:
        """Tiles of the rings, of the chunk, sums, and a dozen barriers: see :func:`alloc_tiles`."""
        BT, K, V = case.BT, case.problem.K, case.problem.V
        ringed = 2 * (BT * (V + K) * 2 + 7 * BT * 4) + BT * (K + 2 * BT) * 2
        kept = (2 * V * K + V * BT + BT * V + 2 * BT * BT) * 2
        return ringed + kept + (4 * GROUPS * BT + ROWS_AT_ONCE + BT) * 4 + 96


@T.macro
def alloc_tiles(case):
    """Tiles of the rings, by the names of what they hold, and those that stay; x is dO."""
    p, BT, io = case.problem, case.BT, "bfloat16"
    x_shared = T.alloc_shared((2, BT, p.V), io)
    k_shared = T.alloc_shared((2, BT, p.K), io)
    powers = T.alloc_shared((2, 7, BT), "float32")
    q_shared = T.alloc_shared((1, BT, p.K), io)
    A_shared = T.alloc_shared((1, BT, BT), io)
    Aqk_shared = T.alloc_shared((1, BT, BT), io)
    state = T.alloc_shared((p.V, p.K), io)
    values = T.alloc_shared((1, BT, p.V), io)
    dstate = T.alloc_shared((p.V, p.K), io)
    dx = T.alloc_shared((BT, p.V), io)
    pairs = T.alloc_shared((BT, 2 * BT), io)  # P, then R; what dX loses by its rounding before that
    sums = T.alloc_shared((4, GROUPS, BT), "float32")
    parts = T.alloc_shared((ROWS_AT_ONCE,), "float32")
    db = T.alloc_shared((BT,), "float32")
    single = {"q": Slot(q_shared), "A": Slot(A_shared), "Aqk": Slot(Aqk_shared)}
    kept = {"state": state, "values": values, "dstate": dstate, "dx": dx, "pairs": pairs}
    return SimpleNamespace(x=x_shared, k=k_shared, powers=powers, **single, **kept, sums=sums, parts=parts, db=db)


@T.macro
def load_walk(case, x, tiles, rings, w):
    """Producer: the chunks of a walk from the last to the first."""
    for c in T.serial(w.chunks):
        i_c = w.chunks - 1 - c
        i_t, row = w.first + i_c, w.start + i_c * case.BT
        load_rows(x, tiles, rings.rows, c, i_t, row, w)
        load_pairs(x, tiles, rings.pairs, c, i_t, w)
        if c >= w.passed:
            own, turn_of_own = rings.states.place_to_fill(c - w.passed)
            rings.states.acquire(own, turn_of_own)
            T.tma_copy(x.states[i_t, w.i_h, :, :], tiles.state, barrier=rings.states.full[own])
            load_values(x.values, tiles.values, rings.states.full, own, row, w.end, w.i_h, 0)
            rings.states.commit(own)
        load_queries(x, tiles, rings.queries, c, row, w)


@T.macro
def load_end(p, state, x, w, far):
    """What the walk begins with: what is known where its segment or its sequence ends, or zero."""
    T.clear(state)
    if far:
        for i, j in T.Parallel(*state.shape):
            state[i, j] = x.ends[w.i_s, w.i_h, i, j]
    if p.final_state:
        if w.i_n >= 0:
            for i, j in T.Parallel(*state.shape):
                state[i, j] = x.dht[at_state(p, w.i_n, w.i_h, j, i)]


@T.macro
def walk(case, config, x, tiles, rings, w, far, scalars):
    """Consumer: the gradient of the state from the last chunk to the first, and all others of the segment's own."""
    p, BT = case.problem, case.BT
    r = alloc_registers(case, config)
    load_end(p, r.state, x, w, far)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        i_c = w.chunks - 1 - c
        at = Chunk(
            w.first + i_c, w.i_h, x.heads.of_keys(w.i_h), w.start + i_c * BT, T.min(w.end - w.start - i_c * BT, BT)
        )
        slot, phase = rings.rows.place_to_read(c)
        one, turn = rings.pairs.place_to_read(c)
        own, turn_of_own = rings.states.place_to_read(c - w.passed)
        rings.rows.wait(slot, phase)
        rings.pairs.wait(one, turn)
        if c >= w.passed:
            T.copy(r.state_io, tiles.dstate)
        find_gradients(r, tiles, slot)
        multiply_gradients(r, tiles.A, one)
        rings.queries.wait(one, turn)
        take_gradients(r, tiles, slot)
        rings.pairs.release(one)
        if c >= w.passed:
            store_dx(r.value_io, tiles.dx)
            store_rest(r.value, r.value_io, tiles.pairs)
            T.fence_proxy_async()
            meet()
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(r.state, num_regs=p.K // 2)
        if c >= w.passed:
            finish_chunk(case, x, tiles, rings, slot, own, turn_of_own, at, scalars)
        rings.rows.release(slot)
        rings.queries.release(one)
        T.copy(r.state, r.state_io)
    return r.state


def build(case: Case, config: WalkConfig) -> Any:
    """The kernel: one thread block a (segment, value head)."""
    p, heads = case.problem, Heads.of(case.problem)
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def bwd_gdn_walk(
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        values,
        states,
        d_o,
        A,
        Aqk,
        powers,
        bounds,
        ends,
        dht,
        segment_sequences,
        segments,
        chunk_tokens,
        dq,
        dk,
        dq_part,
        dk_part,
        dg,
        dbeta,
        dA_log_part,
        ddt_bias_part,
        dv,
        dh0,
        scale,
        lower_bound,
    ):
        prelude = ADDS if p.paired else None
        with T.Kernel(NS * heads.HV, threads=CONSUMERS + WARPGROUP, prelude=prelude) as i_block:
            i_s, i_h, _ = split_block(i_block, (NS, heads.HV))
            given = {"q": q, "k": k, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias, "d_o": d_o, "dht": dht}
            found = {"values": values, "states": states, "ends": ends, "A": A, "Aqk": Aqk, "powers": powers}
            parts = {"dA_log_part": dA_log_part, "ddt_bias_part": ddt_bias_part}
            written = {"dq": dq_part if p.parted else dq, "dk": dk_part if p.parted else dk, "dg": dg, "dbeta": dbeta}
            tables = {"segments": segments, "owners": segment_sequences, "bounds": bounds}
            x = SimpleNamespace(**given, **found, **parts, **written, **tables, dv=dv, heads=heads)
            first, count = segments[i_s, 0], segments[i_s, 1]
            reach, ends_sequence = find_backwards(x, i_s, i_h)
            passed = T.if_then_else(reach > FAR, 0, reach)
            last = T.max(first + count + passed - 1, 0)
            start = chunk_tokens[T.min(first, last), 0]
            end = chunk_tokens[last, 0] + chunk_tokens[last, 1]
            i_n = T.if_then_else(ends_sequence & (reach <= FAR), segment_sequences[i_s, 0], -1)
            tiles = alloc_tiles(case)
            rows_full = T.alloc_barrier(arrive_count=[PRODUCER] * 2)
            rows_empty = T.alloc_barrier(arrive_count=[CONSUMERS] * 2)
            pairs_full = T.alloc_barrier(arrive_count=[PRODUCER])
            pairs_empty = T.alloc_barrier(arrive_count=[CONSUMERS])
            states_full = T.alloc_barrier(arrive_count=[PRODUCER])
            states_empty = T.alloc_barrier(arrive_count=[CONSUMERS])
            queries_full = T.alloc_barrier(arrive_count=[PRODUCER])
            queries_empty = T.alloc_barrier(arrive_count=[CONSUMERS])
            rings = SimpleNamespace(
                rows=Ring(rows_full, rows_empty),
                pairs=Ring(pairs_full, pairs_empty),
                states=Ring(states_full, states_empty),
                queries=Ring(queries_full, queries_empty),
            )
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tiles.A.tile, tiles.Aqk.tile))
            store_constants([tiles.A.tile, tiles.Aqk.tile])
            w = Walk(i_s, i_n, i_h, 0, first, count + passed, start, end, passed)
            if thread < CONSUMERS:
                T.set_max_nreg(REGISTERS[0], 1)
                state = walk(case, config, x, tiles, rings, w, reach > FAR, (scale, lower_bound))
                if p.initial_state:
                    begins = segments[i_s, 2]
                    for i, j in T.Parallel(*state.shape):
                        if begins >= 0:
                            dh0[at_state(p, begins, i_h, j, i)] = state[i, j]
            else:
                T.set_max_nreg(REGISTERS[1], 0)
                if thread < CONSUMERS + PRODUCER:
                    load_walk(case, x, tiles, rings, w)

    return bwd_gdn_walk


def default(case: Case) -> Config:
    """The only one."""
    return first_valid(case, WalkConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; sixteen products of 64 rows."""
    p, BT = case.problem, case.BT
    products = BT * (6 * p.V * p.K + 4 * p.V * BT + 6 * BT * p.K)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=sizes["NT"] * p.HV * 2 * products)


def passes(case: Case) -> dict[str, bool]:
    """Barriers are those that are written: loops of threads that load have none."""
    return {"tl.disable_thread_storage_sync": True}


STAGE = Stage(
    "bwd_gdn_walk",
    INPUTS,
    OUTPUTS,
    WalkConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
    passes=passes,
    adds={"dq": "paired", "dk": "paired"},
    replaces={"dv": "values"},
)
