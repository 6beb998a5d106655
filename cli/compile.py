"""``kda-tl compile``: the kernels that calls will launch, built for a GPU that need not be here, as a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kda_tl import __version__
from kda_tl.aot.packaged import GPUS, list_packaged
from kda_tl.aot.plans import BUILD_TIMEOUT_S, BuildJob, KernelSpec, list_calls, list_distinct
from kda_tl.aot.writer import BundleWriter, list_entries
from kda_tl.bundle.manifest import Entry
from kda_tl.cli._console import ExitCode, Terminal, format_bytes, format_count, make_table, one_line
from kda_tl.cli._problem import read_numbers, read_workloads
from kda_tl.cli._progress import format_span
from kda_tl.cli._target import find_known, open_database, suggest
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerError, WorkerFailure, map_pool
from kda_tl.database.gpus import known_device
from kda_tl.database.store import sources
from kda_tl.errors import BundleError, InputError
from kda_tl.runtime.lower import require_compiler
from kda_tl.tune.pool import TARGET
from kda_tl.tune.stage_search import count_cores

ABOUT_S = 10.0  # that a kernel takes one core, for the estimate before any was built


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Builds what the bundle lacks, or lists a bundle."""
    if (args.list is None) == (args.out is None):
        raise InputError("pass --out DIR for the folder that the kernels go to, or --list DIR to look at a bundle.")
    if args.list is not None:
        return _show(Path(args.list), terminal)
    devices = _find_devices(args)
    for device in devices:
        require_compiler(device)
    kernels = _list_kernels(args, devices)
    return _build(kernels, Path(args.out), args, terminal)


def _find_devices(args: argparse.Namespace) -> Sequence[Device]:
    if args.packaged and args.gpu == "auto":
        return tuple(known_device(slug) for slug in GPUS)
    devices = find_known(args.gpu)
    if devices[0].kind == "cpu":
        raise InputError(f"kernels are built for GPUs: say for which, as in `{suggest(args, gpu='h100')}`.")
    return devices


def _list_kernels(args: argparse.Namespace, devices: Sequence[Device]) -> Sequence[KernelSpec]:
    with open_database(args.db):
        if args.packaged:
            if args.workload or read_numbers(args):
                raise InputError("--packaged says what is built: leave --workload and the problem's options out.")
            return list_distinct(list_packaged(devices, sources()))
        problems = [workload.problem() for workload in read_workloads(args)]
        return list_distinct(k for device in devices for p in problems for k in list_calls(p, device, sources()))


def _build(kernels: Sequence[KernelSpec], folder: Path, args: argparse.Namespace, terminal: Terminal) -> int:
    """Builds what is missing; what was built stays, whatever becomes of the rest."""
    failures: list[tuple[KernelSpec, WorkerFailure]] = []
    keep_source, cores = not args.no_source, args.jobs or count_cores()
    with BundleWriter(folder, __version__) as bundle:
        missing = bundle.list_missing(kernels, keep_source=keep_source)
        kept = len(kernels) - len(missing)
        about = format_span(ABOUT_S * -(-len(missing) // cores))
        todo = f"{len(missing)} to build on {cores} cores, about {about}" if missing else "nothing to build"
        terminal.note(f"{format_count(len(kernels), 'kernel')}, {kept} there already; {todo}.")
        try:
            for number, (kernel, result) in enumerate(_work(missing, folder, keep_source, cores), start=1):
                what = f"  {number:>3} of {len(missing)}  {kernel.stage.name:<14} {describe(kernel.built_for)}"
                if isinstance(result, WorkerFailure):
                    failures.append((kernel, result))
                    terminal.note(f"{what}  failed", cut=True)
                    if isinstance(result, WorkerError) and result.type_name == "BundleError":
                        raise BundleError(result.message)  # the folder is full or read-only: no other would fit
                    continue
                bundle.add(result)
                terminal.note(f"{what}  {format_bytes(result.bytes)}", cut=True)
        except KeyboardInterrupt:
            built = sum(kernel.digest in bundle.entries for kernel in kernels)
            terminal.note(f"interrupted: {built} of {len(kernels)} kernels are in {folder}.")
            terminal.note(f"To go on: {suggest(args)}")
            return ExitCode.INTERRUPTED
        pruned = bundle.prune(kernels) if args.prune else 0
        bundle.clean()
        entries = list(bundle.entries.values())
    size = sum({entry.binary: entry.bytes for entry in entries}.values())
    built = len(missing) - len(failures)
    values: dict[str, Any] = {"folder": str(folder), "kernels": len(entries), "bytes": size, "built": built}
    values |= {"kept": kept, "removed": pruned, "failed": [_tell(kernel, failure) for kernel, failure in failures]}
    others = len(entries) - len({kernel.digest for kernel in kernels} & bundle.entries.keys())
    parts = [f"{built} built", f"{kept} kept", *([f"{others} of other problems"] if others else [])]
    parts += [f"{pruned} removed"] * bool(pruned) + [f"{len(failures)} failed"] * bool(failures)
    total = f"{folder}: {format_count(len(entries), 'kernel')}, {format_bytes(size)} ({', '.join(parts)})"
    terminal.show(values, *(f"failed: {line}" for line in values["failed"]), total)
    return ExitCode.REGRESSION if failures else ExitCode.OK


def _work(
    kernels: Sequence[KernelSpec], folder: Path, keep_source: bool, cores: int
) -> Iterator[tuple[KernelSpec, Entry | WorkerFailure]]:
    """Every kernel with its entry, or with why there is none, as they end."""
    jobs = [BuildJob(kernel=kernel, folder=str(folder.resolve()), keep_source=keep_source) for kernel in kernels]
    for index, result in map_pool(TARGET, jobs, jobs=cores, timeout_s=BUILD_TIMEOUT_S):
        yield kernels[index], result


def _tell(kernel: KernelSpec, failure: WorkerFailure) -> str:
    text = failure.message if isinstance(failure, WorkerError) else str(failure)
    return f"{kernel.stage.name} {describe(kernel.built_for)}: {one_line(text)}"


def _show(folder: Path, terminal: Terminal) -> int:
    """A bundle as a table."""
    entries = list_entries(folder)
    rows = [
        (e.stage, describe(e.built_for), e.arch, _number(e.registers), _number(e.local_bytes), f"{e.bytes:,}", state)
        for e, state in entries
    ]
    columns = ("stage", "for", "arch", "regs", "local", "bytes", "state")
    table = make_table(*columns, right=("regs", "local", "bytes"), rows=rows)
    good = sum(state == "ok" for _, state in entries)
    size = sum({e.binary: e.bytes for e, _ in entries}.values())
    total = f"{format_count(len(entries), 'kernel')}, {good} ok, {format_bytes(size)} in {folder}"
    values = [{**asdict(entry), "state": state} for entry, state in entries]
    terminal.show({"folder": str(folder), "kernels": values}, table, total)
    return ExitCode.OK if good == len(entries) else ExitCode.REGRESSION


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def describe(built_for: Any) -> str:
    """What a kernel is for, in a few words, as far as it depends on that: ``H32 K128 bf16 safe 64/16``."""
    problem = built_for.get("problem", built_for)
    heads = {"H": problem.get("H"), "HV": problem.get("HV") if problem.get("HV") != problem.get("H") else None}
    sizes = {**heads, "K": problem.get("K"), "V": problem.get("V") if problem.get("V") != problem.get("K") else None}
    words = [f"{name}{size}" for name, size in sizes.items() if size]
    words += [str(problem[name]) for name in ("dtype", "gate") if problem.get(name)]
    if problem.get("g_dtype") not in (None, problem.get("dtype")):
        words.append(f"g-{problem['g_dtype']}")
    states = {"initial_state": "h0", "final_state": "ht", "state_v_first": "vk"}
    words += [short for name, short in states.items() if problem.get(name)]
    if "state_dtype" in problem:  # of a recurrent operator; what is given and what is written tell its calls apart
        words += [f"states-{problem['state_dtype']}", *(name for name in problem["options"] if name[:4] != "has_")]
    if built_for.get("BT"):
        words.append(f"{built_for['BT']}/{built_for.get('BC', '')}")
    return " ".join(words)
