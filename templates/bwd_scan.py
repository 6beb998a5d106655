"""Scans in both directions for Hopper, two halves of one grid: values and states again, and gradients of both.

    V'^T = (V^T + S^T k_neg^T) A^T              S^T <- S^T diag(decay) + V'^T kg                       forwards
    dV'^T = dO^T Aqk + dS^T kg^T                dX^T = dV'^T A
                                                dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg        backwards

from V' = A X, X = V + k_neg S, O = qg S + Aqk V' and S' = diag(decay) S + kg^T V'; dX is the gradient of v. Neither
needs the other, so both run at once where heads leave multiprocessors idle. The transposed state, or its gradient,
stays in registers, as in fwd_recurrence; S goes to memory as it is before each chunk, dS as it is after it.
Source: autograd of Kimi Linear, arXiv:2510.26692, section 3, in the form of fwd_recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Cost, Stage, prefer
from kda_tl.templates._chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates._recurrence import (
    OUTPUT_PAD,
    PRODUCER,
    ROWS,
    WARPGROUP,
    RecurrenceConfig,
    ask_values,
    find_chunks,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    put_constants,
    put_output,
    read_state,
)
from kda_tl.templates._scan import put_tiles
from kda_tl.templates._tile import FP32_TOLERANCE, TL_DTYPE, annotate

INPUTS = {
    "v": "tokens HV V : io",
    "do": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "dht": "N HV K V : f32 ? final_state",
    "segments": "NS 4 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "values": "NT HV V BT : io",
    "states": "NT HV V KP : io",
    "dv": "tokens HV V : io",
    "dstates": "NT HV V KP : io",
    "dh0": "N HV K V : f32 ? initial_state",
}


def reference(
    case: Case,
    *,
    v: torch.Tensor,
    do: torch.Tensor,
    A: torch.Tensor,
    Aqk: torch.Tensor,
    k_neg: torch.Tensor,
    qg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    h0: torch.Tensor | None,
    dht: torch.Tensor | None,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    p, dtype = case.problem, decay.dtype
    given, d_o = (split_chunks(x.to(dtype), chunk_tokens, case.BT).mT for x in (v, do))
    A, Aqk = unpack_lower(A.to(dtype)), unpack_lower(Aqk.to(dtype))
    k_neg, qg, kg = (x.to(dtype) for x in (k_neg, qg, kg))
    values, dx = torch.zeros_like(given), torch.zeros_like(given)
    states = given.new_zeros((*given.shape[:2], p.V, p.KP))
    dstates, dh0 = torch.zeros_like(states), {}
    for first, count, n, _ in segments.tolist():
        state, dstate = (read_state(case, x, n, decay) for x in (h0, dht))
        for t in range(first, first + count):
            states[t] = state
            values[t] = (given[t] + state @ k_neg[t].mT) @ A[t].mT
            state = state * decay[t][:, None] + values[t] @ kg[t]
        for t in reversed(range(first, first + count)):
            dstates[t] = dstate
            dx[t] = (d_o[t] @ Aqk[t] + dstate @ kg[t].mT) @ A[t]
            dstate = dstate * decay[t][:, None] + d_o[t] @ qg[t] + dx[t] @ k_neg[t]
        dh0[n] = dstate[..., : p.K] if p.state_v_first else dstate[..., : p.K].mT
    dv = join_chunks(dx.mT, chunk_tokens, do.shape[0], p.V)
    found = {"values": values, "states": states, "dv": dv, "dstates": dstates}
    return found | ({"dh0": torch.stack([dh0[n] for n in sorted(dh0)])} if p.initial_state else {})


@dataclass(frozen=True, kw_only=True)
class BwdScanConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * (KP + BT) + BT * (self.BV + OUTPUT_PAD)) * 2


# A thread's: what multiplies holds a state or its gradient, what loads holds nothing.
REGISTERS, LOADER_REGISTERS = 232, 40


def build(case: Case, config: BwdScanConfig) -> Any:
    """The kernel: one thread block a (direction, sequence, value head, BV channels)."""
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    policy = T.GemmWarpPolicy.FullRow
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")
    state_shape = "N HV V K" if p.state_v_first else "N HV K V"

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @T.macro
    def begin(state, state_io, given, there, i_n, i_h, v0):
        """A state from memory, or zeros, and its rounded copy."""
        if there:
            for i, j in T.Parallel(BV, KP):
                state[i, j] = T.if_then_else(j < K, state_at(given, i_n, i_h, j, v0 + i), 0.0)
        else:
            T.clear(state)
        T.copy(state, state_io)

    @T.macro
    def multiply_forwards(first, chunks, at, h0, tensors, tiles, kept, barriers):
        """Values and states from the first chunk to the last."""
        i_n, i_h, v0 = at
        values, states = tensors
        v_shared, A_shared, unit_shared, n_shared, _, k_shared, decay_shared = tiles
        state_shared, value_shared, _ = kept
        ready, free = barriers
        state = T.alloc_fragment((BV, KP), f32)
        state_io = T.alloc_fragment((BV, KP), io)
        value = T.alloc_fragment((BV, BT), f32)
        value_io = T.alloc_fragment((BV, BT), io)
        begin(state, state_io, h0, p.initial_state, i_n, i_h, v0)
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
            shared = (state_shared, value_shared)
            put_tiles((state_io, value_io), shared, (states, values), first + c, i_h, v0, consumers)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(state, num_regs=KP // 2)
            T.barrier_arrive(free[slot])
            T.copy(state, state_io)
        T.tma_store_wait(0)

    @T.macro
    def multiply_backwards(first, chunks, start, end, at, dht, tensors, tiles, kept, barriers):
        """Their gradients from the last chunk to the first."""
        i_n, i_h, v0 = at
        dv, dstates, dh0 = tensors
        do_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared = tiles
        state_shared, _, dv_shared = kept
        ready, free = barriers
        state = T.alloc_fragment((BV, KP), f32)
        state_io = T.alloc_fragment((BV, KP), io)
        value = T.alloc_fragment((BV, BT), f32)
        value_io = T.alloc_fragment((BV, BT), io)
        begin(state, state_io, dht, p.final_state, i_n, i_h, v0)
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
            put_tiles((state_io,), (state_shared,), (dstates,), first + i_c, i_h, v0, consumers)
            for i, j in T.Parallel(BV, KP):
                state[i, j] = state[i, j] * decay_shared[slot, j]
            T.wgmma_gemm(do_shared[slot, :, :], q_shared[slot, :, :], state, transpose_A=True, policy=policy)
            T.wait_wgmma(1)
            T.warpgroup_fence_operand(value, num_regs=BT // 2)
            T.copy(value, value_io)
            T.wgmma_gemm(value_io, n_shared[slot, :, :], state, policy=policy)
            put_output(value_io, dv_shared, dv, start + i_c * BT, start, end, i_h, v0)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(state, num_regs=KP // 2)
            T.barrier_arrive(free[slot])
            T.copy(state, state_io)
        T.tma_store_wait(0)
        if p.initial_state:
            for i, j in T.Parallel(BV, KP):
                if j < K:
                    if p.state_v_first:
                        dh0[i_n, i_h, v0 + i, j] = state[i, j]
                    else:
                        dh0[i_n, i_h, j, v0 + i] = state[i, j]

    @T.macro
    def load_chunk(x, factors, tiles, barriers, c, i_t, row, end, i_h, v0, backwards):
        """What a direction needs of a chunk, what is multiplied first before the rest."""
        A, Aqk, k_neg, qg, kg, decay = factors
        x_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared = tiles
        ready, free = barriers
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

    @T.prim_func
    def bwd_scan(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        d_o: annotate(case, INPUTS["do"], tokens=tokens),  # do is a word of C
        A: annotate(case, INPUTS["A"], NT=NT),
        Aqk: annotate(case, INPUTS["Aqk"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        qg: annotate(case, INPUTS["qg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        h0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
        dht: annotate(case, f"{state_shape} : f32 ? final_state", N=N),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        values: annotate(case, OUTPUTS["values"], NT=NT),
        states: annotate(case, OUTPUTS["states"], NT=NT),
        dv: annotate(case, OUTPUTS["dv"], tokens=tokens),
        dstates: annotate(case, OUTPUTS["dstates"], NT=NT),
        dh0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
    ):
        with T.Kernel(2 * NS * HV * VB, threads=consumers + WARPGROUP) as i_block:
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

            at = (i_n, i_h, v0)
            tiles = (x_shared, A_shared, Aqk_shared, n_shared, q_shared, k_shared, decay_shared)
            kept = (state_shared, value_shared, dv_shared)
            factors, barriers = (A, Aqk, k_neg, qg, kg, decay), (ready, free)
            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                if back:
                    multiply_backwards(first, chunks, start, end, at, dht, (dv, dstates, dh0), tiles, kept, barriers)
                else:
                    multiply_forwards(first, chunks, at, h0, (values, states), tiles, kept, barriers)
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
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

    return bwd_scan


def default(case: Case) -> BwdScanConfig:
    """Two warpgroups where one direction's blocks of 64 channels are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // ROWS) > case.device.num_sms
    return prefer(case, BwdScanConfig(BV=2 * ROWS if wide else ROWS))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, do and what prep made in; values, states and gradients out; ten products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks, rows = sizes["NT"] * p.HV, sizes["tokens"] * p.HV
    moved = 3 * rows * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    kept = chunks * p.V * (BT + 2 * p.KP) * io
    ends = sizes["N"] * p.HV * p.K * p.V * 4 * (2 * p.initial_state + p.final_state)
    return Cost(bytes=moved + kept + ends, flops=chunks * BT * p.V * (10 * p.K + 6 * BT))


STAGE = Stage(
    name="bwd_scan",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=BwdScanConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # states, values, their gradients and products' operands rounded to io a chunk; both recurrences contract
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
