"""From a stage and a config to a kernel that can be called.

Kernels are looked for in this process, in bundles, and among those that this user's processes compiled before. What is
nowhere is compiled, several kernels side by side.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from kda_tl.bundle import cache, sources
from kda_tl.bundle.load import link_binary
from kda_tl.bundle.manifest import Entry
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.core.toolchain import is_of_cache, replace_cache, tilelang_version, warn_if_not_kept
from kda_tl.errors import CompileError, KdaTlError
from kda_tl.runtime.binary import explaining
from kda_tl.runtime.kernel import Binary, Kernel
from kda_tl.runtime.lower import generate_source, hash_source, pass_configs, require_compiler
from kda_tl.runtime.parallel import Job, make_libraries

# The C target's header includes half.hpp, which takes g++ 0.7 of a kernel's 1.0 s; kernels there are fp32 and need no
# more than the type's name. TileLang 0.1.15 splits flags at spaces and has them in its cache's key, so this is no file.
_CPU_FLAGS = [
    "-DHALF_HALF_HPP",  # its include guard
    "-Dhalf_float=half_float_t=float;namespace/**/half_float{class/**/half;}using/**/half_float",  # after a "using"
]
JIT_VARIABLE = "KDA_TL_JIT"

_Key = tuple[str, Case, Config]

_log = logging.getLogger("kda_tl")
_kernels: dict[_Key, Kernel] = {}
_binaries: dict[_Key, Binary] = {}  # by what they were built for, see Stage.specialise
_compiling = threading.Lock()
_forbidden: ContextVar[bool] = ContextVar("kda_tl_no_compile", default=False)


class Library:
    """A kernel as a library on disk."""

    def __init__(self, job: Job, path: Path, entry: Entry) -> None:
        self.job, self.path, self.entry = job, path, entry

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """Its host function, linked when first asked for."""
        return link_binary(self.path)

    @property
    def source(self) -> str:
        """The CUDA, which is generated anew."""
        return generate_source(*self.job)


class CpuBinary:
    """A kernel of TileLang's C target: ``jit`` is TileLang's."""

    def __init__(self, jit: Any) -> None:
        self.jit = self.function = jit

    @property
    def source(self) -> str:
        """The C."""
        return str(self.jit.get_kernel_source())


def compile_stage(stage: Stage, case: Case, config: Config) -> Kernel:
    """The kernel of a stage: see :func:`compile_stages`."""
    return compile_stages([(stage, case, config)])[0]


def compile_stages(jobs: Sequence[Job]) -> list[Kernel]:
    """The kernels of some stages, in order; those that must be compiled are compiled side by side.

    Raises CompileError if a config is rejected, no compiler or no TileLang that works was found, one refused, or
    compiling is off.
    """
    wanted = [(stage, replace(case, problem=case.problem.without_lengths()), config) for stage, case, config in jobs]
    if any(_key(*job) not in _kernels for job in wanted):
        with _compiling:
            _make_kernels([job for job in wanted if _key(*job) not in _kernels])
    return [_kernels[_key(*job)] for job in wanted]


def is_ready(stage: Stage, case: Case, config: Config) -> bool:
    """Whether a kernel for CUDA is there, so that nothing needs to be compiled; its binary is not read."""
    job = stage, stage.specialise(case), config
    return _key(*job) in _binaries or sources.holds(*job) or cache.find(cache.name_of(*job)) is not None


@contextlib.contextmanager
def no_compile() -> Iterator[None]:
    """Inside a ``with`` block of this thread or task, calls raise CompileError instead of compiling a kernel.

    ``KDA_TL_JIT=0`` in the environment does the same for all calls of a process.
    """
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


def hash_kernel(stage: Stage, case: Case, config: Config) -> str:
    """SHA-256 of what the compiler is given for a kernel: the generated CUDA or C, and the settings beside it.

    Neither holds comments, paths or line numbers of the templates, and variables count by their place, not by their
    names: sources that make the same kernel give the same hash, in every process. It is of one version of TileLang;
    another one generates other text.
    """
    if known := known_hash(stage, case, config):
        return known
    case = stage.specialise(case)
    binary = _binaries.get(_key(stage, case, config))
    return hash_source(binary.source if binary else generate_source(stage, case, config), pass_configs(stage, case))


def known_hash(stage: Stage, case: Case, config: Config) -> str | None:
    """:func:`hash_kernel` of a kernel that the TileLang that is here built before, as is kept beside its binary."""
    job = stage, stage.specialise(case), config
    if case.device.kind == "cpu":
        return None
    entry = sources.find_entry(*job)
    if entry is not None and entry.tools.get("tilelang") == tilelang_version():
        return entry.cuda
    found = cache.find(cache.name_of(*job))
    return found[1].cuda if found else None


def _key(stage: Stage, case: Case, config: Config) -> _Key:
    return stage.name, case, config


def _make_kernels(jobs: Sequence[Job]) -> None:
    """Fills ``_kernels``."""
    built_for: dict[_Key, Job] = {}
    for stage, case, config in jobs:
        if reason := config.reject(case):
            raise CompileError(f"{stage.name} cannot run with {config}: {reason}.")
        job = stage, stage.specialise(case), config
        built_for[_key(*job)] = job
    missing = {key: job for key, job in built_for.items() if key not in _binaries}
    found = {key: binary for key, job in missing.items() if (binary := _find(*job))}
    _binaries.update(found)
    if unknown := {key: job for key, job in missing.items() if key not in found}:
        _binaries.update(_compile(unknown))
    for stage, case, config in jobs:
        binary = _binaries[_key(stage, stage.specialise(case), config)]
        _kernels[_key(stage, case, config)] = Kernel(stage, case, config, binary)


def _find(stage: Stage, case: Case, config: Config) -> Binary | None:
    """A kernel that was compiled before, by anybody."""
    if case.device.kind == "cpu":  # TileLang's cache knows
        return None
    job = stage, case, config
    for path, entry in sources.find_binaries(*job):
        library = Library(job, path, entry)
        try:
            library.function  # noqa: B018 (a system that cannot load it is told, and the next source asked)
        except KdaTlError as error:
            sources.warn(str(error))
            continue
        return library
    found = cache.find(cache.name_of(*job))
    return Library(job, *found) if found else None


def _compile(jobs: Mapping[_Key, Job]) -> dict[_Key, Binary]:
    device = next(iter(jobs.values()))[1].device
    if _forbidden.get() or os.environ.get(JIT_VARIABLE, "1") == "0":
        off = "kda_tl.no_compile()" if _forbidden.get() else f"{JIT_VARIABLE}=0"
        what = _describe([*jobs.values()])
        raise CompileError(f"{what} would have to be compiled, which {off} forbids: make them with `kda-tl compile`.")
    require_compiler(device)
    return _compile_for_cpu(jobs) if device.kind == "cpu" else _compile_for_cuda(jobs)


@contextlib.contextmanager
def _telling(jobs: Sequence[Job]) -> Iterator[None]:
    """Logs what this process compiles, and how long it took."""
    what, start = _describe(jobs), time.monotonic()
    _log.info("Compiling %s, which no bundle has; `kda-tl compile` makes them ahead of time.", what)
    yield
    _log.info("Compiled %s in %.1f s.", what, time.monotonic() - start)


def _describe(jobs: Sequence[Job]) -> str:
    names = ", ".join(sorted({stage.name for stage, _, _ in jobs}))
    return f"{len(jobs)} kernel{'s' * (len(jobs) > 1)} for {jobs[0][1].device.arch} ({names})"


def _compile_for_cpu(jobs: Mapping[_Key, Job]) -> dict[_Key, Binary]:
    with _telling([*jobs.values()]):
        return {key: _compile_one_for_cpu(*job) for key, job in jobs.items()}


def _compile_one_for_cpu(stage: Stage, case: Case, config: Config) -> Binary:
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # its log lines would land in the caller's output
    # Of a kernel that its cache could not keep it prints a traceback, on stdout
    logging.getLogger("tilelang.cache.kernel_cache").setLevel(logging.CRITICAL)
    with explaining(stage, case, config):
        try:
            jit = _run_tilelang(stage, case, config)
        except OSError as error:
            if not is_of_cache(error):
                raise
            replace_cache(error)
            jit = _run_tilelang(stage, case, config)
    warn_if_not_kept(jit)
    return CpuBinary(jit)


def _run_tilelang(stage: Stage, case: Case, config: Config) -> Any:
    import tilelang

    function = stage.build(case, config)
    return tilelang.compile(function, target="c", execution_backend="cython", compile_flags=_CPU_FLAGS)


def _compile_for_cuda(jobs: Mapping[_Key, Job]) -> dict[_Key, Binary]:
    """Compiles what no other process has compiled while this one waited for it. All take the locks in one order."""
    found_or_made: dict[_Key, Binary] = {}
    wanted: list[tuple[str, _Key]] = []
    with contextlib.ExitStack() as held:
        for name, key in sorted((cache.name_of(*job), key) for key, job in jobs.items()):
            _lock(held, name)
            if found := cache.find(name):
                found_or_made[key] = Library(jobs[key], *found)
            else:
                wanted.append((name, key))
        if not wanted:
            return found_or_made
        failures: list[CompileError] = []
        with _telling(own := [jobs[key] for _, key in wanted]):
            for i, made in make_libraries(own):
                if isinstance(made, CompileError):
                    failures.append(made)
                    continue
                (name, key), (content, entry) = wanted[i], made
                found_or_made[key] = Library(jobs[key], _keep(name, content, entry), entry)
            if failures:
                raise failures[0]
    return found_or_made


def _lock(held: contextlib.ExitStack, name: str) -> None:
    try:
        held.enter_context(cache.lock(name))
    except OSError as error:
        if not is_of_cache(error):
            raise
        replace_cache(error)
        held.enter_context(cache.lock(name))


def _keep(name: str, content: bytes, entry: Entry) -> Path:
    try:
        return cache.add(name, content, entry)
    except OSError as error:
        replace_cache(error)
        return cache.add(name, content, entry)
