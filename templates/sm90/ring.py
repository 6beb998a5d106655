"""A ring of tiles in shared memory, which a warp fills by copies and warpgroups empty by products.

    who        waits           until               tells       that
    producer   acquire         the slot is empty   commit      copies of all of its tiles are under way
    consumer   wait            they have come      release     they have been read

The barriers of a slot change their phase each time that the ring comes round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.language import T


@dataclass(frozen=True)
class Ring:
    """The barriers of a ring, one of each a slot."""

    full: Any  # complete when the copies that name it have come and their producers have committed
    empty: Any  # complete when all consumers have released the slot

    @property
    def stages(self) -> int:
        """Number of slots."""
        return int(self.full.shape[0])

    def place_to_fill(self, step: Any) -> tuple[Any, Any]:
        """The slot of a step, and the phase in which a producer finds it empty: the first time at once."""
        return step % self.stages, (step // self.stages + 1) % 2

    def place_to_read(self, step: Any) -> tuple[Any, Any]:
        """The slot of a step, and the phase in which a consumer finds it full."""
        return step % self.stages, step // self.stages % 2

    def acquire(self, slot: Any, phase: Any) -> Any:
        """Producer: waits until a slot may be written."""
        return T.barrier_wait(self.empty[slot], phase)

    def commit(self, slot: Any) -> Any:
        """Producer: everything that the slot waits for has been asked for."""
        return T.barrier_arrive(self.full[slot])

    def wait(self, slot: Any, phase: Any) -> Any:
        """Consumer: waits until a slot may be read."""
        return T.barrier_wait(self.full[slot], phase)

    def release(self, slot: Any) -> Any:
        """Consumer: the slot has been read."""
        return T.barrier_arrive(self.empty[slot])


@dataclass(frozen=True)
class Slot:
    """A tile of a ring."""

    tiles: Any
    slot: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.tiles.shape[1:]

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.tiles.dtype

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        return self.tiles[(self.slot, *at)]
