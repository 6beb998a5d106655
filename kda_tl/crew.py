"""Who works for a tuning run: processes that compile and one that measures, all alive from its begin to its end.

One thread waits for all of them, so Ctrl-C can only arrive in one place. On a GPU kernels are compiled while others
are timed; on the CPU target compilers would take the cores that are measured, so they rest meanwhile.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from kda_tl.isolate import PENDING, IsolatedWorker, WorkerError, WorkerFailure, wait_any

TARGET = "kda_tl.trial:run_request"


class Request(Protocol):
    """Work for another process: picklable, and done there by ``run``."""

    @property
    def timeout_s(self) -> float:
        """Wall-clock limit."""

    def run(self) -> Any:
        """Does it; called in the worker."""


class Job(Request, Protocol):
    """Work for the pool, done once a run however often it is asked for."""

    @property
    def key(self) -> Hashable:
        """What makes two jobs the same."""


class OutOfTime(Exception):
    """The deadline of a workload has passed."""


class Crew:
    """A pool and a measuring worker; a context manager.

    Args:
        jobs: processes of the pool.
        overlap: whether the pool works while something is measured.
    """

    def __init__(self, jobs: int, *, overlap: bool) -> None:
        self.overlap = overlap
        self._idle = [IsolatedWorker(TARGET, 0.0) for _ in range(max(jobs, 1))]
        self._busy: dict[IsolatedWorker, Hashable] = {}
        self._urgent: OrderedDict[Hashable, Job] = OrderedDict()
        self._later: OrderedDict[Hashable, Job] = OrderedDict()
        self._asked: set[Hashable] = set()
        self._results: dict[Hashable, Any | WorkerFailure] = {}
        self._meter = IsolatedWorker(TARGET, 0.0)
        self._prepared: Hashable = None

    @property
    def size(self) -> int:
        """Processes of the pool."""
        return len(self._idle) + len(self._busy)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in (*self._idle, *self._busy, self._meter):
            worker.kill()

    def enqueue(self, jobs: Iterable[Job], *, urgent: bool = True) -> None:
        """Has jobs done as soon as a process is free, in order; those that were asked for before are not repeated.

        Args:
            jobs: what to do.
            urgent: before what was enqueued as not urgent.
        """
        for job in jobs:
            key = job.key
            if key not in self._asked:
                self._asked.add(key)
                (self._urgent if urgent else self._later)[key] = job
        if self.overlap:
            self._feed()

    def hurry(self, jobs: Iterable[Job]) -> None:
        """Has jobs done next, in order, whether they were enqueued before or not; nothing is done twice."""
        for job in reversed(list(jobs)):
            key = job.key
            if key not in self._asked or key in self._urgent or key in self._later:
                self._asked.add(key)
                self._later.pop(key, None)
                self._urgent[key] = job
                self._urgent.move_to_end(key, last=False)
        if self.overlap:
            self._feed()

    def result(self, job: Job, *, deadline: float | None = None) -> Any | WorkerFailure:
        """Waits for a job, which is done next if it is not done.

        Args:
            job: enqueued before or not.
            deadline: ``time.monotonic`` after which nobody waits.

        Returns:
            Its result, or its failure, which is not raised.

        Raises:
            OutOfTime: the deadline passed.
        """
        self.hurry([job])
        key = job.key
        while key not in self._results:
            if deadline is not None and time.monotonic() > deadline:
                raise OutOfTime
            self._feed()
            wait_any(list(self._busy))
            self._collect()
        return self._results[key]

    def prepare(self, job: Job) -> None:
        """Runs a job in the measuring process unless the last one prepared there was the same.

        Raises:
            WorkerFailure: as for :meth:`measure`.
        """
        if self._prepared != job.key:
            self._prepared = None
            self.measure(job)
            self._prepared = job.key

    def measure(self, request: Request) -> Any:
        """Runs a request in the measuring process.

        Raises:
            WorkerFailure: it gave no result; see :mod:`kda_tl.isolate`. Unless the request raised, the process is gone.
        """
        while self._busy and not self.overlap:
            wait_any(list(self._busy))
            self._collect()
        self._meter.timeout_s = request.timeout_s
        try:
            self._meter.submit(request)
            while (result := self._meter.poll()) is PENDING:
                wait_any([self._meter, *self._busy])
                self._collect()
                if self.overlap:
                    self._feed()
            return result
        except WorkerError:
            raise
        except BaseException:  # Ctrl-C too: an answer that nobody waits for must not meet the next request
            self.restart_meter()
            raise

    def restart_meter(self) -> None:
        """Ends the measuring process; the next request starts another, unprepared."""
        self._prepared = None
        self._meter.kill()

    def _feed(self) -> None:
        while self._idle and (queue := self._urgent or self._later):
            key, job = queue.popitem(last=False)
            worker = self._idle.pop()
            worker.timeout_s = job.timeout_s
            self._busy[worker] = key
            worker.submit(job)

    def _collect(self) -> None:
        for worker in list(self._busy):
            try:
                result = worker.poll()
            except WorkerFailure as failure:
                result = failure
            if result is not PENDING:
                self._results[self._busy.pop(worker)] = result
                self._idle.append(worker)
