"""TileLang, imported when a kernel is needed, and the folder in which it keeps kernels.

TileLang 0.1.15 makes that folder when it is imported and fails if it cannot. Kernels are then kept in a temporary
folder, which the processes that this one starts share, and which goes when this one ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
import warnings
from typing import Any

from kda_tl.device import Device, find_compiler
from kda_tl.errors import CompileError, KdaTlWarning
from kda_tl.packages import describe_failure

CACHE_VARIABLE = "TILELANG_CACHE_DIR"
_refused = ""


def import_tilelang() -> None:
    """Imports TileLang.

    Raises:
        CompileError: it is missing or broken; the message says what to install.
    """
    failure = _try_tilelang()
    if failure is not None:
        raise CompileError(f"{describe_failure('tilelang', failure)}; `kda-tl doctor` says more.") from failure


@functools.cache
def _try_tilelang() -> Exception | None:
    """What its import raised: tried once, since what it loaded before it failed cannot be loaded twice."""
    ensure_cache()
    try:
        import tilelang  # noqa: F401
    except Exception as error:  # a broken package raises what it likes
        return error
    return None


def can_import_tilelang() -> bool:
    """Whether TileLang is there and works."""
    return _try_tilelang() is None


def explain_missing(device: Device) -> str:
    """Why kernels cannot be built for a device where they cannot, and what to do, without a full stop."""
    if find_compiler(device) is not None and (failure := _try_tilelang()) is not None:
        return describe_failure("tilelang", failure)
    what = "nvcc" if device.kind == "cuda" else "a C++ compiler (g++ or clang++)"
    return f"no compiler found: install {what}"


def cache_directory() -> str:
    """Where TileLang keeps kernels."""
    return os.environ.get(CACHE_VARIABLE, os.path.expanduser("~/.tilelang/cache"))


def cache_refusal() -> str:
    """Which folder for kernels could not be written, and why; empty if all is well."""
    return _refused


def ensure_cache() -> None:
    """Sees to it that TileLang's folder can be written: if need be by another one, with a warning."""
    directory = cache_directory()
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        replace_cache(error)


def is_of_cache(error: OSError) -> bool:
    """Whether an error is about TileLang's folder: one that turned read-only, or is full, after it was imported."""
    directory, refused = cache_directory(), str(error.filename)
    return refused.startswith(directory) or directory.startswith(refused)  # the folder above may be the one that went


@functools.cache
def _warn_not_kept(directory: str) -> None:
    text = f"kernels cannot be kept in {directory} (is its disk full?), so every process compiles them anew"
    warnings.warn(f"{text}: set {CACHE_VARIABLE} to a directory with room.", KdaTlWarning, stacklevel=3)


def warn_if_not_kept(jit: Any) -> None:
    """Warns, once a folder, if TileLang could not write a kernel that it compiled: it only logs that."""
    path = getattr(jit, "_tilelang_cache_path", None)
    if path is not None and not os.path.isdir(path):
        _warn_not_kept(cache_directory())


def replace_cache(error: OSError) -> None:
    """Gives TileLang a temporary folder for kernels, in this process and in those that it starts.

    Args:
        error: what its own folder was refused with.

    Raises:
        CompileError: no temporary folder can be made either.
    """
    global _refused
    reason = f"{cache_directory()} ({error.strerror or error})"
    try:
        folder = tempfile.mkdtemp(prefix="kda_tl-kernels-")
    except OSError as second:
        raise CompileError(
            f"kernels cannot be kept in {reason}, nor in a temporary folder ({second.strerror or second}): set "
            f"{CACHE_VARIABLE} to a directory you may write."
        ) from error
    _refused = reason
    os.environ[CACHE_VARIABLE] = folder
    if "tilelang.cache.kernel_cache" in sys.modules:  # it reads the variable for each kernel, but makes folders once
        sys.modules["tilelang.cache.kernel_cache"].KernelCache._create_dirs()
    atexit.register(_remove, folder, os.getpid())
    warnings.warn(
        f"kernels cannot be kept in {reason}, so every process compiles them anew: set {CACHE_VARIABLE} to a directory "
        "you may write.",
        KdaTlWarning,
        stacklevel=2,
    )


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
