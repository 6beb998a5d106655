"""What files of GPU tests share: specialisations, plans, the kernels they need, and how exact results must be.

Kernels that neither a bundle nor this user's cache has are compiled first, on all cores: on the 16 of a GPU machine
that is most of the time these tests take, and ``gpu_bundle.py`` spares it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support import gpu_decode_cases
from support.cases import random_of_run
from support.chunked import STAGES

from kda_tl import templates
from kda_tl.core.device import Device, cuda_device
from kda_tl.core.isolate import WorkerFailure, map_pool
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Plan
from kda_tl.database.store import Entry, sources
from kda_tl.ops import load_all
from kda_tl.runtime.compile import is_ready
from kda_tl.runtime.defaults import iter_defaults, pipeline_defaults
from kda_tl.runtime.dispatch import numerics_class, parse_plan
from kda_tl.templates.pipelines import PIPELINES

# bf16, fp16: where peers land against a float64 oracle; fp32: products of operands split into tf32 and rest
TOLERANCE = {"bf16": 6e-3, "fp16": 6e-3, "fp32": 2e-4}
# Steps of up to 2 make inverses and new values larger beside the state: rounded operands alone, in float64, come to
# 4.8e-3 to 6.3e-3 with them, where those of steps of up to 1 come to 4.0e-3 (tests/templates/test_rounding.py)
LARGE_STEPS = 4 / 3
# three rounded products in a row where the forward has one
GRADIENT_TOLERANCE = {"bf16": 1.5e-2, "fp16": 1.5e-2, "fp32": 2e-4}
PACKED = (0, 1, 130, 64, 0, 77)
DECAYS = ("steep", "slow", "mixed")
FULL: dict[str, Any] = {
    "tokens": 0,
    "has_A_log": True,
    "has_dt_bias": True,
    "l2norm": True,
    "beta": "sigmoid",
    "initial_state": True,
    "final_state": True,
}
LOG: dict[str, Any] = {"has_A_log": False, "has_dt_bias": False, "gate": "log"}
GDN: dict[str, Any] = {"operator": "chunk_gated_delta_rule", "scalar_gate": True}


def make(BT: int, H: int, HV: int, K: int, V: int, **fields: Any) -> tuple[int, Problem]:
    return BT, Problem(H=H, HV=HV, K=K, V=V, **{**FULL, **fields})


# Tokens a chunk, and what the kernels are specialised for. Every value of every field occurs; not every pair does.
SPECIALISED = {
    "bf16-safe-K128-V128": make(64, 1, 1, 128, 128, gate="safe"),
    "bf16-safe-K128-V128-BT32-GVA-vk": make(32, 2, 4, 128, 128, gate="safe", state_v_first=True),
    "bf16-softplus-K128-V128-GVA": make(64, 2, 4, 128, 128, gate="softplus", has_dt_bias=False),
    "bf16-log-K128-V128-BT16": make(16, 1, 1, 128, 128, **LOG, l2norm=False, beta="plain"),
    "bf16-safe-K64-V64-BT16": make(16, 2, 4, 64, 64, gate="safe", has_A_log=False, beta="sigmoid2"),
    "bf16-softplus-K60-V100-GVA-vk": make(64, 2, 4, 60, 100, gate="softplus", state_v_first=True),
    "bf16-safe-K32-V256": make(64, 1, 1, 32, 256, gate="safe"),
    "bf16-log-K256-V256-BT32": make(32, 2, 4, 256, 256, **LOG),
    "bf16-softplus-K256-V256": make(64, 1, 1, 256, 256, gate="softplus"),
    "bf16-log-K64-V64-bare": make(
        64, 2, 4, 64, 64, **LOG, l2norm=False, beta="plain", initial_state=False, final_state=False
    ),
    "fp16-safe-K128-V128": make(64, 2, 4, 128, 128, gate="safe", dtype="fp16", g_dtype="fp32"),
    "fp16-log-K60-V100-BT32-vk": make(32, 1, 1, 60, 100, **LOG, dtype="fp16", state_v_first=True),
    "fp32-softplus-K128-V128": make(64, 1, 1, 128, 128, gate="softplus", dtype="fp32"),
    "fp32-safe-K60-V100-BT16": make(16, 2, 4, 60, 100, gate="safe", dtype="fp32"),
    "bf16-softplus-K100-V60-H4": make(64, 4, 4, 100, 60, gate="softplus"),
    "fp32-log-K32-V32-H4-BT32": make(32, 4, 4, 32, 32, **LOG, dtype="fp32"),
}
# The same for the pipelines that only Hopper runs: with sequences whole, and cut into segments
WHOLE = {
    "prep-safe-K128-V128": make(64, 1, 1, 128, 128, gate="safe"),
    "prep-softplus-K128-V128-GVA-vk": make(64, 2, 4, 128, 128, gate="softplus", state_v_first=True),
    "prep-log-K64-V64-bare": SPECIALISED["bf16-log-K64-V64-bare"],
    "prep-safe-K100-V192": make(64, 2, 4, 100, 192, gate="safe", has_A_log=False, has_dt_bias=False, beta="sigmoid2"),
    "prep-log-K128-V64-H4": make(64, 4, 4, 128, 64, **LOG, g_dtype="fp32"),
    "prep-softplus-K256-V128-GVA-vk": make(64, 2, 4, 256, 128, gate="softplus", state_v_first=True),
    "prep-safe-K230-V256": make(64, 1, 1, 230, 256, gate="safe", has_dt_bias=False),
    "prep-log-K256-V64-bare": make(
        64, 2, 2, 256, 64, **LOG, l2norm=False, beta="plain", initial_state=False, final_state=False
    ),
    "prep-gdn-softplus-K128-V128-GVA-vk": make(64, 2, 4, 128, 128, gate="softplus", state_v_first=True, **GDN),
    "prep-gdn-log-K64-V64-bare": make(
        64, 2, 2, 64, 64, **LOG, **GDN, l2norm=False, beta="plain", initial_state=False, final_state=False
    ),
    "prep-gdn-softplus-K100-V192": make(
        64, 1, 3, 100, 192, **GDN, gate="softplus", has_dt_bias=False, beta="sigmoid2", g_dtype="fp32"
    ),
    "prep-gdn-log-K256-V128": make(64, 1, 2, 256, 128, **LOG, **GDN),
    "prep-gdn-log-K128-V256": make(64, 1, 2, 128, 256, **LOG, **GDN),
}
CUT = {name.replace("prep", "cut"): made for name, made in WHOLE.items() if made[1].K <= 128}
HOPPER = WHOLE | CUT
# And for the backward that only Hopper runs, beside those above that it takes
SCANNED = {
    "scan-safe-K128-V128-vk": make(64, 2, 2, 128, 128, gate="safe", state_v_first=True),
    "scan-softplus-K64-V128": make(64, 2, 2, 64, 128, gate="softplus", has_dt_bias=False, beta="sigmoid2"),
    "scan-softplus-K128-V128": make(64, 1, 1, 128, 128, gate="softplus", beta="plain"),
    "scan-log-K64-V64-bare": make(
        64, 2, 2, 64, 64, **LOG, l2norm=False, beta="plain", initial_state=False, final_state=False
    ),
    "scan-safe-K128-V128-GVA": make(64, 2, 4, 128, 128, gate="safe"),
    "scan-log-K64-V64-GVA-bare": SPECIALISED["bf16-log-K64-V64-bare"],
    "scan-gdn-softplus-K128-V128-GVA-vk": WHOLE["prep-gdn-softplus-K128-V128-GVA-vk"],
    "scan-gdn-log-K64-V64-bare": WHOLE["prep-gdn-log-K64-V64-bare"],
    "scan-gdn-softplus-K64-V128": make(
        64, 1, 3, 64, 128, **GDN, gate="softplus", has_dt_bias=False, beta="sigmoid2", g_dtype="fp32"
    ),
    "scan-gdn-log-K128-V64": make(64, 1, 2, 128, 64, **LOG, **GDN, beta="plain"),
}
# And for the one that walks back with all gradients: of heads that share keys and that do not, with the gate inside and
# outside, norms and steps of each kind, and any of the two states
WALKED = {
    "walk-gdn-softplus-GVA-vk": WHOLE["prep-gdn-softplus-K128-V128-GVA-vk"],
    "walk-gdn-log-bare": make(
        64, 2, 2, 128, 128, **LOG, **GDN, l2norm=False, beta="plain", initial_state=False, final_state=False
    ),
    "walk-gdn-softplus-GVA-from": make(
        64, 1, 3, 128, 128, **GDN, gate="softplus", has_dt_bias=False, g_dtype="fp32", final_state=False
    ),
    "walk-gdn-log-to": make(64, 2, 2, 128, 128, **LOG, **GDN, l2norm=False, beta="sigmoid2", initial_state=False),
}
SCANNED |= WALKED
# And forwards alone, which take more head dimensions
RESUMED = (*WALKED, "prep-gdn-log-K64-V64-bare", "prep-gdn-log-K128-V256")
# Head dimensions that are no power of two when they are padded; two of each are drawn, new ones each run
ODD_DIMS = (80, 96, 130, 160, 200)


def draw_odd(dtype: str) -> tuple[int, Problem]:
    """A problem with one such dimension, or two."""
    rng = random_of_run(f"odd {dtype}")
    K, V = rng.choice(ODD_DIMS), rng.choice((*ODD_DIMS, 64, 128))
    K, V = rng.choice(((K, V), (V, K)))
    gate = rng.choice(("log", "softplus", "safe"))
    return make(64, 1, 2, K, V, **(LOG if gate == "log" else {"gate": gate}), dtype=dtype)


ODD = {f"odd-{dtype}": draw_odd(dtype) for dtype in ("bf16", "fp16")}
# Operators beside chunk_kda, each on the pipelines that run on every device
_OTHER = {
    "bf16-softplus-K128-V128-GVA-vk": make(64, 2, 4, 128, 128, gate="softplus", state_v_first=True),
    "bf16-log-K256-V192": make(64, 1, 1, 256, 192, **LOG, g_dtype="fp32", beta="plain"),
    "fp16-softplus-K60-V100-BT32": make(32, 2, 4, 60, 100, gate="softplus", dtype="fp16", has_dt_bias=False),
    "fp32-softplus-K64-V32-BT16": make(16, 2, 2, 64, 32, gate="softplus", dtype="fp32", beta="sigmoid2"),
}
OTHER = {
    f"{operator.name}-{name}": (BT, replace(problem, operator=operator.name, scalar_gate=operator.scalar_gate))
    for operator in load_all().values()
    for name, (BT, problem) in _OTHER.items()
    if operator.name != "chunk_kda"
}
# Stages that take cut sequences of cases which the stages around them do not
APART = ("fwd_merge", "bwd_scan", "bwd_gdn_scan", "bwd_segment", "bwd_merge", "bwd_resume")
# Stages of walks that find where they begin: they take cut sequences
WALKS = (
    *("fwd_gdn_segment", "fwd_gdn_merge", "fwd_gdn_resume"),
    *("bwd_gdn_segment", "bwd_gdn_merge", "bwd_gdn_resume", "bwd_gdn_states", "bwd_gdn_walk"),
)
BACKWARD = SPECIALISED | SCANNED | ODD | OTHER
# One of each gate for long sequences: their truth is token by token, 4096 of them in a row. Defaults cut these
LONG = (
    *("bf16-safe-K128-V128", "bf16-softplus-K100-V60-H4", "bf16-log-K128-V128-BT16"),
    *("scan-softplus-K64-V128", "walk-gdn-softplus-GVA-vk"),
)
LONG_TOKENS = (1000, 4096)
MANY = (70,) * 70 + (130, 0, 1, 0, 64)  # with heads more than multiprocessors, which take one after the other
FORWARD = SPECIALISED | HOPPER | ODD | OTHER
ATTENDED = [name for name, (_, p) in HOPPER.items() if p.scalar_gate and p.K in (64, 128)]  # with pairs made beside
BT, MAIN = SPECIALISED["bf16-safe-K128-V128"]
WIDE = replace(MAIN, H=32, HV=32, initial_state=False)
HUGE = replace(MAIN, H=64, HV=64, initial_state=False)
AFTER_EACH_OTHER = replace(
    FORWARD["prep-gdn-softplus-K128-V128-GVA-vk"][1],
    H=2,
    HV=4,
    tokens=sum(MANY),
    sequences=len(MANY),
    longest=max(MANY),
)
backward = pytest.mark.parametrize("name", BACKWARD)
specialised = pytest.mark.parametrize("name", SPECIALISED | OTHER)
forward = pytest.mark.parametrize("name", FORWARD)
Job = tuple[str, Case, Config]


@cache
def device() -> Device:
    return cuda_device(torch.cuda.current_device())


def plan_of(problem: Problem, BT: int) -> Plan:
    """The default of the pipelines that run on every device."""
    return next(plan for plan in iter_defaults(problem, device(), BT=BT) if plan.pipeline.startswith("staged"))


def hopper_pipeline(problem: Problem, segments: int = 0) -> str:
    """One that only Hopper runs: sequences are whole, or cut into as many segments as are given."""
    family = "gdn" if problem.scalar_gate else "prep"
    if problem.direction == "bwd":
        return f"{family}_scan_segments_{segments}" if segments else f"{family}_scan"
    if segments:
        return f"{family}_segments_{segments}"
    return "gdn_pairs" if problem.scalar_gate and problem.K in (64, 128) else f"{family}_recurrence"


def default_of(pipeline: str, problem: Problem) -> Plan:
    """The default of a pipeline that only Hopper runs."""
    return pipeline_defaults(pipeline, Case(problem=problem, device=device(), BT=64, BC=16))


def hopper_plan(problem: Problem, segments: int = 0) -> Plan:
    """That of :func:`hopper_pipeline`."""
    return default_of(hopper_pipeline(problem, segments), problem)


def scan_plan(name: str, segments: int = 0) -> Plan:
    """That of the backward of a specialisation that only Hopper runs, which scans, or walks."""
    problem = backward_of(SCANNED[name][1])
    if name in WALKED:
        return default_of(f"gdn_walk_segments_{segments}" if segments else "gdn_walk", problem)
    return hopper_plan(problem, segments)


def cut_plan(problem: Problem) -> Plan:
    """That of one that cuts sequences; its kernels are those of the others that do."""
    return hopper_plan(problem, segments=8)


def plan_named(name: str) -> Plan:
    """What runs a specialisation."""
    BT, problem = FORWARD[name]
    if name in CUT:
        return cut_plan(problem)
    return hopper_plan(problem) if name in WHOLE else plan_of(problem, BT)


def backward_plan(name: str) -> tuple[Problem, Plan]:
    """What runs the backward of a specialisation."""
    BT, problem = BACKWARD[name]
    problem = backward_of(problem)
    return problem, scan_plan(name) if name in SCANNED else plan_of(problem, BT)


def tolerance_of(problem: Problem) -> float:
    """Of the results of a forward, relative to their norm."""
    return TOLERANCE[problem.dtype] * (LARGE_STEPS if (problem.dtype, problem.beta) == ("bf16", "sigmoid2") else 1.0)


def case_of(problem: Problem, plan: Plan) -> Case:
    return Case(problem=problem.without_lengths(), device=device(), BT=plan.BT, BC=plan.BC)


def jobs_of(problem: Problem, plan: Plan) -> list[Job]:
    return [(name, case_of(problem, plan), config) for name, config in plan.stages]


def pipeline_of(stage_name: str) -> Pipeline:
    """The first that has the stage."""
    return next(p for p in PIPELINES.values() if stage_name in [s.name for s in p.stages])


def stage_case(stage_name: str, name: str) -> Case:
    """What a stage is built for: its pass has chunks of its own where the other's do not fit the device."""
    BT, problem = (FORWARD | BACKWARD)[name]
    problem = replace(problem, direction=pipeline_of(stage_name).direction)
    return case_of(problem, plan_of(problem, BT))


@cache
def other_configs(stage_name: str, name: str) -> tuple[Config, ...]:
    """Two configs beside the default, of the seed that the run's first lines tell."""
    stage, case = templates.load(stage_name), stage_case(stage_name, name)
    others = [config for config in stage.candidates(case) if config != stage.default(case)]
    rng = random_of_run(f"{stage_name}/{name}")
    return tuple(rng.sample(others, min(2, len(others))))


OTHERS = ("bf16-safe-K128-V128", "bf16-softplus-K60-V100-GVA-vk")


@cache
def equal_plans(plan: Plan) -> tuple[Plan, ...]:
    """Plans of a plan's numerics class that differ from it in one stage: at most two a stage. All for MAIN."""
    found: list[Plan] = []
    for name, config in plan.stages:
        same = []
        for other in config.neighbours():
            changed = replace(plan, stages=tuple((n, other if n == name else c) for n, c in plan.stages))
            if other.reject(case_of(MAIN, plan)) is None and numerics_class(changed) == numerics_class(plan):
                same.append(changed)
        found += same[:1] + same[-1:] if len(same) > 1 else same
    return tuple(found)


@cache
def shipped(direction: str) -> tuple[tuple[str, Problem, Plan], ...]:
    """Every packaged plan of a pass for this GPU, with a problem of its key but few heads; equal pairs once."""
    found: dict[tuple[Problem, Plan], str] = {}
    packaged = [database for database in sources() if database.name == "packaged"]
    for database in packaged:
        for (slug, operator, stored), file in database.files.items():
            if (slug, stored) == (device().slug, direction):
                for key, entry in file.entries.items():
                    problem = problem_of(entry, operator, direction)
                    plan = parse_plan(entry.plan, problem, device())
                    found.setdefault((problem, plan), key.text)
    return tuple((text, problem, plan) for (problem, plan), text in found.items())


def forward_of(problem: Problem) -> Problem:
    """The problem of the pass that is called before."""
    return replace(problem, direction="fwd")


def backward_of(problem: Problem) -> Problem:
    """The problem of the pass that is called after."""
    return replace(problem, direction="bwd")


def forward_plan(problem: Problem) -> Plan:
    """Its default."""
    return next(iter_defaults(forward_of(problem), device()))


def problem_of(entry: Entry, operator: str, direction: str) -> Problem:
    key = entry.key
    return Problem(
        **FULL | {"has_A_log": key.gate != "log", "has_dt_bias": key.gate != "log", "initial_state": False},
        H=2,
        HV=2 * key.group,
        K=key.K,
        V=key.V,
        dtype=key.dtype,
        gate=key.gate,
        operator=operator,
        scalar_gate=load_all()[operator].scalar_gate,
        direction=direction,
    )


def list_kernels() -> list[Job]:
    """Every kernel that GPU tests run, once; the longest to compile come first."""
    wanted = [job for BT, problem in SPECIALISED.values() for job in jobs_of(problem, plan_of(problem, BT))]
    for name in BACKWARD:
        problem, plan = backward_plan(name)
        wanted += jobs_of(problem, plan)
        wanted += jobs_of(problem, next(iter_defaults(problem, device(), BT=BACKWARD[name][0])))
        before = next(iter_defaults(forward_of(problem), device(), BT=BACKWARD[name][0]))
        wanted += jobs_of(backward_of(problem), before)  # what keeps residuals makes them as the backward would
    for _, problem in map((FORWARD | SCANNED).__getitem__, RESUMED):
        for each in (problem, replace(problem, intermediate_states=True)):
            wanted += jobs_of(each, default_of("gdn_pairs_segments_8", each))
    for name, (BT, problem) in SCANNED.items():  # the forward that is called before, and the same backward of segments
        wanted += jobs_of(problem, next(iter_defaults(problem, device(), BT=BT)))
        wanted += jobs_of(backward_of(problem), scan_plan(name, segments=8))
    for BT_of_it, problem in (BACKWARD[name] for name in LONG):
        long = replace(problem, tokens=LONG_TOKENS[-1])
        for each in (long, backward_of(long)):
            wanted += jobs_of(each, next(iter_defaults(each, device(), BT=BT_of_it)))
    for BT_of_it, problem in (ODD | OTHER).values():
        wanted += jobs_of(problem, plan_of(problem, BT_of_it))
    for problem in (WIDE, HUGE):
        wanted += jobs_of(problem, plan_of(problem, BT))
    for state_v_first in (False, True):
        problem = replace(AFTER_EACH_OTHER, state_v_first=state_v_first)
        wanted += jobs_of(problem, hopper_plan(problem))
    wanted += jobs_of(HUGE, hopper_plan(HUGE))
    for problem in (AFTER_EACH_OTHER, *(FORWARD[name][1] for name in ATTENDED)):
        wanted += jobs_of(problem, default_of("gdn_attend", problem))
    for name in OTHERS:
        for stage_name in STAGES:
            wanted += [(stage_name, stage_case(stage_name, name), c) for c in other_configs(stage_name, name)]
    for first in (plan_of(MAIN, BT), hopper_plan(MAIN), cut_plan(MAIN)):
        for plan in (first, *equal_plans(first)):
            wanted += jobs_of(MAIN, plan)
    for stage in STAGES.values():
        more = (CUT if stage.name in APART else {}) | (WALKED if stage.name in WALKS else {})
        cases = [stage_case(stage.name, name) for name in SPECIALISED | OTHER | more]
        wanted += [(stage.name, case, config) for case in cases if not (config := stage.default(case)).reject(case)]
    for tokens, problem in FORWARD.values():
        for plan in (hopper_plan(problem), cut_plan(problem)) if tokens == 64 else ():
            wanted += [job for job in jobs_of(problem, plan) if job[2].reject(job[1]) is None]
    for name in HOPPER:
        jobs = jobs_of(replace(FORWARD[name][1], intermediate_states=True), plan_named(name))
        wanted += [job for job in jobs if "h" in templates.load(job[0]).outputs]
    for direction in ("fwd", "bwd"):
        for _, problem, plan in shipped(direction):
            wanted += jobs_of(problem, plan)
            if direction == "bwd":
                wanted += jobs_of(forward_of(problem), forward_plan(problem))
    wanted += gpu_decode_cases.list_kernels(device())
    distinct: dict[Job, Job] = {}
    for name, case, config in wanted:
        distinct.setdefault((name, templates.load(name).specialise(case), config), (name, case, config))
    return sorted(distinct.values(), key=lambda job: job[0] != "fwd_intra")


@cache
def compile_all() -> dict[Job, WorkerFailure]:
    """Makes ready everything that GPU tests run, on all cores, once; what failed, and why. Or nothing, if forbidden."""
    if os.environ.get("KDA_TL_JIT") == "0":
        return {}
    jobs = [job for job in list_kernels() if not is_ready(templates.load(job[0]), *job[1:])]
    cores = max(1, (os.cpu_count() or 2) - 1)
    results = map_pool("support.launches:compile_job", jobs, jobs=cores, timeout_s=200)
    return {jobs[i]: result for i, result in results if isinstance(result, WorkerFailure)}
