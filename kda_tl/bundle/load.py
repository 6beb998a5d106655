"""Kernels of a bundle, checked against its manifest and linked without TileLang and without a compiler."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bundle.manifest import Entry, digest, read, specialisation
from kda_tl.core.files import read_regular
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import BundleError

MAX_BINARY_BYTES = 64 << 20


class Bundle:
    """A folder of kernels and their manifest. Raises BundleError if its manifest cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.entries = folder, read(folder)

    def find(self, stage: Stage, case: Case, config: Config) -> Entry | None:
        """The kernel that was built for this by today's templates, if there is one."""
        entry = self.entries.get(digest(stage.name, specialisation(stage, case, config)))
        return entry if entry is not None and entry.sources == templates.fingerprint(stage.name) else None

    def explain_miss(self, stage: Stage, case: Case) -> str:
        """Why none of a stage's kernels here can serve a case's device, in a sentence; empty if some can."""
        own = [entry for entry in self.entries.values() if entry.stage == stage.name]
        archs = {entry.arch for entry in own}
        if own and case.device.arch not in archs:
            return f"{self.folder} has kernels for {', '.join(sorted(archs))}, none for {case.device.arch}."
        if own and all(entry.sources != templates.fingerprint(stage.name) for entry in own):
            return f"{self.folder} was made by another kda_tl, whose {stage.name} is another: make the bundle anew."
        return ""

    def check(self, entry: Entry) -> Path:
        """The file of a kernel. Raises BundleError if it is not the one that the manifest names."""
        path = self.folder / entry.binary
        if path.name != entry.binary:
            raise BundleError(f"{self.folder}: {entry.binary!r} is no file name: make the bundle anew.")
        check_binary(path, entry)
        return path


def check_binary(path: Path, entry: Entry) -> None:
    """Raises BundleError if a file is not the one that an entry names."""
    try:
        content = read_regular(path, MAX_BINARY_BYTES)
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror or error}): make the bundle anew.") from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise BundleError(f"{path} is not the file that its manifest names: make the bundle anew.")


def link_binary(path: Path) -> Callable[..., Any]:
    """The host function of a kernel's library. Raises BundleError if the system cannot load it."""
    import tvm_ffi

    try:
        function: Callable[..., Any] = tvm_ffi.load_module(str(path))["main"]
    except Exception as error:  # tvm-ffi raises whatever the system's loader says
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise BundleError(f"{path} cannot be loaded ({last}): make the bundle anew on this system.") from error
    return function
