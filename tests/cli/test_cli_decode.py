"""The commands for recurrent operators: which problem options describe, what is shown, verified and measured of it."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_cases import CPU, SMALL_STEP, Run, make_entry, store

from kda_tl.bench.workloads import WORKLOADS, Workload, select
from kda_tl.cli import _call as call
from kda_tl.cli import _timing as timing
from kda_tl.cli import verify
from kda_tl.cli._options import add_arguments
from kda_tl.cli._peers import _prepare_for_fla
from kda_tl.cli._problem import change_workload, read_workloads
from kda_tl.cli._report import Ceilings
from kda_tl.cli._subjects import Finding, Subject, find_workload, stored_subjects
from kda_tl.core.stage import Plan
from kda_tl.database.gpus import known_device
from kda_tl.database.store import Database
from kda_tl.errors import UnsupportedError
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import load_program

STEPS = [workload for workload in WORKLOADS if workload.direction == "step"]
STEP = {"operator": SMALL_STEP.operator, "direction": "step"}  # of a file of the database
H200 = known_device("nvidia_h200")
pytestmark = pytest.mark.usefixtures("own_database")


def read(*argv: object) -> tuple[Workload, ...]:
    parser = argparse.ArgumentParser()
    add_arguments("explain", parser)
    words = [str(word) for word in argv]
    return read_workloads(argparse.Namespace(**vars(parser.parse_args(words)), words=words))


@pytest.mark.parametrize("workload", STEPS, ids=lambda w: w.name)
def test_a_described_step_that_has_a_name_goes_by_it(workload: Workload) -> None:
    w = workload
    words = ["--operator", w.operator, "--heads", w.H, "--value-heads", w.HV, "--K", w.K, "--V", w.V, "--gate", w.gate]
    words += ["--dtype", w.dtype, "--state-v-first", "--state-dtype", w.state_dtype, "--state-use", w.state_use]
    shape = ["--sequences", w.B] if w.T == 1 else ["--sequences", w.B, "--tokens", w.tokens]
    assert read(*words, *shape) == (w,)


def test_sequences_of_steps_keep_their_lengths() -> None:
    for B in (1, 64):
        (more,) = read("--workload", "kda-verify-B32-T4-bf16", "--sequences", B)
        assert (more.B, more.T, more.state_use) == (B, 4, "verify")
    assert read("--workload", "kda-decode-B32-bf16", "--sequences", 8) == select(["kda-decode-B8-bf16"])
    chunked = Workload(name="x", T=64, H=1)
    assert change_workload(chunked, {"sequences": 2}).T == 32, "tokens are those in all"


def test_names_tell_steps_apart(rng: random.Random) -> None:
    choices = {"state-dtype": ("bf16", "fp32"), "state-use": ("pool", "columns", "verify", "rows")}
    named: dict[str, Workload] = {}
    for _ in range(60):
        words = ["--operator", "fused_recurrent_kda", "--heads", 2, "--sequences", rng.choice((1, 4))]
        words += [word for name, values in choices.items() for word in (f"--{name}", rng.choice(values))]
        (workload,) = read(*words, *(["--state-v-first"] if rng.random() < 0.5 else []))
        assert named.setdefault(workload.name, workload) == workload
    assert len(named) > 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain --operator fused_recurrent_kda --sequences 2", "--heads missing"),
        ("explain --heads 2 --tokens 8 --pass step", "chunk_kda has no step pass: choose fwd or bwd"),
        ("explain --workload kda-decode-cpu --chunk-size 16", "without chunks: leave --chunk-size out"),
        (
            "explain --operator fused_recurrent_kda --heads 2 --state-use heap",
            "choose pool or columns or verify or rows",
        ),
        (
            "source decode_step --workload cpu-safe-K32",
            "decode_step is of the pass step, which chunk_kda does not have",
        ),
        ("source fwd_gate --workload kda-decode-cpu", "fused_recurrent_kda does not have"),
        ("source decode_step --gpu cpu --BT 16", "leave --BT and --BC out"),
        ("show --pipeline decode --workload cpu-safe-K32", "decode is of the pass step"),
        ("tune --gpu cpu --pipeline decode", "decode is a pipeline of the decode pass"),
    ],
)
def test_what_does_not_fit_is_a_sentence(run: Run, words: str, told: str) -> None:
    code, _, err = run(*words.split())
    assert code == 2 and told in err


def test_source_and_flow_are_those_of_a_usual_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = run("source", "decode_step", "--gpu", "cpu")
    assert code == 0 and "decode_step" in out and "fused_recurrent_kda-step" in err and "BT=" not in err
    monkeypatch.setenv("COLUMNS", "80")
    words = ("show", "--pipeline", "decode_rows", "--gpu", "nvidia_h200")
    drawing = json.loads(run(*words, "--json")[1])
    assert (drawing["BT"], drawing["given"]["pool"]) == (0, 33 * 32 * 128 * 128 * 4)
    assert drawing["steps"][0]["makes"] == {"o": 32 * 32 * 128 * 2}
    first, problem, *rest = run(*words)[1].splitlines()
    assert (first, problem.split()[:2]) == ("decode_rows on nvidia_h200", ["fused_recurrent_kda", "step"])
    assert max(map(len, rest)) <= 80


def test_plans_of_steps_are_shown_by_their_problem(run: Run, own_database: Path) -> None:
    wide, drafts = (replace(select([name])[0], state_v_first=True) for name in ("kda-decode-B8-fp32", "kda-verify-cpu"))
    store(own_database, H200, *(make_entry(w, H200) for w in (wide, drafts)), **STEP)
    code, out, _ = run("show", "--source", "$KDA_TL_DB", "--gpu", "h200")
    told = " ".join(re.sub(r"decode_rows.*", "", out).split())  # its column is of two lines
    assert code == 0 and "128x128 bf16 softplus h32 t8 max1 fp32 vk updates" in told

    def find(*words: object) -> list[int]:
        plans = json.loads(run("show", "--json", "--source", "$KDA_TL_DB", *words)[1])["plans"]
        return [plan["key"]["tokens_bucket"] for plan in plans]

    assert find("--state-dtype", "bf16") == find("--workload", "kda-verify-cpu") == [16]
    assert find("--tokens", 9) == [8] and find("--tokens", 14) == [16], "steps are told from one token on"
    assert find("--state-v-first", "--pass", "step") == [16, 8]
    assert [find("--state-use", use) for use in ("pool", "columns", "verify", "rows")] == [[8], [], [16], []]
    assert find("--state-use", "verify", "--state-dtype", "fp32") == []
    code, _, err = run("show", "--state-use", "heap")
    assert code == 2 and "--state-use must be one of pool, columns, verify, rows, got 'heap'" in err


def test_stored_steps_are_verified(run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[int, ...], bool]] = []

    def measure(operator: Any, inputs: Mapping[str, Any], plan: Plan, direction: str) -> dict[str, float]:
        seen.append((direction, tuple(inputs["q"].shape[:2]), inputs["use_qk_l2norm_in_kernel"]))
        return {"pool": 1e-3 if len(seen) == 3 else 0.0}

    monkeypatch.setattr(call, "measure_errors", measure)
    store(own_database, CPU, make_entry(SMALL_STEP, CPU), **STEP)
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database, "--workload", SMALL_STEP.name)
    assert code == 1 and "stored kda-decode-cpu, drafts: pool is off by 1.0e-03, over 1e-05" in out
    assert seen == [("step", (3, 2), True), ("step", (1, 4), False), ("step", (3, 2), True)]


@pytest.mark.parametrize("use", SMALL_STEP.declaration.state_uses)
def test_a_record_without_a_name_is_run_as_it_was_tuned(use: str, own_database: Path) -> None:
    for changes in ({"B": 3, "T": 2}, {"B": 1, "lengths": (2, 1)}):
        tuned = replace(SMALL_STEP, state_use=use, state_dtype="bf16", state_v_first=False, **changes)
        found = find_workload(make_entry(tuned, CPU), "step", tuned.operator)
        assert (found.state_use, found.state_dtype, bool(found.lengths)) == (use, "bf16", bool(tuned.lengths))
    path = store(own_database, CPU, make_entry(SMALL_STEP, CPU), **STEP)
    path.write_text(path.read_text().replace('["updates"]', '["tree"]'))
    (found,) = stored_subjects(Database.load(own_database, "test"), CPU, ())
    assert isinstance(found, Finding) and not found.passed and "no workload has calls of" in found.detail


def test_speed_of_steps_is_gated_by_their_states(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = default_plan(SMALL_STEP.problem(), CPU)
    subject = Subject(name="x", workload=SMALL_STEP, plan=plan, shipped=True)
    states = 8 * 2
    for sms, gated in ((states, True), (states + 1, False)):
        found = verify.check_speed(subject, replace(CPU, num_sms=sms))
        assert found.passed and ("smaller than a wave" in found.detail) is not gated


def test_bench_of_a_step(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ceilings = Ceilings(bytes_per_s=1e9, flops_per_s=1e15, dtype="float32")
    monkeypatch.setattr(timing, "measure_ceilings", lambda device: ceilings)
    argv = ("bench", "--gpu", "cpu", "--workload", SMALL_STEP.name, "--reps", 1, "--rounds", 1)
    code, out, _ = run(*argv, "--json", tmp_path / "bench.json")
    assert code == 0 and "kda-decode-cpu  (decode, default)" in out
    (result,) = json.loads((tmp_path / "bench.json").read_text())["workloads"]
    (stage,), (ours,) = result["stages"], result["calls"]
    assert stage["name"] == "decode_step" and stage["roofline_us"] == ours["roofline_us"] == stage["bytes"] / 1e3


def test_every_peer_changes_states_of_its_own() -> None:
    inputs = SMALL_STEP.inputs("cpu")
    before, seen = inputs["initial_state"].clone(), []

    def step(given: Mapping[str, Any]) -> tuple[torch.Tensor]:
        seen.append(given["initial_state"].clone())
        return (given["initial_state"].add_(1.0),)

    timing._try_peers({name: timing.Peer(step) for name in ("kda_tl", "other")}, inputs, SMALL_STEP)
    assert len(seen) == 2 and all(torch.equal(each, before) for each in (*seen, inputs["initial_state"]))


def take_slots(q: Any, initial_state: Any = None, inplace_final_state: bool = True, ssm_state_indices: Any = None,
               num_accepted_tokens: Any = None, output_final_state: bool = False, **more: Any) -> None:  # fmt: skip
    """What decides of FLA's fused_recurrent_kda_fwd."""


def take_rows(q: Any, initial_state: Any = None, output_final_state: bool = False) -> None:
    """What decides of FLA's fused_recurrent_gated_delta_rule."""


@pytest.mark.parametrize("use", ["pool", "columns", "verify", "rows"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("function", [take_slots, take_rows])
def test_fla_gets_states_as_it_takes_them(function: Any, T: int, use: str) -> None:
    inputs = replace(SMALL_STEP, T=T, state_use=use).inputs("cpu")
    inputs = {name: x for name, x in inputs.items() if name not in ("k", "v", "g", "beta", "A_log", "dt_bias")}
    if use == "verify" or (use == "columns" and function is take_rows):
        with pytest.raises(UnsupportedError):
            _prepare_for_fla(function, inputs)
        return
    given = _prepare_for_fla(function, inputs)
    if function is take_slots and (use == "columns" or (use == "pool" and T == 1)):
        assert given["initial_state"] is inputs["initial_state"] and given["inplace_final_state"]
        assert given["ssm_state_indices"] is inputs["ssm_state_indices"]
        return
    rows = inputs["initial_state"] if use == "rows" else inputs["initial_state"][inputs["ssm_state_indices"].long()]
    assert torch.equal(given["initial_state"], rows) and given["output_final_state"]
    assert not given.get("inplace_final_state") and given.get("ssm_state_indices") is None


def test_a_tuned_step_serves_calls(own_database: Path) -> None:
    plan = default_plan(SMALL_STEP.problem(), CPU)
    other = replace(plan, stages=tuple((name, replace(config, BV=8)) for name, config in plan.stages))
    store(own_database, CPU, make_entry(SMALL_STEP, CPU, plan=other), **STEP)
    choice, program = load_program(SMALL_STEP.problem(), CPU)
    assert choice.step == "exact bucket" and program is not None and program.plan == other
    errors = call.measure_errors(SMALL_STEP.declaration, SMALL_STEP.inputs("cpu"), None)
    assert set(errors) == {"o", "pool"} and 0 < max(errors.values()) < 1e-5
