"""Intra-chunk matrices: query-key and key-key products under decay, and the triangular inverse.

    Aqk[i, j] = scale * <q_i 2^(G_i - G_j), k_j>    j <= i          Akk = (I + L)^-1
    L[i, j]   = beta_i * <k_i 2^(G_i - G_j), k_j>   j <  i

An exponent relative to one anchor for the whole chunk overflows, so pairs are taken by *halving*: for s = 1, 2, 4, ...,
BT/2 the rows of every odd block of s tokens meet the rows of the even block before it, both relative to the first row
of the odd block. Both exponents are then never positive, whatever the gate does, every pair belongs to exactly one s,
and an s costs one exponential an element and one product: the BT/2 odd rows of q and of k, stacked, against the BT/2
even rows of k. No gate needs another path.

A bounded gate may take the pairs inside sub-chunks of BC tokens in one product instead ("anchored"): relative to the
middle row no exponent exceeds BC/2 tokens of 5 nats, 2^58, which fp32 and bf16 hold; what overflows is above the
diagonal and dropped.

The inverse: forward substitution in BC x BC diagonal blocks, a thread a column, then the same levels again,
X <- X - X L_s X. L2 norms of q and k enter as row factors of the results and are handed on to later stages.

Where a token has r rows, they do not see each other: L holds the pairs of different tokens only, j // r < i // r, so no
level s < r adds to it. Aqk stays as it is: a token's query stands in its last row, below all the others.
Source: Kimi Linear, arXiv:2510.26692, section 3; the halving and the levelled inverse are derived above.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_operands
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, L2NORM_EPS, Tile, beta_factor, prim_func, sees

INPUTS = {
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "g_cumsum": "NT HV BT GP : f32",
    "beta": "tokens HV : beta",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "Aqk": "NT HV BT BT : io",
    "Akk": "NT HV BT BT : io",
    "rstd": "NT HV 2 BT : f32 ? l2norm",  # 1 / norm of each row of q, then of k
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: pairwise exponents, a dense triangular solve, all in the dtype of g_cumsum."""
    p, BT = case.problem, case.BT
    q_tile, k_tile, step = split_operands(case, x)
    q_rstd, k_rstd = (torch.rsqrt(y.square().sum(-1) + L2NORM_EPS) for y in (q_tile, k_tile))
    if p.l2norm:
        q_tile, k_tile = q_tile * q_rstd[..., None], k_tile * k_rstd[..., None]
    Aqk, L = (x.g_cumsum.new_zeros((*x.g_cumsum.shape[:2], BT, BT)) for _ in range(2))
    for j in range(BT):  # a column at a time: [NT, HV, rows, KP] instead of all pairs at once
        decay = torch.exp2(x.g_cumsum[:, :, j:] - x.g_cumsum[:, :, j : j + 1])
        key = k_tile[:, :, j : j + 1] * decay
        Aqk[:, :, j:, j] = x.scale * (q_tile[:, :, j:] * key).sum(-1)
        after = (j // p.rank + 1) * p.rank  # the next token
        L[:, :, after:, j] = step[:, :, after:, 0] * (k_tile[:, :, after:] * key[:, :, after - j :]).sum(-1)
    eye = torch.eye(BT, dtype=L.dtype, device=L.device)
    Akk = torch.linalg.solve_triangular(eye + L, eye.expand_as(L), upper=False, unitriangular=True)
    return {"Aqk": Aqk, "Akk": Akk} | ({"rstd": torch.stack([q_rstd, k_rstd], dim=2)} if p.l2norm else {})


@dataclass(frozen=True, kw_only=True)
class FwdIntraConfig(Config):
    """BK: channels of q, k and g held at once; threads a block; diagonal: how pairs inside a sub-chunk are taken."""

    BK: int = tunable(128, 32, 64, 128, 256)
    threads: int = tunable(128, 32, 64, 128, 256)
    diagonal: str = tunable("halved", "halved", "anchored")

    def reject(self, case: Case) -> str | None:
        """Tiles divide, exponents fit, every warp of a product has 16 x 8 results, shared memory suffices."""
        p, BT, BK, io = case.problem, case.BT, self.BK, io_bytes(case)
        anchored = self.diagonal == "anchored"
        if anchored and not p.bounded_gate:
            return f"the {p.gate} gate is unbounded: anchored sub-chunks would overflow"
        if anchored and p.dtype == "fp16":
            return "fp16 cannot hold the factors of anchored sub-chunks"
        # q, k, their scaled halves, the cumsum; then the two results, which outlive them
        smem = BT * BK * (2 * io + 3 * io // 2 + anchored * io + 4) + BT * BT * (2 * io + 8)
        product = BT, BT // 2, BK if p.KP > BK else 0  # in a single step rests share the place of what is counted
        return find_misfit(case, self, *[product] * (BT.bit_length() - 1), smem=smem)


def odd_row(r: Any, s: int) -> Any:
    """Row r of the odd blocks of s tokens, in the chunk, where pairs are taken by halving."""
    return r + (r // s + 1) * s


def even_row(r: Any, s: int) -> Any:
    """Row r of the even blocks."""
    return r + r // s * s


def build(case: Case, config: FwdIntraConfig) -> Any:
    """The kernel: one thread block a (chunk, value head)."""
    p, BT, BC, BK, threads = case.problem, case.BT, case.BC, config.BK, config.threads
    K, half, heads = p.K, case.BT // 2, Heads.of(p)
    anchored = config.diagonal == "anchored"
    merges = [BC << n for n in range((BT // BC).bit_length() - 1)]
    levels = merges if anchored else [1 << n for n in range(BT.bit_length() - 1)]
    tile = Tile.of(case)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def fwd_intra(q, k, g_cumsum, beta, chunk_tokens, Aqk, Akk, rstd, scale):
        with tile.kernel(chunk_tokens.shape[0] * heads.HV, threads=threads) as i_block:
            i_t, i_hv, _ = split_block(i_block, (chunk_tokens.shape[0], heads.HV))
            i_h = heads.of_keys(i_hv)
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            q_shared, k_shared = tile.shareds(2, (BT, BK))
            g_shared = tile.shared((BT, BK), "float32")
            odd_rows = tile.shared((BT, BK))  # q above k
            even_rows = tile.shared((half, BK))
            q_frag, k_frag = tile.fragments(2, (BT, BK), tile.io)
            product = tile.fragment((BT, BK))
            qk_dot = tile.fragment((BT,))
            if p.l2norm:
                qq_dot, kk_dot = tile.fragments(2, (BT,))
                tile.clear(qq_dot, kk_dot)
            pairs = [tile.fragment((BT, half)) for _ in levels]
            if anchored:
                anchored_keys = tile.shared((BT, BK))
                q_pairs, k_pairs = tile.fragments(2, (BT, BT))
                tile.clear(q_pairs, k_pairs)
            tile.clear(qk_dot, *pairs)
            for i_k in T.serial(p.KP // BK):
                for i, j in tile.parallel(BT, BK):
                    inside = (i < count) & (i_k * BK + j < K)
                    q_frag[i, j] = T.if_then_else(inside, q[start + i, i_h, i_k * BK + j], 0)
                    k_frag[i, j] = T.if_then_else(inside, k[start + i, i_h, i_k * BK + j], 0)
                tile.load_cumsum(g_cumsum, i_t, i_hv, i_k, g_shared)
                T.copy(q_frag, q_shared)
                T.copy(k_frag, k_shared)
                for i, j in tile.parallel(BT, BK):
                    product[i, j] = T.cast(q_frag[i, j], "float32") * T.cast(k_frag[i, j], "float32")
                T.reduce_sum(product, qk_dot, dim=1, clear=False)
                if p.l2norm:
                    for i, j in tile.parallel(BT, BK):
                        product[i, j] = T.cast(q_frag[i, j], "float32") * T.cast(q_frag[i, j], "float32")
                    T.reduce_sum(product, qq_dot, dim=1, clear=False)
                    for i, j in tile.parallel(BT, BK):
                        product[i, j] = T.cast(k_frag[i, j], "float32") * T.cast(k_frag[i, j], "float32")
                    T.reduce_sum(product, kk_dot, dim=1, clear=False)
                if anchored:
                    for i, j in tile.parallel(BT, BK):
                        growth = T.exp2(g_shared[i // BC * BC + BC // 2, j] - g_shared[i, j])
                        anchored_keys[i, j] = T.cast(T.cast(k_shared[i, j], "float32") * growth, tile.io)
                    for rows_shared, products in ((q_shared, q_pairs), (k_shared, k_pairs)):
                        for i, j in tile.parallel(BT, BK):
                            decay = T.exp2(g_shared[i, j] - g_shared[i // BC * BC + BC // 2, j])
                            odd_rows[i, j] = T.cast(T.cast(rows_shared[i, j], "float32") * decay, tile.io)
                        tile.gemm(odd_rows, anchored_keys, products, transpose_B=True)
                for s, pair in zip(levels, pairs, strict=True):
                    for r, j in tile.parallel(half, BK):
                        decay = T.exp2(g_shared[odd_row(r, s), j] - g_shared[even_row(r // s * s, s) + s, j])
                        odd_rows[r, j] = T.cast(T.cast(q_shared[odd_row(r, s), j], "float32") * decay, tile.io)
                        odd_rows[half + r, j] = T.cast(T.cast(k_shared[odd_row(r, s), j], "float32") * decay, tile.io)
                    for r, j in tile.parallel(half, BK):
                        growth = T.exp2(g_shared[even_row(r // s * s, s) + s, j] - g_shared[even_row(r, s), j])
                        even_rows[r, j] = T.cast(T.cast(k_shared[even_row(r, s), j], "float32") * growth, tile.io)
                    tile.gemm(odd_rows, even_rows, pair, transpose_B=True)

            q_factor, k_factor, b_factor = tile.shareds(3, (BT,), "float32")
            A_shared, lower = tile.shareds(2, (BT, BT), "float32")
            for i in tile.parallel(BT):
                b_factor[i] = T.if_then_else(i < count, beta_factor(p, beta[start + i, i_hv]), 0.0)
            for i in tile.parallel(BT):
                q_factor[i] = T.rsqrt(qq_dot[i] + L2NORM_EPS) if p.l2norm else 1.0
                k_factor[i] = T.rsqrt(kk_dot[i] + L2NORM_EPS) if p.l2norm else 1.0
            if p.l2norm:
                for i in tile.parallel(BT):
                    rstd[i_t, i_hv, 0, i] = q_factor[i]
                    rstd[i_t, i_hv, 1, i] = k_factor[i]
            tile.clear(A_shared, lower)
            for i in tile.parallel(BT):
                A_shared[i, i] = qk_dot[i] * (scale * q_factor[i] * k_factor[i])
            # Other pairs of blocks meet in the products too, and are dropped here. Both matrices stay fp32, and each
            # loop has one condition: tilelang 0.1.15 loses the inner one of two around a store that casts.
            if anchored:
                for i, j in tile.parallel(BT, BT):
                    if (i // BC == j // BC) & (i > j):
                        A_shared[i, j] = q_pairs[i, j] * (scale * q_factor[i] * k_factor[j])
                for i, j in tile.parallel(BT, BT):
                    if (i // BC == j // BC) & sees(p, i, j):
                        lower[i, j] = k_pairs[i, j] * (b_factor[i] * k_factor[i] * k_factor[j])
            for s, pair in zip(levels, pairs, strict=True):
                for r, c in tile.parallel(BT, half):
                    if (r < half) & (r % half // s == c // s):
                        at = odd_row(r % half, s), even_row(c, s)
                        A_shared[at] = pair[r, c] * (scale * q_factor[at[0]] * k_factor[at[1]])
                if s >= p.rank:
                    for r, c in tile.parallel(BT, half):
                        if (r >= half) & (r % half // s == c // s):
                            at = odd_row(r % half, s), even_row(c, s)
                            lower[at] = pair[r, c] * (b_factor[at[0]] * k_factor[at[0]] * k_factor[at[1]])
            for i, j in tile.parallel(BT, BT):
                Aqk[i_t, i_hv, i, j] = T.cast(A_shared[i, j], tile.io)

            # Merging with io operands adds nothing to the rounding of Akk itself: 1.7e-3 in bf16, as with tf32
            # operands, which took 11 to 20 % longer (H200, B1 T8192 H32).
            inverse = tile.shared((BT, BT))
            column = T.alloc_local((BC,), "float32")
            T.clear(inverse)
            for c in tile.parallel(BT):  # forward substitution, a thread a column of its BC x BC block
                for r in T.unroll(BC):
                    column[r] = T.if_then_else(r == c % BC, 1.0, 0.0)
                    for m in T.unroll(r):
                        column[r] = column[r] - lower[c // BC * BC + r, c // BC * BC + m] * column[m]
                for r in T.unroll(BC):
                    inverse[c // BC * BC + r, c] = T.cast(column[r], tile.io)
            if len(merges) > 0:
                level = tile.shared((BT, BT))
                merged = tile.fragment((BT, BT))
            for s in merges:
                for i, j in tile.parallel(BT, BT):
                    level[i, j] = T.cast(T.if_then_else((i // s) ^ (j // s) == 1, lower[i, j], 0.0), tile.io)
                tile.gemm(inverse, level, merged, clear_accum=True)
                T.copy(merged, level)
                tile.gemm(level, inverse, merged, clear_accum=True)
                for i, j in tile.parallel(BT, BT):
                    if ((i // s) ^ (j // s) == 1) & (i > j):
                        inverse[i, j] = T.cast(-merged[i, j], tile.io)
            for i, j in tile.parallel(BT, BT):
                Akk[i_t, i_hv, i, j] = T.cast(inverse[i, j], tile.io)

    return fwd_intra


def default(case: Case) -> FwdIntraConfig:
    """As many channels at once as K has and shared memory holds; four warps, one where the products are small."""
    threads = 128 if case.device.kind == "cpu" or case.BT > 16 else 32
    return first_valid(case, *(FwdIntraConfig(BK=BK, threads=threads) for BK in (128, 64, 32)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """q, k and the cumsum in, two BT x BT matrices out; two products over K and an inverse of BT^3 / 3."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * (2 * BT * BT * p.K + 2 * BT**3 // 3)
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops)


# operands and results rounded to io once each: 2^-9 (bf16), 2^-11 (fp16)
TOLERANCE = {"bf16": 6e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage(
    "fwd_intra",
    INPUTS,
    OUTPUTS,
    FwdIntraConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("beta", "rank"),
    scalars=("scale",),
)
