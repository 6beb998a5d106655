"""State recurrence over the chunks of a sequence, and the values corrected by what the state already knew.

    v_new = u - w S            S <- 2^(G_last) S + kg^T v_new            h[chunk] = S before the chunk

The state stays in fp32 registers; its copy for the matrix unit is rounded to the io dtype.
Source: Kimi Linear, arXiv:2510.26692, section 3 (as FLA v0.6.0 ``fla/ops/common/chunk_delta_h.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, avoid_wgmma, prim_func, rest_bytes

INPUTS = {
    "w": "NT HV BT KP : io",
    "u": "NT HV BT VP : io",
    "kg": "NT HV BT KP : io",
    "g_cumsum": "NT HV BT GP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "seq_chunks": "N+1 : i32",
}
OUTPUTS = {
    "h": "NT HV KP VP : io",
    "v_new": "NT HV BT VP : io",
    "ht": "N HV K V : f32 ? final_state",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    p, dtype = case.problem, x.g_cumsum.dtype
    bounds = x.seq_chunks.tolist()
    h, v_new, ht = [], [], []
    for n, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = x.g_cumsum.new_zeros((p.HV, p.KP, p.VP))
        if x.h0 is not None:
            given = x.h0[n].transpose(-1, -2) if p.state_v_first else x.h0[n]
            state = torch.nn.functional.pad(given.to(dtype), (0, p.VP - p.V, 0, p.KP - p.K))
        for t in range(first, end):
            h.append(state)
            v_new.append(x.u[t].to(dtype) - x.w[t].to(dtype) @ state)
            state = (
                torch.exp2(x.g_cumsum[t, :, -1])[..., None] * state + x.kg[t].to(dtype).transpose(-1, -2) @ v_new[-1]
            )
        state = state[:, : p.K, : p.V]
        ht.append(state.transpose(-1, -2) if p.state_v_first else state)
    outputs = {
        "h": torch.stack(h) if h else x.g_cumsum.new_zeros((0, p.HV, p.KP, p.VP)),
        "v_new": torch.stack(v_new) if h else x.g_cumsum.new_zeros((0, p.HV, case.BT, p.VP)),
    }
    return outputs | ({"ht": torch.stack(ht)} if p.final_state else {})


THREADS = 128


@dataclass(frozen=True, kw_only=True)
class FwdStateConfig(Config):
    """BV: value channels a block owns; num_stages: chunks whose tiles are loaded ahead.

    A block has one warpgroup. With two, one plan was off by 1.1e-2 and another with the same state config right
    (BV=128, 96 heads, H200, tilelang 0.1.15). A race on the unpipelined copy of the state is suspected, not shown.
    """

    BV: int = tunable(32, 16, 32, 64, 128)
    num_stages: int = tunable(2, 1, 2, 3, 4)

    def reject(self, case: Case) -> str | None:
        """BV divides; the pipelined tiles fit shared memory; the state fits the registers."""
        p = case.problem
        if p.VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {p.VP}"
        if case.device.kind == "cpu":
            return None if self.num_stages == 2 else "num_stages has no meaning on the CPU target"
        if THREADS // 32 > (case.BT // 16) * (self.BV // 8):
            return f"BV={self.BV} leaves {THREADS // 32} warps less than a 16 x 8 tile each of {case.BT} rows"
        io = 4 if p.dtype == "fp32" else 2
        stage = case.BT * (2 * p.KP + self.BV) * io + (0 if p.scalar_gate else p.KP * 4)
        smem = self.num_stages * stage + (p.KP + case.BT) * self.BV * io
        rows, columns = (case.BT, p.KP), (p.KP, self.BV)
        smem += rest_bytes(case, rows, columns, rows, (case.BT, self.BV))
        if smem > case.device.smem_bytes:
            return f"BV={self.BV}, num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        registers = (p.KP + case.BT) * self.BV // THREADS
        if registers > 200:
            return f"BV={self.BV} keeps {registers} registers of state a thread: use a smaller BV"
        return None


def build(case: Case, config: FwdStateConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks in order."""
    p, BT, BV = case.problem, case.BT, config.BV
    HV, K, V, KP = p.HV, p.K, p.V, p.KP
    VB = p.VP // BV
    tile = Tile.of(case)
    # The C target finds a size only where it stands alone in a shape, so the sequences are counted by their bounds.
    NT, bounds = T.dynamic("NT"), T.dynamic("bounds")
    N = bounds - 1

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, N=N, **{"N+1": bounds})
    def fwd_state(w, u, kg, g_cumsum, h0, seq_chunks, h, v_new, ht):
        with tile.kernel(N * HV * VB, threads=THREADS) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            first = seq_chunks[i_n]
            chunks = seq_chunks[i_n + 1] - first
            state = tile.fragment((KP, BV))
            state_shared = tile.shared((KP, BV))
            w_shared = tile.shared((BT, KP))
            kg_shared = tile.shared((BT, KP))
            u_shared = tile.shared((BT, BV))
            decay = tile.fragment((1,)) if p.scalar_gate else tile.shared((KP,), "float32")
            value = tile.fragment((BT, BV))
            value_shared = tile.shared((BT, BV))
            if p.initial_state:
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = T.if_then_else((i < K) & (v0 + j < V), state_at(h0, i_n, i_h, i, v0 + j), 0.0)
            else:
                T.clear(state)
            for i_c in tile.pipelined(chunks, num_stages=config.num_stages):
                T.copy(w[first + i_c, i_h, :, :], w_shared)
                T.copy(u[first + i_c, i_h, :, v0 : v0 + BV], u_shared)
                T.copy(kg[first + i_c, i_h, :, :], kg_shared)
                if p.scalar_gate:
                    decay[0] = g_cumsum[first + i_c, i_h, BT - 1, 0]
                else:
                    T.copy(g_cumsum[first + i_c, i_h, BT - 1, :], decay)
                T.copy(state, state_shared)
                T.copy(state_shared, h[first + i_c, i_h, :, v0 : v0 + BV])
                tile.gemm(w_shared, state_shared, value, clear_accum=True)
                for i, j in tile.parallel(BT, BV):
                    value[i, j] = T.cast(u_shared[i, j], "float32") - value[i, j]
                T.copy(value, value_shared)
                T.copy(value_shared, v_new[first + i_c, i_h, :, v0 : v0 + BV])
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = state[i, j] * T.exp2(decay[0 if p.scalar_gate else i])
                tile.gemm(kg_shared, value_shared, state, transpose_A=True)
            if p.final_state:
                for i, j in tile.parallel(KP, BV):
                    if (i < K) & (v0 + j < V):
                        if p.state_v_first:
                            ht[i_n, i_h, v0 + j, i] = state[i, j]
                        else:
                            ht[i_n, i_h, i, v0 + j] = state[i, j]

    return fwd_state


def default(case: Case) -> FwdStateConfig:
    """Many thread blocks with little state each; one stage where shared memory is short."""
    return first_valid(case, *(FwdStateConfig(BV=BV, num_stages=n) for n in (2, 1) for BV in (32, 16)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """w, u, kg and one cumsum row in; h and v_new out; two products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = chunks * (BT * (2 * p.KP + 2 * p.VP) * io + p.GP * 4 + p.KP * p.VP * io)
    states = sizes["N"] * p.HV * p.K * p.V * 4 * (p.initial_state + p.final_state)
    return Cost(bytes=moved + states, flops=4 * chunks * BT * p.K * p.V)


# state, v_new and both products' operands rounded to io a chunk; the recurrence contracts, so errors do not grow
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "fwd_state", INPUTS, OUTPUTS, FwdStateConfig, build, reference, default, cost, TOLERANCE, passes=avoid_wgmma
)
