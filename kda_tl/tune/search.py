"""Search of a config space with few measurements: enumeration where it is affordable, else Optuna's TPE.

Nothing here knows what a config does: ``evaluate`` measures it, and can be a lambda in a test. Every outcome is
journaled before the next config is measured. A rerun does not restore the sampler, it replays the search: the same
proposals come in the same order and are answered from the journal, so that an interrupted search goes on as if it had
never stopped. Where the replay departs (another seed or budget), the rest of the journal is told to the sampler first.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kda_tl.bench.timing import summarise
from kda_tl.core.stage import Config
from kda_tl.errors import InputError
from kda_tl.tune.journal import Journal, Outcome, Trial, as_key
from kda_tl.tune.pool import DeadlineExceeded
from kda_tl.tune.sampler import TOP, GridSampler, TPESampler

Item = TypeVar("Item", bound=Hashable)

_MAX_RANKED_SEEDS = 10
_TIE = 0.02
_MAD_TO_SIGMA = 1.4826
_MEDIAN_ERROR = 1.2533  # standard error of a median, in sigma / sqrt(n)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Generic[Item]):
    """A config of a stage, or a whole plan, with its outcome; ``resumed`` if it came from the journal."""

    config: Item
    outcome: Outcome
    resumed: bool = False

    @property
    def time_us(self) -> float:
        """Its median, infinite unless it is valid."""
        return self.outcome.median_us or math.inf if self.outcome.status == "ok" else math.inf


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Every trial of a search, in order, and why it stopped: one sentence."""

    trials: tuple[Evaluation[Config], ...]
    stopped_because: str

    @property
    def best(self) -> Evaluation[Config] | None:
        """The valid trial with the least median. Not the winner yet: finalists are measured again, interleaved."""
        return next(iter(sort_valid(self.trials)), None)

    @property
    def counts(self) -> dict[str, int]:
        """Number of trials by status."""
        return dict(Counter(trial.outcome.status for trial in self.trials))

    @property
    def resumed(self) -> int:
        """Number of trials that came from the journal."""
        return sum(trial.resumed for trial in self.trials)


def sort_valid(trials: Iterable[Evaluation[Item]]) -> list[Evaluation[Item]]:
    """Valid evaluations, least median first; equal ones stay in order."""
    return sorted((t for t in trials if t.outcome.status == "ok"), key=lambda t: t.time_us)


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
    on_trial: Callable[[Evaluation[Config]], None] = lambda trial: None,
    prepare: Callable[[Sequence[Config]], None] = lambda configs: None,
    batch: int = 1,
    patience: int = 40,
    exhaustive_limit: int = 300,
) -> SearchResult:
    """Looks for the fastest config of a space.

    The default is measured first, then the seeds, then the best ranked. A space that fits the budget is enumerated in
    rank order; a larger one is sampled. Deterministic for a fixed seed and evaluate.

    Args:
        space: valid candidates, i.e. those that reject() passed.
        evaluate: measures one config. Failures are outcomes; DeadlineExceeded ends the search, any other exception
            (Ctrl-C) passes through it, and nothing that was finished is lost.
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

    Raises InputError if the default is not in the space, DatabaseError if the journal cannot be read or written.
    """
    if default is not None and default not in space:
        raise InputError(f"the default {default} is not in the search space: pass one that reject() accepts.")
    candidates = list(dict.fromkeys(space))
    ranked = sorted(candidates, key=rank) if rank else []
    early = dict.fromkeys([default, *seeds, *ranked[: min(_MAX_RANKED_SEEDS, budget // 6)]])
    first = [config for config in early if config is not None and config in candidates]
    if len(candidates) <= min(budget, exhaustive_limit):
        sampler: GridSampler | TPESampler = GridSampler([*first, *(ranked or candidates)])
    else:
        sampler = TPESampler(candidates, first, seed, patience)
    journal = None if storage is None else Journal(storage)
    known = _recall(journal, study, candidates) if journal else {}
    run = _Run(sampler, evaluate, on_trial, prepare, study, budget, journal, known)
    try:
        while run.left and (configs := sampler.propose(min(max(batch, 1), run.left))):
            run.take_all(configs)
        run.absorb()
    except DeadlineExceeded:
        why = "the time limit was reached"
    else:
        why = _explain_end(len(run.trials), len(candidates), budget, patience)
    return SearchResult(trials=tuple(run.trials), stopped_because=why)


def _recall(journal: Journal, study: str, space: Sequence[Config]) -> dict[Config, Outcome]:
    """Journaled outcomes of the configs of a space, the first of each, in the journal's order."""
    by_key = {as_key(config.as_dict()): config for config in space}
    known: dict[Config, Outcome] = {}
    for trial in journal.trials(study):
        if (config := by_key.get(as_key(trial.config))) is not None:
            known.setdefault(config, trial.outcome)
    return known


def _explain_end(tried: int, size: int, budget: int, patience: int) -> str:
    if not size:
        return "there is no candidate to try"
    if tried == size:
        return f"all {size} candidates were tried"
    if tried >= budget:
        return f"the budget of {budget} trials is used up ({size} candidates)"
    return f"{patience} trials gained less than 1 %, and all neighbours of the {TOP} best were tried"


@dataclass
class _Run:
    """Bookkeeping of one search: what was measured, and what the journal knows."""

    sampler: GridSampler | TPESampler
    evaluate: Callable[[Config], Outcome]
    on_trial: Callable[[Evaluation[Config]], None]
    prepare: Callable[[Sequence[Config]], None]
    study: str
    budget: int
    journal: Journal | None
    known: dict[Config, Outcome]  # journaled outcomes that the replay did not come to yet
    trials: list[Evaluation[Config]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Trials that the budget still allows."""
        return max(0, self.budget - len(self.trials))

    def take_all(self, configs: Sequence[Config]) -> None:
        """Takes what was proposed, as far as the budget goes."""
        unknown = [config for config in configs if config not in self.known]
        if unknown:  # the replay ends here: what is left of the journal goes first
            self.absorb()
            unknown = unknown[: self.left]
        if unknown:
            self.prepare(unknown)
        for config in configs:
            if config in unknown or config in self.known:
                self.take(config)

    def take(self, config: Config) -> None:
        """Answers a config from the journal, or measures and journals it."""
        resumed = config in self.known
        outcome = self.known.pop(config) if resumed else self.evaluate(config)
        if self.journal and not resumed:
            self.journal.append(Trial.of(outcome, study=self.study, config=config.as_dict()))
        evaluation = Evaluation(config=config, outcome=outcome, resumed=resumed)
        self.trials.append(evaluation)
        self.sampler.tell(config, outcome)
        self.on_trial(evaluation)

    def absorb(self) -> None:
        """Takes every journaled outcome that is left."""
        for config in list(self.known):
            self.take(config)


def pick_winner(
    finalists: Mapping[Item, Sequence[float]], default: Item | None = None, fixed_order: Sequence[Item] = ()
) -> Item:
    """Chooses among finalists so that two runs on the same machine agree.

    Those whose median of interleaved rounds, in us, is within 2 % of the best, or within the noise of the two medians
    (two standard errors, estimated from the MAD over rounds), are ties; the first of them in a fixed order wins. The
    default comes first, so that a tuned config must beat it; finalists outside the order come last, in their own.
    Raises InputError if no finalist has a median.
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
    return _MEDIAN_ERROR * _MAD_TO_SIGMA * summarise(rounds)[1] / math.sqrt(len(rounds))
