"""Kernels that only Hopper runs, without one: those that can be run on the host, and what holds the others.

fwd_prep, fwd_gdn_prep, fwd_gdn_pairs, bwd_gradients and bwd_gdn_gradients, with the macros they are written with, are
executed from their generated CUDA (emulate.py), so a wrong sign, index or layout fails here. What this cannot see:
races, missing barriers and fences, addresses that are not aligned, the rounding of fast exponentials, what nvcc makes
of the text.

fwd_recurrence, fwd_gdn_recurrence, fwd_segment, fwd_merge, fwd_resume, bwd_scan, bwd_gdn_scan, bwd_segment, bwd_merge,
bwd_resume and bwd_heads, and the sm_90 lowering of the stages that also run on the CPU, are run by the GPU tests alone
(tests/gpu/test_gpu*.py, tests/gpu/test_sanitizer.py). They wait for copies by barriers and tensor maps, which nothing
here imitates. Their references are checked everywhere (test_templates.py), and a change of their text makes the
packaged plans stale, which fails below and in ``make verify`` until ``kda-tl verify --static`` finds their kernels
unchanged, or they are measured again.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
from support.cases import draw_backward, draw_call, draw_problem, family_of, random_of_run
from support.emulate import EmulatedKernel
from support.launches import run_references, sizes_of, stage_errors

from kda_tl import templates
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.stage import Case
from kda_tl.database.gpus import known_device
from kda_tl.database.records import Entry
from kda_tl.database.store import Database, stale_stages
from kda_tl.ops import load_all
from kda_tl.templates.pipelines import PIPELINES

H200 = known_device("nvidia_h200")
SMALL = dataclasses.replace(H200, num_sms=2)  # so that blocks which take chunks in turn have several
OPERATORS = load_all()
LENGTHS = (1, 0, 40, 64)
# One number a chunk and head, the sum of 4096 terms of either sign: about as large as the root of the sum of their
# squares, by which the terms' roundings count, and for six such sums less than a quarter of it once in 900 draws.
CANCELLING = {"dA_log_part": 4}
EMULATED = {
    "fwd_prep": "prep_recurrence",
    "fwd_gdn_prep": "gdn_recurrence",
    "fwd_gdn_pairs": "gdn_pairs",
    "bwd_gradients": "prep_scan",
    "bwd_gdn_gradients": "gdn_scan",
}


@pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++")
@pytest.mark.rest(draws=3)
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
    bounds = {name: stage.tolerance["bf16"] * CANCELLING.get(name, 1) for name in errors}
    assert all(errors[name] < bound for name, bound in bounds.items()), f"{errors} {problem.key}"


def test_packaged_plans_were_measured_with_todays_templates() -> None:
    """Those of every GPU: after a change, run `kda-tl verify --static`, and tune again what it finds changed."""
    from importlib.resources import files

    current = templates.fingerprints()
    packaged = Database.load(files("kda_tl.tuning_db"), "packaged")
    entries: list[Entry] = [entry for file in packaged.files.values() for entry in file.entries.values()]
    stale = {stage for entry in entries for stage in stale_stages(entry, current)}
    assert entries and not stale, f"{', '.join(sorted(stale))} changed since packaged plans were measured"
