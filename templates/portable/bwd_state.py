"""State recurrence, backward: the gradient of the state, from the last chunk of a sequence to its first.

    dv_new = dv_local + kg dS'           dS = 2^(G_last) dS' + qg^T do - w^T dv_new           dh[chunk] = dS'

dS' is the gradient of the state after the chunk: dht after the last one, zeros where no final state was asked for. The
dS of the first chunk is dh0; a sequence without tokens hands dht through. The gradient stays in fp32 registers; its
copy for the matrix unit is rounded to the io dtype. Rows past the end of a sequence and padding channels are zero.
Source: the chain rule on fwd_state and fwd_output, Kimi Linear, arXiv:2510.26692, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.chunks import crop_state, pad_state, split_chunks
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, at_state, avoid_wgmma, prim_func
from kda_tl.templates.portable.fwd_state import THREADS, FwdStateConfig

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
OUTPUTS = {"dh": "NT HV KP VP : io", "dv_new": "NT HV BT VP : io", "dh0": "N HV K V : f32 ? initial_state"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    p, dtype = case.problem, x.g_cumsum.dtype
    qg, kg, w, dv_local = (y.to(dtype) for y in (x.qg, x.kg, x.w, x.dv_local))
    read = qg.mT @ split_chunks(x.do.to(dtype), x.chunk_tokens, case.BT, width=p.VP)  # by the queries
    decay = torch.exp2(x.g_cumsum[:, :, -1])[..., None]
    dh, dv_new = torch.empty_like(read), torch.empty_like(dv_local)
    bounds = x.seq_chunks.tolist()
    dstates = read.new_zeros((len(bounds) - 1, *read.shape[1:])) if x.dht is None else pad_state(p, x.dht.to(dtype))
    for dstate, first, end in zip(dstates, bounds, bounds[1:], strict=False):
        for t in reversed(range(first, end)):
            dh[t] = dstate
            dv_new[t] = dv_local[t] + kg[t] @ dstate
            dstate.copy_(decay[t] * dstate + read[t] - w[t].mT @ dv_new[t])
    return {"dh": dh, "dv_new": dv_new} | ({"dh0": crop_state(p, dstates)} if p.initial_state else {})


@dataclass(frozen=True, kw_only=True)
class BwdStateConfig(FwdStateConfig):
    """The choices of fwd_state. A block has one warpgroup too: two are suspected to race there."""

    def reject(self, case: Case) -> str | None:
        """BV divides; the pipelined tiles fit shared memory; the state's gradient fits the registers."""
        p, BT, io = case.problem, case.BT, io_bytes(case)
        ahead = [BT * p.KP * io] * 3 + [BT * self.BV * io, 0 if p.scalar_gate else p.KP * 4]
        once = [p.KP * self.BV * io] + [BT * self.BV * io] * 2
        tiles = [self.num_stages * size for size in ahead] + once
        smem = sum(-(-size // 1024) * 1024 for size in tiles)  # every tile starts at a multiple of 1024 bytes
        products = (BT, self.BV, p.KP), *[(p.KP, self.BV, BT)] * 2
        registers = ((p.KP + BT) * 4 + BT * io) * self.BV // (4 * THREADS)  # with do; 224 spill, 192 do not
        return find_misfit(case, self, *products, smem=smem, registers=registers) or self.reject_loop(case)


def build(case: Case, config: BwdStateConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks from the last to the first."""
    p, BT, BV = case.problem, case.BT, config.BV
    K, V, KP, VB, heads = p.K, p.V, p.KP, p.VP // BV, Heads.of(p)
    tile = Tile.of(case)
    # The C target finds a size only where it stands alone in a shape, so the sequences are counted by their bounds.
    bounds = T.dynamic("bounds")
    N = bounds - 1

    @prim_func(case, INPUTS | OUTPUTS, N=N, **{"N+1": bounds}, **heads.sizes)
    def bwd_state(qg, kg, w, d_o, dv_local, g_cumsum, dht, seq_chunks, chunk_tokens, dh, dv_new, dh0):
        # Heads on an axis of their own: TileLang 0.1.15 loads ahead of a division, whose results only the loop needs
        with tile.kernel(N * VB, heads.HV, threads=THREADS) as (i_block, i_h):
            i_n, v0 = i_block // VB, i_block % VB * BV
            last = seq_chunks[i_n + 1] - 1
            chunks = seq_chunks[i_n + 1] - seq_chunks[i_n]
            start = T.if_then_else(chunks > 0, chunk_tokens[last, 0], 0)  # of the last chunk; the others are full
            end = T.if_then_else(chunks > 0, start + chunk_tokens[last, 1], 0)
            state = tile.fragment((KP, BV))
            state_shared = tile.shared((KP, BV))
            qg_shared, kg_shared, w_shared = tile.shareds(3, (BT, KP))
            do_frag = tile.fragment((BT, BV), tile.io)
            do_shared, dv_shared = tile.shareds(2, (BT, BV))
            decay = tile.fragment((1,)) if p.scalar_gate else tile.shared((KP,), "float32")
            value = tile.fragment((BT, BV))
            value_shared = tile.shared((BT, BV))
            if p.final_state:
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = T.if_then_else((i < K) & (v0 + j < V), dht[at_state(p, i_n, i_h, i, v0 + j)], 0.0)
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
                        dh0[at_state(p, i_n, i_h, i, v0 + j)] = state[i, j]

    return bwd_state


def default(case: Case) -> BwdStateConfig:
    """Many thread blocks with little state each; one stage where shared memory is short."""
    return first_valid(case, *(BwdStateConfig(BV=BV, num_stages=n) for n in (2, 1) for BV in (32, 16)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """qg, kg, w, do, dv_local and one cumsum row in; dh and dv_new out; three products a chunk."""
    p, chunks = case.problem, sizes["NT"] * case.problem.HV
    moved = INPUTS | OUTPUTS | {"g_cumsum": "NT HV GP : f32"}
    return cost_of(case, sizes, moved, flops=6 * chunks * case.BT * p.K * p.V)


# the gradient's copy, dv_new and the products' operands rounded to io a chunk; the recurrence contracts, as forward
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "bwd_state",
    INPUTS,
    OUTPUTS,
    BwdStateConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    passes=avoid_wgmma,
)
