"""Recurrence of segments for Hopper: that of whole sequences, but every segment starts from a state of its own.

    V'^T = (V^T + S^T k_neg^T) A^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

The states that segments start from are known, see fwd_merge, so segments of one sequence run side by side.
Source: as fwd_recurrence, whose body this is.
"""

from collections.abc import Mapping
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.fwd_recurrence import recurrence_cost, recurrence_reference
from kda_tl.templates.sm90.hopper import FACTORS, TABLES
from kda_tl.templates.sm90.outputs import OUTPUTS, OutputConfig, build_recurrence
from kda_tl.templates.sm90.recurrence import TOLERANCE

INPUTS = {"v": "tokens HV V : io", **FACTORS, "starts": "NS HV VP KP : f32", **TABLES}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    return recurrence_reference(case, x, x.starts[:, :, : case.problem.V].to(x.decay.dtype).unbind())


def build(case: Case, config: OutputConfig) -> Any:
    """The kernel: every segment has a state to start from."""

    @T.macro
    def load_state(state, start, k0):
        for i, j in T.Parallel(*state.shape):
            state[i, j] = start.states[start.i_s, start.i_h, start.v0 + i, k0 + j]

    return build_recurrence("fwd_resume", case, config, INPUTS["starts"], load_state)


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, what prep made and a state a segment in; o, final states and those between chunks out."""
    return recurrence_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_resume",
    INPUTS,
    OUTPUTS,
    OutputConfig,
    build,
    reference,
    OutputConfig.default,
    cost,
    TOLERANCE,
    depends=("num_sms",),
)
