"""Calls of recurrent operators that GPU tests make, and the kernels that these need."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from support.cases import random_of_run
from support.decode_cases import Args
from support.step_cases import OPERATORS, Shape, Types, draw_step

from kda_tl import templates
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Plan
from kda_tl.errors import InputError
from kda_tl.ops import recurrent_call
from kda_tl.ops.recurrent import pose
from kda_tl.ops.recurrent_entry import RECURRENT
from kda_tl.runtime.defaults import iter_defaults
from kda_tl.templates.pipelines import PIPELINES

PIPELINES_OF_STEPS = tuple(name for name, pipeline in PIPELINES.items() if pipeline.direction == "step")


@dataclass(frozen=True, kw_only=True)
class Decode:
    """What the kernels of some calls are specialised for: all else of :func:`draw_step` changes numbers alone."""

    name: str = "kda"
    kind: str = "pool"
    shape: Shape = Shape(H=2, HV=4, K=128, V=128)
    types: Types = Types(io="bf16", gates="bf16", beta="bf16")
    v_first: bool = True
    ragged: bool = False
    final: bool = False
    placed: bool = True
    gap: int = 8  # elements between slots; of 16 bytes or more states lie on boundaries of 16

    def draw(self, rng: random.Random, device: str, N: int = 3, T: int | None = None, **more: Any) -> Args:
        """Arguments of a call."""
        if self.ragged:
            lengths = [rng.choice((0, 1, rng.randint(2, 6))) for _ in range(N)]
            given: Args = {"lengths": lengths, "padding": rng.randint(0, 3)}
        else:
            given = {"N": N, "T": T}
        fixed = {name: getattr(self, name) for name in ("shape", "v_first", "final", "placed", "gap")} | {"align": 8}
        return draw_step(
            rng, self.name, self.kind, types=replace(self.types, device=device), **{**fixed, **given, **more}
        )


def _sized(K: int, V: int, **more: Any) -> Shape:
    return Shape(H=2, HV=4, K=K, V=V, **more)


def _typed(io: str, state: str, gates: str = "", beta: str = "") -> Types:
    return Types(io=io, gates=gates or io, beta=beta or io, state=state)


# Every type, layout, size and kind occurs, not every pair
DECODES = {
    "bf16-fp32-K128-V128-vk": Decode(),
    "bf16-bf16-K128-V128-vk-safe": Decode(types=_typed("bf16", "bf16"), shape=_sized(128, 128, gate="safe")),
    "bf16-fp32-K128-V128-vk-gdn": Decode(name="gdn"),
    "bf16-bf16-K128-V128-vk-gdn": Decode(name="gdn", types=_typed("bf16", "bf16")),
    "bf16-fp32-K128-V128-kv-columns": Decode(kind="columns", v_first=False),
    "bf16-fp32-K128-V128-vk-columns": Decode(kind="columns"),
    "bf16-bf16-K128-V128-vk-columns-gdn": Decode(kind="columns", name="gdn", types=_typed("bf16", "bf16")),
    "bf16-bf16-K128-V128-kv-split-gdn": Decode(
        kind="split columns", name="gdn", types=_typed("bf16", "bf16"), v_first=False
    ),
    "bf16-fp32-K128-V128-vk-split": Decode(kind="split pool", types=_typed("bf16", "fp32", beta="fp32")),
    "bf16-fp32-K128-V128-vk-ragged": Decode(ragged=True),
    "bf16-fp32-K128-V128-vk-ragged-columns": Decode(kind="columns", ragged=True),
    "bf16-fp32-K128-V128-vk-verify": Decode(kind="verify"),
    "bf16-fp32-K128-V128-vk-tree": Decode(kind="tree"),
    "bf16-bf16-K128-V128-kv-tree-gdn": Decode(kind="tree", name="gdn", types=_typed("bf16", "bf16"), v_first=False),
    "fp16-fp32-K64-V64-vk-gdn": Decode(name="gdn", types=_typed("fp16", "fp32"), shape=_sized(64, 64)),
    "fp16-fp32-K64-V64-kv": Decode(types=_typed("fp16", "fp32"), shape=_sized(64, 64, gate="log"), v_first=False),
    "fp16-fp16-K64-V64-kv": Decode(types=_typed("fp16", "fp16"), shape=_sized(64, 64, gate="log"), v_first=False),
    "fp32-fp32-K64-V128-kv-rows": Decode(
        kind="rows", types=_typed("fp32", "fp32"), shape=_sized(64, 128, gate="log"), v_first=False, final=True
    ),
    "fp32-fp32-K128-V128-vk": Decode(types=_typed("fp32", "fp32"), shape=_sized(128, 128, beta="plain")),
    "fp32-bf16-K128-V64-vk-gdn": Decode(name="gdn", types=_typed("fp32", "bf16"), shape=_sized(128, 64, bias=False)),
    "bf16-fp32-K256-V256-vk": Decode(shape=_sized(256, 256)),
    "bf16-fp32-K256-V64-kv-keep": Decode(kind="keep", shape=_sized(256, 64), v_first=False),
    "bf16-fp32-K100-V60-vk-ragged": Decode(shape=_sized(100, 60), ragged=True),
    "fp16-bf16-K60-V100-kv": Decode(types=_typed("fp16", "bf16"), shape=_sized(60, 100), v_first=False),
    "fp32-fp32-K60-V100-vk-gates": Decode(
        name="gdn",
        kind="keep",
        types=_typed("fp32", "fp32"),
        shape=_sized(60, 100, key_gate=True, value_gate=True, wide_beta=True, beta="sigmoid2"),
    ),
    "bf16-fp32-K128-V128-vk-fresh": Decode(kind="fresh", ragged=True, final=True),
    "bf16-fp32-K128-V128-vk-fresh-tree": Decode(kind="fresh tree"),
    "bf16-fp32-K19-V13-vk-unaligned": Decode(shape=_sized(19, 13), gap=7),
    "bf16-fp32-K128-V128-vk-unaligned": Decode(gap=1),
    "bf16-bf16-K128-V128-kv-unaligned": Decode(types=_typed("bf16", "bf16"), v_first=False, gap=3),
}
MAIN = "bf16-fp32-K128-V128-vk"


@cache
def problem_of(name: str) -> Problem:
    """What such a call on a GPU poses."""
    decode = DECODES[name]
    operator = RECURRENT[OPERATORS[decode.name].__name__]
    a = operator.bind(**decode.draw(random.Random(0), "cpu"))
    problem = pose(operator, a)
    states = [x for x in (a.initial_state, a.intermediate_states) if x is not None]
    if any(recurrent_call._is_unaligned("pool", x) for x in states):
        problem = replace(problem, options=(*problem.options, "unaligned"))
    return problem


def plan_of(problem: Problem, device: Device, pipeline: str | None = None) -> Plan | None:
    """The default, of all pipelines or of one; None if that does not take the problem."""
    try:
        return next(iter_defaults(problem, device, pipeline=pipeline))
    except InputError:
        return None


def other_configs(name: str, device: Device) -> list[Plan]:
    """Plans of one call in other configs: two a pipeline, of the run's seed."""
    problem, found = problem_of(name), []
    for pipeline in PIPELINES_OF_STEPS:
        plan = plan_of(problem, device, pipeline)
        if plan is None:
            continue
        case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
        ((stage, default),) = plan.stages
        others = [config for config in templates.load(stage).candidates(case) if config != default]
        for config in random_of_run(f"{pipeline}/{name}").sample(others, min(2, len(others))):
            found.append(replace(plan, stages=((stage, config),)))
    return found


def list_kernels(device: Device) -> list[tuple[str, Case, Config]]:
    """Every kernel that the tests of recurrent operators run."""
    wanted = []
    for name in DECODES:
        problem = problem_of(name)
        plans = [plan_of(problem, device, pipeline) for pipeline in (None, *PIPELINES_OF_STEPS)]
        for plan in (*plans, *(other_configs(name, device) if name in OTHERS else ())):
            if plan is not None:
                case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
                wanted += [(stage, case, config) for stage, config in plan.stages]
    return wanted


OTHERS = (MAIN, "bf16-bf16-K128-V128-kv-split-gdn")


def draw(name: str, seed: int, **more: Any) -> tuple[str, Args]:
    """A call on the GPU."""
    decode = DECODES[name]
    return decode.name, decode.draw(random.Random(seed), "cuda", **more)


def copy(a: Args) -> Args:
    """The same arguments in memory of their own, strides as they were."""

    def clone(x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).clone()
        return whole.as_strided(x.shape, x.stride(), x.storage_offset())

    return {name: clone(x) if isinstance(x, torch.Tensor) else x for name, x in a.items()}
