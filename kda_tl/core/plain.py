"""Which calls may read their tensors by address, and what becomes of the others.

Kernels get addresses, which say nothing of subclasses, tangents, transforms or tracers. So a call goes straight to
kernels only if every tensor is an ordinary one and nothing watches. Every other call goes through its registered
operator, which PyTorch then fakes, traces or hands to whoever watches, or it is refused. Tensors that are ordinary by
their type, but have no memory of their own, are refused where their address is taken.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import _C
from torch.autograd import forward_ad

from kda_tl.errors import InputError, UnsupportedError

Tensor = torch.Tensor
Signature = tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_count_dispatch_modes, _count_function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_are_transforms_active, _is_tracing = _C._are_functorch_transforms_active, _C._is_tracing
_LOW = 1 << 40  # an address below is an offset into memory that is not there, or deserves a second look


def is_plain(tensors: Iterable[Any]) -> bool:
    """Whether a call on these tensors, or None, may go straight to kernels. If not, ask :func:`needs_operator`.

    Every warm call asks: it takes 0.3 us for ten tensors, and may say no to a call that is plain after all.
    """
    return _PLAIN.issuperset(map(type, tensors)) and not (
        _count_dispatch_modes()
        or _count_function_modes()
        or _are_transforms_active()
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


def needs_operator(tensors: Mapping[str, Any]) -> bool:
    """Whether a call must be made through its registered operator; what is no tensor plays no part.

    Raises UnsupportedError for a transform or tracer, and InputError for a kind of tensor, that no operator can serve.
    """
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    _refuse_transforms()
    for name, x in given.items():
        if hasattr(x, "to_local"):
            raise InputError(
                f"{name} is a {type(x).__name__}: pass local tensors, x.to_local(), of whole sequences; heads and"
                " sequences are independent of each other, so either may be sharded."
            )
        check_kind(name, x)
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"{name} has a forward-mode tangent, but kernels have no forward-mode derivative: use backward(), or"
                " kda_tl.reference.recurrent_kda."
            )
    return _are_transforms_active() or _is_watched() or any(_has_own_rules(type(x)) for x in given.values())


def _refuse_transforms() -> None:
    if _is_tracing():
        raise UnsupportedError("torch.jit.trace cannot record kernels: use torch.compile or torch.export.")
    advice = {
        "Vmap": "put what it maps over into the batch B, or pack it with cu_seqlens",
        "Jvp": "kernels have no forward-mode derivative; use backward(), or kda_tl.reference.recurrent_kda",
        "Grad": "use backward() or torch.autograd.grad outside of it, or kda_tl.reference.recurrent_kda",
    }
    if torch.is_grad_enabled():
        advice["Functionalize"] = "call it under torch.no_grad(), for autograd does not reach into it"
    for transform in _C._functorch.get_interpreter_stack() or ():
        kind = transform.key().name
        if kind in advice:
            raise UnsupportedError(f"kernels cannot run inside torch.func's {kind.lower()} transform: {advice[kind]}.")


def _is_watched() -> bool:
    """Whether a mode of PyTorch's dispatch must see the call; ``with torch.device(...)`` need not."""
    from torch.utils._device import DeviceContext

    functions = (_C._get_function_stack_at(i) for i in range(_count_function_modes()))
    return _count_dispatch_modes() > 0 or not all(isinstance(mode, DeviceContext) for mode in functions)


def _has_own_rules(kind: type[Tensor]) -> bool:
    """Whether a subclass says itself what operators do with it."""
    return kind not in _PLAIN and (
        kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        or kind.__torch_function__ is not _C._disabled_torch_function_impl
    )


def align(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors by name, in place, as kernels read them: contiguous, on 16-byte boundaries, signs in their memory.

    One is copied only where it is not so. A loop in one function, because calls of one for each would take as long as
    all that it does. Raises InputError if a tensor has no memory that could be read.
    """
    name = ""
    try:
        for name, x in tensors.items():
            if x is None:
                continue
            if x.is_neg() or not x.is_contiguous():
                check_memory(name, x)
                x = tensors[name] = x.contiguous().resolve_neg()
            address = x.data_ptr()
            if address < _LOW:
                check_memory(name, x)
            if address % 16:
                tensors[name] = x.clone()
    except RuntimeError:
        check_memory(name, tensors[name])
        raise
    return tensors


def check_kind(name: str, x: Tensor) -> None:
    """Raises InputError unless a tensor is a dense, strided one."""
    if x.is_nested:
        raise InputError(f"{name} is a nested tensor: pack its sequences into one [1, T, ...] and pass cu_seqlens.")
    if x.layout != torch.strided:
        raise InputError(f"{name} must be a dense tensor, got one of layout {x.layout}: pass x.to_dense().")


def check_memory(name: str, x: Tensor) -> None:
    """Raises InputError unless a tensor is a dense, strided one whose memory holds all of it."""
    check_kind(name, x)
    if not x.numel():
        return
    try:
        held, real = x.untyped_storage().nbytes(), x.data_ptr() != 0
    except RuntimeError:  # of a transform that is over, or one that only the tensor knows of
        held, real = 0, False
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    if not real or (last + 1) * x.element_size() > held:
        raise InputError(
            f"{name} has no memory of its own: it was freed (as FSDP frees parameters between uses), or stands for"
            " another tensor inside a transform. Pass a tensor that holds its values."
        )


def describe(tensors: Iterable[Tensor | None]) -> Signature:
    """What plans and kernels know of tensors; the shapes of what kernels read must be those that they were told."""
    return tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])


def check_gradient(of: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A gradient that came in, checked: hooks may have made another one of it."""
    check_kind(f"the gradient of {of}", x)
    if x.shape != shape or x.device != device:
        raise InputError(
            f"the gradient of {of} must be {list(shape)} on {device}, got {list(x.shape)} on {x.device}: see to what"
            " hooks make of it."
        )
    check_memory(f"the gradient of {of}", x)
    return x


def check_saved(names: tuple[str, ...], saved: tuple[Tensor | None, ...], saved_as: Signature) -> None:
    """Hooks give back what they like, and ``x.data = y`` goes unnoticed by autograd."""
    found = describe(saved)
    if found != saved_as:
        name, now, then = next(x for x in zip(names, found, saved_as, strict=True) if x[1] != x[2])
        was, now_is = ("absent" if x is None else f"{x[1]} {list(x[0])} on {x[2]}" for x in (then, now))
        raise InputError(
            f"{name} was {was} in the forward, but autograd gives back {now_is}: leave its .data alone"
            " until the backward, and let hooks on saved tensors return what they were given."
        )
