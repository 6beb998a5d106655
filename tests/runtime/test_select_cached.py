"""The plan of a call is chosen once: what is remembered of it, and which contexts are part of that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.cases import make_entry
from support.dispatch_cases import H200, PROBLEM, make_database, make_plan

import kda_tl
from kda_tl.errors import KdaTlWarning
from kda_tl.runtime import dispatch
from kda_tl.runtime.dispatch import Pin, select_cached


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process has made no choice yet, and a compiler is here."""

    def forget() -> None:
        dispatch._select.cache_clear()
        dispatch._can_compile.cache_clear()
        dispatch._is_strict.cache_clear()

    monkeypatch.setattr(dispatch, "find_compiler", lambda device: "/bin/true")
    forget()
    yield
    forget()


# The process's choice


def test_choose_is_cached_and_follows_its_context(tmp_path: Path, forgetful: None) -> None:
    problem = replace(PROBLEM, H=3, HV=3, K=48, V=48)  # nothing is shipped for it
    plan = make_plan(BT=32, problem=problem)
    database = make_database(tmp_path, make_entry(problem, plan))
    default = select_cached(problem, H200)
    assert default.step == "default" and select_cached(problem, H200) is default
    with kda_tl.use(database):
        tuned = select_cached(problem, H200)
        assert tuned.plan == plan and select_cached(problem, H200) is tuned
        assert select_cached(problem, H200, 16).plan.BT == 16
        with kda_tl.pin(make_plan(BT=64, BC=8, problem=problem)):
            assert select_cached(problem, H200).step == "pinned"
        assert select_cached(problem, H200) is tuned
    assert select_cached(problem, H200) is default


def test_pins_nest_and_end_with_an_error() -> None:
    with pytest.raises(RuntimeError), kda_tl.pin(numerics="a"):
        with kda_tl.pin(make_plan()):
            assert dispatch.context()[1].plan == make_plan()
        assert dispatch.context()[1] == Pin(numerics="a")
        raise RuntimeError
    assert dispatch.context()[1] is None


def test_stale_plan_warns_once(tmp_path: Path, forgetful: None) -> None:
    database = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=32), stale=True))
    with kda_tl.use(database):
        with pytest.warns(KdaTlWarning, match="is stale: fwd_gate.*kda-tl tune --stale"):
            assert select_cached(PROBLEM, H200).plan == make_plan(BT=32)
        select_cached(PROBLEM, H200)


def test_strict_is_read_from_the_environment(tmp_path: Path, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    database = make_database(tmp_path, make_entry(PROBLEM, make_plan(BT=32), stale=True))
    monkeypatch.setenv("KDA_TL_STRICT", "1")
    with kda_tl.use(database):
        assert "KDA_TL_STRICT=1" in select_cached(PROBLEM, H200).passed_over[0]


def test_cached_choice_costs_microseconds(forgetful: None) -> None:
    """Loose: the figure that counts, 3 us, is measured where calls are fast enough to notice (tests/gpu)."""
    select_cached(PROBLEM, H200)
    samples = []
    for _ in range(50):
        start = time.perf_counter()
        for _ in range(20):
            select_cached(PROBLEM, H200)
        samples.append((time.perf_counter() - start) / 20)
    assert statistics.median(samples) < 50e-6


def test_memory_is_bounded(forgetful: None) -> None:
    for tokens in range(1, 30):
        assert select_cached(replace(PROBLEM, tokens=tokens, longest=tokens), H200).plan is not None
    limit = dispatch._select.cache_info().maxsize
    assert dispatch._select.cache_info().currsize == 29 and limit is not None and limit <= 4096
