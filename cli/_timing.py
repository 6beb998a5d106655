"""Timing of a workload: its stages one by one, then whole calls of the operator and its peers in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.bench import operator_tensors, torch_device
from kda_tl.cli._call import make_launch
from kda_tl.cli._console import one_line
from kda_tl.cli._floor import Ceilings, Row, call_bytes
from kda_tl.cli._peers import find_peers
from kda_tl.device import Device
from kda_tl.dispatch import prepare
from kda_tl.errors import CompileError
from kda_tl.measure import cuda_graph, summarise, time_host, time_interleaved, time_launch
from kda_tl.program import Program
from kda_tl.reference import relative_error
from kda_tl.stage import Case, Cost, Stage
from kda_tl.workloads import Workload

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
    """A whole call, as issued from Python, as a CUDA graph, and the host's part of it."""

    name: str
    eager_us: float
    eager_mad_us: float
    graph_us: float | None
    host_us: float
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
    choice, program = prepare(workload.problem(), device)
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
    tensors, sizes = operator_tensors(workload, program.plan.BT, where)
    case = Case(problem=workload.problem(), device=device, BT=program.plan.BT, BC=program.plan.BC)
    rows: list[Row] = []

    def run(stage: Stage, **inputs: Any) -> tuple[Any, ...]:
        kernel = program.kernels[stage.name]
        outputs = kernel.allocate(sizes, where)
        launch = functools.partial(kernel.launch, inputs, outputs, where)
        median, mad = summarise(time_launch(launch, where, reps=settings.reps * settings.rounds))
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

    program.compute(run, tensors)
    return tuple(rows)


def _time_calls(
    workload: Workload, device: Device, ceilings: Ceilings, settings: Settings, program: Program
) -> tuple[tuple[CallRow, ...], dict[str, str]]:
    """The operator and its peers, round by round in turns; of a backward, without the forward before it."""
    where = torch_device(device)
    inputs = workload.inputs(where)
    calls: dict[str, Call] = {OURS: make_launch(inputs, workload.direction)}
    left_out: dict[str, str] = {}
    if settings.peers:
        peers, left_out = find_peers(workload, inputs)
        calls |= peers
    outputs = _try_calls(calls, left_out)
    calls = {name: calls[name] for name in outputs}
    eager_only = workload.direction == "bwd"  # it runs on the stream of its forward, which is not captured
    graphs = {name: graph for name, call in calls.items() if not eager_only and (graph := _capture(call, device))}
    eager = time_interleaved(calls, where, rounds=settings.rounds, reps=settings.reps)
    replayed = time_interleaved(graphs, where, rounds=settings.rounds, reps=settings.reps)
    eager_us, graph_us = ({name: summarise(x)[0] for name, x in rounds.items()} for rounds in (eager, replayed))
    floor = ceilings.floor_us(_least_cost(workload, program))
    rows = [
        CallRow(
            name=name,
            eager_us=eager_us[name],
            eager_mad_us=summarise(eager[name])[1],
            graph_us=graph_us.get(name),
            host_us=time_host(call, where, reps=100 if device.kind == "cuda" else 3),
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


def _try_calls(calls: Mapping[str, Call], left_out: dict[str, str]) -> dict[str, torch.Tensor]:
    """What each call computes; a peer that refuses the problem is left out, and why."""
    outputs = {}
    for name, call in calls.items():
        try:
            outputs[name] = call()[0]
        except Exception as error:  # peers refuse however they like
            if name == OURS:
                raise
            left_out[name] = one_line(error)
    return outputs


def _least_cost(workload: Workload, program: Program) -> Cost:
    """Inputs in and outputs out once; the FLOPs are those of the stages."""
    plan, problem = program.plan, workload.problem()
    NT = sum(-(-(end - start) // plan.BT) for start, end in zip(workload.bounds, workload.bounds[1:], strict=False))
    sizes = {"tokens": workload.tokens, "NT": NT, "N": len(workload.bounds) - 1}
    costs = [k.stage.cost(k.case, sizes) for k in program.kernels.values()]
    return Cost(bytes=call_bytes(problem), flops=sum(cost.flops for cost in costs))


def _capture(call: Call, device: Device) -> Callable[[], Any] | None:
    """The call as a CUDA graph, None on the CPU or if it cannot be captured."""
    if device.kind != "cuda":
        return None
    try:
        return cuda_graph(call)
    except RuntimeError:  # it allocates, synchronises or asks the host for something
        torch.cuda.synchronize()
        return None
