"""Packages that are missing: a sentence that says what to install, wherever one is first needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.database_cases import H200

from kda_tl.bench.workloads import select
from kda_tl.core.device import cpu_device
from kda_tl.core.packages import REQUIREMENTS, describe_failure, importing
from kda_tl.database import store as db
from kda_tl.errors import KdaTlError, PackageError
from kda_tl.tune import tuner
from kda_tl.tune.journal import Journal, Trial

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_requirements_are_those_of_the_package() -> None:
    block = PYPROJECT.read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    assert sorted(REQUIREMENTS.values()) == sorted(re.findall(r'^ +"([^"]+)"', block, re.MULTILINE))


def tune(tmp_path: Path) -> None:
    tuner.tune(select(["cpu-safe-K32"]), cpu_device(), db_dir=tmp_path)


NEEDED: dict[str, tuple[str, Callable[[Path], object]]] = {
    "store": ("filelock", lambda path: db.store(path, H200, "chunk_kda", "fwd", [])),
    "journal": ("filelock", lambda path: Journal(path / "j").append(Trial(study="s", config={}, status="crash"))),
    "tune": ("optuna", tune),
}


@pytest.mark.parametrize("what", NEEDED)
def test_missing_package_is_a_sentence(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, use = NEEDED[what]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(tuner, "WorkerPool", None)  # told before any process is started
    monkeypatch.setattr(tuner, "require_compiler", lambda device: None)
    told = rf"{package} cannot be imported .*: run `pip install '{re.escape(REQUIREMENTS[package])}'`\."
    with pytest.raises(PackageError, match=told) as caught:
        use(tmp_path)
    assert isinstance(caught.value, KdaTlError) and isinstance(caught.value, ImportError)


def test_broken_package_is_a_sentence_too() -> None:
    with pytest.raises(PackageError, match=r"psutil cannot be imported \(OSError: no\s?library\)"), importing("psutil"):
        raise OSError("no\nlibrary")
    missing = ModuleNotFoundError("No module named 'psutil'", name="psutil.linux")
    assert describe_failure("tilelang", missing).endswith("run `pip install 'psutil>=5.9'`")
