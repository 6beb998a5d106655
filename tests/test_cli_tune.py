"""``kda-tl tune``: what it is asked, what it shows while it goes on, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import ANSI, CPU, OLD, SMALL, SMALL_BACKWARD, SPAWN_ENV, Run, make_entry, store
from rich.console import Console

from kda_tl import db, templates
from kda_tl.cli import _call as call
from kda_tl.cli._console import Terminal
from kda_tl.cli._progress import TuneProgress
from kda_tl.device import Device
from kda_tl.dispatch import default_plan
from kda_tl.journal import Outcome
from kda_tl.progress import (
    Geometry,
    GeometryScreened,
    PlanDone,
    PlanResult,
    StageDone,
    StageResult,
    StageStarted,
    TrialDone,
    TuneReport,
    WorkloadDone,
    WorkloadReport,
    WorkloadStarted,
)
from kda_tl.search import Evaluation, SearchResult
from kda_tl.workloads import Workload

pytestmark = pytest.mark.usefixtures("own_database")


def make_search(trials: tuple[Evaluation, ...] = ()) -> SearchResult:
    return SearchResult(best=None, trials=trials, counts={}, stopped_because="everything was tried", resumed=0)


def make_report(workload: Workload = SMALL, **changes: Any) -> WorkloadReport:
    report = WorkloadReport(
        workload=workload,
        entry=None,
        path=None,
        default=default_plan(workload.problem(), CPU),
        stages=(),
        plans=(),
        counts={"ok": 3, "wrong": 1},
        resumed=0,
        stopped_because="everything was tried",
        seconds=1.5,
    )
    return replace(report, **changes)


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
                options["on_event"](WorkloadDone(report=report))
            return TuneReport(
                device=device, workloads=tuple(reports), journals=(options["db_dir"] / "trials.jsonl",), seconds=2.0
            )

        monkeypatch.setattr("kda_tl.tuner.tune", tune)
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


def test_tune_ends_by_calling_the_backward(
    run: Run, tuner: Any, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[str] = []
    for name, function in (("measure_errors", call.measure_errors), ("make_launch", call.make_launch)):

        def spy(inputs: Any, *more: Any, real: Any = function) -> Any:
            passes.extend(word for word in more if isinstance(word, str))
            return real(inputs, *more)

        monkeypatch.setattr(f"kda_tl.cli._tuned.{name}", spy)

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
    ("changes", "code"),
    [({"failure": "no plan computes the right numbers"}, 4), ({}, 5)],
    ids=["nothing valid", "nothing beats the default"],
)
def test_tune_exit_codes(run: Run, tuner: Any, changes: dict[str, Any], code: int) -> None:
    tuner(lambda directory: [make_report(**changes)])
    found, out, _ = run("tune", "--gpu", "cpu", "--stage", "fwd_gate")
    assert found == code
    assert changes.get("failure", "Trials are in") in out


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
    monkeypatch.setattr("kda_tl.cli._static.compile_static", lambda *_, **more: asked.append(more["stages"]) or ())
    run("tune", "--gpu", "h200", "--static", *options)
    assert asked == [stages]


def test_tune_is_stopped_by_the_terminal(own_database: Path) -> None:
    argv = [sys.executable, "-m", "kda_tl.cli", "tune", "--gpu", "cpu", "--db", str(own_database)]
    env = {**os.environ, **SPAWN_ENV}
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


def emit_all(progress: TuneProgress) -> None:
    """Every kind of event, as a tuner sends them."""
    stage = templates.load("fwd_state")
    plan = default_plan(SMALL.problem(), CPU)
    geometry = Geometry(pipeline="staged", BT=64, BC=16)
    config = plan.config("fwd_state")
    ok = Evaluation(config=config, outcome=Outcome(status="ok", median_us=41.2), resumed=False)
    bad = Evaluation(config=config, outcome=Outcome(status="compile", reason="ptxas said\nno " * 30), resumed=False)
    result = StageResult(
        stage=stage.name,
        geometry=geometry,
        study="s",
        winner=config,
        default=config,
        median_us=41.2,
        mad_us=0.1,
        default_us=55.0,
        ratio=1.33,
        ci95=(1.3, 1.4),
        rejected={"BV=64 does not divide 32": 3},
        search=make_search((ok, bad)),
        seconds=1.0,
    )
    started = {"workload": SMALL, "stage": stage.name, "geometry": geometry}
    timed = PlanResult(plan=plan, status="ok", median_us=55.0, check={"max_rel_err": 1e-6})
    progress(WorkloadStarted(workload=SMALL, index=0, total=2))
    progress(GeometryScreened(workload=SMALL, geometry=geometry, result=timed, resumed=True))
    progress(StageStarted(**started, space=18, candidates=2, budget=9, rejected=result.rejected))
    for number, evaluation in enumerate((ok, bad), start=1):
        trial = {"workload": SMALL, "stage": stage.name, "number": number, "of": 9}
        progress(TrialDone(**trial, evaluation=evaluation, best_us=41.2, default_us=55.0))
    progress(StageDone(workload=SMALL, result=result))
    progress(PlanDone(workload=SMALL, result=replace(timed, status="wrong", median_us=None, reason="o is off")))
    progress(WorkloadDone(report=make_report(failure="no plan computes the right numbers")))


def test_progress_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    err = Console(stderr=True, force_terminal=False, width=120, highlight=False, markup=False)
    progress = TuneProgress(Terminal(out=Console(), err=err))
    with progress.running():
        emit_all(progress)
    out, text = capsys.readouterr()
    assert out == "" and ANSI not in text
    assert re.search(r"fwd_state +64/16 +2 trials +best +41.2 us +default +55.0 us +1.33x", text)
    for part in ("3 rejected, 1 did not compile", "1 x did not compile: ptxas said no", "3 x rejected: BV=64", "wrong"):
        assert part in text


@pytest.mark.parametrize("width", [80, 120])
def test_progress_on_a_terminal_fits(width: int) -> None:
    console = Console(force_terminal=True, width=width, highlight=False, markup=False, record=True, quiet=False)
    progress = TuneProgress(Terminal(out=console, err=console))
    stop = StopIteration()

    def until_trial(event: Any) -> None:
        progress(event)
        if isinstance(event, TrialDone) and event.number == 2:
            raise stop

    with pytest.raises(StopIteration), console.capture():
        emit_all(until_trial)  # type: ignore[arg-type]
    with console.capture() as captured:
        console.print(progress._render())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", captured.get()).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("trial 2/9" in line and "gain 1.33x" in line for line in lines)
