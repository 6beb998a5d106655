"""Records, workloads and processes that the tests of the command line share; its fixtures are in conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bench.workloads import Workload, select
from kda_tl.core.device import Device, cpu_device
from kda_tl.core.stage import Plan
from kda_tl.database import store as db
from kda_tl.database.records import Check, Entry, Key, Timing, VsDefault
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import numerics_class
from kda_tl.tune.events import WorkloadReport
from kda_tl.tune.search import Evaluation, SearchResult

ANSI = "\x1b"
OLD = dict.fromkeys(templates.names(), "0" * 64)  # fingerprints of other templates
CPU = cpu_device()
SMALL = select(["cpu-safe-K32"])[0]
SMALL_BACKWARD = select(["train-cpu-safe-K32"])[0]
SMALL_STEP = select(["kda-decode-cpu"])[0]
BACKWARD_PLAN = default_plan(SMALL_BACKWARD.problem(), CPU)

Run = Callable[..., tuple[int, str, str]]


def make_entry(workload: Workload, device: Device, plan: Plan | None = None, **changes: Any) -> Entry:
    problem = workload.problem()
    plan = plan or default_plan(problem, device, BT=32)
    entry = Entry(
        key=Key.of(problem),
        plan=plan.as_dict(),
        numerics=numerics_class(plan),
        time_us=Timing(median=412.6, mad=1.4, reps=300, rounds=5),
        vs_default=VsDefault(ratio=1.21, ci95=(1.2, 1.22)),
        check=Check(max_rel_err=0.0031, tolerance=0.006),
        templates={name: templates.fingerprint(name) for name, _ in plan.stages},
        provenance={"date": "2026-01-01T00:00:00+00:00"},
    )
    return replace(entry, **changes)


def store(
    directory: Path, device: Device, *entries: Entry, direction: str = "fwd", operator: str = "chunk_kda"
) -> Path:
    path = db.store(directory, device, operator, direction, entries)
    db.reload()
    return path


def spawn_env() -> dict[str, str]:
    """The environment of a process that imports what this one can; folders of tests are added as they are collected."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def spawn(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = spawn_env() | more.pop("env", {})
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False, **more)


def make_search(trials: tuple[Evaluation, ...] = ()) -> SearchResult:
    return SearchResult(trials=trials, stopped_because="everything was tried")


def make_report(workload: Workload = SMALL, **changes: Any) -> WorkloadReport:
    report = WorkloadReport(
        workload=workload,
        entry=None,
        path=None,
        default=default_plan(workload.problem(), CPU),
        stages=(),
        plans=(),
        stopped_because="everything was tried",
        seconds=1.5,
    )
    return replace(report, **changes)
