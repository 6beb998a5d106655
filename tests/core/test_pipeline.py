"""Pipelines: which stages a problem launches."""

from __future__ import annotations

import pytest

from kda_tl.core.problem import Problem
from kda_tl.templates.pipelines import PIPELINES


@pytest.mark.parametrize(
    ("name", "HV", "sums"),
    [("gdn_walk", 2, False), ("gdn_walk", 4, False), ("gdn_walk", 6, True), ("gdn_scan", 4, True)],
)
def test_gradients_of_heads_are_summed_by_a_stage_where_no_other_does(name: str, HV: int, sums: bool) -> None:
    problem = Problem(H=2, HV=HV, K=128, V=128, tokens=64, scalar_gate=True, direction="bwd")
    assert ("bwd_heads" in [stage.name for stage in PIPELINES[name].stages_of(problem)]) is sums
