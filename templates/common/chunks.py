"""Chunk-major layout in plain PyTorch: what the stages' references share.

Intermediates are laid out ``[NT, HV, BT, D]``: one contiguous tile a chunk and head, for dense batches and packed
sequences alike. ``chunk_tokens[i] = (first token, token count)`` of chunk i, tokens being flattened over the batch.
"""

from __future__ import annotations

import torch

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Operands
from kda_tl.reference import activate_beta


def split_chunks(x: torch.Tensor, chunk_tokens: torch.Tensor, BT: int, width: int | None = None) -> torch.Tensor:
    """``[tokens, heads, D]`` (or ``[tokens, heads]``) to ``[NT, heads, BT, width]``, zeros past the end of a chunk."""
    start, count = chunk_tokens[:, :1].long(), chunk_tokens[:, 1:].long()
    row = torch.arange(BT, device=x.device)
    index = torch.where(row < count, start + row, x.shape[0])  # past the end of a chunk: a row of zeros after the last
    tiles = torch.cat((x, x.new_zeros((1, *x.shape[1:]))))[index].transpose(1, 2)
    return tiles if width is None else torch.nn.functional.pad(tiles, (0, width - x.shape[-1]))


def join_chunks(tiles: torch.Tensor, chunk_tokens: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """The inverse: ``[NT, heads, BT, D]`` to ``[tokens, heads, width]``."""
    start, count = chunk_tokens[:, :1].long(), chunk_tokens[:, 1:].long()
    row = torch.arange(tiles.shape[2], device=tiles.device)
    inside = row < count
    rows = tiles.transpose(1, 2)[..., :width]
    return tiles.new_zeros((tokens, tiles.shape[1], width)).index_put(((start + row)[inside],), rows[inside])


def pack_lower(x: torch.Tensor) -> torch.Tensor:
    """Lower triangular ``[..., BT, BT]`` as ``[..., LOWER, HALF]``: its left half, then the lower half of the right."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., half:, half:]), dim=-2)


def unpack_lower(x: torch.Tensor) -> torch.Tensor:
    """The inverse: ``[..., LOWER, HALF]`` to ``[..., BT, BT]``."""
    half = x.shape[-1]
    left, right = x.split((2 * half, half), dim=-2)
    return torch.cat((left, torch.nn.functional.pad(right, (0, 0, half, 0))), dim=-1)


def first_rows(BT: int, rank: int, device: torch.device) -> torch.Tensor:
    """Which of BT rows are the first of their token: ``[BT, 1]``, bool."""
    return (torch.arange(BT, device=device) % rank == 0)[:, None]


def keep_seen(x: torch.Tensor, rank: int) -> torch.Tensor:
    """The entries of ``[..., BT, BT]`` whose row belongs to a later token than their column; zeros elsewhere."""
    token = torch.arange(x.shape[-1], device=x.device) // rank
    return torch.where(token[:, None] > token, x, torch.zeros((), dtype=x.dtype, device=x.device))


def share_heads(x: torch.Tensor, group: int, dim: int = 1) -> torch.Tensor:
    """Repeats each query/key head for the value heads of its group."""
    return x if group == 1 else x.repeat_interleave(group, dim=dim)


def split_operands(case: Case, x: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys, both ``[NT, HV, BT, KP]``, and step sizes, ``[NT, HV, BT, 1]``, in the dtype of g_cumsum.

    q and k are normalised where their rstd is given.
    """
    p, dtype = case.problem, x.g_cumsum.dtype
    q_tile, k_tile = (
        share_heads(split_chunks(y.to(dtype), x.chunk_tokens, case.BT, width=p.KP), p.group) for y in (x.q, x.k)
    )
    rstd = getattr(x, "rstd", None)
    if rstd is not None:
        q_tile, k_tile = q_tile * rstd[:, :, 0, :, None], k_tile * rstd[:, :, 1, :, None]
    step = split_chunks(activate_beta(x.beta.to(dtype), p.beta), x.chunk_tokens, case.BT)[..., None]
    return q_tile, k_tile, step


def pad_state(problem: Problem, state: torch.Tensor) -> torch.Tensor:
    """States as a caller gives them to ``[..., KP, VP]``."""
    state = state.mT if problem.state_v_first else state
    return torch.nn.functional.pad(state, (0, problem.VP - problem.V, 0, problem.KP - problem.K))


def crop_state(problem: Problem, state: torch.Tensor) -> torch.Tensor:
    """The inverse: ``[..., KP, VP]`` to what a caller gets."""
    state = state[..., : problem.K, : problem.V]
    return state.mT if problem.state_v_first else state
