"""An operator as a differentiable function: the backward is a pass with a plan of its own.

The forward keeps its inputs and nothing else, and the backward computes the intermediates again; where the caller or
the backward's plan asks for it, the forward keeps those too.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from kda_tl.core.plain import check_saved, describe, is_plain, needs_operator
from kda_tl.ops.call import BoundCall, choose_backward, run_backward, run_forward, run_with_residuals
from kda_tl.ops.custom_op import differentiate_custom_op, refuse_second_derivative
from kda_tl.ops.operator import Args
from kda_tl.runtime.program import Compute


def run_differentiable(bound: BoundCall, compute: Compute, a: Args) -> Any:
    """:func:`kda_tl.ops.call.run_forward` on the record of autograd."""
    out = _Forward.apply(bound, compute, a, *bound.operator.pick_operands(a))  # type: ignore[no-untyped-call]
    return out if bound.problem.intermediate_states else out[:2]


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: BoundCall, compute: Compute, a: Args, *tensors: torch.Tensor | None) -> Any:
        operator = bound.operator
        ctx.set_materialize_grads(False)
        ctx.bound, ctx.chosen = bound, choose_backward(bound, keep=bool(a.disable_recompute))
        ctx.others = operator.pick_others(a)
        residuals: dict[str, torch.Tensor | None] = {}
        if ctx.chosen.residuals:
            (o, ht, *states), residuals = run_with_residuals(bound, ctx.chosen, a)
        else:
            o, ht, *states = run_forward(bound, compute, a)
        ctx.saved_as = bound.signature + describe(residuals.values())
        # autograd then frees them, and tells if one is written to before the backward
        ctx.save_for_backward(*tensors, *residuals.values())
        ctx.mark_non_differentiable(*states)
        return o, ht, *states

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor | None, dht: torch.Tensor | None, *_states: None) -> Any:
        operator = ctx.bound.operator
        saved, names = ctx.saved_tensors, (*operator.tensors, *ctx.chosen.residuals)
        tensors, kept = saved[: len(operator.tensors)], saved[len(operator.tensors) :]
        gradients = {"the gradient of o": do, "the gradient of the final state": dht}
        if not is_plain((do, dht, *saved)) and needs_operator(gradients | dict(zip(names, saved, strict=True))):
            found = differentiate_custom_op(operator, operator.Arguments(*tensors, *ctx.others), do, dht)
            return None, None, None, *_pick_wanted(ctx, found)
        check_saved(names, saved, ctx.saved_as)
        residuals = dict(zip(ctx.chosen.residuals, kept, strict=True)) if kept else None
        return None, None, None, *_Backward.apply(ctx, residuals, do, dht, *tensors)  # type: ignore[no-untyped-call]


def _pick_wanted(ctx: Any, found: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    wanted = ctx.needs_input_grad[-len(found) :]
    return tuple(x if want else None for x, want in zip(found, wanted, strict=True))


class _Backward(torch.autograd.Function):
    """A function of its own only to refuse a second derivative in our words."""

    @staticmethod
    def forward(
        ctx: Any,
        of: Any,
        residuals: Mapping[str, torch.Tensor | None] | None,
        do: torch.Tensor | None,
        dht: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.name = of.bound.operator.name
        a = of.bound.operator.Arguments(*tensors, *of.others)
        return _pick_wanted(of, run_backward(of.bound, of.chosen, a, do, dht, residuals))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        refuse_second_derivative(ctx.name)
