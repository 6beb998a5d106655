"""The oracle against formulations that share no code with it: matrix products, closed forms, hand arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from support.oracle import F64, assert_close
from torch import Tensor

from kda_tl.core.problem import GATES
from kda_tl.errors import InputError
from kda_tl.reference import activate_gate, l2norm, recurrent_kda, relative_error

seeded = pytest.mark.parametrize("seed", (0, 1), ids="seed{}".format)
layouts = pytest.mark.parametrize("state_v_first", (False, True), ids=("kv", "vk"))
gates = pytest.mark.parametrize("gate", GATES)


def draw(
    seed: int, B: int = 1, T: int = 9, H: int = 2, HV: int = 4, K: int = 5, V: int = 3, N: int = 0
) -> dict[str, Any]:
    """Inputs of recurrent_kda by name, in float64: log decays of -3 to 0 nats, a state of N (default B) sequences."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=rng)

    return {
        "q": normal(B, T, H, K),
        "k": l2norm(normal(B, T, H, K)),
        "v": normal(B, T, HV, V),
        "g": -3 * torch.rand(B, T, HV, K, dtype=F64, generator=rng),
        "beta": torch.rand(B, T, HV, dtype=F64, generator=rng),
        "initial_state": normal(N or B, HV, K, V),
    }


def draw_gate(seed: int, gate: str, HV: int = 4, K: int = 5) -> dict[str, Any]:
    """Gate arguments of recurrent_kda."""
    rng = torch.Generator().manual_seed(1000 + seed)
    parameters = {
        "A_log": torch.randn(HV, dtype=F64, generator=rng),
        "dt_bias": torch.randn(HV * K, dtype=F64, generator=rng),
    }
    arguments: dict[str, dict[str, Any]] = {
        "log": {"gate": "log"},
        "softplus": {"gate": "softplus", **parameters},
        "safe": {"gate": "safe", "lower_bound": -5 * float(torch.rand((), generator=rng)), **parameters},
    }
    return arguments[gate]


def cut(inputs: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    """The tokens from start up to stop of q, k, v, g and beta."""
    return {name: inputs[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")}


def unroll_one_head(q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, S0: Any) -> tuple[Any, Any]:
    """States as explicit sums of matrix products, never carried from token to token; all numpy, q and k are [T, K].

    S_t = M_t ... M_1 S_0 + sum_j M_t ... M_{j+1} beta_j k_j v_j^T,    M_t = (I - beta_t k_t k_t^T) diag(exp g_t)
    """
    T, K = q.shape
    step = [(np.eye(K) - beta[t] * np.outer(k[t], k[t])) @ np.diag(np.exp(g[t])) for t in range(T)]

    def transition(start: int, stop: int) -> Any:
        return np.linalg.multi_dot([np.eye(K), np.eye(K), *reversed(step[start:stop])])

    states = [
        transition(0, t + 1) @ S0
        + sum(transition(j + 1, t + 1) @ (beta[j] * k[j][:, None] @ v[j][None, :]) for j in range(t + 1))
        for t in range(T)
    ]
    return np.stack([scale * states[t].T @ q[t] for t in range(T)]), states[-1]


@seeded
@pytest.mark.parametrize("scale", (None, 0.7))
@pytest.mark.parametrize(("H", "HV"), ((2, 2), (2, 6), (1, 3)))
def test_recurrence_equals_unrolled_matrix_products(seed: int, scale: float | None, H: int, HV: int) -> None:
    B, T, K, V = 2, 6, 5, 3
    inputs = draw(seed, B, T, H, HV, K, V)
    o, final_state = recurrent_kda(**inputs, scale=scale)
    x = {name: tensor.numpy() for name, tensor in inputs.items()}
    for b in range(B):
        for j in range(HV):
            i = j // (HV // H)
            o_head, state = unroll_one_head(
                x["q"][b, :, i],
                x["k"][b, :, i],
                x["v"][b, :, j],
                x["g"][b, :, j],
                x["beta"][b, :, j],
                1 / math.sqrt(K) if scale is None else scale,
                x["initial_state"][b, j],
            )
            assert_close(o[b, :, j], torch.from_numpy(o_head))
            assert_close(final_state[b, j], torch.from_numpy(state))


def test_recurrence_by_hand() -> None:
    def tokens(*values: float) -> Tensor:
        return torch.tensor(values, dtype=F64).view(1, -1, 1, 1)

    # S: 4 -> halved 2 -> 2 + .5 * 2 * (3 - 2 * 2) = 1 -> halved .5 -> .5 + 1 * 1 * (5 - .5) = 5
    o, final_state = recurrent_kda(
        q=tokens(10, 3),
        k=tokens(2, 1),
        v=tokens(3, 5),
        g=tokens(math.log(0.5), math.log(0.5)),
        beta=tokens(0.5, 1)[..., 0],
        initial_state=tokens(4),
    )
    assert_close(o, tokens(10, 15))
    assert_close(final_state, tokens(5))


@seeded
def test_no_initial_state_means_zeros(seed: int) -> None:
    inputs = draw(seed)
    expected = recurrent_kda(**{**inputs, "initial_state": torch.zeros_like(inputs["initial_state"])})
    for actual, zeros in zip(recurrent_kda(**{**inputs, "initial_state": None}), expected, strict=True):
        assert torch.equal(actual, zeros)


@seeded
@gates
def test_fused_activations_equal_activating_first(seed: int, gate: str) -> None:
    inputs, arguments = draw(seed), draw_gate(seed, gate)
    plain = {
        **inputs,
        "q": inputs["q"] / (inputs["q"].norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt(),
        "k": inputs["k"] / (inputs["k"].norm(dim=-1, keepdim=True) ** 2 + 1e-6).sqrt(),
        "g": activate_gate(inputs["g"], **arguments),
        "beta": 2 / (1 + torch.exp(-inputs["beta"])),
    }
    fused = recurrent_kda(**inputs, **arguments, beta_mode="sigmoid2", use_l2norm=True)
    for actual, expected in zip(fused, recurrent_kda(**plain), strict=True):
        assert_close(actual, expected)


@seeded
@gates
def test_one_gate_a_head_is_that_gate_in_every_channel(seed: int, gate: str) -> None:
    K = 5
    inputs, one = draw(seed, K=K), draw_gate(seed, gate, K=1)
    g = inputs["g"][..., :1]
    every = {**one, "dt_bias": one["dt_bias"].repeat_interleave(K)} if "dt_bias" in one else one
    expected = recurrent_kda(**{**inputs, "g": g.expand(*g.shape[:-1], K)}, **every)
    for actual, wide in zip(recurrent_kda(**{**inputs, "g": g}, **one), expected, strict=True):
        assert_close(actual, wide)


@seeded
@pytest.mark.parametrize("rank", (1, 2, 4))
def test_rows_of_a_token_correct_one_state_at_once(seed: int, rank: int) -> None:
    inputs = draw(seed, T=3 * rank, H=2, HV=2)
    read = inputs["g"].clone()
    inputs["g"].unflatten(1, (-1, rank))[:, :, 1:] = torch.nan  # a token's decay stands in its first row
    o, final_state = recurrent_kda(**inputs, rank=rank, scale=1.0)
    S = inputs["initial_state"]
    for t in range(3):
        rows = slice(t * rank, (t + 1) * rank)
        q, k, v, beta = (inputs[name][:, rows].transpose(1, 2) for name in ("q", "k", "v", "beta"))
        D = read[:, t * rank, :, :, None].exp() * S
        correction = beta[..., None] * (v - k @ D)
        for m in range(rank):
            S = D + k[:, :, : m + 1].mT @ correction[:, :, : m + 1]
            assert_close(o[:, t * rank + m], (q[:, :, m : m + 1] @ S)[:, :, 0])
    assert_close(final_state, S)


@seeded
def test_grouped_heads_equal_repeated_queries_and_keys(seed: int) -> None:
    inputs = draw(seed, H=2, HV=6)
    repeated = {**inputs, **{name: inputs[name].repeat_interleave(3, dim=2) for name in ("q", "k")}}
    for actual, expected in zip(recurrent_kda(**inputs), recurrent_kda(**repeated), strict=True):
        assert torch.equal(actual, expected)


@seeded
@layouts
@gates
@pytest.mark.parametrize("lengths", ((4, 0, 1, 3), (0, 5, 2, 0), (0,), (6,)), ids=str)
def test_packed_sequences_equal_each_alone(seed: int, state_v_first: bool, gate: str, lengths: tuple[int, ...]) -> None:
    bounds = np.cumsum((0, *lengths))
    inputs, arguments = draw(seed, T=sum(lengths), N=len(lengths)), draw_gate(seed, gate)
    arguments["state_v_first"] = state_v_first
    states = inputs["initial_state"].mT if state_v_first else inputs["initial_state"]
    inputs["initial_state"] = states
    o, final_state = recurrent_kda(**inputs, **arguments, cu_seqlens=torch.from_numpy(bounds).to(torch.int32))
    assert o.shape == inputs["v"].shape and final_state.shape == states.shape
    for n, length in enumerate(lengths):
        start, stop = bounds[n], bounds[n + 1]
        if not length:
            assert torch.equal(final_state[n], states[n])
            continue
        alone = recurrent_kda(**cut(inputs, start, stop), **arguments, initial_state=states[n : n + 1])
        assert_close(o[:, start:stop], alone[0])
        assert_close(final_state[n : n + 1], alone[1])


def test_empty_sequence_without_initial_state_ends_in_zeros() -> None:
    inputs = {**draw(0, T=3), "initial_state": None}
    _, final_state = recurrent_kda(**inputs, cu_seqlens=torch.tensor([0, 3, 3]))
    assert final_state[0].abs().min() > 0
    assert torch.equal(final_state[1], torch.zeros(4, 5, 3, dtype=F64))


def test_final_state_of_no_tokens_is_a_copy() -> None:
    inputs = draw(0, T=0)
    _, final_state = recurrent_kda(**inputs)
    assert torch.equal(final_state, inputs["initial_state"])
    assert final_state.data_ptr() != inputs["initial_state"].data_ptr()


@seeded
@layouts
@gates
@pytest.mark.parametrize("at", (1, 4, 8))
def test_handing_the_state_over_equals_one_run(seed: int, state_v_first: bool, gate: str, at: int) -> None:
    inputs = draw(seed, B=2)
    arguments = {**draw_gate(seed, gate), "state_v_first": state_v_first}
    state = inputs["initial_state"].mT if state_v_first else inputs["initial_state"]
    inputs["initial_state"] = state
    o, final_state = recurrent_kda(**inputs, **arguments)
    first, state = recurrent_kda(**cut(inputs, 0, at), **arguments, initial_state=state)
    second, state = recurrent_kda(**cut(inputs, at, 9), **arguments, initial_state=state)
    assert_close(torch.cat([first, second], dim=1), o)
    assert_close(state, final_state)


@seeded
@pytest.mark.parametrize("K", (3, 5), ids="K{}".format)
def test_state_layouts_are_transposes(seed: int, K: int) -> None:
    inputs = draw(seed, K=K, V=3)
    o, final_state = recurrent_kda(**inputs)
    inputs["initial_state"] = inputs["initial_state"].mT.contiguous()
    o_v_first, final_state_v_first = recurrent_kda(**inputs, state_v_first=True)
    assert torch.equal(o, o_v_first)
    assert torch.equal(final_state.mT, final_state_v_first) and final_state_v_first.is_contiguous()


@seeded
def test_inputs_are_cast_before_any_arithmetic(seed: int) -> None:
    arguments = draw_gate(seed, "softplus")
    low: dict[str, Any] = {name: x.to(torch.bfloat16) for name, x in draw(seed).items()}
    low_gate: dict[str, Any] = {
        name: x.to(torch.bfloat16) if isinstance(x, Tensor) else x for name, x in arguments.items()
    }
    high: dict[str, Any] = {name: x.to(F64) for name, x in low.items()}
    high_gate: dict[str, Any] = {name: x.to(F64) if isinstance(x, Tensor) else x for name, x in low_gate.items()}
    flags: dict[str, Any] = {"use_l2norm": True, "beta_mode": "sigmoid"}
    expected = recurrent_kda(**high, **high_gate, **flags)
    for actual, exact in zip(recurrent_kda(**low, **low_gate, **flags), expected, strict=True):
        assert actual.dtype == F64 and torch.equal(actual, exact)
    for actual, exact in zip(recurrent_kda(**low, **low_gate, **flags, dtype=torch.float32), expected, strict=True):
        assert actual.dtype == torch.float32 and 0 < relative_error(actual, exact) < 1e-5


def test_inputs_are_left_alone() -> None:
    inputs = draw(0)
    before = {name: x.clone() for name, x in inputs.items()}
    recurrent_kda(**inputs, use_l2norm=True, beta_mode="sigmoid2")
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"k": torch.ones(1, 9, 4, 5)}, "k must have"),
        ({"v": torch.ones(1, 9, 3, 3)}, "multiple of H"),
        ({"v": torch.ones(1, 1, 4, 3)}, "v must have"),
        ({"g": torch.ones(1, 9, 4, 2)}, "g must have"),
        ({"beta": torch.ones(1, 9, 2)}, "beta must have"),
        ({"initial_state": torch.ones(1, 4, 3, 5)}, "initial_state must have"),
        ({"gate": "sofplus"}, "gate must be one of"),
        ({"gate": "softplus"}, "needs A_log"),
        ({"gate": "safe"}, "needs lower_bound"),
        ({"gate": "safe", "lower_bound": -5.0, "A_log": torch.ones(1)}, "A_log must have 4"),
        ({"gate": "safe", "lower_bound": -5.0, "dt_bias": torch.ones(5)}, "dt_bias must have 20"),
        ({"beta_mode": "tanh"}, "beta mode must be one of"),
        ({"cu_seqlens": torch.tensor([0, 8])}, "end at T=9"),
        ({"cu_seqlens": torch.tensor([1, 9])}, "start at 0"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 9])}, "never decrease"),
        ({"cu_seqlens": torch.tensor([0.0, 9.0])}, "integer"),
        ({"cu_seqlens": torch.tensor([0])}, "at least 2"),
        ({"cu_seqlens": torch.tensor([0, 4, 9])}, "initial_state must have"),
        ({"rank": 2}, "cannot be tokens of 2 rows"),
    ),
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        recurrent_kda(**{**draw(0), **change})


def test_packing_needs_a_batch_of_one() -> None:
    with pytest.raises(InputError, match="got B=2"):
        recurrent_kda(**draw(0, B=2), cu_seqlens=torch.tensor([0, 9]))


@pytest.mark.rest(draws=8)
@seeded
@layouts
@gates
@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
def test_gradients_equal_finite_differences(seed: int, state_v_first: bool, gate: str, packed: bool) -> None:
    H, HV, K, V = 1, 2, 3, 2
    cu_seqlens = torch.tensor([0, 2, 2, 3]) if packed else None
    inputs = draw(seed, T=3, H=H, HV=HV, K=K, V=V, N=3 if packed else 1)
    if state_v_first:
        inputs["initial_state"] = inputs["initial_state"].mT
    arguments = draw_gate(seed, gate, HV, K)
    inputs |= {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    flags = {name: x for name, x in arguments.items() if not isinstance(x, Tensor)}

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named: dict[str, Any] = dict(zip(inputs, tensors, strict=True))
        return recurrent_kda(
            **named,
            **flags,
            beta_mode="sigmoid2" if packed else "plain",
            use_l2norm=packed,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
        )

    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-7, rtol=1e-6)
    # gradcheck alone would accept a function that ignores an input
    gradients = torch.autograd.grad([x.square().sum() for x in call(*leaves)], leaves)
    assert all(gradient.norm() > 1e-4 for gradient in gradients)
