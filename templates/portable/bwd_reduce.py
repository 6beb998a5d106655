"""Gate parameters, backward: sums over the chunks, always in the same order.

    dA_log = sum over NT of dA_log_part          ddt_bias = sum over NT of ddt_bias_part

A stage of its own because sums across thread blocks would need atomics, whose order no two runs share.
Source: the chain rule on fwd_gate, whose parameters every chunk shares.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit
from kda_tl.templates.common.tile import Tile, prim_func

INPUTS = {"dA_log_part": "NT HV : f32 ? has_A_log", "ddt_bias_part": "NT HV GP : f32 ? has_dt_bias"}
OUTPUTS = {"dA_log": "HV : f32 ? has_A_log", "ddt_bias": "HV G : f32 ? has_dt_bias"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of the parts."""
    outputs = {}
    if x.dA_log_part is not None:
        outputs["dA_log"] = x.dA_log_part.sum(0)
    if x.ddt_bias_part is not None:
        outputs["ddt_bias"] = x.ddt_bias_part.sum(0)[:, : case.problem.G]
    return outputs


@dataclass(frozen=True, kw_only=True)
class BwdReduceConfig(Config):
    """BK: channels of ddt_bias a block sums, if there are several; rows: chunks it reads at once; threads a block."""

    BK: int = tunable(32, 32, 64, 128)
    rows: int = tunable(64, 16, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """BK divides; every thread has an element to add and can hold its share; the partial sums fit shared memory."""
        if case.problem.scalar_gate and self.BK != 32:
            return "BK has no meaning for a scalar gate"
        if self.threads > self.rows * self.BK // 4:
            return f"threads={self.threads} leaves threads less than 4 of {self.rows} x {self.BK} sums"
        registers, smem = self.rows * self.BK // self.threads, self.rows * (self.BK + 1) * 4
        return find_misfit(case, self, smem=smem, registers=registers, room=64)


def build(case: Case, config: BwdReduceConfig) -> Any:
    """The kernel: one thread block a (value head, BK channels); row r sums the chunks r, r + rows, ... in turn."""
    p, BK, rows = case.problem, config.BK, config.rows
    K, NT, heads = p.K, T.dynamic("NT"), Heads.of(p)
    KB = p.KP // BK if p.has_dt_bias and not p.scalar_gate else 1
    tile = Tile.of(case)

    def at(x, *index):
        """Where a head's number is, in [NT, HV], [NT, HV, 1], [HV] or [HV, 1]."""
        return index + (0,) * (len(x.shape) - len(index))

    @T.macro
    def sum_scalars(parts, sums, i_h, k0):
        """A number a chunk and head."""
        scalar_sums = tile.fragment((rows,))
        scalar_rows = tile.shared((rows,), "float32")
        scalar = tile.fragment((1,))
        tile.clear(scalar_sums, scalar)
        for i_r in T.serial(T.ceildiv(NT, rows)):
            for r in tile.parallel(rows):
                inside = (i_r * rows + r < NT) & (k0 == 0)
                scalar_sums[r] += T.if_then_else(inside, parts[at(parts, i_r * rows + r, i_h)], 0.0)
        T.copy(scalar_sums, scalar_rows)
        for r in T.serial(rows):
            scalar[0] += scalar_rows[r]
        if k0 == 0:
            sums[at(sums, i_h)] = scalar[0]

    @prim_func(case, INPUTS | OUTPUTS, NT=NT, **heads.sizes)
    def bwd_reduce(dA_log_part, ddt_bias_part, dA_log, ddt_bias):
        with tile.kernel(heads.HV * KB, threads=config.threads) as i_block:
            i_h = i_block // KB
            k0 = i_block % KB * BK
            if p.has_A_log:
                sum_scalars(dA_log_part, dA_log, i_h, k0)
            if p.has_dt_bias and p.scalar_gate:
                sum_scalars(ddt_bias_part, ddt_bias, i_h, k0)
            elif p.has_dt_bias:
                sums = tile.fragment((rows, BK))
                sum_rows = tile.shared((rows, BK), "float32")
                total = tile.fragment((BK,))
                tile.clear(sums, total)
                for i_r in T.serial(T.ceildiv(NT, rows)):
                    for r, j in tile.parallel(rows, BK):
                        inside = i_r * rows + r < NT
                        sums[r, j] += T.if_then_else(inside, ddt_bias_part[i_r * rows + r, i_h, k0 + j], 0.0)
                T.copy(sums, sum_rows)
                for r in T.serial(rows):
                    for j in tile.parallel(BK):
                        total[j] += sum_rows[r, j]
                for j in tile.parallel(BK):
                    if k0 + j < K:
                        ddt_bias[i_h, k0 + j] = total[j]

    return bwd_reduce


def default(case: Case) -> BwdReduceConfig:
    """Narrow tiles: a launch has few blocks, so each should have little to add."""
    return first_valid(case, BwdReduceConfig())


def cost(case: Case, sizes: Sizes) -> Cost:
    """The parts in, one sum of each out."""
    sums = case.problem.HV * (case.problem.has_A_log + case.problem.has_dt_bias * case.problem.GP)
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops=sums * sizes["NT"])


# fp32 sums: 10000 terms of random sign in 16 rows err by sqrt(10000 / 16 + 16) * 2^-24 = 2e-6
TOLERANCE = {"bf16": 1e-5, "fp16": 1e-5, "fp32": 1e-5}
STAGE = Stage("bwd_reduce", INPUTS, OUTPUTS, BwdReduceConfig, build, reference, default, cost, TOLERANCE, depends=())
