"""Where rows of q and k lie that share a tile: as many of q, then as many of k, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BC = 16  # tokens a sub-chunk
NB = 4  # sub-chunks a chunk: kernels of whole chunks are written for four, and their sums name each


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of a chunk."""

    run: int  # neighbouring rows of q, above as many of k
    later_first: bool = False  # whether the later half of a chunk lies above the earlier; then runs are of a sub-chunk

    def _place(self, block: Any) -> Any:
        """Where a run lies among the runs, or which run lies there."""
        return (block + NB // 2) % NB if self.later_first else block

    def first_row(self, block: Any) -> Any:
        """The first row of q of a run; that of k is ``run`` below."""
        return self._place(block) * 2 * self.run

    def row_of(self, i: Any) -> Any:
        """The row of q of token i; that of k is ``run`` below."""
        return self._place(i // self.run) * 2 * self.run + i % self.run

    def token_of(self, r: Any) -> Any:
        """The token of row r, of q or of k."""
        return self._place(r // (2 * self.run)) * self.run + r % self.run

    def is_key(self, r: Any) -> Any:
        """1 for rows of k, 0 for those of q."""
        return r // self.run % 2


BY_SUB_CHUNK = RowOrder(run=BC)  # pairs, norms and what they are multiplied with
# Operands of prep: the later half meets most keys, from registers, and TileLang 0.1.15 fills these by ldmatrix from a
# tile's start, whatever the start of the slice.
LATER_FIRST = RowOrder(run=BC, later_first=True)
# Operands of the gradients: the two rows of a thread in the matrix unit's order, 8 apart, belong to one token
BY_EIGHT = RowOrder(run=BC // 2)


@dataclass(frozen=True)
class Pairs:
    """Rows of q and of k, BY_SUB_CHUNK, multiplied with keys, and which of its rows belongs to a token's key."""

    tile: Any  # [2 BT, BT], some columns more

    def of_key(self, i: Any, j: Any) -> Any:
        """Of token i with the key of token j."""
        return self.tile[BY_SUB_CHUNK.row_of(i) + BC, j]
