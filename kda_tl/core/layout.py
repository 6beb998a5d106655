"""Where chunks lie in the tokens: the index tables every kernel reads, for dense batches and packed sequences alike.

Tables are made on the host and copied once per distinct layout; both caches are bounded.
"""

import functools
from collections.abc import MutableMapping
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kda_tl.core.plain import check_memory
from kda_tl.errors import InputError


class Layout(NamedTuple):
    """Chunks of a batch, and the segments that its sequences are cut into.

    Attributes:
        tables: int32, by the names under which pipelines take them.
            chunk_tokens: [NT, 2], first token (flattened over the batch) and token count of each chunk.
            seq_chunks: [N + 1], chunks of sequence n are seq_chunks[n] to seq_chunks[n + 1].
            segments: [NS, 4], first chunk and chunk count of each segment, the sequence that starts with it or -1, and
                the sequence that ends with it or -1. Those that end no sequence come first, a sequence's in their
                order; the others follow, the longest first.
            segment_sequences: [NS, 3], the sequence of each segment, its first chunk and the chunk past its last.
            seq_segments: [N, 3], of each sequence the first of its segments that do not end it, their count, and the
                segment that ends it.
        sizes: what kernels are launched with: tokens, NT, N and NS, the numbers of tokens, chunks, sequences and
            segments, and NC, that of segments that end no sequence, but at least 1: so many rows has what is kept of
            them.
    """

    tables: dict[str, torch.Tensor]
    sizes: dict[str, int]


@functools.lru_cache(maxsize=256)
def make_layout(bounds: tuple[int, ...], BT: int, device: torch.device, segments: int = 1) -> Layout:
    """The layout of sequences whose tokens are ``bounds[n]`` to ``bounds[n + 1]``, in chunks of BT tokens.

    The tables live on ``device``. All chunks would make so many ``segments`` if they were one sequence; no segment is
    longer than those would be, so with 1 every sequence stays whole.
    """
    edges = np.asarray(bounds, dtype=np.int64)
    chunks = -(-np.diff(edges) // BT)
    seq_chunks = np.concatenate([[0], np.cumsum(chunks)])
    sequence = np.repeat(np.arange(len(chunks)), chunks)
    start = edges[sequence] + BT * (np.arange(len(sequence)) - seq_chunks[sequence])
    count = np.minimum(edges[sequence + 1] - start, BT)
    pieces, owners, seq_segments = _cut_sequences(seq_chunks, segments)
    tables = {
        "chunk_tokens": np.stack([start, count], axis=1),
        "seq_chunks": seq_chunks,
        "segments": pieces,
        "segment_sequences": np.stack([owners, seq_chunks[owners], seq_chunks[owners + 1]], axis=1),
        "seq_segments": seq_segments,
    }
    NT, N, NS = len(sequence), len(chunks), len(pieces)
    return Layout(
        {name: torch.from_numpy(table.astype(np.int32)).to(device) for name, table in tables.items()},
        {"tokens": int(edges[-1]), "NT": NT, "N": N, "NS": NS, "NC": max(1, NS - N)},
    )


def _cut_sequences(seq_chunks: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table ``segments``, the sequence of each, and ``seq_segments``; a sequence's differ by at most a chunk."""
    chunks = np.diff(seq_chunks)
    longest = max(1, -(-int(seq_chunks[-1]) // segments))
    counts = np.maximum(1, -(-chunks // longest))
    sequence = np.repeat(np.arange(len(chunks)), counts)
    number = np.arange(len(sequence)) - np.repeat(np.cumsum(counts) - counts, counts)
    first, end = (seq_chunks[sequence] + at * chunks[sequence] // counts[sequence] for at in (number, number + 1))
    ends = number == counts[sequence] - 1
    rows = np.stack([first, end - first, np.where(number, -1, sequence), np.where(ends, sequence, -1)], axis=1)
    order = np.lexsort((np.where(ends, first - end, 0), ends))
    last = np.empty(len(chunks), dtype=np.int64)
    last[sequence[order][ends[order]]] = np.flatnonzero(ends[order])
    return rows[order], sequence[order], np.stack([np.cumsum(counts - 1) - (counts - 1), counts - 1, last], axis=1)


@functools.lru_cache(maxsize=256)
def dense_bounds(B: int, T: int) -> tuple[int, ...]:
    """Token bounds of B sequences of T tokens each."""
    return tuple(range(0, B * T + 1, T)) if T else (0,) * (B + 1)


_INTEGERS = (torch.int32, torch.int64)
_seen: MutableMapping[torch.Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def packed_bounds(cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None, tokens: int) -> tuple[int, ...]:
    """Token bounds on the host, checked.

    A device tensor that comes without ``cu_seqlens_cpu`` is copied to the host the first time it is seen, which waits
    for the device once; one that comes with it is never read. Both are read, and compared, where both are on the host.
    Raises InputError for what is not integer, 1-D, from 0 to ``tokens``, in order, or not what the host copy holds.
    """
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    bounds = _read_bounds(source)
    if source is not cu_seqlens and (cu_seqlens.shape != source.shape or cu_seqlens.dtype not in _INTEGERS):
        raise InputError(
            "cu_seqlens must be a 1-D int32 or int64 tensor of which cu_seqlens_cpu is the copy, got "
            f"{cu_seqlens.dtype} {list(cu_seqlens.shape)} and {list(source.shape)}."
        )
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise InputError(f"cu_seqlens must start at 0 and end at T={tokens}, got {bounds[0]} and {bounds[-1]}.")
    if source is not cu_seqlens and cu_seqlens.is_cpu and (held := _read_bounds(cu_seqlens)) != bounds:
        i = next(i for i, pair in enumerate(zip(held, bounds, strict=True)) if pair[0] != pair[1])
        raise InputError(
            f"cu_seqlens_cpu must be a copy of cu_seqlens, but they hold {bounds[i]} and {held[i]} at index {i}:"
            " copy it anew, or leave it out."
        )
    return bounds


def _read_bounds(source: torch.Tensor) -> tuple[int, ...]:
    """A tensor's values. Those of one that PyTorch knows to be unchanged are remembered for as long as it lives.

    Tensors made under ``torch.inference_mode`` carry no version, so they are read at every call.
    """
    version = None if source.is_inference() else source._version
    known = _seen.get(source)
    if known is not None and known[0] == version:
        return known[1]
    if source.dim() != 1 or source.dtype not in _INTEGERS or len(source) < 2:
        raise InputError(
            f"cu_seqlens must be a 1-D int32 or int64 tensor [0, ..., T], got {source.dtype} {list(source.shape)}."
        )
    check_memory("cu_seqlens", source)
    bounds = tuple(source.tolist())
    if any(a > b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise InputError("cu_seqlens must not decrease: pass the running sum of the sequence lengths.")
    if version is not None:
        _seen[source] = (version, bounds)
    return bounds
