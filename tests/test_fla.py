"""Under flash-linear-attention: what we serve there, what we decline and why, and that FLA gets our numbers.

FLA needs Triton even to be imported, so most tests run on a stub of its registry; those of the fixture ``entry`` run on
the real one as well where it can be imported. On a GPU, FLA's own kernels and layer.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import OPERATOR
from support.fla_stub import (
    ORDERS,
    SMALL,
    StubBackend,
    StubRegistry,
    arguments_of,
    assert_same,
    install_stub,
    record_served,
    registered,
    stub_chunk_kda,
    why_not_importable,
)

import kda_tl
from kda_tl import fla
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.ops import load_all
from kda_tl.ops.kda import chunk_kda
from kda_tl.runtime.dispatch import PlanSelection

PACKED = (3, 0, 70, 1)
needs_compiler = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++")
ORDER = ORDERS["chunk_kda"]
SERVICE = fla.Service(OPERATOR, ORDER)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubRegistry:
    return install_stub(monkeypatch)


@pytest.fixture(params=("stub", "real"))
def entry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """FLA's ``chunk_kda`` with our backend, which is gone after the test."""
    if request.param == "stub":
        install_stub(monkeypatch)
    elif reason := why_not_importable():
        pytest.skip(reason)
    with registered() as function:
        yield function


# Registration


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return record_served(monkeypatch)


def test_is_an_attribute_before_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(kda_tl, "fla")
    assert kda_tl.fla is fla


def test_registering_twice_is_registering_once(stub: StubRegistry) -> None:
    for _ in range(2):
        fla.register()
        assert list(stub.backends) == ["kda_tl"]


@needs_compiler
def test_is_asked_before_the_others(stub: StubRegistry, served: list[Any], seed: int) -> None:
    other = StubBackend()
    other.priority, other.__dict__["chunk_kda"] = 3, lambda *args, **kwargs: "another"  # FlashKDA's priority
    stub.backends["other"] = other
    fla.register()
    function = sys.modules["fla.ops.kda.chunk"].chunk_kda
    arguments = arguments_of(SMALL, seed)
    assert len(function(**arguments)) == 2 and len(served) == 1
    assert function(**arguments, use_graph=True) == "another" and len(served) == 1


def test_real_signatures_are_known(entry: Callable[..., Any]) -> None:
    for name, order in ORDERS.items():
        function = getattr(sys.modules[fla.list_served()[name].fla.module], name)
        assert tuple(inspect.signature(function).parameters) == (*order, "kwargs")


@needs_compiler
@pytest.mark.parametrize("name", load_all())
@pytest.mark.usefixtures("entry")
def test_every_operator_is_served(name: str, served: list[Any], seed: int) -> None:
    """By FLA's own function: arguments of FLA's that change nothing are taken, those that we do not have declined."""
    operator = load_all()[name]
    problem = replace(SMALL, gate="softplus", operator=name, scalar_gate=operator.scalar_gate)
    arguments = arguments_of(problem, seed, PACKED)
    function = getattr(sys.modules[operator.fla.module], name)
    nothing = {"chunk_kda": {"max_num_seqs": 3}, "chunk_gated_delta_rule": {"chunk_indices": 3}}[name]
    assert_same(function(**arguments, **nothing), operator.call(**arguments))
    assert len(served) == 1
    service = fla.Service(operator, ORDERS[name])
    for argument, reason in operator.fla.declined.items():
        assert service.verify(**arguments, **{argument: object()}) == (not reason, reason or None)


def test_without_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(UnsupportedError, match="not installed: `pip install flash-linear-attention`"):
        kda_tl.fla.register()


def test_fla_without_its_dependencies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("__version__ = '0.6.0'\n")
    (tmp_path / "fla" / "backends.py").write_text("import no_such_triton\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=r"FLA 0.6.0 cannot be imported \(No module named 'no_such_triton'\)"):
        fla.register()
    for name in ("fla", "fla.backends"):  # what this test imported goes with it
        sys.modules.pop(name, None)


def test_older_fla_has_no_registry(stub: StubRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.backends", types.ModuleType("fla.backends"))
    sys.modules["fla"].__dict__["__version__"] = "0.5.0"
    with pytest.raises(UnsupportedError, match=r"FLA 0\.5\.0 has no registry.*install flash-linear-attention 0\.6\.0"):
        fla.register()


def test_function_without_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk_kda(*args: Any) -> None: ...

    chunk_kda.__dict__["__signature__"] = inspect.signature(stub_chunk_kda)
    install_stub(monkeypatch, chunk_kda=chunk_kda)
    with pytest.raises(UnsupportedError, match="no registry of backends for chunk_kda"):
        fla.register()


def test_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_stub(monkeypatch, chunk_kda=lambda q, k, v, beta, g: None)
    with pytest.raises(UnsupportedError, match="takes other arguments than FLA 0.6.0"):
        fla.register()


def test_fla_that_asks_no_backend_is_told(stub: StubRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    with pytest.warns(KdaTlWarning, match="FLA_DISABLE_BACKEND_DISPATCH=1") as warned:
        fla.register()
    assert warned[0].filename == __file__


# Calls that we serve


@needs_compiler
@pytest.mark.parametrize("lengths", ((70,), PACKED), ids=("dense", "packed"))
def test_gives_our_numbers(entry: Callable[..., Any], served: list[Any], lengths: tuple[int, ...], seed: int) -> None:
    arguments = arguments_of(SMALL, seed, lengths)
    ours = chunk_kda(**arguments)
    assert_same(entry(**arguments), ours)
    in_order = [arguments.pop(name) for name in ORDER[:14]]
    assert_same(entry(*in_order, **arguments), ours)
    assert len(served) == 2


@needs_compiler
@pytest.mark.parametrize("given", ({}, {"chunk_size": 64}), ids=("unset", "64"))
def test_intermediate_states(entry: Callable[..., Any], served: list[Any], given: dict[str, int], seed: int) -> None:
    """Before every 64 tokens unless told otherwise, as FLA's."""
    arguments = arguments_of(SMALL, seed, (130, 5)) | {"return_intermediate_states": True}
    with torch.inference_mode():
        found = entry(**arguments, **given)
    assert_same(found, chunk_kda(**arguments, chunk_size=64))
    assert found[2].shape[:2] == (1, 4) and len(served) == 1


def test_every_argument_arrives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "_serve", lambda operator, arguments: arguments)
    order = ORDER
    further = {"A_log": "A", "dt_bias": "b", "chunk_size": 32}
    only_theirs = {"cp_context", "use_graph", "max_num_seqs"}
    expected = {name: name for name in order if name not in only_theirs} | further
    for n in (0, 5, len(order)):
        assert SERVICE.run(*order[:n], **{name: name for name in order[n:]}, **further) == expected
    assert expected.keys() == inspect.signature(chunk_kda).parameters.keys() - {"transpose_state_layout"}


GATES = {
    "softplus": {"gate": "softplus", "beta": "sigmoid2", "has_dt_bias": False},
    "log": {"gate": "log", "beta": "plain", "has_A_log": False, "has_dt_bias": False, "state_v_first": False},
    "safe": {"has_A_log": False, "initial_state": False, "final_state": False, "l2norm": False},
    "wide": {"K": 256, "V": 256, "dtype": "bf16", "g_dtype": "fp32"},
}


@pytest.mark.parametrize("name", GATES)
def test_accepts(name: str, seed: int) -> None:
    arguments = arguments_of(replace(SMALL, **GATES[name]), seed)
    assert SERVICE.verify(**arguments) == (True, None)
    assert SERVICE.verify(**arguments | {"chunk_size": 32, "output_final_state": None}) == (True, None)


@needs_compiler
def test_what_makes_no_difference(entry: Callable[..., Any], served: list[Any], seed: int) -> None:
    arguments = arguments_of(SMALL, seed)
    ours = chunk_kda(**arguments)
    for hint in ({"disable_recompute": True}, {"max_num_seqs": 7}, {"cp_context": None}, {"use_graph": False}):
        assert_same(entry(**arguments, **hint), ours)
    assert len(served) == 4


@needs_compiler
def test_old_name_of_state_v_first(entry: Callable[..., Any], served: list[Any], seed: int) -> None:
    arguments = arguments_of(SMALL, seed)
    ours = chunk_kda(**arguments)
    arguments["transpose_state_layout"] = arguments.pop("state_v_first")
    with pytest.warns(DeprecationWarning, match="old name of state_v_first: pass that") as warned:
        assert_same(entry(**arguments), ours)
    assert len(served) == len(warned) == 1


@needs_compiler
def test_gradients_on_the_cpu(entry: Callable[..., Any], served: list[Any], seed: int) -> None:
    """The same whether intermediates are kept or not."""
    grads = []
    for hint in (False, True):
        arguments = arguments_of(SMALL, seed)
        arguments["g"].requires_grad_()
        o, ht = entry(**arguments, disable_recompute=hint)
        grads += torch.autograd.grad((o, ht), arguments["g"], (o, ht))
    assert torch.equal(*grads) and [call["disable_recompute"] for call in served] == [False, True]


def test_on_the_cpu_the_reference_serves(
    stub: StubRegistry, served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLA has no kernels there at all."""
    no_compiler(monkeypatch)
    assert SERVICE.verify(**arguments_of(SMALL, seed)) == (True, None)


def test_verifier_leaves_lengths_on_the_device(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Reading them waits for the device; the call itself does, once."""
    arguments = arguments_of(SMALL, seed, PACKED)

    def read(self: torch.Tensor) -> Any:
        raise RuntimeError("read back")

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    assert SERVICE.verify(**arguments) == (True, None)


def test_what_only_the_lengths_tell_is_our_error(stub: StubRegistry, seed: int) -> None:
    fla.register()
    arguments = arguments_of(SMALL, seed, PACKED)
    for bad in ([0, 6, 4, 4, 74], [[0, 3, 3, 73, 74]]):
        with pytest.raises(InputError, match="cu_seqlens"):
            sys.modules["fla.ops.kda.chunk"].chunk_kda(**arguments | {"cu_seqlens": torch.tensor(bad)})


# Calls that we decline


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    choice = PlanSelection(plan=None, step="reference", source="reference", reason="no compiler found")
    patch.setattr(fla, "select_cached", lambda *args: choice)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*shape, **options)


DECLINED: dict[str, tuple[dict[str, Any], str]] = {
    "cp_context": ({"cp_context": object()}, "no context parallelism: leave cp_context out"),
    "use_graph": ({"use_graph": True}, "use_graph=True is FLA's own"),
    "unknown keywords": ({"head_first": True, "a": 1}, "does not know the keywords a, head_first"),
    "both names": ({"transpose_state_layout": True}, "pass state_v_first without .*, its old name"),
    "dtype": ({"q": zeros(1, 70, 1, 32, dtype=torch.float64)}, "q must be bfloat16, float16 or float32"),
    "mixed dtypes": ({"k": zeros(1, 70, 1, 32, dtype=torch.bfloat16)}, "k must have the dtype of q"),
    "state dtype": ({"initial_state": zeros(1, 2, 16, 32, dtype=torch.int32)}, "initial_state must be a float tensor"),
    "K": (
        {"q": zeros(1, 70, 1, 257), "k": zeros(1, 70, 1, 257), "g": zeros(1, 70, 2, 257), "dt_bias": None},
        "K=257 is not supported: pass 256 or less",
    ),
    "V": ({"v": zeros(1, 70, 2, 513), "initial_state": None}, "V=513 is not supported: pass 512 or less"),
    "lower_bound": ({"safe_gate": False, "lower_bound": -9.0}, r"lower_bound must be in \[-5, 0\), got -9"),
    "chunk_size": ({"chunk_size": 48}, "chunk_size must be one of"),
    "device": ({"q": zeros(1, 70, 1, 32, device="meta")}, "on a CUDA device or the CPU, got meta"),
    "no queries": ({"q": None}, "q must be a torch.Tensor"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_declines_with_a_reason(stub: StubRegistry, served: list[Any], case: str, seed: int) -> None:
    changes, sentence = DECLINED[case]
    fla.register()
    function = sys.modules["fla.ops.kda.chunk"].chunk_kda
    assert function(**arguments_of(SMALL, seed) | changes) == "FLA's own" and not served
    (reason,) = stub.rejected
    assert reason and re.search(sentence, reason), reason


def test_declines_arguments_given_twice(seed: int) -> None:
    arguments = arguments_of(SMALL, seed)
    for args in ((arguments["q"],), tuple(range(23))):
        accepted, reason = SERVICE.verify(*args, **arguments)
        assert not accepted and "positional" in str(reason)


def test_declines_intermediate_states_with_gradients(seed: int) -> None:
    arguments = arguments_of(SMALL, seed) | {"return_intermediate_states": True}
    arguments["v"].requires_grad_()
    accepted, reason = SERVICE.verify(**arguments)
    assert not accepted and "carry no gradient" in str(reason)
    with torch.no_grad():
        assert SERVICE.verify(**arguments) == (True, None)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, seed: int) -> dict[str, Any]:
    monkeypatch.setattr("kda_tl.ops.call.cuda_device", lambda index: cpu_device())
    arguments = arguments_of(SMALL, seed)
    return arguments | {"q": arguments["q"].as_subclass(OnGpu)}


def test_accepts_gradients_on_a_gpu(on_gpu: dict[str, Any]) -> None:
    on_gpu["A_log"].requires_grad_()
    assert SERVICE.verify(**on_gpu) == (True, None)


def test_declines_without_a_compiler_on_a_gpu(on_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch)
    accepted, reason = SERVICE.verify(**on_gpu)
    assert not accepted and "no kernels for this GPU: no compiler found: install" in str(reason)


@needs_compiler
def test_switch_is_read_at_every_call(
    stub: StubRegistry, served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fla.register()
    function = sys.modules["fla.ops.kda.chunk"].chunk_kda
    arguments = arguments_of(SMALL, seed)
    for value, calls in (("1", 1), ("0", 1), ("1", 2), ("0", 2)):
        monkeypatch.setenv("KDA_TL_FLA", value)
        assert (function(**arguments) == "FLA's own") == (value == "0") and len(served) == calls
