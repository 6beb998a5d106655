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


@dataclass(frozen=True, kw_only=True)
class FlaEntry:
    """The function of flash-linear-attention that an operator stands in for.

    Attributes:
        module: where it is; it has the operator's name.
        registry: name of the registry of backends that it shares with other functions; empty if it has its own.
        declined: arguments of FLA's that we do not have, and why a call that passes one is declined; empty for one that
            means nothing alone.
    """

    module: str
    registry: str = ""
    declined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """One operator. Where an attribute is the name of an argument, it is empty if the operator has no such argument.

    Attributes:
        function: its signature is the list of arguments, its docstring says what they mean. It is not called.
        operands: the differentiable tensors: the argument by the name that pipelines know it under.
        like: the argument whose shape and dtype the result o has.
        same_dtype: arguments that must have one dtype, which autocast therefore casts.
        renamed: old names of arguments, and the names they have now.
        packed: the argument with the bounds of packed sequences.
        final_state: the flag that asks for the final state.
        states: the flag that asks for the states before chunks.
        chunk_size: the argument that asks for a chunk size.
        keep: the flag that keeps the intermediates of the forward for the backward.
        check: raises InputError for tensors and flags that cannot be used, whatever the bounds.
        find_bounds: the bounds of a call, which may have to be read from the device.
        assume_bounds: as many, without reading anything.
        pose: the problem of a valid call; raises InputError, a sentence, for any other.
        numbers: the scalars that stages take, by name.
        shapes: shapes of o, ht and h by name, for a chunk size; None for a size that only the bounds tell.
        recurrence: the arguments of :func:`kda_tl.reference.recurrent_kda` that compute the same.
        scalar_gate: a value head has one gate for all its key channels.
        gates: the gate modes that it has.
        draw: arguments of a :class:`kda_tl.bench.workloads.Workload` by name, drawn with a generator.
        bare: the same call, with what kernels may do first done by the caller, and no final state.
        fla: what it is in FLA.
        call: the public function, see :func:`kda_tl.ops.entry.publish`.
    """

    function: Callable[..., Any]
    operands: Mapping[str, str]
    like: str
    same_dtype: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    packed: str = ""
    final_state: str = ""
    states: str = ""
    chunk_size: str = ""
    keep: str = ""
    check: Callable[[Args], None]
    find_bounds: Callable[[Args], Bounds]
    assume_bounds: Callable[[Args], Bounds]
    pose: Callable[[Args, Bounds], Problem]
    numbers: Callable[[Args], dict[str, float]]
    shapes: Callable[[Args, int], dict[str, tuple[Any, ...]]]
    recurrence: Callable[[Args], dict[str, Any]]
    scalar_gate: bool
    gates: tuple[str, ...]
    draw: Callable[[Any, torch.Generator], dict[str, Any]]
    bare: Callable[[Mapping[str, Any]], dict[str, Any]]
    fla: FlaEntry
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
        here = {*self.renamed, self.keep}
        return {name: _SCHEMA[p.annotation] for name, p in self.signature.parameters.items() if name not in here}

    @functools.cached_property
    def all_tensors(self) -> tuple[str, ...]:
        """Names of the arguments that are tensors."""
        return tuple(name for name, kind in self.schema.items() if kind.startswith("Tensor"))

    @functools.cached_property
    def Arguments(self) -> type[Any]:
        """The class that carries the arguments of a call; it takes them in the order of :attr:`arguments`."""
        fields = [(name, Any, dataclasses.field(default=None)) for name in self.arguments]
        return dataclasses.make_dataclass(f"{self.name}_arguments", fields, slots=True, eq=False)

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

    def bind(self, *args: Any, **kwargs: Any) -> Args:
        """The arguments of a call, as the public function takes them. Raises TypeError as a call does."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self.Arguments(**bound.arguments)

    def asks(self, a: Args, name: str) -> Any:
        """The value of an argument that the operator may not have."""
        return getattr(a, name) if name else None
