"""Queries and keys that value heads share, backward: the sum over the value heads of a group.

    dx = sum of dx_part over the group's value heads          x: q, k

A stage of its own because sums across thread blocks would need atomics, whose order no two runs share. Parts are those
of the caller's q and k, norms included: the norm's backward is linear in the gradient that it is given.
Source: the chain rule on the repetition of a head for its value heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, tunable
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90.hopper import HopperConfig

INPUTS = dict.fromkeys(("dq_part", "dk_part"), "tokens HV K : io ? grouped")
OUTPUTS = dict.fromkeys(("dq", "dk"), "tokens H K : io ? grouped")


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of the parts."""
    p = case.problem
    return {name: part.unflatten(1, (p.H, p.group)).sum(2) for name, part in (("dq", x.dq_part), ("dk", x.dk_part))}


@dataclass(frozen=True, kw_only=True)
class BwdHeadsConfig(HopperConfig):
    """rows: tokens of a head that a block takes; threads a block. By default a thread has 16 channels of K = 128."""

    NEEDS: ClassVar[str] = "it adds what instructions of sm_90 made"
    rows: int = tunable(16, 8, 16, 32)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """The device and channels of the stage before it; every thread has 8 bytes to add, and room for its share."""
        if reason := super().reject(case):
            return reason
        if case.problem.K not in (64, 128):
            return f"K={case.problem.K} is not 64 or 128 channels, which its tiles are"
        elements = self.rows * case.problem.K // self.threads
        if elements < 4:
            return f"threads={self.threads} leaves a thread less than 4 of {self.rows} x {case.problem.K} elements"
        if elements > 64:
            return f"rows={self.rows} gives a thread {elements} elements of either gradient: use fewer rows"
        return None


def build(case: Case, config: BwdHeadsConfig) -> Any:
    """The kernel: one thread block a (rows of tokens, query/key head)."""
    p, rows = case.problem, config.rows
    K, heads, tokens = p.K, Heads.of(p), T.dynamic("tokens")

    @T.macro
    def add(part, dx, t0, i_h, first, count):
        total = T.alloc_fragment((rows, K), "float32")
        T.clear(total)
        for m in T.serial(count):
            for i, j in T.Parallel(rows, K):
                own = T.if_then_else(t0 + i < tokens, part[t0 + i, first + m, j], 0)
                total[i, j] = total[i, j] + T.cast(own, "float32")
        for i, j in T.Parallel(rows, K):
            if t0 + i < tokens:
                dx[t0 + i, i_h, j] = T.cast(total[i, j], TL_DTYPE[p.dtype])

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, **heads.sizes)
    def bwd_heads(dq_part, dk_part, dq, dk):
        # without groups there is nothing to add: no flow launches it, and no tensor tells how many tokens there are
        with T.Kernel(T.ceildiv(tokens, rows) * heads.H if p.grouped else 1, threads=config.threads) as i_block:
            if p.grouped:
                i_r, i_h, _ = split_block(i_block, (T.ceildiv(tokens, rows), heads.H))
                t0 = i_r * rows
                first, count = heads.of_values(i_h)
                add(dq_part, dq, t0, i_h, first, count)
                add(dk_part, dk, t0, i_h, first, count)

    return bwd_heads


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Parts of all value heads in, sums out."""
    p = case.problem
    io = 4 if p.dtype == "fp32" else 2
    return Cost(bytes=2 * sizes["tokens"] * (p.HV + p.H) * p.K * io, flops=2 * sizes["tokens"] * p.HV * p.K)


# fp32 sums of a few parts; only the results are rounded: 2^-9 (bf16), 2^-11 (fp16)
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
STAGE = Stage(
    "bwd_heads", INPUTS, OUTPUTS, BwdHeadsConfig, build, reference, BwdHeadsConfig.default, cost, TOLERANCE, depends=()
)
