"""Generated CUDA compiled by nvcc as TileLang does it, but for line numbers; and the versions of both."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kda_tl.core.device import Device, find_compiler
from kda_tl.core.toolchain import import_tilelang
from kda_tl.errors import CompileError

_UNKNOWN = ("tl.ptxas_register_usage_level", "tl.device_compile_flags")  # settings that change flags; no stage has any
_UNIT = re.compile(rb"[0-9a-f]{8}_9_kernel_cu_[0-9a-f]{8}")  # in the names of what one file keeps to itself
_RELEASE = re.compile(r"release [\d.]+, V([\d.]+)")


def compile_device(cuda: str, device: Device, settings: Mapping[str, Any], kind: str = "cubin") -> bytes:
    """Compiles CUDA for a device that need not be here, to a ``cubin`` or to ``ptx``. Raises CompileError."""
    import_tilelang()
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    if unknown := [name for name in _UNKNOWN if settings.get(name)]:
        raise CompileError(f"kernels with the setting {unknown[0]} cannot be built ahead of time.")
    flags = ["-O3", "-std=c++20", f"-arch={device.arch}", f"-I{TILELANG_TEMPLATE_PATH}", f"-I{CUTLASS_INCLUDE_DIR}"]
    flags += ["--use_fast_math"] if settings.get("tl.enable_fast_math") else []
    with tempfile.TemporaryDirectory(prefix="kda_tl-") as folder:
        Path(folder, "kernel.cu").write_text(cuda)
        command = [find_nvcc(device), f"--{kind}", *flags, "-o", f"kernel.{kind}", "kernel.cu"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[0] if lines else "no reason given")
            raise CompileError(f"nvcc refused a kernel for {device.arch}: {first.strip()}")
        return _UNIT.sub(_forget_unit, Path(folder, f"kernel.{kind}").read_bytes())


def _forget_unit(found: re.Match[bytes]) -> bytes:
    """The name of as many letters that stands for every file: nvcc hashes the path of the one it reads."""
    return re.sub(rb"[0-9a-f]{8}", b"0" * 8, found[0])


def find_nvcc(device: Device) -> str:
    """Path of nvcc. Raises CompileError with what to install."""
    found = find_compiler(device)
    if found is None:
        raise CompileError(f"no nvcc found for {device.arch}: install a CUDA toolkit, or 'kda-tl[cuda-compiler]'.")
    return found


def find_versions(device: Device) -> dict[str, str]:
    """Of what decides a kernel's binary beside its source: TileLang and nvcc."""
    return {"nvcc": _nvcc_version(find_nvcc(device)), "tilelang": metadata.version("tilelang")}


@functools.cache
def _nvcc_version(path: str) -> str:
    told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = _RELEASE.search(told)
    if found is None:
        raise CompileError(f"{path} --version does not tell its release: is it nvcc?")
    return found[1]
