"""The judge of the decode operators against the recurrence, and against loops of simpler calls of its own."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.cases import bounds_of
from support.decode_cases import (
    LAYOUTS,
    TOKENS,
    UNTOUCHED,
    Args,
    assert_only_written,
    cut,
    draw,
    draw_call,
    draw_gate,
    draw_states,
    ints,
    normal,
    single,
    uniform,
)
from support.oracle import EXACT, F64, assert_close
from torch import Tensor

from kda_tl.core.problem import BETAS, GATES
from kda_tl.errors import InputError
from kda_tl.reference import activate_beta, activate_gate, recurrent_kda, relative_error
from kda_tl.reference_decode import DecodeResult, decode_reference


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("beta_mode", BETAS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("scalar", (False, True), ids=("channel", "scalar"))
def test_equals_the_recurrence(scalar: bool, gate: str, beta_mode: str, packed: bool, rng: random.Random) -> None:
    lengths = [rng.choice((0, 1, rng.randint(2, 6))) for _ in range(rng.randint(1, 4))]
    N = len(lengths)
    B, T = (1, sum(lengths)) if packed else (N, rng.randint(1, 6))
    x = draw(rng, B, T, scalar)
    x |= draw_gate(rng, gate, x["g"])
    x |= {"beta_mode": beta_mode, "use_l2norm": rng.random() < 0.5, "state_v_first": rng.random() < 0.5}
    x |= {"scale": rng.choice((None, 0.7)), "cu_seqlens": ints(*bounds_of(lengths)) if packed else None}
    states = draw_states(rng, x, N)
    x["initial_state"] = rng.choice((None, states.mT.contiguous() if x["state_v_first"] else states))
    o, final_state = recurrent_kda(**{**x, "g": x["g"][..., None] if scalar else x["g"]})
    result = decode_reference(**x)
    assert_close(result.o, o)
    assert_close(result.final_state, final_state)
    assert result.intermediate_states is None
    if x["initial_state"] is None:
        assert result.pool is None
    else:
        assert result.pool is not None and torch.equal(result.pool, result.final_state)


def test_absent_gates_and_steps_change_nothing(rng: random.Random) -> None:
    x = draw(rng, 2, 3)
    expected = decode_reference(**{**x, "g": torch.zeros_like(x["g"]), "beta": torch.ones_like(x["beta"])})
    for mode in BETAS:
        result = decode_reference(**{**x, "g": None, "beta": None}, beta_mode=mode)
        assert_close(result.o, expected.o)
        assert_close(result.final_state, expected.final_state)


@pytest.mark.parametrize("gate", GATES)
def test_every_value_channel_is_a_recurrence_of_its_own(gate: str, rng: random.Random) -> None:
    B, T = rng.randint(1, 3), rng.randint(1, 5)
    x, mode = draw(rng, B, T), rng.choice(BETAS)
    HV, K, V = x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]
    arguments, states = draw_gate(rng, gate, x["g"]), draw_states(rng, x, B)
    gk, gv, beta = -uniform(rng, B, T, HV, K), -uniform(rng, B, T, HV, V), normal(rng, B, T, HV, V)
    g = x["g"] if x["g"].dim() == 4 else x["g"][..., None]
    g = activate_gate(g, **{"gate": "log", **arguments})
    steps = activate_beta(beta, mode)
    cases: list[tuple[Args, Tensor, Tensor]] = [
        ({"gk": gk}, gk + 0 * gv[..., :1], x["beta"][..., None].expand_as(beta)),
        ({"gv": gv, "beta": beta, "beta_mode": mode}, gv, steps),
        ({"gk": gk, "gv": gv, "beta": beta, "beta_mode": mode}, gv, steps),
        ({"beta": beta, "beta_mode": mode}, 0 * gv, steps),
    ]
    for given, of_values, step in cases:
        result = decode_reference(**{**x, **arguments, "initial_state": states, **given})
        for c in range(V):
            log_decay = g.expand(B, T, HV, K) + given.get("gk", 0)
            if "gv" in given:
                log_decay = log_decay + of_values[..., c : c + 1]
            o, final_state = recurrent_kda(
                x["q"], x["k"], x["v"][..., c : c + 1], log_decay, step[..., c], initial_state=states[..., c : c + 1]
            )
            assert_close(result.o[..., c : c + 1], o)
            assert_close(result.final_state[..., c : c + 1], final_state)


def test_tokens_at_once_equal_calls_of_one_token(rng: random.Random) -> None:
    B, T = rng.randint(1, 3), rng.randint(2, 6)
    x = draw_call(rng, B, T)
    pool = draw_states(rng, x, B + 2)
    slots = ints(*rng.sample(range(B + 2), B))
    at_once = decode_reference(**x, initial_state=pool, ssm_state_indices=slots)
    for t in range(T):
        tokens = x | {name: x[name][:, t : t + 1] for name in TOKENS}
        one = decode_reference(**tokens, initial_state=pool, ssm_state_indices=slots)
        assert one.pool is not None
        pool = one.pool
        assert_close(at_once.o[:, t : t + 1], one.o)
    assert at_once.pool is not None
    assert_close(at_once.pool, pool)


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
def test_no_tokens_carry_the_state(packed: bool, rng: random.Random) -> None:
    x = draw(rng, 1 if packed else 2, 0)
    cu_seqlens = ints(0, 0, 0) if packed else None
    pool = draw_states(rng, x, 6)
    indices = {"ssm_state_indices": ints(4, -1), "cu_seqlens": cu_seqlens}

    def call(**given: Any) -> DecodeResult:
        result = decode_reference(**x, initial_state=pool, **{**indices, **given})
        assert result.o.shape == x["v"].shape
        assert torch.equal(result.final_state[0], pool[4]) and not result.final_state[1].any()
        return result

    same, moved = call(), call(output_state_indices=ints(2, 3))
    wide, unmoved = call(output_state_indices=ints([2, 1], [0, 3])), call(update=False, output_state_indices=ints(2, 3))
    for result, written in ((same, {}), (moved, {2: pool[4]}), (wide, {}), (unmoved, {})):
        assert result.pool is not None
        assert_only_written(result.pool, pool, written)
    fresh = decode_reference(**x, cu_seqlens=cu_seqlens)
    assert fresh.final_state.shape == (2, *pool.shape[1:]) and not fresh.final_state.any()


def test_tokens_after_the_last_sequence_have_zeros(rng: random.Random) -> None:
    x = draw(rng, 1, 5)
    expected = decode_reference(**cut(x, 0, 0, 3), cu_seqlens=ints(0, 1, 3))
    for name in x:
        x[name][:, 3:] = torch.nan
    result = decode_reference(**x, cu_seqlens=ints(0, 1, 3))
    assert not result.o[:, 3:].any()
    assert torch.equal(result.o[:, :3], expected.o) and torch.equal(result.final_state, expected.final_state)


def test_verification_leaves_the_pool(rng: random.Random) -> None:
    """Intermediate states lie by the row that is given, not by slot or sequence; rows below 0 are not written."""
    N, T, W = 4, rng.randint(2, 4), 2
    x = draw_call(rng, N, T)
    pool = draw_states(rng, x, 9)
    slots = ints(*rng.sample(range(9), N * W)).view(N, W)  # fewer columns than tokens: they are read only
    rows = ints(*rng.sample(range(6), N))
    unwritten = rng.randrange(N)
    rows[unwritten] = -1
    kept = torch.full((6, T + 1, *pool.shape[1:]), UNTOUCHED, dtype=F64)
    result = decode_reference(
        **x,
        initial_state=pool,
        ssm_state_indices=slots,
        num_accepted_tokens=ints(*([2] * N)),
        update=False,
        intermediate_states=kept,
        intermediate_state_indices=rows,
    )
    written = {}
    for n in range(N):
        state, row = pool[slots[n, 1]], kept[0].clone()
        for t in range(T):
            o, state = single(x, n, t, state)
            assert_close(result.o[n, t], o)
            row[t] = state
        assert_close(result.final_state[n], state)
        if n != unwritten:
            written[int(rows[n])] = row
    assert result.pool is not None and torch.equal(result.pool, pool)
    assert result.intermediate_states is not None and len(written) == N - 1
    assert_only_written(result.intermediate_states, kept, written)


def test_intermediate_states_beside_an_update(rng: random.Random) -> None:
    """Of packed sequences, without a pool too."""
    lengths = (2, 0, 3)
    x = draw(rng, 1, 5)
    states, cu_seqlens = draw_states(rng, x, 3), ints(*bounds_of(lengths))
    for initial in (None, states):
        kept = torch.full((4, 3, *states.shape[1:]), UNTOUCHED)
        result = decode_reference(**x, initial_state=initial, cu_seqlens=cu_seqlens, intermediate_states=kept)
        expected = kept.to(F64)
        for n, (first, end) in enumerate(pairwise(bounds_of(lengths))):
            state = torch.zeros_like(states[n]) if initial is None else initial[n]
            for t in range(first, end):
                _, state = single(x, 0, t, state)
                expected[n, t - first] = state
        assert result.intermediate_states is not None
        assert_close(result.intermediate_states, expected)
        assert initial is None or (result.pool is not None and torch.equal(result.pool, result.final_state))


@LAYOUTS
@pytest.mark.parametrize("kept_dtype", (F64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_trees_equal_the_paths_from_their_roots(
    kept_dtype: torch.dtype, state_v_first: bool, rng: random.Random
) -> None:
    """A path is walked token by token; a state that a token starts from has gone through the buffer's dtype."""
    # Sums in another order are rounded to another fp32 number once in ten thousand runs, and to another bf16 never
    tolerance = 1e-6 if kept_dtype == torch.float32 else EXACT
    N, T = 3, rng.randint(3, 7)
    x = draw_call(rng, N, T)
    parents = [[rng.randrange(-1, t) if t else rng.choice((-1, 0, T)) for t in range(T)] for _ in range(N)]
    parents[0][1:] = range(T - 1)  # a chain
    pool = draw_states(rng, x, N + 1)
    slots, rows = rng.sample(range(N + 1), N), rng.sample(range(N + 2), N)
    kept = torch.full((N + 2, T, *pool.shape[1:]), 7.0, dtype=kept_dtype)
    result = decode_reference(
        **x,
        initial_state=pool.mT if state_v_first else pool,
        ssm_state_indices=ints(*slots),
        update=False,
        intermediate_states=kept.mT if state_v_first else kept,
        intermediate_state_indices=ints(*rows),
        retrieve_parent_token=ints(*parents),
        state_v_first=state_v_first,
    )
    assert result.pool is not None and torch.equal(result.pool.mT if state_v_first else result.pool, pool)
    assert result.intermediate_states is not None
    states = result.intermediate_states.mT if state_v_first else result.intermediate_states
    for n in range(N):
        for t in range(T):
            path = [t]
            while path[0] and parents[n][path[0]] >= 0:
                path.insert(0, parents[n][path[0]])
            state = pool[slots[n]]
            for token in path:
                state = state if token == path[0] else state.to(kept_dtype).to(F64)
                o, state = single(x, n, token, state)
            assert_close(result.o[n, t], o, tolerance)
            assert_close(states[rows[n], t], state, tolerance)
        final_state = result.final_state[n].mT if state_v_first else result.final_state[n]
        assert_close(final_state, state, tolerance)
    for row in set(range(N + 2)) - set(rows):
        assert torch.equal(states[row], kept[row].to(F64))


def test_chains_through_a_short_buffer_are_rounded(rng: random.Random) -> None:
    x = draw(rng, 1, 4)
    kept = draw_states(rng, x, 1, 4)
    tree: Args = {"update": False, "retrieve_parent_token": ints([-1, 0, 1, 2])}
    exact = decode_reference(**x)
    assert_close(decode_reference(**x, **tree, intermediate_states=kept).o, exact.o)
    rounded = decode_reference(**x, **tree, intermediate_states=kept.bfloat16())
    assert_close(rounded.o[:, 0], exact.o[:, 0])
    assert 1e-5 < relative_error(rounded.o, exact.o) < 0.1


def test_a_tree_without_a_row_is_null(rng: random.Random) -> None:
    x = draw(rng, 2, 3)
    pool, kept = draw_states(rng, x, 2), draw_states(rng, x, 2, 3)
    arguments: Args = {"initial_state": pool, "update": False, "intermediate_states": kept}
    arguments["intermediate_state_indices"] = ints(-1, 1)
    result = decode_reference(**x, **arguments, retrieve_parent_token=ints([9, 9, 9], [-1, 0, 0]))
    assert not result.o[0].any() and not result.final_state[0].any() and result.o[1].any()
    assert result.intermediate_states is not None and torch.equal(result.intermediate_states[0], kept[0])
    assert decode_reference(**x, **arguments).o[0].any()


def test_state_layouts_are_transposes(rng: random.Random) -> None:
    N, T = 3, rng.randint(1, 3)
    x = draw_call(rng, N, T)
    pool, kept = draw_states(rng, x, N * T + 1), draw_states(rng, x, N, T)
    order = ints(*rng.sample(range(N * T + 1), N * T)).view(N, T)
    for slots in (order, order[:, 0]):
        one = decode_reference(**x, initial_state=pool, ssm_state_indices=slots, intermediate_states=kept)
        other = decode_reference(
            **x,
            initial_state=pool.mT.contiguous(),
            ssm_state_indices=slots,
            intermediate_states=kept.mT.contiguous(),
            state_v_first=True,
        )
        assert_close(one.o, other.o)
        for name in ("final_state", "pool", "intermediate_states"):
            assert_close(getattr(one, name), getattr(other, name).mT)
        assert other.final_state.is_contiguous()


@pytest.mark.parametrize("dtype", (F64, torch.float32), ids=str)
def test_inputs_are_cast_and_left_alone(dtype: torch.dtype, rng: random.Random) -> None:
    """With slots that are apart in memory, and inputs that require gradients."""
    N, T = 2, 3
    exact = draw_call(rng, N, T)
    exact |= {"initial_state": draw_states(rng, exact, 6), "intermediate_states": draw_states(rng, exact, N, T)}
    low = {name: x.to(torch.bfloat16) if isinstance(x, Tensor) else x for name, x in exact.items()}
    low["q"].requires_grad_()
    low["initial_state"] = low["initial_state"][:, None].repeat(1, 3, 1, 1, 1)[:, 1]
    exact = {name: x.detach().to(F64) if isinstance(x, Tensor) else x for name, x in low.items()}
    exact["ssm_state_indices"] = low["ssm_state_indices"] = ints([5, 0, 1], [2, 3, 4])
    copied = {name: x.clone() if isinstance(x, Tensor) else x for name, x in exact.items()}
    truth = decode_reference(**copied)
    for x in (low, exact):
        before = {name: t.clone() for name, t in x.items() if isinstance(t, Tensor)}
        result = decode_reference(**x, dtype=dtype)
        for name, t in before.items():
            assert torch.equal(x[name], t), name
        for actual, expected in zip(result, truth, strict=True):
            assert actual is not None and expected is not None
            assert actual.dtype == dtype and not actual.requires_grad
            error = relative_error(actual, expected)
            assert error == 0 if dtype == F64 else 0 < error < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"k": torch.ones(2, 3, 4, 5)}, "k must have"),
        ({"v": torch.ones(2, 3, 3, 3)}, "multiple of H"),
        ({"v": torch.ones(2, 1, 4, 3), "g": None, "beta": None}, "v must have"),
        ({"g": torch.ones(2, 3, 4, 1)}, r"g must have the shape \[2, 3, 4\] or \[2, 3, 4, 5\]"),
        ({"beta": torch.ones(2, 3, 4, 5)}, "beta must have"),
        ({"gk": torch.ones(2, 3, 4)}, "gk must have"),
        ({"gv": torch.ones(2, 3, 4, 5)}, "gv must have"),
        ({"gate": "softplus"}, "needs A_log"),
        ({"beta_mode": "tanh"}, "beta mode must be one of"),
        ({"ssm_state_indices": None, "initial_state": None, "num_accepted_tokens": ints(1, 1)}, "chooses a column"),
        ({"ssm_state_indices": None}, "initial_state must have"),
        ({"ssm_state_indices": ints(0, 9)}, "no place"),
        ({"ssm_state_indices": ints(0, -1), "pad_slot_id": -2}, "no place"),
        ({"ssm_state_indices": ints(0, 1, 2)}, "ssm_state_indices must have"),
        ({"ssm_state_indices": torch.ones(2)}, "must hold integers"),
        ({"ssm_state_indices": ints([0, 1], [2, 3])}, "2 slots cannot take the states after 3 tokens"),
        ({"output_state_indices": ints([0, 1], [2, 3])}, "2 slots cannot take the states after 3 tokens"),
        ({"output_state_indices": ints(0, 9)}, "no place"),
        ({"num_accepted_tokens": ints(1, 1)}, "chooses a column"),
        ({"initial_state": None}, "pass initial_state"),
        ({"initial_state": torch.ones(9, 4, 3, 5)}, "initial_state must have"),
        ({"intermediate_state_indices": ints(0, 1)}, "need intermediate_states"),
        ({"retrieve_parent_token": ints([0, 0, 0], [0, 0, 0]), "update": False}, "need intermediate_states"),
        ({"intermediate_states": torch.ones(2, 3, 4, 3, 5)}, "intermediate_states must have"),
        ({"intermediate_states": torch.ones(2, 2, 4, 5, 3)}, "no place"),
        ({"intermediate_states": torch.ones(1, 3, 4, 5, 3)}, "no place"),
        ({"cu_seqlens": ints(0, 3)}, "got B=2"),
    ),
)
def test_wrong_arguments_are_refused(change: Args, message: str) -> None:
    rng = random.Random(0)
    x: Args = {"q": normal(rng, 2, 3, 2, 5), "k": normal(rng, 2, 3, 2, 5), "v": normal(rng, 2, 3, 4, 3)}
    x |= {"g": -uniform(rng, 2, 3, 4), "beta": uniform(rng, 2, 3, 4), "initial_state": normal(rng, 9, 4, 5, 3)}
    x["ssm_state_indices"] = ints(0, 1)
    decode_reference(**x)
    with pytest.raises(InputError, match=message):
        decode_reference(**{**x, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"update": True}, "update=False"),
        ({"retrieve_parent_token": ints([0, 1, 0])}, "parent of token 1 must be below 1"),
        ({"retrieve_parent_token": ints([0, 0])}, "retrieve_parent_token must have"),
        ({"cu_seqlens": ints(0, 3)}, "no cu_seqlens"),
    ),
)
def test_wrong_trees_are_refused(change: Args, message: str) -> None:
    x = draw(random.Random(0), 1, 3)
    x |= {"intermediate_states": draw_states(random.Random(0), x, 1, 3), "update": False}
    x["retrieve_parent_token"] = ints([0, 0, 0])
    decode_reference(**x)
    with pytest.raises(InputError, match=message):
        decode_reference(**{**x, **change})


@pytest.mark.parametrize("bounds", ((0, 4), (1, 3), (0, 2, 1, 3), ()), ids=str)
def test_wrong_bounds_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cu_seqlens must start at 0"):
        decode_reference(**draw(random.Random(0), 1, 3), cu_seqlens=ints(*bounds))
