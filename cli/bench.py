"""``kda-tl bench``: stages and whole calls in time, bytes and FLOPs, against what the device can move and compute."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kda_tl.bench.timing import read_gpu_state
from kda_tl.cli import _chart, _peers, _timing
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
from kda_tl.cli._options import OPTIONS
from kda_tl.cli._problem import read_numbers, read_workloads
from kda_tl.cli._report import CallRow, Ceilings, Report, Result, Row, check_file, read_report
from kda_tl.cli._target import find_here, open_database
from kda_tl.core.toolchain import import_tilelang
from kda_tl.database.store import provenance
from kda_tl.errors import InputError


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures one workload after the other, or shows again what was measured."""
    report = _measure(args, terminal) if args.source is None else _read_again(args, terminal)
    if terminal.json:
        terminal.show(report)
    elif args.json:
        terminal.note(f"Wrote {args.json}")
    if args.chart:
        _chart.draw_chart(report, Path(args.chart))
        terminal.note(f"Wrote {args.chart}")
    return ExitCode.OK


def _measure(args: argparse.Namespace, terminal: Terminal) -> Report:
    """Everything that can be refused is refused before the first measurement."""
    device = find_here(args.gpu, args)
    import_tilelang()
    if (args.reps or 1) < 1 or args.rounds < 1:
        raise InputError("--reps and --rounds must be at least 1.")
    workloads = read_workloads(args, ["cpu" if device.kind == "cpu" else "bench"])
    file = _check_files(args)
    terminal.note(f"Measuring what {device.slug} ({device.arch}) can move and compute.")
    settings = _timing.Settings(
        device=device,
        ceilings=_timing.measure_ceilings(device),
        reps=args.reps or (3 if device.kind == "cpu" else 30),
        rounds=args.rounds,
        peers=args.peers,
        stages=not args.calls_only,
    )
    about = {**asdict(device), **provenance(), **(read_gpu_state() if device.kind == "cuda" else {})}
    report = Report(environment=about, ceilings=settings.ceilings, workloads=())
    terminal.print(_describe(report.ceilings))
    with open_database(args.db):
        for number, workload in enumerate(workloads, start=1):
            terminal.note(f"Timing {workload.name} ({number} of {len(workloads)}).")
            result = _timing.bench_workload(workload, settings)
            about |= _peers.find_versions()  # now: a checkout has a version once it is imported
            report = replace(report, environment=about, workloads=(*report.workloads, result))
            if file:  # after each: the next may take minutes, and be stopped
                file.write_text(to_json(report), encoding="utf-8")
            terminal.print(*_tables(result, device.kind == "cpu"))
    return report


def _read_again(args: argparse.Namespace, terminal: Terminal) -> Report:
    """What ``--json FILE`` wrote, its tables printed."""
    read_numbers(args)  # refuses a stray word
    shown = ("--from", "--chart", "--json", "stray")
    given = [o.word for o in OPTIONS["bench"] if getattr(args, o.dest) != o.settings.get("default")]
    if over := [word for word in given if word not in shown]:
        raise InputError(f"--from measures nothing, so {', '.join(over)} cannot apply: leave it out, or --from.")
    report = read_report(args.source)
    file = _check_files(args)
    terminal.print(_describe(report.ceilings))
    for result in report.workloads:
        terminal.print(*_tables(result, report.environment["kind"] == "cpu"))
    if file:
        file.write_text(to_json(report), encoding="utf-8")
    return report


def _check_files(args: argparse.Namespace) -> Path | None:
    """Tries what will be written; the file for the JSON, if it was given."""
    if args.chart is not None:
        _chart.check_chart(args.chart)
    return check_file("--json", args.json) if isinstance(args.json, str) else None


def _describe(ceilings: Ceilings) -> str:
    moved, computed = ceilings.bytes_per_s / 1e9, ceilings.flops_per_s / 1e12
    return (
        f"Ceilings, measured here: {format_number(moved)} GB/s copied, {format_number(computed * 1e3)} GFLOP/s in "
        f"{ceilings.dtype} matmul.\nroof: the time that either takes (the roofline) as a share of the time measured. "
        "speed: relative to kda_tl. diff: from its first result.\n"
    )


def _tables(result: Result, cpu: bool) -> Iterator[Any]:
    yield f"{result.workload}  ({result.plan}, {result.step})"
    unit, scale = ("GFLOP/s", 1e3) if cpu else ("TFLOP/s", 1e6)
    stage_columns: dict[str, Callable[[Row], str]] = {
        "median": lambda row: format_us(row.median_us),
        "mad": lambda row: format_us(row.mad_us),
        "bytes": lambda row: format_bytes(row.bytes),
        "GB/s": lambda row: format_number(row.bytes / row.median_us / 1e3),
        unit: lambda row: format_number(row.flops / row.median_us / scale),
        "roof": lambda row: f"{row.roofline_us / row.median_us:.1%}",
    }
    call_columns: dict[str, Callable[[CallRow], str]] = {
        "eager": lambda row: format_us(row.eager_us),
        "mad": lambda row: format_us(row.eager_mad_us),
        "graph": lambda row: format_us(row.graph_us),
        "host": lambda row: format_us(row.host_us),
        "peak": lambda row: "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "roof": lambda row: f"{row.roofline_fraction:.1%}",
        "speed": lambda row: format_ratio(row.speed),
        "diff": lambda row: format_error(row.difference),
    }
    if result.stages:
        yield _table("stage", result.stages, stage_columns)
    yield _table("call", result.calls, call_columns)
    for name, reason in result.left_out.items():
        yield f"{name} left out: {reason}"
    yield ""


def _table(what: str, rows: Sequence[Any], columns: Mapping[str, Callable[[Any], str]]) -> Any:
    """A row for each that was timed, named first."""
    cells = [(row.name, *(write(row) for write in columns.values())) for row in rows]
    return make_table(what, *columns, right=list(columns), rows=cells)
