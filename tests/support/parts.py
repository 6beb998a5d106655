"""Which tests a run takes: ``pytest --part``. What ``test`` leaves out is the rest, which the shards divide.

``@pytest.mark.rest`` marks a test that ``make test`` leaves to ``make test-shard`` and ``make test-all``;
``@pytest.mark.rest(draws=2)`` one with a grid of parameters, of which ``make test`` draws two by the run's seed;
``@pytest.mark.rest(draws=2, per="direction")`` two of each value of a parameter.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Sequence

import pytest

SEED_VARIABLE = "KDA_TL_TEST_SEED"
HELP = "test (the default): what make test runs; 2/4: the second of four shards of the rest; all: everything"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="test", metavar="test|K/N|all", help=HELP)


def parse_shard(part: str) -> tuple[int, int] | None:
    """(number, count) of a shard, counted from 1; None for the parts that have a name.

    Raises:
        pytest.UsageError: there is no such part.
    """
    if part in ("test", "all"):
        return None
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"--part {part}: no such part. {HELP}.")
    return int(match[1]), int(match[2])


def describe(part: str) -> str:
    """What is run, and what is left to whom, in one line."""
    shard = parse_shard(part)
    if part == "all":
        return "part: all; nothing is left to another part"
    if shard is None:
        return "part: test; the rest, of whose grids it draws, is left to make test-shard and make test-all"
    number, count = shard
    return (
        f"part: shard {number} of {count} of the rest; what is not rest is left to make test, the rest to other shards"
    )


def shard_of(node_id: str, count: int) -> int:
    """The shard of a test, from 1: the same on every machine, whatever other tests there are."""
    return int.from_bytes(hashlib.sha256(node_id.encode()).digest()[:8], "big") % count + 1


def name_grid(item: pytest.Item) -> str:
    """The test and, where draws are per value of a parameter, that value."""
    marker, name = item.get_closest_marker("rest"), item.nodeid.partition("[")[0]
    assert marker is not None
    if "per" not in marker.kwargs:
        return name
    value = item.callspec.params[marker.kwargs["per"]]
    if not isinstance(value, str | int):  # of an object each process would have another text, and draw other tests
        raise pytest.UsageError(f"{name}: draws per {marker.kwargs['per']} need values that are words or numbers.")
    return f"{name}[{value}"


def draw(name: str, grid: Sequence[pytest.Item], draws: int) -> list[pytest.Item]:
    """Points of a test's grid, by the run's seed."""
    rng = random.Random(f"{os.environ[SEED_VARIABLE]}/{name}")
    return rng.sample(list(grid), min(draws, len(grid)))


def select(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """The tests of a part, in their order."""
    if part == "all":
        return list(items)
    shard = parse_shard(part)
    rest = [item for item in items if item.get_closest_marker("rest")]
    if shard:
        number, count = shard
        return [item for item in rest if shard_of(item.nodeid, count) == number]
    grids: dict[str, list[pytest.Item]] = {}
    for item in rest:
        grids.setdefault(name_grid(item), []).append(item)
    left = set(rest)
    for name, grid in grids.items():
        marker = grid[0].get_closest_marker("rest")
        assert marker is not None
        left.difference_update(draw(name, grid, marker.kwargs.get("draws", 0)))
    return [item for item in items if item not in left]


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes from a run what is not of its part."""
    kept = select(items, config.getoption("--part"))
    chosen = set(kept)
    if left := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
