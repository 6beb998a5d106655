"""The search: what it finds on spaces with a known optimum, what it never measures twice, and how it ends."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.calls import call
from support.search_spaces import DEFAULT, SMALL, SPACE, KernelConfig, SmallConfig, draw_surface

from kda_tl.core.isolate import IsolatedWorker, WorkerCrash, WorkerError
from kda_tl.core.stage import Config
from kda_tl.errors import InputError
from kda_tl.tune.journal import STATUSES, Journal, Outcome
from kda_tl.tune.search import Evaluation, SearchResult, search, sort_valid


class Counted:
    """An evaluate that notes what it was asked, and may stop as Ctrl-C does."""

    def __init__(self, cost: Callable[[Config], float], stop_at: int | None = None) -> None:
        self.cost, self.stop_at = cost, stop_at
        self.asked: list[Config] = []

    def __call__(self, config: Config) -> Outcome:
        if len(self.asked) == self.stop_at:
            raise KeyboardInterrupt
        self.asked.append(config)
        return Outcome(status="ok", median_us=self.cost(config))


def configs_of(result: SearchResult) -> list[Config]:
    return [trial.config for trial in result.trials]


def small_cost(config: Config) -> float:
    assert isinstance(config, SmallConfig)
    return 10.0 + abs(config.BV - 32) + abs(config.threads - 256) / 10


# ---- quality


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("batch", [1, 4])
def test_60_trials_come_within_5_percent_of_the_enumerated_best(batch: int) -> None:
    assert 350 < len(SPACE) < 450
    ratios = {}
    for seed in range(10):
        cost = draw_surface(seed)
        result = search(SPACE, Counted(cost), study="s", budget=60, seed=seed, default=DEFAULT, batch=batch)
        assert result.best and result.best.outcome.median_us
        assert len(result.trials) <= 60
        ratios[seed] = result.best.outcome.median_us / min(map(cost, SPACE))
    assert sum(ratio <= 1.05 for ratio in ratios.values()) >= 9, f"found / best by seed: {ratios}"


def test_a_small_space_is_enumerated_in_rank_order() -> None:
    def rank(config: Config) -> float:
        return -small_cost(config)

    evaluate = Counted(small_cost)
    default, seed = SMALL[5], SMALL[7]
    result = search(SMALL, evaluate, study="s", budget=12, default=default, seeds=[seed, default], rank=rank)
    rest = sorted(set(SMALL) - {default, seed}, key=lambda c: (rank(c), SMALL.index(c)))
    first = [default, seed, *(c for c in sorted(SMALL, key=rank)[:2] if c not in (default, seed))]
    assert evaluate.asked == [*first, *(c for c in rest if c not in first)] == configs_of(result)
    assert result.best and result.best.config == SmallConfig(BV=32, threads=256)
    assert result.stopped_because == "all 12 candidates were tried"


def test_default_then_seeds_then_ranked_come_first_when_sampling() -> None:
    cost = draw_surface(3)
    ranked = sorted(SPACE, key=cost)
    outside = KernelConfig(BK=128, BV=128, num_stages=4)
    assert outside not in SPACE
    seeds = [SPACE[9], outside, DEFAULT, SPACE[11], SPACE[9]]
    evaluate = Counted(cost)
    result = search(SPACE, evaluate, study="s", budget=30, default=DEFAULT, seeds=seeds, rank=cost)
    first = [DEFAULT, SPACE[9], SPACE[11], *ranked[:5]]
    assert evaluate.asked[: len(first)] == first
    assert result.best and result.best.config == ranked[0]


@pytest.mark.parametrize(("limit", "sampled"), [(300, True), (440, False)])
def test_the_limit_of_enumeration(limit: int, sampled: bool) -> None:
    result = search(SPACE, Counted(draw_surface(1)), study="s", budget=600, exhaustive_limit=limit, patience=5)
    assert (len(result.trials) < len(SPACE)) == sampled


def test_sampling_a_space_to_its_end_asks_for_each_config_once() -> None:
    result = search(SMALL, Counted(small_cost), study="s", budget=50, exhaustive_limit=0, patience=10**6)
    assert sorted(map(repr, configs_of(result))) == sorted(map(repr, SMALL))
    assert result.stopped_because == "all 12 candidates were tried"


@pytest.mark.parametrize("batch", [1, 3])
def test_the_same_seed_gives_the_same_search(batch: int) -> None:
    def run(seed: int) -> SearchResult:
        return search(SPACE, Counted(draw_surface(2)), study="s", budget=35, seed=seed, default=DEFAULT, batch=batch)

    assert run(5) == run(5)
    assert configs_of(run(5)) != configs_of(run(6))


# ---- the end


def test_a_search_ends_for_lack_of_gain_only_with_the_neighbours_tried() -> None:
    cost = draw_surface(4)
    result = search(SPACE, Counted(cost), study="s", budget=400, seed=1, patience=20)
    tried = configs_of(result)
    assert 20 < len(tried) < 400
    for trial in sort_valid(result.trials)[:3]:
        assert {c for c in trial.config.neighbours() if c in SPACE} <= set(tried)
    assert result.stopped_because == "20 trials gained less than 1 %, and all neighbours of the 3 best were tried"
    bar, stale = math.inf, []
    for median in (cost(c) for c in tried):
        stale.append(0 if median < 0.99 * bar else (stale[-1] + 1 if stale else 0))
        bar = median if stale[-1] == 0 else bar
    assert stale[-1] >= 20


def test_the_budget_is_kept() -> None:
    for budget, batch in [(0, 1), (1, 1), (7, 4), (7, 100)]:
        evaluate = Counted(draw_surface(0))
        result = search(SPACE, evaluate, study="s", budget=budget, default=DEFAULT, batch=batch)
        assert len(evaluate.asked) == len(result.trials) == budget
        assert result.stopped_because == f"the budget of {budget} trials is used up ({len(SPACE)} candidates)"


def test_an_empty_space_gives_no_best() -> None:
    result = search([], Counted(small_cost), study="s", budget=5)
    assert (result.best, result.trials, result.stopped_because) == (None, (), "there is no candidate to try")


def test_a_default_outside_the_space_is_refused() -> None:
    with pytest.raises(InputError, match="not in the search space"):
        search(SMALL[:3], Counted(small_cost), study="s", budget=5, default=SMALL[5])


# ---- failures


@pytest.mark.parametrize("exhaustive_limit", [300, 0])
def test_failures_are_recorded_and_the_search_goes_on(tmp_path: Path, exhaustive_limit: int) -> None:
    failures = [status for status in STATUSES if status != "ok"]
    expected = dict(zip(SMALL, failures, strict=False))

    def evaluate(config: Config) -> Outcome:
        if status := expected.get(config):
            # Slow with a better median than any: it must not win all the same.
            return Outcome(status=status, reason=f"{status} it is", median_us=0.5 if status == "slow" else None)
        return Outcome(status="ok", median_us=small_cost(config), samples_us=[1.0, 2.0], check={"max_rel_err": 0.1})

    path = tmp_path / "trials.jsonl"
    result = search(SMALL, evaluate, study="s", budget=12, storage=path, exhaustive_limit=exhaustive_limit)
    assert result.counts == {**dict.fromkeys(failures, 1), "ok": 6}
    assert result.best and result.best.config not in expected
    assert result.best.outcome.median_us == min(small_cost(c) for c in SMALL if c not in expected)
    stored = {SmallConfig.from_dict(t.config): t for t in Journal(path).trials("s")}
    assert {c: t.status for c, t in stored.items() if t.status != "ok"} == expected
    assert all(stored[c].reason == f"{status} it is" for c, status in expected.items())
    assert stored[result.best.config].outcome == result.best.outcome


def test_nothing_valid_uses_the_budget_and_gives_no_best() -> None:
    result = search(SPACE, lambda _: Outcome(status="compile", reason="no"), study="s", budget=60, patience=10)
    assert (result.best, result.counts) == (None, {"compile": 60})
    assert len(set(configs_of(result))) == 60


def test_a_config_that_crashes_its_process_costs_only_itself(tmp_path: Path) -> None:
    bad = {SMALL[2]: "__import__('os')._exit(3)", SMALL[4]: "__import__('ctypes').string_at(0)", SMALL[6]: "1 / 0"}
    with IsolatedWorker("builtins:eval", 60.0) as worker:

        def evaluate(config: Config) -> Outcome:
            try:
                return Outcome(status="ok", median_us=call(worker, bad.get(config, repr(small_cost(config)))))
            except WorkerCrash as failure:
                return Outcome(status="crash", reason=str(failure))
            except WorkerError as failure:
                return Outcome(status="wrong", reason=str(failure))

        result = search(SMALL, evaluate, study="s", budget=12, storage=tmp_path / "trials.jsonl")
    assert result.counts == {"ok": 9, "crash": 2, "wrong": 1}
    assert result.best and result.best.config == SmallConfig(BV=32, threads=256)


# ---- resume


def bare(trials: tuple[Evaluation, ...]) -> list[tuple[Config, Outcome]]:
    return [(trial.config, trial.outcome) for trial in trials]


@pytest.mark.parametrize("batch", [1, 4])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path: Path, batch: int) -> None:
    path, cost = tmp_path / "trials.jsonl", draw_surface(7)

    def run(evaluate: Counted, storage: Path | None) -> SearchResult:
        return search(SPACE, evaluate, study="s", budget=45, seed=3, storage=storage, default=DEFAULT, batch=batch)

    stopped = Counted(cost, stop_at=17)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, path)
    assert len(Journal(path).trials("s")) == 17
    resumed = Counted(cost)
    result = run(resumed, path)
    assert not set(stopped.asked) & set(resumed.asked)
    assert (len(resumed.asked), result.resumed, len(result.trials)) == (28, 17, 45)
    assert [t.resumed for t in result.trials] == [True] * 17 + [False] * 28
    assert bare(result.trials) == bare(run(Counted(cost), None).trials)
    again = Counted(cost)
    assert (run(again, path).resumed, again.asked) == (45, [])


@pytest.mark.parametrize("exhaustive_limit", [300, 0])
def test_a_resume_that_differs_still_repeats_nothing(tmp_path: Path, exhaustive_limit: int) -> None:
    """Another seed, default and budget: the journal counts, and all of it is in the result."""
    path = tmp_path / "trials.jsonl"
    first = Counted(small_cost)
    search(SMALL, first, study="s", budget=7, seed=1, storage=path, exhaustive_limit=0)
    second = Counted(small_cost)
    result = search(
        SMALL, second, study="s", budget=10, seed=2, storage=path, default=SMALL[-1], exhaustive_limit=exhaustive_limit
    )
    assert not set(first.asked) & set(second.asked)
    assert len(second.asked) == 3
    assert set(configs_of(result)) == {*first.asked, *second.asked}
    for seed in (1, 2):  # seed 1 is replayed up to the lower budget, and the rest is in the result all the same
        lower = search(SMALL, second, study="s", budget=2, seed=seed, storage=path, exhaustive_limit=exhaustive_limit)
        assert (len(lower.trials), lower.resumed, len(second.asked)) == (10, 10, 3)


def test_studies_and_spaces_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    search(SMALL, Counted(small_cost), study="gpu/a", budget=12, storage=path)
    other = Counted(small_cost)
    assert search(SMALL, other, study="gpu/b", budget=12, storage=path).resumed == 0
    assert len(other.asked) == 12
    shrunk = search(SMALL[:4], other, study="gpu/a", budget=12, storage=path)
    assert (shrunk.resumed, set(configs_of(shrunk))) == (4, set(SMALL[:4]))


def test_prepare_sees_what_will_be_measured_and_nothing_else(tmp_path: Path) -> None:
    path, cost = tmp_path / "trials.jsonl", draw_surface(5)
    with pytest.raises(KeyboardInterrupt):
        search(SPACE, Counted(cost, stop_at=9), study="s", budget=22, storage=path, batch=4)
    prepared: list[list[Config]] = []
    evaluate = Counted(cost)

    def prepare(configs: object) -> None:
        assert isinstance(configs, list)
        assert sum(map(len, prepared)) == len(evaluate.asked)
        prepared.append(configs)

    result = search(SPACE, evaluate, study="s", budget=22, storage=path, batch=4, prepare=prepare)
    assert [len(p) for p in prepared] == [3, 4, 4, 2]
    assert list(itertools.chain(*prepared)) == evaluate.asked
    assert len(result.trials) == 22


def test_on_trial_sees_every_trial_after_it_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    for resumed in (False, True):
        seen: list[Evaluation] = []

        def note(trial: Evaluation, seen: list[Evaluation] = seen) -> None:
            seen.append(trial)
            assert trial.config.as_dict() in [t.config for t in Journal(path).trials("s")]

        result = search(SMALL, Counted(small_cost), study="s", budget=12, storage=path, on_trial=note)
        assert tuple(seen) == result.trials
        assert all(trial.resumed == resumed for trial in seen)


def search_slowly(path: str, seconds: float = 0.05) -> SearchResult:
    """A search that notes what it begins and ends beside its journal; runs in a process that is killed."""
    cost = draw_surface(8)

    def evaluate(config: Config) -> Outcome:
        with open(f"{path}.measured", "a") as file:
            time.sleep(seconds)
            file.write(f"{config}\n")
        return Outcome(status="ok", median_us=cost(config))

    return search(SPACE, evaluate, study="s", budget=30, storage=path, default=DEFAULT)


def test_kill_9_loses_nothing_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as t; t.search_slowly({str(path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 11:
        assert process.poll() is None, "the search ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    stored = Journal(path).trials("s")
    assert 11 <= len(stored) < 30
    result = search_slowly(str(path), seconds=0.0)
    assert (result.resumed, len(result.trials)) == (len(stored), 30)
    measured = (tmp_path / "trials.jsonl.measured").read_text().splitlines()
    repeated = {line for line in measured if measured.count(line) > 1}
    # A measurement that ended in the instant before it could be stored may be made again, a stored one never.
    assert len(repeated) <= 1
    assert not repeated & {str(KernelConfig.from_dict(t.config)) for t in stored}
    assert bare(result.trials) == bare(search_slowly(str(tmp_path / "whole.jsonl"), seconds=0.0).trials)
