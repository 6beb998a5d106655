"""Fixtures of the tests of operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.cases import SMALL, TENSORS, draw_call, operator_arguments
from support.operator_cases import Arguments

from kda_tl.core.stage import Plan
from kda_tl.ops import call as call_module
from kda_tl.ops.kda import chunk_kda
from kda_tl.runtime import dispatch
from kda_tl.runtime.program import Program


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
        for memory in (dispatch._can_compile, dispatch._is_strict, dispatch._select, call_module._warn_reference):
            memory.cache_clear()
        call_module._bound_calls.clear()

    forget()
    yield
    forget()


@pytest.fixture
def a(seed: int) -> Arguments:
    """Arguments of a call that was made before: a signature that is known must not let other tensors through."""
    arguments = operator_arguments(draw_call(SMALL, (20,), seed, varlen=False))
    chunk_kda(**arguments)
    return arguments


@pytest.fixture
def leaves(a: Arguments) -> Arguments:
    return {name: x.clone().requires_grad_() if name in TENSORS else x for name, x in a.items()}


@pytest.fixture
def planned_only(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are planned, but nothing is compiled for them."""
    monkeypatch.setattr(
        call_module, "load_program", lambda problem, *args: (dispatch.select_cached(problem, *args), None)
    )
    monkeypatch.setattr(call_module, "build_program", lambda *args, **kwargs: None)
