"""``chunk_kda`` as a differentiable function: the backward is a pass with a plan of its own.

The forward keeps its inputs and nothing else, and the backward computes the intermediates again; with
``disable_recompute``, or where the backward's plan says so, the forward keeps those too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from kda_tl.arguments import TENSORS
from kda_tl.call import Ready, choose_backward, run_backward, run_forward, run_keeping
from kda_tl.opaque import differentiate_opaque, refuse_second_derivative
from kda_tl.plain import check_saved, describe, is_plain, needs_operator
from kda_tl.program import Compute


def run_differentiable(ready: Ready, compute: Compute, a: dict[str, Any]) -> Any:
    """:func:`kda_tl.call.run_forward` on the record of autograd."""
    out = _Forward.apply(ready, compute, a, *(a[name] for name in TENSORS))  # type: ignore[no-untyped-call]
    return out if a["return_intermediate_states"] else out[:2]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ready: Ready, compute: Compute, a: dict[str, Any], *tensors: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.ready, ctx.chosen = ready, choose_backward(ready, keep=a["disable_recompute"])
        ctx.others = {name: value for name, value in a.items() if name not in TENSORS}
        residuals: dict[str, torch.Tensor | None] = {}
        if ctx.chosen.residuals:
            (o, ht, *states), residuals = run_keeping(ready, ctx.chosen.residuals, a)
        else:
            o, ht, *states = run_forward(ready, compute, a)
        ctx.saved_as = ready.signature + describe(residuals.values())
        # autograd then frees them, and tells if one is written to before the backward
        ctx.save_for_backward(*tensors, *residuals.values())
        ctx.mark_non_differentiable(*states)
        return o, ht, *states

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, *_states: None) -> Any:
        saved, names = ctx.saved_tensors, (*TENSORS, *ctx.chosen.residuals)
        gradients = {"the gradient of o": do, "the gradient of the final state": dht}
        if not is_plain((do, dht, *saved)) and needs_operator(gradients | dict(zip(names, saved, strict=True))):
            a = ctx.others | dict(zip(TENSORS, saved, strict=False))
            found = differentiate_opaque(a, do, dht)
            return None, None, None, *_pick_wanted(ctx, found)
        check_saved(names, saved, ctx.saved_as)
        tensors, kept = saved[: len(TENSORS)], saved[len(TENSORS) :]
        residuals = dict(zip(ctx.chosen.residuals, kept, strict=True)) if kept else None
        return None, None, None, *_Backward.apply(ctx, residuals, do, dht, *tensors)  # type: ignore[no-untyped-call]


def _pick_wanted(ctx: Any, found: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad[-len(TENSORS) :]
    return tuple(found[name] if want else None for name, want in zip(TENSORS, wanted, strict=True))


class _Backward(torch.autograd.Function):
    """A function of its own only to refuse a second derivative in our words."""

    @staticmethod
    def forward(
        ctx: Any,
        of: Any,
        residuals: dict[str, torch.Tensor | None] | None,
        do: torch.Tensor | None,
        dht: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        a = of.others | dict(zip(TENSORS, tensors, strict=True))
        return _pick_wanted(of, run_backward(of.ready, of.chosen, a, do, dht, residuals))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        refuse_second_derivative(ctx, *grads)
