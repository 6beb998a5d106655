"""Kernels made side by side. TVM works on one kernel a process, so all kernels but one have worker processes.

A worker imports PyTorch and TileLang first, for some seconds; the kernel that is made here spares them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from kda_tl.bundle.manifest import Entry
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import CompileError
from kda_tl.runtime.binary import compile_library, explaining, generate

Job = tuple[Stage, Case, Config]  # what a kernel is made of
Library = tuple[bytes, Entry]

TARGET = "kda_tl.runtime.parallel:make_library"
TIMEOUT_S = 600.0  # the longest kernel takes a minute on a busy core
_log = logging.getLogger("kda_tl")


def make_library(job: Job) -> Library:
    """A kernel's library and its entry; runs in worker processes too. Raises CompileError."""
    with explaining(*job):
        return compile_library(generate(*job))


def make_libraries(jobs: Sequence[Job]) -> Iterator[tuple[int, Library | CompileError]]:
    """Libraries of kernels, each with its place among the jobs, as they end; an error costs only its own kernel.

    The kernel whose stage has most tensors, which mostly takes longest, is made here, in a thread: this one attends to
    the workers. So is one whose worker died.
    """
    if len(jobs) < 2:
        yield from ((i, _try(job)) for i, job in enumerate(jobs))
        return
    from kda_tl.core.isolate import WorkerError, WorkerFailure, map_pool

    first, *others = sorted(range(len(jobs)), key=lambda i: -len(jobs[i][0].specs))
    with ThreadPoolExecutor(max_workers=1) as here:
        own = here.submit(_try, jobs[first])
        workers = min(len(others), os.cpu_count() or 1)
        for i, result in map_pool(TARGET, [jobs[i] for i in others], jobs=workers, timeout_s=TIMEOUT_S):
            if isinstance(result, WorkerError):
                yield others[i], CompileError(result.message)
            elif isinstance(result, WorkerFailure):
                _log.warning("%s is compiled again, in this process: %s", jobs[others[i]][0].name, result)
                yield others[i], here.submit(_try, jobs[others[i]]).result()
            else:
                yield others[i], result
        yield first, own.result()


def _try(job: Job) -> Library | CompileError:
    try:
        return make_library(job)
    except CompileError as error:
        return error
