"""``kda-tl verify``: CI's regression check. Every shipped plan compiles, agrees with the recurrence, and is current."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kda_tl import templates
from kda_tl.bench.fixtures import plan_tolerance, torch_device
from kda_tl.bench.timing import summarise, time_interleaved
from kda_tl.cli import _call
from kda_tl.cli._console import ExitCode, Terminal, format_count, format_error, format_us, make_table, one_line
from kda_tl.cli._kernels import check_compiles, judge_file, renew_files
from kda_tl.cli._problem import read_numbers, read_workloads
from kda_tl.cli._subjects import Finding, Subject, default_subjects, served_subjects, stored_subjects
from kda_tl.cli._target import find_here, find_known, load_directory
from kda_tl.core.device import Device
from kda_tl.database.store import Database, sources, stale_stages, validate
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.lower import require_compiler

# A plan is too slow if it is so in more than one of three rounds
ROUNDS, MAX_BAD_ROUNDS = 3, 1
SUBROUNDS = 5  # medians a round
MIN_RATIO, MADS, MIN_US = 0.05, 3.0, 2.0


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Checks the files, then the plans of every device that was named."""
    chosen = read_workloads(args) if args.workload or read_numbers(args) else ()
    devices = find_known(args.gpu) if args.static else (find_here(args.gpu, args, static=True),)
    packaged = (database for database in sources() if database.name == "packaged")
    database = next(packaged) if args.db is None else load_directory(args.db)
    findings = list(_check_files(database, devices, args, terminal))
    subjects: list[tuple[Device, Subject]] = []
    for device in devices:
        require_compiler(device)
        stored = list(stored_subjects(database, device, chosen))
        findings += [found for found in stored if isinstance(found, Finding)]
        mine = list(default_subjects(device, chosen, static=args.static))
        mine += [found for found in stored if isinstance(found, Subject)]
        mine += served_subjects(database, device, chosen)
        terminal.note(f"{device.slug} ({device.arch}): {format_count(len(mine), 'plan')}, defaults among them.")
        if len(devices) > 1:
            mine = [replace(subject, name=f"{device.slug}: {subject.name}") for subject in mine]
        subjects += [(device, subject) for subject in mine]
    if args.static or devices[0].kind == "cuda":  # a GPU's kernels take seconds each
        findings += check_compiles(subjects, args.jobs, terminal, static=args.static)
    if not args.static:
        findings += _check_runs([subject for _, subject in subjects], devices[0], args, terminal)
    failed = [finding for finding in findings if not finding.passed]
    values = {"gpu": [device.slug for device in devices], "passed": not failed, "checks": findings}
    terminal.show(values, *_tables(findings), f"{len(findings) - len(failed)} of {len(findings)} checks passed.")
    return ExitCode.REGRESSION if failed else ExitCode.OK


def _check_runs(
    subjects: Sequence[Subject], device: Device, args: argparse.Namespace, terminal: Terminal
) -> Iterator[Finding]:
    for number, subject in enumerate(subjects, start=1):
        terminal.note(f"  {number:>2} of {len(subjects)}  {subject.name}")
        yield from _check_subject(subject, device)
    shipped = [subject for subject in subjects if subject.shipped and args.time]
    for number, subject in enumerate(shipped, start=1):
        terminal.note(f"  {number:>2} of {len(shipped)}  {subject.name}: plan against default")
        yield check_speed(subject, device)


def _check_files(
    database: Database, devices: Sequence[Device], args: argparse.Namespace, terminal: Terminal
) -> Iterator[Finding]:
    """Every file of the database is valid, and no entry was measured with other templates than today's.

    Compiled only, files of the devices' architectures are judged by their kernels, and others are not judged.
    """
    problems = validate(database.path)
    yield Finding(subject="database", check="valid", passed=not problems, detail=" ".join(problems))
    if args.static:
        yield from renew_files(database, devices, args, terminal)
        return
    current = templates.fingerprints()
    for file in database.files.values():
        stale = {key: changed for key, entry in file.entries.items() if (changed := stale_stages(entry, current))}
        remedy = f"`kda-tl verify --gpu {file.gpu.slug} --static` tells whether their kernels did; if so, tune again"
        yield judge_file(file, stale, f"{remedy}: `kda-tl tune --stale`.", allow_stale=args.allow_stale)


def _check_subject(subject: Subject, device: Device) -> Iterator[Finding]:
    """The operator run with the plan, each way against the recurrence."""
    w = subject.workload
    tolerance = plan_tolerance(w, device)
    for variant in subject.variants:
        finding = Finding(subject=subject.name, check=variant.name, passed=False, tolerance=tolerance)
        inputs = variant.change(w).inputs(torch_device(device))
        inputs = w.declaration.bare(inputs) if variant.flags else inputs
        try:
            errors = _call.measure_errors(w.declaration, inputs, subject.plan, w.direction)
        except Exception as error:  # whatever breaks, the others are still to be checked
            yield replace(finding, detail=f"{type(error).__name__}: {one_line(error)}")
            continue
        worst = max(errors, key=lambda name: errors[name])
        passed = errors[worst] <= tolerance
        detail = "" if passed else f"{worst} is off by {errors[worst]:.1e}, over {tolerance:.0e}."
        yield replace(finding, passed=passed, error=errors[worst], detail=detail)


def check_speed(subject: Subject, device: Device) -> Finding:
    """Times plan and default in turns; fails if the plan is clearly slower in 2 of 3 rounds."""
    finding = Finding(subject=subject.name, check="speed", passed=True)
    workload, problem = subject.workload, subject.workload.problem()
    BT = subject.plan.BT
    side_by_side = -(-workload.tokens // BT) if BT else problem.sequences
    if side_by_side * problem.HV < device.num_sms:
        return replace(finding, detail="smaller than a wave: not gated.")
    default = default_plan(problem, device)
    if default == subject.plan:
        return finding
    where, reps = torch_device(device), 3 if device.kind == "cpu" else 20
    launches = _call.make_launches(workload, where, {"plan": subject.plan, "default": default})
    with torch.no_grad():
        rounds = [time_interleaved(launches, where, rounds=SUBROUNDS, reps=reps) for _ in range(ROUNDS)]
    bad = [r for r in rounds if is_slower(r["plan"], r["default"])]
    middles = [[format_us(statistics.median(r[name])) for name in ("plan", "default")] for r in rounds]
    passed = len(bad) <= MAX_BAD_ROUNDS
    times = ", ".join(" against ".join(pair) for pair in middles)
    detail = "" if passed else f"slower than the default in {len(bad)} of {ROUNDS} rounds: {times}."
    return replace(finding, passed=passed, detail=detail)


def is_slower(plan: Sequence[float], default: Sequence[float]) -> bool:
    """Whether a plan is slower by more than 5 %, by more than the noise, and by more than a launch's jitter."""
    middle, mad = summarise(default)
    behind = statistics.median(plan) - middle
    return behind > max(MIN_RATIO * middle, MADS * mad) and behind > MIN_US


def _tables(findings: Sequence[Finding]) -> Iterator[Any]:
    rows = [
        (f.subject, f.check, format_error(f.error), format_error(f.tolerance, 0), "ok" if f.passed else "FAILED")
        for f in findings
    ]
    yield make_table("plan", "check", "error", "limit", "result", right=("error", "limit"), rows=rows)
    told: dict[str, list[str]] = {}
    for f in findings:
        told.setdefault(f.detail, []).append(f"{f.subject}, {f.check}")
    for detail, where in told.items():
        more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
        yield from [f"{where[0]}{more}: {detail}"] if detail else []
