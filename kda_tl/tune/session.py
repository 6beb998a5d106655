"""What one tuning run shares: its workers, its journal, what both already know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda_tl.bench.fixtures import StageFixture
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerCrash, WorkerError, WorkerFailure, WorkerTimeout
from kda_tl.core.stage import Config
from kda_tl.errors import KdaTlError
from kda_tl.tune.events import ChunkVariant, OnEvent
from kda_tl.tune.journal import Journal, Outcome, Trial, as_key
from kda_tl.tune.pool import Job, Request, WorkerPool
from kda_tl.tune.requests import Prepare

PLANS, STAGES, CONTEST = "/plans", "/stages", "/contest"  # ends of the studies that are no searches


class PrepareError(KdaTlError, RuntimeError):
    """What trials are measured on could not be made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What one tuning run shares; the arguments of :func:`kda_tl.tune.tuner.tune` say more of some."""

    pool: WorkerPool
    device: Device
    journal: Path
    budget: int  # most trials a stage
    objective: str  # what results of a forward may be kept for
    seed: int  # of inputs and sampler
    emit: OnEvent
    pipeline: str | None = None  # the only one whose plans are searched and compete; None for all
    known: dict[tuple[str, str], Outcome] = field(default_factory=dict)  # see load_known
    winners: dict[tuple[str, ChunkVariant], Config] = field(default_factory=dict)  # by stage, seeds for later workloads

    def answer(self, study: str, config: Mapping[str, Any], measure: Callable[[], Outcome]) -> tuple[Outcome, bool]:
        """A contest, a plan or times of stages, from the journal or measured now; and whether the journal had it."""
        key = study, as_key(config)
        if key in self.known:
            return self.known[key], True
        outcome = measure()
        Journal(self.journal).append(Trial.of(outcome, study=study, config=config))
        return self.known.setdefault(key, outcome), False

    def attempt(
        self, jobs: Iterable[Job], request: Request, deadline: float | None, fixture: StageFixture | None = None
    ) -> Outcome:
        """What a request gives once its kernels are compiled; what fails is an outcome too.

        Raises PrepareError as :meth:`measure`, and DeadlineExceeded if it passed before the kernels were compiled.
        """
        for job in jobs:
            compiled = self.pool.result(job, deadline=deadline)
            if isinstance(compiled, WorkerFailure):
                return describe_failure(compiled)
        try:
            return self.measure(request, fixture)
        except WorkerFailure as failure:
            return describe_failure(failure)

    def measure(self, request: Request, fixture: StageFixture | None = None) -> Any:
        """Runs a request in the measuring process, which is replaced if it may be damaged.

        Raises PrepareError if the tensors of the fixture that it needs could not be made, else WorkerFailure.
        """
        if fixture is not None:
            try:
                self.pool.prepare(Prepare(fixture=fixture))
            except WorkerFailure as failure:
                self.pool.restart_timer()
                raise PrepareError(f"{fixture.workload.name} does not run with default configs: {failure}") from failure
        try:
            return self.pool.measure(request)
        except WorkerError as failure:
            if failure.type_name != "CompileError":  # an error of the device stays with the process
                self.pool.restart_timer()
            raise


def load_known(journal: Path) -> dict[tuple[str, str], Outcome]:
    """The journal's contests, plans and times of stages, by study and config, for :meth:`Run.answer`."""
    trials = Journal(journal).trials()
    return {(t.study, as_key(t.config)): t.outcome for t in trials if t.study.endswith((PLANS, STAGES, CONTEST))}


def describe_failure(failure: WorkerFailure) -> Outcome:
    """A failure as an outcome that is journaled."""
    if isinstance(failure, WorkerTimeout):
        return Outcome(status="timeout", reason=str(failure))
    if isinstance(failure, WorkerError) and failure.type_name == "CompileError":
        return Outcome(status="compile", reason=failure.message)
    said = failure.output.splitlines()[:1] if isinstance(failure, WorkerCrash) else []
    return Outcome(status="crash", reason=" ".join([str(failure), *said]))
