"""Recurrent operators on the CPU target against their judge: gates, types, layouts, lengths, and other ways to compute.

Which slots a call reads and writes: test_recurrent_slots.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import TORCH, draw_call, forget_compilers, operator_arguments
from support.decode_cases import LAYOUTS, TOKENS, Args, ints
from support.operator_cases import CPU, SMALL
from support.step_cases import (
    KINDS,
    OPERATORS,
    TOLERANCE,
    Shape,
    Types,
    assert_right,
    cut_tokens,
    draw_step,
    truth,
)
from support.views import scatter, widen

from kda_tl.core.device import find_compiler
from kda_tl.core.problem import BETAS, GATES
from kda_tl.errors import InputError, KdaTlWarning
from kda_tl.ops import recurrent_call, recurrent_entry
from kda_tl.ops.gated_delta_rule import chunk_gated_delta_rule
from kda_tl.ops.kda import chunk_kda
from kda_tl.ops.packed_decode import packed_decode
from kda_tl.reference import relative_error

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]
FP32 = TOLERANCE[torch.float32]
names = pytest.mark.parametrize("name", OPERATORS)
GATES_OF = {"kda": GATES, "gdn": tuple(gate for gate in GATES if gate != "safe")}


# Everything at once


@pytest.mark.rest(draws=2)
@LAYOUTS
@pytest.mark.parametrize(("name", "gate"), [(name, gate) for name in OPERATORS for gate in GATES_OF[name]])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_of_every_kind(kind: str, name: str, gate: str, state_v_first: bool, rng: random.Random) -> None:
    """With every other option drawn; several draws of values."""
    shape = Shape(
        gate=gate,
        beta=rng.choice(BETAS),
        l2norm=rng.random() < 0.5,
        wide_beta=rng.random() < 0.3,
        key_gate=name == "gdn" and rng.random() < 0.4,
        value_gate=name == "gdn" and rng.random() < 0.4,
        bias=rng.random() < 0.5,
    )
    ragged, final = rng.random() < 0.5 and not kind.endswith("tree"), rng.random() < 0.5
    types = Types(state=rng.choice(("fp32", "fp32", "bf16")), index=rng.choice((torch.int32, torch.int64)))
    for _ in range(4):
        H = rng.choice((1, 2, 3))
        heads = replace(shape, H=H, HV=H * rng.choice((1, 2, 4)))
        lengths = [rng.choice((0, 1, rng.randint(2, 9))) for _ in range(rng.randint(1, 5))] if ragged else None
        more: Args = {"lengths": lengths, "padding": rng.randint(0, 3)} if ragged else {"N": rng.randint(1, 5)}
        a = draw_step(
            rng,
            name,
            kind,
            shape=heads,
            types=types,
            v_first=state_v_first,
            pad=rng.choice((-1, 0)),
            final=final,
            **more,
        )
        assert_right(name, a)


# Gates, steps, types, sizes


LACKING: dict[str, tuple[str, Shape, tuple[str, ...]]] = {
    "no g": ("gdn", Shape(gate="log"), ("g",)),
    "no g and no step": ("gdn", Shape(gate="log", beta="plain"), ("g", "beta")),
    "gk alone": ("gdn", Shape(gate="log", key_gate=True), ("g",)),
    "gv alone": ("gdn", Shape(gate="log", value_gate=True), ("g",)),
    "gk and gv": ("gdn", Shape(gate="log", key_gate=True, value_gate=True), ("g",)),
    "a raw gate beside gk and gv": ("gdn", Shape(key_gate=True, value_gate=True, beta="sigmoid2"), ()),
    "no step": ("gdn", Shape(beta="plain"), ("beta",)),
    "a step a channel": ("gdn", Shape(wide_beta=True), ()),
    "a step a channel of KDA": ("kda", Shape(wide_beta=True, beta="plain"), ()),
    "steps of 2": ("kda", Shape(beta="sigmoid2"), ()),
    "no norm": ("kda", Shape(l2norm=False), ()),
    "no bias": ("kda", Shape(bias=False), ()),
    "a bound alone": ("kda", Shape(gate="safe", bias=False), ("A_log",)),
    "a bound and a bias": ("kda", Shape(gate="safe"), ("A_log",)),
    "a bound and A_log": ("kda", Shape(gate="safe", bias=False), ()),
    "a scale": ("kda", Shape(), ("scale",)),
}


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("case", LACKING)
def test_gates_and_steps(case: str, rng: random.Random) -> None:
    name, shape, without = LACKING[case]
    a = draw_step(rng, name, "pool", shape=shape, final=False)
    assert_right(name, a | dict.fromkeys(without) | ({"scale": -3} if case == "a scale" else {}))


def test_unused_gate_parameters_are_ignored(rng: random.Random) -> None:
    junk = torch.full((4,), torch.nan)
    a = draw_step(rng, "kda", "pool", shape=Shape(gate="log"), final=False)
    assert_right("kda", a)
    o, _ = assert_right("kda", a | {"A_log": junk, "dt_bias": junk.repeat(19), "lower_bound": -1.0, "scale": 1})
    assert o.isfinite().all()


def test_a_steep_gate_forgets_all(rng: random.Random) -> None:
    """Whatever the numbers: exponents beyond those of fp32 are 0, not NaN, and decays near 1 are not lost beside."""
    a = draw_step(rng, "kda", "pool", shape=Shape(gate="log", K=19), final=False, null=(), T=3, fused=False)
    a["g"] = torch.where(torch.rand(a["g"].shape) < 0.3, -1e30, a["g"])
    assert_right("kda", a)


@pytest.mark.rest(draws=1)
@names
@pytest.mark.parametrize("state", TORCH)
@pytest.mark.parametrize("io", TORCH)
def test_element_types(io: str, state: str, name: str, rng: random.Random) -> None:
    """States of 16 bits are cast on the way in, and rounded once on the way out: memory around them stays."""
    types = Types(io=io, state=state, gates=rng.choice(tuple(TORCH)), beta=rng.choice(tuple(TORCH)))
    for kind in ("pool", "keep"):
        assert_right(name, draw_step(rng, name, kind, types=types, final=False, placed=True))


def test_steps_are_not_rounded_to_the_type_of_the_keys(rng: random.Random) -> None:
    """A step size in fp32 beside q, k and v in bf16: rounded, it would be 500 times the tolerance off."""
    types = Types(io="bf16", gates="fp32", beta="fp32")
    a = draw_step(rng, "kda", "rows", T=3, shape=Shape(beta="plain"), types=types, final=True, fused=False)
    _, state = assert_right("kda", a)
    rounded = truth(a | {"beta": a["beta"].bfloat16()}).final_state
    assert state is not None and relative_error(state, rounded) > 20 * FP32


@names
@pytest.mark.parametrize("change", ("q", "k", "qk"))
def test_q_and_k_may_be_wider_than_v(change: str, name: str, rng: random.Random) -> None:
    """As FLA takes them; o is as wide as v, what a call says of itself names the copies, and kernels get v's type."""
    a = draw_step(rng, name, "rows", T=3, types=Types(io="bf16"), final=True, fused=False)
    a |= {key: a[key].float() + 2.0**-12 for key in change}
    o, _ = assert_right(name, a)
    operator = recurrent_entry.RECURRENT[OPERATORS[name].__name__]
    arguments = operator.Arguments(**a)
    choice = recurrent_call.explain_step(operator, arguments)
    copies = {key for key in "qk" if any(line.startswith(f"{key} is copied") for line in choice.passed_over)}
    assert copies == set(change)
    problem, _, given, copied = recurrent_call.pose_step(operator, arguments)
    constants = recurrent_call._find_constants(problem, arguments)
    bound = recurrent_call.BoundStep(problem, choice, None, {}, constants, given, copied, gpu=0)
    found = recurrent_call._find_operands(bound, arguments, o, None)
    assert all(torch.equal(found[key], a[key].bfloat16()) and found[key].dtype == torch.bfloat16 for key in "qk")


@pytest.mark.parametrize("heads", ((1, 1), (1, 4), (2, 6), (3, 3), (1, 35)), ids=str)
def test_value_heads_share_keys(heads: tuple[int, int], rng: random.Random) -> None:
    shape = Shape(H=heads[0], HV=heads[1])
    assert_right("kda", draw_step(rng, "kda", "pool", shape=shape, final=False))


@pytest.mark.rest(draws=1)
@names
@LAYOUTS
@pytest.mark.parametrize(
    ("K", "V"), ((1, 1), (16, 40), (33, 65), (100, 60), (128, 128), (60, 100), (256, 32), (31, 512))
)
def test_channels(K: int, V: int, state_v_first: bool, name: str, rng: random.Random) -> None:
    shape = Shape(H=1, HV=2, K=K, V=V, gate="softplus")
    assert_right(name, draw_step(rng, name, "pool", shape=shape, v_first=state_v_first, final=False))


# Where tensors lie


def test_a_fused_projection_and_apart_slots_change_no_bit(rng: random.Random) -> None:
    """NaN in the rest of the projection and between slots, K of an odd number: what kernels pad with is never read."""
    a = draw_step(rng, "kda", "pool", T=3, final=False)
    dense = {key: x.contiguous() if key in TOKENS else x for key, x in a.items()}
    dense["initial_state"] = a["initial_state"].clone()
    assert not a["q"].is_contiguous() and dense["initial_state"].is_contiguous()
    assert not a["initial_state"].is_contiguous()
    o, pool = assert_right("kda", a)
    other, other_pool = assert_right("kda", dense)
    assert torch.equal(o, other) and torch.equal(pool, other_pool)


@pytest.mark.parametrize("change", (scatter, widen, lambda x: torch._neg_view(-x)), ids=("scatter", "widen", "neg"))
def test_any_strides_are_served(change: Any, rng: random.Random) -> None:
    a = draw_step(rng, "kda", "rows", T=3, final=True, fused=False)
    expected = OPERATORS["kda"](**a)
    for key in (*TOKENS, "A_log", "dt_bias", "initial_state"):
        if a.get(key) is not None:
            for one, other in zip(OPERATORS["kda"](**a | {key: change(a[key])}), expected, strict=True):
                assert torch.equal(one, other), key


@pytest.mark.rest(draws=1)
@names
def test_layouts_of_states_are_transposes(name: str, rng: random.Random) -> None:
    a = draw_step(rng, name, "pool", T=3, final=False)
    turned = a | {"initial_state": a["initial_state"].mT.contiguous(), "state_v_first": True}
    o, pool = assert_right(name, a)
    other, other_pool = assert_right(name, turned)
    assert relative_error(o, other.double()) < FP32
    read = pool.abs().amax((1, 2, 3)) < 1e3
    assert relative_error(pool[read], other_pool[read].mT.double()) < FP32


def test_out_is_written_and_returned(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "pool", T=3, final=False)
    expected, _ = OPERATORS["kda"](**a | {"initial_state": a["initial_state"].clone()})
    out = torch.full(a["v"].shape, torch.nan)
    o, _ = assert_right("kda", a | {"out": out})
    assert o is out and torch.equal(o, expected)


# The same in other ways


@names
def test_tokens_at_once_are_calls_of_one_token(name: str, rng: random.Random) -> None:
    """To the bit, of fp32 states."""
    a = draw_step(rng, name, "pool", T=5, final=False)
    first = a | {"initial_state": a["initial_state"].clone()}
    o, pool = assert_right(name, a)
    for t in range(5):
        one, state = OPERATORS[name](**cut_tokens(first, t, t + 1))
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(state, pool)


@pytest.mark.rest(draws=1)
@names
def test_512_steps_do_not_drift(name: str, rng: random.Random) -> None:
    """Slow decays, so that the state of all steps counts; errors of single steps must not add up."""
    shape = Shape(H=1, HV=1, gate="log", beta="plain")
    a = draw_step(rng, name, "pool", N=1, T=512, shape=shape, null=(), final=False, fused=False)
    a["g"] *= 0.05
    expected = truth(a)
    for t in range(512):
        o, pool = OPERATORS[name](**cut_tokens(a, t, t + 1))
        assert relative_error(o, expected.o[:, t : t + 1]) < 5 * FP32, t
    slot = int(a["ssm_state_indices"][0])
    assert relative_error(pool[slot], expected.pool[slot]) < 2 * FP32


@pytest.mark.rest(draws=1)
@names
@LAYOUTS
def test_prefill_decode_and_prefill_again(name: str, state_v_first: bool, rng: random.Random, seed: int) -> None:
    """A sequence cut in three anywhere: chunks, tokens through a pool, chunks again."""
    T, slot = 18, 2
    problem = replace(SMALL, scalar_gate=name == "gdn", operator="chunk_kda", state_v_first=state_v_first)
    call = draw_call(problem, (T,), seed, varlen=False)
    if name == "gdn":
        call = replace(call, problem=replace(problem, operator="chunk_gated_delta_rule"))
    whole = operator_arguments(call)
    chunk = chunk_gated_delta_rule if name == "gdn" else chunk_kda
    o, ht, _ = call.truth()
    plain = {"scale": whole["scale"], "state_v_first": state_v_first}
    for first in range(T + 1):
        end = rng.randint(first, T)
        tokens = [{n: whole[n][:, i:j] for n in TOKENS if n in whole} for i, j in ((0, first), (first, end), (end, T))]
        before, state = chunk(**whole | tokens[0])
        pool = torch.full((4, *state.shape[1:]), 1e30)
        pool[slot] = state[0]
        indices = {"ssm_state_indices": ints(slot), "inplace_final_state": True}
        during, pool = OPERATORS[name](**tokens[1], **plain, initial_state=pool, **indices)
        after, state = chunk(**whole | tokens[2] | {"initial_state": pool[slot : slot + 1]})
        assert relative_error(torch.cat([before, during, after], 1)[0], o) < 5e-5, (first, end)
        assert relative_error(state, ht) < 5e-5, (first, end)


PACKED = {
    "kda": ("kda", Shape()),
    "kda with a bound": ("kda", Shape(gate="safe", bias=False)),
    "gdn": ("gdn", Shape(bias=False)),
    "kda of one channel": ("kda", Shape(K=1, H=1, HV=3)),  # taken for gdn, which is the same then
}


@pytest.mark.rest(draws=3)
@pytest.mark.parametrize("pad", (-1, 0))
@pytest.mark.parametrize("case", PACKED)
def test_packed_decode(case: str, pad: int, rng: random.Random) -> None:
    """From views of a wider projection, of which NaN is the rest; results where they are wanted."""
    name, shape = PACKED[case]
    a = draw_step(rng, name, "pool", T=1, shape=shape, v_first=True, pad=pad, null=(), fused=False, final=False)
    a["ssm_state_indices"][1] = pad
    B = len(a["q"])
    given = {"initial_state": a["initial_state"].clone(), "out": torch.full(a["v"].shape, torch.nan)}
    mixed = torch.cat([a[key].reshape(B, -1) for key in "qkv"], 1)
    found = packed_decode(
        widen(mixed),
        widen(a["g"].reshape(B, -1)),
        widen(a["beta"][:, 0]),
        a["A_log"],
        a["dt_bias"],
        a["scale"],
        given["initial_state"],
        given["out"],
        a["ssm_state_indices"],
        use_qk_l2norm_in_kernel=True,
        lower_bound=a.get("lower_bound"),
        pad_slot_id=pad,
    )
    assert found is given["out"]
    o, pool = assert_right(name, a)
    assert torch.equal(found, o) and torch.equal(given["initial_state"], pool)


# Without tokens, sequences or a compiler


@pytest.mark.rest(draws=2)
@names
@pytest.mark.parametrize("kind", ("rows", "pool", "split pool", "columns"))
@pytest.mark.parametrize("ragged", (False, True), ids=("dense", "ragged"))
def test_no_tokens_carry_the_state(ragged: bool, kind: str, name: str, rng: random.Random) -> None:
    more: Args = {"lengths": (0, 0, 0)} if ragged else {"N": 3, "T": 0}
    a = draw_step(rng, name, kind, final=True, **more)
    o, state = assert_right(name, a)
    assert o.shape[1] == 0 and state is not None


def test_no_sequences(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "rows", N=0, T=2, final=True, fused=False)
    o, state = assert_right("kda", a)
    assert o.shape == (0, 2, 4, 13) and state is not None and state.shape == (0, 4, 19, 13)
    a = draw_step(rng, "kda", "rows", lengths=(), padding=3, final=True, fused=False)
    out = torch.full(a["v"].shape, torch.nan)
    assert_right("kda", a | {"out": out})  # tokens that belong to no sequence have zeros


@names
@pytest.mark.parametrize("kind", ("fresh", "pool", "columns", "split columns", "keep", "tree"))
def test_without_a_compiler_the_judge_serves(
    kind: str, name: str, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_compilers(monkeypatch)
    monkeypatch.setattr(recurrent_call, "_bound", {})
    recurrent_call._warn_reference.cache_clear()
    lengths = None if kind == "tree" else (2, 0, 3, 1)
    types = Types(state=rng.choice(("fp32", "bf16")))
    with pytest.warns(KdaTlWarning, match="slow here") as warned:
        for _ in range(2):
            assert_right(name, draw_step(rng, name, kind, lengths=lengths, padding=2, types=types), by_kernel=False)
    assert len(warned) == 1 and warned[0].filename == assert_right.__code__.co_filename


def test_states_with_a_negative_bit_are_refused(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "pool", final=False)
    with pytest.raises(InputError, match="initial_state has its negative bit set: pass initial_state.resolve_neg"):
        OPERATORS["kda"](**a | {"initial_state": torch._neg_view(a["initial_state"].clone())})
