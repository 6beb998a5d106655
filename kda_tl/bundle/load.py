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

    def link(self, entry: Entry) -> Callable[..., Any]:
        """A kernel's host function. Raises BundleError if the binary is not the one that the manifest names."""
        path = self.folder / entry.binary
        if path.name != entry.binary:
            raise BundleError(f"{self.folder}: {entry.binary!r} is no file name: make the bundle anew.")
        try:
            content = read_regular(path, MAX_BINARY_BYTES)
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror or error}): make the bundle anew.") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise BundleError(f"{path} is not the file that its manifest names: make the bundle anew.")
        import tvm_ffi

        function: Callable[..., Any] = tvm_ffi.load_module(str(path))["main"]
        return function
