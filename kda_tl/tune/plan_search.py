"""Whole plans: how one is run, and the contest that gives the database its entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kda_tl import templates
from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.timing import read_gpu_state
from kda_tl.bench.workloads import Workload
from kda_tl.core.isolate import WorkerFailure
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Plan
from kda_tl.database import store
from kda_tl.database.records import Check, Entry, Key, Timing, VsDefault
from kda_tl.errors import InputError, KdaTlError
from kda_tl.runtime.compile import known_hash
from kda_tl.runtime.defaults import pipeline_defaults
from kda_tl.runtime.dispatch import numerics_class, select_plan
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune.events import ChunkVariant, PartStarted, PlanDone
from kda_tl.tune.final import ROUNDS, Comparison, decide, measure_in_turns
from kda_tl.tune.requests import CompileJob, HashJob, PlanContest, PlanTrial
from kda_tl.tune.search import Evaluation, sort_valid
from kda_tl.tune.session import PLANS, Run
from kda_tl.tune.stage_search import compile_jobs, compiler_version, name_problem_study

OBJECTIVES = ("balanced", "time", "memory")
_PASS_NAMES = {"fwd": "forward", "bwd": "backward", "step": "decode"}


def require_pipeline(name: str, workloads: Sequence[Workload], stage: str | None = None) -> Pipeline:
    """The pipeline of a name, to which a search of workloads, or of one stage, is restricted.

    Raises InputError if there is none, if it is not of a workload's pass, or does not have the stage.
    """
    pipeline = PIPELINES.get(name)
    if pipeline is None:
        raise InputError(f"there is no pipeline {name!r}: choose one of {', '.join(PIPELINES)}.")
    other = next((workload for workload in workloads if workload.direction != pipeline.direction), None)
    if other is not None:
        fitting = ", ".join(p.name for p in PIPELINES.values() if p.direction == other.direction)
        ours, theirs = _PASS_NAMES[pipeline.direction], _PASS_NAMES[other.direction]
        raise InputError(
            f"{name} is a pipeline of the {ours} pass, but {other.name} is a workload of the {theirs} pass: "
            f"pass {ours} workloads only, or a {theirs} pipeline ({fitting})."
        )
    stages = [each.name for each in pipeline.stages]
    if stage is not None and stage not in stages:
        raise InputError(f"{name} has no stage {stage!r}: choose one of {', '.join(stages)}.")
    return pipeline


def searched_pipelines(run: Run, workload: Workload) -> list[Pipeline]:
    """Those of a workload's pass, or of them the one that the run is restricted to."""
    return [p for p in PIPELINES.values() if p.direction == workload.direction and run.pipeline in (None, p.name)]


def make_fixture(run: Run, workload: Workload, variant: ChunkVariant) -> StageFixture:
    """What the stages of a variant are measured on."""
    pipeline, (BT, BC) = PIPELINES[variant.pipeline], (variant.BT, variant.BC)
    return StageFixture(pipeline=pipeline, workload=workload, device=run.device, BT=BT, BC=BC, seed=run.seed)


def default_plans(run: Run, workload: Workload, variants: Iterable[ChunkVariant]) -> list[Plan]:
    """The plan of each variant when nothing is tuned, as a call runs it."""
    plans = [pipeline_defaults(variant.pipeline, case_of(run, workload, variant)) for variant in variants]
    return [as_called(run, workload, plan) for plan in plans]


def as_called(run: Run, workload: Workload, plan: Plan) -> Plan:
    """A plan as a call runs it: a backward does not begin with what the forward that is called before does not make."""
    if not plan.kept or can_be_kept(run, workload, plan):
        return plan
    return replace(plan, kept=False)


def can_be_kept(run: Run, workload: Workload, plan: Plan) -> bool:
    """Whether the forward that a call of the same chunks chooses makes what a backward may begin with."""
    forward = replace(workload.problem(), direction="fwd")
    try:
        chosen = select_plan(forward, run.device, store.sources(), chunk_size=plan.BT).plan
    except InputError:  # there is no room for such chunks
        return False
    return chosen is not None and PIPELINES[plan.pipeline].finds_residuals(PIPELINES[chosen.pipeline])


def case_of(run: Run, workload: Workload, variant: ChunkVariant | Plan) -> Case:
    """What kernels of that variant are built for."""
    return Case(problem=workload.problem(), device=run.device, BT=variant.BT, BC=variant.BC)


def list_kernels(run: Run, workload: Workload, plans: Iterable[Plan]) -> list[CompileJob]:
    """What is to be compiled for plans."""
    jobs = []
    for plan in plans:
        case = case_of(run, workload, plan)
        for stage in PIPELINES[plan.pipeline].stages_of(case.problem):
            jobs += compile_jobs(stage, case, [plan.config(stage.name)])
    return jobs


def name_study(run: Run, workload: Workload) -> str:
    """Identity of a workload's plans: the problem, how fast its states decay, and every template of the pass."""
    stages = {s.name: s for p in PIPELINES.values() if p.direction == workload.direction for s in p.stages}
    return name_problem_study(run, workload, [stages[name] for name in sorted(stages)]) + PLANS


def run_plan(run: Run, workload: Workload, plan: Plan, deadline: float | None = None) -> Evaluation[Plan]:
    """Verifies and times a plan end to end, or recalls what the journal says of it.

    Raises DeadlineExceeded if the deadline passes before its kernels are compiled.
    """
    request = PlanTrial(plan=plan, workload=workload, device=run.device, seed=run.seed)
    kernels = list_kernels(run, workload, [plan])
    study, stored = name_study(run, workload), plan.as_dict()
    outcome, resumed = run.answer(study, stored, lambda: run.attempt(kernels, request, deadline))
    return Evaluation(config=plan, outcome=outcome, resumed=resumed)


def compete(
    run: Run, workload: Workload, default: Plan, plans: Sequence[Plan], counts: Mapping[str, int]
) -> tuple[tuple[Evaluation[Plan], ...], Entry | None]:
    """Verifies tuned plans, measures the valid ones in turns with the default, and makes the winner's entry, if any.

    The default wins ties. ``counts``, trials of the stages by status, are for the entry's provenance.
    """
    results: dict[Plan, Evaluation[Plan]] = {}
    entering = list(dict.fromkeys([default, *plans]))
    run.emit(PartStarted(part="plans", count=len(entering)))
    for plan in entering:
        results[plan] = _enter(run, workload, plan)
    for plan, result in list(results.items()):
        twin = find_kept_twin(plan, run.objective)
        if twin and result.outcome.status == "ok" and can_be_kept(run, workload, twin):
            kept = _enter(run, workload, twin)
            if is_worth_keeping(run.objective, result.time_us, kept):
                results[twin] = kept
    valid = [result.config for result in sort_valid(results.values())]
    if not valid:
        return tuple(results.values()), None
    try:
        rounds, reps = measure_plans(run, workload, valid)
    except WorkerFailure as failure:
        raise KdaTlError(f"the plans of {workload.name} cannot be measured in turns: {failure}") from failure
    comparison = decide(rounds, reps, default if default in valid else None, sorted(valid, key=_rank_plan))
    entry = _make_entry(run, workload, comparison, results[comparison.winner], results[default], counts)
    return tuple(results.values()), entry


def _rank_plan(plan: Plan) -> tuple[Any, ...]:
    """Place of a plan among equally fast ones: by pipeline, then large chunks first, then what keeps nothing."""
    places = [list(type(config).space()).index(config) for _, config in plan.stages]
    return list(PIPELINES).index(plan.pipeline), -plan.BT, -plan.BC, plan.kept, places


def measure_plans(run: Run, workload: Workload, plans: Sequence[Plan]) -> tuple[dict[Plan, list[float]], int]:
    """Whole plans, measured in turns. Returns and errors as for :func:`kda_tl.tune.final.measure_in_turns`."""
    rounds = ROUNDS[run.device.kind]
    request = PlanContest(plans=tuple(plans), workload=workload, device=run.device, rounds=rounds, seed=run.seed)
    return measure_in_turns(run, name_study(run, workload), plans, request)


def _enter(run: Run, workload: Workload, plan: Plan) -> Evaluation[Plan]:
    result = run_plan(run, workload, plan)
    run.emit(PlanDone(result=result))
    return result


def find_kept_twin(plan: Plan, objective: str) -> Plan | None:
    """The plan that begins with what the forward kept; None if there is nothing to keep, or memory is what counts."""
    if objective == "memory" or not PIPELINES[plan.pipeline].residuals:
        return None
    return replace(plan, kept=True)


def is_worth_keeping(objective: str, again_us: float, kept: Evaluation[Plan]) -> bool:
    """Whether a plan may win that has its first results kept; ``again_us`` is its time when it computes them again.

    The objective "time" leaves it to the contest; "balanced" wants as large a share of time saved as of memory added.
    """
    if kept.outcome.status != "ok" or objective == "time":
        return kept.outcome.status == "ok"
    return 1 - kept.time_us / again_us >= kept.outcome.extra["kept_bytes"] / kept.outcome.extra["call_bytes"]


def _make_entry(
    run: Run,
    workload: Workload,
    comparison: Comparison[Plan],
    result: Evaluation[Plan],
    default: Evaluation[Plan],
    counts: Mapping[str, int],
) -> Entry:
    plan, key, check = comparison.winner, Key.of(workload.problem()), result.outcome.check
    provenance: dict[str, Any] = {
        **store.provenance(),
        **({"cuda": torch.version.cuda, **read_gpu_state()} if run.device.kind == "cuda" else {}),
        **result.outcome.extra,
        "valid": counts.get("ok", 0) + counts.get("slow", 0),
        "failed": {status: n for status, n in counts.items() if status not in ("ok", "slow") and n},
        "workload": workload.name,
        "seed": run.seed,
    }
    if run.pipeline is not None:  # what the gain is over is this pipeline's default
        provenance["pipeline"] = run.pipeline
    gain = [round(x, 4) for x in (comparison.ratio or 1.0, *(comparison.ci95 or (1.0, 1.0)))]
    if comparison.ratio is None:  # nothing to compare with: the plan is served for its own bucket only
        provenance["default"] = f"{default.outcome.status}: {default.outcome.reason}"
    median, mad = round(comparison.median_us, 3), round(comparison.mad_us, 3)
    return Entry(
        key=key,
        plan=plan.as_dict(),
        numerics=numerics_class(plan),
        time_us=Timing(median=median, mad=mad, reps=comparison.reps, rounds=comparison.rounds),
        vs_default=VsDefault(ratio=gain[0], ci95=(gain[1], gain[2])),
        check=Check(max_rel_err=float(f"{check['max_rel_err']:.3g}"), tolerance=check["tolerance"]),
        templates={name: templates.fingerprint(name) for name, _ in plan.stages},
        provenance=provenance,
        kernels={compiler_version(): _hash_kernels(run, key.problem(workload.operator, workload.direction), plan)},
    )


def _hash_kernels(run: Run, problem: Problem, plan: Plan) -> dict[str, str]:
    """Hashes by stage. Kernels that calls usually need may not be those measured: lowered side by side, once a run."""
    case = Case(problem=problem, device=run.device, BT=plan.BT, BC=plan.BC)
    jobs = {name: HashJob(stage=templates.load(name), case=case, config=config) for name, config in plan.stages}
    known = {name: known_hash(job.stage, job.case, job.config) for name, job in jobs.items()}
    run.pool.enqueue(job for name, job in jobs.items() if known[name] is None)
    hashes: dict[str, str] = {}
    for name, job in jobs.items():
        found = known[name] or run.pool.result(job)
        if isinstance(found, WorkerFailure):
            raise KdaTlError(f"the kernels of {plan.label} cannot be hashed for {problem.key}: {found}") from found
        hashes[name] = found
    return hashes
