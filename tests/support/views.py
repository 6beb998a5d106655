"""The same values in tensors that are laid out otherwise."""

import torch
from torch import Tensor


def scatter(x: Tensor) -> Tensor:
    """The same values with the axes in memory turned around."""
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def misalign(x: Tensor) -> Tensor:
    """The same values one element past a boundary."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def widen(x: Tensor) -> Tensor:
    """The same values as part of a wider tensor, as a slice of a fused projection is."""
    return torch.cat([torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], -1)[
        ..., x.shape[-1] : 2 * x.shape[-1]
    ]
