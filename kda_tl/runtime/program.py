"""A plan made runnable: its pipeline and one compiled kernel a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kda_tl.core.device import Device
from kda_tl.core.pipeline import Flow, Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Plan, Stage
from kda_tl.runtime.compile import compile_stages
from kda_tl.runtime.kernel import Kernel, slots_of
from kda_tl.runtime.parallel import Job
from kda_tl.runtime.replay import Recording, Replay, trace

Compute = Callable[[Mapping[str, Any]], dict[str, Any]]
_REPLAYS_LIMIT = 256  # sizes a program remembers


def record(
    plan: Plan,
    problem: Problem,
    device: Device,
    sizes: Mapping[str, int],
    results: Sequence[str] | None = None,
    given: Sequence[str] = (),
) -> Recording:
    """What a plan launches for one size, without its kernels: nothing is compiled. See :meth:`Program.bind`."""
    from kda_tl.templates.pipelines import PIPELINES

    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    flow = PIPELINES[plan.pipeline].flow(case.problem, results, given)
    return trace(flow, {stage.name: slots_of(stage, case) for stage in flow.stages}, sizes)


def list_jobs(plan: Plan, problem: Problem, device: Device, *, from_residuals: bool = False) -> list[Job]:
    """The kernels that a plan launches for a problem; ``from_residuals``, those that residuals do not spare."""
    from kda_tl.templates.pipelines import PIPELINES

    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    pipeline = PIPELINES[plan.pipeline]
    stages = pipeline.flow(problem, given=pipeline.residuals if from_residuals else ()).stages
    return [(stage, case, plan.config(stage.name)) for stage in stages]


@dataclass(frozen=True, eq=False)
class Program:
    """On the CPU the pipeline runs stage by stage; on CUDA it is recorded once a size and replayed."""

    plan: Plan
    problem: Problem
    pipeline: Pipeline
    kernels: Mapping[str, Kernel]  # by stage name
    given: tuple[str, ...] = ()  # names of the residuals that callers give beside the operator's tensors, if they do
    _replays: dict[tuple[Any, ...], Replay] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, plan: Plan, problem: Problem, device: Device, *, from_residuals: bool = False) -> Program:
        """Compiles the stages that a problem needs; ``from_residuals``, those that residuals do not spare.

        Raises CompileError if a stage cannot be compiled.
        """
        from kda_tl.templates.pipelines import PIPELINES

        pipeline = PIPELINES[plan.pipeline]
        given = pipeline.residuals if from_residuals else ()
        made = compile_stages(list_jobs(plan, problem, device, from_residuals=from_residuals))
        kernels = {kernel.stage.name: kernel for kernel in made}
        return cls(plan=plan, problem=problem, pipeline=pipeline, kernels=kernels, given=given)

    def flow(self, results: Sequence[str] | None = None) -> Flow:
        """The launches that make some results, those of the problem unless given."""
        return self.pipeline.flow(self.problem, results, self.given)

    def bind(
        self,
        sizes: Mapping[str, int],
        device: torch.device,
        results: tuple[str, ...] | None = None,
        views: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> Compute:
        """The pass for all calls of one size; calling it does not wait for the device.

        It is a function of the operator's tensors and numbers by name (contiguous; on the CPU with tokens flattened
        over the batch) that returns the results by name, None for absent ones. ``sizes`` are those of a
        :class:`kda_tl.core.layout.Layout`, ``results`` names of what the caller wants, also residuals, the problem's
        unless given, and ``views`` results on CUDA that shall have another shape of as many elements, and these shapes.
        """
        if device.type != "cuda":
            return lambda tensors: self.run(tensors, sizes, device, results)
        key = (*sizes.items(), device, results, views)
        found = self._replays.get(key)
        if found is None:
            if len(self._replays) >= _REPLAYS_LIMIT:
                self._replays.clear()
            slots = {name: kernel.slots for name, kernel in self.kernels.items()}
            recording = trace(self.flow(results), slots, sizes)
            found = self._replays[key] = Replay(recording, self.kernels, device, dict(views))
        return found

    def run(
        self,
        tensors: Mapping[str, Any],
        sizes: Mapping[str, int],
        device: torch.device,
        results: tuple[str, ...] | None = None,
    ) -> dict[str, Any]:
        """One call: see :meth:`bind`."""
        if device.type == "cuda":
            return self.bind(sizes, device, results)(tensors)

        def launch(stage: Stage, inputs: Mapping[str, Any]) -> Sequence[Any]:
            return self.kernels[stage.name](inputs, sizes, device)

        return self.flow(results).run(launch, tensors)
