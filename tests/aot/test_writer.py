"""Bundles that grow: what is built again, what is kept, what is refused, and what is left behind."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from support.bundles import TOOLS, build_fake, make_kernel

from kda_tl import templates
from kda_tl.aot import writer
from kda_tl.aot.writer import BundleWriter, judge, list_entries
from kda_tl.bundle.manifest import NAME, Entry, read
from kda_tl.errors import BundleError, InputError

KERNELS = [make_kernel(V=V) for V in (64, 128)]


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions, which a test may change."""
    found = dict(TOOLS)
    monkeypatch.setattr(writer, "find_versions", lambda device: found)
    return found


def build(folder: Path, *, keep_source: bool = False) -> list[Entry]:
    """Builds what the bundle lacks; returns it."""
    with BundleWriter(folder, "1") as bundle:
        missing = bundle.list_missing(KERNELS, keep_source=keep_source)
        made = [build_fake(kernel, folder, keep_source=keep_source) for kernel in missing]
        for entry in made:
            bundle.add(entry)
        bundle.clean()
    return made


def test_what_is_there_is_kept_and_the_same_work_gives_the_same_bytes(tmp_path: Path) -> None:
    assert len(build(tmp_path / "a")) == 2 and not build(tmp_path / "a")
    build(tmp_path / "b")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1] and NAME in files[0]


@pytest.mark.parametrize("fault", ["removed", "flipped", "source removed", "source edited"])
def test_a_file_that_is_not_as_it_was_is_built_again(tmp_path: Path, fault: str) -> None:
    first, _ = build(tmp_path, keep_source=True)
    path = tmp_path / (first.source if fault.startswith("source") else first.binary)
    content = path.read_bytes()
    if fault.endswith("removed"):
        path.unlink()
    else:
        path.write_bytes(content[:-1] + b"?")
    expected = "missing" if fault.endswith("removed") else "altered"
    assert [state for _, state in list_entries(tmp_path)].count(expected) == 1
    assert [entry.binary for entry in build(tmp_path, keep_source=True)] == [first.binary]
    assert path.read_bytes() == content


def test_other_templates_and_other_tools_build_again(
    tmp_path: Path, tools: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    tools["nvcc"] = "13.1.0"
    assert len(build(tmp_path)) == 2
    tools["nvcc"] = TOOLS["nvcc"]
    assert not build(tmp_path), "the fake says that these were its tools"
    monkeypatch.setattr(templates, "fingerprint", lambda name: "edited")
    assert {state for _, state in list_entries(tmp_path)} == {"stale"}
    assert len(build(tmp_path)) == 2


def test_sources_are_made_where_they_are_wanted(tmp_path: Path) -> None:
    build(tmp_path)
    assert not list(tmp_path.glob("*.cu"))
    assert len(build(tmp_path, keep_source=True)) == 2 and len(list(tmp_path.glob("*.cu"))) == 2
    assert not build(tmp_path), "a bundle with sources lacks nothing"


def test_an_interrupted_run_leaves_what_it_built(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), BundleWriter(tmp_path, "1") as bundle:
        bundle.add(build_fake(KERNELS[0], tmp_path))
        build_fake(KERNELS[1], tmp_path)  # built, but nobody was told
        raise KeyboardInterrupt
    assert len(read(tmp_path)) == 1
    assert [entry.built_for for entry in build(tmp_path)] == [KERNELS[1].built_for]


def test_files_that_no_kernel_has_are_removed_and_others_are_not(tmp_path: Path) -> None:
    build(tmp_path)
    lost = tmp_path / f"fwd_prep-{'0' * 32}.so.123.part"
    lost.write_bytes(b"half")
    (tmp_path / "README").write_text("mine")
    with BundleWriter(tmp_path, "1") as bundle:
        assert bundle.prune(KERNELS[:1]) == 1
        bundle.clean()
    assert not lost.exists() and (tmp_path / "README").exists() and len(list(tmp_path.glob("*.so"))) == 1


def test_a_folder_that_is_no_bundle_is_refused_and_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    with pytest.raises(InputError, match="holds files, but no bundle"):
        BundleWriter(tmp_path, "1")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(InputError, match="is no folder"):
        BundleWriter(mine, "1")


def test_a_folder_of_steps_that_was_left_without_a_manifest_goes_on(tmp_path: Path) -> None:
    left = tmp_path / f"decode_rows-{'0' * 32}.so"
    left.touch()
    with BundleWriter(tmp_path, "1") as bundle:
        bundle.clean()
    assert not left.exists() and (tmp_path / NAME).exists()


def test_a_bundle_whose_manifest_cannot_be_used_is_refused_and_left_alone(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / NAME).write_text("{")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(BundleError, match="make the bundle anew"):
        BundleWriter(tmp_path, "1")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with BundleWriter(tmp_path, "1"), pytest.raises(BundleError, match="another process writes"):
        BundleWriter(tmp_path, "1")
    build(tmp_path)


def test_a_full_disk_is_one_sentence_and_the_former_manifest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    before = (tmp_path / NAME).read_bytes()

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write", refuse)
    with (
        pytest.raises(BundleError, match="cannot be written .No space left on device."),
        BundleWriter(tmp_path, "1") as b,
    ):
        b.save()
    assert (tmp_path / NAME).read_bytes() == before


def test_a_file_name_that_leaves_the_folder_is_altered(tmp_path: Path) -> None:
    entry = build(tmp_path)[0]
    assert judge(tmp_path, entry) == "ok"
    assert judge(tmp_path, replace(entry, binary=f"../{tmp_path.name}/{entry.binary}")) == "altered"
