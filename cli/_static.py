"""``kda-tl tune --static``: candidates compiled for a GPU that need not be here, ranked by what the compiler says."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from kda_tl.cli._console import ExitCode, Terminal, make_table
from kda_tl.cli._target import find_one_known
from kda_tl.cli.tune import choose_workloads, require_stage
from kda_tl.tune.compile_only import Compiled, compile_static

LINE_EVERY_S = 5.0
SHOWN = 5  # configs a stage, best first; --json has them all


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compiles the candidates of the first workload that was named, or of each if several were."""
    require_stage(args.stage)
    device, note = find_one_known(args.gpu)
    if note:
        terminal.note(note)
    workloads = choose_workloads(args, device.kind)[: None if args.workload else 1]
    stages = _choose_stages(args, workloads)
    results: dict[str, Sequence[Compiled]] = {}
    done: Counter[str] = Counter()
    told = time.monotonic()

    def count(compiled: Compiled) -> None:
        nonlocal told
        done[compiled.status] += 1
        if compiled.status != "ok" or time.monotonic() - told > LINE_EVERY_S:
            told = time.monotonic()
            why = f": {compiled.reason}" if compiled.reason else ""
            terminal.note(f"  {sum(done.values()):>4} compiled  {compiled.stage} {compiled.status}{why}")

    for workload in workloads:
        terminal.note(f"Compiling for {device.slug} ({device.arch}): {workload.name}")
        results[workload.name] = compile_static(
            workload, device, stages=stages, budget=args.budget, jobs=args.jobs, on_compiled=count
        )
    values = {
        "gpu": device.slug,
        "arch": device.arch,
        "measured": False,
        "workloads": {name: [asdict(compiled) for compiled in found] for name, found in results.items()},
    }
    terminal.show(values, *_tables(results))
    some = all(any(c.status == "ok" for c in found) for found in results.values())
    return ExitCode.OK if some else ExitCode.NOTHING_VALID


def _choose_stages(args: argparse.Namespace, workloads: Sequence[Any]) -> list[str] | None:
    """The stage that was named, or those of the pipeline that was; None for all."""
    if args.pipeline is not None:
        from kda_tl.tune.plan_search import require_pipeline

        pipeline = require_pipeline(args.pipeline, workloads, args.stage)
        return [args.stage] if args.stage else [stage.name for stage in pipeline.stages]
    return [args.stage] if args.stage else None


def _tables(results: dict[str, Sequence[Compiled]]) -> Iterator[Any]:
    for name, found in results.items():
        yield f"{name}: compiled, not measured"
        right = ("registers", "local", "shared")
        table = make_table("stage", "registers", "local", "shared", "config", right=right)
        for stage in dict.fromkeys(c.stage for c in found):
            mine = [c for c in found if c.stage == stage]
            for c in [c for c in mine if c.status == "ok"][:SHOWN]:
                config = " ".join(f"{k}={v}" for k, v in c.config.as_dict().items())
                table.add_row(c.stage, *map(_count, (c.registers, c.local_bytes, c.smem_bytes)), config)
            failed = [c for c in mine if c.status != "ok"]
            if failed:
                table.add_row(stage, "", "", "", f"{len(failed)} of {len(mine)} failed: {failed[0].reason}")
        yield table


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)
