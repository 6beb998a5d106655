"""``kda-tl show``: the tuned plans of all databases, a pipeline, or the workloads that have names."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_tl import templates
from kda_tl.cli._console import ExitCode, Terminal, format_chunks, format_error, format_ratio, format_us, make_table
from kda_tl.cli._problem import read_numbers, read_workloads
from kda_tl.cli._target import find_known, load_directory
from kda_tl.database.lookup import TuningFile
from kda_tl.database.records import KEY_OPTIONS, Key, round_heads
from kda_tl.database.store import Database, Entry, sources, stale_stages
from kda_tl.errors import InputError


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
    databases = sources() if args.db is None else (load_directory(args.db),)
    passes = _make_filter(args)
    rows = [row for row in _rows(databases) if passes(row)]
    asked = [{"name": db.name, "path": db.path, "skipped": db.skipped} for db in databases]
    terminal.show({"plans": [_as_dict(row) for row in rows], "databases": asked}, *_tables(rows))
    if not rows:
        where = ", ".join(f"{database.name} ({database.path})" for database in databases)
        terminal.note(f"No plan is stored for this in: {where}. `kda-tl tune` finds some.")
    return ExitCode.OK


def _rows(databases: Sequence[Database]) -> Iterator[Row]:
    current = templates.fingerprints()
    for database in databases:
        for file in database.files.values():
            for _, entry in sorted(file.entries.items(), key=lambda item: item[0]):
                yield Row(database=database, file=file, entry=entry, stale=stale_stages(entry, current))


def _make_filter(args: argparse.Namespace) -> Callable[[Row], bool]:
    """Whether a row is of the GPU and the workloads that were named, changed as asked, or has the numbers given."""
    given = read_numbers(args)
    uses = _use_states(given.pop("state_use", None))
    slugs = None if args.gpu is None else {device.slug for device in find_known(args.gpu)}
    problems = [workload.problem() for workload in read_workloads(args)] if args.workload else []
    keys = {(problem.operator, problem.direction, Key.of(problem)) for problem in problems}

    def passes(row: Row) -> bool:
        key, direction = row.entry.key, row.file.direction
        fits = (
            (row.file.operator, direction, key) in keys
            if args.workload
            else _has_numbers(row.file, key, given) and uses(key)
        )
        fits = fits and (slugs is None or row.file.gpu.slug in slugs)
        return fits and args.source in (None, row.database.name) and (bool(row.stale) or not args.stale)

    return passes


def _use_states(use: str | None) -> Callable[[Key], bool]:
    """Whether a key is of steps that use states in one of the ways that workloads name; all keys are, if none is given.

    Raises InputError for another name.
    """
    if use is None:
        return lambda key: True
    from kda_tl.ops.recurrent_draws import STATE_USES

    if use not in STATE_USES:
        raise InputError(f"--state-use must be one of {', '.join(STATE_USES)}, got {use!r}.")
    told = {name for options in STATE_USES.values() for name in options} & {*KEY_OPTIONS}
    return lambda key: key.recurrent and told & set(key.options) == told & set(STATE_USES[use])


def _has_numbers(file: TuningFile, key: Key, given: Mapping[str, Any]) -> bool:
    """Whether a key is of problems with some numbers; heads and tokens are those of its buckets."""
    told = {"operator": file.operator, "direction": file.direction, **key._asdict()}
    if not key.recurrent:
        del told["state_v_first"]  # such plans serve both
    wanted: dict[str, Any] = {name: value for name, value in given.items() if name in told}
    if heads := given.get("HV", given.get("H", 0) * key.group):
        wanted["heads_bucket"] = round_heads(heads)
    if "H" in given and "HV" in given:
        wanted["group"] = given["HV"] / given["H"]
    for name, bucket in (("tokens", "tokens_bucket"), ("longest", "longest_bucket")):
        if name in given:
            wanted[bucket] = key.round(given[name])
    return all(told[name] == value for name, value in wanted.items())


def _show_workloads(args: argparse.Namespace, terminal: Terminal) -> int:
    """Lists names, which tell their problems, and tags; as JSON with all numbers."""
    from kda_tl.bench.workloads import WORKLOADS

    workloads = read_workloads(args, [workload.name for workload in WORKLOADS])
    table = make_table("workload", "tags", rows=[(w.name, ", ".join(w.tags)) for w in workloads])
    terminal.show({"workloads": workloads}, table)
    return ExitCode.OK


def _tables(rows: Sequence[Row]) -> Iterator[Any]:
    """One table a file."""
    right = ("time", "gain", "error")
    for _, group in itertools.groupby(rows, lambda row: id(row.file)):
        first, *_ = mine = list(group)
        yield f"{first.file.gpu.slug}  {first.file.operator} {first.file.direction}  ({first.database.name})"
        states = ", states" if first.entry.key.recurrent else ""
        columns = (f"KxV, type, gate, heads, tokens{states}", "plan", *right, "")
        yield make_table(*columns, right=right, rows=map(_cells, mine))
        yield f"{first.file.path}\n"


def _cells(row: Row) -> tuple[str, ...]:
    entry = row.entry
    return (
        format_key(entry.key),
        f"{entry.plan['pipeline']} {format_chunks(entry.plan)}".rstrip(),
        format_us(entry.time_us.median),
        format_ratio(entry.vs_default.ratio),
        format_error(entry.check.max_rel_err),
        "stale" if row.stale else "",
    )


def format_key(key: Key) -> str:
    """The key as short as it can be told: ``128x128 bf16 safe h32 t8192``; of a step ``... fp32 vk updates``, too."""
    parts = {
        f"{key.K}x{key.V} {key.dtype} {key.gate}": True,
        f"g{key.group}": key.group > 1,
        f"h{key.heads_bucket} t{key.tokens_bucket}": True,
        "packed": key.varlen,
        f"max{key.longest_bucket}": key.longest_bucket != key.tokens_bucket,
        " ".join((key.state_dtype, "vk" if key.state_v_first else "kv", *key.options)): key.recurrent,
    }
    return " ".join(part for part, told in parts.items() if told)


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "source": row.database.name,
        "path": row.file.path,
        "gpu": vars(row.file.gpu),
        "operator": row.file.operator,
        "pass": row.file.direction,
        "stale": row.stale,
        **row.entry.as_dict(),
    }
