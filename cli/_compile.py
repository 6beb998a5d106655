"""Every kernel of every shipped plan compiled or hashed by several processes, for a device that need not be here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kda_tl import templates
from kda_tl.cli._console import Terminal, one_line
from kda_tl.cli.verify import Finding, Subject, variants_of
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.tune.isolate import WorkerFailure, map_pool
from kda_tl.tune.pool import TARGET
from kda_tl.tune.requests import CompileJob, HashJob

COMPILE_TIMEOUT_S = 300.0


def check_compiles(
    subjects: Sequence[Subject], device: Device, jobs: int | None, terminal: Terminal, *, static: bool
) -> Iterator[Finding]:
    """One finding a plan; TileLang's disk cache then holds the kernels.

    Args:
        subjects: the plans.
        device: for which device.
        jobs: processes, one a core unless given.
        terminal: where progress is told.
        static: nothing will run: of kernels that differ in the number of heads only, one constant, the first stands for
            all, and the workload's own flags for others.
    """
    kernels: dict[Any, CompileJob] = {}
    owners: dict[Any, list[str]] = {}
    for subject in subjects:
        for problem in _problems(subject)[: 1 if static else None]:
            case = Case(problem=problem, device=device, BT=subject.plan.BT, BC=subject.plan.BC)
            alike = replace(problem, direction="fwd")  # a stage's kernel is the same in both passes
            alike = replace(alike, H=1, HV=problem.group) if static else alike
            for name, config in subject.plan.stages:
                key = name, alike, case.BT, case.BC, config
                kernels.setdefault(key, CompileJob(stage=templates.load(name), case=case, config=config))
                owners.setdefault(key, []).append(subject.name)
    failures = _compile(kernels, jobs, terminal)
    for subject in subjects:
        details = [failures[key] for key, names in owners.items() if subject.name in names and key in failures]
        yield Finding(subject=subject.name, check="compiles", passed=not details, detail=" ".join(details))


def _problems(subject: Subject) -> Sequence[Problem]:
    """The problems whose kernels differ, the workload's own first."""
    problem = subject.workload.problem().without_lengths()
    return list(dict.fromkeys(replace(problem, **variant.flags) for variant in variants_of(subject)))


def _compile(kernels: Mapping[Any, CompileJob], jobs: int | None, terminal: Terminal) -> dict[Any, str]:
    """Failures by kernel."""
    results = _run(kernels, jobs, lambda seconds: f"{seconds:.1f} s", terminal)
    return {key: one_line(result) for key, result in results.items() if isinstance(result, WorkerFailure)}


def hash_kernels(kernels: Mapping[Any, HashJob], jobs: int | None, terminal: Terminal) -> dict[Any, str]:
    """Hashes by kernel, without those that do not compile."""
    results = _run(kernels, jobs, lambda found: f"hash {found[:12]}", terminal)
    return {key: result for key, result in results.items() if not isinstance(result, WorkerFailure)}


def _run(
    kernels: Mapping[Any, CompileJob | HashJob], jobs: int | None, describe: Callable[[Any], str], terminal: Terminal
) -> dict[Any, Any]:
    """Results by kernel, failures among them."""
    results: dict[Any, Any] = {}
    named = list(kernels.items())
    found = map_pool(TARGET, list(kernels.values()), jobs=jobs or os.cpu_count() or 1, timeout_s=COMPILE_TIMEOUT_S)
    for done, (index, result) in enumerate(found, start=1):
        key, job = named[index]
        results[key] = result
        state = "failed" if isinstance(result, WorkerFailure) else describe(result)
        terminal.note(f"  {done:>3} of {len(kernels)}  {job.stage.name:<10} BT={job.case.BT:<2} {state}")
    return results
