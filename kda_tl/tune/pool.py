"""Who works for a tuning run: processes that compile and one that measures, all alive from its begin to its end.

One thread waits for all of them, so Ctrl-C can only arrive in one place. On a GPU kernels are compiled while others
are timed; on the CPU target compilers would take the cores that are measured, so they rest meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from kda_tl.core.isolate import PENDING, IsolatedWorker, WorkerError, WorkerFailure, collect, wait_any

TARGET = "kda_tl.tune.requests:run_request"


class Request(Protocol):
    """Work for another process: picklable, and done there by ``run``, within the wall-clock limit."""

    @property
    def timeout_s(self) -> float: ...

    def run(self) -> Any: ...


class Job(Request, Protocol):
    """Work for the pool, done once a run however often it is asked for; two jobs of one key are the same."""

    @property
    def key(self) -> Hashable: ...


class DeadlineExceeded(Exception):
    """The deadline of a workload has passed."""


class WorkerPool:
    """A pool of so many processes and a measuring worker; with ``overlap`` both work at a time. A context manager."""

    def __init__(self, jobs: int, *, overlap: bool) -> None:
        self.overlap = overlap
        self._idle = [IsolatedWorker(TARGET, 0.0) for _ in range(max(jobs, 1))]
        self._busy: dict[IsolatedWorker, Hashable] = {}
        self._urgent: OrderedDict[Hashable, Job] = OrderedDict()
        self._later: OrderedDict[Hashable, Job] = OrderedDict()
        self._asked: set[Hashable] = set()
        self._results: dict[Hashable, Any | WorkerFailure] = {}
        self._timer = IsolatedWorker(TARGET, 0.0)
        self._warming = False
        self._prepared: Request | None = None
        self.useful_until: float | None = None  # urgent jobs that will not end by then wait behind those that are not

    @property
    def size(self) -> int:
        """Processes of the pool."""
        return len(self._idle) + len(self._busy)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for worker in (*self._idle, *self._busy, self._timer):
            worker.kill()

    def enqueue(self, jobs: Iterable[Job], *, urgent: bool = True) -> None:
        """Has jobs done as soon as a process is free, in order, urgent ones first; none is done twice."""
        for job in jobs:
            key = job.key
            if key not in self._asked or (urgent and key in self._later):
                self._later.pop(key, None)
                self._asked.add(key)
                (self._urgent if urgent else self._later)[key] = job
        if self.overlap:
            self._feed()

    def drop(self, *, later: bool) -> None:
        """Forgets urgent jobs that nobody has begun, ``later`` the others too: what is next shall not wait for them."""
        for queue in (self._urgent, self._later) if later else (self._urgent,):
            self._asked.difference_update(queue)
            queue.clear()

    def finished(self, key: Hashable) -> bool:
        """Whether the job of this key was done, or failed."""
        return key in self._results

    def mean_result(self) -> float | None:
        """Mean of the results that are numbers: of jobs that compile, the seconds that one takes."""
        numbers = [result for result in self._results.values() if isinstance(result, float)]
        return sum(numbers) / len(numbers) if numbers else None

    def prioritize(self, jobs: Iterable[Job]) -> None:
        """Has jobs done next, in order, whether they were enqueued before or not; nothing is done twice."""
        self._put_first(jobs)
        if self.overlap:
            self._feed()

    def _put_first(self, jobs: Iterable[Job]) -> None:
        for job in reversed(list(jobs)):
            key = job.key
            if key not in self._asked or key in self._urgent or key in self._later:
                self._asked.add(key)
                self._later.pop(key, None)
                self._urgent[key] = job
                self._urgent.move_to_end(key, last=False)

    def result(self, job: Job, *, deadline: float | None = None) -> Any | WorkerFailure:
        """Waits for a job, enqueued before or not, and has it done next; returns its result, or its failure.

        Raises DeadlineExceeded when ``time.monotonic`` passes the deadline.
        """
        self._put_first([job])
        key = job.key
        while key not in self._results:
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded
            self._feed(first=key)
            self._wait()
        return self._results[key]

    def warm_up(self, request: Request) -> None:
        """Starts the measuring process ahead of its first request, with one whose result does not matter."""
        self._timer.timeout_s = request.timeout_s
        self._timer.submit(request)
        self._warming = True

    def await_warm(self) -> None:
        """Waits for :meth:`warm_up`; what is wrong with it shows in the next request."""
        if self._warming:
            self._warming = False
            with contextlib.suppress(WorkerFailure):
                self._await_timer()

    def prepare(self, request: Request) -> None:
        """Runs a request in the measuring process unless the last one prepared there was equal; see :meth:`measure`."""
        if self._prepared != request:
            self._prepared = None
            self.measure(request)
            self._prepared = request

    def measure(self, request: Request) -> Any:
        """Runs a request in the measuring process.

        Raises WorkerFailure if it gives no result; unless the request itself raised, the process is then gone.
        """
        while self._busy and not self.overlap:
            self._wait()
        try:
            self.await_warm()
            self._timer.timeout_s = request.timeout_s
            self._timer.submit(request)
            return self._await_timer()
        except WorkerError:
            raise
        except BaseException:  # Ctrl-C too: an answer that nobody waits for must not meet the next request
            self.restart_timer()
            raise

    def _await_timer(self) -> Any:
        while (result := self._timer.poll()) is PENDING:
            self._wait(self._timer)
            if self.overlap:
                self._feed()
        return result

    def restart_timer(self) -> None:
        """Ends the measuring process; the next request starts another, unprepared."""
        self._prepared, self._warming = None, False
        self._timer.kill()

    def _feed(self, first: Hashable = None) -> None:
        while self._idle and (self._urgent or self._later):
            late = self._later and first not in self._urgent and self._is_late()
            key, job = (self._later if late else self._urgent or self._later).popitem(last=False)
            worker = self._idle.pop()
            worker.timeout_s = job.timeout_s
            self._busy[worker] = key
            worker.submit(job)

    def _is_late(self) -> bool:
        return self.useful_until is not None and time.monotonic() + (self.mean_result() or 0.0) > self.useful_until

    def _wait(self, *others: IsolatedWorker) -> None:
        """Waits for news of the pool, or of other workers, and takes what the pool has done."""
        wait_any([*others, *self._busy])
        for worker, key, result in collect(self._busy):
            self._results[key] = result
            self._idle.append(worker)
