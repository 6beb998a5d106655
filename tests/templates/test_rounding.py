"""Tolerances of GPU tests are what rounded operands cost, and not much more."""

from __future__ import annotations

import pytest
import torch
from support.cases import F64, draw_call
from support.gpu_cases import WHOLE, tolerance_of
from support.rounding import rounded_errors

from kda_tl.database.gpus import known_device

NAMES = (
    "prep-safe-K100-V192",
    "prep-softplus-K128-V128-GVA-vk",
    "prep-gdn-softplus-K100-V192",
    "prep-gdn-log-K256-V128",
)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", NAMES)
def test_tolerance_is_the_cost_of_rounding(name: str, seed: int) -> None:
    """Of slow gates, where a state keeps the errors of all chunks; within a factor of 2.5 of what is allowed."""
    _, problem = WHOLE[name]
    raw = torch.randn((333, problem.HV, problem.G), generator=torch.Generator().manual_seed(seed), dtype=F64) - 7.0
    call = draw_call(problem, (333,), seed, varlen=False, g=-5.0 * raw.sigmoid() if problem.gate == "log" else raw)
    errors = rounded_errors(call, call.case(known_device("nvidia_h100_80gb_hbm3"), 64, 16))
    assert tolerance_of(problem) / 2.5 < max(errors) < tolerance_of(problem), f"{errors} {problem.key}"
