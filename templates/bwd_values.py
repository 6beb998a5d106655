"""Values and states of all chunks again, for gradients on Hopper: the recurrence, which keeps what it passes through.

    V'^T = (V^T + S^T k_neg^T) A^T        S^T <- S^T diag(decay) + V'^T kg

The transposed state stays in registers, as in fwd_recurrence; it goes to memory as it is before each chunk, and so do
the transposed values, through shared memory and the tensor memory accelerator.
Source: Kimi Linear, arXiv:2510.26692, section 3; the transposed form is derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Cost, Stage, prefer
from kda_tl.templates._chunks import split_chunks, unpack_lower
from kda_tl.templates._recurrence import (
    PRODUCER,
    WARPGROUP,
    RecurrenceConfig,
    ask_values,
    find_chunks,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    put_constants,
    read_state,
)
from kda_tl.templates._scan import choose_width, put_tiles
from kda_tl.templates._tile import FP32_TOLERANCE, TL_DTYPE, annotate

INPUTS = {
    "v": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "segments": "NS 4 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "values": "NT HV V BT : io",
    "states": "NT HV V KP : io",
}


def reference(
    case: Case,
    *,
    v: torch.Tensor,
    A: torch.Tensor,
    k_neg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    h0: torch.Tensor | None,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    dtype = decay.dtype
    given = split_chunks(v.to(dtype), chunk_tokens, case.BT)
    values = torch.zeros_like(given).mT.contiguous()
    states = given.new_zeros((*given.shape[:2], case.problem.V, case.problem.KP))
    for first, count, n, _ in segments.tolist():
        state = read_state(case, h0, n, decay)
        for t in range(first, first + count):
            states[t] = state
            v_new = unpack_lower(A[t].to(dtype)) @ (given[t] + k_neg[t].to(dtype) @ state.mT)
            values[t] = v_new.mT
            state = state * decay[t][:, None] + v_new.mT @ kg[t].to(dtype)
    return {"values": values, "states": states}


@dataclass(frozen=True, kw_only=True)
class BwdValuesConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, a unit matrix, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + BT + 2 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * (BT + KP) + BT * BT) * 2


# A thread's: what multiplies holds a state, what loads holds nothing.
REGISTERS, LOADER_REGISTERS = 232, 40


def build(case: Case, config: BwdValuesConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks in order."""
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    policy = T.GemmWarpPolicy.FullRow
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")
    state_shape = "N HV V K" if p.state_v_first else "N HV K V"

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @T.prim_func
    def bwd_values(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        A: annotate(case, INPUTS["A"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        h0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        values: annotate(case, OUTPUTS["values"], NT=NT),
        states: annotate(case, OUTPUTS["states"], NT=NT),
    ):
        with T.Kernel(NS * HV * VB, threads=consumers + WARPGROUP) as i_block:
            i_s = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
            v_shared = T.alloc_shared((stages, BT, BV), io)
            A_shared = T.alloc_shared((stages, BT, BT), io)
            n_shared = T.alloc_shared((stages, BT, KP), io)
            k_shared = T.alloc_shared((stages, BT, KP), io)
            decay_shared = T.alloc_shared((stages, KP), f32)
            unit = T.alloc_shared((BT, BT), io)
            state_shared = T.alloc_shared((BV, KP), io)
            value_shared = T.alloc_shared((BV, BT), io)
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
                if p.initial_state:
                    i_n = segments[i_s, 2]
                    for i, j in T.Parallel(BV, KP):
                        state[i, j] = T.if_then_else(j < K, state_at(h0, i_n, i_h, j, v0 + i), 0.0)
                else:
                    T.clear(state)
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
                    put_tiles(
                        (state_io, value_io),
                        (state_shared, value_shared),
                        (states, values),
                        first + c,
                        i_h,
                        v0,
                        consumers,
                    )
                    T.wait_wgmma(0)
                    T.warpgroup_fence_operand(state, num_regs=KP // 2)
                    T.barrier_arrive(free[slot])
                    T.copy(state, state_io)
                T.tma_store_wait(0)
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    for c in T.serial(chunks):
                        slot = c % stages
                        i_t = first + c
                        T.barrier_wait(free[slot], (c // stages + 1) % 2)
                        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=ready[slot])
                        load_values(v, v_shared, ready, slot, start + c * BT, end, i_h, v0)
                        load_lower(A, i_t, i_h, A_shared, slot, ready)
                        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
                        T.barrier_arrive(ready[slot])

    return bwd_values


def default(case: Case) -> BwdValuesConfig:
    """Two warpgroups where heads' 64-channel blocks exceed the multiprocessors."""
    return prefer(case, BwdValuesConfig(BV=choose_width(case)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made in; values and states out; four products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = sizes["tokens"] * p.HV * p.V * io + chunks * (BT * (BT * 3 // 4 + 2 * p.KP) * io + p.KP * 4)
    kept = chunks * p.V * (BT + p.KP) * io + sizes["N"] * p.HV * p.K * p.V * 4 * p.initial_state
    return Cost(bytes=moved + kept, flops=chunks * BT * p.V * (4 * p.K + 2 * BT))


STAGE = Stage(
    name="bwd_values",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=BwdValuesConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # state and values rounded to io a chunk; the recurrence contracts, so errors do not grow
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
