"""Kernels that only Hopper runs, without one: those that can be run on the host, and what holds the others.

fwd_prep, fwd_gdn_prep, fwd_gdn_pairs, fwd_gdn_inverse, bwd_gradients and bwd_gdn_gradients, with the macros they are
written with, are executed from their generated CUDA (emulate.py), so a wrong sign, index or layout fails here. What
this cannot see: races, missing barriers and fences, addresses that are not aligned, the rounding of fast exponentials,
what nvcc makes of the text.

fwd_recurrence, fwd_gdn_recurrence, fwd_gdn_attend, fwd_segment, fwd_merge, fwd_resume, fwd_gdn_segment, fwd_gdn_merge,
fwd_gdn_resume, bwd_scan, bwd_gdn_scan, bwd_gdn_segment, bwd_gdn_merge, bwd_gdn_resume, bwd_gdn_states, bwd_gdn_walk,
bwd_segment, bwd_merge, bwd_resume and bwd_heads, and the sm_90 lowering of the stages that also run on the CPU, are run
by the GPU tests alone (tests/gpu/test_gpu*.py, tests/gpu/test_sanitizer.py). They wait for copies by barriers and
tensor maps, which nothing here imitates. Their references are checked everywhere (test_templates.py), and a change of
their text makes the packaged plans stale, which fails below and in ``make verify`` until ``kda-tl verify --static``
finds their kernels unchanged, or they are measured again.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from support.cases import TORCH, draw_backward, draw_call, draw_problem, family_of, random_of_run
from support.emulate import EmulatedKernel
from support.launches import launch_poisoned, run_references, sizes_of, stage_errors

from kda_tl import templates
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Operands, Stage
from kda_tl.database.gpus import known_device
from kda_tl.database.records import Entry
from kda_tl.database.store import Database, stale_stages
from kda_tl.ops import load_all
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.sm90.powers import GATE

H200 = known_device("nvidia_h200")
SMALL = dataclasses.replace(H200, num_sms=2)  # so that blocks which take chunks in turn have several
OPERATORS = load_all()
LENGTHS = (1, 0, 40, 64)
EMULATED = {
    "fwd_prep": "prep_recurrence",
    "fwd_gdn_prep": "gdn_recurrence",
    "fwd_gdn_pairs": "gdn_pairs",
    "fwd_gdn_inverse": "gdn_attend",
    "bwd_gradients": "prep_scan",
    "bwd_gdn_gradients": "gdn_scan",
}


needs_compiler = pytest.mark.skipif(
    find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++"
)


@needs_compiler
@pytest.mark.rest(draws=1)
@pytest.mark.parametrize(("H", "HV"), [(3, 6), (5, 5)], ids=["shared", "odd"])
@pytest.mark.parametrize("name", EMULATED)
def test_kernel_for_hopper_equals_reference(name: str, H: int, HV: int, seed: int) -> None:
    """Of a gate that is drawn: slow over a whole chunk, and, if unbounded, further in one than anchors can follow."""
    rng, stage, pipeline = random.Random(seed), templates.load(name), PIPELINES[EMULATED[name]]
    given = {**family_of(name), "dtype": "bf16", "final_state": True, "K": 64, "V": 64}
    if H != HV:  # what else is drawn, and without a state or a norm a sign in its terms is not seen
        given |= {"initial_state": True, "l2norm": True}
    gate = random_of_run(f"gate of {name}").choice(OPERATORS[given.get("operator", "chunk_kda")].gates)
    problem = draw_problem(rng, gate=gate, H=H, HV=HV, intermediate_states=False, **given)
    call = draw_call(problem, LENGTHS, seed)
    call.x["g"][-LENGTHS[-1] :] = -0.01 if gate == "log" else -9.0
    if problem.scalar_gate:  # what follows a token that forgets everything must not be blurred by its size
        call.x["g"][1 : -LENGTHS[-1] : 8] = -1e6 if gate == "log" else 1e6
    elif not problem.bounded_gate:
        call.x["g"][1 : -LENGTHS[-1] : 3] = -50.0 if gate == "log" else 300.0
    if pipeline.direction == "bwd":
        call = draw_backward(call, seed)
    case = call.case(H200, 64, 16)
    _, records = run_references(pipeline, case, call.tensors(64))
    inputs = next(inputs for recorded, inputs in records if recorded.name == name)
    bare = Case(problem=case.problem.without_lengths(), device=SMALL, BT=64, BC=16)
    errors = stage_errors(EmulatedKernel(stage, bare, stage.default(bare)), inputs, sizes_of(call, 64))
    assert max(errors.values()) < stage.tolerance["bf16"], f"{errors} {problem.key}"


@needs_compiler
@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("num_sms", (1, 8, 30), ids=["whole", "no part of two", "one by one"])
def test_pairs_of_value_heads_that_blocks_part(num_sms: int, seed: int) -> None:
    """Three share a head, of which there are eight in the chunks: for two, 16 and up to 24 blocks. Parts are equal.

    Of 128 channels: what is made of one head then has room enough to lie where the next must find something.
    """
    stage, device = templates.load("fwd_gdn_pairs"), dataclasses.replace(H200, num_sms=num_sms)
    given = {**family_of("gdn"), "dtype": "bf16", "K": 128, "V": 64}
    problem = draw_problem(random.Random(seed), H=2, HV=6, intermediate_states=False, **given)
    call = draw_call(problem, (1, 0, 40, 64, 20), seed)
    _, ((_, inputs), *_) = run_references(PIPELINES["gdn_pairs"], call.case(H200, 64, 16), call.tensors(64))
    bare = Case(problem=problem.without_lengths(), device=device, BT=64, BC=16)
    errors = stage_errors(EmulatedKernel(stage, bare, stage.default(bare)), inputs, sizes_of(call, 64))
    assert max(errors.values()) < stage.tolerance["bf16"], f"{errors} {problem.key}"


@needs_compiler
@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("l2norm", (False, True))
def test_bounds_of_pairs_are_right_one_by_one(l2norm: bool, seed: int) -> None:
    """Of keys that make states grow, and of those that do not; endless where a gate or a key has no end."""
    stage, lengths = templates.load("fwd_gdn_pairs"), (64, 1, 0, 40, 64, 64)
    given = {"dtype": "bf16", "g_dtype": "fp32", "gate": "log", "K": 64, "V": 64, "l2norm": l2norm, **family_of("gdn")}
    problem = draw_problem(random.Random(seed), H=2, HV=4, beta="sigmoid2" if l2norm else "plain", **given)
    call = draw_call(problem, lengths, seed)
    if not l2norm:
        call.x["k"] = (1.7 * call.x["k"]).bfloat16().double()
        call.x["beta"] = 2 * call.x["beta"]
    case, bare = call.case(H200, 64, 16), Case(problem=problem.without_lengths(), device=SMALL, BT=64, BC=16)
    kernel = EmulatedKernel(stage, bare, stage.default(bare))
    _, ((_, inputs), *_) = run_references(PIPELINES["gdn_pairs"], case, call.tensors(64))
    truth = stage.reference(case, Operands(**inputs))
    expected, growth = truth["bounds"], truth["bounds"] - truth["powers"][:, :, GATE, -1]
    assert growth.max() < 1e-9 if l2norm else growth.max() > 30
    bounds = launch_poisoned(kernel, as_launched(stage, problem, inputs), sizes_of(call, 64))["bounds"]
    # of |k|^2 the rounding of 64 products, 2^-18, times steps and keys of up to 6, in each of 64 logarithms
    off = (bounds - expected).abs() - 64 * 2.0**-24 * expected.abs()
    assert off.max() < 64 * 6 * 2.0**-18 / math.log(2), f"{off.max()} {problem.key}"
    inputs["k"][70, 0, 3] = math.nan if l2norm else math.inf  # of the chunk of 40, and two value heads that share it
    inputs["g"][-1, 3, 0] = math.nan
    inputs["g"][-65, 2, 0] = math.inf
    bounds = launch_poisoned(kernel, as_launched(stage, problem, inputs), sizes_of(call, 64))["bounds"]
    endless = torch.zeros(5, 4, dtype=torch.bool)
    endless[2, :2] = True
    endless[4, 3] = endless[3, 2] = True
    assert ((bounds == 1e30) == endless).all(), bounds


def as_launched(stage: Stage, problem: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a reference in the dtypes that a kernel reads."""
    elements = {name: TORCH.get(stage.specs[name].element(problem)) for name in stage.inputs}
    return {
        name: x.to(elements[name]) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def test_packaged_plans_were_measured_with_todays_templates() -> None:
    """Those of every GPU: after a change, run `kda-tl verify --static`, and tune again what it finds changed."""
    from importlib.resources import files

    current = templates.fingerprints()
    packaged = Database.load(files("kda_tl.tuning_db"), "packaged")
    entries: list[Entry] = [entry for file in packaged.files.values() for entry in file.entries.values()]
    stale = {stage for entry in entries for stage in stale_stages(entry, current)}
    assert entries and not stale, f"{', '.join(sorted(stale))} changed since packaged plans were measured"
