"""Small calls of recurrent operators that are right, to be spoiled in one thing."""

from __future__ import annotations

from typing import Any

import torch
from support.decode_cases import Args, ints
from torch import Tensor


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


def good(**changes: Any) -> Args:
    """A call of KDA of 2 sequences of 3 tokens, H=2, HV=4, K=8, V=6, with a pool of 7 slots; and changes to it."""
    tokens: Args = {"q": normal(2, 3, 2, 8), "k": normal(2, 3, 2, 8), "v": normal(2, 3, 4, 6)}
    gates: Args = {"g": normal(2, 3, 4, 8), "beta": normal(2, 3, 4), "A_log": normal(4), "use_gate_in_kernel": True}
    states: Args = {"initial_state": normal(7, 4, 8, 6), "ssm_state_indices": ints(4, 2), "inplace_final_state": True}
    return {**tokens, **gates, **states, **changes}


def scalar(**changes: Any) -> Args:
    """The same of Gated DeltaNet."""
    return good(g=normal(2, 3, 4), **changes)


def without(*names: str, **changes: Any) -> Args:
    return good(**changes) | dict.fromkeys(names)


def packed(bounds: Any, **changes: Any) -> Args:
    tokens = {name: good()[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    return good(**{**tokens, "cu_seqlens": bounds, **changes})


def verify(**changes: Any) -> Args:
    """Drafts: their states go to a buffer of 5 rows."""
    states = {"intermediate_states": zeros(5, 3, 4, 8, 6), "disable_state_update": True, "inplace_final_state": False}
    return good(**{**states, **changes})


I32, BF16 = {"dtype": torch.int32}, {"dtype": torch.bfloat16}
WIDE = ints([4, 3, 2], [1, 0, 5])
TREE = {"retrieve_parent_token": ints([-1, 0, 1], [-1, 0, 0])}
