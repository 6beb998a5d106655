"""``kda-tl show``: the tuned plans of all databases."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kda_tl.cli._console import ExitCode, Terminal, format_chunks, format_error, format_ratio, format_us, make_table
from kda_tl.db import Database, Entry, sources, stale_stages
from kda_tl.lookup import TuningFile
from kda_tl.problem import DTYPES, GATES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--gpu", metavar="NAME", help="only plans of this GPU: cpu, h100, h200, ..., or a slug")
    parser.add_argument("--source", metavar="NAME", help="only this database: overlay, '$KDA_TL_DB', user, packaged")
    parser.add_argument("--db", metavar="DIR", help="the database in this directory instead of the usual ones")
    parser.add_argument("--gate", choices=GATES, help="only plans for this gate mode")
    parser.add_argument("--dtype", choices=DTYPES, help="only plans for this element type")
    parser.add_argument("--stale", action="store_true", help="only plans whose templates changed since")
    parser.add_argument("--json", action="store_true", help="everything that is stored, as JSON")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One entry and where it lies."""

    database: Database
    file: TuningFile
    entry: Entry
    stale: tuple[str, ...]


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Lists the entries that pass the filters."""
    databases = _databases(args.db)
    rows = [row for row in _rows(databases) if _passes(row, args)]
    slugs = _slugs(args.gpu)
    rows = [row for row in rows if slugs is None or row.file.gpu.slug in slugs]
    terminal.show({"plans": [_as_dict(row) for row in rows], "databases": _describe(databases)}, *_tables(rows))
    if not rows:
        asked = ", ".join(f"{database.name} ({database.path})" for database in databases)
        terminal.note(f"No plan is stored for this in: {asked}. `kda-tl tune` finds some.")
    return ExitCode.OK


def _databases(directory: str | None) -> tuple[Database, ...]:
    if directory is None:
        return sources()
    from kda_tl.cli.db import load_directory

    return (load_directory(directory),)


def _rows(databases: Sequence[Database]) -> Iterator[Row]:
    from kda_tl import templates

    current = {name: templates.fingerprint(name) for name in templates.names()}
    for database in databases:
        for file in database.files.values():
            for key in sorted(file.entries):
                entry = file.entries[key]
                yield Row(database=database, file=file, entry=entry, stale=stale_stages(entry, current))


def _slugs(name: str | None) -> tuple[str, ...] | None:
    if name is None:
        return None
    from kda_tl.cli._target import find_known

    return tuple(device.slug for device in find_known(name))


def _passes(row: Row, args: argparse.Namespace) -> bool:
    key = row.entry.key
    return (
        args.source in (None, row.database.name)
        and args.gate in (None, key.gate)
        and args.dtype in (None, key.dtype)
        and (bool(row.stale) or not args.stale)
    )


def _tables(rows: Sequence[Row]) -> Iterator[Any]:
    """One table a file."""
    files: dict[int, list[Row]] = {}
    for row in rows:
        files.setdefault(id(row.file), []).append(row)
    for group in files.values():
        first = group[0]
        title = f"{first.file.gpu.slug}  {first.file.operator} {first.file.direction}  ({first.database.name})"
        yield title
        right = ("time", "gain", "error")
        table = make_table("KxV, type, gate, heads, tokens", "plan", *right, "", right=right)
        for row in group:
            table.add_row(*_cells(row.entry), "stale" if row.stale else "")
        yield table
        yield f"{first.file.path}\n"


def _cells(entry: Entry) -> tuple[str, ...]:
    return (
        format_key(entry),
        f"{entry.plan['pipeline']} {format_chunks(entry.plan)}",
        format_us(entry.time_us.median),
        format_ratio(entry.vs_default.ratio),
        format_error(entry.check.max_rel_err),
    )


def format_key(entry: Entry) -> str:
    """The key as short as it can be told: ``128x128 bf16 safe h32 t8192``."""
    key = entry.key
    parts = [f"{key.K}x{key.V}", key.dtype, key.gate]
    parts += [f"g{key.group}"] if key.group > 1 else []
    parts += [f"h{key.heads_bucket}", f"t{key.tokens_bucket}"]
    parts += ["packed"] if key.varlen else []
    parts += [f"max{key.longest_bucket}"] if key.longest_bucket != key.tokens_bucket else []
    return " ".join(parts)


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "source": row.database.name,
        "path": row.file.path,
        "gpu": vars(row.file.gpu),
        "operator": row.file.operator,
        "pass": row.file.direction,
        "stale": list(row.stale),
        **row.entry.as_dict(),
    }


def _describe(databases: Sequence[Database]) -> list[dict[str, Any]]:
    return [{"name": db.name, "path": db.path, "skipped": list(db.skipped)} for db in databases]
