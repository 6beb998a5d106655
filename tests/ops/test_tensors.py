"""Tensors that are not plain: the operator serves them, or they are refused with a sentence; nothing crashes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import SMALL, TENSORS, draw_call, forget_compilers, operator_arguments
from support.operator_cases import NO_MEMORY, Arguments, assert_sentence
from support.views import scatter
from torch import Tensor
from torch.autograd import forward_ad

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def plain_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a plain call went through the operator")

    monkeypatch.setattr("kda_tl.ops.entry._run_watched", fail)


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
        assert one.dtype == mixed[name].dtype and torch.equal(one, other.to(one.dtype))  # fp16 ends at 2^-24


def test_no_tokens_give_zeros(seed: int) -> None:
    """To every tensor that wants a gradient, though none plays a part."""
    arguments = operator_arguments(draw_call(SMALL, (0, 0), seed))
    for name in TENSORS:
        x = arguments[name].clone().requires_grad_()
        o, _ = chunk_kda(**{**arguments, name: x})
        o.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x)), name
