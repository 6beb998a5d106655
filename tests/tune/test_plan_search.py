"""Plans that compete: each is checked first, and what is within the noise follows a fixed order."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.search_spaces import SMALL
from support.tuner_cases import BACKWARD, CPU, HERE, WORKLOAD

import kda_tl
from kda_tl import templates
from kda_tl.bench.fixtures import check_plan, make_pass, operator_tensors
from kda_tl.bench.workloads import Workload
from kda_tl.core.isolate import WorkerError
from kda_tl.core.stage import Case, Plan
from kda_tl.database.gpus import known_device
from kda_tl.errors import KdaTlError, WrongResultError
from kda_tl.runtime.compile import hash_kernel
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.dispatch import pin
from kda_tl.runtime.kernel import Kernel
from kda_tl.runtime.program import Program
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.tune import plan_search
from kda_tl.tune.events import ChunkVariant
from kda_tl.tune.final import decide, measure_in_turns
from kda_tl.tune.journal import Outcome
from kda_tl.tune.pool import WorkerPool
from kda_tl.tune.requests import Rounds
from kda_tl.tune.search import Evaluation
from kda_tl.tune.session import Run

# The backward


def test_backward_plans_are_run_on_what_the_operator_would_pass() -> None:
    workload = replace(BACKWARD, B=2, lengths=())
    plan = default_plan(workload.problem(), CPU, BT=16)
    tensors, sizes = operator_tensors(workload, 16, HERE, seed=3)
    found = Program.build(plan, workload.problem(), CPU).run(tensors, sizes, HERE)
    x = workload.inputs("cpu", seed=3)
    leaves = {name: x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias")}
    with pin(plan):
        o, ht = kda_tl.chunk_kda(**x)[:2]
    torch.autograd.backward([o, ht], [tensors["do"].view(o.shape), tensors["dht"]])
    for name, leaf in leaves.items():
        assert torch.equal(found[f"d{name}"].view(leaf.shape), leaf.grad), name


def test_every_gradient_of_a_plan_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = default_plan(BACKWARD.problem(), CPU, BT=16)
    assert 0 < check_plan(plan, BACKWARD, CPU) < 2e-5
    right = Program.run
    for wrong in ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"):

        def run(*args: Any, wrong: str = wrong) -> dict[str, Any]:
            found = right(*args)
            return found | {wrong: 1.01 * found[wrong]}

        monkeypatch.setattr(Program, "run", run)
        with pytest.raises(WrongResultError, match=f"{wrong} is off by 0.01 .* over 0.0002"):
            check_plan(plan, BACKWARD, CPU)


def test_a_plan_with_kept_results_begins_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(default_plan(BACKWARD.problem(), CPU, BT=16), kept=True)
    assert check_plan(plan, BACKWARD, CPU) < 2e-5
    made, names = make_pass(plan, BACKWARD, CPU), []
    launch = Kernel.__call__
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: names.append(self.stage.name) or launch(self, *args))
    made.run()
    pipeline = PIPELINES["staged_backward"]
    spared = [stage.name for stage in pipeline.stages if stage.name.startswith("fwd_")]
    assert spared + names == [stage.name for stage in pipeline.stages]
    again = make_pass(replace(plan, kept=False), BACKWARD, CPU)
    assert made.kept_bytes > 0 == again.kept_bytes and made.call_bytes == again.call_bytes > 0


@pytest.mark.parametrize(
    ("objective", "kept_us", "kept_bytes", "worth"),
    [
        ("time", 99.0, 10**9, True),  # the contest decides
        ("time", None, 1, False),
        ("balanced", 80.0, 19, True),
        ("balanced", 80.0, 21, False),
        ("balanced", 101.0, 1, False),
        ("balanced", None, 1, False),
    ],
)
def test_results_are_kept_for_what_that_saves(
    objective: str, kept_us: float | None, kept_bytes: int, worth: bool
) -> None:
    plan = default_plan(BACKWARD.problem(), CPU, BT=16)
    twin = plan_search.find_kept_twin(plan, objective)
    assert twin == replace(plan, kept=True)
    about = {"kept_bytes": kept_bytes, "call_bytes": 100}
    outcome = Outcome(status="ok" if kept_us else "crash", median_us=kept_us, extra=about)
    assert plan_search.is_worth_keeping(objective, 100.0, Evaluation(config=twin, outcome=outcome)) == worth


def test_a_backward_begins_with_what_the_forward_makes_that_is_called(run: Run) -> None:
    """Of 32 heads and 8192 tokens the forward leaves sequences whole: it makes no states of segments."""
    given: dict[str, Any] = {"operator": "chunk_gated_delta_rule", "gate": "log", "direction": "bwd"}
    at, workload = replace(run, device=known_device("nvidia_h200")), Workload(name="w", T=8192, H=32, **given)
    for pipeline, kept in (("gdn_walk_segments_4", True), ("gdn_walk_told_4", False)):
        variant = ChunkVariant(pipeline=pipeline, BT=64, BC=16)
        (plan,) = plan_search.default_plans(at, workload, [variant])
        assert plan.kept is kept is plan_search.can_be_kept(at, workload, plan), pipeline


def test_nothing_is_kept_for_memory_or_by_a_forward() -> None:
    backward, forward = (default_plan(w.problem(), CPU, BT=16) for w in (BACKWARD, WORKLOAD))
    assert plan_search.find_kept_twin(backward, "memory") is plan_search.find_kept_twin(forward, "time") is None


@pytest.mark.rest(draws=1)
@pytest.mark.parametrize("objective", plan_search.OBJECTIVES)
def test_the_objective_decides_what_competes(run: Run, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept results save half of the time, and double the memory."""
    default, held = default_plan(BACKWARD.problem(), CPU, BT=16), []

    def measure(run: Run, workload: Workload, plan: Plan) -> Evaluation[Plan]:
        about = {"kept_bytes": 100, "call_bytes": 100} if plan.kept else {}
        check = {"max_rel_err": 1e-6, "tolerance": 1e-5}
        us = 50.0 if plan.kept else 100.0
        outcome = Outcome(status="ok", median_us=us, check=check, extra={"timed": "launch", **about})
        return Evaluation(config=plan, outcome=outcome)

    def hold(run: Run, workload: Workload, plans: list[Plan]) -> tuple[dict[Plan, list[float]], int]:
        held.extend(plans)
        return {plan: [50.0 if plan.kept else 100.0] * 5 for plan in plans}, 5

    monkeypatch.setattr(plan_search, "run_plan", measure)
    monkeypatch.setattr(plan_search, "measure_plans", hold)
    _, entry = plan_search.compete(replace(run, objective=objective), BACKWARD, default, [], {})
    assert {plan.kept for plan in held} == ({True, False} if objective == "time" else {False})
    assert entry is not None and entry.plan.get("kept", False) == (objective == "time")
    assert entry.provenance.get("kept_bytes") == (100 if objective == "time" else None)


def test_the_default_wins_what_is_within_the_noise() -> None:
    default = [10.0, 10.1, 9.9, 10.0, 10.2]
    faster = decide({"default": default, "a": [5.0, 5.1, 4.9, 5.0, 5.0], "b": [5.0] * 5}, 3, "default", ("b", "a"))
    assert (faster.winner, faster.median_us, faster.default_us, faster.reps) == ("b", 5.0, 10.0, 15)
    assert faster.ratio == pytest.approx(2.0) and faster.ci95 is not None and faster.ci95[0] > 1.9
    near = decide({"default": default, "a": [9.9] * 5}, 3, "default")
    noisy = decide({"default": default, "a": [9.0, 9.0, 9.0, 30.0, 30.0]}, 3, "default")
    for comparison in (near, noisy):
        assert (comparison.winner, comparison.ratio, comparison.ci95) == ("default", 1.0, (1.0, 1.0))
    alone = decide({"a": [3.0, 4.0]}, 3, None)
    assert (alone.winner, alone.ratio, alone.ci95, alone.default_us) == ("a", None, None, None)


@pytest.mark.parametrize("noise", [(100.0, 101.0), (101.0, 100.0)])
def test_equally_fast_entrants_of_a_contest_follow_the_fixed_order(noise: tuple[float, float]) -> None:
    """Entrants come best first, which is noise too."""
    times = dict(sorted(zip(SMALL[:2], noise, strict=True), key=lambda item: item[1]))
    stored = Mock(extra={"rounds": [[us] * 5 for us in times.values()], "reps": 3})
    recall: Any = SimpleNamespace(answer=lambda study, config, measure: (stored, True))
    for order in (SMALL[:2], SMALL[1::-1]):
        assert decide(*measure_in_turns(recall, "s", list(times), Mock()), None, order).winner == order[0]


def test_equally_fast_plans_follow_a_fixed_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two is measured as the faster one changes from run to run; the default is far behind."""
    plans = [default_plan(BACKWARD.problem(), CPU, BT=BT, BC=BC) for BT, BC in ((64, 16), (32, 16), (32, 8))]
    default, *others = plans
    winners = set()
    for faster in others:
        for order in (others, others[::-1]):
            noisy = {plan: 100.0 if plan == faster else 101.0 for plan in others} | {default: 200.0}
            fake = FakeMeasurements(noisy)
            monkeypatch.setattr(plan_search, "run_plan", fake.run_plan)
            again = replace(run, objective="memory", known={})
            monkeypatch.setattr(Run, "measure", fake.measure)
            _, entry = plan_search.compete(again, BACKWARD, default, order, {})
            assert entry is not None
            winners.add((entry.plan["BT"], entry.plan["BC"]))
    assert winners == {(32, 16)}


def test_kernels_that_calls_need_are_hashed_side_by_side_once_a_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other workloads have the same kernels; what cannot be lowered says which plan it is of."""
    plan = default_plan(WORKLOAD.problem(), CPU, BT=16)
    found = plan_search._hash_kernels(run, WORKLOAD.problem(), plan)
    case = Case(problem=WORKLOAD.problem(), device=CPU, BT=plan.BT, BC=plan.BC)
    assert found == {name: hash_kernel(templates.load(name), case, config) for name, config in plan.stages}
    monkeypatch.setattr(WorkerPool, "_feed", lambda pool, first=None: None)  # no process works from here on
    longer = replace(WORKLOAD, T=WORKLOAD.T + 1).problem()
    assert plan_search._hash_kernels(run, longer, plan) == found
    monkeypatch.setattr(WorkerPool, "result", lambda pool, job: WorkerError("CompileError", "it is too wide"))
    with pytest.raises(KdaTlError, match=f"{re.escape(plan.label)} cannot be hashed for .*: .*too wide"):
        plan_search._hash_kernels(run, longer, plan)


class FakeMeasurements:
    """Plans with times that are made up."""

    def __init__(self, us: dict[Plan, float]) -> None:
        self.us = us

    def run_plan(self, run: Run, workload: Workload, plan: Plan) -> Evaluation[Plan]:
        check = {"max_rel_err": 1e-6, "tolerance": 1e-5}
        return Evaluation(config=plan, outcome=Outcome(status="ok", median_us=self.us[plan], check=check))

    def measure(self, request: Any, fixture: Any = None) -> Any:
        return Rounds(medians_us=[[self.us[plan]] * 5 for plan in request.plans], reps=3)


def test_a_wrong_plan_neither_competes_nor_is_stored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by far the fastest: it answers from memory, and one of its results is 1 % off."""
    right, wrong = (default_plan(WORKLOAD.problem(), CPU, BT=16, BC=BC) for BC in (16, 8))
    launch, answers, held = Program.run, {}, []

    def answer(self: Program, tensors: Any, sizes: Any, *args: Any) -> dict[str, Any]:
        if self.plan != wrong:
            return launch(self, tensors, sizes, *args)
        size = tuple(sizes.items())
        if size not in answers:
            found = launch(self, tensors, sizes, *args)
            answers[size] = found | {"ht": 1.01 * found["ht"]}
        return answers[size]

    def measure(self: Run, request: Any, fixture: Any = None) -> Any:
        held.extend(getattr(request, "plans", ()))
        return request.run()

    monkeypatch.setattr(Program, "run", answer)
    monkeypatch.setattr(Run, "measure", measure)
    with torch.no_grad():
        found, entry = plan_search.compete(run, WORKLOAD, right, [wrong], {})
        failed, no_entry = plan_search.compete(run, WORKLOAD, wrong, [wrong], {})
    assert [(result.config, result.outcome.status) for result in found] == [(right, "ok"), (wrong, "wrong")]
    assert "ht is off by 0.01" in found[1].outcome.reason and held == [right]
    assert entry is not None and entry.plan == right.as_dict() and entry.check.max_rel_err < 1e-5
    assert no_entry is None and [result.outcome.status for result in failed] == ["wrong"]
