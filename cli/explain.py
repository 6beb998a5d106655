"""``kda-tl explain``: which plan a problem runs, where it comes from and why. Nothing is compiled or run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kda_tl.bench.workloads import Workload
from kda_tl.cli._console import ExitCode, Terminal, format_config, make_table
from kda_tl.cli._problem import read_workloads
from kda_tl.cli._target import find_one_known, open_database
from kda_tl.core.device import Device, cpu_device, current_device
from kda_tl.core.problem import Problem
from kda_tl.database.store import sources
from kda_tl.errors import InputError
from kda_tl.runtime.dispatch import PlanSelection, select_cached, select_plan


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Resolves the plan of each workload and shows it, with an empty line between two."""
    workloads = read_workloads(args)
    if args.chunk_size and (step := next((w for w in workloads if not w.problem().chunked), None)):
        raise InputError(f"{step.operator} takes tokens one by one, without chunks: leave --chunk-size out.")
    device = find_one_known(args.gpu, terminal)
    with open_database(args.db):
        choices = {workload: choose_for(workload.problem(), device, args.chunk_size) for workload in workloads}
    values = [
        {"workload": workload.name, "problem": workload.problem(), "gpu": device.slug, **vars(choice)}
        for workload, choice in choices.items()
    ]
    tables = [make_table("", "", rows=_rows(workload, device, choice)) for workload, choice in choices.items()]
    terminal.show({"workloads": values}, *[part for table in tables for part in ("", table)][1:])
    return ExitCode.OK


def choose_for(problem: Problem, device: Device, chunk_size: int | None = None) -> PlanSelection:
    """What a call would run here; for a device that is elsewhere, what it would run with a compiler."""
    if device in (current_device(), cpu_device()):
        return select_cached(problem, device, chunk_size)
    return select_plan(problem, device, sources(), chunk_size=chunk_size)


def _rows(workload: Workload, device: Device, choice: PlanSelection) -> Iterator[tuple[str, str]]:
    yield "workload", workload.name
    yield "problem", workload.problem().key.replace("-", " ")  # so that it wraps between words
    yield "device", f"{device.slug} ({device.arch})"
    yield from ((name, getattr(choice, name)) for name in ("step", "source", "reason"))
    if choice.plan is not None:
        yield "plan", choice.plan.label
        yield from ((f"  {stage}", format_config(config)) for stage, config in choice.plan.stages)
    if choice.stale:
        yield "stale", f"{', '.join(choice.stale)} changed since: run `kda-tl tune --stale`"
    yield from (("passed over", sentence) for sentence in choice.passed_over)
