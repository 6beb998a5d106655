"""Operators: everything that serves one derives from its declaration, whatever its arguments are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cases import OPERATOR

from kda_tl.bench.fixtures import check_plan
from kda_tl.bench.workloads import Workload, draw_gradients
from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError
from kda_tl.ops.delta_rule import declare
from kda_tl.ops.entry import explain, publish
from kda_tl.ops.operator import OPERATORS, FlaEntry
from kda_tl.reference import gradient_name, recurrent_gradients, relative_error
from kda_tl.runtime.dispatch import default_plan

CPU = cpu_device()
Tensor = torch.Tensor


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """An operator with one gate a head, its arguments in another order, and none of a bounded gate."""

    @publish(functools.partial(declare, fla=FlaEntry(module="fla.ops.other"), scalar_gate=True))
    def other_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        g: Tensor,
        scale: float | None = None,
        output_final_state: bool = False,
        initial_state: Tensor | None = None,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_size: int | None = None,
        transpose_state_layout: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Another one."""
        raise NotImplementedError

    yield "other_rule"
    del OPERATORS["other_rule"]


def test_what_derives_from_the_signature() -> None:
    names = list(inspect.signature(OPERATOR.call).parameters)
    assert sorted(OPERATOR.arguments) == sorted(names) and OPERATOR.arguments[:8] == OPERATOR.tensors
    assert [name for name in names if name not in OPERATOR.schema] == ["disable_recompute", "transpose_state_layout"]
    a = OPERATOR.bind(1, 2, 3, 4, 5, A_log=6, chunk_size=16)
    assert OPERATOR.pick_operands(a) == (1, 2, 3, 4, 5, None, 6, None)
    assert OPERATOR.Arguments(*OPERATOR.pick_operands(a), *OPERATOR.pick_others(a)).chunk_size == 16
    assert not hasattr(a, "__dict__") and "chunk by chunk" in str(OPERATOR.call.__doc__)


@pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++")
@pytest.mark.parametrize("gate", ["softplus", "log"])
def test_another_operator_is_served(other: str, gate: str, seed: int) -> None:
    shape = {"H": 1, "HV": 2, "K": 32, "V": 16, "lengths": (20, 0, 70), "initial_state": True, "state_v_first": True}
    workload = Workload(name="other", dtype="fp32", gate=gate, operator=other, direction="bwd", **shape)
    operator, x = workload.declaration, workload.inputs("cpu", seed)
    leaves = {name: x[name].requires_grad_() for name in operator.tensors if name in x}
    o, ht = operator.call(**x)
    seeds = draw_gradients(o, ht, seed)
    found = torch.autograd.grad((o, ht), list(leaves.values()), seeds)
    truth = recurrent_gradients(operator.recurrence(operator.bind(**x)), *seeds)
    for name, gradient in zip(leaves, found, strict=True):
        assert relative_error(gradient, truth[gradient_name(name)].view(gradient.shape)) < 2e-5, name
    compiled = torch.compile(lambda: operator.call(**x), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled()[0], o)
    for each in (workload, replace(workload, direction="fwd")):
        plan = default_plan(each.problem(), CPU)
        assert check_plan(plan, each, CPU, seed=seed) < 2e-4
    assert explain(**x, operator=other).plan == plan


def test_what_an_operator_lacks(other: str) -> None:
    workload = Workload(name="other", T=20, H=1, dtype="fp32", operator=other)
    with pytest.raises(InputError, match="other_rule has no safe gate"):
        workload.inputs("cpu")
    with pytest.raises(InputError, match="there is no operator 'chunk_kdb': choose one of chunk_kda"):
        Workload(name="x", T=20, H=1, operator="chunk_kdb")
