"""Kernels of calls: compiled once for all who want them, kept, found again, and never compiled where that is off."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.libraries import CASE, JOBS, PREP, Compilers, forget_kernels, make_bundle, replace_compilers

import kda_tl
from kda_tl import templates
from kda_tl.bundle import cache
from kda_tl.core import isolate, toolchain
from kda_tl.core.device import find_compiler
from kda_tl.core.toolchain import CACHE_VARIABLE
from kda_tl.errors import BundleError, CompileError, KdaTlWarning
from kda_tl.runtime import compile
from kda_tl.runtime.compile import compile_stage, compile_stages, is_ready
from kda_tl.runtime.lower import hash_source, pass_configs

CONFIG = PREP.default(CASE)


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    return replace_compilers(monkeypatch, tmp_path / "cache")


def libraries() -> list[Path]:
    return sorted(cache.folder().glob("*.so"))


# Compiled once


def test_a_kernel_serves_any_number_of_heads_and_what_the_stage_ignores(compilers: Compilers) -> None:
    problem = CASE.problem
    for other in (problem, replace(problem, H=17, HV=17), replace(problem, V=64, final_state=True, tokens=99)):
        kernel = compile_stage(PREP, replace(CASE, problem=other), CONFIG)
        assert kernel.slots[-1].dims == ("NT", other.HV, 128), "its tensors are those of the problem"
    assert compilers.made == ["fwd_prep"]
    compile_stage(PREP, replace(CASE, problem=replace(problem, HV=16)), CONFIG)
    assert compilers.made == ["fwd_prep"] * 2, "shared heads are another kernel"


def test_the_next_process_finds_what_was_compiled(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_ready(*JOBS[0])
    first = [kernel.function for kernel in compile_stages(JOBS)]
    assert sorted(compilers.made) == ["fwd_prep", "fwd_recurrence"] and sorted(first) == libraries()
    forget_kernels(monkeypatch)
    assert is_ready(*JOBS[0])
    with kda_tl.no_compile():
        assert [kernel.function for kernel in compile_stages(JOBS)] == first
    assert len(compilers.made) == 2


@pytest.mark.parametrize(
    ("known", "version"), [("user", ""), ("bundle", ""), ("bundle", "0.0.1"), ("nowhere", ""), ("damaged", "")]
)
def test_what_was_built_by_this_tilelang_is_not_lowered_again_for_its_hash(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, version: str
) -> None:
    if known in ("user", "damaged"):
        compile_stages(JOBS)
        forget_kernels(monkeypatch)
    elif known == "bundle":
        kda_tl.use_kernels(make_bundle(tmp_path / "bundle", version=version or metadata.version("tilelang")))
    if known == "damaged":
        for library in libraries():
            library.write_bytes(b"")
    monkeypatch.setattr(compile, "generate_source", lambda *job: "its CUDA")
    told = known == "user" or (known == "bundle" and not version)
    passes = pass_configs(*JOBS[0][:2])
    assert compile.hash_kernel(*JOBS[0]) == ("0" * 64 if told else hash_source("its CUDA", passes))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied", "no library", "no entry", "other entry", "text"])
def test_what_is_damaged_is_compiled_again(compilers: Compilers, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    compile_stages(JOBS)
    library, other = libraries()
    entry, content = library.with_suffix(".json"), bytearray(library.read_bytes())
    if damage == "flipped":
        content[3] ^= 1
    library.write_bytes(content[: {"truncated": -1, "emptied": 0}.get(damage, len(content))])
    if damage == "no library":
        library.unlink()
    elif damage == "no entry":
        entry.unlink()
    elif damage == "other entry":
        entry.write_bytes(other.with_suffix(".json").read_bytes())
    elif damage == "text":
        entry.write_text('{"stage": "fwd_prep"}')
    forget_kernels(monkeypatch)
    compile_stages(JOBS)
    assert sorted(compilers.made) == ["fwd_prep", "fwd_prep", "fwd_recurrence"]
    forget_kernels(monkeypatch)
    with kda_tl.no_compile():
        compile_stages(JOBS)


def test_versions_do_not_meet(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own kernel, however often they run in turns."""
    fingerprint = templates.fingerprint
    for version in ("", "edited", "", "edited"):
        forget_kernels(monkeypatch)
        monkeypatch.setattr(templates, "fingerprint", lambda name, v=version: v or fingerprint(name))
        compile_stage(PREP, CASE, CONFIG)
    assert compilers.made == ["fwd_prep"] * 2 and len(libraries()) == 2


def test_compilers_run_side_by_side(compilers: Compilers, caplog: pytest.LogCaptureFixture) -> None:
    together = threading.Barrier(2)
    compilers.on_compile = lambda name: together.wait(timeout=30)
    with caplog.at_level(logging.INFO, "kda_tl"):
        compile_stages(JOBS)
    begin, end = (record.getMessage() for record in caplog.records)
    assert begin == (
        "Compiling 2 kernels for sm_90a (fwd_prep, fwd_recurrence), which no bundle has; `kda-tl compile` makes them "
        "ahead of time."
    )
    assert end.startswith("Compiled 2 kernels for sm_90a (fwd_prep, fwd_recurrence) in 0.")


def _compile_and_note(path: Path, compilers: Compilers) -> None:
    def note(name: str) -> None:
        with path.open("a") as file:
            file.write(f"{name}\n")
        time.sleep(0.2)

    compilers.on_compile = note
    assert [kernel.function for kernel in compile_stages(JOBS)] == libraries()


def test_eight_processes_compile_each_kernel_once(compilers: Compilers, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    noted = tmp_path / "noted"
    ranks = [context.Process(target=_compile_and_note, args=(noted, compilers)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert sorted(noted.read_text().split()) == ["fwd_prep", "fwd_recurrence"]


def test_a_kernel_whose_worker_died_is_made_here(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die(target: str, payloads: Sequence[compile.Job], **_: Any) -> Iterator[tuple[int, isolate.WorkerCrash]]:
        yield from ((i, isolate.WorkerCrash(-9)) for i, _ in enumerate(payloads))

    monkeypatch.setattr(isolate, "map_pool", die)
    compile_stages(JOBS)
    assert sorted(compilers.made) == ["fwd_prep", "fwd_recurrence"] and len(libraries()) == 2
    assert "is compiled again, in this process: the worker process was ended by SIGKILL." in caplog.text


@pytest.mark.rest
@pytest.mark.usefixtures("real_processes")
@pytest.mark.skipif(find_compiler(CASE.device) is None, reason="no nvcc: install a CUDA toolkit, or cuda-compiler")
def test_kernels_of_two_processes_are_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TileLang, nvcc and workers as outside of the tests."""
    forget_kernels(monkeypatch)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    case = replace(CASE, problem=replace(CASE.problem, K=64, V=64, direction="bwd"))
    stages = [templates.load(name) for name in ("bwd_reduce", "fwd_merge")]
    made = compile_stages([(stage, case, stage.default(case)) for stage in stages])
    assert sorted(kernel.binary.path for kernel in made) == libraries() and libraries()[0].parent.parent == tmp_path
    assert [kernel.binary.path.name.partition("-")[0] for kernel in made] == [stage.name for stage in stages]


@pytest.mark.parametrize("stage", [job[0].name for job in JOBS])
def test_an_error_of_one_kernel_names_it_and_frees_the_others(compilers: Compilers, stage: str) -> None:
    """Of the kernel that this process makes, and of the one that a worker makes."""

    def refuse(name: str) -> None:
        if name == stage:
            raise RuntimeError("nvcc says no\nand more")

    compilers.on_compile = refuse
    with pytest.raises(CompileError, match=rf"^{stage} did not compile for sm_90a with \w+Config.*: nvcc says no$"):
        compile_stages(JOBS)
    compilers.on_compile = lambda name: None
    compile_stages(JOBS)


# Never compiled


def test_compiling_can_be_forbidden(compilers: Compilers, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"^2 kernels for sm_90a \(fwd_prep, fwd_recurrence\) would have to be compiled, which {} forbids: make them "
    with kda_tl.no_compile(), pytest.raises(CompileError, match=told.format(r"kda_tl\.no_compile\(\)")):
        compile_stages(JOBS)
    monkeypatch.setenv("KDA_TL_JIT", "0")
    with pytest.raises(CompileError, match=told.format("KDA_TL_JIT=0")):
        compile_stages(JOBS)
    monkeypatch.delenv("KDA_TL_JIT")
    compile_stages(JOBS)


# Folders


def test_a_folder_that_cannot_be_written_is_replaced(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a file, since permissions do not stop root."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(toolchain, "_refused", "")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.warns(KdaTlWarning, match="kernels cannot be kept in .*file/cache .*: set TILELANG_CACHE_DIR"):
        compile_stages(JOBS)
    assert len(libraries()) == 2 and libraries()[0].is_relative_to(tmp_path)


def test_a_folder_that_can_only_be_read_serves_what_it_holds(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_stage(PREP, CASE, CONFIG)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def refuse(name: str) -> None:
        if cache.folder().is_relative_to(tmp_path / "cache"):
            raise PermissionError(13, "Permission denied", str(cache.folder() / name))

    monkeypatch.setattr(
        cache, "add", lambda name, content, entry, add=cache.add: refuse(name) or add(name, content, entry)
    )
    forget_kernels(monkeypatch)
    with pytest.warns(KdaTlWarning, match="kernels cannot be kept in"):
        compile_stages(JOBS)
    assert sorted(compilers.made) == ["fwd_prep", "fwd_recurrence"]
    assert [path.is_symlink() for path in libraries()] == [True, False]


# Bundles come first


def test_bundles_serve_before_the_users_kernels(
    compilers: Compilers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    kda_tl.use_kernels(bundle)
    with kda_tl.no_compile():
        kernels = compile_stages(JOBS)
    assert {kernel.function.parent for kernel in kernels} == {bundle} and is_ready(*JOBS[0])
    assert [kernel.binary.entry.stage for kernel in kernels] == [stage.name for stage, _, _ in JOBS]

    def refuse(path: Path) -> Path:
        if path.parent == bundle:
            raise BundleError(f"{path} cannot be loaded (GLIBC_2.99 not found): make the bundle anew on this system.")
        return path

    forget_kernels(monkeypatch)
    kda_tl.use_kernels(bundle)
    monkeypatch.setattr(compile, "link_binary", refuse)
    with pytest.warns(KdaTlWarning, match=r"cannot be loaded \(GLIBC_2.99 not found\)"):
        found = [kernel.function for kernel in compile_stages(JOBS)]
    assert sorted(found) == libraries() and len(compilers.made) == 2
