"""``kda-tl tune --static``: candidates compiled for a GPU that need not be here, ranked by what the compiler says."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kda_tl.bench.workloads import Workload
from kda_tl.cli._console import ExitCode, Terminal, format_config, make_table
from kda_tl.cli._target import find_one_known
from kda_tl.cli.tune import choose_workloads, require_stage
from kda_tl.tune.compile_only import Compiled, compile_static
from kda_tl.tune.plan_search import require_pipeline

LINE_EVERY_S = 5.0
SHOWN = 5  # configs a stage, best first; --json has them all


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compiles the candidates of the first workload that was named, or of each if several were."""
    require_stage(args.stage)
    device = find_one_known(args.gpu, terminal)
    workloads = choose_workloads(args, device.kind)[: None if args.workload else 1]
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
