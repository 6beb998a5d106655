"""The search of a stage on the CPU target: every way to fail, killed and run again, nothing measured twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support import fake_stages
from support.tuner_cases import WORKLOAD, fixture, searched

from kda_tl import templates
from kda_tl.bench.workloads import Workload
from kda_tl.tune import stage_search
from kda_tl.tune.events import StageResult, TrialDone
from kda_tl.tune.journal import Trial
from kda_tl.tune.pool import WorkerPool
from kda_tl.tune.session import Run


@dataclass(frozen=True)
class Stopped:
    """The fake stage's search, killed and run again."""

    journal: Path
    before: list[Trial]
    after: list[Trial]
    result: StageResult


@pytest.fixture(scope="module")
def stopped(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """kill -9 after the first measurement, then the same search to its end."""
    journal = tmp_path_factory.mktemp("stopped") / "trials.jsonl"
    code = f"from support.fake_stages import tune_fake; tune_fake({str(journal)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    victim = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        while victim.poll() is None and not (journal.exists() and journal.read_bytes().endswith(b"\n")):
            time.sleep(0.05)
    finally:
        victim.kill()
        victim.wait()
    before = searched(journal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stage_search._TRIAL_TIMEOUT_S, "cpu", 5.0)
        result = stage_search.tune_stage(fake_stages.make_run(pool, journal), fake_stages.BENCH, fake_stages.STAGE)
    return Stopped(journal, before, searched(journal), result)


@pytest.mark.rest
def test_a_killed_search_goes_on_and_repeats_no_measurement(stopped: Stopped) -> None:
    assert 1 <= len(stopped.before) < len(stopped.after)
    assert stopped.after[: len(stopped.before)] == stopped.before
    repeated = [key for key, n in Counter((t.study, repr(t.config)) for t in stopped.after).items() if n > 1]
    assert not repeated
    assert stopped.result.search.resumed == len(stopped.before)


@pytest.mark.rest
def test_every_failure_is_recorded_as_what_it_is_and_the_search_goes_on(stopped: Stopped) -> None:
    statuses = {(t.config["kind"], t.config["repeat"]): t.status for t in stopped.after}
    assert statuses == {
        ("right", 8): "ok",
        ("right", 1): "ok",
        ("wrong", 8): "wrong",
        ("unwritten", 8): "wrong",
        ("broken", 8): "compile",
        ("dies", 8): "crash",
        ("segfaults", 8): "crash",
        ("hangs", 8): "timeout",
    }
    reasons = {t.config["kind"]: t.reason for t in stopped.after}
    assert "this config cannot be built" in reasons["broken"]
    assert "code 3" in reasons["dies"] and "SIGSEGV" in reasons["segfaults"]
    assert "o is off by 0.5" in reasons["wrong"] and "5 s" in reasons["hangs"]
    assert stopped.result.search.counts == {"ok": 2, "wrong": 2, "compile": 1, "crash": 2, "timeout": 1}
    assert stopped.result.rejected == {"refused configs are refused": 2, "one of each failure is enough": 6}


@pytest.mark.rest
def test_the_faster_config_wins_and_tells_by_how_much(stopped: Stopped) -> None:
    result = stopped.result
    assert result.winner == fake_stages.FakeConfig(repeat=1)
    assert result.default == fake_stages.FakeConfig(repeat=8)
    assert result.ratio is not None and result.ci95 is not None and result.median_us is not None
    assert result.ratio > 1.5 and result.ci95[0] <= result.ratio <= result.ci95[1]


@pytest.mark.rest
def test_a_finished_stage_is_answered_from_the_journal(
    stopped: Stopped, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerPool, "measure", lambda *_: pytest.fail("something was measured again"))
    again = stage_search.tune_stage(fake_stages.make_run(pool, stopped.journal), fake_stages.BENCH, fake_stages.STAGE)
    assert again.search.resumed == len(stopped.after) == len(searched(stopped.journal))
    assert (again.winner, again.ci95) == (stopped.result.winner, stopped.result.ci95)


def test_a_search_without_time_leaves_the_stage_untuned(run: Run) -> None:
    result = stage_search.tune_stage(run, fake_stages.BENCH, fake_stages.STAGE, deadline=time.monotonic() - 1)
    assert (result.winner, result.search.trials) == (None, ())
    assert "time limit" in result.search.stopped_because
    assert not run.journal.exists()


def test_ctrl_c_leaves_the_finished_trials(pool: WorkerPool, tmp_path: Path) -> None:
    journal = tmp_path / "trials.jsonl"

    def press(event: Any) -> None:
        if isinstance(event, TrialDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage_search.tune_stage(fake_stages.make_run(pool, journal, press), fake_stages.BENCH, fake_stages.STAGE)
    assert [t.status for t in searched(journal)] == ["ok"]


def test_equal_kernels_are_one_study(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def study(stage: str, workload: Workload = WORKLOAD, BC: int = 16) -> str:
        on, loaded = fixture(workload, BT=16, BC=BC), templates.load(stage)
        return stage_search.name_study(run, on, loaded, list(loaded.candidates(on.case)))

    softplus, slow = replace(WORKLOAD, gate="softplus"), replace(WORKLOAD, decay="slow")
    assert study("fwd_state", softplus) == study("fwd_state", slow) == study("fwd_state")
    assert study("fwd_gate", slow) == study("fwd_gate", BC=8) == study("fwd_gate")
    assert study("fwd_gate", softplus) != study("fwd_gate")
    assert study("fwd_intra", BC=8) != study("fwd_intra")
    assert study("fwd_state", replace(WORKLOAD, T=400)) != study("fwd_state")
    assert study("fwd_state", replace(WORKLOAD, T=41)) == study("fwd_state")  # the same bucket
    assert study("fwd_state", replace(WORKLOAD, H=2, HV=2)) != study("fwd_state")
    before = study("fwd_state")
    monkeypatch.setattr(stage_search, "fingerprint", lambda stage: "an edited template")
    assert study("fwd_state") != before


def test_candidates_are_ranked_from_the_default_outwards() -> None:
    case = fixture(replace(WORKLOAD, K=64), BT=64).case
    stage = templates.load("fwd_gate")
    ranked = stage_search.rank_by_distance(stage.candidates(case), stage.default(case))
    distances = [stage_search.measure_distance(config, ranked[0]) for config in ranked]
    assert ranked[0] == stage.default(case) and distances == sorted(distances) and distances[1] == 1
