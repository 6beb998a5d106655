"""Memory that a call takes beside its arguments and results, known before anything is compiled or launched."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kda_tl.core.device import Device, current_device
from kda_tl.core.layout import dense_bounds, make_layout
from kda_tl.core.problem import DIRECTIONS, Problem
from kda_tl.core.stage import Plan
from kda_tl.errors import InputError, UnsupportedError
from kda_tl.ops import find_operator
from kda_tl.ops.call import backward_problem, choose_backward_of, pose
from kda_tl.ops.entry import needs_gradients, settle
from kda_tl.ops.operator import Bounds
from kda_tl.runtime.defaults import DEFAULT_BT
from kda_tl.runtime.dispatch import PlanSelection, select_cached
from kda_tl.runtime.program import record
from kda_tl.runtime.replay import Workspace
from kda_tl.templates.pipelines import PIPELINES

_CPU = torch.device("cpu")


class PosedCall(NamedTuple):
    """What decides the plans of a call."""

    problem: Problem  # of its forward
    device: Device
    bounds: Bounds
    chunk_size: int | None
    trains: bool = False  # autograd records it
    keep: bool = False  # disable_recompute


def pose_call(args: tuple[Any, ...], kwargs: dict[str, Any], operator: str, device: Device | None) -> PosedCall:
    """A call by its arguments, or by a problem. Raises InputError as the operator, or for unequal sequences."""
    if args and isinstance(args[0], Problem):
        problem, where = args[0], device or current_device()
        if problem.varlen or problem.tokens % max(1, problem.sequences):
            raise InputError("a problem does not tell the lengths of unequal sequences: pass the call's arguments.")
        bounds = dense_bounds(problem.sequences, problem.tokens // max(1, problem.sequences))
        chunk_size = DEFAULT_BT if problem.intermediate_states else None
        return PosedCall(replace(problem, direction="fwd"), where, bounds, chunk_size)
    declared = find_operator(operator)
    a = settle(declared, declared.bind(*args, **kwargs))
    bounds = declared.find_bounds(a)
    problem, where, chunk_size = pose(declared, a, bounds)
    keep = bool(getattr(a, "disable_recompute", False))
    return PosedCall(problem, where, bounds, chunk_size, needs_gradients(declared, a), keep)


def workspace_bytes(
    *args: Any, direction: str = "fwd", operator: str = "chunk_kda", device: Device | None = None, **kwargs: Any
) -> int:
    """Bytes of device memory that one pass of a call allocates, beside its results.

    These are the intermediates, in one allocation that the pass lets go at its end; the chunk tables, which stay for
    calls of the same lengths; and where ``disable_recompute`` asks a forward for them, what it keeps for the backward.
    Copies are not counted: of tensors that are not contiguous or do not begin at a multiple of 16 bytes, and of A_log,
    dt_bias and states that are not fp32. Neither is what PyTorch's allocator rounds up.

    Args:
        args: positional arguments of the operator; or one :class:`kda_tl.core.problem.Problem`, whose sequences are
            then equally long.
        direction: "fwd" or "bwd". A backward is that of all results, the final state included if there is one.
        operator: its name.
        device: of a problem, the one here unless given. Arguments know theirs.
        kwargs: arguments of the operator by name.

    Raises:
        InputError: as the operator; or a problem with packed or unequal sequences, whose lengths it does not tell.
        UnsupportedError: no compiler was found, so that the call runs as plain PyTorch.
    """
    if direction not in DIRECTIONS:
        raise InputError(f"direction must be one of {', '.join(DIRECTIONS)}, got {direction!r}.")
    call = pose_call(args, kwargs, operator, device)
    problem, where, bounds = call.problem, call.device, call.bounds
    trains = direction == "bwd" or call.trains
    plan = _choose_plan(select_cached(problem, where, call.chunk_size))
    residuals: tuple[str, ...] = ()
    if trains:
        backward = choose_backward_of(problem, where, call.chunk_size, plan, call.keep)
        residuals, plan = backward.residuals, backward.forward or plan
    if direction == "bwd":
        plan = _choose_plan(backward.choice)
    tables, sizes = make_layout(bounds, plan.BT, _CPU, PIPELINES[plan.pipeline].segments)
    held = sum(table.nbytes for table in tables.values())
    if direction == "bwd":
        recording = record(plan, backward_problem(problem, problem.final_state), where, sizes, given=residuals)
    else:
        results = PIPELINES[plan.pipeline].flow(problem).results
        recording = record(plan, problem, where, sizes, (*results, *residuals))
        held += sum(recording.count_bytes(value) for name in residuals if (value := recording.results[name]))
    return Workspace.of(recording).bytes + held


def _choose_plan(choice: PlanSelection) -> Plan:
    if choice.plan is None:
        raise UnsupportedError(f"{choice.reason}: kda_tl does not know how much memory that takes.")
    return choice.plan
