"""Recurrence of Gated DeltaNet for Hopper that makes the pairs of queries itself, beside its products.

    Aqk[i, j] = scale rq_i 2^(G_i - H_j) <q_i, k_j>   j <= i,   H = G - log2 rk

The rest is fwd_gdn_recurrence's. It has q, k and the powers of a chunk in shared memory, so fwd_gdn_inverse need not
make Aqk nor this read it. A warpgroup more makes it, up to three chunks ahead:

    warps                        registers   produce          consume
    4, or twice 4: multiply      208         o, h, ht         the ring, Aqk
    4: make                      64          Aqk              the ring
    1: loads, 3: send or idle    32          the ring, o      tensors in memory

    ring    slots         tiles
    ring    num_stages    v, q, k, A, powers
    made    3             Aqk

Who multiplies waits for Aqk before a chunk's product with A. Later, while products are on their way, there are no
registers for it: ptxas (CUDA 13.0) then waits after each product of the kernel.
Source: as fwd_gdn_recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import pack_lower, share_heads, split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90 import fwd_gdn_recurrence
from kda_tl.templates.sm90.blocks import EIGHT, layout_product, pair_of, store_block
from kda_tl.templates.sm90.blocks import STORES as BLOCK_STORES
from kda_tl.templates.sm90.fwd_gdn_recurrence import ROW_PRODUCTS, Queries, passes
from kda_tl.templates.sm90.fwd_recurrence import recurrence_cost
from kda_tl.templates.sm90.hopper import PAIRS, TABLES
from kda_tl.templates.sm90.outputs import OUTPUTS, Sizes, recur, states_bytes
from kda_tl.templates.sm90.powers import GATE, GIVEN_ROWS, KEY_GATE, POWERS, QUERY_NORM, reject_rows
from kda_tl.templates.sm90.ready import overlap
from kda_tl.templates.sm90.recurrence import ROWS, STORES, TOLERANCE, WARPGROUP, RecurrenceConfig
from kda_tl.templates.sm90.ring import Ring, Slot
from kda_tl.templates.sm90.rows import BC, NB
from kda_tl.templates.sm90.starts import load_slices, slice_bytes

INPUTS = {
    **GIVEN_ROWS,
    "v": "tokens HV V : io",
    "A": PAIRS["A"],
    "powers": PAIRS["powers"],
    "h0": "N HV K V : f32 ? initial_state",
    **TABLES,
}
MADE = 3  # slots
# Of a thread of two groups that multiply, of the one that makes, and of one that loads: what a multiprocessor has
REGISTERS, MAKER_REGISTERS, LOADER_REGISTERS = 208, 64, 32
LARGEST_GROUP = 4  # value heads a query/key head: where more share its rows, pairs of queries cost little, see suits


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: fwd_gdn_recurrence's, of pairs made here."""
    p, dtype = case.problem, x.powers.dtype
    q, k = (share_heads(split_chunks(y.to(dtype), x.chunk_tokens, case.BT), p.group) for y in (x.q, x.k))
    G, query, key = (x.powers[:, :, m, :, None] for m in (GATE, QUERY_NORM, KEY_GATE))
    pairs = (query * q) @ k.mT * (G - key.mT).exp2()
    return fwd_gdn_recurrence.reference(case, Operands(**{**vars(x), "Aqk": pack_lower(pairs.tril())}))


@dataclass(frozen=True, kw_only=True)
class AttendConfig(RecurrenceConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    loader_registers: ClassVar[int | None] = LOADER_REGISTERS
    early: ClassVar[bool] = False  # all of a chunk comes at once
    powers: ClassVar[int] = POWERS  # of a token, that are loaded
    pairs_stages: ClassVar[int] = MADE
    BV: int = tunable(128, 64, 128)

    def reject(self, case: Case) -> str | None:
        """As the base, and channels that lie in whole tiles, since the caller's rows are not padded."""
        return super().reject(case) or reject_rows(case, self.WIDTHS)

    @property
    def registers(self) -> int | None:  # type: ignore[override]
        """Of a thread that multiplies."""
        return REGISTERS if self.BV > ROWS else None

    def rest_stages(self, case: Case) -> int:
        """Chunks of which all is loaded ahead."""
        return self.num_stages

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, pairs, the output's, those of first and other states, and barriers."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + BT + 2 * K) * 2 + POWERS * BT * 4 + 16
        rest = MADE * (BT * BT * 2 + 16) + BT * self.BV * 2
        return self.num_stages * stage + rest + states_bytes(case, self.BV) + slice_bytes(case, self.BV // ROWS)


@dataclass(frozen=True)
class MadeQueries(Queries):
    """Pairs of queries that are made beside products."""

    ring: Ring

    def await_slot(self, slot: Any, step: Any) -> Any:
        """Waits for a chunk's. Their slot."""
        return _await_made(self.ring, step)

    def release(self, own_slot: Any) -> Any:
        """They have been read."""
        return self.ring.release(own_slot)


@T.macro
def _await_made(ring, step):
    slot, phase = ring.place_to_read(step)
    ring.wait(slot, phase)
    return slot


@T.macro
def alloc_tiles(z):
    """By the names of what they hold."""
    tiles = ROW_PRODUCTS.alloc_tiles(z)
    made_full = T.alloc_barrier(arrive_count=[WARPGROUP] * MADE)
    made_empty = T.alloc_barrier(arrive_count=[z.config.consumers] * MADE)
    return {**tiles, "queries": MadeQueries(tiles["Aqk"], Ring(made_full, made_empty))}


@dataclass(frozen=True)
class Decays:
    """What a thread knows of its pairs, see blocks: two rows, 8 apart, and of a block four keys."""

    near: Any  # G of its rows, and H of keys of its warp's block
    rows: Any  # what its rows are multiplied with, and that times their powers
    keys: Any  # powers of earlier keys, with their norms

    @classmethod
    def alloc(cls) -> "Decays":
        """The registers."""
        return cls(*(T.alloc_local((n,), "float32") for n in (6, 4, 4 * (NB - 1))))


@T.macro
def find_decays(powers, slot, warp, d):
    """All of them: the powers of a slot are not read again."""
    lane = T.get_thread_binding() % 32
    i, j = lane // 4, lane % 4 * 2
    first = powers[slot, GATE, warp * BC]
    for h in T.unroll(2):
        d.near[h] = powers[slot, GATE, warp * BC + 8 * h + i]
        d.rows[h] = powers[slot, QUERY_NORM, warp * BC + 8 * h + i]
    for n in T.unroll(2):
        for e in T.vectorized(2):
            d.near[2 + 2 * n + e] = powers[slot, KEY_GATE, warp * BC + 8 * n + j + e]
    for n in T.unroll(2 * (NB - 1)):
        for e in T.vectorized(2):
            d.keys[2 * n + e] = powers[slot, KEY_GATE, 8 * n + j + e]
    for n in T.unroll(4 * (NB - 1)):
        d.keys[n] = T.exp2(first - d.keys[n])
    for h in T.unroll(2):
        d.rows[2 + h] = d.rows[h] * T.exp2(d.near[h] - first)


@T.macro
def put_near(pairs, m, warp, d, tile):
    """Pairs of a warp's rows with keys of their own block, the m-th, to a slot."""
    lane = T.get_thread_binding() % 32
    i, j = lane // 4, lane % 4 * 2
    values = T.alloc_local((8,), tile.dtype)
    for n, h, e in EIGHT:
        power = T.exp2(d.near[h] - d.near[2 + 2 * n + e])
        scaled = pair_of([pairs], warp, m, h, n, e) * d.rows[h] * power
        seen = T.if_then_else(8 * h + i >= 8 * n + j + e, scaled, 0.0)
        values[4 * n + 2 * h + e] = T.cast(seen, tile.dtype)
    store_block(values, tile, warp, m)


@T.macro
def put_far(pairs, m, warp, d, tile):
    """Pairs of a warp's rows with keys of an earlier block, the m-th, to a slot."""
    values = T.alloc_local((8,), tile.dtype)
    for n, h, e in EIGHT:
        scaled = pair_of([pairs], warp, m, h, n, e) * (d.rows[2 + h] * d.keys[4 * m + 2 * n + e])
        values[4 * n + 2 * h + e] = T.cast(scaled, tile.dtype)
    store_block(values, tile, warp, m)


@T.macro
def make(z, i_block, blocks, x, tiles, ring):
    """The part of the warpgroup that makes pairs of queries. Zeros behind them lie in the slots from the start."""
    BT, made = z.case.BT, tiles.queries.ring
    pairs = T.alloc_fragment((BT, BT), "float32")
    T.annotate_layout(layout_product(pairs))
    decays = Decays.alloc()
    step, warp = T.alloc_var("int32"), T.alloc_var("int32")
    T.set_max_nreg(MAKER_REGISTERS, 0)
    step = 0
    warp = T.get_thread_binding() % WARPGROUP // 32
    for n in T.serial(T.ceildiv(x.segments.shape[0] * x.v.shape[1] * z.VB - i_block, blocks)):
        i_s, i_h, _ = split_block(i_block + n * blocks, (x.segments.shape[0], x.v.shape[1]), z.VB)
        for c in T.serial(x.segments[i_s, 1]):
            slot, phase = ring.place_to_read(step)
            made_slot, made_phase = made.place_to_fill(step)
            ring.wait(slot, phase)
            T.wgmma_gemm(
                *(tiles.q[slot, :, :], tiles.k[slot, :, :], pairs),
                transpose_B=True,
                clear_accum=True,
                policy=T.BY_ROWS,
            )
            find_decays(tiles.powers, slot, warp, decays)
            made.acquire(made_slot, made_phase)
            T.wait_wgmma(0)
            T.warpgroup_fence_operand(pairs, num_regs=BT // 2)
            ring.release(slot)
            tile = Slot(tiles.Aqk, made_slot)
            for m in list(range(NB)):
                if m < warp:
                    put_far(pairs, m, warp, decays, tile)
                if m == warp:
                    put_near(pairs, m, warp, decays, tile)
            T.fence_proxy_async()
            made.commit(made_slot)
            step = step + 1


MADE_PRODUCTS = replace(ROW_PRODUCTS, alloc_tiles=alloc_tiles, make=make, triangles=("A",))


def build(case: Case, config: AttendConfig) -> Any:
    """The kernel: states start from those that the caller gives, or from zero."""
    z, heads, load_state = Sizes(case, config, MADE_PRODUCTS), Heads.of(case.problem), load_slices(case.problem)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def fwd_gdn_attend(q, k, v, A, powers, h0, segments, chunk_tokens, o, ht, h):
        blocks = T.min(NS * heads.HV * z.VB, case.device.num_sms)
        with T.Kernel(blocks, threads=z.readers + WARPGROUP, prelude=STORES + BLOCK_STORES) as i_block:
            read = {"q": q, "k": k, "v": v, "A": A, "Aqk": None, "powers": powers, "states": h0, "ready": None}
            tables, written = {"segments": segments, "chunk_tokens": chunk_tokens}, {"o": o, "ht": ht, "h": h}
            recur(z, load_state, i_block, blocks, SimpleNamespace(**read, **tables, **written, heads=heads))

    return fwd_gdn_attend


def suits(case: Case) -> bool:
    """Whether it is faster than fwd_gdn_recurrence: docs/h200/gdn_attend.json, in blocks of 128 channels."""
    p = case.problem
    return p.V % (2 * ROWS) == 0 and p.group <= LARGEST_GROUP and not overlap(case)


def default(case: Case) -> Config:
    """128 channels a block, and as many chunks ahead as have room."""
    return first_valid(case, *(AttendConfig(num_stages=n) for n in (3, 2)))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """q, k, v, what is known of chunks and initial states in; o and final states out."""
    return recurrence_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_gdn_attend",
    INPUTS,
    OUTPUTS,
    AttendConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=("num_sms",),
    passes=passes,
)
