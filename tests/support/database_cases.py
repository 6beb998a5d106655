"""Records and databases that the tests of tuning databases make."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.database.records import Check, Timing, VsDefault
from kda_tl.database.store import Database, Entry, Hit, Key, iter_hits, store

NAME = {"operator": "chunk_kda", "direction": "fwd"}
H200 = known_device("nvidia_h200")
H100 = known_device("nvidia_h100_nvl")
PCIE = known_device("nvidia_h100_pcie")
H20 = known_device("nvidia_h20")
A100 = known_device("nvidia_a100_sxm4_80gb")


def make_key(heads: int = 32, tokens: int = 8192, longest: int | None = None, **fields: Any) -> Key:
    problem = Problem(H=heads, HV=heads, K=128, V=128, tokens=tokens, longest=longest or tokens, gate="safe")
    return Key.of(problem)._replace(**fields)


def make_entry(key: Key, ratio: float = 1.21, BV: int = 64, numerics: str = "BT64-BC16-accf32") -> Entry:
    return Entry(
        key=key,
        plan={"pipeline": "staged", "BT": 64, "BC": 16, "stages": {"fwd_state": {"BV": BV, "threads": 128}}},
        numerics=numerics,
        time_us=Timing(median=412.6, mad=1.4, reps=300, rounds=5),
        vs_default=VsDefault(ratio=ratio, ci95=(ratio, ratio)),
        check=Check(max_rel_err=0.0031, tolerance=0.006),
        templates={"fwd_state": "0" * 64},
        provenance={**db.provenance(), "failed": {"compile": 9}},
    )


def make_database(folder: Path, device: Device, *entries: Entry, name: str = "test") -> Database:
    store(folder, device, "chunk_kda", "fwd", entries)
    return Database.load(folder, name)


def edit(path: Path, change: Callable[[Any], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def lookup(key: Key, device: Device, databases: Sequence[Database], **options: Any) -> Hit | None:
    """The best hit."""
    return next(iter_hits(key, device, databases, **options), None)


def find(key: Key, device: Device, *databases: Database, **options: Any) -> tuple[str, str, Key] | None:
    """Step, source and key of what a lookup finds."""
    hit = lookup(key, device, databases, **NAME, **options)
    return hit and (hit.step, hit.database.name, hit.entry.key)
