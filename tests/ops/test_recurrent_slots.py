"""Which states a recurrent operator reads and writes: slots, padding, accepted tokens, lengths, drafts and trees."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from support.decode_cases import LAYOUTS, PADS, TOKENS, Args, ints
from support.operator_cases import CPU
from support.step_cases import (
    OPERATORS,
    TOLERANCE,
    assert_right,
    draw_step,
    memory_of,
    truth,
    unpack,
)
from support.views import scatter
from torch import Tensor

from kda_tl.core.device import find_compiler
from kda_tl.core.problem import Problem
from kda_tl.ops import recurrent_call
from kda_tl.reference import relative_error

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]
FP32 = TOLERANCE[torch.float32]
PROBLEM = Problem(H=1, HV=1, K=4, V=4, tokens=1, operator="fused_recurrent_kda", direction="step")
kda = OPERATORS["kda"]
names = pytest.mark.parametrize("name", OPERATORS)


def fresh(a: Args) -> Args:
    """The arguments with memory of their own for what is written, slots as far apart as before."""

    def copy(x: Tensor) -> Tensor:
        return memory_of(x).clone().view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    written = ("initial_state", "intermediate_states", "out")
    return a | {key: copy(a[key]) for key in written if a.get(key) is not None}


# Padding


@pytest.mark.rest(draws=12)
@PADS
@pytest.mark.parametrize("kind", ("pool", "columns", "split columns"))
@pytest.mark.parametrize("T", (1, 3))
@pytest.mark.parametrize("null", ((1, 3), (0, 1, 2, 3, 4), ()), ids=("some", "all", "none"))
def test_null_sequences(null: tuple[int, ...], T: int, kind: str, pad: int, rng: random.Random) -> None:
    """Zeros where NaN was, for every token, and no slot is touched: stale ones stand in the other columns."""
    a = draw_step(rng, "kda", kind, N=5, T=T, pad=pad, null=null, final=False)
    o, _ = assert_right("kda", a | {"out": torch.full(a["v"].shape, torch.nan)})
    assert [n for n in range(5) if not o[n].any()] == list(null)


def test_null_sequences_have_zeros_for_final_states(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "verify", N=4, T=2, null=(0, 2), final=True, placed=True)
    a["inplace_final_state"] = False
    _, state = assert_right("kda", a)
    assert state is not None and not state[[0, 2]].any() and state[[1, 3]].flatten(1).any(1).all()


def test_slot_zero_is_a_slot_unless_it_is_padding(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "pool", N=1, null=(), final=False)
    pool = a["initial_state"].clone()
    pool[0] = pool[a["ssm_state_indices"][0]]
    a |= {"initial_state": pool, "ssm_state_indices": ints(0)}
    before = pool.clone()
    o, _ = assert_right("kda", fresh(a))
    assert o.any()
    o, _ = assert_right("kda", a | {"pad_slot_id": 0})
    assert not o.any() and torch.equal(pool, before)


@pytest.mark.parametrize("kind", ("pool", "columns", "split pool"))
def test_slots_beyond_the_pool(kind: str, rng: random.Random) -> None:
    """They are no slots: their sequences have zeros and write nothing."""
    a = draw_step(rng, "kda", kind, N=4, T=2, null=(), final=False)
    slots, beyond = len(a["initial_state"]), a["ssm_state_indices"].clone()
    beyond[1], beyond[2] = slots, slots + 100_000
    expected = truth(a | {"ssm_state_indices": torch.where(beyond < slots, beyond, -1)})
    before = a["initial_state"].clone()
    targets = a.get("output_state_indices", beyond)
    o, pool = kda(**a | {"ssm_state_indices": beyond})
    assert relative_error(o, expected.o) < FP32
    touched = {slot for slot in targets.flatten().tolist() if 0 <= slot < slots}
    for slot in range(slots):
        if slot in touched:
            assert relative_error(a["initial_state"][slot], expected.pool[slot]) < FP32
        else:
            assert torch.equal(a["initial_state"][slot], before[slot]), slot


def test_targets_beyond_the_pool(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "split pool", N=3, T=2, null=(), final=False)
    far = a["output_state_indices"].clone()
    far[1] = len(a["initial_state"])
    before, skipped = a["initial_state"].clone(), a["output_state_indices"].clone()
    skipped[1] = -1
    expected, _ = kda(**fresh(a) | {"output_state_indices": skipped})
    o, _ = kda(**a | {"output_state_indices": far})
    changed = (a["initial_state"] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert torch.equal(o, expected) and changed == sorted(far[[0, 2]].tolist())


def test_rows_beyond_the_buffer(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "keep", N=3, T=2, null=(), final=False, placed=True)
    rows = len(a["intermediate_states"])
    a["intermediate_state_indices"] = ints(0, -1, -9)
    expected, _ = assert_right("kda", fresh(a))
    before = a["intermediate_states"].clone()
    o, _ = kda(**a | {"intermediate_state_indices": ints(0, rows, rows + 9)})
    changed = (a["intermediate_states"] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert torch.equal(o, expected) and changed == [0]


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("kind", ("columns", "split columns"))
def test_tokens_beyond_the_columns(kind: str, rng: random.Random) -> None:
    """Their states go nowhere, above all not to slot 0."""
    a = draw_step(rng, "kda", kind, lengths=(1, 5, 2), width=3, null=(), final=False)
    more = {key: x for key, x in a.items() if key in ("ssm_state_indices", "output_state_indices")}
    room = {key: torch.cat([x, torch.full((3, 2), -1, dtype=x.dtype)], 1) for key, x in more.items()}
    roomy = fresh(a) | room | {"num_accepted_tokens": a["num_accepted_tokens"].clamp(max=3)}
    expected, _ = assert_right("kda", roomy)
    o, _ = kda(**a)
    assert torch.equal(o, expected) and torch.equal(memory_of(a["initial_state"]), memory_of(roomy["initial_state"]))


# Accepted tokens


@pytest.mark.parametrize("counts", ((0,) * 5, (1,) * 5, (3,) * 5, (9,) * 5, (-2,) * 5, (0, 1, 2, 3, 9)), ids=str)
@pytest.mark.parametrize("kind", ("columns", "split columns"))
def test_accepted_tokens_choose_the_column(kind: str, counts: tuple[int, ...], rng: random.Random) -> None:
    a = draw_step(rng, "kda", kind, N=5, T=3, null=(), accepted=counts, final=False)
    assert_right("kda", a)


@pytest.mark.rest(draws=1)
@LAYOUTS
@names
def test_speculation_equals_the_accepted_tokens_alone(name: str, state_v_first: bool, rng: random.Random) -> None:
    """Rounds of drafts, of which some tokens hold: the state is that of these tokens one after the other."""
    N, T, rounds = 3, 4, 5
    a = draw_step(rng, name, "columns", N=N, T=T, v_first=state_v_first, null=(), accepted=(1,) * N, final=False)
    serial = {"initial_state": a["initial_state"][a["ssm_state_indices"][:, 0]].clone(), "inplace_final_state": True}
    flags = {key: x for key, x in a.items() if key not in ("ssm_state_indices", "num_accepted_tokens", "pad_slot_id")}
    a["ssm_state_indices"] = a["ssm_state_indices"][:, :T].clone()
    a["ssm_state_indices"][:, :] = torch.tensor(rng.sample(range(len(a["initial_state"])), N * T)).view(N, T)
    a["initial_state"][a["ssm_state_indices"][:, 0].long()] = serial["initial_state"]
    for _ in range(rounds):
        tokens = draw_step(rng, name, "fresh", N=N, T=T, final=False)
        a |= {key: tokens[key] for key in TOKENS if key in tokens}
        o, _ = OPERATORS[name](**a)
        counts = [rng.randint(1, T) for _ in range(N)]
        for n, count in enumerate(counts):
            state = serial["initial_state"][n : n + 1]
            alone = {key: a[key][n : n + 1, :count] for key in TOKENS if key in a}
            one, _ = OPERATORS[name](**flags | alone | {"initial_state": state, "inplace_final_state": True})
            assert torch.equal(one[0], o[n, :count])
        a["num_accepted_tokens"] = ints(*counts)


# Lengths


@pytest.mark.rest(draws=2)
@names
@pytest.mark.parametrize("kind", ("pool", "columns", "fresh", "keep"))
def test_ragged_lengths(kind: str, name: str, rng: random.Random) -> None:
    """Of 1 to 16 tokens, none here and there, and tokens after the last sequence, whose results are zeros."""
    for lengths in (tuple(range(1, 17)), (0, 3, 0, 0, 16, 1, 0), (0, 0, 2), (1,) * 9):
        a = draw_step(rng, name, kind, lengths=lengths, padding=rng.randint(1, 5), final=kind == "fresh", placed=True)
        out = torch.full(a["v"].shape, torch.nan)
        o, _ = assert_right(name, a | {"out": out})
        assert not o[:, sum(lengths) :].any()


@names
def test_sequences_do_not_see_each_other(name: str, rng: random.Random) -> None:
    """Packed and alone give the same bits."""
    lengths = (3, 0, 1, 5)
    a = draw_step(rng, name, "rows", lengths=lengths, final=True)
    o, states = assert_right(name, a)
    tokens = {key: unpack(a, a[key]) for key in TOKENS if key in a}
    for n, whole in enumerate(unpack(a, o)):
        alone = {key: x[n][None] for key, x in tokens.items()} | {"initial_state": a["initial_state"][n : n + 1]}
        one, state = OPERATORS[name](**a | alone | {"cu_seqlens": ints(0, lengths[n])})
        assert torch.equal(one[0], whole) and torch.equal(state[0], states[n])


@names
def test_dense_equals_packed(name: str, rng: random.Random) -> None:
    a = draw_step(rng, name, "pool", N=3, T=4, null=(1,), final=False)
    flat = {key: a[key].flatten(0, 1)[None] for key in TOKENS if key in a} | {"cu_seqlens": ints(0, 4, 8, 12)}
    packed = fresh(a) | flat
    o, _ = OPERATORS[name](**a)
    other, _ = OPERATORS[name](**packed)
    assert relative_error(other[0], o.flatten(0, 1).double()) < FP32
    assert relative_error(packed["initial_state"], a["initial_state"].double()) < FP32


# Indices


def strided(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1)[..., ::2]


def wider(x: Tensor) -> Tensor:
    """Columns of a wider tensor, whose others are stale."""
    stale = torch.zeros_like(x)
    return (
        torch.stack([stale, x, stale], 1)[:, 1]
        if x.dim() == 1
        else torch.cat([stale, x, stale], 1)[:, x.shape[1] : 2 * x.shape[1]]
    )


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {"strided": strided, "wider": wider, "turned": scatter}


@pytest.mark.rest(draws=6)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ("split columns", "keep", "tree"))
def test_indices_of_any_kind(kind: str, view: str, dtype: torch.dtype, rng: random.Random) -> None:
    """Alone and all together."""
    a = draw_step(rng, "kda", kind, N=4, T=3, final=False, placed=True)
    expected = fresh(a)
    o, _ = kda(**expected)
    indices = {
        key: VIEWS[view](x).to(dtype) if dtype == torch.int32 else VIEWS[view](x.long())
        for key, x in a.items()
        if isinstance(x, Tensor) and not x.is_floating_point()
    }
    for given in (*({key: x} for key, x in indices.items()), indices):
        b = fresh(a) | given
        other, _ = kda(**b)
        assert torch.equal(other, o)
        for key in ("initial_state", "intermediate_states"):
            assert key not in b or torch.equal(memory_of(b[key]), memory_of(expected[key]))


LAID: dict[str, Callable[[Tensor], Tensor]] = VIEWS | {
    "as it is": lambda x: x,
    "a row for all": lambda x: x[:1].expand(x.shape),
    "every second row": lambda x: torch.cat([x, x], 1).view(2 * len(x), *x.shape[1:])[::2] if x.dim() > 1 else x[::2],
}


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("view", LAID)
@pytest.mark.parametrize("shape", ((4, 3), (4, 1), (1, 3), (4,), (1,)), ids=str)
def test_kernels_on_a_gpu_find_indices(shape: tuple[int, ...], view: str, dtype: torch.dtype) -> None:
    """Where they are told that these lie, or they are copied: words of 32 bits, in rows that have all that is read."""
    x = LAID[view](torch.arange(100, 100 + torch.Size(shape).numel()).to(dtype).view(shape))
    copied = recurrent_call._must_copy("slots", x)
    sizes = recurrent_call._find_sizes(PROBLEM, {"slots": x}, ("slots",) if copied else ())
    words = x.to(torch.int32).contiguous() if copied else x
    memory, first = memory_of(words).view(torch.int32), words.storage_offset() * words.element_size() // 4
    row, step = sizes["slots_row"], sizes["slots_step"]
    for n, columns in enumerate(x.view(len(x), -1).tolist() if x.dim() == 1 else x.tolist()):
        for j, value in enumerate(columns):
            assert j < row, "an index that the kernel believes to be none"
            assert memory[first + (n * row + j) * step] == value, (n, j)


ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "fused": lambda x: torch.cat([x.flatten(2), x.flatten(2)], 2)[:, :, : x.shape[2:].numel()].unflatten(
        2, x.shape[2:]
    ),
    "turned": scatter,
    "a token for all": lambda x: x[:, :1].expand(x.shape),
    "a sequence for all": lambda x: x[:1].expand(x.shape),
    "every second sequence": lambda x: x.repeat_interleave(2, 0)[::2],
    "heads apart": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
}


@pytest.mark.parametrize("view", ROWS)
@pytest.mark.parametrize("lead", ((3, 4), (1, 4), (3, 1), (1, 1), (0, 4), (3, 0)), ids=str)
def test_kernels_on_a_gpu_find_tokens(lead: tuple[int, int], view: str) -> None:
    whole = torch.arange(lead[0] * lead[1] * 2 * 5, dtype=torch.float32).view(*lead, 2, 5)
    x = ROWS[view](whole)
    row = recurrent_call._find_row(x)
    if row is None:
        assert view not in ("dense", "fused")
        return
    if x.numel():
        seen = x.as_strided((lead[0] * lead[1], 10), (row, 1))
        assert row >= 10 and torch.equal(seen, x.reshape(-1, 10))


# Drafts and trees


@pytest.mark.rest(draws=1)
@LAYOUTS
@names
def test_verified_tokens_are_committed_from_the_buffer(name: str, state_v_first: bool, rng: random.Random) -> None:
    """Drafts are verified beside the pool; the state after the last one that holds is copied to its slot."""
    N, T = 3, 4
    a = draw_step(rng, name, "verify", N=N, T=T, v_first=state_v_first, null=(), final=False, placed=True)
    a["intermediate_state_indices"] = ints(*rng.sample(range(len(a["intermediate_states"])), N))
    before = a["initial_state"].clone()
    o, _ = assert_right(name, a)
    for n in range(N):
        count, slot, row = rng.randint(1, T), int(a["ssm_state_indices"][n]), int(a["intermediate_state_indices"][n])
        alone = {key: a[key][n : n + 1, :count] for key in TOKENS if key in a}
        pool = before.clone()
        one, _ = assert_right(
            name,
            {key: x for key, x in a.items() if "intermediate" not in key}
            | alone
            | {
                "initial_state": pool,
                "ssm_state_indices": ints(slot),
                "disable_state_update": False,
                "inplace_final_state": True,
            },
        )
        assert relative_error(o[n, :count], one[0].double()) < FP32
        assert relative_error(a["intermediate_states"][row, count - 1], pool[slot].double()) < FP32


@pytest.mark.rest(draws=1)
@LAYOUTS
@names
def test_trees_are_their_paths(name: str, state_v_first: bool, rng: random.Random) -> None:
    """Every path of a tree, as a sequence of its own from the same state, gives what the tree does."""
    N, T = 3, 6
    a = draw_step(rng, name, "tree", N=N, T=T, v_first=state_v_first, null=(), final=False, placed=False)
    o, _ = assert_right(name, a)
    for n in range(N):
        parents, initial = a["retrieve_parent_token"][n].tolist(), a["initial_state"][a["ssm_state_indices"][n]]
        for t in range(T):
            path = [t]
            while path[0] and parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            serial = {key: a[key][n : n + 1, path] for key in TOKENS if key in a}
            flags = {key: a[key] for key in a if key.startswith("use_") or key in ("A_log", "dt_bias", "scale")}
            one, state = OPERATORS[name](
                **serial, **flags, initial_state=initial[None], state_v_first=state_v_first, output_final_state=True
            )
            assert relative_error(o[n, t], one[0, -1].double()) < FP32
            assert relative_error(a["intermediate_states"][n, t], state[0].double()) < FP32


@pytest.mark.rest
def test_a_tree_without_a_row_is_null(rng: random.Random) -> None:
    a = draw_step(rng, "kda", "tree", N=3, T=3, null=(), final=True, placed=True)
    a["intermediate_state_indices"] = ints(2, -1, 0)
    o, state = assert_right("kda", a | {"out": torch.full(a["v"].shape, torch.nan)})
    assert not o[1].any() and not state[1].any() and o[0].any() and o[2].any()
