"""Every stage: references that compose to the recurrence, kernels that equal their references, code for sm_90a."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.cases import (
    F64,
    KDA,
    Call,
    draw_backward,
    draw_call,
    draw_extreme,
    draw_lengths,
    draw_problem,
    random_of_run,
)
from support.chunked import STAGES
from support.launches import reverse_chunks, run_references, sizes_of, stage_errors

from kda_tl import templates
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.isolate import WorkerFailure, map_pool
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import BETAS, GATES, Problem
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES, Case, Config, Operands, Stage
from kda_tl.database.gpus import known_device
from kda_tl.errors import CompileError
from kda_tl.reference import activate_beta, relative_error
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.program import Program
from kda_tl.templates.common.chunks import pack_lower, split_chunks
from kda_tl.templates.pipelines import PIPELINES

CPU = cpu_device()
EXACT = 1e-10
# fp32 kernels on the references' own inputs: sums of up to 256 products of random sign err by sqrt(256) * 2^-24 = 1e-6;
# exponents of up to 64 * 5 nats that fp32 holds to 2^-16 would add 1e-5, but where they are that long, results vanish
FP32 = 2e-5
RAGGED = (1, 15, 16, 63, 64, 65, 130)
KINDS = (*GATES, "scalar", "ranked")

needs_compiler = pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")
stages = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)
gates = pytest.mark.parametrize("gate", GATES)
EVERYWHERE = list(
    {stage.name: stage for name in ("staged", "staged_backward") for stage in PIPELINES[name].stages}.values()
)
HOPPER_ONLY = [stage for stage in STAGES.values() if stage not in EVERYWHERE]
# A kernel for sm_90a is 10 to 45 s of processor time: one of the long ones a run, one of the others, and one of
# Hopper's own, which `kda-tl verify --gpu h200 --static` compiles
LONG = [stage for stage in EVERYWHERE if stage.name in ("fwd_intra", "bwd_state", "bwd_wy", "bwd_intra")]
SHORT = [stage for stage in EVERYWHERE if stage not in LONG]
COMPILED = [
    *random_of_run("long").sample(LONG, 1),
    *random_of_run("short").sample(SHORT, 1),
    *random_of_run("hopper").sample(HOPPER_ONLY, 1),
]
pipelines = pytest.mark.parametrize(
    "pipeline", [p for p in PIPELINES.values() if p.direction == "fwd"], ids=lambda p: p.name
)
pytestmark = pytest.mark.usefixtures("one_thread")


# Composed references against the recurrence, in float64


def gates_of(pipeline: Pipeline) -> dict[str, Any]:
    """Which gates a pipeline takes: those of Gated DeltaNet are one a head."""
    return {"scalar_gate": True} if "gdn" in pipeline.name else {}


def assert_composes(pipeline: Pipeline, call: Call, BT: int, tolerance: float = EXACT) -> None:
    out, _ = run_references(pipeline, call.case(CPU, BT, 16), call.tensors(BT, pipeline.segments))
    o, ht, h = call.truth(BT)
    p = call.problem
    where = f"{p.key} BT={BT} bounds={call.bounds}"
    assert out["o"].dtype == F64 and relative_error(out["o"], o) < tolerance, where
    if p.final_state:
        assert relative_error(out["ht"], ht) < tolerance, where
    else:
        assert out["ht"] is None
    if out["h"] is None:
        assert not p.intermediate_states and pipeline.name != "staged", "it has them in memory"
        return
    states = out["h"][..., : p.K, : p.V]
    assert relative_error(states.transpose(-1, -2) if p.state_v_first else states, h) < tolerance, where
    assert not out["h"][..., p.K :, :].any() and not out["h"][..., p.V :].any(), "padding is zero"


@pytest.mark.rest(draws=60)
@pipelines
@gates
@pytest.mark.parametrize("T", RAGGED)
def test_references_compose_ragged(pipeline: Pipeline, gate: str, T: int, seed: int) -> None:
    rng = random.Random(seed)
    for n, BT in enumerate(BT_CHOICES):
        problem = draw_problem(rng, gate=gate, beta=BETAS[n], l2norm=n % 2 == 0, **gates_of(pipeline))
        assert_composes(pipeline, draw_call(problem, (T,) * rng.choice((1, 2)), seed + n, varlen=False), BT)


@pytest.mark.rest(draws=20)
@pipelines
@gates
def test_references_compose_varlen(pipeline: Pipeline, gate: str, seed: int) -> None:
    rng = random.Random(seed)
    for n, BT in enumerate((*BT_CHOICES, *BT_CHOICES)):
        problem = draw_problem(
            rng, gate=gate, initial_state=n < 3, final_state=True, state_v_first=n % 2 == 0, **gates_of(pipeline)
        )
        assert_composes(pipeline, draw_call(problem, draw_lengths(rng), seed + n), BT)


@pytest.mark.rest(draws=100)
@pipelines
@gates
@pytest.mark.parametrize(("H", "HV"), ((1, 1), (1, 4), (2, 6)))
@pytest.mark.parametrize(("K", "V"), ((60, 100), (100, 60), (32, 500), (256, 32)))
def test_references_compose_heads_and_dims(
    pipeline: Pipeline, gate: str, H: int, HV: int, K: int, V: int, seed: int
) -> None:
    rng = random.Random(seed)
    problem = draw_problem(rng, gate=gate, H=H, HV=HV, K=K, V=V, **gates_of(pipeline))
    assert_composes(pipeline, draw_call(problem, (70, 0, 1), seed), rng.choice(BT_CHOICES))


@pipelines
@pytest.mark.parametrize("has_dt_bias", (False, True))
@pytest.mark.parametrize(("gate", "has_A_log"), (("softplus", True), ("safe", False), ("safe", True)))
def test_references_compose_gate_parameters(
    pipeline: Pipeline, gate: str, has_A_log: bool, has_dt_bias: bool, seed: int
) -> None:
    problem = draw_problem(
        random.Random(seed), gate=gate, has_A_log=has_A_log, has_dt_bias=has_dt_bias, **gates_of(pipeline)
    )
    assert_composes(pipeline, draw_call(problem, (100,), seed), 64)


@pytest.mark.parametrize("gate", ("log", "softplus"))
def test_a_gate_a_head_is_taken_out_of_the_pairs(gate: str, seed: int) -> None:
    """What fwd_gdn_prep computes: products of rows without a gate, times powers of two of differences of G."""
    rng = random.Random(seed)
    operator = "chunk_gated_delta_rule"
    problem = draw_problem(rng, gate=gate, operator=operator, scalar_gate=True, rank=1, l2norm=False, HV=2, H=2)
    call = draw_call(problem, (1, 40, 0, 64, 100), seed)
    case = call.case(CPU, 64, 16)
    _, ((stage, x), *_) = run_references(PIPELINES["gdn_recurrence"], case, call.tensors(64))
    found = stage.reference(case, Operands(**x))
    G = templates.load("fwd_gate").reference(case, Operands(**x))["g_cumsum"]
    q, k = (split_chunks(x[name], x["chunk_tokens"], 64, width=problem.KP) for name in "qk")
    steps = split_chunks(activate_beta(x["beta"], problem.beta), x["chunk_tokens"], 64)
    D = torch.exp2((G - G.mT).tril()).tril()
    L = steps[..., None] * (k @ k.mT * D).tril(-1)
    A = torch.linalg.inv(torch.eye(64, dtype=G.dtype) + L) * steps[..., None, :]
    assert relative_error(found["A"], pack_lower(A)) < EXACT
    assert relative_error(found["Aqk"], pack_lower(x["scale"] * (q @ k.mT) * D)) < EXACT


# Every kernel of the CPU target against its own reference


def draw_configs(rng: random.Random, stage: Stage, kind: str, case: Case) -> list[Config]:
    """The default; for two kinds a run also another one that is not rejected."""
    default = stage.default(case)
    if kind not in random_of_run(f"configs of {stage.name}").sample(KINDS, 2):
        return [default]
    others = [config for config in stage.candidates(case) if config != default]
    return [default, *rng.sample(others, min(1, len(others)))]


@needs_compiler
@pytest.mark.rest(draws=5, per="kind")
@stages
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_kernels_equal_references(stage: Stage, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    others: dict[str, dict[str, Any]] = {
        "scalar": {"scalar_gate": True, "H": 1, "HV": rng.choice((3, 35)), "K": 60, "V": 32},  # 35: more than a warp
        "ranked": {"rank": rng.choice((2, 4)), "gate": "safe", "H": 2, "HV": 4},  # shared heads, more than one of them
    }
    problem = draw_problem(rng, **others.get(kind, {"gate": kind, **KDA}))
    if problem.rank > 1:  # of a single token without a state before it dg is 0: a sum of roundings alone
        problem = replace(problem, initial_state=True)
    pipeline = next(p for p in PIPELINES.values() if stage.name in [s.name for s in p.stages])
    call = draw_call(problem, draw_lengths(rng), seed)
    if pipeline.direction == "bwd":
        call = draw_backward(call, seed)
    BT, BC = rng.choice(BT_CHOICES), rng.choice(BC_CHOICES)
    case = call.case(CPU, BT, BC)
    _, records = run_references(pipeline, case, call.tensors(BT, pipeline.segments))
    inputs = next((inputs for recorded, inputs in records if recorded.name == stage.name), None)
    if inputs is None:
        assert not stage.tensors_of(problem)[1]
        return
    if stage in HOPPER_ONLY:
        with pytest.raises(CompileError, match=f"{stage.name} cannot run with .*: .*sm_90"):
            compile_stage(stage, case, stage.default(case))
        return
    for config in draw_configs(rng, stage, kind, case):
        kernel = compile_stage(stage, case, config)
        errors = stage_errors(kernel, reverse_chunks(stage, inputs), sizes_of(call, BT, pipeline.segments))
        assert all(error < FP32 for error in errors.values()), f"{errors} {config} {case} bounds={call.bounds}"


# Gates at their limits


extremes = pytest.mark.parametrize(
    "kind", [f"{gate} {how}" for gate in GATES for how in ("steep", "flat", "mixed", "wild")]
)


@pytest.mark.rest(draws=80)
@pipelines
@extremes
def test_references_compose_at_the_limits(pipeline: Pipeline, kind: str, seed: int) -> None:
    # up to 64 * 1.5e6 nats are summed: float64 holds such an exponent to 2^-53 of its size
    assert_composes(pipeline, draw_extreme(kind, seed, **gates_of(pipeline)), 64, tolerance=1e-7)


@needs_compiler
@extremes
def test_cpu_kernels_equal_recurrence_at_the_limits(kind: str, seed: int) -> None:
    """A token that forgets everything must not blur the slow decays of the tokens after it.

    Every decay below 2^-150 is 0 in fp32, so a chunk's exponents need not pass 64 * 150, which fp32 holds to 5e-4.
    """
    call = draw_extreme(kind, seed)
    program = Program.build(default_plan(call.problem, CPU), call.problem, CPU)
    tensors = {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in call.tensors(program.plan.BT).items()
    }
    out = program.run(tensors, sizes_of(call, program.plan.BT), torch.device("cpu"))
    o, ht, _ = call.truth()
    assert all(out[name].isfinite().all() for name in ("o", "ht"))
    errors = relative_error(out["o"], o), relative_error(out["ht"], ht)
    assert max(errors) < 5e-4, errors


# Code for Hopper, without a GPU

H200 = known_device("nvidia_h200")
SETUPS = {
    "K128-V128-bf16-safe": {"K": 128, "V": 128, "dtype": "bf16", "gate": "safe", "HV": 2},
    "K128-V128-bf16-softplus": {"K": 128, "V": 128, "dtype": "bf16", "gate": "softplus", "intermediate_states": True},
    "K60-V100-fp16-softplus": {"K": 60, "V": 100, "dtype": "fp16", "gate": "softplus", "state_v_first": True},
    "K128-V128-bf16-softplus-scalar-r2": {
        "K": 128,
        "V": 128,
        "dtype": "bf16",
        "gate": "softplus",
        "scalar_gate": True,
        "rank": 2,
    },
    "K128-V128-bf16-softplus-scalar": {
        "K": 128,
        "V": 128,
        "dtype": "bf16",
        "gate": "softplus",
        "scalar_gate": True,
    },
    "K64-V128-bf16-log-scalar": {"K": 64, "V": 128, "dtype": "bf16", "gate": "log", "scalar_gate": True},
    "K230-V128-bf16-safe": {"K": 230, "V": 128, "dtype": "bf16", "gate": "safe"},
    "K256-V256-fp32-log": {"K": 256, "V": 256, "dtype": "fp32", "gate": "log", "HV": 2},
}


def hopper_case(setup: str) -> Case:
    fields = {
        "H": 2,
        "HV": 4,
        "tokens": 0,
        "l2norm": True,
        "beta": "sigmoid",
        "initial_state": True,
        "final_state": True,
    }
    gated = SETUPS[setup]["gate"] != "log"
    problem = Problem(**{**fields, **SETUPS[setup], "has_A_log": gated, "has_dt_bias": gated})
    plan = default_plan(replace(problem, direction="bwd"), H200)  # chunks are shorter where shared memory is short
    return Case(problem=problem, device=H200, BT=plan.BT, BC=plan.BC)


@cache
def draw_setup(stage_name: str) -> str:
    """One that a stage takes, of the run's seed: all of them are minutes, and the GPU's tests compile as many."""
    stage = templates.load(stage_name)
    taken = [setup for setup in SETUPS if (case := hopper_case(setup)) and not stage.default(case).reject(case)]
    return random_of_run(stage_name).choice(taken)


@pytest.fixture(scope="module")
def hopper_kernels(request: pytest.FixtureRequest) -> dict[str, tuple[str, dict[str, Any]] | WorkerFailure]:
    """Source and resources by stage, or why there are none, of the stages that this run tests."""
    if find_compiler(H200) is None:
        pytest.skip("no nvcc: install a CUDA toolkit, or the extra cuda-compiler")
    tested = {item.name for item in request.session.items if isinstance(item, pytest.Function)}
    names = [stage.name for stage in COMPILED if f"test_default_compiles_for_sm_90a[{stage.name}]" in tested]
    payloads = [(name, hopper_case(draw_setup(name))) for name in names]
    results = map_pool("support.launches:inspect_job", payloads, jobs=os.cpu_count() or 1, timeout_s=400)
    return {names[i]: result for i, result in results}


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("stage", COMPILED, ids=lambda s: s.name)
@pytest.mark.timeout(900)  # the first waits for all, and other work may share the cores
def test_default_compiles_for_sm_90a(
    stage: Stage, hopper_kernels: dict[str, tuple[str, dict[str, Any]] | WorkerFailure]
) -> None:
    setup, result = draw_setup(stage.name), hopper_kernels[stage.name]
    assert not isinstance(result, WorkerFailure), f"{setup}: {result}\n{getattr(result, 'output', '')}"
    source, resources = result
    assert f"{stage.name}_kernel(" in source
    assert resources.get("smem_bytes", 0) <= H200.smem_bytes, f"{setup} would be refused at the launch"
    case = hopper_case(setup)
    if promised := getattr(stage.default(case), "smem_bytes", None):
        assert resources["smem_bytes"] <= promised(case), f"{setup}: fewer blocks run at once than it says"


@stages
def test_only_hoppers_stages_refuse_problems(stage: Stage) -> None:
    cases = map(hopper_case, SETUPS)
    refused = [case.problem.key for case in cases if stage.default(case).reject(case)]
    assert len(refused) < len(SETUPS) if stage in HOPPER_ONLY else not refused, refused


@stages
def test_parameters_of_one_name_have_one_shape(stage: Stage) -> None:
    """A macro gives its tensors new names, the same to several; a launch then checks the shapes of one for all."""
    case = hopper_case("K128-V128-bf16-softplus")
    function = stage.build(case, stage.default(case))
    tensors = [function.buffer_map[handle] for handle in function.params if handle in function.buffer_map]
    shapes: dict[str, set[str]] = {}
    for tensor in tensors:
        shapes.setdefault(tensor.name, set()).add(str(tensor.shape))
    assert shapes and all(len(found) == 1 for found in shapes.values()), shapes


@needs_compiler
def test_rejected_config_is_not_compiled() -> None:
    stage = templates.load("fwd_state")
    case = hopper_case("K256-V256-fp32-log")
    rejected = next(config for config in stage.config.space() if config.reject(case))
    with pytest.raises(CompileError, match="fwd_state cannot run with .*: " + re.escape(rejected.reject(case) or "")):
        compile_stage(stage, case, rejected)
