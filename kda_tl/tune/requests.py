"""What runs inside the worker processes of a tuning run: requests that are sent there and answer for themselves."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kda_tl.bench import fixtures
from kda_tl.bench.fixtures import StageFixture, stage_launch, torch_device
from kda_tl.bench.timing import Launch, cuda_graph, time_interleaved, time_launch
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import Device
from kda_tl.core.stage import Case, Config, Plan, Stage
from kda_tl.errors import CompileError, WrongResultError
from kda_tl.runtime.compile import compile_stage, hash_kernel
from kda_tl.tune.journal import Outcome

COMPILE_TIMEOUT_S = 180.0  # nvcc takes 60 s for the largest kernel on two busy cores
SLOWER = 1.25  # dropping candidates this far behind after 3 repetitions saved 86 % of kernel time and lost no best
FIRST_REPS = 3
_MAX_REPS = 30
_TRIAL_US = {"cuda": 20e3, "cpu": 500e3}
_ROUND_US = {"cuda": 5e3, "cpu": 150e3}


def run_request(request: Any) -> Any:
    """Target of the worker processes."""
    torch.set_grad_enabled(False)
    return request.run()


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Interleaved measurements: the medians of each candidate's rounds, and how many repetitions a round had."""

    medians_us: list[list[float]]
    reps: int


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """What is done with the kernel of one config."""

    stage: Stage
    case: Case
    config: Config
    timeout_s: float = COMPILE_TIMEOUT_S

    @property
    def key(self) -> Hashable:
        """The kernel."""
        return type(self).__name__, self.stage.name, self.stage.specialise(self.case), self.config


class CompileJob(KernelJob):
    """Compiles one config, so that TileLang's disk cache holds it."""

    def run(self) -> float:
        """Returns the seconds it took."""
        begin = time.perf_counter()
        compile_stage(self.stage, self.case, self.config)
        return time.perf_counter() - begin


class HashJob(KernelJob):
    """Hashes one kernel as the compiler is given it, which is lowered unless it was built before."""

    def run(self) -> str:
        """Returns :func:`kda_tl.runtime.compile.hash_kernel`."""
        return hash_kernel(self.stage, self.case, self.config)


@dataclass(frozen=True, kw_only=True)
class IdentifyJob:
    """Tells apart what differs for the compiler: problems that make the same kernels have the same digest."""

    stage: Stage
    case: Case
    configs: tuple[Config, ...]
    timeout_s: float = 30.0

    @property
    def key(self) -> Hashable:
        """Stage and case."""
        return "identify", self.stage.name, self.stage.specialise(self.case)

    def run(self) -> str:
        """Returns a SHA-256 over the kernels of the configs, before lowering."""
        digest, case = hashlib.sha256(), self.stage.specialise(self.case)
        for config in self.configs:
            digest.update(self.stage.build(case, config).script().encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Makes the tensors of a bench, so that the time limit of a trial is about the trial."""

    fixture: StageFixture
    timeout_s: float = 300.0

    def run(self) -> None:
        """Fills the caches of this process."""
        fixtures.record(self.fixture)
        fixtures.reference_cases(self.fixture)


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Starts a process: its imports are done, and the device is there."""

    device: Device
    timeout_s: float = 120.0

    def run(self) -> None:
        """Touches the device."""
        torch.zeros(1, device=torch_device(self.device))


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Times every stage of a bench with its default config: what a pass's time is made of."""

    fixture: StageFixture
    timeout_s: float = 60.0

    def run(self) -> dict[str, float]:
        """Returns median microseconds by stage; a stage whose default does not compile is left out."""
        case, where, times = self.fixture.case, torch_device(self.fixture.device), {}
        for stage in self.fixture.pipeline.stages_of(case.problem):
            with contextlib.suppress(CompileError):
                launch = stage_launch(compile_stage(stage, case, stage.default(case)), self.fixture)
                times[stage.name] = statistics.median(time_launch(launch, where, reps=FIRST_REPS))
        return times


@dataclass(frozen=True, kw_only=True)
class StageTrial:
    """Verifies, then times one config of a stage; far behind ``incumbent_us``, the best so far, it is dropped early."""

    fixture: StageFixture
    stage: Stage
    config: Config
    incumbent_us: float | None
    timeout_s: float = 60.0

    def run(self) -> Outcome:
        """Returns "ok", "slow" or "wrong"."""
        kernel = compile_stage(self.stage, self.fixture.case, self.config)
        tolerance = fixtures.stage_tolerance(self.stage, self.fixture.workload)
        verdict = _verify(tolerance, lambda: fixtures.check_kernel(kernel, self.fixture, tolerance))
        if isinstance(verdict, Outcome):
            return verdict
        return _time(stage_launch(kernel, self.fixture), self.fixture.device, verdict, self.incumbent_us)


@dataclass(frozen=True, kw_only=True)
class StageContest:
    """Times configs of a stage in turns."""

    fixture: StageFixture
    stage: Stage
    configs: tuple[Config, ...]
    rounds: int
    timeout_s: float = 300.0

    def run(self) -> Rounds:
        """Returns one series a config, in their order."""
        case = self.fixture.case
        launches = [stage_launch(compile_stage(self.stage, case, config), self.fixture) for config in self.configs]
        return _compete(launches, self.fixture.device, self.rounds)


@dataclass(frozen=True, kw_only=True)
class PlanTrial:
    """Verifies a plan end to end against the recurrence, then times it."""

    plan: Plan
    workload: Workload
    device: Device
    seed: int = 0
    timeout_s: float = 300.0

    def run(self) -> Outcome:
        """Returns "ok" or "wrong"."""
        tolerance = fixtures.plan_tolerance(self.workload, self.device)
        what = self.plan, self.workload, self.device
        verdict = _verify(tolerance, lambda: fixtures.check_plan(*what, seed=self.seed))
        if isinstance(verdict, Outcome):
            return verdict
        launch, about = _plan_launch(*what, self.seed)
        return replace(_time(launch, self.device, verdict, None), extra=about)


@dataclass(frozen=True, kw_only=True)
class PlanContest:
    """Times plans end to end in turns."""

    plans: tuple[Plan, ...]
    workload: Workload
    device: Device
    rounds: int
    seed: int = 0
    timeout_s: float = 300.0

    def run(self) -> Rounds:
        """Returns one series a plan, in their order."""
        launches = [_plan_launch(plan, self.workload, self.device, self.seed)[0] for plan in self.plans]
        return _compete(launches, self.device, self.rounds)


def _plan_launch(plan: Plan, workload: Workload, device: Device, seed: int) -> tuple[Launch, dict[str, Any]]:
    """A launch of the whole plan, on a GPU as a CUDA graph where it can be captured; which of the two, and memory."""
    made = fixtures.make_pass(plan, workload, device, seed=seed)
    about = {"call_bytes": made.call_bytes, "kept_bytes": made.kept_bytes} if plan.kept else {}
    if device.kind == "cuda":
        try:
            return cuda_graph(made.run), {"timed": "graph", **about}
        except RuntimeError:  # an operation that cannot be captured: host time is then part of what is measured
            torch.cuda.synchronize()
    return made.run, {"timed": "launch", **about}


def _verify(tolerance: float, check: Callable[[], float]) -> dict[str, float] | Outcome:
    """What a check that passes is journaled as, or the outcome if it does not."""
    try:
        return {"tolerance": tolerance, "max_rel_err": check()}
    except WrongResultError as error:
        return Outcome(status="wrong", reason=str(error), check={"tolerance": tolerance})


def _time(launch: Launch, device: Device, verdict: Mapping[str, float], incumbent_us: float | None) -> Outcome:
    """Three repetitions, and more if they are not far behind the incumbent: early ones may reject, never choose."""
    where = torch_device(device)
    samples = [round(sample, 3) for sample in time_launch(launch, where, reps=FIRST_REPS)]
    first = statistics.median(samples)
    if incumbent_us is not None and first > SLOWER * incumbent_us:
        reason = f"{first / incumbent_us:.2f} times the best after {FIRST_REPS} repetitions"
        return Outcome(status="slow", median_us=first, samples_us=samples, check=verdict, reason=reason)
    rest = time_launch(launch, where, reps=_fit(_TRIAL_US[device.kind], first), warmup=0)
    samples += [round(sample, 3) for sample in rest]
    return Outcome(status="ok", median_us=statistics.median(samples), samples_us=samples, check=verdict)


def _compete(launches: Sequence[Launch], device: Device, rounds: int) -> Rounds:
    where = torch_device(device)
    first = min(min(time_launch(launch, where, reps=2)) for launch in launches)
    reps = _fit(_ROUND_US[device.kind], first)
    named = {str(i): launch for i, launch in enumerate(launches)}
    medians = time_interleaved(named, where, rounds=rounds, reps=reps)
    return Rounds(medians_us=list(medians.values()), reps=reps)


def _fit(total_us: float, one_us: float) -> int:
    """Repetitions that fit a span of time."""
    return max(1, min(_MAX_REPS, int(total_us / max(one_us, 1.0))))
