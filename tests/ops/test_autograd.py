"""Gradients of ``chunk_kda`` on the CPU target, against autograd through the recurrence in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import (
    KDA,
    SMALL,
    TENSORS,
    Call,
    draw_backward,
    draw_call,
    draw_extreme,
    draw_lengths,
    draw_problem,
    forget_compilers,
    operator_arguments,
    random_of_run,
)
from support.operator_cases import backward_of, differentiable
from support.views import scatter
from torch.utils.checkpoint import checkpoint

import kda_tl
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import GATES, Problem
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error
from kda_tl.runtime import dispatch
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.kernel import Kernel

CPU = cpu_device()
# fp32 kernels: eleven stages of 2e-5 at most, sums that cancel in dA_log; 16-bit: do and results rounded, 2^-9 each
TOLERANCE = {"fp32": 2e-4, "bf16": 6e-3, "fp16": 2e-3}
BARE = {"initial_state": False, "final_state": False, "l2norm": False}
LOG: dict[str, Any] = {"gate": "log", "has_A_log": False, "has_dt_bias": False}
# One of each gate, of the run's seed; kernels take seconds, so tests that draw lengths and values share them
DRAWN = {gate: draw_problem(random_of_run(gate), gate=gate, **KDA) for gate in GATES}
KEPT = {
    "all": SMALL,
    "bare": replace(SMALL, **LOG, beta="plain", **BARE),
    "softplus": DRAWN["softplus"],
    "log bf16": replace(DRAWN["log"], dtype="bf16"),
}

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


kept = pytest.mark.parametrize("disable_recompute", (False, True), ids=("recomputed", "kept"))


def assert_right(call: Call, batch: int = 1, **changes: Any) -> None:
    call = draw_backward(call, 7)
    arguments = differentiable(call, batch)
    found = backward_of(call, arguments, **changes)
    tolerance = TOLERANCE[call.problem.dtype]
    for name, error in call.gradient_errors(found, tolerance).items():
        assert found[name].shape == arguments[name].shape and found[name].dtype == arguments[name].dtype
        assert error < tolerance, f"d{name} is off by {error:.1e}: {call.problem.key} {call.bounds}"


@pytest.mark.parametrize("gate", ("softplus", "safe"))
@pytest.mark.parametrize("has_dt_bias", (False, True))
def test_terms_of_the_slope_are_what_autograd_sums(gate: str, has_dt_bias: bool, seed: int) -> None:
    """The judge's own check, in float64."""
    problem = replace(SMALL, gate=gate, has_dt_bias=has_dt_bias)
    call = draw_backward(draw_call(problem, (20, 0, 1), seed), seed)
    call.x["g"][0] = -40.0
    truth = call.gradients()
    assert relative_error(call.slope_terms(truth["dg"]).sum((0, 2)), truth["dA_log"]) < 1e-10


@pytest.mark.parametrize("state_v_first", (False, True))
@pytest.mark.parametrize("initial_state", (False, True))
@pytest.mark.parametrize("gates", ({"gate": "softplus"}, LOG), ids=("softplus", "log"))
@pytest.mark.parametrize("scalar_gate", (False, True), ids=("channels", "scalar"))
def test_terms_of_value_channels_are_what_autograd_sums(
    scalar_gate: bool, gates: dict[str, Any], initial_state: bool, state_v_first: bool, seed: int
) -> None:
    """The judge's own check, in float64."""
    fixed: dict[str, Any] = {"initial_state": initial_state, "state_v_first": state_v_first, "scalar_gate": scalar_gate}
    call = draw_backward(draw_call(replace(SMALL, H=2, HV=4, **fixed, **gates), (20, 0, 1), seed), seed)
    truth, (dbeta, dg) = call.gradients(), call.value_terms()
    sums = {"dbeta": dbeta.sum(2), "dg": dg.sum((2, 3)) if scalar_gate else dg.sum(2)}
    for name, found in sums.items():
        expected = truth[name]
        assert expected is not None and relative_error(found.flatten(), expected.flatten()) < 1e-10


def test_errors_are_judged_by_terms_that_cancel(seed: int) -> None:
    """One that is off by a tenth of its terms, however small it is itself; of a gradient that is larger, by less."""
    call = draw_backward(draw_call(SMALL, (20, 0, 1), seed), seed)
    truth = call.gradients()
    for name in ("beta", "g", "A_log", "dt_bias"):
        expected = truth[f"d{name}"]
        assert expected is not None
        ratio = call.size_of_terms(name) / float(expected.norm())
        (error,) = call.gradient_errors({name: expected * (1 + 0.1 * ratio)}, 1e-2).values()
        assert error == pytest.approx(0.1 * min(1.0, ratio))


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("T", (1, 15, 63, 64, 65, 130))
def test_lengths(T: int, seed: int) -> None:
    assert_right(draw_call(SMALL, (T,), seed, varlen=False))


def test_batches(seed: int) -> None:
    assert_right(draw_call(SMALL, (70, 70, 70), seed, varlen=False), batch=3)


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
def test_gates_and_dtypes(gate: str, dtype: str, seed: int) -> None:
    """Dtypes share kernels, which are fp32 on the CPU target."""
    rng = random.Random(seed)
    problem = replace(DRAWN[gate], dtype=dtype, g_dtype=rng.choice(("fp32", dtype)))
    assert_right(draw_call(problem, draw_lengths(rng), seed))


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("chunk_size", (random_of_run("chunk size").choice((16, 32)), 64))
def test_chunk_sizes(chunk_size: int, seed: int) -> None:
    assert_right(draw_call(SMALL, (20, 0, 1, 70), seed), chunk_size=chunk_size)


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("kind", [f"{gate} {how}" for gate in GATES for how in ("steep", "flat", "mixed")])
def test_gates_at_their_limits(kind: str, seed: int) -> None:
    """Finite everywhere, and right where a gradient is not lost among larger ones of its tensor."""
    call = draw_backward(draw_extreme(kind, seed), seed)
    found = backward_of(call, differentiable(call))
    truth = call.gradients()
    for name in ("q", "k", "v", "beta", "initial_state"):
        grad, expected = found[name], truth["dh0" if name == "initial_state" else f"d{name}"]
        assert grad is not None and expected is not None
        assert relative_error(grad.flatten(), expected.flatten()) < 5e-4, name
    for grad in found.values():
        assert grad is None or grad.isfinite().all()


@pytest.mark.rest
@settings(max_examples=8)
@given(
    problem=st.sampled_from(tuple(DRAWN.values())),
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 2**31),
)
def test_drawn_problems(problem: Problem, lengths: list[int], seed: int) -> None:
    """Whatever lengths hypothesis thinks of; a failure is shrunk and printed as code that repeats it."""
    assert_right(draw_call(problem, lengths, seed))


def test_any_strides(seed: int) -> None:
    """Of inputs, and of incoming gradients: those of a sum are one number, expanded."""
    call = draw_backward(draw_call(SMALL, (40,), seed, varlen=False), seed)
    arguments = differentiable(call)
    o, _ = chunk_kda(**{n: scatter(x) if n in TENSORS and x is not None else x for n, x in arguments.items()})
    o.sum().backward()
    plain = differentiable(call)
    chunk_kda(**plain)[0].backward(torch.ones_like(o))
    for name in TENSORS:
        assert torch.equal(arguments[name].grad, plain[name].grad), name


def test_only_what_is_asked_for(seed: int) -> None:
    call = draw_call(SMALL, (40,), seed, varlen=False)
    whole = differentiable(call)
    o, ht = chunk_kda(**whole)
    assert ht is not None and o.requires_grad and ht.requires_grad
    ht.square().sum().backward()
    for name in TENSORS:
        arguments = operator_arguments(call)
        arguments[name] = arguments[name].clone().requires_grad_()
        chunk_kda(**arguments)[1].square().sum().backward()
        assert torch.equal(arguments[name].grad, whole[name].grad), name
        assert all(arguments[other].grad is None for other in TENSORS if other != name)
    with torch.no_grad():
        assert not chunk_kda(**whole)[0].requires_grad


def test_final_state_that_nothing_depends_on(seed: int) -> None:
    """Its gradient is absent: the bits of a call that does not return it."""
    call = draw_call(SMALL, (40,), seed, varlen=False)
    asked, not_asked = differentiable(call), differentiable(call)
    chunk_kda(**asked)[0].square().sum().backward()
    chunk_kda(**not_asked | {"output_final_state": False})[0].square().sum().backward()
    for name in TENSORS:
        assert torch.equal(asked[name].grad, not_asked[name].grad), name


def test_same_bits_every_time(seed: int) -> None:
    call = draw_backward(draw_call(SMALL, (70, 0, 3), seed), seed)
    one, two = (backward_of(call, differentiable(call)) for _ in range(2))
    for name in TENSORS:
        assert torch.equal(one[name], two[name]), name


@kept
def test_checkpointed(disable_recompute: bool, seed: int) -> None:
    call = draw_backward(draw_call(SMALL, (70,), seed, varlen=False), seed)
    expected, arguments = backward_of(call, differentiable(call)), differentiable(call)
    run = partial(chunk_kda, **arguments, disable_recompute=disable_recompute)
    o, ht = checkpoint(run, use_reentrant=False)
    torch.autograd.backward([o, ht], [call.x["do"].float().view(o.shape), call.x["dht"].float()])
    for name in TENSORS:
        assert torch.equal(arguments[name].grad, expected[name]), name


@kept
def test_intermediate_states_carry_no_gradient(disable_recompute: bool, seed: int) -> None:
    arguments = differentiable(draw_call(SMALL, (70,), seed, varlen=False))
    o, ht, h = chunk_kda(**arguments, return_intermediate_states=True, disable_recompute=disable_recompute)
    assert o.requires_grad and ht is not None and ht.requires_grad and not h.requires_grad


@kept
def test_second_derivative_is_refused(disable_recompute: bool, seed: int) -> None:
    arguments = differentiable(draw_call(SMALL, (20,), seed, varlen=False))
    o, _ = chunk_kda(**arguments, disable_recompute=disable_recompute)
    (dq,) = torch.autograd.grad(o.sum(), arguments["q"], create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        dq.sum().backward()


@kept
def test_inputs_changed_in_between_are_noticed(disable_recompute: bool, seed: int) -> None:
    arguments = differentiable(draw_call(SMALL, (20,), seed, varlen=False))
    k = arguments["k"] * 1.0
    o, _ = chunk_kda(**arguments | {"k": k}, disable_recompute=disable_recompute)
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@kept
def test_autocast_changes_nothing(disable_recompute: bool, seed: int) -> None:
    call = draw_backward(draw_call(SMALL, (70,), seed, varlen=False), seed)
    expected = backward_of(call, differentiable(call))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = backward_of(call, differentiable(call), disable_recompute=disable_recompute)
    for name in TENSORS:
        assert torch.equal(found[name], expected[name]), name


# Kept intermediates


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the stages that run."""
    names: list[str] = []
    launch = Kernel.__call__

    def note(self: Kernel, *args: Any) -> Any:
        names.append(self.stage.name)
        return launch(self, *args)

    monkeypatch.setattr(Kernel, "__call__", note)
    return names


FORWARD = ["fwd_gate", "fwd_intra", "fwd_wy", "fwd_state", "fwd_output"]


@pytest.mark.rest(draws=3)
@pytest.mark.parametrize("lengths", ((130,), (20, 0, 1, 70)), ids=("dense", "packed"))
@pytest.mark.parametrize("problem", KEPT.values(), ids=KEPT)
def test_kept_intermediates_give_the_same_bits(
    problem: Problem, lengths: tuple[int, ...], seed: int, launched: list[str]
) -> None:
    call = draw_backward(draw_call(problem, lengths, seed, varlen=len(lengths) > 1), seed)
    expected = backward_of(call, differentiable(call))
    assert launched[:9] == FORWARD + FORWARD[:4] and launched[9] == "bwd_output"
    launched.clear()
    found = backward_of(call, differentiable(call), disable_recompute=True)
    assert launched[:6] == [*FORWARD, "bwd_output"] and not set(FORWARD) & set(launched[5:])
    for name, grad in expected.items():
        assert found[name] is grad is None or torch.equal(found[name], grad), name
    with torch.no_grad():
        o, ht = chunk_kda(**operator_arguments(call), disable_recompute=True)
    same_o, same_ht = chunk_kda(**differentiable(call), disable_recompute=True)
    assert torch.equal(o, same_o) and (ht is same_ht is None or torch.equal(ht, same_ht))


@pytest.mark.rest
def test_a_plan_may_have_intermediates_kept(seed: int, launched: list[str]) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    problem = replace(call.problem, direction="bwd")
    for BT, repeated in ((64, 0), (16, 4)):  # those of the forward's chunks of 64, or none
        launched.clear()
        with kda_tl.pin(replace(default_plan(problem, CPU, BT=BT), kept=True)):
            assert_right(call)
        assert launched[:5] == FORWARD and launched[5 + repeated] == "bwd_output"


@pytest.mark.rest
def test_backward_takes_the_chunks_of_the_forward(seed: int, launched: list[str]) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    with kda_tl.pin(default_plan(call.problem, CPU, BT=16)):
        assert_right(call, disable_recompute=True)
    assert launched.count("fwd_state") == 1


def test_pinned_backward_of_other_chunks_is_refused(seed: int, launched: list[str]) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    arguments = differentiable(call)
    with kda_tl.pin(default_plan(replace(call.problem, direction="bwd"), CPU, BT=32)):
        with pytest.raises(InputError, match=r"backward has BT=32 and the forward BT=64: pass chunk_size=32"):
            chunk_kda(**arguments, disable_recompute=True)
        assert_right(call, disable_recompute=True, chunk_size=32)
        with torch.no_grad():
            chunk_kda(**arguments, disable_recompute=True)
    assert launched.count("fwd_state") == 2


def test_without_a_plan_of_those_chunks_they_are_made_again(
    seed: int, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose shared memory holds the backward's tiles of shorter chunks only."""
    select_cached = dispatch.select_cached

    def choose_short(problem: Problem, device: Any, chunk_size: int | None = None) -> dispatch.PlanSelection:
        if problem.direction == "bwd" and chunk_size == 64:
            raise InputError("no room")
        return select_cached(problem, device, 16 if problem.direction == "bwd" else chunk_size)

    monkeypatch.setattr("kda_tl.ops.call.select_cached", choose_short)
    kda_tl.ops.call._choose_chunks.cache_clear()
    assert_right(draw_call(SMALL, (70,), seed, varlen=False), disable_recompute=True)
    kda_tl.ops.call._choose_chunks.cache_clear()
    assert launched.count("fwd_state") == 2


def test_kept_intermediates_are_autograds(seed: int) -> None:
    """It frees them with the graph, keeps them as long as it is told to, and hands them to its hooks."""
    call = draw_backward(draw_call(SMALL, (70,), seed, varlen=False), seed)
    arguments, packed = differentiable(call), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or scatter(x), lambda x: x):
        o, ht = chunk_kda(**arguments, disable_recompute=True)
    assert len(packed) == len(TENSORS) + 10
    inputs = [arguments[name] for name in TENSORS]
    first = torch.autograd.grad((o, ht), inputs, (o, ht), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad((o, ht), inputs, (o, ht)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad((o, ht), inputs, (o, ht))


def test_states_changed_in_between_are_noticed(seed: int) -> None:
    """Those that are returned are those that are kept."""
    arguments = differentiable(draw_call(SMALL, (70,), seed, varlen=False))
    o, _, h = chunk_kda(**arguments, return_intermediate_states=True, disable_recompute=True)
    h.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_a_pinned_forward_plan_leaves_the_backward_free(seed: int) -> None:
    call = draw_call(SMALL, (70,), seed, varlen=False)
    forward = default_plan(call.problem, CPU, BT=16)
    backward = default_plan(replace(call.problem, direction="bwd"), CPU, BT=32)
    for plan in (forward, backward):
        with kda_tl.pin(plan):
            assert_right(call)
    with kda_tl.pin(numerics=dispatch.numerics_class(default_plan(call.problem, CPU))):
        assert_right(call)


def test_without_a_compiler_the_recurrence_is_differentiated(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_compilers(monkeypatch)
    with pytest.warns(KdaTlWarning, match="slow here"):
        assert_right(draw_call(SMALL, (20,), seed, varlen=False))


def test_no_tokens(seed: int) -> None:
    arguments = differentiable(draw_call(SMALL, (0, 0), seed))
    _, ht = chunk_kda(**arguments)
    ht.square().sum().backward()
    assert torch.equal(arguments["initial_state"].grad, 2 * arguments["initial_state"].detach())
