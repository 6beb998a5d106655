"""Queries and keys, backward: the sum over the value heads of a group, and the backward of the L2 norm.

    dx = rstd (d - x^ <x^, d>)          d = sum over the group's value heads,  x^ = rstd x          x: q, k

Without l2norm, dx = d.
Source: the chain rule on ``kda_tl.reference.l2norm``, whose epsilon lies inside the root: it is in rstd, and nowhere
else.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import join_chunks, split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit
from kda_tl.templates.common.tile import Tile, prim_func

INPUTS = {
    "dq_part": "NT HV BT KP : f32",
    "dk_part": "NT HV BT KP : f32",
    "q": "tokens H K : io",
    "k": "tokens H K : io",
    "rstd": "NT HV 2 BT : f32 ? l2norm",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {"dq": "tokens H K : io", "dk": "tokens H K : io"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of dq_part."""
    p, dtype = case.problem, x.dq_part.dtype
    outputs = {}
    for n, (name, part, y) in enumerate((("dq", x.dq_part, x.q), ("dk", x.dk_part.to(dtype), x.k))):
        d = part.unflatten(1, (p.H, p.group)).sum(2)
        if x.rstd is not None:
            factor = x.rstd[:, :: p.group, n, :, None].to(dtype)  # the same for all value heads of a group
            x_hat = factor * split_chunks(y.to(dtype), x.chunk_tokens, case.BT, width=p.KP)
            d = factor * (d - x_hat * (x_hat * d).sum(-1, keepdim=True))
        outputs[name] = join_chunks(d, x.chunk_tokens, y.shape[0], p.K)
    return outputs


@dataclass(frozen=True, kw_only=True)
class BwdQkConfig(Config):
    """rows: tokens of a chunk that a block takes; threads a block."""

    rows: int = tunable(16, 8, 16, 32, 64)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """Rows divide the chunk; every thread holds at least 4 channels, and not more than registers do."""
        if case.BT % self.rows:
            return f"rows={self.rows} does not divide BT={case.BT}"
        elements = self.rows * case.problem.KP // self.threads  # of a gradient, and as many of its query
        if case.device.kind == "cuda" and elements < 4:
            return f"threads={self.threads} leaves a thread less than 16 bytes of {self.rows} x {case.problem.KP}"
        return find_misfit(case, self, registers=elements, room=64)


def build(case: Case, config: BwdQkConfig) -> Any:
    """The kernel: one thread block a (chunk, query/key head, rows), the queries first, then the keys."""
    p, rows, KP = case.problem, config.rows, case.problem.KP
    K, RB, heads = p.K, case.BT // config.rows, Heads.of(p)
    tile = Tile.of(case)

    @T.macro
    def project(n, part, x, dx, rstd, i_t, i_h, i_hv, group, r0, start, count):
        d = tile.fragment((rows, KP))
        if p.l2norm:
            x_hat, product = tile.fragments(2, (rows, KP))
            factor, dot = tile.fragments(2, (rows,))
        for i, j in tile.parallel(rows, KP):
            d[i, j] = part[i_t, i_hv, r0 + i, j]
        for m in T.serial(group - 1):
            for i, j in tile.parallel(rows, KP):
                d[i, j] = d[i, j] + part[i_t, i_hv + 1 + m, r0 + i, j]
        if p.l2norm:
            for i in tile.parallel(rows):
                factor[i] = rstd[i_t, i_hv, n, r0 + i]  # the same for all value heads of a group
            for i, j in tile.parallel(rows, KP):
                raw = T.if_then_else((i < count) & (j < K), x[start + i, i_h, j], 0)
                x_hat[i, j] = factor[i] * T.cast(raw, "float32")
            for i, j in tile.parallel(rows, KP):
                product[i, j] = x_hat[i, j] * d[i, j]
            T.clear(dot)
            T.reduce_sum(product, dot, dim=1, clear=False)
            for i, j in tile.parallel(rows, KP):
                d[i, j] = factor[i] * (d[i, j] - x_hat[i, j] * dot[i])
        for i, j in tile.parallel(rows, KP):
            if (i < count) & (j < K):
                dx[start + i, i_h, j] = T.cast(d[i, j], tile.io)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def bwd_qk(dq_part, dk_part, q, k, rstd, chunk_tokens, dq, dk):
        with tile.kernel(chunk_tokens.shape[0] * heads.H * RB, threads=config.threads) as i_block:
            i_t, i_h, i_r = split_block(i_block, (chunk_tokens.shape[0], heads.H), RB)
            i_hv, group = heads.of_values(i_h)
            r0 = i_r * rows
            start, count = chunk_tokens[i_t, 0] + r0, chunk_tokens[i_t, 1] - r0
            project(0, dq_part, q, dq, rstd, i_t, i_h, i_hv, group, r0, start, count)
            project(1, dk_part, k, dk, rstd, i_t, i_h, i_hv, group, r0, start, count)

    return bwd_qk


def default(case: Case) -> BwdQkConfig:
    """16 channels a thread at K = 128; more threads where K is longer."""
    return first_valid(case, BwdQkConfig(threads=256 if case.device.kind != "cpu" and case.problem.KP > 128 else 128))


def cost(case: Case, sizes: Sizes) -> Cost:
    """Both partials in, q and k too where they are normalised; dq and dk out; a sum and a projection."""
    p = case.problem
    parts, results = 2 * sizes["NT"] * p.HV * case.BT * p.KP, 2 * sizes["tokens"] * p.H * p.K
    read = INPUTS if p.l2norm else {"dq_part": INPUTS["dq_part"], "dk_part": INPUTS["dk_part"]}
    return cost_of(case, sizes, read | OUTPUTS, flops=parts + 6 * results * p.l2norm)


# fp32 sums of up to 256 products, sqrt(256) * 2^-24; only the results are rounded: 2^-9 (bf16), 2^-11 (fp16)
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
STAGE = Stage("bwd_qk", INPUTS, OUTPUTS, BwdQkConfig, build, reference, default, cost, TOLERANCE, depends=())
