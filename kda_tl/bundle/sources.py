"""Which bundles serve the calls of this process, first in rank first.

Those of :func:`use_kernels`, the folders of ``$KDA_TL_KERNELS``, and the bundle inside the wheel. What a bundle cannot
serve, the next one may; a sentence says once why it was passed over.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from kda_tl.bundle.load import Bundle
from kda_tl.bundle.manifest import Entry
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import BundleError, KdaTlWarning

ENVIRONMENT = "KDA_TL_KERNELS"
PACKAGED = "kernels"  # folder in the package that wheels have: a bundle an architecture

_loading = threading.Lock()
_named: tuple[Bundle, ...] = ()  # by use_kernels


def use_kernels(folder: str | os.PathLike[str]) -> None:
    """Has this process look for kernels in a bundle before all other places: to be called before the first call.

    Args:
        folder: as ``kda-tl compile --out`` made it.

    Raises:
        BundleError: it is no bundle that can be used.
    """
    global _named
    bundle = Bundle(Path(folder))
    with _loading:
        _named = (bundle, *(other for other in _named if other.folder != bundle.folder))


def bundles() -> tuple[Bundle, ...]:
    """Those that are asked for kernels, in order."""
    return _named + _found()


@functools.cache
def _found() -> tuple[Bundle, ...]:
    """Bundles of the environment and of the wheel, read once a process; what cannot be used is told and left out."""
    folders = [Path(folder) for folder in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if folder]
    packaged = importlib.resources.files("kda_tl").joinpath(PACKAGED)
    if isinstance(packaged, Path) and packaged.is_dir():  # libraries can only be loaded from files
        folders += sorted(folder for folder in packaged.iterdir() if folder.is_dir())
    found = []
    for folder in folders:
        try:
            found.append(Bundle(folder))
        except BundleError as error:
            warn(str(error))
    return tuple(found)


def find_binaries(stage: Stage, case: Case, config: Config) -> Iterator[tuple[Path, Entry]]:
    """Libraries of bundles that hold the kernel of a stage, checked, and their entries, the first in rank first.

    ``case`` is as :meth:`Stage.specialise` makes it. A binary that is not the one of its manifest is told once, and
    passed over.
    """
    for bundle in bundles():
        entry = bundle.find(stage, case, config)
        if entry is None:
            if bundle.folder.parent.name != PACKAGED and (reason := bundle.explain_miss(stage, case)):
                warn(reason)
            continue
        try:
            yield bundle.check(entry), entry
        except BundleError as error:
            warn(str(error))


def find_entry(stage: Stage, case: Case, config: Config) -> Entry | None:
    """What the first bundle that has the kernel says of it; its binary is not read."""
    return next((entry for bundle in bundles() if (entry := bundle.find(stage, case, config))), None)


def holds(stage: Stage, case: Case, config: Config) -> bool:
    """Whether a bundle says that it has the kernel; its binary is not read."""
    return find_entry(stage, case, config) is not None


@functools.cache
def warn(sentence: str) -> None:
    """Tells why a bundle was passed over, once."""
    warnings.warn(sentence, KdaTlWarning, stacklevel=2)
