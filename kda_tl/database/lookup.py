"""Which stored plan serves a problem: a loaded database, and the order in which databases are asked.

The order (step 0, an override, and steps 4 and 5, default and reference, belong to the dispatcher):

1. the exact bucket on the same GPU, sources in order;
2. the nearest bucket on the same GPU, at most 2 doublings away on each axis;
3. the nearest bucket, as in 2 or the very one, on a GPU of the same architecture with an SM count within 20 %.

Steps are outermost: a plan measured for this bucket beats a near one of an earlier source. Within 2 and 3 all sources
compete, the shortest distance wins, and ties go to the earlier source. An entry counts by its distance, whatever won
there: that the default is best near by is worth knowing, and what won far away is not. In 2 and 3 it must be of
all pipelines, not of one tuned alone. Nothing crosses architectures: best-of-A100 ran 1.7-1.8x off the optimum on A4000
and A6000.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kda_tl.core.device import Device
from kda_tl.core.files import read_regular
from kda_tl.database.file import MAX_FILE_BYTES, Document, Gpu
from kda_tl.database.records import Entry, Key
from kda_tl.errors import DatabaseError, KdaTlWarning

if TYPE_CHECKING:
    from importlib.abc import Traversable

MAX_RATIO = 4  # between two buckets of one axis: 2 doublings
MAX_SM_DIFFERENCE = 0.2
EXACT, NEAREST, SAME_ARCH = "exact bucket", "nearest bucket", "same architecture"


@dataclass(frozen=True, kw_only=True, eq=False)
class TuningFile:
    """One file of a database: its valid entries by key, and a sentence for each entry that is not valid."""

    path: str
    gpu: Gpu
    operator: str
    direction: str
    entries: Mapping[Key, Entry]
    skipped: tuple[str, ...] = ()

    @functools.cached_property
    def by_semantic(self) -> Mapping[tuple[Any, ...], Sequence[Entry]]:
        """Entries by the fields that must match, in the order of their keys."""
        groups: dict[tuple[Any, ...], list[Entry]] = {}
        for key in sorted(self.entries):
            groups.setdefault(key.semantic, []).append(self.entries[key])
        return groups

    @classmethod
    def read(cls, file: Path | Traversable, folder: str) -> TuningFile:
        """Reads a file from the folder of a GPU's slug. Raises DatabaseError if it cannot be used as a whole."""
        document = read_document(file, folder)
        entries, skipped = {}, []
        for i, values in enumerate(document.entries):
            try:
                entry = Entry.from_dict(values, f"entries[{i}]")
            except DatabaseError as error:
                skipped.append(str(error))
            else:
                entries[entry.key] = entry
        return cls(path=str(file), skipped=tuple(skipped), **document._asdict() | {"entries": entries})


@dataclass(frozen=True, kw_only=True, eq=False)
class Database:
    """The tuning files under one directory, read once and never written; compared by identity."""

    name: str  # what it is called in reasons: "overlay", "$KDA_TL_DB", "user", "packaged"
    path: str
    files: Mapping[tuple[str, str, str], TuningFile] = field(default_factory=dict)  # by (slug, operator, direction)
    skipped: tuple[str, ...] = ()  # a sentence for each file or entry that was not usable

    @classmethod
    def load(cls, path: str | os.PathLike[str] | Traversable, name: str) -> Database:
        """Reads ``<path>/<slug>/<operator>_<direction>.json``.

        What cannot be used is warned of once and left out, so that the next source serves; nothing is raised.
        """
        root = Path(path) if isinstance(path, (str, os.PathLike)) else path
        files: dict[tuple[str, str, str], TuningFile] = {}
        skipped: list[str] = []
        for file, folder in _find_files(root, skipped):
            try:
                read = TuningFile.read(file, folder)
            except DatabaseError as error:
                skipped.append(f"{file} is not used: {error}")
                continue
            files[read.gpu.slug, read.operator, read.direction] = read
            if read.skipped:
                total = len(read.skipped) + len(read.entries)
                skipped.append(f"{file}: {len(read.skipped)} of {total} entries are not used: {read.skipped[0]}")
        for sentence in skipped:
            warnings.warn(f"{name} tuning database: {sentence}. The next source serves.", KdaTlWarning, stacklevel=2)
        return cls(name=name, path=str(root), files=files, skipped=tuple(skipped))


def _find_files(root: Path | Traversable, skipped: list[str]) -> Iterator[tuple[Path | Traversable, str]]:
    """JSON files one folder below the root, in a fixed order."""
    try:
        folders = sorted((item for item in root.iterdir() if item.is_dir()), key=lambda item: item.name)
        found = [(file, folder.name) for folder in folders for file in folder.iterdir()]
    except OSError as error:
        skipped.append(f"{root} cannot be listed ({error.strerror or error})")
        return
    for file, folder_name in sorted(found, key=lambda pair: (pair[1], pair[0].name)):
        if file.name.endswith(".json") and not file.name.startswith("."):
            yield file, folder_name


def read_document(file: Path | Traversable, folder: str) -> Document:
    """Reads one file. Raises DatabaseError if it cannot be read or understood, or belongs elsewhere."""
    try:
        document = Document.parse(read_regular(file, MAX_FILE_BYTES).decode("utf-8"))
    except OSError as error:
        raise DatabaseError(f"it cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DatabaseError("it is not UTF-8 text") from error
    place = f"{document.gpu.slug}/{document.operator}_{document.direction}.json"
    if place != f"{folder}/{file.name}":
        raise DatabaseError(f"its content belongs in {place}")
    return document


class Hit(NamedTuple):
    """An entry that may serve a problem, and where it was found."""

    step: str  # "exact bucket", "nearest bucket" or "same architecture"
    database: Database
    file: TuningFile
    entry: Entry
    distance: float  # :func:`measure_distance` of its key from the one that was looked up
    key: Key  # that was looked up, for this device
    device: Device

    @property
    def reason(self) -> str:
        """A sentence for people; made when asked for, since the call path does not ask."""
        gpu = self.file.gpu
        text = f"tuned on {gpu.slug}"
        if gpu.slug != self.device.slug:
            text += f" ({gpu.arch}, {gpu.sms} SMs; this {self.device.slug} has {self.device.num_sms})"
        buckets = zip(("heads", "tokens", "longest"), self.entry.key.buckets, self.key.buckets, strict=True)
        axes = [f"{name} {theirs} instead of {ours}" for name, theirs, ours in buckets if theirs != ours]
        text += " for " + (", ".join(axes) or "this bucket")
        ratio, only = self.entry.vs_default.ratio, self.entry.provenance.get("pipeline")
        default = "default" if only is None else f"default of {only}"
        return f"{self.step} in the {self.database.name} database: {text}; {ratio:.2f}x the {default} there."


def iter_hits(
    key: Key,
    device: Device,
    databases: Sequence[Database],
    *,
    operator: str,
    direction: str,
    numerics: str | None = None,
) -> Iterator[Hit]:
    """Entries that may serve a key, best first, so that a caller who rejects a plan can take the next.

    The databases come first in rank first. With ``numerics`` given, only entries of that numerics class count.
    """
    name = (device.slug, operator, direction)
    own = [(db, db.files[name]) for db in databases if name in db.files]
    own = [(db, file) for db, file in own if file.gpu.arch == device.arch]
    for db, file in own:
        entry = file.entries.get(key)
        if entry is not None and numerics in (None, entry.numerics):
            yield Hit(EXACT, db, file, entry, 0.0, key, device)
    for distance, db, file, entry in _nearest(own, key, device, numerics):
        if entry.key != key:  # as many states by other heads are no distance apart
            yield Hit(NEAREST, db, file, entry, distance, key, device)
    others = [
        (db, file)
        for db in databases
        for file in db.files.values()
        if (file.operator, file.direction) == (operator, direction)
        and (file.gpu.slug != device.slug and file.gpu.arch == device.arch)
        and abs(file.gpu.sms - device.num_sms) <= MAX_SM_DIFFERENCE * device.num_sms
    ]
    for distance, db, file, entry in _nearest(others, key, device, numerics):
        yield Hit(SAME_ARCH, db, file, entry, distance, key, device)


def measure_distance(a: Key, b: Key) -> float | None:
    """Doublings between two keys, summed over their extents; None if one of these is over the cap.

    Extents are heads, tokens and longest; of steps, whose states all run side by side, sequences times heads and the
    tokens of one.
    """
    if a.semantic != b.semantic:
        return None
    larger = smaller = 1  # products of integers, so that equal distances are equal to the last bit
    for x, y in zip(a.extents, b.extents, strict=True):
        low, high = (x, y) if x < y else (y, x)
        if high > MAX_RATIO * low:
            return None
        larger, smaller = larger * high, smaller * low
    return math.log2(larger / smaller)


def _nearest(
    files: Iterable[tuple[Database, TuningFile]], key: Key, device: Device, numerics: str | None
) -> list[tuple[float, Database, TuningFile, Entry]]:
    found = [
        (distance, db, file, entry)
        for db, file in files
        for entry in file.by_semantic.get(key.semantic, ())
        if (distance := measure_distance(key, entry.key)) is not None
        and "pipeline" not in entry.provenance  # others were not tried, the ratio says nothing of them
        and numerics in (None, entry.numerics)
    ]
    # sorted() is stable: ties keep the order of the sources.
    return sorted(found, key=lambda hit: (hit[0], abs(hit[2].gpu.sms - device.num_sms)))
