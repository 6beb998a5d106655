"""On the GPU that is here: streams and graphs, and calls that wait for nothing and cost the host next to nothing."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.cases import draw_call, operator_arguments
from support.gpu_calls import assert_same_bits, draw, outputs
from support.gpu_cases import BT, FORWARD, PACKED, WIDE, device, plan_of
from support.views import misalign, scatter

import kda_tl
from kda_tl.core.layout import make_layout
from kda_tl.ops.kda import chunk_kda
from kda_tl.ops.memory import workspace_bytes
from kda_tl.runtime.dispatch import select_cached

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("defaults_by_name"),
    pytest.mark.timeout(500),
]  # the first waits for all kernels


# Streams and graphs


@pytest.mark.parametrize(
    "name",
    (
        "bf16-safe-K128-V128",
        "bf16-softplus-K60-V100-GVA-vk",
        "bf16-log-K64-V64-bare",
        "prep-safe-K128-V128",
        "cut-safe-K128-V128",
    ),
)
def test_graph_replays_on_new_values(name: str, seed: int) -> None:
    BT, _ = FORWARD[name]
    calls = [draw(name, PACKED, seed + n, varlen=True, lower_bound=-3.0) for n in range(2)]  # graphs keep numbers
    one, two = (operator_arguments(call) | {"chunk_size": BT} for call in calls)
    expected = [outputs(one), outputs(two)]
    static = {key: x.clone() if isinstance(x, torch.Tensor) and key != "cu_seqlens" else x for key, x in one.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(static)
    for values, truth in ((two, expected[1]), (one, expected[0]), (two, expected[1])):
        for key, x in static.items():
            if isinstance(x, torch.Tensor) and key != "cu_seqlens":
                x.copy_(values[key])
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert_same_bits(captured, truth)


@pytest.mark.parametrize(
    "name", ("bf16-safe-K128-V128", "bf16-softplus-K60-V100-GVA-vk", "prep-safe-K128-V128", "cut-safe-K128-V128")
)
def test_work_is_put_on_the_current_stream(name: str, seed: int) -> None:
    """Inputs arrive late on another stream: kernels on any but that stream would read NaN."""
    BT, _ = FORWARD[name]
    arguments = operator_arguments(draw(name, (200,), seed)) | {"chunk_size": BT}
    expected = outputs(arguments)
    late = {key: torch.full_like(arguments[key], torch.nan) for key in ("q", "k", "v", "g", "beta")}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for key, x in late.items():
            x.copy_(arguments[key])
        result = outputs(arguments | late)
    stream.synchronize()
    assert_same_bits(result, expected)


@pytest.mark.parametrize("name", ("bf16-safe-K128-V128", "bf16-softplus-K60-V100-GVA-vk", "bf16-log-K64-V64-bare"))
def test_warm_call_waits_for_nothing(name: str, seed: int) -> None:
    BT, _ = FORWARD[name]
    packed = operator_arguments(draw(name, PACKED, seed, varlen=True)) | {"chunk_size": BT}
    dense = operator_arguments(draw(name, (70, 70), seed), batch=2) | {"chunk_size": BT}
    strided = {**dense, "q": scatter(dense["q"]), "v": misalign(dense["v"])}
    states = {**packed, "return_intermediate_states": True}
    calls = (packed, dense, strided, states)
    expected = [outputs(arguments) for arguments in calls]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [outputs(arguments) for arguments in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result, truth in zip(results, expected, strict=True):
        assert_same_bits(result, truth)


# Memory


@pytest.mark.parametrize("name", ("bf16-safe-K128-V128", "fp32-safe-K60-V100-BT16", "prep-safe-K128-V128"))
def test_a_call_allocates_its_results_and_what_was_told(name: str, seed: int) -> None:
    """To the byte, as requested of the allocator; the chunk tables are there from the call before."""
    BT, _ = FORWARD[name]
    call = draw(name, PACKED, seed, varlen=True)
    arguments = operator_arguments(call) | {"chunk_size": BT}
    told = workspace_bytes(**arguments)
    tables = make_layout(call.bounds, BT, torch.device("cpu")).tables
    outputs(arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = outputs(arguments)
    most = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert most == told - sum(x.nbytes for x in tables.values()) + sum(x.nbytes for x in results)


# Host time


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Without this the collector would walk what all tests before this one have left, some 10^6 objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def time_call_us(arguments: dict[str, Any]) -> float:
    """Median over a second or so."""
    samples = []
    for _ in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(40):  # a longer queue would make the host wait for the GPU
            chunk_kda(**arguments)
        samples.append((time.perf_counter() - start) / 40)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(samples)


@pytest.mark.parametrize("staged", [False, True], ids=["as called", "staged"])
def test_host_time_of_a_warm_call(staged: bool) -> None:
    """In one of five tries, seconds apart: others on the machine can only add to what a call costs."""
    arguments = operator_arguments(draw_call(WIDE, (64,), 0, varlen=False, device="cuda"))
    medians: list[float] = []
    with kda_tl.pin(plan_of(WIDE, BT)) if staged else contextlib.nullcontext(), frozen_garbage():
        chunk_kda(**arguments)
        while not medians or (min(medians) >= 80 and len(medians) < 5):
            time.sleep(3.0 * bool(medians))
            medians.append(time_call_us(arguments))
    assert min(medians) < 80, f"{medians} us a call"


def test_host_time_of_a_cached_choice() -> None:
    select_cached(WIDE, device())
    samples = []
    for _ in range(25):
        start = time.perf_counter()
        for _ in range(200):
            select_cached(WIDE, device())
        samples.append((time.perf_counter() - start) / 200)
    median_us = 1e6 * statistics.median(samples)
    assert median_us < 3, f"{median_us:.2f} us"
