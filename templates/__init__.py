"""Templates: one file a stage; the folders are the registry. The only code that imports tilelang."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.core.stage import Stage

_FROM = re.compile(rb"^[ \t]*from kda_tl\.templates\.(\w+)\.(\w+) import", re.MULTILINE)


@functools.cache
def _folders() -> dict[str, str]:
    """Folder by stage: the modules of the folders here whose names start with a pass."""
    folders = [m.name for m in pkgutil.iter_modules(__path__) if m.ispkg]
    modules = [(m.name, f) for f in folders for m in pkgutil.iter_modules([f"{__path__[0]}/{f}"])]
    return {name: f for name, f in sorted(modules) if name.startswith(("fwd_", "bwd_", "decode_"))}


def names() -> tuple[str, ...]:
    """Names of all stages."""
    return tuple(_folders())


@functools.cache
def load(name: str) -> Stage:
    """The stage of a name.

    Raises:
        InputError: no such stage; the message lists those there are.
    """
    if name not in names():
        raise InputError(f"there is no stage {name!r}: choose one of {', '.join(names())}.")
    stage: Stage = importlib.import_module(f"{__name__}.{_folders()[name]}.{name}").STAGE
    return stage


@functools.cache
def fingerprint(name: str) -> str:
    """sha256 of a stage and of the modules here that it, or one of them, imports names from: tells stale records.

    Kernels hold what they import by name. A stage that is imported whole gives its reference alone, and does not count.
    """
    from importlib.resources import files

    sources: dict[tuple[str, str], bytes] = {}
    wanted = [(_folders()[name], name)]
    for folder, module in wanted:
        if (folder, module) not in sources:
            source = sources[folder, module] = files(__name__).joinpath(folder, f"{module}.py").read_bytes()
            wanted += [(found[0].decode(), found[1].decode()) for found in _FROM.findall(source)]
    first, *others = sources.values()
    return hashlib.sha256(first + b"".join(sorted(others))).hexdigest()


def fingerprints() -> dict[str, str]:
    """:func:`fingerprint` of every stage by its name."""
    return {name: fingerprint(name) for name in names()}
