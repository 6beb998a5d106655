"""``kda-tl verify --static``: stored plans held against the kernels that today's sources make, and records renewed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kda_tl import templates
from kda_tl.cli._compile import hash_kernels
from kda_tl.cli._console import Terminal
from kda_tl.cli.verify import Finding, judge_file
from kda_tl.core.device import Device
from kda_tl.core.stage import Case
from kda_tl.database.lookup import TuningFile
from kda_tl.database.staleness import list_unproved, renew
from kda_tl.database.store import Database, Entry, Key, store
from kda_tl.errors import DatabaseError, InputError
from kda_tl.runtime.dispatch import parse_plan
from kda_tl.tune.requests import HashJob
from kda_tl.tune.stage_search import compiler_version

REMEDY = "their kernels differ, or no hash tells what they were; run `kda-tl tune --stale`."


def renew_files(
    database: Database, devices: Sequence[Device], args: argparse.Namespace, terminal: Terminal
) -> Iterator[Finding]:
    """One finding a file of the devices' architectures: their GPUs share most kernels, and each is lowered once.

    A plan is stale if sources and kernels differ from those that were measured. Where sources alone differ, or kernels
    have no hash yet, the file gets the hashes of today. Only kernels that decide this are lowered; nothing is compiled.

    Args:
        database: what is checked, and written if it may be.
        devices: for which devices.
        args: ``jobs``, processes, and ``allow_stale``: stale plans are no failure.
        terminal: where progress is told.
    """
    archs, version = {device.arch for device in devices}, compiler_version()
    files = [file for file in database.files.values() if file.gpu.arch in archs]
    kernels = {
        (file.path, key): _list_kernels(file, entry, version) for file in files for key, entry in file.entries.items()
    }
    shared = {_identify(job): job for jobs in kernels.values() for job in jobs.values()}
    if shared:
        terminal.note(f"Lowering {len(shared)} kernels whose sources changed, or that have no hash yet.")
    hashes = hash_kernels(shared, args.jobs, terminal) if shared else {}
    current = templates.fingerprints()
    for file in files:
        renewed: list[Entry] = []
        stale: dict[Key, Sequence[str]] = {}
        for key, entry in file.entries.items():
            jobs = {name: _identify(job) for name, job in kernels[file.path, key].items()}
            found = {name: hashes[kernel] for name, kernel in jobs.items() if kernel in hashes}
            now, changed = renew(entry, current, version, found)
            if changed:
                stale[key] = changed
            elif now != entry:
                renewed.append(now)
        told = _write(database, file, renewed) if renewed else ""
        yield judge_file(file, stale, REMEDY, allow_stale=args.allow_stale, told=told)


def _list_kernels(file: TuningFile, entry: Entry, version: str) -> dict[str, HashJob]:
    """What decides whether an entry is stale, by stage; nothing if its plan does not run, which another check tells."""
    device, problem = file.gpu.as_device(), entry.key.problem(file.operator, file.direction)
    unproved = list_unproved(entry, templates.fingerprints(), version)
    try:
        plan = parse_plan(entry.plan, problem, device)
    except InputError:
        return {}
    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    return {
        name: HashJob(stage=templates.load(name), case=case, config=config)
        for name, config in plan.stages
        if name in unproved
    }


def _identify(job: HashJob) -> Any:
    """Equal for equal kernels: those of both passes, and of GPUs that differ in their names only."""
    device, problem = replace(job.case.device, slug=""), replace(job.case.problem, direction="fwd")
    return job.stage.name, replace(job.case, device=device, problem=problem), job.config


def _write(database: Database, file: TuningFile, entries: Sequence[Entry]) -> str:
    """Writes entries; says in a sentence what was renewed, or why it was not."""
    what = "1 plan runs" if len(entries) == 1 else f"{len(entries)} plans run"
    what += " the kernels that were measured: today's hashes of sources and kernels"
    try:
        path = store(database.path, file.gpu.as_device(), file.operator, file.direction, entries)
    except DatabaseError as error:
        return f"{what} are not written, as kda_tl {error}"
    return f"{what} are written to {path}."
