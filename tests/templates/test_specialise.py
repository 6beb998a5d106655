"""Kernels depend on what their stage says of a problem, and on nothing else: neither on numbers of heads nor on flags.

Every problem has all that the stage does not name set to something else than :meth:`kda_tl.core.stage.Stage.specialise`
sets. Kernels are one if TileLang is given one function for both; where it is given two, their texts are compared after
lowering. ``make test`` draws some stages, the shards take all.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.cases import draw_problem, family_of
from support.chunked import STAGES

from kda_tl.core.device import Device, cpu_device
from kda_tl.core.problem import BETAS, DTYPES, GATES, RANKS, Problem
from kda_tl.core.stage import Case, Stage
from kda_tl.core.toolchain import import_tilelang
from kda_tl.database.gpus import known_device
from kda_tl.runtime.lower import generate_source, number_names, pass_configs
from kda_tl.templates.pipelines import PIPELINES

HOPPER = known_device("nvidia_h200")
FOR_HOPPER = {"dtype": "bf16", "K": 128, "V": 128}
STAGED = [stage.name for name in ("staged", "staged_backward") for stage in PIPELINES[name].stages]
PORTABLE = list(dict.fromkeys(STAGED))
PLACES = [(name, "cuda") for name in STAGES] + [(name, "cpu") for name in PORTABLE]
CHOICES: dict[str, tuple[Any, ...]] = {
    "K": (32, 64, 96, 128),
    "V": (32, 64, 96, 128),
    "gate": GATES,
    "beta": BETAS,
    "rank": RANKS,
    "operator": ("chunk_kda", "chunk_gated_delta_rule"),
    "direction": ("fwd", "bwd", "step"),
    "options": ((), ("has_g", "pooled")),
    **dict.fromkeys(("dtype", "g_dtype", "beta_dtype", "state_dtype"), DTYPES),
}


def draw_case(rng: random.Random, stage: Stage, device: Device) -> Case:
    """A case that the stage's default takes, with shared heads or without.

    Portable stages are lowered for 32 tokens a chunk: ``bwd_intra`` takes over a minute for 64, and names the same.
    """
    while True:
        fixed = FOR_HOPPER if stage.name not in PORTABLE else {"K": rng.choice((32, 64, 100)), "V": 64}
        if case := try_case(rng, stage, device, 32, **fixed):
            return case


def draw_small_case(rng: random.Random, stage: Stage) -> Case:
    """A case for Hopper of as few channels as the stage's default takes, whose kernel is lowered in seconds."""
    for width in (32, 64, 128):
        for _ in range(20):  # what it takes may depend on other draws too
            if case := try_case(rng, stage, HOPPER, 16, dtype="bf16", K=width, V=width):
                return case
    raise AssertionError(f"{stage.name} takes no case")


def try_case(rng: random.Random, stage: Stage, device: Device, BT: int, **fixed: Any) -> Case | None:
    """A drawn case, unless the stage's default rejects it or there is nothing to do; Hopper's own stages have BT 64."""
    family = {} if stage.name in PORTABLE else family_of(stage.name)
    drawn = draw_problem(rng, **fixed, **family, H=1, HV=rng.choice((1, 2)), direction=stage.name[:3])
    case = Case(problem=drawn, device=device, BT=BT if stage.name in PORTABLE else 64, BC=16)
    return case if stage.tensors_of(drawn)[1] and stage.default(case).reject(case) is None else None


def change_rest(rng: random.Random, stage: Stage, case: Case) -> Case:
    """The case with everything changed that its kernel does not depend on, numbers of heads among it."""
    known, seen = stage.fields_of(case.problem), stage.specialise(case).problem
    H = rng.choice((3, 5, 8))
    groups = [n for n in (1, 2, 3) if known.get("grouped", n > 1) is (n > 1) and known.get("parted", n > 2) is (n > 2)]
    heads = {"H": H, "HV": H * rng.choice(groups)}
    lengths = {"tokens": 4 * rng.randrange(1, 9), "sequences": 2, "longest": 8}
    found = {name: known[name] for name in known if name not in ("grouped", "parted")}
    for name, value in vars(seen).items():
        if name not in {*known, *heads, *lengths}:
            choices = CHOICES.get(name, (not value,))
            found[name] = rng.choice([choice for choice in choices if choice != value])
    if found["gate"] == "softplus" and not found["has_A_log"]:
        found["gate"] = "safe"
    device = case.device if "num_sms" in stage.depends else replace(case.device, num_sms=rng.choice((78, 114)))
    return replace(case, problem=Problem(**(found | heads | lengths)), device=device)


def text_of(stage: Stage, case: Case, config: Any) -> str:
    """What the compiler is given for exactly this case."""
    return f"{pass_configs(stage, case)}\n{number_names(generate_source(stage, case, config))}"


def is_one_function(stage: Stage, case: Case, other: Case, config: Any) -> bool:
    """Whether TileLang is given the same for two cases: one function, one target and one set of settings.

    Names of variables do not count, as in :func:`number_names`.
    """
    import_tilelang()
    from tilelang import tvm

    given = [(each.device.target, pass_configs(stage, each)) for each in (case, other)]
    functions = [stage.build(each, config) for each in (case, other)]
    return given[0] == given[1] and bool(tvm.ir.structural_equal(*functions, map_free_vars=True))


@pytest.mark.rest(draws=1, per="kind")
@pytest.mark.parametrize(("name", "kind"), PLACES, ids=[f"{name}-{kind}" for name, kind in PLACES])
def test_kernels_ignore_what_their_stage_does_not_name(name: str, kind: str, rng: random.Random) -> None:
    stage = STAGES[name]
    case = draw_case(rng, stage, HOPPER if kind == "cuda" else cpu_device())
    config = stage.default(case)
    other = change_rest(rng, stage, case)
    assert stage.specialise(other) == stage.specialise(case) and other.problem != case.problem
    if is_one_function(stage, other, stage.specialise(case), config):
        return
    texts: tuple[set[str], set[str]] = (set(), set())
    for _ in range(8):  # TileLang 0.1.15 puts a barrier of bwd_state before a loop or into it, as addresses fall
        for found, of in zip(texts, (other, stage.specialise(case)), strict=True):
            found.add(text_of(stage, of, config))
        if texts[0] & texts[1]:
            return
    raise AssertionError(f"{name} depends on what {other.problem} has changed")


NAMED = [(name, field) for name, stage in STAGES.items() for field in stage.depends]


@pytest.mark.rest
@pytest.mark.timeout(900)  # it lowers a kernel for each value: bwd_gdn_walk takes minutes on two slow cores
@pytest.mark.parametrize(("name", "field"), NAMED, ids=[f"{name}-{field}" for name, field in NAMED])
def test_kernels_depend_on_what_their_stage_names(name: str, field: str, rng: random.Random) -> None:
    """One case that shows it is enough."""
    stage = STAGES[name]
    drawn = draw_small_case(rng, stage)
    case = stage.specialise(drawn)  # which a config may reject
    config, texts = stage.default(drawn), set[str]()
    if field == "num_sms":
        other = replace(case, device=replace(case.device, num_sms=78))
        assert text_of(stage, other, config) != text_of(stage, case, config)
        return
    for value in rng.sample(CHOICES.get(field, (False, True)), len(CHOICES.get(field, (False, True)))):
        changed = {field: value} | ({"has_A_log": True} if value == "softplus" else {})
        if value == "log":  # which has no parameters
            changed |= {"has_A_log": False, "has_dt_bias": False}
        texts.add(text_of(stage, replace(case, problem=replace(case.problem, **changed)), config))
        if len(texts) > 1:
            return
    raise AssertionError(f"{name} does not depend on {field}")
