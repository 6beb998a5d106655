"""On the GPU that is here: sequences cut into segments, against the references and against whole sequences."""

from __future__ import annotations

import pytest
from cases import operator_arguments
from gpu_cases import CUT, DECAYS, FORWARD, TOLERANCE, check_stage, compile_all, draw, hopper_plan, outputs, stage_case

import kda_tl
from kda_tl.reference import relative_error
from kda_tl.stage import Stage
from kda_tl.templates.pipelines import PIPELINES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]  # the first waits for all kernels

CUTTING = [stage for stage in PIPELINES["prep_segments_4"].stages if stage.name != "fwd_prep"]


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Every test comes after the compilation."""
    compile_all()


@pytest.mark.parametrize("stage", CUTTING, ids=lambda stage: stage.name)
@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("segments", (4, 16))
def test_many_segments_equal_reference(stage: Stage, name: str, segments: int, seed: int) -> None:
    """Segments of one and of several chunks, of sequences that are cut and whole, in one launch.

    Not of very many: what a transition keeps after ten chunks is 1e-34 where gates are steep.
    """
    pipeline = PIPELINES[f"prep_segments_{segments}"]
    for lengths in ((1000,), (700, 0, 65, 1, 333)):
        check_stage(stage, name, stage.default(stage_case(stage.name, name)), seed, pipeline, lengths)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("decay", DECAYS)
def test_cut_sequences_equal_whole_ones(name: str, decay: str, seed: int) -> None:
    """Exact for any gate: a long sequence among short ones, against the same kernels over whole sequences."""
    _, problem = FORWARD[name]
    call = draw(name, (5000, 64, 0, 700), seed, decay, varlen=True)
    arguments = operator_arguments(call)
    with kda_tl.pin(hopper_plan(problem)):
        whole = outputs(arguments)
    for segments in (4, 8, 16):
        with kda_tl.pin(hopper_plan(problem, f"prep_segments_{segments}")):
            for one, other in zip(outputs(arguments), whole, strict=True):
                assert relative_error(one, other) < TOLERANCE[problem.dtype], f"{segments} segments"
