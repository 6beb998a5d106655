"""``kda-tl show``: the tuned plans of all databases, a pipeline, or the workloads that have names."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_tl.cli._console import ExitCode, Terminal, format_chunks, format_error, format_ratio, format_us, make_table
from kda_tl.cli._problem import NOT_IN_KEYS, add_workload_arguments, read_numbers, read_workloads
from kda_tl.database.lookup import TuningFile
from kda_tl.database.records import Key, round_heads, round_tokens
from kda_tl.database.store import Database, Entry, sources, stale_stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--gpu", metavar="NAME", help="only plans of this GPU: cpu, h100, h200, ..., or a slug")
    parser.add_argument("--source", metavar="NAME", help="only this database: overlay, '$KDA_TL_DB', user, packaged")
    parser.add_argument("--db", metavar="DIR", help="the database in this directory instead of the usual ones")
    add_workload_arguments(parser, "all", leave_out=NOT_IN_KEYS, alone="they choose among plans")
    parser.add_argument("--workloads", action="store_true", help="the workloads and their tags instead of plans")
    parser.add_argument("--pipeline", metavar="NAME", help="how tensors flow through a pipeline instead of plans")
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
    """Lists the entries that pass the filters, or the workloads; or draws a pipeline."""
    if args.workloads:
        return _show_workloads(args, terminal)
    if args.pipeline:
        from kda_tl.cli import _flow

        return _flow.run(args, terminal)
    databases = _databases(args.db)
    passes = _make_filter(args)
    rows = [row for row in _rows(databases) if passes(row)]
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

    current = templates.fingerprints()
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


def _make_filter(args: argparse.Namespace) -> Callable[[Row], bool]:
    """Whether a row is of the workloads that were named, changed as asked; else whether it has the numbers given."""
    given = read_numbers(args)
    problems = [workload.problem() for workload in read_workloads(args)] if args.workload else []
    keys = {(problem.operator, problem.direction, Key.of(problem)) for problem in problems}

    def passes(row: Row) -> bool:
        key, direction = row.entry.key, row.file.direction
        fits = (row.file.operator, direction, key) in keys if args.workload else _has_numbers(row.file, key, given)
        return fits and args.source in (None, row.database.name) and (bool(row.stale) or not args.stale)

    return passes


def _has_numbers(file: TuningFile, key: Key, given: Mapping[str, Any]) -> bool:
    """Whether a key is of problems with some numbers; heads and tokens are those of its buckets."""
    told = {"operator": file.operator, "direction": file.direction, **key._asdict()}
    wanted: dict[str, Any] = {name: value for name, value in given.items() if name in told}
    if heads := given.get("HV", given.get("H", 0) * key.group):
        wanted["heads_bucket"] = round_heads(heads)
    if "H" in given and "HV" in given:
        wanted["group"] = given["HV"] / given["H"]
    for name, bucket in (("tokens", "tokens_bucket"), ("longest", "longest_bucket")):
        if name in given:
            wanted[bucket] = round_tokens(given[name])
    return all(told[name] == value for name, value in wanted.items())


def _show_workloads(args: argparse.Namespace, terminal: Terminal) -> int:
    """Lists names, which tell their problems, and tags; as JSON with all numbers."""
    from kda_tl.bench.workloads import WORKLOADS

    workloads = read_workloads(args, [workload.name for workload in WORKLOADS])
    table = make_table("workload", "tags")
    for workload in workloads:
        table.add_row(workload.name, ", ".join(workload.tags))
    terminal.show({"workloads": workloads}, table)
    return ExitCode.OK


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
