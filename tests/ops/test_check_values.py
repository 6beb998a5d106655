"""What ``KDA_TL_CHECK=1`` reads of recurrent calls: indices that lead beyond, or two sequences to one slot."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kda_tl.errors import InputError
from kda_tl.ops import load_all
from kda_tl.ops.recurrent_check import check_values
from kda_tl.ops.recurrent_entry import RECURRENT

load_all()
N, T, SLOTS, D = 3, 2, 9, 4
PAIRS = [[1, 2], [3, 4], [5, 6]]
RAGGED = {"cu_seqlens": [0, 3, 3, 4]}  # 3, 0 and 1 tokens
UPDATES = {"inplace_final_state": True}


def check(**given: Any) -> None:
    lead = (1, 4) if "cu_seqlens" in given else (N, T)
    q = torch.zeros(*lead, 1, D)
    given = {name: torch.tensor(x) if isinstance(x, list) else x for name, x in given.items()}
    pool = torch.zeros(SLOTS, 1, D, D)
    a = RECURRENT["fused_recurrent_kda"].bind(q, q, q, q, q[..., 0], initial_state=pool, **given)
    check_values(a)


ACCEPTED: dict[str, dict[str, Any]] = {
    "slots apart": {"ssm_state_indices": [1, 2, 8], **UPDATES},
    "null slots": {"ssm_state_indices": [-1, 2, -1], **UPDATES},
    "null slots of vLLM": {"ssm_state_indices": [0, 0, 1], "pad_slot_id": 0, **UPDATES},
    "nothing is written": {"ssm_state_indices": [1, 1, 1]},
    "a slot a token": {"ssm_state_indices": PAIRS, "num_accepted_tokens": [0, 1, 2], **UPDATES},
    "columns of no token": {"ssm_state_indices": [[1, 2, 8], [3, 4, 8], [5, 6, 8]], **UPDATES},
    "columns beyond a sequence": {"ssm_state_indices": [[1, 2, 3], [4, 1, 1], [5, 1, 1]], **RAGGED, **UPDATES},
    "elsewhere": {"ssm_state_indices": [1, 2, 3], "output_state_indices": [4, 5, 6]},
    "elsewhere of a null one": {"ssm_state_indices": [1, -1, 3], "output_state_indices": [4, 4, 6]},
    "rows": {"intermediate_states": torch.zeros(2, T, 1, D, D), "intermediate_state_indices": [1, -1, 0]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepts(name: str) -> None:
    check(**ACCEPTED[name])


def test_accepts_no_sequences() -> None:
    none = torch.zeros(0, 2, dtype=torch.int32)
    check(cu_seqlens=[0], ssm_state_indices=none, num_accepted_tokens=none[:, 0], **UPDATES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "slots": ({"ssm_state_indices": [1, 2, 9]}, "below 9, the number of slots of the pool, got 9"),
    "targets": ({"ssm_state_indices": [1, 2, 3], "output_state_indices": [4, 5, 99]}, "output_state_indices must be"),
    "bounds": ({"cu_seqlens": [0, 3, 2, 4]}, "cu_seqlens must rise from 0 to at most 4 tokens"),
    "accepted": ({"ssm_state_indices": PAIRS, "num_accepted_tokens": [1, 3, 1]}, "at most 2, as many as indices"),
    "one slot": ({"ssm_state_indices": [1, 2, 1], **UPDATES}, "two sequences write to one slot"),
    "one slot of tokens": ({"ssm_state_indices": [[1, 2], [3, 4], [5, 2]], **UPDATES}, "two sequences write to"),
    "another's source": (
        {"ssm_state_indices": [1, 2, 3], "output_state_indices": [4, 5, 1]},
        "sequence 2 writes to slot 1, which sequence 0 reads",
    ),
    "another's accepted source": (
        {"ssm_state_indices": PAIRS, "num_accepted_tokens": [2, 1, 1], "output_state_indices": [7, 8, 2]},
        "sequence 2 writes to slot 2, which sequence 0 reads",
    ),
    "few columns": ({"ssm_state_indices": PAIRS, **RAGGED, **UPDATES}, "a column for each of a sequence's 3 tokens"),
    "few steps": (
        {"intermediate_states": torch.zeros(3, 2, 1, D, D), **RAGGED},
        "intermediate_states must have a column for each of a sequence's 3 tokens, got 2",
    ),
    "rows": (
        {"intermediate_states": torch.zeros(2, T, 1, D, D), "intermediate_state_indices": [1, 2, 0]},
        "intermediate_state_indices must be below 2, the number of rows",
    ),
    "parents": ({"retrieve_parent_token": [[-1, 0], [-1, 1], [-1, -1]]}, "must name an earlier token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    given, sentence = REFUSED[name]
    with pytest.raises(InputError, match=re.escape(sentence)):
        check(**given)
