"""Functions run in spawned worker processes, so that a crash or a hang never takes the coordinator down.

A worker is a fresh interpreter (nothing forked: CUDA contexts do not survive a fork) that imports one target,
``"module:function"``, and serves calls over a socket (:mod:`kda_tl.core.worker`). It is started with ``subprocess`` and
not by ``multiprocessing``, which would import the caller's ``__main__`` (pytest, the CLI, a user's unguarded script)
into every worker. Each worker is the leader of its own session: a Ctrl-C in the terminal reaches the coordinator only,
and a kill takes the compilers along that the worker started.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any, TypeVar

from kda_tl.core.packages import importing
from kda_tl.errors import InputError, KdaTlError

with importing("psutil"):  # before there is anything to end
    import psutil

T = TypeVar("T")
_WORKER = str(Path(__file__).with_name("worker.py"))
_START_TIMEOUT_S = 120.0  # importing torch and tilelang takes 5 s on an idle machine, far longer on a cold disk
_POLL_S = 0.2
_EXIT_GRACE_S = 1.0
_OUTPUT_TAIL_BYTES = 4000
PENDING = object()  # what :meth:`IsolatedWorker.poll` gives until the result is there


class WorkerFailure(KdaTlError, RuntimeError):
    """A call in a worker gave no result. ``output`` is the end of what the worker printed during it."""

    def __init__(self, message: str, output: str = "") -> None:
        self.output = output
        super().__init__(message)


class WorkerCrash(WorkerFailure):
    """The worker process died, with ``exit_code`` or by ``signal_name`` (``SIGSEGV``); the other of them is None."""

    def __init__(self, returncode: int, output: str = "") -> None:
        self.exit_code = returncode if returncode >= 0 else None
        names = {int(known): known.name for known in signal.Signals}  # real-time signals have none
        self.signal_name = names.get(-returncode, f"signal {-returncode}") if returncode < 0 else None
        how = f"was ended by {self.signal_name}" if self.signal_name else f"exited with code {returncode}"
        super().__init__(f"the worker process {how}.", output)


class WorkerTimeout(WorkerFailure):
    """The call, or the start of the worker, took longer than allowed; the worker and its children were killed."""


class WorkerError(WorkerFailure):
    """The target raised, could not be imported, or its result cannot be pickled; the worker lives on.

    Holds class name, text and formatted traceback of what was raised there.
    """

    def __init__(self, type_name: str, message: str, remote_traceback: str = "", output: str = "") -> None:
        self.type_name, self.message, self.remote_traceback = type_name, message, remote_traceback
        super().__init__(f"{type_name}: {message}", output)


class _Process:
    """A started interpreter that serves the target, and what it is doing, first of all its first call."""

    def __init__(self, target: str, payload: Any) -> None:
        self.ready = False  # the target is imported
        self.busy = True  # a call is under way
        self.payload = payload  # sent when the worker listens, a large one would block until then
        self.deadline = time.monotonic() + _START_TIMEOUT_S
        self.connection, theirs = Pipe()
        lifeline_theirs, self.lifeline = Pipe(duplex=False)  # nothing is ever sent: its end is our end
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        fcntl.fcntl(self.output, fcntl.F_SETFL, os.O_APPEND)
        handles = (theirs.fileno(), lifeline_theirs.fileno())
        # By its path, so that nothing but the target decides what is imported: kda_tl itself takes torch's 2.5 s.
        code = f"import sys; sys.path[:] = {sys.path!r}; import runpy; runpy.run_path({_WORKER!r}, run_name='__main__')"
        with theirs, lifeline_theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", code, target, *map(str, handles)],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                pass_fds=handles,
                start_new_session=True,
            )

    def send(self, payload: Any, timeout_s: float) -> None:
        """Hands a payload to the listening worker."""
        self.busy, self.deadline = True, time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died: poll finds out how
            self.connection.send(payload)

    def read_output(self) -> str:
        """End of what the worker printed since the call began."""
        start = max(0, os.fstat(self.output.fileno()).st_size - _OUTPUT_TAIL_BYTES)
        return os.pread(self.output.fileno(), _OUTPUT_TAIL_BYTES, start).decode(errors="replace").strip()

    def kill(self) -> int:
        """Kills the process, its group and its descendants, reaps it; returns its exit status."""
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            if self.popen.poll() is None:
                family = psutil.Process(self.popen.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for member in family:  # those that made a session of their own
            with contextlib.suppress(psutil.Error):
                member.kill()
        for stream in (self.connection, self.lifeline, self.output):
            stream.close()
        return self.popen.wait()


class IsolatedWorker:
    """One long-lived worker process; a context manager.

    The process starts with the first call, and again with the next call after a crash, a time-out or an interrupt.

    Args:
        target: ``"module:function"``, importable; called with the payload as its only argument.
        timeout_s: wall-clock limit of one call. Starting the process and importing the target count apart.
    """

    def __init__(self, target: str, timeout_s: float) -> None:
        if not all(target.partition(":")):
            raise InputError(f'target must be "module:function", got {target!r}.')
        self.target = target
        self.timeout_s = timeout_s
        self._process: _Process | None = None

    def __enter__(self) -> IsolatedWorker:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker: an idle one leaves by itself, any other is killed."""
        if self._process and self._process.ready and not self._process.busy:
            self._process.connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.popen.wait(_EXIT_GRACE_S)
        self.kill()

    def kill(self) -> None:
        """Kills the worker and its children now."""
        process, self._process = self._process, None
        if process:
            process.kill()

    def submit(self, payload: Any) -> None:
        """Begins a call of the target on any picklable value; :meth:`poll` ends it, or :meth:`kill` forgets it."""
        if self._process and self._process.ready and self._process.popen.poll() is None:
            os.ftruncate(self._process.output.fileno(), 0)
            self._process.send(payload, self.timeout_s)
        else:
            self.kill()
            self._process = _Process(self.target, payload)

    def poll(self) -> Any:
        """The result of the call if it is there, else PENDING; raises a kind of WorkerFailure if there is none."""
        process = self._process
        if process is None:
            raise RuntimeError("no call is under way")
        dead = process.popen.poll() is not None  # asked before the socket, which may hold a last answer
        try:
            if process.connection.poll():
                return self._receive(process)
        except (EOFError, ConnectionResetError):
            dead = True
        if dead:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(_EXIT_GRACE_S)
            output, self._process = process.read_output(), None
            raise WorkerCrash(process.kill(), output)
        if time.monotonic() > process.deadline:
            output = process.read_output()
            self.kill()
            what, limit_s = ("the call", self.timeout_s) if process.ready else ("starting the worker", _START_TIMEOUT_S)
            raise WorkerTimeout(f"{what} took longer than {limit_s:g} s; the worker was killed.", output)
        return PENDING

    def _receive(self, process: _Process) -> Any:
        kind, value = process.connection.recv()
        if kind == "ready":
            process.ready = True
            process.send(process.payload, self.timeout_s)
            process.payload = None
            return PENDING
        process.busy = False
        if kind == "error":
            type_name, message, remote_traceback = value
            raise WorkerError(type_name, message, remote_traceback, process.read_output())
        return value


def map_pool(
    target: str, payloads: Sequence[Any], *, jobs: int, timeout_s: float
) -> Generator[tuple[int, Any | WorkerFailure], None, None]:
    """Runs a target on many payloads in isolated workers; yields (index, result or failure) as they end.

    A failure is yielded, never raised, and costs only its own payload. Leaving the loop early kills the workers, of
    which there are ``jobs``, at least 1. Other arguments as for :class:`IsolatedWorker`.
    """
    waiting = deque(enumerate(payloads))
    busy: dict[IsolatedWorker, int] = {}

    def feed(worker: IsolatedWorker) -> None:
        if waiting:
            busy[worker], payload = waiting.popleft()
            worker.submit(payload)

    with contextlib.ExitStack() as stack:
        for _ in range(min(max(jobs, 1), len(waiting))):
            feed(stack.enter_context(IsolatedWorker(target, timeout_s)))
        while busy:
            wait_any(busy)
            for worker, index, result in collect(busy):
                feed(worker)  # before the caller takes its time with the result
                yield index, result


def collect(busy: dict[IsolatedWorker, T]) -> Iterator[tuple[IsolatedWorker, T, Any | WorkerFailure]]:
    """Takes out the workers whose calls have ended; yields each with what it was busy with, and result or failure."""
    for worker in list(busy):
        try:
            result = worker.poll()
        except WorkerFailure as failure:
            result = failure
        if result is not PENDING:
            yield worker, busy.pop(worker), result


def wait_any(workers: Iterable[IsolatedWorker]) -> None:
    """Sleeps until one of the workers may have news: a message, the end of its process, or a deadline."""
    # The cap is for a worker that died while a grandchild holds its socket open: no message comes, only a zombie.
    processes = [worker._process for worker in workers if worker._process]
    remaining = min([_POLL_S, *(process.deadline - time.monotonic() for process in processes)])
    wait([process.connection for process in processes], timeout=max(0.0, remaining))
