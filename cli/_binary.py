"""What ``kda-tl source`` shows of a kernel's binary: its PTX, its instructions, and what it takes."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import CompileError, InputError
from kda_tl.runtime.binary import Generated, explaining, generate
from kda_tl.runtime.nvcc import compile_device, find_nvcc
from kda_tl.runtime.resources import read_resources

_TOOLS = {"cuobjdump": ("-sass",), "nvdisasm": ("-c",)}


def read_binary(what: str, stage: Stage, case: Case, config: Config) -> Any:
    """The ``ptx`` or ``sass`` of a kernel as text, or with ``registers`` what it takes by name.

    Raises InputError for the CPU target, and CompileError if the kernel does not compile, or if nvcc or what tells
    instructions is not here.
    """
    if case.device.kind != "cuda":
        raise InputError(f"--{what} is about a GPU's binary: name a GPU, as in --gpu h100.")
    tool = _find_tool(find_nvcc(case.device)) if what == "sass" else ("", ())
    with explaining(stage, case, config):
        made = generate(stage, case, config)
        if what == "ptx":
            return compile_device(made.cuda, case.device, made.settings, "ptx").decode()
        cubin = compile_device(made.cuda, case.device, made.settings)
    return _disassemble(tool, cubin) if what == "sass" else _describe(made, cubin)


def _describe(made: Generated, cubin: bytes) -> dict[str, Any]:
    threads = made.block[0] * made.block[1] * made.block[2]
    return {**read_resources(cubin), "smem_bytes": made.smem_bytes, "threads": threads, "bytes": len(cubin)}


def _find_tool(nvcc: str) -> tuple[str, tuple[str, ...]]:
    for name, flags in _TOOLS.items():
        if path := shutil.which(name) or shutil.which(name, path=str(Path(nvcc).resolve().parent)):
            return path, flags
    raise CompileError(
        f"neither {' nor '.join(_TOOLS)} was found, which tell a binary's instructions: install the CUDA toolkit's "
        "tools (the package cuda-cuobjdump) and put one on the PATH; --ptx needs neither."
    )


def _disassemble(tool: tuple[str, tuple[str, ...]], cubin: bytes) -> str:
    path, flags = tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *flags, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        first = next(iter((done.stderr or done.stdout).strip().splitlines()), "no reason given")
        raise CompileError(f"{path} cannot read the binary: {first}")
    return done.stdout
