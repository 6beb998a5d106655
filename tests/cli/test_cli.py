"""The command line: exit codes, streams, sentences for bad input, and what each command says."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.cli_cases import CPU, SMALL, Run, make_entry, spawn, store

from kda_tl.cli import COMMANDS, doctor
from kda_tl.cli._console import make_table
from kda_tl.core.device import Device

HELP_BUDGET_S = 0.3  # beyond starting Python
pytestmark = pytest.mark.usefixtures("own_database")


# Start-up


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
    for command, told in COMMANDS.items():
        assert re.search(rf"^ +{command} ", out, re.MULTILINE)
        code, text, _ = run(command, "--help")
        assert code == 0 and f"usage: kda-tl {command} " in text
        assert f"{told[0].upper()}{told[1:]}." in " ".join(text.split())
        for action in ("validate", "export") if command == "db" else ([],):
            code, text, _ = run(*[command, action][: 2 if action else 1], "--help")
            assert code == 0 and re.search(r"^ +--json( |$)", text, re.MULTILINE)


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
        ("explain --workload nope", "unknown workload nope"),
        ("explain safe-T8192-H32", "run `kda-tl explain --workload safe-T8192-H32`"),
        (
            "source fwd_gate safe-T8192-H32 --gpu cpu",
            "run `kda-tl source fwd_gate --gpu cpu --workload safe-T8192-H32`",
        ),
        ("source fwd_gate --workload tune", "takes one workload, not 24"),
        ("explain --heads 8 --value-heads 12 --tokens 64", "make HV a multiple of H"),
        ("explain --heads 8 --tokens 64 --K 300", "pass 256 or less"),
        ("explain --heads 8 --tokens 0", "--tokens must be at least 1"),
        ("explain --heads 8 --tokens 64 --sequences 3", "no batch"),
        ("explain --heads 8 --tokens 64 --sequences 3 --varlen --longest 20", "cannot have 64 tokens in all"),
        ("tune --gpu cpu --gate softplus", "--heads and --tokens missing"),
        ("bench --gpu cpu --tokens 64", "--heads missing"),
        ("verify --gpu cpu --heads 4", "--tokens missing"),
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


# db, doctor, tables, pipes


def test_db(run: Run, own_database: Path, tmp_path: Path) -> None:
    path = store(own_database, CPU, make_entry(SMALL, CPU))
    assert run("db", "validate", own_database)[0] == 0
    code, out, _ = run("db", "export", tmp_path / "other", "--json")
    assert code == 0 and json.loads(out)["files"] == [str(tmp_path / "other" / "cpu" / path.name)]
    (tmp_path / "other" / "cpu" / path.name).write_text("{")
    code, out, _ = run("db", "validate", tmp_path / "other", "--json")
    assert code == 2 and len(json.loads(out)["paths"][str(tmp_path / "other")]) == 1


def test_tables_are_as_wide_as_their_content() -> None:
    console = Console(width=80, force_terminal=False)
    table = make_table("a", "b", right=("b",))
    table.add_row("x" * 20, "1")
    with console.capture() as captured:
        console.print(table)
    assert max(len(line.rstrip()) for line in captured.get().splitlines()) < 30


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


def test_a_pipe_that_is_closed_is_no_error() -> None:
    script = f"{sys.executable} -m kda_tl.cli show --json --db {Path(__file__).parents[2] / 'tuning_db'} | true"
    done = spawn("bash", "-c", script)
    assert "Traceback" not in done.stderr and "Error" not in done.stderr
