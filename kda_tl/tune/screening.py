"""Geometries: default plans timed end to end, those that decide most first, and the choice of what is searched."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kda_tl.bench.timing import summarise
from kda_tl.bench.workloads import Workload
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES
from kda_tl.runtime.dispatch import DEFAULT_BC, find_rejection
from kda_tl.tune.events import ChunkVariant, PartStarted, VariantScreened
from kda_tl.tune.final import measure_in_turns
from kda_tl.tune.isolate import WorkerFailure
from kda_tl.tune.plan_search import (
    case_of,
    contest_of,
    default_plans,
    list_kernels,
    name_study,
    run_plan,
    searched_pipelines,
)
from kda_tl.tune.pool import DeadlineExceeded
from kda_tl.tune.session import Run
from kda_tl.tune.stage_search import make_fixture, prefetch

TUNED = 2  # variants at most
_CLOSE = 1.15  # a variant whose default plan is this near to the best one's may be tuned too
_HOPELESS = 1.5  # of a pipeline this far behind the best one no other chunk size is tried


@dataclass(frozen=True, kw_only=True)
class Screened:
    """A variant with the time of its default plan, None if that does not run."""

    variant: ChunkVariant
    median_us: float | None


def screen(
    run: Run, workload: Workload, deadline: float | None = None, following: Workload | None = None
) -> list[Screened]:
    """Times default plans end to end, what decides most first: every pipeline, other BT of fast ones, other BC.

    Every pipeline is timed once, whatever the deadline: the choice of a pipeline matters more than anything after it.
    The rest may take half of the time that is then left.

    Args:
        run: the tuning run.
        workload: what the plans are for.
        deadline: ``time.monotonic`` when searching ends.
        following: the next workload, whose first kernels are compiled when nothing else is to be.
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
    times = {s.variant.pipeline: s.median_us or math.inf for s in found}
    limit = _HOPELESS * min(times.values(), default=math.inf)
    others = [g for g in variants if g not in firsts and times[g.pipeline] <= limit]
    found += _screen(run, workload, sorted(others, key=lambda g: times[g.pipeline]), deadline)
    best = _find_best(found)
    if best is None:
        return found
    g = best.variant
    others = [ChunkVariant(pipeline=g.pipeline, BT=g.BT, BC=BC) for BC in BC_CHOICES if BC != g.BC and g.BT % BC == 0]
    return found + _screen(run, workload, _keep_possible(run, workload, others), deadline)


def list_variants(run: Run, workload: Workload) -> list[ChunkVariant]:
    """Every searched pipeline with every BT that it has a config for, the largest first."""
    pipelines = searched_pipelines(run, workload)
    variants = [ChunkVariant(pipeline=p.name, BT=BT, BC=DEFAULT_BC) for BT in BT_CHOICES for p in pipelines]
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
    plans = default_plans(run, workload, variants)
    run.pool.enqueue((job for plan in plans for job in list_kernels(run, workload, plan)), urgent=urgent)


def _screen(run: Run, workload: Workload, variants: list[ChunkVariant], deadline: float | None) -> list[Screened]:
    screened: list[Screened] = []
    run.emit(PartStarted(workload=workload, part="default plans", count=len(variants)))
    if deadline is None or time.monotonic() < deadline:
        _enqueue_plans(run, workload, variants)
    for number, plan in enumerate(default_plans(run, workload, variants)):
        try:
            result, resumed = run_plan(run, workload, plan, deadline)
        except DeadlineExceeded:
            continue
        variant = variants[number]
        run.emit(VariantScreened(workload=workload, variant=variant, result=result, resumed=resumed))
        screened.append(Screened(variant=variant, median_us=result.median_us))
        if run.pool.overlap and deadline is None and (best := _find_best(screened)) and best.variant == variant:
            run.pool.drop(later=False)
            _enqueue_plans(run, workload, variants[number:])
            prefetch(run, make_fixture(run, workload, variant))  # likely what is searched
    return screened


def _find_best(screened: Sequence[Screened]) -> Screened | None:
    return min((s for s in screened if s.median_us is not None), key=lambda s: s.median_us or 0.0, default=None)


def choose_variants(
    run: Run, workload: Workload, screened: Sequence[Screened], deadline: float | None = None
) -> list[ChunkVariant]:
    """The variant of the fastest default plan, and the second where it is close; none where none runs.

    Where more are close they are measured in turns first: else noise would choose among them.
    """
    valid = sorted((s for s in screened if s.median_us is not None), key=lambda s: s.median_us or 0.0)
    close = [s.variant for s in valid if (s.median_us or 0.0) <= _CLOSE * (valid[0].median_us or 0.0)]
    if len(close) > TUNED and (deadline is None or time.monotonic() < deadline):
        plans = list(default_plans(run, workload, close))
        candidates = [plan.as_dict() for plan in plans]
        with contextlib.suppress(WorkerFailure):  # then what each took alone decides
            request = contest_of(run, workload, plans)
            rounds, _ = measure_in_turns(run, name_study(run, workload), candidates, request)
            medians = {variant: summarise(series)[0] for variant, series in zip(close, rounds, strict=True)}
            close.sort(key=medians.__getitem__)
    return close[:TUNED]
