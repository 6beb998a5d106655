"""Drawn arguments of operators of the delta rule: what workloads are made of."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.reference import activate_beta, activate_gate, l2norm

Tensor = torch.Tensor
LOWER_BOUND = -5.0
_MAX_TRIMMED_SEQUENCES = 4
_SLOW_SHIFT = 7.0  # subtracted from the raw gate: a state then survives thousands of tokens


def draw_inputs(workload: Any, generator: torch.Generator, *, scalar_gate: bool, bounded: bool) -> dict[str, Any]:
    """Arguments of an operator of the delta rule. q, k, v, logits of beta and the initial state are N(0, 1).

    A plain beta is the sigmoid of such logits. Raw gate, A_log and dt_bias: see :func:`draw_gate`.
    """
    w, device = workload, generator.device
    inputs = draw_tokens(w, generator, scalar_gate=scalar_gate, bounded=bounded) | {"output_final_state": True}
    if bounded:
        inputs["safe_gate"] = w.gate == "safe"
    if w.initial_state:
        state = (w.V, w.K) if w.state_v_first else (w.K, w.V)
        inputs["initial_state"] = torch.randn(len(w.bounds) - 1, w.HV, *state, generator=generator, device=device)
    if w.state_v_first:
        inputs["state_v_first"] = True
    if w.lengths:
        inputs["cu_seqlens_cpu"] = torch.tensor(w.bounds, dtype=torch.int32)
        inputs["cu_seqlens"] = inputs["cu_seqlens_cpu"].to(device)
    return inputs


def draw_tokens(workload: Any, generator: torch.Generator, *, scalar_gate: bool, bounded: bool) -> dict[str, Any]:
    """What operators of whole sequences and recurrent ones take alike: tokens, gates, and what kernels do with them."""
    w, device = workload, generator.device

    def draw(*shape: int) -> Tensor:
        return torch.randn(w.B, w.T, *shape, generator=generator, device=device).to(TORCH_DTYPE[w.dtype])

    inputs: dict[str, Any] = {
        "q": draw(w.H, w.K),
        "k": draw(w.H, w.K),
        "v": draw(w.HV, w.V),
        "beta": draw(w.HV),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": w.gate != "log",
        "use_beta_sigmoid_in_kernel": w.beta != "plain",
        **draw_gate(w, generator, scalar_gate),
    }
    if bounded:
        inputs["lower_bound"] = LOWER_BOUND if w.gate == "safe" else None
    if w.beta == "plain":
        inputs["beta"] = inputs["beta"].sigmoid()
    if w.beta == "sigmoid2":
        inputs["allow_neg_eigval"] = True
    return inputs


def trim_tokens(workload: Any, tokens: int) -> Any:
    """A twin of at most about so many tokens: of fewer and shorter sequences, of which each ends inside a chunk.

    Heads, dimensions and modes stay. The twin keeps several sequences where there are several, and every sequence that
    is cut ends inside a chunk of any size.
    """
    w = workload
    if w.tokens <= tokens:
        return w
    count = min(len(w.lengths) or w.B, _MAX_TRIMMED_SEQUENCES)
    share = tokens / sum(w.lengths[:count] or (w.T,) * count)
    if w.lengths:
        return replace(w, name=f"{w.name}-trimmed", lengths=tuple(_make_ragged(n, share) for n in w.lengths[:count]))
    return replace(w, name=f"{w.name}-trimmed", B=count, T=_make_ragged(w.T, share))


def _make_ragged(length: int, share: float) -> int:
    """A share of a length, odd, so that no chunk size divides it."""
    return max(1, min(length, int(length * share))) - 1 | 1


def prepare_before(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same call with q, k and beta prepared by the caller, and no final state."""
    return {
        **inputs,
        **{name: l2norm(inputs[name].float()).to(inputs[name].dtype) for name in ("q", "k")},
        "beta": activate_beta(inputs["beta"], "sigmoid"),
        "allow_neg_eigval": False,
        "use_qk_l2norm_in_kernel": False,
        "use_beta_sigmoid_in_kernel": False,
        "output_final_state": False,
    }


def draw_gate(workload: Any, generator: torch.Generator, scalar_gate: bool = False) -> dict[str, Any]:
    """``g``, ``A_log`` and ``dt_bias`` of a workload.

    Steep: raw g ~ N(0, 1), A_log and dt_bias ~ U(0, 1). Slow: the same with 7 subtracted from raw g; for the softplus
    gate Mamba's initialisation instead, A ~ U(1, 16) and a step log-uniform in [0.001, 0.1]. A "log" gate gets what the
    safe gate makes of the same numbers.

    Source: gates of FlashKDA's benchmark (steep); ``mamba_ssm/modules/mamba2.py`` (A and dt_bias).
    """
    w, device = workload, generator.device
    channels = () if scalar_gate else (w.K,)
    raw = torch.randn(w.B, w.T, w.HV, *channels, generator=generator, device=device)
    A = torch.rand(w.HV, generator=generator, device=device)
    bias = torch.rand(math.prod((w.HV, *channels)), generator=generator, device=device)
    if w.gate == "softplus" and w.decay == "slow":
        A = torch.log1p(15 * A)
        step = torch.exp(math.log(1e-3) + bias * (math.log(1e-1) - math.log(1e-3)))
        bias = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    elif w.decay == "slow":
        raw -= _SLOW_SHIFT
    dtype = TORCH_DTYPE[w.dtype]
    if w.gate == "log":
        raw = raw.view(*raw.shape[:3], -1)
        g = activate_gate(raw, gate="safe", A_log=A, dt_bias=bias, lower_bound=LOWER_BOUND)
        return {"g": g.view(w.B, w.T, w.HV, *channels).to(dtype)}
    return {"g": raw.to(dtype), "A_log": A, "dt_bias": bias}
