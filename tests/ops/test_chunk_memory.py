"""What the operator remembers between calls, on the CPU target: every argument is part of a call's signature."""

from __future__ import annotations

import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import TENSORS, Call, draw_call, make_entry, operator_arguments
from support.operator_cases import CPU, SMALL, SPECIALISED, STATE, assert_right, bind_call

import kda_tl
from kda_tl.core.device import find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan
from kda_tl.database import store as db
from kda_tl.errors import InputError
from kda_tl.ops import call as call_module
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error
from kda_tl.runtime import dispatch
from kda_tl.runtime.defaults import default_plan

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


# What is remembered between calls


def test_same_signature_other_values(seed: int, plans: list[Plan]) -> None:
    for n in range(3):
        assert_right(draw_call(SMALL, (70,), seed + n, varlen=False))
    call = draw_call(SMALL, (70,), seed, varlen=False)
    assert_right(Call(call.problem, call.bounds, call.x | {"scale": 1.0}))
    assert len(plans) == 4 and len(set(plans)) == 1


def test_changed_cu_seqlens_is_followed(seed: int) -> None:
    one, other = (draw_call(SMALL, lengths, seed) for lengths in ((10, 60), (33, 37)))
    cu_seqlens = torch.tensor(one.bounds)
    assert_right(one, cu_seqlens=cu_seqlens)
    cu_seqlens.copy_(torch.tensor(other.bounds))
    assert_right(other, cu_seqlens=cu_seqlens)


def test_flags_are_part_of_the_signature(seed: int) -> None:
    """Calls that differ in one flag, in a row: none may get the other's program."""
    base = replace(SPECIALISED["safe-fp32"], K=32, V=32, H=1, HV=2)
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"beta": "plain"},
        {"beta": "sigmoid2"},
        {"l2norm": False},
        {"has_dt_bias": False},
        {"has_A_log": False},
        {"gate": "softplus"},
        {"final_state": False},
        {"initial_state": False},
        {"state_v_first": True},
        {},
    )
    for change in changes:
        assert_right(draw_call(replace(base, **change), (40,), seed, varlen=False))


def test_calls_that_differ_in_the_lower_bound_alone(seed: int) -> None:
    """Its kernel is the same: the number must reach it anew at each call."""
    problem = replace(SPECIALISED["safe-fp32"], K=32, V=32, H=1, HV=2)
    for lower_bound in (-5.0, -0.7, -2.2, -5.0):
        assert_right(draw_call(problem, (40,), seed, varlen=False, lower_bound=lower_bound))


def signature_of_all() -> dict[str, Any]:
    """Arguments of chunk_kda by name, each of which can be changed alone."""
    call = draw_call(replace(SPECIALISED["safe-fp32"], K=8, V=8), (10, 10), 0, varlen=False)
    given = inspect.signature(chunk_kda).bind(**operator_arguments(call, 2))
    given.apply_defaults()
    return {**given.arguments, "safe_gate": False}


def packed_as(*bounds: int) -> dict[str, Any]:
    """The same tokens as sequences of one batch."""
    tokens = {name: x.flatten(0, 1)[None] for name, x in signature_of_all().items() if name in TENSORS[:5]}
    return tokens | {"cu_seqlens": torch.tensor(bounds), "initial_state": None}


def cast(dtype: torch.dtype, *names: str) -> dict[str, Any]:
    """Arguments in another dtype."""
    return {name: signature_of_all()[name].to(dtype) for name in names}


HALF = {name: x[:, :5] for name, x in signature_of_all().items() if name in TENSORS[:5]}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scale": ({}, {"scale": 0.25}),
    "scale None": ({}, {"scale": None}),
    "initial_state": ({}, {"initial_state": None}),
    "output_final_state": ({}, {"output_final_state": False}),
    "use_qk_l2norm_in_kernel": ({}, {"use_qk_l2norm_in_kernel": False}),
    "use_gate_in_kernel": ({}, {"use_gate_in_kernel": False}),
    "use_beta_sigmoid_in_kernel": ({}, {"use_beta_sigmoid_in_kernel": False}),
    "allow_neg_eigval": ({}, {"allow_neg_eigval": True}),
    "lower_bound": ({"lower_bound": -5.0}, {"lower_bound": -2.5}),
    "lower_bound None": ({}, {"lower_bound": None}),
    "A_log": ({}, {"A_log": None}),
    "dt_bias": ({}, {"dt_bias": None}),
    "state_v_first": ({}, {"state_v_first": True}),
    "return_intermediate_states": ({}, {"return_intermediate_states": True}),
    "chunk_size": ({}, {"chunk_size": 16}),
    "chunk_size of states": ({"return_intermediate_states": True}, {"chunk_size": 16}),
    "cu_seqlens": (packed_as(0, 20) | {"cu_seqlens": None}, {"cu_seqlens": torch.tensor([0, 20])}),
    "bounds": (packed_as(0, 7, 20), packed_as(0, 9, 20)),
    "tokens": ({}, HALF),
    "q dtype": ({}, cast(torch.bfloat16, "q", "k", "v")),
    "g dtype": ({}, cast(torch.bfloat16, "g")),
    "beta dtype": ({}, cast(torch.bfloat16, "beta")),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_argument_is_part_of_the_signature(name: str, planned_only: None) -> None:
    """Two calls that differ in one argument alone: the second is planned as if the first had not been."""
    first = {**signature_of_all(), **DIFFERENT[name][0]}
    second = {**first, **DIFFERENT[name][1]}
    before = bind_call(first)
    found = bind_call(second)
    assert found != before, "they are to differ"
    call_module._bound_calls.clear()
    assert bind_call(second) == found


def test_a_refused_flag_is_part_of_the_signature(planned_only: None) -> None:
    """It changes nothing of what is planned, but a call that is refused alone is refused after a good one."""
    good = {**signature_of_all(), "lower_bound": None}
    assert bind_call(good).choice.plan is not None
    with pytest.raises(InputError, match="needs lower_bound"):
        bind_call(good | {"safe_gate": True})


def test_packed_and_dense_are_planned_apart(seed: int, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence of T tokens either way, but plans are tuned for packed sequences and dense batches apart."""
    asked: list[bool] = []
    load = call_module.load_program

    def record(problem: Problem, *args: Any) -> Any:
        asked.append(problem.varlen)
        return load(problem, *args)

    monkeypatch.setattr(call_module, "load_program", record)
    for varlen in (False, True):
        assert_right(draw_call(SMALL, (70,), seed, varlen=varlen))
    assert asked == [False, True]


def test_pin_takes_effect_at_once(seed: int, plans: list[Plan]) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    pinned = default_plan(call.problem, CPU, BT=16, BC=8)
    assert_right(call)
    with kda_tl.pin(pinned):
        assert_right(call)
        assert explain(**operator_arguments(call)).step == "pinned"
    assert_right(call)
    assert plans[1] == pinned and plans[0] == plans[2] != pinned


def test_pinned_plan_and_chunk_size_must_agree(seed: int) -> None:
    """Intermediate states are of chunk_size tokens: a plan of other chunks must not answer in its place."""
    call = draw_call(SMALL, (70,), seed, varlen=False)
    with (
        kda_tl.pin(default_plan(call.problem, CPU, BT=16)),
        pytest.raises(InputError, match="BT=16.*chunk_size=32"),
    ):
        chunk_kda(**operator_arguments(call), chunk_size=32, return_intermediate_states=True)


def test_overlay_takes_effect_at_once(seed: int, plans: list[Plan], tmp_path: Path) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    tuned = default_plan(call.problem, CPU, BT=32)
    db.store(tmp_path, CPU, "chunk_kda", "fwd", [make_entry(call.problem, tuned)])
    assert_right(call)
    with kda_tl.use(tmp_path):
        assert_right(call)
        choice = explain(**operator_arguments(call))
        assert (choice.step, choice.source, choice.plan) == ("exact bucket", "overlay", tuned)
        assert_right(call, chunk_size=64)
    assert_right(call)
    assert [plan.BT for plan in plans] == [plans[0].BT, 32, 64, plans[0].BT] and plans[0].BT != 32


def test_first_calls_from_many_threads(seed: int, forgetful: None) -> None:
    call = draw_call(replace(SMALL, V=16), (70,), seed, varlen=False)
    arguments = operator_arguments(call)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: chunk_kda(**arguments), range(8)))
    assert relative_error(results[0][0][0], call.truth()[0]) < STATE
    for o, ht in results[1:]:
        assert torch.equal(o, results[0][0]) and torch.equal(ht, results[0][1])


def test_warm_call_is_silent_and_leaves_nothing_behind(seed: int) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    arguments = operator_arguments(call)
    chunk_kda(**arguments)
    known = len(call_module._bound_calls), dispatch._select.cache_info().currsize
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_kda(**arguments)
    assert (len(call_module._bound_calls), dispatch._select.cache_info().currsize) == known
