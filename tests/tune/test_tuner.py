"""Whole runs of the tuner on the CPU target: real kernels, few candidates, what is stored, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import fake_stages
from support.tuner_cases import BACKWARD, CPU, HERE, WORKLOAD, searched

import kda_tl
from kda_tl import templates
from kda_tl.bench.fixtures import check_plan, operator_tensors
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cuda_device
from kda_tl.core.stage import Case, Plan
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.records import Key
from kda_tl.errors import InputError, KdaTlError, WrongResultError
from kda_tl.reference import recurrent_kda, relative_error
from kda_tl.runtime.compile import hash_kernel
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import pin, select_cached
from kda_tl.runtime.program import Program
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune import requests, screening, tuner
from kda_tl.tune.events import (
    ChunkVariant,
    PartStarted,
    PlanDone,
    RunStarted,
    StageResult,
    StageStarted,
    TrialDone,
    TuneReport,
    VariantScreened,
    WorkloadReport,
    WorkloadStarted,
)
from kda_tl.tune.journal import Journal, Outcome, Trial
from kda_tl.tune.pool import DeadlineExceeded, WorkerPool
from kda_tl.tune.search import Evaluation
from kda_tl.tune.session import Run, load_known


def test_one_stage_alone_stores_no_plan(pool: WorkerPool, tmp_path: Path) -> None:
    run = fake_stages.make_run(pool, tmp_path / "trials.jsonl", budget=1)
    report = tuner.tune_workload(run, WORKLOAD, tmp_path / "db", stage="fwd_gate")
    assert (report.entry, report.failure) == (None, "")
    assert [(s.stage, s.variant.BT) for s in report.stages] == [("fwd_gate", 64)]
    assert [t.status for t in searched(run.journal)] == ["ok"] and not (tmp_path / "db").exists()


@pytest.fixture(scope="module")
def events() -> list[Any]:
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def tuned(folder: Path, events: list[Any]) -> TuneReport:
    """A whole run on the two variants of BT=16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screening, "BT_CHOICES", (16,))
        return tuner.tune([WORKLOAD], CPU, db_dir=folder, jobs=2, on_event=events.append)


def test_the_winner_is_stored_with_its_evidence(tuned: TuneReport, folder: Path) -> None:
    (report,) = tuned.workloads
    entry = report.entry
    assert entry is not None and not report.failure
    assert db.validate(folder) == []
    assert entry.key == Key.of(WORKLOAD.problem()) and entry.plan["BT"] == 16
    assert report.improved and entry.vs_default.ratio > 1.1 and entry.vs_default.ci95[0] > 1
    assert entry.check.max_rel_err < entry.check.tolerance == 1e-5
    assert entry.templates == {name: templates.fingerprint(name) for name in entry.plan["stages"]}
    (hashes,) = entry.kernels.values()
    case = Case(problem=WORKLOAD.problem(), device=CPU, BT=16, BC=entry.plan["BC"])
    stage = templates.load("fwd_output")
    config = stage.config.from_dict(entry.plan["stages"]["fwd_output"])
    assert hashes.keys() == entry.templates.keys() and hashes["fwd_output"] == hash_kernel(stage, case, config)
    assert entry.provenance["valid"] == sum(report.counts.values()) and entry.provenance["failed"] == {}
    assert entry.provenance["workload"] == "tiny"
    assert report.plans[0].config == report.default


def test_the_operator_runs_the_stored_plan(tuned: TuneReport, folder: Path) -> None:
    x = WORKLOAD.inputs("cpu", seed=9)
    with kda_tl.use(folder):
        choice = kda_tl.explain(**x)
        o, ht = kda_tl.chunk_kda(**x)[:2]
    (report,) = tuned.workloads
    assert report.entry is not None and choice.plan is not None
    assert (choice.step, choice.plan.as_dict()) == ("exact bucket", report.entry.plan)
    kwargs = {name: x[name] for name in ("A_log", "dt_bias", "lower_bound")}
    truth, state = recurrent_kda(
        *(x[n] for n in ("q", "k", "v", "g", "beta")), gate="safe", beta_mode="sigmoid", use_l2norm=True, **kwargs
    )
    assert relative_error(o, truth) < 1e-5 and ht is not None and relative_error(ht, state) < 1e-5


def test_events_tell_the_whole_story(tuned: TuneReport, events: list[Any]) -> None:
    assert isinstance(events[0], RunStarted) and isinstance(events[1], WorkloadStarted)
    assert isinstance(events[-1], WorkloadReport)
    started = [(e.stage, e.variant) for e in events if isinstance(e, StageStarted)]
    assert started == [(e.stage, e.variant) for e in events if isinstance(e, StageResult)]
    assert {name for name, _ in started} == {stage.name for stage in PIPELINES["staged"].stages}
    for part, kind in (("default plans", VariantScreened), ("stages", StageStarted), ("plans", PlanDone)):
        announced = [e.count for e in events if isinstance(e, PartStarted) and e.part == part]
        assert sum(announced) == sum(isinstance(e, kind) for e in events) > 0
    trials = [e for e in events if isinstance(e, TrialDone)]
    assert sum(s.search.counts.get("ok", 0) for s in tuned.workloads[0].stages) <= len(trials)
    for event in trials:
        assert 1 <= event.number <= event.of
        assert event.default_us is not None and event.best_us is not None and event.best_us <= event.default_us


def test_the_same_command_measures_nothing_again(
    tuned: TuneReport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screening, "BT_CHOICES", (16,))

    def measure(pool: WorkerPool, request: Any) -> Any:
        return pytest.fail(f"something was measured again: {request}")

    monkeypatch.setattr(WorkerPool, "measure", measure)
    (journal,) = tuned.journals
    lines = journal.read_bytes()
    (again,) = tuner.tune([WORKLOAD], CPU, db_dir=folder, jobs=1).workloads
    assert journal.read_bytes() == lines
    assert again.resumed == sum(again.counts.values()) > 0
    first = tuned.workloads[0].entry
    assert first and again.entry and again.entry.plan == first.plan and again.entry.time_us == first.time_us


def test_plans_are_run_on_what_the_operator_would_pass(tuned: TuneReport) -> None:
    plan = default_plan(WORKLOAD.problem(), CPU, BT=16, BC=16)
    tensors, sizes = operator_tensors(WORKLOAD, 16, HERE, seed=3)
    o = Program.build(plan, WORKLOAD.problem(), CPU).run(tensors, sizes, HERE)["o"]
    with pin(plan):
        expected = kda_tl.chunk_kda(**WORKLOAD.inputs("cpu", seed=3))[0]
    assert torch.equal(o.view(expected.shape), expected)
    assert check_plan(plan, WORKLOAD, CPU) < 1e-5


def test_a_plan_that_computes_wrong_numbers_is_refused(tuned: TuneReport, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Program.run

    def wrong(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: x if x is None else 1.01 * x for name, x in right(*args, **kwargs).items()}

    monkeypatch.setattr(Program, "run", wrong)
    with pytest.raises(WrongResultError, match="is off by 0.01 "):
        check_plan(default_plan(WORKLOAD.problem(), CPU, BT=16), WORKLOAD, CPU)


@pytest.mark.rest
def test_both_passes_are_tuned_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "BT_CHOICES", (16,))
    monkeypatch.setattr(screening, "BC_CHOICES", (16,))
    backward = replace(BACKWARD, gate=WORKLOAD.gate)  # shares kernels with the forward
    report = tuner.tune([backward, WORKLOAD], CPU, db_dir=tmp_path, budget=1, jobs=2)
    assert not any(found.failure for found in report.workloads) and db.validate(tmp_path) == []
    assert [path.name for path in report.journals] == ["chunk_kda_bwd.trials.jsonl", "chunk_kda_fwd.trials.jsonl"]
    (database,) = [db.Database.load(tmp_path, "test")]
    for found, journal, name in zip(report.workloads, report.journals, ("staged_backward", "staged"), strict=True):
        problem, stages = found.workload.problem(), {stage.name for stage in PIPELINES[name].stages}
        assert found.path == tmp_path / "cpu" / f"chunk_kda_{problem.direction}.json"
        file = database.files["cpu", "chunk_kda", problem.direction]
        (entry,) = file.entries.values()
        assert entry.plan["pipeline"] == name and entry.key == Key.of(problem)
        assert {t.study.split("/")[1] for t in searched(journal)} == stages
        plans = [t for t in Journal(journal).trials() if t.study.endswith("/plans")]
        assert plans and {t.config["pipeline"] for t in plans} == {name}
    entry = report.workloads[0].entry
    assert entry is not None and 0 < entry.check.max_rel_err < entry.check.tolerance == 2e-4
    with kda_tl.use(tmp_path):
        assert (
            select_cached(backward.problem(), CPU).step == select_cached(WORKLOAD.problem(), CPU).step == "exact bucket"
        )


def test_stages_that_a_problem_does_not_run_are_not_tuned(run: Run, tmp_path: Path) -> None:
    ungated = replace(BACKWARD, gate="log")
    stage = templates.load("bwd_reduce")
    assert stage.tensors_of(BACKWARD.problem())[1] and not stage.tensors_of(ungated.problem())[1]
    for workload, stage in ((ungated, "bwd_reduce"), (WORKLOAD, "bwd_qk")):
        assert f"pipeline runs '{stage}'" in tuner.tune_workload(run, workload, tmp_path, stage=stage).failure
    variant = ChunkVariant(pipeline="staged_backward", BT=16, BC=16)
    (plan,) = tuner._make_plans(run, ungated, [variant], [])
    assert plan == default_plan(ungated.problem(), CPU, BT=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "fwd_nothing"}, "fwd_state"),
        ({"workloads": []}, "at least one"),
        ({"budget": 0}, "at least 1"),
        ({"objective": "speed"}, "time, memory"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    request = {"workloads": [WORKLOAD], "device": CPU, "db_dir": tmp_path} | change
    with pytest.raises(InputError, match=message):
        tuner.tune(**request)


def test_a_workload_that_fails_says_why(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KdaTlError("out of luck")

    report = tuner.tune_workload(replace(run, device=known_device("nvidia_l4")), replace(WORKLOAD, K=256), tmp_path)
    assert "does not fit nvidia_l4" in report.failure and "shared" in report.failure and report.default is None
    monkeypatch.setattr(tuner, "tune_plan", fail)
    assert tuner.tune_workload(run, WORKLOAD, tmp_path).failure == "out of luck"


def test_every_pipeline_is_timed_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_plan(run: Any, workload: Workload, plan: Plan, deadline: float | None) -> Evaluation[Plan]:
        if deadline is not None:
            raise DeadlineExceeded
        return Evaluation(config=plan, outcome=Outcome(status="ok", median_us=float(plan.BT)))

    monkeypatch.setattr(screening, "run_plan", run_plan)
    quiet = SimpleNamespace(device=known_device("nvidia_h200"), pipeline=None, pool=Mock(overlap=False), emit=Mock())
    found = screening.screen(quiet, Workload(name="w", T=1024, H=8), deadline=0.0)
    assert [(v.pipeline, v.BT) for v in found] == [
        (name, 64) for name in ("prep_recurrence", "prep_segments_4", "prep_segments_8", "prep_segments_16", "staged")
    ]


def screened(*medians: float | None) -> dict[ChunkVariant, float]:
    variants = [ChunkVariant(pipeline="staged", BT=BT, BC=16) for BT in (64, 32, 16)]
    return {variant: us for variant, us in zip(variants, medians, strict=False) if us is not None}


@pytest.mark.parametrize(
    ("medians", "chosen"),
    [((10.0, 12.0, 10.5), [64, 16]), ((30.0, 20.0, 10.0), [16]), ((None, 20.0, None), [32]), ((None, None), [])],
)
def test_the_best_geometry_is_tuned_and_a_close_second(medians: tuple[float | None, ...], chosen: list[int]) -> None:
    quiet = SimpleNamespace(device=CPU)
    assert [g.BT for g in screening.choose_variants(quiet, WORKLOAD, screened(*medians))] == chosen


def test_every_timed_repetition_meets_a_cold_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[None] = []
    monkeypatch.setattr("kda_tl.bench.timing._flusher", lambda device: lambda: flushes.append(None))
    outcome = requests._time(lambda: None, CPU, {}, None)
    assert len(flushes) == len(outcome.samples_us) > requests.FIRST_REPS
    flushes.clear()
    rounds = requests._compete([lambda: None] * 3, CPU, rounds=2)
    assert len(flushes) == 3 * (2 + 2 * rounds.reps) and [len(medians) for medians in rounds.medians_us] == [2] * 3


def test_contests_and_plans_are_recalled_but_no_trials(tmp_path: Path) -> None:
    journal = tmp_path / "trials.jsonl"
    for study in ("a/contest", "a/plans", "a"):
        Journal(journal).append(Trial(study=study, config={"b": 1, "a": 2}, status="ok", median_us=1.0))
    assert set(load_known(journal)) == {("a/contest", '{"a": 2, "b": 1}'), ("a/plans", '{"a": 2, "b": 1}')}


@pytest.mark.gpu
def test_a_gpu_is_tuned_on_graphs_of_the_whole_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screening, "BT_CHOICES", (64,))
    workload = Workload(name="small", T=1000, H=4)
    (report,) = tuner.tune([workload], cuda_device(), budget=2, db_dir=tmp_path).workloads
    assert not report.failure and report.entry is not None and db.validate(tmp_path) == []
    assert report.entry.provenance["timed"] == "graph" and report.entry.provenance["driver"]
    assert report.entry.check.max_rel_err < 6e-3
    assert set(report.counts) <= {"ok", "slow"}
