"""``kda-tl bench`` run on the CPU target; its report and chart: test_bench.py."""

from __future__ import annotations

import json
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_cases import BACKWARD_PLAN, CPU, SMALL, SMALL_BACKWARD, Run

from kda_tl import chunk_gated_delta_rule
from kda_tl.bench.fixtures import torch_device
from kda_tl.bench.workloads import Workload
from kda_tl.cli._peers import (
    _call_flash_qla,
    _call_flashinfer,
    _prepare_for_flash_qla,
    _prepare_for_flashinfer,
    find_peers,
)
from kda_tl.reference import relative_error

pytestmark = pytest.mark.usefixtures("own_database")

GATED = Workload(
    name="gated", B=2, T=70, H=1, HV=2, K=32, V=48, dtype="fp32", gate="log", operator="chunk_gated_delta_rule"
)


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
    fake = types.SimpleNamespace(chunk_kda=None, kimi_delta_attention=None, chunk_gated_delta_rule=None)
    monkeypatch.setattr("importlib.import_module", lambda name: fake)
    calls, left_out = find_peers(SMALL, torch_device(CPU))
    assert not calls and set(left_out) == {"fla", "cudnn", "flash_qla", "flashinfer"}
    for name in ("flash_qla", "flashinfer"):
        assert left_out.pop(name) == "its kernels take one gate a value head"
    assert all("need a GPU" in reason for reason in left_out.values())
    _, left_out = find_peers(GATED, torch_device(CPU))
    assert all("need a GPU" in left_out[name] for name in ("flash_qla", "flashinfer"))
    assert left_out["cudnn"] == "its kernels take one gate a channel"
    _, left_out = find_peers(replace(GATED, direction="bwd"), torch_device(CPU))
    assert "forwards" in left_out["flashinfer"]


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("gate", ["log", "softplus"])
def test_flash_qla_is_asked_for_the_same(gate: str) -> None:
    """Its function is ours here, which takes the same names and refuses what is not its own."""
    beta = "plain" if gate == "log" else "sigmoid"
    workload = replace(GATED, gate=gate, beta=beta, initial_state=True, state_v_first=True)
    inputs = workload.inputs("cpu")
    asked: dict[str, Any] = {}

    def function(q: Any, k: Any, v: Any, g: Any, beta: Any, **options: Any) -> Any:
        asked.update(options, g=g)
        return chunk_gated_delta_rule(q, k, v, g, beta, **options)

    found = _call_flash_qla(function, workload, _prepare_for_flash_qla(inputs))
    assert asked["g"].dtype == torch.float32 and "A_log" not in asked
    for one, other in zip(found, chunk_gated_delta_rule(**inputs), strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("gate", ["log", "softplus"])
def test_flashinfer_is_asked_for_the_same(gate: str, state_v_first: bool) -> None:
    """Its function is ours here, with its arguments: packed tokens, factors for gates, fp32, states [V, K]."""
    beta = "plain" if gate == "log" else "sigmoid"
    workload = replace(GATED, gate=gate, beta=beta, initial_state=True, state_v_first=state_v_first)
    inputs = workload.inputs("cpu")

    def function(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        cu_seqlens: Any,
        output_state: Any,
        max_seqlen: int,
        **options: Any,
    ) -> Any:
        assert max_seqlen == cu_seqlens.diff().max()
        assert q.dim() == 3 and q.is_contiguous() and g.dtype == beta.dtype == torch.float32 and g.max() <= 1
        packed = (x[None] for x in (q, k, v, g.log(), beta))
        o, ht = chunk_gated_delta_rule(*packed, cu_seqlens=cu_seqlens, state_v_first=True, **options)
        assert output_state.shape == ht.shape and output_state.dtype == ht.dtype
        return o[0], ht

    found = _call_flashinfer(function, workload, _prepare_for_flashinfer(workload, inputs))
    for one, other in zip(found, chunk_gated_delta_rule(**inputs), strict=True):
        assert one.shape == other.shape and relative_error(one, other) < 1e-5
