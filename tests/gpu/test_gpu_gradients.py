"""Gradients on the GPU that is here: right ones, the same bits each time, kept or recomputed, and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import LOWEST, TENSORS, Call, draw_backward, draw_call, operator_arguments
from support.gpu_calls import assert_same_bits, differentiate, draw, leaves_of, seeds_of, spiked_gates
from support.gpu_cases import (
    BACKWARD,
    DECAYS,
    GRADIENT_TOLERANCE,
    LONG,
    LONG_TOKENS,
    PACKED,
    SCANNED,
    backward,
    backward_plan,
    device,
    forward_of,
    shipped,
)
from torch import Tensor

from kda_tl.runtime.dispatch import pin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_only"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels

LENGTHS = (15, 63, 64, 65)
EXTREME = (
    "bf16-safe-K128-V128-BT32-GVA-vk",
    "bf16-softplus-K60-V100-GVA-vk",
    "fp32-safe-K60-V100-BT16",
    "scan-safe-K128-V128-vk",
    "scan-softplus-K128-V128",
)
DRAWN = ("bf16-safe-K128-V128", "bf16-softplus-K100-V60-H4", "fp32-safe-K60-V100-BT16", "scan-softplus-K128-V128")
# where a gate saturates, what is left of its own gradient is lost among the terms it is the sum of
BESIDE_THE_GATE = ("q", "k", "v", "beta", "initial_state")


def arguments_of(name: str, call: Call, batch: int = 1) -> dict[str, Any]:
    return operator_arguments(call, batch) | {"chunk_size": BACKWARD[name][0]}


def gradients_of(name: str, call: Call, batch: int = 1, **changes: Any) -> dict[str, Tensor]:
    arguments = arguments_of(name, call, batch) | changes
    leaves = leaves_of(arguments)
    with pin(backward_plan(name)[1] if name in SCANNED else None):
        found = differentiate(arguments, leaves, seeds_of(call, batch), call.problem.operator)
    return dict(zip(leaves, found, strict=True))


def assert_right(name: str, call: Call, batch: int = 1, judged: tuple[str, ...] = TENSORS) -> None:
    found = gradients_of(name, call, batch)
    tolerance = GRADIENT_TOLERANCE[call.problem.dtype]
    errors = call.gradient_errors({tensor: found.get(tensor) for tensor in TENSORS}, tolerance)
    wrong = {tensor: error for tensor, error in errors.items() if tensor in judged}
    where = f"{errors} {call.problem.key} bounds={call.bounds}"
    assert max(wrong.values()) < tolerance, where
    assert all(grad.isfinite().all() for grad in found.values()), where


# Right numbers


@backward
@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_equal_recurrence(name: str, decay: str, seed: int) -> None:
    # 32 of one token: with one alone the gradient of beta is a single number, which may be near zero
    assert_right(name, draw_backward(draw(name, (1,) * 32, seed, decay), seed), batch=32)
    for n, T in enumerate(LENGTHS):
        assert_right(name, draw_backward(draw(name, (T,), seed + n, decay), seed))
    assert_right(name, draw_backward(draw(name, PACKED, seed, decay, varlen=True), seed))


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("T", LONG_TOKENS)
def test_long_sequences(name: str, T: int, seed: int) -> None:
    assert_right(name, draw_backward(draw(name, (T,), seed), seed))


def draw_extreme_parameters(
    name: str, lengths: tuple[int, ...], seed: int, A_log: float, dt_bias: float, shift: float = 0.0
) -> Call:
    """A call with that slope in every head, that bias in every other channel, and raw gates shifted by as much."""
    _, problem = BACKWARD[name]
    rng = torch.Generator().manual_seed(seed)
    bias = torch.randn(problem.HV, problem.K, generator=rng, dtype=torch.float64)
    bias[:, ::2] = dt_bias
    g = torch.randn(sum(lengths), problem.HV, problem.K, generator=rng, dtype=torch.float64) + shift
    given = {"A_log": torch.full((problem.HV,), A_log)} if problem.has_A_log else {}
    given |= {"dt_bias": bias} if problem.has_dt_bias else {}
    return draw_backward(draw_call(problem, lengths, seed, device="cuda", g=g, **given), seed)


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("A_log", (-9.0, 4.0))
@pytest.mark.parametrize("dt_bias", (-30.0, 30.0))
def test_extreme_parameters(name: str, A_log: float, dt_bias: float, seed: int) -> None:
    assert_right(name, draw_extreme_parameters(name, PACKED, seed, A_log, dt_bias), judged=BESIDE_THE_GATE)


@pytest.mark.parametrize("name", SCANNED)
def test_every_eighth_token_steep(name: str, seed: int) -> None:
    _, problem = SCANNED[name]
    g = spiked_gates(problem, 130)
    call = draw_backward(draw_call(problem, (65, 1, 64), seed, device="cuda", lower_bound=LOWEST, g=g), seed)
    assert_right(name, call, judged=BESIDE_THE_GATE)


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_calls(name: str) -> None:
    """Whatever hypothesis thinks of, on kernels that are there; a failure is shrunk and printed."""
    reason = "draws calls with hypothesis: pip install hypothesis"
    hypothesis = pytest.importorskip("hypothesis", reason=reason)
    st = pytest.importorskip("hypothesis.strategies", reason=reason)

    @hypothesis.settings(max_examples=20, deadline=None)
    @hypothesis.given(
        lengths=st.lists(st.integers(0, 2) | st.integers(0, 130), min_size=1, max_size=4).filter(any),
        A_log=st.floats(-10, 5),
        dt_bias=st.floats(-30, 30),
        shift=st.floats(-10, 3),
        seed=st.integers(0, 2**31),
    )
    def check(lengths: list[int], A_log: float, dt_bias: float, shift: float, seed: int) -> None:
        call = draw_extreme_parameters(name, tuple(lengths), seed, A_log, dt_bias, shift)
        assert_right(name, call, judged=("q", "k", "v"))  # a few tokens' dbeta and dh0 may be next to nothing

    check()


def test_shipped_plans_are_right(seed: int) -> None:
    plans = shipped("bwd")
    if not plans:
        pytest.skip(f"tuning_db holds no backward for {device().slug}")
    for n, (text, problem, plan) in enumerate(plans):
        for lengths in ((200,), PACKED):
            call = draw_backward(draw_call(forward_of(problem), lengths, seed + n, device="cuda"), seed + n)
            arguments = operator_arguments(call)
            leaves = leaves_of(arguments)
            with pin(plan):
                found = dict(zip(leaves, differentiate(arguments, leaves, seeds_of(call)), strict=True))
            tolerance = GRADIENT_TOLERANCE[problem.dtype]
            errors = call.gradient_errors({tensor: found.get(tensor) for tensor in TENSORS}, tolerance)
            assert max(errors.values()) < tolerance, f"{text}: {errors} {plan}"


@pytest.mark.parametrize("name", ("bf16-safe-K128-V128", "scan-safe-K128-V128-vk"))
def test_calls_that_differ_in_the_lower_bound_alone(name: str, seed: int) -> None:
    for lower_bound in (-5.0, -0.7, -2.2):
        assert_right(name, draw_backward(draw(name, (130,), seed, lower_bound=lower_bound), seed))


# The same numbers


@backward
def test_gradients_have_the_same_bits(name: str, seed: int) -> None:
    """At every call, and whether intermediates are kept or made again."""
    call = draw_backward(draw(name, (333, 1, 200, 64), seed, varlen=True), seed)
    first = list(gradients_of(name, call).values())
    for changes in ({}, {}, {"disable_recompute": True}, {"disable_recompute": True}):
        again = gradients_of(name, call, **changes)
        assert_same_bits(list(again.values()), first)


# Graphs


@pytest.mark.parametrize("disable_recompute", (False, True), ids=("recomputed", "kept"))
@pytest.mark.parametrize("name", ("bf16-safe-K128-V128", "bf16-softplus-K60-V100-GVA-vk", "bf16-log-K64-V64-bare"))
def test_graph_of_both_passes_replays_on_new_values(name: str, disable_recompute: bool, seed: int) -> None:
    calls = [draw(name, PACKED, seed + n, varlen=True, lower_bound=-3.0) for n in range(2)]  # graphs keep numbers
    calls = [draw_backward(call, seed + n) for n, call in enumerate(calls)]
    values = [arguments_of(name, call) | {"disable_recompute": disable_recompute} for call in calls]
    seeds = [seeds_of(call) for call in calls]
    expected = [differentiate(a, leaves_of(a), dy) for a, dy in zip(values, seeds, strict=True)]

    leaves, static_seeds = leaves_of(values[0]), [x.clone() for x in seeds[0]]  # seen by no other graph of autograd
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate(values[0], leaves, static_seeds)
    for n in (1, 0, 1):
        with torch.no_grad():
            for leaf, new in zip(leaves.values(), leaves_of(values[n]).values(), strict=True):
                leaf.copy_(new)
        for static, new in zip(static_seeds, seeds[n], strict=True):
            static.copy_(new)
        for grad in captured:
            grad.fill_(torch.nan)
        graph.replay()
        assert_same_bits(captured, expected[n])
