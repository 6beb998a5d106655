"""Where chunks lie in the tokens: the index tables every kernel reads, for dense batches and packed sequences alike.

Tables are made on the host and copied once per distinct layout; both caches are bounded.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kda_tl.errors import InputError


@dataclass(frozen=True, eq=False)
class Layout:
    """Chunks of a batch.

    Attributes:
        chunk_tokens: int32 [NT, 2], first token (flattened over the batch) and token count of each chunk.
        seq_chunks: int32 [N + 1], chunks of sequence n are seq_chunks[n] to seq_chunks[n + 1].
        NT: number of chunks.
        N: number of sequences.
    """

    chunk_tokens: torch.Tensor
    seq_chunks: torch.Tensor
    NT: int
    N: int


@functools.lru_cache(maxsize=256)
def make_layout(bounds: tuple[int, ...], BT: int, device: torch.device) -> Layout:
    """The layout of sequences whose tokens are ``bounds[n]`` to ``bounds[n + 1]``, in chunks of BT tokens."""
    edges = np.asarray(bounds, dtype=np.int64)
    chunks = -(-np.diff(edges) // BT)
    seq_chunks = np.concatenate([[0], np.cumsum(chunks)])
    sequence = np.repeat(np.arange(len(chunks)), chunks)
    start = edges[sequence] + BT * (np.arange(len(sequence)) - seq_chunks[sequence])
    count = np.minimum(edges[sequence + 1] - start, BT)
    chunk_tokens = np.stack([start, count], axis=1).astype(np.int32)
    return Layout(
        chunk_tokens=torch.from_numpy(chunk_tokens).to(device),
        seq_chunks=torch.from_numpy(seq_chunks.astype(np.int32)).to(device),
        NT=len(sequence),
        N=len(chunks),
    )


@functools.lru_cache(maxsize=256)
def dense_bounds(B: int, T: int) -> tuple[int, ...]:
    """Token bounds of B sequences of T tokens each."""
    return tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1)


_INTEGERS = (torch.int32, torch.int64)
_seen: MutableMapping[torch.Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def packed_bounds(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, tokens: int) -> tuple[int, ...]:
    """Token bounds on the host, checked.

    A device tensor that comes without ``cu_seqlens_cpu`` is copied to the host the first time it is seen, which waits
    for the device once; a tensor that PyTorch knows to be unchanged is remembered for as long as it lives. Tensors
    made under ``torch.inference_mode`` carry no version, so they are read at every call.

    Raises:
        InputError: not integer, not 1-D, not from 0 to ``tokens``, decreasing, or not of the host copy's length.
    """
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    version = None if source.is_inference() else source._version
    known = _seen.get(source)
    if known is not None and known[0] == version:
        bounds = known[1]
    else:
        if source.dim() != 1 or source.dtype not in _INTEGERS or len(source) < 2:
            raise InputError(
                f"cu_seqlens must be a 1-D int32 or int64 tensor [0, ..., T], got {source.dtype} {list(source.shape)}."
            )
        bounds = tuple(source.tolist())
        if any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
            raise InputError("cu_seqlens must not decrease: pass the running sum of the sequence lengths.")
        if version is not None:
            _seen[source] = (version, bounds)
    if source is not cu_seqlens and (cu_seqlens.shape != source.shape or cu_seqlens.dtype not in _INTEGERS):
        raise InputError(
            "cu_seqlens must be a 1-D int32 or int64 tensor of which cu_seqlens_cpu is the copy, got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} and {list(source.shape)}."
        )
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise InputError(f"cu_seqlens must start at 0 and end at T={tokens}, got {bounds[0]} and {bounds[-1]}.")
    return bounds
