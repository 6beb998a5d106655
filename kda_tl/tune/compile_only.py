"""The compile-only check: candidates compiled for a device that need not be here, with what the binaries tell.

Nothing is timed, so nothing of it may be served; but the user's kernels then have what a search begins with, here or,
where their folder is taken along, on a machine with the device (:mod:`kda_tl.bundle.cache`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kda_tl.bench.workloads import Workload
from kda_tl.core.device import Device
from kda_tl.core.isolate import WorkerCrash, WorkerFailure, WorkerTimeout, map_pool
from kda_tl.core.stage import Case, Config
from kda_tl.errors import InputError
from kda_tl.runtime.compile import Library, compile_stage
from kda_tl.runtime.defaults import DEFAULT_BC, DEFAULT_BT
from kda_tl.runtime.lower import require_compiler
from kda_tl.tune.pool import TARGET
from kda_tl.tune.requests import KernelJob
from kda_tl.tune.stage_search import count_cores, rank_by_distance, split_space

_COMPILE_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One config, compiled or not; what the binary does not tell is None (the CPU target's never tells)."""

    stage: str
    BT: int
    BC: int
    config: Config
    status: str  # "ok", "compile", "crash" or "timeout"
    reason: str = ""  # why the status is not "ok"
    registers: int | None = None  # a thread
    local_bytes: int | None = None  # local memory a thread: spilled registers, and arrays indexed at run time
    smem_bytes: int | None = None  # dynamic shared memory a block
    threads: int | None = None  # a block, as launched
    measured: bool = False  # always


class StaticJob(KernelJob):
    """Compiles one config and reads what the binary tells; runs in a worker process."""

    def run(self) -> dict[str, Any]:
        """Returns fields of :class:`Compiled`."""
        binary = compile_stage(self.stage, self.case, self.config).binary
        if not isinstance(binary, Library):
            return {}
        told = {name: getattr(binary.entry, name) for name in ("smem_bytes", "registers", "local_bytes")}
        return {**told, "threads": math.prod(binary.entry.block)}


def compile_static(
    workload: Workload,
    device: Device,
    *,
    stages: Sequence[str] | None = None,
    BT: int = DEFAULT_BT,
    BC: int = DEFAULT_BC,
    budget: int | None = None,
    jobs: int | None = None,
    on_compiled: Callable[[Compiled], None] | None = None,
) -> tuple[Compiled, ...]:
    """Compiles the candidates of a workload's stages for a device, here or not; nothing is run, stored or served.

    Args:
        workload, device: what for, see :func:`kda_tl.database.gpus.known_device`.
        stages: names; unless given, those of all pipelines that have a config for the problem and the device.
        BT, BC: tokens a chunk and a sub-chunk, where the pass has chunks.
        budget: most candidates a stage, those nearest to the default, beside those that pipelines begin with; all
            unless given.
        jobs: processes, one a core unless given.
        on_compiled: called as each ends.

    Returns:
        All of them, by stage; within a stage those that compiled first, least local memory and registers first.

    Raises:
        InputError: there is no such stage in the pass, or it has no config here: the message says why.
        CompileError: no compiler was found.
    """
    from kda_tl.templates.pipelines import PIPELINES

    require_compiler(device)
    problem = workload.problem()
    pipelines = [pipeline for pipeline in PIPELINES.values() if pipeline.direction == problem.direction]
    every = {stage.name: stage for pipeline in pipelines for stage in pipeline.stages}
    names = list(every)
    if unknown := set(stages or ()) - set(names):
        raise InputError(f"there is no stage {', '.join(sorted(unknown))}: choose among {', '.join(names)}.")
    case = Case(problem=problem, device=device, BT=BT * problem.chunked, BC=BC * problem.chunked)
    work: list[StaticJob] = []
    for name in stages or names:
        stage = every[name]
        possible, rejected = split_space(stage, case)
        if stages and not possible:
            raise InputError(f"{name} has no config for {workload.name} on {device.slug}: {next(iter(rejected))}.")
        first = [p.defaults[name](case) for p in pipelines if stage in p.stages and name in p.defaults]
        nearest = rank_by_distance(possible, stage.default(case))[:budget]
        chosen = dict.fromkeys([*nearest, *(config for config in first if config in possible)])
        work += [StaticJob(stage=stage, case=case, config=config) for config in chosen]
    compiled = []
    for index, result in map_pool(TARGET, work, jobs=jobs or count_cores(), timeout_s=_COMPILE_TIMEOUT_S):
        compiled.append(_describe(work[index], result))
        if on_compiled:
            on_compiled(compiled[-1])
    ranked = sorted(compiled, key=lambda c: (c.status != "ok", c.local_bytes or 0, c.registers or 0))
    return tuple(sorted(ranked, key=lambda c: names.index(c.stage)))


def _describe(job: StaticJob, result: dict[str, Any] | WorkerFailure) -> Compiled:
    known: dict[str, Any] = {"stage": job.stage.name, "BT": job.case.BT, "BC": job.case.BC, "config": job.config}
    if not isinstance(result, WorkerFailure):
        return Compiled(**known, status="ok", **result)
    kinds: dict[type, str] = {WorkerCrash: "crash", WorkerTimeout: "timeout"}
    return Compiled(**known, status=kinds.get(type(result), "compile"), reason=str(result))
