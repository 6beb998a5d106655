"""The trial journal: nothing finished is lost or mixed up, whatever kills whom while writing."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_tl.errors import DatabaseError, InputError, KdaTlWarning
from kda_tl.tune.journal import STATUSES, Journal, Outcome, Trial


def make_trial(number: int = 0, **changes: Any) -> Trial:
    values = {"study": "s", "config": {"BV": number, "order": "rows"}, "status": "ok", "median_us": 0.1 + number}
    return Trial(**{**values, **changes})


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "new" / "trials.jsonl")


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_trials_come_back_as_written(journal: Journal) -> None:
    assert journal.trials() == []
    written = [
        make_trial(samples_us=[0.1, 1 / 3, 1e-7], check={"max_rel_err": 0.003, "n": 3}, extra={"clocks": [1, 2]}),
        make_trial(1, status="wrong", median_us=None, reason="o differs: ü\n2nd line"),
        make_trial(2, status="slow", median_us=12.0, study="other"),
    ]
    for trial in written:
        journal.append(trial)
    assert journal.trials() == written
    assert journal.trials("other") == written[2:]
    assert all(trial.date for trial in written)


def test_non_finite_values_stay_strict_json_and_come_back(journal: Journal) -> None:
    errors = {"nan": math.nan, "all": [math.inf, {"low": -math.inf}]}
    journal.append(make_trial(status="wrong", median_us=None, check=errors, samples_us=[math.inf, 1.0]))
    json.loads(journal.path.read_text(), parse_constant=refuse)
    (trial,) = journal.trials()
    assert math.isnan(trial.check["nan"])
    assert trial.check["all"] == [math.inf, {"low": -math.inf}]
    assert trial.samples_us == (math.inf, 1.0)


def test_values_that_json_does_not_know_do_not_lose_the_measurement(journal: Journal) -> None:
    journal.append(make_trial(check={"error": torch.tensor(0.5), "path": Path("x")}))
    assert journal.trials()[0].check == {"error": 0.5, "path": "x"}


@pytest.mark.parametrize("median_us", [None, math.nan, math.inf, 0.0, -1.0])
def test_ok_needs_a_positive_finite_median(median_us: float | None) -> None:
    with pytest.raises(InputError, match="median_us"):
        Outcome(status="ok", median_us=median_us)
    for status in set(STATUSES) - {"ok"}:
        Outcome(status=status)


def test_unknown_status_is_refused() -> None:
    with pytest.raises(InputError, match="fast"):
        Outcome(status="fast", median_us=1.0)


@pytest.mark.filterwarnings("ignore::kda_tl.errors.KdaTlWarning")
def test_a_line_torn_anywhere_costs_only_itself(journal: Journal) -> None:
    for number in range(3):
        journal.append(make_trial(number, reason="ü" * number))
    whole = journal.path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(whole)):
        journal.path.write_bytes(whole[:cut])
        kept = [0, 1, 2] if cut == len(whole) - 1 else [0, 1]
        assert [t.config["BV"] for t in journal.trials()] == kept, f"cut at byte {cut - start}"
        journal.append(make_trial(9))
        assert [t.config["BV"] for t in journal.trials()] == [*kept, 9], f"cut at byte {cut - start}"


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"schema": "kda_tl.trial/2", "study": "s", "config": {}, "status": "ok", "median_us": 1.0}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": {}, "status": "ok"}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": {}}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": [], "status": "crash"}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": {}, "status": "ok", "median_us": "x"}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": {}, "status": "crash", "samples_us": 3}',
        b'{"schema": "kda_tl.trial/1", "study": "s", "config": {}, "status": []}',
    ],
)
def test_unreadable_lines_are_skipped_with_a_warning(journal: Journal, line: bytes) -> None:
    journal.append(make_trial(0))
    with journal.path.open("ab") as file:
        file.write(line + b"\n")
    journal.append(make_trial(1))
    with pytest.warns(KdaTlWarning, match=r"trials.jsonl: ignored 1 unreadable .* line 2"):
        assert [t.config["BV"] for t in journal.trials()] == [0, 1]


def test_keys_of_a_later_version_are_ignored(journal: Journal) -> None:
    journal.append(make_trial())
    record = json.loads(journal.path.read_text())
    journal.path.write_text(json.dumps({**record, "new_key": 1}) + "\n")
    assert journal.trials()[0].config == record["config"]


def test_concurrent_appenders_do_not_mix_lines(journal: Journal) -> None:
    def append_many(writer: int) -> None:
        for number in range(25):
            journal.append(make_trial(number, study=f"w{writer}", samples_us=[float(writer)] * 4000))

    context = multiprocessing.get_context("fork")  # spawned ones would spend their time importing torch
    writers = [context.Process(target=append_many, args=(w,)) for w in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
        assert process.exitcode == 0
    for writer in range(4):
        trials = journal.trials(f"w{writer}")
        assert [t.config["BV"] for t in trials] == list(range(25))
        assert all(t.samples_us == (float(writer),) * 4000 for t in trials)


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=str(tmp_path)):
        Journal(tmp_path).trials()
    (tmp_path / "file").write_text("")
    with pytest.raises(DatabaseError, match="cannot write the trial journal"):
        Journal(tmp_path / "file" / "trials.jsonl").append(make_trial())


def test_a_full_disk_is_an_error(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with monkeypatch.context() as patch, pytest.raises(DatabaseError, match=r"cannot write .*only 10 of \d+ bytes fit"):
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:10]))
        journal.append(make_trial())
    with monkeypatch.context() as patch, pytest.raises(DatabaseError, match=r"cannot write .*\(No space left"):
        patch.setattr(os, "write", refuse_space)
        journal.append(make_trial())


def refuse_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_journal_is_tried_before_it_is_needed(journal: Journal, tmp_path: Path) -> None:
    journal.require_writable()
    assert journal.trials() == []
    journal.append(make_trial())
    journal.path.write_bytes(journal.path.read_bytes()[:-1])  # torn: to be ended by the next line, not by a try
    torn = journal.path.read_bytes()
    journal.require_writable()
    assert journal.path.read_bytes() == torn
    (tmp_path / "file").write_text("")  # tests may run as root, whom permissions do not stop
    with pytest.raises(DatabaseError, match="cannot write the trial journal .*pass another folder"):
        Journal(tmp_path / "file" / "trials.jsonl").require_writable()
