"""Scans on Hopper that keep what they pass through: tiles from registers to memory, a chunk at a time."""

from collections.abc import Sequence
from typing import Any

import tilelang.language as T

BARRIER = 1  # a named one, of the threads that multiply


@T.macro
def _begin(threads):
    """Until the last chunk's tiles have been read."""
    T.tma_store_wait(0)
    T.sync_threads(BARRIER, threads)


@T.macro
def _copy(tile, shared):
    T.copy(tile, shared)


@T.macro
def _publish(threads):
    T.fence_proxy_async()
    T.sync_threads(BARRIER, threads)


@T.macro
def _store(shared, x, i_t, i_h, v0, threads):
    T.tma_copy(shared, x[i_t, i_h, v0 : v0 + shared.shape[0], :], leader_scope_threads=threads)


def put_tiles(
    tiles: Sequence[Any], shared: Sequence[Any], tensors: Sequence[Any], i_t: Any, i_h: Any, v0: Any, threads: int
) -> None:
    """Fragments ``[BV, width]`` to their rows of a chunk, by way of shared memory; does not wait for the stores.

    No macro: in one, a loop over tensors gives all of them the loop variable's name (TileLang 0.1.15).

    Args:
        tiles: fragments.
        shared: a tile in shared memory for each.
        tensors: where they go, ``[NT, HV, V, width]``.
        i_t: the chunk.
        i_h: the head.
        v0: the first row.
        threads: that hold the fragments, from the block's first on.
    """
    _begin(threads)
    for tile, to in zip(tiles, shared, strict=True):
        _copy(tile, to)
    _publish(threads)
    for to, x in zip(shared, tensors, strict=True):
        _store(to, x, i_t, i_h, v0, threads)
