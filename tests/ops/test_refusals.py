"""What the operator refuses, each with a sentence that says what to do, and its signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.errors import InputError
from kda_tl.ops.entry import explain
from kda_tl.ops.kda import chunk_kda

pytestmark = pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++")


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of a softplus call of 2 sequences of 5 tokens, H=2, HV=4, K=8, V=6, and changes to them."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    return {
        "q": normal(2, 5, 2, 8),
        "k": normal(2, 5, 2, 8),
        "v": normal(2, 5, 4, 6),
        "g": normal(2, 5, 4, 8),
        "beta": normal(2, 5, 4),
        "use_gate_in_kernel": True,
        "A_log": normal(4),
        **changes,
    }


def packed(bounds: Any, **changes: Any) -> dict[str, Any]:
    tokens = {name: good()[name].flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    return good(**tokens, cu_seqlens=bounds, **changes)


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(*shape, **options)


I32 = {"dtype": torch.int32}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q rank": (good(q=zeros(2, 5, 16)), r"q must have 4 dimensions.*\[2, 5, 16\]"),
    "k rank": (good(k=zeros(1, 2, 5, 2, 8)), "k must have 4 dimensions"),
    "beta rank": (good(beta=zeros(2, 5, 4, 1)), r"beta must have 3 dimensions, \[B, T, HV\]"),
    "q integer": (good(q=zeros(2, 5, 2, 8, **I32)), "q must be bfloat16, float16 or float32"),
    "q float64": (good(q=zeros(2, 5, 2, 8, dtype=torch.float64)), "got torch.float64"),
    "g integer": (good(g=zeros(2, 5, 4, 8, **I32)), "g must be bfloat16, float16 or float32"),
    "beta bool": (good(beta=zeros(2, 5, 4, dtype=torch.bool)), "beta must be bfloat16"),
    "k dtype": (good(k=zeros(2, 5, 2, 8, dtype=torch.bfloat16)), "k must have the dtype of q"),
    "v dtype": (good(v=zeros(2, 5, 4, 6, dtype=torch.float16)), "v must have the dtype of q"),
    "q no tensor": (good(q=[[1.0]]), "q must be a torch.Tensor, got list"),
    "v None": (good(v=None), "v must be a torch.Tensor, got NoneType"),
    "beta number": (good(beta=1.0), "beta must be a torch.Tensor, got float"),
    "A_log no tensor": (good(A_log=[0.0] * 4), "A_log must be a torch.Tensor, got list"),
    "dt_bias no tensor": (good(dt_bias=0.5), "dt_bias must be a torch.Tensor, got float"),
    "initial_state no tensor": (good(initial_state=0), "initial_state must be a torch.Tensor, got int"),
    "cu_seqlens no tensor": (packed([0, 10]), "cu_seqlens must be a torch.Tensor, got list"),
    "cu_seqlens_cpu no tensor": (
        packed(torch.tensor([0, 10]), cu_seqlens_cpu=[0, 10]),
        "cu_seqlens_cpu must be a torch.Tensor, got list",
    ),
    "all on meta": (
        {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in good().items()},
        "on a CUDA device or the CPU, got meta",
    ),
    "k elsewhere": (good(k=zeros(2, 5, 2, 8, device="meta")), "k is on meta but q is on cpu"),
    "A_log elsewhere": (good(A_log=zeros(4, device="meta")), "A_log is on meta but q is on cpu"),
    "v elsewhere": (good(v=zeros(2, 5, 4, 6, device="meta")), "v is on meta but q is on cpu"),
    "g elsewhere": (good(g=zeros(2, 5, 4, 8, device="meta")), "g is on meta but q is on cpu"),
    "beta elsewhere": (good(beta=zeros(2, 5, 4, device="meta")), "beta is on meta but q is on cpu"),
    "dt_bias elsewhere": (good(dt_bias=zeros(32, device="meta")), "dt_bias is on meta but q is on cpu"),
    "initial_state elsewhere": (
        good(initial_state=zeros(2, 4, 8, 6, device="meta")),
        "initial_state is on meta but q is on cpu",
    ),
    "cu_seqlens elsewhere": (packed(zeros(2, device="meta", **I32)), "cu_seqlens is on meta but q is on cpu"),
    "heads": (
        good(q=zeros(2, 5, 3, 8), k=zeros(2, 5, 3, 8)),
        "HV=4 value heads cannot share H=3 query/key heads: make HV a multiple",
    ),
    "more query heads": (good(q=zeros(2, 5, 8, 8), k=zeros(2, 5, 8, 8)), "make HV a multiple of H"),
    "many heads": (
        good(**dict.fromkeys("qkvg", zeros(1, 1, 1 << 16, 1)), beta=zeros(1, 1, 1 << 16), A_log=zeros(1 << 16)),
        "H=65536 heads are not supported: pass 65535",
    ),
    "no heads": (good(q=zeros(2, 5, 0, 8), k=zeros(2, 5, 0, 8)), "H must be at least 1"),
    "no batch": (
        {name: x[:0] if name in ("q", "k", "v", "g", "beta") else x for name, x in good().items()},
        "at least one sequence",
    ),
    "K": (
        good(q=zeros(2, 5, 2, 257), k=zeros(2, 5, 2, 257), g=zeros(2, 5, 4, 257)),
        "K=257 is not supported: pass 256",
    ),
    "V": (good(v=zeros(2, 5, 4, 513)), "V=513 is not supported: pass 512"),
    "no K": (good(q=zeros(2, 5, 2, 0), k=zeros(2, 5, 2, 0), g=zeros(2, 5, 4, 0)), "K must be at least 1"),
    "k shape": (good(k=zeros(2, 5, 2, 7)), r"k must have the shape \[2, 5, 2, 8\], got \[2, 5, 2, 7\]"),
    "v tokens": (good(v=zeros(2, 4, 4, 6)), r"v must have the shape \[2, 5, 4, 6\]"),
    "g per key head": (good(g=zeros(2, 5, 2, 8)), r"g must have the shape \[2, 5, 4, 8\]"),
    "beta per key head": (good(beta=zeros(2, 5, 2)), r"beta must have the shape \[2, 5, 4\]"),
    "safe_gate": (good(safe_gate=True), "needs lower_bound, for example -5"),
    "lower_bound low": (good(safe_gate=True, lower_bound=-5.1), r"lower_bound must be in \[-5, 0\), got -5.1"),
    "lower_bound zero": (good(safe_gate=True, lower_bound=0), r"lower_bound must be in \[-5, 0\), got 0"),
    "lower_bound positive": (good(safe_gate=True, lower_bound=5.0), "lower_bound must be in"),
    "lower_bound NaN": (good(safe_gate=True, lower_bound=float("nan")), "lower_bound must be in"),
    "lower_bound text": (good(safe_gate=True, lower_bound="-5"), "lower_bound must be a number"),
    "A_log missing": (good(A_log=None), r"needs A_log of shape \[HV\], or a lower_bound"),
    "A_log shape": (good(A_log=zeros(2)), r"A_log must be a float tensor \[HV\] of 4 elements, got \[2\]"),
    "A_log integer": (good(A_log=zeros(4, **I32)), r"A_log must be a float tensor \[HV\]"),
    "dt_bias shape": (good(dt_bias=zeros(4)), r"dt_bias must be a float tensor \[HV \* K\] of 32 elements"),
    "dt_bias integer": (good(dt_bias=zeros(32, **I32)), r"dt_bias must be a float tensor \[HV \* K\]"),
    "initial_state layout": (
        good(initial_state=zeros(2, 4, 6, 8)),
        r"initial_state must be a float tensor \[N, HV, K, V\] = \[2, 4, 8, 6\]",
    ),
    "initial_state other layout": (
        good(initial_state=zeros(2, 4, 8, 6), state_v_first=True),
        r"\[N, HV, V, K\] = \[2, 4, 6, 8\]",
    ),
    "initial_state dtype": (good(initial_state=zeros(2, 4, 8, 6, **I32)), "initial_state must be a float tensor"),
    "initial_state batch": (good(initial_state=zeros(1, 4, 8, 6)), r"\[2, 4, 8, 6\], got torch.float32 \[1, 4, 8, 6\]"),
    "initial_state of packed": (
        packed(torch.tensor([0, 3, 4, 10]), initial_state=zeros(1, 4, 8, 6)),
        r"= \[3, 4, 8, 6\]",
    ),
    "cu_seqlens start": (packed(torch.tensor([1, 10])), "must start at 0 and end at T=10, got 1 and 10"),
    "cu_seqlens end": (packed(torch.tensor([0, 9])), "end at T=10, got 0 and 9"),
    "cu_seqlens order": (packed(torch.tensor([0, 6, 4, 10])), "must not decrease"),
    "cu_seqlens dtype": (packed(torch.tensor([0.0, 10.0])), "1-D int32 or int64"),
    "cu_seqlens short": (packed(torch.tensor([0, 10], dtype=torch.int16)), "1-D int32 or int64"),
    "cu_seqlens rank": (packed(torch.tensor([[0, 10]])), "1-D int32 or int64"),
    "cu_seqlens dtype beside a host copy": (
        packed(torch.tensor([0.0, 10.0]), cu_seqlens_cpu=torch.tensor([0, 10])),
        "1-D int32 or int64",
    ),
    "cu_seqlens_cpu of other length": (
        packed(torch.tensor([0, 4, 10]), cu_seqlens_cpu=torch.tensor([0, 10])),
        "cu_seqlens_cpu",
    ),
    "cu_seqlens_cpu of other values": (
        packed(torch.tensor([0, 4, 10]), cu_seqlens_cpu=torch.tensor([0, 6, 10])),
        "cu_seqlens_cpu must be a copy of cu_seqlens, but they hold 6 and 4 at index 1",
    ),
    "q sparse": (good(q=good()["q"].to_sparse()), r"q must be a dense tensor.*pass x.to_dense\(\)"),
    "cu_seqlens sparse": (packed(torch.tensor([0, 10]).to_sparse()), "cu_seqlens must be a dense tensor"),
    "cu_seqlens batch": (good(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens needs B=1, got B=2: flatten"),
    "cu_seqlens_cpu alone": (packed(None, cu_seqlens_cpu=torch.tensor([0, 10])), "pass cu_seqlens too"),
    "allow_neg_eigval": (good(allow_neg_eigval=True), "needs use_beta_sigmoid_in_kernel=True"),
    "chunk_size": (good(chunk_size=48), r"chunk_size must be one of \[16, 32, 64\] or None, got 48"),
    "chunk_size zero": (good(chunk_size=0), "chunk_size must be one of"),
    "chunk_size float": (good(chunk_size=64.0), "chunk_size must be one of"),
    "chunk_size text": (good(chunk_size="64"), "chunk_size must be one of"),
    "scale NaN": (good(scale=float("nan")), "scale must be a finite fp32 number, got nan"),
    "scale infinite": (good(scale=-float("inf")), "scale must be a finite fp32 number"),
    "scale beyond fp32": (good(scale=10**400), "scale must be a finite fp32 number"),
    "scale text": (good(scale="1"), "scale must be a number"),
    "scale tensor": (good(scale=torch.tensor(1.0)), "scale must be a number"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("function", (chunk_kda, explain), ids=("call", "explain"))
def test_refusals(case: str, function: Callable[..., Any]) -> None:
    arguments, sentence = REFUSED[case]
    for _ in range(2):  # what was refused is not remembered as good
        with pytest.raises(InputError) as caught:
            function(**arguments)
        message = str(caught.value)
        assert re.search(sentence, message), message
        assert "\n" not in message and message.rstrip(".").count(" ") >= 4


def test_what_is_refused_differs_from_a_good_call_in_one_thing() -> None:
    """Or the table above would test itself."""
    assert explain(**good()).plan is not None
    assert explain(**packed(torch.tensor([0, 4, 10]))).plan is not None
    assert explain(**good(safe_gate=True, lower_bound=-5)).plan is not None


def test_unknown_keyword_is_a_type_error() -> None:
    for function in (chunk_kda, explain):
        with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
            function(**good(), head_first=True)


def test_signature_follows_fla() -> None:
    names = (
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate lower_bound disable_recompute A_log dt_bias "
        "state_v_first cu_seqlens cu_seqlens_cpu return_intermediate_states chunk_size transpose_state_layout"
    )
    parameters = inspect.signature(chunk_kda).parameters
    assert list(parameters) == names.split()
    assert all(parameters[name].default in (None, False) for name in names.split()[5:])
