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

from kda_tl.core.stage import Case, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.tile import FP32_TOLERANCE
from kda_tl.templates.sm90.fwd_recurrence import recurrence_cost, recurrence_reference
from kda_tl.templates.sm90.outputs import OUTPUTS, OutputConfig, build_recurrence
from kda_tl.templates.sm90.recurrence import FACTORS, TABLES

INPUTS = {"v": "tokens HV V : io", **FACTORS, "starts": "NS HV VP KP : f32", **TABLES}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    factors = {name: getattr(x, name) for name in FACTORS}
    states = x.starts[:, :, : case.problem.V].to(x.decay.dtype).unbind()
    return recurrence_reference(case, states, x.v, x.segments, x.chunk_tokens, factors)


@dataclass(frozen=True, kw_only=True)
class FwdResumeConfig(OutputConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; early:
    whether values are multiplied before all of their chunk has come.
    """


def build(case: Case, config: FwdResumeConfig) -> Any:
    """The kernel: every segment has a state to start from."""

    @T.macro
    def load_state(state, starts, i_s, segments, i_h, v0, k0):
        for i, j in T.Parallel(*state.shape):
            state[i, j] = starts[i_s, i_h, v0 + i, k0 + j]

    return build_recurrence("fwd_resume", case, config, INPUTS["starts"], load_state)


def default(case: Case) -> FwdResumeConfig:
    """One warpgroup that multiplies."""
    return first_valid(case, FwdResumeConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, what prep made and a state a segment in; o and final states out; six products a chunk."""
    p = case.problem
    states = sizes["NS"] * p.HV * p.VP * p.KP + sizes["N"] * p.HV * p.K * p.V * p.final_state
    return recurrence_cost(case, sizes, states)


# state, values and the result rounded to io a chunk; the recurrence contracts, so errors do not grow
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage("fwd_resume", INPUTS, OUTPUTS, FwdResumeConfig, build, reference, default, cost, TOLERANCE)
