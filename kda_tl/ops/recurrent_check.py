"""Values that only the device holds, checked under ``KDA_TL_CHECK=1``: each call then waits for the device."""

from __future__ import annotations

import torch

from kda_tl.errors import InputError
from kda_tl.ops.operator import Args
from kda_tl.ops.recurrent import writes_pool

Tensor = torch.Tensor


def check_values(a: Args) -> None:
    """Raises InputError for indices beyond what they are about, or two sequences that write to one place."""
    bounds = a.cu_seqlens
    if bounds is not None:
        held = bounds.tolist()
        if held[0] != 0 or held[-1] > a.q.shape[1] or sorted(held) != held:
            raise InputError(f"cu_seqlens must rise from 0 to at most {a.q.shape[1]} tokens, got {held}.")
    if a.initial_state is not None:
        for name in ("ssm_state_indices", "output_state_indices"):
            _check_below(name, getattr(a, name), len(a.initial_state), "slots of the pool")
    if a.intermediate_states is not None:
        _check_below("intermediate_state_indices", a.intermediate_state_indices, len(a.intermediate_states), "rows")
    if (accepted := a.num_accepted_tokens) is not None and int(accepted.max()) > a.ssm_state_indices.shape[1]:
        raise InputError(f"num_accepted_tokens must be at most {a.ssm_state_indices.shape[1]}, as many as indices.")
    if (parents := a.retrieve_parent_token) is not None:
        before = torch.arange(parents.shape[1], device=parents.device)
        if bool((parents[:, 1:] >= before[1:]).any()):
            raise InputError("retrieve_parent_token must name an earlier token of the sequence, or -1.")
    if writes_pool(a):
        _check_apart(a)


def _check_below(name: str, x: Tensor | None, count: int, what: str) -> None:
    if x is not None and x.numel() and int(x.max()) >= count:
        raise InputError(f"{name} must be below {count}, the number of {what}, got {int(x.max())}.")


def _check_apart(a: Args) -> None:
    """Sequences run side by side: one may not write to a slot that another one reads or writes."""
    targets = a.ssm_state_indices if a.output_state_indices is None else a.output_state_indices
    if targets is None:
        return
    rows = [
        sorted({slot for slot in row if slot > a.pad_slot_id}) for row in targets.reshape(len(targets), -1).tolist()
    ]
    written = [slot for row in rows for slot in row]
    if len(set(written)) != len(written):
        raise InputError("two sequences write to one slot: give each slots of its own, or pad_slot_id.")
    if a.output_state_indices is None:
        return
    owner = {slot: n for n, row in enumerate(rows) for slot in row}
    sources = a.ssm_state_indices
    read = range(len(targets)) if sources is None else sources.reshape(len(targets), -1)[:, 0].tolist()
    for n, slot in enumerate(read):
        if owner.get(slot, n) != n:
            raise InputError(f"sequence {owner[slot]} writes to slot {slot}, which sequence {n} reads.")
