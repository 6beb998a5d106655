"""The reverse recurrence for Hopper: gradients of values and states, the transposed state's in registers.

    dV'^T = dO^T Aqk + dS^T kg^T        dX^T = dV'^T A        dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg

from V' = A X, X = V + k_neg S, O = qg S + Aqk V' and S' = diag(decay) S + kg^T V'; dX is the gradient of v. Chunks run
from the last to the first, dS is that of the state after the chunk, and goes to memory before it changes.
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
    WARPGROUP,
    RecurrenceConfig,
    find_chunks,
    finish_values,
    layout_lower,
    load_lower,
    load_values,
    put_constants,
    put_output,
    read_state,
)
from kda_tl.templates._scan import choose_width, put_tiles
from kda_tl.templates._tile import FP32_TOLERANCE, TL_DTYPE, annotate

INPUTS = {
    "do": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "dht": "N HV K V : f32 ? final_state",
    "segments": "NS 4 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "dv": "tokens HV V : io",
    "dstates": "NT HV V KP : io",
    "dh0": "N HV K V : f32 ? initial_state",
}


def reference(
    case: Case,
    *,
    do: torch.Tensor,
    A: torch.Tensor,
    Aqk: torch.Tensor,
    k_neg: torch.Tensor,
    qg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    dht: torch.Tensor | None,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    p, dtype = case.problem, decay.dtype
    given = split_chunks(do.to(dtype), chunk_tokens, case.BT).mT
    dx = torch.zeros_like(given)
    dstates = given.new_zeros((*given.shape[:2], p.V, p.KP))
    dh0 = {}
    for first, count, n, _ in segments.tolist():
        dstate = read_state(case, dht, n, decay)
        for t in reversed(range(first, first + count)):
            dstates[t] = dstate
            dvalues = given[t] @ unpack_lower(Aqk[t].to(dtype)) + dstate @ kg[t].to(dtype).mT
            dx[t] = dvalues @ unpack_lower(A[t].to(dtype))
            dstate = dstate * decay[t][:, None] + given[t] @ qg[t].to(dtype) + dx[t] @ k_neg[t].to(dtype)
        dh0[n] = dstate[..., : p.K] if p.state_v_first else dstate[..., : p.K].mT
    found = {"dv": join_chunks(dx.mT, chunk_tokens, do.shape[0], p.V), "dstates": dstates}
    return found | ({"dh0": torch.stack([dh0[n] for n in sorted(dh0)])} if p.initial_state else {})


@dataclass(frozen=True, kw_only=True)
class BwdScanConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, a unit matrix, and two barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 16
        return self.num_stages * stage + (self.BV * KP + BT * (self.BV + OUTPUT_PAD) + BT * BT) * 2


# A thread's: what multiplies holds a state's gradient, what loads holds nothing.
REGISTERS, LOADER_REGISTERS = 232, 40


def build(case: Case, config: BwdScanConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks from the last to the first."""
    p, BT, BV, stages = case.problem, case.BT, config.BV, config.num_stages
    HV, K, KP, VB = p.HV, p.K, p.KP, p.V // config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    consumers = config.consumers
    policy = T.GemmWarpPolicy.FullRow
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")
    state_shape = "N HV V K" if p.state_v_first else "N HV K V"

    @T.prim_func
    def bwd_scan(
        d_o: annotate(case, INPUTS["do"], tokens=tokens),  # do is a word of C
        A: annotate(case, INPUTS["A"], NT=NT),
        Aqk: annotate(case, INPUTS["Aqk"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        qg: annotate(case, INPUTS["qg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        dht: annotate(case, f"{state_shape} : f32 ? final_state", N=N),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        dv: annotate(case, OUTPUTS["dv"], tokens=tokens),
        dstates: annotate(case, OUTPUTS["dstates"], NT=NT),
        dh0: annotate(case, f"{state_shape} : f32 ? initial_state", N=N),
    ):
        with T.Kernel(NS * HV * VB, threads=consumers + WARPGROUP) as i_block:
            i_s = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first, chunks, start, end = find_chunks(segments, chunk_tokens, i_s)
            do_shared = T.alloc_shared((stages, BT, BV), io)
            A_shared = T.alloc_shared((stages, BT, BT), io)
            Aqk_shared = T.alloc_shared((stages, BT, BT), io)
            n_shared = T.alloc_shared((stages, BT, KP), io)
            q_shared = T.alloc_shared((stages, BT, KP), io)
            k_shared = T.alloc_shared((stages, BT, KP), io)
            decay_shared = T.alloc_shared((stages, KP), f32)
            state_shared = T.alloc_shared((BV, KP), io)
            dv_shared = T.alloc_shared((BT, BV + OUTPUT_PAD), io)
            state = T.alloc_fragment((BV, KP), f32)
            state_io = T.alloc_fragment((BV, KP), io)
            value = T.alloc_fragment((BV, BT), f32)
            value_io = T.alloc_fragment((BV, BT), io)
            ready = T.alloc_barrier(arrive_count=[PRODUCER] * stages)
            free = T.alloc_barrier(arrive_count=[consumers] * stages)
            thread = T.get_thread_binding()
            T.annotate_layout(layout_lower(A_shared, Aqk_shared))
            put_constants([A_shared, Aqk_shared])

            if thread < consumers:
                T.set_max_nreg(REGISTERS, 1)
                if p.final_state:
                    i_n = segments[i_s, 2]
                    for i, j in T.Parallel(BV, KP):
                        if p.state_v_first:
                            state[i, j] = T.if_then_else(j < K, dht[i_n, i_h, v0 + i, j], 0.0)
                        else:
                            state[i, j] = T.if_then_else(j < K, dht[i_n, i_h, j, v0 + i], 0.0)
                else:
                    T.clear(state)
                T.copy(state, state_io)
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
                    i_n = segments[i_s, 2]
                    for i, j in T.Parallel(BV, KP):
                        if j < K:
                            if p.state_v_first:
                                dh0[i_n, i_h, v0 + i, j] = state[i, j]
                            else:
                                dh0[i_n, i_h, j, v0 + i] = state[i, j]
            else:
                T.set_max_nreg(LOADER_REGISTERS, 0)
                if thread < consumers + PRODUCER:
                    for c in T.serial(chunks):
                        slot = c % stages
                        i_t = first + chunks - 1 - c
                        T.barrier_wait(free[slot], (c // stages + 1) % 2)
                        load_values(d_o, do_shared, ready, slot, start + (chunks - 1 - c) * BT, end, i_h, v0)
                        load_lower(Aqk, i_t, i_h, Aqk_shared, slot, ready)
                        T.tma_copy(kg[i_t, i_h, :, :], k_shared[slot, :, :], barrier=ready[slot])
                        load_lower(A, i_t, i_h, A_shared, slot, ready)
                        T.tma_copy(qg[i_t, i_h, :, :], q_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(k_neg[i_t, i_h, :, :], n_shared[slot, :, :], barrier=ready[slot])
                        T.tma_copy(decay[i_t, i_h, :], decay_shared[slot, :], barrier=ready[slot])
                        T.barrier_arrive(ready[slot])

    return bwd_scan


def default(case: Case) -> BwdScanConfig:
    """Two warpgroups where heads' 64-channel blocks exceed the multiprocessors."""
    return prefer(case, BwdScanConfig(BV=choose_width(case)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """do and what prep made in; dv and the states' gradients out; five products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = 2 * sizes["tokens"] * p.HV * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    kept = chunks * p.V * p.KP * io + sizes["N"] * p.HV * p.K * p.V * 4 * (p.initial_state + p.final_state)
    return Cost(bytes=moved + kept, flops=chunks * BT * p.V * (6 * p.K + 4 * BT))


STAGE = Stage(
    name="bwd_scan",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=BwdScanConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # the state's gradient, dv and products' operands rounded to io a chunk; the recurrence contracts, as forward
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
