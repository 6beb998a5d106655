"""``kda-tl explain``, ``show`` and ``source``: which problem they are about, and what they say of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.cli_cases import CPU, OLD, SMALL, Run, make_entry, store

from kda_tl.bench.workloads import select
from kda_tl.database.gpus import known_device
from kda_tl.runtime import dispatch

pytestmark = pytest.mark.usefixtures("own_database")


def test_show(run: Run, own_database: Path) -> None:
    h200 = known_device("nvidia_h200")
    tuned, packed = select(["safe-T8192-H32", "safe-packed-H64"])
    store(own_database, h200, make_entry(tuned, h200), make_entry(packed, h200))
    store(own_database, CPU, make_entry(SMALL, CPU, templates=OLD))
    code, out, err = run("show")
    assert (code, err) == (0, "")
    assert "nvidia_h200  chunk_kda fwd  ($KDA_TL_DB)" in out
    assert re.search(r"128x128 bf16 safe h32 t8192 +staged 32/16 +412.6 us +1.21x +3.1e-03", out)
    assert re.search(r"32x32 fp32 safe.* stale", out)
    assert max(map(len, out.splitlines()[:4])) <= 80
    for filters, count in ((["--gpu", "h200"], 2), (["--stale"], 1), (["--dtype", "fp32"], 1), (["--gate", "log"], 0)):
        code, out, _ = run("show", "--json", "--source", "$KDA_TL_DB", *filters)
        plans = json.loads(out)["plans"]
        assert code == 0 and len(plans) == count
        assert all(plan["source"] == "$KDA_TL_DB" for plan in plans)


def test_show_nothing(run: Run) -> None:
    code, out, err = run("show", "--gpu", "cpu", "--source", "user")
    assert (code, out) == (0, "")
    assert "kda-tl tune" in err


@pytest.mark.usefixtures("without_gpu")
def test_show_draws_a_pipeline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("show", "--pipeline", "prep_scan", "--gpu", "nvidia_h200", "--heads", "32", "--tokens", "8192")
    code, out, _ = run(*words, "--json")
    drawing = json.loads(out)
    steps = {step["stage"]: step for step in drawing["steps"]}
    assert code == 0 and list(steps) == ["fwd_prep", "bwd_scan", "bwd_gradients", "bwd_reduce"]
    triangle, tile = 8192 // 64 * 32 * 96 * 32 * 2, 8192 * 32 * 128 * 2
    assert steps["fwd_prep"]["makes"] | {"decay": 0} == {
        **dict.fromkeys(("A", "Aqk"), triangle),
        **dict.fromkeys(("k_neg", "qg", "kg"), tile),
        "decay": 0,
    }
    assert set(steps["bwd_scan"]["frees"]) == set(drawing["residuals"]) == set(steps["fwd_prep"]["makes"])
    made, gone = [], []
    for step in steps.values():
        made += step["makes"].values()
        assert step["live_bytes"] == sum(made) - sum(gone)
        gone += [each["makes"][name] for name in step["frees"] for each in steps.values() if name in each["makes"]]
    assert drawing["peak_bytes"] == steps["bwd_scan"]["live_bytes"]
    code, out, _ = run(*words)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert re.search(r"bwd_scan +values +67.1 MB  A, Aqk, k_neg, qg, kg, decay +656.4 MB", out)
    assert "* residuals, 253.8 MB: kept by the forward, they spare fwd_prep\n" in out
    code, _, err = run(*words[:3], "--gpu", "cpu")
    assert code == 2 and "prep_scan does not run" in err
    code, _, err = run("show", "--pipeline", "prep")
    assert code == 2 and "choose one of staged, prep_recurrence," in err


def test_explain_names_step_source_and_plan(run: Run, own_database: Path) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    code, out, _ = run("explain", "--workload", SMALL.name, "--gpu", "cpu")
    assert code == 0
    for word in ("exact bucket", "$KDA_TL_DB", "BT=32", "fwd_state", "1.21x the default"):
        assert word in out
    code, out, _ = run("explain", "--workload", SMALL.name, "--gpu", "cpu", "--tokens", "500", "--json")
    (choice,) = json.loads(out)["workloads"]
    assert choice["step"] == "nearest bucket" and choice["plan"]["BT"] == 32
    code, out, _ = run("explain", "--workload", SMALL.name, "--gpu", "cpu", "--chunk-size", "16", "--json")
    (choice,) = json.loads(out)["workloads"]
    assert choice["step"] == "default" and choice["passed_over"]


@pytest.mark.usefixtures("without_gpu")
def test_explain_for_a_gpu_that_is_elsewhere(run: Run) -> None:
    code, out, err = run("explain", "--heads", "32", "--tokens", "8192", "--gpu", "h100", "--json")
    (choice,) = json.loads(out)["workloads"]
    assert code == 0 and choice["gpu"] == "nvidia_h100_80gb_hbm3"
    assert (choice["step"], choice["source"]) == ("exact bucket", "packaged") and "heads 8" not in choice["reason"]
    assert "also: nvidia_h100_pcie" in err
    code, out, _ = run("explain", "--heads", "32", "--tokens", "8192", "--gpu", "nvidia_h100_nvl", "--json")
    (choice,) = json.loads(out)["workloads"]
    assert (choice["step"], choice["source"]) == ("same architecture", "packaged")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("heads", "way", "pipeline"), [("4", "fwd", "gdn_pairs_segments_16"), ("8", "bwd", "gdn_walk_segments_16")]
)
def test_explain_says_that_few_heads_are_cut(run: Run, heads: str, way: str, pipeline: str) -> None:
    words = ("--operator", "chunk_gated_delta_rule", "--heads", heads, "--value-heads", "8", "--gate", "log")
    code, out, _ = run("explain", *words, "--tokens", "32768", "--pass", way, "--gpu", "h100", "--json")
    (choice,) = json.loads(out)["workloads"]
    assert (code, choice["step"], choice["plan"]["pipeline"]) == (0, "default", pipeline)


def test_source(run: Run) -> None:
    argv = ("source", "fwd_gate", "--gpu", "cpu", "--BT", "16", "--BC", "8", "--config", "unroll=8")
    code, out, err = run(*argv)
    assert code == 0 and "fwd_gate_kernel" in out and "unroll=8" in err
    code, text, _ = run(*argv, "--json")
    assert json.loads(text)["source"] == out
    code, _, err = run("source", "bwd_qk", "--gpu", "cpu")
    assert code == 0 and "bwd_qk for chunk_kda-bwd-" in err


def test_choices_are_not_shared_between_databases(run: Run, own_database: Path, tmp_path: Path) -> None:
    store(tmp_path / "other", CPU, make_entry(SMALL, CPU))
    assert dispatch.select_cached(SMALL.problem(), CPU).step == "default"
    _, out, _ = run("explain", "--workload", SMALL.name, "--gpu", "cpu", "--db", tmp_path / "other", "--json")
    assert [choice["step"] for choice in json.loads(out)["workloads"]] == ["exact bucket"]
