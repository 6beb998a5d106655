"""What bf16 costs: a forward in float64 whose operands alone are rounded, as the matrix unit takes them.

Tolerances of GPU tests are derived from it: a kernel cannot be nearer to the recurrence, unless its errors cancel.
"""

from __future__ import annotations

import torch
from support.cases import F64, Call
from support.launches import run_references
from torch import Tensor

from kda_tl.core.stage import Case
from kda_tl.reference import relative_error
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.sm90.recurrence import unpack_lower


def _round(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(F64)


def rounded_errors(call: Call, case: Case) -> tuple[float, float]:
    """Relative errors of o and of the final state of one sequence, in the order of fwd_recurrence."""
    p = call.problem
    pipeline = PIPELINES["gdn_recurrence" if p.scalar_gate else "prep_recurrence"]
    _, records = run_references(pipeline, case, call.tensors(case.BT))
    x = next(inputs for stage, inputs in records if stage.name == "fwd_recurrence")
    k_neg, qg, kg = (_round(x[name]) for name in ("k_neg", "qg", "kg"))
    A, Aqk = (unpack_lower(_round(x[name])) for name in ("A", "Aqk"))
    given = split_chunks(x["v"].to(F64), x["chunk_tokens"], case.BT)
    state = torch.nn.functional.pad(x["h0"][0] if p.state_v_first else x["h0"][0].mT, (0, p.KP - p.K)).to(F64)
    o = []
    for t in range(len(A)):
        operand = _round(state).mT
        values = _round(A[t] @ _round(given[t] + k_neg[t] @ operand))
        o.append(_round(qg[t] @ operand + Aqk[t] @ values).transpose(0, 1))
        state = state * x["decay"][t][:, None] + values.mT @ kg[t]
    expected_o, expected_ht, _ = call.truth()
    ht = state[..., : p.K] if p.state_v_first else state[..., : p.K].mT
    return relative_error(torch.cat(o)[: p.tokens], expected_o), relative_error(ht[None], expected_ht)
