"""What runs when nothing is tuned: from a problem and a device to the plans of all pipelines, first in rank first."""

import functools
from collections.abc import Iterable, Iterator

from kda_tl.core.device import Device
from kda_tl.core.pipeline import Pipeline
from kda_tl.core.problem import Problem
from kda_tl.core.stage import BT_CHOICES, Case, Plan
from kda_tl.errors import InputError

# When nothing is tuned: the first whose stages take the case, see rank_pipelines. The last runs on every device.
DEFAULT_PIPELINES = {
    "fwd": ("prep_recurrence", "gdn_pairs", "gdn_recurrence", "staged"),
    "bwd": ("prep_scan", "gdn_scan", "staged_backward"),
    "step": ("decode_rows", "decode"),
}
DEFAULT_BT = 64
DEFAULT_BC = 16
# When a batch is cut into segments, see count_steps
_BLOCK_CHANNELS = 64  # of a head's values that a thread block takes through all chunks of a sequence
_WALKS = {"fwd": 1.75, "bwd": 3.0}  # steps a chunk of a segment, which is walked through several times
_SHARED = 1.5  # how many times as long they are where two blocks share each multiprocessor
_APART = 2.0  # steps of a GPU that is full a chunk of all heads: it is prepared before the walks and not beside them
_A_SEGMENT = 1.6  # steps that each segment adds
_A_CUT = 4.0  # steps that a cut adds
# When a serial pipeline comes first, see fills_device
_LEAST_FILLED = 0.7  # of a GPU's time, or what has more and shorter blocks is faster
_SERIAL_CHANNELS = 128  # of a head's values that a multiprocessor takes through all chunks of a segment


def pipeline_defaults(pipeline: str, case: Case) -> Plan:
    """A pipeline's plan when nothing is tuned, whether or not the case fits it: see :func:`find_rejection`."""
    from kda_tl.templates.pipelines import PIPELINES

    of = PIPELINES[pipeline]
    stages = tuple((stage.name, of.defaults.get(stage.name, stage.default)(case)) for stage in of.stages)
    return Plan(pipeline=pipeline, BT=case.BT, BC=case.BC, stages=stages, kept=of.keeps)


def find_rejection(plan: Plan, case: Case) -> str:
    """The first stage that cannot run a case as the plan says, and why; empty if all can."""
    reasons = (f"{name}: {reason}" for name, config in plan.stages if (reason := config.reject(case)))
    return next(reasons, "")


def count_steps(case: Case, segments: int) -> float:
    """About how long a pass takes that cuts a batch, or leaves it whole (1), in chunks that a lone sequence takes.

    Whole sequences of few heads leave most of a GPU idle. Segments are counted as a layout does, all sequences together
    (:func:`kda_tl.core.layout.make_layout`). The constants were fitted to docs/h200/cuts.json, 141 problems of both
    operators on one H200: of 4, 8, 16 segments and none, what takes the fewest steps was 0.5 % slower than the fastest
    there on average, and 10 % at most.
    """
    p = case.problem
    chunks = -(-p.tokens // case.BT)
    longest = min(-(-p.longest // case.BT), chunks)
    share = p.HV * -(-p.V // _BLOCK_CHANNELS) / case.device.num_sms  # of the multiprocessors, that a sequence takes
    if segments == 1:
        return max(longest, chunks * share)
    full = segments * share
    rounds = 1.0 if full <= 1 else max(_SHARED, _SHARED * full / 2)
    walks = rounds * _WALKS[p.direction] * chunks / segments
    return walks + _APART * chunks * share + _A_SEGMENT * segments + _A_CUT


def choose_segments(case: Case, choices: Iterable[int]) -> int:
    """Into which of some numbers of segments a batch is cut when nothing is tuned: what takes the fewest steps.

    1 leaves sequences whole, as all are that have no lengths.
    """
    return min((1, *sorted(choices)), key=lambda segments: count_steps(case, segments))


def fills_device(case: Case, pipeline: Pipeline) -> bool:
    """Whether the blocks of a serial pipeline, if all segments were as long as the longest, keep a GPU busy.

    What has no lengths does not, nor what is cut into fewer chunks than repay it.
    """
    p, num_sms, segments = case.problem, case.device.num_sms, pipeline.segments
    chunks, longest = (-(-tokens // case.BT) for tokens in (p.tokens, p.longest))
    if chunks < segments * (pipeline.least_chunks if segments > 1 else 1):
        return False
    of_segment, heads = min(longest, -(-chunks // segments)), p.HV * -(-p.V // _SERIAL_CHANNELS)
    rounds = -(-heads * -(-chunks // of_segment) // num_sms)
    if pipeline.at_once and rounds > 1:
        return False
    return heads * chunks >= _LEAST_FILLED * num_sms * rounds * of_segment


def rank_pipelines(case: Case) -> list[str]:
    """The pipelines of a case's pass by their names, as they run when nothing is tuned: the first that takes the case.

    Serial ones that fill the GPU come first, that with the fewest segments before the others. Those that cut a batch as
    :func:`choose_segments` says come before those that leave sequences whole, of which those come first that say
    themselves that they suit a case. All others come after these: their kernels may be the only ones that are there
    where none can be compiled.
    """
    from kda_tl.templates.pipelines import PIPELINES

    direction = case.problem.direction
    *whole, last = DEFAULT_PIPELINES[direction]
    others = [each for each in PIPELINES.values() if each.direction == direction and each.name not in (*whole, last)]
    cuts = {each.segments for each in others if not each.serial} - {1}
    segments = choose_segments(case, cuts) if cuts else 1
    first = [each for each in others if each.serial and fills_device(case, each)]
    first += [each for each in others if not each.serial and each.segments == segments > 1]
    first += [each for each in others if each.suits is not None and each.suits(case)]
    return [*(each.name for each in first), *whole, *(each.name for each in others if each not in first), last]


def iter_defaults(
    problem: Problem, device: Device, *, BT: int = DEFAULT_BT, BC: int = DEFAULT_BC, pipeline: str | None = None
) -> Iterator[Plan]:
    """The plans that run when nothing is tuned, first in rank first: of every pipeline, and of chunks from BT down.

    A step has no chunks.

    BT and BC are the most tokens a chunk and a sub-chunk; a pipeline that is given need not be a default. Raises
    InputError if the device runs no chunk size of at most BT; the message holds the last stage's reason, that of the
    largest chunks if it is about one pipeline.
    """
    sizes = [size for size in BT_CHOICES if size <= BT] if problem.chunked else [0]  # the largest first
    cases = [Case(problem=problem, device=device, BT=size, BC=min(BC, size)) for size in sizes]
    ranked = [(case, name) for case in cases for name in (rank_pipelines(case) if pipeline is None else (pipeline,))]
    failures: list[str] = []
    for case, name in ranked:
        plan = pipeline_defaults(name, case)
        if rejection := find_rejection(plan, case):
            failures.append(rejection)
        else:
            yield plan
    if len(failures) == len(ranked):
        if pipeline is not None:
            raise InputError(f"{pipeline} does not run {problem.key} on {device.slug}: {failures[0]}.")
        raise InputError(f"{problem.key} does not fit {device.slug}: {failures[-1]}.")


def default_plan(
    problem: Problem, device: Device, *, BT: int = DEFAULT_BT, BC: int = DEFAULT_BC, pipeline: str | None = None
) -> Plan:
    """The first of :func:`iter_defaults`."""
    return next(iter_defaults(problem, device, BT=BT, BC=BC, pipeline=pipeline))


@functools.lru_cache(maxsize=512)
def find_keeper(forward: Plan, problem: Problem, device: Device) -> Plan:
    """The plan of a forward that keeps residuals: its own, or the default of a pipeline that makes them."""
    from kda_tl.templates.pipelines import PIPELINES

    keeper = PIPELINES[forward.pipeline].keeper
    return default_plan(problem, device, BT=forward.BT, BC=forward.BC, pipeline=keeper) if keeper else forward


def count_segments(plan: Plan) -> int:
    """Into how many segments a plan's pipeline cuts sequences, at most; 1 leaves them whole."""
    from kda_tl.templates.pipelines import PIPELINES

    return PIPELINES[plan.pipeline].segments
