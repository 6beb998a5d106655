"""An operator as PyTorch sees it: one custom operator forward and one backward, ``torch.ops.kda_tl.*``.

Here pass calls inside ``torch.compile`` and those that are not plain (:mod:`kda_tl.core.plain`). Plain eager calls do
not: PyTorch's operator layer costs more host time than the rest of a call. Absent tensors are empty ones, because
operators return no None. Intermediates are never kept: what an operator returns is fixed, so the backward always
computes them again, to the same gradients.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from kda_tl.errors import UnsupportedError
from kda_tl.ops.call import bind_call, choose_backward, run_backward, run_forward, run_reference
from kda_tl.ops.operator import Args, Operator
from kda_tl.runtime.defaults import DEFAULT_BT

Tensor = torch.Tensor


def register(operator: Operator) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Defines the two operators. Returns the forward's, which takes the arguments of the schema in order."""
    arguments = ", ".join(f"{kind} {name}" for name, kind in operator.schema.items())

    def run(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _run(operator, _name(operator, values))

    def differentiate(do: Tensor, dht: Tensor | None, *values: Any) -> list[Tensor]:
        return _differentiate(operator, _name(operator, values), do, dht)

    def differentiate_fake(do: Tensor, dht: Tensor | None, *values: Any) -> list[Tensor]:
        tensors = operator.pick_operands(_name(operator, values))
        return [_empty(do) if x is None else x.new_empty(x.shape) for x in tensors]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        given = dict(zip(operator.schema, inputs, strict=True))
        ctx.tensors = [name for name in operator.all_tensors if given[name] is not None]
        ctx.save_for_backward(*(given.pop(name) for name in ctx.tensors))
        ctx.others = given
        ctx.mark_non_differentiable(output[2])

    def backward(ctx: Any, do: Tensor | None, dht: Tensor | None, _dh: Tensor | None) -> tuple[Tensor | None, ...]:
        a = operator.Arguments(**ctx.others, **dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)))
        found = differentiate_custom_op(operator, a, do, dht if a.output_final_state else None)
        gradients = dict(zip(operator.tensors, found, strict=True))
        return tuple(gradients.get(name) for name in operator.schema)

    forward = torch.library.custom_op(
        f"kda_tl::{operator.name}", run, mutates_args=(), schema=f"({arguments}) -> (Tensor, Tensor, Tensor)"
    )
    forward.register_fake(lambda *values: _run_fake(operator, _name(operator, values)))
    schema = f"(Tensor do, Tensor? dht, {arguments}) -> Tensor[]"
    gradient = torch.library.custom_op(
        f"kda_tl::{operator.name}_backward", differentiate, mutates_args=(), schema=schema
    )
    gradient.register_fake(differentiate_fake)
    forward.register_autograd(backward, setup_context=keep)
    gradient.register_autograd(lambda ctx, *grads: refuse_second_derivative(operator.name))
    forwards[operator.name], _gradients[operator.name] = forward, gradient
    return forward


forwards: dict[str, Any] = {}  # by the name of the operator
_gradients: dict[str, Any] = {}


def _name(operator: Operator, values: tuple[Any, ...]) -> Args:
    return operator.Arguments(**dict(zip(operator.schema, values, strict=True)))


def _run(operator: Operator, a: Args) -> tuple[Tensor, Tensor, Tensor]:
    bound = bind_call(operator, a)
    with torch.no_grad(), torch.cuda.device_of(a.v):
        if bound.compute is None:
            o, ht, *h = run_reference(bound, a)
        else:
            o, ht, *h = run_forward(bound, bound.compute, a)
    return o, _empty(o) if ht is None else ht, h[0].contiguous() if h else _empty(o)


def _run_fake(operator: Operator, a: Args) -> tuple[Tensor, Tensor, Tensor]:
    shapes = operator.shapes(a, a.chunk_size or DEFAULT_BT)
    ht = h = _empty(a.v)
    if a.output_final_state:
        ht = a.v.new_empty(shapes["ht"], dtype=torch.float32)
    if a.return_intermediate_states:
        h = a.v.new_empty([torch.library.get_ctx().new_dynamic_size() if n is None else n for n in shapes["h"]])
    return a.v.new_empty(shapes["o"]), ht, h


def _differentiate(operator: Operator, a: Args, do: Tensor, dht: Tensor | None) -> list[Tensor]:
    bound, tensors = bind_call(operator, a), operator.pick_operands(a)
    if bound.problem.tokens == 0:  # the final state is the initial one, and nothing else plays a part
        zeros = [_empty(do) if x is None else torch.zeros_like(x) for x in tensors]
        made = dict(zip(operator.operands, zeros, strict=True))
        if dht is not None:
            made["h0"] = dht.to(made["h0"].dtype, copy=True)
        return list(made.values())
    if bound.compute is None:
        raise UnsupportedError(
            "gradients of the reference path are not to be had inside torch.compile or under PyTorch's dispatch modes,"
            f" and {bound.choice.reason}: install a compiler, or keep {operator.name} out of what is compiled."
        )
    with torch.cuda.device_of(do):
        found = run_backward(bound, choose_backward(bound), a, do, dht)
    return [_empty(do) if grad is None else grad for grad in found]


def _empty(like: Tensor) -> Tensor:
    return like.new_empty((0,))


def differentiate_custom_op(operator: Operator, a: Args, do: Tensor | None, dht: Tensor | None) -> list[Tensor | None]:
    """Gradients of the differentiable arguments, as one node of a graph; None for absent ones."""
    do = torch.zeros_like(a.v) if do is None else do
    found = _gradients[operator.name](do, dht, *(getattr(a, name) for name in operator.schema))
    return [None if x is None else gradient for x, gradient in zip(operator.pick_operands(a), found, strict=True)]


def refuse_second_derivative(name: str) -> NoReturn:
    """What stands where the backward's own backward would."""
    raise UnsupportedError(
        f"{name} has no second derivative: differentiate once, or use kda_tl.reference.recurrent_kda."
    )
