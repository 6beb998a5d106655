"""From a problem to the plan that runs it: the whole policy in :func:`select_plan`, and the caches around it.

Order: 0 a pinned plan, 1 the exact bucket, 2 the nearest bucket on this GPU, 3 another GPU of the same architecture,
4 the default, 5 the reference path where no kernels are there and none can be compiled. Steps 1 to 3 are
:func:`kda_tl.database.lookup.iter_hits`.
"""

import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kda_tl.core.device import Device, find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Plan
from kda_tl.core.toolchain import can_import_tilelang, explain_missing
from kda_tl.database.lookup import EXACT, Hit
from kda_tl.database.store import Database, Key, iter_hits, sources, stale_stages
from kda_tl.errors import InputError, KdaTlWarning
from kda_tl.runtime.compile import is_ready
from kda_tl.runtime.defaults import DEFAULT_BT, count_segments, default_plan, find_rejection, iter_defaults
from kda_tl.runtime.program import Program


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What a caller insists on for a pass: exactly one plan, or only plans of one :func:`numerics_class`."""

    plan: Plan | None = None
    numerics: str | None = None

    def holds_for(self, problem: Problem) -> bool:
        """Whether it is about the problem's pass: a pinned forward plan leaves the backward free."""
        from kda_tl.templates.pipelines import PIPELINES

        name = self.plan.pipeline if self.plan else (self.numerics or "").partition("-")[0]
        return name not in PIPELINES or PIPELINES[name].direction == problem.direction


@dataclass(frozen=True, kw_only=True)
class PlanSelection:
    """The plan for a problem, and why."""

    plan: Plan | None  # what runs, None for the reference path
    step: str  # "pinned", "exact bucket", "nearest bucket", "same architecture", "default" or "reference"
    source: str  # name of the database, or of the step
    reason: str  # a sentence for people
    stale: tuple[str, ...] = ()  # stages whose template changed since the plan was measured
    passed_over: tuple[str, ...] = ()  # sentences on better-ranked entries that could not serve

    def __str__(self) -> str:
        lines = [f"{self.step}: {self.reason}"]
        if self.plan is not None:
            lines.append(f"pipeline {self.plan.label}")
            for name, config in self.plan.stages:
                lines.append(f"  {name}: " + ", ".join(f"{k}={v}" for k, v in config.as_dict().items()))
        if self.stale:
            lines.append(f"stale: {', '.join(self.stale)} changed since; run `kda-tl tune --stale`")
        lines += [f"passed over: {sentence}" for sentence in self.passed_over]
        return "\n".join(lines)


def numerics_class(plan: Plan) -> str:
    """Plans of one class give the same bits: chunk sizes, how diagonals are taken, accumulation type.

    Tiles over K change the order in which products are summed, so configs that name BK are part of it.
    """
    settings = ((name, field, value) for name, config in plan.stages for field, value in config.as_dict().items())
    order = [f"{name}.{field}={value}" for name, field, value in settings if field in ("BK", "diagonal")]
    chunks = [f"BT{plan.BT}", f"BC{plan.BC}"] if plan.BT else []
    return "-".join([plan.pipeline, *chunks, "accf32", *order])


def parse_plan(stored: Mapping[str, Any], problem: Problem, device: Device) -> Plan:
    """A plan from its stored form, checked against the templates as they are now.

    Raises InputError for an unknown pipeline, stage, field or value, or a config that this problem and device reject.
    """
    from kda_tl.templates.pipelines import PIPELINES

    pipeline = PIPELINES.get(stored["pipeline"])
    if pipeline is None or pipeline.direction != problem.direction:
        raise InputError(f"there is no {problem.direction} pipeline {stored['pipeline']!r}.")
    case = Case(problem=problem, device=device, BT=stored["BT"], BC=stored["BC"])
    if (case.BT > 0) is not problem.chunked:
        raise InputError(
            f"BT={case.BT}, BC={case.BC}: a {problem.direction} has {'' if problem.chunked else 'no '}chunks."
        )
    kept = stored.get("kept", False)
    if kept and not pipeline.residuals:
        raise InputError(f"{pipeline.name} has nothing to keep: it cannot begin with what a forward made.")
    if set(stored["stages"]) != {stage.name for stage in pipeline.stages}:
        raise InputError(f"the stages of {pipeline.name} are {[s.name for s in pipeline.stages]}.")
    stages = tuple((stage.name, stage.config.from_dict(stored["stages"][stage.name])) for stage in pipeline.stages)
    plan = Plan(pipeline=pipeline.name, BT=case.BT, BC=case.BC, stages=stages, kept=kept)
    if rejection := find_rejection(plan, case):
        raise InputError(f"{rejection}.")
    return plan


@functools.lru_cache(maxsize=1024)
def _find_default(problem: Problem, device: Device) -> Plan | None:
    """The default plan of a problem; None where no default runs."""
    try:
        return default_plan(problem, device)
    except InputError:
        return None


def _explain_elsewhere(hit: Hit, plan: Plan, problem: Problem, device: Device) -> str:
    """Why a plan that was tuned for another bucket or GPU does not serve here, in a sentence; empty if it does.

    How many blocks fill a GPU decides between pipelines, and defaults follow that. So a plan serves where the default
    is of the same pipeline as it was there, cuts sequences exactly where the default does, and into no fewer segments.
    """
    posed, gpu = hit.entry.key.problem(problem.operator, problem.direction), hit.file.gpu
    origin = device if gpu.slug == device.slug else gpu.as_device()
    here, there = _find_default(problem, device), _find_default(posed, origin)
    if here is None or there is None:
        return ""
    segments, by_default = count_segments(plan), count_segments(here)
    if segments < by_default or (segments > 1) != (by_default > 1):
        what = f"cuts sequences into {segments}" if segments > 1 else "leaves sequences whole"
        return f"it {what}, and the default does not here."
    if here.pipeline != there.pipeline:
        return f"the default is {there.pipeline} there, and {here.pipeline} here."
    return ""


def select_plan(
    problem: Problem,
    device: Device,
    databases: Sequence[Database],
    *,
    pin: Pin | None = None,
    chunk_size: int | None = None,
    runs: Callable[[Plan], bool] | None = None,
    strict: bool = False,
) -> PlanSelection:
    """The plan for a problem. Pure: the same arguments give the same choice, nothing is compiled or measured.

    The ``databases`` come first in rank first, with a ``chunk_size`` only plans of this BT count, ``runs`` says whether
    a plan's kernels are there or can be compiled, all plans' unless given, and with ``strict`` entries measured with
    other templates than today's are misses instead of marked stale. A plan of another bucket or GPU serves only
    where the default is what it was there: see :func:`_explain_elsewhere`. Raises InputError if the pinned plan cannot
    run this problem or has another chunk size, no plan is of the pinned numerics class, or the device has no room for
    the chunk size.
    """
    pin = pin if pin and pin.holds_for(problem) else None
    if pin is not None and pin.plan is not None:
        plan = parse_plan(pin.plan.as_dict(), problem, device)
        if chunk_size not in (None, plan.BT):
            raise InputError(
                f"the pinned plan has BT={plan.BT}, but chunk_size={chunk_size} was asked for: leave one of them out."
            )
        if runs and not runs(plan):
            return _select_reference(device)
        return PlanSelection(plan=plan, step="pinned", source="caller", reason="the caller pinned this plan")
    passed_over: list[str] = []
    numerics = pin.numerics if pin else None
    key, operator, direction = Key.of(problem), problem.operator, problem.direction
    for hit in iter_hits(key, device, databases, operator=operator, direction=direction, numerics=numerics):
        stale = stale_stages(hit.entry, _fingerprints(hit.entry.plan))
        if chunk_size is not None and hit.entry.plan["BT"] != chunk_size:
            passed_over.append(f"{hit.reason} But chunk_size={chunk_size} was asked for.")
        elif stale and strict:
            passed_over.append(f"{hit.reason} But {', '.join(stale)} changed since (KDA_TL_STRICT=1).")
        else:
            try:
                plan = parse_plan(hit.entry.plan, problem, device)
            except InputError as error:
                passed_over.append(f"{hit.reason} But {error}")
                continue
            if hit.step != EXACT and (reason := _explain_elsewhere(hit, plan, problem, device)):
                passed_over.append(f"{hit.reason} But {reason}")
                continue
            if runs and not runs(plan):
                passed_over.append(f"{hit.reason} But no bundle has its kernels, and none can be compiled here.")
                continue
            source, over = hit.database.name, tuple(passed_over)
            return PlanSelection(
                plan=plan, step=hit.step, source=source, reason=hit.reason, stale=stale, passed_over=over
            )
    defaults = iter_defaults(problem, device, BT=chunk_size or DEFAULT_BT)
    possible = (each for each in defaults if numerics in (None, numerics_class(each)))
    first = next(possible, None)
    if first is None:
        raise InputError(f"no plan of the pinned numerics class {numerics} serves {problem.key} on {device.slug}.")
    chosen = next((each for each in itertools.chain([first], possible) if runs is None or runs(each)), None)
    if chosen is None:
        return _select_reference(device)
    if chunk_size not in (None, chosen.BT):
        what = f"{device.slug} has no room for chunks" if numerics is None else f"{numerics} has no chunks"
        raise InputError(f"{what} of {chunk_size} tokens: pass chunk_size={chosen.BT} or less.")
    reason = f"nothing tuned for {key.text} on {device.slug}; run `kda-tl tune` there"
    return PlanSelection(plan=chosen, step="default", source="default", reason=reason, passed_over=tuple(passed_over))


def _select_reference(device: Device) -> PlanSelection:
    reason = f"{explain_missing(device)}; the recurrence runs in plain PyTorch"
    return PlanSelection(plan=None, step="reference", source="reference", reason=reason)


def _fingerprints(stored_plan: Mapping[str, Any]) -> dict[str, str]:
    from kda_tl import templates

    known = templates.names()
    return {name: templates.fingerprint(name) for name in stored_plan["stages"] if name in known}


_pin: ContextVar[Pin | None] = ContextVar("kda_tl_pin", default=None)


@contextlib.contextmanager
def pin(plan: Plan | None = None, *, numerics: str | None = None) -> Iterator[None]:
    """Insists on one plan, or on plans of one numerics class, inside a ``with`` block of this thread or task."""
    token = _pin.set(Pin(plan=plan, numerics=numerics))
    try:
        yield
    finally:
        _pin.reset(token)


@functools.cache
def _is_strict() -> bool:
    """KDA_TL_STRICT, read once a process."""
    return os.environ.get("KDA_TL_STRICT", "0") not in ("", "0")


@functools.cache
def _can_compile(device: Device) -> bool:
    """Whether a compiler was found and TileLang works, tried once a process."""
    return find_compiler(device) is not None and can_import_tilelang()


def _can_run(problem: Problem, device: Device, plan: Plan) -> bool:
    """Whether a plan's kernels are there or can be compiled. Where they are there TileLang need not be imported."""
    from kda_tl.templates.pipelines import PIPELINES

    case = Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)
    stages = PIPELINES[plan.pipeline].stages_of(problem)
    found = device.kind == "cuda" and all(is_ready(stage, case, plan.config(stage.name)) for stage in stages)
    return found or _can_compile(device)


def context() -> tuple[Any, ...]:
    """What besides its arguments decides a choice: cheap to compare, for callers that cache by it."""
    return sources(), _pin.get()


def select_cached(problem: Problem, device: Device, chunk_size: int | None = None) -> PlanSelection:
    """:func:`select_plan` with the databases and settings of the process, cached."""
    return _select(problem, device, chunk_size, *context())


@functools.lru_cache(maxsize=4096)
def _select(
    problem: Problem, device: Device, chunk_size: int | None, databases: Sequence[Database], pinned: Pin | None
) -> PlanSelection:
    runs = functools.partial(_can_run, problem, device)
    found = select_plan(problem, device, databases, pin=pinned, chunk_size=chunk_size, runs=runs, strict=_is_strict())
    if found.stale:
        message = f"the plan for {problem.key} is stale: {', '.join(found.stale)} changed since it was tuned"
        warnings.warn(f"{message}. Run `kda-tl tune --stale`.", KdaTlWarning, stacklevel=4)
    return found


@functools.lru_cache(maxsize=512)
def build_program(plan: Plan, problem: Problem, device: Device, *, from_residuals: bool = False) -> Program:
    """A plan's kernels for a problem without lengths, compiled once a process: :meth:`Program.build`, cached."""
    return Program.build(plan, problem, device, from_residuals=from_residuals)


def load_program(
    problem: Problem, device: Device, chunk_size: int | None = None
) -> tuple[PlanSelection, Program | None]:
    """The choice for a problem and its compiled program, None on the reference path; compiles as Program.build does."""
    choice = select_cached(problem, device, chunk_size)
    if choice.plan is None:
        return choice, None
    return choice, build_program(choice.plan, problem.without_lengths(), device)
