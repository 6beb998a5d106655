"""Kernels for CUDA that no compiler makes: what is kept, shared and found of libraries does not ask what they do."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kda_tl import templates
from kda_tl.bundle import sources
from kda_tl.bundle.manifest import Entry, digest, specialisation, write
from kda_tl.core import isolate
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.core.toolchain import CACHE_VARIABLE
from kda_tl.database.gpus import known_device
from kda_tl.runtime import compile, parallel

GATE = {"gate": "safe", "has_A_log": True, "has_dt_bias": True}
PROBLEM = Problem(H=8, HV=8, K=128, V=128, tokens=0, **GATE)
CASE = Case(problem=PROBLEM, device=known_device("nvidia_h200"), BT=64, BC=16)
PREP, RECURRENCE = templates.load("fwd_prep"), templates.load("fwd_recurrence")
JOBS = [(stage, CASE, stage.default(CASE)) for stage in (PREP, RECURRENCE)]


def make_library(stage: Stage, case: Case, config: Config) -> tuple[bytes, Entry]:
    """What stands for a library, and its entry."""
    built_for = specialisation(stage, case, config)
    content = f"library of {stage.name} {digest(stage.name, built_for)}".encode()
    entry = Entry(
        stage=stage.name,
        built_for=built_for,
        arch=case.device.arch,
        sources=templates.fingerprint(stage.name),
        cuda="0" * 64,
        binary=f"{stage.name}-{digest(stage.name, built_for)}.so",
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        parameters="pp",
        launch="03",
    )
    return content, entry


def make_bundle(folder: Path, jobs: Sequence[compile.Job] = JOBS, version: str = "") -> Path:
    """A bundle of such libraries, made by a version of TileLang."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for job in jobs:
        content, entry = make_library(*job)
        (folder / entry.binary).write_bytes(content)
        entries.append(replace(entry, tools={"tilelang": version}))
    write(folder, entries, {})
    return folder


@dataclass
class Compilers:
    """What stands for TileLang and nvcc: says what it made."""

    made: list[str] = field(default_factory=list)
    on_compile: Callable[[str], None] = lambda name: None

    def lower(self, stage: Stage, case: Case, config: Config) -> Any:
        return SimpleNamespace(job=(stage, case, config))

    def compile(self, lowered: Any) -> tuple[bytes, Entry]:
        self.on_compile(lowered.job[0].name)
        self.made.append(lowered.job[0].name)
        return make_library(*lowered.job)


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just begun."""
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setattr(compile, "_binaries", {})
    monkeypatch.setattr(compile, "_compiling", threading.Lock())
    monkeypatch.setattr(sources, "_named", ())
    sources._found.cache_clear()
    sources.warn.cache_clear()


def map_threads(target: str, payloads: Sequence[Any], *, jobs: int, timeout_s: float) -> Iterator[tuple[int, Any]]:
    """What stands for worker processes, which would not see what stands for compilers."""

    def run(payload: Any) -> Any:
        try:
            return parallel.make_library(payload)
        except Exception as error:
            return isolate.WorkerError(type(error).__name__, str(error))

    assert target == parallel.TARGET
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        yield from enumerate(threads.map(run, payloads))


def replace_compilers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Compilers:
    """A process that has just begun, with an empty folder for kernels; host functions are paths."""
    compilers = Compilers()
    forget_kernels(monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(parallel, "generate", compilers.lower)
    monkeypatch.setattr(parallel, "compile_library", compilers.compile)
    monkeypatch.setattr(isolate, "map_pool", map_threads)
    monkeypatch.setattr(compile, "require_compiler", lambda device: None)
    monkeypatch.setattr(compile, "link_binary", lambda path: path)
    return compilers
