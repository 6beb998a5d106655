"""Pipelines: ways to compute a pass, as ordered stage calls. Each reads as the life of its tensors.

A pipeline is a function of ``run`` and the operator's tensors. ``run(stage, **tensors)`` returns the stage's outputs
in the order it declares them, None for absent ones: dispatch launches kernels, tests run the references, the tuner
records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kda_tl.problem import Problem
from kda_tl.stage import Stage
from kda_tl.toolchain import import_tilelang

import_tilelang()  # or a sentence; the stages below would raise whatever a missing or broken TileLang raises

from kda_tl.templates import (  # noqa: E402
    bwd_gate,
    bwd_gradients,
    bwd_heads,
    bwd_intra,
    bwd_merge,
    bwd_output,
    bwd_qk,
    bwd_reduce,
    bwd_resume,
    bwd_scan,
    bwd_segment,
    bwd_state,
    bwd_wy,
    fwd_gate,
    fwd_intra,
    fwd_merge,
    fwd_output,
    fwd_prep,
    fwd_recurrence,
    fwd_resume,
    fwd_segment,
    fwd_state,
    fwd_wy,
)


class Run(Protocol):
    """Executes one stage."""

    def __call__(self, stage: Stage, **tensors: Any) -> Sequence[Any]:
        """Returns the outputs in the order the stage declares them."""


Compute = Callable[[Run, Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One way to compute a pass.

    Attributes:
        name: as stored in plans.
        direction: "fwd" or "bwd".
        stages: in launch order.
        compute: ``(run, tensors) -> outputs``: o, ht and h forward; dq, dk, dv, dg, dbeta, dh0, dA_log and ddt_bias
            backward.
        factors: outputs of stages, by name, that a forward can keep for a backward, or that a backward can resume from.
        resumed: the backward without the stages that make the factors: it takes them beside its other tensors.
        segments: that all chunks of a batch would make if they were one sequence: sequences longer than such a segment
            are cut. Kernels do not depend on it, only the chunk tables do.
    """

    name: str
    direction: str
    stages: tuple[Stage, ...]
    compute: Compute
    factors: tuple[str, ...] = ()
    resumed: Pipeline | None = None
    segments: int = 1

    def stages_of(self, problem: Problem) -> tuple[Stage, ...]:
        """The stages that are launched for a problem, in order."""
        return tuple(stage for stage in self.stages if stage.runs(problem))


def keeping(compute: Compute, names: tuple[str, ...]) -> Compute:
    """A pipeline's function that returns these outputs of its stages as well."""

    def compute_and_keep(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}

        def run_and_keep(stage: Stage, **tensors: Any) -> Sequence[Any]:
            outputs = run(stage, **tensors)
            kept.update((name, out) for name, out in zip(stage.outputs, outputs, strict=True) if name in names)
            return outputs

        return compute(run_and_keep, x) | kept

    return compute_and_keep


class _Factors(NamedTuple):
    """What the stages before the recurrence make of a pass's inputs."""

    g_cumsum: Any
    Aqk: Any
    Akk: Any
    rstd: Any
    w: Any
    u: Any
    kg: Any
    qg: Any


def _make_factors(run: Run, x: Mapping[str, Any]) -> _Factors:
    """Gate, intra and wy: the same in both directions."""
    chunks = x["chunk_tokens"]
    (g_cumsum,) = run(
        fwd_gate.STAGE,
        g=x["g"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        chunk_tokens=chunks,
        lower_bound=x["lower_bound"],
    )
    Aqk, Akk, rstd = run(
        fwd_intra.STAGE,
        q=x["q"],
        k=x["k"],
        g_cumsum=g_cumsum,
        beta=x["beta"],
        chunk_tokens=chunks,
        scale=x["scale"],
    )
    w, u, kg, qg = run(
        fwd_wy.STAGE,
        q=x["q"],
        k=x["k"],
        v=x["v"],
        g_cumsum=g_cumsum,
        beta=x["beta"],
        Akk=Akk,
        rstd=rstd,
        chunk_tokens=chunks,
        scale=x["scale"],
    )
    return _Factors(g_cumsum=g_cumsum, Aqk=Aqk, Akk=Akk, rstd=rstd, w=w, u=u, kg=kg, qg=qg)


def _scan_chunks(run: Run, x: Mapping[str, Any], **factors: Any) -> Sequence[Any]:
    """The recurrence: h, v_new, ht."""
    return run(fwd_state.STAGE, h0=x["h0"], seq_chunks=x["seq_chunks"], **factors)


def staged_forward(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """Five stages through memory: runs on every target, and each step can be looked at."""
    g_cumsum, Aqk, Akk, rstd, w, u, kg, qg = _make_factors(run, x)
    del Akk, rstd
    h, v_new, ht = _scan_chunks(run, x, w=w, u=u, kg=kg, g_cumsum=g_cumsum)
    del w, u, kg, g_cumsum
    (o,) = run(fwd_output.STAGE, qg=qg, h=h, Aqk=Aqk, v_new=v_new, chunk_tokens=x["chunk_tokens"])
    return {"o": o, "ht": ht, "h": h}


# What a chunk's factors are made of, and what gradients go back to
_RAW = ("q", "k", "g", "beta", "A_log", "dt_bias", "chunk_tokens", "scale", "lower_bound")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0", "dA_log", "ddt_bias")


# What a chunk does alone
PREPARED = tuple(fwd_prep.STAGE.outputs)


def _prepare_chunks(run: Run, x: Mapping[str, Any]) -> Sequence[Any]:
    """By the names of PREPARED."""
    return run(fwd_prep.STAGE, **{name: x[name] for name in _RAW})


def prep_recurrence(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk does alone, then what chunks do one after the other: two stages, for Hopper."""
    A, Aqk, k_neg, qg, kg, decay = _prepare_chunks(run, x)
    o, ht, h = run(
        fwd_recurrence.STAGE,
        v=x["v"],
        A=A,
        Aqk=Aqk,
        k_neg=k_neg,
        qg=qg,
        kg=kg,
        decay=decay,
        h0=x["h0"],
        segments=x["segments"],
        chunk_tokens=x["chunk_tokens"],
    )
    return {"o": o, "ht": ht, "h": h}


def prep_segments(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """The same with sequences cut into segments side by side: their effect, the states between them, their outputs."""
    A, Aqk, k_neg, qg, kg, decay = _prepare_chunks(run, x)
    tables = {"segments": x["segments"], "chunk_tokens": x["chunk_tokens"]}
    starts, transition = _find_starts(run, x, A=A, k_neg=k_neg, kg=kg, decay=decay)
    del transition
    o, ht, h = run(
        fwd_resume.STAGE,
        v=x["v"],
        A=A,
        Aqk=Aqk,
        k_neg=k_neg,
        qg=qg,
        kg=kg,
        decay=decay,
        starts=starts,
        **tables,
    )
    return {"o": o, "ht": ht, "h": h}


def _find_starts(run: Run, x: Mapping[str, Any], **factors: Any) -> tuple[Any, Any]:
    """The states that segments start from, and the transitions of those that end no sequence."""
    tables = {"segments": x["segments"], "chunk_tokens": x["chunk_tokens"]}
    local, transition = run(fwd_segment.STAGE, v=x["v"], **factors, **tables)
    (starts,) = run(
        fwd_merge.STAGE,
        local=local,
        transition=transition,
        h0=x["h0"],
        seq_segments=x["seq_segments"],
    )
    return starts, transition


def staged_backward(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """Four stages of the forward again, then seven of gradients: nothing is kept from the forward but its inputs."""
    return _make_gradients(run, x, _repeat_forward(run, x))


def resumed_backward(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """Seven stages of gradients, from factors that the forward kept."""
    return _make_gradients(run, x, {name: x[name] for name in FACTORS})


# What gradients need of the forward. Chunks of both passes must be cut alike: the factors lie chunk by chunk.
FACTORS = (*_Factors._fields, "h", "v_new")


def _repeat_forward(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """The factors by name."""
    made = _make_factors(run, x)
    h, v_new, _ = _scan_chunks(run, x, w=made.w, u=made.u, kg=made.kg, g_cumsum=made.g_cumsum)
    return {**made._asdict(), "h": h, "v_new": v_new}


def _make_gradients(run: Run, x: Mapping[str, Any], factors: dict[str, Any]) -> dict[str, Any]:
    """From the factors on, which are taken out of their dict: each lives until its last stage and no longer."""
    chunks = x["chunk_tokens"]
    g_cumsum, Aqk, Akk, rstd, w, u, kg, qg, h, v_new = map(factors.pop, FACTORS)
    dAqk, dv_local = run(bwd_output.STAGE, do=x["do"], Aqk=Aqk, v_new=v_new, chunk_tokens=chunks)
    del Aqk
    dh, dv_new, dh0 = run(
        bwd_state.STAGE,
        qg=qg,
        kg=kg,
        w=w,
        do=x["do"],
        dv_local=dv_local,
        g_cumsum=g_cumsum,
        dht=x["dht"],
        seq_chunks=x["seq_chunks"],
        chunk_tokens=chunks,
    )
    del kg, qg, dv_local
    dq_inter, dk_inter, dv, db_inter, dG_inter, dL = run(
        bwd_wy.STAGE,
        q=x["q"],
        k=x["k"],
        v=x["v"],
        g_cumsum=g_cumsum,
        beta=x["beta"],
        Akk=Akk,
        w=w,
        u=u,
        rstd=rstd,
        h=h,
        v_new=v_new,
        do=x["do"],
        dv_new=dv_new,
        dh=dh,
        chunk_tokens=chunks,
        scale=x["scale"],
    )
    del Akk, w, u, h, v_new, dv_new, dh
    dq_part, dk_part, db, dG = run(
        bwd_intra.STAGE,
        q=x["q"],
        k=x["k"],
        g_cumsum=g_cumsum,
        beta=x["beta"],
        rstd=rstd,
        dAqk=dAqk,
        dL=dL,
        dq_inter=dq_inter,
        dk_inter=dk_inter,
        db_inter=db_inter,
        dG_inter=dG_inter,
        chunk_tokens=chunks,
        scale=x["scale"],
    )
    del g_cumsum, dAqk, dL, dq_inter, dk_inter, db_inter, dG_inter
    dg, dbeta, dA_log_part, ddt_bias_part = run(
        bwd_gate.STAGE,
        dG=dG,
        db=db,
        g=x["g"],
        A_log=x["A_log"],
        dt_bias=x["dt_bias"],
        beta=x["beta"],
        chunk_tokens=chunks,
        lower_bound=x["lower_bound"],
    )
    del db, dG
    dq, dk = run(bwd_qk.STAGE, dq_part=dq_part, dk_part=dk_part, q=x["q"], k=x["k"], rstd=rstd, chunk_tokens=chunks)
    del dq_part, dk_part, rstd
    dA_log, ddt_bias = _add_chunks(run, dA_log_part, ddt_bias_part)
    return dict(zip(GRADIENTS, (dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias), strict=True))


def _add_chunks(run: Run, dA_log_part: Any, ddt_bias_part: Any) -> Sequence[Any]:
    """Gradients of the gate's parameters, None for those that the problem lacks."""
    if dA_log_part is None and ddt_bias_part is None:
        return None, None
    return run(bwd_reduce.STAGE, dA_log_part=dA_log_part, ddt_bias_part=ddt_bias_part)


def prep_scan(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """For Hopper: what a chunk does alone, the scans in both directions, and the rest of a chunk's gradients."""
    return _scan_both_ways(run, x, dict(zip(PREPARED, _prepare_chunks(run, x), strict=True)), _scan_sequences)


def resumed_scan(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """The same from what the forward prepared."""
    return _scan_both_ways(run, x, {name: x[name] for name in PREPARED}, _scan_sequences)


def prep_scan_segments(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """The same as prep_scan with sequences cut into segments side by side."""
    return _scan_both_ways(run, x, dict(zip(PREPARED, _prepare_chunks(run, x), strict=True)), _scan_segments)


def resumed_scan_segments(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """The same from what the forward prepared."""
    return _scan_both_ways(run, x, {name: x[name] for name in PREPARED}, _scan_segments)


def _scan_sequences(run: Run, x: Mapping[str, Any], prepared: Mapping[str, Any]) -> Sequence[Any]:
    """Values, states, their gradients and those of initial states, of whole sequences."""
    return run(
        bwd_scan.STAGE,
        **prepared,
        v=x["v"],
        do=x["do"],
        h0=x["h0"],
        dht=x["dht"],
        segments=x["segments"],
        chunk_tokens=x["chunk_tokens"],
    )


def _scan_segments(run: Run, x: Mapping[str, Any], prepared: Mapping[str, Any]) -> Sequence[Any]:
    """The same of segments: their effect in both directions, the states and gradients between them, and the scans."""
    tables = {"segments": x["segments"], "chunk_tokens": x["chunk_tokens"]}
    walked = ("A", "k_neg", "kg", "decay")
    starts, transition = _find_starts(run, x, **{name: prepared[name] for name in walked})
    (dlocal,) = run(bwd_segment.STAGE, do=x["do"], **prepared, dht=x["dht"], **tables)
    (ends,) = run(
        bwd_merge.STAGE,
        dlocal=dlocal,
        transition=transition,
        dht=x["dht"],
        seq_segments=x["seq_segments"],
    )
    del dlocal, transition
    return run(bwd_resume.STAGE, **prepared, v=x["v"], do=x["do"], starts=starts, ends=ends, **tables)


Scan = Callable[[Run, Mapping[str, Any], Mapping[str, Any]], Sequence[Any]]


def _scan_both_ways(run: Run, x: Mapping[str, Any], prepared: dict[str, Any], scan: Scan) -> dict[str, Any]:
    """From what chunks do alone on, which is forgotten after the scans."""
    values, states, dv, dstates, dh0 = scan(run, x, prepared)
    prepared.clear()
    dq, dk, dq_part, dk_part, dg, dbeta, dA_log_part, ddt_bias_part = run(
        bwd_gradients.STAGE,
        values=values,
        states=states,
        do=x["do"],
        dv=dv,
        dstates=dstates,
        **{name: x[name] for name in _RAW},
    )
    del values, states, dstates
    if dq is None:  # value heads share heads
        dq, dk = run(bwd_heads.STAGE, dq_part=dq_part, dk_part=dk_part)
        del dq_part, dk_part
    dA_log, ddt_bias = _add_chunks(run, dA_log_part, ddt_bias_part)
    return dict(zip(GRADIENTS, (dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias), strict=True))


_BEFORE_OUTPUT = (fwd_gate.STAGE, fwd_intra.STAGE, fwd_wy.STAGE, fwd_state.STAGE)
_GRADIENTS = (
    bwd_output.STAGE,
    bwd_state.STAGE,
    bwd_wy.STAGE,
    bwd_intra.STAGE,
    bwd_gate.STAGE,
    bwd_qk.STAGE,
    bwd_reduce.STAGE,
)
_SCANNED = (bwd_scan.STAGE, bwd_gradients.STAGE, bwd_heads.STAGE, bwd_reduce.STAGE)
_SCANNED_SEGMENTS = (
    fwd_segment.STAGE,
    fwd_merge.STAGE,
    bwd_segment.STAGE,
    bwd_merge.STAGE,
    bwd_resume.STAGE,
    bwd_gradients.STAGE,
    bwd_heads.STAGE,
    bwd_reduce.STAGE,
)


def _cut_pipeline(segments: int) -> Pipeline:
    """The forward that cuts so many segments."""
    return Pipeline(
        name=f"prep_segments_{segments}",
        direction="fwd",
        stages=(fwd_prep.STAGE, fwd_segment.STAGE, fwd_merge.STAGE, fwd_resume.STAGE),
        compute=prep_segments,
        factors=PREPARED,
        segments=segments,
    )


def _cut_scan(segments: int) -> Pipeline:
    """The backward that does."""
    name = f"prep_scan_segments_{segments}"
    return Pipeline(
        name=name,
        direction="bwd",
        stages=(fwd_prep.STAGE, *_SCANNED_SEGMENTS),
        compute=prep_scan_segments,
        factors=PREPARED,
        resumed=Pipeline(
            name=name,
            direction="bwd",
            stages=_SCANNED_SEGMENTS,
            compute=resumed_scan_segments,
            segments=segments,
        ),
        segments=segments,
    )


PIPELINES: dict[str, Pipeline] = {
    "staged": Pipeline(
        name="staged",
        direction="fwd",
        stages=(*_BEFORE_OUTPUT, fwd_output.STAGE),
        compute=staged_forward,
        factors=FACTORS,
    ),
    "prep_recurrence": Pipeline(
        name="prep_recurrence",
        direction="fwd",
        stages=(fwd_prep.STAGE, fwd_recurrence.STAGE),
        compute=prep_recurrence,
        factors=PREPARED,
    ),
    **{pipeline.name: pipeline for pipeline in map(_cut_pipeline, (4, 8, 16))},
    "staged_backward": Pipeline(
        name="staged_backward",
        direction="bwd",
        stages=(*_BEFORE_OUTPUT, *_GRADIENTS),
        compute=staged_backward,
        factors=FACTORS,
        resumed=Pipeline(name="staged_backward", direction="bwd", stages=_GRADIENTS, compute=resumed_backward),
    ),
    "prep_scan": Pipeline(
        name="prep_scan",
        direction="bwd",
        stages=(fwd_prep.STAGE, *_SCANNED),
        compute=prep_scan,
        factors=PREPARED,
        resumed=Pipeline(name="prep_scan", direction="bwd", stages=_SCANNED, compute=resumed_scan),
    ),
    **{pipeline.name: pipeline for pipeline in map(_cut_scan, (4, 8, 16))},
}
