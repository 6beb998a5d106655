"""Recurrence for Hopper: the transposed state stays in registers, values and output in the same kernel.

    V'^T = (V^T + S^T k_neg^T) A^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

S^T is the accumulator of one product and, rounded, the register operand of others, so the state never goes through
shared memory; V^T is read transposed by the matrix unit. A warp keeps chunks coming through the tensor memory
accelerator, the others multiply. What prep computes of a chunk is all they read beside v.
Source: Kimi Linear, arXiv:2510.26692, section 3; the transposed form is derived above.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tilelang.language as T
import torch

from kda_tl.core.stage import Case, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.chunks import join_chunks, split_chunks
from kda_tl.templates.common.tile import FP32_TOLERANCE, at_state
from kda_tl.templates.sm90.outputs import OUTPUTS, OutputConfig, build_recurrence
from kda_tl.templates.sm90.recurrence import FACTORS, TABLES, read_state, walk_reference

INPUTS = {"v": "tokens HV V : io", **FACTORS, "h0": "N HV K V : f32 ? initial_state", **TABLES}


def recurrence_reference(
    case: Case,
    starts: Sequence[torch.Tensor],
    v: torch.Tensor,
    segments: torch.Tensor,
    chunk_tokens: torch.Tensor,
    factors: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What segments make that start from given states [HV, V, KP]: output, final states and those before each chunk."""
    p, rows = case.problem, segments.tolist()
    dtype = factors["decay"].dtype
    values = split_chunks(v.to(dtype), chunk_tokens, case.BT)
    outputs, ht = values.clone(), {}
    h = values.new_zeros((values.shape[0], p.HV, p.KP, p.VP))
    for state, (first, count, _, ends) in zip(starts, rows, strict=True):
        for t in range(first, first + count):
            h[t, ..., : p.V] = state.mT
            state, (outputs[t],) = walk_reference(values, state, t, 1, factors)
        if ends >= 0:
            ht[ends] = state[..., : p.K] if p.state_v_first else state[..., : p.K].mT
    found = {"o": join_chunks(outputs, chunk_tokens, v.shape[0], p.V)}
    found |= {"h": h} if p.intermediate_states else {}
    return found | ({"ht": torch.stack([ht[n] for n in sorted(ht)])} if p.final_state else {})


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    factors = {name: getattr(x, name) for name in FACTORS}
    starts = [read_state(case, x.h0, n, x.decay) for n in x.segments[:, 2].tolist()]
    return recurrence_reference(case, starts, x.v, x.segments, x.chunk_tokens, factors)


@dataclass(frozen=True, kw_only=True)
class FwdRecurrenceConfig(OutputConfig):
    """BV: value channels a block owns, 64 for each warpgroup that multiplies; num_stages: chunks loaded ahead; early:
    whether values are multiplied before all of their chunk has come.
    """


def build(case: Case, config: FwdRecurrenceConfig) -> Any:
    """The kernel: states start from those that the caller gives, or from zero."""
    p = case.problem

    @T.macro
    def load_state(state, h0, i_s, segments, i_h, v0, k0):
        if p.initial_state:
            i_n = segments[i_s, 2]
            for i, j in T.Parallel(*state.shape):
                state[i, j] = T.if_then_else(k0 + j < p.K, h0[at_state(p, i_n, i_h, k0 + j, v0 + i)], 0.0)
        else:
            T.clear(state)

    return build_recurrence("fwd_recurrence", case, config, INPUTS["h0"], load_state)


def default(case: Case) -> FwdRecurrenceConfig:
    """64 channels a block, 128 where all heads' blocks of 64 are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // 64) > case.device.num_sms
    configs = [FwdRecurrenceConfig(BV=128, early=early) for early in (False, True)] if wide else []
    return first_valid(case, *configs, FwdRecurrenceConfig())


def recurrence_cost(case: Case, sizes: Mapping[str, int], states: int) -> Cost:
    """v and what prep made in, o and h out, and some elements of states in fp32; six products a chunk."""
    p, BT = case.problem, case.BT
    io = 4 if p.dtype == "fp32" else 2
    chunks = sizes["NT"] * p.HV
    moved = 2 * sizes["tokens"] * p.HV * p.V * io + chunks * (BT * (2 * BT * 3 // 4 + 3 * p.KP) * io + p.KP * 4)
    moved += chunks * p.KP * p.VP * io * p.intermediate_states
    return Cost(bytes=moved + states * 4, flops=chunks * BT * p.V * (6 * p.K + 4 * BT))


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v and what prep made in; o out; six products a chunk."""
    p = case.problem
    return recurrence_cost(case, sizes, sizes["N"] * p.HV * p.K * p.V * (p.initial_state + p.final_state))


# state, values and the result rounded to io a chunk; the recurrence contracts, so errors do not grow
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage("fwd_recurrence", INPUTS, OUTPUTS, FwdRecurrenceConfig, build, reference, default, cost, TOLERANCE)
