"""``kda-tl bench``: stages and whole calls in time, bytes and FLOPs, against what the device can move and compute."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_tl.cli._console import (
    ExitCode,
    Terminal,
    format_bytes,
    format_error,
    format_number,
    format_ratio,
    format_us,
    make_table,
    to_json,
)
from kda_tl.cli._problem import add_workload_arguments, read_numbers, read_workloads
from kda_tl.cli._target import add_gpu_argument, find_here
from kda_tl.core.toolchain import import_tilelang
from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.cli._floor import Ceilings, Row
    from kda_tl.cli._report import Report
    from kda_tl.cli._timing import CallRow, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_gpu_argument(parser)
    add_workload_arguments(parser, "the tag cpu on the CPU, else bench")
    parser.add_argument("--peers", action="store_true", help="also FLA and cuDNN, where they can be imported")
    parser.add_argument("--calls-only", action="store_true", help="whole calls, no stages")
    parser.add_argument("--reps", type=int, metavar="N", help="repetitions a round (default: 30, on the CPU 3)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument("--db", metavar="DIR", help="take plans from this database first")
    parser.add_argument(
        "--json", nargs="?", const=True, metavar="FILE", help="everything as JSON, on stdout or into a file"
    )
    parser.add_argument("--chart", metavar="FILE", help="draw the times of whole calls into a .svg or .png file")
    parser.add_argument(
        "--from", dest="source", metavar="FILE", help="measure nothing: show and draw what --json FILE wrote"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures one workload after the other, or shows again what was measured."""
    report = _measure(args, terminal) if args.source is None else _read_again(args, terminal)
    if terminal.json:
        terminal.show(report)
    elif args.json:
        terminal.note(f"Wrote {args.json}")
    if args.chart:
        from kda_tl.cli._chart import draw_chart

        draw_chart(report, Path(args.chart))
        terminal.note(f"Wrote {args.chart}")
    return ExitCode.OK


def _measure(args: argparse.Namespace, terminal: Terminal) -> Report:
    """Everything that can be refused is refused before the first measurement."""
    device = find_here(args.gpu, args)
    import_tilelang()
    if (args.reps or 1) < 1 or args.rounds < 1:
        raise InputError("--reps and --rounds must be at least 1.")
    from kda_tl.cli._floor import measure_ceilings
    from kda_tl.cli._peers import find_versions
    from kda_tl.cli._report import Report
    from kda_tl.cli._timing import Settings, bench_workload
    from kda_tl.cli.explain import open_database

    workloads = read_workloads(args, ["cpu" if device.kind == "cpu" else "bench"])
    file = _check_files(args)
    terminal.note(f"Measuring what {device.slug} ({device.arch}) can move and compute.")
    ceilings = measure_ceilings(device)
    settings = Settings(
        reps=args.reps or (3 if device.kind == "cpu" else 30),
        rounds=args.rounds,
        peers=args.peers,
        stages=not args.calls_only,
    )
    report = Report(environment=_environment(device), ceilings=ceilings, workloads=())
    _print(terminal, _describe(ceilings))
    with open_database(args.db):
        for number, workload in enumerate(workloads, start=1):
            terminal.note(f"Timing {workload.name} ({number} of {len(workloads)}).")
            result = bench_workload(workload, device, ceilings, settings)
            known = {**report.environment, **find_versions()}  # now: a checkout has a version once it is imported
            report = replace(report, environment=known, workloads=(*report.workloads, result))
            if file:  # after each: the next may take minutes, and be stopped
                file.write_text(to_json(report), encoding="utf-8")
            _print(terminal, *_tables(result, device.kind == "cpu"))
    return report


def _read_again(args: argparse.Namespace, terminal: Terminal) -> Report:
    """What ``--json FILE`` wrote, its tables printed."""
    read_numbers(args)  # refuses a stray word
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    shown = ("source", "chart", "json")
    given = [name for name, value in vars(parser.parse_args([])).items() if getattr(args, name) != value]
    if over := [f"--{name.replace('_', '-')}" for name in given if name not in shown]:
        raise InputError(f"--from measures nothing, so {', '.join(over)} cannot apply: leave it out, or --from.")
    from kda_tl.cli._report import read_report

    report = read_report(args.source)
    file = _check_files(args)
    _print(terminal, _describe(report.ceilings))
    for result in report.workloads:
        _print(terminal, *_tables(result, report.environment["kind"] == "cpu"))
    if file:
        file.write_text(to_json(report), encoding="utf-8")
    return report


def _check_files(args: argparse.Namespace) -> Path | None:
    """Tries what will be written; the file for the JSON, if it was given."""
    from kda_tl.cli._report import check_file

    if args.chart is not None:
        from kda_tl.cli._chart import check_chart

        check_chart(args.chart)
    return check_file("--json", args.json) if isinstance(args.json, str) else None


def _print(terminal: Terminal, *tables: Any) -> None:
    """For people; where stdout is one JSON value, nothing."""
    if not terminal.json:
        for table in tables:
            terminal.print(table)


def _environment(device: Any) -> dict[str, Any]:
    from kda_tl.bench.timing import read_gpu_state
    from kda_tl.database.store import provenance

    return {**asdict(device), **provenance(), **(read_gpu_state() if device.kind == "cuda" else {})}


def _describe(ceilings: Ceilings) -> str:
    moved, computed = ceilings.bytes_per_s / 1e9, ceilings.flops_per_s / 1e12
    return (
        f"Ceilings, measured here: {format_number(moved)} GB/s copied, {format_number(computed * 1e3)} GFLOP/s in "
        f"{ceilings.dtype} matmul.\nfloor: the time that either takes, as a share of the time measured. "
        "speed: relative to kda_tl. diff: from its first result.\n"
    )


def _tables(result: Result, cpu: bool) -> Iterator[Any]:
    yield f"{result.workload}  ({result.plan}, {result.step})"
    if result.stages:
        yield _stage_table(result.stages, cpu)
    yield _call_table(result.calls)
    for name, reason in result.left_out.items():
        yield f"{name} left out: {reason}"
    yield ""


def _stage_table(rows: Sequence[Row], cpu: bool) -> Any:
    unit, scale = ("GFLOP/s", 1e3) if cpu else ("TFLOP/s", 1e6)
    right = ("median", "mad", "bytes", "GB/s", unit, "floor")
    table = make_table("stage", *right, right=right)
    for row in rows:
        table.add_row(
            row.name,
            format_us(row.median_us),
            format_us(row.mad_us),
            format_bytes(row.bytes),
            format_number(row.bytes / row.median_us / 1e3),
            format_number(row.flops / row.median_us / scale),
            f"{row.share_of_floor:.1%}",
        )
    return table


def _call_table(rows: Sequence[CallRow]) -> Any:
    right = ("eager", "mad", "graph", "host", "peak", "floor", "speed", "diff")
    table = make_table("call", *right, right=right)
    for row in rows:
        table.add_row(
            row.name,
            format_us(row.eager_us),
            format_us(row.eager_mad_us),
            format_us(row.graph_us),
            format_us(row.host_us),
            "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
            f"{row.share_of_floor:.1%}",
            format_ratio(row.speed),
            format_error(row.difference),
        )
    return table
