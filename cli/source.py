"""``kda-tl source``: the generated CUDA or C of a stage, for a device that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kda_tl import templates
from kda_tl.cli._console import ExitCode, Terminal
from kda_tl.cli._problem import add_workload_arguments, read_one_workload
from kda_tl.cli._target import add_gpu_argument, find_one_known
from kda_tl.cli.explain import choose_for, open_database
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES, Case, Config, Stage
from kda_tl.errors import InputError

WORKLOAD = {"cpu": "cpu-safe-K32", "cuda": "safe-T8192-H32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("stage", metavar="STAGE", help=f"one of {', '.join(templates.names())}")
    defaults = " or ".join(f"{name} ({kind})" for kind, name in WORKLOAD.items())
    add_gpu_argument(parser)
    add_workload_arguments(parser, defaults)
    parser.add_argument("--config", nargs="+", action="extend", metavar="FIELD=VALUE", help="change the plan's config")
    parser.add_argument("--BT", type=int, choices=sorted(BT_CHOICES), help="tokens a chunk (default: the plan's)")
    parser.add_argument("--BC", type=int, choices=sorted(BC_CHOICES), help="tokens a sub-chunk (default: the plan's)")
    parser.add_argument("--db", metavar="DIR", help="take the plan from this database first")
    parser.add_argument("--json", action="store_true", help="stage, config and source as JSON")


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compiles the stage and writes its source as it is."""
    stage = templates.load(args.stage)
    device, note = find_one_known(args.gpu)
    if note:
        terminal.note(note)
    problem = _turn(read_one_workload(args, [WORKLOAD[device.kind]]).problem(), stage)
    with open_database(args.db):
        case, config = _choose(stage, problem, device, args)
    terminal.note(f"{stage.name} for {problem.key} on {device.slug}, BT={case.BT}, BC={case.BC}, {config}")
    from kda_tl.runtime.compile import compile_stage

    source = compile_stage(stage, case, config).source
    if terminal.json:
        values = {"BT": case.BT, "BC": case.BC, "config": config, "source": source}
        terminal.show({"stage": stage.name, "problem": problem.key, "gpu": device.slug, **values})
    else:
        terminal.write(source)
    return ExitCode.OK


def _turn(problem: Problem, stage: Stage) -> Problem:
    """The problem in a pass that has the stage: its own, if it is among them."""
    from kda_tl.templates.pipelines import PIPELINES

    passes = [p.direction for p in PIPELINES.values() if stage.name in {s.name for s in p.stages}]
    return problem if problem.direction in passes or not passes else replace(problem, direction=passes[0])


def _choose(stage: Stage, problem: Problem, device: Device, args: argparse.Namespace) -> tuple[Case, Config]:
    """The variant and config of the plan that serves, changed as asked."""
    from kda_tl.runtime.dispatch import default_plan

    plan = choose_for(problem, device, args.BT).plan or default_plan(problem, device)
    BT = args.BT or plan.BT
    case = Case(problem=problem, device=device, BT=BT, BC=args.BC or min(plan.BC, BT))
    served = dict(plan.stages).get(stage.name) if (plan.BT, plan.BC) == (case.BT, case.BC) else None
    config = _change(served or stage.default(case), args.config or ())
    reason = config.reject(case)
    if reason:
        raise InputError(f"{stage.name} cannot run with {config}: {reason}.")
    return case, config


def _change(config: Config, words: Sequence[str]) -> Config:
    """The config with some fields changed; values are matched with the choices of the field."""
    values: dict[str, Any] = config.as_dict()
    axes = config.axes()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in axes:
            raise InputError(f"--config takes FIELD=VALUE with a field among {', '.join(axes)}, got {word!r}.")
        matching = [choice for choice in axes[name] if str(choice) == text]
        if not matching:
            raise InputError(f"{name} must be one of {', '.join(map(str, axes[name]))}, got {text!r}.")
        values[name] = matching[0]
    return type(config).from_dict(values)
