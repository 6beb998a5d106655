"""``kda-tl verify --time``: a stored plan may not have become slower than the default."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from kda_tl.bench.fixtures import torch_device
from kda_tl.bench.timing import summarise, time_interleaved
from kda_tl.cli._call import make_launch
from kda_tl.cli._console import format_us
from kda_tl.cli.verify import Finding, Subject
from kda_tl.core.device import Device
from kda_tl.runtime.dispatch import default_plan

ROUNDS = 3
MAX_BAD_ROUNDS = 1
MIN_RATIO = 0.05
MADS = 3.0
MIN_US = 2.0
SUBROUNDS = 5  # medians a round


def check_speed(subject: Subject, device: Device) -> Finding:
    """Times plan and default in turns; fails if the plan is clearly slower in 2 of 3 rounds."""
    finding = Finding(subject=subject.name, check="speed", passed=True)
    workload, problem = subject.workload, subject.workload.problem()
    chunks = -(-workload.tokens // subject.plan.BT) * problem.HV
    if chunks < device.num_sms:
        return replace(finding, detail="smaller than a wave: not gated.")
    default = default_plan(problem, device)
    if default == subject.plan:
        return finding
    where = torch_device(device)
    inputs = workload.inputs(where)
    plans = {"plan": subject.plan, "default": default}
    launches = {
        name: make_launch(workload.declaration, inputs, workload.direction, plan) for name, plan in plans.items()
    }
    reps = 3 if device.kind == "cpu" else 20
    with torch.no_grad():
        rounds = [time_interleaved(launches, where, rounds=SUBROUNDS, reps=reps) for _ in range(ROUNDS)]
    bad = [r for r in rounds if is_slower(r["plan"], r["default"])]
    times = ", ".join(
        f"{format_us(statistics.median(r['plan']))} against {format_us(statistics.median(r['default']))}"
        for r in rounds
    )
    passed = len(bad) <= MAX_BAD_ROUNDS
    detail = "" if passed else f"slower than the default in {len(bad)} of {ROUNDS} rounds: {times}."
    return Finding(subject=subject.name, check="speed", passed=passed, detail=detail)


def is_slower(plan: Sequence[float], default: Sequence[float]) -> bool:
    """Whether a plan is slower by more than 5 %, by more than the noise, and by more than a launch's jitter."""
    middle, mad = summarise(default)
    behind = statistics.median(plan) - middle
    return behind > max(MIN_RATIO * middle, MADS * mad) and behind > MIN_US
