"""Kernels of calls that are to come, compiled or loaded ahead."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kda_tl.core.device import Device
from kda_tl.ops import load_recurrent
from kda_tl.ops.call import backward_problem, choose_backward_of
from kda_tl.ops.memory import pose_call
from kda_tl.ops.recurrent_call import bind_step
from kda_tl.runtime.compile import compile_stages
from kda_tl.runtime.dispatch import select_cached
from kda_tl.runtime.program import list_jobs


def warmup(
    *args: Any, operator: str = "chunk_kda", device: Device | None = None, backward: bool = True, **kwargs: Any
) -> None:
    """Makes the kernels of a call ready, so that the call itself compiles nothing; kernels are compiled side by side.

    A call that runs as plain PyTorch needs nothing. Kernels do not depend on lengths, nor on the number of heads, but
    plans do: warm up with the shapes that will come.

    Args:
        args: positional arguments of the operator; or one :class:`kda_tl.core.problem.Problem`; or one function
            without arguments, such as a training step, which is then called once.
        operator: its name.
        device: of a problem, the one here unless given. Arguments know theirs.
        backward: whether the kernels of the gradients are made ready too.
        kwargs: arguments of the operator by name.

    Raises:
        InputError: as the operator.
        CompileError: a kernel cannot be compiled, or compiling is off.
    """
    if args and callable(args[0]):
        function: Callable[[], Any] = args[0]
        function()
        return
    if recurrent := load_recurrent().get(operator):
        bind_step(recurrent, recurrent.bind(*args, **kwargs))
        return
    call = pose_call(args, kwargs, operator, device)
    chosen = select_cached(call.problem, call.device, call.chunk_size).plan
    plans = [(chosen, call.problem)]
    if backward:
        after = choose_backward_of(call.problem, call.device, call.chunk_size, chosen, call.keep)
        for final_state in {False, call.problem.final_state}:
            plans.append((after.choice.plan, backward_problem(call.problem, final_state)))
        if after.residuals:  # the forward that keeps them makes them as the backward would
            plans.append((after.forward, replace(call.problem, direction="bwd")))
    jobs = [job for plan, problem in plans if plan is not None for job in list_jobs(plan, problem, call.device)]
    if jobs:
        compile_stages(jobs)
