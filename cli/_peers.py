"""Other implementations of the operator, called as their own documentation says, on the same tensors."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

from kda_tl.bench.workloads import Workload
from kda_tl.errors import UnsupportedError
from kda_tl.reference import activate_beta, activate_gate, l2norm

# takes the arguments of our operator by name, returns o, the final state or None, and what else there is
Operator = Callable[[Mapping[str, Any]], tuple[Any, ...]]
# name of a version: module, package; Triton compiles FLA's kernels
VERSIONS = {
    "fla": ("fla", "flash-linear-attention"),
    "cudnn_frontend": ("cudnn", "nvidia-cudnn-frontend"),
    "triton": ("triton", "triton"),
}


def find_peers(workload: Workload, where: torch.device) -> tuple[dict[str, Operator], dict[str, str]]:
    """The peers that can be imported and serve this workload on a device, and why the others are left out."""
    operators: dict[str, Operator] = {}
    left_out: dict[str, str] = {}
    for name, make in (("fla", _make_fla), ("cudnn", _make_cudnn)):
        try:
            operators[name] = make(workload, where)
        except ImportError as error:
            left_out[name] = f"not importable here ({error})"
        except UnsupportedError as error:
            left_out[name] = str(error)
        except Exception as error:  # a broken installation raises whatever it likes while it is imported
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return operators, left_out


def find_versions() -> dict[str, str]:
    """The versions of the peers, and of what compiles them: of what is imported, else of what is installed."""
    versions = {}
    for name, (module, package) in VERSIONS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):  # absent, or a checkout that nobody has imported
            loaded = getattr(sys.modules.get(module), "__version__", None)
            versions[name] = str(loaded or metadata.version(package))
    return versions


def _make_fla(workload: Workload, where: torch.device) -> Operator:
    """FLA's function that our operator stands in for: the same names and shapes."""
    function = getattr(importlib.import_module(workload.declaration.fla.module), workload.operator)
    if where.type != "cuda":
        raise UnsupportedError("its Triton kernels need a GPU")

    def call(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        bounds = {name: inputs[name].long() for name in ("cu_seqlens", "cu_seqlens_cpu") if name in inputs}
        o, ht = function(**{**inputs, **bounds})
        return o, ht

    return call


def _make_cudnn(workload: Workload, where: torch.device) -> Operator:
    """cuDNN frontend 1.32 ``cudnn.linear_attention.kimi_delta_attention``: tokens packed, states [V, K]."""
    module = importlib.import_module("cudnn.linear_attention")
    if workload.declaration.scalar_gate:
        raise UnsupportedError("its kernels take one gate a channel")
    if where.type != "cuda":
        raise UnsupportedError("its kernels need a GPU")
    if workload.gate == "softplus" and workload.direction == "fwd":
        raise UnsupportedError("it has no softplus gate")
    if workload.beta != "sigmoid" or workload.initial_state or workload.state_v_first:
        raise UnsupportedError("it is called with sigmoid step sizes and without an initial state only")
    bounds = torch.tensor(workload.bounds, dtype=torch.int32, device=where)
    prepare = _activate_before if workload.direction == "bwd" else _activate_inside

    def call(inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors, options = prepare(inputs, workload)
        packed = (tensors[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta"))
        o, ht = module.kimi_delta_attention(*packed, bounds, output_final_state=True, **options)
        return o.view(inputs["v"].shape), ht

    return call


def _activate_inside(inputs: Mapping[str, Any], workload: Workload) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Tensors as they are, and what tells its forward to activate them."""
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    if workload.gate == "safe":
        bias = inputs["dt_bias"].view(workload.HV, workload.K)
        gate = {"gate_lower_bound": inputs["lower_bound"], "a_log": inputs["A_log"], "dt_bias": bias}
        options |= {"safe_gate": True, **gate}
    return inputs, options


def _activate_before(inputs: Mapping[str, Any], workload: Workload) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Activations and norms by torch, whose autograd takes their gradients; its own begin at what it then gets."""
    g = inputs["g"].float()
    if workload.gate != "log":
        names = ("A_log", "dt_bias", "lower_bound")
        g = activate_gate(g, gate=workload.gate, **{name: inputs[name] for name in names})
    q, k = (l2norm(inputs[name].float()).to(inputs[name].dtype) for name in ("q", "k"))
    beta = activate_beta(inputs["beta"].float(), "sigmoid")
    states = (len(workload.bounds) - 1, workload.HV, workload.V, workload.K)
    return {"q": q, "k": k, "v": inputs["v"], "g": g, "beta": beta}, {"initial_state": g.new_zeros(states)}
