"""On the GPU that is here: sequences cut into segments, against the references and against whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import TENSORS, Call, draw_backward, operator_arguments
from support.gpu_calls import assert_same_bits, check_stage, differentiate, draw, leaves_of, outputs, seeds_of
from support.gpu_cases import (
    CUT,
    DECAYS,
    FORWARD,
    GRADIENT_TOLERANCE,
    RESUMED,
    SCANNED,
    WALKED,
    WALKS,
    default_of,
    device,
    hopper_plan,
    scan_plan,
    stage_case,
    tolerance_of,
)

import kda_tl
from kda_tl import templates
from kda_tl.ops import load_all
from kda_tl.ops.call import choose_backward_of
from kda_tl.reference import relative_error
from kda_tl.runtime.defaults import default_plan
from kda_tl.templates.pipelines import PIPELINES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_only"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels

CUTTING = {
    **dict.fromkeys(("fwd_segment", "fwd_merge", "fwd_resume"), "prep_segments"),
    **dict.fromkeys(("bwd_segment", "bwd_merge", "bwd_resume"), "prep_scan_segments"),
}
WALKING = [
    (pipeline.name, stage.name)
    for pipeline in PIPELINES.values()
    for stage in pipeline.stages
    if pipeline.name.startswith(("gdn_walk", "gdn_pairs_segments")) and stage.name in WALKS
]


@pytest.mark.parametrize("stage_name", CUTTING)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("segments", (4, 16))
def test_many_segments_equal_reference(stage_name: str, name: str, segments: int, seed: int) -> None:
    """Segments of one and of several chunks, of sequences that are cut and whole, in one launch.

    Not of very many: what a transition keeps after ten chunks is 1e-34 where gates are steep.
    """
    stage, pipeline = templates.load(stage_name), PIPELINES[f"{CUTTING[stage_name]}_{segments}"]
    for lengths in ((1000,), (700, 0, 65, 1, 333)):
        check_stage(stage, name, stage.default(stage_case(stage_name, name)), seed, pipeline, lengths)


@pytest.mark.parametrize(("pipeline_name", "stage_name"), WALKING)
@pytest.mark.parametrize("name", WALKED)
@pytest.mark.parametrize("decay", DECAYS)
def test_walks_equal_reference(pipeline_name: str, stage_name: str, name: str, decay: str, seed: int) -> None:
    """Of whole sequences and of segments that find where they begin, or, where 17 chunks are not enough, are told."""
    pipeline, stage = PIPELINES[pipeline_name], templates.load(stage_name)
    for lengths in ((2400,), (2000, 0, 65, 1, 333)):
        config = stage.default(stage_case(stage_name, name))
        check_stage(stage, name, config, seed, pipeline, lengths, decay)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("decay", DECAYS)
def test_cut_sequences_equal_whole_ones(name: str, decay: str, seed: int) -> None:
    """Exact for any gate: a long sequence among short ones, against the same kernels over whole sequences."""
    _, problem = FORWARD[name]
    call = draw(name, (5000, 64, 0, 700), seed, decay, varlen=True)
    arguments = operator_arguments(call)
    with kda_tl.pin(hopper_plan(problem)):
        whole = outputs(arguments, problem.operator)
    for segments in (4, 8, 16):
        with kda_tl.pin(hopper_plan(problem, segments)):
            for one, other in zip(outputs(arguments, problem.operator), whole, strict=True):
                assert relative_error(one, other) < tolerance_of(problem), f"{segments} segments"


def gradients_of(name: str, call: Call, segments: int, told: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    """By the names of the tensors, with the default plan of the backward that cuts into segments, or does not; with
    ``told`` of the walk whose few segments are told what they begin with.
    """
    arguments = operator_arguments(call) | changes
    leaves = leaves_of(arguments)
    posed = replace(SCANNED[name][1], direction="bwd")
    with kda_tl.pin(default_of(f"gdn_walk_told_{segments}", posed) if told else scan_plan(name, segments)):
        found = differentiate(arguments, leaves, seeds_of(call), call.problem.operator)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("name", SCANNED)
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_of_cut_sequences_equal_those_of_whole_ones(name: str, decay: str, seed: int) -> None:
    """As above, backwards; dA_log, whose terms may cancel, relative to them."""
    call = draw_backward(draw(name, (5000, 64, 0, 700), seed, decay, varlen=True), seed)
    whole = gradients_of(name, call, 0)
    tolerance = GRADIENT_TOLERANCE[call.problem.dtype]
    for segments in (2, 4, 8, 16) if name in WALKED else (4, 8, 16):
        found = gradients_of(name, call, segments)
        errors = {tensor: relative_error(grad, whole[tensor]) for tensor, grad in found.items()}
        if "A_log" in errors:
            size = whole["A_log"].double().norm()
            terms = call.slope_terms(whole["g"].double().view_as(call.x["g"])).abs().sum(0).norm()
            errors["A_log"] *= float(size / max(size, terms))
        assert max(errors.values()) < tolerance, f"{errors} {segments} segments"


@pytest.mark.parametrize("name", WALKED)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", ((2400,), (2000, 0, 65, 1, 333)), ids=("long", "packed"))
def test_gradients_of_walks_equal_recurrence(name: str, decay: str, lengths: tuple[int, ...], seed: int) -> None:
    """By autograd in float64, of sequences that are cut in two and more."""
    call = draw_backward(draw(name, lengths, seed, decay, varlen=len(lengths) > 1), seed)
    tolerance = GRADIENT_TOLERANCE[call.problem.dtype]
    for segments, told in ((2, False), (4, False), (4, True), (8, False)):
        found = gradients_of(name, call, segments, told)
        errors = call.gradient_errors({tensor: found.get(tensor) for tensor in TENSORS}, tolerance)
        assert max(errors.values()) < tolerance, f"{errors} {segments} segments, told: {told}"
        assert all(grad.isfinite().all() for grad in found.values())


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("lengths", ((2400,), (2000, 0, 65, 1, 333)), ids=("long", "packed"))
def test_walks_forwards_equal_recurrence(name: str, decay: str, lengths: tuple[int, ...], seed: int) -> None:
    """In float64, of sequences that are cut in two and more, and the states between their chunks."""
    call = draw(name, lengths, seed, decay, varlen=len(lengths) > 1)
    operator = load_all()[call.problem.operator]
    for segments in (4, 8, 16):
        with kda_tl.pin(default_of(f"gdn_pairs_segments_{segments}", call.problem)):
            found = operator.call(**operator_arguments(call), return_intermediate_states=True)
        for x, expected in zip(found, call.truth(64), strict=True):
            if x is not None:
                error = relative_error(x.reshape(expected.shape), expected)
                assert error < tolerance_of(call.problem), f"{error} {segments} segments"


@pytest.mark.parametrize("decay", DECAYS)
def test_few_heads_keep_what_is_between_segments(decay: str, seed: int) -> None:
    """The defaults of both passes, of which the backward begins from what the forward found, against a whole scan."""
    name = "walk-gdn-softplus-GVA-vk"
    call = draw_backward(draw(name, (8192,), seed, decay, H=4, HV=8), seed)
    problem, arguments = call.problem, operator_arguments(call)
    forward = default_plan(replace(problem, direction="fwd"), device())
    kept = choose_backward_of(replace(problem, direction="fwd"), device(), None, forward).residuals
    assert {"powers", "edges", "transition"} <= set(kept)
    leaves = leaves_of(arguments)
    found, again = (differentiate(arguments, leaves, seeds_of(call), problem.operator) for _ in range(2))
    assert_same_bits(again, found)
    with kda_tl.pin(default_of("gdn_scan", replace(problem, direction="bwd"))):
        whole = differentiate(arguments, leaves, seeds_of(call), problem.operator)
    errors = {tensor: relative_error(*pair) for tensor, *pair in zip(leaves, found, whole, strict=True)}
    errors.pop("A_log", None)  # whose terms may cancel, see above
    assert max(errors.values()) < GRADIENT_TOLERANCE[problem.dtype], errors


@pytest.mark.parametrize("name", SCANNED)
def test_gradients_of_cut_sequences_have_the_same_bits(name: str, seed: int) -> None:
    """Again, and from what the forward keeps."""
    call = draw_backward(draw(name, (1000, 64, 0, 700), seed, varlen=True), seed)
    first, again = (list(gradients_of(name, call, 8).values()) for _ in range(2))
    assert_same_bits(again, first)
    kept = gradients_of(name, call, 8, disable_recompute=True)
    assert_same_bits(list(kept.values()), first)
