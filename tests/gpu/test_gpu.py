"""On the GPU that is here: right numbers, and the same each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import LOWEST, Call, draw_call, operator_arguments
from support.chunked import STAGES
from support.gpu_calls import assert_same_bits, check_stage, draw, outputs, spiked_gates
from support.gpu_cases import (
    AFTER_EACH_OTHER,
    ATTENDED,
    BT,
    DECAYS,
    FORWARD,
    HUGE,
    MAIN,
    MANY,
    OTHERS,
    PACKED,
    compile_all,
    cut_plan,
    default_of,
    device,
    equal_plans,
    forward,
    hopper_plan,
    other_configs,
    plan_of,
    shipped,
    specialised,
    stage_case,
    tolerance_of,
)
from support.views import misalign, scatter, widen

import kda_tl
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan, Stage
from kda_tl.errors import InputError
from kda_tl.ops import load_all
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_by_name"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels

LENGTHS = (1, 15, 63, 64, 65, 333)
STRIDED = (
    "bf16-safe-K128-V128",
    "bf16-softplus-K60-V100-GVA-vk",
    "fp32-safe-K60-V100-BT16",
    "prep-safe-K100-V192",
    "cut-safe-K100-V192",
)
LIMITED = (
    "bf16-safe-K128-V128",
    "bf16-softplus-K128-V128-GVA",
    "bf16-log-K128-V128-BT16",
    "prep-safe-K128-V128",
    "prep-softplus-K128-V128-GVA-vk",
    "prep-log-K128-V64-H4",
    "prep-softplus-K256-V128-GVA-vk",
    "cut-safe-K128-V128",
    "cut-softplus-K128-V128-GVA-vk",
    "cut-log-K128-V64-H4",
)


def test_everything_compiles() -> None:
    text = [f"{name} {case} {config}: {failure}" for (name, case, config), failure in compile_all().items()]
    assert not text, "\n".join(text)


def assert_right(call: Call, BT: int | None, batch: int = 1, **changes: Any) -> None:
    o, ht = load_all()[call.problem.operator].call(**operator_arguments(call, batch) | {"chunk_size": BT} | changes)
    expected_o, expected_ht, _ = call.truth()
    errors = {"o": relative_error(o.flatten(0, 1), expected_o)}
    if call.problem.final_state:
        errors["ht"] = relative_error(ht, expected_ht)
    assert max(errors.values()) < tolerance_of(call.problem), f"{errors} {call.problem.key} bounds={call.bounds}"


# Right numbers


@forward
@pytest.mark.parametrize("decay", DECAYS)
def test_operator_equals_recurrence(name: str, decay: str, seed: int) -> None:
    BT, _ = FORWARD[name]
    for n, T in enumerate(LENGTHS):
        assert_right(draw(name, (T,), seed + n, decay), BT)
    assert_right(draw(name, (70, 70, 70), seed, decay), BT, batch=3)
    assert_right(draw(name, PACKED, seed, decay, varlen=True), BT)


@pytest.mark.parametrize("state_v_first", (False, True))
def test_blocks_that_take_sequence_after_sequence(state_v_first: bool, seed: int) -> None:
    call = draw_call(replace(AFTER_EACH_OTHER, state_v_first=state_v_first), MANY, seed, varlen=True, device="cuda")
    assert_right(call, 64)


@pytest.mark.parametrize("name", ATTENDED)
@pytest.mark.parametrize("decay", DECAYS)
def test_a_recurrence_that_makes_pairs_itself(name: str, decay: str, seed: int) -> None:
    """Which defaults choose for many sequences alone; their blocks take one after the other."""
    with kda_tl.pin(default_of("gdn_attend", FORWARD[name][1])):
        for n, T in enumerate(LENGTHS):
            assert_right(draw(name, (T,), seed + n, decay), 64)
        assert_right(draw(name, PACKED, seed, decay, varlen=True), 64)
    with kda_tl.pin(default_of("gdn_attend", AFTER_EACH_OTHER)):
        assert_right(draw_call(AFTER_EACH_OTHER, MANY, seed, varlen=True, device="cuda"), 64)


@forward
def test_intermediate_states(name: str, seed: int) -> None:
    BT, problem = FORWARD[name]
    call = draw(name, PACKED, seed, varlen=True)
    *_, h = load_all()[problem.operator].call(
        **operator_arguments(call), chunk_size=BT, return_intermediate_states=True
    )
    assert relative_error(h[0], call.truth(BT)[2]) < tolerance_of(problem)


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("change", (scatter, misalign, widen))
def test_any_strides_are_served(name: str, change: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    call = draw(name, PACKED, seed, varlen=True)
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    given = {key: x for key, x in operator_arguments(call).items() if key in names and x is not None}
    assert_right(call, FORWARD[name][0], **{key: change(x) for key, x in given.items()})


@pytest.mark.parametrize("name", (*LIMITED, "prep-gdn-softplus-K128-V128-GVA-vk", "cut-gdn-log-K64-V64-bare"))
@pytest.mark.parametrize("limit", ("steep", "flat", "mixed", "spiked"))
def test_gates_at_their_limits(name: str, limit: str, seed: int) -> None:
    """Saturated everywhere, nowhere, in a tenth of the places among slow decays, and at every eighth token."""
    BT, problem = FORWARD[name]
    shape = (130, problem.HV, problem.G)
    here = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < {"steep": 2.0, "flat": -1.0}.get(
        limit, 0.1
    )
    log = problem.gate == "log"
    g = torch.where(here, -1e4 if log else 1e4, (0.0 if limit == "flat" else -0.03) if log else -4.0).double()
    if limit == "spiked":
        g = spiked_gates(problem, 130)
    assert_right(draw_call(problem, (65, 1, 64), seed, device="cuda", lower_bound=LOWEST, g=g), BT)


@pytest.mark.parametrize("name", LIMITED)
def test_nan_in_the_gate_propagates(name: str, seed: int) -> None:
    BT, _ = FORWARD[name]
    call = draw(name, (130, 70), seed, varlen=True)
    arguments = operator_arguments(call) | {"chunk_size": BT}
    clean, _ = chunk_kda(**arguments)
    arguments["g"] = arguments["g"].clone()
    arguments["g"][0, 70, 0, 5] = torch.nan
    o, _ = chunk_kda(**arguments)
    assert o[0, 70:130, 0].isnan().all() and torch.equal(o[0, :64], clean[0, :64])
    assert torch.equal(o[0, 130:], clean[0, 130:]) and torch.equal(o[:, :, 1:], clean[:, :, 1:])


# Stages


stages = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)


@stages
@specialised
def test_kernel_equals_reference(stage: Stage, name: str, seed: int) -> None:
    check_stage(stage, name, stage.default(stage_case(stage.name, name)), seed)


@stages
@pytest.mark.parametrize("name", OTHERS)
def test_other_configs_equal_reference(stage: Stage, name: str, seed: int) -> None:
    for config in other_configs(stage.name, name):
        check_stage(stage, name, config, seed)


# The same numbers


@forward
def test_two_runs_give_the_same_bits(name: str, seed: int) -> None:
    BT, _ = FORWARD[name]
    call = draw(name, (333, 1, 200, 64), seed, varlen=True)
    operator, arguments = load_all()[call.problem.operator], operator_arguments(call) | {"chunk_size": BT}
    arguments |= dict.fromkeys({"return_intermediate_states"} & set(operator.arguments), True)
    first = outputs(arguments, operator.name)
    for _ in range(5):
        assert_same_bits(outputs(arguments, operator.name), first)


def test_plans_of_one_numerics_class_give_the_same_bits(seed: int) -> None:
    call = draw("bf16-safe-K128-V128", (333, 1, 200, 64), seed, varlen=True)
    arguments = operator_arguments(call)
    for first in (plan_of(MAIN, BT), hopper_plan(MAIN), cut_plan(MAIN)):
        with kda_tl.pin(first):
            expected = outputs(arguments)
        for plan in equal_plans(first):
            with kda_tl.pin(plan):
                for one, other in zip(outputs(arguments), expected, strict=True):
                    assert torch.equal(one, other), f"{plan.stages}"


@pytest.mark.parametrize("plan", (hopper_plan, lambda problem: plan_of(problem, BT)), ids=("Hopper's own", "staged"))
def test_offsets_pass_2_to_the_31(plan: Callable[[Problem], Plan]) -> None:
    """The last sequence of a pack so long that its elements are past 2^31 has the bits it has alone.

    The staged plan takes 60 GiB: 20 for arguments and result, and 40 of the intermediates that live at once.
    """
    tokens, last = 270_000, 130
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("needs 64 GiB of free device memory")
    H, K = HUGE.H, HUGE.K
    rng = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    packed = {"q": normal(H, K), "k": normal(H, K), "v": normal(H, K), "g": normal(H, K), "beta": normal(H)}
    assert packed["q"].numel() > 2**31
    flags: dict[str, Any] = {
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": LOWEST,
        "A_log": torch.zeros(H, device="cuda"),
        "dt_bias": torch.zeros(H * K, device="cuda"),
    }
    with kda_tl.pin(plan(HUGE)):
        o, ht = chunk_kda(**packed, **flags, cu_seqlens=torch.tensor([0, tokens - last, tokens], device="cuda"))
        alone = {name: x[:, -last:].clone() for name, x in packed.items()}
        expected, expected_ht = chunk_kda(**alone, **flags)
    assert torch.equal(o[:, -last:], expected) and torch.equal(ht[1:], expected_ht)
    assert o[:, :: tokens // 100].isfinite().all()
    del packed, o, ht
    torch.cuda.empty_cache()


# Calls that differ in one number


@pytest.mark.parametrize("name", ("bf16-safe-K128-V128", "prep-safe-K128-V128", "cut-safe-K128-V128"))
def test_calls_that_differ_in_the_lower_bound_alone(name: str, seed: int) -> None:
    """In a row: a replay's numbers are written anew where they change."""
    for lower_bound in (-5.0, -0.7, -2.2, -5.0):
        assert_right(draw(name, (130,), seed, lower_bound=lower_bound), FORWARD[name][0])


# Shipped plans, bad input


def test_shipped_plans_are_right(seed: int) -> None:
    plans = shipped("fwd")
    if not plans:
        pytest.skip(f"tuning_db holds no forward for {device().slug}")
    for n, (text, problem, plan) in enumerate(plans):
        with kda_tl.pin(plan):
            for lengths in ((200,), PACKED):
                call = draw_call(problem, lengths, seed + n, device="cuda")
                o, ht = chunk_kda(**operator_arguments(call))
                expected_o, expected_ht, _ = call.truth()
                errors = relative_error(o[0], expected_o), relative_error(ht, expected_ht)
                assert max(errors) < tolerance_of(problem), f"{text}: {errors} {plan}"


def test_mixed_devices_are_refused(seed: int) -> None:
    arguments = operator_arguments(draw("bf16-safe-K128-V128", PACKED, seed, varlen=True))
    for name in ("k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"):
        with pytest.raises(InputError, match=f"{name} is on cpu but q is on cuda:0"):
            chunk_kda(**arguments | {name: arguments[name].cpu()})


def test_explain_names_the_plan_that_runs(seed: int) -> None:
    arguments = operator_arguments(draw("bf16-safe-K128-V128", (70,), seed))
    plan = plan_of(MAIN, BT)
    with kda_tl.pin(plan):
        choice = explain(**arguments)
    assert (choice.step, choice.plan) == ("pinned", plan)
