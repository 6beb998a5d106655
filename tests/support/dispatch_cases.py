"""Plans and databases that the tests of the dispatch policy make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.store import Database, Entry
from kda_tl.runtime.defaults import iter_defaults

H200 = known_device("nvidia_h200")
PROBLEM = Problem(H=32, HV=32, K=128, V=128, tokens=8192, gate="safe")


def make_plan(BT: int = 64, BC: int = 16, problem: Problem = PROBLEM, device: Device = H200, **changes: Any) -> Plan:
    """The default of the pipelines that run anywhere; each change is a stage and the config to take instead."""
    plans = iter_defaults(problem, device, BT=BT, BC=BC)
    plan = next(plan for plan in plans if plan.pipeline.startswith("staged"))
    return replace(plan, stages=tuple((name, changes.get(name, config)) for name, config in plan.stages))


def make_database(folder: Path, *entries: Entry, device: Device = H200, name: str = "test") -> Database:
    db.store(folder / name, device, "chunk_kda", "fwd", entries)
    return Database.load(folder / name, name)
