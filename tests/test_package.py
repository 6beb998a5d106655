"""The installed package: cheap to import, and complete in a wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
IMPORT_BUDGET_S = 0.3  # beyond torch
FOLDERS = {
    "kda_tl": "kda_tl",
    "templates": "kda_tl/templates",
    "tuning_db": "kda_tl/tuning_db",
    "cli": "kda_tl/cli",
}

IMPORT = """
import json, sys, time
import torch
start = time.perf_counter()
import kda_tl
print(json.dumps({"seconds": time.perf_counter() - start, "modules": sorted(sys.modules)}))
"""


def run_python(*args: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_is_cheap(tmp_path: Path) -> None:
    runs = [json.loads(run_python("-c", IMPORT, cwd=tmp_path)) for _ in range(2)]
    assert not {"fla", "tilelang", "tvm", "optuna", "rich"} & set(runs[0]["modules"])
    assert min(run["seconds"] for run in runs) < IMPORT_BUDGET_S


def shipped_files() -> dict[str, Path]:
    """Name in the wheel -> source file, for everything a wheel must hold."""
    return {
        f"{package}/{path.relative_to(ROOT / folder)}": path
        for folder, package in FOLDERS.items()
        for pattern in ("**/*.py", "py.typed", "**/*.json", "**/*.md", "**/*.c")
        for path in (ROOT / folder).glob(pattern)
    }


@pytest.mark.skipif(int(version("setuptools").split(".")[0]) < 77, reason="needs setuptools 77 or later")
def test_wheel_is_complete(tmp_path: Path) -> None:
    # From a copy: setuptools leaves a build folder beside what it builds, whose stale files reach the next wheel.
    copy = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run_python("-c", "from setuptools.build_meta import build_wheel; build_wheel('..')", cwd=copy)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    expected = shipped_files()
    assert "kda_tl/py.typed" in expected
    assert any(name.startswith("kda_tl/tuning_db/") and name.endswith(".json") for name in expected)
    assert not expected.keys() - held
    assert not {name for name in held - expected.keys() if ".dist-info/" not in name}
