"""Kernels of plans, by several processes and for a device that need not be here: compiled, or held against records."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kda_tl import templates
from kda_tl.cli._console import Terminal, one_line
from kda_tl.cli._subjects import Finding, Subject
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerFailure, map_pool
from kda_tl.core.stage import Case
from kda_tl.database.lookup import TuningFile
from kda_tl.database.staleness import list_unproved, renew
from kda_tl.database.store import Database, Entry, Key, store
from kda_tl.errors import DatabaseError, InputError
from kda_tl.runtime.dispatch import parse_plan
from kda_tl.tune.pool import TARGET
from kda_tl.tune.requests import CompileJob, HashJob
from kda_tl.tune.stage_search import compiler_version, count_cores

COMPILE_TIMEOUT_S = 300.0
REMEDY = "their kernels differ, or no hash tells what they were; run `kda-tl tune --stale`."


def check_compiles(
    subjects: Sequence[tuple[Device, Subject]], jobs: int | None, terminal: Terminal, *, static: bool
) -> Iterator[Finding]:
    """One finding a plan; TileLang's disk cache then holds the kernels, once for devices that share them.

    With ``static`` nothing will run: the workload's own flags stand for others. ``jobs`` is the number of processes,
    one a core unless given.
    """
    wanted = [{_identify(job): job for job in _list_jobs(s, d, static)} for d, s in subjects]
    kernels: dict[Any, CompileJob] = {}
    for key, job in (item for each in wanted for item in each.items()):
        kernels.setdefault(key, job)
    results = _run(kernels, jobs, terminal)
    for (_, subject), each in zip(subjects, wanted, strict=True):
        details = [one_line(results[key]) for key in each if isinstance(results.get(key), WorkerFailure)]
        yield Finding(subject=subject.name, check="compiles", passed=not details, detail=" ".join(details))


def _list_jobs(subject: Subject, device: Device, static: bool) -> Iterator[CompileJob]:
    """The kernels of a plan: of its workload, and of flags that make others unless that stands for them."""
    workload, plan = subject.workload, subject.plan
    own = workload.problem().without_lengths()
    problems = dict.fromkeys([own, *(variant.problem(workload) for variant in subject.variants)])
    for each in list(problems)[: 1 if static else None]:
        case = Case(problem=each, device=device, BT=plan.BT, BC=plan.BC)
        for name, config in plan.stages:
            yield CompileJob(stage=templates.load(name), case=case, config=config)


def renew_files(
    database: Database, devices: Sequence[Device], args: argparse.Namespace, terminal: Terminal
) -> Iterator[Finding]:
    """One finding a file of the devices' architectures: their GPUs share most kernels, and each is lowered once.

    A plan is stale if sources and kernels differ from those that were measured. Where sources alone differ, or kernels
    have no hash yet, the file gets the hashes of today. Only kernels that decide this are lowered; nothing is compiled.
    """
    archs, version = {device.arch for device in devices}, compiler_version()
    files = [file for file in database.files.values() if file.gpu.arch in archs]
    jobs = {(file.path, key): _list_unproved(file, e, version) for file in files for key, e in file.entries.items()}
    shared = {_identify(job): job for each in jobs.values() for job in each.values()}
    if shared:
        terminal.note(f"Lowering {len(shared)} kernels whose sources changed, or that have no hash yet.")
    hashes = _run(shared, args.jobs, terminal)
    current = templates.fingerprints()
    for file in files:
        renewed: list[Entry] = []
        stale: dict[Key, Sequence[str]] = {}
        for key, entry in file.entries.items():
            found = {name: hashes[_identify(job)] for name, job in jobs[file.path, key].items()}
            known = {name: text for name, text in found.items() if not isinstance(text, WorkerFailure)}
            now, changed = renew(entry, current, version, known)
            if changed:
                stale[key] = changed
            elif now != entry:
                renewed.append(now)
        told = _write(database, file, renewed) if renewed else ""
        yield judge_file(file, stale, REMEDY, allow_stale=args.allow_stale, told=told)


def judge_file(
    file: TuningFile, stale: Mapping[Key, Sequence[str]], remedy: str, *, allow_stale: bool, told: str = ""
) -> Finding:
    """Whether plans of a file are current: ``stale`` holds the stages that changed, ``told`` what else there is."""
    stages = ", ".join(sorted({stage for changed in stale.values() for stage in changed}))
    detail = f"{len(stale)} of {len(file.entries)} plans are stale ({stages} changed): {remedy}" if stale else ""
    name, passed = f"{file.gpu.slug}/{file.operator}_{file.direction}", allow_stale or not stale
    return Finding(subject=name, check="current", passed=passed, detail=" ".join(filter(None, [detail, told])))


def _list_unproved(file: TuningFile, entry: Entry, version: str) -> dict[str, HashJob]:
    """What decides whether an entry is stale, by stage; nothing if its plan does not run, which another check tells."""
    device, problem = file.gpu.as_device(), entry.key.problem(file.operator, file.direction)
    unproved = list_unproved(entry, templates.fingerprints(), version)
    try:
        plan = parse_plan(entry.plan, problem, device)
    except InputError:
        return {}
    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    configs = {name: config for name, config in plan.stages if name in unproved}
    return {name: HashJob(stage=templates.load(name), case=case, config=config) for name, config in configs.items()}


def _identify(job: CompileJob | HashJob) -> Any:
    """Equal for equal kernels: those of problems that differ in what a stage ignores, of GPUs in their names only."""
    case = job.stage.specialise(job.case)
    return job.stage.name, replace(case, device=replace(case.device, slug="")), job.config


def _run(kernels: Mapping[Any, CompileJob | HashJob], jobs: int | None, terminal: Terminal) -> dict[Any, Any]:
    """Results by kernel: seconds, hashes, and failures among them."""
    results: dict[Any, Any] = {}
    named = list(kernels.items())
    found = map_pool(TARGET, list(kernels.values()), jobs=jobs or count_cores(), timeout_s=COMPILE_TIMEOUT_S)
    for done, (index, result) in enumerate(found, start=1):
        key, job = named[index]
        results[key] = result
        state = "failed"
        if not isinstance(result, WorkerFailure):
            state = f"hash {result[:12]}" if isinstance(job, HashJob) else f"{result:.1f} s"
        terminal.note(
            f"  {done:>3} of {len(kernels)}  {job.stage.name:<10} {f'BT={job.case.BT:<2} ' * (job.case.BT > 0)}{state}"
        )
    return results


def _write(database: Database, file: TuningFile, entries: Sequence[Entry]) -> str:
    """Writes entries; says in a sentence what was renewed, or why it was not."""
    what = "1 plan runs" if len(entries) == 1 else f"{len(entries)} plans run"
    what += " the kernels that were measured: today's hashes of sources and kernels"
    try:
        path = store(database.path, file.gpu.as_device(), file.operator, file.direction, entries)
    except DatabaseError as error:
        return f"{what} are not written, as kda_tl {error}"
    return f"{what} are written to {path}."
