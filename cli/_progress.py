"""What a tuning run shows while it goes on: lasting lines for what is done, and on a terminal the stage under way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kda_tl.cli._console import Terminal, format_error, format_ratio, format_us, one_line
from kda_tl.progress import (
    Event,
    GeometryScreened,
    PlanDone,
    PlanResult,
    RunStarted,
    StageDone,
    StageResult,
    StageStarted,
    TrialDone,
    WorkloadDone,
    WorkloadStarted,
)
from kda_tl.workloads import Workload

LINE_EVERY_S = 10.0  # off a terminal, while a stage is under way
MAX_REASONS = 3
FAILURES = {
    "rejected": "rejected",
    "compile": "did not compile",
    "wrong": "wrong",
    "crash": "crashed",
    "timeout": "timed out",
    "slow": "dropped as slow",
}


class TuneProgress:
    """Takes the events of a tuning run and writes them to stderr."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.where = ""
        self.stage: StageStarted | None = None
        self.trial: TrialDone | None = None
        self.failures: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.explained: set[str] = set()
        self.doing = ""
        self.began = self.last_line = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[TuneProgress]:
        """Shows the stage under way, on a terminal only; it leaves nothing behind."""
        if not self.terminal.err.is_terminal:
            yield self
            return
        with Live(
            console=self.terminal.err,
            get_renderable=self._render,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield self

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        handlers: dict[type, Any] = {
            RunStarted: lambda e: self._write(describe_run(e)),
            WorkloadStarted: self._start_workload,
            GeometryScreened: self._screen,
            StageStarted: self._start_stage,
            TrialDone: self._count_trial,
            StageDone: lambda e: self._end_stage(e.result),
            PlanDone: lambda e: self._write(f"  plan       {_format_plan(e.result)}"),
            WorkloadDone: self._end_workload,
        }
        handlers[type(event)](event)

    def _write(self, line: str) -> None:
        self.terminal.note(line)
        self.last_line = time.monotonic()

    def _write_off_terminal(self, line: str) -> None:
        """What a terminal shows while it lasts, and a log would not show at all."""
        if not self.terminal.err.is_terminal:
            self._write(f"  ... {line}")

    def _start_workload(self, event: WorkloadStarted) -> None:
        self.where = f"{event.workload.name} ({event.index + 1} of {event.total})"
        self.stage, self.doing = None, "timing the default plans"
        left = f", about {format_span(event.left_s)} left" if event.index else ""
        self._write(f"{self.where}{left}: {describe_workload(event.workload)}")
        self._write_off_terminal(self.doing)

    def _screen(self, event: GeometryScreened) -> None:
        known = "  (from the journal)" if event.resumed else ""
        self._write(f"  default    {_format_plan(event.result)}{known}")

    def _start_stage(self, event: StageStarted) -> None:
        self.stage, self.trial = event, None
        self.failures, self.reasons = Counter(), Counter()
        self.doing = "compiling"
        if sum(event.rejected.values()):
            self.failures["rejected"] = sum(event.rejected.values())
        self._write_off_terminal(f"{event.stage}, {event.geometry.text}: {self._format_state()}")

    def _count_trial(self, event: TrialDone) -> None:
        self.trial, self.doing = event, ""
        outcome = event.evaluation.outcome
        if outcome.status != "ok":
            self.failures[outcome.status] += 1
            if outcome.reason and outcome.status != "slow":
                self.reasons[f"{FAILURES.get(outcome.status, outcome.status)}: {outcome.reason}"] += 1
        if not self.terminal.err.is_terminal and time.monotonic() - self.last_line > LINE_EVERY_S:
            self._write(f"  {event.stage:<10} {self._format_state()}   {format_counts(self.failures)}")

    def _end_stage(self, result: StageResult) -> None:
        trials = len(result.search.trials)
        if result.winner is not None:
            default = format_us(result.default_us)
            found = f"best {format_us(result.median_us):>8}  default {default:>8}  {format_ratio(result.ratio)}"
        else:
            found = f"{'nothing valid' if trials else 'default kept'}, {result.search.stopped_because}"
        geometry = f"{result.geometry.BT:>2}/{result.geometry.BC:<2}"
        self._write(f"  {result.stage:<10} {geometry} {trials:>4} {'trials' if trials != 1 else 'trial '}  {found}")
        new = result.stage not in self.explained  # every chunk size and workload rejects much the same
        if self.failures and (new or set(self.failures) != {"rejected"}):
            self._write(f"    {format_counts(self.failures)}")
        for reason, count in self.reasons.most_common(MAX_REASONS):
            self._write(f"    {count} x {one_line(reason)}")
        for reason, count in Counter(result.rejected).most_common(MAX_REASONS if new else 0):
            self._write(f"    {count} x rejected: {reason}")
        self.explained.add(result.stage)
        self.stage, self.doing = None, "measuring plans end to end"

    def _end_workload(self, event: WorkloadDone) -> None:
        report = event.report
        self.doing = ""
        if report.failure:
            self._write(f"  failed     {report.failure}")
        elif report.entry is not None:
            known = f", {report.resumed} trials came from the journal" if report.resumed else ""
            gain = format_ratio(report.entry.vs_default.ratio)
            self._write(f"  stored     {gain} the default, after {report.seconds:.0f} s{known}")

    def _render(self) -> Any:
        """The stage under way, in at most five lines."""
        elapsed = int(time.monotonic() - self.began)
        stage = f"{self.stage.stage}  {self.stage.geometry.text}" if self.stage else self.doing
        title = Text.assemble((self.where, "bold"), f"  {stage}  ", (f"{elapsed // 60}:{elapsed % 60:02d}", "dim"))
        if self.stage is None:
            return Group("", title)
        done, of = (self.trial.number, self.trial.of) if self.trial else (0, self.stage.budget)
        width = min(78, self.terminal.err.width - 2)
        lines = [Text(self._format_state()), Text(format_counts(self.failures) or "none failed", style="dim")]
        if self.reasons:
            (reason, _), *_ = self.reasons.most_common(1)
            lines.append(Text(one_line(reason), style="dim"))
        for line in (title, *lines):
            line.truncate(width, overflow="ellipsis")
        bar = Table.grid()  # a bar by itself ends no line
        bar.add_row(ProgressBar(total=max(of, 1), completed=done, width=width, complete_style="green"))
        return Group("", title, bar, *lines)

    def _format_state(self) -> str:
        if self.stage is None or self.trial is None:
            return f"{self.stage.candidates} of {self.stage.space} configs can run; compiling" if self.stage else ""
        best, default = self.trial.best_us, self.trial.default_us
        gain = format_ratio(default / best if best and default else None)
        return (
            f"trial {self.trial.number}/{self.trial.of}   best {format_us(best)}   "
            f"default {format_us(default)}   gain {gain}"
        )


def describe_run(event: RunStarted) -> str:
    """How long a run takes at most or about, and what it has to compile, in one line."""
    count = "1 workload" if event.workloads == 1 else f"{event.workloads} workloads"
    if event.limit_s is None:
        time_s = f"{count}, no time limit: about {format_span(event.about_s)}"
    else:
        most, about = format_span(event.limit_s * event.workloads), format_span(event.about_s)
        time_s = f"{count}, at most {event.limit_s:g} s each: up to {most}{f', about {about}' if about != most else ''}"
    return f"{time_s}; about {event.kernels} kernels to compile on {event.jobs} cores."


def format_span(seconds: float) -> str:
    """A span of time, rounded: ``40 s``, ``12 min``, ``1.5 h``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_workload(w: Workload) -> str:
    """Shape, type and gate in one line."""
    tokens = f"{len(w.lengths)} packed sequences, {w.T} tokens" if w.lengths else f"B{w.B} T{w.T}"
    heads = f"H{w.H}" if w.HV == w.H else f"H{w.H} HV{w.HV}"
    return f"{tokens} {heads} K{w.K} V{w.V} {w.dtype}, {w.gate} gate, {w.decay} decay"


def format_counts(counts: Mapping[str, int]) -> str:
    """``12 rejected, 2 did not compile``, in a fixed order; statuses that are fine are left out."""
    return ", ".join(f"{counts[status]} {word}" for status, word in FAILURES.items() if counts.get(status))


def _format_plan(result: PlanResult) -> str:
    plan = f"{result.plan.pipeline} {result.plan.BT:>2}/{result.plan.BC:<2}{' kept' if result.plan.kept else ''}"
    if result.status != "ok":
        return f"{plan}  {FAILURES.get(result.status, result.status)}: {one_line(result.reason)}"
    error = result.check.get("max_rel_err")
    shown = f"  error {format_error(error)}" if isinstance(error, (int, float)) else ""
    return f"{plan}  {format_us(result.median_us):>9}{shown}"
