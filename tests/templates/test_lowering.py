"""Every stage of every default plan becomes CUDA for Hopper, at any head dimension: lowered, neither compiled nor run.

``make test`` draws some stages, one of them at a width of K that 64 does not divide; the shards and ``make test-all``
take all stages, for every width of K as stored, and for one width of V of each, the run's draw: all pairs would be an
hour and a half of processor time. A stage that plans of both passes have is lowered once for a problem: which pass it
is in, it does not know (test_specialise.py).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.cases import KDA, draw_problem

from kda_tl import templates
from kda_tl.core.problem import DIRECTIONS, DTYPES, Problem
from kda_tl.core.stage import Case, Config
from kda_tl.database.gpus import known_device
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.lower import generate_source
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.pipelines import PIPELINES

HOPPER = known_device("nvidia_h200")
WIDTHS = range(32, 257, 32)
WIDTHS_V = (*WIDTHS, 320, 416, 512)  # value channels are parted among blocks
STAGES = {stage.name: stage for name in ("staged", "staged_backward") for stage in PIPELINES[name].stages}
WIDTHS_BY_16 = tuple(width for width in WIDTHS if width > 64 and width % 64)  # what wgmma's 64 rows do not divide
PLACES = [(name, "by 16" if width in WIDTHS_BY_16 else "by 64", width) for name in STAGES for width in WIDTHS]


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("name", ["fwd_state", "bwd_state"])
@pytest.mark.parametrize("width", WIDTHS_BY_16)
def test_products_of_rows_that_64_does_not_divide(name: str, width: int, rng: random.Random) -> None:
    stage = templates.load(name)
    problem = draw_problem(rng, K=width - rng.randrange(32), V=rng.choice((64, 96)), dtype=rng.choice(("bf16", "fp16")))
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "tl::mma_sync" in generate_source(stage, case, stage.default(case))


@pytest.mark.rest
def test_equations_of_integers_do_not_end_the_process() -> None:
    """Whether values of 144 channels can be loaded as vectors ended Python in Z3 4.15.4."""
    problem = Problem(H=1, HV=2, K=64, V=144, tokens=0, dtype="bf16", gate="log")
    case, stage = Case(problem=problem, device=HOPPER, BT=64, BC=16), templates.load("bwd_wy")
    assert "__global__" in generate_source(stage, case, replace(stage.default(case), BV=32))


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("name", ["fwd_state", "bwd_state"])
def test_nothing_after_the_loop(name: str, states: bool, rng: random.Random) -> None:
    """Without a state to write, nothing but the loop needs a block's sequence: TileLang 0.1.15 may load ahead of it."""
    stage = templates.load(name)
    problem = draw_problem(rng, K=128, V=64, dtype="bf16", initial_state=states, final_state=states)
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "seq_chunks" in generate_source(stage, case, stage.default(case))


def test_parameters_are_in_the_order_of_their_launch() -> None:
    """A kernel's text does not tell: tensors of one kind would be swapped without a word."""
    tensors = {"v": "tokens HV V : io", "do": "tokens HV V : io"}
    case = Case(problem=draw_problem(random.Random(0), K=64, V=64), device=HOPPER, BT=64, BC=16)

    def swapped(d_o, v, scale):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(TypeError, match="swapped takes d_o, v, scale, but is launched with v, d_o"):
        prim_func(case, tensors)(swapped)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "K"), [("fwd_gdn_recurrence", 128), ("fwd_recurrence", 128), ("fwd_recurrence", 256), ("fwd_resume", 128)]
)
def test_states_between_chunks_without_the_last(name: str, K: int) -> None:
    stage = templates.load(name)
    problem = Problem(H=1, HV=1, K=K, V=128, tokens=0, dtype="bf16", gate="log", intermediate_states=True)
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "(14, 128)" in generate_source(stage, case, stage.default(case))


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("name", ["fwd_state", "bwd_state"])
def test_states_of_a_gpu_without_tma(name: str, rng: random.Random) -> None:
    """Nothing is loaded ahead there: TileLang 0.1.15 stops at a loop whose length the launch does not tell."""
    stage = templates.load(name)
    problem = draw_problem(rng, K=64, V=64, dtype="bf16")
    case = Case(problem=problem, device=known_device("nvidia_a100_sxm4_80gb"), BT=64, BC=16)
    config = stage.default(case)
    assert config.num_stages == 1 and "num_stages=2 needs a GPU with TMA" in replace(config, num_stages=2).reject(case)
    assert "seq_chunks" in generate_source(stage, case, config)


@pytest.mark.rest
@pytest.mark.parametrize("has_dt_bias", [False, True])
def test_gradients_of_a_safe_gate_without_A_log(has_dt_bias: bool, rng: random.Random) -> None:
    """Nothing is summed for A_log then: TileLang 0.1.15 stops at a sum in registers that nothing is added to."""
    stage, fixed = templates.load("bwd_gradients"), {"dtype": "bf16", "scalar_gate": False, "rank": 1, "K": 64, "V": 64}
    problem = draw_problem(rng, gate="safe", has_A_log=False, has_dt_bias=has_dt_bias, direction="bwd", **fixed)
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "dA_log_part" not in generate_source(stage, case, stage.default(case))


@pytest.mark.rest(draws=1, per="rows")
@pytest.mark.parametrize(("name", "rows", "width_k"), PLACES)
def test_defaults_of_stages_lower(name: str, rows: str, width_k: int, rng: random.Random) -> None:
    lower_defaults(name, width_k, rng.choice(WIDTHS_V), rng)


@pytest.mark.rest
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_defaults_of_hoppers_own_stages_lower(direction: str, rng: random.Random) -> None:
    """They are for values that 64 divides."""
    own: dict[str, Config] = {}
    while not own:
        K, V = rng.choice((64, 128, rng.randrange(33, 257))), rng.choice(range(64, 513, 64))
        problem = replace(draw_problem(rng, K=K, V=V, H=1, HV=2, dtype="bf16", **KDA), direction=direction)
        plan = default_plan(problem, HOPPER)
        own = {name: config for name, config in plan.stages if name not in STAGES}
    case = Case(problem=problem, device=HOPPER, BT=plan.BT, BC=plan.BC)
    for name, config in own.items():
        if (stage := templates.load(name)).tensors_of(problem)[1]:
            assert "__global__" in generate_source(stage, case, config), (problem.key, name)


def test_default_plans_have_no_other_stages(rng: random.Random) -> None:
    """Or the tests above would leave them out."""
    for direction in DIRECTIONS:
        for width_k in WIDTHS:
            for width_v in WIDTHS_V:
                problem = draw_widths(rng, width_k, width_v, direction)
                if problem.V % 64 or problem.dtype != "bf16":
                    assert {name for name, _ in default_plan(problem, HOPPER).stages} <= STAGES.keys()


def draw_widths(rng: random.Random, width_k: int, width_v: int, direction: str) -> Problem:
    """A problem of chunk_kda; widths of K and V as stored."""
    K, V = width_k - rng.randrange(32), width_v - rng.randrange(32)
    drawn = draw_problem(rng, K=K, V=V, H=1, HV=2, dtype=rng.choice(DTYPES), **KDA)
    return replace(drawn, direction=direction)


def lower_defaults(name: str, width_k: int, width_v: int, rng: random.Random) -> None:
    """A stage as default plans of both passes have it for one problem: once, where it is one kernel for both."""
    stage, lowered = STAGES[name], set()
    while not lowered:  # bwd_reduce has nothing to do for some problems
        drawn = draw_widths(rng, width_k, width_v, "fwd")
        for direction in DIRECTIONS:
            problem = replace(drawn, direction=direction)
            plan = default_plan(problem, HOPPER)
            case = Case(problem=problem, device=HOPPER, BT=plan.BT, BC=plan.BC)
            if name not in dict(plan.stages) or not stage.tensors_of(problem)[1]:
                continue
            kernel = stage.specialise(case), plan.config(name)
            if kernel not in lowered:
                assert "__global__" in generate_source(stage, case, plan.config(name)), problem.key
                lowered.add(kernel)
