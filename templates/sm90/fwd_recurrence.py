"""Recurrence for Hopper: the transposed state stays in registers, values and output in the same kernel.

    V'^T = (V^T + S^T k_neg^T) A^T        O^T = S^T qg^T + V'^T Aqk^T        S^T <- S^T diag(decay) + V'^T kg

S^T is the accumulator of one product and, rounded, the register operand of others, so the state never goes through
shared memory; V^T is read transposed by the matrix unit. A warp keeps chunks coming through the tensor memory
accelerator, the others multiply. What prep computes of a chunk is all they read beside v.
Source: Kimi Linear, arXiv:2510.26692, section 3; the transposed form is derived above.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid
from kda_tl.templates.common.chunks import join_chunks, split_chunks, unpack_lower
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import at_state
from kda_tl.templates.sm90.hopper import FACTORS, TABLES, count_bytes
from kda_tl.templates.sm90.outputs import OUTPUTS, OutputConfig, build_recurrence
from kda_tl.templates.sm90.recurrence import TOLERANCE, read_state, step_reference

INPUTS = {"v": "tokens HV V : io", **FACTORS, "h0": "N HV K V : f32 ? initial_state", **TABLES}


def recurrence_reference(case: Case, x: Operands, starts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """What segments make that start from given states [HV, V, KP]: output, final states and those before each chunk."""
    p, dtype = case.problem, x.decay.dtype
    values = split_chunks(x.v.to(dtype), x.chunk_tokens, case.BT)
    outputs, ht = values.clone(), {}
    h = values.new_zeros((values.shape[0], p.HV, p.KP, p.VP))
    for state, (first, count, _, ends) in zip(starts, x.segments.tolist(), strict=True):
        for t in range(first, first + count):
            h[t, ..., : p.V] = state.mT
            before = x.qg[t].to(dtype) @ state.mT
            v_new, state = step_reference(x, t, values, state)
            outputs[t] = before + unpack_lower(x.Aqk[t].to(dtype)) @ v_new
        if ends >= 0:
            ht[ends] = state[..., : p.K] if p.state_v_first else state[..., : p.K].mT
    found = {"o": join_chunks(outputs, x.chunk_tokens, x.v.shape[0], p.V)}
    found |= {"h": h} if p.intermediate_states else {}
    return found | ({"ht": torch.stack([ht[n] for n in sorted(ht)])} if p.final_state else {})


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of decay; a segment is a sequence."""
    return recurrence_reference(case, x, [read_state(case, x.h0, n, x.decay) for n in x.segments[:, 2].tolist()])


def start_from(p: Problem) -> Any:
    """A macro that loads the states which the caller gives, or zeros."""

    @T.macro
    def load_state(state, start, k0):
        if p.initial_state:
            i_n = start.segments[start.i_s, 2]
            for i, j in T.Parallel(*state.shape):
                at = at_state(p, i_n, start.i_h, k0 + j, start.v0 + i)
                state[i, j] = T.if_then_else(k0 + j < p.K, start.states[at], 0.0)
        else:
            T.clear(state)

    return load_state


def build(case: Case, config: OutputConfig) -> Any:
    """The kernel: states start from those that the caller gives, or from zero."""
    return build_recurrence("fwd_recurrence", case, config, INPUTS["h0"], start_from(case.problem))


def default(case: Case) -> Config:
    """64 channels a block, 128 where all heads' blocks of 64 are more than the multiprocessors."""
    p = case.problem
    wide = p.HV * (p.V // 64) > case.device.num_sms
    configs = [OutputConfig(BV=128, early=early) for early in (False, True)] if wide else []
    return first_valid(case, *configs, OutputConfig())


def recurrence_cost(case: Case, sizes: Mapping[str, int], tensors: Mapping[str, str]) -> Cost:
    """Every tensor once; six products a chunk."""
    p, BT = case.problem, case.BT
    flops = sizes["NT"] * p.HV * BT * p.V * (6 * p.K + 4 * BT)
    return Cost(bytes=count_bytes(case, sizes, tensors), flops=flops)


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """v, what prep made and initial states in; o, final states and those between chunks out."""
    return recurrence_cost(case, sizes, INPUTS | OUTPUTS)


STAGE = Stage(
    "fwd_recurrence", INPUTS, OUTPUTS, OutputConfig, build, reference, default, cost, TOLERANCE, depends=("num_sms",)
)
