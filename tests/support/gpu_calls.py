"""Calls on the GPU that is here, drawn at a decay, and kernels against their references."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import LOWEST, TENSORS, Call, draw_backward, draw_call, operator_arguments
from support.gpu_cases import BACKWARD, FORWARD, PACKED, pipeline_of, stage_case
from support.launches import run_references, sizes_of, stage_errors

from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Config, Stage
from kda_tl.errors import CompileError
from kda_tl.ops import load_all
from kda_tl.runtime.compile import compile_stage


def draw(
    name: str,
    lengths: tuple[int, ...],
    seed: int,
    decay: str = "mixed",
    varlen: bool = False,
    lower_bound: float | None = None,
    **changes: Any,
) -> Call:
    """A call on the GPU, of a specialisation but for some fields; steep: about -3.5 nats a token, slow: about -0.005 at
    any lower bound.
    """
    problem = replace((FORWARD | BACKWARD)[name][1], **changes)
    shape = (sum(lengths), problem.HV, problem.G)
    raw = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    given = {}
    if decay == "steep":
        lower_bound = LOWEST
    if decay == "slow" and problem.gate == "safe":  # g is nearly lower_bound * exp(raw): the bound changes, g does not
        lower_bound = random.Random(f"{seed}/{name}").uniform(LOWEST, 0.1 * LOWEST)
        raw = raw + math.log(LOWEST / lower_bound)
    if decay != "mixed":
        raw = raw + (0.5 if decay == "steep" else -7.0)
        given["g"] = -5.0 * raw.sigmoid() if problem.gate == "log" else raw
    return draw_call(problem, lengths, seed, varlen=varlen, device="cuda", lower_bound=lower_bound, **given)


def spiked_gates(problem: Problem, tokens: int) -> torch.Tensor:
    """Every eighth token steep: between two nothing decays, while anchors lie further apart than fp32 reaches."""
    log = problem.gate == "log"
    g = torch.full((tokens, problem.HV, problem.G), 0.0 if log else -9.0, dtype=torch.float64)
    g[3::8] = -50.0 if log else 30.0
    return g


def outputs(arguments: dict[str, Any], operator: str = "chunk_kda") -> list[torch.Tensor]:
    return [x for x in load_all()[operator].call(**arguments) if x is not None]


def seeds_of(call: Call, batch: int = 1) -> list[torch.Tensor]:
    """Gradients of o and, where the problem has it, of the final state."""
    do = call.x["do"].unflatten(0, (batch, -1)).to(operator_arguments(call, batch)["v"].dtype)
    return [do] if call.x["dht"] is None else [do, call.x["dht"].float()]


def leaves_of(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the tensors, which require gradients."""
    present = {name: arguments[name] for name in TENSORS if arguments.get(name) is not None}
    return {name: x.clone().requires_grad_() for name, x in present.items()}


def differentiate(
    arguments: dict[str, Any],
    leaves: dict[str, torch.Tensor],
    seeds: list[torch.Tensor],
    operator: str = "chunk_kda",
) -> list[torch.Tensor]:
    results = outputs(arguments | leaves, operator)
    return list(torch.autograd.grad(results, list(leaves.values()), seeds))


def assert_same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} elements differ"


def check_stage(
    stage: Stage,
    name: str,
    config: Config,
    seed: int,
    pipeline: Pipeline | None = None,
    lengths: tuple[int, ...] = PACKED,
    decay: str = "mixed",
) -> None:
    """A kernel against its reference, on what the references of the stages before it made."""
    case = stage_case(stage.name, name)
    if next(stage.candidates(case), None) is None:
        with pytest.raises(CompileError, match=re.escape(config.reject(case) or "")):
            compile_stage(stage, case, config)
        return
    call, pipeline = draw(name, lengths, seed, decay, varlen=True), pipeline or pipeline_of(stage.name)
    if pipeline.direction == "bwd":
        call = draw_backward(call, seed)
    case = replace(case, problem=call.problem)
    _, records = run_references(pipeline, case, call.tensors(case.BT, pipeline.segments))
    inputs = next((inputs for recorded, inputs in records if recorded.name == stage.name), None)
    if inputs is None:
        assert not stage.tensors_of(call.problem)[1]
        return
    errors = stage_errors(compile_stage(stage, case, config), inputs, sizes_of(call, case.BT, pipeline.segments))
    assert max(errors.values()) < stage.tolerance[call.problem.dtype], f"{errors} {config}"
