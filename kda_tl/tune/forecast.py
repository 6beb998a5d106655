"""How long a tuning run will take: what its workloads have left to compile and to measure, at the pace so far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kda_tl.bench.workloads import Workload
from kda_tl.tune.plan_search import default_plans, list_kernels, make_fixture
from kda_tl.tune.screening import list_variants
from kda_tl.tune.session import Run
from kda_tl.tune.stage_search import compile_jobs, split_space

# Seconds, until a run has compiled something itself; and of what is measured, contests and preparations included.
_COMPILE_S = {"cuda": 8.0, "cpu": 3.0}
_PLAN_S = {"cuda": 2.0, "cpu": 4.0}
_STAGE_S = {"cuda": 3.0, "cpu": 5.0}
_TRIAL_S = {"cuda": 0.5, "cpu": 1.5}


class Forecast:
    """Estimates of a run, as if the pipeline that runs by default were the one to be searched.

    Of workloads that may take ``limit_s`` seconds each, all stages are searched unless one is named.
    """

    def __init__(self, run: Run, workloads: Sequence[Workload], stage: str | None, limit_s: float | None) -> None:
        self._run, self._limit_s = run, limit_s
        self._work = [_count_work(run, workload, stage) for workload in workloads]

    def count_kernels(self) -> int:
        """Kernels that all workloads need, each counted once."""
        return len(frozenset().union(*(kernels for kernels, _ in self._work)))

    def left_s(self, index: int = 0) -> float:
        """Seconds for the workloads from this one on."""
        pool, kind = self._run.pool, self._run.device.kind
        pace = (pool.mean_result() or _COMPILE_S[kind]) / pool.size
        total, seen = 0.0, set[Hashable]()
        for kernels, measuring_s in self._work[index:]:
            new = sum(not pool.finished(key) for key in kernels - seen)
            seen |= kernels
            seconds = new * pace + measuring_s
            total += seconds if self._limit_s is None else min(seconds, self._limit_s)
        return total


def _count_work(run: Run, workload: Workload, stage: str | None) -> tuple[frozenset[Hashable], float]:
    """What one workload needs: kernels by key, and the seconds its measurements take."""
    kind, problem = run.device.kind, workload.problem()
    variants = list_variants(run, workload)
    if not variants:  # it will fail, at once
        return frozenset(), 0.0
    first = variants[0]  # what runs by default
    fixture = make_fixture(run, workload, first)
    stages = [s for s in fixture.pipeline.stages_of(problem) if stage in (None, s.name)]
    spaces = [(s, split_space(s, fixture.case)[0][: run.budget]) for s in stages]
    plans = default_plans(run, workload, [first] if stage else variants)
    jobs = list_kernels(run, workload, plans)
    jobs += [job for s, configs in spaces for job in compile_jobs(s, fixture.case, configs)]
    trials = sum(len(configs) for _, configs in spaces)
    seconds = trials * _TRIAL_S[kind] + len(stages) * _STAGE_S[kind] + (0 if stage else len(plans) + 1) * _PLAN_S[kind]
    return frozenset(job.key for job in jobs), seconds
