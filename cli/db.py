"""``kda-tl db``: checks tuning files, and moves records from one database into another."""

from __future__ import annotations

import argparse

from kda_tl.cli._console import ExitCode, Terminal, one_line
from kda_tl.cli._target import load_directory
from kda_tl.database.file import Document
from kda_tl.database.store import Entry, export, sources, validate, writable_directory
from kda_tl.errors import InputError
from kda_tl.ops import load_declarations
from kda_tl.runtime.dispatch import parse_plan


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the action."""
    return _validate(args, terminal) if args.action == "validate" else _export(args, terminal)


def _validate(args: argparse.Namespace, terminal: Terminal) -> int:
    paths = args.paths or [database.path for database in sources()]
    problems = {path: validate(path, find_plan_problem) for path in paths}
    lines = [sentence for found in problems.values() for sentence in found]
    terminal.show({"paths": problems}, *lines, *(f"{path}: valid." for path, found in problems.items() if not found))
    return ExitCode.USAGE if lines else ExitCode.OK


def find_plan_problem(document: Document, entry: Entry) -> str:
    """Why a plan cannot run what it is stored for, with the templates as they are now; empty if it can."""
    if document.operator not in load_declarations():
        return f"there is no operator {document.operator!r}"
    try:
        parse_plan(entry.plan, entry.key.problem(document.operator, document.direction), document.gpu.as_device())
    except InputError as error:
        return one_line(error)
    return ""


def _export(args: argparse.Namespace, terminal: Terminal) -> int:
    origin = args.origin or str(writable_directory())
    if args.origin:
        load_directory(args.origin)
    files = [str(path) for path in export(origin, args.destination)]
    terminal.show({"from": origin, "files": files}, *(f"wrote {path}" for path in files))
    return ExitCode.OK
