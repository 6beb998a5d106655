"""Builds kernels whose numbers of heads are constants: ``python constant_heads.py GPU FOLDER``, for compare_heads.py.

Of every workload that a packaged plan of the GPU serves, e.g. ``nvidia_h200``; no GPU need be here. Templates are
today's; what tells a kernel its numbers of heads at the launch is replaced by those of the workload.
"""

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from kda_tl import templates
from kda_tl.bench.workloads import WORKLOADS
from kda_tl.core.stage import Case, Stage
from kda_tl.database.gpus import known_device
from kda_tl.database.store import sources
from kda_tl.runtime.binary import build_binary
from kda_tl.runtime.dispatch import select_plan
from kda_tl.templates.common.heads import Heads

told = Stage.specialise


def keep_heads(stage, case):
    """As :meth:`Stage.specialise`, but for heads."""
    made = told(stage, case)
    return replace(made, problem=replace(made.problem, H=case.problem.H, HV=case.problem.HV))


def build(job):
    """The file name of one kernel."""
    name, case, config, folder = job
    Stage.specialise = keep_heads
    Heads.of = classmethod(lambda cls, p: cls(p.H if p.grouped else p.HV, p.HV))
    return build_binary(templates.load(name), case, config, folder).binary


def main():
    device, folder = known_device(sys.argv[1]), Path(sys.argv[2])
    jobs, built_for = {}, {}
    for workload in WORKLOADS:
        problem = workload.problem()
        chosen = select_plan(problem, device, sources())
        if chosen.source != "packaged":
            continue
        case = Case(problem=problem.without_lengths(), device=device, BT=chosen.plan.BT, BC=chosen.plan.BC)
        for name, config in chosen.plan.stages:
            key = name, keep_heads(templates.load(name), case), config
            built_for[f"{workload.name}/{name}"] = key
            jobs[key] = name, case, config, folder
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        files = dict(zip(jobs, pool.map(build, jobs.values()), strict=True))
    (folder / "index.json").write_text(json.dumps({name: files[key] for name, key in built_for.items()}))


if __name__ == "__main__":
    main()
