"""The tuning database: where plans come from, and how new ones are written. Schema: ``tuning_db/README.md``.

Sources, first in rank first: the ``with use(...)`` overlay, ``$KDA_TL_DB``, the user's database, the packaged one.
"""

import contextlib
import functools
import importlib.resources
import importlib.util
import json
import os
import platform
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_tl.core.device import Device
from kda_tl.core.packages import importing
from kda_tl.database.file import Document, Gpu, NewerSchemaError, move_aside, read_key, write_atomically
from kda_tl.database.lookup import Database, Hit, iter_hits, read_document
from kda_tl.database.records import Entry, Key
from kda_tl.database.staleness import stale_stages
from kda_tl.database.validation import validate
from kda_tl.errors import DatabaseError, KdaTlWarning

__all__ = ["Database", "Entry", "Hit", "Key", "iter_hits", "stale_stages", "validate"]  # passed on, beside its own

ENVIRONMENT = "KDA_TL_DB"
LOCK_TIMEOUT_S = 60.0

_overlays: ContextVar[tuple[Database, ...]] = ContextVar("kda_tl_overlays", default=())
_loading = threading.Lock()
_loaded: tuple[Database, ...] | None = None


def sources() -> tuple[Database, ...]:
    """The databases to ask, first in rank first.

    The same tuple while nothing changed, and databases compare by identity: it can be part of a cache's key. Files
    and the environment are read at the first call and by :func:`reload`.
    """
    loaded = _loaded
    if loaded is None:
        with _loading:
            loaded = _loaded or _load_sources()
    overlays = _overlays.get()
    return _join(overlays, loaded) if overlays else loaded


def reload() -> tuple[Database, ...]:
    """Reads the environment and all files again, as after :func:`store`; overlays stay as they are."""
    with _loading:
        _load_sources()
    return sources()


@contextlib.contextmanager
def use(database: Database | str | os.PathLike[str]) -> Iterator[Database]:
    """Puts a database before all others inside a ``with`` block, in this thread or task; blocks nest.

    Args:
        database: a loaded database, or a directory to load.

    Raises:
        DatabaseError: the path is not a directory.
    """
    if not isinstance(database, Database):
        if not os.path.isdir(database):
            raise DatabaseError(f"{os.fspath(database)} is not a directory: pass a database's directory to use().")
        database = Database.load(database, "overlay")
    token = _overlays.set((database, *_overlays.get()))
    try:
        yield database
    finally:
        _overlays.reset(token)


def writable_directory() -> Path:
    """Where tuning results are written: ``$KDA_TL_DB``, else the user's database. It need not exist yet."""
    return Path(os.environ.get(ENVIRONMENT) or _user_directory())


def _user_directory() -> Path:
    if importlib.util.find_spec("platformdirs") is None:  # calls that bundles serve do without: what it says on Linux
        return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "kda_tl" / "tuning_db"
    with importing("platformdirs"):
        import platformdirs

    return Path(platformdirs.user_data_dir("kda_tl", appauthor=False)) / "tuning_db"


def _may_exist(directory: Path) -> bool:
    """Whether a directory is there, or nobody can tell: loading it then says why."""
    try:
        return directory.is_dir()
    except OSError:
        return True


def _load_sources() -> tuple[Database, ...]:
    global _loaded
    found = []
    if path := os.environ.get(ENVIRONMENT):
        found.append(Database.load(path, f"${ENVIRONMENT}"))
    if _may_exist(user := _user_directory()):
        found.append(Database.load(user, "user"))
    found.append(Database.load(importlib.resources.files("kda_tl.tuning_db"), "packaged"))
    _loaded = tuple(found)
    return _loaded


@functools.lru_cache(maxsize=16)
def _join(overlays: tuple[Database, ...], loaded: tuple[Database, ...]) -> tuple[Database, ...]:
    return overlays + loaded


def store(
    directory: str | os.PathLike[str], device: Device, operator: str, direction: str, entries: Iterable[Entry]
) -> Path:
    """Merges entries into ``<directory>/<slug>/<operator>_<direction>.json``; an entry of the same key is replaced.

    Locked and atomic: writers at once lose nothing, a killed one leaves the old file. Entries that this version does
    not understand are kept as they are. Call :func:`reload` to serve what was written in this process.

    Returns the file. Raises DatabaseError if the directory cannot be written, an entry is not valid, or the file there
    is of a newer schema or of another GPU.
    """
    gpu = Gpu.of(device)
    new = {entry.key: _as_stored(entry) for entry in entries}
    root = Path(directory)
    path = root / gpu.slug / f"{operator}_{direction}.json"
    with _locked(root):
        kept = [values for values in _read_for_merge(root, path, gpu) if read_key(values) not in new]
        document = Document(gpu=gpu, operator=operator, direction=direction, entries=[*kept, *new.values()])
        write_atomically(path, document.format())
    return path


def export(src_dir: str | os.PathLike[str], dest_dir: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Merges all files of one database into another directory, as from the user's into ``tuning_db/``.

    Returns the files written. Raises DatabaseError as :func:`store` does, or if there is nothing to export.
    """
    database = Database.load(src_dir, "exported")
    if not database.files:
        raise DatabaseError(f"{os.fspath(src_dir)} holds no tuning records: pass a directory that `kda-tl tune` wrote.")
    return tuple(
        store(dest_dir, file.gpu.as_device(), file.operator, file.direction, file.entries.values())
        for file in database.files.values()
    )


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock and turns what the file system refuses into a sentence."""
    with importing("filelock"):
        from filelock import FileLock, Timeout

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock", timeout=LOCK_TIMEOUT_S):
            yield
    except Timeout as error:
        raise DatabaseError(
            f"{directory} has been locked by another process for {LOCK_TIMEOUT_S:.0f} s: wait for it, or "
            f"{_advise(directory, 'another directory')}."
        ) from error
    except OSError as error:
        raise DatabaseError(
            f"cannot write the tuning database {directory} ({error.strerror or error}): "
            f"{_advise(directory, 'a directory you may write')}."
        ) from error


def _advise(directory: Path, wanted: str) -> str:
    """How to name another directory: by the variable if it, or its absence, names this one."""
    return f"set {ENVIRONMENT} to {wanted}" if directory == writable_directory() else f"pass {wanted}"


def _as_stored(entry: Entry) -> dict[str, Any]:
    """The stored form, after the trip through JSON that every reader will make."""
    try:
        text = json.dumps(entry.as_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DatabaseError(f"the entry for {entry.key.text} cannot be written as JSON ({error}).") from error
    return Entry.from_dict(json.loads(text), f"the entry for {entry.key.text}").as_dict()


def _read_for_merge(root: Path, path: Path, gpu: Gpu) -> list[Any]:
    """Stored entries of the file to merge into; a corrupt file is moved aside."""
    if not path.exists():
        return []
    try:
        document = read_document(path, gpu.slug)
    except NewerSchemaError as error:
        raise DatabaseError(f"{path} is not written: {error}.") from error
    except DatabaseError as error:
        if isinstance(error.__cause__, OSError):  # nothing is known to be wrong with what it holds
            raise DatabaseError(f"cannot write {path}: {error}.") from error
        aside = move_aside(path)
        warnings.warn(f"{path} is replaced: {error}. What it held is now in {aside.name}.", KdaTlWarning, stacklevel=4)
        return []
    if (document.gpu.arch, document.gpu.sms) != (gpu.arch, gpu.sms):
        raise DatabaseError(
            f"{path} holds plans for {document.gpu.arch} with {document.gpu.sms} SMs, not {gpu.arch} with {gpu.sms}: "
            f"{_advise(root, 'another directory')}."
        )
    return document.entries


def provenance() -> dict[str, str]:
    """When (UTC) and with which versions something is measured; the caller adds what needs a GPU: driver and cuda."""
    versions = {"python": platform.python_version()}
    for package in ("kda_tl", "tilelang", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **versions}
