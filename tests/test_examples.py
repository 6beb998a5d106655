"""Every file of examples/ runs as a user would run it: a process of its own, on the CPU target, no tuned plans."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kda_tl.core.device import cpu_device, find_compiler

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++")

# FLA needs Triton even to be imported: a stub of its registry, and a layer that calls FLA's function as
# FLA's own does. That function returns a string unless kda_tl serves the call.
WITH_STUB = """
import runpy, sys, types
import pytest, torch
from support.fla_stub import install_stub
from torch import nn

class KimiDeltaAttention(nn.Module):
    def __init__(self, hidden_size, head_dim, num_heads, use_short_conv, layer_idx):
        super().__init__()
        self.heads, self.project = (num_heads, head_dim), nn.Linear(hidden_size, 5 * hidden_size)
        self.beta, self.A_log = nn.Linear(hidden_size, num_heads), nn.Parameter(torch.zeros(num_heads))

    def forward(self, x):
        from fla.ops.kda.chunk import chunk_kda
        q, k, v, g, gate = self.project(x).unflatten(-1, (5, *self.heads)).unbind(2)
        o, _ = chunk_kda(q, k, v, g, self.beta(x), A_log=self.A_log, use_qk_l2norm_in_kernel=True,
                         use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, state_v_first=True)
        return self.o_norm(o, gate).flatten(2), None, None

install_stub(pytest.MonkeyPatch())
sys.modules["fla.layers"] = types.ModuleType("fla.layers")
sys.modules["fla.layers"].KimiDeltaAttention = KimiDeltaAttention
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_DATA_HOME": str(folder / "data"), "PYTHONPATH": path}
    argv = [sys.executable, *words]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)


def assert_falls(output: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) >= 3 and losses == sorted(losses, reverse=True) and losses[-1] < losses[0], output


def assert_fact(name: str, output: str) -> None:
    """What an example prints, by its name; of one without a line here, that it prints."""
    if name in ("train_step", "fla_model"):
        assert_falls(output)
    elif name == "tune_and_export":
        assert "exact bucket in the overlay database" in output and "export: valid." in output
    elif name == "add_stage":
        assert output.count("relative error") == 3 and 'extern "C" __global__ void' in output
    elif name == "serve":
        slots = [line.split()[3] for line in output.splitlines()[1:]]
        assert len(slots) > len(set(slots)) > 1, output  # requests take slots that others left
    assert output


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path) -> None:
    done = run(tmp_path, *(("-c", WITH_STUB) if path.stem == "fla_model" else ()), str(path))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert_fact(path.stem, done.stdout)


@pytest.mark.rest
def test_the_other_operator_trains(tmp_path: Path) -> None:
    done = run(tmp_path, str(ROOT / "examples" / "train_step.py"), "--operator", "chunk_gated_delta_rule")
    assert done.returncode == 0, done.stderr
    assert_falls(done.stdout)


def test_without_fla_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "fla.py").write_text("raise ImportError('none here', name='fla')\n")
    code = "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = run(tmp_path, "-c", code, str(ROOT / "examples" / "fla_model.py"))
    assert done.returncode == 1 and not done.stdout
    assert re.fullmatch(r"flash-linear-attention is not installed: `pip install .*\n", done.stderr)
