"""What stages and plans are measured on, made where they are measured: their inputs, and what they are judged by.

Inputs to time come from running the workload once with default configs; inputs to check with, and what is expected of
them, from running the stages' references in float64 on a trimmed twin. Nothing big crosses a process boundary.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.bench.timing import check
from kda_tl.bench.workloads import Workload, draw_gradients
from kda_tl.core.device import Device
from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.pipeline import Pipeline, operand_shapes
from kda_tl.core.stage import Case, Operands, Plan, Stage
from kda_tl.errors import CompileError
from kda_tl.ops import find_operator
from kda_tl.reference import recurrent_gradients
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.kernel import Kernel
from kda_tl.runtime.program import Program

STAGE_CHECK_TOKENS = 160  # three chunks of 64, the last ragged
PLAN_CHECK_TOKENS = 320
# Roundings of a chain of stages add in quadrature: at their limits, 1.2e-2 in bf16 for intra, wy, state and output, and
# 1.7e-2 for the eight stages from a gradient to dg. A right forward stays under half of that. The backward may take
# most of it: dg and dA_log are differences of larger terms. fp32 on a GPU: four stages of at most 1e-4 make 2e-4.
_TOLERANCE = {
    "fwd": {"bf16": 6e-3, "fp16": 2e-3, "fp32": 2e-4},
    "bwd": {"bf16": 1.5e-2, "fp16": 5e-3, "fp32": 2e-4},
    "step": {"bf16": 6e-3, "fp16": 2e-3, "fp32": 1e-5},  # one stage, and no matrix unit: that of its results
}
# No matrix unit rounds its operands there. Backward: eleven stages of 2e-5 at most; what they lose in dA_log adds up.
_TOLERANCE_FP32_ON_CPU = {"fwd": 1e-5, "bwd": 2e-4, "step": 1e-5}
_BASE_TRIES = 8

Tensors = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class StageFixture:
    """What a stage is measured on: a pipeline that runs a workload, with chunks of BT and sub-chunks of BC tokens."""

    pipeline: Pipeline
    workload: Workload
    device: Device
    BT: int
    BC: int
    seed: int = 0

    @property
    def case(self) -> Case:
        """What its kernels are built for."""
        return Case(problem=self.workload.problem(), device=self.device, BT=self.BT, BC=self.BC)

    @property
    def key(self) -> Hashable:
        """What decides its tensors."""
        return (self.pipeline.name, self.workload, self.device, self.BT, self.BC, self.seed)


def torch_device(device: Device) -> torch.device:
    """Where tensors of a device live in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if device.kind == "cuda" else torch.device("cpu")


def operator_tensors(
    workload: Workload, BT: int, device: torch.device, *, segments: int = 1, seed: int = 0
) -> tuple[dict[str, Any], dict[str, int]]:
    """What a pipeline takes, tokens flattened over the batch, and the sizes its kernels are launched with."""
    operator = workload.declaration
    a = operator.bind(**workload.inputs(device, seed))
    tensors, sizes = operator.lay_out(a, workload.problem(), BT, segments)
    return tensors | _draw_incoming(workload, device, seed), sizes


def _draw_incoming(workload: Workload, device: torch.device, seed: int) -> dict[str, Any]:
    """The gradients that a backward takes, as a pipeline does."""
    if workload.direction != "bwd":
        return {}
    w, dims = workload, (workload.V, workload.K) if workload.state_v_first else (workload.K, workload.V)
    o = torch.empty(w.tokens, w.HV, w.V, dtype=TORCH_DTYPE[w.dtype], device=device)
    state = torch.empty(len(w.bounds) - 1, w.HV, *dims, device=device)
    return dict(zip(("do", "dht"), draw_gradients(o, state, seed), strict=True))


def plan_tolerance(workload: Workload, device: Device) -> float:
    """Largest relative error a result of a whole pass may have against the recurrence."""
    table = _TOLERANCE[workload.direction]
    if device.kind == "cpu":
        table = {**table, "fp32": _TOLERANCE_FP32_ON_CPU[workload.direction]}
    return max(table[dtype] for dtype in (workload.dtype, workload.state_dtype))


def stage_tolerance(stage: Stage, workload: Workload) -> float:
    """Largest relative error an output of a stage may have against its reference."""
    return max(stage.tolerance[dtype] for dtype in (workload.dtype, workload.state_dtype))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A plan ready to run on a workload: one launch, which returns the results by name, and what its tensors take.

    ``call_bytes`` are of those a call holds anyway, ``kept_bytes`` of the residuals, if the plan begins from them.
    """

    run: Callable[[], Mapping[str, torch.Tensor | None]]
    tensors: Tensors  # that it takes; states among them may change in place
    call_bytes: int
    kept_bytes: int


def make_pass(plan: Plan, workload: Workload, device: Device, *, seed: int = 0) -> Pass:
    """Compiles a plan, and makes the tensors it takes. Raises CompileError if a stage does not compile."""
    where, problem = torch_device(device), workload.problem()
    program = Program.build(plan, problem, device)
    tensors, sizes = operator_tensors(workload, plan.BT, where, segments=program.pipeline.segments, seed=seed)
    call_bytes, residuals = _count_bytes(tensors.values()), {}
    if plan.kept:  # made by the stages that a forward shares with it
        residuals = program.run(tensors, sizes, where, program.pipeline.residuals)
        program = Program.build(plan, problem, device, from_residuals=True)
    run = functools.partial(program.run, tensors | residuals, sizes, where)
    return Pass(run=run, tensors=tensors, call_bytes=call_bytes, kept_bytes=_count_bytes(residuals.values()))


def _count_bytes(values: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, torch.Tensor))


def check_plan(plan: Plan, workload: Workload, device: Device, *, seed: int = 0) -> float:
    """Largest relative error of a plan's results against the recurrence in float64, on a trimmed twin.

    Of a backward plan every gradient is compared with autograd through the recurrence. Raises WrongResultError if the
    error is over :func:`plan_tolerance`, and CompileError.
    """
    twin, where = workload.trimmed(PLAN_CHECK_TOKENS), torch_device(device)
    made, expected = make_pass(plan, twin, device, seed=seed), _recurrence(twin, where, seed)
    outputs = {**{name: made.tensors.get(name) for name in expected}, **made.run()}  # what it changes in place, too
    like = {name: x if (y := outputs[name]) is None else x.view(y.shape) for name, x in expected.items()}
    return check(outputs, like, plan_tolerance(workload, device))


@functools.lru_cache(maxsize=4)
def _recurrence(workload: Workload, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """The results of the workload's pass by the pipelines' names, in their shapes."""
    operator, shapes = workload.declaration, operand_shapes(workload.problem())
    a = operator.bind(**workload.inputs(device, seed))
    if workload.direction == "bwd":
        arguments, x = find_operator(workload.operator).recurrence(a), _draw_incoming(workload, device, seed)
        found = recurrent_gradients(arguments, x["do"].view_as(arguments["v"]), x["dht"])
        return {name: grad.view(shapes.get(name[1:], grad.shape)) for name, grad in found.items()}
    found = operator.judge(a)
    return found | {"o": found["o"].view(shapes["v"])}


_inputs: dict[Hashable, tuple[dict[str, Tensors], dict[str, int]]] = {}
_references: dict[Hashable, tuple[dict[str, tuple[Tensors, Tensors]], dict[str, int]]] = {}


def _remember(cache: dict[Hashable, Any], key: Hashable, make: Callable[[], Any]) -> Any:
    """A cache of two: the tensors of one bench can take gigabytes."""
    if key not in cache:
        while len(cache) >= 2:
            del cache[next(iter(cache))]
        cache[key] = make()
    return cache[key]


def _fixture_tensors(fixture: StageFixture, workload: Workload) -> tuple[dict[str, Any], dict[str, int]]:
    """:func:`operator_tensors` of the bench's workload, or of its twin."""
    where = torch_device(fixture.device)
    return operator_tensors(workload, fixture.BT, where, segments=fixture.pipeline.segments, seed=fixture.seed)


def record(fixture: StageFixture) -> tuple[dict[str, Tensors], dict[str, int]]:
    """Inputs of every stage when the default configs run the workload."""

    def make() -> tuple[dict[str, Tensors], dict[str, int]]:
        where, case = torch_device(fixture.device), fixture.case
        tensors, sizes = _fixture_tensors(fixture, fixture.workload)
        inputs_of: dict[str, Tensors] = {}

        def launch(stage: Stage, inputs: Tensors) -> tuple[Any, ...]:
            inputs_of[stage.name] = _as_operands(stage, case, inputs)
            return tuple(_compile_base(stage, case)(inputs_of[stage.name], sizes, where))

        fixture.pipeline.flow(case.problem).run(launch, tensors)
        return inputs_of, sizes

    return _remember(_inputs, fixture.key, make)


def _compile_base(stage: Stage, case: Case) -> Kernel:
    """The default's kernel, or that of the first candidate that compiles where the default does not."""
    failure: CompileError | None = None
    for config in itertools.islice((stage.default(case), *stage.candidates(case)), _BASE_TRIES):
        try:
            return compile_stage(stage, case, config)
        except CompileError as error:
            failure = failure or error
    raise failure or CompileError(f"{stage.name} has no config for {case}.")


def reference_cases(fixture: StageFixture) -> tuple[dict[str, tuple[Tensors, Tensors]], dict[str, int]]:
    """For every stage, inputs rounded as the kernel takes them, and what its reference makes of them in float64."""

    def make() -> tuple[dict[str, tuple[Tensors, Tensors]], dict[str, int]]:
        twin = fixture.workload.trimmed(STAGE_CHECK_TOKENS)
        case = replace(fixture.case, problem=twin.problem())
        tensors, sizes = _fixture_tensors(fixture, twin)
        references: dict[str, tuple[Tensors, Tensors]] = {}

        def launch(stage: Stage, inputs: Tensors) -> tuple[Any, ...]:
            operands = _as_operands(stage, case, inputs)
            expected = stage.reference(case, Operands(**{name: _widen(value) for name, value in operands.items()}))
            references[stage.name] = operands, expected
            return tuple(expected.get(name) for name in stage.outputs)

        fixture.pipeline.flow(case.problem).run(launch, tensors)
        return references, sizes

    return _remember(_references, fixture.key, make)


def _as_operands(stage: Stage, case: Case, inputs: Tensors) -> dict[str, Any]:
    """Tensors in the types the stage's kernel reads: on the CPU target every float is fp32."""
    operands = dict(inputs)
    for name in stage.inputs:
        spec, value = stage.specs[name], inputs[name]
        if isinstance(value, torch.Tensor) and spec.dtype != "i32":
            dtype = torch.float32 if case.device.kind == "cpu" else TORCH_DTYPE[spec.element(case.problem)]
            operands[name] = value.to(dtype).contiguous()
    return operands


def _widen(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def check_kernel(kernel: Kernel, fixture: StageFixture, tolerance: float) -> float:
    """Runs a kernel on poisoned outputs: what it leaves unwritten is wrong, not left over from another."""
    references, sizes = reference_cases(fixture)
    operands, expected = references[kernel.stage.name]
    changed = {name: operands[name].clone() for name in expected.keys() & kernel.stage.inputs.keys()}  # in place
    where = torch_device(fixture.device)
    outputs = kernel.allocate(sizes, where)
    for slot, output in zip((slot for slot in kernel.slots if slot.written), outputs, strict=True):
        if output is not None and output.is_floating_point() and not slot.added:
            output.fill_(float("nan"))
    kernel.launch({**operands, **changed}, outputs, where)
    named = changed | dict(zip(kernel.stage.outputs, outputs, strict=True))
    expected = {name: x for name, x in expected.items() if name in changed or named[name] is not None}
    return check(named, expected, tolerance, kernel.stage.rms_floor)


def stage_launch(kernel: Kernel, fixture: StageFixture) -> Callable[[], Any]:
    inputs_of, sizes = record(fixture)
    where = torch_device(fixture.device)
    outputs = kernel.allocate(sizes, where)
    return functools.partial(kernel.launch, inputs_of[kernel.stage.name], outputs, where)
