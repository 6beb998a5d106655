"""From a stage and a config to a kernel that can be called: compiled once a process, kept on disk by TileLang."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.device import Device, find_compiler
from kda_tl.errors import CompileError
from kda_tl.problem import Problem
from kda_tl.stage import Case, Config, Plan, Stage, TensorSpec, static_sizes

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "i32": torch.int32}
NAME_OF_DTYPE = {dtype: name for name, dtype in TORCH_DTYPE.items() if name != "i32"}

# exp2 and division as single instructions (2 ulp): far below the rounding of the io dtype, see stage tolerances
_CUDA_PASS_CONFIGS = {"tl.enable_fast_math": True}


class Kernel:
    """A compiled stage.

    Attributes:
        stage: what it computes.
        case: what it was built for.
        config: the config it was built with.
        jit: TileLang's kernel: host code and binary.
    """

    def __init__(self, stage: Stage, case: Case, config: Config, jit: Any) -> None:
        self.stage, self.case, self.config = stage, case, config
        self.jit = jit
        self._call = _fast_call(jit)
        self._cpu = case.device.kind == "cpu"
        problem, static = case.problem, static_sizes(case)

        def dtype_of(spec: TensorSpec) -> torch.dtype:
            element = spec.element(problem)
            return torch.float32 if self._cpu and element != "i32" else TORCH_DTYPE[element]

        specs = {name: TensorSpec.parse(text) for name, text in {**stage.inputs, **stage.outputs}.items()}
        self._inputs = [(name, dtype_of(specs[name]), specs[name].present(problem)) for name in stage.inputs]
        self._outputs = []
        for name in stage.outputs:
            spec = specs[name]
            lead, *dims = spec.dims  # NT, N or tokens, known at the call; the rest is compiled in
            tail = [int(d) if d.isdigit() else static[d] for d in dims]
            if problem.state_v_first and spec.dims == ("N", "HV", "K", "V"):
                tail[1:] = [tail[2], tail[1]]
            self._outputs.append((lead, tail, dtype_of(spec), spec.present(problem)))
        self._bound: dict[torch.device, tuple[list[Any], list[Any]]] = {}

    @property
    def source(self) -> str:
        """The generated CUDA or C."""
        return str(self.jit.get_kernel_source())

    def _bind(self, device: torch.device) -> tuple[list[Any], list[Any]]:
        """What a call on one device needs of the inputs and outputs, looked up once."""
        inputs = [(name, None if present else placeholder(dtype, device)) for name, dtype, present in self._inputs]
        outputs = [
            # new_empty of a tensor at hand: torch.empty with dtype and device took twice as long (x86 CPU)
            (placeholder(dtype, device).new_empty if present else None, lead, tail, placeholder(dtype, device))
            for lead, tail, dtype, present in self._outputs
        ]
        bound = self._bound[device] = inputs, outputs
        return bound

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> list[torch.Tensor | None]:
        """Uninitialised outputs; None for those the problem does not have."""
        _, outputs = self._bound.get(device) or self._bind(device)
        return [make and make((sizes[lead], *tail)) for make, lead, tail, _ in outputs]

    def launch(self, tensors: Mapping[str, Any], outputs: list[torch.Tensor | None], device: torch.device) -> None:
        """Writes the outputs. ``tensors`` are the stage's inputs and scalars by name; does not wait for the device."""
        inputs, absent = self._bound.get(device) or self._bind(device)
        args = [tensors[name] if stand_in is None else stand_in for name, stand_in in inputs]
        if self._cpu:  # fp32 kernels: cast at the boundary
            args = [x.to(dtype).contiguous() for x, (_, dtype, _) in zip(args, self._inputs, strict=True)]
        args += [absent[i][3] if x is None else x for i, x in enumerate(outputs)]
        args += [tensors[name] for name in self.stage.scalars]
        self._call(*args)

    def __call__(self, tensors: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device) -> Sequence[Any]:
        """Allocates the outputs, launches, and returns them in the stage's order."""
        outputs = self.allocate(sizes, device)
        self.launch(tensors, outputs, device)
        return outputs


def _fast_call(jit: Any) -> Callable[..., Any]:
    """The function behind tilelang 0.1.15's wrappers, which check arguments a second time in Python (4 us a launch)."""
    executable = getattr(jit.adapter, "_get_executable", None)
    if executable is None:  # the C target's backend has another adapter
        return jit
    module = executable()
    if hasattr(type(module), "jit"):  # just compiled; from the disk cache it is linked already
        module = module.jit()
    function: Callable[..., Any] = module.main
    return function


_placeholders: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one-element tensor that stands for an absent optional tensor; kernels never touch it."""
    found = _placeholders.get((dtype, device))
    if found is None:
        found = _placeholders[dtype, device] = torch.zeros(1, dtype=dtype, device=device)
    return found


_kernels: dict[tuple[str, Case, Config], Kernel] = {}
_compiling = threading.Lock()


def compile_stage(stage: Stage, case: Case, config: Config) -> Kernel:
    """The kernel of a stage, from this process's cache, TileLang's disk cache, or the compiler.

    Raises:
        CompileError: the config is rejected, no compiler was found, or TileLang or the compiler refused.
    """
    case = replace(case, problem=case.problem.without_lengths())
    key = (stage.name, case, config)
    found = _kernels.get(key)
    if found is None:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _compile(stage, case, config)
    return found


def _compile(stage: Stage, case: Case, config: Config) -> Kernel:
    reason = config.reject(case)
    if reason:
        raise CompileError(f"{stage.name} cannot run with {config}: {reason}.")
    require_compiler(case.device)
    os.environ.setdefault("TILELANG_PRINT_ON_COMPILATION", "0")  # its log lines would land in the caller's output
    import tilelang

    # stages that ignore a flag of the problem compile to the same kernel twice, which its cache warns about
    logging.getLogger("tilelang.cache.kernel_cache").setLevel(logging.ERROR)
    try:
        cpu = case.device.kind == "cpu"
        jit = tilelang.compile(
            stage.build(case, config),
            target=case.device.target,
            execution_backend="cython" if cpu else "auto",
            pass_configs=None if cpu else _CUDA_PASS_CONFIGS,
        )
    except Exception as error:  # TileLang raises whatever its passes, TVM or the compiler's wrapper raise
        last = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        raise CompileError(
            f"{stage.name} did not compile for {case.device.arch} with {config}: {last[0].strip()}"
        ) from error
    return Kernel(stage, case, config, jit)


def require_compiler(device: Device) -> None:
    """Raises CompileError with what to install if kernels cannot be built for a device."""
    if find_compiler(device) is None:
        what = "nvcc (a CUDA toolkit of 12.3 or later)" if device.kind == "cuda" else "a C++ compiler (g++ or clang++)"
        raise CompileError(f"no compiler found for {device.arch}: install {what} and put it on the PATH.")


@dataclass(frozen=True, eq=False)
class Program:
    """A plan made runnable: its pipeline and one kernel a stage."""

    plan: Plan
    problem: Problem
    compute: Callable[..., dict[str, Any]]
    kernels: Mapping[str, Kernel]

    @classmethod
    def build(cls, plan: Plan, problem: Problem, device: Device) -> Program:
        """Compiles every stage of a plan.

        Raises:
            CompileError: a stage cannot be compiled.
        """
        from kda_tl.templates.pipelines import PIPELINES

        case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
        pipeline = PIPELINES[plan.pipeline]
        kernels = {stage.name: compile_stage(stage, case, plan.config(stage.name)) for stage in pipeline.stages}
        return cls(plan=plan, problem=problem, compute=pipeline.compute, kernels=kernels)

    def run(self, tensors: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device) -> dict[str, Any]:
        """Runs the pipeline on the operator's tensors; nothing here waits for the device."""
        kernels = self.kernels

        def run(stage: Stage, **inputs: Any) -> Sequence[Any]:
            return kernels[stage.name](inputs, sizes, device)

        return self.compute(run, tensors)
