"""A walk back over chunks on Hopper: what bwd_scan, bwd_gdn_scan, bwd_resume and bwd_segment share.

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

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Operands
from kda_tl.templates.common.chunks import unpack_lower
from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE
from kda_tl.templates.sm90.recurrence import (
    WARPGROUP,
    find_eights,
    finish_values,
    issue_transposed,
    layout_transposed,
    load_lower,
    load_values,
)

BARRIER = 1  # a named one, of the threads that multiply


def step_back_reference(
    x: Operands, t: int, d_o: torch.Tensor, dstate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the values [HV, BT, rows] of chunk t, and of the transposed state [HV, rows, KP] before it.

    ``x`` is what prep made, by name; d_o is of all chunks, [NT, HV, BT, rows], and dstate is that after the chunk, in
    one dtype.
    """
    A, Aqk, k_neg, qg, kg, decay = (y[t].to(dstate.dtype) for y in (x.A, x.Aqk, x.k_neg, x.qg, x.kg, x.decay))
    dx = unpack_lower(A).mT @ (unpack_lower(Aqk).mT @ d_o[t] + kg @ dstate.mT)
    return dx, dstate * decay[:, None] + d_o[t].mT @ qg + dx.mT @ k_neg


@T.macro
def store_tiles(tiles, shared, tensors, i_t, i_h, v0, threads):
    """Fragments ``[BV, width]`` to their rows of a chunk, ``[NT, HV, V, width]``, by way of a tile in shared memory for
    each; the block's first ``threads``, which hold the fragments. Does not wait for the stores.
    """
    T.tma_store_wait(0)  # the last chunk's tiles have been read
    T.sync_threads(BARRIER, threads)
    for m in list(range(len(tiles))):  # of numbers, see load_parts
        T.copy(tiles[m], shared[m])
    T.fence_proxy_async()
    T.sync_threads(BARRIER, threads)
    for m in list(range(len(tiles))):
        rows = shared[m].shape[0]
        T.tma_copy(shared[m], tensors[m][i_t, i_h, v0 : v0 + rows, :], leader_scope_threads=threads)


@T.macro
def store_found(r, kept, i_t, first, w, threads):
    """The state before a chunk, and its values to the rows of their tokens, from token ``first``, by way of shared
    memory; by the block's first ``threads``, which hold them. Does not wait for the stores.
    """
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread // 32
    groups, BT, width = kept.value_shared.shape
    rounded = T.alloc_fragment((BT, r.value_io.shape[0]), r.value_io.dtype)
    T.annotate_layout({rounded: layout_transposed(rounded)})
    for i, j in T.Parallel(*r.value_io.shape):
        rounded[j, i] = r.value_io[i, j]
    T.tma_store_wait(0)  # the last chunk's tiles have been read
    T.sync_threads(BARRIER, threads)
    T.copy(r.state_io, kept.state_shared)
    for n in T.unroll(BT // 16):
        place, _ = find_eights(n, lane, warp % 4)
        _, pairs = find_eights(n, lane, warp)
        T.call_extern(
            "handle",
            "store_transposed",
            T.address_of(kept.value_shared[(thread // WARPGROUP, *place)]),
            T.address_of(rounded[pairs]),
        )
    T.fence_proxy_async()
    T.sync_threads(BARRIER, threads)
    rows = kept.state_shared.shape[0]
    T.tma_copy(kept.state_shared, kept.state[i_t, w.i_h, w.v0 : w.v0 + rows, :], leader_scope_threads=threads)
    if first + BT <= w.end:
        for m in list(range(groups)):  # of numbers, see load_parts
            own = kept.value[first : first + BT, w.i_h, w.v0 + m * width : w.v0 + (m + 1) * width]
            T.tma_copy(kept.value_shared[m, :, :], own, leader_scope_threads=threads)
    else:  # what follows is another sequence's
        tokens = HeadRows.of(kept.value, first, w.i_h)
        for m, i, j in T.Parallel(groups, BT, width):
            if first + i < w.end:
                tokens.rows[i, w.v0 + m * width + j] = kept.value_shared[m, i, j]


@T.macro
def store_rows(output, o_shared, o, first, start, end, i_h, v0):
    """Rows of the chunk that begins at token ``first``, if they lie between ``start`` and ``end``, by way of a tile."""
    BV, BT, own = *output.shape, HeadRows.of(o, first, i_h)
    for i, j in T.Parallel(BV, BT):
        o_shared[j, i] = T.cast(output[i, j], o.dtype)
    for i, j in T.Parallel(BT, BV):
        if (first + i >= start) & (first + i < end):
            own.rows[i, v0 + j] = o_shared[i, j]


@dataclass(frozen=True)
class Walk:
    """What a thread block walks over."""

    i_s: Any  # the segment
    i_n: Any  # its sequence, or what else load_state and store_gradient ask for
    i_h: Any  # the value head
    v0: Any  # the first row of the state
    first: Any  # the first chunk
    chunks: Any  # their number
    start: Any  # the first token
    end: Any  # the token past the last
    passed: Any = None  # so many of the first chunks are walked only to find a state, and nothing is kept of them


@dataclass(frozen=True)
class Products:
    """How what is loaded of a chunk becomes its values, or their gradients, and the next state, as macros.

    Between the two of a direction the inverse is multiplied with what the first leaves, and what a chunk keeps is
    stored.
    """

    alloc_tiles: Any  # the slots of the ring
    load_chunk: Any  # to a slot
    find_values: Any  # forwards: what the inverse is multiplied with, rounded
    take_values: Any  # the values, rounded, and the state that takes them on its way
    find_gradients: Any  # backwards: the same of gradients
    take_gradients: Any
    multiply_gradients: Any  # with the inverse, on their way


@T.macro
def alloc_tiles(case, config):
    """The slots of the ring, by the names of what they hold; x is V or dO."""
    stages, BT, KP, io = config.num_stages, case.BT, case.problem.KP, TL_DTYPE[case.problem.dtype]
    x_shared = T.alloc_shared((stages, BT, config.BV), io)
    A_shared = T.alloc_shared((stages, BT, BT), io)
    Aqk_shared = T.alloc_shared((stages, BT, BT), io)
    n_shared = T.alloc_shared((stages, BT, KP), io)
    q_shared = T.alloc_shared((stages, BT, KP), io)
    k_shared = T.alloc_shared((stages, BT, KP), io)
    decay_shared = T.alloc_shared((stages, KP), "float32")
    triangles, factors = {"A": A_shared, "Aqk": Aqk_shared}, {"k_neg": n_shared, "qg": q_shared, "kg": k_shared}
    return SimpleNamespace(x=x_shared, **triangles, **factors, decay=decay_shared)


@T.macro
def load_chunk(v, x, tiles, ring, c, i_t, row, w, backwards):
    """Producer: what a direction needs of a chunk, what is multiplied first before the rest; v is V or dO."""
    i_h = w.i_h
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    load_values(v, tiles.x, ring.full, slot, row, w.end, i_h, w.v0)
    for name in ("Aqk", "kg", "A", "qg", "k_neg") if backwards else ("k_neg", "A", "kg"):
        if name in ("A", "Aqk"):
            load_lower(getattr(x, name), i_t, i_h, getattr(tiles, name), slot, ring.full)
        else:
            T.tma_copy(getattr(x, name)[i_t, i_h, :, :], getattr(tiles, name)[slot, :, :], barrier=ring.full[slot])
    T.tma_copy(x.decay[i_t, i_h, :], tiles.decay[slot, :], barrier=ring.full[slot])
    ring.commit(slot)


@T.macro
def load_backwards(case, products, x, tiles, ring, w):
    """Producer: the chunks of a segment from the last to the first."""
    for c in T.serial(w.chunks):
        i_c = w.chunks - 1 - c
        row = w.start + i_c * case.BT
        products.load_chunk(x.d_o, x, tiles, ring, c, w.first + i_c, row, w, True)


@T.macro
def decay_state(state, decay, slot):
    """Every channel of a state by its own factor."""
    for i, j in T.Parallel(*state.shape):
        state[i, j] = state[i, j] * decay[slot, j]


@T.macro
def find_values(r, tiles, slot):
    """V^T + S^T k_neg^T; the first slot of Aqk, which is not loaded, is the identity."""
    issue_transposed(tiles.x, tiles.Aqk[0, :, :], slot, r.value)
    T.wgmma_gemm(r.state_io, tiles.k_neg[slot, :, :], r.value, transpose_B=True, policy=T.BY_ROWS)
    finish_values(r.value, r.value_io)


@T.macro
def take_values(r, tiles, slot):
    """S^T diag(decay) + V'^T kg."""
    decay_state(r.state, tiles.decay, slot)
    finish_values(r.value, r.value_io)
    T.wgmma_gemm(r.value_io, tiles.kg[slot, :, :], r.state, policy=T.BY_ROWS)


@T.macro
def find_gradients(r, tiles, slot):
    """dO^T Aqk + dS^T kg^T."""
    T.wgmma_gemm(
        tiles.x[slot, :, :], tiles.Aqk[slot, :, :], r.value, transpose_A=True, clear_accum=True, policy=T.BY_ROWS
    )
    T.wgmma_gemm(r.state_io, tiles.kg[slot, :, :], r.value, transpose_B=True, policy=T.BY_ROWS)
    finish_values(r.value, r.value_io)


@T.macro
def take_gradients(r, tiles, slot):
    """dS^T diag(decay) + dO^T qg + dX^T k_neg."""
    decay_state(r.state, tiles.decay, slot)
    T.wgmma_gemm(tiles.x[slot, :, :], tiles.qg[slot, :, :], r.state, transpose_A=True, policy=T.BY_ROWS)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(r.value, num_regs=r.value.shape[1] // 2)
    T.copy(r.value, r.value_io)
    T.wgmma_gemm(r.value_io, tiles.k_neg[slot, :, :], r.state, policy=T.BY_ROWS)


@T.macro
def multiply_gradients(r, A, slot):
    """dV'^T A on its way."""
    T.wgmma_gemm(r.value_io, A[slot, :, :], r.value, clear_accum=True, policy=T.BY_ROWS)


FACTOR_PRODUCTS = Products(
    *(alloc_tiles, load_chunk, find_values, take_values, find_gradients, take_gradients, multiply_gradients)
)


@T.macro
def alloc_registers(case, config):
    """A state, or its gradient, and values, or theirs, of a thread that multiplies, and both rounded."""
    p, BT, BV = case.problem, case.BT, config.BV
    io, f32 = TL_DTYPE[p.dtype], "float32"
    state = T.alloc_fragment((BV, p.KP), f32)
    state_io = T.alloc_fragment((BV, p.KP), io)
    value = T.alloc_fragment((BV, BT), f32)
    value_io = T.alloc_fragment((BV, BT), io)
    return SimpleNamespace(state=state, state_io=state_io, value=value, value_io=value_io)


@T.macro
def walk_backwards(case, config, products, load_state, ends, tiles, ring, w, kept):
    """Consumer: gradients of states and values from the last chunk to the first, from ``ends``, those of the states
    after segments.

    ``load_state`` is a macro of the fragment to fill, the tensor of states, whether that is there, and the walk.
    ``kept`` says where the gradients of each chunk go, and tiles on the way there; None where they are not wanted.
    Returns the gradient of the state before the first chunk, in registers.
    """
    p, BT = case.problem, case.BT
    r = alloc_registers(case, config)
    load_state(r.state, ends, p.final_state, w)
    T.copy(r.state, r.state_io)
    for c in T.serial(w.chunks):
        slot, phase = ring.place_to_read(c)
        i_c = w.chunks - 1 - c
        ring.wait(slot, phase)
        products.find_gradients(r, tiles, slot)
        products.multiply_gradients(r, tiles.A, slot)
        if kept is not None:
            shared, tensors = (kept.state_shared,), (kept.state,)
            store_tiles((r.state_io,), shared, tensors, w.first + i_c, w.i_h, w.v0, config.consumers)
        products.take_gradients(r, tiles, slot)
        if kept is not None:
            store_rows(r.value_io, kept.value_shared, kept.value, w.start + i_c * BT, w.start, w.end, w.i_h, w.v0)
        T.wait_wgmma(0)
        T.warpgroup_fence_operand(r.state, num_regs=p.KP // 2)
        ring.release(slot)
        T.copy(r.state, r.state_io)
    if kept is not None:
        T.tma_store_wait(0)
    return r.state
