"""Random tokens and states of recurrent operators: what the tests of their judge and of themselves share."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.oracle import F64, assert_close
from torch import Tensor

from kda_tl.core.problem import BETAS, GATES
from kda_tl.reference import l2norm
from kda_tl.reference_decode import decode_reference

Args = dict[str, Any]
UNTOUCHED = 1e30  # what fills places that no call may write
PADS = pytest.mark.parametrize("pad", (-1, 0), ids="pad{}".format)
LAYOUTS = pytest.mark.parametrize("state_v_first", (False, True), ids=("kv", "vk"))
TOKENS = ("q", "k", "v", "g", "beta", "gk", "gv")


def normal(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def uniform(rng: random.Random, *shape: int) -> Tensor:
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(rng.randrange(2**31)))


def draw(rng: random.Random, B: int, T: int, scalar: bool | None = None) -> Args:
    """The tensors of T tokens of B sequences, of drawn heads and a drawn kind of gate: log decays of -3 to 0 nats."""
    H, K, V = rng.randint(1, 2), rng.randint(2, 6), rng.randint(2, 6)
    HV = H * rng.randint(1, 3)
    scalar = rng.random() < 0.5 if scalar is None else scalar
    return {
        "q": normal(rng, B, T, H, K),
        "k": l2norm(normal(rng, B, T, H, K)),
        "v": normal(rng, B, T, HV, V),
        "g": -3 * uniform(rng, B, T, HV, *([] if scalar else [K])),
        "beta": uniform(rng, B, T, HV),
    }


def draw_gate(rng: random.Random, gate: str, g: Tensor) -> Args:
    """Gate arguments for a gate tensor."""
    if gate == "log":
        return {}
    bound = rng.uniform(-5, -0.1) if gate == "safe" else None
    parameters = {"A_log": normal(rng, g.shape[2]), "dt_bias": normal(rng, g.shape[2:].numel())}
    return {"gate": gate, "lower_bound": bound, **parameters}


def draw_states(rng: random.Random, x: Args, *places: int) -> Tensor:
    """States, K first, at so many slots, or rows and steps."""
    return normal(rng, *places, x["v"].shape[2], x["k"].shape[3], x["v"].shape[3])


def draw_call(rng: random.Random, B: int, T: int) -> Args:
    """A call with everything that changes a token: a gate, a step, norms, decays and steps of value channels."""
    x = draw(rng, B, T)
    HV, K, V = x["v"].shape[2], x["k"].shape[3], x["v"].shape[3]
    x |= draw_gate(rng, rng.choice(GATES), x["g"])
    x |= {"gk": -uniform(rng, B, T, HV, K), "gv": -uniform(rng, B, T, HV, V), "beta": normal(rng, B, T, HV, V)}
    return x | {"beta_mode": rng.choice(BETAS[1:]), "use_l2norm": True, "scale": rng.uniform(0.1, 2)}


def cut(x: Args, n: int, first: int, end: int) -> Args:
    """Some tokens of sequence n, alone."""
    return x | {name: x[name][n : n + 1, first:end] for name in TOKENS if x.get(name) is not None}


def single(x: Args, n: int, t: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Output [HV, V] of one token in a call of its own, and the state [HV, K, V] after it."""
    result = decode_reference(**cut(x, n, t, t + 1), initial_state=state[None])
    return result.o[0, 0], result.final_state[0]


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def assert_only_written(pool: Tensor, before: Tensor, written: dict[int, Tensor]) -> None:
    """The pool holds these states at these slots, and is as it was, bitwise, in all others."""
    for slot in range(len(pool)):
        if slot in written:
            assert_close(pool[slot], written[slot])
        else:
            assert torch.equal(pool[slot], before[slot]), f"slot {slot}"
