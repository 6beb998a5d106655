"""``chunk_kda`` as PyTorch sees it: one opaque operator forward and one backward, ``torch.ops.kda_tl.*``.

Here pass calls inside ``torch.compile`` and those that are not plain (:mod:`kda_tl.plain`). Plain eager calls do not:
PyTorch's operator layer costs more host time than the rest of a call. Absent tensors are empty ones, because operators
return no None. ``disable_recompute`` does not pass: what an operator returns is fixed, so the backward always computes
the intermediates again, to the same gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from kda_tl.arguments import TENSORS, check_call
from kda_tl.call import choose_backward, find_ready, run_backward, run_forward, run_reference
from kda_tl.dispatch import DEFAULT_BT
from kda_tl.errors import UnsupportedError

Tensor = torch.Tensor

# the arguments of chunk_kda in its order, but disable_recompute, with their types in a schema
_TYPES = dict.fromkeys(("q", "k", "v", "g", "beta"), "Tensor") | {
    "scale": "float?",
    "initial_state": "Tensor?",
    "output_final_state": "bool",
    "use_qk_l2norm_in_kernel": "bool",
    "use_gate_in_kernel": "bool",
    "use_beta_sigmoid_in_kernel": "bool",
    "allow_neg_eigval": "bool",
    "safe_gate": "bool",
    "lower_bound": "float?",
    "A_log": "Tensor?",
    "dt_bias": "Tensor?",
    "state_v_first": "bool",
    "cu_seqlens": "Tensor?",
    "cu_seqlens_cpu": "Tensor?",
    "return_intermediate_states": "bool",
    "chunk_size": "int?",
}
_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())


def name_arguments(*arguments: Any) -> dict[str, Any]:
    """The operator's arguments, which are those of ``_TYPES`` in order, by name."""
    return dict(zip(_TYPES, arguments, strict=True))


def run_opaque(a: Mapping[str, Any]) -> Any:
    """:func:`kda_tl.chunk_kda` with these arguments, as one node of a graph."""
    if not torch.compiler.is_compiling():  # compiled calls are checked when they run
        check_call(dict(a))
    o, ht, h = _forward(*(a[name] for name in _TYPES))
    final = ht if a["output_final_state"] else None
    return (o, final, h) if a["return_intermediate_states"] else (o, final)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = name_arguments(*arguments)
    ready = find_ready(a)
    with torch.no_grad(), torch.cuda.device_of(a["q"]):
        if ready.compute is None:
            o, ht, *h = run_reference(ready, a)
        else:
            o, ht, *h = run_forward(ready, ready.compute, a)
    return o, _empty(o) if ht is None else ht, h[0].contiguous() if h else _empty(o)


def _run_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = name_arguments(*arguments)
    q, v, packed = a["q"], a["v"], a["cu_seqlens"] is not None
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    state = (HV, V, K) if a["state_v_first"] else (HV, K, V)
    ht = h = _empty(v)
    if a["output_final_state"]:
        ht = v.new_empty((a["cu_seqlens"].shape[0] - 1 if packed else B, *state), dtype=torch.float32)
    if a["return_intermediate_states"]:
        BT = a["chunk_size"] or DEFAULT_BT
        chunks = torch.library.get_ctx().new_dynamic_size() if packed else -(-T // BT)
        h = v.new_empty((B, chunks, *state))
    return v.new_empty(v.shape), ht, h


def _differentiate(do: Tensor, dht: Tensor | None, *arguments: Any) -> list[Tensor]:
    a = name_arguments(*arguments)
    ready = find_ready(a)
    if ready.problem.tokens == 0:  # the final state is the initial one, and nothing else plays a part
        zeros = {name: _empty(do) if a[name] is None else torch.zeros_like(a[name]) for name in TENSORS}
        return list((zeros if dht is None else zeros | {"initial_state": dht.clone()}).values())
    if ready.compute is None:
        raise UnsupportedError(
            "gradients of the reference path are not to be had inside torch.compile or under PyTorch's dispatch modes,"
            f" and {ready.choice.reason}: install a compiler, or keep chunk_kda out of what is compiled."
        )
    with torch.cuda.device_of(do):
        found = run_backward(ready, choose_backward(ready), a, do, dht)
    return [_empty(do) if (grad := found[name]) is None else grad for name in TENSORS]


def _differentiate_fake(do: Tensor, dht: Tensor | None, *arguments: Any) -> list[Tensor]:
    a = name_arguments(*arguments)
    return [_empty(do) if a[name] is None else a[name].new_empty(a[name].shape) for name in TENSORS]


def _empty(like: Tensor) -> Tensor:
    return like.new_empty((0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = name_arguments(*inputs)
    ctx.set_materialize_grads(False)
    tensors = [name for name, kind in _TYPES.items() if kind.startswith("Tensor") and a[name] is not None]
    ctx.save_for_backward(*(a[name] for name in tensors))
    ctx.kept = tensors
    ctx.others = {name: value for name, value in a.items() if name not in tensors}
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _dh: Tensor | None) -> tuple[Tensor | None, ...]:
    a = ctx.others | dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
    found = differentiate_opaque(a, do, dht if a["output_final_state"] else None)
    return tuple(found.get(name) for name in _TYPES)


def differentiate_opaque(a: Mapping[str, Any], do: Tensor | None, dht: Tensor | None) -> dict[str, Tensor | None]:
    """Gradients of the tensor arguments by name, as one node of a graph; None for absent ones."""
    do = torch.zeros_like(a["v"]) if do is None else do
    found = dict(zip(TENSORS, _backward_op(do, dht, *(a[name] for name in _TYPES)), strict=True))
    return {name: None if a[name] is None else x for name, x in found.items()}


def refuse_second_derivative(_ctx: Any, *_grads: Any) -> NoReturn:
    """What stands where the backward's own backward would."""
    raise UnsupportedError(
        "chunk_kda has no second derivative: differentiate once, or use kda_tl.reference.recurrent_kda."
    )


_forward = torch.library.custom_op(
    "kda_tl::chunk_kda", _run, mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
_forward.register_fake(_run_fake)
_backward_op = torch.library.custom_op(
    "kda_tl::chunk_kda_backward",
    _differentiate,
    mutates_args=(),
    schema=f"(Tensor do, Tensor? dht, {_ARGUMENTS}) -> Tensor[]",
)
_backward_op.register_fake(_differentiate_fake)
_forward.register_autograd(_backward, setup_context=_keep)
_backward_op.register_autograd(refuse_second_derivative)
