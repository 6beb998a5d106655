"""Whole plans: how one is run, and the contest that gives the database its entry."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kda_tl.bench.timing import read_gpu_state
from kda_tl.bench.workloads import Workload
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Plan
from kda_tl.database import store
from kda_tl.database.records import Check, Entry, Key, Timing, VsDefault
from kda_tl.errors import InputError, KdaTlError
from kda_tl.runtime.dispatch import numerics_class, pipeline_defaults
from kda_tl.tune.events import ChunkVariant, PartStarted, PlanDone, PlanResult
from kda_tl.tune.final import ROUNDS, Comparison, hold_final
from kda_tl.tune.isolate import WorkerFailure
from kda_tl.tune.journal import Outcome, Trial
from kda_tl.tune.requests import CompileJob, HashJob, PlanContest, PlanTrial
from kda_tl.tune.session import PLANS, Run, describe_failure
from kda_tl.tune.stage_search import compile_jobs, compiler_version, fingerprint

OBJECTIVES = ("balanced", "time", "memory")
_PASS_NAMES = {"fwd": "forward", "bwd": "backward"}


@dataclass(frozen=True, kw_only=True)
class Final:
    """What the contest of plans gave; no entry if no plan is valid."""

    plans: tuple[PlanResult, ...]
    entry: Entry | None


def plan_of(variant: ChunkVariant, configs: Mapping[str, Config]) -> Plan:
    """A plan from the configs of its stages."""
    from kda_tl.templates.pipelines import PIPELINES

    stages = tuple((stage.name, configs[stage.name]) for stage in PIPELINES[variant.pipeline].stages)
    return Plan(pipeline=variant.pipeline, BT=variant.BT, BC=variant.BC, stages=stages)


def require_pipeline(name: str, workloads: Sequence[Workload], stage: str | None = None) -> Pipeline:
    """The pipeline that a search is restricted to.

    Args:
        name: its name.
        workloads: what is searched for.
        stage: the only stage that is searched.

    Raises:
        InputError: there is no such pipeline, it is not of a workload's pass, or it does not have the stage.
    """
    from kda_tl.templates.pipelines import PIPELINES

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
    from kda_tl.templates.pipelines import PIPELINES

    return [p for p in PIPELINES.values() if p.direction == workload.direction and run.pipeline in (None, p.name)]


def default_plans(run: Run, workload: Workload, variants: Sequence[ChunkVariant]) -> Iterator[Plan]:
    """The plan of each variant when nothing is tuned."""
    for variant in variants:
        yield pipeline_defaults(variant.pipeline, case_of(run, workload, variant))


def case_of(run: Run, workload: Workload, variant: ChunkVariant | Plan) -> Case:
    """What kernels of that variant are built for."""
    return Case(problem=workload.problem(), device=run.device, BT=variant.BT, BC=variant.BC)


def list_kernels(run: Run, workload: Workload, plan: Plan) -> list[CompileJob]:
    """What is to be compiled for a plan."""
    from kda_tl.templates.pipelines import PIPELINES

    case = case_of(run, workload, plan)
    stages = PIPELINES[plan.pipeline].stages_of(case.problem)
    return [job for stage in stages for job in compile_jobs(stage, case, [plan.config(stage.name)])]


def name_study(run: Run, workload: Workload) -> str:
    """Identity of a workload's plans: the problem, how fast its states decay, and every template of the pass."""
    from kda_tl.templates.pipelines import PIPELINES

    problem = workload.problem()
    stages = {s.name: s for p in PIPELINES.values() if p.direction == problem.direction for s in p.stages}
    digest = hashlib.sha256("".join(fingerprint(stages[name]) for name in sorted(stages)).encode())
    parts = [run.device.slug, f"{problem.key}-{workload.decay}", compiler_version(), digest.hexdigest()[:16]]
    return "/".join(parts) + PLANS


def run_plan(run: Run, workload: Workload, plan: Plan, deadline: float | None = None) -> tuple[PlanResult, bool]:
    """Verifies and times a plan end to end, or recalls what the journal says of it (then the second item is true).

    Raises:
        DeadlineExceeded: the deadline passed before its kernels were compiled.
    """
    study = name_study(run, workload)
    known = run.recall(study, plan.as_dict())
    if known is None:
        trial = Trial.of(_try_plan(run, workload, plan, deadline), study=study, config=plan.as_dict())
        return _as_result(plan, run.remember(trial)), False
    return _as_result(plan, known), True


def _try_plan(run: Run, workload: Workload, plan: Plan, deadline: float | None) -> Outcome:
    for job in list_kernels(run, workload, plan):
        compiled = run.pool.result(job, deadline=deadline)
        if isinstance(compiled, WorkerFailure):
            return describe_failure(compiled)
    try:
        request = PlanTrial(plan=plan, workload=workload, device=run.device, seed=run.seed)
        return run.measure(request)
    except WorkerFailure as failure:
        return describe_failure(failure)


def _as_result(plan: Plan, trial: Trial) -> PlanResult:
    median = trial.median_us if trial.status == "ok" else None
    return PlanResult(
        plan=plan, status=trial.status, reason=trial.reason, median_us=median, check=trial.check, extra=trial.extra
    )


def compete(run: Run, workload: Workload, default: Plan, plans: Sequence[Plan], counts: Mapping[str, int]) -> Final:
    """Verifies the plans, measures the valid ones in turns with the default, and makes the winner's entry.

    Args:
        run: the tuning run.
        workload: what they are for.
        default: the plan when nothing is tuned; it wins ties.
        plans: the tuned plans.
        counts: trials of the stages by status, for the entry's provenance.
    """
    results: dict[Plan, PlanResult] = {}
    entering = list(dict.fromkeys([default, *plans]))
    run.emit(PartStarted(workload=workload, part="plans", count=len(entering)))
    for plan in entering:
        results[plan] = _enter(run, workload, plan)
    for plan, result in list(results.items()):
        if (twin := find_kept_twin(plan, run.objective)) and result.median_us is not None:
            kept = _enter(run, workload, twin)
            if is_worth_keeping(run.objective, result.median_us, kept):
                results[twin] = kept
    valid = sorted((r for r in results.values() if r.median_us is not None), key=lambda r: r.median_us or 0.0)
    if not valid:
        return Final(plans=tuple(results.values()), entry=None)
    request = contest_of(run, workload, [r.plan for r in valid])
    candidates = {r.plan: r.plan.as_dict() for r in valid}
    base = default if default in candidates else None
    try:
        comparison = hold_final(
            run,
            name_study(run, workload),
            candidates,
            request,
            default=base,
            fixed_order=sorted(candidates, key=_rank_plan),
        )
    except WorkerFailure as failure:
        raise KdaTlError(f"the plans of {workload.name} cannot be measured in turns: {failure}") from failure
    entry = _make_entry(run, workload, comparison, results[comparison.winner], results[default], counts)
    return Final(plans=tuple(results.values()), entry=entry)


def _rank_plan(plan: Plan) -> tuple[Any, ...]:
    """Place of a plan among equally fast ones: by pipeline, then large chunks first, then what keeps nothing."""
    from kda_tl.templates.pipelines import PIPELINES

    places = [list(type(config).space()).index(config) for _, config in plan.stages]
    return list(PIPELINES).index(plan.pipeline), -plan.BT, -plan.BC, plan.kept, places


def contest_of(run: Run, workload: Workload, plans: Sequence[Plan]) -> PlanContest:
    """The request that measures plans in turns."""
    rounds = ROUNDS[run.device.kind]
    return PlanContest(plans=tuple(plans), workload=workload, device=run.device, rounds=rounds, seed=run.seed)


def _enter(run: Run, workload: Workload, plan: Plan) -> PlanResult:
    result, _ = run_plan(run, workload, plan)
    run.emit(PlanDone(workload=workload, result=result))
    return result


def find_kept_twin(plan: Plan, objective: str) -> Plan | None:
    """The plan that begins with what the forward kept; None if there is nothing to keep, or memory is what counts."""
    from kda_tl.templates.pipelines import PIPELINES

    if objective == "memory" or not PIPELINES[plan.pipeline].residuals:
        return None
    return replace(plan, kept=True)


def is_worth_keeping(objective: str, again_us: float, kept: PlanResult) -> bool:
    """Whether a plan may win that has its first results kept.

    Args:
        objective: "time" leaves it to the contest; "balanced" wants as large a share of time saved as of memory added.
        again_us: time of the same plan when it computes them again.
        kept: the plan's result.
    """
    if kept.median_us is None:
        return False
    if objective == "time":
        return True
    return 1 - kept.median_us / again_us >= kept.extra["kept_bytes"] / kept.extra["call_bytes"]


def _make_entry(
    run: Run,
    workload: Workload,
    comparison: Comparison[Plan],
    result: PlanResult,
    default: PlanResult,
    counts: Mapping[str, int],
) -> Entry:
    from kda_tl import templates

    plan, key = comparison.winner, Key.of(workload.problem())
    low, high = comparison.ci95 or (None, None)
    trials = {"valid": counts.get("ok", 0) + counts.get("slow", 0)}
    failed = {status: n for status, n in counts.items() if status not in ("ok", "slow") and n}
    provenance: dict[str, Any] = {
        **store.provenance(),
        **_cuda_version(run),
        **result.extra,
        **trials,
        "failed": failed,
        "workload": workload.name,
        "seed": run.seed,
    }
    if run.pipeline is not None:  # what the gain is over is this pipeline's default
        provenance["pipeline"] = run.pipeline
    if comparison.ratio is None:  # nothing to compare with: the plan is served for its own bucket only
        provenance["default"] = f"{default.status}: {default.reason}"
    return Entry(
        key=key,
        plan=plan.as_dict(),
        numerics=numerics_class(plan),
        time_us=Timing(
            median=round(comparison.median_us, 3),
            mad=round(comparison.mad_us, 3),
            reps=comparison.reps,
            rounds=comparison.rounds,
        ),
        vs_default=VsDefault(ratio=_round(comparison.ratio), ci95=(_round(low), _round(high))),
        check=Check(max_rel_err=float(f"{result.check['max_rel_err']:.3g}"), tolerance=result.check["tolerance"]),
        templates={name: templates.fingerprint(name) for name, _ in plan.stages},
        provenance=provenance,
        kernels={compiler_version(): _hash_kernels(run, key.problem(workload.operator, workload.direction), plan)},
    )


def _hash_kernels(run: Run, problem: Problem, plan: Plan) -> dict[str, str]:
    """Hashes by stage, from the process that measured the plan and so has most of its kernels."""
    from kda_tl import templates

    case = Case(problem=problem, device=run.device, BT=plan.BT, BC=plan.BC)
    jobs = {name: HashJob(stage=templates.load(name), case=case, config=config) for name, config in plan.stages}
    try:
        return {name: run.measure(job) for name, job in jobs.items()}
    except WorkerFailure as failure:
        raise KdaTlError(f"the kernels of {plan.label} cannot be hashed for {problem.key}: {failure}") from failure


def _round(ratio: float | None) -> float:
    return 1.0 if ratio is None else round(ratio, 4)


def _cuda_version(run: Run) -> dict[str, Any]:
    if run.device.kind != "cuda":
        return {}
    import torch

    return {"cuda": torch.version.cuda, **read_gpu_state()}
