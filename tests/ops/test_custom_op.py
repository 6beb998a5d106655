"""``chunk_kda`` inside ``torch.compile``: one node, the same numbers, fake shapes that tell the truth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.cases import OPERATOR, SMALL, TENSORS, draw_backward, draw_call, forget_compilers, operator_arguments
from support.operator_cases import backward_of, differentiable

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import KdaTlWarning, UnsupportedError
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error

pytestmark = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before, one thread."""
    torch.compiler.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compiled(**arguments: Any) -> Any:
    # aot_eager traces, differentiates and checks strides as inductor does, without generating code
    return torch.compile(lambda: chunk_kda(**arguments), backend="aot_eager", fullgraph=True)()


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("lengths", ((70,), (20, 0, 1, 70)))
@pytest.mark.parametrize("final_state", (False, True))
def test_same_numbers_and_gradients(lengths: tuple[int, ...], final_state: bool, seed: int) -> None:
    problem = replace(SMALL, final_state=final_state, has_dt_bias=final_state)
    call = draw_backward(draw_call(problem, lengths, seed, varlen=len(lengths) > 1), seed)
    arguments = differentiable(call)
    expected = backward_of(call, differentiable(call))
    o, ht = compiled(**arguments, disable_recompute=final_state)
    eager, eager_ht = chunk_kda(**arguments)
    assert torch.equal(o, eager)
    do = call.x["do"].float().view(o.shape)
    if final_state:
        assert torch.equal(ht, eager_ht)
        torch.autograd.backward([o, ht], [do, call.x["dht"].float()])
    else:
        assert ht is None
        o.backward(do)
    for name in TENSORS:
        if arguments[name] is not None:
            assert torch.equal(arguments[name].grad, expected[name]), name


@pytest.mark.parametrize("varlen", (False, True))
def test_intermediate_states(varlen: bool, seed: int) -> None:
    arguments = operator_arguments(draw_call(SMALL, (70,), seed, varlen=varlen)) | {"return_intermediate_states": True}
    with torch.no_grad():
        for one, other in zip(compiled(**arguments), chunk_kda(**arguments), strict=True):
            assert torch.equal(one, other)


def test_old_name_of_the_state_layout(seed: int) -> None:
    arguments = operator_arguments(draw_call(replace(SMALL, state_v_first=True), (40,), seed, varlen=False))
    expected, _ = compiled(**arguments)
    arguments["transpose_state_layout"] = arguments.pop("state_v_first")
    assert torch.equal(compiled(**arguments)[0], expected)


def test_operators_keep_their_word(seed: int) -> None:
    """Schema, fake shapes, and what autograd records, as PyTorch checks them."""
    call = draw_backward(draw_call(SMALL, (40,), seed, varlen=False), seed)
    a = operator_arguments(call) | {"cu_seqlens_cpu": None, "return_intermediate_states": False, "chunk_size": None}
    arguments = tuple(a[name] for name in OPERATOR.schema)
    grad = tuple(differentiable(call).get(name, a[name]) for name in OPERATOR.schema)
    torch.library.opcheck(torch.ops.kda_tl.chunk_kda, grad)
    do, dht = call.x["do"].float().view(a["v"].shape), call.x["dht"].float()
    torch.library.opcheck(torch.ops.kda_tl.chunk_kda_backward, (do, dht, *arguments))
    torch.library.opcheck(torch.ops.kda_tl.chunk_kda_backward, (do, None, *arguments))


def test_without_a_compiler(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_compilers(monkeypatch)
    arguments = differentiable(draw_call(SMALL, (20,), seed, varlen=False))
    with torch.no_grad(), pytest.warns(KdaTlWarning, match="slow here"):
        o, _ = compiled(**arguments)
        assert torch.equal(o, chunk_kda(**arguments)[0])
    torch.compiler.reset()
    with pytest.raises(UnsupportedError, match="install a compiler, or keep chunk_kda out"):
        compiled(**arguments)[0].sum().backward()


def test_no_tokens(seed: int) -> None:
    arguments = differentiable(draw_call(SMALL, (0, 0), seed))
    compiled(**arguments)[1].square().sum().backward()
    assert torch.equal(arguments["initial_state"].grad, 2 * arguments["initial_state"].detach())
    assert not arguments["A_log"].grad.any()


def test_autocast_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the kernels, and not the reference, whose products autocast would round."""
    arguments = operator_arguments(draw_call(SMALL, (40,), seed, varlen=False))
    expected = chunk_kda(**arguments)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunk_kda(**arguments)[0], expected)
    forget_compilers(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(KdaTlWarning):
        assert relative_error(chunk_kda(**arguments)[0], expected) < 1e-5


def test_autocast_casts_mixed_dtypes(seed: int) -> None:
    """As eager calls do."""
    arguments = operator_arguments(draw_call(SMALL, (40,), seed, varlen=False))
    arguments["q"] = arguments["q"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(**arguments)[0], chunk_kda(**arguments)[0])
