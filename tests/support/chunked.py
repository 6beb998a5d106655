"""Stages and pipelines of operators that take whole sequences, chunk by chunk; what decodes has tests of its own."""

from kda_tl.core.problem import DIRECTIONS
from kda_tl.templates.pipelines import PIPELINES

CHUNKED = {name: pipeline for name, pipeline in PIPELINES.items() if pipeline.direction in DIRECTIONS}
STAGES = {stage.name: stage for pipeline in CHUNKED.values() for stage in pipeline.stages}
STAGES = {name: STAGES[name] for name in sorted(STAGES)}
