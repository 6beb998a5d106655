"""What ``kda-tl bench`` measures, as records that are written as JSON and read back to be shown again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kda_tl.cli._console import one_line
from kda_tl.core.stage import Cost
from kda_tl.errors import InputError

OURS = "kda_tl"


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reaches in this run: bytes read and written by a copy, FLOPs of a square matmul."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str

    def roofline_us(self, cost: Cost) -> float:
        """The least time a cost can take: moving or computing, whichever is longer."""
        return max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s) * 1e6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage, timed alone with a cold cache."""

    name: str
    config: dict[str, object]
    median_us: float
    mad_us: float
    bytes: int
    flops: int
    roofline_us: float


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """A whole call, as issued from Python, as a CUDA graph, and the host's part of it; of a backward, with its forward.

    ``peak_bytes`` is what a call adds to the device's allocated memory at most, None on the CPU; ``roofline_fraction``
    is 1 where it runs as fast as the device can.
    """

    name: str
    eager_us: float
    eager_mad_us: float
    graph_us: float | None
    host_us: float
    peak_bytes: int | None
    roofline_us: float
    roofline_fraction: float
    speed: float
    difference: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that was measured of one workload."""

    workload: str
    problem: str
    plan: str
    step: str
    stages: tuple[Row, ...]
    calls: tuple[CallRow, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run: the device, its state, the date and versions of what was compared; its ceilings; each workload."""

    environment: Mapping[str, Any]
    ceilings: Ceilings
    workloads: tuple[Result, ...]


def read_report(file: str) -> Report:
    """Reads what ``kda-tl bench --json FILE`` wrote. Raises InputError if it cannot be read or holds something else."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        text = text.replace('"share_of_floor"', '"roofline_fraction"').replace(
            '"floor_us"', '"roofline_us"'
        )  # of 0.1.0
        report: Report = _read_record(Report, json.loads(text))
        if not report.workloads or not all(result.calls for result in report.workloads):
            raise ValueError("no call was measured")
        if len({result.workload for result in report.workloads}) < len(report.workloads):
            raise ValueError("a workload is there twice")
        report.environment["kind"]  # tables need it
        return report
    except OSError as error:
        why = f"cannot read {file} ({error.strerror or error})"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        lacks = isinstance(error, KeyError)
        why = f"{file} is not what bench writes ({'it lacks ' if lacks else ''}{one_line(error)})"
    raise InputError(f"{why}: pass --from a file that `kda-tl bench --json FILE` wrote.")


def _read_record(kind: Any, values: Mapping[str, Any]) -> Any:
    """A record from its fields; those that it does not know are left."""
    return kind(**{field.name: _read_field(str(field.type), values[field.name]) for field in fields(kind)})


def _read_field(kind: str, value: Any) -> Any:
    """A value of a type, named as the annotations above have it."""
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    if kind.startswith("tuple["):
        return tuple(_read_field(kind[len("tuple[") : -len(", ...]")], item) for item in value)
    records = {record.__name__: record for record in (Ceilings, Row, CallRow, Result)}
    if kind in records:
        return _read_record(records[kind], value)
    return {"str": str, "int": int, "float": float}.get(kind, lambda kept: kept)(value)  # "nan" is a string in JSON


def check_file(option: str, given: str) -> Path:
    """The file to write, tried now: better told before the measuring than after. Raises InputError if it cannot be."""
    file = Path(given)
    try:
        new = not file.exists()
        file.open("a", encoding="utf-8").close()
        if new:
            file.unlink()
    except OSError as error:
        raise unwritable(option, given, error) from error
    return file


def unwritable(option: str, file: Path | str, error: OSError) -> InputError:
    """The sentence for a file that cannot be written."""
    return InputError(f"cannot write {file} ({error.strerror or error}): pass {option} a file you may write.")
