"""Search of a config space with few measurements: enumeration where it is affordable, else Optuna's TPE.

Nothing here knows what a config does: ``evaluate`` measures it, and can be a lambda in a test. Every outcome is
journaled before the next config is measured. A rerun does not restore the sampler, it replays the search: the same
proposals come in the same order and are answered from the journal, so that an interrupted search goes on as if it had
never stopped. Where the replay departs (another seed or budget), the rest of the journal is told to the sampler first.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kda_tl.core.stage import Config
from kda_tl.errors import InputError
from kda_tl.tune.journal import Journal, Outcome, Trial
from kda_tl.tune.sampler import TOP, GridSampler, Sampler, TPESampler

Item = TypeVar("Item", bound=Hashable)

_MAX_RANKED_SEEDS = 10
_TIE = 0.02
_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = 1.2533  # standard error of a median, in sigma / sqrt(n)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One config of a search with its outcome; ``resumed`` if it came from the journal."""

    config: Config
    outcome: Outcome
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: the valid evaluation with the least median, None if there is none. Not the winner yet: finalists are
            to be measured again, interleaved.
        trials: every evaluation, in order.
        counts: number of trials by status.
        stopped_because: one sentence.
        resumed: number of trials that came from the journal.
    """

    best: Evaluation | None
    trials: tuple[Evaluation, ...]
    counts: Mapping[str, int]
    stopped_because: str
    resumed: int


def sort_valid(trials: Sequence[Evaluation]) -> list[Evaluation]:
    """Valid evaluations, least median first; equal ones stay in order."""
    return sorted((t for t in trials if t.outcome.status == "ok"), key=lambda t: t.outcome.median_us or math.inf)


def search(
    space: Sequence[Config],
    evaluate: Callable[[Config], Outcome],
    *,
    study: str,
    budget: int,
    seed: int = 0,
    storage: str | os.PathLike[str] | None = None,
    default: Config | None = None,
    seeds: Sequence[Config] = (),
    rank: Callable[[Config], float] | None = None,
    on_trial: Callable[[Evaluation], None] | None = None,
    prepare: Callable[[Sequence[Config]], None] | None = None,
    batch: int = 1,
    patience: int = 40,
    exhaustive_limit: int = 300,
) -> SearchResult:
    """Looks for the fastest config of a space.

    The default is measured first, then the seeds, then the best ranked. A space that fits the budget is enumerated in
    rank order; a larger one is sampled. Deterministic for a fixed seed and evaluate.

    Args:
        space: valid candidates, i.e. those that reject() passed.
        evaluate: measures one config. Failures are outcomes; an exception (Ctrl-C) ends the search, and nothing
            that was finished is lost.
        study: identity of what is searched; only journaled trials of the same study are reused.
        budget: most trials, those from the journal included.
        seed: of the sampler.
        storage: path of the journal, None to keep none.
        default: config when nothing is tuned; must be in the space.
        seeds: configs to try early, e.g. winners of nearby problems; those outside the space are skipped.
        rank: estimated cost of a config, lower is better.
        on_trial: called after each trial, resumed ones included.
        prepare: called with the next configs to be measured, e.g. to compile them in parallel.
        batch: number of configs proposed at a time.
        patience: trials without a gain of 1 % after which the search ends, once all neighbours of the three best are
            tried. GridSampler does not stop early.
        exhaustive_limit: largest space that is enumerated.

    Raises:
        InputError: the default is not in the space.
        DatabaseError: the journal cannot be read or written.
    """
    if default is not None and default not in space:
        raise InputError(f"the default {default} is not in the search space: pass one that reject() accepts.")
    candidates = list(dict.fromkeys(space))
    first = _order_first(candidates, budget, default, seeds, rank)
    sampler: Sampler
    if len(candidates) <= min(budget, exhaustive_limit):
        sampler = GridSampler([*first, *(sorted(candidates, key=rank) if rank else candidates)])
    else:
        sampler = TPESampler(candidates, first, seed, patience)
    run = _Run(candidates, sampler, evaluate, study, Journal(storage) if storage is not None else None, on_trial)
    while run.left(budget) and (configs := sampler.propose(min(max(batch, 1), run.left(budget)))):
        run.take_all(configs, budget, prepare)
    run.absorb()
    return run.result(budget, patience)


def _order_first(
    space: Sequence[Config],
    budget: int,
    default: Config | None,
    seeds: Sequence[Config],
    rank: Callable[[Config], float] | None,
) -> list[Config]:
    """Default, seeds inside the space, best ranked; each once."""
    ranked = sorted(space, key=rank)[: min(_MAX_RANKED_SEEDS, budget // 6)] if rank else []
    allowed = set(space)
    return [c for c in dict.fromkeys([default, *seeds, *ranked]) if c is not None and c in allowed]


class _Run:
    """Bookkeeping of one search: what was measured, and what the journal knows."""

    def __init__(
        self,
        space: Sequence[Config],
        sampler: Sampler,
        evaluate: Callable[[Config], Outcome],
        study: str,
        journal: Journal | None,
        on_trial: Callable[[Evaluation], None] | None,
    ) -> None:
        self.known: dict[Config, Outcome] = {}  # journaled outcomes that the replay did not come to yet
        self._space, self._sampler, self._evaluate = space, sampler, evaluate
        self._study, self._journal, self._on_trial = study, journal, on_trial
        self._trials: list[Evaluation] = []
        by_key = {_key(config.as_dict()): config for config in space}
        for trial in journal.trials(study) if journal else []:
            config = by_key.get(_key(trial.config))
            if config is not None:
                self.known.setdefault(config, trial.outcome)

    def left(self, budget: int) -> int:
        """Trials that the budget still allows."""
        return max(0, budget - len(self._trials))

    def take_all(
        self, configs: Sequence[Config], budget: int, prepare: Callable[[Sequence[Config]], None] | None
    ) -> None:
        """Takes what was proposed, as far as the budget goes."""
        unknown = [config for config in configs if config not in self.known]
        if unknown:  # the replay ends here: what is left of the journal goes first
            self.absorb()
            unknown = unknown[: self.left(budget)]
        if unknown and prepare:
            prepare(unknown)
        for config in configs:
            if config in unknown or config in self.known:
                self.take(config)

    def take(self, config: Config) -> None:
        """Answers a config from the journal, or measures and journals it."""
        resumed = config in self.known
        outcome = self.known.pop(config) if resumed else self._evaluate(config)
        if self._journal and not resumed:
            self._journal.append(Trial.of(outcome, study=self._study, config=config.as_dict()))
        evaluation = Evaluation(config=config, outcome=outcome, resumed=resumed)
        self._trials.append(evaluation)
        self._sampler.tell(config, outcome)
        if self._on_trial:
            self._on_trial(evaluation)

    def absorb(self) -> None:
        """Takes every journaled outcome that is left."""
        for config in list(self.known):
            self.take(config)

    def result(self, budget: int, patience: int) -> SearchResult:
        """The result, with the reason for the end."""
        if not self._space:
            why = "there is no candidate to try"
        elif len(self._trials) == len(self._space):
            why = f"all {len(self._space)} candidates were tried"
        elif not self.left(budget):
            why = f"the budget of {budget} trials is used up ({len(self._space)} candidates)"
        else:
            why = f"{patience} trials gained less than 1 %, and all neighbours of the {TOP} best were tried"
        valid = sort_valid(self._trials)
        return SearchResult(
            best=valid[0] if valid else None,
            trials=tuple(self._trials),
            counts=dict(Counter(trial.outcome.status for trial in self._trials)),
            stopped_because=why,
            resumed=sum(trial.resumed for trial in self._trials),
        )


def _key(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def pick_winner(
    finalists: Mapping[Item, Sequence[float]], default: Item | None = None, fixed_order: Sequence[Item] = ()
) -> Item:
    """Chooses among finalists so that two runs on the same machine agree.

    Those whose median is within 2 % of the best, or within the noise of the two medians (two standard errors,
    estimated from the MAD over rounds), are ties; the first of them in a fixed order wins.

    Args:
        finalists: medians of interleaved rounds by config, in us.
        default: comes first in the order, so that a tuned config must beat it.
        fixed_order: the space; finalists outside it come last, in their own order.

    Raises:
        InputError: no finalist has a median.
    """
    medians = {item: statistics.median(rounds) for item, rounds in finalists.items() if rounds}
    if not medians:
        raise InputError("no finalist was measured: pass at least one with the medians of its rounds.")
    best = min(medians, key=medians.__getitem__)

    def ties(item: Item) -> bool:
        noise = 2 * math.hypot(_median_error(finalists[item]), _median_error(finalists[best]))
        return medians[item] - medians[best] <= max(_TIE * medians[best], noise)

    ordered = dict.fromkeys([default, *fixed_order, *medians])
    return next(item for item in ordered if item in medians and ties(item))


def _median_error(rounds: Sequence[float]) -> float:
    """Standard error of a median, from the median absolute deviation."""
    centre = statistics.median(rounds)
    mad = statistics.median(abs(value - centre) for value in rounds)
    return _MEDIAN_ERROR * _MAD_TO_SIGMA * mad / math.sqrt(len(rounds))
