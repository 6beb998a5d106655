"""Verify, then time: comparison with a reference, and the project's one timing loop.

A cold cache is what a kernel of a pass sees, so a buffer larger than the device's L2 is written before every
repetition, outside the timed region.
"""

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kda_tl.core.packages import describe_failure
from kda_tl.errors import KdaTlWarning, WrongResultError
from kda_tl.reference import relative_error

Launch = Callable[[], Any]

_MIN_FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far; its 60 us on an H200 also hide the launches
_CPU_FLUSH_BYTES = 32 << 20
_RESAMPLES = 2000


def check(
    outputs: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor],
    tolerance: float,
    rms_floor: Mapping[str, float] | None = None,
) -> float:
    """The largest relative error (norm of the difference over norm) of the outputs that are expected, by name.

    An error is taken relative to ``rms_floor`` where the root mean square of what is expected is below. Raises
    WrongResultError, which names the tensor and its error, if one is missing or off by more than the tolerance.
    """
    errors = {}
    for name, truth in expected.items():
        output = outputs.get(name)
        error = math.inf if output is None else relative_error(output, truth)
        errors[name] = error * error_weight(truth, rms_floor, name)
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None:
        return 0.0
    if errors[worst] > tolerance:
        raise WrongResultError(
            f"{worst} is off by {errors[worst]:.2g} relative to the reference, over {tolerance:.2g}."
        )
    return errors[worst]


def error_weight(truth: torch.Tensor, rms_floor: Mapping[str, float] | None, name: str) -> float:
    """What the relative error of a tensor of that name counts, see :func:`check`."""
    least = (rms_floor or {}).get(name, 0.0) * math.sqrt(truth.numel())
    length = float(torch.linalg.vector_norm(truth.double()))
    return min(1.0, (length or 1.0) / least) if least else 1.0


def time_launch(launch: Launch, device: torch.device, *, reps: int, warmup: int = 1, flush: bool = True) -> list[float]:
    """Duration of each repetition of a launch in microseconds: on the GPU by events, on the CPU by the clock.

    The launch takes nothing, and on the GPU waits for nothing. ``warmup`` launches come before the first repetition;
    with ``flush`` every one meets a cold cache.
    """
    clear = _flusher(device) if flush else lambda: None
    for _ in range(warmup):
        launch()
    if device.type != "cuda":
        samples = []
        for _ in range(reps):
            clear()
            samples.append(_time_by_clock(launch))
        return samples
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(reps)]
    for begin, end in events:
        clear()
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()  # events are read at the end: the host runs ahead, so its time is not measured
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


def _time_by_clock(launch: Launch) -> float:
    begin = time.perf_counter()
    launch()
    return (time.perf_counter() - begin) * 1e6


_flush_buffers: dict[torch.device, torch.Tensor] = {}


def _flusher(device: torch.device) -> Callable[[], Any]:
    buffer = _flush_buffers.get(device)
    if buffer is None:
        size = _CPU_FLUSH_BYTES
        if device.type == "cuda":
            l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
            size = max(_MIN_FLUSH_BYTES, 4 * l2)
        buffer = _flush_buffers[device] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffer.zero_


def time_interleaved(
    launches: Mapping[str, Launch], device: torch.device, *, rounds: int, reps: int, flush: bool = True
) -> dict[str, list[float]]:
    """Medians of ``reps`` repetitions, one a round and launch, in microseconds.

    Every round times every launch, in turn forwards and backwards, so that a drift of the clocks meets all alike.
    """
    medians: dict[str, list[float]] = {name: [] for name in launches}
    for i in range(rounds):
        for name in list(launches)[:: 1 if i % 2 == 0 else -1]:
            samples = time_launch(launches[name], device, reps=reps, flush=flush)
            medians[name].append(statistics.median(samples))
    return medians


def time_host(launch: Launch, device: torch.device, *, reps: int = 100) -> float:
    """Median host time of one call in microseconds: the device is not waited for.

    The device's queue is emptied every few calls, since a full one makes the host wait.
    """
    samples = []
    launch()
    for i in range(reps):
        if device.type == "cuda" and i % 16 == 0:
            torch.cuda.synchronize(device)
        samples.append(_time_by_clock(launch))
    return statistics.median(samples)


def cuda_graph(launch: Launch) -> Launch:
    """The launch captured in a CUDA graph: calling the result replays it, free of host time.

    Raises RuntimeError if something in the launch cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            launch()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay(_alive: Launch = launch) -> None:  # the graph reads what the launch holds
        graph.replay()

    return replay


def summarise(samples: Sequence[float]) -> tuple[float, float]:
    """Median and median absolute deviation."""
    middle = statistics.median(samples)
    return middle, statistics.median(abs(x - middle) for x in samples)


def ratio_ci(a_rounds: Sequence[float], b_rounds: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Ratio of the medians of two interleaved measurements, a over b, and the bounds of its 95 % interval.

    A bootstrap that draws rounds, the same for both: what disturbs a round disturbs both of its halves.
    """
    a, b = (np.asarray(a_rounds, dtype=np.float64), np.asarray(b_rounds, dtype=np.float64))
    draws = np.random.default_rng(seed).integers(len(a), size=(_RESAMPLES, len(a)))
    ratios = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(np.median(a) / np.median(b)), float(low), float(high)


def read_gpu_state(index: int = 0) -> dict[str, Any]:
    """Name, driver and current clocks of a CUDA device as NVML knows them; empty where NVML does not answer."""
    state: dict[str, Any] = {}
    try:
        import pynvml
    except Exception as error:  # a broken package raises what it likes
        if torch.cuda.is_available():
            text = f"clocks and driver are not recorded: {describe_failure('pynvml', error)}."
            warnings.warn(text, KdaTlWarning, stacklevel=2)
        return state
    with contextlib.suppress(Exception):  # no driver, no permission: all mean unknown
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(Exception):  # it counts all GPUs of the machine, CUDA those that are visible
                uuid = torch.cuda.get_device_properties(index).uuid
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            state["gpu"] = pynvml.nvmlDeviceGetName(handle)
            state["driver"] = pynvml.nvmlSystemGetDriverVersion()
            state["sm_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            state["memory_mhz"] = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        finally:
            pynvml.nvmlShutdown()
    return state
