"""What a tuning run does with its time, on an H100 that is not here: the workers only take (simulated) time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_stages import make_run
from support.simulated_pool import Simulation, simulate

from kda_tl.bench.workloads import Workload
from kda_tl.core.stage import Plan
from kda_tl.database.gpus import known_device
from kda_tl.tune import tuner
from kda_tl.tune.events import RunStarted, StageResult, TuneReport, VariantScreened, WorkloadStarted
from kda_tl.tune.forecast import Forecast
from kda_tl.tune.requests import CompileJob, PlanContest, Rounds, StageTrial
from kda_tl.tune.stage_search import SURE

H100 = known_device("nvidia_h100_80gb_hbm3")
WORKLOADS = [Workload(name=f"H{H}-T{T}", T=T, H=H) for T, H in ((1024, 8), (1024, 32), (1024, 64), (8192, 64))]
APART = [Workload(name=f"K{K}", T=1024, H=32, K=K) for K in (64, 96, 128, 160, 192)]  # no two share a kernel
LIMIT_S = 25.0
STAGE_US = {"fwd_gate": 20.0, "fwd_intra": 100.0, "fwd_wy": 60.0, "fwd_state": 300.0, "fwd_output": 200.0}


def staged_wins(plan: Plan) -> float:
    """Of many kernels, in many variants; short chunks are slow."""
    return (100.0 if plan.pipeline == "staged" else 150.0) * (64 / plan.BT) ** 2


def hopper_wins(plan: Plan) -> float:
    return 500.0 if plan.pipeline == "staged" else 100.0 if plan.pipeline == "prep_segments_8" else 130.0


def tune(simulation: Simulation, folder: Path, workloads: list[Workload], **options: Any) -> TuneReport:
    return tuner.tune(workloads, H100, **{"jobs": 15, "db_dir": folder, "timeout_s": LIMIT_S, **options})


def simulate_h100(patch: pytest.MonkeyPatch, plan_us: Any, **options: Any) -> Simulation:
    return simulate(patch, plan_us=plan_us, stage_us=lambda stage: STAGE_US.get(stage, 50.0), **options)


@pytest.mark.parametrize(("plan_us", "workloads"), [(staged_wins, APART), (hopper_wins, WORKLOADS)])
def test_a_short_limit_still_searches_what_takes_most_of_the_time(
    plan_us: Any, workloads: list[Workload], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels take 8 s, and ten of them are in the default plans alone: from the second workload on they are ready."""
    simulation = simulate_h100(monkeypatch, plan_us)
    for report in tune(simulation, tmp_path, workloads).workloads[1:]:
        stages = list(report.stages)
        share = [STAGE_US.get(stage.stage, 50.0) for stage in stages]
        assert share == sorted(share, reverse=True)
        trials = len(stages[0].search.trials)
        assert trials >= 4 or stages[0].search.stopped_because.startswith("all "), (report.workload.name, trials)


@pytest.mark.parametrize("plan_us", [staged_wins, hopper_wins])
def test_the_limit_holds(plan_us: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate_h100(monkeypatch, plan_us)
    for report in tune(simulation, tmp_path, WORKLOADS).workloads:
        assert report.seconds < LIMIT_S + 2.0 and report.entry is not None  # what is being measured ends


def test_what_a_workload_had_no_time_for_does_not_keep_the_next_one_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, waits = simulate_h100(monkeypatch, staged_wins), []

    def listen(event: Any) -> None:
        if isinstance(event, WorkloadStarted):
            waits.append(-simulation.clock.now)
        elif isinstance(event, VariantScreened) and event.variant.pipeline == "staged" and event.variant.BT == 64:
            waits[-1] += simulation.clock.now if waits[-1] <= 0 else 0.0

    tune(simulation, tmp_path, APART, on_event=listen)
    assert all(wait <= simulation.compile_s for wait in waits[1:]), waits
    assert len({job.key for job in simulation.compiled}) == len(simulation.compiled)


def test_without_a_limit_every_stage_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate_h100(monkeypatch, hopper_wins)
    (report,) = tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=None).workloads
    assert {stage.search.stopped_because.partition(" ")[0] for stage in report.stages} == {"all"}


def test_a_pipeline_far_behind_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate_h100(monkeypatch, hopper_wins)
    found: list[Any] = []
    tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=None, on_event=found.append)
    screened = [e.variant for e in found if isinstance(e, VariantScreened)]
    assert [g.BT for g in screened if g.pipeline == "staged"] == [64]
    assert {g.pipeline for g in screened} == {"staged", "prep_recurrence", *(f"prep_segments_{n}" for n in (4, 8, 16))}


def test_near_pipelines_are_measured_in_turns_before_two_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, prep_segments_4 was lucky: in turns, 8 and 16 are the fastest."""
    alone = {"prep_segments_4": 100.0, "prep_segments_8": 104.0, "prep_segments_16": 105.0}
    simulation = simulate_h100(monkeypatch, lambda plan: alone.get(plan.pipeline, 500.0))
    answer = simulation.answer

    def answer_in_turns(request: Any) -> Any:
        if not isinstance(request, PlanContest):
            return answer(request)
        in_turns = {**alone, "prep_segments_4": 110.0}
        return Rounds(medians_us=[[in_turns.get(p.pipeline, 500.0)] * request.rounds for p in request.plans], reps=3)

    monkeypatch.setattr(simulation, "answer", answer_in_turns)
    found: list[Any] = []
    tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=None, on_event=found.append)
    searched = dict.fromkeys(e.variant.pipeline for e in found if isinstance(e, StageResult))
    assert list(searched) == ["prep_segments_8", "prep_segments_16"]


def test_the_start_says_how_long_it_will_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit_s in (LIMIT_S, None):
        with pytest.MonkeyPatch.context() as patch:
            simulation = simulate_h100(patch, hopper_wins)
            events: list[Any] = []
            report = tune(simulation, tmp_path / str(limit_s), WORKLOADS, timeout_s=limit_s, on_event=events.append)
        start = events[0]
        assert isinstance(start, RunStarted) and (start.workloads, start.limit_s, start.jobs) == (4, limit_s, 15)
        assert 0.5 * len(simulation.compiled) <= start.kernels <= len(simulation.compiled)
        assert 0.5 * report.seconds < start.about_s < 2 * report.seconds
        assert limit_s is None or start.about_s <= limit_s * len(WORKLOADS)
        left = [e.left_s for e in events if isinstance(e, WorkloadStarted)]
        assert left == sorted(left, reverse=True) and left[-1] < 0.5 * start.about_s


def test_the_estimate_follows_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lefts = {}
    for compile_s in (0.1, 40.0):
        with pytest.MonkeyPatch.context() as patch:
            simulation = simulate_h100(patch, hopper_wins, compile_s=compile_s)
            events: list[Any] = []
            tune(simulation, tmp_path / str(compile_s), WORKLOADS, timeout_s=None, on_event=events.append)
        lefts[compile_s] = [events[0].about_s, *(e.left_s for e in events if isinstance(e, WorkloadStarted))]
    fast, slow = lefts.values()
    assert fast[0] == slow[0] and all(a < b for a, b in zip(fast[1:], slow[1:], strict=True))


def test_trials_are_made_when_the_time_is_nearly_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled before, so that only measuring takes time: 12 s are enough for some trials of the longest stage."""
    simulation = simulate_h100(monkeypatch, staged_wins, compile_s=0.01)
    (report,) = tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=18.0).workloads
    measured = [request.stage.name for _, request in simulation.measured if isinstance(request, StageTrial)]
    assert measured and measured[0] == "fwd_state" and report.seconds < 20.0


def count_trials(report: TuneReport) -> dict[str, int]:
    """By stage, for the first variant."""
    (workload,) = report.workloads
    first = workload.stages[0].variant
    return {stage.stage: len(stage.search.trials) for stage in workload.stages if stage.variant == first}


def test_a_stage_leaves_the_others_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is compiled, some 24 s are left: those of fwd_state and fwd_output alone would take 22 s."""
    simulation = simulate_h100(monkeypatch, staged_wins, compile_s=0.01)
    trials = count_trials(tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=42.0))
    assert all(count >= SURE for count in trials.values()), trials


def test_a_small_share_is_enough_for_the_first_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five equal stages share some 5 s."""
    simulation = simulate(monkeypatch, plan_us=staged_wins, stage_us=lambda stage: 50.0, compile_s=0.01)
    trials = count_trials(tune(simulation, tmp_path, WORKLOADS[:1], timeout_s=22.0))
    assert trials["fwd_gate"] == SURE, trials


def test_what_could_not_be_measured_in_time_makes_room_for_the_next_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its last seconds a workload has kernels compiled that the next one begins with, not some of its own."""
    simulation = simulate_h100(monkeypatch, staged_wins)
    starts, begun = [], []
    begin = simulation.begin

    def note(request: Any) -> None:
        if isinstance(request, CompileJob):
            begun.append((simulation.clock.now, request.case.problem.K))
        begin(request)

    def listen(event: Any) -> None:
        if isinstance(event, WorkloadStarted):
            starts.append((simulation.clock.now, event.workload.K))

    monkeypatch.setattr(simulation, "begin", note)
    tune(simulation, tmp_path, APART, on_event=listen)
    for (start, _), (end, following) in zip(starts[1:], starts[2:], strict=False):
        late = [K for when, K in begun if end - 2 * simulation.compile_s / 3 < when < end]
        assert late and set(late) == {following}, (start, late)


def test_kernels_that_workloads_share_are_forecast_once(tmp_path: Path) -> None:
    """Those of 8 heads and 1024 tokens, and of 64 heads and 8192."""
    pool: Any = SimpleNamespace(size=4, mean_result=lambda: None, finished=lambda key: False)
    run = make_run(pool, tmp_path / "journal")
    run = replace(run, device=H100)
    one, two = (Forecast(run, workloads, None, None) for workloads in (WORKLOADS[:1], WORKLOADS[::3]))
    assert one.count_kernels() == two.count_kernels() > 20
    compiling_s = one.count_kernels() * 8.0 / 4
    assert two.left_s() - one.left_s() == pytest.approx(one.left_s() - compiling_s)
    assert two.left_s(1) == pytest.approx(one.left_s())
    finished: Any = SimpleNamespace(size=4, mean_result=lambda: None, finished=lambda key: True)
    done = Forecast(replace(run, pool=finished), WORKLOADS[:1], None, None)
    assert done.left_s() == pytest.approx(one.left_s() - compiling_s)
