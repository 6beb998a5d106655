"""Files of a tuning database: those that cannot be used, and writing that loses nothing."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_cases import A100, H200, edit, find, make_database, make_entry, make_key

from kda_tl.database import store as db
from kda_tl.database.records import VsDefault
from kda_tl.database.store import Database, store, validate
from kda_tl.errors import DatabaseError, KdaTlWarning

SPAWN = multiprocessing.get_context("spawn")


# Files that cannot be used


def set_schema(name: str) -> Callable[[Path], object]:
    return lambda path: edit(path, lambda values: values.update(schema=name))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_text(path.read_text()[:-40]), "not JSON"),
    "empty": (lambda path: path.write_text(""), "not JSON"),
    "binary": (lambda path: path.write_bytes(b"\xff\xfe\x00{}"), "not UTF-8"),
    "list": (lambda path: path.write_text("[]"), "schema is None"),
    "deep": (lambda path: path.write_text("[" * 100_000), "not JSON"),
    "nan": (lambda path: path.write_text(path.read_text().replace("412.6", "NaN")), "not JSON"),
    "infinite": (lambda path: path.write_text(path.read_text().replace("412.6", "1e999")), "not JSON"),
    "newer": (set_schema("kda_tl.tuning/3"), "is newer than kda_tl.tuning/2, which this kda_tl reads: update"),
    "older": (set_schema("kda_tl.tuning/0"), "schema is 'kda_tl.tuning/0', not"),
    "foreign": (set_schema("other/1"), "schema is 'other/1'"),
    "no gpu": (lambda path: edit(path, lambda values: values.pop("gpu")), r"lacks the fields \['gpu'\]"),
    "entries": (lambda path: edit(path, lambda values: values.update(entries={})), "entries must be a list"),
    "sms": (lambda path: edit(path, lambda values: values["gpu"].update(sms="132")), "gpu.sms must be an integer"),
    "folder": (lambda path: edit(path, lambda values: values["gpu"].update(slug="x")), "belongs in x/chunk_kda_fwd"),
    "pass": (lambda path: edit(path, lambda values: values.update({"pass": "bwd"})), "belongs in .*chunk_kda_bwd"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unusable_file_warns_once_and_the_next_source_serves(
    environment: Mapping[str, Path], tmp_path: Path, case: str
) -> None:
    damage, message = BROKEN[case]
    entry = make_entry(make_key())
    make_database(environment["user"], H200, entry)
    path = store(environment["env"], H200, "chunk_kda", "fwd", [entry])
    store(environment["env"], A100, "chunk_kda", "fwd", [entry])
    damage(path)
    with pytest.warns(KdaTlWarning, match=message) as caught:
        found = [find(entry.key, H200, *db.sources()) for _ in range(2)]
    assert len(caught) == 1 and str(path) in str(caught[0].message) and "next source" in str(caught[0].message)
    assert found == [("exact bucket", "user", entry.key)] * 2
    assert find(entry.key, A100, *db.sources()) == ("exact bucket", "$KDA_TL_DB", entry.key), "the other file serves"
    (problem,) = validate(path)
    assert str(path) in problem


def test_mutated_entries_are_misses_never_exceptions(tmp_path: Path, rng: random.Random) -> None:
    """Every field of an entry in turn missing or of every wrong type: refused, with its path; the neighbour serves."""
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(8)), make_entry(make_key(32))])
    intact = json.loads(path.read_text())
    leaves = [("key",), ("plan",), ("plan", "stages"), ("plan", "stages", "fwd_state"), ("time_us",), ("templates",)]
    leaves += [
        (outer, name) for outer in ("key", "time_us", "vs_default", "check") for name in intact["entries"][1][outer]
    ]
    intact["entries"][1]["plan"]["kept"] = False
    leaves += [("plan", "BT"), ("plan", "pipeline"), ("numerics",), ("provenance",), ("templates", "fwd_state")]
    wrong: list[Any] = [None, -1, "", [], [1], True, 0.5, 10**400]
    for leaf, value in itertools.product(leaves, [*wrong, "missing", "unknown"]):
        values = json.loads(json.dumps(intact))
        at = values["entries"][1]
        for name in leaf[:-1]:
            at = at[name]
        old = at[leaf[-1]]
        if value == "missing":
            del at[leaf[-1]]
        elif value == "unknown":
            at[f"{leaf[-1]}_"] = old
        else:
            at[leaf[-1]] = value
        path.write_text(json.dumps(values))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = Database.load(tmp_path, "test")
        assert find(make_key(8), H200, loaded) == ("exact bucket", "test", make_key(8)), (leaf, value)
        find(make_key(32), H200, loaded)
        skipped = len(loaded.skipped)
        assert len(caught) == skipped <= 1
        known = type(value) is type(old) or (type(old) is float and type(value) is int)
        by_stage = leaf[-1] == "fwd_state" and value in (
            "missing",
            "unknown",
        )  # which stages is the dispatcher's to say
        if value == -1 or not known and not by_stage:
            assert skipped, (leaf, value)
        if skipped:
            assert "entries[1]" in loaded.skipped[0] and "1 of 2 entries" in loaded.skipped[0]
            assert validate(path), "what is not served is reported"


def test_hidden_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key())])
    for name in (".chunk_kda_fwd.json.tmp", "chunk_kda_fwd.json.corrupt-1", "notes.txt"):
        path.with_name(name).write_text("junk")
    (tmp_path / "gpus.json").write_text("junk")
    assert len(Database.load(tmp_path, "test").files) == 1
    assert validate(tmp_path) == []


# Writing


def test_corrupt_file_is_moved_aside(tmp_path: Path) -> None:
    for n in (1, 2):
        path = store(tmp_path, H200, "chunk_kda", "fwd", [])
        path.write_text(f"junk {n}")
        with pytest.warns(KdaTlWarning, match=rf"chunk_kda_fwd.json is replaced: .*chunk_kda_fwd.json.corrupt-{n}"):
            make_database(tmp_path, H200, make_entry(make_key()))
        assert path.with_name(f"{path.name}.corrupt-{n}").read_text() == f"junk {n}"
        assert validate(tmp_path) == []


def test_newer_file_and_other_gpu_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key())])
    with pytest.raises(DatabaseError, match="holds plans for sm_90a with 132 SMs, not sm_90a with 66: pass another"):
        store(tmp_path, replace(H200, num_sms=66), "chunk_kda", "fwd", [])
    set_schema("kda_tl.tuning/12")(path)
    before = path.read_text()
    with pytest.raises(DatabaseError, match="is not written: its schema kda_tl.tuning/12 is newer"):
        store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(8))])
    assert path.read_text() == before


def test_invalid_stored_entries_survive_a_merge(tmp_path: Path) -> None:
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(8)), make_entry(make_key(32))])
    edit(path, lambda values: values["entries"][0].update(surplus=1))
    edit(path, lambda values: values["entries"].extend(["what?", {"key": None}]))
    with pytest.warns(KdaTlWarning, match="3 of 5 entries"):
        make_database(tmp_path, H200, make_entry(make_key(32), BV=32), make_entry(make_key(64)))
    stored = json.loads(path.read_text())["entries"]
    assert [entry["key"]["heads_bucket"] for entry in stored[:3]] == [8, 32, 64] and stored[0]["surplus"] == 1
    assert stored[3:] == ["what?", {"key": None}]
    store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(8))])
    assert "surplus" not in path.read_text(), "the same key is replaced, valid or not"


def test_invalid_entries_are_not_written(tmp_path: Path) -> None:
    entry = make_entry(make_key())
    cases = {
        "vs_default.ratio must be a finite": replace(entry, vs_default=VsDefault(ratio=-1.0, ci95=(1.0, 1.0))),
        "cannot be written as JSON": replace(entry, vs_default=VsDefault(ratio=math.nan, ci95=(1.0, 1.0))),
        r"cannot be written as JSON \(Object": replace(entry, provenance={"device": object()}),
        "tokens_bucket is 8000, which is not a bucket: the nearest is 8192": make_entry(make_key(tokens_bucket=8000)),
        r"plan lacks the fields \['BC'\]": replace(entry, plan={k: v for k, v in entry.plan.items() if k != "BC"}),
    }
    for message, bad in cases.items():
        with pytest.raises(DatabaseError, match=message):
            store(tmp_path, H200, "chunk_kda", "fwd", [bad])
    assert not list(tmp_path.iterdir())


def test_unwritable_directory_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/kda_tl")):
        with pytest.raises(DatabaseError, match="cannot write the tuning database .*: pass a directory you may write"):
            store(directory, H200, "chunk_kda", "fwd", [])
    monkeypatch.setenv("KDA_TL_DB", str(directory))
    with pytest.raises(DatabaseError, match="cannot write the tuning database .*: set KDA_TL_DB to a directory"):
        store(directory, H200, "chunk_kda", "fwd", [])
    unreadable = tmp_path / "other" / "nvidia_h200" / "chunk_kda_fwd.json"
    unreadable.mkdir(parents=True)
    with pytest.raises(DatabaseError, match="cannot write .*cannot be read .Is a directory"):
        store(tmp_path / "other", H200, "chunk_kda", "fwd", [])


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key())])
    before = path.read_text()

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(DatabaseError, match="No space left on device"):
            patch.setattr(os, name, refuse)
            store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(8))])
        assert path.read_text() == before


def test_lock_timeout_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db, "LOCK_TIMEOUT_S", 0.1)
    with db._locked(tmp_path), pytest.raises(DatabaseError, match="locked by another process"):
        store(tmp_path, H200, "chunk_kda", "fwd", [])


def write_one_by_one(directory: Path, first: int, count: int) -> None:
    """In a process of its own: many writes of one entry, each into the file the other is writing."""
    for n in range(first, first + count):
        store(directory, H200, "chunk_kda", "fwd", [make_entry(make_key(K=n))])


def write_for_ever(directory: Path) -> None:
    entries = [make_entry(make_key(K=n)) for n in range(1, 101)]
    for n in itertools.count():
        store(directory, H200, "chunk_kda", "fwd", [replace(entry, numerics=f"{n}") for entry in entries])


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    count = 20
    writers = [SPAWN.Process(target=write_one_by_one, args=(tmp_path, 1 + i * count, count)) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    (file,) = Database.load(tmp_path, "test").files.values()
    assert sorted(key.K for key in file.entries) == list(range(1, 2 * count + 1))


def test_killed_writer_leaves_a_whole_file_and_no_lock(tmp_path: Path, rng: random.Random) -> None:
    writer = SPAWN.Process(target=write_for_ever, args=(tmp_path,))
    writer.start()
    path = tmp_path / "nvidia_h200" / "chunk_kda_fwd.json"
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(20):  # readers never see half a file
        (file,) = Database.load(tmp_path, "test").files.values()
        assert len({entry.numerics for entry in file.entries.values()}) == 1
    time.sleep(rng.uniform(0, 0.05))
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert validate(tmp_path) == []
    make_database(tmp_path, H200, *(make_entry(make_key(K=n)) for n in range(1, 101)))
    assert not path.with_name(f".{path.name}.tmp").exists()


def test_export_merges_into_another_directory(tmp_path: Path) -> None:
    make_database(tmp_path / "from", H200, make_entry(make_key(8)), make_entry(make_key(16), BV=32))
    make_database(tmp_path / "from", A100, make_entry(make_key(8)))
    make_database(tmp_path / "to", H200, make_entry(make_key(16)), make_entry(make_key(32)))
    assert len(db.export(tmp_path / "from", tmp_path / "to")) == 2
    files = Database.load(tmp_path / "to", "test").files
    merged = files["nvidia_h200", "chunk_kda", "fwd"]
    assert {k.heads_bucket: e.plan["stages"]["fwd_state"]["BV"] for k, e in merged.entries.items()} == {
        8: 64,
        16: 32,
        32: 64,
    }
    assert files["nvidia_a100_sxm4_80gb", "chunk_kda", "fwd"].gpu.as_device() == A100
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatabaseError, match="holds no tuning records"):
        db.export(tmp_path / "empty", tmp_path / "to")
