"""``kda-tl tune``: what it is asked, what it shows while it goes on, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli_cases import CPU, OLD, SMALL, SMALL_BACKWARD, Run, make_entry, make_report, spawn_env, store

from kda_tl.bench.workloads import select
from kda_tl.cli import _call as call
from kda_tl.cli import _tuned
from kda_tl.core.device import Device
from kda_tl.database import store as db
from kda_tl.database.records import VsDefault
from kda_tl.errors import CompileError
from kda_tl.runtime.defaults import default_plan
from kda_tl.tune.events import TuneReport, WorkloadReport, WorkloadStarted

pytestmark = pytest.mark.usefixtures("own_database")


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Puts something else in the place of the tuner; returns the arguments it was called with."""

    def put(answer: Callable[[Path], list[WorkloadReport]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def tune(workloads: Any, device: Device, **options: Any) -> TuneReport:
            seen.update(options, workloads=workloads, device=device)
            reports = answer(Path(options["db_dir"]))
            for report in reports:
                options["on_event"](WorkloadStarted(workload=report.workload, index=0, total=1))
                options["on_event"](report)
            return TuneReport(
                device=device, workloads=tuple(reports), journals=(options["db_dir"] / "trials.jsonl",), seconds=2.0
            )

        monkeypatch.setattr("kda_tl.tune.tuner.tune", tune)
        return seen

    return put


def test_tune_ends_by_calling_the_operator(run: Run, tuner: Any, tmp_path: Path) -> None:
    def answer(directory: Path) -> list[WorkloadReport]:
        entry = make_entry(SMALL, CPU)
        path = db.store(directory, CPU, "chunk_kda", "fwd", [entry])
        return [make_report(entry=entry, path=path)]

    seen = tuner(answer)
    argv = ("tune", "--gpu", "cpu", "--workload", SMALL.name, "--budget", "7", "--db", tmp_path / "new", "--seed", "3")
    code, out, err = run(*argv)
    assert code == 0
    assert (seen["workloads"], seen["device"], seen["budget"], seen["seed"]) == ((SMALL,), CPU, 7, 3)
    assert re.search(r"cpu-safe-K32 +staged +32/16 .* \d\.\d\de?-?\d*x +\d\.\de-0[678]", out)
    assert str(tmp_path / "new" / "cpu" / "chunk_kda_fwd.json") in out
    assert "1.21x the default" in err
    code, out, _ = run(*argv, "--json")
    (result,) = json.loads(out)["workloads"]
    assert result["served"]["step"] == "exact bucket" and result["served"]["error"] < 1e-5


@pytest.mark.rest
def test_tune_ends_by_calling_the_backward(
    run: Run, tuner: Any, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    for name, function in (("measure_errors", call.measure_errors), ("make_launch", call.make_launch)):

        def spy(inputs: Any, *more: Any, real: Any = function) -> Any:
            passes.extend(word for word in more if isinstance(word, str))
            return real(inputs, *more)

        monkeypatch.setattr(_tuned if name == "measure_errors" else call, name, spy)

    def answer(directory: Path) -> list[WorkloadReport]:
        entry = make_entry(SMALL_BACKWARD, CPU)
        path = db.store(directory, CPU, "chunk_kda", "bwd", [entry])
        return [make_report(SMALL_BACKWARD, entry=entry, path=path)]

    tuner(answer)
    argv = ("tune", "--gpu", "cpu", "--workload", SMALL_BACKWARD.name, "--db", own_database)
    code, out, _ = run(*argv)
    assert code == 0 and "error of the worst gradient" in out and passes == ["bwd"] * 3
    assert re.search(r"train-cpu-safe-K32 +staged_backward +32/16 .* \d\.\d\de?-?\d*x +\d\.\de-0[567]", out)
    assert str(own_database / "cpu" / "chunk_kda_bwd.json") in out
    (served,) = (result["served"] for result in json.loads(run(*argv, "--json")[1])["workloads"])
    assert served["step"] == "exact bucket" and served["error"] < 1e-4
    _, out, _ = run("show", "--db", own_database)
    assert "cpu  chunk_kda bwd" in out and "staged_backward 32/16" in out


@pytest.mark.parametrize(
    ("changes", "code", "told"),
    [
        (
            {"failure": "no plan computes the right numbers"},
            4,
            "1 of 1 workloads failed: cpu-safe-K32. Plans of others that are stored: 0 (exit code 4).",
        ),
        ({}, 5, "Nothing beat the default; --stage stores no plan (exit code 5)."),
    ],
    ids=["nothing valid", "nothing beats the default"],
)
def test_tune_exit_codes(run: Run, tuner: Any, changes: dict[str, Any], code: int, told: str) -> None:
    tuner(lambda directory: [make_report(**changes)])
    found, out, err = run("tune", "--gpu", "cpu", "--stage", "fwd_gate")
    assert found == code and err.splitlines()[-1] == told
    assert changes.get("failure", "Trials are in") in out


def make_served(**changes: Any) -> _tuned.Served:
    times = {"tuned_us": 90.0, "default_us": 100.0, "ratio": 1.11, "ci95": (1.1, 1.12)}
    return _tuned.Served(
        **{"is_default": False, "step": "exact bucket", "source": "", "error": 1e-7, "checked_tokens": 9, **times}
        | changes
    )


@pytest.mark.parametrize("failing", [0, 1], ids=["the first fails", "the second fails"])
def test_tune_goes_on_when_one_workload_fails(
    run: Run, own_database: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = sorted(select(["cpu"]), key=lambda w: w.name != select(["cpu"])[failing].name)

    def tune_plan(run: Any, report: WorkloadReport, directory: Path, **_: Any) -> WorkloadReport:
        if report.workload.name == bad.name:
            raise CompileError("no kernel compiles")
        entry = make_entry(good, CPU)
        path = db.store(directory, CPU, "chunk_kda", "fwd", [entry])
        return replace(report, default=default_plan(good.problem(), CPU), entry=entry, path=path)

    monkeypatch.setattr("kda_tl.tune.tuner.tune_plan", tune_plan)
    monkeypatch.setattr(_tuned, "serve", lambda *_: make_served())
    code, out, err = run("tune", "--gpu", "cpu")
    assert code == 4
    assert f"1 of 2 workloads failed: {bad.name}. Plans of others that are stored: 1 (exit code 4)." in err
    assert f"{bad.name}: no kernel compiles" in out and re.search(rf"^{good.name} .* 1.11x ", out, re.MULTILINE)
    assert f"Plans are in {own_database / 'cpu' / 'chunk_kda_fwd.json'}" in out
    assert [plan["provenance"] for plan in json.loads(run("show", "--db", own_database, "--json")[1])["plans"]] == [
        make_entry(good, CPU).provenance
    ]
    results = json.loads(run("tune", "--gpu", "cpu", "--json")[1])["workloads"]
    assert {r["workload"]: bool(r["entry"]) for r in results} == {bad.name: False, good.name: True}


def test_a_default_that_won_is_shown_as_the_default(run: Run, tuner: Any, own_database: Path) -> None:
    plan = default_plan(SMALL.problem(), CPU)

    def answer(directory: Path) -> list[WorkloadReport]:
        entry = make_entry(SMALL, CPU, plan=plan, vs_default=VsDefault(ratio=1.0, ci95=(1.0, 1.0)))
        return [make_report(entry=entry, path=db.store(directory, CPU, "chunk_kda", "fwd", [entry]))]

    tuner(answer)
    argv = ("tune", "--gpu", "cpu", "--workload", SMALL.name, "--db", own_database)
    code, out, err = run(*argv)
    assert code == 5
    assert err.splitlines()[-2:] == [
        "Calling chunk_kda for cpu-safe-K32 with the default plan, which nothing beat (1 of 1).",
        "Nothing beat the default; records that name the default plan are stored: 1 (exit code 5).",
    ]
    assert re.search(r"^cpu-safe-K32 +staged +64/16 +[\d.]+ \ws +same plan +- +\d\.\de-0\d$", out, re.MULTILINE)
    assert "same plan: nothing beat the default" in out and not re.search(r"\dx", out + err)
    (served,) = (result["served"] for result in json.loads(run(*argv, "--json")[1])["workloads"])
    assert served["is_default"] and served["tuned_us"] == served["default_us"] > 0
    assert (served["ratio"], served["ci95"]) == (1.0, [1.0, 1.0])


@pytest.mark.parametrize("low", [0.9, 1.01])
def test_a_gain_within_the_noise_is_said_to_be(
    run: Run, tuner: Any, low: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_entry(SMALL, CPU)
    tuner(lambda directory: [make_report(entry=entry, path=db.store(directory, CPU, "chunk_kda", "fwd", [entry]))])
    monkeypatch.setattr(_tuned, "serve", lambda *_: make_served(ratio=0.95, ci95=(low, 1.03)))
    code, out, _ = run("tune", "--gpu", "cpu", "--workload", SMALL.name)
    told = "cpu-safe-K32: 1.21x in the 5 rounds of its contest; the 5 rounds of this table are within the noise."
    assert code == 0 and (told in out) == (low < 1)


def test_tune_stops_with_the_command_to_go_on(run: Run, tuner: Any) -> None:
    def interrupt(directory: Path) -> list[WorkloadReport]:
        raise KeyboardInterrupt

    tuner(interrupt)
    code, out, err = run("tune", "--gpu", "cpu", "--budget", "9", "--pipeline", "staged")
    assert (code, out) == (130, "")
    assert "go on with: kda-tl tune --gpu cpu --budget 9 --pipeline staged" in err


def test_tune_of_one_pipeline_says_where_its_plans_go(run: Run, tuner: Any, own_database: Path, tmp_path: Path) -> None:
    seen = tuner(lambda directory: [make_report()])
    _, _, err = run("tune", "--gpu", "cpu", "--pipeline", "staged")
    assert seen["pipeline"] == "staged"
    assert (
        "Tuning staged on cpu" in err
        and f"even where others are faster: without --db they go into {own_database}" in err
    )
    _, _, err = run("tune", "--gpu", "cpu", "--pipeline", "staged", "--db", tmp_path / "staged")
    assert "Tuning staged on cpu" in err and "others are faster" not in err
    _, _, err = run("tune", "--gpu", "cpu")
    assert seen["pipeline"] is None and "Tuning cpu" in err and "others are faster" not in err


def test_tune_takes_a_described_problem(run: Run, tuner: Any) -> None:
    seen = tuner(lambda directory: [make_report()])
    argv = ("--heads", "3", "--tokens", "500", "--K", "32", "--V", "16", "--dtype", "fp32", "--pass", "bwd")
    run("tune", "--gpu", "cpu", *argv)
    (workload,) = seen["workloads"]
    assert workload.name == "train-safe-T500-H3-K32-V16-fp32"
    assert workload.problem().key == "chunk_kda-bwd-H3-HV3-K32-V16-fp32-safe-l2norm-sigmoid-ht-n1-tokens500"


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ((), None),
        (("--pipeline", "prep_recurrence"), ["fwd_prep", "fwd_recurrence"]),
        (("--pipeline", "prep_recurrence", "--stage", "fwd_prep"), ["fwd_prep"]),
    ],
)
def test_static_compiles_the_stages_of_one_pipeline(
    run: Run, options: Sequence[str], stages: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("kda_tl.cli.tune.compile_static", lambda *_, **more: asked.append(more["stages"]) or ())
    run("tune", "--gpu", "h200", "--static", *options)
    assert asked == [stages]


def test_tune_is_stopped_by_the_terminal(own_database: Path) -> None:
    argv = [sys.executable, "-m", "kda_tl.cli", "tune", "--gpu", "cpu", "--db", str(own_database)]
    env = spawn_env()
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, lines
    assert out == "" and "go on with: kda-tl tune --gpu cpu --db" in err and "Traceback" not in err


def test_tune_stale_takes_stale_plans_only(run: Run, tuner: Any, own_database: Path) -> None:
    seen = tuner(lambda directory: [make_report()])
    store(own_database, CPU, make_entry(SMALL, CPU))
    code, out, _ = run("tune", "--gpu", "cpu", "--stale")
    assert code == 0 and "is stale" in out and not seen
    store(own_database, CPU, make_entry(SMALL, CPU, templates=OLD))
    run("tune", "--gpu", "cpu", "--stale")
    assert seen["workloads"] == [SMALL]
