"""Intra-chunk matrices, backward: what Aqk and L say about queries, keys, step sizes and decays.

With P_ij = 2^(G_i - G_j), for Aqk_ij = scale <q_i P_ij, k_j> (j <= i) and L_ij = beta_i <k_i P_ij, k_j> (j < i):

    dq_i (row)    = scale sum_j dAqk_ij P_ij k_j            r_i = sum_j dL_ij P_ij k_j
    dk_i (row)    = beta_i r_i                              dbeta_i = <k_i, r_i>
    dk_j (column) = sum_i P_ij (scale dAqk_ij q_i + beta_i dL_ij k_i)
    dG_i          = q_i dq_i (row) + k_i dk_i (row) - k_i dk_i (column)

dq_part, dk_part, db and dG are these plus the parts of bwd_wy: of the normalised q and k, a gradient a value head, and
of the cumsum *in nats*. The diagonal of Aqk decays nothing: its two terms in dG cancel. Rows past the end of a sequence
and padding channels are zero. dG of a scalar gate is the sum over the channels. Where a token has several rows, dL is
zero inside it, as L is, so its pairs need no mask here.

Pairs are taken by halving, as in fwd_intra: for s = 1, 2, 4, ..., BT/2 the rows of every odd block of s tokens meet the
rows of the even block before it, all of them scaled by their decay from or to the first row of the odd block, which no
gate makes grow. An s has one tile of weights, the odd rows of dAqk over those of dL, and takes it twice: times the even
rows of k for the row parts, and transposed, times the odd rows of q over those of k, for the column part. The products
lie in the order of their s and are read back, through shared memory, in the order of the tokens.
Source: the chain rule on fwd_intra, Kimi Linear, arXiv:2510.26692, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_operands
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, beta_factor, prim_func
from kda_tl.templates.portable.fwd_intra import even_row, odd_row

PAD = 8  # floats between rows of the products: matrix fragments are written in pairs, eight rows at a time
ADDRESSES = 48  # registers a thread needs besides its tiles: with 8 the compiler spilled 520 bytes, with 48 none to 60

INPUTS = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "g_cumsum": "NT HV BT GP : f32",
    "beta": "tokens HV : beta",
    "rstd": "NT HV 2 BT : f32 ? l2norm",
    "dAqk": "NT HV BT BT : f32",
    "dL": "NT HV BT BT : f32",
    "dq_inter": "NT HV BT KP : f32",
    "dk_inter": "NT HV BT KP : f32",
    "db_inter": "NT HV BT : f32",
    "dG_inter": "NT HV BT GP : f32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "dq_part": "NT HV BT KP : f32",
    "dk_part": "NT HV BT KP : f32",
    "db": "NT HV BT : f32",
    "dG": "NT HV BT GP : f32",  # of the cumsum in nats
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: pairwise exponents, in the dtype of g_cumsum."""
    p, BT, dtype = case.problem, case.BT, x.g_cumsum.dtype
    q_tile, k_tile, step = split_operands(case, x)
    q_weight, k_weight = x.scale * x.dAqk.to(dtype).tril(-1), x.dL.to(dtype)
    diagonal = x.scale * x.dAqk.to(dtype).diagonal(dim1=-2, dim2=-1)[..., None]
    dq_row, k_row, dk_column = (torch.zeros_like(k_tile) for _ in range(3))
    for j in range(BT):  # a column at a time: [NT, HV, rows, KP] instead of all pairs at once
        decay = torch.exp2(x.g_cumsum[:, :, j:] - x.g_cumsum[:, :, j : j + 1])
        key = k_tile[:, :, j : j + 1] * decay
        of_q, of_k = q_weight[:, :, j:, j, None], k_weight[:, :, j:, j, None]
        dq_row[:, :, j:] += of_q * key
        k_row[:, :, j:] += of_k * key
        dk_column[:, :, j] = (decay * (of_q * q_tile[:, :, j:] + of_k * (step * k_tile)[:, :, j:])).sum(2)
    dk_row = step * k_row
    dG = q_tile * dq_row + k_tile * (dk_row - dk_column)
    return {
        "dq_part": x.dq_inter.to(dtype) + dq_row + diagonal * k_tile,
        "dk_part": x.dk_inter.to(dtype) + dk_row + dk_column + diagonal * q_tile,
        "db": x.db_inter.to(dtype) + (k_tile * k_row).sum(-1),
        "dG": x.dG_inter.to(dtype) + (dG.sum(-1, keepdim=True) if p.scalar_gate else dG),
    }


@dataclass(frozen=True, kw_only=True)
class BwdIntraConfig(Config):
    """BK: channels of q, k and g held at once; threads a block; registers: what a thread keeps to, for more blocks."""

    BK: int = tunable(32, 32, 64, 128)
    threads: int = tunable(128, 32, 64, 128, 256)
    registers: int = tunable(168, 128, 168, 255)

    def reject(self, case: Case) -> str | None:
        """Tiles divide, every warp of a product has 16 x 8 results, registers and shared memory suffice."""
        BT, BK, columns, io = case.BT, self.BK, self.columns(case), io_bytes(case)
        if self.registers < 255 and self.blocks() == 1:
            return f"registers={self.registers} says nothing: {self.threads} threads a block leave each of them 255"
        # Weights of every s; scaled rows, products and the cumsum of BK channels; four factors a row
        levels = BT.bit_length() - 1
        smem = levels * BT * columns * io + (BT + columns) * (BK * io + (BK + PAD) * 4) + BT * BK * 4 + BT * 16
        tiles = (8 * BT + columns) * BK // self.threads  # q, k, g, decays, four sums, two products
        products = [(BT, BK, columns), (columns, BK, BT)] * levels
        return find_misfit(case, self, *products, smem=smem, registers=tiles, room=self.registers - ADDRESSES)

    def blocks(self) -> int:
        """Thread blocks for which a processor has registers."""
        return 65536 // (self.threads * self.registers)

    @staticmethod
    def columns(case: Case) -> int:
        """Even rows of an s, or what the matrix unit takes at least."""
        return max(case.BT // 2, 16)


def build(case: Case, config: BwdIntraConfig) -> Any:
    """The kernel: one thread block a (chunk, value head), BK channels in turn."""
    p, BT, BK, threads = case.problem, case.BT, config.BK, config.threads
    K, half, columns, heads = p.K, case.BT // 2, config.columns(case), Heads.of(p)
    levels = [1 << n for n in range(BT.bit_length() - 1)]
    tile = Tile.of(case)

    def is_odd(i, s):
        return i // s % 2 == 1

    def rank(i, s):
        """Which of the odd, or of the even, rows the chunk's row i is."""
        return i // (2 * s) * s + i % s

    def anchor(i, s):
        """The first row of the odd block of i's pair of blocks."""
        return i // (2 * s) * (2 * s) + s

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def bwd_intra(
        q, k, g_cumsum, beta, rstd, dAqk, dL, dq_inter, dk_inter, db_inter, dG_inter, chunk_tokens,
        dq_part, dk_part, db, dG, scale,
    ):  # fmt: skip
        with tile.kernel(chunk_tokens.shape[0] * heads.HV, threads=threads) as i_block:
            if not tile.cpu:
                T.annotate_min_blocks_per_sm(config.blocks())
            i_t, i_hv, _ = split_block(i_block, (chunk_tokens.shape[0], heads.HV))
            i_h = heads.of_keys(i_hv)
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            q_factor, k_factor, b_factor, diagonal = tile.shareds(4, (BT,), "float32")
            weights = [tile.shared((BT, columns)) for _ in levels]
            g_shared = tile.shared((BT, BK), "float32")
            odd_rows = tile.shared((BT, BK))  # q above k
            even_rows = tile.shared((columns, BK))
            products = tile.shared((BT + columns, BK + PAD), "float32")  # of dAqk, of dL, of their columns
            q_frag, k_frag, g_frag, decay = tile.fragments(4, (BT, BK))
            dq_row, k_row, dk_column, row_product = tile.fragments(4, (BT, BK))
            column_product = tile.fragment((columns, BK))
            dG_frag = tile.fragment((BT, BK))
            kr_dot = tile.fragment((BT,))
            T.clear(kr_dot)
            if p.scalar_gate:
                G_dot = tile.fragment((BT,))
                T.clear(G_dot)
            for i in tile.parallel(BT):
                q_factor[i] = rstd[i_t, i_hv, 0, i] if p.l2norm else 1.0
                k_factor[i] = rstd[i_t, i_hv, 1, i] if p.l2norm else 1.0
                b_factor[i] = T.if_then_else(i < count, beta_factor(p, beta[start + i, i_hv]), 0.0)
                diagonal[i] = scale * dAqk[i_t, i_hv, i, i]
            for s, weight in zip(levels, weights, strict=True):
                for r, c in tile.parallel(half, columns):
                    at = i_t, i_hv, odd_row(r, s), even_row(c % half, s)
                    of_q = T.if_then_else((c < half) & (r // s == c // s), dAqk[at], 0.0)
                    of_k = T.if_then_else((c < half) & (r // s == c // s), dL[at], 0.0)
                    weight[r, c] = T.cast(scale * of_q, tile.io)
                    weight[half + r, c] = T.cast(of_k, tile.io)
            if columns > half:
                T.clear(even_rows)
            for i_k in T.serial(p.KP // BK):
                for i, j in tile.parallel(BT, BK):
                    g_frag[i, j] = g_cumsum[i_t, i_hv, i, 0 if p.scalar_gate else i_k * BK + j]
                    g_shared[i, j] = g_frag[i, j]
                for i, j in tile.parallel(BT, BK):
                    inside = (i < count) & (i_k * BK + j < K)
                    q_raw = T.if_then_else(inside, q[start + i, i_h, i_k * BK + j], 0)
                    k_raw = T.if_then_else(inside, k[start + i, i_h, i_k * BK + j], 0)
                    q_frag[i, j] = T.cast(q_raw, "float32") * q_factor[i]
                    k_frag[i, j] = T.cast(k_raw, "float32") * k_factor[i]
                tile.clear(dq_row, k_row, dk_column, dG_frag)
                for s, weight in zip(levels, weights, strict=True):
                    for i, j in tile.parallel(BT, BK):
                        step = g_frag[i, j] - g_shared[anchor(i, s), j]
                        decay[i, j] = T.exp2(T.if_then_else(is_odd(i, s), step, -step))
                    for i, j in tile.parallel(BT, BK):
                        if is_odd(i, s):
                            odd_rows[rank(i, s), j] = T.cast(q_frag[i, j] * decay[i, j], tile.io)
                    for i, j in tile.parallel(BT, BK):
                        if is_odd(i, s):
                            odd_rows[half + rank(i, s), j] = T.cast(k_frag[i, j] * (b_factor[i] * decay[i, j]), tile.io)
                    for i, j in tile.parallel(BT, BK):
                        if i // s % 2 == 0:
                            even_rows[rank(i, s), j] = T.cast(k_frag[i, j] * decay[i, j], tile.io)
                    tile.gemm(weight, even_rows, row_product, clear_accum=True)
                    tile.gemm(weight, odd_rows, column_product, transpose_A=True, clear_accum=True)
                    for r, j in tile.parallel(BT, BK):
                        products[r, j] = row_product[r, j]
                    for r, j in tile.parallel(columns, BK):
                        products[BT + r, j] = column_product[r, j]
                    for i, j in tile.parallel(BT, BK):
                        if is_odd(i, s):
                            dq_row[i, j] = dq_row[i, j] + products[rank(i, s), j] * decay[i, j]
                            k_row[i, j] = k_row[i, j] + products[half + rank(i, s), j] * decay[i, j]
                        else:
                            dk_column[i, j] = dk_column[i, j] + products[BT + rank(i, s), j] * decay[i, j]
                    # With the operands as the products saw them: rows and columns of dG then cancel in its sums to the
                    # last digit. With unrounded q and k ddt_bias, a sum of sums, was off by 1.7e-2 instead of 2.6e-3.
                    for i, j in tile.parallel(BT, BK):
                        if is_odd(i, s):
                            of_q = T.cast(odd_rows[rank(i, s), j], "float32") * products[rank(i, s), j]
                            of_k = T.cast(odd_rows[half + rank(i, s), j], "float32") * products[half + rank(i, s), j]
                            dG_frag[i, j] = dG_frag[i, j] + of_q + of_k
                        else:
                            of_column = T.cast(even_rows[rank(i, s), j], "float32") * products[BT + rank(i, s), j]
                            dG_frag[i, j] = dG_frag[i, j] - of_column
                for i, j in tile.parallel(BT, BK):
                    c = i_k * BK + j
                    row = b_factor[i] * k_row[i, j]
                    if not p.scalar_gate:
                        dG[i_t, i_hv, i, c] = dG_inter[i_t, i_hv, i, c] + dG_frag[i, j]
                    dq_part[i_t, i_hv, i, c] = dq_inter[i_t, i_hv, i, c] + dq_row[i, j] + diagonal[i] * k_frag[i, j]
                    dk_part[i_t, i_hv, i, c] = (
                        dk_inter[i_t, i_hv, i, c] + row + dk_column[i, j] + diagonal[i] * q_frag[i, j]
                    )
                    decay[i, j] = k_frag[i, j] * k_row[i, j]
                T.reduce_sum(decay, kr_dot, dim=1, clear=False)
                if p.scalar_gate:
                    T.reduce_sum(dG_frag, G_dot, dim=1, clear=False)
            for i in tile.parallel(BT):
                db[i_t, i_hv, i] = db_inter[i_t, i_hv, i] + kr_dot[i]
            if p.scalar_gate:
                for i in tile.parallel(BT):
                    dG[i_t, i_hv, i, 0] = dG_inter[i_t, i_hv, i, 0] + G_dot[i]

    return bwd_intra


def default(case: Case) -> BwdIntraConfig:
    """32 channels at once and as many threads as keep several blocks on a processor."""
    if case.device.kind == "cpu":
        return BwdIntraConfig()
    threads = {64: 256, 32: 128, 16: 64}[case.BT]
    return first_valid(
        case, *(BwdIntraConfig(BK=32, threads=threads, registers=registers) for registers in (128, 168, 255))
    )


def cost(case: Case, sizes: Sizes) -> Cost:
    """q, k, cumsum, two BT x BT matrices and the parts so far in, their sums out; four triangular products."""
    p, chunks = case.problem, sizes["NT"] * case.problem.HV
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops=4 * chunks * case.BT**2 * p.K)


# both operands of a product rounded to io: 2 * 2^-9 (bf16), 2 * 2^-11 (fp16)
TOLERANCE = {"bf16": 6e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "bwd_intra",
    INPUTS,
    OUTPUTS,
    BwdIntraConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("beta",),
    scalars=("scale",),
)
