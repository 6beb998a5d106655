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

from kda_tl.cli._console import Terminal, format_count, format_error, format_ratio, format_us, one_line
from kda_tl.cli._problem import describe_workload
from kda_tl.core.stage import Config, Plan
from kda_tl.tune import events
from kda_tl.tune.search import Evaluation

LINE_EVERY_S = 10.0  # off a terminal, while a stage is under way
FAILURES = {
    "rejected": "rejected",
    "compile": "did not compile",
    "wrong": "wrong",
    "crash": "crashed",
    "timeout": "timed out",
    "slow": "dropped as slow",
}
DOING = {"default plans": "timing the default plans", "stages": "tuning stages", "plans": "measuring plans end to end"}


class TuneProgress:
    """Takes the events of a tuning run, of at most ``limit_s`` seconds a workload, and writes them to stderr."""

    def __init__(self, terminal: Terminal, limit_s: float | None = None) -> None:
        self.terminal = terminal
        self.limit_s = limit_s
        self.where = self.part = ""
        self.done, self.of = 0, 0  # in the part under way
        self.stage: events.StageStarted | None = None
        self.trial: events.TrialDone | None = None
        self.failures: Counter[str] = Counter()
        self.reasons: dict[str, Counter[str]] = {}
        self.explained: set[str] = set()
        self.measured: set[tuple[str, Config]] = set()  # in this run, by study
        self.began = self.last_line = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[TuneProgress]:
        """Shows what is under way, on a terminal only; it leaves nothing behind."""
        if not self.terminal.err.is_terminal:
            yield self
            return
        streams: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
        with Live(console=self.terminal.err, get_renderable=self._render, transient=True, **streams):
            yield self

    def __call__(self, event: events.Event) -> None:
        """Takes one event."""
        handlers: dict[type, Any] = {
            events.RunStarted: lambda e: self._write(describe_run(e)),
            events.WorkloadStarted: self._start_workload,
            events.PartStarted: self._start_part,
            events.VariantScreened: self._screen,
            events.StageStarted: self._start_stage,
            events.TrialDone: self._count_trial,
            events.StageResult: self._end_stage,
            events.PlanDone: lambda e: self._write(f"  plan    {self._count()}  {_format_plan(e.result)}"),
            events.WorkloadReport: self._end_workload,
        }
        handlers[type(event)](event)

    def _write(self, line: str, *, cut: bool = False) -> None:
        self.terminal.note(line, cut=cut)  # what a line that is cut lacks is in ``--json`` and the journal
        self.last_line = time.monotonic()

    def _write_off_terminal(self, line: str) -> None:
        """What a terminal shows while it lasts, and a log would not show at all."""
        if not self.terminal.err.is_terminal:
            self._write(f"  ... {line}")

    def _start_workload(self, event: events.WorkloadStarted) -> None:
        self.where = f"{event.workload.name} ({event.index + 1} of {event.total})"
        self.stage, self.part, self.done, self.of = None, "", 0, 0
        self.began = time.monotonic()
        left = f", about {format_span(event.left_s)} left" if event.index else ""
        self._write(f"{self.where}{left}: {describe_workload(event.workload)}")

    def _start_part(self, event: events.PartStarted) -> None:
        if event.part != self.part:
            self.part, self.done, self.of = event.part, 0, 0
        self.of = self.done + event.count
        if event.part != "stages" and event.count:  # a stage has a line of its own
            self._write_off_terminal(f"{DOING[event.part]}, {self.of - self.done} to go, {self._format_time()}")

    def _count(self) -> str:
        """Counts one more of the part under way: ``2 of 4``."""
        self.done += 1
        return f"{self.done:>2} of {max(self.of, self.done):<2}"

    def _screen(self, event: events.VariantScreened) -> None:
        known = "  (from the journal)" if event.result.resumed else ""
        self._write(f"  default {self._count()}  {_format_plan(event.result)}{known}")

    def _start_stage(self, event: events.StageStarted) -> None:
        self.stage, self.trial = event, None
        self.failures, self.reasons = Counter(), {}
        if sum(event.rejected.values()):
            self.failures["rejected"] = sum(event.rejected.values())
        self._write_off_terminal(f"{self._format_stage(event)}, {self._format_time()}: {self._format_state()}")

    def _count_trial(self, event: events.TrialDone) -> None:
        self.trial = event
        outcome = event.evaluation.outcome
        if outcome.status != "ok":
            self.failures[outcome.status] += 1
            if outcome.reason and outcome.status != "slow":
                self.reasons.setdefault(outcome.status, Counter())[outcome.reason] += 1
        if not self.terminal.err.is_terminal and time.monotonic() - self.last_line > LINE_EVERY_S:
            failed = format_counts(self.failures)
            self._write(f"  {event.stage:<10} {self._format_state()}   {self._format_time()}   {failed}")

    def _end_stage(self, result: events.StageResult) -> None:
        trials = result.search.trials
        self.measured |= {(result.study, trial.config) for trial in trials if not trial.resumed}
        if result.winner is not None:
            default = format_us(result.default_us)
            found = f"best {format_us(result.median_us):>8}  default {default:>8}  {format_ratio(result.ratio)}"
        else:
            found = f"{'nothing valid' if trials else 'default kept'}, {result.search.stopped_because}"
        self.done += 1
        number = f"{self.done}/{self.of}" if self.of else ""
        variant = _format_sizes(result.variant)
        many = "trials" if len(trials) != 1 else "trial "
        self._write(f"  {number:>5} {result.stage:<10} {variant} {len(trials):>4} {many}  {found}")
        reasons = {**self.reasons, "rejected": Counter(result.rejected)}
        new = result.stage not in self.explained  # every chunk size and workload rejects much the same
        for status, word in FAILURES.items():
            if self.failures[status] and status != "slow" and (new or status != "rejected"):
                self._write(f"        {self.failures[status]} {word}{_sum_up(reasons.get(status))}", cut=True)
        self.explained.add(result.stage)
        self.stage = None

    def _end_workload(self, report: events.WorkloadReport) -> None:
        self.part = ""
        if report.failure:
            self._write(f"  failed     {report.failure}")
        elif report.entry is not None:
            gain = format_ratio(report.entry.vs_default.ratio)
            limited = " in the time there was" if "time limit" in report.stopped_because else ""
            what = f"{gain} the default" if report.improved else f"the default, which nothing beat{limited}"
            self._write(f"  stored     {what}, after {report.seconds:.0f} s{self._tell_known(report)}")

    def _tell_known(self, report: events.WorkloadReport) -> str:
        """How many trials were not measured for this workload, and where they came from."""
        trials = [(result.study, trial) for result in report.stages for trial in result.search.trials]
        known = [(study, trial.config) in self.measured for study, trial in trials if trial.resumed]
        here, before = sum(known), len(known) - sum(known)
        told = [f"{here} were of kernels measured before in this run"] if here else []
        told += [f"{before} came from the journal of an earlier run"] if before else []
        return f"; of {len(trials)} trials {' and '.join(told)}" if told else ""

    def _render(self) -> Any:
        """What is under way, in at most six lines."""
        width = min(78, self.terminal.err.width - 2)
        texts = [Text.assemble((self.where, "bold"), "  ", (self._format_time(), "dim"))]
        bars = []
        if self.stage is not None:
            done, of = (self.trial.number, self.trial.of) if self.trial else (0, self.stage.budget)
            bars.append(Table.grid())  # a bar by itself ends no line
            bars[0].add_row(ProgressBar(total=max(of, 1), completed=done, width=width, complete_style="green"))
            failed = format_counts(self.failures) or "none failed"
            texts += [Text(self._format_stage(self.stage)), Text(self._format_state()), Text(failed, style="dim")]
        elif self.part:
            count = f", {min(self.done + 1, self.of)} of {self.of}" if self.of else ""
            texts.append(Text(f"{DOING[self.part]}{count}"))
        for text in texts:
            text.truncate(width, overflow="ellipsis")
        return Group("", texts[0], *bars, *texts[1:])

    def _format_stage(self, stage: events.StageStarted) -> str:
        number = f"stage {self.done + 1} of {self.of}, " if self.of else ""
        return f"{number}{stage.stage}, {stage.variant.text}"

    def _format_time(self) -> str:
        """Time that the workload took so far, and its limit."""
        taken = format_clock(time.monotonic() - self.began)
        return taken if self.limit_s is None else f"{taken} of {format_clock(self.limit_s)}"

    def _format_state(self) -> str:
        if self.stage is None or self.trial is None:
            return f"{self.stage.candidates} of {self.stage.space} configs can run; compiling" if self.stage else ""
        best, default = self.trial.best_us, self.trial.default_us
        gain = format_ratio(default / best if best and default else None)
        return (
            f"trial {self.trial.number}/{self.trial.of}   best {format_us(best)}   "
            f"default {format_us(default)}   gain {gain}"
        )


def describe_run(event: events.RunStarted) -> str:
    """How long a run takes at most or about, and what it has to compile, in one line."""
    count = format_count(event.workloads, "workload")
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


def format_counts(counts: Mapping[str, int]) -> str:
    """``12 rejected, 2 did not compile``, in a fixed order; statuses that are fine are left out."""
    return ", ".join(f"{counts[status]} {word}" for status, word in FAILURES.items() if counts.get(status))


def format_clock(seconds: float) -> str:
    """Minutes and seconds: ``1:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _sum_up(reasons: Mapping[str, int] | None) -> str:
    """How many reasons there are, and the most frequent one."""
    if not reasons:
        return ""
    many = f" ({len(reasons)} reasons)" if len(reasons) > 1 else ""
    return f"{many}: {one_line(max(reasons, key=lambda reason: reasons[reason]))}"


def _format_sizes(chunks: Plan | events.ChunkVariant) -> str:
    """Chunk sizes, aligned; nothing where there are no chunks."""
    return f"{chunks.BT:>2}/{chunks.BC:<2}" if chunks.BT else ""


def _format_plan(result: Evaluation[Plan]) -> str:
    plan, outcome = result.config, result.outcome
    name = " ".join(filter(None, (plan.pipeline, _format_sizes(plan)))) + " kept" * plan.kept
    if outcome.status != "ok":
        return f"{name}  {FAILURES.get(outcome.status, outcome.status)}: {one_line(outcome.reason)}"
    error = outcome.check.get("max_rel_err")
    shown = f"  error {format_error(error)}" if isinstance(error, (int, float)) else ""
    return f"{name}  {format_us(outcome.median_us):>9}{shown}"
