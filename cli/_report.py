"""What ``kda-tl bench`` writes as JSON: everything that was measured, and read back to be shown again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kda_tl.cli._console import one_line
from kda_tl.cli._floor import Ceilings, Row
from kda_tl.cli._timing import CallRow, Result
from kda_tl.errors import InputError

_PARSERS: dict[str, Callable[[Any], Any]] = {"str": str, "int": int, "float": float}  # float: "nan" is a string in JSON


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of ``kda-tl bench``; its fields are those of the JSON.

    Attributes:
        environment: the device, its state, the date and the versions of what was compared.
        ceilings: what the device can move and compute.
        workloads: what was measured of each.
    """

    environment: Mapping[str, Any]
    ceilings: Ceilings
    workloads: tuple[Result, ...]


def read_report(file: str) -> Report:
    """Reads what ``kda-tl bench --json FILE`` wrote.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(Path(file).read_text(encoding="utf-8"))
        results = tuple(_read_result(result) for result in values["workloads"])
        if not results or not all(result.calls for result in results):
            raise ValueError("no call was measured")
        if len({result.workload for result in results}) < len(results):
            raise ValueError("a workload is there twice")
        environment = {"kind": values["environment"]["kind"], **values["environment"]}  # tables need the kind
        return Report(environment=environment, ceilings=_read_record(Ceilings, values["ceilings"]), workloads=results)
    except OSError as error:
        why = f"cannot read {file} ({error.strerror or error})"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        lacks = isinstance(error, KeyError)
        why = f"{file} is not what bench writes ({'it lacks ' if lacks else ''}{one_line(error)})"
    raise InputError(f"{why}: pass --from a file that `kda-tl bench --json FILE` wrote.")


def _read_result(values: Mapping[str, Any]) -> Result:
    stages = tuple(_read_record(Row, row) for row in values["stages"])
    calls = tuple(_read_record(CallRow, row) for row in values["calls"])
    return _read_record(Result, {**values, "stages": stages, "calls": calls})


def _read_record(kind: Any, values: Mapping[str, Any]) -> Any:
    """A record from its fields; those that it does not know are left."""
    return kind(**{field.name: _read_field(str(field.type), values[field.name]) for field in fields(kind)})


def _read_field(kind: str, value: Any) -> Any:
    kind, _, optional = kind.partition(" | ")
    if value is None and optional:
        return None
    return _PARSERS.get(kind, lambda kept: kept)(value)


def check_file(option: str, given: str) -> Path:
    """The file to write, tried now: better told before the measuring than after.

    Raises:
        InputError: it cannot be written.
    """
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
