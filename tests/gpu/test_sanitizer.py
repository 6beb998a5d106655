"""No kernel reads or writes out of its tensors, and no two threads race on shared memory: NVIDIA's tools say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.sanitized import BROKEN, compile_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SUMMARY = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}


def find_sanitizer() -> str | None:
    """compute-sanitizer of the CUDA toolkit."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *(f"{h}/bin" for h in homes)]))


def run_sanitizer(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A tool over sanitized.py."""
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH nor in $CUDA_HOME/bin: install it with the CUDA toolkit")
    return subprocess.run(
        # only kernels of the templates, whose names start with a pass
        [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", "--kernel-regex", "kns=wd_"]
        + [sys.executable, "-m", "support.sanitized", *arguments],
        capture_output=True,
        text=True,
        # an allocation a tensor, or accesses past one would land in the next unseen
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=Path(__file__).parents[1],
    )


@pytest.mark.parametrize("tool", SUMMARY)
def test_every_template_is_clean(tool: str, seed: int) -> None:
    if find_sanitizer() is not None:
        compile_all(seed)
    run = run_sanitizer(tool, str(seed))
    assert run.returncode == 0, f"seed {seed}\n{run.stdout[-6000:]}\n{run.stderr[-3000:]}"
    assert SUMMARY[tool] in run.stdout, run.stdout[-500:]


def test_sanitizer_sees_our_kernels(seed: int) -> None:
    """Or the test above would pass with a filter that no kernel's name matches: one that writes too far is reported."""
    run = run_sanitizer("memcheck", str(seed), "--broken")
    assert run.returncode == 86, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    assert "Invalid __global__ write" in run.stdout and f"{BROKEN}_kernel" in run.stdout, run.stdout[-3000:]
