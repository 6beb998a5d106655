"""The recurrent operator under flash-linear-attention: served inside FLA's function, and as engines call it, on pools.

As in test_fla, on a stub of FLA's registry, and on the real one where it can be imported.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.fla_stub import ORDERS, assert_same, install_stub, record_served, registered, why_not_importable

import kda_tl
from kda_tl import fla
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import UnsupportedError

needs_compiler = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++")
NAME, MODULE = "fused_recurrent_kda_fwd", "fla.ops.kda.fused_recurrent"
ORDER = ORDERS[NAME]
SERVICE = fla.Service(fla.list_served()[NAME], ORDER)
B, H, D, SLOTS = 3, 2, 16, 7


@pytest.fixture(params=("stub", "real"))
def entry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """FLA's inner function with our backend, which is gone after the test."""
    if request.param == "stub":
        install_stub(monkeypatch)
    elif reason := why_not_importable():
        pytest.skip(reason)
    with registered(NAME) as function:
        yield function


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return record_served(monkeypatch)


def draw(seed: int) -> dict[str, Any]:
    """A token of each of B sequences, and their states."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = torch.randn(4, B, 1, H, D, generator=generator)
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": torch.randn(B, 1, H, generator=generator),
        "A_log": torch.randn(H, generator=generator),
        "lower_bound": -5.0,
        "initial_state": torch.randn(B, H, D, D, generator=generator),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


def draw_pooled(seed: int) -> dict[str, Any]:
    """The same on a pool, as vLLM lays a batch out: packed sequences of a token each."""
    arguments = draw(seed)
    packed = {name: arguments[name].transpose(0, 1) for name in ("q", "k", "v", "g", "beta")}
    slots = torch.tensor(random.Random(seed).sample(range(1, SLOTS), B), dtype=torch.int32)
    pool = torch.full((SLOTS, H, D, D), 1e30)
    pool[slots.long()] = arguments["initial_state"]
    bounds = torch.arange(B + 1, dtype=torch.int32)
    return arguments | packed | {"initial_state": pool, "ssm_state_indices": slots, "cu_seqlens": bounds}


def test_only_dispatched_functions_are_served() -> None:
    """FLA 0.6.0 has no registry for its fused_recurrent_gated_delta_rule."""
    assert fla.list_served().keys() == {"chunk_kda", "chunk_gated_delta_rule", NAME}


def test_arguments_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SERVICE.knows_arguments()
    for order in (ORDER[1:], (*ORDER, "block_table")):
        assert not fla.Service(SERVICE.operator, order).knows_arguments()
    install_stub(monkeypatch, fused_recurrent_kda_fwd=lambda q, k, v, beta, g: None)
    with pytest.raises(UnsupportedError, match=r"takes other arguments.*or call kda_tl\.fused_recurrent_kda"):
        fla.register()


def test_every_argument_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """In FLA's order, which is not ours, with FLA's default of the one that is not ours; our keywords too."""
    monkeypatch.setattr(fla, "_serve", lambda operator, arguments: arguments)
    further = {"pad_slot_id": 0, "output_state_indices": "o"}
    expected = {name: name for name in ORDER} | further
    for n in (0, 5, len(ORDER)):
        assert SERVICE.run(*ORDER[:n], **{name: name for name in ORDER[n:]}, **further) == expected
    assert SERVICE.run(*ORDER[:5]) == {name: name for name in ORDER[:5]} | {"inplace_final_state": True}
    defaults = inspect.signature(kda_tl.fused_recurrent_kda).parameters
    assert expected.keys() <= defaults.keys() and not defaults["inplace_final_state"].default


@needs_compiler
@pytest.mark.usefixtures("entry")
@pytest.mark.parametrize("output_final_state", (False, True))
def test_users_function_is_served(output_final_state: bool, served: list[Any], seed: int) -> None:
    arguments = draw(seed) | {"output_final_state": output_final_state}
    with torch.no_grad():
        found = sys.modules[MODULE].fused_recurrent_kda(**arguments)
    o, final_state = kda_tl.fused_recurrent_kda(**arguments)
    assert len(served) == 1 and torch.equal(found[0], o)
    assert torch.equal(found[1], final_state) if output_final_state else found[1] is final_state is None


@needs_compiler
def test_engines_update_a_pool(entry: Callable[..., Any], served: list[Any], seed: int) -> None:
    arguments = draw_pooled(seed)
    pool, slots = arguments["initial_state"], arguments["ssm_state_indices"].long()
    o, states = kda_tl.fused_recurrent_kda(**draw(seed), output_final_state=True)
    found, final_state = entry(**arguments)
    assert len(served) == 1 and final_state is pool
    assert_same((found.transpose(0, 1), pool[slots]), (o, states))
    others = [slot for slot in range(SLOTS) if slot not in slots.tolist()]
    assert bool((pool[others] == 1e30).all())


@needs_compiler
@pytest.mark.parametrize("pad", (-1, 0))
def test_null_slots(entry: Callable[..., Any], served: list[Any], pad: int, seed: int) -> None:
    """FLA has none: they come with our keyword, or with indices below 0."""
    arguments = draw_pooled(seed)
    arguments["ssm_state_indices"][1] = pad
    before = arguments["initial_state"].clone()
    o, pool = entry(**arguments, **({"pad_slot_id": 0} if pad == 0 else {}))
    assert len(served) == 1 and not o[0, 1].any()
    changed = [slot for slot in range(SLOTS) if not torch.equal(pool[slot], before[slot])]
    assert changed == sorted(arguments["ssm_state_indices"][[0, 2]].tolist())


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown keywords": ({"block_table": 1}, "does not know the keywords block_table"),
    "no state": ({"initial_state": None}, "need initial_state, the pool"),
    "dtype": ({"q": torch.zeros(B, 1, H, D, dtype=torch.float64)}, "q must be bfloat16, float16 or float32"),
    "lower_bound": ({"lower_bound": -9.0}, r"lower_bound must be in \[-5, 0\)"),
    "no gate": ({"lower_bound": None, "A_log": None}, "needs A_log"),
}


@needs_compiler
@pytest.mark.parametrize("case", DECLINED)
def test_declines_with_a_reason(case: str, served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = install_stub(monkeypatch, of=NAME)
    fla.register()
    changes, sentence = DECLINED[case]
    assert getattr(sys.modules[MODULE], NAME)(**draw(seed) | changes) == "FLA's own" and not served
    (reason,) = registry.rejected
    assert reason and re.search(sentence, reason), reason


@needs_compiler
def test_declines_gradients(seed: int) -> None:
    arguments = draw(seed)
    arguments["A_log"].requires_grad_()
    accepted, reason = SERVICE.verify(**arguments)
    assert not accepted and "carries no gradient: call it under torch.no_grad()" in str(reason)
    with torch.no_grad():
        assert SERVICE.verify(**arguments) == (True, None)
