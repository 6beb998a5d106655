"""Segments of Gated DeltaNet for Hopper: what a stretch of chunks makes of any state, where gates remember.

In X = S^T a segment is affine: X_end = X_start M + local, see fwd_segment. From its end, with R = (M_c+1 ... M_n)^T,

    Z^T = ((R K^T) diag(end)) A        local^T <- local^T + Z^T V        R <- last R - (Z^T diag(start)) K

from R = I and local = 0; the factors of rows are the powers of fwd_gdn_pairs, see powers. R is left as it is, the
transposed transition, which gradients go through too, in halves of 16 bits as merges multiply it. A walk ends where
less than 2^-64 is left of R. Where gates forget walks find their own start, see reach: all is zero for a head and
sequence in which no walk is far.

    warps             registers  produce            consume
    4 or 8 multiply   224        transition, local  the ring
    1 loads           56         the ring           tensors in memory
Source: as fwd_segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90.fwd_segment import FLOOR, LOADER_REGISTERS, REGISTERS
from kda_tl.templates.sm90.hopper import BOUNDS, PAIRS, TABLES, count_bytes
from kda_tl.templates.sm90.merge import MOVED, ROW_PAD, SPLIT, split_reference, store_transition
from kda_tl.templates.sm90.powers import END, GIVEN_ROWS, LAST, MULTIPLIED, START, make_factors, reject_rows
from kda_tl.templates.sm90.reach import CUTS, OWNERS, far_reference, find_reach, has_far
from kda_tl.templates.sm90.recurrence import (
    PRODUCER,
    ROWS,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    layout_lower,
    load_lower,
    load_values,
    step_reference,
    store_constants,
)
from kda_tl.templates.sm90.ring import Ring
from kda_tl.templates.sm90.walk import Walk

INPUTS = {
    "k": GIVEN_ROWS["k"],
    "v": "tokens HV V : io",
    "A": PAIRS["A"],
    "powers": PAIRS["powers"],
    **BOUNDS,
    **OWNERS,
    **CUTS,
    **TABLES,
}
OUTPUTS = {"local": "NC HV V KP : f32", **MOVED}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers."""
    p, x, rows = case.problem, make_factors(case, x), x.segments.tolist()
    given = split_chunks(x.v.to(x.powers.dtype), x.chunk_tokens, case.BT)
    nothing = given.new_zeros((*given.shape[:3], p.KP))
    cuts = max(1, len(rows) - len(x.seq_segments))
    local = given.new_zeros((cuts, p.HV, p.V, p.KP))
    transition = given.new_zeros((cuts, p.HV, 2, p.KP, p.KP))
    for n, (begun, count, _) in enumerate(x.seq_segments.tolist()):
        far = (far_reference(x, n, -1) | far_reference(x, n, 1))[:, None, None]
        for i_s in range(begun, begun + count):
            own = torch.zeros_like(local[0])
            moved = torch.eye(p.KP, dtype=given.dtype, device=given.device).expand(p.HV, -1, -1)
            for t in range(rows[i_s][0], sum(rows[i_s][:2])):
                own, moved = (step_reference(x, t, y, s)[1] for y, s in ((given, own), (nothing, moved)))
            local[i_s], transition[i_s] = own * far, torch.stack(split_reference(moved.mT * far), 1)
    return {"local": local, "transition": transition}


@dataclass(frozen=True, kw_only=True)
class GdnSegmentConfig(RecurrenceConfig):
    """BK: rows of R a block owns, 64 for each warpgroup that multiplies; BV: columns of local a walk sums; num_stages:
    chunks loaded ahead.
    """

    BK: int = tunable(128, 64, 128)
    BV: int = tunable(128, 64, 128)

    def reject(self, case: Case) -> str | None:
        """As the recurrence, and channels that lie in whole tiles; rows of the transition are shared out too."""
        if reason := super().reject(case) or reject_rows(case, self.WIDTHS):
            return reason
        return None if case.problem.K % self.BK == 0 else f"BK={self.BK} does not divide K={case.problem.K}"

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.BK // ROWS

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage and two barriers a stage; and rows on their way to memory."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + K) * 2 + MULTIPLIED * BT * 4 + 16
        return self.num_stages * stage + self.BK * (K + ROW_PAD) * 2


@T.macro
def load(case, x, tiles, ring, w):
    """Producer: the chunks of a walk, the last one first."""
    for c in T.serial(w.chunks):
        i_c = w.chunks - 1 - c
        i_t, row = w.first + i_c, w.start + i_c * case.BT
        slot, phase = ring.place_to_fill(c)
        ring.acquire(slot, phase)
        load_values(x.k, tiles.k, ring.full, slot, row, w.end, x.heads.of_keys(w.i_h), 0)
        load_lower(x.A, i_t, w.i_h, tiles.A, slot, ring.full)
        load_values(x.v, tiles.v, ring.full, slot, row, w.end, w.i_h, w.v0)
        T.tma_copy(x.powers[i_t, w.i_h, :MULTIPLIED, :], tiles.powers[slot, :, :], barrier=ring.full[slot])
        ring.commit(slot)


@T.macro
def take_chunk(r, tiles, slot):
    """Consumer: R before the chunk, and what the chunk adds."""
    BT, io = r.value.shape[1], r.value_io.dtype
    moved = T.alloc_fragment(r.value.shape, io)
    T.wgmma_gemm(r.state_io, tiles.k[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    for i, j in T.Parallel(*r.state.shape):
        r.state[i, j] = r.state[i, j] * tiles.powers[slot, LAST, 0]
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.value, num_regs=BT // 2)
    for i, j in T.Parallel(*r.value.shape):
        r.value_io[i, j] = T.cast(r.value[i, j] * tiles.powers[slot, END, j], io)
    T.wgmma_gemm(r.value_io, tiles.A[slot, :, :], r.value, clear_accum=True, policy=T.BY_ROWS)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.value, num_regs=BT // 2)
    for i, j in T.Parallel(*r.value.shape):
        moved[i, j] = T.cast(-r.value[i, j] * tiles.powers[slot, START, j], io)
    T.wgmma_gemm(moved, tiles.k[slot, :, :], r.state, policy=T.BY_ROWS)
    T.copy(r.value, r.value_io)
    T.wgmma_gemm(r.value_io, tiles.v[slot, :, :], r.sums, policy=T.BY_ROWS)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(r.state, num_regs=r.state.shape[1] // 2)
    T.copy(r.state, r.state_io)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.sums, num_regs=r.sums.shape[1] // 2)


@T.macro
def walk(case, config, tiles, ring, k0, chunks):
    """Consumer: rows of R and of local^T, from the segment's end."""
    p, BT, BK, BV, io, f32 = case.problem, case.BT, config.BK, config.BV, TL_DTYPE[case.problem.dtype], "float32"
    state = T.alloc_fragment((BK, p.K), f32)
    state_io = T.alloc_fragment((BK, p.K), io)
    sums = T.alloc_fragment((BK, BV), f32)
    value = T.alloc_fragment((BK, BT), f32)
    value_io = T.alloc_fragment((BK, BT), io)
    r = SimpleNamespace(state=state, state_io=state_io, sums=sums, value=value, value_io=value_io)
    for i, j in T.Parallel(BK, p.K):
        state[i, j] = T.if_then_else((k0 + i == j) & (chunks > 0), 1.0, 0.0)
    T.clear(sums)
    T.copy(state, state_io)
    for c in T.serial(chunks):
        slot, phase = ring.place_to_read(c)
        ring.wait(slot, phase)
        take_chunk(r, tiles, slot)
        ring.release(slot)
    return r


def build(case: Case, config: GdnSegmentConfig) -> Any:
    """The kernel: one thread block a (cut segment, value head, BK rows of R, BV columns of local)."""
    p, BT, BK, BV, stages = case.problem, case.BT, config.BK, config.BV, config.num_stages
    KB, VB, heads, consumers, io = p.K // BK, p.V // BV, Heads.of(p), config.consumers, TL_DTYPE[p.dtype]
    NT, tokens, N, NS, NC = (T.dynamic(name) for name in ("NT", "tokens", "N", "NS", "NC"))

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, NC=NC, **heads.sizes)
    def fwd_gdn_segment(
        k, v, A, powers, bounds, segment_sequences, seq_segments, segments, chunk_tokens, local, transition
    ):
        with T.Kernel(NC * heads.HV * KB * VB, threads=consumers + WARPGROUP) as i_block:
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            given = {"k": k, "v": v, "A": A, "powers": powers, "bounds": bounds}
            x = SimpleNamespace(**given, **tables, chunk_tokens=chunk_tokens, heads=heads)
            i_c, i_h, i_kv = split_block(i_block, (NC, heads.HV), KB * VB)
            k0, v0, i_n = i_kv // VB * BK, i_kv % VB * BV, segment_sequences[i_c, 0]
            far, first, chunks, start, end = (T.alloc_var("int32") for _ in range(5))
            far = 0
            first = 0
            chunks = 0
            start = 0
            end = 0
            if segments[i_c, 3] < 0:
                far = has_far(x, i_n, i_h, -1)
                if far == 0:
                    far = has_far(x, i_n, i_h, 1)
            if far > 0:
                last = segments[i_c, 0] + segments[i_c, 1] - 1
                chunks = find_reach(bounds, i_h, last, -1, segments[i_c, 1])
                first = last + 1 - chunks
                start = chunk_tokens[first, 0]
                end = chunk_tokens[last, 0] + chunk_tokens[last, 1]
            w = Walk(i_c, i_n, i_h, v0, first, chunks, start, end)
            v_shared = T.alloc_shared((stages, BT, BV), io)
            A_shared = T.alloc_shared((stages, BT, BT), io)
            k_shared = T.alloc_shared((stages, BT, p.K), io)
            of_rows = T.alloc_shared((stages, MULTIPLIED, BT), "float32")
            rows_shared = T.alloc_shared((BK, p.K + ROW_PAD), SPLIT)
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            ring, thread = Ring(full, empty), T.get_thread_binding()
            tiles = SimpleNamespace(v=v_shared, A=A_shared, k=k_shared, powers=of_rows)
            T.annotate_layout(layout_lower(A_shared))
            store_constants([A_shared])
            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                r = walk(case, config, tiles, ring, k0, chunks)
                for i, j in T.Parallel(BK, BV):
                    local[i_c, i_h, v0 + j, k0 + i] = r.sums[i, j]
                if v0 == 0:
                    store_transition(r.state, rows_shared, transition, i_c, i_h, k0)
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    load(case, x, tiles, ring, w)

    return fwd_gdn_segment


def default(case: Case) -> Config:
    """As many rows and columns as there are."""
    return first_valid(case, *(GdnSegmentConfig(BK=BK, BV=BV) for BK in (128, 64) for BV in (128, 64)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Of a problem all of whose gates remember: every tensor once; four products a chunk."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * 2 * p.K * (2 * p.K + BT + p.V)
    return Cost(bytes=count_bytes(case, sizes, INPUTS | OUTPUTS), flops=flops)


STAGE = Stage(
    "fwd_gdn_segment",
    INPUTS,
    OUTPUTS,
    GdnSegmentConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    rms_floor=FLOOR,
)
