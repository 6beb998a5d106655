"""The pool: what is done first, what is dropped, and workers that hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import notes

from kda_tl.core.isolate import WorkerTimeout
from kda_tl.tune.pool import DeadlineExceeded, WorkerPool

pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., notes.Note]:
    """Notes, and workers that know nothing else, so that they start at once."""
    monkeypatch.setattr("kda_tl.tune.pool.TARGET", "support.notes:run")

    def note(name: str, seconds: float = 0.0, **options: Any) -> notes.Note:
        return notes.Note(path=str(tmp_path / "notes"), name=name, seconds=seconds, **options)

    return note


def test_on_a_gpu_the_pool_works_while_something_is_measured(light: Any, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(KeyboardInterrupt), WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("f")], urgent=False)
        pool.enqueue(map(light, "abc"))
        pool.prioritize(map(light, "cb"))
        assert pool.measure(light("m", 2.0)) == "M"
        assert (tmp_path / "notes").read_text() == "fcbam"  # the first one had begun at once
        assert pool.result(light("a")) == "A" and (tmp_path / "notes").read_text() == "fcbam"
        assert {child.pid for child in psutil.Process().children()} > before
        raise KeyboardInterrupt
    assert {child.pid for child in psutil.Process().children()} == before


def test_on_the_cpu_the_pool_rests_while_something_is_measured(light: Any, tmp_path: Path) -> None:
    a, m = light("a", 0.2), light("m", 0.2)
    with WorkerPool(2, overlap=False) as pool:
        pool.enqueue([a])
        pool.measure(m)
        assert (tmp_path / "notes").read_text() == "m"
        assert pool.result(a) == "A"
        with pytest.raises(DeadlineExceeded):
            pool.result(light("late", 5.0), deadline=time.monotonic() + 0.1)


def test_what_is_dropped_is_not_done_unless_it_is_asked_for_again(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("a", 0.5)])  # begun at once
        pool.enqueue(map(light, "bc"))
        pool.enqueue(map(light, "de"), urgent=False)
        pool.drop(later=False)
        assert pool.result(light("e")) == "E"  # what is not urgent was not dropped
        pool.enqueue([light("f", 0.5)])
        pool.enqueue([light("g")], urgent=False)
        pool.enqueue([light("g")])  # now it is, and precedes d
        assert pool.measure(light("m", 1.0)) == "M"
        pool.enqueue([light("h", 0.5)])
        pool.enqueue([light("i")], urgent=False)
        pool.drop(later=True)
        pool.enqueue([light("c")])
        assert pool.measure(light("n", 1.0)) == "N"
    assert (tmp_path / "notes").read_text() == "aefgdmhcn"


def test_what_would_end_too_late_waits_behind_what_is_not_urgent(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.enqueue([light("a", 0.3)])
        pool.enqueue(map(light, "bc"))
        pool.enqueue(map(light, "de"), urgent=False)
        pool.useful_until = time.monotonic()
        assert pool.result(light("c")) == "C"  # what is waited for comes first all the same
        assert pool.measure(light("m", 1.0)) == "M"
    assert (tmp_path / "notes").read_text() == "acdebm"


def test_a_first_call_that_hangs_is_ended_in_both_kinds_of_workers(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.warm_up(light("w", timeout_s=60.0))
        with pytest.raises(WorkerTimeout, match=r"the call took longer than 0\.3 s"):
            pool.measure(light("m", 20.0, timeout_s=0.3))
        assert isinstance(pool.result(light("a", 20.0, timeout_s=0.3)), WorkerTimeout)
        assert pool.measure(light("n")) == "N" and pool.result(light("b")) == "B"
    assert (tmp_path / "notes").read_text() == "wnb"


def test_a_measuring_process_that_cannot_warm_up_is_replaced(light: Any, tmp_path: Path) -> None:
    with WorkerPool(1, overlap=True) as pool:
        pool.warm_up(light("w", 20.0, timeout_s=0.3))
        assert pool.measure(light("m")) == "M"
    assert (tmp_path / "notes").read_text() == "m"
