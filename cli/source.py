"""``kda-tl source``: the generated CUDA or C of a stage, or its binary, for a device that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kda_tl import templates
from kda_tl.cli._binary import read_binary
from kda_tl.cli._console import ExitCode, Terminal, make_table
from kda_tl.cli._options import SHOWN_WORKLOAD
from kda_tl.cli._problem import read_one_workload, require_pass
from kda_tl.cli._target import find_one_known, open_database
from kda_tl.cli.explain import choose_for
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import InputError
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.defaults import default_plan


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compiles the stage and writes its source as it is, or what the binary holds."""
    asked = [what for what in ("ptx", "sass", "registers") if getattr(args, what)]
    if len(asked) > 1:
        raise InputError(f"pass one of --{' and --'.join(asked)}.")
    stage = templates.load(args.stage)
    device = find_one_known(args.gpu, terminal)
    problem = _read_problem(args, stage, device)
    with open_database(args.db):
        case, config = _choose(stage, problem, device, args)
    chunks = f"BT={case.BT}, BC={case.BC}, " if problem.chunked else ""
    terminal.note(f"{stage.name} for {problem.key} on {device.slug}, {chunks}{config}")
    values: dict[str, Any] = {"BT": case.BT, "BC": case.BC, "config": config}
    name = asked[0] if asked else "source"
    found = read_binary(name, stage, case, config) if asked else compile_stage(stage, case, config).source
    values |= found if isinstance(found, dict) else {name: found}
    if terminal.json:
        terminal.show({"stage": stage.name, "problem": problem.key, "gpu": device.slug, **values})
    elif isinstance(found, dict):
        rows = [(key, "-" if value is None else f"{value:,}") for key, value in found.items()]
        terminal.print(make_table("of the binary", "", right=("",), rows=rows))
    else:
        terminal.write(found)
    return ExitCode.OK


def _read_problem(args: argparse.Namespace, stage: Stage, device: Device) -> Problem:
    """The problem in a pass that has the stage: its own, if it is among them."""
    from kda_tl.templates.pipelines import PIPELINES

    passes = [p.direction for p in PIPELINES.values() if stage.name in {s.name for s in p.stages}] or [*SHOWN_WORKLOAD]
    workload = read_one_workload(args, [SHOWN_WORKLOAD[passes[0]][device.kind]])
    problem = workload.problem()
    if workload.direction not in passes:
        problem = require_pass(workload, passes[0], stage.name).problem()
    if (args.BT or args.BC) and not problem.chunked:
        raise InputError(f"{stage.name} takes tokens one by one, without chunks: leave --BT and --BC out.")
    return problem


def _choose(stage: Stage, problem: Problem, device: Device, args: argparse.Namespace) -> tuple[Case, Config]:
    """The variant and config of the plan that serves, changed as asked."""
    plan = choose_for(problem, device, args.BT).plan or default_plan(problem, device)
    BT = args.BT or plan.BT
    case = Case(problem=problem, device=device, BT=BT, BC=args.BC or min(plan.BC, BT))
    served = dict(plan.stages).get(stage.name) if (plan.BT, plan.BC) == (case.BT, case.BC) else None
    config = _change(served or stage.default(case), args.config or ())
    if reason := config.reject(case):
        raise InputError(f"{stage.name} cannot run with {config}: {reason}.")
    return case, config


def _change(config: Config, words: Sequence[str]) -> Config:
    """The config with some fields changed; values are matched with the choices of the field."""
    axes, values = config.axes(), dict[str, Any]()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in axes:
            raise InputError(f"--config takes FIELD=VALUE with a field among {', '.join(axes)}, got {word!r}.")
        choices = {str(choice): choice for choice in axes[name]}
        if text not in choices:
            raise InputError(f"{name} must be one of {', '.join(choices)}, got {text!r}.")
        values[name] = choices[text]
    return replace(config, **values)
