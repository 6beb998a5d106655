"""Pipelines: ways to compute a pass, as tuples of stages over an environment of tensors by name.

A stage reads the tensors that it names from the environment and leaves its outputs there. All else follows: which
stages a problem launches, which of them residuals spare, and when a tensor is read for the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Stage, TensorSpec

# By direction, what a pass may be asked for; states before chunks only come with a problem that wants them
RESULTS = {
    "fwd": ("o", "ht", "h"),
    "bwd": ("dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias"),
    "step": ("o", "ht"),
}


def operand_shapes(p: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of an operator's tensors as stages take them, the batch flattened into the tokens; not those of states."""
    keys, values = (p.tokens, p.H, p.K), (p.tokens, p.HV, p.V)
    sequences = {"q": keys, "k": keys, "v": values, "do": values, "g": (p.tokens, p.HV, p.G), "beta": (p.tokens, p.HV)}
    return sequences | {"A_log": (p.HV,), "dt_bias": (p.HV, p.G)}


# Executes a stage on its inputs and scalars by name. Returns its outputs in the order it declares, None for absent ones
Launch = Callable[[Stage, dict[str, Any]], Sequence[Any]]


@dataclass(frozen=True)
class Flow:
    """What a pipeline launches for a problem."""

    stages: tuple[Stage, ...]  # in launch order
    frees: tuple[tuple[str, ...], ...]  # for each stage the tensors that nothing needs after it
    results: tuple[str, ...]  # names of the tensors that are returned

    def run(self, launch: Launch, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The results by name; a stage is launched after the other, and a tensor is let go after its last reader.

        ``tensors`` are tensors and numbers by name, None for those that the problem lacks; so are the results.
        """
        environment = dict(tensors)
        for stage, names in zip(self.stages, self.frees, strict=True):
            inputs = {name: environment[name] for name in (*stage.inputs, *stage.scalars)}
            environment.update(zip(stage.outputs, launch(stage, inputs), strict=True))
            for name in names:
                del environment[name]
        return {name: environment.get(name) for name in self.results}


@dataclass(frozen=True)
class Pipeline:
    """One way to compute a pass."""

    name: str  # as stored in plans
    direction: str  # "fwd", "bwd" or "step"
    stages: tuple[Stage, ...]  # in launch order
    # Of a backward, the tensors that spare it its first stages if the forward kept them. Chunks of both passes must
    # then be cut alike: residuals lie chunk by chunk.
    residuals: tuple[str, ...] = ()
    keeper: str = ""  # of a forward that does not make residuals, the one that runs in its place where they are kept
    keeps: bool = False  # whether the forward keeps them unasked, when nothing is tuned: they take little memory
    # Whether it comes before those that leave sequences whole, when nothing is tuned
    suits: Callable[[Case], bool] | None = None
    # Whether its longest stage has a thread block for a (segment, 128 channels of a value head), which does all of its
    # chunks one after the other: worth it where such blocks, all as long, fill the GPU.
    serial: bool = False
    at_once: bool = False  # whether a serial one is worth it only where all of these blocks run at once
    least_chunks: int = 8  # of a segment, for a serial one to be worth it
    # That all chunks of a batch would make if they were one sequence: sequences longer than such a segment are cut.
    # Kernels do not depend on it, only the chunk tables do.
    segments: int = 1
    # By stage, what it begins with when nothing is tuned, where that is not the stage's own default
    defaults: Mapping[str, Callable[[Case], Config]] = field(default_factory=dict, hash=False)

    def flow(self, problem: Problem, results: Sequence[str] | None = None, given: Sequence[str] = ()) -> Flow:
        """The launches that make the results, all that a call of the problem gets unless some are named.

        Tensors that are given, as residuals are, need not be made.
        """
        made = {name for stage in self.stages for name in stage.tensors_of(problem)[1]}
        usual = (name for name in RESULTS[self.direction] if name != "h" or problem.intermediate_states)
        results = tuple(usual) if results is None else tuple(dict.fromkeys(results))
        missing = {name for stage in self.stages for name in stage.outputs} - made - set(given)
        needed, stages = set(results), list[Stage]()
        for stage in reversed(self.stages):
            reads, writes = stage.tensors_of(problem)
            if missing.intersection(reads):
                continue  # it sums what this problem does not have
            if needed.intersection(writes).difference(given):
                stages.insert(0, stage)
                needed.update(reads)
        last = {name: i for i, stage in enumerate(stages) for names in stage.tensors_of(problem) for name in names}
        frees = [tuple(name for name in last if last[name] == i and name not in results) for i in range(len(stages))]
        return Flow(tuple(stages), tuple(frees), results)

    def stages_of(self, problem: Problem) -> tuple[Stage, ...]:
        """The stages that are launched for a problem, in order."""
        return self.flow(problem).stages

    def finds_residuals(self, forward: Pipeline) -> bool:
        """Whether a forward makes the residuals of this backward: those of segments, of the same ones."""
        makers = [stage for stage in self.stages if set(self.residuals) & stage.outputs.keys()]
        specs = [stage.outputs[name] for stage in makers for name in self.residuals if name in stage.outputs]
        of_segments = any({"NS", "NC"} & set(TensorSpec.parse(text).dims) for text in specs)
        made = {stage.name for stage in makers} <= {stage.name for stage in forward.stages}
        return bool(makers) and made and not (of_segments and self.segments != forward.segments)
