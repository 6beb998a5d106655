"""The operator as a user calls it, against its judge, the float64 recurrence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kda_tl.chunk import chunk_kda
from kda_tl.dispatch import pin
from kda_tl.reference import activate_beta, l2norm, recurrent_kda, relative_error
from kda_tl.stage import Plan

Inputs = Mapping[str, Any]


def run_recurrence(inputs: Inputs) -> dict[str, torch.Tensor]:
    """``o`` and ``ht`` of the float64 recurrence on the operator's arguments."""
    computed, lower_bound = inputs["use_gate_in_kernel"], inputs["lower_bound"]
    o, ht = recurrent_kda(
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")),
        initial_state=inputs.get("initial_state"),
        gate="log" if not computed else "softplus" if lower_bound is None else "safe",
        A_log=inputs.get("A_log"),
        dt_bias=inputs.get("dt_bias"),
        lower_bound=lower_bound,
        beta_mode="sigmoid" if inputs["use_beta_sigmoid_in_kernel"] else "plain",
        use_l2norm=inputs["use_qk_l2norm_in_kernel"],
        state_v_first=inputs.get("state_v_first", False),
        cu_seqlens=inputs.get("cu_seqlens_cpu"),
    )
    return {"o": o, "ht": ht}


def measure_errors(inputs: Inputs, plan: Plan | None) -> dict[str, float]:
    """Relative errors of what the operator returns, run with one plan."""
    with torch.no_grad():
        with pin(plan):
            outputs = dict(zip(("o", "ht"), chunk_kda(**inputs), strict=False))
        truth = run_recurrence(inputs)
    return {name: relative_error(x, truth[name]) for name, x in outputs.items() if x is not None}


def without_extras(inputs: Inputs) -> dict[str, Any]:
    """The same call with q, k and beta prepared by the caller, and no final state."""
    bare = {
        "q": l2norm(inputs["q"].float()).to(inputs["q"].dtype),
        "k": l2norm(inputs["k"].float()).to(inputs["k"].dtype),
        "beta": activate_beta(inputs["beta"], "sigmoid"),
        "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
        "output_final_state": False,
    }
    return {**inputs, **bare}


def with_state(inputs: Inputs) -> dict[str, Any]:
    """The same call with a state before the first token, states being [V, K]."""
    k, v = inputs["k"], inputs["v"]
    N = len(inputs["cu_seqlens_cpu"]) - 1 if "cu_seqlens_cpu" in inputs else len(k)
    generator = torch.Generator(device=v.device).manual_seed(1)
    state = torch.randn(N, v.shape[2], v.shape[3], k.shape[3], generator=generator, device=v.device)
    return {**inputs, "initial_state": state, "state_v_first": True}
