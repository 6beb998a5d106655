"""Gate, backward: reverse cumsum of the decay's gradient, then the activations of the gate and of the step size.

    dlog_alpha[r] = sum_{i >= r} dG[i]                    within a chunk; dG and log_alpha in nats
    log:       dg = dlog_alpha
    softplus:  dg = -a sigmoid(x) dlog_alpha              dA_log = sum log_alpha dlog_alpha
    safe:      dg = lower_bound a s (1 - s) dlog_alpha    dA_log = sum x dg            x = g + dt_bias, a = exp(A_log),
    beta:      dbeta = c s(beta) (1 - s(beta)) db         ddt_bias = sum dg            s = sigmoid(a x), c = 1 or 2

The sums of dA_log and ddt_bias run over the tokens of one chunk; bwd_reduce adds the chunks. Of a token of several rows
only the first has a gate, as in fwd_gate: dg of the others is zero.
Gradients are those of the gate without the forward's cut at 2^-150. Only softplus steps below it get none: theirs is
alpha times something, 0 even in float64 beside the others, and what a cumsum in fp32 makes of it would be multiplied
by a step that may be millions of nats.
Source: the chain rule on fwd_gate; gates as in FLA v0.6.0 ``fla/ops/kda/gate.py``.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.reference import activate_gate
from kda_tl.templates.common.chunks import first_rows, join_chunks, split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of
from kda_tl.templates.common.slopes import Slopes
from kda_tl.templates.common.tile import FORGOTTEN, RCP_LN2, Tile, has_gate, prim_func
from kda_tl.templates.portable.fwd_gate import at_cumsum, at_gate

INPUTS = {
    "dG": "NT HV BT GP : f32",
    "db": "NT HV BT : f32",
    "g": "tokens HV G : g",
    "A_log": "HV : f32 ? has_A_log",
    "dt_bias": "HV G : f32 ? has_dt_bias",
    "beta": "tokens HV : beta",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "dg": "tokens HV G : g",
    "dbeta": "tokens HV : beta",
    "dA_log_part": "NT HV : f32 ? has_A_log",
    "ddt_bias_part": "NT HV GP : f32 ? has_dt_bias",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of dG."""
    p, BT, dtype = case.problem, case.BT, x.dG.dtype
    tokens = x.g.shape[0]
    A_log, dt_bias = (None if y is None else y.to(dtype) for y in (x.A_log, x.dt_bias))
    y = x.g.to(dtype) if dt_bias is None else x.g.to(dtype) + dt_bias
    slope = 1.0 if A_log is None else A_log.exp()[:, None]
    d_cumsum = torch.where(first_rows(BT, p.rank, x.g.device), x.dG.flip(2).cumsum(2).flip(2), 0.0)
    d_log_alpha = join_chunks(d_cumsum, x.chunk_tokens, tokens, p.G)
    if p.gate == "softplus":
        log_alpha = activate_gate(x.g.to(dtype), gate=p.gate, A_log=A_log, dt_bias=dt_bias)
        d_log_alpha = torch.where(log_alpha * RCP_LN2 < FORGOTTEN, 0.0, d_log_alpha)
        dg, of_slope = -slope * torch.sigmoid(y) * d_log_alpha, log_alpha * d_log_alpha
    elif p.gate == "safe":
        dg = x.lower_bound * slope * torch.sigmoid(slope * y) * torch.sigmoid(-slope * y) * d_log_alpha
        of_slope = y * dg
    else:
        dg, of_slope = d_log_alpha, torch.zeros_like(d_log_alpha)
    dbeta = join_chunks(x.db[..., None], x.chunk_tokens, tokens, 1)[..., 0]
    if p.beta != "plain":
        raw = x.beta.to(dtype)
        dbeta = (2 if p.beta == "sigmoid2" else 1) * torch.sigmoid(raw) * torch.sigmoid(-raw) * dbeta
    outputs = {"dg": dg, "dbeta": dbeta}
    if p.has_A_log:
        outputs["dA_log_part"] = split_chunks(of_slope, x.chunk_tokens, BT).sum((2, 3))
    if p.has_dt_bias:
        of_bias = torch.zeros_like(dg) if p.gate == "log" else dg
        outputs["ddt_bias_part"] = split_chunks(of_bias, x.chunk_tokens, BT, width=p.GP).sum(2)
    return outputs


@dataclass(frozen=True, kw_only=True)
class BwdGateConfig(Config):
    """BK: channels a block scans at once, or heads of a scalar gate; threads a block; unroll: rows loaded at once."""

    BK: int = tunable(128, 32, 64, 128, 256)
    threads: int = tunable(64, 32, 64, 128)
    unroll: int = tunable(16, 8, 16, 32)

    def reject(self, case: Case) -> str | None:
        """Every thread owns a lane and has registers for its loads; the unrolled rows divide a chunk."""
        if not case.problem.scalar_gate and case.problem.KP % self.BK:
            return f"BK={self.BK} does not divide the padded head dimension {case.problem.KP}"
        if case.BT % self.unroll:
            return f"unroll={self.unroll} does not divide BT={case.BT}"
        if case.device.kind == "cpu":
            return None if self.threads == 64 else "threads has no meaning on the CPU target"
        if self.threads > self.BK:
            return f"threads={self.threads} exceeds the BK={self.BK} lanes of a block"
        loads = 2 * self.unroll * self.BK // self.threads  # of dG and of g
        return f"{loads} loads in flight are more than a thread has registers for" if loads > 128 else None


def build(case: Case, config: BwdGateConfig) -> Any:
    """The kernel: one thread block a (chunk, head), BK channels in turn; each thread walks up its own channels.

    A scalar gate's block takes BK heads at once, a lane a head, as in fwd_gate.
    """
    p, BT, BK, unroll = case.problem, case.BT, config.BK, config.unroll
    HV, scalar, gated = (heads := Heads.of(p)).HV, p.scalar_gate, p.gate != "log"
    lanes, blocks, steps = (HV, T.ceildiv(HV, BK), 1) if scalar else (p.K, HV, p.KP // BK)
    tile, slopes = Tile.of(case), Slopes(p)

    def lane(i_h, i_k, j):
        return (i_h if scalar else i_k) * BK + j

    def stored(lane):
        return lane < lanes if scalar else True  # channels are padded, heads are not

    def load(dG, i_t, i_h, i, lane):
        element = dG[at_cumsum(p, i_t, i_h, i, lane)]
        return T.if_then_else(stored(lane), element, 0.0) if scalar else element

    def of_step(i, count, d):
        """The gradient of row i's own step from that of the cumsum; rows past the end have zeros."""
        return d if p.rank == 1 else T.if_then_else(has_gate(p, i, count), d, 0.0)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def bwd_gate(dG, db, g, A_log, dt_bias, beta, chunk_tokens, dg, dbeta, dA_log_part, ddt_bias_part, lower_bound):
        with tile.kernel(chunk_tokens.shape[0] * blocks, threads=config.threads) as i_block:
            # the head; of a scalar gate, which BK heads
            i_t, i_h, _ = split_block(i_block, (chunk_tokens.shape[0], blocks))
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            if scalar:
                for i, j in tile.parallel(BT, BK):
                    h = i_h * BK + j
                    if (i < count) & (h < HV):
                        dbeta[start + i, h] = T.cast(db[i_t, h, i] * slopes.beta(beta[start + i, h]), dbeta.dtype)
            else:
                for i in tile.parallel(BT):
                    if i < count:
                        dbeta[start + i, i_h] = T.cast(db[i_t, i_h, i] * slopes.beta(beta[start + i, i_h]), dbeta.dtype)

            d_cumsum = tile.fragment((unroll, BK))
            total = tile.fragment((BK,))
            if gated:
                raw = tile.fragment((unroll, BK), g.dtype)
                bias = tile.fragment((BK,))
                rate = tile.fragment((BK if scalar else 1,))
                T.clear(bias)
                if scalar:
                    for j in tile.parallel(BK):
                        h = i_h * BK + j
                        rate[j] = T.if_then_else(h < HV, T.exp(A_log[h]), 1.0) if p.has_A_log else 1.0
                else:
                    rate[0] = 1.0
                    if p.has_A_log:
                        rate[0] = T.exp(A_log[i_h])
            if p.has_A_log:
                of_slope = tile.fragment((1, BK))
                T.clear(of_slope)
                if not scalar:
                    slope_sum = tile.fragment((1,))
            if p.has_dt_bias:
                of_bias = tile.fragment((BK,))
            for i_k in T.serial(steps):
                T.clear(total)
                if p.has_dt_bias:
                    T.clear(of_bias)
                    if gated:
                        for j in tile.parallel(BK):
                            inside = lane(i_h, i_k, j) < lanes
                            bias[j] = T.if_then_else(inside, dt_bias[at_gate(p, i_h, lane(i_h, i_k, j))], 0.0)
                for i_outer in T.serial(BT // unroll):
                    for i_inner in T.unroll(unroll):  # all loads of a group are issued before the first is used
                        for j in tile.parallel(BK):
                            i = BT - 1 - i_outer * unroll - i_inner
                            d_cumsum[i_inner, j] = load(dG, i_t, i_h, i, lane(i_h, i_k, j))
                            if gated:
                                inside = has_gate(p, i, count) and lane(i_h, i_k, j) < lanes
                                at = (start + i, *at_gate(p, i_h, lane(i_h, i_k, j)))
                                raw[i_inner, j] = T.if_then_else(inside, g[at], 0)
                    for i_inner in T.unroll(unroll):
                        for j in tile.parallel(BK):
                            i = BT - 1 - i_outer * unroll - i_inner
                            total[j] = total[j] + d_cumsum[i_inner, j]
                            d_cumsum[i_inner, j] = of_step(i, count, total[j])
                            if gated:
                                x = T.cast(raw[i_inner, j], "float32") + bias[j]
                                d_cumsum[i_inner, j] = of_step(i, count, total[j]) * slopes.gate(
                                    x, rate[j if scalar else 0], lower_bound
                                )
                                if p.has_A_log:
                                    d = d_cumsum[i_inner, j] if p.gate == "safe" else of_step(i, count, total[j])
                                    of_slope[0, j] = of_slope[0, j] + slopes.A_log(x, rate[j if scalar else 0], d)
                                if p.has_dt_bias:
                                    of_bias[j] = of_bias[j] + d_cumsum[i_inner, j]
                    for i_inner in T.unroll(unroll):
                        for j in tile.parallel(BK):
                            i = BT - 1 - i_outer * unroll - i_inner
                            if (i < count) & (lane(i_h, i_k, j) < lanes):
                                at = (start + i, *at_gate(p, i_h, lane(i_h, i_k, j)))
                                dg[at] = T.cast(d_cumsum[i_inner, j], dg.dtype)
                if p.has_dt_bias:
                    for j in tile.parallel(BK):
                        if stored(lane(i_h, i_k, j)):
                            ddt_bias_part[(i_t, *at_gate(p, i_h, lane(i_h, i_k, j)))] = of_bias[j]
            if p.has_A_log:
                if scalar:
                    for j in tile.parallel(BK):
                        if i_h * BK + j < HV:
                            dA_log_part[i_t, i_h * BK + j] = of_slope[0, j]
                else:
                    T.reduce_sum(of_slope, slope_sum, dim=1)
                    dA_log_part[i_t, i_h] = slope_sum[0]

    return bwd_gate


def default(case: Case) -> BwdGateConfig:
    """All channels of K = 128 at once, two a thread: 8 bytes of dG a thread and row; fewer where K is short.

    For a scalar gate a warp over 32 heads.
    """
    if case.problem.scalar_gate:
        return first_valid(case, BwdGateConfig(BK=32, threads=32), BwdGateConfig(BK=32))
    return first_valid(case, BwdGateConfig(BK=128), BwdGateConfig(BK=64, threads=32), BwdGateConfig(BK=32, threads=32))


def cost(case: Case, sizes: Sizes) -> Cost:
    """dG and db in, g too unless its gradient does not need it; dg and dbeta out; some operations an element."""
    p = case.problem
    read = {name: INPUTS[name] for name in INPUTS if name != "g" and (name != "beta" or p.beta != "plain")}
    if p.gate != "log":
        read["g"] = "first_rows HV G : g"  # of a token, only the first row has a gate
    sizes = {**sizes, "first_rows": sizes["tokens"] // p.rank}
    return cost_of(case, sizes, read | OUTPUTS, flops=12 * sizes["tokens"] * p.HV * p.G)


# dg and dbeta rounded to io once: 2^-9 (bf16), 2^-12 (fp16); fp32 sums of up to 64 x 256 terms of either sign
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-4}
STAGE = Stage(
    "bwd_gate",
    INPUTS,
    OUTPUTS,
    BwdGateConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("gate", "beta", "rank"),
    scalars=("lower_bound",),
)
