"""A kernel as a shared library: TileLang's host code, the device's binary, and ``launcher.c`` instead of a runtime.

The same inputs give the same bytes: nothing in a library tells the time, a folder or a line of a file. A third of the
size of what TileLang builds, for it leaves out ``-lineinfo``; the device's instructions are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kda_tl import templates
from kda_tl.bundle.manifest import Entry, specialisation
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import BundleError, CompileError, KdaTlError
from kda_tl.runtime.lower import hash_source, lower, pass_configs, require_compiler
from kda_tl.runtime.nvcc import compile_device, find_versions
from kda_tl.runtime.resources import read_resources

# In the order of launcher.c's numbers
_LAUNCH = (*(f"blockIdx.{d}" for d in "xyz"), *(f"threadIdx.{d}" for d in "xyz"), "tirx.use_dyn_shared_memory")
_OVERLAPS = {"has_cuda_pdl_trigger": "n", "has_cuda_pdl_sync": "e"}
_LETTERS = {"int32": "i", "int64": "l", "float32": "f"}
_KERNEL = """struct KdaKernel {{ const char* name; const char* parameters; const char* launch; }};
const struct KdaKernel kda_kernel = {{"{name}", "{parameters}", "{launch}"}};
__asm__(".section .rodata\\n.balign 16\\n.globl kda_cubin\\n.hidden kda_cubin\\nkda_cubin:\\n"
        ".incbin \\"kernel.cubin\\"\\n.byte 0\\n.previous\\n");
"""
_CFLAGS = ("-Os", "-fPIC", "-fno-ident", "-fno-asynchronous-unwind-tables", "-ffunction-sections", "-w")
_LDFLAGS = ("-shared", "-s", "-Wl,-Bsymbolic", "-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,-z,noseparate-code")


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What TileLang makes of a kernel.

    Attributes:
        stage, case, config: what it is made of, the case as :meth:`Stage.specialise` has it.
        cuda, host: source of the device's and of the host's code.
        name: of the device function.
        parameters, launch: how it is called, see ``launcher.c``.
        block, smem_bytes: threads of a block by dimension, and its dynamic shared memory.
    """

    stage: Stage
    case: Case
    config: Config
    cuda: str
    host: str
    name: str
    parameters: str
    launch: str
    block: tuple[int, ...]
    smem_bytes: int

    @property
    def settings(self) -> dict[str, Any]:
        """Of TileLang's passes; of the compiler, :func:`compile_device` takes what it needs."""
        return pass_configs(self.stage, self.case)


def generate(stage: Stage, case: Case, config: Config) -> Generated:
    """Lowers a kernel for CUDA; no GPU need be here. Raises CompileError without nvcc or TileLang."""
    require_compiler(case.device)
    case = stage.specialise(case)
    artifact = lower(stage, case, config, target_host="c", enable_host_codegen=True)
    (function,) = artifact.device_mod.functions.values()
    host = str(artifact.rt_mod.inspect_source())
    launch = "".join(str(_LAUNCH.index(str(tag))) for tag in function.attrs["tirx.kernel_launch_params"])
    numbers = dict(zip(launch, _last_numbers(host, len(launch)), strict=True))
    return Generated(
        stage=stage,
        case=case,
        config=config,
        cuda=str(artifact.kernel_source),
        host=host,
        name=str(function.attrs["global_symbol"]),
        parameters="".join(map(_letter, function.params)),
        launch=launch + "".join(letter for attribute, letter in _OVERLAPS.items() if attribute in function.attrs),
        block=tuple(numbers.get(place) or 1 for place in "345"),
        smem_bytes=numbers.get("6") or 0,
    )


def compile_library(made: Generated) -> tuple[bytes, Entry]:
    """The library of a kernel, and its entry: the work of compilers, which run side by side. Raises CompileError."""
    stage, device, settings = made.stage, made.case.device, made.settings
    cubin = compile_device(made.cuda, device, settings)
    content = _link(made, cubin)
    entry = Entry(
        stage=stage.name,
        built_for=specialisation(stage, made.case, made.config),
        sources=templates.fingerprint(stage.name),
        cuda=hash_source(made.cuda, settings),
        binary=_name(stage, content, ".so"),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        parameters=made.parameters,
        launch=made.launch,
        arch=device.arch,
        block=list(made.block),
        smem_bytes=made.smem_bytes,
        tools=find_versions(device),
        **read_resources(cubin),
    )
    return content, entry


def build_binary(stage: Stage, case: Case, config: Config, folder: Path, *, keep_source: bool = False) -> Entry:
    """Builds a kernel's library into a folder, and with ``keep_source`` its CUDA beside it; no GPU need be here.

    Files are named by their content: equal ones are one file. Raises CompileError, or BundleError if the folder cannot
    be written.
    """
    if reason := config.reject(case):
        raise CompileError(f"{stage.name} cannot run with {config}: {reason}.")
    with explaining(stage, case, config):
        made = generate(stage, case, config)
        content, entry = compile_library(made)
    _store(folder, entry.binary, content)
    if not keep_source:
        return entry
    source = made.cuda.encode()
    entry = replace(entry, source=_name(stage, source, ".cu"))
    _store(folder, entry.source, source)
    return entry


@contextlib.contextmanager
def explaining(stage: Stage, case: Case, config: Config) -> Iterator[None]:
    """Makes a CompileError of whatever TileLang's passes, TVM or a compiler's wrapper raise."""
    try:
        yield
    except KdaTlError:
        raise
    except Exception as error:
        last = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        raise CompileError(
            f"{stage.name} did not compile for {case.device.arch} with {config}: {last[0].strip()}"
        ) from error


def _name(stage: Stage, content: bytes, suffix: str) -> str:
    return f"{stage.name}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"


def _link(made: Generated, cubin: bytes) -> bytes:
    """The library, built in a temporary folder whose name does not get into it."""
    with tempfile.TemporaryDirectory(prefix="kda_tl-") as folder:
        work = Path(folder)
        (work / "kernel.cubin").write_bytes(cubin)
        (work / "host.c").write_text(made.host)
        names = {"name": made.name, "parameters": made.parameters, "launch": made.launch}
        (work / "kernel.c").write_text(_KERNEL.format(**names))
        (work / "launcher.c").write_bytes((importlib.resources.files(__package__) / "launcher.c").read_bytes())
        includes = [f"-I{path}" for path in _includes()]
        for name in ("host", "kernel", "launcher"):
            hidden = () if name == "host" else ("-fvisibility=hidden",)
            _run(work, "gcc", *_CFLAGS, *hidden, *includes, "-c", f"{name}.c")
        _run(work, "gcc", *_LDFLAGS, "-o", "kernel.so", "host.o", "kernel.o", "launcher.o", "-ldl")
        return (work / "kernel.so").read_bytes()


def _store(folder: Path, name: str, content: bytes) -> None:
    """Writes a file beside its place and renames it."""
    part = folder / f"{name}.{os.getpid()}.part"
    try:
        part.write_bytes(content)
        part.replace(folder / name)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise BundleError(f"{folder} cannot be written ({error.strerror or error}): choose another folder.") from error


def _last_numbers(host: str, count: int) -> list[int | None]:
    """The last arguments of the launch in host code, None where they are computed at the call."""
    found = re.findall(r"\[(\d+)\]\.v_int64\) = \(\(int64_t\)(.*)\);", host)[-count:] if count else []
    return [int(text) if text.isdigit() else None for _, text in found]


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
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(
            f"{command[0]} cannot be run ({error.strerror}): install it and put it on the PATH."
        ) from error
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["no reason given"])[0]
        raise CompileError(f"{command[0]} refused {command[-1]}: {first}")
