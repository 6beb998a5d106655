"""``kda-tl verify``: CI's regression check. Every shipped plan compiles, agrees with the recurrence, and is current."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kda_tl import templates
from kda_tl.cli._console import ExitCode, Terminal, format_error, make_table, one_line
from kda_tl.cli._problem import add_workload_arguments, read_numbers, read_workloads
from kda_tl.cli._target import add_gpu_argument, find_here, find_known
from kda_tl.core.device import Device
from kda_tl.errors import KdaTlError

if TYPE_CHECKING:
    from kda_tl.bench.workloads import Workload
    from kda_tl.core.stage import Plan
    from kda_tl.database.lookup import TuningFile
    from kda_tl.database.store import Database, Entry, Key

TAGS = {"fwd": {"cpu": "cpu", "cuda": "tune"}, "bwd": {"cpu": "train-cpu", "cuda": "train"}}  # tuned on such devices
RAGGED: dict[str, Any] = {"B": 2, "T": 97, "lengths": ()}  # ends inside a chunk of any size
PACKED: dict[str, Any] = {"B": 1, "T": 0, "lengths": (63, 0, 1, 130)}  # an empty sequence, one of a single token
STATES = {"initial_state": True, "state_v_first": True}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    add_gpu_argument(parser)
    add_workload_arguments(parser, "all plans that are shipped")
    parser.add_argument(
        "--static",
        action="store_true",
        help="compile only, for a device that need not be here; records whose kernels are the same get today's hashes",
    )
    parser.add_argument("--time", action="store_true", help="also fail where a stored plan is slower than the default")
    parser.add_argument("--db", metavar="DIR", help="plans of this database instead of the packaged one")
    parser.add_argument("--allow-stale", action="store_true", help="report stale plans, but do not fail for them")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one a core)")
    parser.add_argument("--json", action="store_true", help="every check as JSON")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One plan to check, what for, and whether a database holds it or it is a default."""

    name: str
    workload: Workload
    plan: Plan
    shipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to call the operator: what changes in the workload, and flags of the problem that no key holds but every
    plan must serve."""

    name: str
    shape: dict[str, Any]
    flags: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant(name="ragged", shape=RAGGED),
    Variant(name="packed", shape=PACKED),
    Variant(name="bare", shape=RAGGED, flags={"l2norm": False, "beta": "plain", "final_state": False}),
    Variant(name="stateful", shape={**PACKED, **STATES}, flags=STATES),
)


def variants_of(subject: Subject) -> tuple[Variant, ...]:
    """All for the forward's defaults; for others those that need no further kernels, ten seconds a variant."""
    all_flags = not subject.shipped and subject.workload.direction == "fwd"
    return tuple(variant for variant in VARIANTS if all_flags or not variant.flags)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check."""

    subject: str
    check: str
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    detail: str = ""


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Checks the files, then the plans of every device that was named."""
    chosen = read_workloads(args) if args.workload or read_numbers(args) else ()
    devices = find_known(args.gpu) if args.static else (find_here(args.gpu, args, static=True),)
    database = _open_database(args.db)
    findings = list(_check_files(database, devices, args, terminal))
    for device in devices:
        from kda_tl.runtime.compile import require_compiler

        require_compiler(device)
        subjects = list(_default_subjects(device, chosen, static=args.static))
        for direction in TAGS:
            found, stored = _stored_subjects(database, device, direction, chosen)
            findings += found
            subjects += stored
        subjects += _served_subjects(database, device, chosen)
        count = "1 plan" if len(subjects) == 1 else f"{len(subjects)} plans"
        terminal.note(f"{device.slug} ({device.arch}): {count}, defaults among them.")
        findings += _check_device(subjects, device, args, terminal)
    failed = [finding for finding in findings if not finding.passed]
    values = {"gpu": [device.slug for device in devices], "passed": not failed, "checks": findings}
    terminal.show(values, *_tables(findings), f"{len(findings) - len(failed)} of {len(findings)} checks passed.")
    return ExitCode.REGRESSION if failed else ExitCode.OK


def _check_device(
    subjects: Sequence[Subject], device: Device, args: argparse.Namespace, terminal: Terminal
) -> list[Finding]:
    findings: list[Finding] = []
    if args.static or device.kind == "cuda":  # a GPU's kernels take seconds each
        from kda_tl.cli._compile import check_compiles

        findings += check_compiles(subjects, device, args.jobs, terminal, static=args.static)
    if args.static:
        return findings
    for number, subject in enumerate(subjects, start=1):
        terminal.note(f"  {number:>2} of {len(subjects)}  {subject.name}")
        findings += _check_subject(subject, device)
    if args.time:
        from kda_tl.cli._regression import check_speed

        shipped = [subject for subject in subjects if subject.shipped]
        for number, subject in enumerate(shipped, start=1):
            terminal.note(f"  {number:>2} of {len(shipped)}  {subject.name}: plan against default")
            findings.append(check_speed(subject, device))
    return findings


def _open_database(directory: str | None) -> Database:
    if directory is not None:
        from kda_tl.cli.db import load_directory

        return load_directory(directory)
    from kda_tl.database.store import sources

    return next(database for database in sources() if database.name == "packaged")


def _check_files(
    database: Database, devices: Sequence[Device], args: argparse.Namespace, terminal: Terminal
) -> Iterator[Finding]:
    """Every file of the database is valid, and no entry was measured with other templates than today's.

    Compiled only, files of the devices' architectures are judged by their kernels, and others are not judged.
    """
    from kda_tl.database.store import stale_stages, validate

    problems = validate(database.path)
    yield Finding(subject="database", check="valid", passed=not problems, detail=" ".join(problems))
    if args.static:
        from kda_tl.cli._renew import renew_files

        yield from renew_files(database, devices, args, terminal)
        return
    current = templates.fingerprints()
    for file in database.files.values():
        stale = {key: changed for key, entry in file.entries.items() if (changed := stale_stages(entry, current))}
        remedy = f"`kda-tl verify --gpu {file.gpu.slug} --static` tells whether their kernels did; if so, tune again"
        yield judge_file(file, stale, f"{remedy}: `kda-tl tune --stale`.", allow_stale=args.allow_stale)


def judge_file(
    file: TuningFile, stale: Mapping[Key, Sequence[str]], remedy: str, *, allow_stale: bool, told: str = ""
) -> Finding:
    """Whether plans of a file are current.

    Args:
        file: the file.
        stale: stages that changed, by the keys of stale plans.
        remedy: what to do about those.
        allow_stale: they are no failure.
        told: what else is to be said.
    """
    stages = ", ".join(sorted({stage for changed in stale.values() for stage in changed}))
    detail = f"{len(stale)} of {len(file.entries)} plans are stale ({stages} changed): {remedy}" if stale else ""
    name, passed = f"{file.gpu.slug}/{file.operator}_{file.direction}", allow_stale or not stale
    return Finding(subject=name, check="current", passed=passed, detail=" ".join(filter(None, [detail, told])))


def _default_subjects(device: Device, chosen: Sequence[Workload] = (), *, static: bool) -> Iterator[Subject]:
    """The default of every problem that was chosen, or that is tuned on a device.

    Compiled only, one backward stands for all that are tuned: its kernels take half a minute on two cores.
    """
    from kda_tl.bench.workloads import select
    from kda_tl.runtime.dispatch import default_plan

    for direction, tags in TAGS.items():
        subjects: dict[Any, Subject] = {}
        mine = [workload for workload in chosen if workload.direction == direction]
        for workload in mine if chosen else select([tags[device.kind]]):
            problem = workload.problem().without_lengths()
            plan = default_plan(problem, device)
            subjects.setdefault(problem, Subject(name=f"default {workload.name}", workload=workload, plan=plan))
        one = static and direction == "bwd" and not chosen
        yield from list(subjects.values())[: 1 if one else None]


def _stored_subjects(
    database: Database, device: Device, direction: str, chosen: Sequence[Workload]
) -> tuple[list[Finding], list[Subject]]:
    """Plans stored for a device and a pass, if workloads were chosen those of theirs; unusable ones are findings."""
    from kda_tl.database.store import Key
    from kda_tl.ops import load_all
    from kda_tl.runtime.dispatch import parse_plan

    findings: list[Finding] = []
    found: list[Subject] = []
    files = [database.files.get((device.slug, operator, direction)) for operator in load_all()]
    owners = {(w.operator, Key.of(w.problem())): w for w in chosen if w.direction == direction}
    for file, key in [(each, key) for each in files if each for key in sorted(each.entries)]:
        if chosen and (file.operator, key) not in owners:
            continue
        entry = file.entries[key]
        workload = owners.get((file.operator, key)) or find_workload(entry, direction, file.operator)
        name = f"stored {workload.name}"
        try:
            plan = parse_plan(entry.plan, workload.problem(), device)
        except KdaTlError as error:
            findings.append(Finding(subject=f"{name} {key.text}", check="usable", passed=False, detail=one_line(error)))
        else:
            found.append(Subject(name=name, workload=workload, plan=plan, shipped=True))
    return findings, found


def _served_subjects(database: Database, device: Device, chosen: Sequence[Workload]) -> Iterator[Subject]:
    """What the database serves to workloads that have no plan of their own in it."""
    from kda_tl.database.lookup import EXACT
    from kda_tl.runtime.dispatch import select_plan

    for workload in chosen:
        choice = select_plan(workload.problem(), device, (database,))
        if choice.plan is not None and choice.step not in (EXACT, "default"):
            name = f"served {workload.name} ({choice.step})"
            yield Subject(name=name, workload=workload, plan=choice.plan, shipped=True)


def find_workload(entry: Entry, direction: str, operator: str = "chunk_kda") -> Workload:
    """The workload of a pass that an entry was tuned on; where the table has none, one of its buckets."""
    from kda_tl.bench.workloads import WORKLOADS, Workload
    from kda_tl.database.store import Key

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
    return Workload(name=key.text, **kind, **sizes, **shape)


def _check_subject(subject: Subject, device: Device) -> Iterator[Finding]:
    """The operator run with the plan, each way against the recurrence."""
    from kda_tl.bench.fixtures import plan_tolerance, torch_device
    from kda_tl.cli import _call

    w = subject.workload
    tolerance = plan_tolerance(w, device)
    for variant in variants_of(subject):
        finding = Finding(subject=subject.name, check=variant.name, passed=False, tolerance=tolerance)
        inputs = replace(w, name=f"{w.name}-{variant.name}", **variant.shape).inputs(torch_device(device))
        inputs = w.declaration.bare(inputs) if variant.name == "bare" else inputs
        try:
            errors = _call.measure_errors(w.declaration, inputs, subject.plan, w.direction)
        except Exception as error:  # whatever breaks, the others are still to be checked
            yield replace(finding, detail=f"{type(error).__name__}: {one_line(error)}")
            continue
        worst = max(errors, key=lambda name: errors[name])
        passed = errors[worst] <= tolerance
        detail = "" if passed else f"{worst} is off by {errors[worst]:.1e}, over {tolerance:.0e}."
        yield replace(finding, passed=passed, error=errors[worst], detail=detail)


def _tables(findings: Sequence[Finding]) -> Iterator[Any]:
    table = make_table("plan", "check", "error", "limit", "result", right=("error", "limit"))
    for f in findings:
        limit = "-" if f.tolerance is None else f"{f.tolerance:.0e}"
        table.add_row(f.subject, f.check, format_error(f.error), limit, "ok" if f.passed else "FAILED")
    yield table
    told: dict[str, list[str]] = {}
    for f in findings:
        told.setdefault(f.detail, []).append(f"{f.subject}, {f.check}")
    for detail, where in told.items():
        more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
        yield from [f"{where[0]}{more}: {detail}"] if detail else []
