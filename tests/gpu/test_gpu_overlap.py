"""On the GPU that is here: a kernel that begins while the one before it still runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import Call, draw_call, operator_arguments
from support.gpu_calls import assert_same_bits, outputs
from support.gpu_cases import FORWARD, device, hopper_plan
from support.launches import TORCH, sizes_of

import kda_tl
from kda_tl.core.stage import Stage
from kda_tl.runtime.dispatch import build_program

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("defaults_only"), pytest.mark.timeout(500)]

NAME = "prep-gdn-softplus-K128-V128-GVA-vk"
REPEATS = 20


def run_in_turn(call: Call) -> list[torch.Tensor]:
    """The results of the same kernels, each started when the one before it has ended."""
    problem, where = call.problem, torch.device("cuda", 0)
    program = build_program(hopper_plan(problem), problem.without_lengths(), device())
    sizes = sizes_of(call, 64)

    def launch(stage: Stage, inputs: dict[str, Any]) -> Sequence[Any]:
        given = {
            name: x.to(TORCH[stage.specs[name].element(problem)])
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for name, x in inputs.items()
        }
        torch.cuda.synchronize()
        return program.kernels[stage.name](given, sizes, where)

    results = program.flow().run(launch, call.tensors(64))
    torch.cuda.synchronize()
    return [results[name] for name in ("o", "ht")]


@pytest.mark.parametrize("heads", [(16, 32), (3, 6), (16, 64)], ids=str)
@pytest.mark.parametrize("lengths", [(4000,), (1000, 0, 65, 1, 1934)], ids=["one", "several"])
def test_kernels_that_overlap_give_the_bits_of_kernels_in_turn(
    heads: tuple[int, int], lengths: tuple[int, ...], seed: int
) -> None:
    """A chunk that is read before it is in memory is the poison of the workspace, or an earlier call's."""
    problem = replace(FORWARD[NAME][1], H=heads[0], HV=heads[1])
    call = draw_call(problem, lengths, seed, varlen=True, device="cuda")
    arguments = operator_arguments(call)
    expected = run_in_turn(call)
    with kda_tl.pin(hopper_plan(problem)):
        for _ in range(REPEATS):
            poison = torch.full((64 << 20,), torch.nan, device="cuda")  # what the allocator gives next
            del poison
            found = outputs(arguments, problem.operator)
            assert_same_bits([x.view(y.shape) for x, y in zip(found, expected, strict=True)], expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = outputs(arguments, problem.operator)
        for _ in range(REPEATS):
            for x in captured:
                x.fill_(torch.nan)
            graph.replay()
            assert_same_bits([x.view(y.shape) for x, y in zip(captured, expected, strict=True)], expected)
