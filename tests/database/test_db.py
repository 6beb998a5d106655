"""The tuning database: keys, records, sources, and what the shipped one holds."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_cases import H200, edit, find, make_database, make_entry, make_key

from kda_tl.core.device import Device, cpu_device
from kda_tl.core.problem import Problem
from kda_tl.database import store as db
from kda_tl.database.file import Document, Gpu
from kda_tl.database.gpus import known_device, resolve_gpu
from kda_tl.database.records import round_heads, round_tokens
from kda_tl.database.staleness import list_unproved, renew, stale_stages
from kda_tl.database.store import Database, Entry, Key, store, use, validate
from kda_tl.errors import DatabaseError, InputError, KdaTlWarning

FOLDER = Path(__file__).parents[2] / "tuning_db"


# Keys and buckets


def test_head_buckets_are_half_octaves() -> None:
    assert sorted({round_heads(n) for n in range(1, 129)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert [round_heads(n) for n in (5, 7, 56, 80, 110, 112)] == [6, 8, 64, 96, 96, 128]


def test_buckets_are_nearest_in_log2(rng: random.Random) -> None:
    halves = [n for e in range(40) for n in (1 << e, 3 << e)]
    for _ in range(3000):
        n = int(2 ** rng.uniform(0, 34)) + rng.randrange(2)
        for rounded, buckets in ((round_heads(n), halves), (round_tokens(n), [1 << e for e in range(4, 40)])):
            nearest = min(abs(math.log2(n / bucket)) for bucket in buckets)
            assert rounded in buckets and abs(math.log2(n / rounded)) <= nearest + 1e-12, n
        assert round_heads(round_heads(n)) == round_heads(n) and round_tokens(round_tokens(n)) == round_tokens(n)


def test_key_keeps_what_moves_the_optimum() -> None:
    problem = Problem(H=8, HV=24, K=60, V=100, tokens=3000, sequences=3, longest=2000, varlen=True, dtype="fp16")
    key = Key.of(problem)
    assert key == Key(60, 100, "fp16", "log", 3, True, 24, 4096, 2048)
    same = replace(problem, l2norm=True, beta="sigmoid", has_A_log=True, initial_state=True, g_dtype="fp32")
    assert Key.of(same) == key
    changes: tuple[dict[str, Any], ...] = (
        *({"K": 64}, {"V": 64}, {"dtype": "bf16"}, {"gate": "safe"}, {"H": 12}, {"varlen": False}),
        *({"scalar_gate": True}, {"rank": 2}),
    )
    for change in changes:
        other = Key.of(replace(problem, **change))
        assert other.semantic != key.semantic and other.text != key.text, change
    assert Key.of(problem.without_lengths()).tokens_bucket == 16


# Round trip


def test_file_round_trip_is_exact_and_diffable(tmp_path: Path, rng: random.Random) -> None:
    keys = {
        make_key(
            rng.randrange(1, 300),
            rng.randrange(1, 10**9),
            rng.randrange(1, 10**9),
            K=rng.randrange(1, 257),
            gate=rng.choice(["log", "softplus", "safe"]),
            varlen=rng.random() < 0.5,
            scalar_gate=rng.random() < 0.3,
            rank=rng.choice([1, 1, 2, 4]),
        )
        for _ in range(60)
    }
    entries = [make_entry(key, ratio=rng.uniform(1, 3)) for key in keys]
    path = store(tmp_path, H200, "chunk_kda", "fwd", entries)
    assert path == tmp_path / "nvidia_h200" / "chunk_kda_fwd.json"
    (file,) = Database.load(tmp_path, "test").files.values()
    assert dict(file.entries) == {entry.key: entry for entry in entries}
    assert file.gpu.as_device() == H200
    assert validate(tmp_path) == []

    before = path.read_text()
    rng.shuffle(entries)
    store(tmp_path, H200, "chunk_kda", "fwd", entries)
    assert path.read_text() == before
    entry = entries[0]
    store(tmp_path, H200, "chunk_kda", "fwd", [replace(entry, time_us=replace(entry.time_us, median=1.5))])
    changed = [(a, b) for a, b in zip(before.splitlines(), path.read_text().splitlines(), strict=True) if a != b]
    assert len(changed) == 1 and '"median": 1.5' in changed[0][1]
    assert max(map(len, before.splitlines())) <= 170


def test_records_of_before_the_key_had_gate_width_and_rank(tmp_path: Path) -> None:
    """They read as what they were measured for, and are written as they were; what differs is written."""
    plain, scalar, ranked = (make_key(**fields) for fields in ({}, {"scalar_gate": True}, {"rank": 2}))
    names = ["K", "V", "dtype", "gate", "group", "varlen", "heads_bucket", "tokens_bucket", "longest_bucket"]
    assert list(plain.as_dict()) == names and (plain.scalar_gate, plain.rank) == (False, 1)
    assert [set(key.as_dict()) - set(names) for key in (scalar, ranked)] == [{"scalar_gate"}, {"rank"}]
    for key in (plain, scalar, ranked):
        assert Key.from_dict(key.as_dict()) == Key.from_dict(key._asdict()) == key
    for file in FOLDER.glob("*/*.json"):
        copy = tmp_path / file.parent.name / file.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(file.read_text())
        document = Document.parse(file.read_text())
        store(
            tmp_path,
            document.gpu.as_device(),
            document.operator,
            document.direction,
            [Entry.from_dict(document.entries[0])],
        )
        assert copy.read_text() == file.read_text()


def test_stored_plan_form_is_the_one_plans_write() -> None:
    from kda_tl.core.stage import Config, Plan

    plan = Plan(pipeline="staged", BT=64, BC=16, stages=(("fwd_state", Config()),))
    assert make_entry(make_key()).plan.keys() == plan.as_dict().keys()
    assert Entry.from_dict({**make_entry(make_key()).as_dict(), "plan": plan.as_dict()}).plan == plan.as_dict()


def test_merge_keeps_other_entries_and_replaces_the_same_key(tmp_path: Path) -> None:
    make_database(tmp_path, H200, make_entry(make_key(8)), make_entry(make_key(16)))
    loaded = make_database(tmp_path, H200, make_entry(make_key(16), BV=32), make_entry(make_key(32)))
    (file,) = loaded.files.values()
    widths = {key.heads_bucket: entry.plan["stages"]["fwd_state"]["BV"] for key, entry in file.entries.items()}
    assert widths == {8: 64, 16: 32, 32: 64}


# Sources


def test_sources_come_in_order_and_keep_their_identity(environment: Mapping[str, Path], tmp_path: Path) -> None:
    key = make_key()
    make_database(environment["user"], H200, make_entry(key))
    make_database(environment["env"], H200, make_entry(key))
    overlay = make_database(tmp_path / "overlay", H200, make_entry(key), name="overlay")
    base = db.sources()
    assert [database.name for database in base] == ["$KDA_TL_DB", "user", "packaged"]
    assert db.sources() is base
    assert find(key, H200, *base) == ("exact bucket", "$KDA_TL_DB", key)
    with use(overlay) as outer:
        assert outer is overlay
        assert db.sources() == (overlay, *base) and db.sources() is db.sources()
        with use(tmp_path / "overlay") as inner:
            assert db.sources() == (inner, overlay, *base)
        with pytest.raises(KeyError), use(overlay):
            raise KeyError
        assert db.sources() == (overlay, *base)
    assert db.sources() is base
    with use(overlay):
        assert {db.sources(): "cached"}[(overlay, *base)], "sources can be part of a cache's key"


def test_overlay_is_of_one_thread(environment: Mapping[str, Path], tmp_path: Path) -> None:
    overlay = make_database(tmp_path / "overlay", H200, make_entry(make_key()))
    seen: list[tuple[Database, ...]] = []
    with use(overlay):
        thread = threading.Thread(target=lambda: seen.append(db.sources()))
        thread.start()
        thread.join()
        assert overlay in db.sources() and overlay not in seen[0]


def test_threads_load_once(environment: Mapping[str, Path]) -> None:
    together = threading.Barrier(4)
    seen: list[tuple[Database, ...]] = []

    def ask() -> None:
        together.wait()
        seen.append(db.sources())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 and all(each is db.sources() for each in seen)


def test_environment_is_read_once_and_on_reload(
    environment: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = db.sources()
    monkeypatch.setenv(db.ENVIRONMENT, str(tmp_path / "other"))
    make_database(tmp_path / "other", H200, make_entry(make_key()))
    assert db.sources() is base
    assert db.writable_directory() == tmp_path / "other"
    assert find(make_key(), H200, *db.reload()) == ("exact bucket", "$KDA_TL_DB", make_key())
    monkeypatch.delenv(db.ENVIRONMENT)
    assert [database.name for database in db.reload()] == ["packaged"]
    assert db.writable_directory() == tmp_path / "user"


def test_missing_directories(environment: Mapping[str, Path], tmp_path: Path) -> None:
    environment["env"].rmdir()
    with pytest.warns(KdaTlWarning, match=r"\$KDA_TL_DB tuning database: .*No such file.*next source") as caught:
        db.sources()
        db.sources()
    assert len(caught) == 1
    with pytest.raises(DatabaseError, match="is not a directory: pass"), use(tmp_path / "nowhere"):
        pass


def test_user_directory_that_nobody_may_see_is_warned_of(
    environment: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below another user's home. Tests may run as root, whom permissions do not stop: so the refusal is made."""

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for name in ("is_dir", "iterdir"):
        allow = getattr(Path, name)
        monkeypatch.setattr(
            Path, name, lambda path, allow=allow: refuse(path) if path == environment["user"] else allow(path)
        )
    with pytest.warns(KdaTlWarning, match=r"user tuning database: .* cannot be listed \(Permission denied\)"):
        assert [database.name for database in db.sources()] == ["$KDA_TL_DB", "user", "packaged"]


# Validation, staleness, GPUs, provenance


def test_validate_names_each_problem(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    path = store(tmp_path, H200, "chunk_kda", "fwd", [make_entry(make_key(heads)) for heads in (8, 16, 32, 64)])

    def damage(values: Any) -> None:
        first, second, third, fourth = values["entries"]
        first["key"]["K"] = 999
        second["templates"] = {}
        third["key"] = fourth["key"]
        third["vs_default"]["ratio"] = 0.9
        fourth["check"]["max_rel_err"] = 0.5
        fourth["key"]["gate"] = "open"
        third["plan"]["BT"] = 48
        fourth["templates"]["fwd_state"] = "abc"

    edit(path, damage)
    problems = validate(tmp_path)
    for expected in (
        "entries[0].key.K: 999 is greater",
        "entries[1].templates lacks the stages ['fwd_state']",
        "entries[3] has the key of entries[2]",
        "entries[2] is slower than the default",
        "entries[3] is wrong by 0.5",
        "entries[3].key.gate: 'open' is not one of",
        "entries[2].plan.BT: 48 is not one of",
        "entries[3].templates.fwd_state: 'abc' does not match",
    ):
        assert any(expected in problem for problem in problems), (expected, problems)
    assert all(problem.startswith(str(path)) and problem.endswith(".") for problem in problems)
    assert validate(tmp_path / "nowhere") == [f"{tmp_path / 'nowhere'} does not exist."]


def test_schema_agrees_with_the_records(tmp_path: Path) -> None:
    """Fields declared twice, in the records and in schema.json, are the same fields."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FOLDER / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    entry, values = schema["$defs"]["entry"], make_entry(make_key()).as_dict()
    assert set(entry["required"]) == set(entry["properties"]) == set(values)
    key = schema["$defs"]["key"]
    assert list(key["properties"]) == list(Key._fields)
    assert key["required"] == [name for name in Key._fields if name not in Key._field_defaults]
    for name in ("time_us", "vs_default", "check"):
        block = entry["properties"][name]
        assert block["required"] == list(block["properties"]) == list(values[name])
    text = Document(gpu=Gpu.of(cpu_device()), operator="chunk_kda", direction="bwd", entries=[values]).format()
    jsonschema.validate(json.loads(text), schema)


def test_shipped_database_is_valid() -> None:
    assert validate(FOLDER) == []
    for file in Database.load(FOLDER, "packaged").files.values():
        if file.gpu.slug != "cpu":
            assert file.gpu.as_device() == known_device(file.gpu.slug)


def test_stale_stages() -> None:
    stages: dict[str, Any] = {"a": {}, "b": {}, "c": {}, "d": {}}
    entry = replace(make_entry(make_key()), plan={"stages": stages}, templates={"a": "1", "b": "2", "c": "3"})
    assert stale_stages(entry, {"a": "1", "b": "other", "d": "4", "e": "5"}) == ("b", "c", "d")


def test_entries_are_renewed_where_the_kernels_are_the_same() -> None:
    """Not where one changed, was made by another TileLang, or is unknown; a stage with the sources of before counts."""
    stages: dict[str, Any] = {"a": {}, "b": {}}
    entry = replace(make_entry(make_key()), plan={"stages": stages}, templates={"a": "1", "b": "2"})
    edited = {"a": "1", "b": "new", "other": "3"}
    assert list_unproved(entry, edited, "v1") == () and renew(entry, edited, "v1", {"b": "B"}) == (entry, ("b",))
    assert list_unproved(entry, entry.templates, "v1") == ("a", "b"), "a record of schema 1"
    filled, stale = renew(entry, entry.templates, "v1", {"a": "A", "b": "B"})
    assert filled == replace(entry, kernels={"v1": {"a": "A", "b": "B"}}) and stale == ()
    assert list_unproved(filled, entry.templates, "v1") == ()
    assert renew(filled, entry.templates, "v1", {}) == (filled, ())
    assert list_unproved(filled, edited, "v1") == ("b",)
    assert renew(filled, edited, "v1", {"b": "B"}) == (replace(filled, templates={"a": "1", "b": "new"}), ())
    assert renew(filled, edited, "v1", {"b": "changed"}) == (filled, ("b",))
    assert renew(filled, edited, "v1", {}) == (filled, ("b",)), "it does not compile"
    assert list_unproved(filled, edited, "v2") == () and renew(filled, edited, "v2", {}) == (filled, ("b",))
    both, _ = renew(filled, entry.templates, "v2", {"a": "A2", "b": "B2"})
    assert both.kernels == {**filled.kernels, "v2": {"a": "A2", "b": "B2"}}
    gone = {"b": "2"}
    assert list_unproved(filled, gone, "v1") == ("a",) and renew(filled, gone, "v1", {}) == (filled, ("a",))


def test_files_of_schema_1_are_read_and_written_as_2(tmp_path: Path) -> None:
    """Those that were packaged: what they hold stays, and no kernel has a hash."""
    for file in FOLDER.glob("*/*.json"):
        values = json.loads(file.read_text())
        for entry in values["entries"]:
            entry.pop("kernels", None)
        values["schema"] = "kda_tl.tuning/1"
        old = tmp_path / file.parent.name / file.name
        old.parent.mkdir(exist_ok=True)
        old.write_text(json.dumps(values))
        assert validate(old) == []
        document = Document.parse(old.read_text())
        assert document.entries == [{**entry, "kernels": {}} for entry in values["entries"]]
        first = Entry.from_dict(document.entries[0])
        store(tmp_path, document.gpu.as_device(), document.operator, document.direction, [first])
        assert json.loads(old.read_text())["schema"] == "kda_tl.tuning/2"
        texts = [json.dumps(entry, sort_keys=True) for entry in document.entries]
        after = Document.parse(old.read_text()).entries
        assert sorted(texts) == sorted(json.dumps(entry, sort_keys=True) for entry in after)
    assert list(tmp_path.iterdir())


def test_gpu_names(environment: Mapping[str, Path]) -> None:
    assert resolve_gpu("h100") == ("nvidia_h100_80gb_hbm3", "nvidia_h100_pcie", "nvidia_h100_nvl")
    assert resolve_gpu("H200")[0] == "nvidia_h200"
    assert resolve_gpu("NVIDIA H200") == resolve_gpu("nvidia_h200") == ("nvidia_h200",)
    assert resolve_gpu("cpu") == ("cpu",) and known_device("cpu") == cpu_device()
    assert Device(slug="nvidia_h200", arch="sm_90a", num_sms=132, smem_bytes=232448) == H200
    assert (H200.kind, H200.sm) == ("cuda", 90)
    assert known_device("nvidia_b200").sm == 100
    with pytest.raises(InputError, match="unknown GPU 'h300': pass one of cpu, .*h100.*nvidia_h200"):
        resolve_gpu("h300")
    with pytest.raises(InputError, match="unknown GPU 'nvidia_h300'"):
        known_device("nvidia_h300")
    with pytest.raises(InputError, match="several products: pass one of nvidia_h100_80gb_hbm3"):
        known_device("h100")
    new = replace(H200, slug="nvidia_h300", num_sms=160)
    make_database(environment["env"], new, make_entry(make_key()))
    db.reload()
    assert resolve_gpu("NVIDIA H300") == ("nvidia_h300",) and known_device("nvidia_h300") == new


def test_gpu_data_is_consistent() -> None:
    values = json.loads((FOLDER / "gpus.json").read_text())
    assert {slug for slugs in values["aliases"].values() for slug in slugs} == set(values["gpus"])
    assert not set(values["aliases"]) & set(values["gpus"])
    for slug in values["gpus"]:
        device = known_device(slug)
        assert device.kind == "cuda" and device.arch == f"sm_{device.sm}" + ("a" if device.sm >= 90 else "")


def test_provenance_is_plain_data() -> None:
    found = db.provenance()
    assert {"date", "python", "torch"} <= found.keys() and found["date"].endswith("+00:00")
    assert all(isinstance(value, str) for value in found.values())


def test_the_user_directory_without_platformdirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that only call have no such package: the folder is the same."""
    pytest.importorskip("platformdirs")
    for data in ("", "/somewhere/data"):
        monkeypatch.setenv("XDG_DATA_HOME", data)
        with monkeypatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda name: None)
            found = db._user_directory()
        assert sys.platform != "linux" or found == db._user_directory()
