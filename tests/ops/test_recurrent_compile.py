"""Recurrent operators inside torch.compile, tracers and modes, which must know what they write; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.decode_cases import Args, ints
from support.operator_cases import CPU, NO_MEMORY, assert_sentence
from support.small_steps import TREE, good, packed, scalar, verify, zeros
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kda_tl.core.device import find_compiler
from kda_tl.errors import InputError, UnsupportedError
from kda_tl.ops.packed_decode import packed_decode
from kda_tl.ops.recurrent_entry import RECURRENT
from kda_tl.ops.recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule
from kda_tl.ops.recurrent_kda import fused_recurrent_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]
WRITTEN = ("initial_state", "intermediate_states", "out")
NO_BACKWARD = "has no backward, it serves: train with the chunk operator, or call it under torch.no_grad"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before."""
    torch.compiler.reset()
    yield


def copy(a: Args) -> Args:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in a.items()}


CALLS: dict[str, tuple[Callable[..., Any], Args]] = {
    "in place": (fused_recurrent_kda, good()),
    "gdn in place": (fused_recurrent_gated_delta_rule, scalar()),
    "out": (fused_recurrent_kda, good(out=zeros(2, 3, 4, 6))),
    "verify": (fused_recurrent_kda, verify(output_final_state=True, **TREE)),
    "packed": (fused_recurrent_kda, packed(ints(0, 4, 5), inplace_final_state=False, output_final_state=True)),
    "split": (
        fused_recurrent_kda,
        good(inplace_final_state=False, output_final_state=True, output_state_indices=ints(0, 1)),
    ),
}


def assert_same(function: Callable[..., Any], compiled: Callable[..., Any], a: Args) -> None:
    """A compiled function gives what the other gives, and writes what it writes."""
    one, other = copy(a), copy(a)
    results, expected = compiled(**one), function(**other)
    for x, y in zip(results, expected, strict=True):
        assert (x is None) == (y is None) and (x is None or torch.equal(x, y))
    for name in WRITTEN:
        assert a.get(name) is None or torch.equal(one[name], other[name]), name
    if a.get("inplace_final_state"):
        assert results[1] is one["initial_state"]
    if a.get("out") is not None:
        assert results[0].data_ptr() == one["out"].data_ptr()


@pytest.mark.rest(draws=3)
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("case", CALLS)
def test_compiled_calls(case: str, backend: str) -> None:
    """With slots that change from call to call, of one graph."""
    function, a = CALLS[case]
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for slots in ((4, 2), (0, 5), (-1, 3)):
        assert_same(function, compiled, a | {"ssm_state_indices": ints(*slots)})


def test_compiled_steps_see_what_the_step_before_wrote() -> None:
    """Two layers' calls on one pool in one graph, and a read of it between them."""

    def run(a: Args) -> tuple[Tensor, Tensor, Tensor]:
        pool = a["initial_state"]
        before, _ = fused_recurrent_kda(**a)
        between = pool * 1
        after, _ = fused_recurrent_kda(**a | {"ssm_state_indices": a["ssm_state_indices"].flip(0)})
        return before, between, after

    one, other = copy(good()), copy(good())
    for x, y in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(one), run(other), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(one["initial_state"], other["initial_state"])


def test_compiled_packed_decode() -> None:
    def run(pool: Tensor, out: Tensor, slots: Tensor) -> Tensor:
        return packed_decode(mixed, gate, step, rate, None, None, pool, out, slots)

    rng = torch.Generator().manual_seed(0)
    mixed, gate, step, rate, first = (
        torch.randn(*shape, generator=rng) for shape in ((2, 56), (2, 32), (2, 4), (4,), (7, 4, 6, 8))
    )
    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        pool, out = first.clone(), zeros(2, 1, 4, 6)
        o = [function(pool, out, ints(*slots)).clone() for slots in ((4, 2), (2, 6))]
        results.append((*o, pool, out))
    assert all(map(torch.equal, *results))


def test_registered_operators_keep_their_word() -> None:
    """Schema, what they write, and fake shapes, as PyTorch checks them."""
    for function, a in CALLS.values():
        operator = RECURRENT[function.__name__]
        bound = operator.bind(**copy({"out": zeros(*a["v"].shape)} | a))
        final = zeros(2, 4, 8, 6) if a.get("output_final_state") else None
        values = tuple(getattr(bound, name) for name in operator.arguments)
        torch.library.opcheck(getattr(torch.ops.kda_tl, operator.name), (*values, final))


@pytest.mark.parametrize("how", ({}, {"pre_dispatch": True}, {"tracing_mode": "symbolic"}), ids=str)
def test_make_fx(how: dict[str, Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    a = good()
    names = [name for name, x in a.items() if isinstance(x, Tensor)]
    others = {name: x for name, x in a.items() if name not in names}

    def run(*tensors: Tensor) -> Any:
        return fused_recurrent_kda(**dict(zip(names, tensors, strict=True)), **others)

    graph = make_fx(run, **how)(*(copy(a)[name] for name in names))
    found = [str(node.target) for node in graph.graph.nodes if "kda" in str(node.target)]
    assert found == ["kda_tl.fused_recurrent_kda.default"]
    one, other = copy(a | {"ssm_state_indices": ints(0, 6)}), copy(a | {"ssm_state_indices": ints(0, 6)})
    assert torch.equal(graph(*(one[name] for name in names))[0], run(*(other[name] for name in names))[0])
    assert torch.equal(one["initial_state"], other["initial_state"])


def test_export() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, slots: Tensor) -> Any:
            flags = {"inplace_final_state": True, "ssm_state_indices": slots}
            return fused_recurrent_kda(q, k, v, g, beta, initial_state=pool, **flags)[0]

    a = good()
    names = ("q", "k", "v", "g", "beta", "initial_state", "ssm_state_indices")
    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(copy(a)[name] for name in names))
        for slots in ((4, 2), (1, 6)):
            one, other = (copy(a | {"ssm_state_indices": ints(*slots)}) for _ in range(2))
            found = program.module()(*(one[name] for name in names))
            assert torch.equal(found, Layer()(*(other[name] for name in names)))
            assert torch.equal(one["initial_state"], other["initial_state"])


def test_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode()
    for function, a in CALLS.values():
        fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in a.items()}
        for found, real in zip(function(**fakes), function(**copy(a)), strict=True):
            assert (found is None) == (real is None)
            if real is not None:
                assert isinstance(found, FakeTensor)
                assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())
        with pytest.raises(InputError, match="must have the shape"):
            function(**fakes | {"k": fakes["k"][:, :, :1]})


def test_modes_see_one_call() -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    with Watch():
        fused_recurrent_kda(**copy(good()))
    assert [name for name in seen if "kda" in name] == ["kda_tl.fused_recurrent_kda.default"]


def test_plain_calls_go_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    a = good()
    expected = fused_recurrent_kda(**copy(a))[0]
    monkeypatch.setattr("kda_tl.ops.recurrent_entry._customs", {})  # a call through the operator would fail
    assert torch.equal(fused_recurrent_kda(**copy(a) | {"A_log": torch.nn.Parameter(a["A_log"])})[0], expected)
    with torch.inference_mode():
        assert torch.equal(fused_recurrent_kda(**copy(a))[0], expected)
    with torch.device("cpu"), forward_ad.dual_level():
        assert torch.equal(fused_recurrent_kda(**copy(a))[0], expected)


# Gradients


class Named(Tensor):
    """A subclass as users write them."""


@pytest.mark.rest(draws=4)
@pytest.mark.parametrize("how", ("plain", "subclass", "eager", "aot_eager"))
@pytest.mark.parametrize("name", ("q", "A_log", "initial_state"))
def test_a_gradient_that_is_asked_for(name: str, how: str) -> None:
    """Refused where it is asked for, not before: a layer's weights may want gradients while it serves."""
    a = copy(verify())
    a[name].requires_grad_()
    if how == "subclass":
        a["v"] = a["v"].as_subclass(Named)
    function = (
        torch.compile(fused_recurrent_kda, backend=how, fullgraph=True) if "eager" in how else fused_recurrent_kda
    )
    expected, _ = fused_recurrent_kda(**copy(verify()))
    o, _ = function(**a)
    assert o.requires_grad and torch.equal(o.detach().as_subclass(Tensor), expected)
    with pytest.raises(UnsupportedError, match=NO_BACKWARD) as caught:
        o.sum().backward()
    assert_sentence(caught.value)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            o, _ = function(**a)
        assert not o.requires_grad and torch.equal(o.as_subclass(Tensor), expected)


def test_no_gradient_is_wanted_of_a_pool_that_is_written() -> None:
    a = copy(good())
    a["q"].requires_grad_()
    o, pool = fused_recurrent_kda(**a)
    assert o.requires_grad and not pool.requires_grad


# What is refused


def dual(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q, torch.ones_like(q)))


TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "vmap": (lambda f, q: torch.func.vmap(f)(q[None]), "vmap transform: put what it maps over into the batch"),
    "jvp": (lambda f, q: torch.func.jvp(f, (q,), (q,)), "jvp transform"),
    "grad": (lambda f, q: torch.func.grad(lambda x: f(x).sum())(q), "grad transform"),
    "dual": (dual, "q has a forward-mode tangent"),
    "functionalize": (lambda f, q: torch.func.functionalize(f)(q), "functionalize transform: call it under torch.no"),
    "trace": (lambda f, q: torch.jit.trace(f, q), "torch.jit.trace cannot record kernels: use torch.compile"),
    "old vmap": (lambda f, q: torch._vmap_internals._vmap(f)(q[None]), NO_MEMORY),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("case", TRANSFORMS)
def test_refused_transforms(case: str) -> None:
    transform, sentence = TRANSFORMS[case]
    a = copy(good())
    with pytest.raises((InputError, UnsupportedError), match=sentence) as caught:
        transform(lambda q: fused_recurrent_kda(**a | {"q": q})[0], a["q"])
    assert_sentence(caught.value)


def test_functionalize_without_gradients() -> None:
    a = copy(good())
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"use torch.compile or torch.export") as caught:
        torch.func.functionalize(lambda q: fused_recurrent_kda(**a | {"q": q})[0])(a["q"])
    assert_sentence(caught.value)


def test_distributed_tensors() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        spread = partial(DTensor.from_local, device_mesh=init_device_mesh("cpu", (1,)), placements=[Replicate()])
        for name in ("q", "A_log", "initial_state"):
            a = copy(good())
            with pytest.raises(InputError, match=rf"{name} is a DTensor: pass local tensors, x.to_local\(\)"):
                fused_recurrent_kda(**a | {name: spread(a[name])})
    finally:
        dist.destroy_process_group()
