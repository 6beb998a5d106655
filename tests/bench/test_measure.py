"""Measuring: wrong is an error, the timed region holds the launch alone, and intervals hold the truth."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kda_tl.bench import timing
from kda_tl.errors import KdaTlWarning, WrongResultError

CPU = torch.device("cpu")


def test_check_gives_the_largest_relative_error() -> None:
    truth = {"o": torch.tensor([3.0, 4.0]), "ht": torch.tensor([10.0])}
    outputs = {"o": torch.tensor([3.0, 4.1]), "ht": torch.tensor([10.1]), "extra": None}
    assert timing.check(outputs, truth, 0.05) == pytest.approx(0.02, rel=1e-4)
    assert timing.check(outputs, {}, 0.0) == 0.0


@pytest.mark.parametrize(
    ("bad", "said"), [(torch.tensor([3.0, 4.5]), "0.1"), (None, "inf"), (torch.ones(2) / 0, "inf")]
)
def test_check_names_the_wrong_output_and_its_error(bad: torch.Tensor | None, said: str) -> None:
    truth = {"fine": torch.ones(3), "o": torch.tensor([3.0, 4.0])}
    with pytest.raises(WrongResultError, match=rf"\bo\b.* {said} "):
        timing.check({"fine": torch.ones(3), "o": bad}, truth, 0.05)


def test_check_sees_what_was_left_unwritten() -> None:
    poisoned = torch.full((3,), math.nan)
    poisoned[:2] = 1.0
    with pytest.raises(WrongResultError):
        timing.check({"o": poisoned}, {"o": torch.ones(3)}, 1e9)


def test_what_weighs_nothing_is_judged_by_what_would() -> None:
    """Below a root mean square errors count relative to it; at or above it, and without one, to the truth."""
    for size, off, passes in (
        (1e-9, 0.5, True),
        (0.0, 1e-9, True),
        (0.05, 0.5, False),
        (0.005, 0.5, False),
        (1.0, 0.5, False),
    ):
        truth = torch.full((100,), size)
        found = {"transition": truth * (1 + off) if size else truth + off}
        context = contextlib.nullcontext() if passes else pytest.raises(WrongResultError, match="transition is off by")
        with context:
            assert timing.check(found, {"transition": truth}, 0.01, {"transition": 0.05}) < 1e-6
    with pytest.raises(WrongResultError):
        timing.check({"o": torch.full((100,), 1.5e-9)}, {"o": torch.full((100,), 1e-9)}, 0.01, {"transition": 0.05})


def test_time_launch_times_the_launch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def flush() -> None:
        calls.append("flush")
        time.sleep(0.02)

    def launch() -> None:
        calls.append("launch")
        time.sleep(0.005)

    monkeypatch.setattr(timing, "_flusher", lambda device: flush)
    samples = timing.time_launch(launch, CPU, reps=3, warmup=2)
    assert calls == ["launch"] * 2 + ["flush", "launch"] * 3
    assert len(samples) == 3 and all(5e3 <= sample < 20e3 for sample in samples)
    calls.clear()
    timing.time_launch(launch, CPU, reps=1, warmup=0, flush=False)
    assert calls == ["launch"]


class FakeEvent:
    """A CUDA event on a device whose clock advances by what is enqueued."""

    clock = 0.0
    log: list[str] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.clock
        FakeEvent.log.append("event")

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeEvent.clock, FakeEvent.log = 0.0, []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: FakeEvent.log.append("wait"))
    yield


def enqueue(what: str, ms: float) -> None:
    FakeEvent.clock += ms
    FakeEvent.log.append(what)


def test_gpu_time_is_taken_by_events_around_the_launch(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    durations = itertools.count(1)
    monkeypatch.setattr(timing, "_flusher", lambda device: lambda: enqueue("flush", 100.0))
    samples = timing.time_launch(lambda: enqueue("launch", next(durations)), torch.device("cuda"), reps=3, warmup=1)
    assert samples == [2e3, 3e3, 4e3]
    assert FakeEvent.log == ["launch", *["flush", "event", "launch", "event"] * 3, "wait"]


def test_interleaved_rounds_meet_every_launch_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repetition with a cold cache, and each round's median where it belongs."""
    log, clock = [], 0.0
    durations = {"a": itertools.cycle([9.0, 1.0, 2.0, 30.0]), "b": itertools.cycle([9.0, 5.0, 4.0, 60.0])}

    def launch(name: str) -> None:
        nonlocal clock
        clock += next(durations[name])
        log.append(name)

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock / 1e6))
    monkeypatch.setattr(timing, "_flusher", lambda device: lambda: log.append("~"))
    launches = {name: functools.partial(launch, name) for name in "ab"}
    rounds = timing.time_interleaved(launches, CPU, rounds=3, reps=3)
    one, other = "a~a~a~a", "b~b~b~b"  # a warm-up and three repetitions each
    assert "".join(log) == one + other + other + one + one + other
    assert {name: [round(us, 6) for us in medians] for name, medians in rounds.items()} == {"a": [2] * 3, "b": [5] * 3}
    log.clear()
    timing.time_interleaved(launches, CPU, rounds=1, reps=1, flush=False)
    assert "".join(log) == "aabb"


@pytest.mark.parametrize(("kind", "l2_mib", "flushed_mib"), [("cpu", 0, 32), ("cuda", 50, 256), ("cuda", 100, 400)])
def test_a_flush_writes_more_than_the_cache_holds(
    kind: str, l2_mib: int, flushed_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def pretend(size: int, **options: object) -> torch.Tensor:
        assert options == {"dtype": torch.uint8, "device": torch.device(kind)}
        made.append(empty(size, dtype=torch.uint8))
        return made[-1]

    made: list[torch.Tensor] = []
    monkeypatch.setattr(timing, "_flush_buffers", {})
    monkeypatch.setattr(torch, "empty", pretend)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=l2_mib << 20))
    flush = timing._flusher(torch.device(kind))
    (buffer,) = made
    for _ in range(2):
        buffer.fill_(1)
        flush()
        assert not buffer.any()
    assert buffer.numel() == flushed_mib << 20
    timing._flusher(torch.device(kind))
    assert len(made) == 1


def test_host_time_of_a_call() -> None:
    assert 1e3 <= timing.time_host(lambda: time.sleep(1e-3), CPU, reps=5) < 10e3


def test_summary_is_median_and_its_absolute_deviation() -> None:
    assert timing.summarise([1.0, 100.0, 2.0, 4.0, 3.0]) == (3.0, 1.0)


def test_ratio_interval_holds_95_percent_of_the_bootstrap() -> None:
    """Of the median of 9 rounds: it is the lowest in .1 % of all draws and one of the lowest two in 3 %."""
    nine = [float(i) for i in range(1, 10)]
    for seed in range(3):
        assert timing.ratio_ci(nine, [1.0] * 9, seed=seed) == (5.0, 2.0, 8.0)
        assert timing.ratio_ci([1.0] * 9, nine, seed=seed) == (1 / 5, 1 / 8, 1 / 2)


def test_ratio_interval_ignores_what_disturbs_both_alike() -> None:
    drift = np.linspace(1.0, 2.0, 9)
    assert timing.ratio_ci(1.1 * drift, drift) == pytest.approx((1.1, 1.1, 1.1))


def test_the_same_rounds_give_the_same_interval() -> None:
    a, b = 1 + 0.05 * np.random.default_rng(1).standard_normal((2, 9))
    assert len({timing.ratio_ci(a, b) for _ in range(5)}) == 1


def test_gpu_state_is_unknown_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.read_gpu_state() == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(KdaTlWarning, match="clocks and driver are not recorded: pynvml .*pip install 'nvidia-ml-py"):
        assert timing.read_gpu_state() == {}


@pytest.mark.gpu
def test_a_replayed_graph_computes_and_is_timed() -> None:
    x, y = (torch.zeros(1 << 20, device="cuda") for _ in range(2))
    replay = timing.cuda_graph(lambda: torch.add(x, 1, out=y))
    x.fill_(4)
    replay()
    assert bool((y == 5).all())
    samples = timing.time_launch(replay, x.device, reps=20)
    assert 1 < timing.summarise(samples)[0] < 200


@pytest.mark.gpu
def test_a_graph_keeps_what_its_launch_reads() -> None:
    def make() -> tuple[timing.Launch, torch.Tensor]:
        x, y = torch.full((1 << 20,), 3.0, device="cuda"), torch.empty(1 << 20, device="cuda")
        return timing.cuda_graph(lambda: torch.add(x, 1, out=y)), y

    replay, y = make()
    scribble = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(8)]
    replay()
    assert bool((y == 4).all()) and len(scribble) == 8


@pytest.mark.gpu
def test_gpu_state_names_driver_and_clocks() -> None:
    assert {"gpu", "driver", "sm_mhz", "memory_mhz"} <= timing.read_gpu_state().keys()
