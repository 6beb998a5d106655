"""The operator as a user calls it, against its judge, the float64 recurrence; of a backward, every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.bench.workloads import Workload, draw_gradients
from kda_tl.core.stage import Plan
from kda_tl.ops import find_operator
from kda_tl.ops.operator import Declaration, Operator
from kda_tl.reference import gradient_name, recurrent_gradients, relative_error
from kda_tl.runtime.dispatch import pin

Inputs = Mapping[str, Any]
Launch = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """A call on the record of autograd, ready for its backward.

    The ``leaves`` are copies of the call's tensors that require gradients, ``outputs`` o and the final state if it was
    asked for, ``gradients`` do and dht.
    """

    leaves: Mapping[str, torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, operator: Operator, inputs: Inputs, plan: Plan | None) -> Recorded:
        """Calls the forward; the backward will run a plan, the one that serves unless given."""
        leaves = _make_leaves(inputs, operator.tensors)
        with torch.enable_grad(), pin(plan):
            outputs = _drop_none(operator.call(**{**inputs, **leaves})[:2])
        return cls(leaves=leaves, outputs=outputs, gradients=_draw_gradients(outputs))

    def run_backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of the leaves, in their order; may be called again."""
        return torch.autograd.grad(self.outputs, list(self.leaves.values()), self.gradients, retain_graph=True)


def _make_leaves(inputs: Inputs, tensors: Sequence[str]) -> dict[str, torch.Tensor]:
    given = {name: inputs.get(name) for name in tensors}
    return {name: x.detach().clone().requires_grad_() for name, x in given.items() if x is not None}


def _drop_none(outputs: Iterable[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in outputs if x is not None)


def _draw_gradients(outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    o, *ht = outputs
    return _drop_none(draw_gradients(o, ht[0] if ht else None))


def make_launch(operator: Declaration, inputs: Inputs, direction: str, plan: Plan | None = None) -> Launch:
    """One pass of the operator with a plan, the one that serves unless given, to be timed.

    That is the forward ("fwd"), or the backward ("bwd") of a forward that was called before.
    """
    if direction == "bwd":
        return Recorded.of(find_operator(operator.name), inputs, plan).run_backward
    if plan is None:
        return functools.partial(operator.call, **inputs)

    def run_pinned() -> Any:
        with pin(plan):
            return operator.call(**inputs)

    return run_pinned


def make_launches(workload: Workload, where: torch.device, plans: Mapping[str, Plan | None]) -> dict[str, Launch]:
    """The pass of a workload with each of some plans, to be timed in turns."""
    inputs = workload.inputs(where)
    return {name: make_launch(workload.declaration, inputs, workload.direction, plan) for name, plan in plans.items()}


def make_step(call: Callable[[Inputs], Any], inputs: Inputs, tensors: Sequence[str]) -> Launch:
    """A training step of any implementation: its forward, then gradients of all tensors; to be timed or captured.

    ``call`` takes the arguments of our operator by name, and returns o and the final state; ``tensors`` are the names
    of those that are differentiable.
    """
    leaves = _make_leaves(inputs, tensors)

    def run_forward() -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            return _drop_none(call({**inputs, **leaves})[:2])

    gradients = _draw_gradients(run_forward())

    def run_step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(run_forward(), list(leaves.values()), gradients)

    return run_step


def measure_errors(
    operator: Declaration, inputs: Inputs, plan: Plan | None, direction: str = "fwd"
) -> dict[str, float]:
    """Relative errors of what a pass of the operator returns, run with one plan: o and ht, or all gradients."""
    if direction == "bwd":
        chunked = find_operator(operator.name)
        call = Recorded.of(chunked, inputs, plan)
        outputs: Mapping[str, torch.Tensor | None] = dict(
            zip(map(gradient_name, call.leaves), call.run_backward(), strict=True)
        )
        found = recurrent_gradients(chunked.recurrence(chunked.bind(**inputs)), *call.gradients)
        # of a scalar gate with a dimension for its channel
        truth = {(name := gradient_name(leaf)): found[name].view_as(x) for leaf, x in call.leaves.items()}
    else:
        a = operator.bind(**inputs)
        truth = operator.judge(a)  # before the call changes states
        with torch.no_grad():
            outputs = operator.name_results(a, make_launch(operator, inputs, direction, plan)())
    return {name: relative_error(x, truth[name]) for name, x in outputs.items() if x is not None}
