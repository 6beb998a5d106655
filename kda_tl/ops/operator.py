"""What an operator is: one declaration, from which everything that serves it derives.

The list of arguments stands once, as the signature of the public function. The key of the memory of earlier calls, the
schema of the operator that PyTorch sees, what autograd records and what FLA is checked for come from it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from kda_tl.core.problem import Problem

# By the annotation of an argument, its type in a schema
_SCHEMA = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float | None": "float?",
    "int | None": "int?",
    "bool | None": "bool?",
    "bool": "bool",
}
OPERATORS: dict[str, Operator] = {}  # by name, as their modules are imported; see kda_tl.ops.load_all
# The arguments of one call by name, and bounds: where sequences begin and end among the flattened tokens
Args = Any
Bounds = tuple[int, ...]


class Lacking:
    """What arguments are that not every operator has, for one without them."""

    __slots__ = ()
    safe_gate = lower_bound = disable_recompute = return_intermediate_states = None


@dataclass(frozen=True, kw_only=True)
class FlaEntry:
    """The function of flash-linear-attention that an operator stands in for."""

    module: str  # where it is
    asks: bool = True  # whether FLA asks backends about it
    name: str = ""  # what it is called there; empty for the operator's name
    registry: str = ""  # name of the registry of backends that it shares with other functions; empty if it has its own
    # Arguments of FLA's that we do not have, and why a call that passes one is declined; empty for one that means
    # nothing alone
    declined: Mapping[str, str] = field(default_factory=dict)
    # Arguments whose defaults there are not ours, and what they are
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Declaration:
    """What every operator declares: by this alone it is measured, tuned, verified and shown.

    A workload is a :class:`kda_tl.bench.workloads.Workload`.
    """

    function: Callable[..., Any]  # its signature is the list of arguments, its docstring their meaning; never called
    scalar_gate: bool  # a value head has one gate for all its key channels
    gates: tuple[str, ...]  # the gate modes that it has
    directions: tuple[str, ...]  # its passes, the usual one first
    length: int | None = None  # tokens of a sequence that calls usually have; None if there is no such number
    state_uses: tuple[str, ...] = ("",)  # what workloads say of where states are, the usual one first
    state_dtypes: tuple[str, ...] = ("fp32",)  # that states may have
    # Fields of a workload's problem that the workload does not have itself
    modes: Callable[[Any], dict[str, Any]]
    # Arguments of a workload by name, drawn with a generator
    draw: Callable[[Any, torch.Generator], dict[str, Any]]
    # The same call, with what kernels may do first done by the caller, and no final state
    bare: Callable[[Mapping[str, Any]], dict[str, Any]]
    # A workload of about so many tokens that the same kernels serve, for checks against slow references
    trim: Callable[[Any, int], Any]
    # Of a call and its problem, in chunks of BT tokens and so many segments: the tensors and numbers that pipelines
    # take, tokens flattened over the batch, and the sizes that kernels are launched with
    lay_out: Callable[[Args, Problem, int, int], tuple[dict[str, Any], dict[str, int]]]
    # The sizes alone, of a workload
    sizes: Callable[[Any, int, int], dict[str, int]]
    written: tuple[str, ...] = ()  # arguments that a call changes in place
    # What a call computes, in float64, by the names of pipelines: o, ht and states that it changes in place
    judge: Callable[[Args], dict[str, torch.Tensor]]
    # The same of what a call returned
    name_results: Callable[[Args, Any], dict[str, torch.Tensor | None]]
    fla: FlaEntry
    # The public function, see kda_tl.ops.entry.publish
    call: Callable[..., Any] = field(init=False)

    @functools.cached_property
    def name(self) -> str:
        """What it is called."""
        return self.function.__name__

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """Of the public function."""
        return inspect.signature(self.function)

    @functools.cached_property
    def Arguments(self) -> type[Any]:
        """The class that carries the arguments of a call."""
        raise NotImplementedError

    def bind(self, *args: Any, **kwargs: Any) -> Args:
        """The arguments of a call, as the public function takes them. Raises TypeError as a call does."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.Arguments(**bound.arguments)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator(Declaration):
    """One operator of whole sequences. The result o has the shape and dtype of the argument v.

    Arguments that mean the same have one name in all operators: cu_seqlens, output_final_state, chunk_size,
    return_intermediate_states, and disable_recompute, which keeps the intermediates of the forward for the backward.
    """

    operands: Mapping[str, str]  # the differentiable tensors: the argument by the name that pipelines know it under
    same_dtype: tuple[str, ...]  # arguments that must have one dtype, which autocast therefore casts
    renamed: Mapping[str, str] = field(default_factory=dict)  # old names of arguments, and the names they have now
    check: Callable[[Args], None]  # raises InputError for what cannot be used, whatever the bounds
    find_bounds: Callable[[Args], Bounds]  # the bounds of a call, which may have to be read from the device
    assume_bounds: Callable[[Args], Bounds]  # as many, without reading anything
    pose: Callable[[Args, Bounds], Problem]  # the problem of a valid call; raises InputError for any other
    numbers: Callable[[Args], dict[str, float]]  # the scalars that stages take, by name
    # Shapes of o, ht and h by name, for a chunk size; None for a size that only the bounds tell
    shapes: Callable[[Args, int], dict[str, tuple[Any, ...]]]
    recurrence: Callable[[Args], dict[str, Any]]  # arguments of kda_tl.reference.recurrent_kda that compute the same

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of the differentiable arguments."""
        return tuple(self.operands.values())

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of all arguments, the differentiable ones first."""
        return (*self.tensors, *(name for name in self.signature.parameters if name not in self.tensors))

    @functools.cached_property
    def schema(self) -> dict[str, str]:
        """Types of the arguments in the schema of the operator that PyTorch sees, which always recomputes."""
        here = {*self.renamed, "disable_recompute"}
        return {name: _SCHEMA[p.annotation] for name, p in self.signature.parameters.items() if name not in here}

    @functools.cached_property
    def all_tensors(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors."""
        return tuple(name for name, kind in self.schema.items() if kind.startswith("Tensor"))

    @functools.cached_property
    def Arguments(self) -> type[Any]:
        """The class that carries the arguments of a call; it takes them in the order of :attr:`arguments`."""
        fields = [(name, Any, dataclasses.field(default=None)) for name in self.arguments]
        return dataclasses.make_dataclass(f"{self.name}_arguments", fields, bases=(Lacking,), slots=True, eq=False)

    @functools.cached_property
    def pick_operands(self) -> Callable[[Args], tuple[Any, ...]]:
        """The differentiable tensors of a call, None for absent ones."""
        return attrgetter(*self.tensors)

    @functools.cached_property
    def pick_others(self) -> Callable[[Args], tuple[Any, ...]]:
        """What is not differentiable: with the operands before it, the arguments of :attr:`Arguments`."""
        return attrgetter(*self.arguments[len(self.tensors) :])

    @functools.cached_property
    def pick_flags(self) -> Callable[[Args], tuple[Any, ...]]:
        """What is no tensor, and what may not be there: with the tensors' shapes it decides how a call is planned."""
        return attrgetter(*(name for name in self.schema if name not in self.all_tensors))
