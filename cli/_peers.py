"""Other implementations of the operator, called as their own documentation says, on the same tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from kda_tl.errors import UnsupportedError
from kda_tl.workloads import Workload

Call = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
MODULES = {"fla": "fla.ops.kda", "cudnn": "cudnn.linear_attention"}


def find_peers(workload: Workload, inputs: dict[str, Any]) -> tuple[dict[str, Call], dict[str, str]]:
    """Calls of the peers that can be imported and serve this workload, and why the others are left out."""
    if workload.direction == "bwd":
        return {}, dict.fromkeys(MODULES, "peers are timed in the forward only: pass a forward workload")
    calls: dict[str, Call] = {}
    left_out: dict[str, str] = {}
    for name, make in (("fla", _call_fla), ("cudnn", _call_cudnn)):
        try:
            module = importlib.import_module(MODULES[name])
            calls[name] = make(module, workload, inputs)
        except ImportError as error:
            left_out[name] = f"not importable here ({error})"
        except UnsupportedError as error:
            left_out[name] = str(error)
        except Exception as error:  # a broken installation raises whatever it likes while it is imported
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return calls, left_out


def _call_fla(module: Any, workload: Workload, inputs: dict[str, Any]) -> Call:
    """FLA v0.6.0 ``fla.ops.kda.chunk_kda``: the same names and shapes."""
    if inputs["q"].device.type != "cuda":
        raise UnsupportedError("its Triton kernels need a GPU")
    kwargs = dict(inputs)
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if name in kwargs:
            kwargs[name] = kwargs[name].long()

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, ht = module.chunk_kda(**kwargs)
        return o, ht

    return call


def _call_cudnn(module: Any, workload: Workload, inputs: dict[str, Any]) -> Call:
    """cuDNN frontend 1.32 ``cudnn.linear_attention.kimi_delta_attention``: tokens packed, states [V, K]."""
    if inputs["q"].device.type != "cuda":
        raise UnsupportedError("its kernels need a GPU")
    if workload.gate == "softplus":
        raise UnsupportedError("it has no softplus gate")
    q, k, v, g, beta = (inputs[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
    bounds = torch.tensor(workload.bounds, dtype=torch.int32, device=q.device)
    gate: dict[str, Any] = {}
    if workload.gate == "safe":
        bias = inputs["dt_bias"].view(workload.HV, workload.K)
        gate = {"safe_gate": True, "gate_lower_bound": inputs["lower_bound"], "a_log": inputs["A_log"], "dt_bias": bias}

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        o, ht = module.kimi_delta_attention(
            q,
            k,
            v,
            g,
            beta,
            bounds,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **gate,
        )
        return o.view(inputs["v"].shape), ht

    return call
