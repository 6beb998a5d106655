"""What a tuning run tells while it goes on (events) and when it ends (reports): frozen records for the CLI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda_tl.bench.workloads import Workload
from kda_tl.core.device import Device
from kda_tl.core.stage import Config, Plan
from kda_tl.database.records import Entry
from kda_tl.tune.search import Evaluation, SearchResult


@dataclass(frozen=True, kw_only=True)
class ChunkVariant:
    """A pipeline with its chunk sizes: what is chosen before stages are tuned."""

    pipeline: str
    BT: int
    BC: int

    @property
    def text(self) -> str:
        """Readable form, e.g. ``staged BT=64 BC=16``."""
        return f"{self.pipeline} BT={self.BT} BC={self.BC}"


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """A tuned stage.

    Attributes:
        stage: its name.
        variant: what it was tuned for.
        study: identity of its trials in the journal.
        default: the config when nothing is tuned.
        winner: the config to use; the default where nothing is faster beyond the noise, None where nothing is valid.
        median_us: of the winner, over interleaved rounds; None where nothing is valid.
        mad_us: its median absolute deviation.
        default_us: of the default, in the same rounds; None if the default is not valid.
        ratio: default over winner, 1 if the default won, None if the default is not valid.
        ci95: 95 % interval of the ratio.
        rejected: sentence of :meth:`Config.reject` -> number of configs it turned down before any compiling.
        search: all trials, counts by status, and why the search stopped.
        seconds: wall time it took.
    """

    stage: str
    variant: ChunkVariant
    study: str
    default: Config
    winner: Config | None = None
    median_us: float | None = None
    mad_us: float | None = None
    default_us: float | None = None
    ratio: float | None = None
    ci95: tuple[float, float] | None = None
    rejected: Mapping[str, int]
    search: SearchResult
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan that was run end to end.

    Attributes:
        plan: the plan.
        status: "ok", or a failure as in :class:`kda_tl.tune.search.Outcome`.
        reason: why the status is not "ok".
        median_us: end to end, None if not "ok".
        check: ``max_rel_err`` against the recurrence, and its ``tolerance``.
        extra: "timed": whether a CUDA graph or plain launches were timed; of a plan with kept results "kept_bytes",
            their memory, and "call_bytes", that of the tensors a call has anyway.
    """

    plan: Plan
    status: str
    reason: str = ""
    median_us: float | None = None
    check: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WorkloadReport:
    """A tuned workload.

    Attributes:
        workload: what was tuned.
        default: the plan when nothing is tuned; None if only a stage was tuned, or an error ended it.
        entry: the stored record, None if only a stage was tuned or nothing is valid.
        path: the database file it was written to.
        stages: every stage tuned, in order.
        plans: every plan that ran in the final, the default first.
        counts: trials by status, over all stages.
        resumed: trials that the journal held: of an earlier run, or of the same kernels earlier in this one.
        stopped_because: one sentence.
        failure: why there is no result, empty if there is one.
        seconds: wall time.
    """

    workload: Workload
    default: Plan | None = None
    entry: Entry | None = None
    path: Path | None = None
    stages: tuple[StageResult, ...] = ()
    plans: tuple[PlanResult, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    resumed: int = 0
    stopped_because: str = ""
    failure: str = ""
    seconds: float = 0.0

    @property
    def improved(self) -> bool:
        """Whether something beats the default beyond the noise."""
        if self.entry is not None:
            return self.entry.vs_default.ratio > 1
        return any(stage.winner not in (None, stage.default) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """A tuning run.

    Attributes:
        device: what was tuned for.
        workloads: one report a workload.
        journals: the files that hold all trials, one a pass.
        seconds: wall time.
    """

    device: Device
    workloads: tuple[WorkloadReport, ...]
    journals: tuple[Path, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStarted:
    """A tuning run begins.

    Attributes:
        workloads: how many it tunes.
        limit_s: most seconds a workload, None without a limit.
        kernels: about how many there are to compile; those in TileLang's cache take no time.
        jobs: processes that compile.
        about_s: estimate of the seconds it will take.
    """

    workloads: int
    limit_s: float | None
    kernels: int
    jobs: int
    about_s: float


@dataclass(frozen=True, kw_only=True)
class WorkloadStarted:
    """Tuning of a workload begins; it is number ``index`` (from 0) of ``total``.

    ``left_s`` is an estimate, at the pace so far, of the seconds that it and those after it will take.
    """

    workload: Workload
    index: int
    total: int
    left_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PartStarted:
    """A part of a workload's tuning begins: ``count`` more "default plans", "stages" or "plans" are measured."""

    workload: Workload
    part: str
    count: int


@dataclass(frozen=True, kw_only=True)
class VariantScreened:
    """The default plan of a variant was timed end to end, or failed."""

    workload: Workload
    variant: ChunkVariant
    result: PlanResult
    resumed: bool


@dataclass(frozen=True, kw_only=True)
class StageStarted:
    """The search of a stage begins.

    Attributes:
        workload: what it is tuned for.
        stage: its name.
        variant: pipeline and chunk sizes.
        space: points of the space.
        candidates: those that are not rejected.
        budget: most trials.
        rejected: sentence -> number of configs it turned down.
    """

    workload: Workload
    stage: str
    variant: ChunkVariant
    space: int
    candidates: int
    budget: int
    rejected: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class TrialDone:
    """One config was measured, failed, or came from the journal.

    Attributes:
        workload: as in StageStarted.
        stage: as in StageStarted.
        number: of the trial, from 1.
        of: most trials there will be.
        evaluation: config, outcome, and whether it came from the journal.
        best_us: least median so far, None before the first valid one.
        default_us: median of the default, None if it is not valid or not measured yet.
    """

    workload: Workload
    stage: str
    number: int
    of: int
    evaluation: Evaluation
    best_us: float | None
    default_us: float | None


@dataclass(frozen=True, kw_only=True)
class StageDone:
    """A stage has its winner."""

    workload: Workload
    result: StageResult


@dataclass(frozen=True, kw_only=True)
class PlanDone:
    """A plan of the final was verified end to end, or failed."""

    workload: Workload
    result: PlanResult


@dataclass(frozen=True, kw_only=True)
class WorkloadDone:
    """A workload is tuned; its entry is stored."""

    report: WorkloadReport


Event = (
    RunStarted
    | WorkloadStarted
    | PartStarted
    | VariantScreened
    | StageStarted
    | TrialDone
    | StageDone
    | PlanDone
    | WorkloadDone
)
OnEvent = Callable[[Event], None]
