"""Kernels made ready ahead: the call then compiles nothing, in neither pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import SMALL, draw_call, operator_arguments
from support.libraries import forget_kernels

import kda_tl
from kda_tl.core.device import cpu_device
from kda_tl.errors import CompileError, InputError
from kda_tl.ops import call as call_module
from kda_tl.runtime import dispatch

Arguments = dict[str, Any]


@pytest.fixture
def arguments(seed: int, monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """Of a call in a process that has no kernels yet."""
    forget_kernels(monkeypatch)
    monkeypatch.setattr(call_module, "_bound_calls", {})
    dispatch.build_program.cache_clear()
    return operator_arguments(draw_call(replace(SMALL, final_state=True), (20,), seed, varlen=False))


def train(arguments: Arguments, of_state: bool) -> None:
    v = arguments["v"].clone().requires_grad_()
    o, state = kda_tl.chunk_kda(**{**arguments, "v": v})
    (o.sum() + of_state * state.sum()).backward()
    assert v.grad is not None


@pytest.mark.rest(draws=4)
@pytest.mark.parametrize("of_state", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("by", ["arguments", "problem", "function"])
def test_a_warm_call_compiles_nothing(by: str, keep: bool, of_state: bool, arguments: Arguments) -> None:
    if keep and by == "problem":
        pytest.skip("a problem does not tell of disable_recompute")
    arguments["disable_recompute"] = keep
    with kda_tl.no_compile(), pytest.raises(CompileError, match=r"which kda_tl.no_compile\(\) forbids"):
        train(arguments, of_state)
    if by == "arguments":
        kda_tl.warmup(**arguments)
    elif by == "problem":
        kda_tl.warmup(replace(SMALL, final_state=True, tokens=20, H=2 * SMALL.H, HV=2 * SMALL.HV), device=cpu_device())
    else:
        kda_tl.warmup(lambda: train(arguments, of_state))
    with kda_tl.no_compile():
        train(arguments, of_state)


def test_the_backward_can_be_left_out(arguments: Arguments) -> None:
    kda_tl.warmup(**arguments, backward=False)
    with kda_tl.no_compile():
        with torch.no_grad():
            kda_tl.chunk_kda(**arguments)
        with pytest.raises(CompileError):
            train(arguments, False)


def test_what_cannot_be_called_cannot_be_warmed_up(arguments: Arguments) -> None:
    with pytest.raises(InputError):
        kda_tl.warmup(**{**arguments, "v": arguments["v"][..., :0]})
