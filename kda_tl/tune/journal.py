"""Trial journal: one JSON line for every finished measurement, so that no measurement is ever made twice.

The journal is read by the tuner (resume, replay) and by reports, never on the call path. Nothing in a file is
rewritten: a line is appended in one write under a lock, then synced, so a killed process costs at most the line it was
writing, and a torn line costs only itself.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kda_tl.core.files import open_regular, read_regular
from kda_tl.core.packages import importing
from kda_tl.errors import DatabaseError, InputError, KdaTlWarning

SCHEMA = "kda_tl.trial/1"
STATUSES = ("ok", "rejected", "compile", "wrong", "crash", "timeout", "slow")
_LOCK_TIMEOUT_S = 60.0
_MAX_BYTES = 2**30  # some 500,000 trials of 2 kB, months of measuring; a reader holds all of it in memory
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What measuring one config gave.

    The status is "ok"; or "rejected" (a constraint), "compile", "wrong" (disagrees with the reference), "crash",
    "timeout", or "slow" (dropped after a few repetitions, so never a winner). Raises InputError if it is unknown, or
    "ok" without a positive, finite median.
    """

    status: str
    reason: str = ""  # why the status is not "ok", one sentence
    median_us: float | None = None  # what the search minimises; needed for "ok", kept for "slow"
    samples_us: Sequence[float] = ()  # raw repetitions
    check: Mapping[str, Any] = field(default_factory=dict)  # against the reference: max_rel_err and tolerance
    extra: Mapping[str, Any] = field(default_factory=dict)  # anything a report may want: bytes, rounds of a contest

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise InputError(f"status must be one of {', '.join(STATUSES)}, got {self.status!r}.")
        median = self.median_us
        if not (self.status != "ok" if median is None else math.isfinite(median) and median > 0):
            raise InputError(f"median_us of an outcome {self.status!r} must be positive and finite, got {median!r}.")
        object.__setattr__(self, "samples_us", tuple(self.samples_us))


@dataclass(frozen=True, kw_only=True)
class Trial(Outcome):
    """One finished measurement, as stored: an outcome, and of what."""

    study: str  # what was searched: GPU slug, stage, case key and template hash, in one string
    config: Mapping[str, Any]  # field values
    date: str = ""  # when the measurement ended, UTC, ISO 8601; now, if empty
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.date:
            object.__setattr__(self, "date", datetime.now(timezone.utc).isoformat(timespec="seconds"))

    @classmethod
    def of(cls, outcome: Outcome, *, study: str, config: Mapping[str, Any]) -> Trial:
        """The record of an outcome that was just measured."""
        return cls(study=study, config=config, **{f.name: getattr(outcome, f.name) for f in fields(Outcome)})

    @property
    def outcome(self) -> Outcome:
        """The outcome alone."""
        return Outcome(**{f.name: getattr(self, f.name) for f in fields(Outcome)})

    def to_line(self) -> str:
        """The record as one line of strict JSON (non-finite floats become "nan", "inf", "-inf")."""
        return json.dumps(_encode(asdict(self)), allow_nan=False, sort_keys=True) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Trial:
        """Reads what :meth:`to_line` wrote; unknown keys are ignored. Raises ValueError if it is no such trial."""
        record = json.loads(line)
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise ValueError(f"not a {SCHEMA} record")
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        if not (isinstance(known.get("study"), str) and isinstance(known.get("config"), dict)):
            raise ValueError("study or config is missing")
        for name in ("samples_us", "check", "extra"):
            if name in known:
                known[name] = _decode(known[name])
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # A measurement is worth more than its type: scalars of torch and numpy have item(), the rest is kept as text.
    return _encode(value.item()) if hasattr(value, "item") else str(value)


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def as_key(config: Mapping[str, Any]) -> str:
    """Field values of a config as text, equal for equal configs."""
    return json.dumps(config, sort_keys=True)


class Journal:
    """A file of trials that any number of processes append to; DatabaseError if it cannot be read or written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def trials(self, study: str | None = None) -> list[Trial]:
        """Trials in the order they were appended, of one study or of all.

        A line that cannot be read (torn by a kill, or of another schema) is skipped with a warning.
        """
        try:
            lines = read_regular(self.path, _MAX_BYTES).decode(errors="replace").split("\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DatabaseError(
                f"cannot read the trial journal {self.path} ({error.strerror or error}): move it away, or pass another "
                "folder for the journal."
            ) from error
        trials, skipped = [], []
        for number, line in enumerate(lines, start=1):
            try:
                trials += [Trial.from_line(line)] if line.strip() else []
            except ValueError:  # InputError and JSONDecodeError are ValueErrors too
                skipped.append(number)
        if skipped:
            warnings.warn(
                f"{self.path}: ignored {len(skipped)} unreadable line(s), the first is line {skipped[0]} "
                f"(a killed process tore it, or another version wrote it).",
                KdaTlWarning,
                stacklevel=2,
            )
        return [trial for trial in trials if study is None or trial.study == study]

    def append(self, trial: Trial) -> None:
        """Stores a trial; when this returns, the line is on the disk."""
        self._append(trial.to_line().encode())

    def require_writable(self) -> None:
        """Makes the file if it is not there, as the first append would: better told before a search than during it."""
        self._append(b"")

    def _append(self, line: bytes) -> None:
        with importing("filelock"):
            from filelock import FileLock, Timeout

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_TIMEOUT_S):
                _append_bytes(self.path, line)
        except Timeout as error:
            raise DatabaseError(f"another process holds {error.lock_file} for over {_LOCK_TIMEOUT_S:.0f} s.") from error
        except OSError as error:
            raise DatabaseError(
                f"cannot write the trial journal {self.path} ({error.strerror or error}): pass another folder for the "
                "journal, with `kda-tl tune --journal DIR`."
            ) from error


def _append_bytes(path: Path, line: bytes) -> None:
    """Appends a line with one write; a torn last line is ended first, so that it spoils only itself."""
    descriptor = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        if line and size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes fit on the disk")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
