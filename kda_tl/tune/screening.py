"""Variants: default plans timed end to end, those that decide most first, and the choice of what is searched."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence

from kda_tl.bench.timing import summarise
from kda_tl.bench.workloads import Workload
from kda_tl.core.isolate import WorkerFailure
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES, Case
from kda_tl.runtime.defaults import DEFAULT_BC, find_rejection, rank_pipelines
from kda_tl.tune import plan_search
from kda_tl.tune.events import ChunkVariant, PartStarted, VariantScreened
from kda_tl.tune.plan_search import case_of, default_plans, list_kernels, make_fixture, run_plan
from kda_tl.tune.pool import DeadlineExceeded
from kda_tl.tune.session import Run
from kda_tl.tune.stage_search import prefetch

TUNED = 2  # variants at most
_CLOSE = 1.15  # a variant whose default plan is this near to the best one's may be tuned too
_HOPELESS = 1.5  # of a pipeline this far behind the best one no other chunk size is tried


def screen(
    run: Run, workload: Workload, deadline: float | None = None, following: Workload | None = None
) -> dict[ChunkVariant, float]:
    """Times default plans end to end, what decides most first: every pipeline, other BT of fast ones, other BC.

    Every pipeline is timed once, whatever the deadline: the choice of a pipeline matters more than anything after it.
    The rest may take half of the time that is then left. The first kernels of the ``following`` workload are compiled
    when nothing else is to be. Returns microseconds by variant, of those whose default plan runs.
    """
    variants = list_variants(run, workload)
    firsts = first_of_pipelines(variants)
    _enqueue_plans(run, workload, firsts)
    if run.pool.overlap and following is not None:
        prefetch_plans(run, following, urgent=False)
    found = _screen(run, workload, firsts, None)
    if deadline is not None:
        run.pool.useful_until = deadline
        deadline -= max(0.0, deadline - time.monotonic()) / 2
    times = dict.fromkeys((v.pipeline for v in firsts), math.inf) | {v.pipeline: us for v, us in found.items()}
    limit = _HOPELESS * min(times.values(), default=math.inf)
    others = [v for v in variants if v not in firsts and times[v.pipeline] <= limit]
    found |= _screen(run, workload, sorted(others, key=lambda v: times[v.pipeline]), deadline)
    if not found or not workload.problem().chunked:
        return found
    best = min(found, key=found.__getitem__)
    sizes = [BC for BC in BC_CHOICES if BC != best.BC and best.BT % BC == 0]
    others = [ChunkVariant(pipeline=best.pipeline, BT=best.BT, BC=BC) for BC in sizes]
    return found | _screen(run, workload, _keep_possible(run, workload, others), deadline)


def list_variants(run: Run, workload: Workload) -> list[ChunkVariant]:
    """Every searched pipeline with every BT that it has a config for: the largest BT first, and of one BT the defaults.

    A step has no chunks.

    :func:`screen` times them in this order, and has the first one's search compiled before it knows the others.
    """
    problem = workload.problem()
    sizes = BT_CHOICES if problem.chunked else (0,)
    ranked = rank_pipelines(Case(problem=problem, device=run.device, BT=sizes[0], BC=min(DEFAULT_BC, sizes[0])))
    searched = plan_search.searched_pipelines(run, workload)
    pipelines = sorted(searched, key=lambda p: ranked.index(p.name) if p.name in ranked else len(ranked))
    variants = [ChunkVariant(pipeline=p.name, BT=BT, BC=min(DEFAULT_BC, BT)) for BT in sizes for p in pipelines]
    return _keep_possible(run, workload, variants)


def first_of_pipelines(variants: Sequence[ChunkVariant]) -> list[ChunkVariant]:
    """The first variant of each pipeline."""
    firsts: dict[str, ChunkVariant] = {}
    for variant in variants:
        firsts.setdefault(variant.pipeline, variant)
    return list(firsts.values())


def _keep_possible(run: Run, workload: Workload, variants: list[ChunkVariant]) -> list[ChunkVariant]:
    """Those that every stage has a config for; what a pipeline is not written for is no trial."""
    plans = zip(variants, default_plans(run, workload, variants), strict=True)
    return [variant for variant, plan in plans if not find_rejection(plan, case_of(run, workload, variant))]


def prefetch_plans(run: Run, workload: Workload, *, urgent: bool = True) -> None:
    """Has the kernels compiled that :func:`screen` begins with."""
    _enqueue_plans(run, workload, first_of_pipelines(list_variants(run, workload)), urgent=urgent)


def _enqueue_plans(run: Run, workload: Workload, variants: Sequence[ChunkVariant], *, urgent: bool = True) -> None:
    run.pool.enqueue(list_kernels(run, workload, default_plans(run, workload, variants)), urgent=urgent)


def _screen(
    run: Run, workload: Workload, variants: list[ChunkVariant], deadline: float | None
) -> dict[ChunkVariant, float]:
    found: dict[ChunkVariant, float] = {}
    run.emit(PartStarted(part="default plans", count=len(variants)))
    if deadline is None or time.monotonic() < deadline:
        _enqueue_plans(run, workload, variants)
    for number, plan in enumerate(default_plans(run, workload, variants)):
        try:
            result = run_plan(run, workload, plan, deadline)
        except DeadlineExceeded:
            continue
        variant = variants[number]
        run.emit(VariantScreened(variant=variant, result=result))
        if result.outcome.status == "ok":
            found[variant] = result.time_us
        if run.pool.overlap and deadline is None and variant == min(found, key=found.__getitem__, default=None):
            run.pool.drop(later=False)
            _enqueue_plans(run, workload, variants[number:])
            prefetch(run, make_fixture(run, workload, variant))  # likely what is searched
    return found


def choose_variants(
    run: Run, workload: Workload, screened: Mapping[ChunkVariant, float], deadline: float | None = None
) -> list[ChunkVariant]:
    """The variant of the fastest default plan, and the second where it is close; none where none runs.

    Where more are close they are measured in turns first: else noise would choose among them.
    """
    limit = _CLOSE * min(screened.values(), default=0.0)
    close = [variant for variant in sorted(screened, key=screened.__getitem__) if screened[variant] <= limit]
    if len(close) > TUNED and (deadline is None or time.monotonic() < deadline):
        plans = default_plans(run, workload, close)
        with contextlib.suppress(WorkerFailure):  # then what each took alone decides
            rounds, _ = plan_search.measure_plans(run, workload, plans)
            medians = {variant: summarise(rounds[plan])[0] for variant, plan in zip(close, plans, strict=True)}
            close.sort(key=medians.__getitem__)
    return close[:TUNED]
