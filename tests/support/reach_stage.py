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
from kda_tl.templates.sm90.reach import CUTS, OWNERS, find_backwards, find_far, find_forwards, has_far

INPUTS = {**BOUNDS, **OWNERS, **CUTS, **TABLES}
OUTPUTS = {
    "forwards": "NS HV 7 : i32",
    "told": "NS HV 7 : i32",
    "backwards": "NS HV 2 : i32",
    "far": "N HV 3 : i32",
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """There is none: see tests/templates/test_reach.py."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ReachConfig(Config):
    """There is nothing to choose."""


def build(case: Case, config: ReachConfig) -> Any:
    """The kernel: one thread block a (segment, value head), then one a (sequence, value head)."""
    HV, NS, N = T.dynamic("HV"), T.dynamic("NS"), T.dynamic("N")

    @T.macro
    def store(tensor, i, i_h, numbers):
        for m in list(range(len(numbers))):
            tensor[i, i_h, m] = numbers[m]

    @prim_func(case, INPUTS | OUTPUTS, HV=HV, NS=NS, N=N)
    def reach(bounds, segment_sequences, seq_segments, segments, chunk_tokens, forwards, told, backwards, far):
        with T.Kernel((NS + N) * HV) as i_block:
            i, i_h = i_block // HV, i_block % HV
            tables = {"segments": segments, "owners": segment_sequences, "cuts": seq_segments}
            x = SimpleNamespace(bounds=bounds, chunk_tokens=chunk_tokens, **tables)
            if i < NS:
                store(forwards, i, i_h, find_forwards(x, i, i_h, False))
                store(told, i, i_h, find_forwards(x, i, i_h, True))
                count, whole = find_backwards(x, i, i_h)
                store(backwards, i, i_h, (count, T.if_then_else(whole, 1, 0)))
            else:
                n = i - NS
                given = (find_far(x, n, i_h), has_far(x, n, i_h, -1, lanes=1), has_far(x, n, i_h, 1, lanes=1))
                store(far, n, i_h, given)

    return reach


def default(case: Case) -> ReachConfig:
    return ReachConfig()


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    return Cost(bytes=1, flops=1)


TOLERANCE = {"bf16": FP32_TOLERANCE, "fp16": FP32_TOLERANCE, "fp32": FP32_TOLERANCE}
STAGE = Stage("reach", INPUTS, OUTPUTS, ReachConfig, build, reference, default, cost, TOLERANCE, depends=())
