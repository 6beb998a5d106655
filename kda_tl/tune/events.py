"""What a tuning run tells while it goes on (events) and when it ends (reports): frozen records for the CLI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kda_tl.bench.workloads import Workload
from kda_tl.core.device import Device
from kda_tl.core.stage import Config, Plan
from kda_tl.database.records import Entry
from kda_tl.tune.search import Evaluation, SearchResult


class Event:
    """What a listener is called with. All between WorkloadStarted and WorkloadReport are of that workload."""


@dataclass(frozen=True, kw_only=True)
class ChunkVariant:
    """A pipeline with its chunk sizes, 0 for a step: what is chosen before stages are tuned."""

    pipeline: str
    BT: int
    BC: int

    @property
    def text(self) -> str:
        """Readable form, e.g. ``staged BT=64 BC=16``."""
        return self.pipeline + (f" BT={self.BT} BC={self.BC}" if self.BT else "")


@dataclass(frozen=True, kw_only=True)
class StageResult(Event):
    """A tuned stage; of what :class:`kda_tl.tune.final.Comparison` says of the winner all is None if none is valid."""

    stage: str
    variant: ChunkVariant
    study: str  # identity of its trials in the journal
    default: Config
    winner: Config | None = None  # the default where nothing is faster beyond the noise
    median_us: float | None = None
    mad_us: float | None = None
    default_us: float | None = None
    ratio: float | None = None
    ci95: tuple[float, float] | None = None
    rejected: Mapping[str, int]  # sentence of Config.reject -> configs it turned down before any compiling
    search: SearchResult
    seconds: float  # wall time


@dataclass(frozen=True, kw_only=True)
class WorkloadReport(Event):
    """A tuned workload; its entry is stored."""

    workload: Workload
    default: Plan | None = None  # None if only a stage was tuned, or an error ended it
    entry: Entry | None = None  # the stored record, None if only a stage was tuned or nothing is valid
    path: Path | None = None  # the database file it was written to
    stages: tuple[StageResult, ...] = ()
    plans: tuple[Evaluation[Plan], ...] = ()  # every plan that ran in the final, the default first
    stopped_because: str = ""
    failure: str = ""  # why there is no result, empty if there is one
    seconds: float = 0.0  # wall time

    @property
    def counts(self) -> dict[str, int]:
        """Trials by status, over all stages."""
        return dict(sum((Counter(stage.search.counts) for stage in self.stages), Counter()))

    @property
    def resumed(self) -> int:
        """Trials that the journal held: of an earlier run, or of the same kernels earlier in this one."""
        return sum(stage.search.resumed for stage in self.stages)

    @property
    def improved(self) -> bool:
        """Whether something beats the default beyond the noise."""
        if self.entry is not None:
            return self.entry.vs_default.ratio > 1
        return any(stage.winner not in (None, stage.default) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """A tuning run: a report a workload, the journals that hold all trials, one a pass, and the wall time."""

    device: Device
    workloads: tuple[WorkloadReport, ...]
    journals: tuple[Path, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """A tuning run begins."""

    workloads: int  # how many it tunes
    limit_s: float | None  # most seconds a workload
    kernels: int  # about how many there are to compile; those in TileLang's cache take no time
    jobs: int  # processes that compile
    about_s: float  # estimate of the seconds it will take


@dataclass(frozen=True, kw_only=True)
class WorkloadStarted(Event):
    """Tuning of a workload begins."""

    workload: Workload
    index: int  # from 0
    total: int
    left_s: float = 0.0  # estimate, at the pace so far, of the seconds that it and those after it will take


@dataclass(frozen=True, kw_only=True)
class PartStarted(Event):
    """A part of a workload's tuning begins: ``count`` more "default plans", "stages" or "plans" are measured."""

    part: str
    count: int


@dataclass(frozen=True, kw_only=True)
class VariantScreened(Event):
    """The default plan of a variant was timed end to end, or failed."""

    variant: ChunkVariant
    result: Evaluation[Plan]


@dataclass(frozen=True, kw_only=True)
class StageStarted(Event):
    """The search of a stage begins."""

    stage: str
    variant: ChunkVariant
    space: int  # points of the space
    candidates: int  # those that are not rejected
    budget: int  # most trials
    rejected: Mapping[str, int]  # as in StageResult


@dataclass(frozen=True, kw_only=True)
class TrialDone(Event):
    """One config was measured, failed, or came from the journal: trial ``number``, from 1, ``of`` at most so many."""

    stage: str
    number: int
    of: int
    evaluation: Evaluation[Config]
    best_us: float | None  # least median so far, None before the first valid one
    default_us: float | None  # median of the default, None if it is not valid or not measured yet


@dataclass(frozen=True, kw_only=True)
class PlanDone(Event):
    """A plan of the final was verified end to end, or failed."""

    result: Evaluation[Plan]


OnEvent = Callable[[Event], None]
