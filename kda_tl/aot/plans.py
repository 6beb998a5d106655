"""Which kernels calls will launch: those of the plans that are chosen for a problem, of both passes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kda_tl.bundle.manifest import Entry, digest, specialisation
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Plan, Stage
from kda_tl.database.store import Database
from kda_tl.errors import InputError
from kda_tl.runtime.binary import build_binary
from kda_tl.runtime.defaults import DEFAULT_BT, find_keeper
from kda_tl.runtime.dispatch import select_plan
from kda_tl.runtime.program import list_jobs

BUILD_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel: a stage's template, what it is built for, and its config."""

    stage: Stage
    case: Case
    config: Config

    @functools.cached_property
    def built_for(self) -> dict[str, Any]:
        """See :func:`kda_tl.bundle.manifest.specialisation`."""
        return specialisation(self.stage, self.case, self.config)

    @functools.cached_property
    def digest(self) -> str:
        """The key of the kernel in a manifest."""
        return digest(self.stage.name, self.built_for)


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """Builds one kernel into a folder; runs in a worker process."""

    kernel: KernelSpec
    folder: str
    keep_source: bool
    timeout_s: float = BUILD_TIMEOUT_S

    def run(self) -> Entry:
        """Returns the kernel's entry of the manifest."""
        kernel, folder = self.kernel, Path(self.folder)
        return build_binary(kernel.stage, kernel.case, kernel.config, folder, keep_source=self.keep_source)


def list_plan(plan: Plan, problem: Problem, device: Device) -> Iterator[KernelSpec]:
    """The kernels of a plan that a problem launches, in their order."""
    for stage, case, config in list_jobs(plan, problem, device):
        yield KernelSpec(stage=stage, case=case, config=config)


def list_calls(problem: Problem, device: Device, databases: Sequence[Database]) -> Iterator[KernelSpec]:
    """The kernels of a call of the operator, and where the problem is of the backward those of its gradients too.

    Plans are those that :func:`kda_tl.runtime.dispatch.select_plan` chooses for the device, here or not. A backward is
    listed with and without a gradient of the final state, and also as it begins from kept residuals, where a plan of
    the forward's chunk size does. Raises InputError if nothing runs the problem.
    """

    def choose(posed: Problem, chunk_size: int | None = None) -> Plan:
        plan = select_plan(posed, device, databases, chunk_size=chunk_size).plan
        if plan is None:
            raise InputError(f"no plan runs {posed.key} on {device.slug}.")
        return plan

    forward = replace(problem, direction="fwd") if problem.direction == "bwd" else problem
    first = choose(forward, DEFAULT_BT if forward.intermediate_states else None)
    yield from list_plan(first, forward, device)
    if problem.direction == "bwd":
        backward = replace(problem, intermediate_states=False)
        plans = {choose(backward): None}
        with contextlib.suppress(InputError):  # without room for the forward's chunks nothing is kept
            plans[choose(backward, first.BT)] = None
        for plan in plans:
            for final_state in dict.fromkeys((problem.final_state, False)):
                yield from list_plan(plan, replace(backward, final_state=final_state), device)
        keeper = find_keeper(first, forward, device)
        yield from list_plan(keeper, problem, device)  # the forward that keeps them: kernels of the backward's pass


def list_distinct(kernels: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Each kernel once, in the order of first use."""
    found: dict[str, KernelSpec] = {}
    for kernel in kernels:
        found.setdefault(kernel.digest, kernel)
    return tuple(found.values())
