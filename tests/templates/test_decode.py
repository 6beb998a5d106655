"""The kernel that decodes: equal to its twin on the CPU target, in poisoned memory, and lowered for GPUs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.decode_cases import LAYOUTS, Args
from support.launches import guarded
from support.oracle import F64
from support.step_cases import KINDS, OPERATORS, Shape, Types, draw_step, truth
from torch import Tensor

from kda_tl import templates
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import BETAS, DTYPES, GATES, Problem
from kda_tl.core.stage import Case, Operands
from kda_tl.database.gpus import known_device
from kda_tl.ops import recurrent_call
from kda_tl.ops.recurrent import pose
from kda_tl.ops.recurrent_entry import RECURRENT
from kda_tl.reference import relative_error
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.lower import generate_source

CPU = cpu_device()
STAGE = templates.load("decode_step")
GPUS = {"sm_90a": known_device("nvidia_h200"), "sm_80": known_device("nvidia_a100_sxm4_80gb")}
EXACT, FP32 = 1e-12, 1e-5
needs_compiler = pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")
pytestmark = pytest.mark.usefixtures("one_thread")


def draw(rng: random.Random, kind: str, **fixed: Any) -> tuple[str, Args]:
    """A call of a kind, of either operator."""
    name = rng.choice(tuple(OPERATORS))
    shape = {
        "gate": rng.choice(GATES if name == "kda" else GATES[:2]),
        "beta": rng.choice(BETAS),
        "l2norm": rng.random() < 0.5,
        "wide_beta": rng.random() < 0.3,
        "key_gate": name == "gdn" and rng.random() < 0.5,
        "value_gate": name == "gdn" and rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        **fixed.pop("shape", {}),
    }
    if not kind.endswith("tree") and rng.random() < 0.5:
        fixed = {"lengths": (2, 0, 1, 3), "padding": 2} | fixed
    return name, draw_step(rng, name, kind, shape=Shape(**shape), **fixed)


def problem_of(name: str, a: Args) -> Problem:
    operator = RECURRENT[OPERATORS[name].__name__]
    return pose(operator, operator.bind(**a))


def case_of(problem: Problem, device: Any) -> Case:
    plan = default_plan(problem, device, pipeline="decode")
    return Case(problem=problem.without_lengths(), device=device, BT=plan.BT, BC=plan.BC)


def operands_of(name: str, a: Args, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, int]]:
    """What a call launches the stage with on the CPU target, and its sizes."""
    seen: list[Any] = []

    class Program:
        @staticmethod
        def bind(sizes: dict[str, int], device: torch.device) -> Any:
            seen.append(sizes)
            return compute

    def compute(tensors: dict[str, Any]) -> Any:
        seen.append(tensors)
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(recurrent_call, "_bound", {})
        patch.setattr(recurrent_call, "load_program", lambda *args: (None, Program))
        with pytest.raises(NotImplementedError):
            OPERATORS[name](**a)
    sizes, tensors = seen
    return tensors, sizes


def widen(x: Any) -> Any:
    return x.to(F64) if isinstance(x, Tensor) and x.is_floating_point() else x


@needs_compiler
@LAYOUTS
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_judge(kind: str, state_v_first: bool, rng: random.Random, monkeypatch: Any) -> None:
    """In float64: what tuners and tests of kernels compare with."""
    for _ in range(4):
        name, a = draw(rng, kind, v_first=state_v_first, pad=rng.choice((-1, 0)), final=True)
        problem = problem_of(name, a)
        x, _ = operands_of(name, a, monkeypatch)
        numbers = {"scale": a["scale"] or 19**-0.5, "lower_bound": a.get("lower_bound", -5.0)}
        exact = {key: widen(value) for key, value in x.items()} | numbers
        made, expected = STAGE.reference(case_of(problem, CPU), Operands(**exact)), truth(a)
        pairs = {"o": expected.o, "ht": expected.final_state, "pool": expected.pool}
        pairs["snapshots"] = expected.intermediate_states
        for key, y in pairs.items():
            if y is not None:
                assert relative_error(made[key].flatten(), y.flatten()) < (1e-2 if "tree" in kind else EXACT), key


@needs_compiler
@pytest.mark.rest(draws=2)
@LAYOUTS
@pytest.mark.parametrize("config", range(2), ids=("default", "another"))
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_reference(
    kind: str, config: int, state_v_first: bool, rng: random.Random, monkeypatch: Any
) -> None:
    """Its outputs hold NaN before, states NaN around them; only what the twin writes changes."""
    dims = {"K": rng.choice((19, 32, 60)), "V": rng.choice((13, 40, 64))}
    name, a = draw(rng, kind, v_first=state_v_first, shape=dims)
    case = case_of(problem_of(name, a), CPU)
    others = [c for c in STAGE.candidates(case) if c != STAGE.default(case)]
    kernel = compile_stage(STAGE, case, rng.choice(others) if config and others else STAGE.default(case))
    x, sizes = operands_of(name, a, monkeypatch)
    x = {key: value.clone() if isinstance(value, Tensor) else value for key, value in x.items()}
    expected = STAGE.reference(case, Operands(**{key: widen(value) for key, value in x.items()}))
    held = {
        key: guarded(value, fill=False)
        for key, value in x.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    outputs = [None if y is None else guarded(y, fill=True) for y in kernel.allocate(sizes, torch.device("cpu"))]
    before = {key: memory.clone() for key, (_, memory) in held.items()}
    kernel.launch(
        x | {key: pair[0] for key, pair in held.items()},
        [None if pair is None else pair[0] for pair in outputs],
        torch.device("cpu"),
    )
    found = {key: pair[0] for key, pair in zip(STAGE.outputs, outputs, strict=True) if pair is not None}
    for pair in outputs:
        assert pair is None or (pair[1][:64].isnan().all() and pair[1][-64:].isnan().all())
    for key, (inside, memory) in held.items():
        if key in expected:
            may = expected[key] != widen(x[key])
            assert torch.equal(inside[~may], x[key][~may]), f"{key} was written where it should not be"
            found[key] = inside.masked_fill(~may, 0)
            expected[key] = expected[key].masked_fill(~may, 0)
        else:
            assert torch.equal(memory.nan_to_num(), before[key].nan_to_num()), f"{key} was written"
        assert memory[:64].isnan().all() and memory[-64:].isnan().all()
    for key, y in found.items():
        assert relative_error(y, expected[key]) < FP32, key
        assert not y[expected[key] == 0].any(), "zeros of null sequences and of padding"


# Other devices, without them

TARGETS = [f"decode_step {gpu} {layout}" for gpu in GPUS for layout in ("kv", "vk")] + ["decode_rows sm_90a vk"]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_size_has_a_config(gpu: str) -> None:
    for K in (1, 16, 33, 64, 100, 128, 230, 256):
        for V in (1, 16, 60, 128, 200, 256, 512):
            problem = Problem(H=1, HV=1, K=K, V=V, tokens=1, operator="fused_recurrent_kda", direction="step")
            case = case_of(problem, GPUS[gpu])
            assert STAGE.default(case).reject(case) is None, (K, V)
            assert list(STAGE.candidates(case)), (K, V)


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_lower(target: str, kind: str, rng: random.Random) -> None:
    """To CUDA, of drawn sizes, types, options and configs; decode_rows takes V-first states on boundaries."""
    name, gpu, layout = target.split()
    stage, problem = templates.load(name), draw_for(rng, name, kind, state_v_first=layout == "vk")
    case = case_of(problem, GPUS[gpu])
    configs = list(stage.candidates(case))
    assert configs, problem
    config = rng.choice((stage.default(case), rng.choice(configs)))
    source = generate_source(stage, case, config)
    assert "__global__" in source and f"{name}_kernel(" in source, (problem, config)


def draw_for(rng: random.Random, name: str, kind: str, state_v_first: bool) -> Problem:
    """A problem of sizes and types as a stage may take them."""
    narrow = name == "decode_rows"
    types = Types(io=rng.choice(DTYPES), gates=rng.choice(DTYPES), beta=rng.choice(DTYPES), state=rng.choice(DTYPES))
    dims = {"H": 1, "HV": 2, "K": rng.choice((16, 60, 64, 100, 128, 256)), "V": rng.choice((16, 60, 64, 128, 192))}
    if narrow:
        dims["K"] = rng.choice((64, 128, 256))
    problem = problem_of(*draw(rng, kind, v_first=state_v_first, shape=dims, types=types))
    unaligned = rng.random() < 0.3 and not narrow
    return Problem(**vars(problem) | {"options": (*problem.options, "unaligned")}) if unaligned else problem


def test_rows_are_taken_of_what_engines_have(rng: random.Random) -> None:
    """Or the test above would lower nothing."""
    stage = templates.load("decode_rows")
    for kind in KINDS:
        for io, state in (("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32")):
            dims, types = {"K": 128, "V": 128, "wide_beta": False}, Types(io=io, gates=io, beta=io, state=state)
            case = case_of(problem_of(*draw(rng, kind, v_first=True, shape=dims, types=types)), GPUS["sm_90a"])
            assert stage.default(case).reject(case) is None, (kind, io, state, stage.default(case).reject(case))


@pytest.mark.parametrize("K", (64, 128, 256))
def test_rows_of_fp32_lie_in_as_many_lanes_for_all_calls(K: int, rng: random.Random) -> None:
    """So their sums are taken in one order: tokens at once are calls of one token, to the bit."""
    stage, types = templates.load("decode_rows"), Types(io="bf16", gates="bf16", beta="bf16", state="fp32")
    shape = {"K": K, "V": 128, "H": 32, "HV": 32, "wide_beta": False}
    problem = problem_of(*draw(rng, "pool", v_first=True, shape=shape, types=types))
    found = set()
    for sequences in (1, 8, 32, 256):
        for longest in (1, 2, 16):
            posed = replace(problem, sequences=sequences, longest=longest, tokens=sequences * longest)
            case = case_of(posed, GPUS["sm_90a"])
            full = replace(case, problem=posed)
            config = stage.default(full)
            assert config.reject(case) is None
            found.add((config.lie(case).count, config.lie(case).channels))
    assert len(found) == 1, found


@pytest.mark.parametrize(
    ("written", "states"),
    [(("updates",), 3 + 3), (("updates", "each_token"), 3 + 6), (("snapshots",), 3 + 6), ((), 3)],
    ids=["in place", "a slot a token", "verify", "read only"],
)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_cost_of_a_step_is_its_tokens_and_the_states_that_it_moves(
    written: tuple[str, ...], states: int, state: str
) -> None:
    """Three sequences of two tokens, in a pool of which the rest does not move."""
    H, HV, K, V, N, tokens = 1, 2, 32, 64, 3, 6
    dims = {"H": H, "HV": HV, "K": K, "V": V, "tokens": tokens, "sequences": N}
    options = ("has_g", "has_beta", "pooled", *written)
    p = Problem(**dims, initial_state=True, state_dtype=state, options=options, direction="step")
    rows = {"q": H * K, "k": H * K, "v": HV * V, "g": HV * K, "beta": HV}
    sizes = {"tokens": tokens, "N": N, "pool_slots": 1000, "pool_row": HV * K * V, "slots_row": 1, "slots_step": 1}
    sizes |= {f"{name}_row": size for name, size in rows.items()} | {"bounds_step": 1}
    sizes |= {"buffer_rows": N, "snapshot_row": 2 * HV * K * V}
    found = STAGE.cost(case_of(p, CPU), sizes)
    moved = tokens * (sum(rows.values()) + HV * V) * 2 + (N + N + 1) * 4
    assert found.bytes == moved + states * HV * K * V * (4 if state == "fp32" else 2)
    assert found.flops == 7 * tokens * HV * K * V
