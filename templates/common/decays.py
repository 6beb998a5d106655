"""The decay of a token from its raw gate, as an expression: what forward stages and decode share."""

from __future__ import annotations

from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import RCP_LN2


def log2_decay(problem: Problem, raw: Any, rate: Any, bias: Any, lower_bound: Any, log1p: Any = None) -> Any:
    """By which power of two a token makes the state decay. rate is exp(A_log), bias dt_bias; ``log1p`` of 0 to 1."""
    x = T.cast(raw, "float32")
    if problem.gate == "log":
        return x * RCP_LN2
    if problem.gate == "safe":
        return lower_bound * RCP_LN2 / (1.0 + T.exp2(-RCP_LN2 * rate * (x + bias)))
    z = x + bias  # softplus(z) = max(z, 0) + log1p(exp(-|z|)): exact where exp(z) would overflow or vanish
    return -RCP_LN2 * rate * (T.max(z, 0.0) + (log1p or T.log1p)(T.exp(T.min(z, -z))))
