"""From a stage and a config to CUDA or C: neither the device nor a compiler need be here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from kda_tl.core.device import Device, find_compiler
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.core.toolchain import import_tilelang
from kda_tl.errors import CompileError

# exp2 and division as single instructions (2 ulp): far below the rounding of the io dtype, see stage tolerances
_CUDA_PASS_CONFIGS = {"tl.enable_fast_math": True}


def pass_configs(stage: Stage, case: Case) -> dict[str, Any]:
    return {} if case.device.kind == "cpu" else {**_CUDA_PASS_CONFIGS, **stage.passes(case)}


def lower(stage: Stage, case: Case, config: Config, **options: Any) -> Any:
    """A kernel lowered to source, TileLang's artifact."""
    import_tilelang()
    import tilelang
    from tilelang import tvm

    target = tilelang.backend.target.determine_target(case.device.target, return_object=True)
    with tvm.transform.PassContext(opt_level=3, config=pass_configs(stage, case)), target:
        return tilelang.lower(stage.build(case, config), target=target, **options)


def generate_source(stage: Stage, case: Case, config: Config) -> str:
    """The CUDA or C of a kernel."""
    return str(lower(stage, case, config).kernel_source)


def hash_source(source: str, passes: Mapping[str, Any]) -> str:
    """SHA-256 of what the compiler is given for a kernel: the generated CUDA or C, and the settings beside it."""
    return hashlib.sha256(f"{sorted(passes.items())}\n{number_names(source)}".encode()).hexdigest()


# Two words in a row are a type and a name that it declares
_WORD = r"(?!(?:return|else|extern|for|if|while)\b)[A-Za-z_]\w*"
_DECLARED = re.compile(rf"\b{_WORD}[*&]*\s+(?:__restrict__\s+)?({_WORD})\b(?!\s*[\w*&])")
_TILE = re.compile(
    r"^ +void\* (\w+?)((?:_\d+)?) = (?=\(\(void\*\)\(\(char\*\)buf_dyn_shmem \+ \d+\)\);$)", re.MULTILINE
)


def number_names(source: str) -> str:
    """Generated code with its variables numbered by first use, so that renaming one in a template changes nothing.

    Of tiles in shared memory whose names differ in a number only, the addresses alone are declared: TileLang 0.1.15
    lays out tiles that were given one name in the order of their addresses in the process, which changes.
    """
    declared = set(_DECLARED.findall(source)) - set(re.findall(r"\b(\w+)\(", source))
    tiles = [found[1] for found in _TILE.finditer(source)]
    numbers = dict[str, str]()

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"#{len(numbers)}") if match[0] in declared else match[0]

    settled = _TILE.sub(lambda found: found[0] if tiles.count(found[1]) == 1 else "", source)
    return re.sub(r"\b[A-Za-z_]\w*\b", number, settled[settled.find('extern "C"') :])


def require_compiler(device: Device) -> None:
    """Raises CompileError with what to install if kernels cannot be built for a device: no compiler, no TileLang."""
    if find_compiler(device) is None:
        what = "nvcc (a CUDA toolkit of 12.3 or later)" if device.kind == "cuda" else "a C++ compiler (g++ or clang++)"
        raise CompileError(f"no compiler found for {device.arch}: install {what} and put it on the PATH.")
    import_tilelang()
