"""``kda-tl doctor``: what works on this machine, and what to install for the rest."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_tl.cli._console import ExitCode, Terminal, make_table, one_line
from kda_tl.cli._exit import was_interrupted
from kda_tl.core.device import Device, cpu_device, cuda_device, find_compiler
from kda_tl.core.packages import REQUIREMENTS
from kda_tl.core.toolchain import (
    CACHE_VARIABLE,
    cache_directory,
    cache_refusal,
    can_import_tilelang,
    explain_missing,
    import_tilelang,
)
from kda_tl.errors import KdaTlError

OK, MISSING, NOTE = "ok", "MISSING", "note"
PACKAGES = REQUIREMENTS | {"tvm_ffi": "apache-tvm-ffi"}  # which comes with TileLang
ORDER = ("torch", "tilelang", "tvm_ffi", "optuna", "numpy", "filelock", "platformdirs", "psutil", "rich", "pynvml")
NEEDED_PYTHON = (3, 10)
NVCC_HINT = "install a CUDA toolkit of 12.3 or later, or `pip install 'kda-tl[cuda-compiler]'`"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table.

    Attributes:
        name: what was looked at.
        state: "ok", "MISSING" (something needed) or "note" (something that would add to what works).
        found: what is there.
        hint: what to do about it.
    """

    name: str
    state: str
    found: str
    hint: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--no-kernel", action="store_true", help="do not compile and run a kernel")
    parser.add_argument("--json", action="store_true", help="every check as JSON")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs every check; one that breaks is a finding, not the end."""
    groups: list[Callable[[], Iterator[Check]]] = [_packages, _gpu, _compilers, _databases, _directories, _peers]
    checks = [check for group in groups for check in _guard(group)]
    if not args.no_kernel:
        for device in _devices():
            terminal.note(f"Compiling and running a small kernel on {device.slug}.")
            checks += _guard(functools.partial(_kernel, device))
    if was_interrupted():  # in the import of a package that took it for an error of its own
        raise KeyboardInterrupt
    missing = [check for check in checks if check.state == MISSING]
    terminal.show({"ok": not missing, "checks": checks}, *_tables(checks))
    return ExitCode.ENVIRONMENT if missing else ExitCode.OK


def _guard(group: Callable[[], Iterator[Check]]) -> list[Check]:
    checks: list[Check] = []
    try:
        checks.extend(group())
    except (Exception, SystemExit) as error:  # a broken package raises whatever it likes when it is imported
        name = getattr(group, "__name__", "kernel").strip("_")
        checks.append(Check(name=name, state=MISSING, found=f"{type(error).__name__}: {one_line(error)}"))
    if was_interrupted():
        raise KeyboardInterrupt
    return checks


def _packages() -> Iterator[Check]:
    python = f"{platform.python_version()} ({sys.executable})"
    fits = sys.version_info >= NEEDED_PYTHON
    hint = "" if fits else "install Python 3.10 or later"
    yield Check(name="python", state=OK if fits else MISSING, found=python, hint=hint)
    try:
        yield Check(name="kda-tl", state=OK, found=metadata.version("kda-tl"))
    except metadata.PackageNotFoundError:
        yield Check(name="kda-tl", state=NOTE, found="not installed, run from its folder", hint="pip install -e .")
    for module in ORDER:
        yield _package(module, PACKAGES[module])


def _package(module: str, requirement: str) -> Check:
    """Whether a package is there, and works."""
    name = requirement.partition(">")[0]
    hint = f"pip install '{requirement}'"
    try:
        import_tilelang() if module == "tilelang" else importlib.import_module(module)
    except Exception as error:  # a broken package raises whatever it likes
        found, state = one_line(error.__cause__ or error), MISSING
        if module == "pynvml":  # measured without it, too
            state, hint = NOTE, f"clocks and driver are then not recorded: {hint}"
        return Check(name=name, state=state, found=f"cannot be imported ({found})", hint=hint)
    try:
        return Check(name=name, state=OK, found=metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name=name, state=OK, found="version unknown")


def _devices() -> list[Device]:
    try:
        import torch

        gpus = [cuda_device(torch.cuda.current_device())] if torch.cuda.is_available() else []
    except Exception:  # no torch: its own check tells
        return []
    return [cpu_device(), *gpus]


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield Check(name="gpu", state=NOTE, found=f"none: {built}", hint="the CPU target works without one")
        return
    from kda_tl.bench.timing import read_gpu_state

    device = cuda_device(torch.cuda.current_device())
    state = read_gpu_state(torch.cuda.current_device())
    driver = f", driver {state['driver']}" if "driver" in state else ""
    found = f"{device.slug}, {device.arch}, {device.num_sms} SMs, {device.smem_bytes} bytes shared{driver}"
    yield Check(name="gpu", state=OK, found=f"{found}, torch for CUDA {torch.version.cuda}")


def _compilers() -> Iterator[Check]:
    has_gpu = len(_devices()) > 1
    compiler = find_compiler(cpu_device())
    if compiler:
        yield Check(name="C++ compiler", state=OK, found=f"{compiler}, {_version(compiler)}")
    else:
        hint = "install g++ (Debian, Ubuntu: apt install g++) or clang++; until then the CPU runs plain PyTorch"
        yield Check(name="C++ compiler", state=MISSING, found="none", hint=hint)
    probe = Device(slug="", arch="sm_0", num_sms=0, smem_bytes=0)
    nvcc = find_compiler(probe)
    if nvcc:
        yield Check(name="nvcc", state=OK, found=f"{nvcc}, {_version(nvcc)}")
    elif has_gpu:
        yield Check(name="nvcc", state=MISSING, found="none", hint=NVCC_HINT)
    else:
        yield Check(name="nvcc", state=NOTE, found="none", hint=f"needed to compile for GPUs (--static): {NVCC_HINT}")


def _version(compiler: str) -> str:
    """The line of ``--version`` that holds a release."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=False)
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return next((line for line in lines if "release" in line), lines[0] if lines else "version unknown")


def _databases() -> Iterator[Check]:
    from kda_tl.database.store import sources

    for database in sources():
        entries = sum(len(file.entries) for file in database.files.values())
        gpus = ", ".join(sorted({file.gpu.slug for file in database.files.values()}))
        found = f"{entries} plans{f' for {gpus}' if gpus else ''} in {database.path}"
        name = f"{database.name} database"
        if database.skipped:
            hint = f"{' '.join(database.skipped)}: see `kda-tl db validate`"
            yield Check(name=name, state=MISSING, found=found, hint=hint)
        else:
            yield Check(name=name, state=OK, found=found)


def _directories() -> Iterator[Check]:
    from kda_tl.database.store import writable_directory

    directory = writable_directory()
    writable, existing = _is_writable(directory)
    hint = "" if writable else "set KDA_TL_DB to a directory you may write, or pass `tune --db DIR`"
    found = f"{directory}{'' if existing == directory else ' (made when needed)'}"
    yield Check(name="tuning results", state=OK if writable else MISSING, found=found, hint=hint)
    cache, refusal = Path(cache_directory()), cache_refusal()
    if not refusal and not _is_writable(cache)[0]:
        refusal = f"{cache} (can only be read)"
    hint = f"every process compiles its own kernels: set {CACHE_VARIABLE} to a directory you may write"
    if refusal:
        yield Check(name="kernel cache", state=NOTE, found=refusal, hint=hint)
    else:
        yield Check(name="kernel cache", state=OK, found=str(cache))


def _is_writable(directory: Path) -> tuple[bool, Path]:
    """Whether a directory, or the one it would be made in, can be written; and which one that is."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK), existing


def _peers() -> Iterator[Check]:
    for name, package in (("FLA", "flash-linear-attention"), ("cuDNN", "nvidia-cudnn-frontend")):
        try:
            yield Check(name=f"peer {name}", state=OK, found=metadata.version(package))
        except metadata.PackageNotFoundError:
            hint = f"only for `bench --peers`: pip install {package}"
            yield Check(name=f"peer {name}", state=NOTE, found="not installed", hint=hint)


def _kernel(device: Device) -> Iterator[Check]:
    """One stage compiled, run and compared with its reference."""
    name = f"kernel on {device.kind}"
    if find_compiler(device) is None or not can_import_tilelang():
        yield Check(name=name, state=MISSING, found=f"not run: {explain_missing(device)}")
        return
    from kda_tl.cli._smoke import run_stage

    try:
        result = run_stage(device)
    except KdaTlError as error:
        yield Check(
            name=name, state=MISSING, found=one_line(error), hint="report this with the output of doctor --json"
        )
        return
    yield Check(name=name, state=OK, found=result)


def _tables(checks: list[Check]) -> Iterator[Any]:
    table = make_table("", "what", "found")
    for check in checks:
        found = f"{check.found}: {check.hint}" if check.hint else check.found
        style = {OK: "green", MISSING: "bold red", NOTE: "yellow"}[check.state]
        table.add_row(f"{check.state:<7}", check.name, found, style=None if check.state == OK else style)
    yield table
    missing = [check.name for check in checks if check.state == MISSING]
    yield f"Missing: {', '.join(missing)}." if missing else "Everything needed is here."
