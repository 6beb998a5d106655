"""Kernels that this user's processes compiled: a library and its entry each, one compilation for all who wait.

They lie in TileLang's folder for kernels (``$TILELANG_CACHE_DIR``), and are loaded as those of bundles are, without
TileLang. A name holds all that decides a kernel, the templates' sources among them, so versions do not meet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from kda_tl import templates
from kda_tl.bundle.load import check_binary
from kda_tl.bundle.manifest import MAX_BYTES, Entry, digest, specialisation
from kda_tl.core.files import read_regular
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.core.toolchain import own_folder, tilelang_version
from kda_tl.errors import BundleError

LOCK_TIMEOUT_S = 600.0  # the longest kernel takes a minute on a busy core


def folder() -> Path:
    """Where they lie."""
    return Path(own_folder())


def name_of(stage: Stage, case: Case, config: Config) -> str:
    """A kernel's name there, without an ending."""
    built_for = digest(stage.name, specialisation(stage, case, config))
    text = f"{built_for} {templates.fingerprint(stage.name)} {tilelang_version()}"
    return f"{stage.name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def find(name: str) -> tuple[Path, Entry] | None:
    """The library of a kernel that was compiled here before, and its entry; what is damaged is not there."""
    path = folder() / f"{name}.so"
    try:
        entry = Entry(**json.loads(read_regular(path.with_suffix(".json"), MAX_BYTES)))
        check_binary(path, entry)
    except (OSError, ValueError, TypeError, BundleError):
        return None
    return path, entry


def add(name: str, content: bytes, entry: Entry) -> Path:
    """Keeps a kernel; nothing is there by halves. Raises OSError."""
    path = folder() / f"{name}.so"
    for file, data in ((path, content), (path.with_suffix(".json"), json.dumps(asdict(entry)).encode())):
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            part.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            error.filename = str(file)  # of a full disk Python does not say
            raise
    return path


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Held by the one process that compiles a kernel. Raises OSError if the folder cannot be written."""
    from filelock import FileLock, Timeout

    folder().mkdir(parents=True, exist_ok=True)
    held = FileLock(folder() / f"{name}.lock")
    try:
        held.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:  # whoever holds it hangs: compiling twice is better than waiting for ever
        yield
        return
    try:
        yield
    finally:
        held.release()
