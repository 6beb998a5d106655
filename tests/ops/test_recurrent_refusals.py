"""What recurrent operators refuse, each with a sentence that says what to do: always, and under KDA_TL_CHECK=1."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from support.decode_cases import Args, ints
from support.operator_cases import CPU, NO_MEMORY
from support.small_steps import BF16, I32, TREE, WIDE, good, normal, packed, scalar, verify, without, zeros
from torch import Tensor

from kda_tl.core.device import find_compiler
from kda_tl.errors import InputError
from kda_tl.ops.recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
from kda_tl.ops.recurrent_kda import fused_recurrent_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


REFUSED: dict[str, tuple[Args, str]] = {
    "q no tensor": (good(q=[[1.0]]), "q must be a torch.Tensor, got list"),
    "q no tensor, final state": (
        without("initial_state", "ssm_state_indices", "inplace_final_state", q=[1.0], output_final_state=True),
        "q must be a torch.Tensor, got list",
    ),
    "q rank, final state": (
        without(
            "initial_state", "ssm_state_indices", "inplace_final_state", q=zeros(2, 3, 16), output_final_state=True
        ),
        "q must have 4 dimensions",
    ),
    "v None": (good(v=None), "v must be a torch.Tensor, got NoneType"),
    "v rank": (good(v=zeros(2, 3, 24)), r"v must have 4 dimensions, \[B, T, heads, channels\]; got shape \[2, 3, 24\]"),
    "g None": (without("g"), "g must be a torch.Tensor, got NoneType"),
    "beta None": (without("beta"), "beta must be a torch.Tensor, got NoneType"),
    "A_log no tensor": (good(A_log=[0.0] * 4), "A_log must be a torch.Tensor, got list"),
    "cu_seqlens no tensor": (packed([0, 4, 6]), "cu_seqlens must be a torch.Tensor, got list"),
    "cu_seqlens no tensor, final state": (
        packed([0, 4, 6], inplace_final_state=False, output_final_state=True),
        "cu_seqlens must be a torch.Tensor, got list",
    ),
    "initial_state no tensor": (good(initial_state=1), "initial_state must be a torch.Tensor, got int"),
    "indices no tensor": (good(ssm_state_indices=[4, 2]), "ssm_state_indices must be a torch.Tensor, got list"),
    "out no tensor": (good(out=1.0), "out must be a torch.Tensor, got float"),
    "q sparse": (good(q=normal(2, 3, 2, 8).to_sparse()), r"q must be a dense tensor.*pass x.to_dense\(\)"),
    "g rank": (good(g=normal(2, 3, 4)), "g must have 4 dimensions"),
    "indices int16": (
        good(ssm_state_indices=ints(4, 2, dtype=torch.int16)),
        "int32 or int64, got torch.int16: cast it once",
    ),
    "indices float": (good(ssm_state_indices=normal(2)), "ssm_state_indices must be int32 or int64"),
    "cu_seqlens float": (packed(torch.tensor([0.0, 6.0])), "cu_seqlens must be int32 or int64"),
    "accepted bool": (
        good(ssm_state_indices=WIDE, num_accepted_tokens=torch.tensor([True, True])),
        "num_accepted_tokens must be int32 or int64",
    ),
    "q integer": (good(q=zeros(2, 3, 2, 8, **I32)), "q must be bfloat16, float16 or float32, got torch.int32"),
    "beta float64": (good(beta=zeros(2, 3, 4).double()), "beta must be bfloat16"),
    "pool float64": (good(initial_state=zeros(7, 4, 8, 6).double()), "initial_state must be bfloat16"),
    "buffer integer": (verify(intermediate_states=zeros(5, 3, 4, 8, 6, **I32)), "intermediate_states must be bfloat16"),
    "k elsewhere": (good(k=zeros(2, 3, 2, 8, device="meta")), "k is on meta but q is on cpu: move them to one"),
    "indices elsewhere": (good(ssm_state_indices=zeros(2, device="meta", **I32)), "ssm_state_indices is on meta"),
    "out elsewhere": (good(out=zeros(2, 3, 4, 6, device="meta")), "out is on meta but q is on cpu"),
    "all on meta": (
        {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in good().items()},
        "on a CUDA device or the CPU, got meta",
    ),
    "out dtype": (
        good(out=zeros(2, 3, 4, 6, **BF16)),
        "out must have the dtype of v, torch.float32, got torch.bfloat16: cast it",
    ),
    "scale text": (good(scale="1"), "scale must be a number or None, got str"),
    "scale tensor": (good(scale=torch.tensor(1.0)), "scale must be a number or None, got Tensor"),
    "scale NaN": (
        good(scale=float("nan")),
        r"scale must be a finite fp32 number, got nan: leave it out for K \*\* -0.5",
    ),
    "scale beyond fp32": (good(scale=10**400), "scale must be a finite fp32 number"),
    "lower_bound text": (good(lower_bound="-5"), "lower_bound must be a number or None"),
    "lower_bound low": (good(lower_bound=-5.1), r"lower_bound must be in \[-5, 0\), got -5.1: pass for example -5.0"),
    "lower_bound zero": (good(lower_bound=0), "lower_bound must be in"),
    "A_log missing": (without("A_log"), r"use_gate_in_kernel=True needs A_log of shape \[HV\], or a lower_bound"),
    "allow_neg_eigval": (good(allow_neg_eigval=True), "needs use_beta_sigmoid_in_kernel=True: it doubles that sigmoid"),
    "pad_slot_id": (good(pad_slot_id=0.5), r"pad_slot_id must be a small whole number, -1 or 0 for example, got 0.5"),
    "pad_slot_id large": (good(pad_slot_id=1 << 30), "pad_slot_id must be a small whole number"),
    "pad_slot_id list": (good(pad_slot_id=[0]), "pad_slot_id must be a small whole number"),
    "k shape": (good(k=zeros(2, 3, 2, 7)), r"k must have the shape \[2, 3, 2, 8\], got \[2, 3, 2, 7\]"),
    "v tokens": (good(v=zeros(2, 4, 4, 6)), r"v must have the shape \[2, 3, 4, 6\]"),
    "g per key head": (good(g=zeros(2, 3, 2, 8)), r"g must have the shape \[2, 3, 4, 8\]"),
    "out shape": (good(out=zeros(2, 3, 24, 1)), r"out must have the shape \[2, 3, 4, 6\]"),
    "out strides": (good(out=zeros(2, 3, 6, 4).mT), "out must be contiguous: kernels write it as it lies"),
    "beta shape": (good(beta=zeros(2, 3, 4, 8)), r"beta must have the shape \[2, 3, 4\], or \[2, 3, 4, 6\], got"),
    "A_log shape": (good(A_log=zeros(2)), r"A_log must be a float tensor of 4 elements, got torch.float32 \[2\]"),
    "A_log integer": (good(A_log=zeros(4, **I32)), "A_log must be a float tensor of 4 elements"),
    "dt_bias shape": (good(dt_bias=zeros(4)), "dt_bias must be a float tensor of 32 elements"),
    "cu_seqlens batch": (good(cu_seqlens=ints(0, 3)), "cu_seqlens needs B=1, got B=2: flatten the batch"),
    "cu_seqlens rank": (packed(ints([0, 6])), r"cu_seqlens must be \[N \+ 1\], got \[1, 2\]"),
    "cu_seqlens empty": (packed(ints()), r"cu_seqlens must be \[N \+ 1\], got \[0\]"),
    "heads": (good(q=zeros(2, 3, 3, 8), k=zeros(2, 3, 3, 8)), "HV=4 value heads cannot share H=3"),
    "K": (
        good(q=zeros(2, 3, 2, 257), k=zeros(2, 3, 2, 257), g=zeros(2, 3, 4, 257), initial_state=zeros(7, 4, 257, 6)),
        "K=257 is not supported: pass 256",
    ),
    "pool layout": (
        good(state_v_first=True),
        r"initial_state must be \[slots, HV, V, K\] = \[slots, 4, 6, 8\], got .*state_v_first says in",
    ),
    "pool rank": (good(initial_state=zeros(7, 4, 48)), r"initial_state must be \[slots, HV, K, V\]"),
    "states without indices": (
        without("ssm_state_indices"),
        "must have a state for each of 2 sequences, got 7: pass ssm_state_indices if it is a pool",
    ),
    "pool strides": (
        good(initial_state=zeros(7, 4, 6, 8).mT),
        "a pool must be contiguous but for the stride between its slots, got strides",
    ),
    "pool folded": (good(initial_state=zeros(1, 4, 8, 6).expand(7, 4, 8, 6)), "a pool must be contiguous but for"),
    "no pool": (without("initial_state"), "inplace_final_state and indices of slots need initial_state, the pool"),
    "no pool, targets": (
        without("initial_state", "ssm_state_indices", "inplace_final_state", output_state_indices=ints(0, 1)),
        "need initial_state, the pool",
    ),
    "no pool, in place": (without("initial_state", "ssm_state_indices"), "need initial_state, the pool"),
    "rows without a buffer": (
        good(intermediate_state_indices=ints(0, 1)),
        "intermediate_state_indices needs intermediate_states",
    ),
    "tree without a buffer": (
        good(**TREE),
        "retrieve_parent_token needs intermediate_states, the buffer that it is about",
    ),
    "buffer layout": (
        verify(intermediate_states=zeros(5, 3, 4, 6, 8)),
        r"intermediate_states must be \[rows, steps, HV, K, V\] with a step for each of 3",
    ),
    "buffer steps": (verify(intermediate_states=zeros(5, 2, 4, 8, 6)), "with a step for each of 3 tokens, got"),
    "buffer rank": (verify(intermediate_states=zeros(5, 4, 8, 6)), "intermediate_states must be"),
    "buffer strides": (
        verify(intermediate_states=zeros(3, 5, 4, 8, 6).transpose(0, 1)),
        "contiguous but for the stride between its rows",
    ),
    "buffer dtype": (
        verify(intermediate_states=zeros(5, 3, 4, 8, 6, **BF16)),
        "intermediate_states must have the dtype of the pool, torch.float32",
    ),
    "buffer rows": (
        verify(intermediate_states=zeros(1, 3, 4, 8, 6)),
        "intermediate_states must have a row for each of 2 sequences",
    ),
    "indices length": (
        good(ssm_state_indices=ints(1, 2, 3)),
        r"ssm_state_indices must be \[N\] or \[N, W\] with N=2 sequences, got \[3\]",
    ),
    "indices rank": (good(ssm_state_indices=WIDE[None]), "ssm_state_indices must be"),
    "indices of no column": (good(ssm_state_indices=zeros(2, 0, **I32)), "ssm_state_indices must be"),
    "accepted shape": (
        good(ssm_state_indices=WIDE, num_accepted_tokens=ints([1], [1])),
        r"num_accepted_tokens must be \[N\] with N=2",
    ),
    "rows shape": (verify(intermediate_state_indices=ints(0)), r"intermediate_state_indices must be \[N\] with"),
    "accepted of one column": (
        good(num_accepted_tokens=ints(1, 1)),
        r"num_accepted_tokens needs ssm_state_indices \[N, W\]: it says which",
    ),
    "targets of no update": (
        good(output_state_indices=ints(0, 1), disable_state_update=True),
        "output_state_indices has no meaning with disable_state_update=True",
    ),
    "few columns": (
        good(ssm_state_indices=WIDE[:, :2]),
        r"slots of 3 tokens need as many columns of indices, got \[2, 2\]",
    ),
    "few target columns": (good(output_state_indices=WIDE[:, :2]), "slots of 3 tokens need as many columns"),
    "tree that updates": (
        verify(disable_state_update=False, **TREE),
        "retrieve_parent_token needs disable_state_update=True and no cu_seqlens",
    ),
    "tree of packed": (
        packed(
            ints(0, 6),
            intermediate_states=zeros(2, 6, 4, 8, 6),
            disable_state_update=True,
            ssm_state_indices=ints(1),
            retrieve_parent_token=zeros(1, 6, **I32),
        ),
        "and no cu_seqlens",
    ),
    "tree shape": (
        verify(retrieve_parent_token=ints([-1, 0], [-1, 0])),
        r"retrieve_parent_token must be \[2, 3\], got \[2, 2\]",
    ),
    "tree rank": (verify(retrieve_parent_token=ints(-1, 0)), r"retrieve_parent_token must be \[N, T\] with N=2"),
}
REFUSED_GDN: dict[str, tuple[Args, str]] = {
    "g rank": (
        scalar() | {"g": normal(2, 3, 4, 8)},
        r"g must have 3 dimensions, \[B, T, HV\]; got shape \[2, 3, 4, 8\]",
    ),
    "gk dtype": (scalar(gk=zeros(2, 3, 4, 8, **BF16)), "gk must have the dtype of g, torch.float32"),
    "gv dtype": (scalar(gv=zeros(2, 3, 4, 6, **BF16)), "gv must have the dtype of g"),
    "gv and gk": (
        scalar(use_gate_in_kernel=False, gk=zeros(2, 3, 4, 8), gv=zeros(2, 3, 4, 6, **BF16)) | {"g": None},
        "gv must have the dtype of gk",
    ),
    "gk shape": (scalar(gk=zeros(2, 3, 2, 8)), r"gk must have the shape \[2, 3, 4, 8\]"),
    "gv shape": (scalar(gv=zeros(2, 3, 4, 8)), r"gv must have the shape \[2, 3, 4, 6\]"),
    "gate of nothing": (scalar() | {"g": None}, "use_gate_in_kernel=True needs g, the raw gate"),
    "A_log missing": (scalar(A_log=None), r"use_gate_in_kernel=True needs A_log of shape \[HV\]\.$"),
    "sigmoid of nothing": (
        scalar(beta=None, use_beta_sigmoid_in_kernel=True),
        "use_beta_sigmoid_in_kernel=True needs beta, the logit",
    ),
    "dt_bias shape": (scalar(dt_bias=zeros(32)), "dt_bias must be a float tensor of 4 elements"),
}
CASES = [(fused_recurrent_kda, REFUSED, case) for case in REFUSED]
CASES += [(fused_recurrent_gated_delta_rule, REFUSED_GDN, case) for case in REFUSED_GDN]


@pytest.mark.parametrize(
    ("function", "table", "case"), CASES, ids=[f"{f.__name__[16:19]} {case}" for f, _, case in CASES]
)
def test_refusals(function: Any, table: dict[str, tuple[Args, str]], case: str) -> None:
    arguments, sentence = table[case]
    for _ in range(2):  # what was refused is not remembered as good
        with pytest.raises(InputError) as caught:
            function(**arguments)
        message = str(caught.value)
        assert re.search(sentence, message), message
        assert "\n" not in message and message.rstrip(".").count(" ") >= 4


def test_what_is_refused_differs_from_a_good_call_in_one_thing() -> None:
    """Or the table above would test itself."""
    for arguments in (good(), packed(ints(0, 4, 6)), verify(), verify(**TREE), good(ssm_state_indices=WIDE)):
        assert fused_recurrent_kda(**arguments)[0].isfinite().all()
    assert fused_recurrent_gated_delta_rule(**scalar(gk=zeros(2, 3, 4, 8)))[0].isfinite().all()


def test_a_known_signature_lets_no_other_tensor_through() -> None:
    a = good()
    fused_recurrent_kda(**a)
    freed = a["k"].clone()
    freed.untyped_storage().resize_(0)
    for bad, sentence in ((freed, NO_MEMORY), (a["k"].to_sparse(), "dense tensor"), (a["k"].double(), "bfloat16")):
        with pytest.raises(InputError, match=sentence):
            fused_recurrent_kda(**a | {"k": bad})


def test_signatures_follow_fla() -> None:
    ours = (
        "inplace_final_state ssm_state_indices output_state_indices num_accepted_tokens pad_slot_id "
        "disable_state_update intermediate_states intermediate_state_indices retrieve_parent_token out"
    )
    kda = (
        "q k v g beta A_log dt_bias scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval lower_bound state_v_first cu_seqlens"
    )
    gdn = (
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel use_gate_in_kernel A_log "
        "dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens"
    )
    for function, names, given in ((fused_recurrent_kda, kda, 5), (fused_recurrent_gated_delta_rule, gdn, 3)):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == [*names.split(), *ours.split()]
        assert all(parameters[name].kind == inspect.Parameter.KEYWORD_ONLY for name in ours.split())
        assert all(parameters[name].default in (None, False, -1) for name in list(parameters)[given:])
        with pytest.raises(TypeError, match="unexpected keyword argument 'head_first'"):
            function(**good(), head_first=True)
    assert fused_recurrent_gdn is fused_recurrent_gated_delta_rule
