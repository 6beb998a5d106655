"""Recurrence of segments for Hopper: that of whole sequences, but every segment starts from a state of its own.

    V'^T = (V^T + S^T k_neg^T) A^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

The states that segments start from are known, see fwd_merge, so segments of one sequence run side by side.
Source: as fwd_recurrence, whose body this is.
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
    recurrence_cost,
    recurrence_reference,
)
from kda_tl.templates._tile import FP32_TOLERANCE, annotate

INPUTS = {
    "v": "tokens HV V : io",
    "A": "NT HV LOWER HALF : io",
    "Aqk": "NT HV LOWER HALF : io",
    "k_neg": "NT HV BT KP : io",
    "qg": "NT HV BT KP : io",
    "kg": "NT HV BT KP : io",
    "decay": "NT HV KP : f32",
    "starts": "NS HV VP KP : f32",
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
    starts: torch.Tensor,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    factors = {"A": A, "Aqk": Aqk, "k_neg": k_neg, "qg": qg, "kg": kg, "decay": decay}
    states = starts[:, :, : case.problem.V].to(decay.dtype).unbind()
    return recurrence_reference(case, states, v, segments, chunk_tokens, factors)


@dataclass(frozen=True, kw_only=True)
class FwdResumeConfig(OutputConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; early:
    whether values are multiplied before all of their chunk has come.
    """


def build(case: Case, config: FwdResumeConfig) -> Any:
    """The kernel: a block a multiprocessor takes (segment, value head, BV channels) in turn, chunks in order."""
    p = case.problem
    HV, VB = p.HV, p.V // config.BV
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @T.macro
    def load_state(state, starts, i_s, segments, i_h, v0, k0):
        for i, j in T.Parallel(*state.shape):
            state[i, j] = starts[i_s, i_h, v0 + i, k0 + j]

    recur = build_recurrence(case, config, load_state)

    @T.prim_func
    def fwd_resume(
        v: annotate(case, INPUTS["v"], tokens=tokens),
        A: annotate(case, INPUTS["A"], NT=NT),
        Aqk: annotate(case, INPUTS["Aqk"], NT=NT),
        k_neg: annotate(case, INPUTS["k_neg"], NT=NT),
        qg: annotate(case, INPUTS["qg"], NT=NT),
        kg: annotate(case, INPUTS["kg"], NT=NT),
        decay: annotate(case, INPUTS["decay"], NT=NT),
        starts: annotate(case, INPUTS["starts"], NS=NS),
        segments: annotate(case, INPUTS["segments"], NS=NS),
        chunk_tokens: annotate(case, INPUTS["chunk_tokens"], NT=NT),
        o: annotate(case, OUTPUTS["o"], tokens=tokens),
        ht: annotate(case, OUTPUTS["ht"], N=N),
        h: annotate(case, OUTPUTS["h"], NT=NT),
    ):
        blocks = T.min(NS * HV * VB, case.device.num_sms)
        with T.Kernel(blocks, threads=config.consumers + WARPGROUP) as i_block:
            recur(i_block, blocks, v, A, Aqk, k_neg, qg, kg, decay, starts, segments, chunk_tokens, o, ht, h)

    return fwd_resume


def default(case: Case) -> FwdResumeConfig:
    """One warpgroup that multiplies."""
    return prefer(case, FwdResumeConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, what prep made and a state a segment in; o and final states out; six products a chunk."""
    p = case.problem
    states = sizes["NS"] * p.HV * p.VP * p.KP + sizes["N"] * p.HV * p.K * p.V * p.final_state
    return recurrence_cost(case, sizes, states)


STAGE = Stage(
    name="fwd_resume",
    inputs=INPUTS,
    outputs=OUTPUTS,
    config=FwdResumeConfig,
    build=build,
    reference=reference,
    default=default,
    cost=cost,
    # state, values and the result rounded to io a chunk; the recurrence contracts, so errors do not grow
    tolerance={"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE},
)
