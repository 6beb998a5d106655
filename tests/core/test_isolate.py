"""Isolated workers: whatever the function does to its process, the caller gets an answer and nothing is left behind.

The workers evaluate Python expressions: ``builtins:eval`` is a target like any other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest
from support import notes
from support.calls import call

from kda_tl.core.isolate import (
    IsolatedWorker,
    WorkerCrash,
    WorkerError,
    WorkerFailure,
    WorkerTimeout,
    map_pool,
)
from kda_tl.errors import InputError, KdaTlError
from kda_tl.tune.pool import WorkerPool

pytestmark = pytest.mark.usefixtures("real_processes")

EVAL = "builtins:eval"
PID = "__import__('os').getpid()"
FOREVER = "[0 for _ in iter(int, 1)]"
GENEROUS_S = 60.0


@pytest.fixture
def worker() -> Iterator[IsolatedWorker]:
    with IsolatedWorker(EVAL, GENEROUS_S) as isolated:
        yield isolated


def wait_until_gone(*pids: int) -> None:
    """Fails unless the processes end within a few seconds; zombies of somebody else count as ended."""
    deadline = time.monotonic() + 10
    for pid in pids:
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.02)


def read_pids(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while not path.exists() or len(path.read_text().split("\n")) <= count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(line) for line in path.read_text().split()]


def note_pid(path: Path) -> str:
    """An expression that appends the worker's pid to a file."""
    return f"open({str(path)!r}, 'a').write(str({PID}) + chr(10))"


def start_sleep(path: Path) -> str:
    """An expression that starts a long process in a session of its own and appends its pid to a file."""
    popen = "__import__('subprocess').Popen(['sleep', '100'], start_new_session=True).pid"
    return f"open({str(path)!r}, 'a').write(str({popen}) + chr(10))"


def test_one_process_serves_all_calls(worker: IsolatedWorker) -> None:
    first, second = call(worker, PID), call(worker, PID)
    assert first == second != os.getpid()
    worker.close()
    wait_until_gone(first)
    assert call(worker, PID) != first


def test_an_idle_worker_leaves_in_order(worker: IsolatedWorker, tmp_path: Path) -> None:
    """Libraries remove their temporary files at exit."""
    path = tmp_path / "left"
    call(worker, f"__import__('atexit').register(__import__('pathlib').Path({str(path)!r}).touch) and None")
    worker.close()
    assert path.exists()


@pytest.mark.parametrize(
    ("expression", "exit_code", "signal_name"),
    [
        ("__import__('os')._exit(3)", 3, None),
        ("__import__('os')._exit(0)", 0, None),
        ("__import__('ctypes').string_at(0)", None, "SIGSEGV"),
        ("__import__('os').abort()", None, "SIGABRT"),
        ("__import__('os').kill(__import__('os').getpid(), 9)", None, "SIGKILL"),
        ("__import__('os').kill(__import__('os').getpid(), 40)", None, "signal 40"),
    ],
)
def test_a_crash_is_reported_and_the_next_call_works(
    worker: IsolatedWorker, expression: str, exit_code: int | None, signal_name: str | None
) -> None:
    with pytest.raises(WorkerCrash) as caught:
        call(worker, expression)
    assert (caught.value.exit_code, caught.value.signal_name) == (exit_code, signal_name)
    assert isinstance(caught.value, KdaTlError)
    assert str(exit_code if signal_name is None else signal_name) in str(caught.value)
    assert call(worker, "1 + 1") == 2


def test_a_crash_tells_what_was_printed(worker: IsolatedWorker, capfd: pytest.CaptureFixture[str]) -> None:
    call(worker, "print('of an earlier call', flush=True)")
    with pytest.raises(WorkerCrash) as caught:
        call(worker, "__import__('os').write(2, b'what(): bad tile') and __import__('ctypes').string_at(0)")
    assert caught.value.output.startswith("what(): bad tile")
    assert "Segmentation fault" in caught.value.output
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("expression", [FOREVER, "__import__('ctypes').PyDLL(None).sleep(100)"])
def test_a_hang_is_killed_with_its_children(tmp_path: Path, expression: str) -> None:
    pids = tmp_path / "pids"
    with IsolatedWorker(EVAL, 1.0) as worker:
        assert call(worker, "1 + 1") == 2
        begin = time.monotonic()
        with pytest.raises(WorkerTimeout, match="longer than 1 s"):
            call(worker, f"{note_pid(pids)} and {start_sleep(pids)} and {expression}")
        assert 1.0 <= time.monotonic() - begin < 5.0
        wait_until_gone(*read_pids(pids, 2))
        assert call(worker, "1 + 1") == 2


def test_a_dead_worker_is_noticed_though_a_grandchild_holds_its_socket(worker: IsolatedWorker, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    forked = f"{note_pid(pids)} and __import__('time').sleep(100)"
    with pytest.raises(WorkerCrash, match="code 5"):
        call(worker, f"__import__('os')._exit(5) if __import__('os').fork() else {forked}")
    if pids.exists():  # else the grandchild was killed before it wrote
        wait_until_gone(*read_pids(pids, 1))


def test_an_exception_is_passed_on_and_the_worker_lives(worker: IsolatedWorker) -> None:
    pid = call(worker, PID)
    with pytest.raises(WorkerError) as caught:
        call(worker, "print('before', flush=True) or int('seven')")
    assert caught.value.type_name == "ValueError"
    assert "seven" in caught.value.message
    assert "seven" in caught.value.remote_traceback
    assert caught.value.output == "before"
    for expression, type_name in [("__import__('sys').exit(3)", "SystemExit"), ("lambda: 0", "PicklingError")]:
        with pytest.raises(WorkerError) as caught:
            call(worker, expression)
        assert caught.value.type_name in (type_name, "AttributeError")  # Pythons name unpicklable lambdas differently
    assert call(worker, PID) == pid


@pytest.mark.parametrize(
    ("target", "type_name"), [("no_such_module:f", "ModuleNotFoundError"), ("math:no_such_function", "AttributeError")]
)
def test_a_target_that_cannot_be_imported(target: str, type_name: str) -> None:
    with IsolatedWorker(target, GENEROUS_S) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError) as caught:
                call(worker, 1)
            assert caught.value.type_name == type_name


def test_a_first_call_that_hangs_is_ended_in_its_own_time() -> None:
    """The start of a process may take long, the call that it is started for may not."""
    begin = time.monotonic()
    with IsolatedWorker(EVAL, 0.5) as fresh:
        with pytest.raises(WorkerTimeout, match=r"the call took longer than 0\.5 s"):
            call(fresh, FOREVER)
        assert time.monotonic() - begin < 50  # of the 120 s that a start may take
        assert call(fresh, "1 + 1") == 2


@pytest.mark.parametrize("target", ["math.sqrt", "math:", ":sqrt", ""])
def test_a_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(InputError, match="module:function"):
        IsolatedWorker(target, GENEROUS_S)


def test_a_worker_that_dies_between_calls_is_replaced(worker: IsolatedWorker) -> None:
    pid = call(worker, PID)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert call(worker, PID) != pid


def test_large_values_pass_both_ways() -> None:
    big = bytes(20_000_000)
    with IsolatedWorker("builtins:bytearray", GENEROUS_S) as worker:
        assert call(worker, big) == big  # the first call: the worker is not listening yet
        assert call(worker, big) == big


def test_a_worker_imports_neither_the_caller_nor_what_it_does_not_need(worker: IsolatedWorker) -> None:
    modules = call(worker, "sorted(__import__('sys').modules)")
    assert not {"pytest", "torch", "optuna", "kda_tl", __name__} & set(modules)
    assert call(worker, "__import__('sys').path") == sys.path


def test_ctrl_c_does_not_reach_a_worker(worker: IsolatedWorker) -> None:
    assert call(worker, "__import__('os').kill(__import__('os').getpid(), 2) or 'alive'") == "alive"
    assert call(worker, "__import__('os').getsid(0)") != os.getsid(0)


def test_an_interrupted_call_does_not_answer_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def note(name: str, seconds: float = 0.0) -> notes.Note:
        return notes.Note(path=str(tmp_path / "notes"), name=name, seconds=seconds)

    monkeypatch.setattr("kda_tl.tune.pool.TARGET", "support.notes:run")
    before = set(psutil.Process().children())
    with WorkerPool(1, overlap=True) as pool:
        assert pool.measure(note("a")) == "A"
        (child,) = set(psutil.Process().children()) - before
        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                pool.measure(note("late", 1.0))
        finally:
            signal.signal(signal.SIGALRM, previous)
        wait_until_gone(child.pid)
        assert pool.measure(note("b")) == "B"


COORDINATOR = """
import sys
from kda_tl.core.isolate import PENDING, IsolatedWorker, wait_any
def call(worker, payload):
    worker.submit(payload)
    while worker.poll() is PENDING:
        wait_any([worker])
idle = IsolatedWorker("builtins:eval", 100)
busy = IsolatedWorker("builtins:eval", 100)
call(idle, sys.argv[1])
try:
    call(busy, sys.argv[2])
except KeyboardInterrupt:
    sys.exit("stopped by the user")
"""


def start_coordinator(pids: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A process with an idle worker, and one that hangs beside a child; returns the three pids below it."""
    command = [sys.executable, "-c", COORDINATOR, note_pid(pids)]
    command.append(f"{note_pid(pids)} and {start_sleep(pids).replace('True', 'False')} and {FOREVER}")
    coordinator = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return coordinator, read_pids(pids, 3)


def test_kill_9_of_the_coordinator_ends_everything_below_it(tmp_path: Path) -> None:
    coordinator, pids = start_coordinator(tmp_path / "pids")
    coordinator.kill()
    coordinator.communicate()
    wait_until_gone(*pids)


def test_ctrl_c_in_the_terminal_prints_no_worker_traceback(tmp_path: Path) -> None:
    coordinator, pids = start_coordinator(tmp_path / "pids")
    os.killpg(coordinator.pid, signal.SIGINT)
    _, errors = coordinator.communicate(timeout=30)
    assert errors.strip() == "stopped by the user"
    wait_until_gone(*pids)


def test_a_pool_loses_only_what_fails() -> None:
    expressions = ["10", "__import__('os')._exit(3)", FOREVER, "1 / 0", "11", "__import__('ctypes').string_at(0)", "12"]
    results = dict(map_pool(EVAL, expressions, jobs=2, timeout_s=1.0))
    assert sorted(results) == list(range(7))
    assert [results[i] for i in (0, 4, 6)] == [10, 11, 12]
    kinds = [type(results[i]) for i in (1, 2, 3, 5)]
    assert kinds == [WorkerCrash, WorkerTimeout, WorkerError, WorkerCrash]
    assert all(isinstance(results[i], WorkerFailure) for i in (1, 2, 3, 5))


def test_a_pool_works_in_parallel(tmp_path: Path) -> None:
    def meet(own: str, other: str) -> str:
        """An expression that ends only while the other one runs too."""
        there = f"__import__('os').path.exists({str(tmp_path / other)!r})"
        return f"open({str(tmp_path / own)!r}, 'w') and next(True for _ in iter(int, 1) if {there})"

    results = dict(map_pool(EVAL, [meet("a", "b"), meet("b", "a")], jobs=2, timeout_s=20.0))
    assert results == {0: True, 1: True}


def test_leaving_a_pool_early_ends_its_workers(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    both = f"next(True for _ in iter(int, 1) if open({str(pids)!r}).read().count(chr(10)) == 2)"
    hang = f"{note_pid(pids)} and {FOREVER}"
    pool = map_pool(EVAL, [f"{note_pid(pids)} and {both}", hang, "1"], jobs=2, timeout_s=GENEROUS_S)
    assert next(pool) == (0, True)
    started = read_pids(pids, 2)
    pool.close()
    wait_until_gone(*started)


def test_a_slow_consumer_costs_no_result() -> None:
    seen = []
    for index, result in map_pool(EVAL, ["0", "1", "2"], jobs=1, timeout_s=0.5):
        seen.append((index, result))
        time.sleep(0.7)
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_a_pool_of_nothing() -> None:
    assert list(map_pool(EVAL, [], jobs=3, timeout_s=1.0)) == []
