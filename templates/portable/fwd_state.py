"""State recurrence over the chunks of a sequence, and the values corrected by what the state already knew.

    v_new = u - w S            S <- 2^(G_last) S + kg^T v_new            h[chunk] = S before the chunk

The state stays in fp32 registers; its copy for the matrix unit is rounded to the io dtype.
Source: Kimi Linear, arXiv:2510.26692, section 3 (as FLA v0.6.0 ``fla/ops/common/chunk_delta_h.py``).
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import crop_state, pad_state
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, at_state, avoid_wgmma, prim_func

INPUTS = {
    "w": "NT HV BT KP : io",
    "u": "NT HV BT VP : io",
    "kg": "NT HV BT KP : io",
    "g_cumsum": "NT HV BT GP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "seq_chunks": "N+1 : i32",
}
OUTPUTS = {"h": "NT HV KP VP : io", "v_new": "NT HV BT VP : io", "ht": "N HV K V : f32 ? final_state"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    p, dtype = case.problem, x.g_cumsum.dtype
    w, u, kg = (y.to(dtype) for y in (x.w, x.u, x.kg))
    decay = torch.exp2(x.g_cumsum[:, :, -1])[..., None]
    h, v_new = u.new_empty((len(u), p.HV, p.KP, p.VP)), torch.empty_like(u)
    bounds = x.seq_chunks.tolist()
    states = u.new_zeros((len(bounds) - 1, *h.shape[1:])) if x.h0 is None else pad_state(p, x.h0.to(dtype))
    for state, first, end in zip(states, bounds, bounds[1:], strict=False):
        for t in range(first, end):
            h[t] = state
            v_new[t] = u[t] - w[t] @ state
            state.copy_(decay[t] * state + kg[t].mT @ v_new[t])
    return {"h": h, "v_new": v_new} | ({"ht": crop_state(p, states)} if p.final_state else {})


THREADS = 128


@dataclass(frozen=True, kw_only=True)
class FwdStateConfig(Config):
    """BV: value channels a block owns; num_stages: chunks whose tiles are loaded ahead.

    A block has one warpgroup. With two, one plan was off by 1.1e-2 and another with the same state config right
    (BV=128, 96 heads, H200, tilelang 0.1.15). A race on the unpipelined copy of the state is suspected, not shown.
    """

    BV: int = tunable(32, 16, 32, 64, 128)
    num_stages: int = tunable(2, 1, 2, 3, 4)

    def reject_loop(self, case: Case) -> str | None:
        """Without TMA, TileLang 0.1.15 loads nothing ahead in a loop whose length the launch does not tell."""
        if self.num_stages > 1 and 0 < case.device.sm < 90:
            return f"num_stages={self.num_stages} needs a GPU with TMA, {case.device.arch} has none: use num_stages=1"
        return None

    def reject(self, case: Case) -> str | None:
        """BV divides; the pipelined tiles fit shared memory; the state fits the registers."""
        p, BT, io = case.problem, case.BT, io_bytes(case)
        stage = BT * (2 * p.KP + self.BV) * io + (0 if p.scalar_gate else p.KP * 4)
        smem = self.num_stages * stage + (p.KP + BT) * self.BV * io
        registers = (p.KP + BT) * self.BV // THREADS
        products = (BT, self.BV, p.KP), (p.KP, self.BV, BT)
        return find_misfit(case, self, *products, smem=smem, registers=registers) or self.reject_loop(case)


def build(case: Case, config: FwdStateConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), chunks in order."""
    p, BT, BV = case.problem, case.BT, config.BV
    K, V, KP, VB, heads = p.K, p.V, p.KP, p.VP // BV, Heads.of(p)
    tile = Tile.of(case)
    # The C target finds a size only where it stands alone in a shape, so the sequences are counted by their bounds.
    bounds = T.dynamic("bounds")
    N = bounds - 1

    @prim_func(case, INPUTS | OUTPUTS, N=N, **{"N+1": bounds}, **heads.sizes)
    def fwd_state(w, u, kg, g_cumsum, h0, seq_chunks, h, v_new, ht):
        # Heads on an axis of their own: TileLang 0.1.15 loads ahead of a division, whose results only the loop needs
        with tile.kernel(N * VB, heads.HV, threads=THREADS) as (i_block, i_h):
            i_n, v0 = i_block // VB, i_block % VB * BV
            first = seq_chunks[i_n]
            chunks = seq_chunks[i_n + 1] - first
            state = tile.fragment((KP, BV))
            state_shared = tile.shared((KP, BV))
            w_shared, kg_shared = tile.shareds(2, (BT, KP))
            u_shared = tile.shared((BT, BV))
            decay = tile.fragment((1,)) if p.scalar_gate else tile.shared((KP,), "float32")
            value = tile.fragment((BT, BV))
            value_shared = tile.shared((BT, BV))
            if p.initial_state:
                for i, j in tile.parallel(KP, BV):
                    state[i, j] = T.if_then_else((i < K) & (v0 + j < V), h0[at_state(p, i_n, i_h, i, v0 + j)], 0.0)
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
                        ht[at_state(p, i_n, i_h, i, v0 + j)] = state[i, j]

    return fwd_state


def default(case: Case) -> FwdStateConfig:
    """Many thread blocks with little state each; one stage where shared memory is short."""
    return first_valid(case, *(FwdStateConfig(BV=BV, num_stages=n) for n in (2, 1) for BV in (32, 16)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """w, u, kg and one cumsum row in; h and v_new out; two products a chunk."""
    p, chunks = case.problem, sizes["NT"] * case.problem.HV
    moved = INPUTS | OUTPUTS | {"g_cumsum": "NT HV GP : f32"}
    return cost_of(case, sizes, moved, flops=4 * chunks * case.BT * p.K * p.V)


# state, v_new and both products' operands rounded to io a chunk; the recurrence contracts, so errors do not grow
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "fwd_state",
    INPUTS,
    OUTPUTS,
    FwdStateConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),
    passes=avoid_wgmma,
)
