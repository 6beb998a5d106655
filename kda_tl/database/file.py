"""One file of the tuning database: its text, read and written. Schema: ``tuning_db/README.md``."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kda_tl.core.device import Device
from kda_tl.database.records import Key, decode
from kda_tl.errors import DatabaseError

SCHEMA_NAME = "kda_tl.tuning"
SCHEMA_VERSION = 2
LINE_WIDTH = 160
MAX_FILE_BYTES = 64 * 2**20  # some 40,000 plans of 1.6 kB, and read in a second; no search ever makes as many


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The ``gpu`` block of a file: what :class:`~kda_tl.core.device.Device` knows, less what follows from it."""

    slug: str
    arch: str
    sms: int
    smem_bytes: int

    @classmethod
    def of(cls, device: Device) -> Gpu:
        """The block of a device."""
        return cls(slug=device.slug, arch=device.arch, sms=device.num_sms, smem_bytes=device.smem_bytes)

    def as_device(self) -> Device:
        """The device of a block."""
        return Device(slug=self.slug, arch=self.arch, num_sms=self.sms, smem_bytes=self.smem_bytes)


def migrate(values: Any) -> Any:
    """A file of an earlier schema in this one: entries of version 1 had no hashes of kernels. Others as they are."""
    if not isinstance(values, dict) or values.get("schema") != f"{SCHEMA_NAME}/1":
        return values
    entries = values.get("entries")
    if isinstance(entries, list):
        entries = [{"kernels": {}, **entry} if isinstance(entry, dict) else entry for entry in entries]
    return {**values, "schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}", "entries": entries}


class NewerSchemaError(DatabaseError):
    """A file was written by a later version of kda_tl."""


class Document(NamedTuple):
    """One file: its head decoded, its entries as stored, since an invalid one must not spoil the others."""

    gpu: Gpu
    operator: str
    direction: str
    entries: list[Any]

    @classmethod
    def parse(cls, text: str) -> Document:
        """Reads a file's text. Raises NewerSchemaError, or DatabaseError if it is not a file of this schema."""
        try:
            values = json.loads(text, parse_constant=_parse_finite, parse_float=_parse_finite)
        except (ValueError, RecursionError) as error:
            raise DatabaseError(f"not JSON ({error})") from error
        values = migrate(values)
        schema = values.get("schema") if isinstance(values, dict) else None
        match = re.fullmatch(re.escape(SCHEMA_NAME) + r"/(\d{1,9})", schema) if isinstance(schema, str) else None
        ours = f"{SCHEMA_NAME}/{SCHEMA_VERSION}"
        if match and int(match[1]) > SCHEMA_VERSION:
            raise NewerSchemaError(f"its schema {schema} is newer than {ours}, which this kda_tl reads: update kda_tl")
        if schema != ours:
            raise DatabaseError(f"its schema is {schema!r}, not {ours!r}")
        del values["schema"]
        found = {"direction" if name == "pass" else name: value for name, value in values.items()}
        document: Document = decode(cls, found, "file")
        return document

    def format(self) -> str:
        """The file's text: sorted keys and entries, a leaf on one line, so that a diff shows which entry changed."""
        values = {
            "schema": f"{SCHEMA_NAME}/{SCHEMA_VERSION}",
            "gpu": dict(vars(self.gpu)),
            "operator": self.operator,
            "pass": self.direction,
            "entries": sorted(self.entries, key=_sort_rank),
        }
        return _format(values) + "\n"


def read_key(entry: Any) -> Key | None:
    """The key of an entry as stored, or None if it has no valid one."""
    try:
        return Key.from_dict(entry.get("key") if isinstance(entry, dict) else None)
    except DatabaseError:
        return None


def _sort_rank(entry: Any) -> tuple[bool, Any]:
    """Keys in their own order, then whatever else a file holds, by its text."""
    key = read_key(entry)
    return (False, key) if key else (True, json.dumps(entry, sort_keys=True))


def _nests_objects(value: Any) -> bool:
    """Whether objects lie below; lists of numbers may."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(isinstance(child, dict) or _nests_objects(child) for child in children)


def _format(value: Any, indent: int = 0) -> str:
    line = json.dumps(value, sort_keys=True, allow_nan=False)
    if not _nests_objects(value) and indent + len(line) <= LINE_WIDTH:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(name)}: {_format(value[name], indent + 1)}" for name in sorted(value)]
        return "{\n" + ",\n".join(items) + "\n" + " " * indent + "}"
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + _format(item, indent + 1) for item in value) + "\n" + " " * indent + "]"
    return line


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or a crash at any moment, sees the old text or the new one.

    The caller holds the lock of the directory. So the temporary file has a fixed name: the next writer overwrites what
    a killed one left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a FIFO of that name would hold the writer
    with open(temporary, "x", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else a power cut may undo the rename
    finally:
        os.close(folder)


def move_aside(path: Path) -> Path:
    """Renames an unreadable file to ``<name>.corrupt-<n>``, the first n that is free."""
    n = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{n}")).exists():
        n += 1
    return path.rename(aside)
