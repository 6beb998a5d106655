"""What ``kda-tl tune`` shows while it goes on, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from support.cli_cases import ANSI, CPU, SMALL, make_entry, make_report, make_search

from kda_tl.cli._console import Terminal
from kda_tl.cli._progress import TuneProgress
from kda_tl.database.records import VsDefault
from kda_tl.runtime.defaults import default_plan
from kda_tl.tune.events import (
    ChunkVariant,
    Event,
    PartStarted,
    PlanDone,
    StageResult,
    StageStarted,
    TrialDone,
    VariantScreened,
    WorkloadStarted,
)
from kda_tl.tune.journal import Outcome
from kda_tl.tune.search import Evaluation

PLAN = default_plan(SMALL.problem(), CPU)
CONFIG = PLAN.config("fwd_state")
REJECTED = {"BV=64 does not divide 32": 9, "BV=128 does not divide 32": 2, "num_stages has no meaning here": 1}
OK = Outcome(status="ok", median_us=41.2)
BAD = Outcome(status="compile", reason="ptxas said\nno " * 30)


def make_stage(
    *outcomes: Outcome, study: str = "s", BC: int = 16, resumed: bool = False, name: str = "fwd_state"
) -> StageResult:
    """A stage whose trials, all of one config, had these outcomes."""
    trials = tuple(Evaluation(config=CONFIG, outcome=outcome, resumed=resumed) for outcome in outcomes)
    return StageResult(
        stage=name,
        variant=ChunkVariant(pipeline="staged", BT=64, BC=BC),
        study=study,
        winner=CONFIG,
        default=CONFIG,
        median_us=41.2,
        mad_us=0.1,
        default_us=55.0,
        ratio=1.33,
        ci95=(1.3, 1.4),
        rejected=REJECTED,
        search=make_search(trials),
        seconds=1.0,
    )


def iter_stage(result: StageResult) -> Iterator[Event]:
    """The events of a stage."""
    yield StageStarted(
        stage=result.stage, variant=result.variant, space=18, candidates=6, budget=9, rejected=result.rejected
    )
    for number, trial in enumerate(result.search.trials, start=1):
        yield TrialDone(stage=result.stage, number=number, of=9, evaluation=trial, best_us=41.2, default_us=55.0)
    yield result


def iter_workload(*stages: StageResult, resumed: bool = False, **report: Any) -> Iterator[Event]:
    """Every kind of event, as a tuner sends them."""
    outcome = Outcome(status="ok", median_us=55.0, check={"max_rel_err": 1e-6})
    timed = Evaluation(config=PLAN, outcome=outcome)
    wrong = replace(timed, outcome=replace(outcome, status="wrong", median_us=None, reason="o is off"))
    yield WorkloadStarted(workload=SMALL, index=0, total=2)
    for count in (2, 1):  # the other BC comes when the best BT is known
        yield PartStarted(part="default plans", count=count)
        for BC in (16, 8)[:count]:
            variant = ChunkVariant(pipeline="staged", BT=64, BC=BC)
            yield VariantScreened(variant=variant, result=replace(timed, resumed=resumed))
    yield PartStarted(part="stages", count=len(stages))
    for stage in stages:
        yield from iter_stage(stage)
    yield PartStarted(part="plans", count=1)
    yield PlanDone(result=wrong)
    yield PlanDone(result=timed)  # the same plan with its first results kept, which nobody announced
    yield make_report(stages=stages, seconds=40.0, **report)


Show = Callable[..., list[str]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Lines of a log after some events, of which each takes five seconds."""

    def show(*events: Event, limit_s: float | None = None) -> list[str]:
        clock = [0.0]
        monkeypatch.setattr("kda_tl.cli._progress.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
        err = Console(stderr=True, force_terminal=False, width=120, highlight=False, markup=False)
        progress = TuneProgress(Terminal(out=Console(), err=err), limit_s)
        with progress.running():
            for event in events:
                progress(event)
                clock[0] += 5
        out, text = capsys.readouterr()
        assert out == "" and ANSI not in text
        return text.splitlines()

    return show


def test_a_log_has_a_line_for_everything_with_counts(show: Show) -> None:
    stages = make_stage(OK, BAD), make_stage(OK, BC=8, study="t")
    lines = show(*iter_workload(*stages, failure="no plan computes the right numbers"), limit_s=75)
    assert lines == [
        "cpu-safe-K32 (1 of 2): B1 T192 H2 K32 V32 fp32, safe gate, steep decay",
        "  ... timing the default plans, 2 to go, 0:05 of 1:15",
        "  default  1 of 2   staged 64/16    55.0 us  error 1.0e-06",
        "  default  2 of 2   staged 64/16    55.0 us  error 1.0e-06",
        "  ... timing the default plans, 1 to go, 0:20 of 1:15",
        "  default  3 of 3   staged 64/16    55.0 us  error 1.0e-06",
        "  ... stage 1 of 2, fwd_state, staged BT=64 BC=16, 0:35 of 1:15: 6 of 18 configs can run; compiling",
        "    1/2 fwd_state  64/16    2 trials  best  41.2 us  default  55.0 us  1.33x",
        "        12 rejected (3 reasons): BV=64 does not divide 32",
        f"        1 did not compile: {' '.join(['ptxas said no'] * 30)}",
        "  ... stage 2 of 2, fwd_state, staged BT=64 BC=8, 0:55 of 1:15: 6 of 18 configs can run; compiling",
        "    2/2 fwd_state  64/8     1 trial   best  41.2 us  default  55.0 us  1.33x",
        "  ... measuring plans end to end, 1 to go, 1:10 of 1:15",
        "  plan     1 of 1   staged 64/16  wrong: o is off",
        "  plan     2 of 2   staged 64/16    55.0 us  error 1.0e-06",
        "  failed     no plan computes the right numbers",
    ]


def test_a_log_without_limit_shows_the_time_of_each_workload(show: Show) -> None:
    lines = show(*iter_workload(make_stage(OK)), *iter_workload(make_stage(OK)))
    assert [line for line in lines if "timing" in line] == 2 * [
        "  ... timing the default plans, 2 to go, 0:05",
        "  ... timing the default plans, 1 to go, 0:20",
    ]


def test_a_long_stage_is_told_of_every_ten_seconds(show: Show) -> None:
    lines = show(*iter_stage(make_stage(OK, OK, BAD, BAD, OK, OK)), limit_s=75)
    told = [line for line in lines if "trial " in line and "trials" not in line]
    assert [line.split("   ")[0].split()[-1] for line in told] == ["3/9", "6/9"]
    assert "0:15 of 1:15" in told[0] and "12 rejected, 1 did not compile" in told[0]


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ([], "after 40 s"),
        ([{"study": "s"}], "after 40 s; of 3 trials 2 were of kernels measured before in this run"),
        ([{"study": "t"}], "after 40 s; of 3 trials 2 came from the journal of an earlier run"),
    ],
    ids=["a first run", "kernels of another workload", "a second run"],
)
def test_known_trials_are_told_by_where_they_come_from(show: Show, before: list[dict[str, str]], told: str) -> None:
    events = [event for study in before for event in iter_stage(make_stage(OK, **study))]  # type: ignore[arg-type]
    last = [make_stage(OK, OK, BC=8, resumed=bool(before)), make_stage(OK, study="new")]
    entry = make_entry(SMALL, CPU)
    lines = show(*events, *iter_workload(*last, entry=entry, resumed=bool(before)))
    assert lines[-1] == f"  stored     1.21x the default, {told}"
    assert sum("(from the journal)" in line for line in lines) == (3 if before else 0)


def test_a_default_that_won_is_no_gain(show: Show) -> None:
    entry = make_entry(SMALL, CPU, vs_default=VsDefault(ratio=1.0, ci95=(1.0, 1.0)))
    for why, told in (("everything was tried", ""), ("the time limit was reached", " in the time there was")):
        lines = show(*iter_workload(make_stage(OK), entry=entry, stopped_because=why))
        assert lines[-1] == f"  stored     the default, which nothing beat{told}, after 40 s"


def take_lines(console: Console) -> list[str]:
    """What was written since the last time, without colours."""
    file: Any = console.file
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_what_is_under_way_and_what_is_left(width: int) -> None:
    console, other = (Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False) for _ in range(2))
    progress = TuneProgress(Terminal(out=console, err=console), 75)
    frames: dict[str, list[str]] = {}
    for event in iter_workload(make_stage(BAD, OK), make_stage(OK, name="fwd_recurrence"), failure="it is wrong"):
        progress(event)
        other.print(progress._render())
        frames[type(event).__name__] = take_lines(other)
    lasting = take_lines(console)
    assert max(len(line) for lines in [lasting, *frames.values()] for line in lines) <= width
    assert len(lasting) == 12 and lasting[6][:34] == "        1 did not compile: ptxas s" and lasting[6][-1] == "\u2026"
    assert frames["VariantScreened"] == ["", "cpu-safe-K32 (1 of 2)  0:00 of 1:15", "timing the default plans, 3 of 3"]
    assert frames["PartStarted"][2] == "measuring plans end to end, 1 of 1"
    trial = frames["TrialDone"]
    assert len(trial) == 6 and trial[1] == "cpu-safe-K32 (1 of 2)  0:00 of 1:15"
    assert trial[3:] == [
        "stage 2 of 2, fwd_recurrence, staged BT=64 BC=16",
        "trial 1/9   best 41.2 us   default 55.0 us   gain 1.33x",
        "12 rejected",
    ]
