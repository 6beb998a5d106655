"""The kernels that a wheel holds, as data: which problems, and on which architectures.

Packaged plans come first, then defaults; what the wheel lacks is compiled on the machine that calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kda_tl.aot.plans import KernelSpec, list_calls, list_plan
from kda_tl.core.device import Device
from kda_tl.core.problem import Problem
from kda_tl.database.store import Database
from kda_tl.errors import InputError
from kda_tl.runtime.dispatch import parse_plan

# GPUs whose kernels are built unless --gpu names others; plans were tuned on the first of each architecture
GPUS = ("nvidia_h200", "nvidia_h100_80gb_hbm3")
# Architectures on whose GPUs kernels were run. Of sm_80, sm_89 and sm_100a it is known that kernels compile, no more:
# for these a wheel holds the first of DIMS only
RUN = ("sm_90a",)

# Heads and tokens of defaults; a packaged plan has its own. Kernels serve all of them, but long sequences of few heads
# are cut, and some that fill a GPU have a backward of their own, which takes others
SHAPES = ((32, 1024), (8, 32768), (32, 8192))
DIMS = ((128, 128), (64, 64), (256, 256))  # K and V, the most used first
DTYPES = ("bf16", "fp16")

_COMPUTED: dict[str, Any] = {"has_A_log": True, "has_dt_bias": True, "beta": "sigmoid"}
# Of heads that have a gate each, for the first of DTYPES: value heads that share a query/key head, for the first of
# DIMS, a forward's kernels being the same for more of them; and short sequences, which fill a GPU with one kernel
GROUP, SEQUENCES = 2, 8
# How models call the operators: the gate, what it is computed from, and the step size
GATES: tuple[dict[str, Any], ...] = (
    {"gate": "safe", **_COMPUTED},
    {"gate": "softplus", **_COMPUTED},
    {"gate": "log"},
    {"gate": "log", "g_dtype": "fp32"},
    {"gate": "log", "g_dtype": "fp32", "operator": "chunk_gated_delta_rule", "scalar_gate": True},
    {"gate": "softplus", "operator": "chunk_gated_delta_rule", "scalar_gate": True, **_COMPUTED},
)
# Prefill, decoding in chunks, training: whether a state is given, and whether one is returned
STATES: tuple[dict[str, Any], ...] = (
    {"initial_state": False, "final_state": True},
    {"initial_state": True, "final_state": True},
    {"initial_state": False, "final_state": False},
)
# Of recurrent operators: gates computed in the kernel, states that change in place or, for drafts of four tokens, are
# kept by token; so many sequences that a GPU is busy, or one
STEP_GATES: tuple[dict[str, Any], ...] = (
    {"operator": "fused_recurrent_kda", "gate": "safe", **_COMPUTED},
    {"operator": "fused_recurrent_kda", "gate": "softplus", **_COMPUTED},
    {"operator": "fused_recurrent_gated_delta_rule", "gate": "softplus", "scalar_gate": True, **_COMPUTED},
)
STEP_USES = ((1, "updates"), (4, "snapshots"))  # tokens, and what is written
STEP_SEQUENCES = (32, 1)
STEP_STATES = ("fp32", "bf16")


def list_packaged(devices: Iterable[Device], databases: Sequence[Database]) -> Iterator[KernelSpec]:
    """The kernels of a wheel for some devices, those of packaged plans first; one may come several times."""
    devices = tuple(devices)
    for device in devices:
        yield from _list_tuned(device, databases)
    for device in devices:
        dims = DIMS if device.arch in RUN else DIMS[:1]
        for problem in (*list_problems("fwd", dims), *list_problems("bwd", dims), *list_steps()):
            try:
                yield from list_calls(problem, device, databases)
            except InputError:  # the device has no room for it: such a call is refused too
                continue


def list_problems(direction: str, dims: Sequence[tuple[int, int]] = DIMS) -> Iterator[Problem]:
    """The problems whose defaults a wheel holds."""
    for dtype, width, (heads, tokens), gate, states in product(DTYPES, dims, SHAPES, GATES, STATES):
        K, V = width
        shape: dict[str, Any] = {"H": heads, "HV": heads, "K": K, "V": V, "tokens": tokens, "dtype": dtype}
        alone = Problem(**shape, **gate, **states, l2norm=True, direction=direction)
        yield alone
        if not alone.scalar_gate or dtype != DTYPES[0]:
            continue
        shared = [replace(alone, H=heads // GROUP)] if width == DIMS[0] else []
        yield from shared
        if (heads, tokens) == SHAPES[-1]:
            short = {"sequences": SEQUENCES, "longest": tokens // SEQUENCES}
            yield from (replace(problem, **short) for problem in (alone, *shared))


def list_steps() -> Iterator[Problem]:
    """The problems of recurrent operators whose defaults a wheel holds: all with states V first, some with K first."""
    K, V = DIMS[0]
    for gate, state, N, (T, written) in product(STEP_GATES, STEP_STATES, STEP_SEQUENCES, STEP_USES):
        shape: dict[str, Any] = {
            "H": 32,
            "HV": 32,
            "K": K,
            "V": V,
            "sequences": N,
            "tokens": N * T,
            "state_dtype": state,
        }
        shape |= {"options": ("has_g", "has_beta", "pooled", written), "l2norm": True, "initial_state": True}
        for state_v_first in (True, False) if written == "updates" else (True,):
            yield Problem(**shape, **gate, state_v_first=state_v_first, direction="step")


def _list_tuned(device: Device, databases: Sequence[Database]) -> Iterator[KernelSpec]:
    """The kernels of every plan that was tuned on a device, for each way to call it."""
    for database in databases:
        for file in database.files.values():
            if file.gpu.slug != device.slug:
                continue
            for key, entry in file.entries.items():
                posed = key.problem(file.operator, file.direction)
                for states in STATES if posed.chunked else ({},):
                    problem = replace(posed, **states)
                    yield from list_plan(parse_plan(entry.plan, problem, device), problem, device)
