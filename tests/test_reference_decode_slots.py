"""The judge of the decode operators: which slots of a pool of states are read, and which are written."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from support.cases import bounds_of
from support.decode_cases import (
    PADS,
    TOKENS,
    Args,
    assert_only_written,
    cut,
    draw,
    draw_call,
    draw_states,
    ints,
    single,
)
from support.oracle import assert_close

from kda_tl.reference_decode import decode_reference


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("columns", (0, 1, 2), ids=("1-D", "2-D", "2-D wide"))
def test_pool_against_single_calls(columns: int, dtype: torch.dtype, rng: random.Random) -> None:
    """Every index names one slot, so that what any token writes is seen."""
    lengths = [0, *(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))]
    rng.shuffle(lengths)
    N, W = len(lengths), max(lengths) + columns - 1
    x = draw_call(rng, 1, sum(lengths))
    order = rng.sample(range(N * max(W, 1) + 3), N * max(W, 1))
    slots = ints(*order, dtype=dtype).view(N, -1)[:, : W if columns else 1]
    pool = draw_states(rng, x, N * max(W, 1) + 3)
    result = decode_reference(
        **x,
        initial_state=pool,
        ssm_state_indices=slots if columns else slots[:, 0],
        cu_seqlens=ints(*bounds_of(lengths), dtype=dtype),
    )
    written = {}
    for n, (first, end) in enumerate(pairwise(bounds_of(lengths))):
        state = pool[slots[n, 0]]
        for t in range(first, end):
            o, state = single(x, 0, t, state)
            assert_close(result.o[0, t], o)
            written[int(slots[n, t - first if columns else 0])] = state
        assert_close(result.final_state[n], state)
    assert result.pool is not None
    assert_only_written(result.pool, pool, written)


def test_accepted_tokens_choose_the_column(rng: random.Random) -> None:
    W = rng.randint(3, 5)
    counts = [0, 1, 2, W, W + 3, -2]
    rng.shuffle(counts)
    N, T = len(counts), rng.randint(1, W)
    x = draw(rng, N, T)
    pool = draw_states(rng, x, N * W)
    slots = torch.tensor(rng.sample(range(N * W), N * W)).view(N, W)
    for accepted in (counts, *([c] * N for c in counts)):
        result = decode_reference(**x, initial_state=pool, ssm_state_indices=slots, num_accepted_tokens=ints(*accepted))
        column = [{0: 0, 1: 0, 2: 1, W: W - 1, W + 3: W - 1, -2: 0}[count] for count in accepted]
        read = pool[slots[range(N), column]]
        alone = decode_reference(**x, initial_state=read)
        assert_close(result.o, alone.o)
        assert_close(result.final_state, alone.final_state)
        states = [decode_reference(**cut_all(x, t + 1), initial_state=read).final_state for t in range(T)]
        written = {int(slots[n, t]): states[t][n] for n in range(N) for t in range(T)}
        assert result.pool is not None
        assert_only_written(result.pool, pool, written)


def cut_all(x: Args, end: int) -> Args:
    """The tokens of every sequence up to end."""
    return x | {name: x[name][:, :end] for name in TOKENS if name in x}


@PADS
@pytest.mark.parametrize("wide", (False, True), ids=("1-D", "2-D"))
@pytest.mark.parametrize("separate", (False, True), ids=("same", "separate"))
@pytest.mark.parametrize("all_null", (False, True), ids=("some", "all"))
def test_null_sequences(all_null: bool, separate: bool, wide: bool, pad: int, rng: random.Random) -> None:
    """They have zeros for results and write nowhere, whatever stands in their destinations and rows."""
    N, T = 5, rng.randint(2, 4)
    x = draw(rng, N, T)
    width = T if wide else 1
    null = set(range(N)) if all_null else set(rng.sample(range(N), rng.randint(1, N - 1)))
    size = 2 * N * width + 1
    order = ints(*rng.sample(range(1, size), 2 * N * width)).view(2, N, width)
    slots, targets = order[0].clone(), order[1] if separate else None
    for n in null:
        slots[n, 0] = rng.choice((pad, pad - 1, pad - 7))  # the other columns are stale
    pool, rows = draw_states(rng, x, size), draw_states(rng, x, N, T)
    result = decode_reference(
        **x,
        initial_state=pool,
        ssm_state_indices=slots if wide else slots[:, 0],
        output_state_indices=targets if targets is None or wide else targets[:, 0],
        pad_slot_id=pad,
        intermediate_states=rows,
    )
    assert result.pool is not None and result.intermediate_states is not None
    written, written_rows = {}, {}
    for n in range(N):
        if n in null:
            assert not result.o[n].any() and not result.final_state[n].any()
            continue
        alone = decode_reference(
            **cut(x, n, 0, T), initial_state=pool[slots[n, :1]], intermediate_states=rows[n : n + 1]
        )
        assert alone.intermediate_states is not None
        assert_close(result.o[n], alone.o[0])
        written_rows[n] = alone.intermediate_states[0]
        at = (slots if targets is None else targets)[n].tolist()
        written |= dict(zip(at, written_rows[n] if wide else alone.final_state, strict=True))
    assert_only_written(result.pool, pool, written)
    assert_only_written(result.intermediate_states, rows, written_rows)


def test_slot_zero_is_a_slot_unless_it_is_padding(rng: random.Random) -> None:
    x = draw(rng, 1, 1)
    pool = draw_states(rng, x, 2)
    live = decode_reference(**x, initial_state=pool, ssm_state_indices=ints(0))
    null = decode_reference(**x, initial_state=pool, ssm_state_indices=ints(0), pad_slot_id=0)
    row = decode_reference(**x, initial_state=pool[:1], pad_slot_id=0)
    assert live.o.any() and live.pool is not None and not torch.equal(live.pool[0], pool[0])
    assert not null.o.any() and null.pool is not None and torch.equal(null.pool, pool)
    assert row.pool is not None
    assert_close(row.pool, live.pool[:1])


@PADS
@pytest.mark.parametrize("wide", (False, True), ids=("1-D", "2-D"))
@pytest.mark.parametrize("below", (0, 1, 7), ids="below{}".format)
def test_separate_destinations_leave_the_source(below: int, wide: bool, pad: int, rng: random.Random) -> None:
    N, T = rng.randint(2, 4), rng.randint(1, 3)
    x, width = draw(rng, N, T), T if wide else 1
    size = N * (width + 1) + 2
    order = rng.sample(range(1, size), N * (width + 1))
    slots, targets = ints(*order[:N]), ints(*order[N:]).view(N, width)
    skipped = rng.randrange(N)
    targets[skipped, -1] = pad - below
    pool = draw_states(rng, x, size)
    result = decode_reference(
        **x,
        initial_state=pool,
        ssm_state_indices=slots,
        output_state_indices=targets if wide else targets[:, 0],
        pad_slot_id=pad,
    )
    alone = decode_reference(**x, initial_state=pool[slots], intermediate_states=draw_states(rng, x, N, T))
    assert alone.intermediate_states is not None and result.pool is not None
    assert result.o[skipped].any()
    assert_close(result.o, alone.o)
    assert_close(result.final_state, alone.final_state)
    states = alone.intermediate_states if wide else alone.final_state[:, None]
    written = {int(targets[n, t]): states[n, t] for n in range(N) for t in range(width) if targets[n, t] > pad}
    assert len(written) == N * width - 1 and not written.keys() & set(order[:N])
    assert_only_written(result.pool, pool, written)


def test_without_sources_destinations_are_rows(rng: random.Random) -> None:
    x = draw(rng, 2, 2)
    states = draw_states(rng, x, 2)
    result = decode_reference(**x, initial_state=states, output_state_indices=ints(1, -1))
    assert result.pool is not None
    assert_only_written(result.pool, states, {1: result.final_state[0]})
    assert_close(result.o, decode_reference(**x, initial_state=states).o)


def test_all_sequences_read_before_any_writes(rng: random.Random) -> None:
    x = draw(rng, 2, 2)
    pool = draw_states(rng, x, 2)
    result = decode_reference(**x, initial_state=pool, ssm_state_indices=ints(0, 1), output_state_indices=ints(1, 0))
    expected = decode_reference(**x, initial_state=pool)
    assert result.pool is not None
    assert_close(result.o, expected.o)
    assert_close(result.pool, expected.final_state.flip(0))
