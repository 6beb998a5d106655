"""The end of ``kda-tl tune``: the operator called with each plan found, its error, its speed, where the plan lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kda_tl.bench.fixtures import PLAN_CHECK_TOKENS, torch_device
from kda_tl.bench.timing import ratio_ci, summarise, time_interleaved
from kda_tl.bench.workloads import Workload
from kda_tl.cli._call import make_launches, measure_errors
from kda_tl.cli._console import (
    ExitCode,
    Terminal,
    format_chunks,
    format_config,
    format_error,
    format_ratio,
    format_us,
    make_table,
)
from kda_tl.core.device import Device
from kda_tl.core.stage import Plan
from kda_tl.database.store import reload, use
from kda_tl.runtime.dispatch import select_cached
from kda_tl.tune.events import StageResult, TuneReport, WorkloadReport

# The recurrence walks token by token in float64; autograd keeps two states a token, 17 MB for 64 heads of 128 by 128.
CHECKED_TOKENS = {"fwd": 2048, "bwd": PLAN_CHECK_TOKENS, "step": PLAN_CHECK_TOKENS}
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a call of the operator gave once the plan was stored; it is compared with nothing if it is the default."""

    is_default: bool
    step: str
    source: str
    error: float
    checked_tokens: int
    tuned_us: float
    default_us: float
    ratio: float
    ci95: tuple[float, float]


def finish(report: TuneReport, directory: Path, terminal: Terminal) -> int:
    """Shows what was found, as dispatched from the database that was just written; explains the exit code."""
    reload()
    served: dict[str, Served] = {}
    stored = [found for found in report.workloads if found.entry is not None]
    with use(directory):
        for number, found in enumerate(stored, start=1):
            if found.default is not None:
                plan = "the plan that was stored" if found.improved else "the default plan, which nothing beat"
                name = found.workload.name
                terminal.note(f"Calling {found.workload.operator} for {name} with {plan} ({number} of {len(stored)}).")
                served[name] = serve(found.workload, found.default, report.device)
    values = {
        "gpu": report.device.slug,
        "journals": report.journals,
        "database": directory,
        "seconds": report.seconds,
        "workloads": [_as_dict(found, served.get(found.workload.name)) for found in report.workloads],
    }
    terminal.show(values, *_tables(report, served))
    code, sentence = conclude(report)
    if sentence:
        terminal.note(sentence)
    return code


def conclude(report: TuneReport) -> tuple[ExitCode, str]:
    """The exit code, and what it means unless all is well."""
    stored = sum(found.entry is not None for found in report.workloads)
    failed = [found.workload.name for found in report.workloads if found.failure]
    if failed:
        some = ", ".join(failed[:3]) + (", ..." if len(failed) > 3 else "")
        what = f"{len(failed)} of {len(report.workloads)} workloads failed: {some}"
        return ExitCode.NOTHING_VALID, f"{what}. Plans of others that are stored: {stored} (exit code 4)."
    if any(found.improved for found in report.workloads):
        return ExitCode.OK, ""
    kept = f"records that name the default plan are stored: {stored}" if stored else "--stage stores no plan"
    return ExitCode.NO_GAIN, f"Nothing beat the default; {kept} (exit code 5)."


def serve(workload: Workload, default: Plan, device: Device) -> Served:
    """Calls the operator as a user would: once checked against the recurrence, then timed against the default.

    For a backward the forward is called too, and the backward alone is timed.
    """
    where = torch_device(device)
    choice = select_cached(workload.problem(), device)
    checked = workload.trimmed(CHECKED_TOKENS[workload.direction])
    errors = measure_errors(workload.declaration, checked.inputs(where), choice.plan, workload.direction)
    is_default = choice.plan == default
    launches = make_launches(workload, where, {"tuned": None} if is_default else {"tuned": None, "default": default})
    with torch.no_grad():
        rounds = time_interleaved(launches, where, rounds=ROUNDS, reps=3 if device.kind == "cpu" else 20)
    rounds.setdefault("default", rounds["tuned"])
    ratio, low, high = ratio_ci(rounds["default"], rounds["tuned"])
    return Served(
        is_default=is_default,
        step=choice.step,
        source=choice.source,
        error=max(errors.values()),
        checked_tokens=checked.tokens,
        tuned_us=summarise(rounds["tuned"])[0],
        default_us=summarise(rounds["default"])[0],
        ratio=ratio,
        ci95=(low, high),
    )


def _tables(report: TuneReport, served: Mapping[str, Served]) -> Iterator[Any]:
    if stages := [stage for found in report.workloads if found.entry is None for stage in found.stages]:
        yield _stage_table(stages)
    if served:
        called = ", ".join(dict.fromkeys(found.workload.operator for found in report.workloads))
        right = ("BT/BC", "call", "default", "gain", "error")
        yield make_table("workload", "pipeline", *right, right=right, rows=_served_rows(report, served))
        yield f"call: the time of {called}. error: relative to the float64 recurrence."
        if any(s.is_default for s in served.values()):
            yield "same plan: nothing beat the default in the contest of plans, so the stored record names it."
        yield from _explain_noise(report, served)
        if any(found.workload.direction == "bwd" for found in report.workloads):
            yield "Of a backward: time without the forward, error of the worst gradient."
    yield from (f"{found.workload.name}: {found.failure}" for found in report.workloads if found.failure)
    yield from (f"Plans are in {path}" for path in sorted({str(f.path) for f in report.workloads if f.path}))
    yield from (f"Trials are in {path}" for path in report.journals)


def _served_rows(report: TuneReport, served: Mapping[str, Served]) -> Iterator[Sequence[str]]:
    for found in report.workloads:
        if (s := served.get(found.workload.name)) is not None and found.entry is not None:
            plan = found.entry.plan
            default = ("same plan", "-") if s.is_default else (format_us(s.default_us), format_ratio(s.ratio))
            times = (format_us(s.tuned_us), *default, format_error(s.error))
            yield found.workload.name, plan["pipeline"], format_chunks(plan), *times


def _explain_noise(report: TuneReport, served: Mapping[str, Served]) -> Iterator[str]:
    """Of plans that won their contest and whose gain the few rounds of the table do not show."""
    for found in report.workloads:
        s = served.get(found.workload.name)
        if s is not None and not s.is_default and s.ci95[0] <= 1 and found.entry is not None:
            gain, rounds = format_ratio(found.entry.vs_default.ratio), found.entry.time_us.rounds
            noise = f"the {ROUNDS} rounds of this table are within the noise"
            yield f"{found.workload.name}: {gain} in the {rounds} rounds of its contest; {noise}."


def _stage_table(stages: Sequence[StageResult]) -> Any:
    right = ("BT/BC", "best", "default", "gain")
    rows = [
        (
            stage.stage,
            format_chunks(vars(stage.variant)),
            format_us(stage.median_us),
            format_us(stage.default_us),
            format_ratio(stage.ratio),
            format_config(stage.winner, ", ") if stage.winner else "nothing valid",
        )
        for stage in stages
    ]
    return make_table("stage", *right, "config", right=right, rows=rows)


def _as_dict(found: WorkloadReport, served: Served | None) -> dict[str, Any]:
    """A workload's report for JSON: its search is told by counts, its trials are in the journal."""
    values = {**vars(found), "workload": found.workload.name, "problem": found.workload.problem().key}
    values |= {"served": served, "counts": found.counts, "resumed": found.resumed, "improved": found.improved}
    stages = [{**vars(s), "counts": s.search.counts, "stopped_because": s.search.stopped_because} for s in found.stages]
    values["stages"] = [_leave_out("search", stage) for stage in stages]
    values["plans"] = [{"plan": plan.config, **_leave_out("samples_us", vars(plan.outcome))} for plan in found.plans]
    return _leave_out("default", values)


def _leave_out(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
