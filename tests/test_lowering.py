"""Every stage of every default plan becomes CUDA for Hopper, at any head dimension: lowered, neither compiled nor run.

``make test`` draws two stages of one plan a pass; ``make test-all`` (KDA_TL_TEST_ALL=1) takes all stages, for every
width of K and V as stored.
"""

from __future__ import annotations

import itertools
import os
import random

import pytest
from cases import draw_problem

from kda_tl import templates
from kda_tl.core.problem import DTYPES, Problem
from kda_tl.core.stage import Case
from kda_tl.database.gpus import known_device
from kda_tl.runtime.compile import generate_source
from kda_tl.runtime.dispatch import default_plan

HOPPER = known_device("nvidia_h200")
WIDTHS = range(32, 257, 32)
WIDTHS_BY_16 = tuple(width for width in WIDTHS if width > 64 and width % 64)  # what wgmma's 64 rows do not divide
ALL = os.environ.get("KDA_TL_TEST_ALL", "0") not in ("", "0")


@pytest.mark.parametrize("name", ["fwd_state", "bwd_state"])
@pytest.mark.parametrize("width", WIDTHS_BY_16)
def test_products_of_rows_that_64_does_not_divide(name: str, width: int, rng: random.Random) -> None:
    stage = templates.load(name)
    problem = draw_problem(rng, K=width - rng.randrange(32), V=rng.choice((64, 96)), dtype=rng.choice(("bf16", "fp16")))
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "tl::mma_sync" in generate_source(stage, case, stage.default(case))


@pytest.mark.parametrize("has_dt_bias", [False, True])
def test_gradients_of_a_safe_gate_without_A_log(has_dt_bias: bool, rng: random.Random) -> None:
    """Nothing is summed for A_log then: TileLang 0.1.15 stops at a sum in registers that nothing is added to."""
    stage, fixed = templates.load("bwd_gradients"), {"dtype": "bf16", "scalar_gate": False, "rank": 1, "K": 64, "V": 64}
    problem = draw_problem(rng, gate="safe", has_A_log=False, has_dt_bias=has_dt_bias, direction="bwd", **fixed)
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "dA_log_part" not in generate_source(stage, case, stage.default(case))


def draw_widths() -> list[tuple[str, int, int]]:
    """(pass, width of K, width of V) of the plans that are lowered; all of them are many minutes."""
    if ALL:
        return list(itertools.product(("fwd", "bwd"), WIDTHS, WIDTHS))
    rng = random.Random(os.environ["KDA_TL_TEST_SEED"])
    return [(direction, rng.choice(WIDTHS_BY_16), rng.choice(WIDTHS)) for direction in ("fwd", "bwd")]


@pytest.mark.parametrize(("direction", "width_k", "width_v"), draw_widths())
def test_default_plans_lower(direction: str, width_k: int, width_v: int, rng: random.Random) -> None:
    K, V = width_k - rng.randrange(32), width_v - rng.randrange(32)
    gates: Problem = draw_problem(rng, K=K, V=V, H=1, HV=2, dtype=rng.choice(DTYPES), direction=direction)
    problem = Problem(**{**vars(gates), "scalar_gate": False, "rank": 1})
    plan = default_plan(problem, HOPPER)
    case = Case(problem=problem, device=HOPPER, BT=plan.BT, BC=plan.BC)
    pairs = [(stage, config) for name, config in plan.stages if (stage := templates.load(name)).tensors_of(problem)[1]]
    for stage, config in pairs if ALL else rng.sample(pairs, min(2, len(pairs))):
        assert "__global__" in generate_source(stage, case, config), (problem.key, stage.name)
