"""Recurrent operators on the GPU that is here: graphs, streams, allocations, compiled steps, and a day of serving."""

from __future__ import annotations

import random

import pytest
import torch
from support.decode_cases import Args
from support.gpu_decode_cases import (
    DECODES,
    MAIN,
    copy,
    draw,
)
from support.step_cases import OPERATORS, TOLERANCE, UNTOUCHED, assert_right, memory_of
from support.views import widen
from torch import Tensor

from kda_tl.ops.packed_decode import packed_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_only"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels
kda = OPERATORS["kda"]


# Streams, graphs, memory


@pytest.mark.parametrize(
    "name",
    (
        MAIN,
        "bf16-fp32-K128-V128-vk-columns",
        "bf16-fp32-K128-V128-vk-ragged-columns",
        "bf16-fp32-K128-V128-vk-verify",
        "bf16-bf16-K128-V128-kv-tree-gdn",
    ),
)
def test_graph_replays_follow_what_tensors_hold(name: str, seed: int) -> None:
    """Values, slots, accepted tokens, lengths, padding: on a side stream, whatever they were at the capture."""
    rng, decode, calls = random.Random(seed), DECODES[name], []
    for n in range(3):
        more: Args = {"T": 3}
        if decode.ragged:
            lengths = rng.sample((0, 1, 2, 3, 4), 4)
            more = {"lengths": lengths, "padding": 16 - sum(lengths)}
        calls.append(decode.draw(random.Random(seed + n), "cuda", N=4, width=4, **more))
    for a in calls:  # numbers stay in a graph
        a |= {key: x for key, x in calls[0].items() if not isinstance(x, Tensor)}
    operator = OPERATORS[decode.name]
    static = copy(calls[0]) | {"out": torch.empty_like(calls[0]["v"], memory_format=torch.contiguous_format)}
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    operator(**static)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        operator(**static)
    for a in (*calls, calls[0]):
        expected = copy(a) | {"out": torch.empty_like(static["out"])}
        operator(**expected)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for key, x in a.items():
                if isinstance(x, Tensor):
                    static[key].copy_(x)
            static["out"].fill_(torch.nan)
            graph.replay()
        stream.synchronize()
        for key in ("out", "initial_state", "intermediate_states"):
            if key in static:
                assert torch.equal(static[key].nan_to_num(), expected[key].nan_to_num()), key


def test_work_is_put_on_the_current_stream(seed: int) -> None:
    """Inputs arrive late on another stream: kernels on any but that stream would read NaN."""
    operator, a = draw(MAIN, seed, N=4, T=2, null=())
    expected, _ = OPERATORS[operator](**copy(a))
    late = copy(a)
    for key in "qkv":
        late[key].fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for key in "qkv":
            late[key].copy_(a[key])
        o, _ = OPERATORS[operator](**late)
    stream.synchronize()
    assert torch.equal(o, expected)


@pytest.mark.parametrize("name", [name for name in DECODES if "fresh" not in name])
def test_a_warm_call_waits_for_nothing_and_allocates_nothing(name: str, seed: int) -> None:
    operator, a = draw(name, seed, N=4)
    a |= {"out": torch.empty(a["v"].shape, dtype=a["v"].dtype, device="cuda")}
    final = DECODES[name].final
    OPERATORS[operator](**a)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        OPERATORS[operator](**a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == final


@pytest.mark.parametrize("name", (MAIN, "bf16-bf16-K128-V128-vk-safe", "bf16-bf16-K128-V128-vk-gdn"))
def test_packed_decode(name: str, seed: int) -> None:
    """From a slice of a wider projection: the same bits as the operator, and nothing is allocated."""
    operator, a = draw(name, seed, N=9, T=1, fused=False)
    B = len(a["q"])
    mixed = widen(torch.cat([a[key].reshape(B, -1) for key in "qkv"], 1))
    gate, step = widen(a["g"].reshape(B, -1)), widen(a["beta"][:, 0])
    pool, out = copy(a)["initial_state"], torch.full_like(a["v"], torch.nan)
    numbers = (a["A_log"], a["dt_bias"], a["scale"], pool, out, a["ssm_state_indices"])
    flags = {"use_qk_l2norm_in_kernel": True, "lower_bound": a.get("lower_bound")}
    o, _ = assert_right(operator, a)
    assert packed_decode(mixed, gate, step, *numbers, **flags) is out
    assert torch.equal(out, o) and torch.equal(memory_of(pool), memory_of(a["initial_state"]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    packed_decode(mixed, gate, step, *numbers, **flags)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_compiled_steps(seed: int) -> None:
    """By inductor, in one graph, with slots that change."""
    operator, a = draw(MAIN, seed, N=4, T=1, null=())
    compiled = torch.compile(OPERATORS[operator], fullgraph=True)
    for shift in range(3):
        slots = {"ssm_state_indices": a["ssm_state_indices"].roll(shift)}
        one, other = copy(a) | slots, copy(a) | slots
        o, _ = compiled(**one)
        expected, _ = OPERATORS[operator](**other)
        assert torch.equal(o, expected)
        assert torch.equal(memory_of(one["initial_state"]), memory_of(other["initial_state"]))


# Serving


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_sequences_come_and_go(seed: int) -> None:
    """10,000 steps of 256 rows, of which some are padding; sequences enter and leave, and slots are used again.

    A mirror in float64 has every state; slots of no row of a step keep their bits.
    """
    B, slots, H, K, steps = 256, 400, 2, 64, 10_000
    rng, host = torch.Generator(device="cuda").manual_seed(seed), random.Random(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, 1, *shape, generator=rng, device="cuda", dtype=torch.float16)

    pool = torch.full((slots, H, K, K), UNTOUCHED[torch.float32], device="cuda")
    mirror, rows = pool.double(), torch.full((B,), -1, dtype=torch.int32, device="cuda")
    out = torch.empty(B, 1, H, K, dtype=torch.float16, device="cuda")
    wrong, worst = torch.zeros((), dtype=torch.bool, device="cuda"), torch.zeros(2, dtype=torch.float64, device="cuda")
    live: dict[int, int] = {}  # slots by row
    flags: Args = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "inplace_final_state": True}
    for step in range(steps):
        for row in host.sample(range(B), 5 if step % 7 == 0 else 0):
            if row in live:
                del live[row]
                rows[row] = -1
            else:
                slot = host.choice(sorted(set(range(slots)) - set(live.values())))
                live[row], rows[row] = slot, slot
                pool[slot] = mirror[slot] = 0
        q, k, v, g, beta = normal(H, K), normal(H, K), normal(H, K), -0.1 * normal(H, K).abs(), normal(H)
        before = pool.clone()
        kda(q, k, v, g, beta, **flags, initial_state=pool, ssm_state_indices=rows, out=out)
        here = torch.tensor(sorted(live), dtype=torch.long, device="cuda")
        at = rows[here].long()
        idle = torch.ones(slots, dtype=torch.bool, device="cuda").index_fill(0, at, False)
        wrong |= ((pool != before).flatten(1).any(1) & idle).any() | out[rows < 0].any()
        x, y, z = (t[here, 0].double() for t in (q, k, v))
        x, y = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x, y))
        state = mirror[at] * g[here, 0].double().exp()[..., None]
        change = beta[here, 0].double().sigmoid()[..., None] * (z - (y[..., None, :] @ state)[..., 0, :])
        state = state + y[..., None] * change[..., None, :]
        expected = K**-0.5 * (x[..., None, :] @ state)[..., 0, :]
        mirror[at] = state
        if live:
            errors = (out[here, 0] - expected).norm() / expected.norm(), (pool[at] - state).norm() / state.norm()
            worst = torch.maximum(worst, torch.stack(errors))
    assert len(live) > B // 4 and not wrong
    assert float(worst[0]) < TOLERANCE[torch.float16] and float(worst[1]) < 2 * TOLERANCE[torch.float32]
