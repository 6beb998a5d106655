"""Recorded passes: the right kernels on the right memory, checked with host functions that run the references."""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import SMALL, bounds_of, draw_backward, draw_call, draw_lengths, draw_problem, family_of
from support.chunked import CHUNKED
from support.launches import run_references

from kda_tl.core.device import cpu_device
from kda_tl.core.layout import make_layout
from kda_tl.core.pipeline import RESULTS, Flow, Pipeline
from kda_tl.core.stage import Case, Operands, Stage
from kda_tl.errors import LaunchError
from kda_tl.runtime.ffi import Arguments, Headers, prepare_call, take_error
from kda_tl.runtime.kernel import Slot, slots_of
from kda_tl.runtime.replay import ALIGNMENT, Replay, place, trace
from kda_tl.templates.pipelines import PIPELINES

CPU, WHERE = cpu_device(), torch.device("cpu")
NUMPY = {torch.float32: np.float32, torch.int32: np.int32}
Function = Callable[[list[int], list[float]], None]


class HostFunction:
    """A host function in Python, as tilelang makes them. Its body gets data pointers and numbers."""

    def __init__(self, body: Function) -> None:
        import tvm_ffi.libinfo

        self.error = ""

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        def call(_self: int, block: int, count: int, _result: int) -> int:
            words = np.ctypeslib.as_array(ctypes.cast(block, ctypes.POINTER(ctypes.c_int64)), (count, 2))
            kinds = words[:, 0] & 0xFFFFFFFF
            data = [ctypes.c_int64.from_address(int(at)).value for at in words[kinds == 7, 1]]
            try:
                body(data, [float(x) for x in words[kinds == 3, 1].copy().view(np.float64)])
            except Exception as error:
                self._library.TVMFFIErrorSetRaisedFromCStr(b"ValueError", str(error).encode())
                return -1
            return 0

        self._library, self._call, handle = ctypes.PyDLL(tvm_ffi.libinfo.find_libtvm_ffi()), call, ctypes.c_void_p()
        self._library.TVMFFIFunctionCreate(None, call, None, ctypes.byref(handle))
        self._handle = handle.value

    def __chandle__(self) -> int | None:
        return self._handle


def at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory that somebody else owns."""
    pointer = ctypes.cast(address, ctypes.POINTER(np.ctypeslib.as_ctypes_type(NUMPY[dtype])))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape))


@dataclass(eq=False)
class FakeKernel:
    """A stage whose kernel is its reference. It spoils outputs first, and notes where they were."""

    stage: Stage
    case: Case
    sizes: dict[str, int]

    def __post_init__(self) -> None:
        self.slots = slots_of(self.stage, self.case)
        self.function = HostFunction(self.compute)

    def compute(self, addresses: list[int], numbers: list[float]) -> None:
        tensors = {
            slot.name: at(address, slot.shape(self.sizes), slot.dtype) if slot.present else None
            for slot, address in zip(self.slots, addresses, strict=True)
        }
        given: dict[str, Any] = {name: tensors[name] for name in self.stage.inputs}
        given = {name: x.clone() if x is not None else None for name, x in given.items()}
        added = {slot.name for slot in self.slots if slot.added}
        for name in self.stage.outputs:
            if tensors[name] is not None and name not in added:
                tensors[name].fill_(torch.nan)
        numbers_by_name = dict(zip(self.stage.scalars, numbers, strict=True))
        made = self.stage.reference(self.case, Operands(**given, **numbers_by_name))
        for name in self.stage.outputs:
            if tensors[name] is not None:
                tensors[name].copy_(made[name] + tensors[name] if name in added else made[name])


def make_replay(flow: Flow, kernels: dict[str, Any], sizes: dict[str, int], views: Any = None) -> Replay:
    return Replay(trace(flow, {name: kernel.slots for name, kernel in kernels.items()}, sizes), kernels, WHERE, views)


@pytest.mark.rest(draws=4)
@pytest.mark.parametrize("pipeline", CHUNKED.values(), ids=lambda p: p.name)
def test_replay_equals_the_pipeline(pipeline: Any, seed: int) -> None:
    """Whatever the sizes and the tensors that are absent: intermediates never land on one that is still needed."""
    rng = random.Random(seed)
    for n in range(3):
        problem, lengths = draw_problem(rng, rank=1), draw_lengths(rng)
        BT = rng.choice((16, 32, 64))
        calls = [draw_call(problem, lengths, seed + 2 * n + i) for i in range(2)]
        if pipeline.direction == "bwd":
            calls = [draw_backward(call, seed) for call in calls]
        layout = make_layout(bounds_of(lengths), BT, WHERE, pipeline.segments)
        sizes = layout.sizes
        case = calls[0].case(CPU, BT, 16)
        kernels: dict[str, Any] = {s.name: FakeKernel(s, case, sizes) for s in pipeline.stages}
        unwanted = rng.choice(((), ("h",), ("dv", "dg")))
        wanted = [name for name in RESULTS[pipeline.direction] if name not in unwanted]
        views = {"o": (1, sizes["tokens"], problem.HV, problem.V)} if pipeline.direction == "fwd" else {}
        play = make_replay(pipeline.flow(case.problem, wanted), kernels, sizes, views)
        for scale, call in zip((0.5, 2.0), calls, strict=True):
            x = {key: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for key, v in call.x.items()}
            x = {**x, **layout.tables, "scale": scale}
            expected, _ = run_references(pipeline, case, x)
            results = play(x)
            assert set(results) == set(wanted)
            for name in wanted:
                if (truth := expected[name]) is None:
                    assert results[name] is None
                else:
                    seen = truth.view(views.get(name, truth.shape))
                    torch.testing.assert_close(results[name], seen, rtol=0, atol=0, msg=f"{name} {problem.key}")


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("backward", [p for p in PIPELINES.values() if p.direction == "bwd"], ids=lambda p: p.name)
def test_residuals_spare_the_backward_its_first_stages(backward: Pipeline, seed: int) -> None:
    """From a forward's replay into the backward's: the bits of a backward that makes them itself."""
    rng = random.Random(seed)
    staged, residuals = backward.name == "staged_backward", backward.residuals
    makers = {stage.name for stage in backward.stages if set(stage.outputs) & set(residuals)}
    makes = [p for p in PIPELINES.values() if p.direction == "fwd" and makers <= {stage.name for stage in p.stages}]
    if "edges" in residuals:  # of segments, not of chunks
        makes = [p for p in makes if p.segments == backward.segments]
    assert [p for p in PIPELINES.values() if p.direction == "fwd" and backward.finds_residuals(p)] == makes
    forward = makes[0]
    for n in range(4 if staged else 2):
        problem = draw_problem(rng, **({} if staged else family_of(backward.name)))
        call = draw_backward(draw_call(problem, draw_lengths(rng), seed + n), seed)
        case = call.case(CPU, 32, 16)
        layout = make_layout(call.bounds, 32, WHERE, backward.segments)
        sizes = layout.sizes
        stages = (*forward.stages, *backward.stages)
        kernels: dict[str, Any] = {s.name: FakeKernel(s, case, sizes) for s in stages}
        x = {key: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for key, v in call.x.items()}
        x = {**x, **layout.tables}
        plain = make_replay(forward.flow(case.problem, ("o", "ht")), kernels, sizes)
        names = dict.fromkeys((*RESULTS["fwd"], *residuals))
        keep = make_replay(forward.flow(case.problem, tuple(names)), kernels, sizes)
        own = {name for name in ("bounds", "ready") if name in forward.stages[0].outputs} - {*residuals}
        _, bytes_left = place([4 * sizes["NT"] * case.problem.HV] * len(own), [(0, 0)] * len(own))
        assert keep.workspace_bytes < plain.workspace_bytes
        assert "edges" in residuals or keep.workspace_bytes == bytes_left, "all but a number a chunk and head is kept"
        expected, out = plain(x), keep(x)
        assert expected.keys() == {"o", "ht"} and out.keys() == names.keys()
        assert torch.equal(out["o"], expected["o"])
        whole, rest = backward.flow(case.problem), backward.flow(case.problem, given=residuals)
        assert makers == {stage.name for stage in whole.stages} - {stage.name for stage in rest.stages}
        own = {stage.name: kernels[stage.name] for stage in rest.stages}
        found = make_replay(rest, own, sizes)({**x, **out})
        for name, truth in make_replay(whole, kernels, sizes)(x).items():
            assert found[name] is truth is None or torch.equal(found[name], truth), name


def test_what_nobody_wants_dies_as_an_intermediate(seed: int) -> None:
    """States of chunks that a call does not return share the workspace, and those that it returns need none."""
    call = draw_call(draw_problem(random.Random(seed), K=64, V=64), (200,), seed)
    sizes, pipeline, case = make_layout(call.bounds, 64, WHERE).sizes, PIPELINES["staged"], call.case(CPU, 64, 16)
    kernels: dict[str, Any] = {s.name: FakeKernel(s, case, sizes) for s in pipeline.stages}
    plays = [make_replay(pipeline.flow(case.problem, names), kernels, sizes) for names in (("o",), ("o", "h"))]
    assert plays[0].workspace_bytes > plays[1].workspace_bytes > 0


def test_what_is_added_to_begins_as_zeros(seed: int) -> None:
    """Results, also those that are given, and intermediates, whatever was in their memory."""
    call = draw_call(draw_problem(random.Random(seed), final_state=True), (70, 5), seed)
    sizes, staged, case = make_layout(call.bounds, 32, WHERE).sizes, PIPELINES["staged"], call.case(CPU, 32, 16)
    stages = tuple(replace(stage, adds=dict.fromkeys(stage.outputs, "final_state")) for stage in staged.stages)
    kernels: dict[str, Any] = {s.name: FakeKernel(s, case, sizes) for s in stages}
    play = make_replay(replace(staged, stages=stages).flow(case.problem, ("o", "ht")), kernels, sizes)
    play._new_bytes = lambda size: torch.full(size, 255, dtype=torch.uint8)  # no number, in fp32
    x = {key: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for key, v in call.x.items()}
    x |= make_layout(call.bounds, 32, WHERE).tables
    expected, _ = run_references(staged, case, x)
    assert play.workspace_bytes
    for given in ({}, {name: torch.full(expected[name].shape, torch.nan) for name in ("o", "ht")}):
        for name, found in play({**x, **given}).items():
            assert found is given.get(name, found)
            torch.testing.assert_close(found, expected[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("results", "given", "shared"),
    [(("dv",), (), True), (("dv", "values"), (), False), (("dv",), ("values", "states", "ends"), False)],
)
def test_what_replaces_an_input_lies_in_its_place(
    results: tuple[str, ...], given: tuple[str, ...], shared: bool, seed: int
) -> None:
    """Unless that is wanted as well, or the caller's."""
    problem = replace(SMALL, operator="chunk_gated_delta_rule", scalar_gate=True, direction="bwd")
    case = draw_call(problem, (200,), seed).case(CPU, 64, 16)
    flow = PIPELINES["gdn_walk"].flow(problem, results, given)
    recording = trace(flow, {s.name: slots_of(s, case) for s in flow.stages}, make_layout((0, 200), 64, WHERE).sizes)
    name, tensors = recording.launches[-1]
    old, new = (tensors[n] for n, slot in enumerate(slots_of(flow.stages[-1], case)) if slot.name in ("values", "dv"))
    assert name == "bwd_gdn_walk" and (old is new) is shared and recording.results["dv"] is new


class Token:
    """Stands for a tensor in a pipeline."""


@pytest.mark.parametrize("pipeline", CHUNKED.values(), ids=lambda p: p.name)
@pytest.mark.parametrize("HV", (1, 2))
@pytest.mark.parametrize("resumed", (False, True))
def test_intermediates_die_after_their_last_stage(pipeline: Pipeline, HV: int, resumed: bool) -> None:
    """On the CPU, where stages run one by one, memory is free as soon as nothing needs it."""
    problem, given = replace(SMALL, HV=HV), pipeline.residuals if resumed else ()
    flow = pipeline.flow(problem, RESULTS[pipeline.direction], given)
    made: dict[str, weakref.ref[Token]] = {}
    held: list[tuple[Stage, set[str]]] = []  # by each stage that starts
    last: dict[str, int] = {}

    def launch(stage: Stage, inputs: dict[str, Any]) -> list[Token | None]:
        last.update(dict.fromkeys(inputs, len(held)))
        held.append((stage, {name for name, token in made.items() if token()}))
        outputs = {name: Token() for name in stage.outputs if stage.specs[name].present(problem)}
        assert not set(outputs) & set(made), "a name is one tensor"
        made.update({name: weakref.ref(token) for name, token in outputs.items()})
        return [outputs.get(name) for name in stage.outputs]

    names = {name for stage in flow.stages for name in (*stage.inputs, *stage.scalars)}
    results = flow.run(launch, dict.fromkeys(names - made.keys()))
    assert list(results) == list(RESULTS[pipeline.direction]) and [stage for stage, _ in held] == list(flow.stages)
    for number, (stage, alive) in enumerate(held):
        late = {name for name in alive - results.keys() if last.get(name, -1) < number}
        assert not late, f"{stage.name} starts while {late} are held"


def test_places_never_overlap(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        count = rng.randrange(0, 12)
        sizes = [rng.choice((0, 1, 255, 256, 257, rng.randrange(1, 10_000))) for _ in range(count)]
        births = [rng.randrange(6) for _ in range(count)]
        lives = [(born, born + rng.randrange(4)) for born in births]
        offsets, total = place(sizes, lives)
        for i in range(count):
            assert offsets[i] % ALIGNMENT == 0 and offsets[i] + sizes[i] <= total
            for j in range(i):
                together = lives[i][0] <= lives[j][1] and lives[j][0] <= lives[i][1]
                apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
                assert apart or not together or not sizes[i] or not sizes[j], (sizes, lives, offsets)
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        needed = [sum(s for s, (a, b) in zip(padded, lives, strict=True) if a <= t <= b) for t in range(10)]
        assert total >= max(needed) - ALIGNMENT, "more lives at once than fits"


def test_places_are_shared() -> None:
    assert place([512, 512, 512], [(0, 1), (1, 2), (2, 3)]) == ([0, 512, 0], 1024)
    assert place([], []) == ([], 0)


def test_a_refused_launch_says_why(seed: int) -> None:
    def refuse(addresses: list[int], numbers: list[float]) -> None:
        raise ValueError(f"no room for {len(addresses)} tensors and {numbers}")

    function = HostFunction(refuse)
    headers = Headers([((2, 3), torch.float32)], WHERE)
    arguments = Arguments([headers.address(0)], 2)
    arguments.numbers[:] = [0.5, -2.0]
    assert prepare_call(function, arguments)() != 0
    assert take_error() == "no room for 1 tensors and [0.5, -2.0]"
    assert take_error() == "no reason given"

    pipeline = PIPELINES["staged"]
    call = draw_call(draw_problem(random.Random(seed), rank=1), (70,), seed)
    layout = make_layout(call.bounds, 64, WHERE)
    sizes = layout.sizes
    kernels: dict[str, Any] = {s.name: FakeKernel(s, call.case(CPU, 64, 16), sizes) for s in pipeline.stages}
    kernels["fwd_wy"].function = HostFunction(refuse)
    play = make_replay(pipeline.flow(call.problem), kernels, sizes)
    x = {key: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for key, v in call.x.items()}
    with pytest.raises(LaunchError, match="fwd_wy was not launched: no room for 12 tensors"):
        play({**x, **layout.tables})


def test_threads_take_turns() -> None:
    """A replay's headers are shared: a call that begins while another launches must not see its tensors."""
    inside, may_end, seen = threading.Event(), threading.Event(), []

    def copy(addresses: list[int], _numbers: list[float]) -> None:
        source, target = (at(address, (1000,), torch.float32) for address in addresses)
        value = float(source[0])
        if value == 1.0:  # the first call waits in its kernel: without the lock the second runs through meanwhile
            inside.set()
            may_end.wait(0.5)
        seen.append(value)
        target.copy_(source)

    @dataclass(eq=False)
    class Copy:
        stage: Any
        slots = (
            Slot(name="x", written=False, present=True, dtype=torch.float32, dims=(1000,)),
            Slot(name="y", written=True, present=True, dtype=torch.float32, dims=(1000,)),
        )
        function = HostFunction(copy)

    stage = replace(PIPELINES["staged"].stages[0], name="copy", scalars=())
    kernels: dict[str, Any] = {"copy": Copy(stage)}
    play = make_replay(Flow((stage,), ((),), ("y",)), kernels, {})
    results: dict[float, torch.Tensor] = {}

    def work(value: float) -> None:
        results[value] = play({"x": torch.full((1000,), value)})["y"]

    first, second = (threading.Thread(target=work, args=(value,)) for value in (1.0, 2.0))
    first.start()
    assert inside.wait(10)
    second.start()
    second.join(0.2)
    assert second.is_alive() and seen == [], "the second waits for the first"
    may_end.set()
    first.join()
    second.join()
    assert seen == [1.0, 2.0] and all(bool((y == value).all()) for value, y in results.items())
