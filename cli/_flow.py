"""``kda-tl show --pipeline``: how tensors flow through a pipeline, and the memory they take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kda_tl.bench.workloads import Workload
from kda_tl.cli._console import ExitCode, Terminal, format_bytes, make_table
from kda_tl.cli._options import SHOWN_WORKLOAD
from kda_tl.cli._problem import read_one_workload, require_pass
from kda_tl.cli._target import find_one_known
from kda_tl.core.device import Device
from kda_tl.core.stage import Case, Plan
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.kernel import Slot
from kda_tl.tune.plan_search import require_pipeline


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch: bytes of the tensors it makes, what is let go after it, and what is alive while it runs."""

    stage: str
    reads: tuple[str, ...]
    makes: Mapping[str, int]
    frees: tuple[str, ...]
    live_bytes: int


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A pipeline's flow; ``given`` are bytes of the caller's tensors, which no launch frees."""

    pipeline: str
    problem: str
    gpu: str
    BT: int
    given: Mapping[str, int]
    steps: tuple[Step, ...]
    peak_bytes: int
    residuals: Mapping[str, int]


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Draws the pipeline for one workload, in the pass that the pipeline computes."""
    device = find_one_known(args.gpu or "auto", terminal)
    direction = require_pipeline(args.pipeline, ()).direction
    workload = read_one_workload(args, [SHOWN_WORKLOAD[direction][device.kind]])
    workload = require_pass(workload, direction, args.pipeline)
    plan = default_plan(workload.problem(), device, pipeline=args.pipeline)
    drawing = _draw(plan, workload, device)
    terminal.show(drawing, *_tables(drawing))
    return ExitCode.OK


def _draw(plan: Plan, workload: Workload, device: Device) -> Drawing:
    from kda_tl.templates.pipelines import PIPELINES

    pipeline, problem = PIPELINES[plan.pipeline], workload.problem()
    case = Case(problem=problem, device=device, BT=plan.BT, BC=plan.BC)
    sizes = workload.declaration.sizes(workload, plan.BT, pipeline.segments)
    flow = pipeline.flow(problem)
    found: dict[str, int] = {}
    given: dict[str, int] = {}
    steps: list[Step] = []
    live = 0
    for stage, frees in zip(flow.stages, flow.frees, strict=True):
        reads, writes = stage.tensors_of(problem)
        for name in (*reads, *writes):
            slot = Slot.of(name, {**stage.inputs, **stage.outputs}[name], case, written=name in writes)
            found.setdefault(name, math.prod(slot.shape(sizes)) * slot.dtype.itemsize)
        given |= {name: found[name] for name in reads if not any(name in step.makes for step in steps)}
        makes = {name: found[name] for name in writes}
        live += sum(makes.values())
        let_go = tuple(name for name in frees if name not in given)
        steps.append(Step(stage=stage.name, reads=tuple(reads), makes=makes, frees=let_go, live_bytes=live))
        live -= sum(found[name] for name in let_go)
    return Drawing(
        pipeline=pipeline.name,
        problem=problem.key,
        gpu=device.slug,
        BT=plan.BT,
        given=given,
        steps=tuple(steps),
        peak_bytes=max(step.live_bytes for step in steps),
        residuals={name: found[name] for name in pipeline.residuals if name in found},
    )


def _tables(drawing: Drawing) -> Iterator[Any]:
    yield f"{drawing.pipeline} on {drawing.gpu}" + (f", chunks of {drawing.BT} tokens" if drawing.BT else "")
    yield drawing.problem.replace("-", " ") + "\n"  # so that it wraps between words
    rows = [("(given)", *_columns(drawing.given), "", "")]
    for step in drawing.steps:
        columns = _columns(step.makes, drawing.residuals)
        rows.append((step.stage, *columns, ", ".join(step.frees), format_bytes(step.live_bytes)))
    yield make_table("stage", "makes", "bytes", "frees", "alive", right=("bytes", "alive"), rows=rows)
    given, most = format_bytes(sum(drawing.given.values())), format_bytes(drawing.peak_bytes)
    yield f"at most {most} alive, results included, beside {given} that are given"
    if drawing.residuals:
        spared = [step.stage for step in drawing.steps if step.makes.keys() & drawing.residuals.keys()]
        total = format_bytes(sum(drawing.residuals.values()))
        yield f"* residuals, {total}: kept by the forward, they spare {', '.join(spared)}"


def _columns(tensors: Mapping[str, int], marked: Collection[str] = ()) -> tuple[str, str]:
    """Names and sizes, a tensor a line."""
    names = "\n".join(f"{name}{'*' * (name in marked)}" for name in tensors)
    return names, "\n".join(format_bytes(count) for count in tensors.values())
