"""What one tuning run shares, and the contests of its finalists: interleaved, journaled, decided with the tie rule."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from kda_tl.bench import Bench
from kda_tl.crew import Crew, Request
from kda_tl.device import Device
from kda_tl.errors import KdaTlError
from kda_tl.isolate import WorkerCrash, WorkerError, WorkerFailure, WorkerTimeout
from kda_tl.journal import Journal, Outcome, Trial
from kda_tl.measure import ratio_ci, summarise
from kda_tl.progress import Geometry, OnEvent
from kda_tl.search import pick_winner
from kda_tl.stage import Config
from kda_tl.trial import Prepare, Rounds

ROUNDS = {"cuda": 9, "cpu": 5}
PLANS, STAGES, _CONTEST = "/plans", "/stages", "/contest"  # ends of the studies that are no searches

T = TypeVar("T", bound=Hashable)


class PrepareError(KdaTlError, RuntimeError):
    """What trials are measured on could not be made."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """What one tuning run shares.

    Attributes:
        crew: the workers.
        device: what is tuned for.
        journal: file of the trials.
        budget: most trials a stage.
        objective: what results of a forward may be kept for, one of :data:`kda_tl.plan_search.OBJECTIVES`.
        seed: of inputs and sampler.
        pipeline: the only one whose plans are searched and compete, its own default plan among them; None for all.
        emit: called with every event.
        known: contests, plans and times of stages in the journal, by study and config; see :func:`load_known`.
        winners: last winner by stage and geometry, a seed for the next workload.
    """

    crew: Crew
    device: Device
    journal: Path
    budget: int
    objective: str
    seed: int
    emit: OnEvent
    pipeline: str | None = None
    known: dict[tuple[str, str], Trial] = field(default_factory=dict)
    winners: dict[tuple[str, Geometry], Config] = field(default_factory=dict)

    def recall(self, study: str, config: Mapping[str, Any]) -> Trial | None:
        """What the journal holds of a contest, a plan or the times of a plan's stages."""
        return self.known.get((study, _as_text(config)))

    def remember(self, trial: Trial) -> Trial:
        """Journals what :meth:`recall` finds."""
        Journal(self.journal).append(trial)
        self.known[trial.study, _as_text(trial.config)] = trial
        return trial

    def measure(self, request: Request, bench: Bench | None = None) -> Any:
        """Runs a request in the measuring process, which is replaced if it may be damaged.

        Args:
            request: what to run.
            bench: whose tensors it needs.

        Raises:
            PrepareError: the tensors could not be made.
            WorkerFailure: the request failed.
        """
        if bench is not None:
            try:
                self.crew.prepare(Prepare(bench=bench))
            except WorkerFailure as failure:
                self.crew.restart_meter()
                raise PrepareError(f"{bench.workload.name} does not run with default configs: {failure}") from failure
        try:
            return self.crew.measure(request)
        except WorkerError as failure:
            if failure.type_name != "CompileError":  # an error of the device stays with the process
                self.crew.restart_meter()
            raise


def load_known(journal: Path) -> dict[tuple[str, str], Trial]:
    """The journal's contests, plans and times of stages for :attr:`Run.known`."""
    trials = Journal(journal).trials()
    return {(t.study, _as_text(t.config)): t for t in trials if t.study.endswith((PLANS, STAGES, _CONTEST))}


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


@dataclass(frozen=True, kw_only=True)
class Verdict(Generic[T]):
    """Who won a contest.

    Attributes:
        winner: the default on a tie.
        median_us: of the winner's rounds.
        mad_us: their median absolute deviation.
        reps: of the winner, over all rounds.
        rounds: number of rounds.
        default_us: of the default, None if it did not run.
        ratio: default over winner, 1 if the default won, None if it did not run.
        ci95: 95 % interval of the ratio.
    """

    winner: T
    median_us: float
    mad_us: float
    reps: int
    rounds: int
    default_us: float | None
    ratio: float | None
    ci95: tuple[float, float] | None


def hold_contest(
    run: Run,
    study: str,
    entrants: Mapping[T, Mapping[str, Any]],
    request: Request,
    *,
    default: T | None,
    fixed_order: Sequence[T] = (),
    bench: Bench | None = None,
) -> Verdict[T]:
    """Decides between entrants that are measured in turns; a contest that the journal holds is not held again.

    Args:
        run: the tuning run.
        study: identity of what was searched.
        entrants: at least one, each with its stored form, best first.
        request: measures them in this order and returns :class:`kda_tl.trial.Rounds`.
        default: the entrant that wins ties, None if it is not among them.
        fixed_order: which of several equally fast entrants wins.
        bench: whose tensors the request needs.

    Raises:
        WorkerFailure: the contest gave no result.
    """
    rounds, reps = measure_in_turns(run, study, list(entrants.values()), request, bench)
    return decide(dict(zip(entrants, rounds, strict=True)), reps, default, fixed_order)


def measure_in_turns(
    run: Run, study: str, entrants: Sequence[Mapping[str, Any]], request: Request, bench: Bench | None = None
) -> tuple[list[list[float]], int]:
    """Medians of the rounds of each entrant and the repetitions of a round, measured or from the journal.

    Arguments as for :func:`hold_contest`; ``entrants`` are their stored forms.

    Raises:
        WorkerFailure: the contest gave no result.
    """
    config = {"entrants": list(entrants)}
    known = run.recall(study + _CONTEST, config)
    if known is None:
        rounds: Rounds = run.measure(request, bench)
        medians = [summarise(series)[0] for series in rounds.medians_us]
        known = run.remember(
            Trial(
                study=study + _CONTEST,
                config=config,
                status="ok",
                median_us=min(medians),
                extra={"rounds": rounds.medians_us, "reps": rounds.reps},
            )
        )
    return known.extra["rounds"], known.extra["reps"]


def decide(
    rounds: Mapping[T, Sequence[float]], reps: int, default: T | None, fixed_order: Sequence[T] = ()
) -> Verdict[T]:
    """The winner of a contest by the tie rule; it is the default unless the interval of its gain is above 1.

    Args:
        rounds: medians of the rounds by entrant, in us.
        reps: repetitions a round.
        default: the entrant that wins ties, None if it is not among them.
        fixed_order: which of several equally fast entrants wins.
    """
    winner = pick_winner(rounds, default, fixed_order)
    ratio, low, high = (1.0, 1.0, 1.0) if default in (None, winner) else ratio_ci(rounds[default], rounds[winner])
    if default is not None and low <= 1 and winner != default:
        winner, ratio, low, high = default, 1.0, 1.0, 1.0
    median, mad = summarise(rounds[winner])
    return Verdict(
        winner=winner,
        median_us=median,
        mad_us=mad,
        reps=reps * len(rounds[winner]),
        rounds=len(rounds[winner]),
        default_us=None if default is None else summarise(rounds[default])[0],
        ratio=None if default is None else ratio,
        ci95=None if default is None else (low, high),
    )
