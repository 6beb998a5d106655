"""Tensors that are not plain: the operator serves them, or they are refused with a sentence; nothing crashes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from cases import SMALL, TENSORS, draw_call, forget_compilers, operator_arguments, scatter
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError, KdaTlError, UnsupportedError
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda

pytestmark = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++")

Arguments = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
def plain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a plain call went through the operator")

    monkeypatch.setattr("kda_tl.ops.entry._run_watched", fail)


def of_q(a: Arguments) -> Callable[[Tensor], Tensor]:
    return lambda q: chunk_kda(**{**a, "q": q})[0]


def assert_sentence(error: KdaTlError) -> None:
    text = str(error)
    assert "\n" not in text and text.count(" ") >= 6 and text.endswith("."), text


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def freed_view(x: Tensor) -> Tensor:
    whole = torch.zeros(x.numel() + 16)
    view = whole[16:].view(x.shape)
    whole.untyped_storage().resize_(0)
    return view


def freed_and_scattered(x: Tensor) -> Tensor:
    x = scatter(x)
    x.untyped_storage().resize_(0)
    return x


def cut(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(x.nbytes - 4)
    return x


def leaked(transform: Callable[..., Any], x: Tensor) -> Tensor:
    """What a transform's function saw, after the transform is over."""
    seen: list[Tensor] = []
    transform(lambda y: seen.append(y[0] if transform is torch.func.grad else y) or y.sum())(x[None])
    return seen[0]


NO_MEMORY = "has no memory of its own"
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (lambda x: x.to_sparse(), "dense tensor, got one of layout torch.sparse_coo: pass x.to_dense"),
    "mkldnn": (lambda x: x.to_mkldnn(), "dense tensor, got one of layout torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "is a nested tensor: pack its sequences"),
    "zero": (lambda x: torch._efficientzerotensor(x.shape), NO_MEMORY),
    "functional": (torch._to_functional_tensor, NO_MEMORY),
    "freed": (freed, NO_MEMORY),
    "freed view": (freed_view, NO_MEMORY),
    "freed and scattered": (freed_and_scattered, NO_MEMORY),
    "cut": (cut, NO_MEMORY),
    "vmap is over": (partial(leaked, torch.func.vmap), NO_MEMORY),
    "grad is over": (partial(leaked, torch.func.grad), NO_MEMORY),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("q", "initial_state"))
def test_refused_kinds(kind: str, name: str, a: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels and, where there is no compiler, by the recurrence; with gradients and without."""
    spoil, sentence = KINDS[kind]
    spoiled = {**a, name: spoil(a[name])}
    for arguments in (spoiled, {**spoiled, "v": a["v"].clone().requires_grad_()}):
        with pytest.raises(InputError, match=f"{name}.*{sentence}" if name == "q" else sentence) as caught:
            chunk_kda(**arguments)
        assert_sentence(caught.value)
    forget_compilers(monkeypatch)
    with pytest.raises(InputError, match=sentence):
        chunk_kda(**spoiled)


def test_negative_bit(a: Arguments) -> None:
    expected = chunk_kda(**a)
    for name in TENSORS:
        for turn in (negated, lambda x: scatter(negated(x))):
            for one, other in zip(chunk_kda(**{**a, name: turn(a[name])}), expected, strict=True):
                assert torch.equal(one, other), name


def test_incoming_gradients(leaves: Arguments) -> None:
    """The same care as inputs: signs, kinds, memory, strides."""
    inputs = [leaves[name] for name in TENSORS]
    o, ht = chunk_kda(**leaves)
    do, dht = torch.randn_like(o), torch.randn_like(ht)
    grad = partial(torch.autograd.grad, (o, ht), inputs, retain_graph=True)
    expected = grad((do, dht))
    for seeds in ((negated(do), dht), (do, negated(dht)), (scatter(negated(do)), scatter(dht))):
        assert all(map(torch.equal, grad(seeds), expected))
    one = grad((torch.tensor(1.0).expand_as(o), dht))
    assert all(map(torch.equal, one, grad((torch.ones_like(o), dht))))
    for kind in ("sparse", "zero", "freed", "freed view", "cut"):
        spoil, sentence = KINDS[kind]
        for seeds, name in (((spoil(do), dht), "o"), ((do, spoil(dht)), "the final state")):
            with pytest.raises(InputError, match=f"the gradient of {name}.*{sentence}"):
                grad(seeds)


@pytest.mark.parametrize("disable_recompute", (False, True))
def test_saved_tensors(disable_recompute: bool, leaves: Arguments) -> None:
    """Hooks give back what they like."""

    def gradients(unpack: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            o, ht = chunk_kda(**leaves, disable_recompute=disable_recompute)
        return torch.autograd.grad((o, ht), [leaves[name] for name in TENSORS], (o.detach(), ht.detach()))

    expected = gradients(lambda x: x)
    for same in (negated, scatter):
        assert all(map(torch.equal, gradients(same), expected))
    for other in (lambda x: x[..., :1], lambda x: x.double()):
        with pytest.raises(InputError, match=r"q was torch.float32 \[1, 20, 1, 32\] on cpu in the forward"):
            gradients(other)
    if disable_recompute:
        inputs = {leaves[name].data_ptr() for name in TENSORS}
        with pytest.raises(InputError, match="in the forward, but autograd gives back"):
            gradients(lambda x: x if x.data_ptr() in inputs else x[:0])


def test_inputs_replaced_before_the_backward(leaves: Arguments) -> None:
    """As FSDP does, behind autograd's back."""
    o, _ = chunk_kda(**leaves)
    kept = leaves["k"].data
    leaves["k"].data = kept[:, :1].clone()
    with pytest.raises(InputError, match=r"k was .* autograd gives back torch.float32 \[1, 1, 1, 32\]"):
        o.sum().backward(retain_graph=True)
    leaves["k"].data = kept
    leaves["k"].untyped_storage().resize_(0)
    with pytest.raises(InputError, match=f"k {NO_MEMORY}"):
        o.sum().backward()


def test_autograd_holds_inputs_as_its_own_only(leaves: Arguments) -> None:
    """Another reference would keep their memory where hooks offload them."""
    with forward_ad.dual_level():  # as after a second look that finds the call plain
        o, _ = chunk_kda(**leaves)
    assert not any(isinstance(value, Tensor | tuple | dict) for value in o.grad_fn.others)


# What works as if nothing were special


def test_plain_calls(a: Arguments, plain_only: None) -> None:
    class Bare(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    class Weight(torch.nn.Parameter):
        pass

    expected, _ = chunk_kda(**a)
    for kind in (torch.nn.Parameter, Weight, lambda x: x.as_subclass(Bare)):
        assert torch.equal(chunk_kda(**{**a, "A_log": kind(a["A_log"])})[0], expected)
    with torch.inference_mode():
        assert torch.equal(chunk_kda(**{**a, "q": a["q"] * 1})[0], expected)
    with torch.device("cpu"):
        assert torch.equal(chunk_kda(**a)[0], expected)
    with forward_ad.dual_level():
        assert torch.equal(chunk_kda(**a)[0], expected)
    views = {**a, "q": a["q"][:, :1].expand_as(a["q"]), "k": torch.randn(60).as_strided(a["k"].shape, (1, 1, 1, 1))}
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in views.items()}
    assert torch.equal(chunk_kda(**views)[0], chunk_kda(**copies)[0])


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


def test_distributed_tensors(leaves: Arguments) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name in ("q", "A_log"):
            spread = {**leaves, name: DTensor.from_local(leaves[name].detach(), mesh, [Replicate()])}
            for function in (chunk_kda, explain):
                with pytest.raises(InputError, match=rf"{name} is a DTensor: pass local tensors, x.to_local\(\)"):
                    function(**spread)
        o, _ = chunk_kda(**leaves)
        with pytest.raises(InputError, match="the gradient of o is a DTensor"):
            o.backward(DTensor.from_local(torch.ones_like(o), mesh, [Replicate()]))
    finally:
        dist.destroy_process_group()


# Autocast


@pytest.mark.filterwarnings("ignore:chunk_kda is slow here")
@pytest.mark.parametrize("compiler", (True, False))
def test_autocast_casts_mixed_dtypes(
    compiler: bool, leaves: Arguments, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would for a product; gradients are in the dtypes that were given."""
    if not compiler:
        forget_compilers(monkeypatch)
    half = {name: leaves[name].detach().bfloat16() for name in ("q", "k", "v")}
    mixed = {**leaves, "q": half["q"].clone().requires_grad_(), "v": leaves["v"].detach().half().requires_grad_()}
    half["v"] = mixed["v"].detach().bfloat16()
    with pytest.raises(InputError, match="k must have the dtype of q"):
        chunk_kda(**mixed)
    expected = {**leaves, **{name: x.requires_grad_() for name, x in half.items()}}
    o, _ = chunk_kda(**expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunk_kda(**mixed)
        explain(**mixed)
    assert found.dtype == torch.bfloat16 and torch.equal(found, o)
    for name in ("q", "k", "v"):
        (one,), (other,) = (
            torch.autograd.grad(x.sum(), y[name], retain_graph=True) for x, y in ((found, mixed), (o, expected))
        )
        assert one.dtype == mixed[name].dtype and torch.equal(one.bfloat16(), other)


def test_no_tokens_give_zeros(seed: int) -> None:
    """To every tensor that wants a gradient, though none plays a part."""
    arguments = operator_arguments(draw_call(SMALL, (0, 0), seed))
    for name in TENSORS:
        x = arguments[name].clone().requires_grad_()
        o, _ = chunk_kda(**{**arguments, name: x})
        o.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x)), name
