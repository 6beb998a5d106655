"""Scans of Gated DeltaNet in both directions for Hopper, on the caller's q and k.

    V'^T = (V^T - (S^T K^T) diag(start)) A^T         S^T <- last S^T + (V'^T diag(end)) K                  forwards
    dV'^T = dO^T Aqk + (dS^T K^T) diag(end)          dX^T = dV'^T A
    dS^T <- last dS^T + (dO^T diag(query)) Q - (dX^T diag(start)) K                                        backwards

This is bwd_scan for a gate that all channels of a value head share; start, query, end and last are the powers of
fwd_gdn_pairs, see powers. A third less comes from memory: K stands for three tensors, in both directions.
Source: as bwd_scan, in the form of fwd_gdn_recurrence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import TL_DTYPE, prim_func
from kda_tl.templates.sm90 import bwd_scan
from kda_tl.templates.sm90.bwd_scan import REGISTERS, start_from
from kda_tl.templates.sm90.hopper import PAIRS, TABLES
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
from kda_tl.templates.sm90.recurrence import (
    OUTPUT_PAD,
    ROWS,
    TOLERANCE,
    WARPGROUP,
    load_lower,
    load_values,
    take_transposed,
)
from kda_tl.templates.sm90.scan import SCANNED, ScanConfig, scan, scan_cost
from kda_tl.templates.sm90.walk import Products

INPUTS = {
    "v": "tokens HV V : io",
    "do": "tokens HV V : io",
    **GIVEN_ROWS,
    **PAIRS,
    "h0": "N HV K V : f32 ? initial_state",
    "dht": "N HV K V : f32 ? final_state",
    **TABLES,
}
OUTPUTS = SCANNED


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of powers: bwd_scan's, of factors made from rows and powers."""
    return bwd_scan.reference(case, make_factors(case, x))


@dataclass(frozen=True, kw_only=True)
class GdnScanConfig(ScanConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead."""

    def reject(self, case: Case) -> str | None:
        """As the base, and channels that lie in whole tiles."""
        return super().reject(case) or reject_rows(case, self.WIDTHS)

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, those that are stored, and two barriers a stage."""
        BT, K = case.BT, case.problem.K
        stage = BT * (self.BV + 2 * BT + 2 * K) * 2 + 4 * BT * 4 + 16
        return self.num_stages * stage + (self.BV * (K + BT) + BT * (self.BV + OUTPUT_PAD)) * 2


@T.macro
def alloc_tiles(case, config):
    """The slots of the ring, by the names of what they hold; x is V or dO."""
    stages, BT, K, io = config.num_stages, case.BT, case.problem.K, TL_DTYPE[case.problem.dtype]
    x_shared = T.alloc_shared((stages, BT, config.BV), io)
    A_shared = T.alloc_shared((stages, BT, BT), io)
    Aqk_shared = T.alloc_shared((stages, BT, BT), io)
    q_shared = T.alloc_shared((stages, BT, K), io)
    k_shared = T.alloc_shared((stages, BT, K), io)
    powers = T.alloc_shared((stages, MULTIPLIED, BT), "float32")
    return SimpleNamespace(x=x_shared, A=A_shared, Aqk=Aqk_shared, q=q_shared, k=k_shared, powers=powers)


@T.macro
def load_chunk(v, x, tiles, ring, c, i_t, row, w, backwards):
    """Producer: what a direction needs of a chunk, what is multiplied first before the rest; v is V or dO."""
    slot, phase = ring.place_to_fill(c)
    ring.acquire(slot, phase)
    i_k = x.heads.of_keys(w.i_h)
    load_values(x.k, tiles.k, ring.full, slot, row, w.end, i_k, 0)
    load_values(v, tiles.x, ring.full, slot, row, w.end, w.i_h, w.v0)
    if backwards:
        load_lower(x.Aqk, i_t, w.i_h, tiles.Aqk, slot, ring.full)
        load_values(x.q, tiles.q, ring.full, slot, row, w.end, i_k, 0)
    load_lower(x.A, i_t, w.i_h, tiles.A, slot, ring.full)
    T.tma_copy(x.powers[i_t, w.i_h, :MULTIPLIED, :], tiles.powers[slot, :, :], barrier=ring.full[slot])
    ring.commit(slot)


@T.macro
def decay_state(r, tiles, slot):
    """All of a state by one factor."""
    for i, j in T.Parallel(*r.state.shape):
        r.state[i, j] = r.state[i, j] * tiles.powers[slot, LAST, 0]


@T.macro
def wait_for_values(r, pending):
    """All products but those that were issued last."""
    T.wait_wgmma(pending)
    T.warpgroup_fence_operand(r.value, num_regs=r.value.shape[1] // 2)


@T.macro
def find_values(r, tiles, slot):
    """V^T - (S^T K^T) diag(start)."""
    T.wgmma_gemm(r.state_io, tiles.k[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    start = take_powers(r.value, tiles.powers, slot, START)
    given = take_transposed(tiles.x, slot)
    wait_for_values(r, 0)
    for i, j in T.Parallel(*r.value.shape):
        r.value_io[i, j] = T.cast(T.cast(given[j, i], "float32") - r.value[i, j] * start[i, j], r.value_io.dtype)


@T.macro
def take_values(r, tiles, slot):
    """last S^T + (V'^T diag(end)) K."""
    taken = T.alloc_fragment(r.value.shape, r.value_io.dtype)
    decay_state(r, tiles, slot)
    end = take_powers(r.value, tiles.powers, slot, END)
    wait_for_values(r, 0)
    for i, j in T.Parallel(*r.value.shape):
        taken[i, j] = T.cast(r.value[i, j] * end[i, j], taken.dtype)
    T.wgmma_gemm(taken, tiles.k[slot, :, :], r.state, policy=T.BY_ROWS)
    T.copy(r.value, r.value_io)


@T.macro
def find_gradients(r, tiles, slot):
    """dO^T Aqk + (dS^T K^T) diag(end); the first product does not wait for the state."""
    of_output = T.alloc_fragment(r.value.shape, "float32")
    T.wgmma_gemm(r.state_io, tiles.k[slot, :, :], r.value, transpose_B=True, clear_accum=True, policy=T.BY_ROWS)
    T.wgmma_gemm(
        tiles.x[slot, :, :], tiles.Aqk[slot, :, :], of_output, transpose_A=True, clear_accum=True, policy=T.BY_ROWS
    )
    end = take_powers(r.value, tiles.powers, slot, END)
    wait_for_values(r, 0)
    T.warpgroup_fence_operand(of_output, num_regs=of_output.shape[1] // 2)
    for i, j in T.Parallel(*r.value.shape):
        r.value[i, j] = r.value[i, j] * end[i, j] + of_output[i, j]
    T.copy(r.value, r.value_io)


@T.macro
def multiply_gradients(r, A, slot):
    """dV'^T A on its way. What dV' lost by its rounding meets the diagonal alone, the step sizes.

    Without it dbeta, the product of a token's dX with its own V', would have one rounding more.
    """
    for i, j in T.Parallel(*r.value.shape):
        lost = r.value[i, j] - T.cast(r.value_io[i, j], "float32")
        r.value[i, j] = lost * T.cast(A[slot, j, j], "float32")
    T.wgmma_gemm(r.value_io, A[slot, :, :], r.value, policy=T.BY_ROWS)


@T.macro
def take_gradients(r, tiles, slot):
    """last dS^T + (dO^T diag(query)) Q - (dX^T diag(start)) K."""
    given = T.alloc_fragment(r.value.shape, r.value_io.dtype)
    taken = T.alloc_fragment(r.value.shape, r.value_io.dtype)
    d_o = take_transposed(tiles.x, slot)
    query = take_powers(r.value, tiles.powers, slot, QUERY)
    for i, j in T.Parallel(*r.value.shape):
        given[i, j] = T.cast(T.cast(d_o[j, i], "float32") * query[i, j], given.dtype)
    decay_state(r, tiles, slot)
    T.wgmma_gemm(given, tiles.q[slot, :, :], r.state, policy=T.BY_ROWS)
    start = take_powers(r.value, tiles.powers, slot, START)
    wait_for_values(r, 1)
    for i, j in T.Parallel(*r.value.shape):
        taken[i, j] = T.cast(-r.value[i, j] * start[i, j], taken.dtype)
    T.wgmma_gemm(taken, tiles.k[slot, :, :], r.state, policy=T.BY_ROWS)
    T.copy(r.value, r.value_io)


ROW_PRODUCTS = Products(
    *(alloc_tiles, load_chunk, find_values, take_values, find_gradients, take_gradients, multiply_gradients)
)


def build(case: Case, config: GdnScanConfig) -> Any:
    """The kernel: one thread block a (direction, sequence, value head, BV channels)."""
    p = case.problem
    VB, heads, load_state = p.V // config.BV, Heads.of(p), start_from(p)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def bwd_gdn_scan(v, d_o, q, k, A, Aqk, powers, h0, dht, segments, chunk_tokens, values, states, dv, dstates, dh0):
        with T.Kernel(2 * NS * heads.HV * VB, threads=config.consumers + WARPGROUP) as i_block:
            rows = {"q": q, "k": k, "A": A, "Aqk": Aqk, "powers": powers, "heads": heads}
            read = {"v": v, "d_o": d_o, "starts": h0, "ends": dht, "segments": segments}
            written = {"values": values, "states": states, "dv": dv, "dstates": dstates, "dh0": dh0}
            x = SimpleNamespace(**rows, **read, chunk_tokens=chunk_tokens, **written)
            scan(case, config, ROW_PRODUCTS, load_state, REGISTERS, False, i_block, NS, heads.HV, x)

    return bwd_gdn_scan


def default(case: Case) -> Config:
    """Two warpgroups where one direction's blocks of 64 channels are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // ROWS) > case.device.num_sms
    deep = [GdnScanConfig(BV=2 * ROWS if wide else ROWS, num_stages=stages) for stages in (3, 2)]
    return first_valid(case, *deep, GdnScanConfig())


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """q, k, v, do, what is known of chunks and the caller's states in; values, states and gradients out."""
    return scan_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage("bwd_gdn_scan", INPUTS, OUTPUTS, GdnScanConfig, build, reference, default, cost, TOLERANCE, depends=())
