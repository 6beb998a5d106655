"""A small kernel, compiled and run: the shortest way to know that TileLang, compiler and device work together."""

from __future__ import annotations

import time
from typing import Any

import torch

from kda_tl import templates
from kda_tl.bench.fixtures import torch_device
from kda_tl.bench.timing import check
from kda_tl.core.device import Device
from kda_tl.core.layout import dense_bounds, make_layout
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Operands
from kda_tl.runtime.compile import compile_stage

STAGE = "fwd_gate"
BT, TOKENS = 16, 40  # the last chunk is ragged


def run_stage(device: Device) -> str:
    """What happened, in a sentence.

    Raises:
        CompileError: it does not compile.
        WrongResultError: it computes something else than its reference.
    """
    problem = Problem(H=1, HV=1, K=32, V=32, tokens=TOKENS, dtype="fp32", gate="safe")
    stage, case = templates.load(STAGE), Case(problem=problem, device=device, BT=BT, BC=8)
    where = torch_device(device)
    layout = make_layout(dense_bounds(1, TOKENS), BT, where)
    g = torch.randn(TOKENS, 1, 32, generator=torch.Generator().manual_seed(0)).to(where)
    inputs: dict[str, Any] = {
        "g": g,
        "A_log": None,
        "dt_bias": None,
        "chunk_tokens": layout.tables["chunk_tokens"],
        "lower_bound": -5.0,
    }
    begin = time.perf_counter()
    kernel = compile_stage(stage, case, stage.default(case))
    seconds = time.perf_counter() - begin
    outputs = kernel(inputs, layout.sizes, where)
    expected = stage.reference(case, Operands(**inputs | {"g": g.double()}))
    error = check(dict(zip(stage.outputs, outputs, strict=True)), expected, stage.tolerance["fp32"])
    return f"{STAGE} compiled in {seconds:.1f} s, relative error {error:.1e} against its reference"
