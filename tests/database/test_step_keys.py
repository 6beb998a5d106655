"""Keys of recurrent operators: what they hold, which record serves a step; chunked keys are as they were."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_cases import H200, edit, make_entry, make_key

from kda_tl.core.problem import OPTIONS, Problem
from kda_tl.database.lookup import Hit, measure_distance
from kda_tl.database.records import KEY_OPTIONS
from kda_tl.database.store import Database, Key, iter_hits, store, validate
from kda_tl.errors import DatabaseError

POOL = ("has_g", "has_beta", "pooled", "updates")
STEP = Problem(
    H=32,
    HV=32,
    K=128,
    V=128,
    tokens=8,
    sequences=8,
    gate="safe",
    initial_state=True,
    state_v_first=True,
    options=POOL,
    operator="fused_recurrent_kda",
    direction="step",
)


def key_of(**changes: Any) -> Key:
    return Key.of(replace(STEP, longest=0, **changes))


def serve(folder: Path, wanted: Key, *keys: Key) -> Hit | None:
    store(folder, H200, "fused_recurrent_kda", "step", [make_entry(key) for key in keys])
    database = Database.load(folder, "test")
    return next(iter_hits(wanted, H200, [database], operator="fused_recurrent_kda", direction="step"), None)


def test_key_holds_what_decides_a_step() -> None:
    key = key_of()
    assert key[6:] == (32, 8, 1, False, 1, True, "fp32", True, ("updates",))
    same = {"options": (*POOL, "separate"), "beta": "sigmoid", "l2norm": True, "final_state": True, "g_dtype": "fp32"}
    assert key_of(**same) == key
    changes: list[dict[str, Any]] = [{"state_dtype": "bf16"}, {"state_v_first": False}, {"varlen": True}, {"K": 64}]
    changes += [{"options": (*POOL, name)} for name in KEY_OPTIONS if name not in POOL]
    others = [key_of(**change) for change in changes]
    assert all(other.semantic != key.semantic and other.text != key.text for other in others)
    assert len({other.text for other in others}) == len(changes)
    lengths = [key_of(tokens=8 * T).longest_bucket for T in (1, 2, 3, 4, 6, 16)]
    assert lengths == [1, 2, 4, 4, 8, 16], "from one token on"
    assert set(KEY_OPTIONS) < set(OPTIONS)


def test_problem_that_stands_for_a_key_has_that_key(rng: random.Random) -> None:
    for _ in range(100):
        options = tuple(name for name in OPTIONS if rng.random() < 0.4)
        change = {"options": options, "varlen": "ragged" in options, "state_dtype": rng.choice(("bf16", "fp32"))}
        key = key_of(H=rng.choice((1, 4, 32)), tokens=8 * rng.randrange(1, 20), **change)
        problem = key.problem("fused_recurrent_kda", "step")
        assert Key.of(problem) == key and ("ragged" in problem.options) is key.varlen
        assert Key.from_dict(json.loads(json.dumps(key.as_dict()))) == key


def test_files_of_steps_are_read_back_and_valid(tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    keys = [key_of(), key_of(state_dtype="bf16"), key_of(state_v_first=False, options=("has_g",)), key_of(V=512)]
    path = store(tmp_path, H200, "fused_recurrent_kda", "step", [make_entry(key) for key in keys])
    assert path.name == "fused_recurrent_kda_step.json" and validate(tmp_path) == []
    (file,) = Database.load(tmp_path, "test").files.values()
    assert set(file.entries) == set(keys)
    edit(path, lambda values: values["entries"][-1]["key"].pop("recurrent"))
    assert any("only keys with recurrent=true have" in problem for problem in validate(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recurrent": False}, "only keys with recurrent=true have"),
        ({"options": ["updates", "key_gate"]}, "in this order"),
        ({"options": ["pooled"]}, "must be of key_gate"),
        ({"options": "updates"}, "a list of strings"),
        ({"tokens_bucket": 3}, "not a bucket: the nearest is 4"),
    ],
)
def test_keys_that_mean_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DatabaseError, match=message):
        Key.from_dict(key_of().as_dict() | change)


def test_chunked_keys_are_written_as_before() -> None:
    assert not {"recurrent", "state_dtype", "state_v_first", "options"} & make_key().as_dict().keys()
    chunked = Problem(H=2, HV=2, K=32, V=32, tokens=3, initial_state=True, state_v_first=True)
    assert Key.of(chunked)[7:] == (16, 16, False, 1, False, "fp32", False, ())
    with pytest.raises(DatabaseError, match="not a bucket: the nearest is 16"):
        Key.from_dict(make_key().as_dict() | {"longest_bucket": 8})


def test_distance_of_steps_is_that_of_states_and_lengths(tmp_path: Path) -> None:
    """Sequences times heads run side by side, whichever there are more of."""
    wanted = key_of()
    sharded = key_of(H=8, HV=8, tokens=32, sequences=32)
    assert measure_distance(wanted, sharded) == 0.0
    assert measure_distance(wanted, key_of(tokens=16, sequences=16)) == 1.0
    assert measure_distance(wanted, key_of(tokens=16)) == 1.0, "twice the tokens a sequence"
    assert measure_distance(wanted, key_of(tokens=64, sequences=64)) is None
    assert measure_distance(wanted, key_of(state_dtype="bf16")) is None
    hit = serve(tmp_path, wanted, sharded, key_of(tokens=16, sequences=16))
    assert hit is not None and (hit.step, hit.entry.key) == ("nearest bucket", sharded)
    assert "heads 8 instead of 32, tokens 32 instead of 8" in hit.reason
    assert (found := serve(tmp_path, wanted, wanted)) is not None and found.step == "exact bucket"
