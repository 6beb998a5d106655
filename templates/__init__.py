"""Templates: one file a stage; the folder is the registry. The only code that imports tilelang."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.stage import Stage

_PRIVATE = re.compile(rb"^from kda_tl\.templates\.(_\w+) import", re.MULTILINE)


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all stages: the modules here whose names start with a pass."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__) if m.name.startswith(("fwd_", "bwd_")))


@functools.cache
def load(name: str) -> Stage:
    """The stage of a name.

    Raises:
        InputError: no such stage; the message lists those there are.
    """
    if name not in names():
        raise InputError(f"there is no stage {name!r}: choose one of {', '.join(names())}.")
    stage: Stage = importlib.import_module(f"{__name__}.{name}").STAGE
    return stage


@functools.cache
def fingerprint(name: str) -> str:
    """sha256 of a stage's source and of the private modules it is written with: tells stale tuning records."""
    from importlib.resources import files

    folder = files(__name__)
    source = folder.joinpath(f"{name}.py").read_bytes()
    digest = hashlib.sha256(source)
    for module in sorted({found.decode() for found in _PRIVATE.findall(source)}):
        digest.update(folder.joinpath(f"{module}.py").read_bytes())
    return digest.hexdigest()
