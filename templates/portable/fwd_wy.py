"""WY representation: the chunk's update as two tall matrices, and queries and keys scaled for the state.

    u  = Akk (beta v)                      kg = k 2^(G_last - G)
    w  = Akk (beta k 2^G)                  qg = scale q 2^G

Rows past the end of a sequence are zero in all four, so later stages work on whole tiles.
Source: Kimi Linear, arXiv:2510.26692, section 3 (as FLA v0.6.0 ``fla/ops/kda/wy_fast.py``).
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_chunks, split_operands
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, beta_factor, prim_func

INPUTS = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "v": "tokens HV V : io",
    "g_cumsum": "NT HV BT GP : f32",
    "beta": "tokens HV : beta",
    "Akk": "NT HV BT BT : io",
    "rstd": "NT HV 2 BT : f32 ? l2norm",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {"w": "NT HV BT KP : io", "u": "NT HV BT VP : io", "kg": "NT HV BT KP : io", "qg": "NT HV BT KP : io"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    q_tile, k_tile, step = split_operands(case, x)
    v_tile = split_chunks(x.v.to(step.dtype), x.chunk_tokens, case.BT, width=case.problem.VP)
    A, decay = x.Akk.to(step.dtype), torch.exp2(x.g_cumsum)
    return {
        "w": A @ (step * k_tile * decay),
        "u": A @ (step * v_tile),
        "kg": k_tile * torch.exp2(x.g_cumsum[:, :, -1:] - x.g_cumsum),
        "qg": x.scale * q_tile * decay,
    }


@dataclass(frozen=True, kw_only=True)
class FwdWyConfig(Config):
    """BK, BV: channels of keys and values a product takes at once; threads a block."""

    BK: int = tunable(64, 32, 64, 128)
    BV: int = tunable(64, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """Tiles divide the padded dimensions; every warp gets at least one 16 x 8 tile."""
        BT, io = case.BT, io_bytes(case)
        smem = BT * io * (BT + 4 * self.BK + 2 * self.BV) + BT * self.BK * 4
        return find_misfit(case, self, (BT, self.BV, BT), (BT, self.BK, BT), smem=smem)


def build(case: Case, config: FwdWyConfig) -> Any:
    """The kernel: one thread block a (chunk, value head), column tiles in turn."""
    p, BT, BK, BV = case.problem, case.BT, config.BK, config.BV
    K, V, heads = p.K, p.V, Heads.of(p)
    tile = Tile.of(case)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def fwd_wy(q, k, v, g_cumsum, beta, Akk, rstd, chunk_tokens, w, u, kg, qg, scale):
        with tile.kernel(chunk_tokens.shape[0] * heads.HV, threads=config.threads) as i_block:
            i_t, i_hv, _ = split_block(i_block, (chunk_tokens.shape[0], heads.HV))
            i_h = heads.of_keys(i_hv)
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            A_shared = tile.shared((BT, BT))
            v_shared = tile.shared((BT, BV))
            k_shared = tile.shared((BT, BK))
            g_shared = tile.shared((BT, BK), "float32")
            q_factor, k_factor, b_factor = tile.shareds(3, (BT,), "float32")
            u_frag = tile.fragment((BT, BV))
            w_frag = tile.fragment((BT, BK))
            T.copy(Akk[i_t, i_hv, :, :], A_shared)
            for i in tile.parallel(BT):
                b_factor[i] = T.if_then_else(i < count, beta_factor(p, beta[start + i, i_hv]), 0.0)
                q_factor[i] = scale * rstd[i_t, i_hv, 0, i] if p.l2norm else scale
                k_factor[i] = rstd[i_t, i_hv, 1, i] if p.l2norm else 1.0

            for i_v in T.serial(p.VP // BV):
                for i, j in tile.parallel(BT, BV):
                    inside = (i < count) & (i_v * BV + j < V)
                    raw = T.if_then_else(inside, v[start + i, i_hv, i_v * BV + j], 0)
                    v_shared[i, j] = T.cast(T.cast(raw, "float32") * b_factor[i], tile.io)
                tile.gemm(A_shared, v_shared, u_frag, clear_accum=True)
                T.copy(u_frag, v_shared)  # through shared memory: 16-byte writes
                T.copy(v_shared, u[i_t, i_hv, :, i_v * BV : (i_v + 1) * BV])

            for i_k in T.serial(p.KP // BK):
                tile.load_cumsum(g_cumsum, i_t, i_hv, i_k, g_shared)
                for i, j in tile.parallel(BT, BK):
                    inside = (i < count) & (i_k * BK + j < K)
                    q_raw = T.if_then_else(inside, q[start + i, i_h, i_k * BK + j], 0)
                    k_raw = T.if_then_else(inside, k[start + i, i_h, i_k * BK + j], 0)
                    key = T.cast(k_raw, "float32") * k_factor[i]
                    decay = T.exp2(g_shared[i, j])
                    k_shared[i, j] = T.cast(key * (b_factor[i] * decay), tile.io)
                    kg[i_t, i_hv, i, i_k * BK + j] = T.cast(key * T.exp2(g_shared[BT - 1, j] - g_shared[i, j]), tile.io)
                    qg[i_t, i_hv, i, i_k * BK + j] = T.cast(T.cast(q_raw, "float32") * (q_factor[i] * decay), tile.io)
                tile.gemm(A_shared, k_shared, w_frag, clear_accum=True)
                T.copy(w_frag, k_shared)
                T.copy(k_shared, w[i_t, i_hv, :, i_k * BK : (i_k + 1) * BK])

    return fwd_wy


def default(case: Case) -> FwdWyConfig:
    """64-channel tiles where the dimensions and shared memory allow."""
    threads = 128 if case.device.kind == "cpu" or case.BT > 16 else 64
    return first_valid(case, *(FwdWyConfig(BK=BK, BV=BV, threads=threads) for BK in (64, 32) for BV in (64, 32)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """q, k, v, cumsum and Akk in; w, u, kg, qg out; two triangular products."""
    p, BT = case.problem, case.BT
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops=sizes["NT"] * p.HV * BT * BT * (p.K + p.V))


# one operand and the result rounded to io: 2^-9 each (bf16), 2^-11 (fp16)
TOLERANCE = {"bf16": 6e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "fwd_wy",
    INPUTS,
    OUTPUTS,
    FwdWyConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("beta",),
    scalars=("scale",),
)
