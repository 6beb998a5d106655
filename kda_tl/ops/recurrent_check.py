"""Values that only the device holds, checked under ``KDA_TL_CHECK=1``: each call then waits for the device."""

from __future__ import annotations

from itertools import pairwise

import torch

from kda_tl.errors import InputError
from kda_tl.ops.operator import Args
from kda_tl.ops.recurrent import writes_pool

Tensor = torch.Tensor


def check_values(a: Args) -> None:
    """Raises InputError for indices beyond what they are about, or two sequences that write to one place."""
    counts = _count_tokens(a)
    if a.initial_state is not None:
        for name in ("ssm_state_indices", "output_state_indices"):
            _check_below(name, getattr(a, name), len(a.initial_state), "slots of the pool")
    if a.intermediate_states is not None:
        _check_below("intermediate_state_indices", a.intermediate_state_indices, len(a.intermediate_states), "rows")
        _check_room("intermediate_states", a.intermediate_states.shape[1], counts)
    accepted = a.num_accepted_tokens
    if accepted is not None and accepted.numel() and int(accepted.max()) > a.ssm_state_indices.shape[1]:
        raise InputError(f"num_accepted_tokens must be at most {a.ssm_state_indices.shape[1]}, as many as indices.")
    if (parents := a.retrieve_parent_token) is not None:
        before = torch.arange(parents.shape[1], device=parents.device)
        if bool((parents[:, 1:] >= before[1:]).any()):
            raise InputError("retrieve_parent_token must name an earlier token of the sequence, or -1.")
    if writes_pool(a):
        _check_apart(a, counts)


def _count_tokens(a: Args) -> list[int]:
    """Of each sequence."""
    if a.cu_seqlens is None:
        return [a.q.shape[1]] * a.q.shape[0]
    held = a.cu_seqlens.tolist()
    if held[0] != 0 or held[-1] > a.q.shape[1] or sorted(held) != held:
        raise InputError(f"cu_seqlens must rise from 0 to at most {a.q.shape[1]} tokens, got {held}.")
    return [end - start for start, end in pairwise(held)]


def _check_room(name: str, steps: int, counts: list[int]) -> None:
    if counts and max(counts) > steps:
        raise InputError(f"{name} must have a column for each of a sequence's {max(counts)} tokens, got {steps}.")


def _check_below(name: str, x: Tensor | None, count: int, what: str) -> None:
    if x is not None and x.numel() and int(x.max()) >= count:
        raise InputError(f"{name} must be below {count}, the number of {what}, got {int(x.max())}.")


def _check_apart(a: Args, counts: list[int]) -> None:
    """Sequences run side by side: one may not write to a slot that another one reads or writes."""
    sources, separate = a.ssm_state_indices, a.output_state_indices
    targets = sources if separate is None else separate
    if targets is None:
        return
    if targets.dim() == 2:
        _check_room("ssm_state_indices" if separate is None else "output_state_indices", targets.shape[1], counts)
    reads, written = list(range(len(targets))), targets.tolist()
    if sources is not None:
        columns = [0] * len(sources) if a.num_accepted_tokens is None else a.num_accepted_tokens.tolist()
        table = sources.tolist() if sources.dim() == 2 else sources[:, None].tolist()
        reads = [row[min(max(column - 1, 0), len(row) - 1)] for row, column in zip(table, columns, strict=True)]
    owner: dict[int, int] = {}
    for n, row in enumerate(written):
        slots = row[: counts[n]] if targets.dim() == 2 else [row]
        absent = sources is not None and reads[n] <= a.pad_slot_id
        for slot in () if absent else slots:
            if slot > a.pad_slot_id and owner.setdefault(slot, n) != n:
                raise InputError("two sequences write to one slot: give each slots of its own, or pad_slot_id.")
    for n, slot in enumerate(reads):
        if owner.get(slot, n) != n:
            raise InputError(f"sequence {owner[slot]} writes to slot {slot}, which sequence {n} reads.")
