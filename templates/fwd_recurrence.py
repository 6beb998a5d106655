"""Recurrence for Hopper: the transposed state stays in registers, values and output in the same kernel.

    V'^T = V^T A^T + S^T w_neg^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

S^T is the accumulator of one product and, rounded, the register operand of others, so the state never goes through
shared memory; V^T is read transposed by the matrix unit. A warp keeps chunks coming through the tensor memory
accelerator, the others multiply. What prep computes of a chunk is all they read beside v.
Source: Kimi Linear, arXiv:2510.26692, section 3; the transposed form is derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Config, Cost, Stage, axis, prefer
from kda_tl.templates._chunks import join_chunks, split_chunks
from kda_tl.templates._tile import FP32_TOLERANCE, TL_DTYPE, annotate

INPUTS = {
    "v": "tokens HV V : io",
    "A": "NT HV BT BT : io",
    "Aqk": "NT HV BT BT : io",
    "w_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "seq_chunks": "N+1 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "o": "tokens HV V : io",
    "ht": "N HV K V : f32 ? final_state",
}


def reference(
    case: Case,
    *,
    v: torch.Tensor,
    A: torch.Tensor,
    Aqk: torch.Tensor,
    w_neg: torch.Tensor,
    qg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    h0: torch.Tensor | None,
    seq_chunks: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    p, dtype = case.problem, decay.dtype
    bounds = seq_chunks.tolist()
    values = split_chunks(v.to(dtype), chunk_tokens, case.BT)
    tiles, ht = [], []
    for n, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = decay.new_zeros((p.HV, p.KP, p.V))
        if h0 is not None:
            given = h0[n].transpose(-1, -2) if p.state_v_first else h0[n]
            state = torch.nn.functional.pad(given.to(dtype), (0, 0, 0, p.KP - p.K))
        for t in range(first, end):
            v_new = A[t].to(dtype) @ values[t] + w_neg[t].to(dtype) @ state
            tiles.append(qg[t].to(dtype) @ state + Aqk[t].to(dtype) @ v_new)
            state = decay[t][..., None] * state + kg[t].to(dtype).transpose(-1, -2) @ v_new
        state = state[:, : p.K]
        ht.append(state.transpose(-1, -2) if p.state_v_first else state)
    chunks = torch.stack(tiles) if tiles else values
    outputs = {"o": join_chunks(chunks, chunk_tokens, v.shape[0], p.V)}
    return outputs | ({"ht": torch.stack(ht)} if p.final_state else {})


WARPGROUP = 128
PRODUCER = 32  # threads of the warp that loads
REGISTERS = 240  # a multiplying thread's: with its group's loader at 24, what a multiprocessor has


@dataclass(frozen=True, kw_only=True)
class FwdRecurrenceConfig(Config):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    BV: int = axis(64, 64, 128)
    num_stages: int = axis(2, 2, 3)

    def reject(self, case: Case) -> str | None:
        """Hopper, 16-bit operands, dimensions in whole tiles of the matrix unit, and shared memory."""
        p = case.problem
        if case.device.sm != 90:
            return f"its products are instructions of sm_90, the device is {case.device.arch}"
        if p.intermediate_states:
            return "the states between chunks stay in registers: it cannot return them"
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

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, the output's, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + BT * self.BV * 2


def build(case: Case, config: FwdRecurrenceConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks in order."""
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = WARPGROUP * BV // 64
    rows = T.GemmWarpPolicy.FullRow
    NT, tokens, bounds = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("bounds")
    N = bounds - 1
    state_shape = "N HV V K" if p.state_v_first else "N HV K V"

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @T.prim_func
    def fwd_recurrence(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        A: annotate(case, INPUTS["A"], NT=NT),
        Aqk: annotate(case, INPUTS["Aqk"], NT=NT),
        w_neg: annotate(case, INPUTS["w_neg"], NT=NT),
        qg: annotate(case, INPUTS["qg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        h0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
        seq_chunks: annotate(case, INPUTS["seq_chunks"], **{"N+1": bounds}),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        o: annotate(case, OUTPUTS["o"], tokens=tokens),
        ht: annotate(case, f"{state_shape} : f32 ? final_state", N=N),
    ):
        with T.Kernel(N * HV * VB, threads=consumers + WARPGROUP) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first = seq_chunks[i_n]
            chunks = seq_chunks[i_n + 1] - first
            start = T.alloc_var("int32")
            end = T.alloc_var("int32")
            start = 0
            end = 0
            if chunks > 0:
                start = chunk_tokens[first, 0]
                end = chunk_tokens[first + chunks - 1, 0] + chunk_tokens[first + chunks - 1, 1]
            v_shared = T.alloc_shared((stages, BT, BV), io)
            A_shared = T.alloc_shared((stages, BT, BT), io)
            w_shared = T.alloc_shared((stages, BT, KP), io)
            q_shared = T.alloc_shared((stages, BT, KP), io)
            Aqk_shared = T.alloc_shared((stages, BT, BT), io)
            k_shared = T.alloc_shared((stages, BT, KP), io)
            decay_shared = T.alloc_shared((stages, KP), f32)
            o_shared = T.alloc_shared((BT, BV), io)
            state = T.alloc_fragment((BV, KP), f32)
            state_io = T.alloc_fragment((BV, KP), io)
            value = T.alloc_fragment((BV, BT), f32)
            value_io = T.alloc_fragment((BV, BT), io)
            output = T.alloc_fragment((BV, BT), f32)
            ready = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            free = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()

            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                if p.initial_state:
                    for i, j in T.Parallel(BV, KP):
                        state[i, j] = T.if_then_else(j < K, state_at(h0, i_n, i_h, j, v0 + i), 0.0)
                else:
                    T.clear(state)
                T.copy(state, state_io)
                for c in T.serial(chunks):
                    slot = c % stages
                    T.barrier_wait(ready[slot], c // stages % 2)
                    T.wgmma_gemm(
                        v_shared[slot, :, :],
                        A_shared[slot, :, :],
                        value,
                        transpose_A=True,
                        transpose_B=True,
                        clear_accum=True,
                        policy=rows,
                    )
                    T.wgmma_gemm(state_io, w_shared[slot, :, :], value, transpose_B=True, policy=rows)
                    T.wgmma_gemm(
                        state_io, q_shared[slot, :, :], output, transpose_B=True, clear_accum=True, policy=rows
                    )
                    for i, j in T.Parallel(BV, KP):
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
                    for i, j in T.Parallel(BV, BT):
                        o_shared[j, i] = T.cast(output[i, j], io)
                    for i, j in T.Parallel(BT, BV):
                        if start + c * BT + i < end:
                            o[start + c * BT + i, i_h, v0 + j] = o_shared[i, j]
                if p.final_state:
                    for i, j in T.Parallel(BV, KP):
                        if j < K:
                            if p.state_v_first:
                                ht[i_n, i_h, v0 + i, j] = state[i, j]
                            else:
                                ht[i_n, i_h, j, v0 + i] = state[i, j]
            else:
                T.set_max_nreg(24, 0)
                if thread < consumers + PRODUCER:
                    for c in T.serial(chunks):
                        slot = c % stages
                        i_t = first + c
                        left = start + c * BT
                        T.barrier_wait(free[slot], (c // stages + 1) % 2)
                        T.tma_copy(A[i_t, i_h, :, :], A_shared[slot, :, :], barrier=ready[slot])
                        if left + BT <= end:
                            T.tma_copy(
                                v[left : left + BT, i_h, v0 : v0 + BV], v_shared[slot, :, :], barrier=ready[slot]
                            )
                        else:  # rows of the next sequence would enter as 0 * v, and may be infinite
                            for i, j in T.Parallel(BT, BV):
                                v_shared[slot, i, j] = T.if_then_else(left + i < end, v[left + i, i_h, v0 + j], 0)
                            T.fence_proxy_async()
                        T.tma_copy(w_neg[i_t, i_h, :, :], w_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(qg[i_t, i_h, :, :], q_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(Aqk[i_t, i_h, :, :], Aqk_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
                        T.barrier_arrive(ready[slot])

    return fwd_recurrence


def default(case: Case) -> FwdRecurrenceConfig:
    """One warpgroup that multiplies."""
    return prefer(case, FwdRecurrenceConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made in; o out; five products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = 2 * sizes["tokens"] * p.HV * p.V * io + chunks * (BT * (2 * BT + 3 * p.KP) * io + p.KP * 4)
    states = sizes["N"] * p.HV * p.K * p.V * 4 * (p.initial_state + p.final_state)
    return Cost(bytes=moved + states, flops=chunks * BT * p.V * (6 * p.K + 2 * BT))


STAGE = Stage(
    name="fwd_recurrence",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=FwdRecurrenceConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # state, values and the result rounded to io a chunk; the recurrence contracts, so errors do not grow
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
