"""Segments for Hopper: what a stretch of chunks makes of any state it starts from, walked without one.

    V'^T = (V^T + X k_neg^T) A^T        X <- X diag(decay) + V'^T kg

In X = S^T this is affine: S_end^T = S_start^T transition + local. X = 0 walks to local; without values, X = I walks to
transition, whose row r is what becomes of a state that is the unit vector r. Exact for any gate, and no chunk waits for
an earlier segment. Rows of X never meet, so a thread block owns some of either. The segments that end their sequence
are not walked, nothing starts from their end; nor is a transition where a sequence starts from zero. What is not
walked is zero.
Source: Kimi Linear, arXiv:2510.26692, section 3; the affine form is derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Cost, Stage, axis, prefer
from kda_tl.templates._chunks import split_chunks
from kda_tl.templates._recurrence import (
    PRODUCER,
    WARPGROUP,
    RecurrenceConfig,
    ask_values,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    put_constants,
    walk_reference,
)
from kda_tl.templates._tile import FP32_TOLERANCE, TL_DTYPE, annotate

INPUTS = {
    "v": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "segments": "NS 4 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "local": "NC HV VP KP : f32",
    "transition": "NC HV KP KP : f32",
}


def reference(
    case: Case,
    *,
    v: torch.Tensor,
    A: torch.Tensor,
    k_neg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    p, rows = case.problem, segments.tolist()
    factors = {"A": A, "k_neg": k_neg, "kg": kg, "decay": decay}
    values = split_chunks(v.to(decay.dtype), chunk_tokens, case.BT, width=p.VP)
    nothing = values.new_zeros((*values.shape[:3], p.KP))
    zero = decay.new_zeros((p.HV, p.VP, p.KP))
    unit = torch.eye(p.KP, dtype=decay.dtype, device=decay.device).expand(p.HV, -1, -1).clone()
    unit[:, p.K :] = 0
    local, transition = [], []
    for first, count, begins, ends in [row for row in rows if row[3] < 0] or rows[:1]:
        cut, from_zero = ends < 0, begins >= 0 and not p.initial_state
        local.append(walk_reference(values, zero, first, count, factors)[0] if cut else zero)
        walked = cut and not from_zero
        transition.append(walk_reference(nothing, unit, first, count, factors)[0] if walked else 0 * unit)
    return {"local": torch.stack(local), "transition": torch.stack(transition)}


# A thread's: what multiplies needs fewer than in the recurrence, what loads knows two kinds of block.
REGISTERS, LOADER_REGISTERS = 216, 72


@dataclass(frozen=True, kw_only=True)
class FwdSegmentConfig(RecurrenceConfig):
    """BV: rows of X a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    BV: int = axis(128, 64, 128)

    def reject(self, case: Case) -> str | None:
        """As the recurrence; rows of the transition are shared out too."""
        reason = super().reject(case)
        if reason is None and case.problem.KP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {case.problem.KP}"
        return reason

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, a unit matrix, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        return self.num_stages * (BT * (self.BV + BT + 2 * KP) * 2 + KP * 4 + 16) + BT * BT * 2


def build(case: Case, config: FwdSegmentConfig) -> Any:
    """The kernel: one thread block a (segment, value head, BV rows of local or transition), chunks in order."""
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP = p.HV, p.K, p.KP
    VB, KB = p.VP // BV, KP // BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    policy = T.GemmWarpPolicy.FullRow
    NT, tokens, NS, NC = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("NS"), T.dynamic("NC")

    @T.prim_func
    def fwd_segment(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        A: annotate(case, INPUTS["A"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        local: annotate(case, OUTPUTS["local"], NC=NC),
        transition: annotate(case, OUTPUTS["transition"], NC=NC),
    ):
        with T.Kernel(NC * HV * (VB + KB), threads=consumers + WARPGROUP) as i_block:
            i_s = i_block // (HV * (VB + KB))
            i_h = i_block // (VB + KB) % HV
            i_b = i_block % (VB + KB)
            v0 = i_b * BV
            k0 = (i_b - VB) * BV
            first = segments[i_s, 0]
            chunks = T.alloc_var("int32")
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            chunks = 0
            start = 0
            end = 0
            if (segments[i_s, 3] < 0) & ((i_b < VB) | p.initial_state | (segments[i_s, 2] < 0)):
                chunks = segments[i_s, 1]
            if chunks > 0:
                start = chunk_tokens[first, 0]
                end = chunk_tokens[first + chunks - 1, 0] + chunk_tokens[first + chunks - 1, 1]
            v_shared = T.alloc_shared((stages, BT, BV), io)
            A_shared = T.alloc_shared((stages, BT, BT), io)
            n_shared = T.alloc_shared((stages, BT, KP), io)
            k_shared = T.alloc_shared((stages, BT, KP), io)
            decay_shared = T.alloc_shared((stages, KP), f32)
            unit = T.alloc_shared((BT, BT), io)
            state = T.alloc_fragment((BV, KP), f32)
            state_io = T.alloc_fragment((BV, KP), io)
            value = T.alloc_fragment((BV, BT), f32)
            value_io = T.alloc_fragment((BV, BT), io)
            ready = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            free = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(A_shared))
            put_constants([A_shared], [unit])

            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                for i, j in T.Parallel(BV, KP):  # of local, k0 is negative: no element is 1
                    state[i, j] = T.if_then_else((k0 + i == j) & (j < K) & (chunks > 0), 1.0, 0.0)
                T.copy(state, state_io)
                for c in T.serial(chunks):
                    slot = c % stages
                    T.barrier_wait(ready[slot], c // stages % 2)
                    ask_values(v_shared, n_shared, unit, slot, state_io, value)
                    finish_values(value, value_io)
                    T.wgmma_gemm(
                        value_io, A_shared[slot, :, :], value, transpose_B=True, clear_accum=True, policy=policy
                    )
                    for i, j in T.Parallel(BV, KP):
                        state[i, j] = state[i, j] * decay_shared[slot, j]
                    finish_values(value, value_io)
                    T.wgmma_gemm(value_io, k_shared[slot, :, :], state, policy=policy)
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(state, num_regs=KP // 2)
                    T.barrier_arrive(free[slot])
                    T.copy(state, state_io)
                if i_b < VB:
                    for i, j in T.Parallel(BV, KP):
                        local[i_s, i_h, v0 + i, j] = state[i, j]
                else:
                    for i, j in T.Parallel(BV, KP):
                        transition[i_s, i_h, k0 + i, j] = state[i, j]
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    if i_b >= VB:
                        for s, i, j in T.Parallel(stages, BT, BV):
                            v_shared[s, i, j] = 0
                        T.fence_proxy_async()
                    for c in T.serial(chunks):
                        slot = c % stages
                        i_t = first + c
                        T.barrier_wait(free[slot], (c // stages + 1) % 2)
                        load_lower(A, i_t, i_h, A_shared, slot, ready)
                        if i_b < VB:
                            load_values(v, v_shared, ready, slot, start + c * BT, end, i_h, v0)
                        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
                        T.barrier_arrive(ready[slot])

    return fwd_segment


def default(case: Case) -> FwdSegmentConfig:
    """Two warpgroups that multiply what one loads."""
    return prefer(case, FwdSegmentConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made of the chunks that are walked in, local and transition out; four products a chunk of each.

    Segments are about as long as each other, and those that end a sequence are not walked.
    """
    p, BT, NC = case.problem, case.BT, sizes["NC"]
    io = 4 if p.dtype == "fp32" else 2
    share = NC / max(sizes["NS"], NC)
    moved = sizes["tokens"] * p.HV * p.V * io + sizes["NT"] * p.HV * (BT * (BT * 3 // 4 + 2 * p.KP) * io + p.KP * 4)
    products = sizes["NT"] * p.HV * BT * (2 * p.V * (2 * p.K + BT) + 2 * p.K * 2 * p.K)
    states = NC * p.HV * (p.VP + p.KP) * p.KP * 4
    return Cost(bytes=int(share * moved) + states, flops=int(share * products))


STAGE = Stage(
    name="fwd_segment",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=FwdSegmentConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # state and values rounded to io a chunk; the recurrence contracts, so errors do not grow
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
    # a transition that gates let vanish errs by more of itself (0.3 at a norm of 1e-34); the identity's is 0.09
    weightless={"transition": 0.05},
)
