"""A walk back over chunks on Hopper: what bwd_scan, bwd_resume and bwd_segment share.

dV'^T = dO^T Aqk + dS^T kg^T      dX^T = dV'^T A      dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg

warps             registers       produce                        consume
4 or 8 multiply   the stage's     dS, dX of each chunk, if kept  the ring
1 loads           the stage's     the ring                       tensors in memory

tensor         tile       dtype  where it lives
dS^T           [BV, KP]   fp32   registers, and rounded beside it
dV'^T, dX^T    [BV, BT]   fp32   registers, and rounded beside it
dO, factors    a slot     io     the ring, of num_stages slots: full when all of a chunk has come
dS^T, dX       one tile   io     shared memory, on the way to memory
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.templates.common.chunks import unpack_lower
from kda_tl.templates.common.tile import TL_DTYPE
from kda_tl.templates.sm90.recurrence import Factors, finish_values, load_lower, load_values, store_output

BARRIER = 1  # a named one, of the threads that multiply
BY_ROWS = T.GemmWarpPolicy.FullRow


def walk_back_reference(
    d_o: torch.Tensor, dstate: torch.Tensor, first: int, count: int, factors: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """The gradient of the transposed state [HV, rows, KP] before ``count`` chunks; of it after each, and of values.

    Args:
        d_o: [NT, HV, BT, rows], in the dtype of dstate.
        dstate: after the last chunk.
        first: the first chunk.
        count: of chunks.
        factors: what prep made, by name.
    """
    dstates, dx = [], []
    for t in reversed(range(first, first + count)):
        x = {name: factor[t].to(dstate.dtype) for name, factor in factors.items()}
        dstates.append(dstate)
        dx.append(unpack_lower(x["A"]).mT @ (unpack_lower(x["Aqk"]).mT @ d_o[t] + x["kg"] @ dstate.mT))
        dstate = dstate * x["decay"][:, None] + d_o[t].mT @ x["qg"] + dx[-1].mT @ x["k_neg"]
    return dstate, dstates[::-1], dx[::-1]


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


def store_tiles(
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


@dataclass(frozen=True)
class Walk:
    """What a thread block walks over.

    Attributes:
        i_s: the segment.
        i_n: its sequence, or what else load_state and store_state ask for.
        i_h: the value head.
        v0: the first row of the state.
        first: the first chunk.
        chunks: their number.
        start: the first token.
        end: the token past the last.
    """

    i_s: Any
    i_n: Any
    i_h: Any
    v0: Any
    first: Any
    chunks: Any
    start: Any
    end: Any


@dataclass(frozen=True)
class Tiles:
    """The slots of the ring: V or dO, and what prep made."""

    x: Any
    factors: Factors


@dataclass(frozen=True)
class Kept:
    """What a walk leaves of each chunk, the state and the values or their gradients, and tiles on the way there."""

    state: Any
    value: Any
    state_shared: Any
    value_shared: Any


@T.macro
def load_chunk(x, factors, tiles, ring, c, i_t, row, end, i_h, v0, backwards):
    """Producer: what a direction needs of a chunk, what is multiplied first before the rest."""
    held = tiles.factors
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    load_values(x, tiles.x, ring.full, slot, row, end, i_h, v0)
    if backwards:
        load_lower(factors.Aqk, i_t, i_h, held.Aqk, slot, ring.full)
        T.tma_copy(factors.kg[i_t, i_h, :, :], held.kg[slot, :, :], barrier=ring.full[slot])
        load_lower(factors.A, i_t, i_h, held.A, slot, ring.full)
        T.tma_copy(factors.qg[i_t, i_h, :, :], held.qg[slot, :, :], barrier=ring.full[slot])
        T.tma_copy(factors.k_neg[i_t, i_h, :, :], held.k_neg[slot, :, :], barrier=ring.full[slot])
    else:
        T.tma_copy(factors.k_neg[i_t, i_h, :, :], held.k_neg[slot, :, :], barrier=ring.full[slot])
        load_lower(factors.A, i_t, i_h, held.A, slot, ring.full)
        T.tma_copy(factors.kg[i_t, i_h, :, :], held.kg[slot, :, :], barrier=ring.full[slot])
    T.tma_copy(factors.decay[i_t, i_h, :], held.decay[slot, :], barrier=ring.full[slot])
    ring.commit(slot)


@T.macro
def load_backwards(case, d_o, factors, tiles, ring, w):
    """Producer: the chunks of a segment from the last to the first."""
    for c in T.serial(w.chunks):
        i_c = w.chunks - 1 - c
        row = w.start + i_c * case.BT
        load_chunk(d_o, factors, tiles, ring, c, w.first + i_c, row, w.end, w.i_h, w.v0, True)


@T.macro
def decay_state(state, decay, slot):
    """Every channel of a state by its own factor."""
    for i, j in T.Parallel(*state.shape):
        state[i, j] = state[i, j] * decay[slot, j]


@T.macro
def walk_backwards(case, config, load_state, ends, tiles, ring, w, kept):
    """Consumer: gradients of states and values from the last chunk to the first.

    Args:
        case: what the kernel is built for.
        config: of the stage.
        load_state: macro of the fragment to fill, the tensor of states, whether that is there, and the walk.
        ends: gradients of the states after segments.
        tiles: slots of the ring.
        ring: their barriers.
        w: the walk.
        kept: where the gradients of each chunk go; None where they are not wanted.

    Returns:
        The gradient of the state before the first chunk, in registers.
    """
    p, BT, BV, held = case.problem, case.BT, config.BV, tiles.factors
    io, f32 = TL_DTYPE[p.dtype], "float32"
    state = T.alloc_fragment((BV, p.KP), f32)
    state_io = T.alloc_fragment((BV, p.KP), io)
    value = T.alloc_fragment((BV, BT), f32)
    value_io = T.alloc_fragment((BV, BT), io)
    load_state(state, ends, p.final_state, w)
    T.copy(state, state_io)
    for c in T.serial(w.chunks):
        slot, phase = ring.place_to_read(c)
        i_c = w.chunks - 1 - c
        ring.wait(slot, phase)
        T.wgmma_gemm(
            tiles.x[slot, :, :], held.Aqk[slot, :, :], value, transpose_A=True, clear_accum=True, policy=BY_ROWS
        )
        T.wgmma_gemm(state_io, held.kg[slot, :, :], value, transpose_B=True, policy=BY_ROWS)
        finish_values(value, value_io)
        T.wgmma_gemm(value_io, held.A[slot, :, :], value, clear_accum=True, policy=BY_ROWS)
        if kept is not None:
            store_tiles((state_io,), (kept.state_shared,), (kept.state,), w.first + i_c, w.i_h, w.v0, config.consumers)
        decay_state(state, held.decay, slot)
        T.wgmma_gemm(tiles.x[slot, :, :], held.qg[slot, :, :], state, transpose_A=True, policy=BY_ROWS)
        T.wait_wgmma(1)
        T.warpgroup_fence_operand(value, num_regs=BT // 2)
        T.copy(value, value_io)
        T.wgmma_gemm(value_io, held.k_neg[slot, :, :], state, policy=BY_ROWS)
        if kept is not None:
            store_output(value_io, kept.value_shared, kept.value, w.start + i_c * BT, w.start, w.end, w.i_h, w.v0)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(state, num_regs=p.KP // 2)
        ring.release(slot)
        T.copy(state, state_io)
    if kept is not None:
        T.tma_store_wait(0)
    return state
