"""The dispatch policy, step by step, with databases made by hand; nothing is compiled."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.cases import make_entry
from support.dispatch_cases import H200, PROBLEM, make_database, make_plan

import kda_tl
from kda_tl.core.device import cpu_device
from kda_tl.core.stage import BT_CHOICES, Case, Plan, static_sizes
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.store import Database, Entry
from kda_tl.errors import InputError
from kda_tl.ops.call import choose_backward_of
from kda_tl.runtime.defaults import default_plan, pipeline_defaults
from kda_tl.runtime.dispatch import Pin, numerics_class, parse_plan, select_plan
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.sm90.outputs import OutputConfig

H100 = known_device("nvidia_h100_80gb_hbm3")
H20 = known_device("nvidia_h20")
L4 = known_device("nvidia_l4")
CPU = cpu_device()


def test_a_plan_serves_its_own_pass_only(tmp_path: Path) -> None:
    """Both passes of a problem have the same key: the file tells them apart."""
    passes = [replace(PROBLEM, direction=direction) for direction in ("fwd", "bwd")]
    for tuned, other in (passes, passes[::-1]):
        plan = make_plan(BT=32, problem=tuned)
        db.store(tmp_path / tuned.direction, H200, "chunk_kda", tuned.direction, [make_entry(tuned, plan)])
        databases = [Database.load(tmp_path / tuned.direction, "test")]
        assert (select_plan(tuned, H200, databases).step, select_plan(tuned, H200, databases).plan) == (
            "exact bucket",
            plan,
        )
        assert select_plan(other, H200, databases).plan == default_plan(other, H200)
    misplaced = db.store(
        tmp_path / "wrong", H200, "chunk_kda", "fwd", [make_entry(passes[1], make_plan(problem=passes[1]))]
    )
    choice = select_plan(PROBLEM, H200, [Database.load(misplaced.parents[1], "test")])
    assert choice.step == "default" and "no fwd pipeline 'staged_backward'" in choice.passed_over[0]


# The order of the steps


def test_every_step_in_order(tmp_path: Path) -> None:
    """With all sources there, and then one source less at a time, each step serves in its turn."""
    plans = {
        step: make_plan(BT=BT, BC=BC)
        for step, (BT, BC) in zip(
            ("exact", "near", "nearer", "other"), ((64, 8), (32, 16), (32, 8), (16, 8)), strict=True
        )
    }
    exact = make_entry(PROBLEM, plans["exact"])
    near = make_entry(PROBLEM, plans["near"], tokens_bucket=32768)
    nearer = make_entry(PROBLEM, plans["nearer"], tokens_bucket=4096)
    other = make_entry(PROBLEM, plans["other"])
    own = [make_database(tmp_path, entry, name=f"own{n}") for n, entry in enumerate((near, nearer, exact))]
    sibling = make_database(tmp_path, other, device=H100, name="sibling")
    pin = Pin(plan=make_plan(BT=16))

    def step(databases: list[Database], **options: Any) -> tuple[str, str, Plan | None]:
        choice = select_plan(PROBLEM, H200, databases, **options)
        assert choice.passed_over == () and choice.stale == ()
        return choice.step, choice.source, choice.plan

    for databases in itertools.permutations([*own, sibling]):
        assert step([*databases], pin=pin) == ("pinned", "caller", pin.plan)
        assert step([*databases]) == ("exact bucket", "own2", plans["exact"])
        without_exact = [d for d in databases if d is not own[2]]
        assert step(without_exact) == ("nearest bucket", "own1", plans["nearer"])
        assert step([d for d in without_exact if d is not own[1]]) == ("nearest bucket", "own0", plans["near"])
    assert step([sibling]) == ("same architecture", "sibling", plans["other"])
    assert step([]) == ("default", "default", default_plan(PROBLEM, H200))
    assert step([*own, sibling], pin=pin, runs=lambda plan: False) == ("reference", "reference", None)


def test_earlier_source_wins_within_a_step(tmp_path: Path) -> None:
    one = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=32), ratio=1.1), name="one")
    two = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=16), ratio=9.0), name="two")
    for databases in ((one, two), (two, one)):
        assert select_plan(PROBLEM, H200, databases).source == databases[0].name


def test_what_is_too_far_is_not_used(tmp_path: Path) -> None:
    plan = make_plan(BT=32)
    for key in ({"tokens_bucket": 65536}, {"heads_bucket": 4}, {"K": 64}, {"gate": "log"}, {"dtype": "fp16"}):
        database = make_database(tmp_path / str(key), make_entry(PROBLEM, plan, **key))
        assert select_plan(PROBLEM, H200, [database]).step == "default", key
    for device in (H20, L4, CPU):  # 78 SMs of 132; other architectures
        database = make_database(tmp_path / device.slug, make_entry(PROBLEM, plan), device=device)
        assert select_plan(PROBLEM, H200, [database]).step == "default", device.slug


def test_a_near_default_is_served_before_a_far_plan() -> None:
    """Eight segments win for 8 heads and lose for 32: what won there says nothing here."""
    packaged = Database.load(files("kda_tl.tuning_db"), "packaged")
    untuned = replace(H200, slug="nvidia_h200_nvl")
    for heads, tokens, device in ((24, 8192, H200), (32, 4096, H200), (32, 8192, untuned)):
        problem = replace(PROBLEM, H=heads, HV=heads, tokens=tokens, longest=tokens)
        plan = select_plan(problem, device, [packaged]).plan
        assert plan is not None and plan.pipeline == "prep_recurrence", (heads, tokens, device.slug)


def test_resolve_is_pure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment nor pins nor overlays nor earlier answers matter."""
    database = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=32)))
    first = select_plan(PROBLEM, H200, [database]), select_plan(PROBLEM, H200, [])
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("KDA_TL_STRICT", "1")
    with kda_tl.pin(make_plan(BT=16)), kda_tl.use(database):
        assert (select_plan(PROBLEM, H200, [database]), select_plan(PROBLEM, H200, [])) == first


# Plans that may not serve


def test_chunk_size_passes_over_other_chunks(tmp_path: Path) -> None:
    exact = make_entry(PROBLEM, make_plan(BT=64))
    near = make_entry(PROBLEM, make_plan(BT=32), tokens_bucket=4096)
    database = make_database(tmp_path, exact, near)
    choice = select_plan(PROBLEM, H200, [database], chunk_size=32)
    assert (choice.step, choice.plan) == ("nearest bucket", make_plan(BT=32))
    assert len(choice.passed_over) == 1 and "exact bucket" in choice.passed_over[0]
    assert choice.passed_over[0].endswith("But chunk_size=32 was asked for.")
    choice = select_plan(PROBLEM, H200, [database], chunk_size=16)
    assert (choice.step, choice.plan) == ("default", make_plan(BT=16)) and len(choice.passed_over) == 2
    assert select_plan(PROBLEM, H200, [database], chunk_size=64).passed_over == ()


def test_a_plan_without_room_for_states_serves_no_call_that_wants_them(tmp_path: Path) -> None:
    """They take shared memory, which another plan may have."""
    problem = replace(PROBLEM, K=64)
    plan = pipeline_defaults("prep_recurrence", Case(problem=problem, device=H200, BT=64, BC=16))
    recurrence = OutputConfig(BV=128, num_stages=3)
    plan = replace(plan, stages=(plan.stages[0], ("fwd_recurrence", recurrence)))
    wanted = replace(problem, intermediate_states=True)
    tight = replace(H200, smem_bytes=recurrence.smem_bytes(Case(problem=problem, device=H200, BT=64, BC=16)))
    database = make_database(tmp_path, make_entry(problem, plan))
    assert select_plan(problem, tight, [database]).plan == plan
    choice = select_plan(wanted, tight, [database])
    assert choice.plan is not None and choice.plan.pipeline == "prep_recurrence" and choice.plan != plan
    assert "bytes" in choice.passed_over[0]
    with pytest.raises(InputError, match=r"fwd_recurrence: BV=128, num_stages=3 need \d+ bytes"):
        select_plan(wanted, tight, [], pin=Pin(plan=plan))


def test_pinned_plan_of_other_chunks_is_refused() -> None:
    """Both are the caller's wish, and intermediate states of other chunks would be a wrong answer."""
    with pytest.raises(InputError, match="BT=64.*chunk_size=32"):
        select_plan(PROBLEM, H200, [], pin=Pin(plan=make_plan(BT=64)), chunk_size=32)


def test_stale_plans(tmp_path: Path) -> None:
    stale = make_entry(PROBLEM, make_plan(BT=32), stale=True)
    fresh = make_entry(PROBLEM, make_plan(BT=16), tokens_bucket=4096)
    database = make_database(tmp_path, stale, fresh)
    choice = select_plan(PROBLEM, H200, [database])
    assert (choice.step, choice.plan) == ("exact bucket", make_plan(BT=32))
    assert set(choice.stale) == {name for name, _ in choice.plan.stages}
    assert "stale: fwd_gate" in str(choice) and "kda-tl tune --stale" in str(choice)
    strict = select_plan(PROBLEM, H200, [database], strict=True)
    assert (strict.step, strict.plan, strict.stale) == ("nearest bucket", make_plan(BT=16), ())
    assert "changed since (KDA_TL_STRICT=1)" in strict.passed_over[0]


def edit_plan(entry: Entry, **changes: Any) -> Entry:
    return replace(entry, plan={**entry.plan, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    (
        ({"pipeline": "fused"}, "there is no fwd pipeline 'fused'"),
        ({"BT": 48}, "BT=48, BC=16"),
        ({"BC": 64}, "BT=64, BC=64"),
        ({"kept": True}, "staged has nothing to keep"),
        ({"stages": {}}, "the stages of staged are"),
        ({"stages": {"fwd_state": {"BV": 32}}}, "the stages of staged are"),
    ),
)
def test_unusable_plans_are_passed_over(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    entry = edit_plan(make_entry(PROBLEM, make_plan()), **changes)
    choice = select_plan(PROBLEM, H200, [make_database(tmp_path, entry)])
    assert choice.step == "default" and len(choice.passed_over) == 1
    assert sentence in choice.passed_over[0] and choice.passed_over[0].endswith(".")
    assert f"passed over: {choice.passed_over[0]}" in str(choice)


@pytest.mark.parametrize("values", ({"BV": 48}, {"BW": 32}, {"BV": "32"}, {"BV": None}))
def test_unknown_config_values_are_passed_over(tmp_path: Path, values: dict[str, Any]) -> None:
    entry = make_entry(PROBLEM, make_plan())
    stages = {name: dict(config) for name, config in entry.plan["stages"].items()}
    stages["fwd_state"] |= values
    choice = select_plan(PROBLEM, H200, [make_database(tmp_path, edit_plan(entry, stages=stages))])
    assert choice.step == "default" and "FwdStateConfig" in choice.passed_over[0]


def test_config_that_the_device_rejects_is_passed_over(tmp_path: Path) -> None:
    """The next entry serves: one that needs a quarter of the memory."""
    database = make_database(
        tmp_path, make_entry(PROBLEM, make_plan(BT=64)), make_entry(PROBLEM, make_plan(BT=16), tokens_bucket=4096)
    )
    small = replace(H200, smem_bytes=60_000)
    choice = select_plan(PROBLEM, small, [database])
    assert (choice.step, choice.plan) == ("nearest bucket", make_plan(BT=16))
    assert len(choice.passed_over) == 1 and "shared" in choice.passed_over[0]


def test_numerics_pin(tmp_path: Path) -> None:
    wide, narrow = make_plan(BT=64), make_plan(BT=16)
    database = make_database(tmp_path, make_entry(PROBLEM, wide), make_entry(PROBLEM, narrow, tokens_bucket=4096))
    pinned = select_plan(PROBLEM, H200, [database], pin=Pin(numerics=numerics_class(narrow)))
    assert pinned.plan == narrow
    assert select_plan(PROBLEM, H200, [database], pin=Pin(numerics=numerics_class(wide))).plan == wide


def test_numerics_class_is_the_geometry_and_what_orders_sums() -> None:
    classes = {numerics_class(make_plan(BT=BT, BC=BC)) for BT in BT_CHOICES for BC in (8, 16)}
    assert len(classes) == 6
    ordering: set[str] = set()
    for problem in (PROBLEM, replace(PROBLEM, direction="bwd")):
        plan = make_plan(problem=problem)
        for name, config in plan.stages:
            for other in config.neighbours():
                changed = numerics_class(make_plan(problem=problem, **{name: other})) != numerics_class(plan)
                (moved,) = (field for field, value in other.as_dict().items() if value != config.as_dict()[field])
                assert changed == (moved in ("BK", "diagonal")), f"{name}: {moved}"
                ordering |= {moved} if changed else set()
    assert ordering == {"BK", "diagonal"}


def test_numerics_pin_is_kept_when_nothing_is_tuned() -> None:
    """Of the defaults, the one of the class; a caller who insists on another must not silently get one of these."""
    for plan in (default_plan(PROBLEM, H200), make_plan(), make_plan(BT=16)):
        assert select_plan(PROBLEM, H200, [], pin=Pin(numerics=numerics_class(plan))).plan == plan
    with pytest.raises(InputError, match="numerics"):
        select_plan(PROBLEM, H200, [], pin=Pin(numerics=numerics_class(make_plan(BC=8))))
    with pytest.raises(InputError, match="has no chunks of 32 tokens: pass chunk_size=16"):
        select_plan(PROBLEM, H200, [], pin=Pin(numerics=numerics_class(make_plan(BT=16))), chunk_size=32)


def test_pinned_plan_is_checked() -> None:
    plan = make_plan()
    small = replace(H200, smem_bytes=20_000)
    with pytest.raises(InputError, match="shared"):
        select_plan(PROBLEM, small, [], pin=Pin(plan=plan))
    with pytest.raises(InputError, match="there is no fwd pipeline"):
        select_plan(PROBLEM, H200, [], pin=Pin(plan=replace(plan, pipeline="none")))
    with pytest.raises(InputError, match="there is no bwd pipeline 'staged'"):
        parse_plan(plan.as_dict(), replace(PROBLEM, direction="bwd"), H200)


# What people read


def test_choice_says_what_runs_and_why(tmp_path: Path) -> None:
    plan = make_plan(BT=32)
    database = make_database(tmp_path, make_entry(PROBLEM, plan, ratio=1.37, tokens_bucket=16384), name="mine")
    text = str(select_plan(PROBLEM, H200, [database]))
    first, second, *stages = text.splitlines()
    assert first.startswith("nearest bucket: ") and "mine database" in first and "1.37x the default" in first
    assert "tokens 16384 instead of 8192" in first and second == "pipeline staged, BT=32, BC=16"
    for line, (name, config) in zip(stages, plan.stages, strict=True):
        assert line.strip().startswith(f"{name}: ")
        assert all(f"{key}={value}" in line for key, value in config.as_dict().items())


def test_default_and_reference_say_what_to_do() -> None:
    text = str(select_plan(PROBLEM, H200, []))
    assert text.startswith("default: nothing tuned for K128-V128-bf16-safe") and "`kda-tl tune`" in text
    assert "nvcc" in str(select_plan(PROBLEM, H200, [], runs=lambda plan: False))
    assert "g++" in str(select_plan(PROBLEM, CPU, [], runs=lambda plan: False))


def test_same_architecture_names_both_devices(tmp_path: Path) -> None:
    database = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=32)), device=H100)
    reason = select_plan(PROBLEM, H200, [database]).reason
    assert "nvidia_h100_80gb_hbm3" in reason and "nvidia_h200" in reason and "sm_90a" in reason


@pytest.mark.parametrize("name", ["gdn_attend", "gdn_pairs"])
def test_a_forward_that_makes_no_residuals_gives_way_where_they_are_kept(name: str) -> None:
    """To gdn_pairs, which makes pairs of queries in memory."""
    problem = replace(PROBLEM, operator="chunk_gated_delta_rule", scalar_gate=True, gate="log")
    case = Case(problem=problem, device=H200, BT=64, BC=16)
    forward, keeper = (pipeline_defaults(each, case) for each in (name, "gdn_pairs"))
    backward = pipeline_defaults("gdn_walk", replace(case, problem=replace(problem, direction="bwd")))
    with kda_tl.pin(backward):
        found = choose_backward_of(problem, H200, None, forward)
    assert found.residuals == PIPELINES["gdn_walk"].residuals and found.forward == keeper


@pytest.mark.parametrize("name", [p.name for p in PIPELINES.values() if p.direction == "bwd" and "gdn" in p.name])
def test_residuals_are_kept_unasked_where_they_are_small(name: str) -> None:
    """Of what a forward makes for the walk back, which has less than a quarter of a chunk's states' bytes in fp32, but
    for what it knows between segments.
    """
    problem = replace(PROBLEM, operator="chunk_gated_delta_rule", scalar_gate=True, gate="log")
    segments = PIPELINES[name].segments  # what is kept of them is of the same ones
    told = "edges" in PIPELINES[name].residuals
    of_forward = f"gdn_pairs_segments_{segments}" if told else "gdn_pairs"
    forward, other = (
        pipeline_defaults(pipeline, Case(problem=problem, device=H200, BT=64, BC=16))
        for pipeline in (of_forward, "gdn_pairs_segments_4")
    )
    case = Case(problem=replace(problem, direction="bwd"), device=H200, BT=64, BC=16)
    with kda_tl.pin(pipeline_defaults(name, case)):
        unasked, asked = (choose_backward_of(problem, H200, None, forward, keep).residuals for keep in (False, True))
        of_others = choose_backward_of(problem, H200, None, other, False).residuals
    walks, pipeline = "walk" in name, PIPELINES[name]
    assert unasked == (pipeline.residuals if walks else ())
    assert asked == (pipeline.residuals if walks or name == "gdn_scan" else ())
    if walks:
        assert of_others == (unasked if segments == 4 or not told else ())
        specs = {of: spec for stage in pipeline.stages for of, spec in stage.specs.items()}
        sizes, width = static_sizes(case) | {"NT": 1, "NC": 0}, {"bf16": 2, "fp32": 4}
        held = [math.prod(specs[of].shape(sizes)) * width[specs[of].element(problem)] for of in unasked]
        assert sum(held) < problem.HV * problem.K * problem.V


def test_a_plan_without_kernels_is_passed_over(tmp_path: Path) -> None:
    """Where nothing can be compiled, plans that a bundle serves run, the first in rank; else the reference does."""
    stored = make_plan()
    database = make_database(tmp_path, make_entry(PROBLEM, stored))
    assert select_plan(PROBLEM, H200, [database], runs=lambda plan: True).step == "exact bucket"
    refused = select_plan(PROBLEM, H200, [database], runs=lambda plan: plan != stored)
    assert (refused.step, refused.plan.pipeline) == ("default", "prep_recurrence")
    assert refused.passed_over[0].endswith("But no bundle has its kernels, and none can be compiled here.")
    staged = select_plan(PROBLEM, H200, [], runs=lambda plan: plan.pipeline == "staged")
    assert (staged.step, staged.plan) == ("default", stored), "the next default, not the reference"
    assert select_plan(PROBLEM, H200, [database], runs=lambda plan: False).step == "reference"
