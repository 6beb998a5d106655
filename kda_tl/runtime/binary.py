"""A kernel as a shared library: TileLang's host code, the device's binary, and ``launcher.cc`` instead of a runtime.

Lowering is TVM's work in this process, one kernel at a time. The rest is done by compilers, several side by side.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bundle.manifest import Entry, digest, specialisation
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import CompileError
from kda_tl.runtime.lower import hash_source, lower, pass_configs, require_compiler

# In the order of launcher.cc's numbers
_LAUNCH = (*(f"blockIdx.{d}" for d in "xyz"), *(f"threadIdx.{d}" for d in "xyz"), "tirx.use_dyn_shared_memory")
_LETTERS = {"int32": "i", "int64": "l", "float32": "f"}
_KERNEL = """struct KdaKernel {{ const char* name; const char* parameters; const char* launch; }};
const struct KdaKernel kda_kernel = {{"{name}", "{parameters}", "{launch}"}};
__asm__(".section .rodata\\n.balign 16\\n.globl kda_cubin\\n.hidden kda_cubin\\nkda_cubin:\\n"
        ".incbin \\"kernel.cubin\\"\\n.byte 0\\n.previous\\n");
"""
_COMPILE = ("-O2", "-fPIC", "-c")

# Records of a kernel: format 4, attribute, size 8, symbol, value; two and more, as four bytes alone may be anything
_RECORDS = re.compile(rb"(?:\x04[\x11\x12\x23\x2f]\x08\x00.{8}){2,}", re.DOTALL)
_ATTRIBUTES = {0x2F: "registers", 0x11: "local_bytes"}


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A kernel's sources, and what its library's entry says of it."""

    stage: Stage
    built_for: dict[str, Any]
    target: Any  # TVM's
    passes: dict[str, Any]
    source: str  # CUDA
    host: str  # C
    name: str  # of the device function
    parameters: str
    launch: str


def lower_kernel(stage: Stage, case: Case, config: Config) -> Lowered:
    """Generates a kernel's sources; the device need not be here. Raises CompileError without a compiler or TileLang."""
    require_compiler(case.device)
    case = stage.specialise(case)
    artifact = lower(stage, case, config, target_host="c", enable_host_codegen=True)
    (function,) = artifact.device_mod.functions.values()
    return Lowered(
        stage=stage,
        built_for=specialisation(stage, case, config),
        target=artifact.target,
        passes=pass_configs(stage, case),
        source=str(artifact.kernel_source),
        host=str(artifact.rt_mod.inspect_source()),
        name=str(function.attrs["global_symbol"]),
        parameters="".join(map(_letter, function.params)),
        launch="".join(str(_LAUNCH.index(str(tag))) for tag in function.attrs["tirx.kernel_launch_params"]),
    )


def compile_library(lowered: Lowered) -> tuple[bytes, Entry]:
    """The library of a kernel, and its entry. Raises CompileError."""
    from tilelang.cuda.backend import tilelang_callback_cuda_compile

    cubin = bytes(tilelang_callback_cuda_compile(lowered.source, lowered.target, lowered.passes))
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "kernel.cubin").write_bytes(cubin)
        (work / "host.c").write_text(lowered.host)
        (work / "launcher.o").write_bytes(_compile_launcher())
        names = {"name": lowered.name, "parameters": lowered.parameters, "launch": lowered.launch}
        (work / "kernel.c").write_text(_KERNEL.format(**names))
        _run(work, "gcc", *_COMPILE, "-w", *_includes(), "host.c")
        _run(work, "gcc", *_COMPILE, "-fvisibility=hidden", "kernel.c")
        objects = ("host.o", "kernel.o", "launcher.o")
        linking = ("-shared", "-s", "-Wl,-Bsymbolic", "-Wl,--build-id=none", "-o", "kernel.so")
        _run(work, "g++", *linking, *objects, "-ldl")
        content = (work / "kernel.so").read_bytes()
    stage, built_for = lowered.stage, lowered.built_for
    entry = Entry(
        stage=stage.name,
        built_for=built_for,
        arch=built_for["device"]["arch"],
        sources=templates.fingerprint(stage.name),
        cuda=hash_source(lowered.source, lowered.passes),
        binary=f"{stage.name}-{digest(stage.name, built_for)}.so",
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        parameters=lowered.parameters,
        launch=lowered.launch,
        **_read_launch(lowered),
        **read_resources(cubin),
    )
    return content, entry


def build_binary(stage: Stage, case: Case, config: Config, folder: Path) -> Entry:
    """Builds a kernel's library into a folder. Raises CompileError."""
    content, entry = compile_library(lower_kernel(stage, case, config))
    part = folder / f"{entry.binary}.{os.getpid()}.part"
    part.write_bytes(content)
    part.replace(folder / entry.binary)
    return entry


def _read_launch(lowered: Lowered) -> dict[str, Any]:
    """Threads a block and bytes of dynamic shared memory, where they are constants."""
    bounds = re.search(r"__launch_bounds__\((\d+)", lowered.source)
    found: dict[str, Any] = {"threads": int(bounds[1]) if bounds else None, "smem_bytes": None}
    if "extern __shared__" in lowered.source:  # the launch's last constant, after grid and block
        constants = re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\)", lowered.host)
        found["smem_bytes"] = int(constants[-1]) if constants else None
    return found


def read_resources(library: bytes) -> dict[str, Any]:
    """Registers and local memory a thread of the one kernel in a library that embeds a cubin; None if there is none.

    Source: section ``.nv.info`` of a cubin is a run of such records; the attributes' numbers are those that
    ``cuobjdump -elf`` names. Equal to what its ELF headers lead to for four kernels of TileLang 0.1.15, CUDA 13.
    """
    found: dict[str, Any] = dict.fromkeys(_ATTRIBUTES.values())
    for records in _RECORDS.findall(library):
        for attribute, value in struct.iter_unpack("<xB6xI", records):
            if attribute in _ATTRIBUTES:
                found[_ATTRIBUTES[attribute]] = value
    return found


def _letter(parameter: Any) -> str:
    if parameter.dtype == "handle":
        return "t" if "grid_constant" in str(parameter.type_annotation) else "p"
    return _LETTERS[str(parameter.dtype)]


@functools.cache
def _compile_launcher() -> bytes:
    """The object that all kernels' libraries share."""
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "launcher.cc").write_bytes((importlib.resources.files(__package__) / "launcher.cc").read_bytes())
        _run(work, "g++", *_COMPILE, "-std=c++17", "-fvisibility=hidden", *_includes(), "launcher.cc")
        return (work / "launcher.o").read_bytes()


@functools.cache
def _includes() -> Sequence[str]:
    import tilelang
    import tvm_ffi

    ffi = Path(tvm_ffi.__file__).parent
    packs = [path.parent.parent for path in ffi.rglob("dlpack/dlpack.h")]
    folders = [Path(tilelang.__file__).parent / "3rdparty" / "tvm" / "include", ffi / "include", *packs]
    return [f"-I{folder}" for folder in folders]


def _run(folder: Path, *command: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run ({error.strerror}): install a C++ compiler.") from error
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise CompileError(f"{command[0]} refused {command[-1]}: {first}")
