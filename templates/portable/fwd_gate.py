"""Gate: activation and chunk-local inclusive cumsum of the log decay.

    G[r] = sum_{i <= r} log2(alpha_i),   alpha = exp(gate(g))          per chunk, value head and key channel

Rows past the end of a sequence repeat the last value, so row BT-1 always holds the decay of the whole chunk;
channels past K hold 0. A scalar gate has one channel. Where a token has several rows, its decay comes before all of
them: g is read in the first only, and the others add 0 to the sum, whatever the gate.
Source: Kimi Linear, arXiv:2510.26692, section 3; gates as in FLA v0.6.0 ``fla/ops/kda/gate.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.reference import activate_gate
from kda_tl.templates.common.chunks import first_rows, split_chunks
from kda_tl.templates.common.decays import log2_decay
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of
from kda_tl.templates.common.tile import FORGOTTEN, RCP_LN2, Tile, has_gate, prim_func

INPUTS = {
    "g": "tokens HV G : g",
    "A_log": "HV : f32 ? has_A_log",
    "dt_bias": "HV G : f32 ? has_dt_bias",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {"g_cumsum": "NT HV BT GP : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of g."""
    p = case.problem
    log_alpha = activate_gate(x.g, gate=p.gate, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=x.lower_bound)
    chunks = split_chunks(log_alpha * RCP_LN2, x.chunk_tokens, case.BT, width=p.GP)  # zeros past the end
    return {"g_cumsum": torch.where(first_rows(case.BT, p.rank, x.g.device), chunks, 0.0).cumsum(dim=2)}


@dataclass(frozen=True, kw_only=True)
class FwdGateConfig(Config):
    """BK: channels a thread block scans, or heads of a scalar gate; threads a block; unroll: rows loaded at once."""

    BK: int = tunable(64, 32, 64, 128)
    threads: int = tunable(32, 32, 64)
    unroll: int = tunable(16, 8, 16, 32)

    def reject(self, case: Case) -> str | None:
        """Every thread owns at least one lane, and chunks are whole multiples of the unrolled rows."""
        if not case.problem.scalar_gate and case.problem.KP % self.BK:
            return f"BK={self.BK} does not divide the padded head dimension {case.problem.KP}"
        if self.threads > self.BK:
            return f"threads={self.threads} exceeds the BK={self.BK} lanes of a block"
        if case.BT % self.unroll:
            return f"unroll={self.unroll} does not divide BT={case.BT}"
        return None


def at_gate(problem: Problem, i_h: Any, lane: Any) -> tuple[Any, Any]:
    """Head and channel of a lane: lanes are the channels of head i_h, or, of a scalar gate, the heads."""
    return (lane, 0) if problem.scalar_gate else (i_h, lane)


def at_cumsum(problem: Problem, i_t: Any, i_h: Any, i: Any, lane: Any) -> tuple[Any, Any, Any, Any]:
    """Where the cumsum of row i of a chunk and of a lane is, or its gradient."""
    head, channel = at_gate(problem, i_h, lane)
    return i_t, head, i, channel


def build(case: Case, config: FwdGateConfig) -> Any:
    """The kernel: one thread block a (chunk, head, BK channels); each thread walks down its own channels.

    A scalar gate's block takes BK heads instead, a lane a head: memory holds the gates of a token side by side.
    """
    p, BT, BK, unroll = case.problem, case.BT, config.BK, config.unroll
    tile, heads = Tile.of(case), Heads.of(p)
    lanes = heads.HV if p.scalar_gate else p.K
    blocks = T.ceildiv(heads.HV, BK) if p.scalar_gate else p.KP // BK * heads.HV  # of a chunk

    def stored(lane):
        return lane < lanes if p.scalar_gate else True  # channels are padded, heads are not

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def fwd_gate(g, A_log, dt_bias, chunk_tokens, g_cumsum, lower_bound):
        with tile.kernel(chunk_tokens.shape[0] * blocks, threads=config.threads) as i_block:
            if p.scalar_gate:
                i_t, i_k, i_h = split_block(i_block, (chunk_tokens.shape[0], blocks))
            else:
                i_t, i_h, i_k = split_block(i_block, (chunk_tokens.shape[0], heads.HV), p.KP // BK)
            k0 = i_k * BK
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            raw = tile.fragment((unroll, BK), g.dtype)
            total, bias = tile.fragments(2, (BK,))
            rate = tile.fragment((BK if p.scalar_gate else 1,))
            T.clear(total)
            if p.gate != "log":
                T.clear(bias)
            if p.scalar_gate:
                for j in tile.parallel(BK):
                    rate[j] = T.if_then_else(k0 + j < lanes, T.exp(A_log[k0 + j]), 1.0) if p.has_A_log else 1.0
            else:
                rate[0] = 1.0
                if p.has_A_log:
                    rate[0] = T.exp(A_log[i_h])
            if p.has_dt_bias:
                for j in tile.parallel(BK):
                    bias[j] = T.if_then_else(k0 + j < lanes, dt_bias[at_gate(p, i_h, k0 + j)], 0.0)
            for i_outer in T.serial(BT // unroll):
                for i_inner in T.unroll(unroll):  # all loads of a group are issued before the first is used
                    for j in tile.parallel(BK):
                        i = i_outer * unroll + i_inner
                        inside = has_gate(p, i, count) and k0 + j < lanes
                        raw[i_inner, j] = T.if_then_else(inside, g[(start + i, *at_gate(p, i_h, k0 + j))], 0)
                for i_inner in T.unroll(unroll):
                    for j in tile.parallel(BK):
                        i = i_outer * unroll + i_inner
                        exact = log2_decay(p, raw[i_inner, j], rate[j if p.scalar_gate else 0], bias[j], lower_bound)
                        step = T.if_then_else(exact < FORGOTTEN, FORGOTTEN, exact)
                        total[j] = total[j] + T.if_then_else(has_gate(p, i, count) and k0 + j < lanes, step, 0.0)
                        if stored(k0 + j):
                            g_cumsum[at_cumsum(p, i_t, i_h, i, k0 + j)] = total[j]

    return fwd_gate


def default(case: Case) -> FwdGateConfig:
    """A warp over 64 channels (32 where K is short): 8 bytes a thread and row. Over 32 heads for a scalar gate."""
    if case.problem.scalar_gate:
        return FwdGateConfig(BK=32)
    return first_valid(case, FwdGateConfig(BK=64), FwdGateConfig(BK=32))


def cost(case: Case, sizes: Sizes) -> Cost:
    """g once in, its fp32 cumsum once out; a few operations an element."""
    tokens = sizes["tokens"] // case.problem.rank  # each has one gate, in the first of its rows
    flops = 8 * tokens * case.problem.HV * case.problem.G
    return cost_of(case, {**sizes, "tokens": tokens}, INPUTS | OUTPUTS, flops)


# fp32 scan of up to 64 terms: 64 * 2^-24 bounds the relative error; fast exp2/log1p are 2 ulp each
TOLERANCE = {"bf16": 1e-5, "fp16": 1e-5, "fp32": 1e-5}
STAGE = Stage(
    "fwd_gate",
    INPUTS,
    OUTPUTS,
    FwdGateConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("gate", "rank"),
    scalars=("lower_bound",),
)
