"""``kda-tl verify``, CI's gate: what must fail fails, with exit code 1 and a sentence."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import CPU, OLD, SMALL, SMALL_BACKWARD, Run, make_entry, store

from kda_tl.cli import _call as call
from kda_tl.cli import _regression as regression
from kda_tl.cli import verify
from kda_tl.dispatch import default_plan
from kda_tl.gpus import known_device
from kda_tl.stage import Plan

pytestmark = pytest.mark.usefixtures("own_database")


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Plans are not run: these are their errors."""
    found = {"o": 1e-7, "ht": 1e-7}
    monkeypatch.setattr(call, "measure_errors", lambda *args, **more: found)
    return found


def test_verify(run: Run, errors: dict[str, float], own_database: Path) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    argv = ("verify", "--gpu", "cpu", "--db", own_database)
    code, out, _ = run(*argv)
    assert code == 0 and "stored cpu-safe-K32" in out and "default cpu-softplus-K64" in out
    errors["ht"] = 1e-3
    code, out, _ = run(*argv)
    assert code == 1 and "ht is off by 1.0e-03, over 1e-05" in out and "over 2e-04" in out
    checks = json.loads(run(*argv, "--json")[1])["checks"]
    assert {check["passed"] for check in checks if check["tolerance"]} == {False}


def test_verify_runs_plans_in_their_own_pass(run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def measure(inputs: Any, plan: Plan, direction: str) -> dict[str, float]:
        seen.append((plan.pipeline, direction))
        return {"x": 0.0}

    monkeypatch.setattr(call, "measure_errors", measure)
    store(own_database, CPU, make_entry(SMALL_BACKWARD, CPU), direction="bwd")
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database)
    assert code == 0 and "stored train-cpu-safe-K32" in out and "stored cpu-safe-K32" not in out
    assert Counter(seen) == {("staged", "fwd"): 2 * 4, ("staged_backward", "bwd"): 3 * 2}


def test_verify_compiles_one_backward_default() -> None:
    subjects = list(verify._default_subjects(known_device("nvidia_h200"), static=True))
    assert [s.workload.direction for s in subjects].count("bwd") == 1


@pytest.mark.parametrize("tensor", ["q", "A_log"])
def test_errors_of_a_backward_are_those_of_its_gradients(tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(SMALL_BACKWARD, T=20)
    plan = default_plan(workload.problem(), CPU, BT=16)
    errors = call.measure_errors(workload.inputs("cpu"), plan, "bwd")
    assert set(errors) == {f"d{name}" for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    assert 0 < max(errors.values()) < 2e-5
    right = call.Recorded.run_backward
    spoil = lambda self: tuple(  # noqa: E731
        1.5 * x if name == tensor else x for name, x in zip(self.leaves, right(self), strict=True)
    )
    monkeypatch.setattr(call.Recorded, "run_backward", spoil)
    errors = call.measure_errors(workload.inputs("cpu"), plan, "bwd")
    assert {name for name, error in errors.items() if error > 2e-5} == {f"d{tensor}"}


@pytest.mark.usefixtures("errors")
def test_verify_allows_no_stale_plan(run: Run, own_database: Path) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU, templates=OLD))
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database)
    assert code == 1 and "kda-tl tune --stale" in out
    assert run("verify", "--gpu", "cpu", "--db", own_database, "--allow-stale")[0] == 0


@pytest.mark.usefixtures("errors")
def test_verify_finds_plans_that_cannot_run(run: Run, own_database: Path) -> None:
    entry = make_entry(SMALL, CPU)
    plan = {**entry.plan, "stages": {**entry.plan["stages"], "fwd_gate": {"BK": 7, "threads": 32, "unroll": 8}}}
    store(own_database, CPU, replace(entry, plan=plan))
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database)
    assert code == 1 and "BK must be one of" in out


@pytest.mark.parametrize(
    ("plan", "default", "slower"),
    [
        ([110.0, 111.0, 112.0], [100.0, 100.0, 101.0], True),
        ([104.0, 104.0, 104.0], [100.0, 100.0, 101.0], False),
        ([11.5, 11.5, 11.5], [10.0, 10.0, 10.0], False),
        ([110.0, 110.0, 110.0], [100.0, 95.0, 108.0], False),
    ],
    ids=["slower", "within 5 %", "within 2 us", "within the noise"],
)
def test_speed_gate(plan: list[float], default: list[float], slower: bool) -> None:
    assert regression.is_slower(plan, default) is slower


def test_no_compiler_is_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.kernel.find_compiler", lambda device: None)
    code, _, err = run("verify", "--gpu", "cpu")
    assert code == 3 and "install a C++ compiler" in err
