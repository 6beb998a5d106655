"""Timing of a workload: its stages one by one, then whole calls of the operator and its peers in turns.

Of a backward, whole calls are training steps: PyTorch frees and allocates as it does in training.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.bench.fixtures import operator_tensors, torch_device
from kda_tl.bench.timing import cuda_graph, summarise, time_host, time_interleaved, time_launch
from kda_tl.bench.workloads import Workload
from kda_tl.cli._call import make_step
from kda_tl.cli._console import one_line
from kda_tl.cli._peers import Peer, find_peers
from kda_tl.cli._report import OURS, CallRow, Ceilings, Result, Row
from kda_tl.core.device import Device
from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Cost, Stage
from kda_tl.errors import CompileError
from kda_tl.ops import find_operator
from kda_tl.reference import relative_error
from kda_tl.runtime.dispatch import load_program
from kda_tl.runtime.program import Program

Call = Callable[[], tuple[Any, ...]]  # of tensors; the first is compared
_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_MATMUL = {"cuda": (8192, torch.bfloat16), "cpu": (1024, torch.float32)}
_CEILING_REPS = {"cuda": 20, "cpu": 5}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where and how much is measured."""

    device: Device
    ceilings: Ceilings
    reps: int
    rounds: int
    peers: bool
    stages: bool


def measure_ceilings(device: Device) -> Ceilings:
    """Times a copy and a matmul on the device."""
    where, reps = torch_device(device), _CEILING_REPS[device.kind]
    source = torch.ones(_COPY_BYTES[device.kind], dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy_us = statistics.median(time_launch(lambda: target.copy_(source), where, reps=reps))
    size, dtype = _MATMUL[device.kind]
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    matmul_us = statistics.median(time_launch(lambda: a @ b, where, reps=reps))
    moved, computed = 2 * source.numel() / copy_us * 1e6, 2 * size**3 / matmul_us * 1e6
    return Ceilings(bytes_per_s=moved, flops_per_s=computed, dtype=str(dtype).removeprefix("torch."))


def bench_workload(workload: Workload, settings: Settings) -> Result:
    """Times a workload with the plan that serves it."""
    choice, program = load_program(workload.problem(), settings.device)
    if program is None:
        raise CompileError(f"{choice.reason}.")
    with torch.no_grad():
        stages = _time_stages(workload, program, settings) if settings.stages else ()
        calls, left_out = _time_calls(workload, program, settings)
    return Result(
        workload=workload.name,
        problem=workload.problem().key,
        plan=program.plan.label.replace(",", ""),
        step=choice.step,
        stages=stages,
        calls=calls,
        left_out=left_out,
    )


def _time_stages(workload: Workload, program: Program, settings: Settings) -> tuple[Row, ...]:
    """Every stage by itself, on what the stages before it made."""
    where, plan = torch_device(settings.device), program.plan
    tensors, sizes = operator_tensors(workload, plan.BT, where, segments=program.pipeline.segments)
    case = Case(problem=workload.problem(), device=settings.device, BT=plan.BT, BC=plan.BC)
    rows: list[Row] = []

    def launch(stage: Stage, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        kernel = program.kernels[stage.name]
        outputs = kernel.allocate(sizes, where)
        again = functools.partial(kernel.launch, inputs, outputs, where)
        median, mad = summarise(time_launch(again, where, reps=settings.reps * settings.rounds))
        cost = stage.cost(case, sizes)
        row = Row(
            name=stage.name,
            config=kernel.config.as_dict(),
            median_us=median,
            mad_us=mad,
            bytes=cost.bytes,
            flops=cost.flops,
            roofline_us=settings.ceilings.roofline_us(cost),
        )
        rows.append(row)
        return tuple(outputs)

    program.flow().run(launch, tensors)
    return tuple(rows)


def _time_calls(
    workload: Workload, program: Program, settings: Settings
) -> tuple[tuple[CallRow, ...], Mapping[str, str]]:
    """The operator and its peers, round by round in turns; of a backward, whole steps with the forward before it."""
    device, where = settings.device, torch_device(settings.device)
    ours = {OURS: Peer(lambda given: workload.declaration.call(**given))}
    peers, left_out = find_peers(workload, where) if settings.peers else ({}, {})
    calls, outputs, refused = _try_peers(ours | peers, workload.inputs(where), workload)
    graphs = {name: graph for name, call in calls.items() if (graph := _capture(call, device))}

    def time_all(launches: Mapping[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
        rounds = time_interleaved(launches, where, rounds=settings.rounds, reps=settings.reps)
        return {name: summarise(medians) for name, medians in rounds.items()}

    eager, replayed = time_all(calls), time_all(graphs)
    roofline = settings.ceilings.roofline_us(_least_cost(workload, program, device))
    rows = []
    for name, call in calls.items():
        shared = replayed if {name, OURS} <= replayed.keys() else eager
        row = CallRow(
            name=name,
            eager_us=eager[name][0],
            eager_mad_us=eager[name][1],
            graph_us=replayed[name][0] if name in replayed else None,
            host_us=time_host(call, where, reps=100 if device.kind == "cuda" else 3),
            peak_bytes=_peak_bytes(call, where),
            roofline_us=roofline,
            roofline_fraction=roofline / replayed.get(name, eager[name])[0],
            speed=shared[OURS][0] / shared[name][0],
            difference=relative_error(outputs[name], outputs[OURS]),
        )
        rows.append(row)
    return tuple(rows), left_out | refused


def _try_peers(
    peers: Mapping[str, Peer], inputs: Mapping[str, Any], workload: Workload
) -> tuple[dict[str, Call], dict[str, torch.Tensor], dict[str, str]]:
    """Calls to time, what each computes, and of a peer that refuses the problem, why. Each has states of its own."""
    calls: dict[str, Call] = {}
    outputs: dict[str, torch.Tensor] = {}
    refused: dict[str, str] = {}
    for name, peer in peers.items():
        written = [each for each in workload.declaration.written if inputs.get(each) is not None]
        own = {**inputs, **{each: inputs[each].clone() for each in written}}
        try:
            given = peer.prepare(own)
            call: Call = functools.partial(peer.call, given)
            if workload.direction == "bwd":
                call = make_step(peer.call, given, find_operator(workload.operator).tensors)
            outputs[name] = call()[0]
            calls[name] = call
        except Exception as error:  # peers refuse however they like
            if name == OURS:
                raise
            refused[name] = one_line(error)
    return calls, outputs, refused


def _least_cost(workload: Workload, program: Program, device: Device) -> Cost:
    """Inputs in and outputs out once, for each pass of a call; the FLOPs are those of the stages.

    A pass of one stage has no intermediates, and must move what that stage must.
    """
    problem = workload.problem()
    passes: dict[Problem, Program | None] = {problem: program}
    if problem.direction == "bwd":
        forward = replace(problem, direction="fwd")
        passes[forward] = load_program(forward, device)[1]
    moved = flops = 0
    for posed, each in passes.items():
        costs: list[Cost] = []
        if each is not None:
            sizes = workload.declaration.sizes(workload, each.plan.BT, each.pipeline.segments)
            costs = [kernel.stage.cost(kernel.case, sizes) for kernel in each.kernels.values()]
        flops += sum(cost.flops for cost in costs)
        moved += costs[0].bytes if len(costs) == 1 else call_bytes(posed)
    return Cost(bytes=moved, flops=flops)


def call_bytes(problem: Problem) -> int:
    """Bytes that any way to compute a pass must move: its inputs once in, its outputs once out."""
    p = problem
    io, g, beta = (TORCH_DTYPE[dtype].itemsize for dtype in (p.dtype, p.g_dtype, p.beta_dtype))
    token = (2 * p.H * p.K + p.HV * p.V) * io + p.HV * p.G * g + p.HV * beta
    states = p.initial_state + p.final_state
    if p.direction == "bwd":  # a gradient for each of these, and do instead of o
        token, states = 2 * token, states + p.initial_state
    return p.tokens * (token + p.HV * p.V * io) + p.sequences * p.HV * p.K * p.V * 4 * states


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
