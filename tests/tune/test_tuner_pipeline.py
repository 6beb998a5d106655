"""Tuning one pipeline only, on an H200 that is not here: what would be compiled and measured is made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kda_tl.bench.workloads import Workload, select
from kda_tl.core.device import cpu_device
from kda_tl.core.stage import Plan
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.errors import InputError
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import select_plan
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune import screening, tuner
from kda_tl.tune.events import StageStarted, TuneReport, VariantScreened
from kda_tl.tune.journal import Journal, Outcome
from kda_tl.tune.requests import HashJob, PlanContest, PlanTrial, Rounds, StageTimes, StageTrial

H200 = known_device("nvidia_h200")
FORWARD = Workload(name="forward", T=1024, H=8)
BACKWARD = replace(FORWARD, name="backward", direction="bwd")
STAGED = [stage.name for stage in PIPELINES["staged"].stages]


def time_of(plan: Plan) -> float:
    """Hopper's pipelines are faster than portable ones, and all faster with short chunks, or kept results."""
    slow = plan.pipeline in ("staged", "staged_backward", "decode")
    return (100.0 if slow else 10.0) * (plan.BT or 64) / 64 * (0.9 if plan.kept else 1.0)


class MadeUpCrew:
    """In the place of the processes: every kernel compiles, and a plan takes its :func:`time_of`."""

    overlap, size, useful_until = True, 1, None

    def __init__(self) -> None:
        self.measured: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> MadeUpCrew:
        return self

    def __enter__(self) -> MadeUpCrew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def enqueue(self, jobs: Any, *, urgent: bool = True) -> None:
        assert all(job.config.reject(job.case) is None for job in jobs if hasattr(job, "config"))

    def drop(self, *, later: bool) -> None:
        pass

    def warm_up(self, request: Any) -> None:
        pass

    def await_warm(self) -> None:
        pass

    def finished(self, key: Any) -> bool:
        return False

    def mean_result(self) -> float | None:
        return None

    def prioritize(self, jobs: Any) -> None:
        self.enqueue(jobs)

    def prepare(self, job: Any) -> None:
        pass

    def result(self, job: Any, *, deadline: float | None = None) -> Any:
        return "0" * 64 if isinstance(job, HashJob) else "the same kernels"

    def measure(self, request: Any) -> Any:
        self.measured.append(request)
        if isinstance(request, PlanContest):
            return Rounds(medians_us=[[time_of(plan)] * request.rounds for plan in request.plans], reps=3)
        if isinstance(request, StageTrial):
            return Outcome(status="ok", median_us=1.0, samples_us=[1.0] * 3)
        if isinstance(request, StageTimes):
            return {stage.name: 1.0 for stage in request.fixture.pipeline.stages}
        assert isinstance(request, PlanTrial)
        us, check = time_of(request.plan), {"max_rel_err": 1e-3, "tolerance": 6e-3}
        extra = {"timed": "graph", "kept_bytes": 1, "call_bytes": 100}
        return Outcome(status="ok", median_us=us, samples_us=[us] * 3, check=check, extra=extra)

    def plans(self) -> list[Plan]:
        return [request.plan for request in self.measured if isinstance(request, PlanTrial)]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUpCrew]:
    made_up = MadeUpCrew()
    monkeypatch.setattr(tuner, "WorkerPool", made_up)
    monkeypatch.setattr(tuner, "require_compiler", lambda device: None)
    yield made_up


Tune = Callable[..., TuneReport]


@pytest.fixture
def tune(pool: MadeUpCrew, tmp_path: Path) -> Tune:
    """The tuner with one trial a stage."""

    def tune(*workloads: Workload, device: Any = H200, **options: Any) -> TuneReport:
        return tuner.tune(workloads, device, **{"db_dir": tmp_path, "budget": 1, **options})

    return tune


def screened(events: list[Any]) -> list[tuple[str, int]]:
    return [(e.variant.pipeline, e.variant.BT) for e in events if isinstance(e, VariantScreened)]


def test_only_the_pipeline_is_screened_tuned_and_competes(tune: Tune, pool: MadeUpCrew) -> None:
    events: list[Any] = []
    (report,) = tune(FORWARD, pipeline="staged", on_event=events.append).workloads
    assert not report.failure and report.entry is not None
    assert set(screened(events)) == {("staged", BT) for BT in screening.BT_CHOICES}
    assert {e.stage for e in events if isinstance(e, StageStarted)} == set(STAGED)
    assert {plan.pipeline for plan in pool.plans()} == {"staged"}
    events.clear()
    (free,) = tune(FORWARD, on_event=events.append).workloads
    assert {"staged", "prep_recurrence", "prep_segments_16"} <= {name for name, _ in screened(events)}
    assert free.entry is not None and free.entry.plan["pipeline"] == "prep_recurrence"


def test_the_gain_is_over_the_default_of_the_pipeline(tune: Tune) -> None:
    (report,) = tune(FORWARD, pipeline="staged").workloads
    default = default_plan(FORWARD.problem(), H200, pipeline="staged")
    assert (default.pipeline, default.BT) == ("staged", 64) and report.default == default == report.plans[0].config
    shortest = min(screening.BT_CHOICES)
    assert report.entry is not None and report.entry.plan["pipeline"] == "staged"
    assert (report.entry.plan["BT"], report.entry.vs_default.ratio) == (shortest, 64 / shortest)
    assert report.entry.provenance["pipeline"] == "staged"
    (free,) = tune(FORWARD).workloads
    assert free.default == default_plan(FORWARD.problem(), H200) != default
    assert free.entry is not None and "pipeline" not in free.entry.provenance


def test_a_backward_pipeline_may_keep_results(tune: Tune) -> None:
    (report,) = tune(BACKWARD, pipeline="staged_backward", objective="time").workloads
    assert report.entry is not None and report.entry.plan["kept"]
    assert {result.config.pipeline for result in report.plans} == {"staged_backward"}


def test_a_stored_plan_is_served_before_the_packaged_one(tune: Tune, tmp_path: Path) -> None:
    (report,) = tune(FORWARD, pipeline="staged").workloads
    assert report.entry is not None and db.validate(tmp_path) == []
    shipped = select_plan(FORWARD.problem(), H200, db.sources())
    assert shipped.plan is not None and (shipped.source, shipped.plan.pipeline != "staged") == ("packaged", True)
    with db.use(tmp_path):
        choice = select_plan(FORWARD.problem(), H200, db.sources())
    assert choice.plan is not None and choice.plan.as_dict() == report.entry.plan
    assert (choice.step, choice.source, choice.plan.pipeline) == ("exact bucket", "overlay", "staged")


def test_the_journal_is_shared_and_contests_are_not(tune: Tune, pool: MadeUpCrew, tmp_path: Path) -> None:
    tune(FORWARD)
    before = len(pool.measured)
    (report,) = tune(FORWARD, pipeline="staged").workloads
    assert report.entry is not None and report.entry.plan["pipeline"] == "staged"
    assert len(pool.measured) > before
    plans = pool.plans()
    assert len(plans) == len(set(plans))  # what both screened was measured once
    once = len(pool.measured)
    for pipeline, winner in ((None, "prep_recurrence"), ("staged", "staged")):
        (again,) = tune(FORWARD, pipeline=pipeline).workloads
        assert again.entry is not None and again.entry.plan["pipeline"] == winner
    assert len(pool.measured) == once
    (journal,) = tmp_path.glob("*/chunk_kda_fwd.trials.jsonl")
    contests = [t.config["entrants"] for t in Journal(journal).trials() if t.study.endswith("/plans/contest")]
    among_defaults, free, staged = contests
    assert {plan["pipeline"] for plan in among_defaults} == {name for name in PIPELINES if name.startswith("prep_")} & {
        plan.pipeline for plan in plans
    }
    assert {plan["pipeline"] for plan in staged} == {"staged"} and len(free) > 1


def test_a_stage_is_tuned_in_the_pipeline(tune: Tune) -> None:
    for pipeline in (None, "prep_recurrence", "prep_segments_8"):
        (report,) = tune(FORWARD, stage="fwd_prep", pipeline=pipeline).workloads
        assert [s.variant.pipeline for s in report.stages] == [pipeline or "prep_recurrence"] and report.entry is None
    ungated = replace(BACKWARD, gate="log")
    (report,) = tune(ungated, stage="bwd_reduce", pipeline="staged_backward").workloads
    assert "staged_backward does not run 'bwd_reduce' for backward" in report.failure


def test_what_cuts_few_heads_by_default_is_tuned_first(tune: Tune, pool: MadeUpCrew) -> None:
    """The default that others are held against, the first that is timed, and the pipeline of a stage that is named."""
    long = Workload(name="long", T=32768, H=8, gate="log", operator="chunk_gated_delta_rule")
    for workload, default, stage in (
        (long, "gdn_pairs_segments_16", "fwd_gdn_merge"),
        (replace(long, direction="bwd"), "gdn_walk_segments_16", "bwd_gdn_merge"),
    ):
        events: list[Any] = []
        (report,) = tune(workload, on_event=events.append).workloads
        assert report.default is not None and report.default.pipeline == default == screened(events)[0][0]
        (report,) = tune(workload, stage=stage).workloads
        assert [s.variant.pipeline for s in report.stages] == [default], report.failure


def test_a_step_is_timed_once_a_pipeline_since_it_has_no_chunks(tune: Tune, pool: MadeUpCrew, tmp_path: Path) -> None:
    """The plans of both pipelines, of which one is searched; its record is of no chunks, and serves."""
    events: list[Any] = []
    (step,) = select(["kda-verify-B32-T4-bf16"])
    (report,) = tune(step, on_event=events.append).workloads
    assert not report.failure and screened(events) == [("decode_rows", 0), ("decode", 0)]
    assert {plan.pipeline: (plan.BT, plan.BC) for plan in pool.plans()} == dict.fromkeys(
        ("decode_rows", "decode"), (0, 0)
    )
    served = select_plan(step.problem(), H200, [db.Database.load(tmp_path, "tuned")])
    assert (served.step, served.plan) == ("exact bucket", default_plan(step.problem(), H200)) and not served.passed_over
    assert db.validate(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pipeline": "nope"}, "no pipeline 'nope': choose one of staged, prep_recurrence"),
        (
            {"pipeline": "decode"},
            "decode is a pipeline of the decode pass, but forward is a workload of the forward pass",
        ),
        ({"pipeline": "prep_scan"}, "backward pass, but forward is .* forward pass: pass backward workloads .*staged"),
        ({"pipeline": "staged", "stage": "fwd_prep"}, "staged has no stage 'fwd_prep': choose one of fwd_gate"),
        ({"pipeline": "staged", "stage": "fwd_nope"}, "there is no stage 'fwd_nope'"),
    ],
)
def test_impossible_requests_are_refused(
    tune: Tune, pool: MadeUpCrew, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        tune(FORWARD, **change)
    assert not pool.measured and not list(tmp_path.iterdir())


def test_one_workload_of_the_other_pass_is_enough(tune: Tune, pool: MadeUpCrew) -> None:
    with pytest.raises(InputError, match="staged is .* forward pass, but backward is .* backward pass"):
        tune(FORWARD, BACKWARD, pipeline="staged")
    assert not pool.measured


@pytest.mark.parametrize("stage", (None, "fwd_prep"))
def test_what_the_pipeline_rejects_fails_in_its_words(tune: Tune, pool: MadeUpCrew, stage: str | None) -> None:
    single = replace(FORWARD, name="single", dtype="fp32")
    first, second = tune(single, FORWARD, pipeline="prep_recurrence", stage=stage).workloads
    assert "prep_recurrence does not run" in first.failure and "fp32 operands are refused" in first.failure
    assert not second.failure and (second.stages if stage else second.entry)
    (report,) = tune(FORWARD, pipeline="prep_recurrence", stage=stage, device=cpu_device()).workloads
    assert "instructions of sm_90" in report.failure and report.entry is None
