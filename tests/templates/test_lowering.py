"""Every stage of every default plan becomes CUDA for Hopper, at any head dimension: lowered, neither compiled nor run.

``make test`` draws an eighth of the stages of a plan of each pass, and of another of one pass whose K 64 does not
divide; the shards and ``make test-all`` take all stages, for every width of K as stored, and for three widths of V of
each. Which three is the run's draw: all pairs would be an hour and a half of processor time.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.cases import draw_problem, random_of_run

from kda_tl import templates
from kda_tl.core.problem import DTYPES, Problem
from kda_tl.core.stage import Case, Stage
from kda_tl.database.gpus import known_device
from kda_tl.runtime.dispatch import default_plan
from kda_tl.runtime.lower import generate_source
from kda_tl.templates.common.tile import prim_func

HOPPER = known_device("nvidia_h200")
WIDTHS = range(32, 257, 32)
WIDTHS_V = (*WIDTHS, 320, 416, 512)  # value channels are parted among blocks
SAMPLES = range(3)  # widths of V for one of K
EIGHTHS = range(8)  # of a plan's stages: all of them take minutes
WIDTHS_BY_16 = tuple(width for width in WIDTHS if width > 64 and width % 64)  # what wgmma's 64 rows do not divide


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("name", ["fwd_state", "bwd_state"])
@pytest.mark.parametrize("width", WIDTHS_BY_16)
def test_products_of_rows_that_64_does_not_divide(name: str, width: int, rng: random.Random) -> None:
    stage = templates.load(name)
    problem = draw_problem(rng, K=width - rng.randrange(32), V=rng.choice((64, 96)), dtype=rng.choice(("bf16", "fp16")))
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    assert "tl::mma_sync" in generate_source(stage, case, stage.default(case))


def test_equations_of_integers_do_not_end_the_process() -> None:
    """Whether values of 144 channels can be loaded as vectors ended Python in Z3 4.15.4."""
    problem = Problem(H=1, HV=2, K=64, V=144, tokens=0, dtype="bf16", gate="log")
    case, stage = Case(problem=problem, device=HOPPER, BT=64, BC=16), templates.load("bwd_wy")
    assert "__global__" in generate_source(stage, case, replace(stage.default(case), BV=32))


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


@pytest.mark.rest(draws=1, per="direction")
@pytest.mark.parametrize("eighth", EIGHTHS)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("width_k", WIDTHS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_default_plans_lower(direction: str, width_k: int, sample: int, eighth: int, rng: random.Random) -> None:
    """Stages that know no V at one of its widths: what else is another draw of the same kernel."""
    width_v = random_of_run(f"widths of V beside {width_k}, {direction}").sample(WIDTHS_V, len(SAMPLES))[sample]
    lower_stages(direction, width_k, width_v, eighth, rng, any_v=sample == 0)


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("eighth", EIGHTHS)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_default_plans_of_an_odd_width_lower(direction: str, eighth: int, rng: random.Random) -> None:
    lower_stages(direction, rng.choice(WIDTHS_BY_16), rng.choice(WIDTHS), eighth, rng)


def knows_v(stage: Stage) -> bool:
    """Whether a tensor of the stage has a dimension of V."""
    return any({"V", "VP"} & set(spec.dims) for spec in stage.specs.values())


def lower_stages(
    direction: str, width_k: int, width_v: int, eighth: int, rng: random.Random, any_v: bool = True
) -> None:
    """Every eighth stage of a plan; widths of K and V as stored; without any_v only stages that know V."""
    K, V = width_k - rng.randrange(32), width_v - rng.randrange(32)
    gates: Problem = draw_problem(rng, K=K, V=V, H=1, HV=2, dtype=rng.choice(DTYPES), direction=direction)
    problem = Problem(**{**vars(gates), "scalar_gate": False, "rank": 1})
    plan = default_plan(problem, HOPPER)
    case = Case(problem=problem, device=HOPPER, BT=plan.BT, BC=plan.BC)
    pairs = [(stage, config) for name, config in plan.stages if (stage := templates.load(name)).tensors_of(problem)[1]]
    for stage, config in [(stage, config) for stage, config in pairs if any_v or knows_v(stage)][eighth::8]:
        assert "__global__" in generate_source(stage, case, config), (problem.key, stage.name)
