"""Copies of the repository that run as they are: for scripts that compare commits, or break code to see tests fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACED = ("templates", "tuning_db", "cli")  # folders that pyproject.toml makes packages inside kda_tl


def copy_tree(folder: Path) -> Path:
    """The working tree, without what git ignores."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return _place(folder)


def copy_commit(commit: str, folder: Path) -> Path:
    """A commit."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return _place(folder)


def _place(folder: Path) -> Path:
    for name in PLACED:
        (folder / "kda_tl" / name).symlink_to(folder / name)
    return folder


def environment_of(folder: Path) -> dict[str, str]:
    """In which Python takes kda_tl from a copy: an editable installation serves only what is not found elsewhere."""
    return {**os.environ, "PYTHONPATH": str(folder)}
