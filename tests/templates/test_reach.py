"""Where walks of segments begin: what bounds promise, how far they reach, and states that gates remember."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support.cases import Call, bounds_of, draw_backward, draw_call, draw_problem
from support.launches import run_references
from support.reach_stage import STAGE
from torch import Tensor

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.layout import make_layout
from kda_tl.core.stage import Case, Operands
from kda_tl.reference import relative_error
from kda_tl.runtime.compile import compile_stage
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.sm90 import (
    bwd_gdn_merge,
    bwd_gdn_segment,
    bwd_gdn_states,
    fwd_gdn_merge,
    fwd_gdn_pairs,
    fwd_gdn_segment,
)
from kda_tl.templates.sm90.reach import FAR, LEAST, VANISHED, count_reach

CPU = cpu_device()
EXACT = 1e-10  # of float64, over some hundred products
GDN: dict[str, Any] = {"operator": "chunk_gated_delta_rule", "scalar_gate": True, "rank": 1}
# How keys and steps are drawn: fields of the problem, the norm of keys, the largest step; "plain" steps are drawn
KEYS = {
    "normalised": ({"l2norm": True, "beta": "sigmoid"}, 1.0, 1.0),
    "normalised, steps up to 2": ({"l2norm": True, "beta": "sigmoid2"}, 1.0, 2.0),
    "of length 1, steps up to 2": ({"l2norm": False, "beta": "plain"}, 1.0, 2.0),
    "long": ({"l2norm": False, "beta": "plain"}, 1.7, 2.0),
}
# What stages find between segments
BETWEEN = {"bwd_gdn_states": ("ends",)} | {
    module.STAGE.name: tuple(module.STAGE.outputs)
    for module in (fwd_gdn_segment, fwd_gdn_merge, bwd_gdn_segment, bwd_gdn_merge)
}
pytestmark = pytest.mark.usefixtures("one_thread")


def draw_steps(keys: str, lengths: Sequence[int], seed: int, rate: float, **fields: Any) -> Call:
    """A call without values whose state is square, with keys of a kind and about so many nats a token to forget."""
    changes, norm, most = KEYS[keys]
    rng, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    fixed = {"gate": "log", "H": 1, "HV": 2, "K": 16, "V": 16, "initial_state": True, "final_state": True, **GDN}
    problem = draw_problem(random.Random(seed), **fixed, **changes, **fields)
    given = {"g": -2 * rate * torch.rand(tokens, 2, 1, generator=rng, dtype=torch.float64)}
    if changes["beta"] == "plain":
        k = torch.randn(tokens, 1, 16, generator=rng, dtype=torch.float64)
        given["k"] = norm * k / k.norm(dim=-1, keepdim=True)
        given["beta"] = most * torch.rand(tokens, 2, generator=rng, dtype=torch.float64)
    call = draw_call(problem, lengths, seed, **given)
    return Call(call.problem, call.bounds, call.x | {"v": torch.zeros_like(call.x["v"])})


def transitions(call: Call, BT: int) -> Tensor:
    """What each chunk makes of the state before it, by the recurrence from unit states: [NT, HV, K, K]."""
    rows = make_layout(call.bounds, BT, torch.device("cpu")).tables["chunk_tokens"].tolist()
    unit = torch.eye(call.problem.K, dtype=torch.float64).expand(1, call.problem.HV, -1, -1)
    found = [call.scan(start, start + count, unit)[1][0] for start, count in rows]
    return torch.stack(found).mT if call.problem.state_v_first else torch.stack(found)


def bounds_by_reference(call: Call, BT: int) -> Tensor:
    """The bounds of fwd_gdn_pairs' reference: [NT, HV]."""
    return fwd_gdn_pairs.STAGE.reference(call.case(CPU, BT, 16), Operands(**call.tensors(BT)))["bounds"]


def norms_of(matrices: Tensor) -> Tensor:
    """The largest factor by which each makes a vector longer, as its log2."""
    return torch.linalg.matrix_norm(matrices, 2).log2()


# What a chunk does to a state


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("rate", (0.0, 0.01, 1.0))
def test_bounds_bound_what_a_chunk_does(keys: str, rate: float, seed: int) -> None:
    """Of whole chunks, and of shorter ones; of a single token they are what it does, not more."""
    call = draw_steps(keys, (64 * 3, 17, 0, 1, 1, 1, 64), seed, rate)
    bounds, norms = bounds_by_reference(call, 64), norms_of(transitions(call, 64))
    assert bounds.shape == norms.shape == (8, 2)
    assert (norms < bounds + EXACT).all(), (norms - bounds).max()
    assert (norms - bounds)[4:7].abs().max() < EXACT
    assert rate > 0 or (bounds.max() > 1 if keys == "long" else bounds.abs().max() < EXACT), "long keys alone grow"


def test_bounds_are_reached_where_keys_are_parallel(seed: int) -> None:
    """Every token of a chunk makes the same vector longer: a bound that leaves a token out is too low."""
    call = draw_steps("long", (64, 40), seed, 0.1)
    k, beta = call.x["k"][:1].expand_as(call.x["k"]), torch.full_like(call.x["beta"], 1.5)
    call = Call(call.problem, call.bounds, call.x | {"k": k, "beta": beta})
    bounds, norms = bounds_by_reference(call, 64), norms_of(transitions(call, 64))
    assert bounds.min() > 40 and (norms - bounds).abs().max() < EXACT


# How many chunks a walk takes before what it is asked for


def needed(bounds: Sequence[float]) -> int:
    """The fewest of the first chunks whose bounds come to -64 or less; all if none do."""
    sums = accumulate(max(bound, -128.0) for bound in bounds)
    return next((n for n, total in enumerate(sums, 1) if total <= -64.0), len(bounds))


def test_limits_are_what_the_text_says() -> None:
    assert (VANISHED, LEAST, FAR) == (-64.0, -128.0, 16)


# Bounds of heads that forget nothing, soon, just in time, at once, or grow at times; in the first and the second half
RANGES = (
    *((r, r) for r in ((-0.25, 0.0), (-9.0, -3.0), (-4.0, -4.0), (-400.0, -60.0), (-8.0, 3.0))),
    *(((-30.0, -20.0), (-0.25, 0.0)), ((-0.25, 0.0), (-6.0, -5.0)), ((1e30, 1e30), (-1e30, -1e30))),
)


def draw_bounds(rng: random.Random, NT: int) -> Tensor:
    """A head of each kind, in any order: [NT, 8]. In quarters, whose sums are exact."""
    heads = [[halves[2 * t >= NT] for t in range(NT)] for halves in rng.sample(RANGES, len(RANGES))]
    columns = [[max(low, min(high, round(4 * rng.uniform(low, high)) / 4)) for low, high in head] for head in heads]
    return torch.tensor(columns, dtype=torch.float32).reshape(len(RANGES), NT).T.contiguous()


def test_reach_is_counted(seed: int) -> None:
    rng = random.Random(seed)
    assert count_reach([]) == 0 and count_reach([-64.0, 1.0]) == 1 and count_reach([-63.75, 0.0]) == 2
    assert count_reach([-32.0, -31.75, 0.25, -0.5, -9.0]) == 4
    assert count_reach([-1e30, 200.0]) == 1 and count_reach([1e30, -1e30]) == 2
    for NT in range(40):
        for column in draw_bounds(rng, NT).T.tolist():
            assert count_reach(column) == needed(column), column


@pytest.mark.parametrize(("keys", "rate"), [(keys, 2.0 if keys == "long" else 0.3) for keys in KEYS])
def test_nothing_is_left_of_what_lies_further(keys: str, rate: float, seed: int) -> None:
    """Of states less than 2^-60 before the chunks that a walk takes, and of gradients less than that after them.

    With a chunk less the bounds would say more than 2^-64, so no walk is longer than they ask for.
    """
    call = draw_steps(keys, (16 * 40,), seed, rate)
    bounds, steps = bounds_by_reference(call, 16), transitions(call, 16)
    checked = 0
    for i_h in range(2):
        for edge in range(41):
            for order in (range(edge - 1, -1, -1), range(edge, 40)):
                column = [float(bounds[t, i_h]) for t in order]
                reach = count_reach(column)
                assert reach == 0 or sum(column[: reach - 1]) > -64.0
                if reach == len(column):
                    continue
                left = torch.eye(16, dtype=torch.float64)
                for t in sorted(order[:reach]):
                    left = steps[t, i_h] @ left
                assert norms_of(left) < -60.0, f"{reach} chunks before or after {edge}"
                checked += reach > 1
    assert checked > 20, "some walks take chunks and leave others"


@pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")
@pytest.mark.parametrize("segments", (1, 2, 4, 8, 16))
def test_kernels_find_where_walks_begin(segments: int, seed: int) -> None:
    """The macros, run on the CPU, against what they are to find, segment by segment."""
    rng = random.Random(seed)
    problem = draw_problem(rng, H=1, HV=len(RANGES), **GDN)
    kernel = compile_stage(STAGE, Case(problem=problem, device=CPU, BT=64, BC=16), STAGE.default(None))
    cases = [(64 * 40,), (64 * 34,), (64 * 33 + 1, 64 * 17, 64 * 18), (0, 64 * 30, 0, 5, 64 * 20 + 3, 1)]
    seen: set[str] = set()
    for lengths in cases * 3:
        tables, sizes = make_layout(bounds_of(lengths), 64, torch.device("cpu"), segments)
        bounds = draw_bounds(rng, sizes["NT"])
        forwards, told, backwards, far = kernel({"bounds": bounds, **tables}, sizes, torch.device("cpu"))
        chunk_tokens = tables["chunk_tokens"].tolist()
        for i_h in range(problem.HV):
            column, reaches = bounds[:, i_h].tolist(), []
            rows = zip(tables["segments"].tolist(), tables["segment_sequences"].tolist(), strict=True)
            for i_s, ((first, count, _, _), (n, begin, end)) in enumerate(rows):
                begun, cuts, last = tables["seq_segments"][n].tolist()
                reach, later = needed(column[begin:first][::-1]), column[first + count : end]
                for found, known in ((forwards, False), (told, True)):
                    edge = (begun + cuts if i_s == last else i_s) - 1 if known and reach > FAR else -1
                    passed = 0 if edge >= 0 else reach
                    numbers = found[i_s, i_h].tolist()
                    assert numbers[:3] == [first - passed, count + passed, passed], lengths
                    if count:
                        of_tokens = [chunk_tokens[first - passed][0], sum(chunk_tokens[first + count - 1])]
                        assert numbers[3:5] == of_tokens, lengths
                    alone = edge < 0 and first - passed == begin
                    assert numbers[5:] == [n if alone else -1, edge], "what it begins with"
                    seen |= {"found"} if passed and not alone else set()
                    seen |= {"told"} if edge >= 0 else set()
                reaches.append((reach, min(needed(later), FAR + 1)))
                assert backwards[i_s, i_h].tolist() == [reaches[-1][1], reaches[-1][1] == len(later)], lengths
                seen |= {"far" if reaches[-1][1] > FAR else "near"} if later else set()
            for n, (begun, cuts, last) in enumerate(tables["seq_segments"].tolist()):
                back = [reach for _, reach in reaches[begun : begun + cuts]]
                expected = next((m for m, reach in enumerate(back) if reach > FAR), cuts)
                both = [any(reaches[i_s][0] > FAR for i_s in (*range(begun, begun + cuts), last)), expected < cuts]
                assert far[n, i_h].tolist() == [expected, *both], lengths
                seen |= {"between"} if 0 < expected < cuts else set()
                seen |= {"one way"} if both[0] != both[1] else set()
    assert seen >= ({"far", "near", "found", "told"} if segments > 1 else set())
    assert "between" in seen or segments < 4
    assert "one way" in seen or segments != 2, "both directions are judged, each by its own chunks"


# States, and gradients of states, between segments


def states_between(call: Call, edges: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """States and their gradients [HV, V, K] at some tokens of each sequence, by autograd of the recurrence."""
    p, found = call.problem, ([], [])
    for n, (first, end) in enumerate(pairwise(call.bounds)):
        state = torch.zeros(1, p.HV, *((p.V, p.K) if p.state_v_first else (p.K, p.V)), dtype=torch.float64)
        state = state if call.x["h0"] is None else call.x["h0"][n : n + 1]
        states: list[Tensor] = []
        loss = torch.zeros((), dtype=torch.float64)
        for start, stop in pairwise([first, *edges[n], end]):
            out, state = call.scan(start, stop, state)
            loss = loss + (out[0] * call.x["do"][start:stop]).sum()
            if stop < end:
                state = state.detach().requires_grad_() if not states else state
                states.append(state)
        if call.x["dht"] is not None:
            loss = loss + (state[0] * call.x["dht"][n]).sum()
        grads = torch.autograd.grad(loss, states) if states else ()
        for kept, of_sequence in zip(found, (states, grads), strict=True):
            kept += [(x[0] if p.state_v_first else x[0].mT).detach() for x in of_sequence]
    return found


# Of each head: nats a token in the first and in the second half of a sequence
PACES = ((0.001, 0.001), (3.0, 3.0), (3.0, 0.001), (0.001, 3.0))


@pytest.mark.parametrize("final_state", (False, True))
@pytest.mark.parametrize("segments", (2, 4))
def test_ends_are_gradients_where_gates_remember(segments: int, final_state: bool, seed: int) -> None:
    """From the first segment on that needs them to the last; zero before it, and of heads that forget in time."""
    BT, lengths = 16, (16 * 48, 0, 1, 16 * 20 + 5)
    problem = draw_problem(
        random.Random(seed), gate="log", H=2, HV=4, K=24, V=16, final_state=final_state, l2norm=True, **GDN
    )
    paces = torch.tensor(PACES, dtype=torch.float64)
    half = torch.cat([torch.arange(length) >= length // 2 for length in lengths]).long()
    g = -paces.T[half][..., None]
    call = draw_backward(draw_call(problem, lengths, seed, g=g), seed)
    tensors = call.tensors(BT, segments)
    _, records = run_references(PIPELINES[f"gdn_walk_segments_{segments}"], call.case(CPU, BT, 16), tensors)
    inputs = next(inputs for stage, inputs in records if stage is bwd_gdn_states.STAGE)
    ends = bwd_gdn_states.STAGE.reference(call.case(CPU, BT, 16), Operands(**inputs))["ends"]
    cuts = [row for row in tensors["segments"].tolist() if row[3] < 0]
    assert len(ends) == len(cuts) == {2: 1, 4: 3}[segments]
    owners = tensors["segment_sequences"].tolist()
    edges: list[list[int]] = [[] for _ in lengths]
    for (first, count, _, _), (n, _, _) in zip(cuts, owners, strict=False):
        edges[n].append(int(tensors["chunk_tokens"][first + count, 0]))
    _, truth = states_between(call, edges)
    for i_h in range(4):
        known = False
        for i_s, (first, count, _, _) in enumerate(cuts):
            n, begin, end = owners[i_s]
            later = inputs["bounds"][first + count : end, i_h].tolist()
            known = (known and first > begin) or needed(later) > FAR
            if known:
                assert relative_error(ends[i_s, i_h, :, :24], truth[i_s][i_h]) < EXACT
            else:
                assert not ends[i_s, i_h].any()
            assert not ends[i_s, i_h, :, 24:].any(), "padding is zero"
    far = ends.flatten(2).any(2)
    assert far[:, 0].any() and not far[:, 1].any(), "heads that remember, and that forget"


@pytest.mark.parametrize("given_states", (False, True))
@pytest.mark.parametrize("segments", (8, 16))
def test_states_between_segments_are_found_where_gates_remember(segments: int, given_states: bool, seed: int) -> None:
    """And their gradients: of heads and sequences that have one which no walk finds, and zero of the others."""
    BT, lengths = 16, (16 * 48, 0, 1, 16 * 20 + 5)
    fixed: dict[str, Any] = {"gate": "log", "H": 2, "HV": 4, "K": 24, "V": 16, "l2norm": True, **GDN}
    fixed |= {"initial_state": given_states, "final_state": given_states}
    problem = draw_problem(random.Random(seed), **fixed)
    paces = torch.tensor(PACES, dtype=torch.float64)
    half = torch.cat([torch.arange(length) >= length // 2 for length in lengths]).long()
    g = -paces.T[half][..., None]
    call = draw_backward(draw_call(problem, lengths, seed, g=g), seed)
    tensors = call.tensors(BT, segments)
    _, records = run_references(PIPELINES[f"gdn_walk_segments_{segments}"], call.case(CPU, BT, 16), tensors)
    found: dict[str, Tensor] = {}
    for stage, inputs in records:
        if stage in (fwd_gdn_merge.STAGE, bwd_gdn_merge.STAGE):
            found |= stage.reference(call.case(CPU, BT, 16), Operands(**inputs))
            bounds = inputs["bounds"]
    cuts = [row for row in tensors["segments"].tolist() if row[3] < 0]
    assert len(found["edges"]) == len(found["ends"]) == len(cuts) == len(tensors["segments"]) - len(lengths)
    owners = tensors["segment_sequences"].tolist()
    edges: list[list[int]] = [[] for _ in lengths]
    for (first, count, _, _), (n, _, _) in zip(cuts, owners, strict=False):
        edges[n].append(int(tensors["chunk_tokens"][first + count, 0]))
    states, dstates = states_between(call, edges)
    for i_h in range(4):
        far: set[tuple[int, str]] = set()
        for (first, count, _, _), (n, begin, end) in zip(cuts, owners, strict=False):
            column, edge = bounds[:, i_h].tolist(), first + count
            far |= {(n, "edges")} if needed(column[begin:edge][::-1]) > FAR else set()
            far |= {(n, "ends")} if needed(column[edge:end]) > FAR else set()
        for name, truth in (("edges", states), ("ends", dstates)):
            for i_s, (of_segment, (n, _, _)) in enumerate(zip(found[name][:, i_h], owners, strict=False)):
                if (n, name) in far:
                    assert relative_error(of_segment[:, :24], truth[i_s][i_h]) < EXACT, name
                else:
                    assert not of_segment.any(), name
                assert not of_segment[:, 24:].any(), "padding is zero"
        known = {name for n, name in far if n == 0}
        assert i_h > 1 or known == ({"edges", "ends"}, set())[i_h], "heads that remember, and that forget"


@pytest.mark.parametrize("pipeline", ("gdn_walk", "gdn_walk_segments_8"))
def test_nothing_is_cut_and_nothing_is_between(pipeline: str, seed: int) -> None:
    """Of sequences that are short already: there is one row, for no segment, and it is zero."""
    problem = draw_problem(random.Random(seed), gate="log", K=16, V=16, **GDN)
    call = draw_backward(draw_call(problem, (3, *[16] * 9), seed), seed)
    case = call.case(CPU, 16, 16)
    _, records = run_references(PIPELINES[pipeline], case, call.tensors(16, PIPELINES[pipeline].segments))
    checked = 0
    for stage, inputs in records:
        found = stage.reference(case, Operands(**inputs)) if stage.name in BETWEEN else {}
        for name in BETWEEN.get(stage.name, ()):
            assert len(found[name]) == 1 and not found[name].any(), name
            checked += 1
    assert checked == (1 if pipeline == "gdn_walk" else 5)
