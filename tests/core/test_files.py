"""Files that are not regular, or have no end: refused at once by whatever reads or writes there, never waited for."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from support.database_cases import A100, H200, find, make_database, make_entry, make_key

from kda_tl.core.files import open_regular, read_regular
from kda_tl.database import gpus
from kda_tl.database import store as db
from kda_tl.database.file import MAX_FILE_BYTES
from kda_tl.errors import DatabaseError, KdaTlWarning
from kda_tl.tune import journal
from kda_tl.tune.journal import Journal, Trial

pytestmark = pytest.mark.timeout(30)  # what waits for a FIFO waits for ever
PAGEMAP = Path("/proc/self/pagemap")  # regular and of no size, but longer than any file


def put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address has 108 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def put_large(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_FILE_BYTES + 1)  # a hole: it takes no room


PUT: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "it is a FIFO, not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "it is a character device, not a regular file"),
    "socket": (put_socket, "it is a socket, not a regular file"),
    "directory": (Path.mkdir, "Is a directory"),
    "large": (put_large, "it is larger than 64 MiB"),
    "endless": (lambda path: path.symlink_to(PAGEMAP), "it is larger than 64 MiB"),
}


@pytest.fixture(params=PUT)
def odd(request: pytest.FixtureRequest) -> tuple[Callable[[Path], None], str]:
    """Puts something into a path; and what is said of it."""
    if request.param == "endless" and not PAGEMAP.exists():
        pytest.skip("needs Linux's /proc")
    return PUT[request.param]


def test_odd_file_of_a_database_is_ignored_with_a_warning(
    odd: tuple[Callable[[Path], None], str], environment: Mapping[str, Path]
) -> None:
    put, told = odd
    entry = make_entry(make_key())
    for folder in environment.values():
        make_database(folder, A100, entry)
    for folder in environment.values():  # $KDA_TL_DB and the user's
        path = folder / "nvidia_h200" / "chunk_kda_fwd.json"
        path.parent.mkdir()
        put(path)
    with pytest.warns(KdaTlWarning) as caught:
        sources = db.sources()
    sentences = [str(warning.message) for warning in caught]
    assert len(sentences) == 2 and all(told in each and "The next source serves." in each for each in sentences)
    assert find(entry.key, A100, *sources) == ("exact bucket", "$KDA_TL_DB", entry.key), "the other files serve"
    (problem,) = db.validate(folder)
    assert str(path) in problem and told in problem
    with pytest.raises(DatabaseError, match="cannot write .*cannot be read"):
        db.store(folder, H200, "chunk_kda", "fwd", [entry])
    assert path.exists(), "it is not moved aside: nothing is known of what it holds"


def test_odd_temporary_file_does_not_hold_a_writer(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia_h200"
    folder.mkdir()
    os.mkfifo(folder / ".chunk_kda_fwd.json.tmp")
    assert len(make_database(tmp_path, H200, make_entry(make_key())).files) == 1


def test_odd_journal_is_an_error(
    odd: tuple[Callable[[Path], None], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, told = odd
    monkeypatch.setattr(journal, "_MAX_BYTES", MAX_FILE_BYTES)
    kept = Journal(tmp_path / "trials.jsonl")
    put(kept.path)
    with pytest.raises(DatabaseError, match=f"cannot read the trial journal .*{told}"):
        kept.trials()
    if "larger" not in told:  # more may be added to a large one
        with pytest.raises(DatabaseError, match=f"cannot write the trial journal .*{told}"):
            kept.append(Trial(study="s", config={}, status="ok", median_us=1.0))


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another list of GPUs in place of the packaged one."""
    monkeypatch.setattr("importlib.resources.files", lambda name: tmp_path)
    gpus._read_packaged.cache_clear()
    yield tmp_path / "gpus.json"
    gpus._read_packaged.cache_clear()


def test_odd_list_of_gpus_is_an_error(odd: tuple[Callable[[Path], None], str], packaged: Path) -> None:
    put, told = odd
    put(packaged)
    with pytest.raises(DatabaseError, match=f"the list of GPUs .*gpus.json cannot be used .*{told}.*install kda_tl"):
        gpus.known_device("nvidia_h200")


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"aliases": {}, "gpus": {"a": {"arch": 1}}})])
def test_broken_list_of_gpus_is_an_error(packaged: Path, text: str) -> None:
    packaged.write_text(text)
    with pytest.raises(DatabaseError, match="the list of GPUs .*gpus.json cannot be used"):
        gpus.known_device("nvidia_h200")


def test_file_replaced_while_it_is_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO that came after the first look is opened without waiting, seen, and closed again."""
    os.mkfifo(tmp_path / "file")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is a FIFO"):
        open_regular(tmp_path / "file", os.O_RDONLY)
    assert len(os.listdir("/proc/self/fd")) == before


def test_regular_file_is_read_to_its_end(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 5)
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", len(content)) == content
    with pytest.raises(OSError, match="it is larger than 1 MiB"):
        read_regular(tmp_path / "link", len(content) - 1)
