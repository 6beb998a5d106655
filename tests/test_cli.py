"""The command line: exit codes, streams, sentences for bad input, and what each command says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kda_tl import db, dispatch, templates
from kda_tl.bench import torch_device
from kda_tl.cli import COMMANDS, doctor, main, verify
from kda_tl.cli import _call as call
from kda_tl.cli import _regression as regression
from kda_tl.cli import _target as target
from kda_tl.cli._console import Terminal, make_table
from kda_tl.cli._peers import find_peers
from kda_tl.cli._progress import TuneProgress
from kda_tl.device import Device, cpu_device
from kda_tl.dispatch import default_plan, numerics_class
from kda_tl.gpus import known_device
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
from kda_tl.records import Check, Entry, Key, Timing, VsDefault
from kda_tl.search import Evaluation, SearchResult
from kda_tl.stage import Plan
from kda_tl.workloads import Workload, select

ANSI = "\x1b"
OLD = dict.fromkeys(templates.names(), "0" * 64)  # fingerprints of other templates
HELP_BUDGET_S = 0.3  # beyond starting Python
CPU = cpu_device()
SMALL = select(["cpu-safe-K32"])[0]
SMALL_BACKWARD = select(["train-cpu-safe-K32"])[0]
BACKWARD_PLAN = default_plan(SMALL_BACKWARD.problem(), CPU)
SPAWN_ENV = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test reads or writes the databases of whoever runs it."""
    directory = tmp_path / "db"
    directory.mkdir()
    monkeypatch.setenv("KDA_TL_DB", str(directory))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    db.reload()
    yield directory
    monkeypatch.undo()
    db.reload()


def make_entry(workload: Workload, device: Device, plan: Plan | None = None, **changes: Any) -> Entry:
    problem = workload.problem()
    plan = plan or default_plan(problem, device, BT=32)
    entry = Entry(
        key=Key.of(problem),
        plan=plan.as_dict(),
        numerics=numerics_class(plan),
        time_us=Timing(median=412.6, mad=1.4, reps=300, rounds=5),
        vs_default=VsDefault(ratio=1.21, ci95=(1.2, 1.22)),
        check=Check(max_rel_err=0.0031, tolerance=0.006),
        templates={name: templates.fingerprint(name) for name, _ in plan.stages},
        provenance={"date": "2026-01-01T00:00:00+00:00"},
    )
    return replace(entry, **changes)


def store(directory: Path, device: Device, *entries: Entry, direction: str = "fwd") -> Path:
    path = db.store(directory, device, "chunk_kda", direction, entries)
    db.reload()
    return path


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns exit code, stdout and stderr, none of which may hold colours or a traceback."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert ANSI not in out + err
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = known_device("nvidia_h200")
    monkeypatch.setattr(target, "current_device", lambda: device)
    return device


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "current_device", cpu_device)


# Start-up


def spawn(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **SPAWN_ENV, **more.pop("env", {})}
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=120, check=False, **more)


def test_help_is_quick_and_loads_nothing_big() -> None:
    code = "import sys; from kda_tl.cli import main; print(main(['--help'])); print(*sys.modules)"
    took, idle = [], []
    for _ in range(3):
        begin = time.perf_counter()
        done = spawn(sys.executable, "-c", code)
        took.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        spawn(sys.executable, "-c", "")
        idle.append(time.perf_counter() - begin)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not {"torch", "tilelang", "optuna", "numpy", "rich"} & loaded
    assert min(took) - min(idle) < HELP_BUDGET_S


def test_help_of_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in out
        code, text, _ = run(command, "--help")
        assert code == 0 and "--json" in text or command == "db"


def test_help_of_commands_does_not_load_torch() -> None:
    code = f"""
import sys
from kda_tl.cli import main
for command in {list(COMMANDS)}:
    main([command, "--help"])
    assert not {{"torch", "tilelang"}} & set(sys.modules), command
"""
    done = spawn(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0 and re.fullmatch(r"kda-tl \d+\.\d+.*\n", out)


# Bad input


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("", "COMMAND"),
        ("nonsense", "invalid choice"),
        ("tune --budget 0", "at least 1"),
        ("tune --gpu h900", "unknown GPU 'h900'"),
        ("tune --gpu cpu --objective speed", "balanced, time, memory"),
        ("tune --gpu cpu --workload nope", "unknown workload nope"),
        ("tune --gpu cpu --stage fwd_nope", "there is no stage 'fwd_nope'"),
        ("tune --gpu h100 --static --stage fwd_nope", "there is no stage 'fwd_nope'"),
        ("tune --gpu cpu --pipeline nope", "there is no pipeline 'nope'"),
        ("tune --gpu cpu --pipeline staged_backward", "staged_backward is a pipeline of the backward pass"),
        ("tune --gpu cpu --pipeline staged --stage fwd_prep", "staged has no stage 'fwd_prep'"),
        ("tune --gpu h100 --static --pipeline nope", "there is no pipeline 'nope'"),
        ("tune --gpu cpu --static --pipeline prep_recurrence", "its products are instructions of sm_90"),
        ("bench --gpu cpu --workload nope", "unknown workload nope"),
        ("bench --gpu cpu --rounds 0", "at least 1"),
        ("bench --gpu cpu --json /nowhere/file.json", "cannot write /nowhere/file.json"),
        ("verify --gpu h900", "unknown GPU"),
        ("verify --gpu cpu --db /nowhere", "/nowhere is not a directory"),
        ("show --gpu h900", "unknown GPU"),
        ("show --db /nowhere", "/nowhere is not a directory"),
        ("explain", "--heads and --tokens"),
        ("explain nope", "unknown workload nope"),
        ("explain tune", "is a tag"),
        ("explain --heads 8 --value-heads 12 --tokens 64", "make HV a multiple of H"),
        ("explain --heads 8 --tokens 64 --K 300", "pass 256 or less"),
        ("explain --heads 8 --tokens 0", "--tokens must be at least 1"),
        ("explain --heads 8 --tokens 64 --gate nope", "invalid choice: 'nope'"),
        ("source fwd_nope", "there is no stage 'fwd_nope'"),
        ("source fwd_gate --gpu cpu --config BK=33", "BK must be one of"),
        ("source fwd_gate --gpu cpu --config nope=1", "FIELD=VALUE"),
        ("source fwd_gate --gpu cpu --config BK=128", "does not divide"),
        ("db validate /nowhere", "/nowhere does not exist"),
        ("db export /tmp/x --from /nowhere", "/nowhere is not a directory"),
    ],
)
def test_bad_input_is_a_sentence_and_2(run: Run, argv: str, told: str) -> None:
    code, out, err = run(*argv.split())
    assert code == 2
    assert told in out + err


def test_unwritable_database(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = run("tune", "--gpu", "cpu", "--db", tmp_path / "file" / "db")
    assert (code, out) == (2, "")
    assert "cannot write the tuning database" in err and "--db" in err


def test_export_to_unwritable_directory(run: Run, own_database: Path, tmp_path: Path) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    (tmp_path / "file").touch()
    code, _, err = run("db", "export", tmp_path / "file" / "db")
    assert code == 2 and "cannot write" in err


# Which GPU


@pytest.mark.parametrize("command", ["tune", "bench", "verify"])
def test_another_gpu_is_refused(run: Run, on_h200: Device, command: str) -> None:
    code, out, err = run(command, "--gpu", "h100")
    assert (code, out) == (3, "")
    assert "the GPU here is nvidia_h200" in err
    assert f"`kda-tl {command} --gpu nvidia_h200`" in err


def test_suggested_command_keeps_the_other_options(run: Run, on_h200: Device) -> None:
    _, _, err = run("tune", "--workload", "safe-T8192-H32", "--gpu=h100", "--budget", "9")
    assert "`kda-tl tune --gpu nvidia_h200 --workload safe-T8192-H32 --budget 9`" in err
    assert "`kda-tl tune --gpu h100 --workload safe-T8192-H32 --budget 9 --static`" in err


@pytest.mark.usefixtures("without_gpu")
def test_no_gpu_offers_what_works(run: Run) -> None:
    code, _, err = run("tune", "--gpu", "h100")
    assert code == 3
    assert "`kda-tl tune --gpu cpu`" in err and "`kda-tl tune --gpu h100 --static`" in err


# show, explain, source, db


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


def test_explain_names_step_source_and_plan(run: Run, own_database: Path) -> None:
    store(own_database, CPU, make_entry(SMALL, CPU))
    code, out, _ = run("explain", SMALL.name, "--gpu", "cpu")
    assert code == 0
    for word in ("exact bucket", "$KDA_TL_DB", "BT=32", "fwd_state", "1.21x the default"):
        assert word in out
    code, out, _ = run("explain", SMALL.name, "--gpu", "cpu", "--tokens", "500", "--json")
    choice = json.loads(out)
    assert choice["step"] == "nearest bucket" and choice["plan"]["BT"] == 32
    code, out, _ = run("explain", SMALL.name, "--gpu", "cpu", "--chunk-size", "16", "--json")
    choice = json.loads(out)
    assert choice["step"] == "default" and choice["passed_over"]


@pytest.mark.usefixtures("without_gpu")
def test_explain_for_a_gpu_that_is_elsewhere(run: Run) -> None:
    code, out, err = run("explain", "--heads", "32", "--tokens", "8192", "--gpu", "h100", "--json")
    choice = json.loads(out)
    assert code == 0 and choice["gpu"] == "nvidia_h100_80gb_hbm3"
    assert (choice["step"], choice["source"]) == ("same architecture", "packaged")  # a plan tuned on an H200
    assert "also: nvidia_h100_pcie" in err


def test_source(run: Run) -> None:
    argv = ("source", "fwd_gate", "--gpu", "cpu", "--BT", "16", "--BC", "8", "--config", "unroll=8")
    code, out, err = run(*argv)
    assert code == 0 and "fwd_gate_kernel" in out and "unroll=8" in err
    code, text, _ = run(*argv, "--json")
    assert json.loads(text)["source"] == out
    code, _, err = run("source", "bwd_qk", "--gpu", "cpu")
    assert code == 0 and "bwd_qk for chunk_kda-bwd-" in err


def test_db(run: Run, own_database: Path, tmp_path: Path) -> None:
    path = store(own_database, CPU, make_entry(SMALL, CPU))
    assert run("db", "validate", own_database)[0] == 0
    code, out, _ = run("db", "export", tmp_path / "other", "--json")
    assert code == 0 and json.loads(out)["files"] == [str(tmp_path / "other" / "cpu" / path.name)]
    (tmp_path / "other" / "cpu" / path.name).write_text("{")
    code, out, _ = run("db", "validate", tmp_path / "other", "--json")
    assert code == 2 and len(json.loads(out)["paths"][str(tmp_path / "other")]) == 1


# tune


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


def test_tables_are_as_wide_as_their_content() -> None:
    console = Console(width=80, force_terminal=False)
    table = make_table("a", "b", right=("b",))
    table.add_row("x" * 20, "1")
    with console.capture() as captured:
        console.print(table)
    assert max(len(line.rstrip()) for line in captured.get().splitlines()) < 30


# verify, bench, doctor


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


def test_bench(run: Run, tmp_path: Path) -> None:
    argv = ("bench", "--gpu", "cpu", "--workload", SMALL.name, "--reps", "1", "--rounds", "1", "--peers")
    code, out, _ = run(*argv, "--json", tmp_path / "bench.json")
    assert code == 0 and "fwd_state" in out and "fla left out" in out
    values = json.loads((tmp_path / "bench.json").read_text())
    (result,) = values["workloads"]
    assert [row["name"] for row in result["calls"]] == ["kda_tl"]
    assert all(0 < row["floor_us"] < row["median_us"] for row in result["stages"])


def test_bench_of_a_backward(run: Run, tmp_path: Path) -> None:
    argv = ("bench", "--gpu", "cpu", "--workload", SMALL_BACKWARD.name, "--reps", "1", "--rounds", "1", "--peers")
    code, out, _ = run(*argv, "--json", tmp_path / "bench.json")
    assert code == 0 and "fla left out: " in out
    (result,) = json.loads((tmp_path / "bench.json").read_text())["workloads"]
    assert [row["name"] for row in result["stages"]] == [name for name, _ in BACKWARD_PLAN.stages]
    assert result["calls"][0]["eager_us"] > max(row["floor_us"] for row in result["stages"])


def test_peers_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(chunk_kda=None, kimi_delta_attention=None)
    monkeypatch.setattr("importlib.import_module", lambda name: fake)
    calls, left_out = find_peers(SMALL, torch_device(CPU))
    assert not calls and set(left_out) == {"fla", "cudnn"}
    assert all("need a GPU" in reason for reason in left_out.values())


def test_doctor(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"]
    names = {check["name"] for check in found["checks"]}
    assert {"python", "tilelang", "gpu", "C++ compiler", "packaged database", "kernel on cpu"} <= names


def test_doctor_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda device: None)
    monkeypatch.setenv("COLUMNS", "200")  # or the table wraps where it likes
    code, out, _ = run("doctor")
    assert code == 3 and "apt install g++" in out and "Missing: C++ compiler" in out


def test_no_compiler_is_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kda_tl.kernel.find_compiler", lambda device: None)
    code, _, err = run("verify", "--gpu", "cpu")
    assert code == 3 and "install a C++ compiler" in err


def test_a_pipe_that_is_closed_is_no_error() -> None:
    script = f"{sys.executable} -m kda_tl.cli show --json --db {Path(__file__).parents[1] / 'tuning_db'} | true"
    done = spawn("bash", "-c", script)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_choices_are_not_shared_between_databases(run: Run, own_database: Path, tmp_path: Path) -> None:
    store(tmp_path / "other", CPU, make_entry(SMALL, CPU))
    assert dispatch.choose(SMALL.problem(), CPU).step == "default"
    _, out, _ = run("explain", SMALL.name, "--gpu", "cpu", "--db", tmp_path / "other", "--json")
    assert json.loads(out)["step"] == "exact bucket"
