"""``kda-tl db``: checks tuning files, and moves records from one database into another."""

from __future__ import annotations

import argparse
from pathlib import Path

from kda_tl.cli._console import ExitCode, Terminal, one_line
from kda_tl.database.file import Document
from kda_tl.database.store import Database, Entry, export, sources, validate, writable_directory
from kda_tl.errors import DatabaseError, InputError
from kda_tl.ops import load_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares ``db validate`` and ``db export``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    text = "check files against the schema, the rules of the database and the templates"
    check = actions.add_parser("validate", help=text, description=f"{text[0].upper()}{text[1:]}.")
    check.add_argument("paths", nargs="*", metavar="PATH", help="files or directories (default: all databases in use)")
    check.add_argument("--json", action="store_true", help="the problems as JSON")
    text = "merge the records of one database into another, as from the user's into tuning_db/"
    move = actions.add_parser("export", help=text, description=f"{text[0].upper()}{text[1:]}.")
    move.add_argument("destination", metavar="DIR", help="directory that takes the records")
    move.add_argument("--from", dest="origin", metavar="DIR", help="database to read (default: where `tune` writes)")
    move.add_argument("--json", action="store_true", help="the files written as JSON")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs the action."""
    return _validate(args, terminal) if args.action == "validate" else _export(args, terminal)


def load_directory(directory: str) -> Database:
    """The database of a directory given by the user.

    Raises:
        DatabaseError: it is not a directory.
    """
    if not Path(directory).is_dir():
        raise DatabaseError(f"{directory} is not a directory: pass one that `kda-tl tune` wrote, or tuning_db/.")
    return Database.load(directory, directory)


def _validate(args: argparse.Namespace, terminal: Terminal) -> int:
    paths = args.paths or [database.path for database in sources()]
    problems = {path: validate(path, find_plan_problem) for path in paths}
    lines = [
        *(sentence for found in problems.values() for sentence in found),
        *(f"{path}: valid." for path, found in problems.items() if not found),
    ]
    terminal.show({"paths": problems}, *lines)
    return ExitCode.USAGE if any(problems.values()) else ExitCode.OK


def find_plan_problem(document: Document, entry: Entry) -> str:
    """Why a plan cannot run what it is stored for, with the templates as they are now; empty if it can.

    Raises:
        CompileError: TileLang, which the templates are written in, is missing or broken.
    """
    from kda_tl.runtime.dispatch import parse_plan

    if document.operator not in load_all():
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
