"""The command line ``kda-tl``: one module a command, imported when called; results on stdout, the rest on stderr."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from kda_tl import __version__
from kda_tl.cli._exit import run_to_end, writing_output

COMMANDS = {
    "tune": "search the fastest plans for this machine and store them",
    "show": "list the tuned plans of all databases",
    "explain": "say which plan a problem runs, where it comes from and why",
    "bench": "time stages and whole calls against the floor and against peers",
    "verify": "check every shipped plan against the reference",
    "source": "print the generated CUDA or C of a stage",
    "compile": "build the kernels of calls ahead of time, without a GPU",
    "doctor": "say what works on this machine and what is missing",
    "db": "validate or export a tuning database",
}
EPILOG = """\
exit codes:
  0  done                        3  environment or GPU does not fit
  1  regression or wrong result  4  no valid config or plan
  2  usage or bad input          5  nothing beats the default
 70  internal error: a bug, please report it
 74  stdout is closed or full (a reader that stops early, as head does, is no error)
130  interrupted, everything measured is kept

first steps:
  kda-tl doctor                  what works here
  kda-tl tune --gpu cpu          tune this machine's CPU target, no GPU needed
  kda-tl tune                    tune the GPU of this machine
"""


class Parser(argparse.ArgumentParser):
    """One whose help is read as far as the reader likes. The argparse of some versions of Python raises then."""

    def _print_message(self, message: str, file: Any = None) -> None:
        with writing_output() if file is sys.stdout else contextlib.suppress(OSError):
            super()._print_message(message, file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the arguments after the program's name are those of the process unless given.

    Returns the exit code, see :class:`kda_tl.cli._exit.ExitCode`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    called = next((word for word in words if word in COMMANDS), "")
    return run_to_end(lambda: _run(words), f"kda-tl {called}".rstrip())


def _run(words: list[str]) -> int:
    args = _parse(words)
    from kda_tl.cli._console import run_command

    return run_command(importlib.import_module(f"{__name__}.{args.command}").run, args)


def _parse(words: list[str]) -> argparse.Namespace:
    """Parses the arguments; only the options of the command that is called are declared."""
    parser = Parser(
        prog="kda-tl",
        description="Kimi Delta Attention kernels, tuned on the machine they run on.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kda-tl {__version__}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    called = next((word for word in words if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if name == called:
            from kda_tl.cli._options import add_arguments

            add_arguments(name, command)
    args = parser.parse_args(words)
    args.words = words
    return args
