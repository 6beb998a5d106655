"""A stage of the CPU target that says where walks begin: the macros that stages for Hopper find it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FP32_TOLERANCE, prim_func
from kda_tl.templates.sm90.hopper import BOUNDS, TABLES
from kda_tl.templates.sm90.reach import OWNERS, find_backwards, find_far, find_forwards

INPUTS = {**BOUNDS, **OWNERS, "seq_segments": "N 3 : i32", **TABLES}
OUTPUTS = {"forwards": "NS HV 7 : i32", "backwards": "NS HV 2 : i32", "far": "N HV : i32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """There is none: see tests/templates/test_reach.py."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Config):
    """There is nothing to choose."""


def build(case: Case, config: ReachConfig) -> Any:
    """The kernel: one thread block a (segment, value head), then one a (sequence, value head)."""
    HV, NS, N = T.dynamic("HV"), T.dynamic("NS"), T.dynamic("N")

    @prim_func(case, INPUTS | OUTPUTS, HV=HV, NS=NS, N=N)
    def reach(bounds, segment_sequences, seq_segments, segments, chunk_tokens, forwards, backwards, far):
        with T.Kernel((NS + N) * HV) as i_block:
            i, i_h = i_block // HV, i_block % HV
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            x = SimpleNamespace(bounds=bounds, chunk_tokens=chunk_tokens, **tables)
            if i < NS:
                first, chunks, passed, start, own_start, end, i_n = find_forwards(x, i, i_h)
                forwards[i, i_h, 0] = first
                forwards[i, i_h, 1] = chunks
                forwards[i, i_h, 2] = passed
                forwards[i, i_h, 3] = start
                forwards[i, i_h, 4] = own_start
                forwards[i, i_h, 5] = end
                forwards[i, i_h, 6] = i_n
                count, whole = find_backwards(x, i, i_h)
                backwards[i, i_h, 0] = count
                backwards[i, i_h, 1] = T.if_then_else(whole, 1, 0)
            else:
                far[i - NS, i_h] = find_far(x, i - NS, i_h)

    return reach


def default(case: Case) -> ReachConfig:
    return ReachConfig()


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    return Cost(bytes=1, flops=1)


TOLERANCE = {"bf16": FP32_TOLERANCE, "fp16": FP32_TOLERANCE, "fp32": FP32_TOLERANCE}
STAGE = Stage("reach", INPUTS, OUTPUTS, ReachConfig, build, reference, default, cost, TOLERANCE, depends=())
