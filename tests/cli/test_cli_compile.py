"""``kda-tl compile``: what it builds, what it keeps, how it goes on, and what it says of bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bundles import TOOLS, build_fake
from support.cli_cases import Run

from kda_tl.aot import writer
from kda_tl.aot.plans import BuildJob
from kda_tl.bundle.manifest import NAME, read
from kda_tl.cli import _binary, compile
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerError
from kda_tl.errors import CompileError
from kda_tl.runtime import lower as runtime_lower

ARGV = ("compile", "--gpu", "nvidia_h200", "--workload", "safe-T8192-H32")


class Builders:
    """Stands for the processes that build; ``raises`` says what becomes of which job."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.raises: dict[int, BaseException] = {}

    def map_pool(self, target: str, work: Sequence[BuildJob], **options: Any) -> Iterator[tuple[int, Any]]:
        for i, job in enumerate(work):
            raised = self.raises.get(i)
            if isinstance(raised, WorkerError):
                yield i, raised
                continue
            if raised is not None:
                raise raised
            self.built.append(job.kernel.stage.name)
            yield i, build_fake(job.kernel, Path(job.folder), keep_source=job.keep_source)


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> Builders:
    made = Builders()
    monkeypatch.setattr(compile, "map_pool", made.map_pool)
    monkeypatch.setattr(compile, "require_compiler", lambda device: None)
    monkeypatch.setattr(writer, "find_versions", lambda device: TOOLS)
    return made


def test_a_bundle_is_built_continued_and_listed(
    run: Run, builders: Builders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "kernels"
    code, out, err = run(*ARGV, "--out", str(folder))
    assert code == 0 and "2 kernels, 0 there already; 2 to build on" in err
    assert out.replace("\n", " ").strip().endswith("(2 built, 0 kept)")
    assert sorted(builders.built) == ["fwd_prep", "fwd_recurrence"] and len(list(folder.glob("*.cu"))) == 2
    code, out, err = run(*ARGV, "--out", str(folder))
    assert code == 0 and "nothing to build" in err and "(0 built, 2 kept)" in out
    code, out, _ = run("compile", "--gpu", "h200", "--workload", "train-T8192-H32", "--out", str(folder), "--json")
    values = json.loads(out)
    assert code == 0 and values["kept"] == 2 and values["built"] > 3 and not values["failed"]
    code, out, _ = run("compile", "--list", str(folder))
    assert code == 0 and all(len(line) <= 80 for line in out.splitlines()[:-1])  # the last one holds a path
    assert out.splitlines()[0].split() == ["stage", "for", "arch", "regs", "local", "bytes", "state"]
    assert sum("sm_90a" in line and line.endswith("ok") for line in out.splitlines()) == values["kernels"]
    code, out, _ = run(*ARGV, "--out", str(folder), "--prune")
    assert code == 0 and len(read(folder)) == 2 and len(list(folder.glob("*.so"))) == 2 and "removed" in out


def test_an_altered_bundle_is_told(run: Run, builders: Builders, tmp_path: Path) -> None:
    run(*ARGV, "--out", str(tmp_path))
    first, second = sorted(tmp_path.glob("*.so"))
    first.unlink()
    second.write_bytes(b"other")
    code, out, _ = run("compile", "--list", str(tmp_path), "--json")
    assert code == 1 and sorted(kernel["state"] for kernel in json.loads(out)["kernels"]) == ["altered", "missing"]
    code, out, _ = run(*ARGV, "--out", str(tmp_path))
    assert code == 0 and "(2 built, 0 kept)" in out


def test_ctrl_c_keeps_what_was_built_and_says_how_to_go_on(run: Run, builders: Builders, tmp_path: Path) -> None:
    builders.raises = {1: KeyboardInterrupt()}
    code, out, err = run(*ARGV, "--out", str(tmp_path), "--no-source")
    assert code == 130 and not out and "1 of 2 kernels are in" in err
    assert f"kda-tl {' '.join(ARGV)} --out {tmp_path} --no-source" in err
    builders.raises = {}
    code, out, _ = run(*ARGV, "--out", str(tmp_path), "--no-source")
    assert code == 0 and "(1 built, 1 kept)" in out


def test_a_kernel_that_does_not_compile_fails_alone(run: Run, builders: Builders, tmp_path: Path) -> None:
    builders.raises = {0: WorkerError("CompileError", "nvcc refused it.")}
    code, out, err = run(*ARGV, "--out", str(tmp_path))
    assert code == 1 and "nvcc refused it." in out and "(1 built, 0 kept, 1 failed)" in out.replace("\n", " ")
    assert len(read(tmp_path)) == 1


def test_a_full_disk_ends_the_run(run: Run, builders: Builders, tmp_path: Path) -> None:
    builders.raises = {0: WorkerError("BundleError", "the folder cannot be written.")}
    code, out, err = run(*ARGV, "--out", str(tmp_path))
    assert code == 2 and not out and err.splitlines()[-1] == "kda-tl compile: the folder cannot be written."
    assert not builders.built


@pytest.mark.parametrize(
    "argv, words",
    [
        (("compile", "--gpu", "h200", "--workload", "safe-T8192-H32"), "pass --out DIR"),
        (("compile", "--gpu", "h200", "--out", "{new}"), "say which problem"),
        ((*ARGV, "--packaged", "--out", "{new}"), "leave --workload"),
        (("compile", "--gpu", "cpu", "--workload", "cpu-safe-K32", "--out", "{new}"), "--gpu h100"),
        ((*ARGV, "--out", "{other}"), "holds files, but no bundle"),
        ((*ARGV, "--out", "{file}"), "is no folder"),
        ((*ARGV, "--out", "{newer}"), "install a newer kda_tl"),
        (("compile", "--list", "{newer}"), "install a newer kda_tl"),
        (("compile", "--list", "{new}"), "cannot be used"),
    ],
)
def test_bad_input_is_a_sentence(
    argv: tuple[str, ...], words: str, run: Run, builders: Builders, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("new", "other", "file", "newer")}
    for name in ("other", "newer"):
        places[name].mkdir()
    (places["other"] / "x").write_text("mine")
    places["file"].write_text("mine")
    (places["newer"] / NAME).write_text(json.dumps({"schema": 99, "kernels": []}))
    before = sorted(str(path) for path in tmp_path.rglob("*") if path.name != ".lock")
    code, out, err = run(*(word.format(**places) for word in argv))
    assert code == 2 and not out and words in err and err.count("\n") == 1
    assert sorted(str(path) for path in tmp_path.rglob("*") if path.name != ".lock") == before


def test_without_nvcc_nothing_begins(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_lower, "find_compiler", lambda device: None)
    code, out, err = run(*ARGV, "--out", str(tmp_path / "new"))
    assert code == 3 and not out and "install nvcc" in err and not (tmp_path / "new").exists()


def test_two_gpus_of_a_name_share_kernels(run: Run, builders: Builders, tmp_path: Path) -> None:
    code, *_ = run("compile", "--gpu", "h200", "--workload", "safe-T8192-H32", "--out", str(tmp_path))
    assert code == 0 and len(builders.built) == 2, "an H200 NVL has an H200's architecture and multiprocessors"


def test_what_a_binary_holds_is_told_for_gpus_only(run: Run) -> None:
    code, out, err = run("source", "fwd_gate", "--gpu", "cpu", "--ptx")
    assert code == 2 and not out and "name a GPU" in err
    code, out, err = run("source", "fwd_gate", "--gpu", "h200", "--ptx", "--registers")
    assert code == 2 and "one of --ptx and --registers" in err


def test_what_does_not_compile_has_no_binary_to_tell_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, as for the source alone; passes of TileLang raise what they like."""

    def refuse(*_: Any, **options: Any) -> None:
        raise ValueError("layouts conflict\nsecond line")

    monkeypatch.setattr("kda_tl.runtime.binary.lower", refuse)
    code, out, err = run("source", "fwd_gate", "--gpu", "h200", "--registers")
    assert code == 3 and not out and "fwd_gate did not compile for sm_90a" in err and "layouts conflict" in err
    assert "Traceback" not in err and "second line" not in err


def test_instructions_need_a_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="cuda-cuobjdump"):
        _binary._find_tool(str(tmp_path / "nvcc"))
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = _binary._find_tool(str(tmp_path / "nvcc"))
    assert found == (str(tool), ("-c",)) and _binary._disassemble(found, b"").startswith("-c ")


def test_all_architectures_of_a_name_are_checked_for_a_compiler(
    run: Run, builders: Builders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Device] = []
    monkeypatch.setattr(compile, "require_compiler", asked.append)
    run("compile", "--gpu", "hopper", "--workload", "safe-T8192-H32", "--out", str(tmp_path))
    assert len(asked) == 7 and {replace(device, slug="x").arch for device in asked} == {"sm_90a"}
