"""A kernel as a shared library: TileLang's host code, the device's binary, and ``launcher.cc`` instead of a runtime."""

from __future__ import annotations

import hashlib
import importlib.resources
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bundle.manifest import Entry, digest, specialisation
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import CompileError
from kda_tl.runtime.compile import hash_kernel, lower, pass_configs, require_compiler

# In the order of launcher.cc's numbers
_LAUNCH = (*(f"blockIdx.{d}" for d in "xyz"), *(f"threadIdx.{d}" for d in "xyz"), "tirx.use_dyn_shared_memory")
_LETTERS = {"int32": "i", "int64": "l", "float32": "f"}
_KERNEL = """struct KdaKernel {{ const char* name; const char* parameters; const char* launch; }};
const struct KdaKernel kda_kernel = {{"{name}", "{parameters}", "{launch}"}};
__asm__(".section .rodata\\n.balign 16\\n.globl kda_cubin\\n.hidden kda_cubin\\nkda_cubin:\\n"
        ".incbin \\"kernel.cubin\\"\\n.byte 0\\n.previous\\n");
"""


def build_binary(stage: Stage, case: Case, config: Config, folder: Path) -> Entry:
    """Builds a kernel's library into a folder; no GPU need be here. Raises CompileError."""
    require_compiler(case.device)
    from tilelang.cuda.backend import tilelang_callback_cuda_compile

    artifact = lower(stage, stage.specialise(case), config, target_host="c", enable_host_codegen=True)
    (function,) = artifact.device_mod.functions.values()
    name = str(function.attrs["global_symbol"])
    parameters = "".join(map(_letter, function.params))
    launch = "".join(str(_LAUNCH.index(str(tag))) for tag in function.attrs["tirx.kernel_launch_params"])
    cubin = bytes(tilelang_callback_cuda_compile(artifact.kernel_source, artifact.target, pass_configs(stage, case)))
    built_for = specialisation(stage, case, config)
    binary = f"{stage.name}-{digest(stage.name, built_for)}.so"
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        (work / "kernel.cubin").write_bytes(cubin)
        (work / "host.c").write_text(artifact.rt_mod.inspect_source())
        (work / "kernel.c").write_text(_KERNEL.format(name=name, parameters=parameters, launch=launch))
        (work / "launcher.cc").write_bytes((importlib.resources.files(__package__) / "launcher.cc").read_bytes())
        includes = [f"-I{path}" for path in _includes()]
        for compiler, source, flags in (
            ("gcc", "host.c", ("-w",)),
            ("gcc", "kernel.c", ("-fvisibility=hidden",)),
            ("g++", "launcher.cc", ("-std=c++17", "-fvisibility=hidden")),
        ):
            _run(work, compiler, "-O2", "-fPIC", *flags, "-c", source, *includes)
        objects = ("host.o", "kernel.o", "launcher.o")
        _run(work, "g++", "-shared", "-s", "-Wl,-Bsymbolic", "-o", "kernel.so", *objects, "-ldl")
        content = (work / "kernel.so").read_bytes()
    part = folder / f"{binary}.part"
    part.write_bytes(content)
    part.replace(folder / binary)
    return Entry(
        stage=stage.name,
        built_for=built_for,
        sources=templates.fingerprint(stage.name),
        cuda=hash_kernel(stage, case, config),
        binary=binary,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        parameters=parameters,
        launch=launch,
    )


def _letter(parameter: Any) -> str:
    if parameter.dtype == "handle":
        return "t" if "grid_constant" in str(parameter.type_annotation) else "p"
    return _LETTERS[str(parameter.dtype)]


def _includes() -> Sequence[Path]:
    import tilelang
    import tvm_ffi

    ffi = Path(tvm_ffi.__file__).parent
    packs = [path.parent.parent for path in ffi.rglob("dlpack/dlpack.h")]
    return [Path(tilelang.__file__).parent / "3rdparty" / "tvm" / "include", ffi / "include", *packs]


def _run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise CompileError(f"{command[0]} refused {command[-1]}: {first}")
