"""Other implementations of the operator, called as their own documentation says, on the same tensors."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from kda_tl.bench.workloads import Workload
from kda_tl.errors import UnsupportedError
from kda_tl.reference import activate_beta, activate_gate, l2norm

Inputs = Mapping[str, Any]  # the arguments of our operator by name
# takes these, returns o, the final state or None, and what else there is
Operator = Callable[[Inputs], tuple[Any, ...]]


@dataclass(frozen=True)
class Peer:
    """An implementation that is timed: ``prepare``, which is not, makes of our arguments what it is called with."""

    call: Operator
    prepare: Callable[[Inputs], Inputs] = dict


# name of a version: module, package; Triton compiles FLA's kernels
VERSIONS = {
    "fla": ("fla", "flash-linear-attention"),
    "flash_qla": ("flash_qla", "flash-qla"),
    "flashinfer": ("flashinfer", "flashinfer-python"),
    "cudnn_frontend": ("cudnn", "nvidia-cudnn-frontend"),
    "triton": ("triton", "triton"),
}


def find_peers(workload: Workload, where: torch.device) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can be imported and serve this workload on a device, and why the others are left out."""
    peers: dict[str, Peer] = {}
    left_out: dict[str, str] = {}
    for name, make in _MAKERS.items():
        try:
            peers[name] = make(workload, where)
        except ImportError as error:
            left_out[name] = f"not importable here ({error})"
        except UnsupportedError as error:
            left_out[name] = str(error)
        except Exception as error:  # a broken installation raises whatever it likes while it is imported
            left_out[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return peers, left_out


def find_versions() -> dict[str, str]:
    """The versions of the peers, and of what compiles them: of what is imported, else of what is installed."""
    versions = {}
    for name, (module, package) in VERSIONS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):  # absent, or a checkout that nobody has imported
            loaded = getattr(sys.modules.get(module), "__version__", None)
            versions[name] = str(loaded or metadata.version(package))
    return versions


def _make_fla(workload: Workload, where: torch.device) -> Peer:
    """FLA's function that our operator stands in for: the same names and shapes."""
    entry = workload.declaration.fla
    function = getattr(importlib.import_module(entry.module), entry.name or workload.operator)
    if where.type != "cuda":
        raise UnsupportedError("its Triton kernels need a GPU")
    return Peer(lambda inputs: tuple(function(**inputs)), functools.partial(_prepare_for_fla, function))


def _widen_bounds(inputs: Inputs) -> dict[str, Any]:
    """With bounds of 64 bits."""
    return {**inputs, **{name: inputs[name].long() for name in ("cu_seqlens", "cu_seqlens_cpu") if name in inputs}}


def _activate_gate(inputs: Inputs, workload: Workload) -> torch.Tensor:
    """The log gate in fp32, by torch and so differentiable."""
    g = inputs["g"].float()
    if workload.gate == "log":
        return g
    given = {name: inputs.get(name) for name in ("A_log", "dt_bias", "lower_bound")}
    channels = g[..., None] if workload.declaration.scalar_gate else g
    return activate_gate(channels, gate=workload.gate, **given).view_as(g)


def _prepare_for_fla(function: Callable[..., Any], inputs: Inputs) -> Inputs:
    """Bounds of 64 bits, and no argument that FLA lacks and that is not used; states of slots as FLA takes them.

    That is in rows, a state a sequence, unless it takes slots: those of several tokens only with a slot for each.
    """
    known, slots = inspect.signature(function).parameters, inputs.get("ssm_state_indices")
    given = _widen_bounds(inputs)
    if inputs.get("intermediate_states") is not None:
        raise UnsupportedError("it keeps no states of each token but in slots")
    if slots is not None and ("ssm_state_indices" not in known or (slots.dim() == 1 and inputs["q"].shape[1] > 1)):
        if slots.dim() == 2:
            raise UnsupportedError("it takes no slots")
        given |= {"initial_state": inputs["initial_state"][slots.long()], "output_final_state": True}
        given |= {"ssm_state_indices": None, "inplace_final_state": False}
    return {name: x for name, x in given.items() if name in known or (x is not None and x is not False)}


def _make_flash_qla(workload: Workload, where: torch.device) -> Peer:
    """FlashQLA 0.1.3 ``flash_qla.chunk_gated_delta_rule``, which takes log gates of fp32, and norms q and k."""
    function = importlib.import_module("flash_qla").chunk_gated_delta_rule
    if workload.direction == "step":
        raise UnsupportedError("it has no recurrent operator")
    if not workload.declaration.scalar_gate:
        raise UnsupportedError("its kernels take one gate a value head")
    if where.type != "cuda":
        raise UnsupportedError("its kernels need a GPU")
    return Peer(functools.partial(_call_flash_qla, function, workload), _prepare_for_flash_qla)


def _prepare_for_flash_qla(inputs: Inputs) -> Inputs:
    """Bounds of 64 bits, and gates of fp32."""
    return _widen_bounds(inputs) | {"g": inputs["g"].float()}


def _call_flash_qla(function: Callable[..., Any], workload: Workload, inputs: Inputs) -> tuple[Any, ...]:
    """Gates and step sizes that are not plain are activated by torch first, which is timed as a part of the call."""
    g, beta = _activate_gate(inputs, workload), activate_beta(inputs["beta"], workload.beta)
    names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens", "state_v_first")
    options = {name: inputs[name] for name in names if name in inputs}
    return tuple(function(inputs["q"], inputs["k"], inputs["v"], g, beta, **options))


def _make_flashinfer(workload: Workload, where: torch.device) -> Peer:
    """FlashInfer 0.7 ``flashinfer.gdn_prefill.chunk_gated_delta_rule``: tokens packed, gates factors, states [V, K]."""
    function = importlib.import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule
    if workload.direction != "fwd":
        raise UnsupportedError("it is called for forwards only")
    if not workload.declaration.scalar_gate:
        raise UnsupportedError("its kernels take one gate a value head")
    if where.type != "cuda":
        raise UnsupportedError("its kernels need a GPU")
    prepare = functools.partial(_prepare_for_flashinfer, workload)
    return Peer(functools.partial(_call_flashinfer, function, workload), prepare)


def _prepare_for_flashinfer(workload: Workload, inputs: Inputs) -> Inputs:
    """Tokens of all sequences in a row and where these begin, states [V, K], and plain gates as factors."""
    given = {name: inputs[name].flatten(0, 1).contiguous() for name in ("q", "k", "v", "g", "beta")}
    given |= {"cu_seqlens": torch.tensor(workload.bounds, dtype=torch.int64, device=inputs["q"].device)}
    if workload.gate == "log":
        given["g"] = given["g"].float().exp()
    if workload.beta == "plain":
        given["beta"] = given["beta"].float()
    if inputs.get("initial_state") is not None:
        state = inputs["initial_state"] if workload.state_v_first else inputs["initial_state"].mT
        given["initial_state"] = state.float().contiguous()
    return {**inputs, **given}


def _call_flashinfer(function: Callable[..., Any], workload: Workload, inputs: Inputs) -> tuple[Any, ...]:
    """Gates and step sizes that are not plain are activated by torch first, which is timed as a part of the call."""
    g = inputs["g"] if workload.gate == "log" else _activate_gate(inputs, workload).exp()
    beta = activate_beta(inputs["beta"].float(), workload.beta)
    wants = bool(inputs.get("output_final_state"))
    options = {name: inputs[name] for name in ("initial_state", "use_qk_l2norm_in_kernel") if name in inputs}
    options["max_seqlen"] = workload.problem().longest  # without it, all tokens are taken for one sequence
    if wants:
        states = (len(workload.bounds) - 1, workload.HV, workload.V, workload.K)
        options |= {"output_final_state": True, "output_state": g.new_empty(states)}
    found = function(inputs["q"], inputs["k"], inputs["v"], g, beta, cu_seqlens=inputs["cu_seqlens"], **options)
    o, ht = found if wants else (found, None)
    if ht is not None and not workload.state_v_first:
        ht = ht.mT
    return o.view(workload.B, workload.T, *o.shape[1:]), ht


def _make_cudnn(workload: Workload, where: torch.device) -> Peer:
    """cuDNN frontend 1.32 ``cudnn.linear_attention.kimi_delta_attention``: tokens packed, states [V, K]."""
    module = importlib.import_module("cudnn.linear_attention")
    if workload.direction == "step":
        raise UnsupportedError("it has no recurrent operator")
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

    return Peer(call)


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
    g = _activate_gate(inputs, workload)
    q, k = (l2norm(inputs[name].float()).to(inputs[name].dtype) for name in ("q", "k"))
    beta = activate_beta(inputs["beta"].float(), "sigmoid")
    states = (len(workload.bounds) - 1, workload.HV, workload.V, workload.K)
    return {"q": q, "k": k, "v": inputs["v"], "g": g, "beta": beta}, {"initial_state": g.new_zeros(states)}


_MAKERS = {"fla": _make_fla, "flash_qla": _make_flash_qla, "flashinfer": _make_flashinfer, "cudnn": _make_cudnn}
