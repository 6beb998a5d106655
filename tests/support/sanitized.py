"""Launches every template at ragged sizes; run under compute-sanitizer by test_sanitizer.py.

    python -m support.sanitized SEED [STAGE ...]

Each stage that takes a problem runs with its default and two other configs, on inputs that the references of the
stages before it made.
Writes a line a launch to stderr, so that the last one names the culprit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from support.cases import SMALL, draw_backward, draw_call
from support.chunked import CHUNKED, STAGES
from support.launches import run_references, sizes_of

from kda_tl.core.device import cuda_device
from kda_tl.core.isolate import map_pool
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.kernel import Kernel

LENGTHS = (1, 0, 130, 64)
BF16 = replace(SMALL, HV=1, K=128, V=128, dtype="bf16", g_dtype="bf16", beta_dtype="bf16")
SOFTPLUS = replace(BF16, HV=2, gate="softplus", intermediate_states=True)
PROBLEMS = (BF16, SOFTPLUS, replace(SOFTPLUS, H=2, HV=4, K=60, V=100, state_v_first=True))
GATED_DELTA_RULE = replace(SOFTPLUS, operator="chunk_gated_delta_rule", scalar_gate=True)
WALKS = (
    *("fwd_gdn_segment", "fwd_gdn_merge", "fwd_gdn_resume"),
    *("bwd_gdn_segment", "bwd_gdn_merge", "bwd_gdn_resume", "bwd_gdn_states", "bwd_gdn_walk"),
)
PAIRS = ("fwd_gdn_pairs", "fwd_gdn_inverse")
SLOW = -12.0  # raw gate of softplus that forgets next to nothing


class Apart(NamedTuple):
    """Another way through some kernels."""

    problem: Problem
    lengths: tuple[int, ...]
    stages: tuple[str, ...]
    gate: float | None = None  # raw, of all tokens, if none is to be drawn
    num_sms: int | None = None  # that blocks are counted for, if not those of the GPU: then a block has many turns


APART = (
    Apart(
        GATED_DELTA_RULE,
        LENGTHS,
        (*PAIRS, "fwd_gdn_prep", "fwd_gdn_recurrence", "fwd_gdn_attend", "bwd_gdn_scan", "bwd_gdn_gradients", *WALKS),
    ),
    Apart(replace(GATED_DELTA_RULE, H=2, HV=8, l2norm=False), (200, 64, 0, 1, 130), PAIRS, num_sms=1),
    Apart(replace(GATED_DELTA_RULE, H=2, HV=8, intermediate_states=False), LENGTHS, ("fwd_gdn_attend",), num_sms=3),
    Apart(replace(GATED_DELTA_RULE, HV=1), (1300, 0, 70), WALKS),  # segments that find where they begin
    Apart(GATED_DELTA_RULE, (1300, 0, 70), WALKS, SLOW),  # and that are told: gates remember more chunks than that
    Apart(replace(SOFTPLUS, K=256), LENGTHS, ("fwd_prep", "fwd_recurrence")),
    Apart(replace(BF16, K=96, V=160), LENGTHS, ("fwd_state", "bwd_state")),
    Apart(BF16, (4000,), ("fwd_segment",)),  # segments of some chunks, of which gates leave nothing
)


class Launch(NamedTuple):
    """One launch to watch."""

    stage: Stage
    case: Case
    config: Config
    inputs: dict[str, Any]
    sizes: dict[str, int]


def words(config: Config) -> list[str]:
    """Choices of a config that are no numbers: each is another way through the kernel."""
    return [value for value in config.as_dict().values() if isinstance(value, str)]


def launches(
    problem: Problem,
    lengths: tuple[int, ...],
    seed: int,
    names: Collection[str],
    gate: float | None = None,
    num_sms: int | None = None,
) -> list[Launch]:
    """These stages, each of the first pipeline that has it, with three configs and inputs in float64."""
    device = cuda_device(0)
    device = replace(device, num_sms=num_sms or device.num_sms)
    forward = draw_call(problem, lengths, seed)
    if gate is not None:
        forward.x["g"].fill_(gate)
    elif not problem.bounded_gate:  # the last sequence decays further than anchors can follow
        forward.x["g"][-lengths[-1] :: 3] = 300.0
    plan, found = default_plan(problem, device), []
    seen: set[str] = set()
    for pipeline in sorted(CHUNKED.values(), key=lambda p: -p.segments):  # in few segments, none follows another
        if not {stage.name for stage in pipeline.stages} & set(names) - seen:  # references take seconds
            continue
        call = draw_backward(forward, seed) if pipeline.direction == "bwd" else forward
        case = Case(problem=call.problem, device=device, BT=plan.BT, BC=plan.BC)
        for stage, inputs in run_references(pipeline, case, call.tensors(plan.BT, pipeline.segments))[1]:
            if stage.name in seen or stage.name not in names:  # the backward runs stages of the forward too
                continue
            seen.add(stage.name)
            default = stage.default(case)
            if default.reject(case):
                continue
            others = [config for config in stage.candidates(case) if config != default]
            random.Random(f"{seed}/{stage.name}").shuffle(others)  # the same whichever stages run beside it
            others.sort(key=lambda config: words(config) == words(default))  # first what takes another way
            for config in (default, *others[:2]):
                found.append(Launch(stage, case, config, inputs, sizes_of(call, plan.BT, pipeline.segments)))
    return found


def on_gpu(kernel: Kernel, inputs: dict[str, Any]) -> dict[str, Any]:
    """A stage's inputs as its kernel reads them, each in an allocation of its own."""
    dtypes = {slot.name: slot.dtype for slot in kernel.slots}
    return {
        name: x.to(dtypes[name]).contiguous().cuda() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()
    }


def all_launches(seed: int, names: Collection[str] = ()) -> list[Launch]:
    """Those of these stages, or of all, on every problem."""
    wanted = names or tuple(STAGES)
    work = [launch for problem in PROBLEMS for launch in launches(problem, LENGTHS, seed, wanted)]
    for problem, lengths, stages, *others in APART:
        work += launches(problem, lengths, seed, [name for name in stages if name in wanted], *others)
    if missing := set(wanted) - {launch.stage.name for launch in work}:
        raise SystemExit(f"no problem here is one for {', '.join(sorted(missing))}")
    return work


def compile_all(seed: int) -> None:
    """In parallel, into TileLang's disk cache, and not under the sanitizer, where a pool takes longer than launches."""
    jobs = [(launch.stage.name, launch.case, launch.config) for launch in all_launches(seed)]
    for _ in map_pool("support.launches:compile_job", jobs, jobs=16, timeout_s=300):
        pass


BROKEN = "fwd_gate"


@dataclass(frozen=True)
class Short:
    """One element of memory that says it is a tensor."""

    shape: tuple[int, ...]
    memory: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "<f4", "data": (self.memory.data_ptr(), False), "version": 3}


def launch_broken(seed: int) -> None:
    """A kernel whose output has no room: what the sanitizer must report."""
    where = torch.device("cuda", 0)
    stage, case, config, inputs, sizes = all_launches(seed, [BROKEN])[0]
    kernel = compile_stage(stage, case, config)
    (output,) = kernel.allocate(sizes, where)
    assert output is not None and output.dtype == torch.float32
    short = torch.as_tensor(Short(tuple(output.shape), torch.empty(1, device=where)), device=where)
    kernel.launch(on_gpu(kernel, inputs), [short], where)
    torch.cuda.synchronize()


def main() -> None:
    """Launches one by one; compiles what the disk cache lacks."""
    if sys.argv[2:] == ["--broken"]:
        return launch_broken(int(sys.argv[1]))
    where = torch.device("cuda", 0)
    for stage, case, config, inputs, sizes in all_launches(int(sys.argv[1]), sys.argv[2:]):
        sys.stderr.write(f"{stage.name} {config} {case.problem.key}\n")
        kernel = compile_stage(stage, case, config)
        kernel(on_gpu(kernel, inputs), sizes, where)
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
