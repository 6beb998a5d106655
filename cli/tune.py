"""``kda-tl tune``: searches plans for the machine it runs on, stores them, calls the operator with what it found."""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bench.workloads import Workload
from kda_tl.cli import _tuned
from kda_tl.cli._console import ExitCode, Terminal, format_config, format_count, make_table
from kda_tl.cli._options import TIMEOUT_S
from kda_tl.cli._problem import read_workloads
from kda_tl.cli._progress import TuneProgress
from kda_tl.cli._target import find_here, find_one_known, suggest
from kda_tl.core.device import Device
from kda_tl.database.store import Key, sources, stale_stages, writable_directory
from kda_tl.errors import DatabaseError, InputError
from kda_tl.tune import tuner
from kda_tl.tune.compile_only import Compiled, compile_static
from kda_tl.tune.events import TuneReport
from kda_tl.tune.plan_search import require_pipeline

LINE_EVERY_S = 5.0  # while kernels are compiled only
SHOWN = 5  # configs a stage, best first; --json has them all


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Tunes, or compiles only; interrupted, it says how to go on."""
    try:
        return _compile_only(args, terminal) if args.static else _search(args, terminal)
    except KeyboardInterrupt:
        what = "compiled kernel is cached" if args.static else "finished trial is kept"
        terminal.note(f"Stopped. Every {what}; go on with: {suggest(args)}")
        return ExitCode.INTERRUPTED


def _search(args: argparse.Namespace, terminal: Terminal) -> int:
    _require_stage(args.stage)
    device = find_here(args.gpu, args, static=True)
    workloads: Sequence[Workload] = _choose_workloads(args, device.kind)
    if args.pipeline is not None:
        require_pipeline(args.pipeline, workloads, args.stage)
    directory = _make_directory(args.db)
    if args.stale:
        workloads = _keep_stale(workloads, device, terminal)
        if not workloads:
            terminal.show({"workloads": []}, f"No stored plan of these workloads on {device.slug} is stale.")
            return ExitCode.OK
    count = format_count(len(workloads), "workload")
    what = device.slug if args.pipeline is None else f"{args.pipeline} on {device.slug}"
    terminal.note(f"Tuning {what} ({device.arch}) for {count}. Ctrl-C stops, no trial is lost.")
    if args.pipeline is not None and args.stage is None and args.db is None:
        terminal.note(f"Calls will run its plans even where others are faster: without --db they go into {directory}.")
    report = _tune(args, terminal, workloads, device, directory)
    return _tuned.finish(report, directory, terminal)


def _choose_workloads(args: argparse.Namespace, kind: str) -> tuple[Workload, ...]:
    """The workloads that were named or described, or those that are tuned on this kind of device."""
    return read_workloads(args, ["cpu" if kind == "cpu" else "tune"])


def _tune(
    args: argparse.Namespace, terminal: Terminal, workloads: Sequence[Workload], device: Device, directory: Path
) -> TuneReport:
    limit_s = args.timeout or TIMEOUT_S[device.kind]
    with TuneProgress(terminal, limit_s).running() as progress:
        return tuner.tune(
            workloads,
            device,
            stage=args.stage,
            pipeline=args.pipeline,
            budget=args.budget or tuner.DEFAULT_BUDGET,
            objective=args.objective or tuner.DEFAULT_OBJECTIVE,
            timeout_s=limit_s,
            seed=args.seed,
            jobs=args.jobs,
            journal_dir=args.journal,
            db_dir=directory,
            on_event=progress,
        )


def _make_directory(given: str | None) -> Path:
    """The database to write, made now: better told before hours of search than after."""
    directory = Path(given) if given else writable_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise DatabaseError(
            f"cannot write the tuning database {directory} ({error.strerror or error}): "
            "pass --db with a directory you may write."
        ) from error
    return directory


def _keep_stale(workloads: Sequence[Workload], device: Device, terminal: Terminal) -> list[Workload]:
    """The workloads whose own plan, in any database, was measured with other templates than today's."""
    current, stale = templates.fingerprints(), []
    for workload in workloads:
        problem = workload.problem()
        files = (db.files.get((device.slug, problem.operator, problem.direction)) for db in sources())
        entries = [entry for file in files if file and (entry := file.entries.get(Key.of(problem)))]
        if changed := sorted({stage for entry in entries for stage in stale_stages(entry, current)}):
            terminal.note(f"{workload.name} is stale: {', '.join(changed)} changed.")
            stale.append(workload)
    return stale


def _require_stage(name: str | None) -> None:
    """Raises InputError unless there is a stage of that name, or none was given."""
    if name is not None and name not in templates.names():
        raise InputError(f"there is no stage {name!r}: choose one of {', '.join(templates.names())}.")


def _compile_only(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compiles the candidates of the first workload that was named, or of each if several were."""
    _require_stage(args.stage)
    device = find_one_known(args.gpu, terminal)
    workloads = _choose_workloads(args, device.kind)[: None if args.workload else 1]
    stages = _choose_stages(args, workloads)
    results: dict[str, Sequence[Compiled]] = {}
    numbers, told = itertools.count(1), time.monotonic()

    def count(compiled: Compiled) -> None:
        nonlocal told
        number = next(numbers)
        if compiled.status != "ok" or time.monotonic() - told > LINE_EVERY_S:
            told = time.monotonic()
            why = f": {compiled.reason}" if compiled.reason else ""
            terminal.note(f"  {number:>4} compiled  {compiled.stage} {compiled.status}{why}")

    for workload in workloads:
        terminal.note(f"Compiling for {device.slug} ({device.arch}): {workload.name}")
        results[workload.name] = compile_static(
            workload, device, stages=stages, budget=args.budget, jobs=args.jobs, on_compiled=count
        )
    values = {"gpu": device.slug, "arch": device.arch, "measured": False, "workloads": results}
    terminal.show(values, *_tables(results))
    some = all(any(c.status == "ok" for c in found) for found in results.values())
    return ExitCode.OK if some else ExitCode.NOTHING_VALID


def _choose_stages(args: argparse.Namespace, workloads: Sequence[Workload]) -> list[str] | None:
    """The stage that was named, or those of the pipeline that was; None for all."""
    pipeline = require_pipeline(args.pipeline, workloads, args.stage) if args.pipeline is not None else None
    if args.stage:
        return [args.stage]
    return [stage.name for stage in pipeline.stages] if pipeline else None


def _tables(results: Mapping[str, Sequence[Compiled]]) -> Iterator[Any]:
    right = ("registers", "local", "shared")
    for name, found in results.items():
        yield f"{name}: compiled, not measured"
        yield make_table("stage", *right, "config", right=right, rows=_rows(found))


def _rows(found: Sequence[Compiled]) -> Iterator[Sequence[str]]:
    """The best configs of each stage, then how many failed and why the first did."""
    for stage, group in itertools.groupby(found, lambda compiled: compiled.stage):
        mine = list(group)
        for c in [c for c in mine if c.status == "ok"][:SHOWN]:
            numbers = ("-" if n is None else str(n) for n in (c.registers, c.local_bytes, c.smem_bytes))
            yield stage, *numbers, format_config(c.config)
        if failed := [c for c in mine if c.status != "ok"]:
            yield stage, "", "", "", f"{len(failed)} of {len(mine)} failed: {failed[0].reason}"
