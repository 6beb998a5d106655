"""Templates: one file a stage; the folder is the registry. The only code that imports tilelang."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

from kda_tl.errors import InputError
from kda_tl.toolchain import import_tilelang

if TYPE_CHECKING:
    from kda_tl.stage import Stage

_FROM = re.compile(rb"^[ \t]*from kda_tl\.templates\.(\w+) import", re.MULTILINE)


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all stages: the modules here whose names start with a pass."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__) if m.name.startswith(("fwd_", "bwd_")))


@functools.cache
def load(name: str) -> Stage:
    """The stage of a name.

    Raises:
        InputError: no such stage; the message lists those there are.
        CompileError: TileLang is missing or broken.
    """
    if name not in names():
        raise InputError(f"there is no stage {name!r}: choose one of {', '.join(names())}.")
    import_tilelang()
    stage: Stage = importlib.import_module(f"{__name__}.{name}").STAGE
    return stage


@functools.cache
def fingerprint(name: str) -> str:
    """sha256 of a stage and of the modules here that it, or one of them, imports names from: tells stale records.

    Kernels hold what they import by name. A stage that is imported whole gives its reference alone, and does not count.
    """
    from importlib.resources import files

    folder = files(__name__)
    sources: dict[str, bytes] = {}
    wanted = [name]
    for module in wanted:
        if module not in sources:
            sources[module] = folder.joinpath(f"{module}.py").read_bytes()
            wanted += [found.decode() for found in _FROM.findall(sources[module])]
    digest = hashlib.sha256(sources.pop(name))
    for _, source in sorted(sources.items()):
        digest.update(source)
    return digest.hexdigest()


def fingerprints() -> dict[str, str]:
    """:func:`fingerprint` of every stage by its name."""
    return {name: fingerprint(name) for name in names()}
