"""WY representation and scaled queries and keys, backward; and the backward of the triangular inverse.

    dqg = do S^T            dkg = v_new dS'^T           S before the chunk, dS' the gradient of the state after it
    dkb = Akk^T dw          dvb = Akk^T dv_new          dw = -dv_new S^T
    dL  = -strict_lower(dkb w^T + dvb u^T)

with kb = beta k 2^G and vb = beta v. The gradient of the inverse is dAkk = dw kb^T + dv_new vb^T, that of L then
-Akk^T dAkk Akk^T: since w = Akk kb and u = Akk vb, no product of three BT x BT matrices is left. Of the factors:

    dq_inter = scale 2^G dqg                            dk_inter = beta 2^G dkb + 2^(G_last - G) dkg
    dv       = beta dvb                                 db_inter = rowsum(k 2^G dkb) + rowsum(v dvb)
    dG_inter = qg dqg + kb dkb - kg dkg,  and in the chunk's last row colsum(kg dkg) + rowsum(2^(G_last) S dS') as well

These are the parts that go through the state and the inverse; bwd_intra adds those of Aqk and L. q and k are the
normalised ones, a gradient a value head. dG is the gradient with respect to the cumsum *in nats*, G ln 2. The last row
is that of the chunk's last token: rows past the end of a sequence and padding channels are zero in every output. dG of
a scalar gate is the sum over the channels. L of tokens of several rows has no pairs inside one, nor does dL.
Source: the chain rule on fwd_wy, fwd_state and fwd_output, Kimi Linear, arXiv:2510.26692, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import join_chunks, keep_seen, split_chunks, split_operands
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, beta_factor, prim_func, sees

INPUTS = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "v": "tokens HV V : io",
    "g_cumsum": "NT HV BT GP : f32",
    "beta": "tokens HV : beta",
    "Akk": "NT HV BT BT : io",
    "w": "NT HV BT KP : io",
    "u": "NT HV BT VP : io",
    "rstd": "NT HV 2 BT : f32 ? l2norm",
    "h": "NT HV KP VP : io",
    "v_new": "NT HV BT VP : io",
    "do": "tokens HV V : io",
    "dv_new": "NT HV BT VP : io",
    "dh": "NT HV KP VP : io",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "dq_inter": "NT HV BT KP : f32",
    "dk_inter": "NT HV BT KP : f32",
    "dv": "tokens HV V : io",
    "db_inter": "NT HV BT : f32",
    "dG_inter": "NT HV BT GP : f32",  # of the cumsum in nats
    "dL": "NT HV BT BT : f32",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g_cumsum."""
    p, BT, dtype = case.problem, case.BT, x.g_cumsum.dtype
    q_tile, k_tile, step = split_operands(case, x)
    v_tile, do_tile = (split_chunks(y.to(dtype), x.chunk_tokens, BT, width=p.VP) for y in (x.v, x.do))
    Akk, w, u, h, v_new, dv_new, dh = (y.to(dtype) for y in (x.Akk, x.w, x.u, x.h, x.v_new, x.dv_new, x.dh))
    decay, rest = torch.exp2(x.g_cumsum), torch.exp2(x.g_cumsum[:, :, -1:] - x.g_cumsum)

    dq = x.scale * decay * (do_tile @ h.mT)
    dk_after = rest * (v_new @ dh.mT)
    dw = -dv_new @ h.mT
    dkb, dvb = Akk.mT @ dw, Akk.mT @ dv_new
    dL = -keep_seen(dkb @ w.mT + dvb @ u.mT, p.rank)

    dk_before = step * decay * dkb
    d_last = (k_tile * dk_after).sum(2) + (torch.exp2(x.g_cumsum[:, :, -1])[..., None] * h * dh).sum(-1)
    is_last = torch.arange(BT, device=x.q.device) == x.chunk_tokens[:, 1:] - 1
    dG = q_tile * dq + k_tile * (dk_before - dk_after) + is_last[:, None, :, None] * d_last[:, :, None]
    return {
        "dq_inter": dq,
        "dk_inter": dk_before + dk_after,
        "dv": join_chunks(step * dvb, x.chunk_tokens, x.v.shape[0], p.V),
        "db_inter": (k_tile * decay * dkb).sum(-1) + (v_tile * dvb).sum(-1),
        "dG_inter": dG.sum(-1, keepdim=True) if p.scalar_gate else dG,
        "dL": dL,
    }


@dataclass(frozen=True, kw_only=True)
class BwdWyConfig(Config):
    """BK, BV: channels of keys and values a product takes at once; threads a block.

    Nothing is loaded ahead: around a pipelined loop over V, tilelang 0.1.15 moves all that stands before the loop over
    K, the clearing of dL too, into that loop's body (seen in its CUDA for sm_90a). Two blocks an SM overlap instead.
    """

    BK: int = tunable(32, 32, 64)
    BV: int = tunable(64, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """Tiles divide; every warp gets a 16 x 8 tile of each product; accumulators and tiles fit."""
        BT, BK, BV, io = case.BT, self.BK, self.BV, io_bytes(case)
        # Akk; the operands of a step over V; the tiles of a step over K; row factors and partial sums
        smem = BT * BT * io + (3 * BT + 2 * BK) * BV * io + BT * BK * (4 * io + 8) + 12 * BT + 4 * BK + 1024
        products = (BT, BV, BT), (BT, BT, BV), *[(BT, BK, BV)] * 3, (BT, BK, BT), (BT, BT, BK)
        registers = (BT * (BT + 4 * BK) + BK * BV) // self.threads
        return find_misfit(case, self, *products, smem=smem, registers=registers)


def build(case: Case, config: BwdWyConfig) -> Any:
    """The kernel: one thread block a (chunk, value head); tiles of values in turn, then tiles of keys."""
    p, BT, BK, BV = case.problem, case.BT, config.BK, config.BV
    K, V, heads = p.K, p.V, Heads.of(p)
    tile = Tile.of(case)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def bwd_wy(
        q, k, v, g_cumsum, beta, Akk, w, u, rstd, h, v_new, d_o, dv_new, dh, chunk_tokens,
        dq_inter, dk_inter, dv, db_inter, dG_inter, dL, scale,
    ):  # fmt: skip
        with tile.kernel(chunk_tokens.shape[0] * heads.HV, threads=config.threads) as i_block:
            i_t, i_hv, _ = split_block(i_block, (chunk_tokens.shape[0], heads.HV))
            i_h = heads.of_keys(i_hv)
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            A_shared = tile.shared((BT, BT))
            q_factor, k_factor, b_factor = tile.shareds(3, (BT,), "float32")
            L_frag = tile.fragment((BT, BT))
            b_frag = tile.fragment((BT,))
            T.copy(Akk[i_t, i_hv, :, :], A_shared)
            for i in tile.parallel(BT):
                b_factor[i] = T.if_then_else(i < count, beta_factor(p, beta[start + i, i_hv]), 0.0)
                q_factor[i] = rstd[i_t, i_hv, 0, i] if p.l2norm else 1.0
                k_factor[i] = rstd[i_t, i_hv, 1, i] if p.l2norm else 1.0
            tile.clear(L_frag, b_frag)
            if p.scalar_gate:
                G_frag = tile.fragment((BT,))
                T.clear(G_frag)

            value, u_shared, dvb_shared = tile.shareds(3, (BT, BV))
            dvb = tile.fragment((BT, BV))
            for i_v in T.serial(p.VP // BV):
                T.copy(dv_new[i_t, i_hv, :, i_v * BV : (i_v + 1) * BV], dvb_shared)
                T.copy(u[i_t, i_hv, :, i_v * BV : (i_v + 1) * BV], u_shared)
                for i, j in tile.parallel(BT, BV):
                    inside = (i < count) & (i_v * BV + j < V)
                    value[i, j] = T.if_then_else(inside, v[start + i, i_hv, i_v * BV + j], 0)
                tile.gemm(A_shared, dvb_shared, dvb, transpose_A=True, clear_accum=True)
                T.copy(dvb, dvb_shared)
                tile.gemm(dvb_shared, u_shared, L_frag, transpose_B=True)
                product = tile.fragment((BT, BV))
                for i, j in tile.parallel(BT, BV):
                    product[i, j] = T.cast(value[i, j], "float32") * dvb[i, j]
                T.reduce_sum(product, b_frag, dim=1, clear=False)
                for i, j in tile.parallel(BT, BV):
                    value[i, j] = T.cast(b_factor[i] * dvb[i, j], tile.io)
                for i, j in tile.parallel(BT, BV):
                    if (i < count) & (i_v * BV + j < V):
                        dv[start + i, i_hv, i_v * BV + j] = value[i, j]

            do_shared, v_shared, dv_shared = tile.shareds(3, (BT, BV))
            h_shared, dh_shared = tile.shareds(2, (BK, BV))
            g_shared = tile.shared((BT, BK), "float32")
            q_shared, k_shared, w_shared, dw_shared = tile.shareds(4, (BT, BK))
            kdk_shared = tile.shared((BT, BK), "float32")
            last = tile.shared((BK,), "float32")
            dq_frag, dk_frag, dw_frag, dkb_frag = tile.fragments(4, (BT, BK))
            states = tile.fragment((BK, BV))
            row_frag, column_frag = tile.fragments(2, (BK,))
            for i_k in T.serial(p.KP // BK):
                tile.clear(dq_frag, dk_frag, dw_frag, row_frag)
                for i_v in T.serial(p.VP // BV):
                    T.copy(h[i_t, i_hv, i_k * BK : (i_k + 1) * BK, i_v * BV : (i_v + 1) * BV], h_shared)
                    T.copy(dh[i_t, i_hv, i_k * BK : (i_k + 1) * BK, i_v * BV : (i_v + 1) * BV], dh_shared)
                    T.copy(v_new[i_t, i_hv, :, i_v * BV : (i_v + 1) * BV], v_shared)
                    T.copy(dv_new[i_t, i_hv, :, i_v * BV : (i_v + 1) * BV], dv_shared)
                    for i, j in tile.parallel(BT, BV):
                        inside = (i < count) & (i_v * BV + j < V)
                        do_shared[i, j] = T.if_then_else(inside, d_o[start + i, i_hv, i_v * BV + j], 0)
                    tile.gemm(do_shared, h_shared, dq_frag, transpose_B=True)
                    tile.gemm(v_shared, dh_shared, dk_frag, transpose_B=True)
                    tile.gemm(dv_shared, h_shared, dw_frag, transpose_B=True)
                    for i, j in tile.parallel(BK, BV):
                        states[i, j] = T.cast(h_shared[i, j], "float32") * T.cast(dh_shared[i, j], "float32")
                    T.reduce_sum(states, row_frag, dim=1, clear=False)
                tile.load_cumsum(g_cumsum, i_t, i_hv, i_k, g_shared)
                T.copy(w[i_t, i_hv, :, i_k * BK : (i_k + 1) * BK], w_shared)
                for i, j in tile.parallel(BT, BK):
                    inside = (i < count) & (i_k * BK + j < K)
                    q_shared[i, j] = T.if_then_else(inside, q[start + i, i_h, i_k * BK + j], 0)
                    k_shared[i, j] = T.if_then_else(inside, k[start + i, i_h, i_k * BK + j], 0)
                for i, j in tile.parallel(BT, BK):
                    dw_shared[i, j] = T.cast(-dw_frag[i, j], tile.io)
                tile.gemm(A_shared, dw_shared, dkb_frag, transpose_A=True, clear_accum=True)
                T.copy(dkb_frag, dw_shared)
                tile.gemm(dw_shared, w_shared, L_frag, transpose_B=True)

                for i, j in tile.parallel(BT, BK):
                    dq_frag[i, j] = dq_frag[i, j] * (scale * T.exp2(g_shared[i, j]))
                    dk_frag[i, j] = dk_frag[i, j] * T.exp2(g_shared[BT - 1, j] - g_shared[i, j])
                    dkb_frag[i, j] = dkb_frag[i, j] * T.exp2(g_shared[i, j])
                T.copy(dq_frag, dq_inter[i_t, i_hv, :, i_k * BK : (i_k + 1) * BK])
                for i, j in tile.parallel(BT, BK):
                    dw_frag[i, j] = T.cast(k_shared[i, j], "float32") * k_factor[i] * dkb_frag[i, j]
                T.reduce_sum(dw_frag, b_frag, dim=1, clear=False)
                for i, j in tile.parallel(BT, BK):
                    dkb_frag[i, j] = dkb_frag[i, j] * b_factor[i]
                for i, j in tile.parallel(BT, BK):
                    dk_inter[i_t, i_hv, i, i_k * BK + j] = dkb_frag[i, j] + dk_frag[i, j]
                for i, j in tile.parallel(BT, BK):
                    kdk_shared[i, j] = T.cast(k_shared[i, j], "float32") * k_factor[i] * dk_frag[i, j]
                T.clear(column_frag)
                for i in T.unroll(BT):  # T.reduce_sum over rows would take three barriers a pair of columns
                    for j in tile.parallel(BK):
                        column_frag[j] = column_frag[j] + kdk_shared[i, j]
                for j in tile.parallel(BK):
                    last[j] = column_frag[j]
                for j in tile.parallel(BK):
                    row_frag[j] = row_frag[j] * T.exp2(g_shared[BT - 1, j])
                for j in tile.parallel(BK):
                    last[j] = last[j] + row_frag[j]
                for i, j in tile.parallel(BT, BK):
                    query = T.cast(q_shared[i, j], "float32") * q_factor[i]
                    key = T.cast(k_shared[i, j], "float32") * k_factor[i]
                    end = T.if_then_else(i == count - 1, last[j], 0.0)
                    of_channel = query * dq_frag[i, j] + key * (dkb_frag[i, j] - dk_frag[i, j]) + end
                    if p.scalar_gate:
                        dw_frag[i, j] = of_channel
                    else:
                        dG_inter[i_t, i_hv, i, i_k * BK + j] = of_channel
                if p.scalar_gate:
                    T.reduce_sum(dw_frag, G_frag, dim=1, clear=False)
            T.copy(b_frag, db_inter[i_t, i_hv, :])
            if p.scalar_gate:
                for i in tile.parallel(BT):
                    dG_inter[i_t, i_hv, i, 0] = G_frag[i]
            for i, j in tile.parallel(BT, BT):
                dL[i_t, i_hv, i, j] = T.if_then_else(sees(p, i, j), -L_frag[i, j], 0.0)

    return bwd_wy


def default(case: Case) -> BwdWyConfig:
    """Tiles of 32 key and 64 value channels, smaller where registers or shared memory are short."""
    threads = 128 if case.device.kind == "cpu" or case.BT > 16 else 64
    return first_valid(case, *(BwdWyConfig(BK=32, BV=BV, threads=threads) for BV in (64, 32)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """What the forward used, both states and do in; six gradients out; three products with states, four triangular."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * (6 * BT * p.K * p.V + 2 * BT * BT * (p.K + p.V))
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops)


# dw rounded to io before the product that makes dkb, dkb and dvb before those that make dL: 2^-9 each (bf16), 2^-11
# (fp16), so dL errs by two; dv, a result, by one
TOLERANCE = {"bf16": 6e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "bwd_wy",
    INPUTS,
    OUTPUTS,
    BwdWyConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("beta", "rank"),
    scalars=("scale",),
)
