"""A tuning run in simulated time: the real coordinator and its real queues, workers that only take time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kda_tl.core.isolate import PENDING
from kda_tl.core.stage import Plan
from kda_tl.tune import plan_search, pool, screening, stage_search, tuner
from kda_tl.tune.journal import Outcome
from kda_tl.tune.requests import (
    CompileJob,
    IdentifyJob,
    PlanContest,
    PlanTrial,
    Rounds,
    StageContest,
    StageTrial,
)

START_S, COMPILE_S = 6.0, 8.0
SECONDS = {"IdentifyJob": 0.2, "PlanTrial": 1.5, "Prepare": 2.0, "StageTrial": 0.3, "StageContest": 1.0}
OTHER_S = 1.5


class Clock:
    """Stands in for the module ``time``."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Simulation:
    """What the workers do and how long it takes them.

    Args:
        clock: the time.
        plan_us: the time of a plan.
        stage_us: the time of a stage's default by name; every other config takes a little longer.
        compile_s: seconds a kernel.
    """

    def __init__(
        self, clock: Clock, plan_us: Callable[[Plan], float], stage_us: Callable[[str], float], compile_s: float
    ) -> None:
        self.clock, self.plan_us, self.stage_us, self.compile_s = clock, plan_us, stage_us, compile_s
        self.compiled: list[CompileJob] = []  # as they were begun
        self.measured: list[tuple[float, Any]] = []  # when they were begun

    def seconds(self, request: Any) -> float:
        if isinstance(request, CompileJob):
            return self.compile_s
        return SECONDS.get(type(request).__name__, OTHER_S)

    def begin(self, request: Any) -> None:
        if isinstance(request, CompileJob):
            self.compiled.append(request)
        else:
            self.measured.append((self.clock.now, request))

    def answer(self, request: Any) -> Any:
        if isinstance(request, CompileJob):
            return self.compile_s
        if isinstance(request, IdentifyJob):
            return repr(request.key)
        if isinstance(request, PlanTrial):
            us, extra = self.plan_us(request.plan), {"timed": "graph", "kept_bytes": 1, "call_bytes": 100}
            check = {"max_rel_err": 1e-3, "tolerance": 6e-3}
            return Outcome(status="ok", median_us=us, samples_us=[us] * 3, check=check, extra=extra)
        if isinstance(request, PlanContest):
            return Rounds(medians_us=[[self.plan_us(plan)] * request.rounds for plan in request.plans], reps=3)
        if isinstance(request, StageTrial):
            us = self.stage_us(request.stage.name) * (
                1 if request.config == request.stage.default(request.fixture.case) else 1.05
            )
            return Outcome(status="ok", median_us=us, samples_us=[us] * 3)
        if isinstance(request, StageContest):
            return Rounds(medians_us=[[1.0] * request.rounds for _ in request.configs], reps=3)
        if type(request).__name__ == "StageTimes":
            return {stage.name: self.stage_us(stage.name) for stage in request.fixture.pipeline.stages}
        return None


class SimulatedWorker:
    """In the place of an isolated worker."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.started, self.timeout_s = simulation, False, 0.0
        self.request: Any = None
        self.done_at = 0.0

    def submit(self, request: Any) -> None:
        assert self.request is None
        simulation = self.simulation
        simulation.begin(request)
        self.request = request
        self.done_at = simulation.clock.now + simulation.seconds(request) + (0.0 if self.started else START_S)
        self.started = True

    def poll(self) -> Any:
        if self.simulation.clock.now < self.done_at:
            return PENDING
        request, self.request = self.request, None
        return self.simulation.answer(request)

    def kill(self) -> None:
        self.started, self.request = False, None


def simulate(
    patch: pytest.MonkeyPatch,
    *,
    plan_us: Callable[[Plan], float],
    stage_us: Callable[[str], float],
    compile_s: float = COMPILE_S,
) -> Simulation:
    """Has the tuner run in simulated time."""
    clock = Clock()
    simulation = Simulation(clock, plan_us, stage_us, compile_s)

    def wait_any(workers: list[SimulatedWorker]) -> None:
        busy = [worker.done_at for worker in workers if worker.request is not None]
        clock.now = max(clock.now, min([clock.now + 0.2, *busy]))

    patch.setattr(pool, "IsolatedWorker", lambda *_: SimulatedWorker(simulation))
    patch.setattr(pool, "wait_any", wait_any)
    for module in (pool, screening, stage_search, tuner):
        if hasattr(module, "time"):
            patch.setattr(module, "time", clock)
    patch.setattr(tuner, "require_compiler", lambda device: None)
    patch.setattr(plan_search, "known_hash", lambda stage, case, config: "0" * 64)  # they were measured
    return simulation
