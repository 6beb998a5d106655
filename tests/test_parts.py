"""The parts of the suite: what ``make test`` leaves out is in the shards, once, and both are in ``make test-all``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support import parts


@dataclass(frozen=True)
class Item:
    """As much of a collected test as parts are chosen by."""

    nodeid: str
    draws: int | None = None  # None: not of the rest
    per: str | None = None

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"direction": self.nodeid.partition("[")[2].partition("-")[0]})

    def get_closest_marker(self, name: str) -> Any:
        assert name == "rest"
        options = {} if self.per is None else {"per": self.per}
        return None if self.draws is None else pytest.mark.rest(draws=self.draws, **options).mark


COMMON = [Item(f"tests/test_a.py::test_common[{n}]") for n in range(5)]
LEFT = [Item("tests/test_a.py::test_left", 0)]
GRIDS = [Item(f"tests/test_{name}.py::test_grid[{n}]", 2) for name in "ab" for n in range(100)]
ITEMS: Any = [*LEFT, *COMMON, *GRIDS]


@pytest.mark.parametrize("count", [1, 4, 7])
def test_shards_are_the_rest_and_nothing_is_twice(count: int) -> None:
    shards = [parts.select(ITEMS, f"{number}/{count}") for number in range(1, count + 1)]
    assert Counter(item for shard in shards for item in shard) == Counter([*LEFT, *GRIDS])
    assert all(len(shard) > len(GRIDS) / count / 2 for shard in shards), "they are of about one size"
    assert set(parts.select(ITEMS, "test")) | {item for shard in shards for item in shard} == set(ITEMS)
    assert parts.select(ITEMS, "all") == ITEMS


def test_make_test_draws_from_every_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set()
    for seed in range(20):
        monkeypatch.setenv(parts.SEED_VARIABLE, str(seed))
        chosen: list[Any] = parts.select(ITEMS, "test")
        assert chosen == parts.select(ITEMS, "test") and [item for item in chosen if item.draws is None] == COMMON
        grids = Counter(item.nodeid.partition("[")[0] for item in chosen if item.draws is not None)
        assert grids == {"tests/test_a.py::test_grid": 2, "tests/test_b.py::test_grid": 2}
        drawn.update(chosen)
    assert len(drawn) > len(COMMON) + 20, "another seed draws others"


def test_draws_per_object_are_refused() -> None:
    """Its text has an address, so that processes would draw other tests."""
    item: Any = SimpleNamespace(
        nodeid="tests/test_a.py::test_grid[x]",
        callspec=SimpleNamespace(params={"stage": object()}),
        get_closest_marker=lambda name: pytest.mark.rest(draws=1, per="stage").mark,
    )
    with pytest.raises(pytest.UsageError, match="draws per stage need values that are words or numbers"):
        parts.select([item], "test")


def test_a_shard_is_of_the_name_alone() -> None:
    assert [parts.shard_of(item.nodeid, 4) for item in GRIDS[:6]] == [2, 2, 4, 2, 3, 3]


@pytest.mark.parametrize("part", ["0/4", "5/4", "1/0", "2", "", "rest", "1/4 "])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    with pytest.raises(pytest.UsageError, match="no such part"):
        parts.select(ITEMS, part)


def test_every_part_says_what_it_leaves_out() -> None:
    assert "left to make test-shard and make test-all" in parts.describe("test")
    shard = parts.describe("2/4")
    assert "shard 2 of 4" in shard and "left to make test, the rest to other shards" in shard
    assert "nothing is left" in parts.describe("all")


def test_draws_may_be_of_each_value_of_a_parameter() -> None:
    grid: Any = [
        Item(f"tests/test_a.py::test_grid[{way}-{n}]", 2, "direction") for way in ("fwd", "bwd") for n in range(50)
    ]
    drawn = [item.callspec.params["direction"] for item in parts.select(grid, "test")]
    assert Counter(drawn) == {"fwd": 2, "bwd": 2}
