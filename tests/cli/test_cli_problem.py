"""Which problem a command works on: the same options everywhere, and a described problem is as good as a named one."""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import OPERATOR
from support.cli_cases import CPU, SMALL, Run, make_entry, store

from kda_tl.bench.fixtures import _recurrence, operator_tensors
from kda_tl.bench.workloads import WORKLOADS, Workload, draw_gradients, select
from kda_tl.cli import main
from kda_tl.cli._options import NOT_IN_KEYS, add_arguments
from kda_tl.cli._problem import change_workload, read_workloads
from kda_tl.core.problem import BETAS, DIRECTIONS, DTYPES, GATES, Problem
from kda_tl.database.gpus import known_device
from kda_tl.errors import InputError
from kda_tl.reference import gradient_name, recurrent_gradients, recurrent_kda
from kda_tl.runtime.defaults import default_plan

COMMANDS = ("tune", "bench", "verify", "explain", "source", "show", "compile")
OPTIONS = {
    "--operator",
    "--heads",
    "--value-heads",
    "--K",
    "--V",
    "--tokens",
    "--sequences",
    "--longest",
    "--varlen",
    "--dtype",
    "--gate",
    "--beta",
    "--initial-state",
    "--state-v-first",
    "--state-dtype",
    "--state-use",
    "--pass",
}
DESCRIBED = ("--heads", "2", "--tokens", "200", "--K", "32", "--V", "32", "--dtype", "fp32")
pytestmark = pytest.mark.usefixtures("own_database")


def make_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(command, parser)
    return parser


def read(*argv: object, default: tuple[str, ...] = ()) -> tuple[Workload, ...]:
    words = [str(word) for word in argv]
    return read_workloads(argparse.Namespace(**vars(make_parser("explain").parse_args(words)), words=words), default)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_the_same_options(command: str) -> None:
    actions = {word: action for action in make_parser(command)._actions for word in action.option_strings}
    explain = {word: action for action in make_parser("explain")._actions for word in action.option_strings}
    expected = OPTIONS - (set(NOT_IN_KEYS) if command == "show" else set())
    assert actions.keys() & OPTIONS == expected
    for word in expected | {"--workload"}:
        mine, other = vars(actions[word]), vars(explain[word])
        same = mine.keys() - {"container", "help"}
        assert {name: mine[name] for name in same} == {name: other[name] for name in same}


def draw_numbers(rng: random.Random) -> dict[str, Any]:
    """Numbers of a problem as options give them, fitting each other."""
    sequences, length, H = rng.randint(1, 5), rng.randint(1, 400), rng.choice([1, 2, 8, 96])
    given: dict[str, Any] = {"heads": H, "tokens": sequences * length, "sequences": sequences}
    choices = {"value-heads": [H, 2 * H], "K": [32, 128], "V": [32, 128, 200], "dtype": DTYPES, "gate": GATES}
    choices |= {"beta": BETAS, "pass": DIRECTIONS, "initial-state": [True], "state-v-first": [True], "varlen": [True]}
    given |= {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}
    if "varlen" in given and sequences > 1 and rng.random() < 0.5:
        given |= {"longest": rng.randint(length, sequences * length)}
    return given


def as_words(given: dict[str, Any]) -> list[str]:
    return [word for name, value in given.items() for word in (f"--{name}", *([] if value is True else [str(value)]))]


def test_what_options_describe_is_the_problem(rng: random.Random) -> None:
    named: dict[str, Workload] = {}
    for _ in range(300):
        given = draw_numbers(rng)
        (workload,) = read(*as_words(given))
        gate = given.get("gate", "safe")
        assert workload.problem() == Problem(
            H=given["heads"],
            HV=given.get("value-heads", given["heads"]),
            K=given.get("K", 128),
            V=given.get("V", 128),
            tokens=given["tokens"],
            sequences=given["sequences"],
            longest=given.get("longest", 0),
            dtype=given.get("dtype", "bf16"),
            gate=gate,
            has_A_log=gate != "log",
            has_dt_bias=gate != "log",
            beta=given.get("beta", "sigmoid"),
            l2norm=True,
            varlen="varlen" in given,
            initial_state="initial-state" in given,
            final_state=True,
            state_v_first="state-v-first" in given,
            direction=given.get("pass", "fwd"),
        )
        assert named.setdefault(workload.name, workload) == workload, "two problems, one name"
        word = rng.choice(["initial-state", "state-v-first", "beta", "dtype", "gate", "pass", "K", "V"])
        other = {name: value for name, value in given.items() if name != word}
        if word not in given:
            other[word] = {"beta": "plain", "dtype": "fp16", "gate": "log", "pass": "bwd", "K": 64, "V": 64}.get(
                word, True
            )
        (twin,) = read(*as_words(other))
        assert (twin.name == workload.name) == (twin == workload), "two problems, one name"
    assert len(named) > 200


def test_a_described_problem_that_has_a_name_goes_by_it() -> None:
    for workload in (w for w in WORKLOADS if w.direction in DIRECTIONS):
        if len(set(workload.lengths)) < 2 and (workload.dtype, workload.decay) != ("fp32", "steep"):
            w = workload
            count = len(w.lengths) or w.B
            words = ["--heads", w.H, "--tokens", w.tokens, "--sequences", count, "--K", w.K, "--V", w.V]
            words += ["--operator", w.operator, "--value-heads", w.HV, "--gate", w.gate, "--pass", w.direction]
            words += ["--beta", w.beta, *(["--varlen"] if w.lengths else [])]
            words += ["--initial-state"] if w.initial_state else []
            twins = read(*words)
            assert [twin.problem() for twin in twins] == [w.problem()]
            assert twins == (w,) or (w.gate, w.decay) == ("safe", "slow")


def test_options_change_named_workloads() -> None:
    (half,) = read("--workload", "safe-T8192-H64", "--heads", 32)
    assert half == select(["safe-T8192-H32"])[0]
    (grouped,) = read("--workload", "safe-T8192-H64", "--value-heads", 128)
    assert (grouped.H, grouped.HV, grouped.name) == (64, 128, "safe-T8192-H64-HV128")
    assert (change_workload(grouped, {"H": 8}).HV, change_workload(grouped, {"H": 8, "HV": 8}).HV) == (16, 8)
    (fewer,) = read("--workload", "safe-packed-H64", "--tokens", 100)
    assert sorted(fewer.lengths) == [16, 16, 17, 17, 17, 17]
    (sharp,) = read("--workload", "train-slow-T8192-H32", "--dtype", "fp16")
    assert (sharp.decay, sharp.direction, sharp.name) == ("slow", "bwd", "train-slow-T8192-H32-fp16")
    every = read("--workload", "bench", "--workload", "small", "--K", 64, "--V", 64)
    assert len(every) == len(select(["bench", "small"])) and {(w.K, w.V) for w in every} == {(64, 64)}
    assert [w.name for w in read("--workload", "bench", "--gate", "softplus")] == [
        f"softplus-T8192-H{H}" for H in (32, 64, 96)
    ]
    assert read(default=("cpu",)) == select(["cpu"])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_number_reaches_what_plans_are_judged_by(direction: str) -> None:
    base = Workload(name="", lengths=(9, 0, 20), H=1, HV=2, K=16, V=8, dtype="fp32", direction=direction)
    for beta in BETAS:
        w = replace(base, beta=beta, initial_state=beta != "sigmoid", state_v_first=beta != "plain")
        inputs = w.inputs("cpu", seed=3)
        tensors, _ = operator_tensors(w, 16, torch.device("cpu"), seed=3)
        assert tensors["h0"] is inputs.get("initial_state") or torch.equal(tensors["h0"], inputs["initial_state"])
        state = (3, 2, 8, 16) if w.state_v_first else (3, 2, 16, 8)
        assert not w.initial_state or inputs["initial_state"].shape == state
        assert (0 < inputs["beta"].min() < inputs["beta"].max() < 1) == (beta == "plain")
        arguments, judged = OPERATOR.recurrence(OPERATOR.bind(**inputs)), _recurrence(w, torch.device("cpu"), 3)
        o, ht = recurrent_kda(**arguments)
        assert arguments["beta_mode"] == beta and ht.shape == state
        if direction == "fwd":
            torch.testing.assert_close(judged, {"o": o[0], "ht": ht})
            continue
        truth = recurrent_gradients(arguments, *draw_gradients(inputs["v"], ht.float(), 3))
        assert ("dh0" in judged) == w.initial_state
        for name in map(gradient_name, ("q", "k", "v", "g", "beta", "A_log", "initial_state")):
            if name in truth:
                torch.testing.assert_close(judged[name].flatten(), truth[name].flatten())


def test_show_finds_plans_by_their_problem(run: Run, own_database: Path) -> None:
    h200 = known_device("nvidia_h200")
    dense, packed, grouped = select(["safe-T8192-H32", "safe-packed-H64"]) + read(
        "--heads", 4, "--value-heads", 16, "--tokens", 64
    )
    store(own_database, h200, *(make_entry(w, h200) for w in (dense, packed, grouped)))
    store(own_database, h200, make_entry(replace(dense, direction="bwd"), h200), direction="bwd")

    def find(*words: object) -> list[tuple[int, str]]:
        code, out, _ = run("show", "--json", "--source", "$KDA_TL_DB", *words)
        assert code == 0
        return [(plan["key"]["heads_bucket"], plan["pass"]) for plan in json.loads(out)["plans"]]

    assert find("--workload", dense.name) == [(32, "fwd")]
    assert find("--workload", "train-T8192-H32", "--workload", packed.name) == [(32, "bwd"), (64, "fwd")]
    assert find("--workload", dense.name, "--heads", 64) == []
    assert find("--heads", 31) == [(32, "bwd"), (32, "fwd")]
    assert find("--heads", 4) == find("--value-heads", 16) == find("--heads", 4, "--value-heads", 16) == [(16, "fwd")]
    assert find("--heads", 16) == find("--heads", 8, "--value-heads", 16) == []
    assert find("--tokens", 8000, "--pass", "fwd") == [(32, "fwd"), (64, "fwd")]
    assert find("--varlen") == find("--longest", 4096) == [(64, "fwd")]
    assert len(find("--gate", "safe", "--K", 128)) == 4 and find("--gate", "log") == find("--V", 64) == []


def test_show_lists_workloads(run: Run) -> None:
    code, out, _ = run("show", "--workloads")
    assert code == 0 and re.search(r"^safe-T8192-H32 +tune, bench, forward$", out, re.MULTILINE)
    assert len(out.splitlines()) == 2 + len(WORKLOADS) and max(map(len, out.splitlines())) <= 80
    code, out, _ = run("show", "--workloads", "--workload", "cpu", "--json")
    assert [w["name"] for w in json.loads(out)["workloads"]] == ["cpu-safe-K32", "cpu-softplus-K64"]


def test_explain_takes_several(run: Run) -> None:
    code, out, _ = run("explain", "--gpu", "cpu", "--workload", "cpu", "--workload", "train-cpu")
    assert code == 0 and len(re.findall(r"^workload +\S+", out, re.MULTILINE)) == 4
    assert re.search(r"^problem +chunk_kda bwd ", out, re.MULTILINE)


def test_source_of_a_described_problem(run: Run) -> None:
    code, _, err = run("source", "fwd_gate", "--gpu", "cpu", "--BT", 16, "--BC", 8, *DESCRIBED)
    assert code == 0 and "fwd-H2-HV2-K32-V32-fp32-safe" in err and "tokens200" in err


def test_a_described_problem_is_verified(run: Run, own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "kda_tl.cli._call.measure_errors",
        lambda operator, inputs, plan, *_: seen.append((plan.BT, inputs["v"].shape)) or {"o": 0.0},
    )
    argv = ("verify", "--gpu", "cpu", "--db", own_database, *DESCRIBED)
    code, out, err = run(*argv)
    assert code == 0 and "1 plan, " in err and "default safe-T200-H2-K32-fp32" in out and len(seen) == 4
    assert {(BT, *shape[2:]) for BT, shape in seen} == {(64, 2, 32)}
    seen.clear()
    near, other = replace(SMALL, T=1024), replace(SMALL, V=64)
    store(own_database, CPU, make_entry(near, CPU), make_entry(other, CPU))
    code, out, _ = run(*argv)  # what serves it is of the bucket of 1024 tokens
    assert code == 0 and "served safe-T200-H2-K32-fp32 (nearest bucket)" in out and "stored" not in out
    assert [BT for BT, _ in seen] == [64] * 4 + [32] * 2
    store(own_database, CPU, make_entry(SMALL, CPU, plan=default_plan(SMALL.problem(), CPU, BT=16)))
    seen.clear()
    code, out, _ = run(*argv)
    assert code == 0 and "served" not in out and out.count("stored safe-T200-H2-K32-fp32") == 2
    assert [BT for BT, _ in seen] == [64] * 4 + [16] * 2


def test_a_described_problem_is_timed(run: Run, tmp_path: Path) -> None:
    words = ("--heads", 2, "--tokens", 96, "--K", 32, "--V", 32, "--dtype", "fp32", "--reps", 1, "--rounds", 1)
    code, _, _ = run("bench", "--gpu", "cpu", *words, "--calls-only", "--json", tmp_path / "bench.json")
    (result,) = json.loads((tmp_path / "bench.json").read_text())["workloads"]
    assert code == 0 and result["workload"] == "safe-T96-H2-K32-fp32" and result["problem"].endswith("tokens96")


def test_gate_of_an_operator_without_a_safe_one() -> None:
    given = {"operator": "chunk_gated_delta_rule"}
    changed = change_workload(Workload(name="x", T=20, H=1), given)
    assert (changed.gate, changed.decay) == ("softplus", "slow")
    with pytest.raises(InputError, match="has no safe gate"):
        change_workload(Workload(name="x", T=20, H=1), given | {"gate": "safe"})


def test_explain_takes_recurrent_operators(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --gpu h200 --operator fused_recurrent_kda --heads 32 --tokens 8 --sequences 8 --state-v-first"
    assert main([*words.split(), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["workloads"]
    assert (told["problem"]["direction"], told["problem"]["longest"], told["step"]) == ("step", 1, "default")
    assert told["plan"]["pipeline"] == "decode_rows"
    assert main([*words.split(), "--pass", "bwd"]) == 2
    assert "fused_recurrent_kda has no bwd pass: choose step" in capsys.readouterr().err
