"""State recurrence, backward: the gradient of the state, from the last chunk of a sequence to its first.

    dv_new = dv_local + kg dS'           dS = 2^(G_last) dS' + qg^T do - w^T dv_new           dh[chunk] = dS'

dS' is the gradient of the state after the chunk: dht after the last one, zeros where no final state was asked for. The
dS of the first chunk is dh0; a sequence without tokens hands dht through. The gradient stays in fp32 registers; its
copy for the matrix unit is rounded to the io dtype. Rows past the end of a sequence and padding channels are zero.
Source: the chain rule on fwd_state and fwd_output, Kimi Linear, arXiv:2510.26692, section 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, avoid_wgmma, prim_func, rest_bytes

INPUTS = {
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "w": "NT HV BT KP : io",
    "do": "tokens HV V : io",
    "dv_local": "NT HV BT VP : io",
    "g_cumsum": "NT HV BT GP : f32",
    "dht": "N HV K V : f32 ? final_state",
    "seq_chunks": "N+1 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "dh": "NT HV KP VP : io",
    "dv_new": "NT HV BT VP : io",
    "dh0": "N HV K V : f32 ? initial_state",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    qg, kg, w, dv_local = x.qg, x.kg, x.w, x.dv_local
    p, dtype = case.problem, x.g_cumsum.dtype
    qg, kg, w, dv_local = (y.to(dtype) for y in (qg, kg, w, dv_local))
    read = qg.transpose(-1, -2) @ split_chunks(x.do.to(dtype), x.chunk_tokens, case.BT, width=p.VP)  # by the queries
    decay = torch.exp2(x.g_cumsum[:, :, -1])[..., None]
    dh, dv_new = torch.empty_like(read), torch.empty_like(dv_local)
    bounds = x.seq_chunks.tolist()
    dh0 = []
    for n, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        dstate = x.g_cumsum.new_zeros((p.HV, p.KP, p.VP))
        if x.dht is not None:
            given = x.dht[n].transpose(-1, -2) if p.state_v_first else x.dht[n]
            dstate = torch.nn.functional.pad(given.to(dtype), (0, p.VP - p.V, 0, p.KP - p.K))
        for t in reversed(range(first, end)):
            dh[t] = dstate
            dv_new[t] = dv_local[t] + kg[t] @ dstate
            dstate = decay[t] * dstate + read[t] - w[t].transpose(-1, -2) @ dv_new[t]
        dstate = dstate[:, : p.K, : p.V]
        dh0.append(dstate.transpose(-1, -2) if p.state_v_first else dstate)
    return {"dh": dh, "dv_new": dv_new} | ({"dh0": torch.stack(dh0)} if p.initial_state else {})


THREADS = 128


@dataclass(frozen=True, kw_only=True)
class BwdStateConfig(Config):
    """BV: value channels a block owns; num_stages: chunks whose tiles are loaded ahead.

    A block has one warpgroup, as in fwd_state, where two are suspected to race.
    """

    BV: int = tunable(32, 16, 32, 64, 128)
    num_stages: int = tunable(2, 1, 2, 3, 4)

    def reject(self, case: Case) -> str | None:
        """BV divides; the pipelined tiles fit shared memory; the state's gradient fits the registers."""
        p = case.problem
        if p.VP % self.BV:
            return f"BV={self.BV} does not divide the padded head dimension {p.VP}"
        if case.device.kind == "cpu":
            return None if self.num_stages == 2 else "num_stages has no meaning on the CPU target"
        if THREADS // 32 > (case.BT // 16) * (self.BV // 8):
            return f"BV={self.BV} leaves {THREADS // 32} warps less than a 16 x 8 tile each of {case.BT} rows"
        io = 4 if p.dtype == "fp32" else 2
        ahead = [case.BT * p.KP * io] * 3 + [case.BT * self.BV * io, 0 if p.scalar_gate else p.KP * 4]
        once = [p.KP * self.BV * io] + [case.BT * self.BV * io] * 2
        tiles = [self.num_stages * size for size in ahead] + once
        smem = sum(-(-size // 1024) * 1024 for size in tiles)  # every tile starts at a multiple of 1024 bytes
        values, state = [(case.BT, self.BV)] * 2, (p.KP, self.BV)
        smem += rest_bytes(case, *[(case.BT, p.KP)] * 3, state, *values)
        if smem > case.device.smem_bytes:
            return f"BV={self.BV}, num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        registers = ((p.KP + case.BT) * 4 + case.BT * io) * self.BV // (4 * THREADS)  # 224 spill, 192 do not
        if registers > 200:
            return f"BV={self.BV} keeps {registers} registers of state and do a thread: use a smaller BV"
        return None


def build(case: Case, config: BwdStateConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks from the last to the first."""
    p, BT, BV = case.problem, case.BT, config.BV
    HV, K, V, KP = p.HV, p.K, p.V, p.KP
    VB = p.VP // BV
    tile = Tile.of(case)
    # The C target finds a size only where it stands alone in a shape, so the sequences are counted by their bounds.
    tokens, NT, bounds = T.dynamic("tokens"), T.dynamic("NT"), T.dynamic("bounds")
    N = bounds - 1

    def state_at(states, n, i_h, row, column):
        return states[n, i_h, column, row] if p.state_v_first else states[n, i_h, row, column]

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, tokens=tokens, N=N, **{"N+1": bounds})
    def bwd_state(qg, kg, w, d_o, dv_local, g_cumsum, dht, seq_chunks, chunk_tokens, dh, dv_new, dh0):
        with tile.kernel(N * HV * VB, threads=THREADS) as i_block:
            i_n = i_block // (HV * VB)
            i_h = i_block // VB % HV
            v0 = i_block % VB * BV
            last = seq_chunks[i_n + 1] - 1
            chunks = seq_chunks[i_n + 1] - seq_chunks[i_n]
            start = T.if_then_else(chunks > 0, chunk_tokens[last, 0], 0)  # of the last chunk; the others are full
            end = T.if_then_else(chunks > 0, start + chunk_tokens[last, 1], 0)
            state = tile.fragment((KP, BV))
            state_shared = tile.shared((KP, BV))
            qg_shared = tile.shared((BT, KP))
            kg_shared = tile.shared((BT, KP))
            w_shared = tile.shared((BT, KP))
            do_frag = tile.fragment((BT, BV), tile.io)
            do_shared = tile.shared((BT, BV))
            dv_shared = tile.shared((BT, BV))
            decay = tile.fragment((1,)) if p.scalar_gate else tile.shared((KP,), "float32")
            value = tile.fragment((BT, BV))
            value_shared = tile.shared((BT, BV))
            if p.final_state:
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = T.if_then_else((i < K) & (v0 + j < V), state_at(dht, i_n, i_h, i, v0 + j), 0.0)
            else:
                T.clear(state)
            for i_c in tile.pipelined(chunks, num_stages=config.num_stages):
                T.copy(kg[last - i_c, i_h, :, :], kg_shared)
                T.copy(dv_local[last - i_c, i_h, :, v0 : v0 + BV], dv_shared)
                T.copy(qg[last - i_c, i_h, :, :], qg_shared)
                T.copy(w[last - i_c, i_h, :, :], w_shared)
                if p.scalar_gate:
                    decay[0] = g_cumsum[last - i_c, i_h, BT - 1, 0]
                else:
                    T.copy(g_cumsum[last - i_c, i_h, BT - 1, :], decay)
                # Through registers: tilelang 0.1.15 frees a masked tile that it loads ahead with the wrong barrier, so
                # the next chunk's do overwrites this one's before it is used.
                for i, j in tile.parallel(BT, BV):
                    inside = (start - i_c * BT + i < end) & (v0 + j < V)
                    do_frag[i, j] = T.if_then_else(inside, d_o[start - i_c * BT + i, i_h, v0 + j], 0)
                T.copy(state, state_shared)
                T.copy(state_shared, dh[last - i_c, i_h, :, v0 : v0 + BV])
                tile.gemm(kg_shared, state_shared, value, clear_accum=True)
                for i, j in tile.parallel(BT, BV):
                    value[i, j] = -(value[i, j] + T.cast(dv_shared[i, j], "float32"))
                T.copy(do_frag, do_shared)
                T.copy(value, value_shared)  # negative: a product can only be added to the state's gradient
                for i, j in tile.parallel(BT, BV):
                    dv_new[last - i_c, i_h, i, v0 + j] = -value_shared[i, j]
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = state[i, j] * T.exp2(decay[0 if p.scalar_gate else i])
                tile.gemm(qg_shared, do_shared, state, transpose_A=True)
                tile.gemm(w_shared, value_shared, state, transpose_A=True)
            if p.initial_state:
                for i, j in tile.parallel(KP, BV):
                    if (i < K) & (v0 + j < V):
                        if p.state_v_first:
                            dh0[i_n, i_h, v0 + j, i] = state[i, j]
                        else:
                            dh0[i_n, i_h, i, v0 + j] = state[i, j]

    return bwd_state


def default(case: Case) -> BwdStateConfig:
    """Many thread blocks with little state each; one stage where shared memory is short."""
    return first_valid(case, *(BwdStateConfig(BV=BV, num_stages=n) for n in (2, 1) for BV in (32, 16)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """qg, kg, w, do, dv_local and one cumsum row in; dh and dv_new out; three products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = chunks * (BT * (3 * p.KP + 2 * p.VP) * io + p.GP * 4 + p.KP * p.VP * io)
    moved += sizes["tokens"] * p.HV * p.V * io
    states = sizes["N"] * p.HV * p.K * p.V * 4 * (p.initial_state + p.final_state)
    return Cost(bytes=moved + states, flops=6 * chunks * BT * p.K * p.V)


# the gradient's copy, dv_new and the products' operands rounded to io a chunk; the recurrence contracts, as forward
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "bwd_state", INPUTS, OUTPUTS, BwdStateConfig, build, reference, default, cost, TOLERANCE, passes=avoid_wgmma
)
