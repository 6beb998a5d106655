"""Tuning: stages are searched for a plan's chunk sizes, then plans compete end to end; the winner is stored.

Only the coordinator asks and tells: kernels are compiled by a pool of processes and timed by one process
(:mod:`kda_tl.crew`), so that a candidate that crashes or hangs costs itself only. Every result is journaled before the
next measurement begins, and the same call goes on where it was stopped.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kda_tl import db
from kda_tl.bench import Bench
from kda_tl.contest import Run, load_known
from kda_tl.crew import Crew
from kda_tl.device import Device
from kda_tl.dispatch import DEFAULT_PIPELINES, default_plan, resolve
from kda_tl.errors import DatabaseError, InputError, KdaTlError
from kda_tl.kernel import require_compiler
from kda_tl.plan_search import (
    OBJECTIVES,
    Screened,
    compete,
    default_plans,
    plan_of,
    prefetch_screen,
    require_pipeline,
    screen,
    searched_pipelines,
)
from kda_tl.progress import (
    Geometry,
    OnEvent,
    PartStarted,
    StageResult,
    TuneReport,
    WorkloadDone,
    WorkloadReport,
    WorkloadStarted,
)
from kda_tl.stage import Config, Plan, Stage
from kda_tl.stage_search import count_cores, prefetch, split_space, tune_stage
from kda_tl.workloads import Workload

DEFAULT_BUDGET = 64
DEFAULT_OBJECTIVE = "balanced"
_CLOSE = 1.15  # a geometry whose default plan is this near to the best one's is tuned too, if it is the second
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
        workloads: what to tune, see :func:`kda_tl.workloads.select`.
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
        db_dir: the database to write, :func:`kda_tl.db.writable_directory` unless given.
        on_event: called with every event of :mod:`kda_tl.progress`.

    Returns:
        A report a workload. A workload that fails has its reason in ``failure``, and the run goes on.

    Raises:
        InputError: there is no such stage or pipeline, they do not fit each other or a workload's pass, or nothing is
            to be tuned.
        CompileError: no compiler was found.
        DatabaseError: the journal or the database cannot be written.
        KeyboardInterrupt: as pressed; every finished trial is in the journal, and the same call goes on from there.
    """
    begin = time.monotonic()
    _check_request(workloads, stage, pipeline, budget, objective)
    require_compiler(device)
    folder = Path(db_dir) if db_dir is not None else db.writable_directory()
    trials = Path(journal_dir if journal_dir is not None else folder) / device.slug
    journals = [trials / _name_journal(workload) for workload in workloads]
    overlap = device.kind == "cuda"
    emit = on_event or (lambda event: None)
    reports = []
    with Crew(jobs or max(1, count_cores() - overlap), overlap=overlap) as crew:
        shared = Run(
            crew=crew,
            device=device,
            journal=journals[0],
            budget=budget,
            objective=objective,
            seed=seed,
            emit=emit,
            pipeline=pipeline,
        )
        runs = {path: replace(shared, journal=path, known=load_known(path)) for path in dict.fromkeys(journals)}
        for index, workload in enumerate(workloads):
            emit(WorkloadStarted(workload=workload, index=index, total=len(workloads)))
            following = workloads[index + 1] if index + 1 < len(workloads) else None
            run = runs[journals[index]]
            report = tune_workload(run, workload, folder, stage=stage, timeout_s=timeout_s, following=following)
            reports.append(report)
            emit(WorkloadDone(report=report))
    return TuneReport(device=device, workloads=tuple(reports), journals=tuple(runs), seconds=time.monotonic() - begin)


def _name_journal(workload: Workload) -> str:
    problem = workload.problem()
    return f"{problem.operator}_{problem.direction}.trials.jsonl"


def _check_request(
    workloads: Sequence[Workload], stage: str | None, pipeline: str | None, budget: int, objective: str
) -> None:
    from kda_tl import templates

    if not workloads:
        raise InputError("there is nothing to tune: pass at least one workload.")
    if budget < 1:
        raise InputError(f"budget must be at least 1, got {budget}.")
    if objective not in OBJECTIVES:
        raise InputError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}.")
    if stage is not None:
        templates.load(stage)
    if pipeline is not None:
        require_pipeline(pipeline, workloads, stage)


def tune_workload(
    run: Run,
    workload: Workload,
    db_dir: Path,
    *,
    stage: str | None = None,
    timeout_s: float | None = None,
    following: Workload | None = None,
) -> WorkloadReport:
    """Tunes one workload; a failure is in the report. Arguments as for :func:`tune`.

    Args:
        run: the tuning run.
        workload: what to tune.
        db_dir: the database to write.
        stage: tune only this stage.
        timeout_s: wall time it may take; the default plan of every pipeline is timed all the same.
        following: the next workload, whose kernels may be compiled when nothing else is to be.

    Raises:
        DatabaseError: the journal or the database cannot be written.
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
    problem = report.workload.problem()
    direction = problem.direction
    pipelines = searched_pipelines(run, report.workload)
    holders = [p for p in pipelines if stage in {s.name for s in p.stages_of(problem)}]
    if not holders:
        who = f"no {direction} pipeline runs" if run.pipeline is None else f"{run.pipeline} does not run"
        raise InputError(f"{who} {stage!r} for {report.workload.name}: pass another workload.")
    pipeline = next((p for name in DEFAULT_PIPELINES[direction] for p in holders if p.name == name), holders[0])
    default = default_plan(problem, run.device, pipeline=pipeline.name)
    geometry = Geometry(pipeline=pipeline.name, BT=default.BT, BC=default.BC)
    bench = make_bench(run, report.workload, geometry)
    chosen = next(s for s in pipeline.stages if s.name == stage)
    result = tune_stage(run, bench, chosen, deadline=deadline)
    return _add_stages(report, [result])


def make_bench(run: Run, workload: Workload, geometry: Geometry) -> Bench:
    """What the stages of a geometry are measured on."""
    from kda_tl.templates.pipelines import PIPELINES

    return Bench(
        pipeline=PIPELINES[geometry.pipeline],
        workload=workload,
        device=run.device,
        BT=geometry.BT,
        BC=geometry.BC,
        seed=run.seed,
    )


def tune_plan(
    run: Run, report: WorkloadReport, db_dir: Path, *, deadline: float | None = None, following: Workload | None = None
) -> WorkloadReport:
    """Screens geometries with default configs, tunes the stages of the best one or two, and lets plans compete.

    Args:
        run: the tuning run.
        report: the blank report to fill.
        db_dir: the database to write.
        deadline: ``time.monotonic`` when searching ends with what there is.
        following: the next workload, whose kernels may be compiled when nothing else is to be.

    Raises:
        KdaTlError: nothing runs, or a file cannot be written.
    """
    workload = report.workload
    problem = workload.problem()
    default = default_plan(problem, run.device, pipeline=run.pipeline)
    report = replace(report, default=default)
    geometries = choose_geometries(screen(run, workload, deadline), default)
    if run.crew.overlap and following is not None:
        prefetch_screen(run, following)
        for geometry in geometries if following.direction == workload.direction else ():
            prefetch(run, make_bench(run, following, geometry), urgent=False)
    if deadline is not None:
        deadline -= _FINAL_SHARE * max(0.0, deadline - time.monotonic())
    results: list[StageResult] = []
    benches = [make_bench(run, workload, geometry) for geometry in geometries]
    count = sum(len(bench.pipeline.stages_of(problem)) for bench in benches)
    run.emit(PartStarted(workload=workload, part="stages", count=count))
    for number, bench in enumerate(benches):
        results += _tune_stages(run, bench, _share(deadline, len(benches) - number))
    report = _add_stages(report, results)
    final = compete(run, workload, default, _make_plans(run, workload, geometries, results), report.counts)
    if final.entry is None:
        return replace(report, plans=final.plans, failure="no plan computes the right numbers")
    path = db.store(db_dir, run.device, problem.operator, problem.direction, [final.entry])
    return replace(report, plans=final.plans, entry=final.entry, path=path)


def _make_plans(
    run: Run, workload: Workload, geometries: Sequence[Geometry], results: Sequence[StageResult]
) -> list[Plan]:
    """A plan a geometry; a study that two of them share counts as it ended, when the most trials were known."""
    latest = {result.study: result for result in results}
    plans = []
    for geometry, default in zip(geometries, default_plans(run, workload, geometries), strict=True):
        mine = [latest[result.study] for result in results if result.geometry == geometry]
        tuned = {result.stage: result.winner or result.default for result in mine}
        plans.append(plan_of(geometry, dict(default.stages) | tuned))
    return plans


def choose_geometries(screened: Sequence[Screened], default: Plan) -> list[Geometry]:
    """The fastest geometry, and the second where it is close; the default's where none runs."""
    valid = sorted((s for s in screened if s.median_us is not None), key=lambda s: s.median_us or 0.0)
    if not valid:
        return [Geometry(pipeline=default.pipeline, BT=default.BT, BC=default.BC)]
    limit = _CLOSE * (valid[0].median_us or 0.0)
    return [s.geometry for s in valid[:2] if (s.median_us or 0.0) <= limit]


def _tune_stages(run: Run, bench: Bench, deadline: float | None) -> list[StageResult]:
    """Every stage that runs, in order; each may take the share of the time that its number of trials has."""
    prefetch(run, bench)
    geometry = Geometry(pipeline=bench.pipeline.name, BT=bench.BT, BC=bench.BC)
    stages = bench.pipeline.stages_of(bench.workload.problem())
    trials = [min(run.budget, len(split_space(stage, bench.case)[0])) for stage in stages]
    results = []
    for number, stage in enumerate(stages):
        share = _share(deadline, sum(trials[number:]) / max(trials[number], 1))
        result = tune_stage(run, bench, stage, deadline=share, seeds=_find_seeds(run, bench, stage, geometry))
        if result.winner is not None:
            run.winners[stage.name, geometry] = result.winner
        results.append(result)
    return results


def _find_seeds(run: Run, bench: Bench, stage: Stage, geometry: Geometry) -> list[Config]:
    """What won for the last workload, and what the databases serve for this one or one near it."""
    found = [run.winners.get((stage.name, geometry))]
    served = resolve(bench.workload.problem(), run.device, db.sources(), chunk_size=bench.BT)
    if served.plan is not None and served.plan.pipeline == geometry.pipeline:
        found.append(served.plan.config(stage.name))
    return [config for config in dict.fromkeys(found) if config is not None]


def _share(deadline: float | None, parts: float) -> float | None:
    """When the first of some equal parts of the time that is left ends."""
    return None if deadline is None else time.monotonic() + max(0.0, deadline - time.monotonic()) / parts


def _add_stages(report: WorkloadReport, results: Sequence[StageResult]) -> WorkloadReport:
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.search.counts)
    reasons = dict.fromkeys(result.search.stopped_because for result in results)
    return replace(
        report,
        stages=tuple(results),
        counts=dict(counts),
        resumed=sum(result.search.resumed for result in results),
        stopped_because="; ".join(reasons),
    )
