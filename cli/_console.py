"""What all commands share: the two streams, tables, and how numbers are written."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table

from kda_tl.cli._exit import ExitCode as ExitCode
from kda_tl.cli._exit import one_line as one_line
from kda_tl.cli._exit import writing_output
from kda_tl.core.stage import Config
from kda_tl.errors import KdaTlWarning

WIDTH_OFF_TTY = 120  # logs are read in editors and on web pages; $COLUMNS says otherwise


@dataclass(frozen=True, kw_only=True)
class Terminal:
    """Where a command writes: results to ``out``, all else to ``err``; with ``json`` the result is one JSON value."""

    out: Console
    err: Console
    json: bool = False

    def show(self, value: Any, *tables: Any) -> None:
        """Writes the result: tables and lines for people, or the same as JSON."""
        if self.json:
            self.write(to_json(value))
        self.print(*tables)

    def write(self, text: str) -> None:
        """Writes text to stdout as it is."""
        with writing_output():
            self.out.file.write(text)

    def print(self, *tables: Any) -> None:
        """Writes tables and lines for people to stdout; where that is one JSON value, nothing."""
        for table in () if self.json else tables:
            with writing_output():  # the end of a capture flushes the file
                if self.out.is_terminal:
                    self.out.print(table)
                    continue
                with self.out.capture() as captured:
                    self.out.print(table, soft_wrap=isinstance(table, str))
                self.out.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())

    def note(self, text: str, *, cut: bool = False) -> None:
        """Writes a line to stderr, on a terminal cut at its width if asked; nothing ends for one that is lost."""
        wrap: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if cut else {}
        with suppress(OSError):
            self.err.print(text, **(wrap if self.err.is_terminal else {"soft_wrap": True}))


def run_command(run: Callable[[argparse.Namespace, Terminal], int], args: argparse.Namespace) -> int:
    """Runs a command with its streams; returns its exit code."""
    terminal = Terminal(out=_open(sys.stdout), err=_open(sys.stderr), json=getattr(args, "json", None) is True)
    with _warnings_as_notes(terminal):
        return run(args, terminal)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises what was raised; rich would end the process with the code of a wrong result."""
        raise


def _open(file: IO[str]) -> Console:
    """A console that writes plain text off a terminal, whatever $FORCE_COLOR says."""
    tty = file.isatty()
    width = None if tty or os.environ.get("COLUMNS", "").isdigit() else WIDTH_OFF_TTY
    return _Console(file=file, force_terminal=None if tty else False, width=width, highlight=False, markup=False)


@contextmanager
def _warnings_as_notes(terminal: Terminal) -> Iterator[None]:
    """Warnings of kda_tl are read by people here: one line each, without the place in the code."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, KdaTlWarning):
                terminal.note(f"warning: {message}")
            else:
                show(message, category, *where, **more)

        warnings.showwarning = note
        yield


def to_json(value: Any) -> str:
    """Indented JSON; records become objects, and numbers that JSON has no word for become strings."""
    return json.dumps(_plain(value), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "as_dict"):  # the form in which it is stored
        return _plain(value.as_dict())
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def make_table(*columns: str, right: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table whose columns are as wide as their content; those named in ``right`` hold numbers."""
    style: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "show_edge": False}
    table = Table(header_style="bold", show_header=any(columns), **style)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def format_config(config: Config, between: str = " ") -> str:
    """The fields of a config: ``BV=64 num_stages=2``."""
    return between.join(f"{name}={value}" for name, value in config.as_dict().items())


def format_count(count: int, noun: str) -> str:
    """``1 plan``, ``2 plans``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_chunks(plan: Mapping[str, Any]) -> str:
    """Chunk sizes of a stored plan, if it has chunks, and whether it has results kept."""
    return (f"{plan['BT']}/{plan['BC']}" if plan["BT"] else "") + (" kept" if plan.get("kept") else "")


def format_us(us: float | None) -> str:
    """Microseconds with a unit that leaves three or four digits."""
    if us is None or not math.isfinite(us):
        return "-"
    if us < 1e6:
        return f"{us:.1f} us" if us < 1e3 else f"{us * 1e-3:.1f} ms"
    return f"{us * 1e-6:.2f} s"


def format_ratio(ratio: float | None) -> str:
    """How many times faster."""
    return "-" if ratio is None or not math.isfinite(ratio) else f"{ratio:.2f}x"


def format_number(value: float) -> str:
    """Three digits, never as a power of ten."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_error(error: float | None, digits: int = 1) -> str:
    """A relative error, with digits after its point."""
    return "-" if error is None else f"{error:.{digits}e}"


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
