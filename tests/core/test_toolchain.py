"""TileLang's folder for kernels: one that can no longer be written costs the cache, not the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kda_tl import templates
from kda_tl.core import toolchain
from kda_tl.core.device import Device, cpu_device, find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.errors import CompileError, KdaTlWarning
from kda_tl.runtime import compile as compile_module
from kda_tl.runtime.compile import compile_stage

needs_compiler = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++")
CASE = Case(problem=Problem(H=1, HV=1, K=32, V=32, tokens=16, dtype="fp32"), device=cpu_device(), BT=16, BC=8)
GATE = templates.load("fwd_gate")


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that TileLang is to use and cannot: below a file, since permissions do not stop root."""
    import tilelang  # noqa: F401 (its import would refuse the folder)

    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(toolchain, "_refused", "")
    monkeypatch.setattr(compile_module, "_kernels", {})
    monkeypatch.setattr(compile_module, "_binaries", {})
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    yield tmp_path / "file" / "cache"
    toolchain._warn_not_kept.cache_clear()


@needs_compiler
def test_folder_that_went_away_is_replaced(unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where the disk is full then, a kernel is used without being kept."""
    from tilelang.cache import _dispatch_map as caches

    monkeypatch.setattr(caches["cython"], "_memory_cache", {})  # nothing is compiled yet
    with pytest.warns(KdaTlWarning, match="kernels cannot be kept in .*file/cache .*: set TILELANG_CACHE_DIR"):
        assert "fwd_gate" in compile_stage(GATE, CASE, GATE.default(CASE)).source
    folder = Path(toolchain.cache_directory())
    assert folder.parent == tmp_path and len(list(folder.glob("*/*/kernels/*"))) == 1, "kernels are kept there"
    assert str(unwritable) in toolchain.cache_refusal()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caches["cython"], "_write_manifest", refuse)
    case = replace(CASE, problem=replace(CASE.problem, K=64))
    with pytest.warns(KdaTlWarning, match=r"kernels cannot be kept in .* \(is its disk full\?\)"):
        assert "fwd_gate" in compile_stage(GATE, case, GATE.default(case)).source
    toolchain._remove(str(folder), os.getpid() + 1)
    assert folder.exists(), "a forked child leaves it to its parent"
    toolchain._remove(str(folder), os.getpid())
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "/dev/null"])
def test_name_that_is_no_folder_is_replaced(name: str, unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, name)
    monkeypatch.chdir(unwritable.parents[1])
    with pytest.warns(KdaTlWarning, match=f"kernels cannot be kept in {name or repr('')} "):
        toolchain.ensure_cache()
    assert not list(Path().glob("0.*")), "nothing is made where the process happens to be"
    toolchain._remove(toolchain.cache_directory(), os.getpid())


def test_no_temporary_folder_either(unwritable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(unwritable))
    with pytest.raises(CompileError, match="kernels cannot be kept in .*, nor in a temporary folder .*: set TILELANG"):
        toolchain.ensure_cache()


def test_folder_that_can_be_written_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "new" / "cache"))
    toolchain.ensure_cache()
    assert toolchain.cache_directory() == str(tmp_path / "new" / "cache")
    from tilelang.cache.kernel_cache import KernelCache

    assert toolchain.cache_folders() == (KernelCache._get_cache_root(), KernelCache._get_staging_root())
    assert all(Path(folder).is_dir() for folder in toolchain.cache_folders())


@needs_compiler
def test_folder_that_can_only_be_read_serves_what_it_holds(
    unwritable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that came with a container. It is made unwritable by a file in the place of a folder, for root's sake."""
    from tilelang.cache import _dispatch_map as caches

    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "cache"))
    kernels, staging = map(Path, toolchain.cache_folders())
    toolchain.ensure_cache()
    staging.rmdir()
    staging.touch()
    (kernels / "kept").mkdir()
    monkeypatch.setattr(caches["cython"], "_memory_cache", {})
    with pytest.warns(KdaTlWarning, match=r"kernels cannot be kept in .*cache \("):
        compile_stage(GATE, CASE, GATE.default(CASE))
    assert (Path(toolchain.cache_folders()[0]) / "kept").readlink() == kernels / "kept"
    toolchain._remove(toolchain.cache_directory(), os.getpid())
    assert (kernels / "kept").exists(), "only the link went"


def test_errors_of_compilers_are_not_taken_for_the_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, "/home/user/.tilelang/cache")
    for path in ("/home/user/.tilelang/cache/0.1/x", "/home/user/.tilelang/cache", "/home/user/.tilelang"):
        assert toolchain.is_of_cache(FileNotFoundError(errno.ENOENT, "no", path)), path
    for path in ("g++", "/tmp/x.cpp", None):
        assert not toolchain.is_of_cache(FileNotFoundError(errno.ENOENT, "no", path)), path


def test_missing_compiler_is_told_before_tilelang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_try_tilelang", lambda: ModuleNotFoundError("No module named 'z3'", name="z3"))
    device: Device = cpu_device()
    monkeypatch.setattr(toolchain, "find_compiler", lambda device: None)
    assert toolchain.explain_missing(device) == "no compiler found: install a C++ compiler (g++ or clang++)"
    monkeypatch.setattr(toolchain, "find_compiler", lambda device: "/usr/bin/g++")
    assert toolchain.explain_missing(device).endswith("run `pip install 'z3'`")
    with pytest.raises(CompileError, match="tilelang cannot be imported .*z3"):
        toolchain.import_tilelang()
