"""``kda-tl doctor``: what works on this machine, and what to install for the rest."""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_tl.cli._console import ExitCode, Terminal, make_table, one_line
from kda_tl.cli._exit import was_interrupted
from kda_tl.core import toolchain
from kda_tl.core.device import Device, cpu_device, cuda_device, find_compiler
from kda_tl.core.packages import REQUIREMENTS
from kda_tl.errors import KdaTlError

OK, MISSING, NOTE = "ok", "MISSING", "note"
STYLES = {OK: None, MISSING: "bold red", NOTE: "yellow"}
PACKAGES = REQUIREMENTS | {"tvm_ffi": "apache-tvm-ffi"}  # which comes with TileLang
ORDER = ("torch", "tilelang", "tvm_ffi", "optuna", "numpy", "filelock", "platformdirs", "psutil", "rich", "pynvml")
PEERS = {"FLA": "flash-linear-attention", "cuDNN": "nvidia-cudnn-frontend"}
NEEDED_PYTHON = (3, 10)
NVCC_HINT = "install a CUDA toolkit of 12.3 or later, or `pip install 'kda-tl[cuda-compiler]'`"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table: what was looked at, how it is, what is there, and what to do about it.

    The state is "ok", "MISSING" (something needed) or "note" (something that would add to what works).
    """

    name: str
    state: str
    found: str
    hint: str = ""

    @classmethod
    def of(cls, name: str, fine: object, found: str, hint: str, otherwise: str = MISSING) -> Check:
        """A check that is fine, and needs no hint, or is not."""
        return cls(name=name, state=OK if fine else otherwise, found=found, hint="" if fine else hint)


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
    missing = [check.name for check in checks if check.state == MISSING]
    told = f"Missing: {', '.join(missing)}." if missing else "Everything needed is here."
    terminal.show({"ok": not missing, "checks": checks}, _table(checks), told)
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


def _find_version(package: str) -> str:
    """The version that is installed, empty if none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _packages() -> Iterator[Check]:
    python = f"{platform.python_version()} ({sys.executable})"
    yield Check.of("python", sys.version_info >= NEEDED_PYTHON, python, "install Python 3.10 or later")
    own = _find_version("kda-tl")
    yield Check.of("kda-tl", own, own or "not installed, run from its folder", "pip install -e .", NOTE)
    for module in ORDER:
        yield _package(module, PACKAGES[module])


def _package(module: str, requirement: str) -> Check:
    """Whether a package is there, and works."""
    name, hint, otherwise = requirement.partition(">")[0], f"pip install '{requirement}'", MISSING
    try:
        toolchain.import_tilelang() if module == "tilelang" else importlib.import_module(module)
    except Exception as error:  # a broken package raises whatever it likes
        if module == "pynvml":  # measured without it, too
            otherwise, hint = NOTE, f"clocks and driver are then not recorded: {hint}"
        return Check.of(name, False, f"cannot be imported ({one_line(error.__cause__ or error)})", hint, otherwise)
    return Check(name=name, state=OK, found=_find_version(name) or "version unknown")


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
    gcc_hint = "install g++ (Debian, Ubuntu: apt install g++) or clang++; until then the CPU runs plain PyTorch"
    gpu = Device(slug="", arch="sm_0", num_sms=0, smem_bytes=0)
    needed = len(_devices()) > 1
    nvcc = (MISSING, NVCC_HINT) if needed else (NOTE, f"needed to compile for GPUs (--static): {NVCC_HINT}")
    for name, device, otherwise, hint in (("C++ compiler", cpu_device(), MISSING, gcc_hint), ("nvcc", gpu, *nvcc)):
        compiler = find_compiler(device)
        found = f"{compiler}, {_version(compiler)}" if compiler else "none"
        yield Check.of(name, compiler, found, hint, otherwise)


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
        hint = f"{' '.join(database.skipped)}: see `kda-tl db validate`"
        yield Check.of(f"{database.name} database", not database.skipped, found, hint)


def _directories() -> Iterator[Check]:
    from kda_tl.database.store import writable_directory

    directory = writable_directory()
    writable, existing = _is_writable(directory)
    found = f"{directory}{'' if existing == directory else ' (made when needed)'}"
    hint = "set KDA_TL_DB to a directory you may write, or pass `tune --db DIR`"
    yield Check.of("tuning results", writable, found, hint)
    cache, refusal = Path(toolchain.cache_directory()), toolchain.cache_refusal()
    if not refusal and not _is_writable(cache)[0]:
        refusal = f"{cache} (can only be read)"
    hint = f"every process compiles its own kernels: set {toolchain.CACHE_VARIABLE} to a directory you may write"
    yield Check.of("kernel cache", not refusal, refusal or str(cache), hint, NOTE)


def _is_writable(directory: Path) -> tuple[bool, Path]:
    """Whether a directory, or the one it would be made in, can be written; and which one that is."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK), existing


def _peers() -> Iterator[Check]:
    for name, package in PEERS.items():
        version, hint = _find_version(package), f"only for `bench --peers`: pip install {package}"
        yield Check.of(f"peer {name}", version, version or "not installed", hint, NOTE)


def _kernel(device: Device) -> Iterator[Check]:
    """One stage compiled, run and compared with its reference."""
    name, hint = f"kernel on {device.kind}", "report this with the output of doctor --json"
    if find_compiler(device) is None or not toolchain.can_import_tilelang():
        yield Check(name=name, state=MISSING, found=f"not run: {toolchain.explain_missing(device)}")
        return
    try:
        yield Check(name=name, state=OK, found=_run_small_kernel(device))
    except KdaTlError as error:
        yield Check(name=name, state=MISSING, found=one_line(error), hint=hint)


def _run_small_kernel(device: Device) -> str:
    """What happened, in a sentence. Raises CompileError, and WrongResultError if it differs from its reference."""
    from kda_tl.bench.fixtures import StageFixture, check_kernel
    from kda_tl.bench.workloads import Workload
    from kda_tl.runtime.compile import compile_stage
    from kda_tl.templates.pipelines import PIPELINES

    workload = Workload(name="small", T=40, H=1, K=32, V=32, dtype="fp32")  # the last chunk is ragged
    fixture = StageFixture(pipeline=PIPELINES["staged"], workload=workload, device=device, BT=16, BC=8)
    stage, *_ = fixture.pipeline.stages
    begin = time.perf_counter()
    kernel = compile_stage(stage, fixture.case, stage.default(fixture.case))
    seconds = time.perf_counter() - begin
    error = check_kernel(kernel, fixture, stage.tolerance["fp32"])
    return f"{stage.name} compiled in {seconds:.1f} s, relative error {error:.1e} against its reference"


def _table(checks: list[Check]) -> Any:
    table = make_table("", "what", "found")
    for check in checks:
        found = f"{check.found}: {check.hint}" if check.hint else check.found
        table.add_row(f"{check.state:<7}", check.name, found, style=STYLES[check.state])
    return table
