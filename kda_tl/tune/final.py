"""The contest of the finalists: measured in turns, journaled, decided with the tie rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.timing import ratio_ci, summarise
from kda_tl.core.stage import Config, Plan
from kda_tl.tune.journal import Outcome
from kda_tl.tune.pool import Request
from kda_tl.tune.requests import Rounds
from kda_tl.tune.search import pick_winner
from kda_tl.tune.session import CONTEST, Run

ROUNDS = {"cuda": 9, "cpu": 5}

T = TypeVar("T", bound=Config | Plan)


@dataclass(frozen=True, kw_only=True)
class Comparison(Generic[T]):
    """Who won a contest, and what the winner's rounds say."""

    winner: T  # the default on a tie
    median_us: float
    mad_us: float  # median absolute deviation
    reps: int  # over all rounds
    rounds: int
    default_us: float | None  # median of the default; this and the next are None if it did not run
    ratio: float | None  # default over winner, 1 if the default won
    ci95: tuple[float, float] | None  # 95 % interval of the ratio


def measure_in_turns(
    run: Run, study: str, candidates: Sequence[T], request: Request, fixture: StageFixture | None = None
) -> tuple[dict[T, list[float]], int]:
    """Medians of the rounds by candidate, in us, and repetitions a round: measured, or as the journal holds them.

    The request measures the candidates in their order, and returns :class:`kda_tl.tune.requests.Rounds`; ``fixture`` is
    what it needs the tensors of, and ``study`` the identity of what was searched. Raises WorkerFailure if there is no
    result.
    """

    def measure() -> Outcome:
        found: Rounds = run.measure(request, fixture)
        best_us = min(summarise(series)[0] for series in found.medians_us)
        return Outcome(status="ok", median_us=best_us, extra={"rounds": found.medians_us, "reps": found.reps})

    entrants = [candidate.as_dict() for candidate in candidates]
    outcome, _ = run.answer(study + CONTEST, {"entrants": entrants}, measure)
    return dict(zip(candidates, outcome.extra["rounds"], strict=True)), outcome.extra["reps"]


def decide(
    rounds: Mapping[T, Sequence[float]], reps: int, default: T | None, fixed_order: Sequence[T] = ()
) -> Comparison[T]:
    """The winner of a contest by the tie rule; it is the default unless the interval of its gain is above 1.

    Takes what :func:`measure_in_turns` gives, the default if it is among the candidates, and the order in which equally
    fast ones win.
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
