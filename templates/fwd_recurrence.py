"""Recurrence for Hopper: the transposed state stays in registers, values and output in the same kernel.

    V'^T = (V^T + S^T k_neg^T) A^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

S^T is the accumulator of one product and, rounded, the register operand of others, so the state never goes through
shared memory; V^T is read transposed by the matrix unit. A warp keeps chunks coming through the tensor memory
accelerator, the others multiply. What prep computes of a chunk is all they read beside v.
Source: Kimi Linear, arXiv:2510.26692, section 3; the transposed form is derived above.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.stage import Case, Cost, Stage, prefer
from kda_tl.templates._recurrence import (
    WARPGROUP,
    OutputConfig,
    build_recurrence,
    read_state,
    recurrence_cost,
    recurrence_reference,
)
from kda_tl.templates._tile import FP32_TOLERANCE, annotate, at_state

INPUTS = {
    "v": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "h0": "N HV K V : f32 ? initial_state",
    "segments": "NS 4 : i32",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {
    "o": "tokens HV V : io",
    "ht": "N HV K V : f32 ? final_state",
    "h": "NT HV KP VP : io ? intermediate_states",
}


def reference(
    case: Case,
    *,
    v: torch.Tensor,
    A: torch.Tensor,
    Aqk: torch.Tensor,
    k_neg: torch.Tensor,
    qg: torch.Tensor,
    kg: torch.Tensor,
    decay: torch.Tensor,
    h0: torch.Tensor | None,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    factors = {"A": A, "Aqk": Aqk, "k_neg": k_neg, "qg": qg, "kg": kg, "decay": decay}
    starts = [read_state(case, h0, n, decay) for n in segments[:, 2].tolist()]
    return recurrence_reference(case, starts, v, segments, chunk_tokens, factors)


@dataclass(frozen=True, kw_only=True)
class FwdRecurrenceConfig(OutputConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; early:
    whether values are multiplied before all of their chunk has come.
    """


def build(case: Case, config: FwdRecurrenceConfig) -> Any:
    """The kernel: a block a multiprocessor takes (sequence, value head, BV channels) in turn, chunks in order."""
    p = case.problem
    HV, K, VB = p.HV, p.K, p.V // config.BV
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @T.macro
    def load_state(state, h0, i_s, segments, i_h, v0, k0):
        if p.initial_state:
            i_n = segments[i_s, 2]
            for i, j in T.Parallel(*state.shape):
                state[i, j] = T.if_then_else(k0 + j < K, h0[at_state(p, i_n, i_h, k0 + j, v0 + i)], 0.0)
        else:
            T.clear(state)

    recur = build_recurrence(case, config, load_state)

    @T.prim_func
    def fwd_recurrence(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        A: annotate(case, INPUTS["A"], NT=NT),
        Aqk: annotate(case, INPUTS["Aqk"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        qg: annotate(case, INPUTS["qg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        h0: annotate(case, INPUTS["h0"], N=N),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        o: annotate(case, OUTPUTS["o"], tokens=tokens),
        ht: annotate(case, OUTPUTS["ht"], N=N),
        h: annotate(case, OUTPUTS["h"], NT=NT),
    ):
        blocks = T.min(NS * HV * VB, case.device.num_sms)
        with T.Kernel(blocks, threads=config.consumers + WARPGROUP) as i_block:
            recur(i_block, blocks, v, A, Aqk, k_neg, qg, kg, decay, h0, segments, chunk_tokens, o, ht, h)

    return fwd_recurrence


def default(case: Case) -> FwdRecurrenceConfig:
    """64 channels a block, 128 where all heads' blocks of 64 are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // 64) > case.device.num_sms
    configs = [FwdRecurrenceConfig(BV=128, early=early) for early in (False, True)] if wide else []
    return prefer(case, *configs, FwdRecurrenceConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made in; o out; six products a chunk."""
    p = case.problem
    return recurrence_cost(case, sizes, sizes["N"] * p.HV * p.K * p.V * (p.initial_state + p.final_state))


STAGE = Stage(
    name="fwd_recurrence",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=FwdRecurrenceConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # state, values and the result rounded to io a chunk; the recurrence contracts, so errors do not grow
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
