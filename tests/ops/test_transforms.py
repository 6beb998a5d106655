"""Fake tensors, tracing, modes, subclasses and transforms: the operator is one node, or says what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import TENSORS
from support.operator_cases import NO_MEMORY, Arguments, assert_sentence, of_q
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError, UnsupportedError
from kda_tl.ops.kda import chunk_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


# What goes through the operator


def test_fake_tensors(leaves: Arguments) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 3 s

    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in leaves.items()}
    o, ht = chunk_kda(**fakes)
    assert all(isinstance(x, FakeTensor) for x in (o, ht))
    assert o.shape == fakes["v"].shape and ht.shape == fakes["initial_state"].shape
    o.sum().backward()
    for name in TENSORS:
        assert isinstance(fakes[name].grad, FakeTensor) and fakes[name].grad.shape == fakes[name].shape
    with mode, torch.no_grad():
        assert isinstance(chunk_kda(**fakes)[0], FakeTensor)
    for spoiled in ({"k": fakes["k"][:, :3]}, {"initial_state": fakes["initial_state"][:, :1]}, {"scale": "1"}):
        with pytest.raises(InputError, match="must"):
            chunk_kda(**fakes | spoiled)


@pytest.mark.parametrize("how", ({}, {"pre_dispatch": True}, {"tracing_mode": "symbolic"}), ids=str)
def test_make_fx(how: dict[str, Any], a: Arguments) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    others = {name: x for name, x in a.items() if name not in TENSORS}

    def run(*tensors: Tensor) -> Any:
        return chunk_kda(**dict(zip(TENSORS, tensors, strict=True)), **others)

    graph = make_fx(run, **how)(*(a[name] for name in TENSORS))
    assert [str(n.target) for n in graph.graph.nodes if "kda" in str(n.target)] == ["kda_tl.chunk_kda.default"]
    tensors = [a[name] * 0.9 for name in TENSORS]
    for one, other in zip(graph(*tensors), run(*tensors), strict=True):
        assert torch.equal(one, other)


def test_make_fx_of_gradients(leaves: Arguments) -> None:
    """Of a call and its backward, and of the backward of a call that was made before."""
    from torch.fx.experimental.proxy_tensor import make_fx

    run, do = of_q(leaves), torch.randn_like(leaves["v"])
    o = run(leaves["q"])
    functions: tuple[tuple[Callable[..., Any], int], ...] = (
        (lambda do: torch.autograd.grad(run(leaves["q"]), leaves["q"], do)[0], 2),
        (lambda do: torch.autograd.grad(o, leaves["q"], do, retain_graph=True)[0], 1),
    )
    for function, nodes in functions:
        graph = make_fx(function)(do)
        assert sum("kda_tl" in str(node.target) for node in graph.graph.nodes) == nodes
        assert torch.equal(graph(do * 3), function(do * 3))


def test_modes_see_one_call(leaves: Arguments) -> None:
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    class Look(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **kwargs or {})

    o, _ = chunk_kda(**leaves)
    (expected,) = torch.autograd.grad(o.sum(), leaves["q"])
    with Watch():
        found, _ = chunk_kda(**leaves)
        (grad,) = torch.autograd.grad(found.sum(), leaves["q"])
    assert torch.equal(found, o) and torch.equal(grad, expected)
    assert [name for name in seen if "kda" in name] == ["kda_tl.chunk_kda.default", "kda_tl.chunk_kda_backward.default"]
    seen.clear()
    with Look():
        assert torch.equal(chunk_kda(**leaves)[0], o)
    assert "kda_tl.chunk_kda.default" in seen
    with torch.no_grad():
        assert torch.equal(torch.func.functionalize(of_q(leaves))(leaves["q"]), o)


class Named(Tensor):
    """A subclass as users write them."""


class Boxed(Tensor):
    """A wrapper: its own memory is none."""

    @staticmethod
    def __new__(cls, x: Tensor) -> Boxed:
        box = Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        box.inner = x
        return box

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        open_ = partial(torch.utils._pytree.tree_map_only, cls, lambda x: x.inner)
        return func(*open_(args), **open_(kwargs or {}))


def test_subclasses(a: Arguments, leaves: Arguments) -> None:
    expected, _ = chunk_kda(**a)
    o, _ = chunk_kda(**{**a, "q": a["q"].as_subclass(Named)})
    assert type(o) is Named and torch.equal(o.as_subclass(Tensor), expected)
    assert torch.equal(chunk_kda(**{**a, "q": Boxed(a["q"])})[0], expected)
    o, _ = chunk_kda(**leaves)
    do = torch.randn_like(o)
    grad = partial(torch.autograd.grad, o, leaves["q"], retain_graph=True)
    assert torch.equal(grad(Boxed(do))[0], grad(do)[0])


def test_second_derivative_of_the_operator_is_refused(leaves: Arguments) -> None:
    o, _ = chunk_kda(**{**leaves, "q": leaves["q"].as_subclass(Named)})
    (dk,) = torch.autograd.grad(o.sum(), leaves["k"], create_graph=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        dk.sum().backward()


# What is refused


def jvp(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.func.jvp(f, (q,), (torch.ones_like(q),))


def jacobian(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    return torch.autograd.functional.jacobian(f, q, vectorize=True, strategy="forward-mode")


def dual(f: Callable[[Tensor], Tensor], q: Tensor) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(q, torch.ones_like(q)))


TRANSFORMS: dict[str, tuple[Callable[..., Any], str]] = {
    "vmap": (lambda f, q: torch.func.vmap(f)(q[None]), "vmap transform: put what it maps over into the batch"),
    "vmap of others": (lambda f, q: torch.func.vmap(lambda x: x + f(q).sum())(torch.ones(3)), "vmap transform"),
    "jvp": (jvp, "jvp transform"),
    "grad": (lambda f, q: torch.func.grad(lambda x: f(x).sum())(q), "grad transform: use backward"),
    "vjp": (torch.func.vjp, "grad transform"),
    "dual": (dual, "q has a forward-mode tangent"),
    "dual and gradients": (lambda f, q: dual(f, q.clone().requires_grad_()), "q has a forward-mode tangent"),
    "jacobian": (jacobian, "q has a forward-mode tangent"),
    "functionalize": (
        lambda f, q: torch.func.functionalize(f)(q),
        "functionalize transform: call it under torch.no_grad",
    ),
    "trace": (lambda f, q: torch.jit.trace(f, q), "torch.jit.trace cannot record kernels: use torch.compile"),
    "old vmap": (lambda f, q: torch._vmap_internals._vmap(f)(q[None]), NO_MEMORY),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
@pytest.mark.parametrize("case", TRANSFORMS)
def test_refused_transforms(case: str, a: Arguments) -> None:
    transform, sentence = TRANSFORMS[case]
    with pytest.raises((InputError, UnsupportedError), match=sentence) as caught:
        transform(of_q(a), a["q"])
    assert_sentence(caught.value)


def test_refused_transforms_of_the_backward(leaves: Arguments) -> None:
    o, _ = chunk_kda(**leaves)
    grad = partial(torch.autograd.grad, o, leaves["q"], retain_graph=True)
    with pytest.raises(InputError, match=f"the gradient of o {NO_MEMORY}|the gradient of o must be"):
        grad(torch.randn(3, *o.shape), is_grads_batched=True)
    with pytest.raises(UnsupportedError, match="vmap transform"):
        torch.func.vmap(grad)(torch.randn(3, *o.shape))
    with pytest.raises(UnsupportedError, match="the gradient of o has a forward-mode tangent"):
        dual(grad, torch.ones_like(o))
