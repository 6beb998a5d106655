"""Tuning: stages are searched for a plan's chunk sizes, then plans compete end to end; the winner is stored.

Only the coordinator asks and tells: kernels are compiled by a pool of processes and timed by one process
(:mod:`kda_tl.tune.pool`), so that a candidate that crashes or hangs costs itself only. Every result is journaled before
the next measurement begins, and the same call goes on where it was stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kda_tl import templates
from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import Device
from kda_tl.core.packages import importing
from kda_tl.core.stage import Config, Plan, Stage
from kda_tl.database import store
from kda_tl.errors import DatabaseError, InputError, KdaTlError
from kda_tl.runtime.defaults import default_plan, iter_defaults
from kda_tl.runtime.dispatch import select_plan
from kda_tl.runtime.lower import require_compiler
from kda_tl.tune import events, plan_search
from kda_tl.tune.events import ChunkVariant, OnEvent, StageResult, TuneReport, WorkloadReport
from kda_tl.tune.forecast import Forecast
from kda_tl.tune.journal import Journal
from kda_tl.tune.plan_search import OBJECTIVES, as_called, default_plans, make_fixture
from kda_tl.tune.pool import WorkerPool
from kda_tl.tune.requests import WarmUp
from kda_tl.tune.screening import choose_variants, prefetch_plans, screen
from kda_tl.tune.session import Run, load_known
from kda_tl.tune.stage_search import count_cores, prefetch, time_stages, tune_stage

DEFAULT_BUDGET = 64
DEFAULT_OBJECTIVE = "balanced"
_FINAL_SHARE = 0.1  # of the time limit, kept for the contest of plans


def tune(
    workloads: Sequence[Workload],
    device: Device,
    *,
    stage: str | None = None,
    pipeline: str | None = None,
    budget: int = DEFAULT_BUDGET,
    objective: str = DEFAULT_OBJECTIVE,
    timeout_s: float | None = None,
    seed: int = 0,
    jobs: int | None = None,
    journal_dir: str | os.PathLike[str] | None = None,
    db_dir: str | os.PathLike[str] | None = None,
    on_event: OnEvent | None = None,
) -> TuneReport:
    """Tunes workloads one after the other and stores the winners as they are found, each pass in files of its own.

    Args:
        workloads: what to tune, see :func:`kda_tl.bench.workloads.select`; their gates are made slow.
        device: the device here; timings are kept under its slug.
        stage: tune only this stage, for the default chunk sizes; trials are journaled, no plan is stored.
        pipeline: tune only this pipeline, against its own default plan, and store its best plan even where another one
            is faster; the entry's provenance names it.
        budget: most trials a stage and chunk size.
        objective: of a backward, whether its first results may be the forward's, kept in memory: "time" if that is
            faster, "balanced" if it saves at least as large a share of the pass's time as it adds to the memory of the
            call's tensors, "memory" never.
        timeout_s: wall time a workload may take, None for no limit; what was found until then is used. The default plan
            of every pipeline is timed all the same.
        seed: of the inputs and the sampler.
        jobs: processes that compile, one a core unless given.
        journal_dir: where trials are kept, ``<slug>/<operator>_<pass>.trials.jsonl`` below; db_dir unless given.
        db_dir: the database to write, :func:`kda_tl.database.store.writable_directory` unless given.
        on_event: called with every event of :mod:`kda_tl.tune.events`.

    Returns:
        A report a workload. A workload that fails has its reason in ``failure``, and the run goes on.

    Raises:
        InputError: there is no such stage or pipeline, they do not fit each other or a workload's pass, or nothing is
            to be tuned.
        CompileError: no compiler was found.
        PackageError: a package that searches need is missing or broken.
        DatabaseError: the journal or the database cannot be written.
        KeyboardInterrupt: as pressed; every finished trial is in the journal, and the same call goes on from there.
    """
    begin = time.monotonic()
    _check_request(workloads, stage, pipeline, budget, objective)
    # a plan serves every gate of its problem: time it where no stage may stop because states have vanished
    workloads = [replace(workload, decay="slow") for workload in workloads]
    require_compiler(device)
    with importing("optuna"):  # searches need it after their first compile
        import optuna  # noqa: F401
    folder = Path(db_dir) if db_dir is not None else store.writable_directory()
    trials = Path(journal_dir if journal_dir is not None else folder) / device.slug
    problems = [workload.problem() for workload in workloads]
    journals = [trials / f"{problem.operator}_{problem.direction}.trials.jsonl" for problem in problems]
    for path in dict.fromkeys(journals):
        Journal(path).require_writable()
    overlap = device.kind == "cuda"
    emit = on_event or (lambda event: None)
    reports = []
    with WorkerPool(jobs or max(1, count_cores() - overlap), overlap=overlap) as pool:
        shared = Run(
            pool=pool,
            device=device,
            journal=journals[0],
            budget=budget,
            objective=objective,
            seed=seed,
            emit=emit,
            pipeline=pipeline,
        )
        runs = {path: replace(shared, journal=path, known=load_known(path)) for path in dict.fromkeys(journals)}
        forecast = Forecast(shared, workloads, stage, timeout_s)
        kernels, about_s = forecast.count_kernels(), forecast.left_s()
        total = len(workloads)
        emit(events.RunStarted(workloads=total, limit_s=timeout_s, kernels=kernels, jobs=pool.size, about_s=about_s))
        pool.warm_up(WarmUp(device=device))
        if overlap and stage is None:  # the start of the workers is on nobody's time
            prefetch_plans(shared, workloads[0])
            pool.await_warm()
        for index, (workload, following) in enumerate(zip(workloads, [*workloads[1:], None], strict=True)):
            left_s = forecast.left_s(index)
            emit(events.WorkloadStarted(workload=workload, index=index, total=total, left_s=left_s))
            run = runs[journals[index]]
            report = tune_workload(run, workload, folder, stage=stage, timeout_s=timeout_s, following=following)
            reports.append(report)
            emit(report)
    return TuneReport(device=device, workloads=tuple(reports), journals=tuple(runs), seconds=time.monotonic() - begin)


def _check_request(
    workloads: Sequence[Workload], stage: str | None, pipeline: str | None, budget: int, objective: str
) -> None:
    if not workloads:
        raise InputError("there is nothing to tune: pass at least one workload.")
    if budget < 1:
        raise InputError(f"budget must be at least 1, got {budget}.")
    if objective not in OBJECTIVES:
        raise InputError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")
    if stage is not None:
        templates.load(stage)
    if pipeline is not None:
        plan_search.require_pipeline(pipeline, workloads, stage)


def tune_workload(
    run: Run,
    workload: Workload,
    db_dir: Path,
    *,
    stage: str | None = None,
    timeout_s: float | None = None,
    following: Workload | None = None,
) -> WorkloadReport:
    """Tunes one workload, or one stage of it; a failure is in the report. Arguments as for :func:`tune`.

    Kernels of the ``following`` workload may be compiled when nothing else is to be. Raises DatabaseError if the
    journal or the database cannot be written.
    """
    begin = time.monotonic()
    deadline = None if timeout_s is None else begin + timeout_s
    blank = WorkloadReport(workload=workload)
    try:
        if stage is not None:
            report = _tune_one_stage(run, blank, stage, deadline)
        else:
            report = tune_plan(run, blank, db_dir, deadline=deadline, following=following)
    except DatabaseError:
        raise
    except KdaTlError as error:
        report = replace(blank, failure=str(error), stopped_because="it failed")
    return replace(report, seconds=time.monotonic() - begin)


def _tune_one_stage(run: Run, report: WorkloadReport, stage: str, deadline: float | None) -> WorkloadReport:
    """Of the pipeline that runs by default, or else of the first that has the stage."""
    problem, workload = report.workload.problem(), report.workload
    pipelines = plan_search.searched_pipelines(run, workload)
    found = {p.name: s for p in pipelines for s in p.stages_of(problem) if s.name == stage}
    if not found:
        who = f"no {problem.direction} pipeline runs" if run.pipeline is None else f"{run.pipeline} does not run"
        raise InputError(f"{who} {stage!r} for {workload.name}: pass another workload.")
    default = next((plan for plan in iter_defaults(problem, run.device) if plan.pipeline in found), None)
    default = default or default_plan(problem, run.device, pipeline=next(iter(found)))  # raises what it rejects
    variant = ChunkVariant(pipeline=default.pipeline, BT=default.BT, BC=default.BC)
    fixture = make_fixture(run, workload, variant)
    return _add_stages(report, [tune_stage(run, fixture, found[variant.pipeline], deadline=deadline)])


def tune_plan(
    run: Run, report: WorkloadReport, db_dir: Path, *, deadline: float | None = None, following: Workload | None = None
) -> WorkloadReport:
    """Screens variants with default configs, tunes the stages of the best one or two, and lets plans compete.

    Returns the blank report filled. ``deadline``, in terms of ``time.monotonic``, is when searching ends with what
    there is. Raises KdaTlError if nothing runs, or a file cannot be written.
    """
    workload = report.workload
    problem = workload.problem()
    default = as_called(run, workload, default_plan(problem, run.device, pipeline=run.pipeline))
    report = replace(report, default=default)
    end = None if deadline is None else deadline - _FINAL_SHARE * max(0.0, deadline - time.monotonic())
    run.pool.useful_until = None
    run.pool.drop(later=True)  # what the last workload had no time for, and prefetched for this one
    variants = choose_variants(run, workload, screen(run, workload, end, following), end)
    variants = variants or [ChunkVariant(pipeline=default.pipeline, BT=default.BT, BC=default.BC)]
    run.pool.drop(later=True)
    prefetch(run, make_fixture(run, workload, variants[0]))
    if run.pool.overlap and following is not None:
        prefetch_plans(run, following, urgent=False)
        for variant in variants if following.direction == workload.direction else ():
            prefetch(run, make_fixture(run, following, variant), urgent=False)
    results: list[StageResult] = []
    for number, variant in enumerate(variants):
        if number and end is not None and time.monotonic() > end:  # its default plan competes
            break
        fixture = make_fixture(run, workload, variant)
        count = len(fixture.pipeline.stages_of(problem))
        run.emit(events.PartStarted(part="stages", count=count))
        results += _tune_stages(run, fixture, end, _share(end, len(variants) - number))
    report = _add_stages(report, results)
    run.pool.useful_until = None
    run.pool.drop(later=False)
    tuned = _make_plans(run, workload, variants, results)
    plans, entry = plan_search.compete(run, workload, default, tuned, report.counts)
    if entry is None:
        return replace(report, plans=plans, failure="no plan computes the right numbers")
    path = store.store(db_dir, run.device, problem.operator, problem.direction, [entry])
    return replace(report, plans=plans, entry=entry, path=path)


def _make_plans(
    run: Run, workload: Workload, variants: Sequence[ChunkVariant], results: Sequence[StageResult]
) -> list[Plan]:
    """A plan a variant; a study that two of them share counts as it ended, when the most trials were known."""
    latest = {result.study: result for result in results}
    plans = []
    for variant, default in zip(variants, default_plans(run, workload, variants), strict=True):
        mine = [latest[result.study] for result in results if result.variant == variant]
        configs = dict(default.stages) | {result.stage: result.winner or result.default for result in mine}
        plans.append(replace(default, stages=tuple(configs.items())))
    return plans


def _tune_stages(run: Run, fixture: StageFixture, end: float | None, share: float | None) -> list[StageResult]:
    """Every stage that runs, the longest first; each may take as much of the time left as it takes of the pass's time.

    The time left is that until ``share``; until ``end`` every stage makes its first trials all the same.
    """
    variant = ChunkVariant(pipeline=fixture.pipeline.name, BT=fixture.BT, BC=fixture.BC)
    times = {} if end is not None and time.monotonic() > end else time_stages(run, fixture)
    launched = fixture.pipeline.stages_of(fixture.workload.problem())
    stages = sorted(launched, key=lambda stage: -times.get(stage.name, 0.0))
    results = []
    for number, stage in enumerate(stages):
        run.pool.drop(later=False)  # what the last search had no time for
        prefetch(run, fixture, stages=stages[number:])
        left = [times.get(each.name, 0.0) for each in stages[number:]]
        part = _share(share, sum(left) / left[0] if left[0] else len(left))
        seeds = _find_seeds(run, fixture, stage, variant)
        result = tune_stage(run, fixture, stage, deadline=end, share=part, seeds=seeds)
        if result.winner is not None:
            run.winners[stage.name, variant] = result.winner
        results.append(result)
    return results


def _find_seeds(run: Run, fixture: StageFixture, stage: Stage, variant: ChunkVariant) -> list[Config]:
    """What won for the last workload, and what the databases serve for this one or one near it."""
    found = [run.winners.get((stage.name, variant))]
    served = select_plan(fixture.workload.problem(), run.device, store.sources(), chunk_size=fixture.BT)
    if served.plan is not None and served.plan.pipeline == variant.pipeline:
        found.append(served.plan.config(stage.name))
    return [config for config in dict.fromkeys(found) if config is not None]


def _share(deadline: float | None, parts: float) -> float | None:
    """When the first of some equal parts of the time that is left ends."""
    return None if deadline is None else time.monotonic() + max(0.0, deadline - time.monotonic()) / parts


def _add_stages(report: WorkloadReport, stages: Sequence[StageResult]) -> WorkloadReport:
    reasons = dict.fromkeys(result.search.stopped_because for result in stages)
    return replace(report, stages=tuple(stages), stopped_because="; ".join(reasons))
