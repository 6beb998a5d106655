"""What one tuning run shares: its workers, its journal, what both already know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda_tl.bench.fixtures import StageFixture
from kda_tl.core.device import Device
from kda_tl.core.stage import Config
from kda_tl.errors import KdaTlError
from kda_tl.tune.events import ChunkVariant, OnEvent
from kda_tl.tune.isolate import WorkerCrash, WorkerError, WorkerFailure, WorkerTimeout
from kda_tl.tune.journal import Journal, Outcome, Trial
from kda_tl.tune.pool import Request, WorkerPool
from kda_tl.tune.requests import Prepare

PLANS, STAGES, CONTEST = "/plans", "/stages", "/contest"  # ends of the studies that are no searches


class PrepareError(KdaTlError, RuntimeError):
    """What trials are measured on could not be made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What one tuning run shares.

    Attributes:
        pool: the workers.
        device: what is tuned for.
        journal: file of the trials.
        budget: most trials a stage.
        objective: what results of a forward may be kept for, one of :data:`kda_tl.tune.plan_search.OBJECTIVES`.
        seed: of inputs and sampler.
        pipeline: the only one whose plans are searched and compete, its own default plan among them; None for all.
        emit: called with every event.
        known: contests, plans and times of stages in the journal, by study and config; see :func:`load_known`.
        winners: last winner by stage and variant, a seed for the next workload.
    """

    pool: WorkerPool
    device: Device
    journal: Path
    budget: int
    objective: str
    seed: int
    emit: OnEvent
    pipeline: str | None = None
    known: dict[tuple[str, str], Trial] = field(default_factory=dict)
    winners: dict[tuple[str, ChunkVariant], Config] = field(default_factory=dict)

    def recall(self, study: str, config: Mapping[str, Any]) -> Trial | None:
        """What the journal holds of a contest, a plan or the times of a plan's stages."""
        return self.known.get((study, _as_text(config)))

    def remember(self, trial: Trial) -> Trial:
        """Journals what :meth:`recall` finds."""
        Journal(self.journal).append(trial)
        self.known[trial.study, _as_text(trial.config)] = trial
        return trial

    def measure(self, request: Request, fixture: StageFixture | None = None) -> Any:
        """Runs a request in the measuring process, which is replaced if it may be damaged.

        Args:
            request: what to run.
            fixture: whose tensors it needs.

        Raises:
            PrepareError: the tensors could not be made.
            WorkerFailure: the request failed.
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


def load_known(journal: Path) -> dict[tuple[str, str], Trial]:
    """The journal's contests, plans and times of stages for :attr:`Run.known`."""
    trials = Journal(journal).trials()
    return {(t.study, _as_text(t.config)): t for t in trials if t.study.endswith((PLANS, STAGES, CONTEST))}


def _as_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def describe_failure(failure: WorkerFailure) -> Outcome:
    """A failure as an outcome that is journaled."""
    if isinstance(failure, WorkerTimeout):
        return Outcome(status="timeout", reason=str(failure))
    if isinstance(failure, WorkerError) and failure.type_name == "CompileError":
        return Outcome(status="compile", reason=failure.message)
    said = failure.output.splitlines()[:1] if isinstance(failure, WorkerCrash) else []
    return Outcome(status="crash", reason=" ".join([str(failure), *said]))
