"""Scans in both directions for Hopper, two halves of one grid: values and states again, and gradients of both.

    V'^T = (V^T + S^T k_neg^T) A^T              S^T <- S^T diag(decay) + V'^T kg                       forwards
    dV'^T = dO^T Aqk + dS^T kg^T                dX^T = dV'^T A
                                                dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg        backwards

from V' = A X, X = V + k_neg S, O = qg S + Aqk V' and S' = diag(decay) S + kg^T V'; dX is the gradient of v. Neither
needs the other, so both run at once where heads leave multiprocessors idle. The transposed state, or its gradient,
stays in registers, as in fwd_recurrence; S goes to memory as it is before each chunk, dS as it is after it.
Source: autograd of Kimi Linear, arXiv:2510.26692, section 3, in the form of fwd_recurrence.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import at_state, prim_func
from kda_tl.templates.sm90.hopper import FACTORS, TABLES
from kda_tl.templates.sm90.recurrence import ROWS, TOLERANCE, WARPGROUP, read_state
from kda_tl.templates.sm90.scan import SCANNED, ScanConfig, scan, scan_cost, scan_reference
from kda_tl.templates.sm90.walk import FACTOR_PRODUCTS

INPUTS = {
    "v": "tokens HV V : io",
    "do": "tokens HV V : io",
    **FACTORS,
    "h0": "N HV K V : f32 ? initial_state",
    "dht": "N HV K V : f32 ? final_state",
    **TABLES,
}
OUTPUTS = SCANNED


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    starts, ends = ([read_state(case, y, n, x.decay) for n in x.segments[:, 2].tolist()] for y in (x.h0, x.dht))
    return scan_reference(case, x, starts, ends)


# A thread's: what multiplies holds a state or its gradient, what loads holds nothing.
REGISTERS = (232, 40)


def start_from(p: Problem) -> Any:
    """A macro that reads states, or their gradients, that the caller gives; zero where there are none."""

    @T.macro
    def load_state(state, given, there, w):
        if there:
            for i, j in T.Parallel(*state.shape):
                state[i, j] = T.if_then_else(j < p.K, given[at_state(p, w.i_n, w.i_h, j, w.v0 + i)], 0.0)
        else:
            T.clear(state)

    return load_state


def build(case: Case, config: ScanConfig) -> Any:
    """The kernel: one thread block a (direction, sequence, value head, BV channels)."""
    p = case.problem
    VB, heads, load_state = p.V // config.BV, Heads.of(p), start_from(p)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, N=N, NS=NS, **heads.sizes)
    def bwd_scan(
        v, d_o, A, Aqk, k_neg, qg, kg, decay, h0, dht, segments, chunk_tokens, values, states, dv, dstates, dh0
    ):
        with T.Kernel(2 * NS * heads.HV * VB, threads=config.consumers + WARPGROUP) as i_block:
            factors = {"A": A, "Aqk": Aqk, "k_neg": k_neg, "qg": qg, "kg": kg, "decay": decay}
            read = {"v": v, "d_o": d_o, "starts": h0, "ends": dht, "segments": segments}
            written = {"values": values, "states": states, "dv": dv, "dstates": dstates, "dh0": dh0}
            x = SimpleNamespace(**factors, **read, chunk_tokens=chunk_tokens, **written)
            scan(case, config, FACTOR_PRODUCTS, load_state, REGISTERS, False, i_block, NS, heads.HV, x)

    return bwd_scan


def default(case: Case) -> Config:
    """Two warpgroups where one direction's blocks of 64 channels are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // ROWS) > case.device.num_sms
    return first_valid(case, ScanConfig(BV=2 * ROWS if wide else ROWS))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, do, what prep made and the caller's states in; values, states and gradients out."""
    return scan_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage("bwd_scan", INPUTS, OUTPUTS, ScanConfig, build, reference, default, cost, TOLERANCE, depends=())
