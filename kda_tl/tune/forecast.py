"""How long a tuning run will take: what its workloads have left to compile and to measure, at the pace so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kda_tl.bench.workloads import Workload
from kda_tl.runtime.dispatch import DEFAULT_PIPELINES
from kda_tl.tune.events import ChunkVariant
from kda_tl.tune.plan_search import default_plans, list_kernels
from kda_tl.tune.screening import list_variants
from kda_tl.tune.session import Run
from kda_tl.tune.stage_search import compile_jobs, make_fixture, split_space

# Seconds, until a run has compiled something itself; and of what is measured, contests and preparations included.
_COMPILE_S = {"cuda": 8.0, "cpu": 3.0}
_PLAN_S = {"cuda": 2.0, "cpu": 4.0}
_STAGE_S = {"cuda": 3.0, "cpu": 5.0}
_TRIAL_S = {"cuda": 0.5, "cpu": 1.5}


@dataclass(frozen=True)
class _Work:
    """What one workload needs: kernels by key, and the seconds its measurements take."""

    kernels: frozenset[Hashable]
    measuring_s: float


class Forecast:
    """Estimates of a run, as if the pipeline that runs by default were the one to be searched.

    Args:
        run: the tuning run.
        workloads: what it tunes.
        stage: the only stage that is searched.
        limit_s: most seconds a workload.
    """

    def __init__(self, run: Run, workloads: Sequence[Workload], stage: str | None, limit_s: float | None) -> None:
        self._run, self._limit_s = run, limit_s
        self._work = [_count_work(run, workload, stage) for workload in workloads]

    def count_kernels(self) -> int:
        """Kernels that all workloads need, each counted once."""
        return len(frozenset().union(*(work.kernels for work in self._work)))

    def left_s(self, index: int = 0) -> float:
        """Seconds for the workloads from this one on."""
        pool, kind = self._run.pool, self._run.device.kind
        pace = (pool.mean_result() or _COMPILE_S[kind]) / pool.size
        total, seen = 0.0, set[Hashable]()
        for work in self._work[index:]:
            new = sum(not pool.finished(key) for key in work.kernels - seen)
            seen |= work.kernels
            seconds = new * pace + work.measuring_s
            total += seconds if self._limit_s is None else min(seconds, self._limit_s)
        return total


def _count_work(run: Run, workload: Workload, stage: str | None) -> _Work:
    kind, problem = run.device.kind, workload.problem()
    variants = list_variants(run, workload)
    if not variants:  # it will fail, at once
        return _Work(frozenset(), 0.0)
    first: ChunkVariant = next(
        (g for name in DEFAULT_PIPELINES[problem.direction] for g in variants if g.pipeline == name), variants[0]
    )
    fixture = make_fixture(run, workload, first)
    stages = [s for s in fixture.pipeline.stages_of(problem) if stage in (None, s.name)]
    spaces = [(s, split_space(s, fixture.case)[0][: run.budget]) for s in stages]
    plans = list(default_plans(run, workload, [first] if stage else variants))
    jobs = [job for plan in plans for job in list_kernels(run, workload, plan)]
    jobs += [job for s, configs in spaces for job in compile_jobs(s, fixture.case, configs)]
    trials = sum(len(configs) for _, configs in spaces)
    seconds = trials * _TRIAL_S[kind] + len(stages) * _STAGE_S[kind] + (0 if stage else len(plans) + 1) * _PLAN_S[kind]
    return _Work(frozenset(job.key for job in jobs), seconds)
