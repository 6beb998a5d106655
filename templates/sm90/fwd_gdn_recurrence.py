"""Recurrence of Gated DeltaNet for Hopper, on the caller's q and k.

    V'^T = (V^T - (S^T K^T) diag(rk 2^G)) A^T           O^T = (S^T Q^T) diag(scale rq 2^G) + V'^T Aqk^T
    S^T <- 2^G_last S^T + (V'^T diag(rk 2^(G_last - G))) K

This is fwd_recurrence for a gate that all channels of a value head share; the diagonal factors are the powers of
fwd_gdn_pairs, see powers. K serves two products. Roles and loops are fwd_recurrence's; what differs is below.

    slot of the one ring    v, q, k, A, Aqk, powers
    begins                  while fwd_gdn_pairs makes later chunks, and waits for each, see ready; with all registers
                            after its last one
    V^T                     read from shared memory by the threads that hold the values' columns
    output                  sent by a warp of its own, see sender
    first state             by slices, see starts

Source: Gated Delta Networks, arXiv:2412.06464, section 3.3, in the form of fwd_recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90 import fwd_recurrence
from kda_tl.templates.sm90.fwd_recurrence import recurrence_cost
from kda_tl.templates.sm90.hopper import PAIRS, READY, TABLES
from kda_tl.templates.sm90.outputs import OUTPUTS, Products, Sizes, recur, states_bytes
from kda_tl.templates.sm90.powers import (
    END,
    GIVEN_ROWS,
    LAST,
    MULTIPLIED,
    QUERY,
    START,
    make_factors,
    reject_rows,
    take_powers,
)
from kda_tl.templates.sm90.ready import FENCES, await_chunk, overlap
from kda_tl.templates.sm90.recurrence import (
    ROWS,
    STORES,
    TOLERANCE,
    WARPGROUP,
    RecurrenceConfig,
    load_lower,
    load_values,
    take_transposed,
)
from kda_tl.templates.sm90.sender import leave_last, leave_output, send
from kda_tl.templates.sm90.starts import alloc_slices, load_slices, slice_bytes

INPUTS = {
    **GIVEN_ROWS,
    "v": "tokens HV V : io",
    **PAIRS,
    **READY,
    "h0": "N HV K V : f32 ? initial_state",
    **TABLES,
}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: fwd_recurrence's, of factors made from rows and powers."""
    return fwd_recurrence.reference(case, make_factors(case, x))


SHARING_REGISTERS = 216  # with a loader's 40 on average 128: half of a multiprocessor's for 256 threads


@dataclass(frozen=True, kw_only=True)
class GdnRecurrenceConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; shares:
    whether registers are left for two blocks of fwd_gdn_pairs, which then run beside it.
    """

    shares: bool = tunable(True, True, False)
    early: ClassVar[bool] = False  # all of a chunk comes at once
    powers: ClassVar[int] = MULTIPLIED  # of a token, that are loaded

    def reject(self, case: Case) -> str | None:
        """As the base, and channels that lie in whole tiles, since the caller's rows are not padded."""
        if self.shares and self.BV > ROWS:
            return f"BV={self.BV} leaves no registers to share"
        return super().reject(case) or reject_rows(case, self.WIDTHS)

    @property
    def registers(self) -> int | None:  # type: ignore[override]
        """Of a thread that multiplies."""
        return SHARING_REGISTERS if self.shares else None

    @property
    def pairs_stages(self) -> int:
        """Slots of Aqk."""
        return self.num_stages

    def rest_stages(self, case: Case) -> int:
        """Chunks of which all is loaded ahead."""
        return self.num_stages

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, the output's, those of first and other states, and two barriers a stage."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + 2 * BT + 2 * K) * 2 + 4 * BT * 4 + 16
        output = BT * self.BV * 2
        return self.num_stages * stage + output + states_bytes(case, self.BV) + slice_bytes(case, self.BV // ROWS)


@T.macro
def await_pairs(x, i_t, i_h):
    """They may still be in the making. What else there is to read was there before."""
    if x.ready is not None:
        await_chunk(x.ready, i_t, i_h)
    else:
        T.pdl_sync()


@T.macro
def load_nothing(z, x, i_t, i_h, tiles, slot, full):
    """All of a chunk comes at once."""


@T.macro
def load_chunk(z, x, i_t, i_h, tiles, slot, full, first, end):
    """Everything but v."""
    i_k = x.heads.of_keys(i_h)
    load_values(x.k, tiles.k, full, slot, first, end, i_k, 0)
    load_values(x.q, tiles.q, full, slot, first, end, i_k, 0)
    load_lower(x.A, i_t, i_h, tiles.A, slot, full)
    if x.Aqk is not None:
        load_lower(x.Aqk, i_t, i_h, tiles.Aqk, slot, full)
    T.tma_copy(x.powers[i_t, i_h, : z.config.powers, :], tiles.powers[slot, :, :], barrier=full[slot])


@dataclass(frozen=True)
class Queries:
    """Pairs of queries, which come with the rest of a chunk."""

    Aqk: Any

    def await_slot(self, slot: Any, step: Any) -> Any:
        """Waits for a chunk's. Their slot."""
        return slot

    def release(self, own_slot: Any) -> Any:
        """They have been read."""


@T.macro
def alloc_tiles(z):
    """By the names of what they hold."""
    BT, K, io, stages = z.case.BT, z.case.problem.K, z.io, z.config.num_stages
    A_shared = T.alloc_shared((stages, BT, BT), io)
    Aqk_shared = T.alloc_shared((z.config.pairs_stages, BT, BT), io)
    q_shared = T.alloc_shared((stages, BT, K), io)
    k_shared = T.alloc_shared((stages, BT, K), io)
    powers = T.alloc_shared((stages, z.config.powers, BT), "float32")
    start = alloc_slices(z)
    tiles = {"A": A_shared, "Aqk": Aqk_shared, "q": q_shared, "k": k_shared, "powers": powers, "start": start}
    return {**tiles, "queries": Queries(Aqk_shared)}


@T.macro
def issue_values(z, r, tiles, group, slot):
    """S^T K^T on its way."""
    T.wgmma_gemm(r.state_io, tiles.k[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)


@T.macro
def finish_values(z, r, tiles, group, slot):
    """What the inverse is multiplied with, rounded."""
    start = take_powers(r.value, tiles.powers, slot, START)
    given = take_transposed(tiles.v[group], slot)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.value, num_regs=z.case.BT // 2)
    for i, j in T.Parallel(*r.value.shape):
        r.value_io[i, j] = T.cast(T.cast(given[j, i], "float32") - r.value[i, j] * start[i, j], z.io)


@T.macro
def finish_chunk(z, r, tiles, slot, step):
    """The state decays while V'^T and S^T Q^T are on their way; the latter is scaled while the state takes values.

    Powers come first: what is read from shared memory after products waits until the matrix unit has taken them.
    """
    kept = T.alloc_fragment(r.value.shape, z.io)  # what of the values the state takes
    decay = T.alloc_var("float32")
    state, queries = r.state[0], tiles.queries
    own_slot = queries.await_slot(slot, step)
    decay = tiles.powers[slot, LAST, 0]
    end = take_powers(r.value, tiles.powers, slot, END)
    T.wgmma_gemm(r.value_io, tiles.A[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    T.wgmma_gemm(r.state_io, tiles.q[slot, :, :], r.output, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    for i, j in T.Parallel(*state.shape):
        state[i, j] = state[i, j] * decay
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(r.value, num_regs=z.case.BT // 2)
    for i, j in T.Parallel(*r.value.shape):
        kept[i, j] = T.cast(r.value[i, j] * end[i, j], z.io)
    query = take_powers(r.output, tiles.powers, slot, QUERY)
    T.wgmma_gemm(kept, tiles.k[slot, :, :], state, policy=T.BY_ROWS)
    T.copy(r.value, r.value_io)
    T.wait_wgmma(1)
    T.warpgroup_fence_operand(r.output, num_regs=z.case.BT // 2)
    for i, j in T.Parallel(*r.output.shape):
        r.output[i, j] = r.output[i, j] * query[i, j]
    T.wgmma_gemm(r.value_io, queries.Aqk[own_slot, :, :], r.output, transpose_B=True, policy=T.BY_ROWS)
    T.wait_wgmma(1)  # not across the loop's end, see outputs.compute_output
    T.warpgroup_fence_operand(state, num_regs=state.shape[1] // 2)
    T.copy(state, r.state_io)
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(r.output, num_regs=z.case.BT // 2)
    queries.release(own_slot)


ROW_PRODUCTS = Products(
    *(await_pairs, load_nothing, load_chunk, alloc_tiles, issue_values, finish_values, finish_chunk),
    *(leave_output, leave_last, send),
)


def build(case: Case, config: GdnRecurrenceConfig) -> Any:
    """The kernel: states start from those that the caller gives, or from zero."""
    z, heads, load_state = Sizes(case, config, ROW_PRODUCTS), Heads.of(case.problem), load_slices(case.problem)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def fwd_gdn_recurrence(q, k, v, A, Aqk, powers, ready, h0, segments, chunk_tokens, o, ht, h):
        blocks = T.min(NS * heads.HV * z.VB, case.device.num_sms)
        with T.Kernel(blocks, threads=config.consumers + WARPGROUP, prelude=FENCES + STORES) as i_block:
            T.annotate_min_blocks_per_sm(2 if config.shares else 1)
            read = {"q": q, "k": k, "v": v, "A": A, "Aqk": Aqk, "powers": powers, "states": h0}
            read["ready"] = ready if config.shares else None
            tables, written = {"segments": segments, "chunk_tokens": chunk_tokens}, {"o": o, "ht": ht, "h": h}
            recur(z, load_state, i_block, blocks, SimpleNamespace(**read, **tables, **written, heads=heads))
            if config.shares:
                T.pdl_sync()

    return fwd_gdn_recurrence


def default(case: Case) -> Config:
    """64 channels a block beside fwd_gdn_pairs, 128 after it."""
    wide = not overlap(case)
    wider = [GdnRecurrenceConfig(BV=2 * ROWS if wide else ROWS, num_stages=n, shares=False) for n in (3, 2)]
    return first_valid(case, *([] if wide else [GdnRecurrenceConfig()]), *wider, GdnRecurrenceConfig(shares=False))


def passes(case: Case) -> dict[str, bool]:
    """TileLang 0.1.15 does not see that outputs are written before they are sent, see sender.find_unseen."""
    return {"tl.disable_buffer_init_check": True}


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """q, k, v, what is known of chunks and initial states in; o and final states out."""
    return recurrence_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_gdn_recurrence",
    INPUTS,
    OUTPUTS,
    GdnRecurrenceConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("num_sms",),
    passes=passes,
)
