"""``chunk_kda`` for ``torch.compile``: one opaque operator forward and one backward, ``torch.ops.kda_tl.*``.

Eager calls do not pass here: PyTorch's operator layer costs more host time than the rest of a call. Absent tensors are
empty ones, because operators return no None. ``disable_recompute`` does not pass: what an operator returns is fixed, so
the backward always computes the intermediates again, to the same gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from kda_tl.arguments import TENSORS
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


def run_opaque(*arguments: Any) -> Any:
    """:func:`kda_tl.chunk_kda` with the arguments of ``_TYPES`` in order, as one node of a compiled graph."""
    a = dict(zip(_TYPES, arguments, strict=True))
    o, ht, h = _forward(*arguments)
    final = ht if a["output_final_state"] else None
    return (o, final, h) if a["return_intermediate_states"] else (o, final)


def _run(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = dict(zip(_TYPES, arguments, strict=True))
    ready = find_ready(a)
    if ready.compute is None:
        with torch.no_grad():
            o, ht, *h = run_reference(ready, a)
    else:
        o, ht, *h = run_forward(ready, ready.compute, a)
    return o, _empty(o) if ht is None else ht, h[0].contiguous() if h else _empty(o)


def _run_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    a = dict(zip(_TYPES, arguments, strict=True))
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
    a = dict(zip(_TYPES, arguments, strict=True))
    ready = find_ready(a)
    if ready.problem.tokens == 0:  # the final state is the initial one, and nothing else plays a part
        zeros = {name: _empty(do) if a[name] is None else torch.zeros_like(a[name]) for name in TENSORS}
        return list((zeros if dht is None else zeros | {"initial_state": dht.clone()}).values())
    if ready.compute is None:
        raise UnsupportedError(
            f"gradients of the reference path are not to be had inside torch.compile, and {ready.choice.reason}:"
            " install a compiler, or keep chunk_kda out of what is compiled."
        )
    found = run_backward(ready, choose_backward(ready), a, do, dht)
    return [_empty(do) if (grad := found[name]) is None else grad for name in TENSORS]


def _differentiate_fake(do: Tensor, dht: Tensor | None, *arguments: Any) -> list[Tensor]:
    a = dict(zip(_TYPES, arguments, strict=True))
    return [_empty(do) if a[name] is None else a[name].new_empty(a[name].shape) for name in TENSORS]


def _empty(like: Tensor) -> Tensor:
    return like.new_empty((0,))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = dict(zip(_TYPES, inputs, strict=True))
    tensors = [name for name, kind in _TYPES.items() if kind.startswith("Tensor") and a[name] is not None]
    ctx.save_for_backward(*(a[name] for name in tensors))
    ctx.kept = tensors
    ctx.others = {name: value for name, value in a.items() if name not in tensors}
    ctx.mark_non_differentiable(output[2])


def _backward(ctx: Any, do: Tensor, dht: Tensor, _dh: Tensor | None) -> tuple[Tensor | None, ...]:
    a = ctx.others | dict(zip(ctx.kept, ctx.saved_tensors, strict=True))
    grads = dict(
        zip(TENSORS, _backward_op(do, dht if a["output_final_state"] else None, *(a[n] for n in _TYPES)), strict=True)
    )
    return tuple(grads[name] if name in grads and a[name] is not None else None for name in _TYPES)


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
