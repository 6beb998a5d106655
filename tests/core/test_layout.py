"""Index tables against a token-by-token construction, and the bounds of sequences."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence

import pytest
import torch
from support.cases import bounds_of, draw_lengths

from kda_tl.core.layout import dense_bounds, make_layout, packed_bounds
from kda_tl.core.stage import BT_CHOICES
from kda_tl.errors import InputError

CPU = torch.device("cpu")


def walk(lengths: Sequence[int], BT: int) -> tuple[list[list[int]], list[int]]:
    """Chunks found token by token: a new one where a sequence begins or BT tokens are full."""
    chunks: list[list[int]] = []
    first_chunks = [0]
    token = 0
    for length in lengths:
        for i in range(length):
            if i % BT == 0:
                chunks.append([token, 0])
            chunks[-1][1] += 1
            token += 1
        first_chunks.append(len(chunks))
    return chunks, first_chunks


@pytest.mark.parametrize("BT", BT_CHOICES)
def test_tables_equal_a_walk_over_the_tokens(BT: int, seed: int) -> None:
    rng = random.Random(seed)
    edges = [0, 1, BT - 1, BT, BT + 1, 2 * BT, 5 * BT - 1]
    cases = [[n] for n in edges] + [[0, 0, 0], [0, BT, 0], [1] * 5]
    cases += [[rng.choice([*edges, rng.randrange(400)]) for _ in range(rng.randrange(1, 9))] for _ in range(40)]
    for lengths in [*cases, draw_lengths(rng)]:
        tables, counts = make_layout(bounds_of(lengths), BT, CPU)
        chunks, first_chunks = walk(lengths, BT)
        assert tables["chunk_tokens"].dtype == tables["seq_chunks"].dtype == torch.int32
        assert tables["chunk_tokens"].shape == (len(chunks), 2) and tables["chunk_tokens"].is_contiguous()
        assert tables["chunk_tokens"].tolist() == chunks, lengths
        assert tables["seq_chunks"].tolist() == first_chunks, lengths
        assert (len(chunks), len(lengths)) == (counts["NT"], counts["N"])


@pytest.mark.parametrize("segments", (1, 2, 4, 8, 16))
def test_segments_cut_every_sequence(segments: int, seed: int) -> None:
    """Every chunk once and in order, none longer than promised, what ends a sequence last and the longest first."""
    rng = random.Random(seed)
    cases = [[0], [1], [0, 0], [64 * 100], [64, 64 * 100, 0, 1]]
    cases += [[rng.choice((0, 1, 64, 65, rng.randrange(3000))) for _ in range(rng.randrange(1, 9))] for _ in range(60)]
    for lengths in cases:
        tables, counts = make_layout(bounds_of(lengths), 64, CPU, segments)
        rows, found = tables["segments"].tolist(), tables["seq_segments"].tolist()
        assert tables["segments"].dtype == tables["seq_segments"].dtype == torch.int32
        assert (len(rows), len(found)) == (counts["NS"], len(lengths))
        assert counts["NC"] == max(1, counts["NS"] - len(lengths))
        longest = max(1, -(-counts["NT"] // segments))
        seen: list[int] = []
        for n, (first, count, last) in enumerate(found):
            mine = [*range(first, first + count), last]
            seen += mine
            chunks = tables["seq_chunks"].tolist()[n : n + 2]
            sizes = [rows[s][1] for s in mine]
            assert [c for s in mine for c in range(rows[s][0], sum(rows[s][:2]))] == list(range(*chunks)), lengths
            assert [rows[s][2] for s in mine] == [n, *[-1] * count] and [rows[s][3] for s in mine] == [-1] * count + [n]
            assert max(sizes) <= longest and (min(sizes) > 0 or sizes == [0]) and max(sizes) - min(sizes) <= 1, lengths
            assert segments > 1 or count == 0
        assert sorted(seen) == list(range(counts["NS"])), lengths
        ends = [row[3] >= 0 for row in rows]
        lasts = [row[1] for row in rows if row[3] >= 0]
        assert ends == sorted(ends) and lasts == sorted(lasts, reverse=True), lengths


@pytest.mark.parametrize("segments", (1, 2, 4, 8, 16))
def test_segments_know_their_sequence(segments: int, seed: int) -> None:
    """The one that all their tokens are of, and its chunks from the first to the one past the last."""
    rng = random.Random(seed)
    cases = [[0], [1], [0, 0, 0], [64 * 40], [0, 64 * 20, 0, 1, 700]]
    cases += [[rng.choice((0, 1, 64, 65, rng.randrange(2000))) for _ in range(rng.randrange(1, 9))] for _ in range(40)]
    for lengths in cases:
        tables, counts = make_layout(bounds_of(lengths), 64, CPU, segments)
        chunks, first_chunks = walk(lengths, 64)
        sequence_of_token = [n for n, length in enumerate(lengths) for _ in range(length)]
        owners = tables["segment_sequences"]
        assert owners.dtype == torch.int32 and owners.shape == (counts["NS"], 3) and owners.is_contiguous()
        empty: list[int] = []
        for (first, count, _, _), (n, begin, end) in zip(tables["segments"].tolist(), owners.tolist(), strict=True):
            tokens = [start + i for start, held in chunks[first : first + count] for i in range(held)]
            assert {sequence_of_token[token] for token in tokens} <= {n}, lengths
            assert [begin, end] == first_chunks[n : n + 2], lengths
            empty += [] if tokens else [n]
        assert sorted(empty) == [n for n, length in enumerate(lengths) if length == 0], lengths
        assert {*owners[:, 0].tolist()} == {*range(len(lengths))}, lengths


def test_tables_and_sizes_have_the_names_of_pipelines() -> None:
    layout = make_layout(bounds_of((130, 0)), 64, CPU, 4)
    assert layout.sizes == {"tokens": 130, "NT": 3, "N": 2, "NS": 4, "NC": 2}
    assert list(layout.tables) == ["chunk_tokens", "seq_chunks", "segments", "segment_sequences", "seq_segments"]
    assert layout.tables["segments"].tolist() == [[0, 1, 0, -1], [1, 1, -1, -1], [2, 1, -1, 0], [3, 0, 1, 1]]
    assert layout.tables["segment_sequences"].tolist() == [[0, 0, 3], [0, 0, 3], [0, 0, 3], [1, 3, 3]]
    assert layout.tables["seq_segments"].tolist() == [[0, 2, 2], [2, 0, 3]]


def test_dense_bounds_are_packed_bounds_of_equal_lengths() -> None:
    for B in (1, 2, 7):
        for T in (0, 1, 63, 64, 65):
            assert dense_bounds(B, T) == bounds_of([T] * B)


def test_equal_layouts_are_one_object() -> None:
    bounds = bounds_of((5, 70))
    assert make_layout(bounds, 64, CPU) is make_layout(tuple(bounds), 64, torch.device("cpu"))
    assert make_layout(bounds, 32, CPU) is not make_layout(bounds, 64, CPU)
    assert dense_bounds(3, 77) is dense_bounds(3, 77)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_packed_bounds(dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, 0, 3, 3, 10], dtype=dtype)
    assert packed_bounds(cu_seqlens, None, 10) == (0, 0, 3, 3, 10)
    assert packed_bounds(cu_seqlens, None, 10) is packed_bounds(cu_seqlens, None, 10)
    assert all(type(n) is int for n in packed_bounds(cu_seqlens, None, 10))
    with pytest.raises(InputError, match="end at T=11"):  # a remembered tensor is still held against T
        packed_bounds(cu_seqlens, None, 11)


def test_host_copy_is_what_is_read() -> None:
    elsewhere = torch.tensor([0, 4, 9], device="meta")  # cannot be read
    assert packed_bounds(elsewhere, torch.tensor([0, 4, 9]), 9) == (0, 4, 9)


@pytest.mark.parametrize("given", (torch.tensor([0, 4, 4, 9]), torch.tensor([0.0, 4.0, 9.0]), torch.tensor(9)))
def test_host_copy_must_be_a_copy(given: torch.Tensor) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match="of which cu_seqlens_cpu is the copy"):
            packed_bounds(given, torch.tensor([0, 4, 9]), 9)


def test_host_copy_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when either changed."""
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or tolist(x))
    one, copy = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 4, 9])
    for _ in range(3):
        assert packed_bounds(one, copy, 9) == (0, 4, 9)
        assert len(reads) == 2
    one[1] = 5
    for _ in range(2):
        with pytest.raises(InputError, match="cu_seqlens_cpu must be a copy of cu_seqlens, but they hold 4 and 5"):
            packed_bounds(one, copy, 9)
    copy[1] = 5
    assert packed_bounds(one, copy, 9) == (0, 5, 9)


def test_changed_cu_seqlens_is_noticed() -> None:
    cu_seqlens = torch.tensor([0, 4, 10])
    assert packed_bounds(cu_seqlens, None, 10) == (0, 4, 10)
    cu_seqlens[1] = 6
    assert packed_bounds(cu_seqlens, None, 10) == (0, 6, 10)
    cu_seqlens.copy_(torch.tensor([0, 2, 10]))
    assert packed_bounds(cu_seqlens, None, 10) == (0, 2, 10)
    cu_seqlens[1:].add_(1)  # through a view
    assert packed_bounds(cu_seqlens, None, 11) == (0, 3, 11)
    cu_seqlens[1] = 12
    for _ in range(2):  # what was refused is not remembered
        with pytest.raises(InputError, match="must not decrease"):
            packed_bounds(cu_seqlens, None, 11)
    cu_seqlens[1] = 5
    assert packed_bounds(cu_seqlens, None, 11) == (0, 5, 11)


def test_inference_tensors_are_read_every_time() -> None:
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 4, 10])
        assert packed_bounds(cu_seqlens, None, 10) == (0, 4, 10)
        cu_seqlens[1] = 6
        assert packed_bounds(cu_seqlens, None, 10) == (0, 6, 10)


def test_equal_tensors_are_not_mistaken_for_each_other() -> None:
    one, other = torch.tensor([0, 4, 10]), torch.tensor([0, 5, 10])
    assert packed_bounds(one, None, 10) == (0, 4, 10)
    assert packed_bounds(other, None, 10) == (0, 5, 10)
    for n in range(50):  # a new tensor where a dead one lay
        cu_seqlens = torch.tensor([0, n, 50])
        assert packed_bounds(cu_seqlens, None, 50) == (0, n, 50)
        del cu_seqlens


def test_remembered_tensors_may_die() -> None:
    cu_seqlens = torch.tensor([0, 4, 10])
    packed_bounds(cu_seqlens, None, 10)
    dead = weakref.ref(cu_seqlens)
    del cu_seqlens
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize(
    ("values", "dtype", "sentence"),
    (
        ([1, 10], torch.int32, "must start at 0 and end at T=10, got 1 and 10"),
        ([-1, 10], torch.int64, "must start at 0"),
        ([0, 9], torch.int32, "end at T=10, got 0 and 9"),
        ([0, 11], torch.int32, "end at T=10"),
        ([0, 7, 3, 10], torch.int32, "must not decrease"),
        ([0, 12, 10], torch.int64, "must not decrease"),
        ([0.0, 10.0], torch.float32, "1-D int32 or int64"),
        ([0, 10], torch.int16, "1-D int32 or int64"),
        ([0, 10], torch.uint8, "1-D int32 or int64"),
        ([False, True], torch.bool, "1-D int32 or int64"),
        ([[0, 10]], torch.int32, "1-D int32 or int64"),
        (10, torch.int32, "1-D int32 or int64"),
        ([0], torch.int32, "1-D int32 or int64"),
        ([], torch.int32, "1-D int32 or int64"),
    ),
)
@pytest.mark.parametrize("host", (False, True), ids=("tensor", "host copy"))
def test_bad_cu_seqlens(values: object, dtype: torch.dtype, sentence: str, host: bool) -> None:
    bad = torch.tensor(values, dtype=dtype)
    with pytest.raises(InputError, match=sentence):
        packed_bounds(torch.zeros(bad.shape, dtype=torch.int32), bad, 10) if host else packed_bounds(bad, None, 10)
