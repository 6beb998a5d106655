"""Timing of a workload: its stages one by one, then whole calls of the operator and its peers in turns.

Of a backward, whole calls are training steps: PyTorch frees and allocates as it does in training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.bench.fixtures import operator_tensors, torch_device
from kda_tl.bench.timing import cuda_graph, summarise, time_host, time_interleaved, time_launch
from kda_tl.bench.workloads import Workload
from kda_tl.cli._call import make_step
from kda_tl.cli._console import one_line
from kda_tl.cli._floor import Ceilings, Row, call_bytes
from kda_tl.cli._peers import Operator, find_peers
from kda_tl.core.device import Device
from kda_tl.core.layout import make_layout
from kda_tl.core.stage import Case, Cost, Stage
from kda_tl.errors import CompileError
from kda_tl.reference import relative_error
from kda_tl.runtime.dispatch import load_program
from kda_tl.runtime.program import Program

OURS = "kda_tl"
Call = Callable[[], tuple[Any, ...]]  # of tensors; the first is compared


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured."""

    reps: int
    rounds: int
    peers: bool
    stages: bool


@dataclass(frozen=True, kw_only=True)
class CallRow:
    """A whole call, as issued from Python, as a CUDA graph, and the host's part of it; of a backward, with its forward.

    ``peak_bytes`` is what a call adds to the device's allocated memory at most, None on the CPU.
    """

    name: str
    eager_us: float
    eager_mad_us: float
    graph_us: float | None
    host_us: float
    peak_bytes: int | None
    floor_us: float
    share_of_floor: float
    speed: float
    difference: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that was measured of one workload."""

    workload: str
    problem: str
    plan: str
    step: str
    stages: tuple[Row, ...]
    calls: tuple[CallRow, ...]
    left_out: Mapping[str, str]


def bench_workload(workload: Workload, device: Device, ceilings: Ceilings, settings: Settings) -> Result:
    """Times a workload with the plan that serves it."""
    choice, program = load_program(workload.problem(), device)
    if program is None:
        raise CompileError(f"{choice.reason}.")
    with torch.no_grad():
        stages = _time_stages(program, workload, device, ceilings, settings) if settings.stages else ()
        calls, left_out = _time_calls(workload, device, ceilings, settings, program)
    plan = f"{program.plan.pipeline} BT={program.plan.BT} BC={program.plan.BC}"
    return Result(
        workload=workload.name,
        problem=workload.problem().key,
        plan=plan,
        step=choice.step,
        stages=stages,
        calls=calls,
        left_out=left_out,
    )


def _time_stages(
    program: Program, workload: Workload, device: Device, ceilings: Ceilings, settings: Settings
) -> tuple[Row, ...]:
    """Every stage by itself, on what the stages before it made."""
    where = torch_device(device)
    tensors, sizes = operator_tensors(workload, program.plan.BT, where, segments=program.pipeline.segments)
    case = Case(problem=workload.problem(), device=device, BT=program.plan.BT, BC=program.plan.BC)
    rows: list[Row] = []

    def launch(stage: Stage, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        kernel = program.kernels[stage.name]
        outputs = kernel.allocate(sizes, where)
        again = functools.partial(kernel.launch, inputs, outputs, where)
        median, mad = summarise(time_launch(again, where, reps=settings.reps * settings.rounds))
        cost = stage.cost(case, sizes)
        rows.append(
            Row(
                name=stage.name,
                config=kernel.config.as_dict(),
                median_us=median,
                mad_us=mad,
                bytes=cost.bytes,
                flops=cost.flops,
                floor_us=ceilings.floor_us(cost),
            )
        )
        return tuple(outputs)

    program.flow().run(launch, tensors)
    return tuple(rows)


def _time_calls(
    workload: Workload, device: Device, ceilings: Ceilings, settings: Settings, program: Program
) -> tuple[tuple[CallRow, ...], dict[str, str]]:
    """The operator and its peers, round by round in turns; of a backward, whole steps with the forward before it."""
    where = torch_device(device)
    inputs = workload.inputs(where)
    operators: dict[str, Operator] = {OURS: lambda given: workload.declaration.call(**given)}
    left_out: dict[str, str] = {}
    if settings.peers:
        peers, left_out = find_peers(workload, where)
        operators |= peers
    calls, outputs = _try_operators(operators, inputs, workload, left_out)
    graphs = {name: graph for name, call in calls.items() if (graph := _capture(call, device))}
    eager = time_interleaved(calls, where, rounds=settings.rounds, reps=settings.reps)
    replayed = time_interleaved(graphs, where, rounds=settings.rounds, reps=settings.reps)
    eager_us, graph_us = ({name: summarise(x)[0] for name, x in rounds.items()} for rounds in (eager, replayed))
    floor = ceilings.floor_us(_least_cost(workload, device, program))
    rows = [
        CallRow(
            name=name,
            eager_us=eager_us[name],
            eager_mad_us=summarise(eager[name])[1],
            graph_us=graph_us.get(name),
            host_us=time_host(call, where, reps=100 if device.kind == "cuda" else 3),
            peak_bytes=_peak_bytes(call, where),
            floor_us=floor,
            share_of_floor=floor / graph_us.get(name, eager_us[name]),
            speed=_compare(graph_us if {name, OURS} <= graph_us.keys() else eager_us, name),
            difference=relative_error(outputs[name], outputs[OURS]),
        )
        for name, call in calls.items()
    ]
    return tuple(rows), left_out


def _compare(times_us: Mapping[str, float], name: str) -> float:
    return times_us[OURS] / times_us[name]


def _try_operators(
    operators: Mapping[str, Operator], inputs: Mapping[str, Any], workload: Workload, left_out: dict[str, str]
) -> tuple[dict[str, Call], dict[str, torch.Tensor]]:
    """Calls to time, and what each computes; a peer that refuses the problem is left out, and why."""
    calls: dict[str, Call] = {}
    outputs = {}
    for name, operator in operators.items():
        try:
            call: Call = functools.partial(operator, inputs)
            if workload.direction == "bwd":
                call = make_step(operator, inputs, workload.declaration.tensors)
            outputs[name] = call()[0]
            calls[name] = call
        except Exception as error:  # peers refuse however they like
            if name == OURS:
                raise
            left_out[name] = one_line(error)
    return calls, outputs


def _least_cost(workload: Workload, device: Device, program: Program) -> Cost:
    """Inputs in and outputs out once, for each pass of a call; the FLOPs are those of the stages."""
    problem = workload.problem()
    programs, moved = [program], call_bytes(problem)
    if problem.direction == "bwd":
        forward = replace(problem, direction="fwd")
        programs += [found for found in (load_program(forward, device)[1],) if found]
        moved += call_bytes(forward)
    flops = 0
    for each in programs:
        sizes = make_layout(workload.bounds, each.plan.BT, torch.device("cpu"), each.pipeline.segments).sizes
        flops += sum(kernel.stage.cost(kernel.case, sizes).flops for kernel in each.kernels.values())
    return Cost(bytes=moved, flops=flops)


def _peak_bytes(call: Call, where: torch.device) -> int | None:
    """Device memory that a call needs beside what is allocated already; its results are part of it."""
    if where.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _capture(call: Call, device: Device) -> Callable[[], Any] | None:
    """The call as a CUDA graph, None on the CPU or if it cannot be captured."""
    if device.kind != "cuda":
        return None
    try:
        return cuda_graph(call)
    except RuntimeError:  # it allocates, synchronises or asks the host for something
        torch.cuda.synchronize()
        return None
