"""The command line where something is missing or in the way: packages, folders, streams, Ctrl-C, and our own bugs."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_tl.cli import COMMANDS, _exit, main, show
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.tune import tuner

needs_compiler = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's /dev/full")
KDA_TL = f"{sys.executable} -m kda_tl.cli"


def spawn(*argv: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a process, with the packages of a folder before all others."""
    folders = [str(path)] if path else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*folders, *sys.path])), **env}
    return subprocess.run(argv, capture_output=True, text=True, env=env, timeout=200, check=False)


# Packages that are missing or broken

WITHOUT_TILELANG = """
import contextlib, io, json, sys, warnings
import torch
sys.modules["tilelang"] = None
from kda_tl import chunk_kda, cli, explain
from kda_tl.core import toolchain
from kda_tl.reference import recurrent_kda

def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    return code, out.getvalue(), err.getvalue()

found = {"missing": {words: run(*words.split()) for words in json.loads(sys.argv[1])}}
torch.manual_seed(0)  # keys that are not normalised let some draws grow beyond the bound below
q, k, v, g, beta = (torch.randn(1, 20, 2, 8) for _ in range(4)), None, None, None, None
q, k, v, g = q
beta = torch.rand(1, 20, 2)
q.requires_grad_()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    o, _ = chunk_kda(q, k, v, -g.abs(), beta)
    chunk_kda(q, k, v, -g.abs(), beta)
    o.sum().backward()
expected, _ = recurrent_kda(q, k, v, -g.abs(), beta)
found["warnings"] = [str(warning.message) for warning in caught]
found["error"] = float((o - expected).abs().max())
found["gradient"] = float(q.grad.abs().max())
found["step"] = explain(q, k, v, -g.abs(), beta).step

del sys.modules["tilelang"]
sys.path.insert(0, sys.argv[2])  # where importing it fails in another way
toolchain._try_tilelang.cache_clear()
found["broken"] = run("source", "fwd_gate", "--gpu", "cpu")
print(json.dumps(found))
"""


@needs_compiler
def test_without_tilelang_what_needs_no_kernel_works(tmp_path: Path) -> None:
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("raise OSError('libtvm.so: cannot open shared object file')\n")
    works = [
        "--help",
        "--version",
        "show",
        "explain --workload cpu-safe-K32 --gpu cpu",
        "explain --workload safe-T8192-H32 --gpu nvidia_h200",
        "show --pipeline prep_recurrence --workload safe-T8192-H32 --gpu nvidia_h200",
        "db validate",
        *(f"{name} --help" for name in COMMANDS),
    ]
    stops = ["source fwd_gate --gpu cpu", "bench --gpu cpu", "verify --gpu cpu", f"tune --gpu cpu --db {tmp_path}"]
    done = spawn(sys.executable, "-c", WITHOUT_TILELANG, json.dumps([*works, *stops, "doctor --json"]), str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    missing = r"tilelang cannot be imported (ModuleNotFoundError: "
    install = "run `pip install 'tilelang>=0.1.15,<0.1.16'`"
    for words in works:
        code, _, err = found["missing"][words]
        assert (code, err) == (0, ""), words
    for words in stops:
        code, out, err = found["missing"][words]
        last = err.splitlines()[-1]
        assert (code, out) == (3, ""), words
        assert last.startswith(f"kda-tl {words.split()[0]}: {missing}") and install in last and "Traceback" not in err
    assert "reference" in found["missing"]["explain --workload cpu-safe-K32 --gpu cpu"][1]
    code, out, _ = found["missing"]["doctor --json"]
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 3 and {name for name, check in checks.items() if check["state"] == "MISSING"} == {
        "tilelang",
        "kernel on cpu",
    }
    assert checks["tilelang"]["hint"] == "pip install 'tilelang>=0.1.15,<0.1.16'"
    # The operator does as it does where no compiler is found
    (warned,) = found["warnings"]
    assert missing in warned and install in warned and "the recurrence runs in plain PyTorch" in warned
    assert found["step"] == "reference" and found["error"] < 1e-5 and found["gradient"] > 0
    code, out, err = found["broken"]
    assert (code, out) == (3, "") and "(OSError: libtvm.so: cannot open shared object file)" in err and install in err


@pytest.mark.parametrize(("package", "words"), [("rich", "show"), ("psutil", "tune --gpu cpu --static")])
def test_missing_package_is_a_sentence_and_3(package: str, words: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None; from kda_tl.cli import main; sys.exit(main({words.split()!r}))"
    )
    done = spawn(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"cannot be imported (ModuleNotFoundError: import of {package} halted" in done.stderr
    assert f"run `pip install '{package}>=" in done.stderr and "Traceback" not in done.stderr


# Folders that cannot be written: below a regular file, since tests may run as root, whom permissions do not stop


@needs_compiler
def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file" / "home"
    env = {"HOME": str(home), "TMPDIR": str(tmp_path), "XDG_DATA_HOME": "", "KDA_TL_DB": ""}
    script = "import os, sys; os.environ.pop('TILELANG_CACHE_DIR', None); from kda_tl.cli import main; sys.exit(main())"
    done = spawn(sys.executable, "-c", script, "doctor", "--json", **env)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 3, "plans cannot be stored, which is needed"
    assert {name for name, check in checks.items() if check["state"] == "MISSING"} == {"tuning results"}
    assert "set KDA_TL_DB to a directory" in checks["tuning results"]["hint"]
    assert checks["kernel on cpu"]["state"] == "ok", "kernels are compiled all the same"
    assert checks["kernel cache"]["state"] == "note" and str(home) in checks["kernel cache"]["found"]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert f"kernels cannot be kept in {home}/.tilelang/cache" in line and "set TILELANG_CACHE_DIR" in line
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("kda_tl-kernels-*")), "the temporary folder went with the process"


def test_journal_is_tried_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tuner, "WorkerPool", None)
    monkeypatch.setattr(tuner, "require_compiler", lambda device: None)
    argv = f"tune --gpu cpu --workload cpu-safe-K32 --db {tmp_path / 'db'} --journal {tmp_path / 'file' / 'j'}"
    assert main(argv.split()) == 2
    err = capsys.readouterr().err
    assert "cannot write the trial journal" in err and "--journal DIR" in err and "Traceback" not in err


# Streams


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_stops_early_is_no_error(unbuffered: str) -> None:
    script = "; ".join(
        f"{KDA_TL} {words} | true; echo ${{PIPESTATUS[0]}}" for words in ("show", "show --json", "--help")
    )
    done = spawn("bash", "-c", script, PYTHONUNBUFFERED=unbuffered)
    assert (done.stdout.split(), done.stderr) == (["0", "0", "0"], ""), done.stderr


@pytest.mark.parametrize(("words", "code"), [("--help", 0), ("tune --help", 0), ("--version", 0), ("nothing", 2)])
def test_a_reader_of_help_that_stops_early_is_no_error(
    words: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11.2 raises where others say nothing."""

    def print_message(parser: argparse.ArgumentParser, message: str, file: Any = None) -> None:
        assert message
        raise BrokenPipeError

    monkeypatch.setattr(argparse.ArgumentParser, "_print_message", print_message)
    monkeypatch.setattr(_exit, "drop_output", lambda: None)
    assert main(words.split()) == code
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "")


@needs_full
@pytest.mark.parametrize("words", ["show", "show --json"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_stdout_is_a_sentence_and_74(words: str, unbuffered: str) -> None:
    done = spawn("bash", "-c", f"{KDA_TL} {words} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    told = "kda-tl show: the result cannot be written to stdout (No space left on device).\n"
    assert (done.returncode, done.stderr) == (74, told)


def test_closed_streams() -> None:
    done = spawn("bash", "-c", f"{KDA_TL} show >&-")
    assert (done.returncode, done.stderr) == (
        74,
        "kda-tl show: stdout is closed: send it to a file, or to /dev/null.\n",
    )
    done = spawn("bash", "-c", f"{KDA_TL} show --source nowhere --json 2>&-")
    assert done.returncode == 0 and json.loads(done.stdout)["plans"] == []
    done = spawn("bash", "-c", f"{KDA_TL} show --db /nowhere 2>&-")
    assert (done.returncode, done.stdout) == (2, "")


@needs_full
def test_full_stderr_costs_notes_only() -> None:
    done = spawn("bash", "-c", f"{KDA_TL} show --source nowhere --json 2> /dev/full", PYTHONUNBUFFERED="1")
    assert done.returncode == 0 and json.loads(done.stdout)["plans"] == []


def test_code_of_a_result_outlives_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads does not hide a regression, or that nothing is valid."""

    def run(args: Any, terminal: Any) -> int:
        terminal.show({}, *["line"] * 3)
        return 4

    monkeypatch.setattr(show, "run", run)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["show"]) == 4


# Ctrl-C, and our own bugs

INTERRUPTED = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    raise ImportError("initialization failed")
"""


def test_ctrl_c_while_packages_are_imported_ends_doctor(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(INTERRUPTED)  # as extension modules do when they are interrupted
    done = spawn(*KDA_TL.split(), "doctor", path=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kda-tl doctor: interrupted.\n")


def test_ctrl_c_that_a_package_renames_ends_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "run", lambda *_: exec(INTERRUPTED))
    assert main(["show"]) == 130
    assert capsys.readouterr().err == "kda-tl show: interrupted.\n"


def fail(kind: Callable[[], Exception]) -> Callable[..., int]:
    def run(*_: object) -> int:
        raise kind()

    return run


@pytest.mark.parametrize(
    "kind",
    [
        lambda: RuntimeError("boom"),
        lambda: AssertionError("boom"),
        lambda: ImportError("boom", name="kda_tl.x"),
        lambda: ModuleNotFoundError("boom", name="kda_tl.x"),
    ],
)
def test_bug_has_a_code_of_its_own(
    kind: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "run", fail(kind))
    assert main(["show"]) == 70
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0].startswith("Traceback") and lines[-2].endswith("Error: boom")
    assert lines[-1].startswith("kda-tl show: internal error: please report it, with the lines above")


def test_a_package_that_exits_is_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(show, "run", lambda *_: sys.exit(1))
    assert main(["show"]) == 70
    assert "internal error" in capsys.readouterr().err


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    from kda_tl.cli._exit import ExitCode

    main(["--help"])
    listed = capsys.readouterr().out.partition("exit codes:")[2].partition("first steps:")[0]
    words = listed.replace(":", " ").split()
    assert all(str(int(code)) in words for code in ExitCode)
