"""How a command ends: its exit code, errors as one sentence, and a stdout that is closed, full or read no further.

Nothing here needs a package that may be missing: it is told from here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from kda_tl.core.packages import REQUIREMENTS, describe_failure
from kda_tl.errors import BundleError, DatabaseError, InputError, KdaTlError, UnsupportedError, WrongResultError


class ExitCode(IntEnum):
    """What the process returns."""

    OK = 0
    REGRESSION = 1
    USAGE = 2
    ENVIRONMENT = 3
    NOTHING_VALID = 4
    NO_GAIN = 5
    INTERNAL = 70  # as sysexits.h has it, and so is the next
    OUTPUT = 74
    INTERRUPTED = 130


class OutputError(KdaTlError):
    """The result could not be written to stdout."""


_CODES = (  # of errors; all others are of the environment
    ((InputError, UnsupportedError, DatabaseError, BundleError), ExitCode.USAGE),
    ((WrongResultError,), ExitCode.REGRESSION),
    ((OutputError,), ExitCode.OUTPUT),
)
_interrupted = False


def run_to_end(command: Callable[[], int], name: str) -> int:
    """Runs a command, whatever becomes of it; its sentences on stderr begin with its name. Returns the exit code."""
    if sys.stderr is None:  # closed; else the next file that is opened would take what is written there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stdout is None:
        _tell(name, "stdout is closed: send it to a file, or to /dev/null.")
        return ExitCode.OUTPUT
    with _noting_interrupts():
        code = _run(command, name)
    try:
        with writing_output():
            sys.stdout.flush()
    except OutputError as error:
        _tell(name, one_line(error))
        code = code or ExitCode.OUTPUT
    return int(code)


def _run(command: Callable[[], int], name: str) -> int:
    try:
        return command()
    except SystemExit as stop:
        if stop.code in (ExitCode.OK, ExitCode.USAGE):  # argparse, after --help and after a usage error
            return int(stop.code)
        return _report_bug(name)
    except (KeyboardInterrupt, Exception) as error:
        # packages that are interrupted while they are imported raise what they like
        if _interrupted or isinstance(error, KeyboardInterrupt):
            _tell(name, "interrupted.")
            return ExitCode.INTERRUPTED
        if isinstance(error, KdaTlError):
            _tell(name, one_line(error))
            return next((code for kinds, code in _CODES if isinstance(error, kinds)), ExitCode.ENVIRONMENT)
        if package := _find_package(error):
            more = "" if package == "rich" else "; `kda-tl doctor` says more"  # it writes with rich, too
            _tell(name, f"{describe_failure(package, error)}{more}.")
            return ExitCode.ENVIRONMENT
        return _report_bug(name)


def _report_bug(name: str) -> int:
    """Writes the traceback of what is being handled, and where to take it."""
    with contextlib.suppress(OSError):
        traceback.print_exc()
    _tell(name, "internal error: please report it, with the lines above and the output of `kda-tl doctor --json`.")
    return ExitCode.INTERNAL


def _find_package(error: Exception) -> str:
    """The package whose import failed, if that is the error."""
    root = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    missing = isinstance(error, ModuleNotFoundError) and root != "kda_tl"
    return root if missing or root in REQUIREMENTS else ""


def was_interrupted() -> bool:
    """Whether Ctrl-C was pressed since the command began, whatever became of the exception."""
    return _interrupted


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[None]:
    """Notes Ctrl-C before it is raised: imports, finalizers and callbacks of packages swallow or rename it."""
    global _interrupted
    _interrupted = False
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, as in a shell's background job, or somebody else's
        return

    def note(number: int, frame: Any) -> None:
        global _interrupted
        _interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def writing_output() -> Iterator[None]:
    """Holds what writes to stdout. A reader that has seen enough, `head` for one, is no error: the command goes on.

    Raises:
        OutputError: the result cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        drop_output()
    except OSError as error:
        drop_output()
        raise OutputError(f"the result cannot be written to stdout ({error.strerror or error}).") from error


def drop_output() -> None:
    """Sends what is still to be written to stdout nowhere; Python itself writes its buffer when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _tell(name: str, sentence: str) -> None:
    """Writes a sentence to stderr."""
    text = f"{name}: {sentence}"
    with contextlib.suppress(OSError):
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        print(text, file=sys.stderr, flush=True)


def one_line(error: object) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
