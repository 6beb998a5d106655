"""From a stage and a config to a kernel that can be called: compiled once a process, kept on disk by TileLang."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.core.device import Device, find_compiler
from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.stage import Case, Config, Stage, TensorSpec, dim_size, static_sizes
from kda_tl.core.toolchain import import_tilelang, is_of_cache, replace_cache, warn_if_not_kept
from kda_tl.errors import CompileError, KdaTlError

# exp2 and division as single instructions (2 ulp): far below the rounding of the io dtype, see stage tolerances
_CUDA_PASS_CONFIGS = {"tl.enable_fast_math": True}

# The C target's header includes half.hpp, which takes g++ 0.7 of a kernel's 1.0 s; kernels there are fp32 and need no
# more than the type's name. TileLang 0.1.15 splits flags at spaces and has them in its cache's key, so this is no file.
_CPU_FLAGS = [
    "-DHALF_HALF_HPP",  # its include guard
    "-Dhalf_float=half_float_t=float;namespace/**/half_float{class/**/half;}using/**/half_float",  # after a "using"
]


@dataclass(frozen=True)
class Slot:
    """A tensor parameter of a kernel: everything known of it but the lengths.

    Attributes:
        present: False if the problem does not have it, and a :func:`placeholder` is passed.
        dtype: as the kernel reads it; on the CPU every float is fp32.
        dims: sizes, or names of sizes known at the call: those of a layout.
    """

    name: str
    written: bool
    present: bool
    dtype: torch.dtype
    dims: tuple[int | str, ...]

    @classmethod
    def of(cls, name: str, text: str, case: Case, *, written: bool) -> Slot:
        """The slot of a tensor spec for a case."""
        spec, problem, static = TensorSpec.parse(text), case.problem, static_sizes(case)
        element = spec.element(problem)
        dims = list(spec.dims)
        if problem.state_v_first and spec.is_state:
            dims[2:] = "V", "K"
        return cls(
            name=name,
            written=written,
            present=spec.present(problem),
            dtype=TORCH_DTYPE[element if element == "i32" or case.device.kind != "cpu" else "fp32"],
            dims=tuple(int(dim) if dim.isdigit() else static.get(dim, dim) for dim in dims),
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the tensor that is passed."""
        if not self.present:
            return (1,)
        return tuple(dim if isinstance(dim, int) else dim_size(dim, sizes) for dim in self.dims)


def slots_of(stage: Stage, case: Case) -> tuple[Slot, ...]:
    """The tensor parameters of a stage's kernels: its inputs, then its outputs. Nothing is compiled for them."""
    tensors = {**stage.inputs, **stage.outputs}
    return tuple(Slot.of(name, text, case, written=name in stage.outputs) for name, text in tensors.items())


class Binary:
    """What was compiled: ``jit`` is TileLang's kernel."""

    def __init__(self, jit: Any) -> None:
        self.jit = jit

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """Linked when first asked for, by a compiler: processes that compile for others never launch."""
        return _host_function(self.jit)

    @property
    def source(self) -> str:
        """The generated CUDA or C."""
        return str(self.jit.get_kernel_source())


class Kernel:
    """A compiled stage, as a problem uses it: ``slots`` are the stage's inputs, then its outputs.

    Problems that differ in what the stage ignores share the binary. Its host function is called with tensors in the
    order of the slots, then the scalars.
    """

    def __init__(self, stage: Stage, case: Case, config: Config, binary: Binary) -> None:
        self.stage, self.case, self.config, self.binary = stage, case, config, binary
        self.slots = slots_of(stage, case)

    @property
    def function(self) -> Callable[..., Any]:
        """The host function of the binary."""
        return self.binary.function

    @property
    def source(self) -> str:
        """The generated CUDA or C."""
        return self.binary.source

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> list[torch.Tensor | None]:
        """Uninitialised outputs; None for those the problem does not have."""
        return [
            torch.empty(slot.shape(sizes), dtype=slot.dtype, device=device) if slot.present else None
            for slot in self.slots
            if slot.written
        ]

    def launch(self, tensors: Mapping[str, Any], outputs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        """Writes the outputs. ``tensors`` are the stage's inputs and scalars by name; does not wait for the device."""
        written = iter(outputs)
        args = []
        for slot in self.slots:
            x = next(written) if slot.written else tensors[slot.name]
            if not slot.present or x is None:
                x = placeholder(slot.dtype, device)
            elif not slot.written and device.type == "cpu":  # fp32 kernels: cast at the boundary
                x = x.to(slot.dtype).contiguous()
            args.append(x)
        self.function(*args, *(tensors[name] for name in self.stage.scalars))

    def __call__(self, tensors: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device) -> Sequence[Any]:
        """Allocates the outputs, launches, and returns them in the stage's order."""
        outputs = self.allocate(sizes, device)
        self.launch(tensors, outputs, device)
        return outputs


def _host_function(jit: Any) -> Callable[..., Any]:
    """The function behind tilelang 0.1.15's wrappers, which check arguments a second time in Python (4 us a launch).

    A ``tvm_ffi.Function``, but for the C target, whose backend has none.
    """
    executable = getattr(jit.adapter, "_get_executable", None)
    if executable is None:  # the C target's backend has another adapter
        return jit
    module = executable()
    if hasattr(type(module), "jit"):  # just compiled; from the disk cache it is linked already
        module = module.jit()
    function: Callable[..., Any] = module.main
    return function


@functools.cache
def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one-element tensor that stands for an absent optional tensor; kernels never touch it."""
    return torch.zeros(1, dtype=dtype, device=device)


_kernels: dict[tuple[str, Case, Config], Kernel] = {}
_binaries: dict[tuple[str, Case, Config], Binary] = {}  # by what they were built for, see Stage.specialise
_compiling = threading.Lock()


def compile_stage(stage: Stage, case: Case, config: Config) -> Kernel:
    """The kernel of a stage, from this process's cache, TileLang's disk cache, or the compiler.

    Raises CompileError if the config is rejected, no compiler or no TileLang that works was found, or one refused.
    """
    case = replace(case, problem=case.problem.without_lengths())
    key = (stage.name, case, config)
    found = _kernels.get(key)
    if found is None:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(stage, case, config, _load_binary(stage, case, config))
    return found


def _load_binary(stage: Stage, case: Case, config: Config) -> Binary:
    reason = config.reject(case)
    if reason:
        raise CompileError(f"{stage.name} cannot run with {config}: {reason}.")
    case = stage.specialise(case)
    key = (stage.name, case, config)
    if key not in _binaries:
        _binaries[key] = _compile(stage, case, config)
    return _binaries[key]


def _compile(stage: Stage, case: Case, config: Config) -> Binary:
    require_compiler(case.device)
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # its log lines would land in the caller's output
    # Stages that ignore a flag of the problem compile to the same kernel twice, which its cache warns about; and of a
    # kernel that it could not keep it prints a traceback, on stdout.
    logging.getLogger("tilelang.cache.kernel_cache").setLevel(logging.CRITICAL)
    try:
        try:
            jit = _run_tilelang(stage, case, config)
        except OSError as error:
            if not is_of_cache(error):
                raise
            replace_cache(error)
            jit = _run_tilelang(stage, case, config)
    except Exception as error:  # TileLang raises whatever its passes, TVM or the compiler's wrapper raise
        if isinstance(error, KdaTlError):
            raise
        last = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        raise CompileError(
            f"{stage.name} did not compile for {case.device.arch} with {config}: {last[0].strip()}"
        ) from error
    warn_if_not_kept(jit)
    return Binary(jit)


def _run_tilelang(stage: Stage, case: Case, config: Config) -> Any:
    import tilelang

    cpu = case.device.kind == "cpu"
    return tilelang.compile(
        stage.build(case, config),
        target=case.device.target,
        execution_backend="cython" if cpu else "auto",
        pass_configs=pass_configs(stage, case) or None,
        compile_flags=_CPU_FLAGS if cpu else None,
    )


def pass_configs(stage: Stage, case: Case) -> dict[str, Any]:
    return {} if case.device.kind == "cpu" else {**_CUDA_PASS_CONFIGS, **stage.passes(case)}


def lower(stage: Stage, case: Case, config: Config, **options: Any) -> Any:
    """A kernel lowered to source, TileLang's artifact: neither its device nor a compiler need be here."""
    import_tilelang()
    import tilelang
    from tilelang import tvm

    target = tilelang.backend.target.determine_target(case.device.target, return_object=True)
    with tvm.transform.PassContext(opt_level=3, config=pass_configs(stage, case)), target:
        return tilelang.lower(stage.build(case, config), target=target, **options)


def generate_source(stage: Stage, case: Case, config: Config) -> str:
    """The CUDA or C of a kernel."""
    return str(lower(stage, case, config).kernel_source)


def hash_kernel(stage: Stage, case: Case, config: Config) -> str:
    """SHA-256 of what the compiler is given for a kernel: the generated CUDA or C, and the settings beside it.

    Neither holds comments, paths or line numbers of the templates, and variables count by their place, not by their
    names: sources that make the same kernel give the same hash, in every process. It is of one version of TileLang;
    another one generates other text.
    """
    case = stage.specialise(case)
    compiled = _binaries.get((stage.name, case, config))
    source = compiled.source if compiled else generate_source(stage, case, config)
    text = f"{sorted(pass_configs(stage, case).items())}\n{number_names(source)}"
    return hashlib.sha256(text.encode()).hexdigest()


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
