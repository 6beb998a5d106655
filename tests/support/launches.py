"""Stages launched one by one, in poisoned memory, and their references composed: what tests of templates share."""

from __future__ import annotations

from typing import Any

import torch
from support.cases import F64, TORCH, Call, slope_terms
from torch import Tensor

from kda_tl import templates
from kda_tl.bench.timing import error_weight
from kda_tl.core.layout import make_layout
from kda_tl.core.pipeline import RESULTS, Pipeline
from kda_tl.core.stage import Case, Config, Operands, Stage
from kda_tl.reference import relative_error
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.kernel import Kernel
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.tune.compile_only import StaticJob

GUARD = 64  # elements of NaN before and after a tensor

Record = tuple[Stage, dict[str, Any]]


def run_references(
    pipeline: Pipeline, case: Case, tensors: dict[str, Any], given: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[Record]]:
    """Composes the stages' references. Returns the pass's results, and each stage with the inputs it got.

    Of the tensors, those whose names are given spare the stages that make them.
    """
    records: list[Record] = []

    def launch(stage: Stage, inputs: dict[str, Any]) -> list[Tensor | None]:
        records.append((stage, inputs))
        outputs = stage.reference(case, Operands(**inputs))
        return [outputs.get(name) for name in stage.outputs]

    return pipeline.flow(case.problem, RESULTS[pipeline.direction], given).run(launch, tensors), records


def guarded(tensor: Tensor, fill: bool) -> tuple[Tensor, Tensor]:
    """A copy (or, with fill, all NaN) that lies between NaN; and the memory it lies in."""
    buffer = torch.full((tensor.numel() + 2 * GUARD,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    inside = buffer[GUARD : GUARD + tensor.numel()].view(tensor.shape)
    if not fill:
        inside.copy_(tensor)
    return inside, buffer


def launch_poisoned(kernel: Kernel, inputs: dict[str, Any], sizes: dict[str, int]) -> dict[str, Tensor]:
    """Outputs of a kernel that met NaN in them and around every tensor, and wrote nothing but them."""
    device = next(x.device for x in inputs.values() if isinstance(x, Tensor))
    given = {
        name: guarded(x, fill=False)[0] if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    written = [slot for slot in kernel.slots if slot.written]  # those that are added to are zeros already
    pairs = [
        None if out is None else guarded(out, fill=not slot.added)
        for slot, out in zip(written, kernel.allocate(sizes, device), strict=True)
    ]
    kernel.launch(given, [None if pair is None else pair[0] for pair in pairs], device)
    for name, pair in zip(kernel.stage.outputs, pairs, strict=True):
        if pair is not None:
            outside = torch.cat([pair[1][:GUARD], pair[1][-GUARD:]])
            assert outside.isnan().all(), f"{kernel.stage.name} writes outside of {name}"
    return {name: pair[0] for name, pair in zip(kernel.stage.outputs, pairs, strict=True) if pair is not None}


def reverse_chunks(stage: Stage, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same work with the chunks in opposite order, for stages that take them in any.

    The C target runs thread blocks one after the other, so what a block writes past its rows would be made good by
    the next one: backwards it is seen.
    """
    if "seq_chunks" in stage.inputs:
        return inputs
    chunked = {name for name in stage.inputs if stage.specs[name].dims[0] == "NT"}
    return {name: x.flip(0) if name in chunked and x is not None else x for name, x in inputs.items()}


def take_apart(stage: Stage, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name; where a dimension is a number, so many kinds of rows lie in one, and each is one by itself.

    But for those of bf16 whatever the io dtype is: they are halves of numbers, and are added.
    """
    apart = {}
    for name, x in tensors.items():
        spec = stage.specs[name]
        axis = next((axis for axis, dim in enumerate(spec.dims) if dim.isdigit()), None)
        if axis is None:
            apart[name] = x
        elif spec.dtype == "bf16":
            apart[name] = x.double().sum(axis)
        else:
            apart.update({f"{name} {n}": row for n, row in enumerate(x.unbind(axis))})
    return apart


def terms_of_sums(case: Case, x: Operands, expected: dict[str, Tensor]) -> dict[str, float]:
    """Norms of a chunk's sums for A_log and dt_bias, if none of their terms had the opposite sign of another.

    They sum the gate's gradient over tokens, which is a running sum itself, with errors of one sign: where terms
    cancel, the size of the sum says nothing of how exact it can be. Call.gradient_errors judges the whole sums so.
    """
    dg, sizes = expected.get("dg"), {}
    if dg is not None and "dA_log_part" in expected:
        terms = slope_terms(case.problem, x.g, x.dt_bias, dg.abs()).abs()
        sizes["dA_log_part"] = split_chunks(terms, x.chunk_tokens, case.BT).flatten(2).sum(2)
    if dg is not None and "ddt_bias_part" in expected:
        sizes["ddt_bias_part"] = split_chunks(dg.abs(), x.chunk_tokens, case.BT).sum(2)
    return {name: float(size.norm()) for name, size in sizes.items()}


def stage_errors(kernel: Kernel, inputs: dict[str, Any], sizes: dict[str, int]) -> dict[str, float]:
    """Error of each output of a kernel against the stage's reference on the very same numbers, as a tuner judges it.

    But kinds of rows that lie in one tensor are judged one by one: small ones would be lost beside large ones; and sums
    whose terms cancel are judged by their terms, see :func:`terms_of_sums`.
    """
    stage, case = kernel.stage, kernel.case
    given = {}
    for name, x in inputs.items():
        given[name] = x
        if isinstance(x, Tensor) and x.is_floating_point():
            cpu = case.device.kind == "cpu"
            given[name] = x.to(torch.float32 if cpu else TORCH[stage.specs[name].element(case.problem)])
    exact = {name: x.to(F64) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in given.items()}
    outputs = launch_poisoned(kernel, given, sizes)
    expected = stage.reference(case, Operands(**exact))
    assert outputs.keys() == expected.keys()
    sums = terms_of_sums(case, Operands(**exact), expected)
    found, expected = take_apart(stage, outputs), take_apart(stage, expected)
    weight = {name: error_weight(truth, stage.rms_floor, name) for name, truth in expected.items()}
    for name, terms in sums.items():
        size = float(expected[name].norm())
        weight[name] *= size / max(size, terms) if size else 1.0
    return {name: weight[name] * relative_error(found[name], truth) for name, truth in expected.items()}


def sizes_of(call: Call, BT: int, segments: int = 1) -> dict[str, int]:
    """Run-time dimensions of a call."""
    return make_layout(call.bounds, BT, torch.device("cpu"), segments).sizes


def inspect_job(job: tuple[str, Case]) -> tuple[str, dict[str, Any]]:
    """Source of a stage's default, and what its binary says of itself: for worker processes."""
    name, case = job
    stage = templates.load(name)
    config = stage.default(case)
    return compile_stage(stage, case, config).source, StaticJob(stage=stage, case=case, config=config).run()


def compile_job(job: tuple[str, Case, Config | None]) -> None:
    """Compiles a stage (its default unless a config is given) into this user's cache: for worker processes."""
    name, case, config = job
    stage = templates.load(name)
    compile_stage(stage, case, config or stage.default(case))
