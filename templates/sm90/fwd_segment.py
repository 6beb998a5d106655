"""Segments for Hopper: what a stretch of chunks makes of any state it starts from, walked from its end.

In X = S^T a chunk is affine: X <- X M + V^T A^T kg with M = diag(decay) + k_neg^T A^T kg. So is a segment,
S_end^T = S_start^T R^T + local, exact for any gate, and no segment waits for an earlier one. Backwards, with
R = (M_c+1 ... M_n)^T of what was walked,

    Z^T = (R kg^T) A        local^T <- local^T + Z^T V        R <- R diag(decay) + Z^T k_neg

from R = I and local = 0. R is the transition that is left, in halves of 16 bits as merges multiply it. Rows of R never
meet, so a thread block owns some, and those columns of local. The walk ends before the segment's first chunk where no
row of R has an element above 2^-64: a state would lose as much on its way, so what comes earlier is left out, a NaN
too. That depends on the gates: where they are steep, few chunks are walked.
The segments that end their sequence are not walked, for nothing starts from their end; what is not walked is zero.
Source: Kimi Linear, arXiv:2510.26692, section 3; the affine form is derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90.hopper import FACTORS, TABLES, count_bytes
from kda_tl.templates.sm90.merge import MOVED, ROW_PAD, SPLIT, split_reference, store_transition
from kda_tl.templates.sm90.recurrence import (
    PRODUCER,
    ROWS,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    step_reference,
    store_constants,
)

WALKED = {"v": "tokens HV V : io", **{name: FACTORS[name] for name in ("A", "k_neg", "kg", "decay")}}
INPUTS = {**WALKED, **TABLES}
OUTPUTS = {"local": "NC HV VP KP : f32", **MOVED}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    p, rows = case.problem, x.segments.tolist()
    values = split_chunks(x.v.to(x.decay.dtype), x.chunk_tokens, case.BT, width=p.VP)
    nothing = values.new_zeros((*values.shape[:3], p.KP))
    zero = x.decay.new_zeros((p.HV, p.VP, p.KP))
    identity = torch.eye(p.KP, dtype=x.decay.dtype, device=x.decay.device).expand(p.HV, -1, -1).clone()
    identity[:, p.K :] = 0
    local, transition = [], []
    for first, count, _, ends in [row for row in rows if row[3] < 0] or rows[:1]:
        cut = ends < 0
        own, moved = zero, identity if cut else 0 * identity
        for t in range(first, first + count if cut else first):
            _, own = step_reference(x, t, values, own)
            _, moved = step_reference(x, t, nothing, moved)
        local.append(own)
        transition.append(torch.stack(split_reference(moved.mT), 1))
    return {"local": torch.stack(local), "transition": torch.stack(transition)}


# A thread's. With 216 ptxas (CUDA 13.0) waits after each product; what loads spills a few, off the walk's way
REGISTERS, LOADER_REGISTERS = 224, 56
VANISHED = 2.0**-64  # no element of a transition is above it: nothing of any state is left


@dataclass(frozen=True, kw_only=True)
class FwdSegmentConfig(RecurrenceConfig):
    """BK: rows of R a block owns, 64 for each warpgroup that multiplies; BV: columns of local a walk sums; num_stages:
    chunks loaded ahead.
    """

    BK: int = tunable(128, 64, 128)
    BV: int = tunable(128, 64, 128)

    def reject(self, case: Case) -> str | None:
        """As the recurrence; rows of the transition are shared out too."""
        reason = super().reject(case)
        if reason is None and case.problem.KP % self.BK:
            return f"BK={self.BK} does not divide the padded head dimension {case.problem.KP}"
        return reason

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.BK // ROWS

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, what is left of rows in each, two barriers a stage and whether it is the last; rows
        on their way to memory; and gaps, since tiles begin at multiples of some hundred bytes.
        """
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + BT + 2 * KP) * 2 + KP * 4 + self.BK * 4 + 20
        return self.num_stages * stage + self.BK * (KP + ROW_PAD) * 2 + 1024


def build(case: Case, config: FwdSegmentConfig) -> Any:
    """The kernel: one thread block a (segment, value head, BK rows of R, BV columns of local), the last chunk first."""
    p, BT, BK, BV, stages = case.problem, case.BT, config.BK, config.BV, config.num_stages
    K, KP, heads = p.K, p.KP, Heads.of(p)
    KB, VB = KP // BK, p.V // BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    rows = T.GemmWarpPolicy.FullRow
    NT, tokens, NS, NC = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("NS"), T.dynamic("NC")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, NS=NS, NC=NC, **heads.sizes)
    def fwd_segment(v, A, k_neg, kg, decay, segments, chunk_tokens, local, transition):
        with T.Kernel(NC * heads.HV * KB * VB, threads=consumers + WARPGROUP) as i_block:
            i_s, i_h, i_kv = split_block(i_block, (NC, heads.HV), KB * VB)
            k0 = i_kv // VB * BK
            v0 = i_kv % VB * BV
            first = segments[i_s, 0]
            chunks = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            chunks = 0
            start = 0
            end = 0
            if segments[i_s, 3] < 0:
                chunks = segments[i_s, 1]
            if chunks > 0:
                start = chunk_tokens[first, 0]
                end = chunk_tokens[first + chunks - 1, 0] + chunk_tokens[first + chunks - 1, 1]
            v_shared = T.alloc_shared((stages, BT, BV), io)
            tile = T.alloc_shared((stages, BT, BT), io)  # A, by the name that its CUDA has
            n_shared = T.alloc_shared((stages, BT, KP), io)
            k_shared = T.alloc_shared((stages, BT, KP), io)
            decay_shared = T.alloc_shared((stages, KP), f32)
            rows_shared = T.alloc_shared((BK, KP + ROW_PAD), SPLIT)
            left = T.alloc_shared((stages, BK), f32)  # the largest element of a row of R after the chunk in a slot
            stop = T.alloc_shared((stages,), "int32")  # whether no chunk comes in a slot
            full = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            empty = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(tile))
            if thread < stages:
                stop[thread] = 0
            store_constants([tile])

            if thread < consumers:
                state = T.alloc_fragment((BK, KP), f32)
                state_io = T.alloc_fragment((BK, KP), io)
                sums = T.alloc_fragment((BK, BV), f32)
                value = T.alloc_fragment((BK, BT), f32)
                value_io = T.alloc_fragment((BK, BT), io)
                largest = T.alloc_fragment((BK,), f32)
                T.set_max_nreg(REGISTERS, 1)
                for i, j in T.Parallel(BK, KP):
                    state[i, j] = T.if_then_else((k0 + i == j) & (j < K) & (chunks > 0), 1.0, 0.0)
                T.clear(sums)
                for c in T.serial(chunks):
                    slot = c % stages
                    T.barrier_wait(full[slot], c // stages % 2)
                    if stop[slot] == 1:
                        break
                    T.copy(state, state_io)
                    T.wgmma_gemm(state_io, k_shared[slot, :, :], value, transpose_B=True, clear_accum=True, policy=rows)
                    for i, j in T.Parallel(BK, KP):
                        state[i, j] = state[i, j] * decay_shared[slot, j]
                    finish_values(value, value_io)
                    T.wgmma_gemm(value_io, tile[slot, :, :], value, clear_accum=True, policy=rows)
                    finish_values(value, value_io)
                    T.wgmma_gemm(value_io, n_shared[slot, :, :], state, policy=rows)
                    T.wgmma_gemm(value_io, v_shared[slot, :, :], sums, policy=rows)
                    T.wait_wgmma(1)
                    T.warpgroup_fence_operand(state, num_regs=KP // 2)
                    T.reduce_absmax(state, largest, dim=1)
                    T.copy(largest, left[slot, :])
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(sums, num_regs=BV // 2)
                    T.barrier_arrive(empty[slot])
                for i, j in T.Parallel(BK, BV):
                    local[i_s, i_h, v0 + j, k0 + i] = sums[i, j]
                if v0 == 0:
                    store_transition(state, rows_shared, transition, i_s, i_h, k0)
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    walks = T.alloc_var("int32")
                    for c in T.serial(chunks):
                        slot = c % stages
                        i_t = first + chunks - 1 - c
                        T.barrier_wait(empty[slot], (c // stages + 1) % 2)
                        if c >= stages:
                            walks = 0
                            for m in T.unroll(BK // PRODUCER):
                                if left[slot, m * PRODUCER + thread - consumers] > VANISHED:
                                    walks = 1
                            if T.any_sync(walks == 1) == 0:
                                stop[slot] = 1
                                T.barrier_arrive(full[slot])
                                break
                        load_lower(A, i_t, i_h, tile, slot, full)
                        load_values(v, v_shared, full, slot, start + (chunks - 1 - c) * BT, end, i_h, v0)
                        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=full[slot])
                        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=full[slot])
                        T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=full[slot])
                        T.barrier_arrive(full[slot])

    return fwd_segment


default = FwdSegmentConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made of the chunks that are walked in, local and transition out; four products a chunk.

    Segments are about as long as each other, and those that end a sequence are not walked. Where gates are steep, less
    is walked.
    """
    p, BT, NC = case.problem, case.BT, sizes["NC"]
    share = NC / max(sizes["NS"], NC)
    walked, made = (count_bytes(case, sizes, tensors) for tensors in (WALKED, OUTPUTS))
    products = sizes["NT"] * p.HV * BT * 2 * p.K * (2 * p.K + BT + p.V)
    return Cost(bytes=int(share * walked) + made, flops=int(share * products))


# a transition that gates let vanish errs by more of itself (0.3 at a norm of 1e-34); the identity's is 0.09
FLOOR = {"transition": 0.05}
STAGE = Stage(
    "fwd_segment",
    INPUTS,
    OUTPUTS,
    FwdSegmentConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    rms_floor=FLOOR,
)
