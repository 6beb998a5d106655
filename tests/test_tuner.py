"""Tuning on the CPU target: real kernels, few candidates, every way to fail, and nothing measured twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fake_stages
import notes
import psutil
import pytest
import torch

import kda_tl
from kda_tl import templates
from kda_tl.bench.fixtures import StageFixture, check_plan, make_pass, operator_tensors
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cpu_device, cuda_device
from kda_tl.core.stage import Case, Plan
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.records import Key
from kda_tl.errors import InputError, KdaTlError, WrongResultError
from kda_tl.reference import recurrent_kda, relative_error
from kda_tl.runtime.compile import Kernel, hash_kernel
from kda_tl.runtime.dispatch import default_plan, pin, select_cached
from kda_tl.runtime.program import Program
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune import plan_search, requests, screening, stage_search, tuner
from kda_tl.tune.events import (
    ChunkVariant,
    PartStarted,
    PlanDone,
    PlanResult,
    RunStarted,
    StageDone,
    StageResult,
    StageStarted,
    TrialDone,
    TuneReport,
    VariantScreened,
    WorkloadDone,
    WorkloadStarted,
)
from kda_tl.tune.final import Comparison, decide, hold_final
from kda_tl.tune.isolate import WorkerTimeout
from kda_tl.tune.journal import Journal, Trial
from kda_tl.tune.pool import DeadlineExceeded, WorkerPool
from kda_tl.tune.requests import HashJob, Rounds
from kda_tl.tune.session import Run, load_known

WORKLOAD = Workload(name="tiny", T=40, H=1, K=32, V=32, dtype="fp32")
CPU = cpu_device()
HERE = torch.device("cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, overlap=False) as shared:
        yield shared


@pytest.fixture
def run(pool: WorkerPool, tmp_path: Path) -> Run:
    return fake_stages.make_run(pool, tmp_path / "trials.jsonl")


BACKWARD = replace(WORKLOAD, name="tiny-backward", gate="softplus", direction="bwd")


def fixture(workload: Workload = WORKLOAD, BT: int = 16, BC: int = 16) -> StageFixture:
    return StageFixture(pipeline=PIPELINES["staged"], workload=workload, device=CPU, BT=BT, BC=BC)


def searched(journal: Path) -> list[Trial]:
    """Trials of searches, without contests, plans and times of stages."""
    return [t for t in Journal(journal).trials() if not t.study.endswith(("/contest", "/plans", "/stages"))]


@dataclass(frozen=True)
class Stopped:
    """The fake stage's search, killed and run again."""

    journal: Path
    before: list[Trial]
    after: list[Trial]
    result: StageResult


@pytest.fixture(scope="module")
def stopped(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """kill -9 after the first measurement, then the same search to its end."""
    journal = tmp_path_factory.mktemp("stopped") / "trials.jsonl"
    code = f"from fake_stages import tune_fake; tune_fake({str(journal)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    victim = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        while victim.poll() is None and not (journal.exists() and journal.read_bytes().endswith(b"\n")):
            time.sleep(0.05)
    finally:
        victim.kill()
        victim.wait()
    before = searched(journal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stage_search._TRIAL_TIMEOUT_S, "cpu", 5.0)
        result = stage_search.tune_stage(fake_stages.make_run(pool, journal), fake_stages.BENCH, fake_stages.STAGE)
    return Stopped(journal, before, searched(journal), result)


def test_a_killed_search_goes_on_and_repeats_no_measurement(stopped: Stopped) -> None:
    assert 1 <= len(stopped.before) < len(stopped.after)
    assert stopped.after[: len(stopped.before)] == stopped.before
    repeated = [key for key, n in Counter((t.study, repr(t.config)) for t in stopped.after).items() if n > 1]
    assert not repeated
    assert stopped.result.search.resumed == len(stopped.before)


def test_every_failure_is_recorded_as_what_it_is_and_the_search_goes_on(stopped: Stopped) -> None:
    statuses = {(t.config["kind"], t.config["repeat"]): t.status for t in stopped.after}
    assert statuses == {
        ("right", 8): "ok",
        ("right", 1): "ok",
        ("wrong", 8): "wrong",
        ("unwritten", 8): "wrong",
        ("broken", 8): "compile",
        ("dies", 8): "crash",
        ("segfaults", 8): "crash",
        ("hangs", 8): "timeout",
    }
    reasons = {t.config["kind"]: t.reason for t in stopped.after}
    assert "this config cannot be built" in reasons["broken"]
    assert "code 3" in reasons["dies"] and "SIGSEGV" in reasons["segfaults"]
    assert "o is off by 0.5" in reasons["wrong"] and "5 s" in reasons["hangs"]
    assert stopped.result.search.counts == {"ok": 2, "wrong": 2, "compile": 1, "crash": 2, "timeout": 1}
    assert stopped.result.rejected == {"refused configs are refused": 2, "one of each failure is enough": 6}


def test_the_faster_config_wins_and_tells_by_how_much(stopped: Stopped) -> None:
    result = stopped.result
    assert result.winner == fake_stages.FakeConfig(repeat=1)
    assert result.default == fake_stages.FakeConfig(repeat=8)
    assert result.ratio is not None and result.ci95 is not None and result.median_us is not None
    assert result.ratio > 1.5 and result.ci95[0] <= result.ratio <= result.ci95[1]


def test_a_finished_stage_is_answered_from_the_journal(
    stopped: Stopped, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "measure", lambda *_: pytest.fail("something was measured again"))
    again = stage_search.tune_stage(fake_stages.make_run(pool, stopped.journal), fake_stages.BENCH, fake_stages.STAGE)
    assert again.search.resumed == len(stopped.after) == len(searched(stopped.journal))
    assert (again.winner, again.ci95) == (stopped.result.winner, stopped.result.ci95)


def test_a_search_without_time_leaves_the_stage_untuned(run: Run) -> None:
    result = stage_search.tune_stage(run, fake_stages.BENCH, fake_stages.STAGE, deadline=time.monotonic() - 1)
    assert (result.winner, result.search.trials) == (None, ())
    assert "time limit" in result.search.stopped_because
    assert not run.journal.exists()


def test_ctrl_c_leaves_the_finished_trials(pool: WorkerPool, tmp_path: Path) -> None:
    journal = tmp_path / "trials.jsonl"

    def press(event: Any) -> None:
        if isinstance(event, TrialDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage_search.tune_stage(fake_stages.make_run(pool, journal, press), fake_stages.BENCH, fake_stages.STAGE)
    assert [t.status for t in searched(journal)] == ["ok"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., notes.Note]:
    """Notes, and workers that know nothing else, so that they start at once."""
    monkeypatch.setattr("kda_tl.tune.pool.TARGET", "notes:run")

    def note(name: str, seconds: float = 0.0, **options: Any) -> notes.Note:
        return notes.Note(path=str(tmp_path / "notes"), name=name, seconds=seconds, **options)

    return note


def test_on_a_gpu_the_pool_works_while_something_is_measured(light: Any, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt), WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("f")], urgent=False)
        pool.enqueue(map(light, "abc"))
        pool.prioritize(map(light, "cb"))
        assert pool.measure(light("m", 2.0)) == "M"
        assert (tmp_path / "notes").read_text() == "fcbam"  # the first one had begun at once
        assert pool.result(light("a")) == "A" and (tmp_path / "notes").read_text() == "fcbam"
        assert {child.pid for child in psutil.Process().children()} > before
        raise KeyboardInterrupt
    assert {child.pid for child in psutil.Process().children()} == before


def test_on_the_cpu_the_pool_rests_while_something_is_measured(light: Any, tmp_path: Path) -> None:
    a, m = light("a", 0.2), light("m", 0.2)
    with WorkerPool(2, overlap=False) as pool:
        pool.enqueue([a])
        pool.measure(m)
        assert (tmp_path / "notes").read_text() == "m"
        assert pool.result(a) == "A"
        with pytest.raises(DeadlineExceeded):
            pool.result(light("late", 5.0), deadline=time.monotonic() + 0.1)


def test_what_is_dropped_is_not_done_unless_it_is_asked_for_again(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("a", 0.5)])  # begun at once
        pool.enqueue(map(light, "bc"))
        pool.enqueue(map(light, "de"), urgent=False)
        pool.drop(later=False)
        assert pool.result(light("e")) == "E"  # what is not urgent was not dropped
        pool.enqueue([light("f", 0.5)])
        pool.enqueue([light("g")], urgent=False)
        pool.enqueue([light("g")])  # now it is, and precedes d
        assert pool.measure(light("m", 1.0)) == "M"
        pool.enqueue([light("h", 0.5)])
        pool.enqueue([light("i")], urgent=False)
        pool.drop(later=True)
        pool.enqueue([light("c")])
        assert pool.measure(light("n", 1.0)) == "N"
    assert (tmp_path / "notes").read_text() == "aefgdmhcn"


def test_what_would_end_too_late_waits_behind_what_is_not_urgent(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("a", 0.3)])
        pool.enqueue(map(light, "bc"))
        pool.enqueue(map(light, "de"), urgent=False)
        pool.useful_until = time.monotonic()
        assert pool.result(light("c")) == "C"  # what is waited for comes first all the same
        assert pool.measure(light("m", 1.0)) == "M"
    assert (tmp_path / "notes").read_text() == "acdebm"


def test_a_first_call_that_hangs_is_ended_in_both_kinds_of_workers(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.warm_up(light("w", timeout_s=60.0))
        with pytest.raises(WorkerTimeout, match=r"the call took longer than 0\.3 s"):
            pool.measure(light("m", 20.0, timeout_s=0.3))
        assert isinstance(pool.result(light("a", 20.0, timeout_s=0.3)), WorkerTimeout)
        assert pool.measure(light("n")) == "N" and pool.result(light("b")) == "B"
    assert (tmp_path / "notes").read_text() == "wnb"


def test_a_measuring_process_that_cannot_warm_up_is_replaced(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.warm_up(light("w", 20.0, timeout_s=0.3))
        assert pool.measure(light("m")) == "M"
    assert (tmp_path / "notes").read_text() == "m"


def test_equal_kernels_are_one_study(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def study(stage: str, workload: Workload = WORKLOAD, BC: int = 16) -> str:
        on, loaded = fixture(workload, BT=16, BC=BC), templates.load(stage)
        return stage_search.name_study(run, on, loaded, list(loaded.candidates(on.case)))

    softplus, slow = replace(WORKLOAD, gate="softplus"), replace(WORKLOAD, decay="slow")
    assert study("fwd_state", softplus) == study("fwd_state", slow) == study("fwd_state")
    assert study("fwd_gate", slow) == study("fwd_gate", BC=8) == study("fwd_gate")
    assert study("fwd_gate", softplus) != study("fwd_gate")
    assert study("fwd_intra", BC=8) != study("fwd_intra")
    assert study("fwd_state", replace(WORKLOAD, T=400)) != study("fwd_state")
    assert study("fwd_state", replace(WORKLOAD, T=41)) == study("fwd_state")  # the same bucket
    assert study("fwd_state", replace(WORKLOAD, H=2, HV=2)) != study("fwd_state")
    before = study("fwd_state")
    monkeypatch.setattr(stage_search, "fingerprint", lambda stage: "an edited template")
    assert study("fwd_state") != before


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
    assert report.plans[0].plan == report.default


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
    assert isinstance(events[-1], WorkloadDone)
    started = [(e.stage, e.variant) for e in events if isinstance(e, StageStarted)]
    assert started == [(e.result.stage, e.result.variant) for e in events if isinstance(e, StageDone)]
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
        if isinstance(request, HashJob):  # kernels are hashed, not timed
            return request.run()
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
    plan = plan_search.plan_of(
        ChunkVariant(pipeline="staged", BT=16, BC=16),
        {s.name: s.default(fixture().case) for s in PIPELINES["staged"].stages},
    )
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


# The backward


def test_backward_plans_are_run_on_what_the_operator_would_pass() -> None:
    workload = replace(BACKWARD, B=2, lengths=())
    plan = default_plan(workload.problem(), CPU, BT=16)
    tensors, sizes = operator_tensors(workload, 16, HERE, seed=3)
    found = Program.build(plan, workload.problem(), CPU).run(tensors, sizes, HERE)
    x = workload.inputs("cpu", seed=3)
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    with pin(plan):
        o, ht = kda_tl.chunk_kda(**x)[:2]
    torch.autograd.backward([o, ht], [tensors["do"].view(o.shape), tensors["dht"]])
    for name, leaf in leaves.items():
        assert torch.equal(found[f"d{name}"].view(leaf.shape), leaf.grad), name


def test_every_gradient_of_a_plan_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = default_plan(BACKWARD.problem(), CPU, BT=16)
    assert 0 < check_plan(plan, BACKWARD, CPU) < 2e-5
    right = Program.run
    for wrong in ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"):

        def run(*args: Any, wrong: str = wrong) -> dict[str, Any]:
            found = right(*args)
            return found | {wrong: 1.01 * found[wrong]}

        monkeypatch.setattr(Program, "run", run)
        with pytest.raises(WrongResultError, match=f"{wrong} is off by 0.01 .* over 0.0002"):
            check_plan(plan, BACKWARD, CPU)


def test_a_plan_with_kept_results_begins_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(default_plan(BACKWARD.problem(), CPU, BT=16), kept=True)
    assert check_plan(plan, BACKWARD, CPU) < 2e-5
    made, names = make_pass(plan, BACKWARD, CPU), []
    launch = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: names.append(self.stage.name) or launch(self, *args))
    made.run()
    pipeline = PIPELINES["staged_backward"]
    spared = [stage.name for stage in pipeline.stages if stage.name.startswith("fwd_")]
    assert spared + names == [stage.name for stage in pipeline.stages]
    again = make_pass(replace(plan, kept=False), BACKWARD, CPU)
    assert made.kept_bytes > 0 == again.kept_bytes and made.call_bytes == again.call_bytes > 0


@pytest.mark.parametrize(
    ("objective", "kept_us", "kept_bytes", "worth"),
    [
        ("time", 99.0, 10**9, True),  # the contest decides
        ("time", None, 1, False),
        ("balanced", 80.0, 19, True),
        ("balanced", 80.0, 21, False),
        ("balanced", 101.0, 1, False),
        ("balanced", None, 1, False),
    ],
)
def test_results_are_kept_for_what_that_saves(
    objective: str, kept_us: float | None, kept_bytes: int, worth: bool
) -> None:
    plan = default_plan(BACKWARD.problem(), CPU, BT=16)
    twin = plan_search.find_kept_twin(plan, objective)
    assert twin == replace(plan, kept=True)
    about = {"kept_bytes": kept_bytes, "call_bytes": 100}
    result = PlanResult(plan=twin, status="ok" if kept_us else "crash", median_us=kept_us, extra=about)
    assert plan_search.is_worth_keeping(objective, 100.0, result) == worth


def test_nothing_is_kept_for_memory_or_by_a_forward() -> None:
    backward, forward = (default_plan(w.problem(), CPU, BT=16) for w in (BACKWARD, WORKLOAD))
    assert plan_search.find_kept_twin(backward, "memory") is plan_search.find_kept_twin(forward, "time") is None


@pytest.mark.parametrize("objective", plan_search.OBJECTIVES)
def test_the_objective_decides_what_competes(run: Run, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept results save half of the time, and double the memory."""
    default, held = default_plan(BACKWARD.problem(), CPU, BT=16), []

    def measure(run: Run, workload: Workload, plan: Plan) -> tuple[PlanResult, bool]:
        about = {"kept_bytes": 100, "call_bytes": 100} if plan.kept else {}
        check = {"max_rel_err": 1e-6, "tolerance": 1e-5}
        us = 50.0 if plan.kept else 100.0
        return PlanResult(plan=plan, status="ok", median_us=us, check=check, extra={"timed": "launch", **about}), False

    def hold(run: Run, study: str, candidates: dict[Plan, Any], request: Any, **ranks: Any) -> Comparison[Plan]:
        held.extend(candidates)
        return decide({plan: [50.0 if plan.kept else 100.0] * 5 for plan in candidates}, 5, **ranks)

    monkeypatch.setattr(plan_search, "run_plan", measure)
    monkeypatch.setattr(plan_search, "hold_final", hold)
    final = plan_search.compete(replace(run, objective=objective), BACKWARD, default, [], {})
    assert {plan.kept for plan in held} == ({True, False} if objective == "time" else {False})
    assert final.entry is not None and final.entry.plan.get("kept", False) == (objective == "time")
    assert final.entry.provenance.get("kept_bytes") == (100 if objective == "time" else None)


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
    def run_plan(run: Any, workload: Workload, plan: Plan, deadline: float | None) -> tuple[PlanResult, bool]:
        if deadline is not None:
            raise DeadlineExceeded
        return PlanResult(plan=plan, status="ok", median_us=float(plan.BT)), False

    monkeypatch.setattr(screening, "run_plan", run_plan)
    quiet = SimpleNamespace(device=known_device("nvidia_h200"), pipeline=None, pool=Mock(overlap=False), emit=Mock())
    found = screening.screen(quiet, Workload(name="w", T=1024, H=8), deadline=0.0)
    assert [(s.variant.pipeline, s.variant.BT) for s in found] == [
        (name, 64) for name in ("staged", "prep_recurrence", "prep_segments_4", "prep_segments_8", "prep_segments_16")
    ]


def screened(*medians: float | None) -> list[screening.Screened]:
    variants = [ChunkVariant(pipeline="staged", BT=BT, BC=16) for BT in (64, 32, 16)]
    return [screening.Screened(variant=g, median_us=m) for g, m in zip(variants, medians, strict=False)]


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


def test_candidates_are_ranked_from_the_default_outwards() -> None:
    case = fixture(replace(WORKLOAD, K=64), BT=64).case
    stage = templates.load("fwd_gate")
    ranked = stage_search.rank_by_distance(stage.candidates(case), stage.default(case))
    distances = [stage_search.measure_distance(config, ranked[0]) for config in ranked]
    assert ranked[0] == stage.default(case) and distances == sorted(distances) and distances[1] == 1


def test_the_default_wins_what_is_within_the_noise() -> None:
    default = [10.0, 10.1, 9.9, 10.0, 10.2]
    faster = decide({"default": default, "a": [5.0, 5.1, 4.9, 5.0, 5.0], "b": [5.0] * 5}, 3, "default", ("b", "a"))
    assert (faster.winner, faster.median_us, faster.default_us, faster.reps) == ("b", 5.0, 10.0, 15)
    assert faster.ratio == pytest.approx(2.0) and faster.ci95 is not None and faster.ci95[0] > 1.9
    near = decide({"default": default, "a": [9.9] * 5}, 3, "default")
    noisy = decide({"default": default, "a": [9.0, 9.0, 9.0, 30.0, 30.0]}, 3, "default")
    for comparison in (near, noisy):
        assert (comparison.winner, comparison.ratio, comparison.ci95) == ("default", 1.0, (1.0, 1.0))
    alone = decide({"a": [3.0, 4.0]}, 3, None)
    assert (alone.winner, alone.ratio, alone.ci95, alone.default_us) == ("a", None, None, None)


@pytest.mark.parametrize("noise", [(100.0, 101.0), (101.0, 100.0)])
def test_equally_fast_entrants_of_a_contest_follow_the_fixed_order(noise: tuple[float, float]) -> None:
    """Entrants come best first, which is noise too."""
    candidates = dict(sorted(zip("ab", noise, strict=True), key=lambda item: item[1]))
    stored = Mock(extra={"rounds": [[us] * 5 for us in candidates.values()], "reps": 3})
    recall: Any = SimpleNamespace(recall=lambda study, config: stored)
    for order in ("ab", "ba"):
        comparison = hold_final(recall, "s", dict.fromkeys(candidates, {}), Mock(), default=None, fixed_order=order)
        assert comparison.winner == order[0]


def test_equally_fast_plans_follow_a_fixed_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two is measured as the faster one changes from run to run; the default is far behind."""
    plans = [default_plan(BACKWARD.problem(), CPU, BT=BT, BC=BC) for BT, BC in ((64, 16), (32, 16), (32, 8))]
    default, *others = plans
    winners = set()
    for faster in others:
        for order in (others, others[::-1]):
            noisy = {plan: 100.0 if plan == faster else 101.0 for plan in others} | {default: 200.0}
            fake = FakeMeasurements(noisy)
            monkeypatch.setattr(plan_search, "run_plan", fake.run_plan)
            again = replace(run, objective="memory", known={})
            monkeypatch.setattr(Run, "measure", fake.measure)
            final = plan_search.compete(again, BACKWARD, default, order, {})
            assert final.entry is not None
            winners.add((final.entry.plan["BT"], final.entry.plan["BC"]))
    assert winners == {(32, 16)}


class FakeMeasurements:
    """Plans with times that are made up."""

    def __init__(self, us: dict[Plan, float]) -> None:
        self.us = us

    def run_plan(self, run: Run, workload: Workload, plan: Plan) -> tuple[PlanResult, bool]:
        check = {"max_rel_err": 1e-6, "tolerance": 1e-5}
        return PlanResult(plan=plan, status="ok", median_us=self.us[plan], check=check), False

    def measure(self, request: Any, fixture: Any = None) -> Any:
        if isinstance(request, HashJob):
            return "0" * 64
        return Rounds(medians_us=[[self.us[plan]] * 5 for plan in request.plans], reps=3)


def test_a_wrong_plan_neither_competes_nor_is_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by far the fastest: it answers from memory, and one of its results is 1 % off."""
    right, wrong = (default_plan(WORKLOAD.problem(), CPU, BT=16, BC=BC) for BC in (16, 8))
    launch, answers, held = Program.run, {}, []

    def answer(self: Program, tensors: Any, sizes: Any, *args: Any) -> dict[str, Any]:
        if self.plan != wrong:
            return launch(self, tensors, sizes, *args)
        size = tuple(sizes.items())
        if size not in answers:
            found = launch(self, tensors, sizes, *args)
            answers[size] = found | {"ht": 1.01 * found["ht"]}
        return answers[size]

    def measure(self: Run, request: Any, fixture: Any = None) -> Any:
        held.extend(getattr(request, "plans", ()))
        return request.run()

    monkeypatch.setattr(Program, "run", answer)
    monkeypatch.setattr(Run, "measure", measure)
    with torch.no_grad():
        final = plan_search.compete(run, WORKLOAD, right, [wrong], {})
        nothing = plan_search.compete(run, WORKLOAD, wrong, [wrong], {})
    assert [(result.plan, result.status) for result in final.plans] == [(right, "ok"), (wrong, "wrong")]
    assert "ht is off by 0.01" in final.plans[1].reason and held == [right]
    assert final.entry is not None and final.entry.plan == right.as_dict() and final.entry.check.max_rel_err < 1e-5
    assert nothing.entry is None and [result.status for result in nothing.plans] == ["wrong"]


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
