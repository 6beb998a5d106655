"""Times pipelines that cut sequences into segments beside those that leave them whole: ``python compare_cuts.py OUT``.

What `kda_tl.runtime.defaults.count_steps` was fitted to: forwards, and training steps whose backward is pinned, of slow
gates. K = V = 128, bf16. CUDA graphs, a cold L2; medians of three rounds by turns, of four replays each.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kda_tl
from kda_tl.bench.timing import Launch, cuda_graph, time_interleaved
from kda_tl.bench.workloads import Workload
from kda_tl.cli._call import make_launch, make_step
from kda_tl.core.device import current_device
from kda_tl.core.stage import Case, Plan
from kda_tl.ops import find_operator
from kda_tl.runtime.defaults import find_rejection, pipeline_defaults
from kda_tl.templates.pipelines import PIPELINES

CUTS = (4, 8, 16)
NAMES = {
    ("chunk_kda", "fwd"): ("prep_recurrence", *(f"prep_segments_{n}" for n in CUTS)),
    ("chunk_kda", "bwd"): ("prep_scan", *(f"prep_scan_segments_{n}" for n in CUTS)),
    ("chunk_gated_delta_rule", "fwd"): (
        "gdn_pairs",
        *(f"gdn_{which}segments_{n}" for which in ("", "pairs_") for n in CUTS),
    ),
    ("chunk_gated_delta_rule", "bwd"): (
        "gdn_scan",
        *(f"gdn_{which}_segments_{n}" for which in ("scan", "walk") for n in CUTS),
    ),
}
# Of each operator and pass: H / HV, tokens, sequences
KDA = [(H, H, T, 1) for H in (2, 4, 8, 12, 16, 20, 24, 28) for T in (1024, 2048, 3072, 4096, 6000, 8192, 16384, 32768)]
KDA += [(H, H, T, 1) for H in (10, 17, 18) for T in (4096, 8192, 16384)]
KDA += [(4, 4, 4096, 2), (8, 8, 2048, 2), (4, 4, 2048, 4), (12, 12, 8192, 2)]
GATED = [(H, H, T, 1) for H in (2, 4, 8) for T in (1024, 2048, 4096)] + [(5, 5, 8192, 1), (9, 9, 8192, 1)]
GATED += [(*heads, T, 1) for heads in ((2, 4), (4, 8), (2, 8), (8, 16), (4, 16)) for T in (2048, 4096, 6000, 8192)]
SHAPES = {
    ("chunk_kda", "fwd"): KDA,
    ("chunk_kda", "bwd"): [(H, H, T, 1) for H in (2, 8, 12, 16, 24) for T in (2048, 4096, 8192, 32768)],
    ("chunk_gated_delta_rule", "fwd"): GATED,
    ("chunk_gated_delta_rule", "bwd"): [
        *((H, H, T, 1) for H in (2, 8) for T in (2048, 4096)),
        *((*heads, T, 1) for heads in ((2, 4), (4, 8), (8, 16)) for T in (2048, 4096, 8192)),
    ],
}


def list_workloads() -> Iterator[Workload]:
    """One workload a shape."""
    for (operator, direction), shapes in SHAPES.items():
        gate, beta = ("safe", "sigmoid") if operator == "chunk_kda" else ("log", "plain")
        for H, HV, T, B in shapes:
            name = f"{operator} {direction} {H}/{HV} {T}x{B}"
            given: dict[str, Any] = {"gate": gate, "beta": beta, "decay": "slow", "direction": direction}
            yield Workload(name=name, B=B, T=T, H=H, HV=HV, operator=operator, **given)


def list_plans(workload: Workload, device: Any) -> dict[str, Plan]:
    """The default plans of the pipelines that take a workload."""
    case = Case(problem=workload.problem(), device=device, BT=64, BC=16)
    plans = {name: pipeline_defaults(name, case) for name in NAMES[workload.operator, workload.direction]}
    return {name: plan for name, plan in plans.items() if not find_rejection(plan, case)}


def make(workload: Workload, inputs: dict[str, Any], plan: Plan) -> Launch:
    """A forward, or a step whose backward is a plan's, as a CUDA graph."""
    if workload.direction == "fwd":
        return cuda_graph(make_launch(workload.declaration, inputs, "fwd", plan))
    operator = find_operator(workload.operator)

    def call(arguments: Any) -> Any:
        with kda_tl.pin(plan):
            return operator.call(**arguments)

    return cuda_graph(make_step(call, inputs, operator.tensors))


def main() -> None:
    device, where, rows = current_device(), torch.device("cuda"), []
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    about |= {"date": str(datetime.date.today()), "about": __doc__}
    for workload in list_workloads():
        inputs = workload.inputs(where)
        launches = {name: make(workload, inputs, plan) for name, plan in list_plans(workload, device).items()}
        rounds = time_interleaved(launches, where, rounds=3, reps=4)
        us = {name: round(sorted(medians)[1], 1) for name, medians in rounds.items()}
        shape = {name: getattr(workload, name) for name in ("H", "HV", "T", "B")}
        rows.append({"operator": workload.operator, "pass": workload.direction, **shape, "us": us})
        whole = next(us[name] for name in us if PIPELINES[name].segments == 1)
        best = min(us, key=partial(dict.get, us))
        print(f"{workload.name:44} whole {whole:8.1f} best {us[best]:8.1f} {best}", flush=True)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = json.dumps(about)[1:-1]
        Path(sys.argv[1]).write_text(f'{{{head},\n "rows": [\n{lines}\n]}}\n')
        del launches, inputs
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
