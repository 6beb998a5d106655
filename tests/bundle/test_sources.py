"""Which bundles are asked for kernels, and that what does not fit is passed over with a sentence."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.libraries import CASE, JOBS, PREP, forget_kernels, make_bundle

import kda_tl
from kda_tl.bundle import sources
from kda_tl.database.gpus import known_device
from kda_tl.errors import BundleError, KdaTlWarning

JOB = JOBS[0]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)


def find() -> list[Path]:
    stage, case, config = JOB
    return [path.parent for path, _ in sources.find_binaries(stage, stage.specialise(case), config)]


def test_named_bundles_come_before_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c, d = (make_bundle(tmp_path / name) for name in "abcd")
    monkeypatch.setenv("KDA_TL_KERNELS", os.pathsep.join(map(str, (c, d))))
    kda_tl.use_kernels(b)
    kda_tl.use_kernels(a)
    assert find() == [a, b, c, d]
    kda_tl.use_kernels(b)
    assert find() == [b, a, c, d], "named once more, not twice"


def test_a_bundle_that_is_named_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BundleError, match=r"manifest.json cannot be used \(FileNotFoundError"):
        kda_tl.use_kernels(tmp_path)
    good = make_bundle(tmp_path / "good")
    newer = make_bundle(tmp_path / "newer")
    manifest = newer / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"schema": 99}))
    monkeypatch.setenv("KDA_TL_KERNELS", os.pathsep.join(map(str, (newer, tmp_path / "nothing", good))))
    with pytest.warns(KdaTlWarning) as told:
        assert find() == [good]
    assert ["schema 99" in str(w.message) for w in told] == [True, False] and "FileNotFound" in str(told[1].message)


def test_another_architecture_is_told_once(tmp_path: Path) -> None:
    kda_tl.use_kernels(make_bundle(tmp_path))
    other = replace(CASE, device=replace(known_device("nvidia_h200"), arch="sm_100a"))
    specialised = PREP.specialise(other)
    with pytest.warns(KdaTlWarning, match="has kernels for sm_90a, none for sm_100a"):
        assert not list(sources.find_binaries(PREP, specialised, JOB[2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not list(sources.find_binaries(PREP, specialised, JOB[2]))


def test_kernels_of_other_templates_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kda_tl.use_kernels(make_bundle(tmp_path))
    monkeypatch.setattr("kda_tl.templates.fingerprint", lambda name: "edited")
    with pytest.warns(KdaTlWarning, match="was made by another kda_tl, whose fwd_prep is another"):
        assert not find()


def test_no_fault_of_a_file_serves_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of a bundle, each fault: the next bundle serves, or the entry is still the very one that was made."""
    good = make_bundle(tmp_path / "good")
    whole = {path.name: path.read_bytes() for path in good.iterdir()}
    names = sorted(whole)
    faults = 0
    for n, name in enumerate(names):
        content = whole[name]
        places = range(0, len(content), max(1, len(content) // 40))
        broken: list[bytes | None] = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in places]
        broken += [content[:-1], content[: len(content) // 2], b"", None, whole[names[n - 1]]]
        for each in broken:
            folder = tmp_path / "broken"
            folder.mkdir(exist_ok=True)
            for other, data in whole.items():
                (folder / other).write_bytes(data)
            (folder / name).unlink() if each is None else (folder / name).write_bytes(each)
            forget_kernels(monkeypatch)
            monkeypatch.setenv("KDA_TL_KERNELS", os.pathsep.join(map(str, (folder, good))))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", KdaTlWarning)
                for stage, case, config in JOBS:
                    ((first, _), *_) = sources.find_binaries(stage, stage.specialise(case), config)
                    assert first.read_bytes() == whole[first.name] and first.name.startswith(f"{stage.name}-")
            faults += 1
    assert faults >= 3 * 40
