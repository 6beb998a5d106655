"""TileLang, imported when a kernel is needed, and the folder in which it keeps kernels.

TileLang 0.1.15 makes that folder when it is imported, writes there after each compilation, and fails if it cannot.
Kernels are then kept in a temporary folder, which the processes that this one starts share, and which goes when this
one ends. A folder that can only be read still serves the kernels it holds.
"""

import atexit
import contextlib
import functools
import os
import platform
import re
import shutil
import sys
import tempfile
import warnings
from importlib import metadata
from typing import Any

from kda_tl.core.device import Device, find_compiler
from kda_tl.core.packages import describe_failure
from kda_tl.errors import CompileError, KdaTlWarning

CACHE_VARIABLE = "TILELANG_CACHE_DIR"
_refused = ""


def import_tilelang() -> None:
    """Imports TileLang. Raises CompileError, which says what to install, if it is missing or broken."""
    failure = _try_tilelang()
    if failure is not None:
        raise CompileError(f"{_explain(failure)}; `kda-tl doctor` says more.") from failure


def _explain(failure: Exception) -> str:
    if isinstance(failure, OSError) and is_of_cache(failure):
        return f"TileLang cannot make its folder for kernels ({failure}): set {CACHE_VARIABLE} to one you may write"
    return describe_failure("tilelang", failure)


@functools.cache
def _try_tilelang() -> Exception | None:
    """What its import raised: tried once, since what it loaded before it failed cannot be loaded twice."""
    ensure_cache()
    try:
        import tilelang  # noqa: F401
        import z3
    except Exception as error:  # a broken package raises what it likes
        return error
    # TileLang 0.1.15 asks Z3 what it may vectorise, and wants one older than 4.15.5, whose equations of integers end
    # the process for some kernels (bwd_wy, V 144, two value heads a head of keys): Z3 solves them another way without.
    z3.set_param("lp.dio", False)
    return None


def can_import_tilelang() -> bool:
    """Whether TileLang is there and works."""
    return _try_tilelang() is None


def explain_missing(device: Device) -> str:
    """Why kernels cannot be built for a device where they cannot, and what to do, without a full stop."""
    if find_compiler(device) is not None and (failure := _try_tilelang()) is not None:
        return _explain(failure)
    what = "nvcc" if device.kind == "cuda" else "a C++ compiler (g++ or clang++)"
    return f"no compiler found: install {what}"


def cache_directory() -> str:
    """Where TileLang keeps kernels."""
    return os.environ.get(CACHE_VARIABLE, os.path.expanduser("~/.tilelang/cache"))


def cache_refusal() -> str:
    """Which folder for kernels could not be written, and why; empty if all is well."""
    return _refused


def ensure_cache() -> None:
    """Sees to it that TileLang has the folders it makes when it is imported: if need be other ones, with a warning."""
    try:
        for folder in (cache_directory(), *cache_folders()):  # an empty name is refused as TileLang does
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        replace_cache(error)


def cache_folders() -> tuple[str, str]:
    """Where TileLang 0.1.15 keeps kernels, and where it writes them first."""
    version, _, local = tilelang_version().partition("+")
    if not version:
        return cache_directory(), cache_directory()
    name = f"{version}_{re.sub('[^0-9A-Za-z]', '_', local)}" if local else version
    root = os.path.join(cache_directory(), name, f"{sys.platform}-{platform.machine()}")
    return os.path.join(root, "kernels"), os.path.join(root, ".staging")


def tilelang_version() -> str:
    """The version of TileLang that is installed; empty if none is, or not by a package manager."""
    try:
        return metadata.version("tilelang")
    except metadata.PackageNotFoundError:
        return ""


def own_folder() -> str:
    """Where kernels for CUDA are kept, as libraries that load without TileLang: beside those that TileLang keeps."""
    return os.path.join(cache_directory(), "kda_tl")


def is_of_cache(error: OSError) -> bool:
    """Whether an error is about TileLang's folder: one that turned read-only, or is full, after it was imported."""
    directory, refused = cache_directory(), str(error.filename)
    return refused.startswith(directory) or directory.startswith(refused)  # the folder above may be the one that went


@functools.cache
def _warn_not_kept(directory: str) -> None:
    text = f"kernels cannot be kept in {directory} (is its disk full?), so every process compiles its own"
    warnings.warn(f"{text}: set {CACHE_VARIABLE} to a directory with room.", KdaTlWarning, stacklevel=3)


def warn_if_not_kept(jit: Any) -> None:
    """Warns, once a folder, if TileLang could not write a kernel that it compiled: it only logs that."""
    path = getattr(jit, "_tilelang_cache_path", None)
    if path is not None and not os.path.isdir(path):
        _warn_not_kept(cache_directory())


def replace_cache(error: OSError) -> None:
    """Gives TileLang a temporary folder, in this process and in those that it starts, with the kernels of its own.

    ``error`` is what its own folder was refused with. Raises CompileError if no temporary folder can be made either.
    """
    global _refused
    reason = f"{cache_directory() or repr('')} ({error.strerror or error})"
    try:
        folder = tempfile.mkdtemp(prefix="kda_tl-kernels-")
    except OSError as second:
        raise CompileError(
            f"kernels cannot be kept in {reason}, nor in a temporary folder ({second.strerror or second}): set "
            f"{CACHE_VARIABLE} to a directory you may write."
        ) from error
    _refused = reason
    kept = cache_folders()[0], own_folder()
    os.environ[CACHE_VARIABLE] = folder  # which is read for each kernel
    kernels, staging = cache_folders()
    for made in (kernels, staging, own_folder()):
        os.makedirs(made, exist_ok=True)
    for old, new in zip(kept, (kernels, own_folder()), strict=True):
        with contextlib.suppress(OSError):
            for name in os.listdir(old):
                if not name.endswith(".lock"):  # which would be taken where nothing can be written
                    os.symlink(os.path.join(old, name), os.path.join(new, name))
    atexit.register(_remove, folder, os.getpid())
    warnings.warn(
        f"kernels cannot be kept in {reason}, so every process compiles its own: set {CACHE_VARIABLE} to a "
        "directory you may write.",
        KdaTlWarning,
        stacklevel=2,
    )


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
