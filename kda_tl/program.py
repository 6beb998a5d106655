"""A plan made runnable: its pipeline and one compiled kernel a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kda_tl.device import Device
from kda_tl.kernel import Kernel, compile_stage
from kda_tl.problem import Problem
from kda_tl.replay import Replay, record
from kda_tl.stage import Case, Plan, Stage

Compute = Callable[[Mapping[str, Any]], dict[str, Any]]
_REPLAYS_LIMIT = 256  # sizes a program remembers


@dataclass(frozen=True, eq=False)
class Program:
    """On the CPU the pipeline runs stage by stage as it is written; on CUDA it is recorded once a size and replayed.

    Attributes:
        plan: what it was built from.
        problem: what it was built for.
        compute: the pipeline's function.
        kernels: by stage name.
        segments: that chunks are cut into, see :class:`kda_tl.templates.pipelines.Pipeline`.
    """

    plan: Plan
    problem: Problem
    compute: Callable[..., dict[str, Any]]
    kernels: Mapping[str, Kernel]
    segments: int = 1
    _replays: dict[tuple[Any, ...], Replay] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def build(cls, plan: Plan, problem: Problem, device: Device, *, resumed: bool = False) -> Program:
        """Compiles the stages that a problem needs; with ``resumed``, of a backward that goes on from kept factors.

        Raises:
            CompileError: a stage cannot be compiled.
        """
        from kda_tl.templates.pipelines import PIPELINES

        case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
        pipeline = PIPELINES[plan.pipeline]
        if resumed and pipeline.resumed is not None:
            pipeline = pipeline.resumed
        stages = pipeline.stages_of(problem)
        kernels = {stage.name: compile_stage(stage, case, plan.config(stage.name)) for stage in stages}
        return cls(plan=plan, problem=problem, compute=pipeline.compute, kernels=kernels, segments=pipeline.segments)

    def bind(
        self,
        sizes: Mapping[str, int],
        device: torch.device,
        unwanted: tuple[str, ...] = (),
        kept: tuple[str, ...] = (),
        views: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> Compute:
        """The pass for all calls of one size; calling it does not wait for the device.

        Args:
            sizes: of :class:`kda_tl.layout.Layout`.
            device: where it runs.
            unwanted: results that the caller has no use for.
            kept: outputs of stages that the caller wants beside the results.
            views: results on CUDA whose shape shall be another one of as many elements, and these shapes.

        Returns:
            A function of the operator's tensors and numbers by name (contiguous; on the CPU with tokens flattened over
            the batch) that returns the pipeline's results by name, None for absent ones and on CUDA for unwanted ones.
        """
        if device.type != "cuda":
            return lambda tensors: self.run(tensors, sizes, device, kept)
        key = (*sizes.items(), device, unwanted, kept, views)
        found = self._replays.get(key)
        if found is None:
            if len(self._replays) >= _REPLAYS_LIMIT:
                self._replays.clear()
            found = self._replays[key] = Replay(
                record(self._keep(kept), self.kernels, sizes), device, unwanted, dict(views)
            )
        return found

    def run(
        self, tensors: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device, kept: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """One call: see :meth:`bind`."""
        if device.type == "cuda":
            return self.bind(sizes, device, kept=kept)(tensors)

        def run(stage: Stage, **inputs: Any) -> Sequence[Any]:
            return self.kernels[stage.name](inputs, sizes, device)

        return self._keep(kept)(run, tensors)

    def _keep(self, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
        from kda_tl.templates.pipelines import keeping

        return keeping(self.compute, names) if names else self.compute
