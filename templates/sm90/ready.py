"""Chunks in memory that one kernel makes while the next already reads: see fwd_gdn_pairs.

    maker      withdraw      before it lets the next kernel start (T.pdl_trigger)
               announce      after each chunk
               announce_all  at its end instead, where it has all registers: then no reader runs beside it
    reader     await_chunk   before it loads one
               T.pdl_sync    before it ends, so that what follows it follows the maker too; at its start instead, where
                             it has all registers

The next kernel starts when all blocks of the maker run, so that the maker never waits for room that the reader has.
Where kernels may not overlap all chunks are ready at once. A tensor that only the maker uses must not share its place
in a workspace with one that the reader writes; fwd_gdn_pairs has none.
"""

from __future__ import annotations

from kda_tl.core.stage import Case
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.recurrence import ROWS

# TileLang 0.1.15 has no fence between what threads wrote to memory and what the tensor memory accelerator reads there
FENCES = r"""
static __device__ __forceinline__ void await_flag(const float* flag) {
  float found;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=f"(found) : "l"(flag) : "memory");
  } while (found != 1.0f);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""


def overlap(case: Case) -> bool:
    """Whether makers run best beside readers: these, of 64 value channels a block, find a multiprocessor each at once.

    More of them would come in turns, after the maker too. Then both are faster alone, with all of a multiprocessor's
    registers. Sequences count as if all were as long as the longest.
    """
    p = case.problem
    sequences = max(1, p.tokens // max(1, p.longest))
    return p.HV * (p.V // ROWS) * sequences <= case.device.num_sms


@T.macro
def withdraw(ready, shares, i_block, blocks, turns):
    """No chunk of a block's is ready; ``shares`` tell what is done in a turn."""
    for n in T.serial(turns):
        work = shares.find(i_block + n * blocks)
        for m in T.serial(work.count):
            if T.get_thread_binding() == (n * work.count + m) % 128:
                ready[work.i_t, work.first + m] = 0.0
    T.call_extern("handle", "__threadfence")
    T.sync_threads()


@T.macro
def announce(ready, i_t, i_h):
    """All threads have written a chunk."""
    T.sync_threads()
    if T.get_thread_binding() == 0:
        T.call_extern("handle", "__threadfence")
        T.atomic_store(ready[i_t, i_h], 1.0, memory_order="release")


@T.macro
def announce_all(ready, shares, i_block, blocks, turns):
    """All threads have written all chunks of a block's. One fence a thread: one a flag costs 5 us of 240."""
    T.sync_threads()
    T.call_extern("handle", "__threadfence")
    for n in T.serial(turns):
        work = shares.find(i_block + n * blocks)
        for m in T.serial(work.count):
            if T.get_thread_binding() == (n * work.count + m) % 128:
                T.atomic_store(ready[work.i_t, work.first + m], 1.0, memory_order="relaxed")


@T.macro
def await_chunk(ready, i_t, i_h):
    """Until a chunk is in memory, for the tensor memory accelerator too."""
    T.call_extern("handle", "await_flag", T.address_of(ready[i_t, i_h]))
