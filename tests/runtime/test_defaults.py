"""What runs where nothing is tuned; nothing is compiled."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import make_entry
from support.dispatch_cases import H200, PROBLEM

from kda_tl.bench.workloads import select
from kda_tl.core.device import Device
from kda_tl.core.layout import dense_bounds, make_layout
from kda_tl.core.problem import DTYPES, Problem
from kda_tl.core.stage import Case
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.store import Database
from kda_tl.errors import InputError
from kda_tl.runtime.defaults import (
    DEFAULT_PIPELINES,
    choose_segments,
    default_plan,
    find_keeper,
    iter_defaults,
    pipeline_defaults,
    rank_pipelines,
)
from kda_tl.runtime.dispatch import Pin, PlanSelection, numerics_class, parse_plan, select_plan
from kda_tl.templates.pipelines import PIPELINES

H100 = known_device("nvidia_h100_80gb_hbm3")
H20 = known_device("nvidia_h20")
ROOT = Path(__file__).parents[2]


def test_default_takes_the_first_pipeline_that_can() -> None:
    """Hopper's own where it runs; the staged one elsewhere, and where the fast one is not written for the call."""
    assert all(
        PIPELINES[name].direction == direction for direction, names in DEFAULT_PIPELINES.items() for name in names
    )
    others: list[tuple[Problem, Device, dict[str, Any]]] = [
        (PROBLEM, known_device("nvidia_a100_sxm4_80gb"), {}),
        (replace(PROBLEM, dtype="fp16"), H200, {}),
        (PROBLEM, H200, {"chunk_size": 32}),
    ]
    for problem, device, asked in ((PROBLEM, H200, {"chunk_size": 64}), *others):
        choice = select_plan(problem, device, [], **asked)
        expected = "staged" if (problem, device, asked) in others else "prep_recurrence"
        assert choice.plan is not None and (choice.step, choice.plan.pipeline) == ("default", expected)


GDN = {"operator": "chunk_gated_delta_rule", "scalar_gate": True, "gate": "log"}


@pytest.mark.parametrize(
    ("changes", "forward", "backward"),
    [
        ({}, 16, 16),  # 256 thread blocks for 132 multiprocessors, half as long as 128
        ({"HV": 1}, 16, 16),  # there are no more
        ({"HV": 16}, 8, 1),  # a backward walks through segments twice as often
        ({"HV": 32}, 1, 1),
        ({"HV": 16, "V": 64}, 16, 16),  # half as many thread blocks
        ({"HV": 12, "tokens": 8192}, 8, 1),
        ({"tokens": 8192}, 8, 8),
        ({"tokens": 4096}, 8, 8),
        ({"HV": 16, "tokens": 4096}, 1, 1),
        ({"HV": 4, "tokens": 2048}, 8, 1),
        ({"HV": 2, "tokens": 1024}, 1, 1),  # a cut adds more than it saves
        ({"HV": 4, "tokens": 2 * 4096, "sequences": 2}, 16, 1),
        ({"HV": 2, "tokens": 4 * 8192, "sequences": 4}, 16, 1),  # four segments of each sequence
        ({"HV": 2, "tokens": 5 * 8192, "sequences": 5}, 1, 1),
        ({"HV": 2, "tokens": 8192, "sequences": 9, "longest": 2048, "varlen": True}, 1, 1),
        ({"HV": 2, "tokens": 32768, "sequences": 9, "longest": 8192, "varlen": True}, 16, 1),
        ({"tokens": 0}, 1, 1),
    ],
)
def test_few_heads_of_long_sequences_are_cut(changes: dict[str, Any], forward: int, backward: int) -> None:
    """Of both operators alike: into what takes the fewest steps."""
    wide, narrow = GDN | {"K": 100}, GDN | {"K": 64}  # which walks that find their own start do not take, see below
    for given, direction, whole in (
        ({}, "fwd", "prep_recurrence"),
        ({}, "bwd", "prep_scan"),
        (wide, "fwd", "gdn_recurrence"),
        (narrow, "bwd", "gdn_scan"),
    ):
        segments = forward if direction == "fwd" else backward
        problem = replace(PROBLEM, H=1, HV=8, tokens=32768, direction=direction, **given)
        problem = replace(problem, **{"longest": 0} | changes)
        cut = f"{whole.partition('_recurrence')[0]}_segments_{segments}"
        choice = select_plan(problem, H100, [])
        assert choice.plan is not None and choice.step == "default"
        assert choice.plan.pipeline == (whole if segments == 1 else cut), direction
        if segments > 1 and not problem.varlen:  # they are counted as a layout does: all sequences together
            bounds = dense_bounds(problem.sequences, problem.longest)
            assert make_layout(bounds, 64, torch.device("cpu"), segments).sizes["NS"] == segments


def test_what_takes_the_fewest_steps_was_nearly_the_fastest() -> None:
    """Of 4, 8, 16 segments and none, as measured on an H200: 0.5 % slower on average, 10 % at most."""
    rows = json.loads((ROOT / "docs/h200/cuts.json").read_text())["rows"]
    ratios = []
    for row in rows:
        given = {"gate": "safe"} if row["operator"] == "chunk_kda" else GDN
        shape = {"tokens": row["T"] * row["B"], "longest": row["T"], "sequences": row["B"]}
        problem = replace(PROBLEM, H=row["H"], HV=row["HV"], direction=row["pass"], **given, **shape)
        times = {PIPELINES[name].segments: us for name, us in row["us"].items() if not PIPELINES[name].serial}
        cut = choose_segments(Case(problem=problem, device=H200, BT=64, BC=16), set(times) - {1})
        ratios.append(times[cut] / min(times.values()))
    assert len(ratios) == 141 and max(ratios) < 1.105 and sum(ratios) / len(ratios) < 1.006


@pytest.mark.parametrize(
    ("changes", "pipeline"),
    [
        ({}, "gdn_walk_segments_4"),  # 128 thread blocks for 132 multiprocessors
        ({"HV": 33}, "gdn_walk_segments_4"),
        ({"HV": 34}, "gdn_scan"),  # 136 of four segments take two rounds, and 68 of two leave half of the GPU idle
        ({"HV": 46}, "gdn_scan"),  # less than .7 of the GPU's time, in four segments too
        ({"HV": 47}, "gdn_walk_segments_2"),
        ({"HV": 23}, "gdn_scan"),
        ({"HV": 24}, "gdn_walk_segments_4"),
        ({"tokens": 16384}, "gdn_walk_told_4"),  # by the forward, which has the same segments then
        ({"tokens": 16383 - 63}, "gdn_walk_segments_4"),
        ({"HV": 64}, "gdn_walk_segments_2"),
        ({"HV": 96}, "gdn_walk"),  # as busy as in two segments
        ({"HV": 16}, "gdn_walk_segments_8"),
        ({"HV": 17}, "gdn_scan"),  # 136 of eight segments, and of sixteen 272
        ({"HV": 8}, "gdn_walk_segments_16"),
        ({"HV": 8, "tokens": 8128}, "gdn_scan_segments_8"),  # sixteen segments of less than eight chunks
        ({"HV": 5}, "gdn_scan_segments_8"),
        ({"tokens": 2048}, "gdn_walk_segments_4"),
        ({"tokens": 1984}, "gdn_scan"),  # segments of less than eight chunks
        ({"HV": 132, "tokens": 100}, "gdn_walk"),  # what is not cut may be short
        ({"sequences": 4, "longest": 2048}, "gdn_walk"),
        ({"sequences": 4, "longest": 6000, "varlen": True}, "gdn_walk_segments_4"),  # the longest is what is waited for
        ({"tokens": 0}, "gdn_scan"),
        ({"K": 64}, "gdn_scan"),
    ],
)
def test_a_walk_back_of_all_gradients_where_it_fills_the_gpu(changes: dict[str, Any], pipeline: str) -> None:
    problem = replace(PROBLEM, H=1, HV=32, tokens=8192, direction="bwd", **GDN)
    choice = select_plan(replace(problem, **{"longest": 0} | changes), H100, [])
    assert choice.plan is not None and choice.plan.pipeline == pipeline
    assert choice.plan.kept is PIPELINES[pipeline].keeps is ("walk" in pipeline)


@pytest.mark.parametrize(
    ("changes", "pipeline"),
    [
        ({}, "gdn_pairs_segments_16"),  # 128 pairs of thread blocks for 132 multiprocessors
        ({"HV": 9}, "gdn_segments_16"),  # 144 of sixteen segments, and 72 of eight
        ({"HV": 12}, "gdn_pairs_segments_8"),
        ({"HV": 16}, "gdn_pairs_segments_8"),
        ({"HV": 24}, "gdn_pairs_segments_4"),
        ({"HV": 33}, "gdn_pairs_segments_4"),
        ({"HV": 34}, "gdn_pairs"),  # 136 do not run at once
        ({"HV": 64}, "gdn_pairs"),
        ({"HV": 5}, "gdn_segments_16"),
        ({"HV": 8, "tokens": 8192}, "gdn_pairs_segments_16"),
        ({"HV": 8, "tokens": 8128}, "gdn_segments_8"),  # segments of less than eight chunks
        ({"HV": 32, "tokens": 16384}, "gdn_pairs_segments_4"),
        ({"HV": 32, "tokens": 16320}, "gdn_pairs"),  # of less than 64, which few segments must have
        ({"HV": 8, "V": 256}, "gdn_pairs_segments_8"),
        ({"HV": 8, "V": 64, "K": 64}, "gdn_pairs_segments_16"),
        ({"K": 100}, "gdn_segments_16"),
        ({"K": 256}, "gdn_recurrence"),
        ({"tokens": 0}, "gdn_pairs"),
    ],
)
def test_segments_that_find_their_start_where_they_run_at_once(changes: dict[str, Any], pipeline: str) -> None:
    problem = replace(PROBLEM, H=1, HV=8, tokens=32768, **GDN)
    choice = select_plan(replace(problem, **{"longest": 0} | changes), H100, [])
    assert choice.plan is not None and choice.plan.pipeline == pipeline
    pairs = dict(choice.plan.stages).get("fwd_gdn_pairs")
    assert pairs is None or pairs.as_dict()["resident"] == (2 if pipeline == "gdn_pairs" else 4), "who runs beside it"


@pytest.mark.parametrize(
    ("changes", "pipeline"),
    [
        ({}, "gdn_pairs"),  # 128 blocks of 64 channels, which find a multiprocessor each at once
        ({"sequences": 4}, "gdn_attend"),
        ({"sequences": 4, "V": 64}, "gdn_pairs"),  # was timed in blocks of 128 channels alone
        ({"sequences": 4, "H": 16}, "gdn_attend"),
        ({"sequences": 4, "H": 8}, "gdn_pairs"),  # eight value heads share rows of q
        ({"sequences": 8, "longest": 8000, "varlen": True}, "gdn_pairs"),  # next to all in one sequence
        ({"sequences": 4, "K": 100}, "gdn_recurrence"),
    ],
)
def test_pairs_of_queries_are_made_beside_products_where_blocks_are_many(
    changes: dict[str, Any], pipeline: str
) -> None:
    problem = replace(PROBLEM, HV=64, tokens=8192, **{"H": 64, "longest": 0} | GDN | changes)
    if not problem.longest:
        problem = replace(problem, longest=problem.tokens // max(1, problem.sequences))
    choice = select_plan(problem, H200, [])
    assert choice.plan is not None and choice.plan.pipeline == pipeline
    by_name = pipeline_defaults("gdn_pairs", Case(problem=problem, device=H200, BT=64, BC=16))
    assert find_keeper(choice.plan, problem, H200) == (by_name if pipeline == "gdn_attend" else choice.plan)


def test_what_is_cut_is_what_stages_take() -> None:
    """Fewer multiprocessors are filled by fewer segments, and what cut pipelines are not written for stays whole."""
    few = replace(PROBLEM, H=2, HV=8, tokens=32768, longest=0)
    gdn = replace(few, **GDN)
    expected: list[tuple[Problem, Device, dict[str, Any], str]] = [
        (replace(few, HV=12), H20, {}, "prep_recurrence"),
        (replace(few, HV=12), H200, {}, "prep_segments_16"),
        (few, H200, {"chunk_size": 64}, "prep_segments_16"),
        (replace(few, intermediate_states=True), H200, {"chunk_size": 64}, "prep_segments_16"),
        (few, H200, {"chunk_size": 32}, "staged"),
        (few, known_device("nvidia_a100_sxm4_80gb"), {}, "staged"),
        (replace(few, K=256), H200, {}, "prep_recurrence"),
        (replace(gdn, K=100), H200, {}, "gdn_segments_16"),
        (replace(gdn, K=100, tokens=100, longest=100), H200, {}, "gdn_recurrence"),
        (replace(gdn, K=256), H200, {}, "gdn_recurrence"),
        (replace(gdn, direction="bwd", K=96), H200, {}, "staged_backward"),
    ]
    for problem, device, asked, pipeline in expected:
        choice = select_plan(problem, device, [], **asked)
        assert choice.plan is not None and choice.plan.pipeline == pipeline, (problem.key, device.slug, asked)


def test_every_pipeline_of_a_pass_has_a_rank() -> None:
    """Those that cut too, though no case asks for their number of segments: their kernels may be all there are."""
    for direction, tokens in itertools.product(("fwd", "bwd"), (100, 32768)):
        problem = replace(PROBLEM, direction=direction, H=2, HV=8, tokens=tokens, longest=tokens)
        ranked = rank_pipelines(Case(problem=problem, device=H200, BT=64, BC=16))
        assert sorted(ranked) == sorted(p.name for p in PIPELINES.values() if p.direction == direction)
        assert ranked[-1] == DEFAULT_PIPELINES[direction][-1]
        assert (PIPELINES[ranked[0]].segments > 1) is (tokens > 100)


def test_kernels_of_cut_and_of_whole_sequences_stand_in_for_each_other() -> None:
    """Where nothing can be compiled: kernels know no lengths, so what a bundle has of one call serves the other."""
    short, long = (replace(PROBLEM, H=2, HV=8, tokens=tokens, longest=tokens) for tokens in (100, 32768))
    only_cut = select_plan(short, H200, [], runs=lambda plan: PIPELINES[plan.pipeline].segments > 1)
    only_whole = select_plan(long, H200, [], runs=lambda plan: PIPELINES[plan.pipeline].segments == 1)
    assert only_cut.plan is not None and only_cut.plan.pipeline == "prep_segments_4"
    assert only_whole.plan is not None and only_whole.plan.pipeline == "prep_recurrence"
    pin = Pin(numerics=numerics_class(only_whole.plan))
    assert select_plan(long, H200, [], pin=pin).plan == only_whole.plan


def test_a_tuned_plan_comes_before_the_default() -> None:
    """All packaged plans serve their own problems, and a near one where it cuts sequences as the default does."""
    packaged = Database.load(files("kda_tl.tuning_db"), "packaged")
    for (slug, operator, direction), file in packaged.files.items():
        for key, entry in file.entries.items():
            problem, device = key.problem(operator, direction), known_device(slug)
            choice = select_plan(problem, device, [packaged])
            assert (choice.step, choice.plan) == ("exact bucket", parse_plan(entry.plan, problem, device))
    near = replace(PROBLEM, H=8, HV=8, tokens=4096, longest=4096)
    assert default_plan(near, H100).pipeline == "prep_segments_8"
    served = select_plan(near, H100, [packaged])
    assert served.plan is not None and (served.step, served.plan.pipeline) == ("nearest bucket", "prep_segments_8")


@pytest.mark.parametrize(("direction", "cut"), [("fwd", "prep_segments_{}"), ("bwd", "prep_scan_segments_{}")])
def test_a_near_plan_serves_only_what_the_default_cuts_alike(tmp_path: Path, direction: str, cut: str) -> None:
    """Few heads whose sequences are left whole leave a GPU idle, whatever was fastest for twice the tokens."""
    many, few = (
        replace(PROBLEM, direction=direction, H=heads, HV=heads, tokens=16384, longest=16384) for heads in (32, 2)
    )
    whole, most = default_plan(many, H200).pipeline, default_plan(few, H200).pipeline
    assert (PIPELINES[whole].segments, most) == (1, cut.format(16))
    for problem, pipeline, sentence in (
        (few, whole, "leaves sequences whole"),
        (few, cut.format(8), "cuts sequences into 8"),
        (many, most, "cuts sequences into 16"),
        (few, most, ""),
        (many, whole, ""),
    ):
        longer = replace(problem, tokens=32768, longest=32768)
        choice = select_near(tmp_path / f"{problem.HV} {pipeline}", longer, pipeline, problem)
        expected = ("default", default_plan(problem, H200).pipeline) if sentence else ("nearest bucket", pipeline)
        assert choice.plan is not None and (choice.step, choice.plan.pipeline) == expected
        assert not sentence or choice.passed_over[0].endswith(f"But it {sentence}, and the default does not here.")


@pytest.mark.parametrize(
    ("tuned", "asked", "defaults"),
    [
        ({}, {"sequences": 4, "longest": 2048}, ("gdn_walk_segments_4", "gdn_walk")),
        ({"tokens": 4096, "longest": 4096}, {"H": 48, "HV": 48}, ("gdn_walk_segments_4", "gdn_walk_segments_2")),
        ({}, {"tokens": 16384, "longest": 16384}, ("gdn_walk_segments_4", "gdn_walk_told_4")),
    ],
)
def test_a_near_plan_serves_only_where_the_default_is_what_it_was(
    tmp_path: Path, tuned: dict[str, Any], asked: dict[str, Any], defaults: tuple[str, str]
) -> None:
    """How many thread blocks there are decides between pipelines. docs/h200/near.json has times of such calls."""
    there = replace(replace(PROBLEM, **GDN, direction="bwd", tokens=8192, longest=8192), **tuned)
    here = replace(there, **asked)
    assert tuple(default_plan(problem, H200).pipeline for problem in (there, here)) == defaults
    plan = "gdn_scan" if PIPELINES[defaults[1]].segments == 1 else defaults[0]
    choice = select_near(tmp_path, there, plan, here)
    assert (choice.step, choice.plan) == ("default", default_plan(here, H200))
    assert choice.passed_over[0].endswith(f"But the default is {defaults[0]} there, and {defaults[1]} here.")


def select_near(folder: Path, tuned: Problem, pipeline: str, asked: Problem) -> PlanSelection:
    """What serves a problem on an H200 where the default plan of a pipeline won for a near one."""
    entry = make_entry(tuned, default_plan(tuned, H200, pipeline=pipeline))
    db.store(folder, H200, tuned.operator, tuned.direction, [entry])
    database = Database.load(folder, "test")
    assert select_plan(tuned, H200, [database]).step == "exact bucket"
    return select_plan(asked, H200, [database])


@pytest.mark.parametrize(
    "slug", ("cpu", "nvidia_a100_sxm4_80gb", "nvidia_l4", "nvidia_geforce_rtx_5090", "nvidia_h200")
)
def test_default_plan_runs_everywhere(slug: str) -> None:
    """Whatever the device, what is served when nothing is tuned is not rejected by its own stages.

    But fp32 with long keys where shared memory is short: its products take twice the room.
    """
    device = known_device(slug)
    failures = []
    for K, V, dtype in itertools.product((32, 60, 64, 100, 128, 256), (32, 100, 128, 256), DTYPES):
        problem = Problem(H=2, HV=4, K=K, V=V, tokens=100, dtype=dtype)
        if device.kind == "cuda" and device.smem_bytes < 128 << 10 and (dtype, K) == ("fp32", 256):
            with pytest.raises(InputError, match=f"does not fit {slug}: .* shared"):
                select_plan(problem, device, [])
            continue
        choice = select_plan(problem, device, [])
        assert choice.step == "default" and choice.plan is not None
        try:
            parse_plan(choice.plan.as_dict(), problem, device)
        except InputError as error:
            failures.append(f"K={K} V={V} {dtype}: {error}")
    assert not failures, f"{len(failures)} of 72 problems, as {failures[0]}"


@pytest.mark.parametrize("device", [H200, known_device("nvidia_a100_sxm4_80gb")], ids=lambda device: device.slug)
def test_steps_have_no_chunks(device: Device) -> None:
    (step,) = select(["kda-decode-B32-fp32"])
    plans = list(iter_defaults(step.problem(), device))
    assert [plan.pipeline for plan in plans] == (["decode_rows", "decode"] if device is H200 else ["decode"])
    assert {(plan.BT, plan.BC, plan.label, numerics_class(plan)) for plan in plans} == {
        (0, 0, plan.pipeline, f"{plan.pipeline}-accf32") for plan in plans
    }
    stored = plans[0].as_dict()
    assert parse_plan(stored, step.problem(), device) == plans[0]
    with pytest.raises(InputError, match="a step has no chunks"):
        parse_plan(stored | {"BT": 64, "BC": 16}, step.problem(), device)
    with pytest.raises(InputError, match="a fwd has chunks"):
        parse_plan(default_plan(PROBLEM, device).as_dict() | {"BT": 0, "BC": 0}, PROBLEM, device)
