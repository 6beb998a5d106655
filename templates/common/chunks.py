"""Chunk-major layout in plain PyTorch: what the stages' references share.

Intermediates are laid out ``[NT, HV, BT, D]``: one contiguous tile a chunk and head, for dense batches and packed
sequences alike. ``chunk_tokens[i] = (first token, token count)`` of chunk i, tokens being flattened over the batch.
"""

from __future__ import annotations

import torch


def split_chunks(x: torch.Tensor, chunk_tokens: torch.Tensor, BT: int, width: int | None = None) -> torch.Tensor:
    """``[tokens, heads, D]`` (or ``[tokens, heads]``) to ``[NT, heads, BT, width]``, zeros past the end of a chunk."""
    start, count = chunk_tokens[:, :1].long(), chunk_tokens[:, 1:].long()
    row = torch.arange(BT, device=x.device)
    inside = row < count
    index = torch.where(inside, start + row, 0)
    if x.shape[0] == 0:
        tiles = x.new_zeros((*index.shape, *x.shape[1:]))
    else:
        mask = inside.reshape(*inside.shape, *([1] * (x.dim() - 1)))
        tiles = torch.where(mask, x[index], torch.zeros((), dtype=x.dtype, device=x.device))
    tiles = tiles.transpose(1, 2)
    if width is not None and width > x.shape[-1]:
        tiles = torch.nn.functional.pad(tiles, (0, width - x.shape[-1]))
    return tiles


def join_chunks(tiles: torch.Tensor, chunk_tokens: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """The inverse: ``[NT, heads, BT, D]`` to ``[tokens, heads, width]``."""
    NT, heads, BT, _ = tiles.shape
    start, count = chunk_tokens[:, :1].long(), chunk_tokens[:, 1:].long()
    row = torch.arange(BT, device=tiles.device)
    inside = row < count
    out = tiles.new_zeros((tokens, heads, width))
    rows = tiles.transpose(1, 2)[..., :width]
    return out.index_put(((start + row)[inside],), rows[inside])


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
