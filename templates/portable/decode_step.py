"""A few tokens a sequence through its state: the recurrence itself, token by token, for any target.

    S <- exp(g + gk + gv) S        v_new = step (v - S^T k)        S <- S + k v_new^T        o = scale S^T q

A state stays in registers from a sequence's first token to its last. It comes from a slot of a pool and goes back
there, or to another slot, or token by token to several; which ones, tensors on the device say. Index tensors are read
as int32 whatever their type: of an int64 every second word.
Source: Kimi Linear, arXiv:2510.26692, and Gated Delta Networks, arXiv:2412.06464; kda_tl.reference_decode.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.reference_decode import decode_reference
from kda_tl.templates.common.decays import log2_decay
from kda_tl.templates.common.heads import divide, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit
from kda_tl.templates.common.states import (
    DEPENDS,
    INDEX_TENSORS,
    INPUTS,
    OUTPUTS,
    SCALARS,
    STATES,
    at_element,
    find_snapshot_row,
    find_source,
    find_target,
    find_tokens,
)
from kda_tl.templates.common.tile import FORGOTTEN, L2NORM_EPS, RCP_LN2, Tile, at_state, beta_factor, prim_func


@dataclass(frozen=True, kw_only=True)
class DecodeStepConfig(Config):
    """BV: value channels a block; threads a block."""

    BV: int = tunable(32, 8, 16, 32, 64)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """Blocks divide the padded channels, and a state fits the registers."""
        return find_misfit(case, self, registers=2 * self.BV * case.problem.KP // self.threads, room=128)


def build(case: Case, config: DecodeStepConfig) -> Any:
    """The kernel: one thread block a (sequence, value head, BV channels), tokens in order."""
    p, BV = case.problem, config.BV
    K, V, KP, VB = p.K, p.V, p.KP, p.VP // BV
    tile, has = Tile.of(case), p.options.__contains__
    edges, HV = T.dynamic("edges"), T.dynamic("HV")  # sizes may not have names of tensors
    N = edges - 1

    @T.macro
    def load(x, row, offset, i_hv, v0, state):
        wide = T.cast(row, "int64")
        for i, j in tile.parallel(BV, KP):
            inside = (v0 + i < V) & (j < K)
            state[i, j] = T.if_then_else(inside, x[wide, offset + at_element(p, i_hv, j, v0 + i)], 0)

    @T.macro
    def store(state, x, row, offset, i_hv, v0):
        wide = T.cast(row, "int64")
        for i, j in tile.parallel(BV, KP):
            if (v0 + i < V) & (j < K):
                x[wide, offset + at_element(p, i_hv, j, v0 + i)] = T.cast(state[i, j], x.dtype)

    @T.macro
    def clear(o, start, count, i_hv, v0):
        for t in T.serial(count):
            for i in tile.parallel(BV):
                if v0 + i < V:
                    o[T.cast(start + t, "int64"), i_hv, v0 + i] = T.cast(0.0, o.dtype)

    @T.macro
    def normalise(row, squares, square):
        for i, j in tile.parallel(1, KP):
            squares[i, j] = row[j] * row[j]
        T.reduce_sum(squares, square, dim=1)
        for j in tile.parallel(KP):
            row[j] = row[j] * T.rsqrt(square[0] + L2NORM_EPS)

    @prim_func(case, INPUTS | OUTPUTS, N=N, HV=HV, **{"N+1": edges})
    def decode_step(
        q, k, v, g, gk, gv, beta, A_log, dt_bias, bounds, pool, slots, accepted, targets, snapshots, snapshot_rows,
        parents, o, ht, scale, lower_bound, group, steps, pad_slot_id, slots_width,
    ):  # fmt: skip
        with tile.kernel(N * HV * VB, threads=config.threads) as i_block:
            i_n, i_hv, i_v = split_block(i_block, (N, HV), VB)
            v0 = i_v * BV
            i_h, _ = divide(i_hv, (T.cast(group, "int32"),))
            T.assume(i_h >= 0)
            start, count = find_tokens(p, i_n, bounds, steps)
            slot, null = find_source(p, i_n, slots, accepted, pad_slot_id, slots_width)
            row = find_snapshot_row(p, i_n, snapshot_rows)
            absent = null | (slot >= pool.shape[0]) if p.initial_state else null
            absent = absent | (row < 0) | (row >= snapshots.shape[0]) if has("tree") else absent
            state, products = tile.fragments(2, (BV, KP))
            q_row, k_row, decay = tile.shareds(3, (KP,), "float32")
            squares, square, rate = tile.fragment((1, KP)), tile.fragment((1,)), tile.fragment((1,))
            value, result = tile.fragments(2, (BV,))
            rate[0] = T.exp(A_log[i_hv]) if p.has_A_log else 1.0
            if has("ragged"):
                if i_n == N - 1:  # tokens after the last sequence, with which captured calls are filled up
                    clear(o, start + count, o.shape[0] - (start + count), i_hv, v0)
            if absent:
                clear(o, start, count, i_hv, v0)
                T.clear(state)
            else:
                if p.initial_state:
                    load(pool, slot, 0, i_hv, v0, state)
                else:
                    T.clear(state)
                for t in T.serial(count):
                    token = T.cast(start + t, "int64")
                    if has("tree"):
                        parent = T.alloc_var("int32")
                        parent = T.if_then_else(t == 0, -1, parents[i_n, t, 0])
                        if parent >= 0:
                            load(snapshots, row, parent * (HV * K * V), i_hv, v0, state)
                        elif p.initial_state:
                            load(pool, slot, 0, i_hv, v0, state)
                        else:
                            T.clear(state)
                    for j in tile.parallel(KP):
                        q_row[j] = T.if_then_else(j < K, T.cast(q[token, i_h * K + j], "float32"), 0.0)
                        k_row[j] = T.if_then_else(j < K, T.cast(k[token, i_h * K + j], "float32"), 0.0)
                    for j in tile.parallel(KP):
                        exponent = T.float32(0.0)
                        if has("has_g"):
                            channel = i_hv if p.scalar_gate else i_hv * K + j
                            bias = dt_bias[i_hv, 0 if p.scalar_gate else j] if p.has_dt_bias else 0.0
                            exponent = log2_decay(p, g[token, channel], rate[0], bias, lower_bound)
                            exponent = T.if_then_else(exponent < FORGOTTEN, FORGOTTEN, exponent)
                        if has("key_gate"):
                            exponent = exponent + RCP_LN2 * T.cast(gk[token, i_hv * K + j], "float32")
                        decay[j] = T.if_then_else(j < K, T.exp2(exponent), 0.0)
                    if p.l2norm:
                        normalise(q_row, squares, square)
                        normalise(k_row, squares, square)
                    for i, j in tile.parallel(BV, KP):
                        if has("value_gate"):
                            of_value = T.if_then_else(v0 + i < V, T.cast(gv[token, i_hv * V + v0 + i], "float32"), 0.0)
                            state[i, j] = state[i, j] * (decay[j] * T.exp2(RCP_LN2 * of_value))
                        else:
                            state[i, j] = state[i, j] * decay[j]
                    for i, j in tile.parallel(BV, KP):
                        products[i, j] = state[i, j] * k_row[j]
                    T.reduce_sum(products, result, dim=1)
                    for i in tile.parallel(BV):
                        step = T.float32(1.0)
                        if has("wide_beta"):
                            step = T.if_then_else(v0 + i < V, beta_factor(p, beta[token, i_hv * V + v0 + i]), 0.0)
                        elif has("has_beta"):
                            step = beta_factor(p, beta[token, i_hv])
                        raw = T.if_then_else(v0 + i < V, T.cast(v[token, i_hv * V + v0 + i], "float32"), 0.0)
                        value[i] = step * (raw - result[i])
                    for i, j in tile.parallel(BV, KP):
                        state[i, j] = state[i, j] + value[i] * k_row[j]
                    for i, j in tile.parallel(BV, KP):
                        products[i, j] = state[i, j] * q_row[j]
                    T.reduce_sum(products, result, dim=1)
                    for i in tile.parallel(BV):
                        if v0 + i < V:
                            o[token, i_hv, v0 + i] = T.cast(scale * result[i], o.dtype)
                    if has("snapshots"):
                        if row >= 0:
                            store(state, snapshots, row, t * (HV * K * V), i_hv, v0)
                    if has("each_token"):
                        target = find_target(p, i_n, t, slots, targets, pad_slot_id)
                        if target >= 0:
                            store(state, pool, target, 0, i_hv, v0)
                if has("updates") and not has("each_token"):
                    target = find_target(p, i_n, 0, slots, targets, pad_slot_id)
                    if target >= 0:
                        store(state, pool, target, 0, i_hv, v0)
            if p.final_state:
                for i, j in tile.parallel(BV, KP):
                    if (v0 + i < V) & (j < K):
                        ht[at_state(p, i_n, i_hv, j, v0 + i)] = state[i, j]

    return decode_step


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of v: the recurrence, token by token. Gives the pool and snapshots after it, too."""
    p, has = case.problem, case.problem.options.__contains__
    N, HV = len(x.bounds) - 1, x.v.shape[1] // p.V
    lead = (1, len(x.v)) if has("ragged") else (N, int(x.steps))
    state = (HV, p.V, p.K) if p.state_v_first else (HV, p.K, p.V)
    gates = (HV,) if p.scalar_gate else (HV, p.K)
    heads = {"q": (-1, p.K), "k": (-1, p.K), "v": (HV, p.V), "g": gates, "gk": (HV, p.K), "gv": (HV, p.V)}
    heads["beta"] = (HV, p.V) if has("wide_beta") else (HV,)
    words = {name: None if (y := getattr(x, name)) is None else y[..., 0] for name in INDEX_TENSORS}
    slots, targets = words["slots"], words["targets"]
    if slots is not None and not has("accepted") and (targets is not None or not has("each_token")):
        slots = slots[:, 0]
    tensors: dict[str, Any] = {
        name: None if (y := getattr(x, name)) is None else y.view(*lead, *dims) for name, dims in heads.items()
    }
    found = decode_reference(
        **tensors,
        scale=x.scale,
        gate=p.gate,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        lower_bound=x.lower_bound,
        beta_mode=p.beta,
        use_l2norm=p.l2norm,
        initial_state=None if x.pool is None else x.pool.view(-1, *state),
        state_v_first=p.state_v_first,
        cu_seqlens=words["bounds"] if has("ragged") else None,
        ssm_state_indices=slots,
        output_state_indices=targets if targets is None or has("each_token") else targets[:, 0],
        num_accepted_tokens=words["accepted"],
        pad_slot_id=int(x.pad_slot_id),
        update=has("updates"),
        intermediate_states=None if x.snapshots is None else x.snapshots.view(len(x.snapshots), -1, *state),
        intermediate_state_indices=words["snapshot_rows"],
        retrieve_parent_token=words["parents"],
        dtype=x.v.dtype,
    )
    made: dict[str, Any] = {"o": found.o.view(-1, HV, p.V), "ht": found.final_state}
    if found.pool is not None:
        made["pool"] = found.pool.view(x.pool.shape)
    if found.intermediate_states is not None:
        made["snapshots"] = found.intermediate_states.view(x.snapshots.shape)
    return made


def default(case: Case) -> DecodeStepConfig:
    """Blocks of few channels: a state of its own each, and many of them even where sequences are few."""
    return first_valid(case, *(DecodeStepConfig(BV=BV) for BV in (32, 16, 8)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """What tokens bring and take, and the states of their sequences: in once, and out as often as they are kept.

    A token takes seven operations an element: a product for the decay, and two each for the sums with k and q and for
    the correction. Of a pool only those slots count that a call reads or writes.
    """
    p, (N, tokens) = case.problem, (sizes["N"], sizes["tokens"])
    moved = cost_of(case, sizes, {name: text for name, text in (INPUTS | OUTPUTS).items() if name not in STATES}, 0)
    written = {"each_token": tokens, "updates": N if "each_token" not in p.options else 0, "snapshots": tokens}
    states = N * p.initial_state + sum(count for name, count in written.items() if name in p.options)
    element = p.HV * p.K * p.V * (4 if p.state_dtype == "fp32" else 2)
    return Cost(bytes=moved.bytes + states * element, flops=7 * tokens * p.HV * p.K * p.V)


TOLERANCE = {"bf16": 6e-3, "fp16": 2e-3, "fp32": 1e-5}
STAGE = Stage(
    "decode_step",
    INPUTS,
    OUTPUTS,
    DecodeStepConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=DEPENDS,
    scalars=SCALARS,
)
