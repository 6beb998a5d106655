"""The search of one stage: candidates, identity of what is searched, trials, and a contest of the finalists."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kda_tl import templates
from kda_tl.bench.fixtures import StageFixture
from kda_tl.bench.workloads import Workload
from kda_tl.core.isolate import WorkerFailure
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.core.toolchain import tilelang_version
from kda_tl.database.records import Key
from kda_tl.tune.events import ChunkVariant, StageResult, StageStarted, TrialDone
from kda_tl.tune.final import ROUNDS, Comparison, decide, measure_in_turns
from kda_tl.tune.journal import Outcome
from kda_tl.tune.pool import DeadlineExceeded
from kda_tl.tune.requests import CompileJob, IdentifyJob, StageContest, StageTimes, StageTrial
from kda_tl.tune.search import Evaluation, SearchResult, search, sort_valid
from kda_tl.tune.session import STAGES, Run

FINALISTS = 8
_NEAR = 1.1  # how far behind the best a finalist may be: over 8 interleaved rounds nothing has made up for 10 %
_TRIAL_TIMEOUT_S = {"cuda": 40.0, "cpu": 60.0}
_COMPARISON = ("winner", "median_us", "mad_us", "default_us", "ratio", "ci95")  # what a stage's result takes over
SURE = 8  # trials of a stage that its share of the time does not limit: the default and the best ranked


def count_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_space(stage: Stage, case: Case) -> tuple[list[Config], dict[str, int]]:
    """Candidates of a stage, and each sentence of rejection with the number of configs it turned down."""
    reasons = {config: config.reject(case) for config in stage.config.space()}
    rejected = Counter(reason for reason in reasons.values() if reason is not None)
    return [config for config, reason in reasons.items() if reason is None], dict(rejected)


def measure_distance(config: Config, default: Config) -> int:
    """Steps along the axes from the default: a guess at the cost that needs neither compiler nor device."""
    return sum(
        abs(choices.index(getattr(config, name)) - choices.index(getattr(default, name)))
        for name, choices in config.axes().items()
    )


def rank_by_distance(configs: Iterable[Config], default: Config) -> list[Config]:
    """Configs, the default first, then by distance from it; equally far ones in the order of the space."""
    return sorted(configs, key=lambda config: measure_distance(config, default))


def compile_jobs(stage: Stage, case: Case, configs: Iterable[Config]) -> list[CompileJob]:
    """One job a config."""
    return [CompileJob(stage=stage, case=case, config=config) for config in configs]


def prefetch(run: Run, fixture: StageFixture, *, stages: Sequence[Stage] | None = None, urgent: bool = True) -> None:
    """Has the kernels compiled that the searches of a bench's stages begin with; ``urgent`` if they are measured next.

    The stages come in the order of their searches, that of the pipeline unless given.
    """
    case = fixture.case
    searched = stages or fixture.pipeline.stages_of(case.problem)
    ranked = [(stage, rank_by_distance(split_space(stage, case)[0], stage.default(case))) for stage in searched]
    run.pool.enqueue((_identify_job(stage, case, configs) for stage, configs in ranked), urgent=urgent)
    for stage, configs in ranked:
        run.pool.enqueue(compile_jobs(stage, case, configs[: min(SURE, run.budget)]), urgent=urgent)


def time_stages(run: Run, fixture: StageFixture) -> dict[str, float]:
    """Microseconds of every stage with its default config, measured or from the journal; empty if that fails.

    Raises PrepareError if the workload does not run with default configs, DatabaseError if the journal is not written.
    """
    study = name_problem_study(run, fixture.workload, fixture.pipeline.stages_of(fixture.case.problem)) + STAGES
    config = {"pipeline": fixture.pipeline.name, "BT": fixture.BT, "BC": fixture.BC}

    def measure() -> Outcome:
        times = run.measure(StageTimes(fixture=fixture), fixture)
        return Outcome(status="ok", median_us=sum(times.values()), extra={"stages": times})

    try:
        outcome, _ = run.answer(study, config, measure)
    except WorkerFailure:  # the searches will show what is wrong
        return {}
    return dict(outcome.extra["stages"])


def name_problem_study(run: Run, workload: Workload, stages: Iterable[Stage]) -> str:
    """Identity of a problem, how fast its states decay, and the templates of some stages."""
    digest = hashlib.sha256("".join(map(fingerprint, stages)).encode()).hexdigest()[:16]
    return "/".join([run.device.slug, f"{workload.problem().key}-{workload.decay}", compiler_version(), digest])


def _identify_job(stage: Stage, case: Case, ranked: Sequence[Config]) -> IdentifyJob:
    return IdentifyJob(stage=stage, case=case, configs=(ranked[0], ranked[-1]) if ranked else ())


def name_study(
    run: Run, fixture: StageFixture, stage: Stage, candidates: Sequence[Config], deadline: float | None = None
) -> str:
    """Identity of what is searched: equal for two workloads if the same kernels run on as many tokens.

    Kernels are compared by their text before lowering, for the default and the candidate farthest from it: stages
    after the gate are the same for all gate modes, and only one stage depends on BC. Where the deadline passes first,
    nothing will be searched, and the problem itself takes their place.
    """
    case, problem = fixture.case, fixture.workload.problem()
    ranked = rank_by_distance(candidates, stage.default(case))
    kernels = repr((problem.without_lengths(), case.BT, case.BC))
    with contextlib.suppress(DeadlineExceeded):
        found = run.pool.result(_identify_job(stage, case, ranked), deadline=deadline)
        kernels = kernels if isinstance(found, WorkerFailure) else found
    digest = hashlib.sha256("\n".join([fingerprint(stage), kernels, *map(repr, candidates)]).encode())
    key = Key.of(problem)
    lengths = f"tokens{key.tokens_bucket}-longest{key.longest_bucket}-n{problem.sequences}"
    shape = f"H{problem.H}-HV{problem.HV}-K{problem.K}-V{problem.V}-{problem.dtype}-BT{case.BT}"
    return "/".join([run.device.slug, stage.name, shape, lengths, compiler_version(), digest.hexdigest()[:16]])


@functools.cache
def compiler_version() -> str:
    """TileLang's version, which moves the optimum."""
    return f"tilelang-{tilelang_version() or 'unknown'}"


def fingerprint(stage: Stage) -> str:
    """SHA-256 of a stage's template, or of the file that defines it elsewhere."""
    if stage.name in templates.names():
        return templates.fingerprint(stage.name)
    return hashlib.sha256(Path(inspect.getfile(stage.build)).read_bytes()).hexdigest()


@dataclass(eq=False)
class _Search:
    """State of one stage's search."""

    run: Run
    fixture: StageFixture
    stage: Stage
    of: int
    default: Config
    deadline: float | None  # of its share
    limit: float | None
    trials: list[Evaluation[Config]] = field(default_factory=list)

    @property
    def best_us(self) -> float | None:
        return min((t.time_us for t in sort_valid(self.trials)), default=None)

    def evaluate(self, config: Config) -> Outcome:
        deadline = self.limit if len(self.trials) < SURE else self.deadline
        if deadline is not None and time.monotonic() > deadline:
            raise DeadlineExceeded
        case, pool = self.fixture.case, self.run.pool
        jobs = compile_jobs(self.stage, case, [config])
        stages = self.fixture.pipeline.stages_of(case.problem)
        others = [one for s in stages for one in compile_jobs(s, case, [s.default(case)])]
        pool.prioritize([*others, *jobs])
        for other in others:  # the measuring process runs them to make this stage's inputs
            pool.result(other, deadline=deadline)
        limit_s, best_us = _TRIAL_TIMEOUT_S[self.run.device.kind], self.best_us
        trial = StageTrial(
            fixture=self.fixture, stage=self.stage, config=config, incumbent_us=best_us, timeout_s=limit_s
        )
        return self.run.attempt(jobs, trial, deadline, self.fixture)

    def note(self, evaluation: Evaluation[Config]) -> None:
        self.trials.append(evaluation)
        default_us = next((t.outcome.median_us for t in self.trials if t.config == self.default), None)
        name, number, best_us = self.stage.name, len(self.trials), self.best_us
        event = TrialDone(
            stage=name, number=number, of=self.of, evaluation=evaluation, best_us=best_us, default_us=default_us
        )
        self.run.emit(event)

    def search(self, candidates: Sequence[Config], study: str, seeds: Sequence[Config]) -> SearchResult:
        run, stage, case = self.run, self.stage, self.fixture.case
        if len(candidates) <= run.budget:  # all are enumerated: the pool need not wait for what is proposed
            run.pool.enqueue(compile_jobs(stage, case, rank_by_distance(candidates, self.default)))
        return search(
            candidates,
            self.evaluate,
            study=study,
            budget=run.budget,
            seed=run.seed,
            storage=run.journal,
            default=self.default if self.default in candidates else None,
            seeds=seeds,
            rank=lambda config: measure_distance(config, self.default),
            on_trial=self.note,
            prepare=lambda configs: run.pool.prioritize(compile_jobs(stage, case, configs)),
            batch=run.pool.size,
        )


def tune_stage(
    run: Run,
    fixture: StageFixture,
    stage: Stage,
    *,
    deadline: float | None = None,
    share: float | None = None,
    seeds: Sequence[Config] = (),
) -> StageResult:
    """Searches one stage of a fixture's pipeline and compares its best configs in a final.

    Args:
        run: the tuning run.
        fixture: what it is measured on.
        stage: the stage.
        deadline: ``time.monotonic`` when the search ends with what it has.
        share: when it ends if it has made its first trials, the best ranked; the deadline unless given.
        seeds: configs to try early.

    Raises PrepareError as :func:`time_stages`, and DatabaseError if the journal cannot be read or written.
    """
    begin = time.monotonic()
    candidates, rejected = split_space(stage, fixture.case)
    default = stage.default(fixture.case)
    study = name_study(run, fixture, stage, candidates, deadline)
    started = StageStarted(
        stage=stage.name,
        variant=ChunkVariant(pipeline=fixture.pipeline.name, BT=fixture.BT, BC=fixture.BC),
        space=stage.config.size(),
        candidates=len(candidates),
        budget=min(run.budget, len(candidates)),
        rejected=rejected,
    )
    run.emit(started)
    state = _Search(run, fixture, stage, started.budget, default, share or deadline, deadline)
    found = state.search(candidates, study, seeds)
    comparison = _choose(run, fixture, stage, study, found, default)
    result = StageResult(
        stage=stage.name,
        variant=started.variant,
        study=study,
        default=default,
        rejected=rejected,
        search=found,
        seconds=time.monotonic() - begin,
        **({} if comparison is None else {name: getattr(comparison, name) for name in _COMPARISON}),
    )
    run.emit(result)
    return result


def _choose(
    run: Run, fixture: StageFixture, stage: Stage, study: str, found: SearchResult, default: Config
) -> Comparison[Config] | None:
    """The contest of the finalists and the default; None if nothing is valid."""
    valid = sort_valid(found.trials)
    if not valid:
        return None
    configs = [t.config for t in valid[:FINALISTS] if t.time_us <= _NEAR * valid[0].time_us]
    base = next((t for t in valid if t.config == default), None)
    if base and default not in configs:
        configs.append(default)
    request = StageContest(fixture=fixture, stage=stage, configs=tuple(configs), rounds=ROUNDS[run.device.kind])
    order = tuple(stage.config.space())
    known = base.config if base else None
    if len(configs) > 1:
        with contextlib.suppress(WorkerFailure):  # what ran alone does not run in turns: a gain cannot be shown
            return decide(*measure_in_turns(run, study, configs, request, fixture), known, order)
    alone = base or valid[0]
    return decide({alone.config: alone.outcome.samples_us}, 1, known)
