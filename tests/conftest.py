"""What all tests share: where GPU tests run, seeds that a failure tells, and no tuning results of the user's."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import parts
from support.forkserver import FakeSubprocess

if TYPE_CHECKING:
    from kda_tl.core.device import Device

SEED_VARIABLE = "KDA_TL_TEST_SEED"
# In the environment, so that worker processes of a parallel run draw from the same seed. Here, and not when pytest is
# configured: conftest files of folders that the command names are imported before, and draw.
os.environ.setdefault(SEED_VARIABLE, str(random.SystemRandom().randrange(2**31)))
# Files that take minutes begin first, or a process would be left with one of them at the end
LONGEST = (
    "test_autograd.py",
    "test_tuner.py",
    "test_stage_search.py",
    "test_plan_search.py",
    "test_templates.py",
    "test_chunk.py",
    "test_chunk_memory.py",
    "test_cli_tune.py",
    "test_cli.py",
    "test_emulated.py",
)

with contextlib.suppress(ImportError):  # GPU tests run without it
    from hypothesis import settings

    # Examples that compile kernels take seconds, and how many depends on the machine.
    settings.register_profile("kda_tl", deadline=None, print_blob=True)
    settings.load_profile("kda_tl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parts.add_option(parser)


def pytest_configure() -> None:
    # Ignored where tests run in the background, and so by the processes that they start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"seed: {SEED_VARIABLE}={os.environ[SEED_VARIABLE]}", parts.describe(config.getoption("--part"))]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.deselect(config, items)
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if torch.cuda.is_available():
        return
    why = "torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {why}"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own: a new one each run, the same whichever tests run beside it."""
    base = os.environ[SEED_VARIABLE]
    request.node.add_report_section("setup", "seed", f"rerun with {SEED_VARIABLE}={base}")
    return zlib.crc32(f"{base}/{request.node.nodeid}".encode()) & 0x7FFFFFFF


@pytest.fixture(scope="session", autouse=True)
def no_user_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans that the user tuned would be tested in place of the shipped ones, in subprocesses too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("user-data")))
        for name in ("KDA_TL_DB", "KDA_TL_STRICT"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """Workers are forked by a process that has torch and tilelang loaded; not beside a GPU, with its threads."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr("kda_tl.core.isolate.subprocess", FakeSubprocess)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: a second thread only waits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """An empty directory for each source of tuning databases that has one, in place of this machine's own."""
    from kda_tl.database import store as db

    monkeypatch.setattr(db, "_user_directory", lambda: tmp_path / "user")
    monkeypatch.setattr(db, "_loaded", None)
    monkeypatch.setenv(db.ENVIRONMENT, str(tmp_path / "env"))
    (tmp_path / "env").mkdir()
    return {name: tmp_path / name for name in ("env", "user")}


@pytest.fixture
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of ``$KDA_TL_DB``: no test of the command line reads or writes databases of whoever runs it."""
    from kda_tl.database import store as db

    directory = tmp_path / "db"
    directory.mkdir()
    monkeypatch.setenv("KDA_TL_DB", str(directory))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    db.reload()
    yield directory
    monkeypatch.undo()
    db.reload()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; returns exit code, stdout and stderr, none of which may hold colours or a traceback."""
    from kda_tl.cli import main

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert "\x1b" not in out + err
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The GPU of this machine is an H200, as far as ``--gpu`` is concerned."""
    from kda_tl.database.gpus import known_device

    device = known_device("nvidia_h200")
    monkeypatch.setattr("kda_tl.cli._target.current_device", lambda: device)
    return device


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU in this machine, as far as ``--gpu`` is concerned."""
    from kda_tl.core.device import cpu_device

    monkeypatch.setattr("kda_tl.cli._target.current_device", cpu_device)


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are interpreters that the test process starts, as outside of the tests."""
    monkeypatch.setattr("kda_tl.core.isolate.subprocess", subprocess)
