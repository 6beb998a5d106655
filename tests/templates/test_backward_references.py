"""The backward's references: composed, they are autograd through the recurrence, in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.cases import F64, Call, draw_backward, draw_call, draw_extreme, draw_lengths, draw_problem
from support.launches import run_references, sizes_of

from kda_tl.core.device import cpu_device
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import BETAS, GATES, Problem
from kda_tl.core.stage import BT_CHOICES, Case, Operands, Stage, TensorSpec, static_sizes
from kda_tl.reference import relative_error
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.portable import bwd_gate, bwd_intra, bwd_output, bwd_qk, bwd_reduce, bwd_state, bwd_wy
from kda_tl.templates.sm90 import (
    bwd_gdn_gradients,
    bwd_gdn_merge,
    bwd_gdn_resume,
    bwd_gdn_scan,
    bwd_gdn_segment,
    bwd_gdn_states,
    bwd_gdn_walk,
    bwd_gradients,
    bwd_heads,
    bwd_merge,
    bwd_resume,
    bwd_scan,
    bwd_segment,
    fwd_gdn_merge,
    fwd_gdn_segment,
)

CPU = cpu_device()
EXACT = 1e-9
RAGGED = (1, 15, 16, 63, 64, 65, 130)
SCALAR = {"scalar_gate": True, "rank": 1}  # what pipelines of Gated DeltaNet take
MODULES = (
    *(bwd_output, bwd_state, bwd_wy, bwd_intra, bwd_gate, bwd_qk, bwd_reduce),
    *(bwd_scan, bwd_gradients, bwd_heads),
    *(bwd_segment, bwd_merge, bwd_resume),
    *(bwd_gdn_scan, bwd_gdn_gradients, bwd_gdn_segment, bwd_gdn_merge, bwd_gdn_resume, bwd_gdn_states),
    *(fwd_gdn_segment, fwd_gdn_merge),
    bwd_gdn_walk,
)

gates = pytest.mark.parametrize("gate", GATES)
pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = [pipeline for pipeline in PIPELINES.values() if pipeline.direction == "bwd" and pipeline.segments == 1]
CUT = [pipeline for pipeline in PIPELINES.values() if pipeline.direction == "bwd" and pipeline.segments > 1]
BACKWARD = tuple(module.STAGE for module in MODULES)


def takes(pipeline: Pipeline, problem: Problem) -> bool:
    """Whether a pipeline's references are written for a problem: powers are a number a token."""
    return "powers" not in pipeline.residuals or (problem.scalar_gate and problem.rank == 1)


def assert_declared(call: Call, BT: int, segments: int, stage: Stage, inputs: dict[str, Any]) -> None:
    """Inputs and outputs exist and have the shapes that the stage declares; rows past the end and padding are zero."""
    case, tensors = call.case(CPU, BT, 16), call.tensors(BT, segments)
    p, count = call.problem, tensors["chunk_tokens"][:, 1]
    sizes = {**static_sizes(case), **sizes_of(call, BT, segments)}
    outputs = stage.reference(case, Operands(**inputs))
    past = (torch.arange(BT) >= count[:, None])[:, None, :].expand(-1, p.HV, -1)
    for name, text in {**stage.inputs, **stage.outputs}.items():
        spec, tensor = TensorSpec.parse(text), {**inputs, **outputs}.get(name)
        assert (tensor is not None) == spec.present(p), f"{stage.name}: {name} for {p.key}"
        if tensor is None:
            continue
        seen = tensor.mT if spec.dims[:2] == ("N", "HV") and p.state_v_first else tensor
        assert seen.shape == spec.shape(sizes), f"{stage.name}: {name}"
        if name not in outputs:
            continue
        assert tensor.dtype == F64
        if spec.dims[:3] == ("NT", "HV", "BT"):
            assert not tensor[past].any(), f"{stage.name} fills {name} past the end"
        for axis, dim in enumerate(spec.dims):
            if dim in ("KP", "VP", "GP"):
                padding = tensor.movedim(axis, 0)[getattr(p, dim[0]) :]
                assert not padding.any(), f"{stage.name} fills the padding of {name}"


def assert_gradients(
    call: Call,
    BT: int,
    tolerance: float = EXACT,
    cut: Sequence[Pipeline] = (),
    residues: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """By every pipeline; of those that cut, which differ in the number of segments only, by these or by one.

    A gradient may also be off by its residue, in absolute terms: where its terms cancel to next to nothing.
    """
    p = call.problem
    where = f"{p.key} A_log={p.has_A_log} dt_bias={p.has_dt_bias} BT={BT} bounds={call.bounds}"
    truth = call.gradients()
    some = [pipeline for pipeline in CUT if takes(pipeline, p)]
    for pipeline in (*filter(lambda each: takes(each, p), WHOLE), *(cut or (some[p.tokens % len(some)],))):
        out, records = run_references(pipeline, call.case(CPU, BT, 16), call.tensors(BT, pipeline.segments))
        assert out.keys() == truth.keys()
        for name, expected in truth.items():
            if expected is None:
                assert out[name] is None, f"{pipeline.name} {name}: {where}"
            else:
                error, off = relative_error(out[name], expected), (out[name] - expected).abs().max()
                right = error < tolerance or off < residues.get(name, 0.0)
                assert right, f"{name} of {pipeline.name} is off by {error:.1e}: {where}"
        for stage, inputs in records:
            if stage in BACKWARD:
                assert_declared(call, BT, pipeline.segments, stage, inputs)


@pytest.mark.rest(draws=5)
@gates
@pytest.mark.parametrize("T", RAGGED)
def test_gradients_ragged(gate: str, T: int, seed: int) -> None:
    rng = random.Random(seed)
    for n, BT in enumerate(BT_CHOICES):
        problem = draw_problem(rng, gate=gate, beta=BETAS[n], l2norm=n % 2 == 0)
        call = draw_call(problem, (T,) * rng.choice((1, 2)), seed + n, varlen=False)
        assert_gradients(draw_backward(call, seed), BT)


@gates
def test_gradients_varlen(gate: str, seed: int) -> None:
    rng = random.Random(seed)
    for n, BT in enumerate((*BT_CHOICES, *BT_CHOICES)):
        problem = draw_problem(rng, gate=gate, initial_state=n < 3, state_v_first=n % 2 == 0)
        assert_gradients(draw_backward(draw_call(problem, draw_lengths(rng), seed + n), seed), BT)


@pytest.mark.rest(draws=1)
@gates
@pytest.mark.parametrize("family", ({}, SCALAR), ids=("drawn", "scalar"))
def test_gradients_of_many_segments(gate: str, family: dict[str, Any], seed: int) -> None:
    """Sequences cut in three and more, in two and not at all; and the same from what a forward keeps."""
    rng = random.Random(seed)
    for n, BT in enumerate(BT_CHOICES):
        problem = draw_problem(rng, gate=gate, H=1, HV=2, K=16, V=32, initial_state=n < 2, final_state=n > 0, **family)
        call = draw_backward(draw_call(problem, (10 * BT - 3, 0, 1, 3 * BT + 1), seed + n), seed)
        cut = [pipeline for pipeline in CUT if takes(pipeline, problem)]
        assert cut == CUT or not family
        assert_gradients(call, BT, cut=cut)
        for pipeline in cut:
            tensors = call.tensors(BT, pipeline.segments)
            most = tensors["seq_segments"][:, 1].max()
            assert most > 1 if pipeline.segments > 2 else most == 1, "two products in a row"
            out, records = run_references(pipeline, call.case(CPU, BT, 16), tensors)
            makers = [stage for stage, _ in records if set(stage.outputs) & set(pipeline.residuals)]
            prepared: dict[str, Any] = {}
            for stage, inputs in records:
                prepared |= stage.reference(call.case(CPU, BT, 16), Operands(**inputs)) if stage in makers else {}
            passing = {"ready", "local"}  # flags are of one launch
            assert set(prepared) - passing == set(pipeline.residuals) - passing
            tensors |= {name: prepared[name] for name in pipeline.residuals}
            found, again = run_references(pipeline, call.case(CPU, BT, 16), tensors, given=pipeline.residuals)
            assert [stage for stage, _ in again] == [stage for stage, _ in records[len(makers) :]]
            for name, expected in out.items():
                assert found[name] is expected is None or torch.equal(found[name], expected), name


@pytest.mark.rest(draws=9)
@gates
@pytest.mark.parametrize(("H", "HV"), ((1, 1), (1, 4), (2, 6)))
@pytest.mark.parametrize(("K", "V"), ((60, 100), (100, 60), (32, 256), (256, 32)))
def test_gradients_heads_and_dims(gate: str, H: int, HV: int, K: int, V: int, seed: int) -> None:
    rng = random.Random(seed)
    problem = draw_problem(rng, gate=gate, H=H, HV=HV, K=K, V=V)
    assert_gradients(draw_backward(draw_call(problem, (70, 0, 1), seed), seed), rng.choice(BT_CHOICES))


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("has_dt_bias", (False, True))
@pytest.mark.parametrize(("gate", "has_A_log"), (("softplus", True), ("safe", False), ("safe", True)))
def test_gradients_gate_parameters(gate: str, has_A_log: bool, has_dt_bias: bool, seed: int) -> None:
    rng = random.Random(seed)
    for BT in BT_CHOICES:
        problem = draw_problem(rng, gate=gate, has_A_log=has_A_log, has_dt_bias=has_dt_bias)
        assert_gradients(draw_backward(draw_call(problem, (100, 20), seed), seed), BT)


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("initial_state", (False, True))
@pytest.mark.parametrize("final_state", (False, True))
@pytest.mark.parametrize("state_v_first", (False, True))
def test_gradients_states(initial_state: bool, final_state: bool, state_v_first: bool, seed: int) -> None:
    rng = random.Random(seed)
    for BT in BT_CHOICES:
        problem = draw_problem(
            rng, initial_state=initial_state, final_state=final_state, state_v_first=state_v_first, K=32, V=60
        )
        assert_gradients(draw_backward(draw_call(problem, (33, 0, 1, 64), seed), seed), BT)


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("l2norm", (False, True))
@pytest.mark.parametrize("beta", BETAS)
def test_gradients_beta_and_norm(beta: str, l2norm: bool, seed: int) -> None:
    rng = random.Random(seed)
    for BT in BT_CHOICES:
        problem = draw_problem(rng, beta=beta, l2norm=l2norm)
        assert_gradients(draw_backward(draw_call(problem, (90, 7), seed), seed), BT)


@pytest.mark.parametrize("kind", [f"{gate} {how}" for gate in GATES for how in ("steep", "flat", "mixed", "wild")])
def test_gradients_at_the_limits(kind: str, seed: int) -> None:
    # up to 64 * 1.5e6 nats are summed: float64 holds such an exponent to 2^-53 of its size. Where all is forgotten,
    # 2^-53 is left of the gradient of a decay, whose terms are of size 1: times the decay in dA_log, e^A_log in dg
    residues = {"dA_log": 1.5e6 * 2.0**-53, "dg": 150 * 2.0**-53}
    assert_gradients(draw_backward(draw_extreme(kind, seed), seed), 64, tolerance=1e-7, residues=residues)


def test_cost_is_positive_and_scales() -> None:
    problem = draw_problem(random.Random(0), gate="safe", has_A_log=True, has_dt_bias=True, l2norm=True)
    case = Case(problem=problem, device=CPU, BT=64, BC=16)
    for module in MODULES:
        small, large = (module.cost(case, {"tokens": 64 * n, "NT": n, "N": 1, "NS": n, "NC": n // 2}) for n in (16, 32))
        assert 0 < small.bytes < large.bytes <= 2 * small.bytes, module.__name__
        assert 0 < small.flops < large.flops <= 2 * small.flops, module.__name__
