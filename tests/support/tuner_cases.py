"""Workloads that tests tune on the CPU target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cpu_device
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune.journal import Journal, Trial

WORKLOAD = Workload(name="tiny", T=40, H=1, K=32, V=32, dtype="fp32")
CPU = cpu_device()
HERE = torch.device("cpu")


BACKWARD = replace(WORKLOAD, name="tiny-backward", gate="softplus", direction="bwd")


def fixture(workload: Workload = WORKLOAD, BT: int = 16, BC: int = 16) -> StageFixture:
    return StageFixture(pipeline=PIPELINES["staged"], workload=workload, device=CPU, BT=BT, BC=BC)


def searched(journal: Path) -> list[Trial]:
    """Trials of searches, without contests, plans and times of stages."""
    return [t for t in Journal(journal).trials() if not t.study.endswith(("/contest", "/plans", "/stages"))]
