"""``kda-tl db``: plans are held against the templates, and a folder that cannot be written is told as it was named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chunked import CHUNKED
from support.database_cases import H200, edit, make_entry, make_key

from kda_tl import templates
from kda_tl.cli import main
from kda_tl.core.device import cpu_device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import BT_CHOICES, Case, Plan
from kda_tl.database import store as db
from kda_tl.database.records import Entry, Key
from kda_tl.ops import load_all
from kda_tl.runtime.defaults import default_plan, pipeline_defaults
from kda_tl.runtime.dispatch import numerics_class

PROBLEM = Problem(H=32, HV=32, K=128, V=128, tokens=8192, gate="safe")


def make_record(problem: Problem, plan: Plan) -> Entry:
    return Entry(
        **{
            **vars(make_entry(Key.of(problem))),
            "plan": plan.as_dict(),
            "numerics": numerics_class(plan),
            "templates": {name: templates.fingerprint(name) for name, _ in plan.stages},
        }
    )


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A database of one good record."""
    return db.store(tmp_path, H200, "chunk_kda", "fwd", [make_record(PROBLEM, default_plan(PROBLEM, H200))])


def stages(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return plan["stages"]


def change_config(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets a field of the first stage's config that has it."""

    def change(plan: dict[str, Any]) -> None:
        next(config for config in stages(plan).values() if name in config)[name] = value

    return change


def replace_stage(plan: dict[str, Any]) -> None:
    stages(plan)["fwd_nope"] = stages(plan).pop(next(iter(stages(plan))))


def use_staged(plan: dict[str, Any], **changes: Any) -> None:
    """Another plan for the same record: that of every device, with some fields of fwd_gate changed."""
    case = Case(problem=PROBLEM, device=H200, BT=64, BC=16)
    plan.update(pipeline_defaults("staged", case).as_dict())
    stages(plan)["fwd_gate"].update(changes)


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "huge": (lambda plan: use_staged(plan, BK=1000000000), r"FwdGateConfig.BK must be one of \(.*\), got 1000000000"),
    "float": (lambda plan: use_staged(plan, BK=32.0), r"FwdGateConfig.BK must be one of \(.*\), got 32.0"),
    "flag": (lambda plan: use_staged(plan, unroll=True), r"FwdGateConfig.unroll must be one of \(.*\), got True"),
    "field": (lambda plan: use_staged(plan, nope=1), r"FwdGateConfig has the fields \['BK'.*\], got .*'nope'"),
    "pipeline": (lambda plan: plan.update(pipeline="nope"), "there is no fwd pipeline 'nope'"),
    "pass": (lambda plan: plan.update(pipeline="prep_scan"), "there is no fwd pipeline 'prep_scan'"),
    "stage": (replace_stage, r"the stages of prep_recurrence are \['fwd_prep', 'fwd_recurrence'\]"),
    "chunks": (lambda plan: plan.update(BT=48), "BT must be one of"),
    "kept": (lambda plan: plan.update(kept=True), "prep_recurrence has nothing to keep"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_validate_finds_plans_that_cannot_run(
    what: str, stored: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    change, told = BROKEN[what]
    assert main(["db", "validate", str(tmp_path)]) == 0
    edit(stored, lambda values: change(values["entries"][0]["plan"]))
    capsys.readouterr()
    assert main(["db", "validate", str(tmp_path)]) == 2
    found = [line for line in capsys.readouterr().out.splitlines() if "cannot run" in line]
    assert len(found) == 1
    (sentence,) = found
    assert sentence.startswith(f"{stored}: entries[0].plan cannot run: ") and sentence.endswith(".")
    assert re.search(told, sentence), sentence


def test_validate_asks_for_the_gpu_and_the_pass_of_the_file(
    stored: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan for Hopper does not run on the CPU, and nobody has an operator of another name."""
    record = make_record(PROBLEM, default_plan(PROBLEM, H200))
    cpu = db.store(tmp_path, cpu_device(), "chunk_kda", "fwd", [record])
    other = db.store(tmp_path, H200, "chunk_nope", "fwd", [record])
    assert main(["db", "validate", str(tmp_path), "--json"]) == 2
    (problems,) = json.loads(capsys.readouterr().out)["paths"].values()
    assert [problem.partition(": ")[0] for problem in problems] == [str(cpu), str(other)]
    assert "entries[0].plan cannot run: fwd_prep: " in problems[0]
    assert "entries[0].plan cannot run: there is no operator 'chunk_nope'" in problems[1]


def test_validate_accepts_every_default(tmp_path: Path) -> None:
    """Records of what runs are valid, whatever their key: none is held against a problem that it is not for."""
    for direction in ("fwd", "bwd"):
        records = {}
        for gate in ("log", "softplus", "safe"):
            for heads, group, K in ((4, 1, 64), (5, 3, 128), (7, 5, 48)):
                computed = gate != "log"
                flags = {"gate": gate, "has_A_log": computed, "has_dt_bias": computed, "direction": direction}
                problem = Problem(H=heads, HV=heads * group, K=K, V=K, tokens=300, varlen=group > 1, **flags)
                record = make_record(problem, default_plan(problem, cpu_device(), BT=BT_CHOICES[heads % 3]))
                records[record.key] = record
        db.store(tmp_path, cpu_device(), "chunk_kda", direction, records.values())
    assert main(["db", "validate", str(tmp_path)]) == 0
    assert {p.direction for p in CHUNKED.values()} == {"fwd", "bwd"}


def test_validate_knows_every_operator(tmp_path: Path) -> None:
    for operator in load_all():
        scalar = operator == "chunk_gated_delta_rule"
        problem = Problem(H=2, HV=2, K=64, V=64, tokens=300, gate="log", operator=operator, scalar_gate=scalar)
        db.store(tmp_path, cpu_device(), operator, "fwd", [make_record(problem, default_plan(problem, cpu_device()))])
    assert main(["db", "validate", str(tmp_path)]) == 0


def test_validate_is_not_held_by_a_record_of_endless_sequences(
    stored: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = {**make_key().as_dict(), "varlen": True, "tokens_bucket": 1 << 60, "longest_bucket": 16}
    edit(stored, lambda values: values["entries"][0].update(key=key))
    assert main(["db", "validate", str(tmp_path)]) == 0, capsys.readouterr().out


@pytest.mark.timeout(60)
def test_validate_of_a_fifo_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plans.json")
    assert main(["db", "validate", str(tmp_path / "plans.json")]) == 2
    assert "it is a FIFO, not a regular file" in capsys.readouterr().out


def test_export_into_a_folder_that_cannot_be_written_says_to_pass_another(
    stored: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()  # a folder below a file: tests may run as root, whom permissions do not stop
    assert main(["db", "export", str(tmp_path / "file" / "db"), "--from", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "cannot write the tuning database" in err and err.rstrip().endswith("pass a directory you may write.")
    assert "KDA_TL_DB" not in err
