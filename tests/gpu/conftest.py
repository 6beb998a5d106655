"""Fixtures of the GPU tests: every test comes after the compilation of all kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gpu_cases import compile_all, plan_named

import kda_tl


@pytest.fixture
def defaults_by_name(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test comes after the compilation, and plans are the defaults that were compiled.

    A pin of each test's own, where it names a specialisation.
    """
    compile_all()
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name is None:
        yield
        return
    with kda_tl.pin(plan_named(name)):
        yield


@pytest.fixture
def defaults_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test comes after the compilation; plans are the defaults that were compiled, or pinned."""
    compile_all()
    monkeypatch.setattr("kda_tl.runtime.dispatch.sources", lambda: ())
    yield
