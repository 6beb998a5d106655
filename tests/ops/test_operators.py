"""Operators: everything that serves one derives from its declaration, whatever its arguments are."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace

import pytest
import torch
from support.cases import (
    OPERATOR,
    SMALL,
    draw_backward,
    draw_call,
    draw_lengths,
    draw_problem,
    operator_arguments,
    random_of_run,
)

from kda_tl.bench.fixtures import check_plan
from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.core.problem import Problem
from kda_tl.errors import InputError
from kda_tl.ops import load_all
from kda_tl.ops.entry import explain
from kda_tl.ops.gated_delta_rule import chunk_gated_delta_rule
from kda_tl.ops.operator import Operator
from kda_tl.reference import relative_error
from kda_tl.runtime.defaults import default_plan

CPU = cpu_device()
needs_compiler = pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")


def test_what_derives_from_the_signature() -> None:
    names = list(inspect.signature(OPERATOR.call).parameters)
    assert sorted(OPERATOR.arguments) == sorted(names) and OPERATOR.arguments[:8] == OPERATOR.tensors
    assert [name for name in names if name not in OPERATOR.schema] == ["disable_recompute", "transpose_state_layout"]
    a = OPERATOR.bind(1, 2, 3, 4, 5, A_log=6, chunk_size=16)
    assert OPERATOR.pick_operands(a) == (1, 2, 3, 4, 5, None, 6, None)
    assert OPERATOR.Arguments(*OPERATOR.pick_operands(a), *OPERATOR.pick_others(a)).chunk_size == 16
    assert not hasattr(a, "__dict__") and "chunk by chunk" in str(OPERATOR.call.__doc__)


def draw_served(operator: Operator, gate: str, wide: bool = False) -> Problem:
    """A problem of the run's seed that the operator serves; a wide one has as many value channels as FLA's layers."""
    fixed = {"K": 32, "V": random_of_run("wide").choice((300, 512))} if wide else {}
    fixed |= {"scalar_gate": operator.scalar_gate, "rank": 1, "intermediate_states": False, "operator": operator.name}
    return draw_problem(random_of_run(f"{operator.name} {gate}"), gate=gate, initial_state=True, **fixed)


@needs_compiler
@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("wide", (False, True))
@pytest.mark.parametrize("gate", ("softplus", "log"))
@pytest.mark.parametrize("name", load_all())
def test_both_passes_equal_the_recurrence(name: str, gate: str, wide: bool, seed: int) -> None:
    operator = load_all()[name]
    problem = draw_served(operator, gate, wide)
    for lengths, batch in (((70, 70), 2), (draw_lengths(random.Random(seed)), 1)):
        call = draw_backward(draw_call(problem, lengths, seed, varlen=batch == 1), seed)
        arguments = operator_arguments(call, batch)
        leaves = {n: x.requires_grad_() for n in operator.tensors if (x := arguments.get(n)) is not None}
        o, ht = operator.call(**arguments)
        results, seeds = [o], [call.x["do"].float().view(o.shape)]
        truth_o, truth_ht, _ = call.truth()
        assert relative_error(o, truth_o.view(o.shape)) < 5e-5
        assert (ht is not None) == problem.final_state
        if ht is not None:
            assert relative_error(ht, truth_ht) < 5e-5
            results, seeds = [o, ht], [*seeds, call.x["dht"].float()]
        found = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), seeds), strict=True))
        errors = call.gradient_errors({n: found.get(n) for n in operator.tensors}, 2e-4)
        assert max(errors.values()) < 2e-4, f"{errors} {call.problem.key} {call.bounds}"
        assert all(found[n].shape == leaves[n].shape for n in leaves)


@needs_compiler
@pytest.mark.rest
@pytest.mark.parametrize("name", load_all())
def test_what_is_kept_and_states_between_chunks(name: str, seed: int) -> None:
    """The same gradients from what the forward keeps, in a call that returns the states before its chunks too."""
    operator = load_all()[name]
    problem = replace(draw_served(operator, "softplus"), intermediate_states=True, initial_state=True)
    call = draw_backward(draw_call(problem, (70, 0, 20), seed, varlen=True), seed)
    arguments = operator_arguments(call) | {"chunk_size": 32, "return_intermediate_states": True}
    leaves = {n: x.requires_grad_() for n in operator.tensors if (x := arguments.get(n)) is not None}
    found = []
    for keep in (False, True):
        o, ht, h = operator.call(**arguments, disable_recompute=keep)
        held = sum(x is not None for x in o.grad_fn.saved_tensors)
        found.append((held, *torch.autograd.grad(o, list(leaves.values()), call.x["do"].float().view(o.shape))))
        truth_o, _, truth_h = call.truth(32)
        assert relative_error(o[0], truth_o) < 5e-5 and relative_error(h[0], truth_h) < 5e-5
    assert found[0][0] < found[1][0], "nothing more is kept"
    assert all(torch.equal(a, b) for a, b in zip(found[0][1:], found[1][1:], strict=True))


@needs_compiler
def test_gated_delta_rule_is_its_formula(seed: int) -> None:
    """The docstring's, token by token, of heads that share keys."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 40, heads, 32, generator=rng) for heads in (2, 2, 4))
    g, beta = -torch.rand(1, 40, 4, generator=rng), torch.rand(1, 40, 4, generator=rng)
    k = k / k.norm(dim=-1, keepdim=True)
    o, ht = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    for head in range(4):
        S = torch.zeros(32, 32, dtype=torch.float64)
        for t in range(40):
            q_t, k_t, v_t = (x[0, t].double() for x in (q[:, :, head // 2], k[:, :, head // 2], v[:, :, head]))
            step = float(beta[0, t, head]) * k_t[:, None]
            S = float(g[0, t, head].exp()) * (S - step * (k_t @ S)) + step * v_t
            assert relative_error(o[0, t, head], 32**-0.5 * (q_t @ S)) < 1e-4
        assert relative_error(ht[0, head], S) < 1e-5


@pytest.mark.rest(draws=1)
@needs_compiler
@pytest.mark.parametrize("name", load_all())
def test_everything_derived_knows_the_operator(name: str, seed: int) -> None:
    """A workload, its default plan and the tuner's check of it, explain, a traced call; kernels are those of above."""
    p = draw_served(load_all()[name], "softplus")
    shape = {"H": p.H, "HV": p.HV, "K": p.K, "V": p.V, "beta": p.beta, "state_v_first": p.state_v_first}
    workload = Workload(
        name="any", lengths=(20, 0, 70), dtype="fp32", gate="softplus", initial_state=True, operator=name, **shape
    )
    operator, x = workload.declaration, workload.inputs("cpu", seed)
    for each in (workload, replace(workload, direction="bwd")):
        assert check_plan(default_plan(each.problem(), CPU), each, CPU, seed=seed) < 2e-4
    assert explain(**x, operator=name).plan == default_plan(workload.problem(), CPU)
    compiled = torch.compile(lambda: operator.call(**x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled()[0], operator.call(**x)[0])


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("name", load_all())
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("T", (0, 20))
def test_initial_state_of_any_float_dtype(name: str, T: int, dtype: torch.dtype, seed: int) -> None:
    operator = load_all()[name]
    problem = replace(SMALL, gate="log", has_A_log=False, has_dt_bias=False, operator=name)
    call = draw_call(replace(problem, scalar_gate=operator.scalar_gate), (T,), seed, varlen=False)
    arguments = operator_arguments(call)
    short = arguments["initial_state"].to(dtype).requires_grad_()
    wide = short.detach().float().requires_grad_()
    grads = []
    for state in (short, wide):
        o, ht = operator.call(**arguments | {"initial_state": state})
        assert ht.dtype == torch.float32
        grads.append(torch.autograd.grad(o.sum() + ht.square().sum(), state)[0])
    assert grads[0].dtype == dtype and torch.equal(grads[0], grads[1].to(dtype))


def test_what_an_operator_lacks() -> None:
    with pytest.raises(InputError, match="chunk_gated_delta_rule has no safe gate: choose log or softplus"):
        Workload(name="any", T=20, H=1, dtype="fp32", operator="chunk_gated_delta_rule")
    with pytest.raises(TypeError, match="unexpected keyword argument 'lower_bound'"):
        load_all()["chunk_gated_delta_rule"].bind(1, 2, 3, 4, 5, lower_bound=-5.0)
    with pytest.raises(InputError, match="there is no operator 'chunk_kdb': choose one of chunk_gated_delta_rule, ch"):
        Workload(name="x", T=20, H=1, operator="chunk_kdb")
