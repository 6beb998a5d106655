"""``kda-tl tune``: searches plans for the machine it runs on, stores them, calls the operator with what it found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_tl.cli._console import ExitCode, Terminal
from kda_tl.cli._problem import add_workload_arguments, read_workloads
from kda_tl.cli._target import add_gpu_argument, find_here, suggest
from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.bench.workloads import Workload

# Seconds a workload: the tag cpu then takes under three minutes, the tag tune on a GPU under 50.
TIMEOUT_S = {"cpu": 75, "cuda": 120}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_gpu_argument(parser)
    add_workload_arguments(parser, "the tag cpu on the CPU, else tune")
    parser.add_argument("--stage", metavar="NAME", help="only this stage, at the default chunk sizes; stores no plan")
    parser.add_argument(
        "--pipeline",
        metavar="NAME",
        help="only this pipeline, against its own default plan; what wins is stored even where another is faster: pass"
        " a --db of its own",
    )
    parser.add_argument(
        "--objective",
        metavar="WHAT",
        help="a backward may begin with results that the forward keeps in memory: if that is faster (time), if it saves"
        " as large a share of time as it adds of memory (balanced, the default), or never (memory)",
    )
    parser.add_argument("--budget", type=_positive, metavar="N", help="most trials a stage and chunk size")
    parser.add_argument(
        "--timeout",
        type=_positive,
        metavar="S",
        help="most seconds a workload; the default plan of each pipeline is timed all the same"
        f" (default: {TIMEOUT_S['cpu']} on the CPU, {TIMEOUT_S['cuda']} on a GPU)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of inputs and sampler (default: 0)")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="processes that compile (default: one a core)")
    parser.add_argument("--static", action="store_true", help="compile and rank only, no GPU needed; nothing is stored")
    parser.add_argument("--stale", action="store_true", help="only workloads whose stored plan is stale")
    parser.add_argument("--db", metavar="DIR", help="database to write (default: $KDA_TL_DB, else the user's)")
    parser.add_argument("--journal", metavar="DIR", help="where trials are kept (default: beside the plans)")
    parser.add_argument("--json", action="store_true", help="the result as JSON")


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
        from kda_tl.tune.plan_search import require_pipeline

        require_pipeline(args.pipeline, workloads, args.stage)
    directory = _make_directory(args.db)
    if args.stale:
        workloads = _keep_stale(workloads, device, terminal)
        if not workloads:
            terminal.show({"workloads": []}, f"No stored plan of these workloads on {device.slug} is stale.")
            return ExitCode.OK
    count = "1 workload" if len(workloads) == 1 else f"{len(workloads)} workloads"
    what = device.slug if args.pipeline is None else f"{args.pipeline} on {device.slug}"
    terminal.note(f"Tuning {what} ({device.arch}) for {count}. Ctrl-C stops, no trial is lost.")
    if args.pipeline is not None and args.stage is None and args.db is None:
        terminal.note(f"Calls will run its plans even where others are faster: without --db they go into {directory}.")
    report = _tune(args, terminal, workloads, device, directory)
    from kda_tl.cli import _tuned

    return _tuned.finish(report, directory, terminal)


def choose_workloads(args: argparse.Namespace, kind: str) -> tuple[Workload, ...]:
    """The workloads that were named or described, or those that are tuned on this kind of device.

    Raises:
        InputError: as :func:`kda_tl.cli._problem.read_workloads`.
    """
    return read_workloads(args, ["cpu" if kind == "cpu" else "tune"])


def _tune(args: argparse.Namespace, terminal: Terminal, workloads: Any, device: Any, directory: Path) -> Any:
    from kda_tl.cli._progress import TuneProgress
    from kda_tl.tune import tuner

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
    import tempfile

    from kda_tl.database.store import writable_directory
    from kda_tl.errors import DatabaseError

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


def _keep_stale(workloads: Sequence[Any], device: Any, terminal: Terminal) -> Sequence[Any]:
    """The workloads whose own plan, in any database, was measured with other templates than today's."""
    from kda_tl import templates
    from kda_tl.database.store import Key, sources, stale_stages

    current = templates.fingerprints()
    stale = []
    for workload in workloads:
        problem = workload.problem()
        files = (db.files.get((device.slug, problem.operator, problem.direction)) for db in sources())
        entries = [entry for file in files if file and (entry := file.entries.get(Key.of(problem)))]
        changed = sorted({stage for entry in entries for stage in stale_stages(entry, current)})
        if changed:
            terminal.note(f"{workload.name} is stale: {', '.join(changed)} changed.")
            stale.append(workload)
    return stale


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return number


def require_stage(name: str | None) -> None:
    """Raises InputError unless there is a stage of that name, or none was given."""
    if name is not None:
        from kda_tl import templates

        if name not in templates.names():
            raise InputError(f"there is no stage {name!r}: choose one of {', '.join(templates.names())}.")
