"""A bundle that grows: which kernels it lacks, and a manifest that names every kernel that was built so far."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from kda_tl import templates
from kda_tl.aot.plans import KernelSpec
from kda_tl.bundle.load import MAX_BINARY_BYTES
from kda_tl.bundle.manifest import NAME, Entry, digest, read, write
from kda_tl.core.files import read_regular
from kda_tl.core.packages import importing
from kda_tl.errors import BundleError, InputError
from kda_tl.runtime.nvcc import find_versions

WRITE_EVERY_S = 3.0
LOCK = ".lock"
_OURS = re.compile(r"(?:fwd|bwd|decode)_\w+-[0-9a-f]{32}\.(?:so|cu)(?:\.\d+\.part)?")


class BundleWriter:
    """A folder that becomes a bundle, or is one; a context manager that holds its lock and writes its manifest.

    ``version`` is that of kda_tl, for the manifest.

    Raises:
        InputError: the folder holds something else.
        BundleError: it cannot be written, another process writes it, or its manifest cannot be used.
    """

    def __init__(self, folder: Path, version: str) -> None:
        with importing("filelock"):
            from filelock import FileLock, Timeout

        self.folder, self.version = folder, version
        self._written = time.monotonic()
        try:
            held = {path.name for path in folder.iterdir()} - {LOCK} if folder.exists() else set[str]()
            if held and NAME not in held and not all(_OURS.fullmatch(name.removesuffix(".part")) for name in held):
                raise InputError(f"{folder} holds files, but no bundle: pass a folder that is new or empty.")
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK, timeout=0)
            self._lock.acquire()
        except NotADirectoryError as error:
            raise InputError(f"{folder} is no folder: pass another one.") from error
        except Timeout as error:
            raise BundleError(f"another process writes to {folder}: wait for it, or choose another folder.") from error
        except OSError as error:
            raise _refused(folder, error) from error
        try:
            self.entries: dict[str, Entry] = read(folder) if NAME in held else {}
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None or not issubclass(kind, BundleError):  # which says that it cannot be written
                self.save()
        finally:
            self._lock.release()

    def list_missing(self, kernels: Iterable[KernelSpec], *, keep_source: bool) -> list[KernelSpec]:
        """The kernels that are not there, or not as today's templates and compilers make them."""
        missing = []
        for kernel in kernels:
            entry = self.entries.get(kernel.digest)
            fits = entry is not None and entry.tools == find_versions(kernel.case.device)
            if not fits or judge(self.folder, self.entries[kernel.digest], keep_source=keep_source) != "ok":
                missing.append(kernel)
        return missing

    def add(self, entry: Entry) -> None:
        """Takes a kernel whose files are there; every few seconds the manifest is written."""
        self.entries[digest(entry.stage, entry.built_for)] = entry
        if time.monotonic() - self._written > WRITE_EVERY_S:
            self.save()

    def prune(self, wanted: Iterable[KernelSpec]) -> int:
        """Forgets all kernels but those that are wanted; returns how many went."""
        kept = {kernel.digest for kernel in wanted}
        gone = [key for key in self.entries if key not in kept]
        for key in gone:
            del self.entries[key]
        return len(gone)

    def save(self) -> None:
        """Writes the manifest beside its place and renames it."""
        try:
            write(self.folder, list(self.entries.values()), {"kda_tl": self.version})
        except OSError as error:
            raise _refused(self.folder, error) from error
        self._written = time.monotonic()

    def clean(self) -> None:
        """Removes the files of former kernels, and of workers that were ended: only while none is at work."""
        self.save()
        named = {name for entry in self.entries.values() for name in (entry.binary, entry.source)}
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)


def judge(folder: Path, entry: Entry, *, keep_source: bool = False) -> str:
    """``ok``, ``stale`` (the templates changed since), or what became of a kernel's files: ``missing``, ``altered``."""
    state = _judge_file(folder, entry.binary, entry.sha256)
    if state == "ok" and (keep_source or entry.source):
        short = entry.source.removesuffix(".cu").rpartition("-")[2]
        state = _judge_file(folder, entry.source, short) if entry.source else "missing"
    if state == "ok" and (entry.stage not in templates.names() or entry.sources != templates.fingerprint(entry.stage)):
        return "stale"
    return state


def _judge_file(folder: Path, name: str, digest: str) -> str:
    if Path(name).name != name:
        return "altered"
    try:
        content = read_regular(folder / name, MAX_BINARY_BYTES)
    except OSError:
        return "missing"
    found = hashlib.sha256(content).hexdigest()
    return "ok" if digest and found.startswith(digest) and len(digest) >= 32 else "altered"


def _refused(folder: Path, error: OSError) -> BundleError:
    return BundleError(f"{folder} cannot be written ({error.strerror or error}): choose another folder.")


def list_entries(folder: Path) -> Sequence[tuple[Entry, str]]:
    """The kernels of a bundle with their states, by stage. Raises BundleError if it is none."""
    entries = sorted(read(folder).values(), key=lambda e: (e.stage, e.arch, e.binary))
    return [(entry, judge(folder, entry)) for entry in entries]
