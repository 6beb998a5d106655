"""Output by a warp of its own: a warpgroup that multiplies leaves a chunk in shared memory, and goes on at once.

    who        waits until               then                                        tells
    group      the tile has been read    puts a chunk there                          that it is there, without waiting
    warp       the chunk is there        sends it, and waits until that has read it  that the tile has been read

They tell each other by two named barriers a warpgroup. The fence between what one proxy writes and the other reads may
lie anywhere on the way: it is the warp's, since a group would wait for it in each chunk. Of a chunk that is not whole
the group itself stores the rows that are its sequence's.
"""

from typing import Any

from kda_tl.templates.common.heads import split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.outputs import OUTPUT_BARRIER, STATES_BARRIER
from kda_tl.templates.sm90.recurrence import PRODUCER, WARPGROUP, find_chunks, put_transposed, store_rows

BOTH = WARPGROUP + PRODUCER  # threads
READ = -2  # from the barrier that tells that a chunk is there to the one that tells that it has been read
OWN = STATES_BARRIER - OUTPUT_BARRIER  # and to the group's alone


def find_unseen(element: Any) -> Any:
    """The address of an element of which TileLang 0.1.15 does not know that it is written.

    If it knows, it has a fence before the next product, though that does not read the tile.
    """
    return T.access_ptr(element, "r", extent=8)


@T.macro
def leave_output(rounded, x):
    """As recurrence.store_output, for the warp to send."""
    if x.first >= x.start:
        T.sync_threads(x.barrier + READ, BOTH)
        put_transposed(rounded, x.tile, find_unseen)
        T.named_barrier_arrive(x.barrier, BOTH)


@T.macro
def leave_last(rounded, x):
    """As recurrence.store_last, for the warp to send if it is whole."""
    leave_output(rounded, x)
    if (x.first >= x.start) & (x.first + x.tile.shape[0] > x.end):
        T.sync_threads(x.barrier + OWN, WARPGROUP)
        store_rows(x)


@T.macro
def send(z, group, i_block, blocks, x, tile):
    """The warp's part, in the group's order: all chunks of its segments."""
    BT, BV = tile.shape
    barrier, segments, HV = OUTPUT_BARRIER + group, x.segments, x.v.shape[1]
    for n in T.serial(T.ceildiv(segments.shape[0] * HV * z.VB - i_block, blocks)):
        i = i_block + n * blocks
        i_s, i_h, _ = split_block(i, (segments.shape[0], HV), z.VB)
        v0 = z.first_channel(i, group)
        _, chunks, start, end = find_chunks(segments, x.chunk_tokens, i_s)
        for c in T.serial(chunks):
            row = start + c * BT
            T.named_barrier_arrive(barrier + READ, BOTH)
            T.sync_threads(barrier, BOTH)
            if row + BT <= end:
                T.fence_proxy_async()
                T.tma_copy(tile, x.o[row : row + BT, i_h, v0 : v0 + BV], leader_scope_threads=PRODUCER)
                T.tma_store_wait(0)
