"""``kda-tl bench`` run on the CPU target; its report and chart: test_bench.py."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
from support.cli_cases import BACKWARD_PLAN, CPU, SMALL, SMALL_BACKWARD, Run

from kda_tl.bench.fixtures import torch_device
from kda_tl.cli._peers import find_peers

pytestmark = pytest.mark.usefixtures("own_database")


def test_bench(run: Run, tmp_path: Path) -> None:
    argv = ("bench", "--gpu", "cpu", "--workload", SMALL.name, "--reps", "1", "--rounds", "1", "--peers")
    code, out, _ = run(*argv, "--json", tmp_path / "bench.json")
    assert code == 0 and "fwd_state" in out and "fla left out" in out
    values = json.loads((tmp_path / "bench.json").read_text())
    (result,) = values["workloads"]
    assert [row["name"] for row in result["calls"]] == ["kda_tl"]
    assert all(0 < row["roofline_us"] < row["median_us"] for row in result["stages"])


def test_bench_of_a_backward(run: Run, tmp_path: Path) -> None:
    argv = ("bench", "--gpu", "cpu", "--workload", SMALL_BACKWARD.name, "--reps", "1", "--rounds", "1", "--peers")
    code, out, _ = run(*argv, "--json", tmp_path / "bench.json")
    assert code == 0 and "fla left out: " in out
    (result,) = json.loads((tmp_path / "bench.json").read_text())["workloads"]
    assert [row["name"] for row in result["stages"]] == [name for name, _ in BACKWARD_PLAN.stages]
    assert result["calls"][0]["eager_us"] > max(row["roofline_us"] for row in result["stages"])


def test_peers_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(chunk_kda=None, kimi_delta_attention=None)
    monkeypatch.setattr("importlib.import_module", lambda name: fake)
    calls, left_out = find_peers(SMALL, torch_device(CPU))
    assert not calls and set(left_out) == {"fla", "cudnn"}
    assert all("need a GPU" in reason for reason in left_out.values())
