"""The operator on the CPU target: against the recurrence, and what it remembers between calls."""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    OPERATOR,
    TENSORS,
    Call,
    draw_call,
    draw_lengths,
    make_entry,
    misalign,
    operator_arguments,
    scatter,
    widen,
)
from torch import Tensor

import kda_tl
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Plan
from kda_tl.database import store as db
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.ops import call as call_module
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error
from kda_tl.runtime import dispatch
from kda_tl.runtime.dispatch import default_plan
from kda_tl.runtime.program import Program

CPU = cpu_device()
# States are computed and returned in fp32: an exponent of 64 * 5 nats is held to 2^-16. Outputs are rounded to io once.
STATE = 5e-5
TOLERANCE = {"fp32": STATE, "fp16": 5e-4, "bf16": 3e-3}
SPECIALISED = {
    "safe-fp32": Problem(
        H=2,
        HV=4,
        K=60,
        V=100,
        tokens=0,
        dtype="fp32",
        gate="safe",
        has_A_log=True,
        has_dt_bias=True,
        beta="sigmoid",
        l2norm=True,
        initial_state=True,
        final_state=True,
    ),
    "softplus-bf16": Problem(
        H=1,
        HV=3,
        K=32,
        V=64,
        tokens=0,
        dtype="bf16",
        g_dtype="fp32",
        gate="softplus",
        has_A_log=True,
        beta="sigmoid2",
        l2norm=True,
        initial_state=True,
        final_state=True,
        state_v_first=True,
    ),
    "log-fp16": Problem(H=2, HV=2, K=64, V=32, tokens=0, dtype="fp16", beta_dtype="fp32", final_state=True),
}
SMALL = replace(SPECIALISED["log-fp16"], K=32, dtype="fp32", g_dtype="fp32", initial_state=True)
specialised = pytest.mark.parametrize("problem", SPECIALISED.values(), ids=SPECIALISED)

pytestmark = pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans that ran, in order."""
    ran: list[Plan] = []
    run = Program.run

    def record(self: Program, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.plan)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Program, "run", record)
    return ran


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Nothing is remembered of earlier calls, nor of this test's by later ones."""

    def forget() -> None:
        dispatch._settings.cache_clear()
        for memory in (dispatch._choices, call_module._bound_calls, call_module._warned):
            memory.clear()

    forget()
    yield
    forget()


def bind_call(arguments: dict[str, Any]) -> Any:
    """The plan of a call with these arguments, but for the function that it takes its tensors by."""
    return call_module.bind_call(OPERATOR, OPERATOR.bind(**arguments))


def assert_right(call: Call, batch: int = 1, **changes: Any) -> None:
    """chunk_kda on a call is the recurrence; its arguments are left as they were."""
    arguments = operator_arguments(call, batch) | changes
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    o, ht = chunk_kda(**arguments)
    expected_o, expected_ht, _ = call.truth()
    p = call.problem
    assert o.dtype == arguments["q"].dtype and o.shape == arguments["v"].shape and o.is_contiguous()
    errors = [relative_error(o.flatten(0, 1), expected_o) / TOLERANCE[p.dtype]]
    assert (ht is not None) == p.final_state
    if ht is not None:
        assert ht.dtype == torch.float32
        errors.append(relative_error(ht, expected_ht) / STATE)
    assert max(errors) < 1, f"{errors} of the tolerance, {p.key} bounds={call.bounds}"
    for name, x in before.items():
        assert torch.equal(arguments[name].nan_to_num(), x.nan_to_num()), f"{name} was written to"


# Against the recurrence


@specialised
def test_lengths(problem: Problem, seed: int) -> None:
    for n, T in enumerate((1, 15, 16, 17, 63, 64, 65, 130)):
        assert_right(draw_call(problem, (T,), seed + n, varlen=False))


@specialised
def test_batches(problem: Problem, seed: int) -> None:
    for n, (B, T) in enumerate(((2, 1), (3, 65), (5, 33))):
        assert_right(draw_call(problem, (T,) * B, seed + n, varlen=False), batch=B)


@specialised
def test_packed_sequences(problem: Problem, seed: int) -> None:
    rng = random.Random(seed)
    for n in range(3):
        assert_right(draw_call(problem, draw_lengths(rng), seed + n))
    assert_right(draw_call(problem, (0, 0, 5), seed))
    assert_right(draw_call(problem, (64, 64), seed))


@pytest.mark.parametrize("chunk_size", (16, 32, 64))
@pytest.mark.parametrize("state_v_first", (False, True), ids=("kv", "vk"))
def test_intermediate_states(chunk_size: int, state_v_first: bool, seed: int) -> None:
    problem = replace(SMALL, state_v_first=state_v_first)
    for lengths, batch, varlen in (((65, 65), 2, False), ((70, 0, 1, 16, 33), 1, True)):
        call = draw_call(problem, lengths, seed, varlen=varlen)
        arguments = operator_arguments(call, batch)
        o, ht, h = chunk_kda(**arguments, chunk_size=chunk_size, return_intermediate_states=True)
        expected_o, expected_ht, expected_h = call.truth(chunk_size)
        assert h.dtype == arguments["q"].dtype and h.shape[0] == batch
        assert relative_error(h.flatten(0, 1), expected_h) < STATE
        assert relative_error(o.flatten(0, 1), expected_o) < STATE and relative_error(ht, expected_ht) < STATE


def test_intermediate_states_are_of_64_tokens_unless_told(seed: int) -> None:
    call = draw_call(SMALL, (130,), seed, varlen=False)
    _, _, h = chunk_kda(**operator_arguments(call), return_intermediate_states=True)
    assert relative_error(h[0], call.truth(64)[2]) < STATE


def test_scale(seed: int) -> None:
    call = draw_call(replace(SMALL, V=16), (20,), seed, varlen=False)
    arguments = operator_arguments(call)
    o, _ = chunk_kda(**arguments | {"scale": None})
    assert relative_error(o[0], call.truth()[0] / 0.7) < STATE
    o, _ = chunk_kda(**arguments | {"scale": -3})
    assert relative_error(o[0], call.truth()[0] / call.x["scale"] * -3) < STATE


def test_optional_arguments_may_be_missing(seed: int) -> None:
    call = draw_call(replace(SMALL, initial_state=False, final_state=False), (20,), seed, varlen=False)
    arguments = operator_arguments(call)
    o, ht = chunk_kda(*(arguments[name] for name in ("q", "k", "v", "g", "beta")), scale=arguments["scale"])
    assert ht is None and relative_error(o[0], call.truth()[0]) < STATE


def test_unused_gate_parameters_are_ignored(seed: int) -> None:
    call = draw_call(SMALL, (20,), seed, varlen=False)
    junk = torch.full((call.problem.HV,), torch.nan)
    assert_right(call, A_log=junk, dt_bias=junk.repeat(call.problem.K), safe_gate=True)


def test_state_is_handed_over(seed: int) -> None:
    """A sequence in two calls, cut anywhere, is the sequence in one."""
    call = draw_call(SMALL, (150,), seed, varlen=False)
    o, ht, _ = call.truth()
    whole = operator_arguments(call)
    for cut in (1, 64, 77):
        parts, state = [], whole["initial_state"]
        for piece in (slice(0, cut), slice(cut, None)):
            tokens = {name: whole[name][:, piece] for name in ("q", "k", "v", "g", "beta")}
            out, state = chunk_kda(**whole | tokens | {"initial_state": state})
            parts.append(out)
        assert relative_error(torch.cat(parts, 1)[0], o) < STATE and relative_error(state, ht) < STATE


def test_sequences_do_not_see_each_other(seed: int) -> None:
    """Dense, packed and alone give the same bits."""
    B, T = 3, 70
    call = draw_call(SMALL, (T,) * B, seed, varlen=False)
    dense = operator_arguments(call, B)
    o, ht = chunk_kda(**dense)
    flat = {name: dense[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    packed_o, packed_ht = chunk_kda(**dense | flat | {"cu_seqlens": torch.tensor(call.bounds)})
    assert torch.equal(packed_o[0], o.flatten(0, 1)) and torch.equal(packed_ht, ht)
    for b in range(B):
        alone = {name: dense[name][b : b + 1] for name in (*flat, "initial_state")}
        alone_o, alone_ht = chunk_kda(**dense | alone)
        assert torch.equal(alone_o[0], o[b]) and torch.equal(alone_ht[0], ht[b])


def test_cu_seqlens_of_any_kind(seed: int) -> None:
    call = draw_call(SMALL, (3, 0, 70, 1), seed)
    arguments = operator_arguments(call)
    o, ht = chunk_kda(**arguments)
    bounds = arguments["cu_seqlens"]
    for given in (
        {"cu_seqlens": bounds.long()},
        {"cu_seqlens": bounds, "cu_seqlens_cpu": bounds.long()},
        {"cu_seqlens": bounds.repeat_interleave(2)[::2]},
    ):
        other_o, other_ht = chunk_kda(**arguments | given)
        assert torch.equal(other_o, o) and torch.equal(other_ht, ht)


@specialised
@pytest.mark.parametrize("change", (scatter, misalign, widen))
def test_any_strides_are_served(problem: Problem, change: Callable[[Tensor], Tensor], seed: int) -> None:
    call = draw_call(problem, (70, 2), seed)
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    given = {name: x for name, x in operator_arguments(call).items() if name in names and x is not None}
    assert_right(call, **{name: change(x) for name, x in given.items()})


@pytest.mark.parametrize("elements", (1, 2, 4, 8))
def test_kernels_get_aligned_tensors(
    elements: int, seed: int, planned_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vector loads of 16 bytes, which the CPU's kernels do not have: every tensor, of both passes, lies on such bounds.

    And a tensor that does already is not copied.
    """
    seen: dict[str, Tensor] = {}

    def note(tensors: dict[str, Any]) -> Any:
        seen.update({name: x for name, x in tensors.items() if isinstance(x, Tensor)})
        raise NotImplementedError

    monkeypatch.setattr(call_module, "_bind", lambda *args, **kwargs: (note, {}))

    def shift(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(elements), x.flatten()])[elements:].view(x.shape)

    call = draw_call(replace(SPECIALISED["softplus-bf16"], has_dt_bias=True), (20,), seed, varlen=False)
    for change in (shift, lambda x: x):
        a = {name: change(x) if isinstance(x, Tensor) else x for name, x in operator_arguments(call).items()}
        ready, call_arguments = bind_call(a), OPERATOR.bind(**a)
        seen.clear()
        with pytest.raises(NotImplementedError):
            call_module.run_forward(ready, note, call_arguments)
        do, dht = change(torch.ones_like(a["v"])), change(torch.ones_like(a["initial_state"]))
        factors = {"A": change(torch.ones(64, 64))}
        with pytest.raises(NotImplementedError):
            call_module.run_backward(ready, call_module.choose_backward(ready), call_arguments, do, dht, factors)
        given = {**{name: a[name] for name in TENSORS}, "h0": a["initial_state"], "do": do, "dht": dht, **factors}
        expected = {name: given[name].data_ptr() for name in seen if name in given}
        assert len(expected) == 11
        for name in expected:
            assert seen[name].data_ptr() % 16 == 0, name
            assert seen[name].data_ptr() == expected[name] or expected[name] % 16, f"{name} was copied for nothing"
            assert torch.equal(seen[name].flatten(), given[name].flatten()), name


def test_expanded_inputs_are_served(seed: int) -> None:
    call = draw_call(SMALL, (40,), seed, varlen=False)
    call.x["q"] = call.x["q"][:1].expand(40, -1, -1)
    call.x["beta"] = call.x["beta"][:1, :1].expand(40, 2)
    call.x["h0"] = call.x["h0"][:, :1].expand(-1, 2, -1, -1)
    arguments = operator_arguments(call)
    expanded = {
        "q": arguments["q"][:, :1].expand(-1, 40, -1, -1),
        "beta": arguments["beta"][:, :1, :1].expand(1, 40, 2),
    }
    assert_right(call, **expanded, initial_state=arguments["initial_state"][:, :1].expand(-1, 2, -1, -1))


@pytest.mark.parametrize("shape", ((-1,), (4, 60), (1, 1, 4, 60)))
def test_gate_parameters_of_any_shape_and_dtype(shape: tuple[int, ...], seed: int) -> None:
    call = draw_call(SPECIALISED["safe-fp32"], (20,), seed, varlen=False)
    arguments = operator_arguments(call)
    dt_bias, A_log = arguments["dt_bias"].view(shape).double(), arguments["A_log"].double().view(1, 1, -1, 1)
    assert_right(call, dt_bias=dt_bias, A_log=A_log)


@specialised
@pytest.mark.timeout(60)
def test_nan_in_the_gate_goes_where_it_belongs(problem: Problem, seed: int) -> None:
    call = draw_call(problem, (130, 70), seed)
    arguments = operator_arguments(call)
    clean, clean_ht = chunk_kda(**arguments)
    arguments["g"] = arguments["g"].clone()
    arguments["g"][0, 70, 1, 5] = torch.nan
    o, ht = chunk_kda(**arguments)
    assert o[0, 70:130, 1].isnan().all(), "every later token of that head and sequence"
    assert ht[0, 1].isnan().any()
    others = [head for head in range(problem.HV) if head != 1]
    assert torch.equal(o[:, :, others], clean[:, :, others]) and torch.equal(ht[:, others], clean_ht[:, others])
    assert torch.equal(o[0, :64, 1], clean[0, :64, 1]), "earlier chunks"
    assert torch.equal(o[0, 130:], clean[0, 130:]) and torch.equal(ht[1], clean_ht[1]), "other sequences"


# No tokens


@pytest.mark.parametrize("state_v_first", (False, True))
@pytest.mark.parametrize("packed", (False, True))
def test_no_tokens(packed: bool, state_v_first: bool, seed: int) -> None:
    call = draw_call(replace(SMALL, state_v_first=state_v_first), (0, 0, 0), seed, varlen=packed)
    arguments = operator_arguments(call)
    if not packed:
        for name in ("q", "k", "v", "g", "beta"):
            arguments[name] = arguments[name].expand(3, *arguments[name].shape[1:])
    o, ht = chunk_kda(**arguments)
    assert o.shape == arguments["v"].shape and o.dtype == torch.float32
    assert torch.equal(ht, arguments["initial_state"]) and ht.data_ptr() != arguments["initial_state"].data_ptr()
    o, ht = chunk_kda(**arguments | {"initial_state": None})
    assert ht.shape == arguments["initial_state"].shape and not ht.any()
    o, ht, h = chunk_kda(**arguments, return_intermediate_states=True)
    assert h.shape == (o.shape[0], 0, *arguments["initial_state"].shape[1:])


def test_old_name_of_the_state_layout(seed: int) -> None:
    call = draw_call(replace(SMALL, state_v_first=True), (40,), seed, varlen=False)
    arguments = operator_arguments(call)
    expected, expected_ht = chunk_kda(**arguments)
    old = arguments | {"state_v_first": False, "transpose_state_layout": True}
    with pytest.warns(DeprecationWarning, match="state_v_first") as warned:
        o, ht = chunk_kda(**old)
    assert [warning.filename for warning in warned] == [__file__]
    assert torch.equal(o, expected) and torch.equal(ht, expected_ht)
    assert explain(**old) == explain(**arguments)
    with pytest.raises(InputError, match="without transpose_state_layout"):
        chunk_kda(**arguments | {"transpose_state_layout": True})


# Without a compiler


@pytest.mark.parametrize("varlen", (False, True))
@specialised
def test_without_a_compiler_the_reference_serves(
    problem: Problem, varlen: bool, seed: int, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler(CPU) is None
    call = draw_call(problem, (20, 20), seed, varlen=varlen)
    batch = 1 if varlen else 2
    with pytest.warns(KdaTlWarning, match=r"install a C\+\+ compiler") as warned:
        assert_right(call, batch)
        assert_right(draw_call(problem, (21,), seed, varlen=False))
    assert len(warned) == 1 and warned[0].filename == __file__, "one warning, and it points at the caller"
    choice = explain(**operator_arguments(call, batch))
    assert (choice.step, choice.plan) == ("reference", None) and "no compiler found" in str(choice)
    with pytest.raises(UnsupportedError, match="install a compiler"):
        chunk_kda(**operator_arguments(call, batch), return_intermediate_states=True)


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


@pytest.fixture
def planned_only(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are planned, but nothing is compiled for them."""
    monkeypatch.setattr(
        call_module, "load_program", lambda problem, *args: (dispatch.select_cached(problem, *args), None)
    )
    monkeypatch.setattr(call_module, "build_program", lambda *args, **kwargs: None)


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
    known = len(call_module._bound_calls), len(dispatch._choices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_kda(**arguments)
    assert (len(call_module._bound_calls), len(dispatch._choices)) == known
