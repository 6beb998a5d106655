"""``workspace_bytes``: what a pass allocates, told before anything is compiled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import (
    bounds_of,
    draw_call,
    draw_lengths,
    draw_problem,
    family_of,
    forget_compilers,
    operator_arguments,
)
from support.chunked import CHUNKED
from support.operator_cases import SMALL

from kda_tl import workspace_bytes
from kda_tl.core.layout import make_layout
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, static_sizes
from kda_tl.database.gpus import known_device
from kda_tl.errors import InputError, UnsupportedError
from kda_tl.ops.kda import chunk_kda
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.program import record
from kda_tl.runtime.replay import Workspace
from kda_tl.templates.pipelines import PIPELINES

H200 = known_device("nvidia_h200")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4}
TABLES = 4 * (2 * 128 + 2 + 4 + 3 + 3)  # of one sequence of 128 chunks


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr("kda_tl.runtime.program.compile_stages", refuse)


def test_forward_for_hopper_is_what_its_stages_hand_on() -> None:
    """A and Aqk, lower triangles in 3/4 BT^2 elements a chunk and head, k_neg, qg and kg, and decay: by hand."""
    problem = replace(SMALL, H=32, HV=32, K=128, V=128, tokens=8192, dtype="bf16", g_dtype="bf16", beta_dtype="bf16")
    chunks, elements = 128 * 32, 2 * 64 * 48 + 3 * 64 * 128
    assert workspace_bytes(problem, device=H200) == chunks * (2 * elements + 4 * 128) + TABLES


@pytest.mark.parametrize("pipeline", CHUNKED.values(), ids=lambda p: p.name)
def test_workspace_holds_what_lives_together(pipeline: Any, seed: int) -> None:
    """At least what is alive at once, at most all, counted from the stages' specs; alignment aside.

    Of what a result replaces nothing counts: it lies where the result will.
    """
    rng = random.Random(seed)
    fixed = {**family_of(pipeline.name), "dtype": "bf16", "K": 128, "V": 128, "direction": pipeline.direction}
    problem, lengths = draw_problem(rng, **fixed), draw_lengths(rng)
    plan = default_plan(problem, H200, pipeline=pipeline.name)
    sizes = make_layout(bounds_of(lengths), plan.BT, torch.device("cpu"), pipeline.segments).sizes
    found = Workspace.of(record(plan, problem, H200, sizes)).bytes
    known = {**static_sizes(Case(problem=problem, device=H200, BT=plan.BT, BC=plan.BC)), **sizes}
    flow, alive, most, total, count = pipeline.flow(problem), dict[str, int](), 0, 0, 0
    replaced = {old for stage in flow.stages for new, old in stage.replaces.items() if new in flow.results}
    for stage, frees in zip(flow.stages, flow.frees, strict=True):
        for name in stage.tensors_of(problem)[1]:
            if name not in flow.results and name not in replaced:
                spec = stage.specs[name]
                alive[name] = int(torch.Size(spec.shape(known)).numel()) * BYTES[spec.element(problem)]
                total, count = total + alive[name], count + 1
        most = max(most, sum(alive.values()))
        for name in frees:
            alive.pop(name, None)
    assert most <= found <= total + 256 * count


def test_arguments_and_problems_agree(seed: int) -> None:
    call = draw_call(SMALL, (100, 100), seed, varlen=False)
    arguments = operator_arguments(call, 2)
    for direction in ("fwd", "bwd"):
        found = workspace_bytes(**arguments, direction=direction)
        assert found == workspace_bytes(call.problem, direction=direction) > 0
        packed = {**{n: x.flatten(0, 1)[None] if n in "qkvgbeta" else x for n, x in arguments.items()}}
        packed["cu_seqlens"] = torch.tensor([0, 100, 200])
        assert workspace_bytes(**packed, direction=direction) == found


@pytest.mark.parametrize(("direction", "pipeline"), [("fwd", "gdn_pairs_segments_16"), ("bwd", "gdn_walk_segments_16")])
def test_few_heads_take_the_workspace_of_what_cuts_them(direction: str, pipeline: str) -> None:
    given: dict[str, Any] = {"operator": "chunk_gated_delta_rule", "scalar_gate": True, "gate": "log"}
    problem = Problem(H=2, HV=8, K=128, V=128, tokens=32768, **given)
    posed = replace(problem, direction=direction)
    plan = default_plan(posed, H200, pipeline=pipeline)
    tables, sizes = make_layout((0, 32768), plan.BT, torch.device("cpu"), PIPELINES[pipeline].segments)
    held = sum(table.nbytes for table in tables.values())
    given = PIPELINES[pipeline].residuals  # which the forward kept: the backward begins from them
    expected = held + Workspace.of(record(plan, posed, H200, sizes, given=given)).bytes
    assert (
        sizes["NS"] == PIPELINES[pipeline].segments
        and workspace_bytes(problem, device=H200, direction=direction) == expected
    )


def test_what_is_kept_counts_in_the_forward(seed: int) -> None:
    call = draw_call(SMALL, (100,), seed, varlen=False)
    arguments = operator_arguments(call)
    arguments["q"].requires_grad_()
    plain = [workspace_bytes(**arguments, direction=direction) for direction in ("fwd", "bwd")]
    kept = [workspace_bytes(**arguments, direction=d, disable_recompute=True) for d in ("fwd", "bwd")]
    assert kept[0] > plain[0] and kept[1] < plain[1]
    arguments["q"].requires_grad_(False)
    assert workspace_bytes(**arguments, disable_recompute=True) == plain[0], "nothing is kept for no backward"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"direction": "back"}, "direction must be one of fwd, bwd"),
        ({"varlen": True}, "pass the call's"),
        ({"sequences": 3}, "pass the call's"),
    ],
    ids=["direction", "packed", "unequal"],
)
def test_refusals(changes: dict[str, Any], told: str) -> None:
    direction = changes.pop("direction", "fwd")
    with pytest.raises(InputError, match=told):
        workspace_bytes(replace(SMALL, tokens=64, **changes), direction=direction)


@pytest.mark.filterwarnings("ignore:chunk_kda is slow here")
def test_the_reference_path_is_refused(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_compilers(monkeypatch)
    arguments = operator_arguments(draw_call(SMALL, (10,), seed, varlen=False))
    chunk_kda(**arguments)
    with pytest.raises(UnsupportedError, match="no compiler found"):
        workspace_bytes(**arguments)
