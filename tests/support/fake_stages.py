"""A stage whose configs fail in every way there is; worker processes import it by this name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cpu_device
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, tunable
from kda_tl.templates.common.language import T
from kda_tl.tune.events import OnEvent
from kda_tl.tune.pool import WorkerPool
from kda_tl.tune.session import Run, load_known
from kda_tl.tune.stage_search import tune_stage

INPUTS = {"g": "tokens HV K : g"}
OUTPUTS = {"o": "tokens HV K : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    return {"o": x.scale * x.g}


@dataclass(frozen=True, kw_only=True)
class FakeConfig(Config):
    """repeat: times the work is done; kind: what goes wrong."""

    repeat: int = tunable(8, 1, 8)
    kind: str = tunable("right", "right", "refused", "hangs", "broken", "dies", "segfaults", "unwritten", "wrong")

    def reject(self, case: Case) -> str | None:
        if self.kind == "refused":
            return "refused configs are refused"
        return "one of each failure is enough" if self.kind != "right" and self.repeat == 1 else None


def build(case: Case, config: FakeConfig) -> Any:
    kind, K = config.kind, case.problem.K
    if kind == "broken":
        raise ValueError("this config cannot be built")
    if kind == "dies":
        os._exit(3)
    tokens, HV = T.dynamic("tokens"), T.dynamic("HV")
    wrong = 1.5 if kind == "wrong" else 1.0
    last = K - 1 if kind == "unwritten" else K

    @T.prim_func
    def fake(g: T.Tensor((tokens, HV, K), "float32"), o: T.Tensor((tokens, HV, K), "float32"), scale: T.float32):
        with T.Kernel(tokens * HV) as i:
            if kind == "segfaults":
                T.call_extern("int32", "raise", 11)
            if kind == "hangs":
                T.call_extern("int32", "pause")
            for _ in T.serial(config.repeat * 50):
                for j in T.serial(last):
                    o[i // HV, i % HV, j] = g[i // HV, i % HV, j] * scale * wrong

    return fake


def default(case: Case) -> FakeConfig:
    return FakeConfig()


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    return Cost(bytes=1, flops=1)


TOLERANCE = {"bf16": 1e-3, "fp16": 1e-3, "fp32": 1e-5}
STAGE = Stage(
    "fake", INPUTS, OUTPUTS, FakeConfig, build, reference, default, cost, TOLERANCE, depends=(), scalars=("scale",)
)
PIPELINE = Pipeline("fake", "fwd", (STAGE,))
WORKLOAD = Workload(name="tiny", T=40, H=1, K=32, V=32, dtype="fp32")
BENCH = StageFixture(pipeline=PIPELINE, workload=WORKLOAD, device=cpu_device(), BT=16, BC=16)


def make_run(pool: WorkerPool, journal: Path, emit: OnEvent = lambda event: None, budget: int = 20) -> Run:
    """A tuning run on the CPU target."""
    known = load_known(journal)
    return Run(
        pool=pool,
        device=cpu_device(),
        journal=journal,
        budget=budget,
        objective="balanced",
        seed=0,
        emit=emit,
        known=known,
    )


def tune_fake(journal: str) -> None:
    """Tunes the fake stage; what the test kills runs this."""
    with WorkerPool(1, overlap=False) as pool:
        tune_stage(make_run(pool, Path(journal)), BENCH, STAGE)
