"""``kda-tl bench``: stages and whole calls in time, bytes and FLOPs, against what the device can move and compute."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
from kda_tl.cli._target import add_gpu_argument, find_here
from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.cli._floor import Ceilings, Row
    from kda_tl.cli._timing import CallRow, Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_gpu_argument(parser)
    parser.add_argument(
        "--workload",
        action="append",
        metavar="NAME|TAG",
        help="workload or tag, may be repeated (default: the tag cpu on the CPU, else bench)",
    )
    parser.add_argument("--peers", action="store_true", help="also FLA and cuDNN, where they can be imported")
    parser.add_argument("--calls-only", action="store_true", help="whole calls, no stages")
    parser.add_argument("--reps", type=int, metavar="N", help="repetitions a round (default: 30, on the CPU 3)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument("--db", metavar="DIR", help="take plans from this database first")
    parser.add_argument(
        "--json", nargs="?", const=True, metavar="FILE", help="everything as JSON, on stdout or into a file"
    )


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures one workload after the other."""
    device = find_here(args.gpu, args)
    if (args.reps or 1) < 1 or args.rounds < 1:
        raise InputError("--reps and --rounds must be at least 1.")
    from kda_tl.cli._floor import measure_ceilings
    from kda_tl.cli._timing import Settings, bench_workload
    from kda_tl.cli.explain import open_database
    from kda_tl.workloads import select

    workloads = select(args.workload or ["cpu" if device.kind == "cpu" else "bench"])
    file = _open_file(args.json)
    terminal.note(f"Measuring what {device.slug} ({device.arch}) can move and compute.")
    ceilings = measure_ceilings(device)
    settings = Settings(
        reps=args.reps or (3 if device.kind == "cpu" else 30),
        rounds=args.rounds,
        peers=args.peers,
        stages=not args.calls_only,
    )
    environment, results = _environment(device), []
    if not terminal.json:
        terminal.print(_describe(ceilings))
    with open_database(args.db):
        for workload in workloads:
            terminal.note(f"Timing {workload.name}.")
            results.append(bench_workload(workload, device, ceilings, settings))
            values = {"environment": environment, "ceilings": ceilings, "workloads": [asdict(r) for r in results]}
            if file:  # after each: the next may take minutes, and be stopped
                file.write_text(to_json(values), encoding="utf-8")
            if not terminal.json:
                for table in _tables(results[-1], device.kind == "cpu"):
                    terminal.print(table)
    if terminal.json:
        terminal.show(values)
    elif file:
        terminal.note(f"Wrote {file}")
    return ExitCode.OK


def _open_file(given: object) -> Path | None:
    """The file to write, tried now: better told before the measuring than after."""
    if not isinstance(given, str):
        return None
    try:
        Path(given).open("a", encoding="utf-8").close()
    except OSError as error:
        raise InputError(
            f"cannot write {given} ({error.strerror or error}): pass --json a file you may write."
        ) from error
    return Path(given)


def _environment(device: Any) -> dict[str, Any]:
    from kda_tl.db import provenance
    from kda_tl.measure import read_gpu_state

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
