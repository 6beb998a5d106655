"""What ``kda-tl verify`` checks: the plans of a device, the ways in which each is called, and what a check finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kda_tl.bench.workloads import WORKLOADS, Workload, select
from kda_tl.cli._console import one_line
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan
from kda_tl.database.lookup import EXACT
from kda_tl.database.store import Database, Entry, Key
from kda_tl.errors import InputError, KdaTlError
from kda_tl.ops import find_declaration, load_declarations
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import parse_plan, select_plan

TAGS = {  # of what is tuned on such devices, by pass
    "fwd": {"cpu": "cpu", "cuda": "tune"},
    "bwd": {"cpu": "train-cpu", "cuda": "train"},
    "step": {"cpu": "decode-cpu", "cuda": "decode"},
}
RAGGED: dict[str, Any] = {"B": 2, "T": 97, "lengths": ()}  # ends inside a chunk of any size
PACKED: dict[str, Any] = {"B": 1, "T": 0, "lengths": (63, 0, 1, 130)}  # an empty sequence, one of a single token
STATES = {"initial_state": True, "state_v_first": True}
DRAFTS: dict[str, Any] = {"B": 3, "T": 2, "lengths": ()}  # of recurrent operators
PACKED_DRAFTS: dict[str, Any] = {"B": 1, "T": 0, "lengths": (3, 0, 1)}
BARE = {"l2norm": False, "beta": "plain", "final_state": False}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    subject: str
    check: str
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to call the operator: what changes in the workload, and what the caller does instead of the kernels."""

    name: str
    shape: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)  # of the problem; with any the call is the operator's bare one

    def change(self, workload: Workload) -> Workload:
        """The workload as it is called."""
        return replace(workload, name=f"{workload.name}-{self.name}", **self.shape)

    def problem(self, workload: Workload) -> Problem:
        """What kernels are built for."""
        return replace(self.change(workload).problem().without_lengths(), **self.flags)


_CHUNKED = (
    Variant(name="ragged", shape=RAGGED),
    Variant(name="packed", shape=PACKED),
    Variant(name="bare", shape=RAGGED, flags=BARE),
    Variant(name="stateful", shape={**PACKED, **STATES}),
)
VARIANTS = {  # by pass
    "fwd": _CHUNKED,
    "bwd": _CHUNKED,
    "step": (
        Variant(name="drafts", shape=DRAFTS),
        Variant(name="bare", shape={**PACKED_DRAFTS, "state_use": "rows"}, flags=BARE),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One plan to check, what for, and whether a database holds it or it is a default."""

    name: str
    workload: Workload
    plan: Plan
    shipped: bool = False

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All for defaults but the backward's; for others those that need no further kernels, ten seconds a variant."""
        w, every = self.workload, not self.shipped and self.workload.direction != "bwd"
        own = w.problem().without_lengths()
        return tuple(each for each in VARIANTS[w.direction] if every or each.problem(w) == own)


def default_subjects(device: Device, chosen: Sequence[Workload] = (), *, static: bool) -> Iterator[Subject]:
    """The default of every problem that was chosen, or that is tuned on a device.

    Compiled only, one backward stands for all that are tuned: its kernels take half a minute on two cores.
    """
    for direction, tags in TAGS.items():
        subjects: dict[tuple[Problem, Plan], Subject] = {}
        mine = [workload for workload in chosen if workload.direction == direction]
        for workload in mine if chosen else select([tags[device.kind]]):
            problem = workload.problem()
            plan = default_plan(problem, device)  # which lengths decide too
            subject = Subject(name=f"default {workload.name}", workload=workload, plan=plan)
            subjects.setdefault((problem.without_lengths(), plan), subject)
        one = static and direction == "bwd" and not chosen
        yield from list(subjects.values())[: 1 if one else None]


def stored_subjects(database: Database, device: Device, chosen: Sequence[Workload]) -> Iterator[Subject | Finding]:
    """Plans stored for a device, if workloads were chosen those of theirs; unusable ones are findings."""
    owners = {(w.operator, w.direction, Key.of(w.problem())): w for w in chosen}
    operators = load_declarations().values()
    names = [(device.slug, o.name, direction) for direction in TAGS for o in operators if direction in o.directions]
    for file in filter(None, map(database.files.get, names)):
        for key, entry in sorted(file.entries.items(), key=lambda item: item[0]):
            workload = owners.get((file.operator, file.direction, key))
            if chosen and workload is None:
                continue
            name = "stored"
            try:
                workload = workload or find_workload(entry, file.direction, file.operator)
                name = f"stored {workload.name}"
                plan = parse_plan(entry.plan, workload.problem(), device)
            except KdaTlError as error:
                yield Finding(subject=f"{name} {key.text}", check="usable", passed=False, detail=one_line(error))
            else:
                yield Subject(name=name, workload=workload, plan=plan, shipped=True)


def served_subjects(database: Database, device: Device, chosen: Sequence[Workload]) -> Iterator[Subject]:
    """What the database serves to workloads that have no plan of their own in it."""
    for workload in chosen:
        choice = select_plan(workload.problem(), device, (database,))
        if choice.plan is not None and choice.step not in (EXACT, "default"):
            name = f"served {workload.name} ({choice.step})"
            yield Subject(name=name, workload=workload, plan=choice.plan, shipped=True)


def find_workload(entry: Entry, direction: str, operator: str) -> Workload:
    """The workload of a pass that an entry was tuned on; where the table has none, one of its buckets.

    Raises InputError if no workload has the entry's key.
    """
    key = entry.key
    for workload in WORKLOADS:
        if (workload.operator, workload.direction) == (operator, direction) and Key.of(workload.problem()) == key:
            return workload
    H = max(1, key.heads_bucket // key.group)
    count = max(1, key.tokens_bucket // key.longest_bucket)
    shape: dict[str, Any] = {"B": count, "T": key.longest_bucket}
    if key.varlen:
        shape = {"lengths": (key.longest_bucket,) * count}
    sizes: dict[str, Any] = {"H": H, "HV": H * key.group, "K": key.K, "V": key.V}
    kind: dict[str, Any] = {"operator": operator, "dtype": key.dtype, "gate": key.gate, "direction": direction}
    kind |= {"state_dtype": key.state_dtype, "state_v_first": key.state_v_first}
    uses = find_declaration(operator).state_uses
    made = (Workload(name=key.text, state_use=use, **kind, **sizes, **shape) for use in uses)
    found = next((workload for workload in made if Key.of(workload.problem()).semantic == key.semantic), None)
    if found is None:
        raise InputError(f"no workload has calls of {key.text}, so its plan is not run: remove it, or tune it again.")
    return found
