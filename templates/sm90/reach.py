"""Where a walk must begin so that what lies before it does not count: segments that find their own start.

A state, or its gradient, changes in a chunk by a transition whose norm fwd_gdn_pairs bounds. A walk that begins so many
chunks before its segment that less than 2^-64 of what was there can be left begins with zero, and one that begins at
the sequence's end with what is known there. Most walks take at most FAR chunks so: where gates remember more, they
begin with what is known between segments. With few segments bwd_gdn_states finds that by walks of whole sequences, and
its own states likewise; with many, and in the forward, segments and merges of either direction do. So slow gates cost
some time and no accuracy.
"""

from __future__ import annotations

import torch

from kda_tl.core.stage import Operands
from kda_tl.templates.common.language import T

VANISHED = -64.0  # log2 of what is left
LEAST = -128.0  # of one chunk: sums stay finite
FAR = 16  # chunks
AT_ONCE = 8  # chunks whose bounds are read side by side
# Of each segment its sequence, that one's first chunk and the chunk past its last
OWNERS = {"segment_sequences": "NS 3 : i32"}
# Of each sequence the first of its cut segments, which do not end it, their number, and the segment that ends it
CUTS = {"seq_segments": "N 3 : i32"}
# States after cut segments, for walks that do not find them: see fwd_gdn_merge
EDGES = {"edges": "NC HV V KP : f32"}
WARP = 32  # lanes


@T.macro
def find_reach(bounds, i_h, edge, step, most):
    """How many chunks, ``edge`` the first and ``step`` from one to the next, at most ``most``, a walk takes before its
    segment.
    """
    total = T.alloc_var("float32")
    reach = T.alloc_var("int32")
    found = T.alloc_local((AT_ONCE,), "float32")
    total = 0.0
    reach = 0
    while (reach < most) & (total > VANISHED):
        for n in T.unroll(AT_ONCE):
            found[n] = bounds[edge + step * T.min(reach + n, most - 1), i_h]
        for n in T.unroll(AT_ONCE):
            if (reach < most) & (total > VANISHED):
                total = total + T.max(found[n], LEAST)
                reach = reach + 1
    return reach


@T.macro
def find_forwards(x, i_s, i_h, told):
    """Of the walk forwards that a segment takes: its first chunk, their number, how many are passed only to find the
    state, the first token, the one past the end, the sequence whose state it begins with, or -1, and the cut segment
    after which it begins with the state that is known there, or -1. Where states are not ``told`` there is none.
    """
    own, count = x.segments[i_s, 0], x.segments[i_s, 1]
    earlier = own - x.owners[i_s, 1]
    reach = find_reach(x.bounds, i_h, own - 1, -1, T.min(earlier, FAR + 1) if told else earlier)
    passed = T.if_then_else(reach > FAR, 0, reach) if told else reach
    last = T.max(own + count - 1, 0)
    start = x.chunk_tokens[T.min(own - passed, last), 0]
    end = x.chunk_tokens[last, 0] + x.chunk_tokens[last, 1]
    i_n = x.owners[i_s, 0]
    before = T.if_then_else(i_s == x.cuts[i_n, 2], x.cuts[i_n, 0] + x.cuts[i_n, 1], i_s) - 1
    begins = (reach == earlier) & (reach <= FAR) if told else reach == earlier
    edge = T.if_then_else(reach > FAR, before, -1) if told else -1
    return own - passed, count + passed, passed, start, end, T.if_then_else(begins, i_n, -1), edge


@T.macro
def find_backwards(x, i_s, i_h):
    """How many chunks a walk back takes before a segment, which its gradient of the state then begins with, and whether
    these are all that follow in its sequence; more than FAR where it is to begin with what is known of its end.
    """
    edge = x.segments[i_s, 0] + x.segments[i_s, 1]
    later = x.owners[i_s, 2] - edge
    reach = find_reach(x.bounds, i_h, edge, 1, T.min(later, FAR + 1))
    return reach, reach == later


@T.macro
def find_far(x, i_n, i_h):
    """The first of a sequence's segments whose end a walk of its own does not reach, counted from its first; their
    number but for the last one if there is none.
    """
    begun = T.alloc_var("int32")
    near = T.alloc_var("int32")
    begun = 0
    near = 1
    while (begun < x.cuts[i_n, 1]) & (near > 0):
        reach, _ = find_backwards(x, x.cuts[i_n, 0] + begun, i_h)
        if reach > FAR:
            near = 0
        else:
            begun = begun + 1
    return begun


@T.macro
def has_far(x, i_n, i_h, step, lanes=WARP):
    """Whether some walk to an edge between segments of a sequence is a far one, forwards from earlier chunks where
    ``step`` is -1, and back from later ones where it is 1: 1 or 0, in all lanes of a warp, which share the edges.
    """
    found = T.alloc_var("int32")
    found = 0
    begun, cuts = x.cuts[i_n, 0], x.cuts[i_n, 1]
    for m in T.serial(T.ceildiv(cuts, lanes)):
        lane = T.get_thread_binding() % lanes if lanes > 1 else 0
        i_s = begun + T.min(m * lanes + lane, cuts - 1)
        edge = x.segments[i_s, 0] + x.segments[i_s, 1]
        beyond = x.owners[i_s, 2] - edge if step > 0 else edge - x.owners[i_s, 1]
        reach = find_reach(x.bounds, i_h, edge if step > 0 else edge - 1, step, T.min(beyond, FAR + 1))
        found = T.if_then_else(reach > FAR, 1, found)
    if lanes > 1:  # of the vote alone: where threads may part ptxas (CUDA 13.0) waits after each product
        anywhere = T.alloc_var("int32")
        anywhere = T.if_then_else(T.any_sync(found > 0) != 0, 1, 0)
        return anywhere
    return found


def count_reach(bounds: list[float]) -> int:
    """PyTorch twin, of one head's bounds, in the order of the walk: how many chunks it takes."""
    total = 0.0
    for n, bound in enumerate(bounds):
        if total <= VANISHED:
            return n
        total += max(bound, LEAST)
    return len(bounds)


def far_reference(x: Operands, i_n: int, step: int) -> torch.Tensor:
    """PyTorch twin of has_far, of all heads: [HV]."""
    begun, cuts, last = x.seq_segments[i_n].tolist()
    _, first, end = x.segment_sequences[last].tolist()
    found = torch.zeros(x.bounds.shape[1], dtype=torch.bool, device=x.bounds.device)
    for edge, count, *_ in x.segments[begun : begun + cuts].tolist():
        rows = x.bounds[edge + count : end] if step > 0 else x.bounds[first : edge + count].flip(0)
        found |= torch.tensor([count_reach(column) > FAR for column in rows.T.tolist()], device=found.device)
    return found


def join_segments(x: Operands) -> Operands:
    """The same operands with whole sequences for segments."""
    whole = x.segment_sequences.unique(dim=0)
    sequences = torch.stack([whole[:, 1], whole[:, 2] - whole[:, 1], whole[:, 0], whole[:, 0]], 1)
    return Operands(**vars(x) | {"segments": sequences})
