"""Known GPUs by name: aliases such as ``h100``, and devices that are not here, for compiling and looking up only.

The names are data: ``tuning_db/gpus.json``, and every GPU that a source of the tuning database holds records of.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping

from kda_tl.core.device import Device, cpu_device, normalise_gpu_name
from kda_tl.core.files import read_regular
from kda_tl.database.file import MAX_FILE_BYTES, Gpu
from kda_tl.database.store import sources
from kda_tl.errors import DatabaseError, InputError


def resolve_gpu(name: str) -> tuple[str, ...]:
    """Slugs that an alias (``h100``), a slug (``nvidia_h200``), a product name (``NVIDIA H200``) or ``cpu`` stands for.

    Raises InputError if no GPU of that name is known.
    """
    normalised = normalise_gpu_name(name)
    aliases, gpus = _read_packaged()
    if normalised in aliases:
        return aliases[normalised]
    if normalised == "cpu" or normalised in gpus or normalised in _tuned_gpus():
        return (normalised,)
    known = ", ".join(["cpu", *sorted(aliases)])
    slugs = ", ".join(sorted({*gpus, *_tuned_gpus()} - {"cpu"}))
    raise InputError(f"unknown GPU {name!r}: pass one of {known}, or a product among {slugs}.")


def known_device(slug: str) -> Device:
    """The device of a slug, whether or not it is here. Raises InputError if no GPU of that name is known."""
    if slug == "cpu":
        return cpu_device()
    _, gpus = _read_packaged()
    gpu = gpus.get(slug) or _tuned_gpus().get(slug)
    if gpu is None:
        products = resolve_gpu(slug)  # raises for an unknown name
        raise InputError(f"{slug!r} stands for several products: pass one of {', '.join(products)}.")
    return gpu.as_device()


def _tuned_gpus() -> Mapping[str, Gpu]:
    return {file.gpu.slug: file.gpu for database in sources() for file in database.files.values()}


@functools.cache
def _read_packaged() -> tuple[Mapping[str, tuple[str, ...]], Mapping[str, Gpu]]:
    """Aliases and GPUs of ``gpus.json``. Raises DatabaseError if it cannot be read or understood."""
    file = importlib.resources.files("kda_tl.tuning_db") / "gpus.json"
    try:
        values = json.loads(read_regular(file, MAX_FILE_BYTES))
        aliases = {alias: tuple(slugs) for alias, slugs in values["aliases"].items()}
        return aliases, {slug: Gpu(slug=slug, **block) for slug, block in values["gpus"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DatabaseError(f"the list of GPUs {file} cannot be used ({reason}): install kda_tl again.") from error
