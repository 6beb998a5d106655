"""``kda-tl tune``: searches plans for the machine it runs on, stores them, calls the operator with what it found."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kda_tl import templates
from kda_tl.bench.workloads import Workload
from kda_tl.cli._console import ExitCode, Terminal, format_count
from kda_tl.cli._options import TIMEOUT_S
from kda_tl.cli._problem import read_workloads
from kda_tl.cli._progress import TuneProgress
from kda_tl.cli._target import find_here, suggest
from kda_tl.core.device import Device
from kda_tl.database.store import Key, sources, stale_stages, writable_directory
from kda_tl.errors import DatabaseError, InputError
from kda_tl.tune import tuner
from kda_tl.tune.plan_search import require_pipeline


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Tunes, or compiles only; interrupted, it says how to go on."""
    try:
        if not args.static:
            return _run(args, terminal)
        from kda_tl.cli import _static

        return _static.run(args, terminal)
    except KeyboardInterrupt:
        what = "compiled kernel is cached" if args.static else "finished trial is kept"
        terminal.note(f"Stopped. Every {what}; go on with: {suggest(args)}")
        return ExitCode.INTERRUPTED


def _run(args: argparse.Namespace, terminal: Terminal) -> int:
    require_stage(args.stage)
    device = find_here(args.gpu, args, static=True)
    workloads: Sequence[Workload] = choose_workloads(args, device.kind)
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
    from kda_tl.cli import _tuned

    return _tuned.finish(report, directory, terminal)


def choose_workloads(args: argparse.Namespace, kind: str) -> tuple[Workload, ...]:
    """The workloads that were named or described, or those that are tuned on this kind of device."""
    return read_workloads(args, ["cpu" if kind == "cpu" else "tune"])


def _tune(
    args: argparse.Namespace, terminal: Terminal, workloads: Sequence[Workload], device: Device, directory: Path
) -> tuner.TuneReport:
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


def require_stage(name: str | None) -> None:
    """Raises InputError unless there is a stage of that name, or none was given."""
    if name is not None and name not in templates.names():
        raise InputError(f"there is no stage {name!r}: choose one of {', '.join(templates.names())}.")
