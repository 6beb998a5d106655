"""The contest of the finalists: measured in turns, journaled, decided with the tie rule."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.timing import ratio_ci, summarise
from kda_tl.tune.journal import Trial
from kda_tl.tune.pool import Request
from kda_tl.tune.requests import Rounds
from kda_tl.tune.search import pick_winner
from kda_tl.tune.session import CONTEST, Run

ROUNDS = {"cuda": 9, "cpu": 5}

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[T]):
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


def hold_final(
    run: Run,
    study: str,
    candidates: Mapping[T, Mapping[str, Any]],
    request: Request,
    *,
    default: T | None,
    fixed_order: Sequence[T] = (),
    fixture: StageFixture | None = None,
) -> Comparison[T]:
    """Decides between candidates that are measured in turns; a contest that the journal holds is not held again.

    Args:
        run: the tuning run.
        study: identity of what was searched.
        candidates: at least one, each with its stored form, best first.
        request: measures them in this order and returns :class:`kda_tl.tune.requests.Rounds`.
        default: the candidate that wins ties, None if it is not among them.
        fixed_order: which of several equally fast candidates wins.
        fixture: whose tensors the request needs.

    Raises:
        WorkerFailure: the contest gave no result.
    """
    rounds, reps = measure_in_turns(run, study, list(candidates.values()), request, fixture)
    return decide(dict(zip(candidates, rounds, strict=True)), reps, default, fixed_order)


def measure_in_turns(
    run: Run, study: str, candidates: Sequence[Mapping[str, Any]], request: Request, fixture: StageFixture | None = None
) -> tuple[list[list[float]], int]:
    """Medians of the rounds of each candidate and the repetitions of a round, measured or from the journal.

    Arguments as for :func:`hold_final`; ``candidates`` are their stored forms.

    Raises:
        WorkerFailure: the contest gave no result.
    """
    config = {"entrants": list(candidates)}
    known = run.recall(study + CONTEST, config)
    if known is None:
        rounds: Rounds = run.measure(request, fixture)
        medians = [summarise(series)[0] for series in rounds.medians_us]
        known = run.remember(
            Trial(
                study=study + CONTEST,
                config=config,
                status="ok",
                median_us=min(medians),
                extra={"rounds": rounds.medians_us, "reps": rounds.reps},
            )
        )
    return known.extra["rounds"], known.extra["reps"]


def decide(
    rounds: Mapping[T, Sequence[float]], reps: int, default: T | None, fixed_order: Sequence[T] = ()
) -> Comparison[T]:
    """The winner of a contest by the tie rule; it is the default unless the interval of its gain is above 1.

    Args:
        rounds: medians of the rounds by candidate, in us.
        reps: repetitions a round.
        default: the candidate that wins ties, None if it is not among them.
        fixed_order: which of several equally fast candidates wins.
    """
    winner = pick_winner(rounds, default, fixed_order)
    ratio, low, high = (1.0, 1.0, 1.0) if default in (None, winner) else ratio_ci(rounds[default], rounds[winner])
    if default is not None and low <= 1 and winner != default:
        winner, ratio, low, high = default, 1.0, 1.0, 1.0
    median, mad = summarise(rounds[winner])
    return Comparison(
        winner=winner,
        median_us=median,
        mad_us=mad,
        reps=reps * len(rounds[winner]),
        rounds=len(rounds[winner]),
        default_us=None if default is None else summarise(rounds[default])[0],
        ratio=None if default is None else ratio,
        ci95=None if default is None else (low, high),
    )
