"""``chunk_kda`` as a differentiable function: the backward is a pass with a plan of its own.

The forward keeps its inputs and nothing else; the backward computes the intermediates again.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from kda_tl.arguments import TENSORS
from kda_tl.call import Ready, choose_backward, run_backward, run_forward
from kda_tl.errors import UnsupportedError
from kda_tl.program import Compute


def run_differentiable(ready: Ready, compute: Compute, a: dict[str, Any]) -> Any:
    """:func:`kda_tl.call.run_forward` on the record of autograd."""
    out = _Forward.apply(ready, compute, a, *(a[name] for name in TENSORS))  # type: ignore[no-untyped-call]
    return out if a["return_intermediate_states"] else out[:2]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ready: Ready, compute: Compute, a: dict[str, Any], *tensors: torch.Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # autograd then tells if one is written to before the backward
        ctx.ready, ctx.choice = ready, choose_backward(ready)
        ctx.others = {name: value for name, value in a.items() if name not in TENSORS}
        o, ht, *states = run_forward(ready, compute, a)
        ctx.mark_non_differentiable(*states)
        return o, ht, *states

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, *_states: None) -> Any:
        return None, None, None, *_Backward.apply(ctx, do, dht, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class _Backward(torch.autograd.Function):
    """A function of its own only to refuse a second derivative in our words."""

    @staticmethod
    def forward(
        ctx: Any, of: Any, do: torch.Tensor | None, dht: torch.Tensor | None, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        a = of.others | dict(zip(TENSORS, tensors, strict=True))
        found = run_backward(of.ready, of.choice, a, do, dht)
        wanted = of.needs_input_grad[-len(TENSORS) :]
        return tuple(found[name] if want else None for name, want in zip(TENSORS, wanted, strict=True))

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(
            "chunk_kda has no second derivative: differentiate once, or use kda_tl.reference.recurrent_kda."
        )
