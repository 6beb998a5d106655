"""Scans of segments in both directions for Hopper: those of whole sequences, but a segment has a state and gradient.

    V'^T = (V^T + S^T k_neg^T) A^T              S^T <- S^T diag(decay) + V'^T kg                       forwards
    dV'^T = dO^T Aqk + dS^T kg^T                dX^T = dV'^T A
                                                dS^T <- dS^T diag(decay) + dO^T qg + dX^T k_neg        backwards

The state that a segment starts from is known, see fwd_merge, and so is the gradient of the one that it ends with, see
bwd_merge: segments of one sequence run side by side.
Source: as bwd_scan, whose body this is.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90.hopper import FACTORS, TABLES
from kda_tl.templates.sm90.recurrence import TOLERANCE, WARPGROUP
from kda_tl.templates.sm90.scan import SCANNED, ScanConfig, scan, scan_cost, scan_reference
from kda_tl.templates.sm90.walk import FACTOR_PRODUCTS

INPUTS = {
    "v": "tokens HV V : io",
    "do": "tokens HV V : io",
    **FACTORS,
    "starts": "NS HV VP KP : f32",
    "ends": "NS HV VP KP : f32",
    **TABLES,
}
OUTPUTS = SCANNED


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay."""
    states, dstates = (y[:, :, : case.problem.V].to(x.decay.dtype).unbind() for y in (x.starts, x.ends))
    return scan_reference(case, x, states, dstates)


# A thread's: with those of bwd_scan, 24 bytes of what loads are spilled, with these none (TileLang 0.1.15, CUDA 13.0).
REGISTERS = (216, 72)


def build(case: Case, config: ScanConfig) -> Any:
    """The kernel: one thread block a (direction, segment, value head, BV channels)."""
    p = case.problem
    VB, heads = p.V // config.BV, Heads.of(p)
    NT, tokens, N, NS = T.dynamic("NT"), T.dynamic("tokens"), T.dynamic("N"), T.dynamic("NS")

    @T.macro
    def load_state(state, known, there, w):
        for i, j in T.Parallel(*state.shape):
            state[i, j] = known[w.i_s, w.i_h, w.v0 + i, j]

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, NS=NS, N=N, **heads.sizes)
    def bwd_resume(
        v, d_o, A, Aqk, k_neg, qg, kg, decay, starts, ends, segments, chunk_tokens, values, states, dv, dstates, dh0
    ):
        with T.Kernel(2 * NS * heads.HV * VB, threads=config.consumers + WARPGROUP) as i_block:
            factors = {"A": A, "Aqk": Aqk, "k_neg": k_neg, "qg": qg, "kg": kg, "decay": decay}
            read = {"v": v, "d_o": d_o, "starts": starts, "ends": ends, "segments": segments}
            written = {"values": values, "states": states, "dv": dv, "dstates": dstates, "dh0": dh0}
            x = SimpleNamespace(**factors, **read, chunk_tokens=chunk_tokens, **written)
            scan(case, config, FACTOR_PRODUCTS, load_state, REGISTERS, True, i_block, NS, heads.HV, x)

    return bwd_resume


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, do, what prep made and two states a segment in; values, states and gradients out."""
    return scan_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "bwd_resume", INPUTS, OUTPUTS, ScanConfig, build, reference, ScanConfig.default, cost, TOLERANCE, depends=()
)
