"""How far from the floor: what a device can copy and multiply, measured, and what a stage or a call must move."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from kda_tl.bench.fixtures import torch_device
from kda_tl.bench.timing import time_launch
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Cost

_COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
_MATMUL = {"cuda": (8192, torch.bfloat16), "cpu": (1024, torch.float32)}
_REPS = {"cuda": 20, "cpu": 5}


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reaches in this run: bytes read and written by a copy, FLOPs of a square matmul."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str

    def floor_us(self, cost: Cost) -> float:
        """The least time a cost can take: moving or computing, whichever is longer."""
        return max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s) * 1e6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One stage, timed alone with a cold cache."""

    name: str
    config: dict[str, object]
    median_us: float
    mad_us: float
    bytes: int
    flops: int
    floor_us: float

    @property
    def share_of_floor(self) -> float:
        """1 where it runs as fast as the device can."""
        return self.floor_us / self.median_us


def measure_ceilings(device: Device) -> Ceilings:
    """Times a copy and a matmul on the device."""
    where, reps = torch_device(device), _REPS[device.kind]
    source = torch.ones(_COPY_BYTES[device.kind], dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    copy_us = statistics.median(time_launch(lambda: target.copy_(source), where, reps=reps))
    size, dtype = _MATMUL[device.kind]
    a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
    matmul_us = statistics.median(time_launch(lambda: a @ b, where, reps=reps))
    name = str(dtype).removeprefix("torch.")
    return Ceilings(
        bytes_per_s=2 * source.numel() / copy_us * 1e6, flops_per_s=2 * size**3 / matmul_us * 1e6, dtype=name
    )


def call_bytes(problem: Problem) -> int:
    """Bytes that any way to compute a pass must move: its inputs once in, its outputs once out."""
    p = problem
    size = {"bf16": 2, "fp16": 2, "fp32": 4}
    io = size[p.dtype]
    token = (2 * p.H * p.K + p.HV * p.V) * io + p.HV * p.K * size[p.g_dtype] + p.HV * size[p.beta_dtype]
    states = p.initial_state + p.final_state
    if p.direction == "bwd":  # a gradient for each of these, and do instead of o
        token, states = 2 * token, states + p.initial_state
    return p.tokens * (token + p.HV * p.V * io) + p.sequences * p.HV * p.K * p.V * 4 * states
