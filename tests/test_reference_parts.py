"""Parts of the oracle against closed forms: gates, beta, the norm of keys, and the error that results are judged by."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from support.oracle import F64, assert_close
from torch import Tensor

from kda_tl.core.problem import BETAS
from kda_tl.errors import InputError
from kda_tl.reference import activate_beta, activate_gate, l2norm, relative_error

Curves = dict[str, Callable[[float], float]]


# 25 and 35 lie where softplus(x) - x is small, but not yet below float64
POINTS = (-1e4, -800.0, -35.0, -1.5, 0.0, 0.3, 19.0, 25.0, 35.0, 800.0, 1e4)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@pytest.mark.parametrize("bias", (None, 0.25), ids="bias={}".format)
@pytest.mark.parametrize(
    ("gate", "A_log"),
    (("log", None), ("softplus", -1.0), ("softplus", 0.5), ("safe", None), ("safe", -1.0), ("safe", 0.5)),
)
def test_gate_closed_form(gate: str, A_log: float | None, bias: float | None, rng: random.Random) -> None:
    low = rng.uniform(-5.0, -0.1)
    g = torch.tensor(POINTS, dtype=F64).view(-1, 1, 1).requires_grad_()
    a = 1.0 if A_log is None else math.exp(A_log)
    b = bias or 0.0
    expected: Curves = {
        "log": lambda x: x,
        "softplus": lambda x: -a * softplus(x + b),
        "safe": lambda x: low * sigmoid(a * (x + b)),
    }
    actual = activate_gate(
        g,
        gate=gate,
        A_log=None if A_log is None else torch.tensor([A_log], dtype=F64),
        dt_bias=None if bias is None else torch.tensor([bias], dtype=F64),
        lower_bound=low,
    )
    # x + b rounds, and exp turns that absolute error of |x| * 2^-53 into a relative one: 1e-13 at x = -800
    tolerance = 1e-13 if bias or A_log else 1e-14
    values = torch.tensor([expected[gate](x) for x in POINTS], dtype=F64)
    torch.testing.assert_close(actual.flatten(), values, rtol=tolerance, atol=0)
    (slope,) = torch.autograd.grad(actual.sum(), g)
    derivative: Curves = {
        "log": lambda x: 1.0,
        "softplus": lambda x: -a * sigmoid(x + b),
        "safe": lambda x: low * a * sigmoid(a * (x + b)) * sigmoid(-a * (x + b)),
    }
    assert_close(slope.flatten(), torch.tensor([derivative[gate](x) for x in POINTS], dtype=F64))


@pytest.mark.parametrize("gate", ("softplus", "safe"))
@pytest.mark.parametrize("bias_shape", ((6,), (2, 3)), ids=str)
def test_gate_parameters_belong_to_their_head(gate: str, bias_shape: tuple[int, ...]) -> None:
    HV, K = 2, 3
    A_log = torch.tensor([-1.0, 0.5], dtype=F64)
    dt_bias = torch.arange(6, dtype=F64)
    g = torch.linspace(-2, 2, 5 * HV * K, dtype=F64).view(5, HV, K)
    actual = activate_gate(g, gate=gate, A_log=A_log, dt_bias=dt_bias.view(bias_shape), lower_bound=-4.0)
    for t in range(5):
        for j in range(HV):
            for c in range(K):
                a, x = math.exp(A_log[j]), float(g[t, j, c]) + j * K + c
                expected = -a * softplus(x) if gate == "softplus" else -4 * sigmoid(a * x)
                assert float(actual[t, j, c]) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("mode", BETAS)
def test_beta_closed_form(mode: str) -> None:
    expected: Curves = {"plain": lambda x: x, "sigmoid": sigmoid, "sigmoid2": lambda x: 2 * sigmoid(x)}
    actual = activate_beta(torch.tensor(POINTS, dtype=F64), mode)
    torch.testing.assert_close(actual, torch.tensor([expected[mode](x) for x in POINTS], dtype=F64), rtol=1e-14, atol=0)


def test_l2norm_closed_form() -> None:
    x = torch.tensor([[3.0, 4.0], [3e-3, 4e-3], [0.0, 0.0]], dtype=F64).requires_grad_()
    y = l2norm(x)
    lengths = [math.sqrt(25 + 1e-6), math.sqrt(25e-6 + 1e-6)]
    expected = [[3 / lengths[0], 4 / lengths[0]], [3e-3 / lengths[1], 4e-3 / lengths[1]], [0, 0]]
    assert_close(y, torch.tensor(expected, dtype=F64))
    assert_close(l2norm(x, eps=11.0)[0], torch.tensor([3 / 6, 4 / 6], dtype=F64))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert_close(gradient[2], torch.full((2,), 1e3, dtype=F64))


def test_relative_error_is_a_ratio_of_norms() -> None:
    expected = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(expected + torch.tensor([[0.0, 0.6], [0.8, 0.0]]), expected) == pytest.approx(0.2, rel=1e-6)
    assert relative_error(expected.clone(), expected) == 0.0
    assert relative_error(-expected, expected) == pytest.approx(2.0)


def test_relative_error_is_measured_in_float64() -> None:
    expected = torch.full((1000,), 1e-30, dtype=torch.float32)  # squares vanish in float32
    assert relative_error(torch.zeros(1000, dtype=torch.bfloat16), expected) == pytest.approx(1.0)
    assert relative_error(torch.ones(3, dtype=F64) + 1e-12, torch.ones(3)) == pytest.approx(1e-12, rel=1e-3)
    assert relative_error(torch.full((4,), 60000.0, dtype=torch.float16), torch.full((4,), 30000.0)) == 1.0


@pytest.mark.parametrize("poison", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("expected", (torch.ones(2, 3), torch.zeros(2, 3)), ids=("ones", "zeros"))
def test_relative_error_of_a_poisoned_tensor_is_infinite(poison: float, expected: Tensor) -> None:
    actual = expected.clone()
    actual[1, 2] = poison
    assert relative_error(actual, expected) == math.inf
    assert relative_error(expected, actual) == math.inf
    assert relative_error(actual, actual) == math.inf


def test_relative_error_at_the_edges() -> None:
    assert relative_error(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    assert relative_error(torch.tensor([3.0, 4.0]), torch.zeros(2)) == 5.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)) == 0.0
    with pytest.raises(InputError, match="actual must have"):
        relative_error(torch.ones(3), torch.ones(2, 3))
