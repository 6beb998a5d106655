"""FLA as the tests of its backend need it: a stub of its registry and functions, and the real one where it is."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import cases
from support.cases import draw_call, operator_arguments

from kda_tl import fla
from kda_tl.core.problem import Problem

SMALL = replace(cases.SMALL, state_v_first=True)


@functools.cache
def shorten_autotuning() -> None:
    """Two configs a kernel of FLA instead of up to a hundred that are all compiled: its speed is not tested here."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_short(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        make(self, fn, arg_names, configs[:2], *rest, **named)

    Autotuner.__init__ = make_short


def why_not_importable() -> str:
    with contextlib.suppress(ImportError):
        shorten_autotuning()
    try:
        importlib.import_module("fla.ops.kda.chunk")
    except Exception as error:  # without a GPU, Triton and FLA raise what they like
        return f"FLA cannot be imported: {error}"
    return ""


# A stub: what kda_tl.fla uses of fla/backends.py, FLA 0.6.0, and what FLA makes of it at a call


class StubBackend:
    """Mirrors BaseBackend: a verifier that raises declines; FLA_<TYPE> overrides the backend's own switch."""

    backend_type = "base"
    priority = 5
    env_var: str | None = None

    def is_enabled(self) -> bool:
        forced = os.environ.get(f"FLA_{self.backend_type.upper()}", "0") != "0"
        return self.env_var is None or forced or os.environ.get(self.env_var, "1") != "0"

    def verify(self, name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        verifier = getattr(self, f"{name}_verifier", None)
        try:
            return (True, None) if verifier is None else verifier(*args, **kwargs)
        except Exception as error:
            return False, str(error)


class StubRegistry:
    """Mirrors BackendRegistry, register and dispatch: lower priorities first, one backend a type.

    ``target`` is what FLA registers backends for: the function, or the name of a registry that functions share.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.backends: dict[str, StubBackend] = {}
        self.rejected: list[str | None] = []

    def dispatch(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for backend in sorted(self.backends.values(), key=lambda b: b.priority):
                if not backend.is_enabled():
                    continue
                accepted, reason = backend.verify(name, *args, **kwargs)
                implementation = getattr(backend, name, None)
                if accepted and implementation is not None:
                    return implementation(*args, **kwargs)
                self.rejected.append(reason)
            return function(*args, **kwargs)

        return wrapper


def stub_chunk_kda(  # the signature of fla/ops/kda/chunk.py, FLA 0.6.0
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Any = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: Any = None,
    **kwargs: Any,
) -> str:
    return "FLA's own"


def stub_chunk_gated_delta_rule(  # the signature of fla/ops/gated_delta_rule/chunk.py, FLA 0.6.0
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> str:
    return "FLA's own"


def stub_fused_recurrent_kda_fwd(  # the signature of fla/ops/kda/fused_recurrent.py, FLA 0.6.0
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    initial_state: Any = None,
    scale: Any = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    ssm_state_indices: Any = None,
    num_accepted_tokens: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Any = None,
    out: Any = None,
    **kwargs: Any,
) -> str:
    return "FLA's own"


def stub_fused_recurrent_kda(**arguments: Any) -> Any:
    """FLA's function that users call: it hands keywords on, and never works in place."""
    inner = sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd
    return inner(**{"scale": arguments["k"].shape[-1] ** -0.5} | arguments, inplace_final_state=False)


STUBS: dict[str, tuple[Callable[..., Any], str]] = {  # and the registry that FLA shares between functions
    "chunk_kda": (stub_chunk_kda, ""),
    "chunk_gated_delta_rule": (stub_chunk_gated_delta_rule, "gated_delta_rule"),
    "fused_recurrent_kda_fwd": (stub_fused_recurrent_kda_fwd, "kda"),
}
ORDERS = {name: tuple(inspect.signature(function).parameters)[:-1] for name, (function, _) in STUBS.items()}


def install_stub(patch: pytest.MonkeyPatch, of: str = "chunk_kda", **changes: Any) -> StubRegistry:
    """Puts the stubs where FLA's modules are imported from. Returns the registry of one."""
    registries = {name: StubRegistry(shared or function) for name, (function, shared) in STUBS.items()}

    def register(target: Any, *, env_var: str | None = None) -> Callable[[type[StubBackend]], None]:
        by_target = {registry.target: registry for registry in registries.values()}
        registry = by_target[target if isinstance(target, str) else inspect.unwrap(target)]

        def add(backend: type[StubBackend]) -> None:
            made = registry.backends[backend.backend_type] = backend()
            made.env_var = env_var

        return add

    held: dict[tuple[str, str], Any] = {
        ("fla", "__version__"): "0.6.0",
        ("fla.backends", "BaseBackend"): StubBackend,
        ("fla.backends", "register"): register,
        ("fla.ops.kda.fused_recurrent", "fused_recurrent_kda"): stub_fused_recurrent_kda,
    }
    for name, registry in registries.items():
        dispatched = registry.dispatch(STUBS[name][0], name)
        held[fla.list_served()[name].fla.module, name] = changes.get(name, dispatched)
    for module in {".".join(module.split(".")[:n]) for module, _ in held for n in range(1, 5)}:
        patch.setitem(sys.modules, module, types.ModuleType(module))
    for (module, name), value in held.items():
        setattr(sys.modules[module], name, value)
    return registries[of]


@contextlib.contextmanager
def registered(name: str = "chunk_kda") -> Iterator[Callable[..., Any]]:
    """FLA's function of that name with our backend inside a ``with`` block; the real registry is left as it was."""
    fla.register()
    served = fla.list_served()
    entries = {of: getattr(sys.modules[each.fla.module], of) for of, each in served.items()}
    yield entries[name]
    backends = sys.modules["fla.backends"]
    if hasattr(backends, "_function_registries"):  # the stub goes with its test
        for each, function in zip(served.values(), entries.values(), strict=True):
            of_name = backends._operation_registries.get(each.fla.registry)
            registry = of_name or backends._function_registries[inspect.unwrap(function)]
            del registry._backends[fla.BACKEND]


def arguments_of(problem: Problem, seed: int, lengths: tuple[int, ...] = (70,), device: str = "cpu") -> dict[str, Any]:
    """Arguments of chunk_kda, which FLA's takes by the same names."""
    varlen = len(lengths) > 1
    return operator_arguments(draw_call(problem, lengths, seed, varlen=varlen, device=device))


def assert_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def record_served(patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments that reached our operator through FLA."""
    calls: list[dict[str, Any]] = []

    def record(operator: Any, arguments: dict[str, Any]) -> Any:
        calls.append(arguments)
        return operator.call(**arguments)

    patch.setattr(fla, "_serve", record)
    return calls
