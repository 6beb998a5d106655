"""Values that only the device holds, checked under ``KDA_TL_CHECK=1``: each call then waits for the device."""

from __future__ import annotations

from itertools import pairwise

import torch

from kda_tl.errors import InputError
from kda_tl.ops.operator import Args
from kda_tl.ops.recurrent import count_sequences, writes_pool

Tensor = torch.Tensor


def check_values(a: Args) -> None:
    """Raises InputError for values beyond what they are about, or two sequences that write to one place."""
    lengths = _find_lengths(a)
    if a.initial_state is not None:
        for name in ("ssm_state_indices", "output_state_indices"):
            _check_below(name, getattr(a, name), len(a.initial_state), "slots of the pool")
    if a.intermediate_states is not None:
        _check_below("intermediate_state_indices", a.intermediate_state_indices, len(a.intermediate_states), "rows")
        _check_room(lengths, a.intermediate_states.shape[1], "intermediate_states has {} steps")
    if (accepted := a.num_accepted_tokens) is not None:
        width = a.ssm_state_indices.shape[1]
        if accepted.numel() and int(accepted.max()) > width:
            raise InputError(f"num_accepted_tokens must be at most {width}, as many as a sequence has indices.")
    if (parents := a.retrieve_parent_token) is not None:
        before = torch.arange(parents.shape[1], device=parents.device)
        if bool((parents[:, 1:] >= before[1:]).any()):
            raise InputError("retrieve_parent_token must name an earlier token of the sequence, or -1.")
    if writes_pool(a):
        _check_apart(a, lengths)


def _find_lengths(a: Args) -> list[int]:
    """Tokens of each sequence."""
    if a.cu_seqlens is None:
        return [a.q.shape[1]] * count_sequences(a)
    held = a.cu_seqlens.tolist()
    if held[0] != 0 or held[-1] > a.q.shape[1] or sorted(held) != held:
        raise InputError(f"cu_seqlens must rise from 0 to at most {a.q.shape[1]} tokens, got {held}.")
    return [end - first for first, end in pairwise(held)]


def _check_below(name: str, x: Tensor | None, count: int, what: str) -> None:
    if x is not None and x.numel() and int(x.max()) >= count:
        raise InputError(f"{name} must be below {count}, the number of {what}, got {int(x.max())}.")


def _check_room(lengths: list[int], room: int, what: str) -> None:
    if (longest := max(lengths, default=0)) > room:
        raise InputError(f"a sequence has {longest} tokens, but {what.format(room)}: make them as many.")


def _check_apart(a: Args, lengths: list[int]) -> None:
    """Sequences run side by side: one may not write to a slot that another one reads or writes."""
    targets = a.ssm_state_indices if a.output_state_indices is None else a.output_state_indices
    if targets is None:
        return
    if targets.dim() == 2:
        _check_room(lengths, targets.shape[1], "indices of slots have {} columns")
    read = _find_sources(a)
    written: dict[int, int] = {}  # by which sequence a slot is written
    for n, row in enumerate(targets.tolist()):
        if a.ssm_state_indices is not None and read[n] <= a.pad_slot_id:
            continue
        for slot in {*row[: lengths[n]]} if isinstance(row, list) else {row}:
            if slot > a.pad_slot_id and written.setdefault(slot, n) != n:
                raise InputError("two sequences write to one slot: give each slots of its own, or pad_slot_id.")
    for n, slot in enumerate(read):
        if written.get(slot, n) != n:
            raise InputError(f"sequence {written[slot]} writes to slot {slot}, which sequence {n} reads.")


def _find_sources(a: Args) -> list[int]:
    """The slot or row that each sequence reads."""
    slots: Tensor | None = a.ssm_state_indices
    if slots is None:
        return list(range(count_sequences(a)))
    if slots.dim() == 2:
        column = slots.new_zeros(len(slots)) if a.num_accepted_tokens is None else a.num_accepted_tokens - 1
        slots = slots.gather(1, column.clamp(0, slots.shape[1] - 1)[:, None].long())[:, 0]
    read: list[int] = slots.tolist()
    return read
