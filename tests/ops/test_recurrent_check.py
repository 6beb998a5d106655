"""What packed_decode refuses, and what recurrent operators refuse of values on the device under KDA_TL_CHECK=1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.decode_cases import Args, ints
from support.operator_cases import CPU, assert_sentence
from support.small_steps import I32, TREE, WIDE, good, normal, packed, verify, zeros

from kda_tl.core.device import find_compiler
from kda_tl.errors import InputError
from kda_tl.ops import recurrent_call
from kda_tl.ops.packed_decode import packed_decode
from kda_tl.ops.recurrent_kda import fused_recurrent_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(CPU) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.usefixtures("one_thread"),
]


# packed_decode


def project(**changes: Any) -> Args:
    tensors: Args = {
        "mixed_qkv": normal(2, 2 * 2 * 8 + 4 * 6),
        "a": normal(2, 32),
        "b": normal(2, 4),
        "A_log": normal(4),
    }
    states: Args = {"initial_state": normal(7, 4, 6, 8), "out": zeros(2, 1, 4, 6), "ssm_state_indices": ints(4, 2)}
    return {**tensors, "dt_bias": None, "scale": None, **states, **changes}


PROJECTED: dict[str, tuple[Args, str]] = {
    "ranks": (
        project(mixed_qkv=normal(2, 1, 56)),
        r"packed_decode needs mixed_qkv \[B, 2 \* H \* K .* got \[\[2, 1, 56\]",
    ),
    "a rank": (project(a=normal(2, 4, 8)), "a and b of two dimensions"),
    "b rank": (project(b=normal(2, 1, 4)), "a and b of two dimensions"),
    "pool rank": (project(initial_state=normal(7, 4, 48)), r"and initial_state \[slots, HV, V, K\]"),
    "columns": (
        project(mixed_qkv=normal(2, 57)),
        r"57 columns, which are not 2 \* H \* K \+ HV \* V: .*HV=4, K=8 and V=6",
    ),
    "few columns": (project(mixed_qkv=normal(2, 24)), "24 columns, which are not"),
    "a": (project(a=normal(2, 8)), r"a must be \[2, 32\] or \[2, 4\], got \[2, 8\]"),
    "a for the bias": (project(a=normal(2, 4), dt_bias=zeros(32)), "a must be"),
    "a of others": (project(a=normal(3, 4)), "a must be|g must have the shape"),
    "bound": (project(a=normal(2, 4), lower_bound=-1.0), r"lower_bound is of KDA's gate.*pass a \[B, HV \* K\]"),
    "out": (project(out=zeros(2, 4, 6)), r"out must have the shape \[2, 1, 4, 6\]"),
    "no bias and no A_log": (project(A_log=None), "needs A_log"),
    "indices": (project(ssm_state_indices=ints(1)), "ssm_state_indices must be"),
    "no tensor": (project(mixed_qkv=[1.0]), "mixed_qkv must be a torch.Tensor, got list"),
    "no pool": (project(initial_state=None), "initial_state must be a torch.Tensor, got NoneType"),
    "no out": (project(out=None), "out must be a torch.Tensor, got NoneType"),
    "no indices": (project(ssm_state_indices=None), "ssm_state_indices must be a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize("case", PROJECTED)
def test_refusals_of_packed_decode(case: str) -> None:
    arguments, sentence = PROJECTED[case]
    with pytest.raises(InputError, match=sentence):
        packed_decode(**arguments)


def test_packed_decode_takes_what_differs() -> None:
    for arguments in (project(), project(lower_bound=-1.0, A_log=None), project(a=normal(2, 4), dt_bias=zeros(4))):
        assert packed_decode(**arguments).any()


# What the device alone knows


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KDA_TL_CHECK", "1")
    recurrent_call._checks.cache_clear()
    yield
    monkeypatch.delenv("KDA_TL_CHECK")
    recurrent_call._checks.cache_clear()


SPLIT = {"inplace_final_state": False, "output_state_indices": ints(0, 1)}
CHECKED: dict[str, tuple[Args, str]] = {
    "bounds end": (packed(ints(0, 3, 7)), r"cu_seqlens must rise from 0 to at most 6 tokens, got \[0, 3, 7\]"),
    "bounds start": (packed(ints(1, 3, 6)), "cu_seqlens must rise from 0"),
    "bounds order": (packed(ints(0, 5, 3)), "cu_seqlens must rise from 0"),
    "slots": (
        good(ssm_state_indices=ints(7, 2)),
        "ssm_state_indices must be below 7, the number of slots of the pool, got 7",
    ),
    "targets": (good(**SPLIT | {"output_state_indices": ints(0, 8)}), "output_state_indices must be below 7.*, got 8"),
    "rows": (
        verify(intermediate_state_indices=ints(5, 0)),
        "intermediate_state_indices must be below 5, the number of rows",
    ),
    "accepted": (good(ssm_state_indices=WIDE, num_accepted_tokens=ints(4, 1)), "num_accepted_tokens must be at most 3"),
    "parents": (
        verify(retrieve_parent_token=ints([-1, 1, 0], [0, 0, 0])),
        "must name an earlier token of the sequence, or -1",
    ),
    "one slot twice": (
        good(ssm_state_indices=ints(2, 2)),
        "two sequences write to one slot: give each slots of its own",
    ),
    "one target twice": (good(**SPLIT | {"output_state_indices": ints(0, 0)}), "two sequences write to one slot"),
    "one column twice": (good(ssm_state_indices=ints([4, 3, 2], [1, 0, 3])), "two sequences write to one slot"),
    "read and written": (
        good(**SPLIT | {"output_state_indices": ints(0, 4)}),
        "sequence 1 writes to slot 4, which sequence 0 reads",
    ),
    "rows read and written": (
        good(initial_state=normal(2, 4, 8, 6), ssm_state_indices=None, **SPLIT | {"output_state_indices": ints(1, -1)}),
        "sequence 0 writes to slot 1, which sequence 1 reads",
    ),
    "read of an accepted column": (
        good(
            ssm_state_indices=ints([4, 3, 2], [1, 0, 5]),
            num_accepted_tokens=ints(2, 1),
            **SPLIT | {"output_state_indices": ints([6, -1, -1], [3, -1, -1])},
        ),
        "sequence 1 writes to slot 3, which sequence 0 reads",
    ),
    "more tokens than columns": (
        packed(ints(0, 4, 6), ssm_state_indices=WIDE),
        "a sequence has 4 tokens, but .* 3 columns",
    ),
    "more tokens than target columns": (
        packed(ints(0, 4, 6), **SPLIT | {"output_state_indices": WIDE}),
        "a sequence has 4 tokens, but .* 3 columns",
    ),
    "more tokens than steps": (
        packed(ints(0, 4, 6), intermediate_states=zeros(5, 3, 4, 8, 6)),
        "a sequence has 4 tokens, but .* 3 steps",
    ),
}
FINE: dict[str, Args] = {
    "padding": good(ssm_state_indices=ints(-1, -1)),
    "padding of zeros": good(ssm_state_indices=ints(0, 0), pad_slot_id=0),
    "tokens after the last": packed(ints(0, 3, 4)),
    "swapped by one": good(**SPLIT | {"output_state_indices": ints(4, 2)}),
    "one slot read by both": good(**SPLIT | {"ssm_state_indices": ints(3, 3)}),
    "none accepted": good(ssm_state_indices=WIDE, num_accepted_tokens=ints(0, 3)),
    "columns of padding": good(ssm_state_indices=ints([4, -1, -1], [1, -1, 5])),
    "columns of tokens that there are not": packed(ints(0, 1, 2), ssm_state_indices=ints([4, 3, 3], [1, 3, 3])),
    "stale columns of padding": good(ssm_state_indices=ints([-1, 3, 2], [1, 3, 2])),
    "one slot at all tokens": good(ssm_state_indices=ints([4, 4, 4], [1, 1, 1])),
    "columns that are not read": good(
        ssm_state_indices=ints([4, 3, 2], [1, 0, 5]),
        num_accepted_tokens=ints(2, 1),
        **SPLIT | {"output_state_indices": ints([4, -1, -1], [6, -1, -1])},
    ),
    "parents": verify(**TREE),
    "rows of none": verify(intermediate_state_indices=ints(-1, 4)),
    "no tokens": good(**{n: good()[n][:, :0] for n in ("q", "k", "v", "g", "beta")}),
    "no sequences": packed(ints(0), ssm_state_indices=zeros(0, **I32)),
}


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("case", CHECKED)
def test_values_are_checked_when_asked(case: str, checked: None) -> None:
    arguments, sentence = CHECKED[case]
    before = arguments["initial_state"].clone()
    with pytest.raises(InputError, match=sentence) as caught:
        fused_recurrent_kda(**arguments)
    assert_sentence(caught.value)
    assert torch.equal(arguments["initial_state"], before)


@pytest.mark.rest(draws=2)
@pytest.mark.parametrize("case", FINE)
def test_good_values_pass(case: str, checked: None) -> None:
    assert fused_recurrent_kda(**FINE[case])[0].isfinite().all()


def test_values_are_not_checked_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check waits for the device."""
    monkeypatch.delenv("KDA_TL_CHECK", raising=False)
    recurrent_call._checks.cache_clear()
    monkeypatch.setattr(recurrent_call, "check_values", lambda a: pytest.fail("values were read"))
    fused_recurrent_kda(**good(ssm_state_indices=ints(2, 9)))
    for value in ("0", ""):
        monkeypatch.setenv("KDA_TL_CHECK", value)
        recurrent_call._checks.cache_clear()
        fused_recurrent_kda(**good())
