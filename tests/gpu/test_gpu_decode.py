"""Recurrent operators on the GPU that is here: right numbers, and no memory but theirs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import gpu_cases
from support.decode_cases import TOKENS, Args, ints
from support.gpu_decode_cases import (
    DECODES,
    MAIN,
    OTHERS,
    PIPELINES_OF_STEPS,
    copy,
    draw,
    other_configs,
    plan_of,
    problem_of,
)
from support.step_cases import OPERATORS, TOLERANCE, UNTOUCHED, assert_right, cut_tokens, memory_of, move, truth
from support.views import misalign, scatter, widen
from torch import Tensor

import kda_tl
from kda_tl.errors import InputError
from kda_tl.reference import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_only"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels
HUGE = 1 << 31
decodes = pytest.mark.parametrize("name", DECODES)
kda = OPERATORS["kda"]


# Right numbers


@decodes
@pytest.mark.parametrize("pipeline", PIPELINES_OF_STEPS)
def test_equals_the_judge(pipeline: str, name: str, seed: int) -> None:
    plan = plan_of(problem_of(name), gpu_cases.device(), pipeline)
    if plan is None:
        pytest.skip(f"{pipeline} does not take these calls")
    rng = random.Random(seed)
    with kda_tl.pin(plan):
        for N in (1, 3, 33):
            operator, a = draw(name, rng.randrange(1 << 31), N=N, pad=rng.choice((-1, 0)))
            assert_right(operator, a | {"out": torch.full(a["v"].shape, torch.nan, dtype=a["v"].dtype, device="cuda")})


@decodes
def test_the_default_equals_the_judge(name: str, seed: int) -> None:
    """As a call finds it, without a pin: of many sequences too."""
    for N in (2, 65):
        assert_right(*draw(name, seed + N, N=N))


@pytest.mark.parametrize("name", OTHERS)
def test_other_configs_equal_the_judge(name: str, seed: int) -> None:
    for plan in other_configs(name, gpu_cases.device()):
        with kda_tl.pin(plan):
            assert_right(*draw(name, seed, N=5))


@pytest.mark.parametrize("name", (MAIN, "bf16-bf16-K128-V128-vk-gdn"))
@pytest.mark.parametrize("null", ((0, 1, 2, 3), (2,), ()), ids=str)
def test_null_sequences(null: tuple[int, ...], name: str, seed: int) -> None:
    for pad in (-1, 0):
        for T in (1, 3):
            operator, a = draw(name, seed, N=4, T=T, null=null, pad=pad)
            out = torch.full(a["v"].shape, torch.nan, dtype=a["v"].dtype, device="cuda")
            o, _ = assert_right(operator, a | {"out": out})
            assert [n for n in range(4) if not o[n].any()] == list(null)


@pytest.mark.parametrize("accepted", ((0,) * 5, (4,) * 5, (9,) * 5, (0, 1, 2, 4, 9)), ids=str)
def test_accepted_tokens(accepted: tuple[int, ...], seed: int) -> None:
    for name in ("bf16-fp32-K128-V128-vk-columns", "bf16-fp32-K128-V128-kv-columns"):
        assert_right(*draw(name, seed, N=5, T=4, null=(), accepted=accepted))


def test_ragged_lengths(seed: int) -> None:
    for name in ("bf16-fp32-K128-V128-vk-ragged", "bf16-fp32-K128-V128-vk-ragged-columns"):
        for lengths in (tuple(range(1, 17)), (0, 3, 0, 16, 0), (0, 0)):
            operator, a = draw(name, seed, lengths=lengths, padding=5)
            out = torch.full(a["v"].shape, torch.nan, dtype=a["v"].dtype, device="cuda")
            o, _ = assert_right(operator, a | {"out": out})
            assert not o[:, sum(lengths) :].any()


@pytest.mark.parametrize("name", (MAIN, "fp32-fp32-K128-V128-vk", "bf16-fp32-K256-V256-vk"))
def test_tokens_at_once_are_calls_of_one_token(name: str, seed: int) -> None:
    """To the bit, of fp32 states."""
    operator, a = draw(name, seed, N=4, T=6)
    other = copy(a)
    o, pool = OPERATORS[operator](**a)
    for t in range(6):
        one, state = OPERATORS[operator](**cut_tokens(other, t, t + 1))
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(memory_of(state), memory_of(pool))


@decodes
def test_two_runs_give_the_same_bits(name: str, seed: int) -> None:
    operator, a = draw(name, seed, N=33)
    first = copy(a)
    expected = OPERATORS[operator](**first)
    for _ in range(3):
        again = copy(a)
        for x, y in zip(OPERATORS[operator](**again), expected, strict=True):
            assert x is None or torch.equal(x.nan_to_num(), y.nan_to_num())
        for key in ("initial_state", "intermediate_states"):
            assert key not in a or torch.equal(memory_of(again[key]), memory_of(first[key]))


def test_steps_are_not_rounded_to_the_type_of_the_keys(seed: int) -> None:
    """A step size in fp32 beside q, k and v in bf16."""
    _, a = draw("bf16-fp32-K128-V128-vk-split", seed, N=4, T=2, null=())
    a["initial_state"][a["ssm_state_indices"].long()] = 0  # all of the state is these tokens
    expected, rounded = (truth(move(x, "cpu")) for x in (a, a | {"beta": a["beta"].bfloat16()}))
    assert expected.pool is not None and rounded.pool is not None
    kda(**a)
    for slot in a["output_state_indices"].tolist():
        error = relative_error(a["initial_state"][slot].cpu(), expected.pool[slot])
        assert error < TOLERANCE[torch.float32]
        assert relative_error(rounded.pool[slot], expected.pool[slot]) > 10 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("change", ("q", "k", "qk"))
def test_q_and_k_may_be_wider_than_v(change: str, seed: int) -> None:
    """As FLA takes them; kernels get them rounded to v's type, and o is as wide as v."""
    _, a = draw("bf16-fp32-K128-V128-vk-split", seed, N=3, T=2)
    wide = {key: a[key].float() + 2.0**-12 for key in change}
    assert_right("kda", a | wide, meant=a | {key: x.to(a["v"].dtype) for key, x in wide.items()})


def test_512_steps_do_not_drift(seed: int) -> None:
    _, a = draw("fp32-fp32-K128-V128-vk", seed, N=2, T=512, null=(), fused=False)
    a["g"] = a["g"] - 4  # slow: the state of all steps counts
    expected = truth(move(a, "cpu"))
    assert expected.pool is not None
    for t in range(512):
        _, pool = kda(**cut_tokens(a, t, t + 1))
    for slot in a["ssm_state_indices"].tolist():
        assert relative_error(pool[slot].cpu(), expected.pool[slot]) < 5 * TOLERANCE[torch.float32]


# Where tensors lie


def test_slots_beyond_2_to_the_31_elements(seed: int) -> None:
    """Two of three slots lie past it; nothing between is touched."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory, for a pool and what it was before")
    operator, a = draw("bf16-bf16-K128-V128-vk-gdn", seed, N=2, null=())
    few = a["initial_state"][a["ssm_state_indices"].long()].clone()
    size, apart = few[0].numel(), HUGE // 2 + (1 << 20)
    memory = torch.empty(2 * apart + size, dtype=torch.bfloat16, device="cuda")
    pool = memory.as_strided((3, *few.shape[1:]), (apart, *few.stride()[1:]))
    pool[0] = UNTOUCHED[torch.bfloat16]
    pool[1:] = few
    assert 2 * apart > HUGE
    assert_right(operator, a | {"initial_state": pool, "ssm_state_indices": ints(2, 1).cuda()})
    del memory, pool


def test_rows_beyond_2_to_the_31_elements(seed: int) -> None:
    """Of intermediate states, 2^16 and more rows of them."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("needs 48 GiB of free device memory, for a buffer and what it was before")
    _, a = draw("bf16-fp32-K128-V128-vk-verify", seed, N=2, T=2, null=())
    dims = a["initial_state"].shape[1:]
    size, apart = 2 * dims.numel(), HUGE // 2 + (1 << 20)
    memory = torch.empty(2 * apart + size, device="cuda")
    buffer = memory.as_strided((3, 2, *dims), (apart, dims.numel(), dims[1] * dims[2], dims[2], 1))
    buffer.fill_(UNTOUCHED[torch.float32])
    assert_right("kda", a | {"intermediate_states": buffer, "intermediate_state_indices": ints(2, 1).cuda()})
    del memory, buffer


def test_more_blocks_than_an_axis_of_the_grid_has() -> None:
    """B * HV > 65535, and 2^16 slots and more read by heads: the same bits as in halves."""
    B, H, K = 2100, 32, 64
    rng = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype)

    tokens = {"q": normal(B, 1, H, K), "k": normal(B, 1, H, K), "v": normal(B, 1, H, K), "beta": normal(B, 1, H)}
    tokens["g"] = -normal(B, 1, H, K).abs()
    flags: Args = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "inplace_final_state": True}
    flags |= {"state_v_first": False}
    slots = torch.randperm(B, generator=rng, device="cuda").int()
    pool = normal(B, H, K, K)
    halves = pool.clone()
    o, _ = kda(**tokens, **flags, initial_state=pool, ssm_state_indices=slots)
    for part in (slice(0, B // 2), slice(B // 2, B)):
        some = {name: x[part].clone() for name, x in tokens.items()}
        one, _ = kda(**some, **flags, initial_state=halves, ssm_state_indices=slots[part].clone())
        assert torch.equal(one, o[part])
    assert torch.equal(pool, halves) and o.isfinite().all() and o.flatten(1).any(1).all()


@pytest.mark.parametrize("name", ("bf16-fp32-K128-V128-vk-unaligned", "bf16-bf16-K128-V128-kv-unaligned"))
def test_unaligned_pools(name: str, seed: int) -> None:
    """Not on boundaries of 16 bytes, by their strides or by where they begin."""
    operator, a = draw(name, seed, N=4)
    assert_right(operator, copy(a))
    pool = a["initial_state"]
    memory = torch.full((pool[0].numel() * len(pool) + 1,), torch.nan, dtype=pool.dtype, device="cuda")
    moved = memory[1:].view(pool.shape)
    moved.copy_(pool)
    assert_right(operator, a | {"initial_state": moved})


@pytest.mark.parametrize(
    "change", (scatter, misalign, widen, lambda x: torch._neg_view(-x)), ids=("scatter", "misalign", "widen", "neg")
)
def test_any_strides_are_served(change: Any, seed: int) -> None:
    operator, a = draw(MAIN, seed, N=3, T=2, null=(), fused=False)
    for key in (*TOKENS, "A_log", "dt_bias", "ssm_state_indices"):
        x = a.get(key)
        if x is None or (key == "ssm_state_indices" and change is not misalign):
            continue
        assert_right(operator, copy(a) | {key: change(x)})


def test_indices_of_any_kind(seed: int) -> None:
    """int64, columns of wider tensors, and one row for all."""
    operator, a = draw("bf16-fp32-K128-V128-vk-columns", seed, N=4, T=3)
    o, _ = OPERATORS[operator](**(expected := copy(a)))
    slots, counts = a["ssm_state_indices"], a["num_accepted_tokens"]
    stale = torch.zeros_like(slots)
    wide = torch.cat([stale, slots, stale], 1)[:, slots.shape[1] : 2 * slots.shape[1]]
    for given in (wide, wide.long(), slots.long(), slots.mT.contiguous().mT, slots.repeat_interleave(2, 1)[:, ::2]):
        for count in (counts, counts.long(), torch.stack([counts, counts], 1)[:, 0]):
            b = copy(a) | {"ssm_state_indices": given, "num_accepted_tokens": count}
            other, _ = OPERATORS[operator](**b)
            assert torch.equal(other, o)
            assert torch.equal(memory_of(b["initial_state"]), memory_of(expected["initial_state"]))


def test_mixed_devices_are_refused(seed: int) -> None:
    _, a = draw("bf16-fp32-K128-V128-vk-columns", seed)
    for key in ("k", "beta", "A_log", "initial_state", "ssm_state_indices", "num_accepted_tokens"):
        with pytest.raises(InputError, match=f"{key} is on cpu but q is on cuda:0"):
            kda(**a | {key: a[key].cpu()})
