"""What runs inside an isolated worker process, as a script; the coordinator's side is :mod:`kda_tl.core.isolate`."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection


def serve(target: str, handle: int, lifeline: int) -> None:
    """Imports the target, says so, then answers every payload with ("ok", result) or ("error", description).

    ``handle`` is the file descriptor of the socket to the coordinator, ``lifeline`` that of a pipe whose other end
    closes when the coordinator is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a segfault says where, in the output that WorkerCrash carries
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    connection = Connection(handle)
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except BaseException as error:
        connection.send(("error", _describe(error)))
        return
    connection.send(("ready", None))
    while True:
        try:
            payload = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        except Exception as error:  # the payload cannot be unpickled here
            connection.send(("error", _describe(error)))
            continue
        try:
            connection.send(("ok", function(payload)))
        except BaseException as error:
            connection.send(("error", _describe(error)))


def _describe(error: BaseException) -> tuple[str, str, str]:
    return type(error).__name__, str(error), "".join(traceback.format_exception(error))


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the coordinator is gone, however it went
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
