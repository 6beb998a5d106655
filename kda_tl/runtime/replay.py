"""A pass recorded once for the sizes of a call and replayed by address.

The calls a pipeline makes, the shapes they see and the order in which intermediates die are the same for every call of
one size. So its flow is followed once with values that stand for tensors; intermediates get places in one workspace,
those that never live together sharing them; an output lies in the place of an input that it replaces, where nothing
else wants that. A replay allocates the workspace and the results, writes addresses into prepared headers and calls each
kernel's host function. With a PyTorch tensor for every intermediate, a call of five stages took the host 98 to 115 us
(H200), longer than its kernels on a short sequence.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kda_tl.core.pipeline import Flow
from kda_tl.errors import LaunchError
from kda_tl.runtime.ffi import Arguments, Headers, prepare_call, set_stream, take_error
from kda_tl.runtime.kernel import Kernel, Slot, placeholder

ALIGNMENT = 256  # bytes, as PyTorch's allocator


@dataclass(eq=False)
class Value:
    """A tensor of a recorded pass."""

    name: str
    role: str  # "given" by the caller, "made" by a launch, or "absent" from the problem
    slot: Slot  # how the last kernel that used the tensor sees it
    born: int  # number of the launch that makes it
    dies: int = -1  # number of the last launch that uses it
    added: bool = False  # whether the launch that makes it adds to it


class Recording(NamedTuple):
    """What a pass does for one size. A launch is a stage's name and its tensors, in the order of the stage's slots."""

    sizes: Mapping[str, int]
    launches: list[tuple[str, list[Value]]]
    results: Mapping[str, Value | None]

    @property
    def values(self) -> list[Value]:
        """Every tensor once."""
        return list(dict.fromkeys(value for _, tensors in self.launches for value in tensors))

    def count_bytes(self, value: Value) -> int:
        """Size of a tensor."""
        return math.prod(value.slot.shape(self.sizes)) * value.slot.dtype.itemsize


def trace(flow: Flow, slots: Mapping[str, Sequence[Slot]], sizes: Mapping[str, int]) -> Recording:
    """Follows a flow with values in the place of tensors; ``slots`` are those of each stage by its name."""
    launches: list[tuple[str, list[Value]]] = []
    environment: dict[str, Value] = {}
    for number, (stage, freed) in enumerate(zip(flow.stages, flow.frees, strict=True)):
        tensors = []
        for slot in slots[stage.name]:
            role = "absent" if not slot.present else "made" if slot.written else "given"
            value = Value(slot.name, role, slot, born=number, added=slot.added)
            old = environment.get(slot.replaced) if slot.replaced in freed else None
            if role == "made" and old is not None and old.role == "made":
                value = old
            if role == "made":
                environment[slot.name] = value
            elif role == "given":
                value = environment.setdefault(slot.name, value)
            value.slot, value.dies = slot, number
            tensors.append(value)
        launches.append((stage.name, tensors))
    return Recording(sizes, launches, {name: environment.get(name) for name in flow.results})


def place(sizes_bytes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offsets of tensors in a workspace, and its size in bytes; tensors that live together never overlap.

    The largest first, each at the lowest offset that is free for its whole life, from its first launch to its last.
    """
    offsets = [0] * len(sizes_bytes)
    placed: list[int] = []
    for i in sorted(range(len(sizes_bytes)), key=lambda i: -sizes_bytes[i]):
        rivals = [j for j in placed if lives[j][0] <= lives[i][1] and lives[i][0] <= lives[j][1]]
        for j in sorted(rivals, key=offsets.__getitem__):
            if offsets[i] + sizes_bytes[i] <= offsets[j]:
                break
            offsets[i] = max(offsets[i], -(-(offsets[j] + sizes_bytes[j]) // ALIGNMENT) * ALIGNMENT)
        placed.append(i)
    return offsets, max((offsets[i] + sizes_bytes[i] for i in placed), default=0)


class Workspace(NamedTuple):
    """Where the intermediates of a pass lie: values, their offsets in bytes, and how many bytes they take in all."""

    values: list[Value]
    offsets: list[int]
    bytes: int

    @classmethod
    def of(cls, recording: Recording) -> "Workspace":
        """A place for every tensor that is made and not returned."""
        returned = [value for value in recording.results.values() if value]
        inner = [value for value in recording.values if value.role == "made" and value not in returned]
        sizes = [recording.count_bytes(value) for value in inner]
        # what is added to is zeros from the beginning, so nothing lies there before
        return cls(inner, *place(sizes, [(0 if value.added else value.born, value.dies) for value in inner]))


class Replay:
    """A recorded pass, called with the operator's arguments by name.

    Tensors must have the recorded shapes and dtypes, be contiguous and lie on 16-byte boundaries: callers see to it,
    nothing here looks. Kernels go to the current stream. Calls from several threads take turns. ``views`` are shapes of
    results other than the recorded ones, of as many elements; ``workspace_bytes`` is what intermediates take of the
    device's memory during a call.
    """

    def __init__(
        self,
        recording: Recording,
        kernels: Mapping[str, Kernel],
        device: torch.device,
        views: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        slots = {value: value.slot for value in recording.values}
        wanted = {name: value for name, value in recording.results.items() if value}
        inner, offsets, self.workspace_bytes = Workspace.of(recording)
        given = [s for s in slots if s.role == "given"]
        absent = [s for s in slots if s.role == "absent"]
        order = [*inner, *given, *wanted.values(), *absent]
        shapes = {value: slot.shape(recording.sizes) for value, slot in slots.items()}

        self._offsets = np.array(offsets, dtype=np.int64)
        self._headers = Headers([(shapes[s], slots[s].dtype) for s in order], device)
        self._inner, rest = np.split(self._headers.addresses, [len(inner)])
        self._outer, fixed = np.split(rest, [len(given) + len(wanted)])
        fixed[:] = [placeholder(slots[s].dtype, device).data_ptr() for s in absent]
        self._given = [s.name for s in given]
        seen = {name: shapes[s] for name, s in wanted.items()} | dict(views or {})
        self._wanted = [(name, seen[name], placeholder(slots[s].dtype, device).new_empty) for name, s in wanted.items()]
        self._added = [name for name, value in wanted.items() if value.added]
        self._zeros = [
            (offset, offset + recording.count_bytes(value))
            for value, offset in zip(inner, offsets, strict=True)
            if value.added
        ]
        self._absent = dict.fromkeys(name for name in recording.results if name not in wanted)
        self._new_bytes = placeholder(torch.uint8, device).new_empty

        address = {value: self._headers.address(i) for i, value in enumerate(order)}
        self._calls, self._blocks = [], []
        for name, tensors in recording.launches:
            kernel = kernels[name]
            numbers = kernel.stage.scalars
            block = Arguments([address[value] for value in tensors], len(numbers))
            self._calls.append((kernel, prepare_call(kernel.function, block)))
            self._blocks.append((numbers, block))
        self._numbers: list[float] = []  # those that the blocks hold
        self._names_of_numbers = sorted({name for names, _ in self._blocks for name in names})
        self._device, self._lock = device, threading.Lock()

    def __call__(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Launches the kernels: the pass's results by name, None for absent ones. Raises LaunchError.

        Results go to tensors that are given under their names, and to new ones otherwise.
        """
        workspace = self._new_bytes((self.workspace_bytes,)) if self.workspace_bytes else None
        results: dict[str, Any] = {name: arguments.get(name) for name, _, _ in self._wanted}
        for name, shape, new in self._wanted:
            if results[name] is None:
                results[name] = new(shape)
        for name in self._added:
            results[name].zero_()
        if workspace is not None:
            for start, end in self._zeros:
                workspace[start:end].zero_()
        outer = [arguments[name].data_ptr() for name in self._given]
        outer += [result.data_ptr() for result in results.values()]
        with self._lock:
            if workspace is not None:
                np.add(self._offsets, workspace.data_ptr(), out=self._inner)
            self._outer[:] = outer
            numbers = [arguments[name] for name in self._names_of_numbers]
            if numbers != self._numbers:  # a call's rarely change, and writing them is 1 us a launch
                for names, block in self._blocks:
                    block.numbers[:] = [arguments[name] for name in names]
                self._numbers = numbers
            self._launch()
        results.update(self._absent)
        return results

    def _launch(self) -> None:
        device = self._device
        cuda = device.type == "cuda"
        # not torch.cuda.current_stream, which builds an object for it in 2.5 us (H200's host)
        before = set_stream(device, torch._C._cuda_getCurrentRawStream(device.index)) if cuda else 0
        try:
            for kernel, call in self._calls:
                if call():
                    raise LaunchError(f"{kernel.stage.name} was not launched: {take_error()}")
        finally:
            if cuda:
                set_stream(device, before)
