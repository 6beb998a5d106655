"""A compiled stage as a problem uses it: its parameters, and how it is called with tensors by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.core.stage import Case, Config, Stage, TensorSpec, dim_size, static_sizes


@dataclass(frozen=True)
class Slot:
    """A tensor parameter of a kernel: everything known of it but the lengths.

    Attributes:
        present: False if the problem does not have it, and a :func:`placeholder` is passed.
        dtype: as the kernel reads it; on the CPU every float is fp32.
        dims: sizes, or names of sizes known at the call: those of a layout.
        added: whether the kernel adds to it, so that it must begin as zeros.
        replaced: name of the input whose place it may have, if there is one.
    """

    name: str
    written: bool
    present: bool
    dtype: torch.dtype
    dims: tuple[int | str, ...]
    added: bool = False
    replaced: str | None = None

    @classmethod
    def of(
        cls, name: str, text: str, case: Case, *, written: bool, added: bool = False, replaced: str | None = None
    ) -> Slot:
        """The slot of a tensor spec for a case."""
        spec, problem, static = TensorSpec.parse(text), case.problem, static_sizes(case)
        element = spec.element(problem)
        dims = list(spec.dims)
        if problem.state_v_first and spec.is_state:
            dims[2:] = "V", "K"
        return cls(
            name=name,
            written=written,
            added=added,
            replaced=replaced,
            present=spec.present(problem),
            dtype=TORCH_DTYPE[element if element == "i32" or case.device.kind != "cpu" else "fp32"],
            dims=tuple(int(dim) if dim.isdigit() else static.get(dim, dim) for dim in dims),
        )

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the tensor that is passed."""
        if not self.present:
            return (1,)
        return tuple(dim if isinstance(dim, int) else dim_size(dim, sizes) for dim in self.dims)


def slots_of(stage: Stage, case: Case) -> tuple[Slot, ...]:
    """The tensor parameters of a stage's kernels: its inputs, then its outputs. Nothing is compiled for them."""
    tensors = {**stage.inputs, **stage.outputs}
    added = {name for name, when in stage.adds.items() if getattr(case.problem, when)}
    return tuple(
        Slot.of(
            name,
            text,
            case,
            written=name in stage.outputs,
            added=name in added,
            replaced=stage.replaces.get(name),
        )
        for name, text in tensors.items()
    )


class Binary(Protocol):
    """What was compiled: for all problems that differ in what the stage ignores."""

    @property
    def function(self) -> Callable[..., Any]:
        """The host function, linked when first asked for: processes that compile for others never launch."""

    @property
    def source(self) -> str:
        """The generated CUDA or C."""


class Kernel:
    """A compiled stage, as a problem uses it: ``slots`` are the stage's inputs, then its outputs.

    Problems that differ in what the stage ignores share the binary. Its host function is called with tensors in the
    order of the slots, then the scalars.
    """

    def __init__(self, stage: Stage, case: Case, config: Config, binary: Binary) -> None:
        self.stage, self.case, self.config, self.binary = stage, case, config, binary
        self.slots = slots_of(stage, case)

    @property
    def function(self) -> Callable[..., Any]:
        """The host function of the binary."""
        return self.binary.function

    @property
    def source(self) -> str:
        """The generated CUDA or C."""
        return self.binary.source

    def allocate(self, sizes: Mapping[str, int], device: torch.device) -> list[torch.Tensor | None]:
        """Outputs, uninitialised or zeros that are added to; None for those the problem does not have."""

        def make(slot: Slot) -> torch.Tensor:
            new = torch.zeros if slot.added else torch.empty
            return new(slot.shape(sizes), dtype=slot.dtype, device=device)

        return [make(slot) if slot.present else None for slot in self.slots if slot.written]

    def launch(self, tensors: Mapping[str, Any], outputs: Sequence[torch.Tensor | None], device: torch.device) -> None:
        """Writes the outputs. ``tensors`` are the stage's inputs and scalars by name; does not wait for the device."""
        written = iter(outputs)
        args = []
        for slot in self.slots:
            x = next(written) if slot.written else tensors[slot.name]
            if not slot.present or x is None:
                x = placeholder(slot.dtype, device)
            elif not slot.written and device.type == "cpu":  # fp32 kernels: cast at the boundary
                x = x.to(slot.dtype).contiguous()
            args.append(x)
        self.function(*args, *(tensors[name] for name in self.stage.scalars))

    def __call__(self, tensors: Mapping[str, Any], sizes: Mapping[str, int], device: torch.device) -> Sequence[Any]:
        """Allocates the outputs, launches, and returns them in the stage's order."""
        outputs = self.allocate(sizes, device)
        self.launch(tensors, outputs, device)
        return outputs


@functools.cache
def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The one-element tensor that stands for an absent optional tensor; kernels never touch it."""
    return torch.zeros(1, dtype=dtype, device=device)
