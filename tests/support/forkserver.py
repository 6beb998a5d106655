"""Worker processes that one loaded process forks: torch and tilelang come once a test process, not once a worker (5 s).

Stands in for ``subprocess`` in :mod:`kda_tl.core.isolate`. A worker has what it has without this: a session of its own,
the descriptors that it is given and no others, and the environment of the moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

PRELOADED = ("torch", "tilelang", "kda_tl.tune.requests")
LONGEST = 1 << 18  # bytes of a message: the environment above all
FIRST = 100  # descriptors from here on hold those that come, until they have their numbers


class _Server:
    """The process that forks, and the socket to it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        handle = theirs.fileno()
        code = f"import sys; sys.path[:] = {sys.path!r}; from support import forkserver; forkserver.serve({handle})"
        one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a second one would not be copied by a fork
        with theirs:
            argv = [sys.executable, "-c", code]
            subprocess.Popen(argv, pass_fds=[handle], stdin=subprocess.DEVNULL, env=one_thread)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            return json.loads(self._socket.recv(LONGEST))


_server: _Server | None = None


class Popen:
    """As ``subprocess.Popen`` of ``python -c code arguments``, as far as isolate asks for it."""

    def __init__(
        self, argv: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes], pass_fds: Sequence[int], **_: Any
    ) -> None:
        global _server
        _server = self._server = _server or _Server()
        descriptors = [os.open(os.devnull, os.O_RDONLY), stdout.fileno(), stderr.fileno(), *pass_fds]
        request = {"code": argv[2], "argv": argv[2:], "numbers": [0, 1, 2, *pass_fds], "environment": dict(os.environ)}
        self.pid: int = self._server.ask(request, descriptors)
        self.returncode: int | None = None
        os.close(descriptors[0])

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (timeout or 1e9)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            time.sleep(0.005)
        return status


class FakeSubprocess:
    """What isolate takes from ``subprocess``."""

    Popen = Popen
    DEVNULL = subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired


def serve(handle: int) -> None:
    """Forks a worker for every request, and says how those ended that are asked after, until the tests are gone."""
    for name in PRELOADED:
        __import__(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        raise RuntimeError(f"{threads} threads: a fork would copy one of them alone")
    connection = socket.socket(fileno=handle)
    while True:
        message, descriptors, *_ = socket.recv_fds(connection, LONGEST, 16)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "poll" in request:
            answer: int | None = None
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                connection.close()
                _run(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(answer).encode())


def _run(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """The worker: never returns."""
    status = 1
    try:
        os.setsid()
        for n, descriptor in enumerate(descriptors):  # aside first: a number may be another one's place
            os.dup2(descriptor, FIRST + n)
            os.close(descriptor)
        for n, number in enumerate(request["numbers"]):
            os.dup2(FIRST + n, number)
            os.close(FIRST + n)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["-c", *request["argv"][1:]]
        exec(compile(request["code"], "<worker>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
