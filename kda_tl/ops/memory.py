"""Memory that a call takes beside its arguments and results, known before anything is compiled or launched."""

from dataclasses import replace
from typing import Any

import torch

from kda_tl.core.device import Device, current_device
from kda_tl.core.layout import dense_bounds, make_layout
from kda_tl.core.problem import DIRECTIONS, Problem
from kda_tl.core.stage import Plan
from kda_tl.errors import InputError, UnsupportedError
from kda_tl.ops import load_all
from kda_tl.ops.call import backward_problem, choose_backward_of, pose
from kda_tl.ops.entry import needs_gradients, settle
from kda_tl.runtime.dispatch import DEFAULT_BT, PlanSelection, select_cached
from kda_tl.runtime.program import record
from kda_tl.runtime.replay import Workspace
from kda_tl.templates.pipelines import PIPELINES

_CPU = torch.device("cpu")


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
    trains, keep = direction == "bwd", False
    if args and isinstance(args[0], Problem):
        problem, where = args[0], device or current_device()
        if problem.varlen or problem.tokens % max(1, problem.sequences):
            raise InputError("a problem does not tell the lengths of unequal sequences: pass the call's arguments.")
        bounds = dense_bounds(problem.sequences, problem.tokens // max(1, problem.sequences))
        chunk_size = DEFAULT_BT if problem.intermediate_states else None
    else:
        declared = load_all()[operator]
        a = settle(declared, declared.bind(*args, **kwargs))
        bounds = declared.find_bounds(a)
        problem, where, chunk_size = pose(declared, a, bounds)
        trains = trains or needs_gradients(declared, a)
        keep = bool(getattr(a, "disable_recompute", False))
    problem = replace(problem, direction="fwd")
    plan = _choose_plan(select_cached(problem, where, chunk_size))
    residuals: tuple[str, ...] = ()
    if trains:
        backward = choose_backward_of(problem, where, chunk_size, plan, keep)
        residuals = backward.residuals
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
