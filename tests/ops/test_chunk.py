"""The operator on the CPU target against the recurrence; what it remembers between calls: test_chunk_memory.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import OPERATOR, TENSORS, draw_call, draw_lengths, operator_arguments
from support.operator_cases import CPU, SMALL, SPECIALISED, STATE, assert_right, bind_call, specialised
from support.views import misalign, scatter, widen
from torch import Tensor

from kda_tl.core.device import find_compiler
from kda_tl.core.problem import Problem
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.ops import call as call_module
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


# Against the recurrence


@pytest.mark.rest(draws=1)
@specialised
def test_lengths(problem: Problem, seed: int) -> None:
    for n, T in enumerate((1, 15, 16, 17, 63, 64, 65, 130)):
        assert_right(draw_call(problem, (T,), seed + n, varlen=False))


@pytest.mark.rest(draws=1)
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


@pytest.mark.rest(draws=2)
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
    assert len(warned) == 1 and warned[0].filename == assert_right.__code__.co_filename, (
        "one warning, and it points at the caller"
    )
    choice = explain(**operator_arguments(call, batch))
    assert (choice.step, choice.plan) == ("reference", None) and "no compiler found" in str(choice)
    with pytest.raises(UnsupportedError, match="install a compiler"):
        chunk_kda(**operator_arguments(call, batch), return_intermediate_states=True)
