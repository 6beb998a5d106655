"""``kda-tl verify``, CI's gate: what must fail fails, with exit code 1 and a sentence."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_cases import CPU, OLD, SMALL, SMALL_BACKWARD, Run, make_entry, store

from kda_tl.cli import _call as call
from kda_tl.cli import _subjects, verify
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerFailure
from kda_tl.core.stage import Plan
from kda_tl.database.gpus import known_device
from kda_tl.runtime.defaults import default_plan
from kda_tl.tune.requests import HashJob

pytestmark = pytest.mark.usefixtures("own_database")


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Plans are not run: these are their errors."""
    found = {"o": 1e-7, "ht": 1e-7}
    monkeypatch.setattr(call, "measure_errors", lambda *args, **more: found)
    return found


def read_checks(out: str) -> dict[tuple[str, str], bool]:
    """Whether each check of ``verify --json`` passed, by subject and name."""
    return {(check["subject"], check["check"]): check["passed"] for check in json.loads(out)["checks"]}


@pytest.mark.parametrize("wrong", ["o", "ht"])
def test_verify(run: Run, errors: dict[str, float], own_database: Path, wrong: str) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    argv = ("verify", "--gpu", "cpu", "--db", own_database)
    errors.update(dict.fromkeys(errors, 1e-5))  # at the limit of a forward
    code, out, _ = run(*argv)
    assert code == 0 and "stored cpu-safe-K32" in out and "default cpu-softplus-K64" in out
    errors[wrong] = 1e-2
    code, out, _ = run(*argv)
    assert code == 1 and f"{wrong} is off by 1.0e-02, over 1e-05" in out and "over 2e-04" in out
    checks = json.loads(run(*argv, "--json")[1])["checks"]
    assert {check["passed"] for check in checks if check["tolerance"]} == {False}


VARIANTS = [
    ("ragged", (2, 97), None),
    ("packed", (1, 194), None),
    ("bare", (2, 97), None),
    ("stateful", (1, 194), (4, 2, 32, 32)),
]


@pytest.mark.parametrize("wrong", [(BT, name) for BT in (32, 64) for name, *_ in VARIANTS[: 2 if BT == 32 else 4]])
def test_verify_fails_for_one_wrong_call_of_one_plan(
    run: Run, own_database: Path, wrong: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored plan has chunks of 32, the default of 64: each is run in all its ways, and each way counts."""
    seen: set[tuple[int, str]] = set()

    def measure(operator: Any, inputs: Any, plan: Plan, direction: str) -> dict[str, float]:
        state, shape = inputs.get("initial_state"), tuple(inputs["q"].shape[:2])
        called = shape, None if state is None else tuple(state.shape)
        (name,) = (
            name
            for name, *more in VARIANTS
            if tuple(more) == called and (name == "bare") == (not inputs["use_qk_l2norm_in_kernel"])
        )
        assert (name == "bare") == (not inputs["use_beta_sigmoid_in_kernel"]) == (not inputs["output_final_state"])
        assert (name == "stateful") == inputs.get("state_v_first", False)
        bounds = inputs.get("cu_seqlens_cpu")
        assert (bounds is not None) == (shape[0] == 1) and (bounds is None or bounds.tolist() == [0, 63, 63, 64, 194])
        seen.add((plan.BT, name))
        return {"o": 1e-7, "ht": 1e-3 if (plan.BT, name) == wrong else 1e-7}

    monkeypatch.setattr(call, "measure_errors", measure)
    store(own_database, CPU, make_entry(SMALL, CPU))
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database, "--workload", SMALL.name, "--json")
    failed = [name for name, passed in read_checks(out).items() if not passed]
    subject = f"{'stored' if wrong[0] == 32 else 'default'} {SMALL.name}"
    assert code == 1 and failed == [(subject, wrong[1])]
    assert seen == {(32, "ragged"), (32, "packed"), *((64, name) for name, *_ in VARIANTS)}


def test_verify_reports_a_plan_whose_call_raises(run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(operator: Any, inputs: Any, plan: Plan, direction: str) -> dict[str, float]:
        if plan.BT == 32:
            raise RuntimeError("an illegal\nmemory access")
        return {"o": 1e-7, "ht": 1e-7}

    monkeypatch.setattr(call, "measure_errors", measure)
    store(own_database, CPU, make_entry(SMALL, CPU))
    argv = ("verify", "--gpu", "cpu", "--db", own_database)
    code, out, _ = run(*argv)
    assert code == 1 and "stored cpu-safe-K32, ragged (and 1 more): RuntimeError: an illegal memory access" in out
    checks = read_checks(run(*argv, "--json")[1])
    assert {name for name, passed in checks.items() if not passed} == {
        ("stored cpu-safe-K32", "ragged"),
        ("stored cpu-safe-K32", "packed"),
    }
    assert len(checks) > 12  # the others were checked all the same


@pytest.mark.parametrize("action", ["static", "here"])
def test_verify_fails_for_a_kernel_that_does_not_compile(
    run: Run, own_database: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_all(target: str, payloads: Any, **_: Any) -> Iterator[tuple[int, Any]]:
        for index, job in reversed(list(enumerate(payloads))):
            bad = job.case.BT == 32 and job.stage.name == "fwd_wy"
            result = "0" * 64 if isinstance(job, HashJob) else 1.0
            yield index, WorkerFailure("ptxas does not like it") if bad else result

    monkeypatch.setattr("kda_tl.cli._kernels.map_pool", compile_all)
    monkeypatch.setattr("kda_tl.cli.verify.require_compiler", lambda device: None)
    monkeypatch.setattr(call, "measure_errors", lambda *_: {"o": 0.0})
    h200 = known_device("nvidia_h200")
    monkeypatch.setattr("kda_tl.cli._target.current_device", lambda: h200)
    monkeypatch.setattr("kda_tl.cli.verify.torch_device", lambda device: torch.device("cpu"))
    plan = default_plan(SMALL.problem(), h200, BT=32)
    store(own_database, h200, make_entry(SMALL, h200, plan=plan))
    argv = ("verify", "--gpu", "h200", "--db", own_database, "--workload", SMALL.name)
    code, out, _ = run(*argv, *(["--static"] if action == "static" else []), "--json")
    checks = read_checks(out)
    own = "nvidia_h200: " if action == "static" else ""  # one of two that are called so
    assert code == 1 and not checks[f"{own}stored cpu-safe-K32", "compiles"]
    assert checks[f"{own}default cpu-safe-K32", "compiles"]
    measured = {name for _, name in checks} - {"valid", "current", "compiles"}
    assert all(checks[key] for key in checks if key[1] in measured) and bool(measured) == (action == "here")


@pytest.mark.usefixtures("errors")
@pytest.mark.filterwarnings("default::kda_tl.errors.KdaTlWarning")  # of what cannot be used
@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "chunk_kda_fwd.json: "), (None, "heads_bucket is 33, which is not a bucket")],
    ids=["no JSON", "an entry that is none"],
)
def test_verify_fails_for_an_invalid_database(run: Run, own_database: Path, text: str | None, told: str) -> None:
    path = store(own_database, CPU, make_entry(SMALL, CPU))
    argv = ("verify", "--gpu", "cpu", "--db", own_database, "--workload", SMALL.name)
    assert run(*argv)[0] == 0
    values = json.loads(path.read_text())
    values["entries"][0]["key"]["heads_bucket"] = 33
    path.write_text(json.dumps(values) if text is None else text)
    code, out, _ = run(*argv)
    assert code == 1 and f"database, valid: {path}" in out and told in out and "FAILED" in out
    checks = read_checks(run(*argv, "--json")[1])
    assert [name for name, passed in checks.items() if not passed] == [("database", "valid")]


def test_verify_runs_plans_in_their_own_pass(run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def measure(operator: Any, inputs: Any, plan: Plan, direction: str) -> dict[str, float]:
        seen.append((plan.pipeline, direction))
        return {"x": 0.0}

    monkeypatch.setattr(call, "measure_errors", measure)
    store(own_database, CPU, make_entry(SMALL_BACKWARD, CPU), direction="bwd")
    code, out, _ = run("verify", "--gpu", "cpu", "--db", own_database)
    assert code == 0 and "stored train-cpu-safe-K32" in out and "stored cpu-safe-K32" not in out
    ways = {("staged", "fwd"): 2 * 4, ("staged_backward", "bwd"): 3 * 2, ("decode", "step"): 3 * 2}
    assert Counter(seen) == ways


def test_verify_compiles_one_backward_default() -> None:
    subjects = list(_subjects.default_subjects(known_device("nvidia_h200"), static=True))
    assert [s.workload.direction for s in subjects].count("bwd") == 1


def test_verify_checks_the_defaults_that_lengths_decide() -> None:
    """Two workloads of one number of heads may differ in nothing but lengths, and so in their defaults."""
    subjects = _subjects.default_subjects(known_device("nvidia_h200"), static=False)
    found = {s.workload.name: s.plan.pipeline for s in subjects}
    lengths = {"safe-T1024-H8": "prep_recurrence", "safe-T8192-H8": "prep_segments_8"}
    lengths |= {"safe-T32768-H8": "prep_segments_16", "train-T32768-H8": "prep_scan_segments_16"}
    assert found.items() >= lengths.items()
    assert "safe-T1024-H32" in found and "safe-T8192-H32" not in found, "its plan is that of 1024 tokens"


@pytest.mark.parametrize("tensor", ["q", "A_log"])
def test_errors_of_a_backward_are_those_of_its_gradients(tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = replace(SMALL_BACKWARD, T=20)
    plan = default_plan(workload.problem(), CPU, BT=16)
    errors = call.measure_errors(workload.declaration, workload.inputs("cpu"), plan, "bwd")
    assert set(errors) == {f"d{name}" for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    assert 0 < max(errors.values()) < 2e-5
    right = call.Recorded.run_backward
    spoil = lambda self: tuple(  # noqa: E731
        1.5 * x if name == tensor else x for name, x in zip(self.leaves, right(self), strict=True)
    )
    monkeypatch.setattr(call.Recorded, "run_backward", spoil)
    errors = call.measure_errors(workload.declaration, workload.inputs("cpu"), plan, "bwd")
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
    assert verify.is_slower(plan, default) is slower


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nothing is timed: the default takes 100 us, and the stored plan these in round after round; else it is empty."""
    found: list[float] = []

    def measure(launches: dict[str, Plan], where: Any, *, rounds: int, reps: int) -> dict[str, list[float]]:
        assert {name: plan and plan.BT for name, plan in launches.items()} == {"plan": 32, "default": 64}
        return {"plan": [found.pop(0)] * rounds, "default": [100.0] * rounds}

    monkeypatch.setattr(call, "make_launch", lambda operator, inputs, direction, plan: plan)
    monkeypatch.setattr(verify, "time_interleaved", measure)
    return found


@pytest.mark.usefixtures("errors")
@pytest.mark.parametrize(
    ("rounds_us", "passed"),
    [
        ([90.0, 90.0, 90.0], True),
        ([104.0, 104.0, 104.0], True),
        ([150.0, 90.0, 90.0], True),
        ([90.0, 150.0, 90.0], True),
        ([150.0, 90.0, 106.0], False),
        ([90.0, 150.0, 150.0], False),
        ([150.0, 150.0, 150.0], False),
    ],
)
def test_verify_time_fails_for_a_plan_that_is_clearly_slower_in_two_of_three_rounds(
    run: Run, own_database: Path, times: list[float], rounds_us: list[float], passed: bool
) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    argv = ("verify", "--gpu", "cpu", "--db", own_database, "--workload", SMALL.name)
    times[:] = rounds_us
    assert run(*argv)[0] == 0 and times == rounds_us  # without --time nothing is timed
    code, out, err = run(*argv, "--time")
    assert code == (0 if passed else 1) and times == []
    assert (f"slower than the default in {sum(us > 105 for us in rounds_us)} of 3 rounds: " in out) is not passed
    assert "1 of 1  stored cpu-safe-K32: plan against default" in err
    times[:] = rounds_us
    checks = read_checks(run(*argv, "--time", "--json")[1])
    assert {name: ok for name, ok in checks.items() if name[1] == "speed"} == {
        (f"stored {SMALL.name}", "speed"): passed
    }


@pytest.mark.usefixtures("errors")
def test_verify_time_leaves_out_what_cannot_be_slower_or_told(
    run: Run, own_database: Path, times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU, plan=default_plan(SMALL.problem(), CPU)))
    argv = ("verify", "--gpu", "cpu", "--db", own_database, "--workload", SMALL.name, "--time")
    code, out, _ = run(*argv)  # the default itself
    assert code == 0 and "smaller than a wave" not in out
    store(own_database, CPU, make_entry(SMALL, CPU))
    chunks = 2 * 6  # of two heads
    for sms, gated in ((chunks, True), (chunks + 1, False)):
        monkeypatch.setattr("kda_tl.cli._target.cpu_device", lambda sms=sms: replace(CPU, num_sms=sms))
        times[:] = [150.0] * 3
        code, out, _ = run(*argv)
        assert code == (1 if gated else 0) and ("smaller than a wave: not gated" in out) is not gated


def test_no_compiler_is_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.runtime.lower.find_compiler", lambda device: None)
    code, _, err = run("verify", "--gpu", "cpu")
    assert code == 3 and "install a C++ compiler" in err


@pytest.mark.rest
@pytest.mark.timeout(900)  # some 25 kernels of 5 to 30 s each
def test_every_packaged_plan_compiles(run: Run) -> None:
    """``make test`` compiles those of one workload."""
    code, out, _ = run("verify", "--gpu", "hopper", "--static", "--json")
    assert code == 0 and len(json.loads(out)["checks"]) > 100


def test_plans_of_several_gpus_tell_whose_they_are(
    run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pretend(subjects: Iterable[tuple[Device, _subjects.Subject]], *_: Any, **__: Any) -> list[_subjects.Finding]:
        return [_subjects.Finding(subject=subject.name, check="compiles", passed=True) for _, subject in subjects]

    monkeypatch.setattr("kda_tl.cli.verify.check_compiles", pretend)
    argv = ("verify", "--static", "--db", own_database, "--workload", SMALL.name, "--json")
    found = [json.loads(run(*argv, "--gpu", gpu)[1])["checks"] for gpu in ("h200", "hopper", "l4")]
    names = [[check["subject"] for check in checks if check["check"] == "compiles"] for checks in found]
    assert f"nvidia_h200_nvl: default {SMALL.name}" in names[0] and f"nvidia_h20: default {SMALL.name}" in names[1]
    assert all(len(set(each)) == len(each) for each in names) and names[2] == [f"default {SMALL.name}"]
