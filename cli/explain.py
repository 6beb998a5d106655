"""``kda-tl explain``: which plan a problem runs, where it comes from and why. Nothing is compiled or run."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kda_tl.cli._console import ExitCode, Terminal, make_table
from kda_tl.cli._problem import add_workload_arguments, read_workloads
from kda_tl.cli._target import add_gpu_argument, find_one_known
from kda_tl.core.device import Device, cpu_device, current_device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import BT_CHOICES

if TYPE_CHECKING:
    from kda_tl.bench.workloads import Workload
    from kda_tl.runtime.dispatch import PlanSelection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_gpu_argument(parser)
    add_workload_arguments(parser, "none, say which")
    parser.add_argument("--db", metavar="DIR", help="ask this database first")
    parser.add_argument("--chunk-size", type=int, choices=sorted(BT_CHOICES), help="as passed to the operator")
    parser.add_argument("--json", action="store_true", help="the choices as JSON")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Resolves the plan of each workload and shows it."""
    workloads = read_workloads(args)
    device, note = find_one_known(args.gpu)
    if note:
        terminal.note(note)
    with open_database(args.db):
        choices = {workload: choose_for(workload.problem(), device, args.chunk_size) for workload in workloads}
    values = [_as_dict(workload, device, choice) for workload, choice in choices.items()]
    terminal.show({"workloads": values}, *_tables(choices, device))
    return ExitCode.OK


@contextlib.contextmanager
def open_database(directory: str | None) -> Iterator[None]:
    """Puts the database of a directory before all others, if one was given."""
    if directory is None:
        yield
        return
    from kda_tl.cli.db import load_directory
    from kda_tl.database.store import use

    with use(load_directory(directory)):
        yield


def choose_for(problem: Problem, device: Device, chunk_size: int | None = None) -> PlanSelection:
    """What a call would run here; for a device that is elsewhere, what it would run with a compiler."""
    from kda_tl.database.store import sources
    from kda_tl.runtime.dispatch import select_cached, select_plan

    if device in (current_device(), cpu_device()):
        return select_cached(problem, device, chunk_size)
    return select_plan(problem, device, sources(), chunk_size=chunk_size)


def _tables(choices: Mapping[Workload, PlanSelection], device: Device) -> Iterator[Any]:
    """One table a workload, with an empty line between two."""
    for number, (workload, choice) in enumerate(choices.items()):
        yield from [""] if number else []
        yield _table(workload, device, choice)


def _table(workload: Workload, device: Device, choice: PlanSelection) -> Any:
    table = make_table("", "")
    table.show_header = False
    table.add_row("workload", workload.name)
    table.add_row("problem", workload.problem().key.replace("-", " "))  # so that it wraps between words
    table.add_row("device", f"{device.slug} ({device.arch})")
    for name in ("step", "source", "reason"):
        table.add_row(name, getattr(choice, name))
    if choice.plan is not None:
        table.add_row("plan", choice.plan.label)
        for stage, config in choice.plan.stages:
            table.add_row(f"  {stage}", " ".join(f"{k}={v}" for k, v in config.as_dict().items()))
    if choice.stale:
        table.add_row("stale", f"{', '.join(choice.stale)} changed since: run `kda-tl tune --stale`")
    for sentence in choice.passed_over:
        table.add_row("passed over", sentence)
    return table


def _as_dict(workload: Workload, device: Device, choice: PlanSelection) -> dict[str, Any]:
    return {
        "workload": workload.name,
        "problem": workload.problem(),
        "gpu": device.slug,
        **vars(choice),
        "plan": choice.plan.as_dict() if choice.plan else None,
    }
