"""Kernels that are listed for a problem are those that its calls ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.cli_cases import make_entry

from kda_tl.aot import packaged
from kda_tl.aot.packaged import DIMS, GPUS, list_packaged, list_problems, list_steps
from kda_tl.aot.plans import KernelSpec, list_calls, list_distinct
from kda_tl.bench.workloads import WORKLOADS, Workload, select
from kda_tl.core.problem import Problem
from kda_tl.database.file import Gpu
from kda_tl.database.gpus import known_device
from kda_tl.database.lookup import TuningFile
from kda_tl.database.store import Database, sources
from kda_tl.ops.call import backward_problem, choose_backward_of
from kda_tl.runtime import program
from kda_tl.runtime.compile import Job
from kda_tl.runtime.dispatch import build_program, select_plan
from kda_tl.templates.pipelines import PIPELINES

HOPPER = known_device("nvidia_h200")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Digests of the kernels that programs ask for; nothing is compiled."""
    digests: set[str] = set()

    def note(jobs: Sequence[Job]) -> list[Any]:
        digests.update(KernelSpec(stage=stage, case=case, config=config).digest for stage, case, config in jobs)
        return []

    monkeypatch.setattr(program, "compile_stages", note)
    build_program.cache_clear()
    yield digests
    build_program.cache_clear()


@pytest.mark.parametrize(
    "operator, gate",
    [
        *(("chunk_kda", gate) for gate in ("safe", "softplus", "log")),
        ("chunk_gated_delta_rule", "softplus"),
        ("chunk_gated_delta_rule", "log"),
    ],
)
@pytest.mark.parametrize("T, H, dtype", [(8192, 32, "bf16"), (32768, 8, "bf16"), (1000, 4, "fp16")])
def test_the_kernels_of_a_call_are_listed(
    operator: str, gate: str, T: int, H: int, dtype: str, asked: set[str]
) -> None:
    """Untuned calls of few heads too, which are cut in both passes: the backward finds what the forward made."""
    workload = Workload(name="x", T=T, H=H, dtype=dtype, gate=gate, operator=operator, direction="bwd")
    problem = replace(workload.problem(), direction="fwd")
    forward = select_plan(problem, HOPPER, sources()).plan
    assert forward is not None
    build_program(forward, problem.without_lengths(), HOPPER)
    listed = {kernel.digest for kernel in list_calls(problem, HOPPER, sources())}
    assert listed == asked
    for keep in (False, True):
        backward = choose_backward_of(problem, HOPPER, None, forward, keep)
        assert backward.choice.plan is not None
        made = {name for stage in PIPELINES[forward.pipeline].stages for name in stage.outputs}
        finds = made.issuperset(PIPELINES[backward.choice.plan.pipeline].residuals)
        assert bool(backward.residuals) or not (keep and finds)
        assert finds or backward.choice.plan.pipeline == "gdn_walk_segments_16", "whose forward makes no powers"
        for final_state in (True, False):
            p = backward_problem(problem, final_state)
            for from_residuals in {False, bool(backward.residuals)}:  # inside torch.compile nothing is kept
                build_program(backward.choice.plan, p, HOPPER, from_residuals=from_residuals)
    build_program(forward, replace(problem, direction="bwd").without_lengths(), HOPPER)  # which keeps residuals
    listed = {kernel.digest for kernel in list_calls(workload.problem(), HOPPER, sources())}
    assert listed == asked


@pytest.mark.rest
def test_a_wheel_holds_the_packaged_plans_first_and_then_defaults_of_usual_calls() -> None:
    devices = [known_device(slug) for slug in GPUS]
    kernels = list_distinct(list_packaged(devices, sources()))
    assert len({kernel.digest for kernel in kernels}) == len(kernels) > 100
    places = {kernel.digest: i for i, kernel in enumerate(kernels)}
    tuned = {k.digest for device in devices for k in packaged._list_tuned(device, sources())}
    assert tuned and max(places[digest] for digest in tuned) == len(tuned) - 1
    held = {(k.case.problem.dtype, k.case.problem.K, k.case.problem.V, k.case.problem.gate) for k in kernels}
    assert held >= {(t, *dims, gate) for t in ("bf16", "fp16") for dims in DIMS for gate in ("safe", "softplus", "log")}
    for problem in list_problems("bwd"):  # a call of each finds all that it asks for, with other heads and lengths too
        for HV, tokens in ((problem.HV, problem.tokens), (32, 8192), (16, 4096)):
            other = replace(problem, H=HV // problem.group, HV=HV, tokens=tokens, longest=tokens)
            assert {k.digest for k in list_calls(other, devices[0], sources())} <= places.keys()
    four = [replace(p, H=p.HV // 4) for p in list_problems("fwd") if p.grouped]  # a forward's kernels are the same
    assert len(four) == 24 and all(
        {k.digest for k in list_calls(p, devices[0], sources())} <= places.keys() for p in four
    )
    short = [p for p in list_problems("fwd") if p.sequences > 1 and not p.grouped]
    many = [replace(p, H=96, HV=96) for p in short]
    assert len(many) == 18  # with many heads as with many sequences, of which there may be other ones
    for p in (*many, *(replace(p, H=64, HV=64, sequences=4, longest=p.tokens // 4) for p in many)):
        assert {k.digest for k in list_calls(p, devices[0], sources())} <= places.keys()
    held_stages = {(k.stage.name, k.case.problem.K) for k in kernels}
    assert held_stages >= {(name, 64) for name in ("fwd_recurrence", "fwd_resume", "bwd_scan", "bwd_resume")}


def test_architectures_that_were_run_nowhere_have_fewer_kernels() -> None:
    kernels = list_distinct(list_packaged([known_device("nvidia_a100_sxm4_80gb")], sources()))
    assert {(k.case.problem.K, k.case.problem.V) for k in kernels} == {DIMS[0]}


@pytest.mark.parametrize("name", ["kda-decode-B32-bf16", "gdn-verify-B32-T4-fp32", "kda-decode-B1-fp32"])
def test_the_kernel_of_a_step_is_listed(name: str, asked: set[str]) -> None:
    problem = select([name])[0].problem()
    plan = select_plan(problem, HOPPER, sources()).plan
    assert plan is not None and plan.pipeline == "decode_rows"
    build_program(plan, problem.without_lengths(), HOPPER)
    assert {kernel.digest for kernel in list_calls(problem, HOPPER, sources())} == asked and len(asked) == 1


def test_a_wheel_holds_steps_of_engines() -> None:
    """With K = V = 128: of both operators, types of states and ways of writing; one token of fp32 states has a kernel
    for one sequence and one for many.
    """
    held = {k.digest for device in map(known_device, GPUS) for k in list_packaged([device], ())}
    own = {k.digest for p in list_steps() for k in list_calls(p, HOPPER, ())}
    assert own <= held and len(own) == 21
    steps = [w for w in WORKLOADS if w.K == 128 and w.direction == "step" and (w.T == 4 or w.B in (1, 32, 256))]
    assert len(steps) == 16
    for w in steps:
        for changed in (w, *([replace(w, H=16, HV=64)] if w.B > 1 else [])):
            assert {k.digest for k in list_calls(changed.problem(), HOPPER, ())} <= held, w.name


def test_tuned_steps_are_in_a_wheel_as_they_are_called() -> None:
    w = select(["kda-verify-B32-T4-bf16"])[0]
    entry = make_entry(w, HOPPER)
    file = TuningFile(path="", gpu=Gpu.of(HOPPER), operator=w.operator, direction="step", entries={entry.key: entry})
    database = Database(name="made", path="", files={(HOPPER.slug, w.operator, "step"): file})
    (kernel,) = list_distinct(packaged._list_tuned(HOPPER, [database]))
    assert kernel.digest in {k.digest for k in list_calls(w.problem(), HOPPER, ())}


def test_the_passes_have_kernels_of_their_own() -> None:
    """The backward's `fwd_prep` keeps step sizes from vanishing, the forward's does not."""
    forward = Problem(H=4, HV=4, K=128, V=128, tokens=512, gate="safe", has_A_log=True)
    backward = [
        k for k in list_calls(replace(forward, direction="bwd"), HOPPER, sources()) if k.stage.name == "fwd_prep"
    ]
    assert len({kernel.digest for kernel in backward}) == 2


def test_every_number_of_a_problem_counts() -> None:
    problem = Problem(H=4, HV=4, K=64, V=64, tokens=512, dtype="fp16")
    one = list_distinct(list_calls(problem, HOPPER, sources()))
    assert not {k.digest for k in one} & {k.digest for k in list_calls(replace(problem, K=96), HOPPER, sources())}
