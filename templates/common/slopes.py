"""Derivatives of the activations of gate and step size, as expressions: what backward stages share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FORGOTTEN, RCP_LN2


def _sigmoid_slope(x: Any) -> Any:
    """sigmoid(x) sigmoid(-x), exact where one of them rounds to 1."""
    e = T.exp2(-RCP_LN2 * T.max(x, -x))
    return e / ((1.0 + e) * (1.0 + e))


@dataclass(frozen=True)
class Slopes:
    """Of a problem. x: a raw gate with dt_bias; rate: exp(A_log).

    With ``fast``, softplus is taken by instructions for powers of two, which are off by 2^-22: enough beside bf16.
    """

    p: Problem
    fast: bool = False

    def _log_decay(self, x: Any, rate: Any) -> Any:
        if self.fast:
            return -rate / RCP_LN2 * (T.max(RCP_LN2 * x, 0.0) + T.log2(1.0 + T.exp2(RCP_LN2 * T.min(x, -x))))
        return -rate * (T.max(x, 0.0) + T.log1p(T.exp(T.min(x, -x))))  # softplus, as in fwd_gate

    def gate(self, x: Any, rate: Any, lower_bound: Any) -> Any:
        """d log_alpha / dx, of the gates that have an activation."""
        if self.p.gate == "safe":
            return lower_bound * rate * _sigmoid_slope(rate * x)
        sigmoid = 1.0 / (1.0 + T.exp2(-RCP_LN2 * x))
        return T.if_then_else(self._log_decay(x, rate) * RCP_LN2 < FORGOTTEN, 0.0, -rate * sigmoid)

    def A_log(self, x: Any, rate: Any, d: Any) -> Any:
        """What a token adds to dA_log; d is the gradient of its step, or of x for the safe gate."""
        if self.p.gate == "safe":
            return x * d
        steps = self._log_decay(x, rate)
        return T.if_then_else(steps * RCP_LN2 < FORGOTTEN, 0.0, steps * d)

    def beta(self, raw: Any) -> Any:
        """d step size / d beta."""
        if self.p.beta == "plain":
            return 1.0
        return (2.0 if self.p.beta == "sigmoid2" else 1.0) * _sigmoid_slope(T.cast(raw, "float32"))
