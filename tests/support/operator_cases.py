"""Calls of ``chunk_kda`` on the CPU target that the tests of operators share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import OPERATOR, TENSORS, Call, operator_arguments
from support.cases import SMALL as EVERYTHING
from torch import Tensor

from kda_tl.core.device import cpu_device
from kda_tl.core.problem import Problem
from kda_tl.errors import KdaTlError
from kda_tl.ops import call as call_module
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error

CPU = cpu_device()
# States are computed and returned in fp32: an exponent of 64 * 5 nats is held to 2^-16. Outputs are rounded to io once.
STATE = 5e-5
TOLERANCE = {"fp32": STATE, "fp16": 5e-4, "bf16": 3e-3}
SPECIALISED = {
    "safe-fp32": replace(EVERYTHING, H=2, HV=4, K=60, V=100),
    "softplus-bf16": Problem(
        H=1,
        HV=3,
        K=32,
        V=64,
        tokens=0,
        dtype="bf16",
        g_dtype="fp32",
        gate="softplus",
        has_A_log=True,
        beta="sigmoid2",
        l2norm=True,
        initial_state=True,
        final_state=True,
        state_v_first=True,
    ),
    "log-fp16": Problem(H=2, HV=2, K=64, V=32, tokens=0, dtype="fp16", beta_dtype="fp32", final_state=True),
}
SMALL = replace(SPECIALISED["log-fp16"], K=32, dtype="fp32", g_dtype="fp32", initial_state=True)
specialised = pytest.mark.parametrize("problem", SPECIALISED.values(), ids=SPECIALISED)


def bind_call(arguments: dict[str, Any]) -> Any:
    """The plan of a call with these arguments, but for the function that it takes its tensors by."""
    return call_module.bind_call(OPERATOR, OPERATOR.bind(**arguments))


def assert_right(call: Call, batch: int = 1, **changes: Any) -> None:
    """chunk_kda on a call is the recurrence; its arguments are left as they were."""
    arguments = operator_arguments(call, batch) | changes
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    o, ht = chunk_kda(**arguments)
    expected_o, expected_ht, _ = call.truth()
    p = call.problem
    assert o.dtype == arguments["q"].dtype and o.shape == arguments["v"].shape and o.is_contiguous()
    errors = [relative_error(o.flatten(0, 1), expected_o) / TOLERANCE[p.dtype]]
    assert (ht is not None) == p.final_state
    if ht is not None:
        assert ht.dtype == torch.float32
        errors.append(relative_error(ht, expected_ht) / STATE)
    assert max(errors) < 1, f"{errors} of the tolerance, {p.key} bounds={call.bounds}"
    for name, x in before.items():
        assert torch.equal(arguments[name].nan_to_num(), x.nan_to_num()), f"{name} was written to"


def differentiable(call: Call, batch: int = 1) -> dict[str, Any]:
    """Arguments of a call, every tensor of them a leaf."""
    arguments = operator_arguments(call, batch)
    return {
        name: x.detach().clone().requires_grad_() if name in TENSORS and x is not None else x
        for name, x in arguments.items()
    }


def backward_of(call: Call, arguments: dict[str, Any], **changes: Any) -> dict[str, Tensor | None]:
    """Gradients of all tensors from the call's do and dht."""
    o, ht = chunk_kda(**arguments | changes)
    do = call.x["do"].to(o.dtype).view(o.shape)
    seeds = [(o, do)] if ht is None else [(o, do), (ht, call.x["dht"].float())]
    torch.autograd.backward([x for x, _ in seeds], [d for _, d in seeds])
    return {name: None if arguments[name] is None else arguments[name].grad for name in TENSORS}


Arguments = dict[str, Any]


def of_q(a: Arguments) -> Callable[[Tensor], Tensor]:
    return lambda q: chunk_kda(**{**a, "q": q})[0]


def assert_sentence(error: KdaTlError) -> None:
    text = str(error)
    assert "\n" not in text and text.count(" ") >= 6 and text.endswith("."), text


NO_MEMORY = "has no memory of its own"
