"""No kernel reads or writes out of its tensors, and no two threads race on shared memory: NVIDIA's tools say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sanitized import compile_all

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def find_sanitizer() -> str | None:
    """compute-sanitizer of the CUDA toolkit."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *(f"{h}/bin" for h in homes)]))


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_every_template_is_clean(tool: str, seed: int) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH nor in $CUDA_HOME/bin: install it with the CUDA toolkit")
    compile_all(seed)
    here = Path(__file__).parent
    run = subprocess.run(
        # only kernels of the templates, whose names start with a pass
        [sanitizer, "--tool", tool, "--error-exitcode", "86", "--print-limit", "20", "--kernel-regex", "kns=wd_"]
        + [sys.executable, str(here / "sanitized.py"), str(seed)],
        capture_output=True,
        text=True,
        # an allocation a tensor, or accesses past one would land in the next unseen
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        cwd=here,
    )
    assert run.returncode == 0, f"seed {seed}\n{run.stdout[-6000:]}\n{run.stderr[-3000:]}"
    assert "ERROR SUMMARY: 0 errors" in run.stdout or "RACECHECK SUMMARY: 0 hazards" in run.stdout, run.stdout[-500:]
