"""Pipelines: ways to compute a pass, as ordered stage calls. Each reads as the life of its tensors.

A pipeline is a function of ``run`` and the operator's tensors. ``run(stage, **tensors)`` returns the stage's outputs
in the order it declares them, None for absent ones: dispatch launches kernels, tests run the references, the tuner
records.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kda_tl.stage import Stage
from kda_tl.templates import fwd_gate, fwd_intra, fwd_output, fwd_state, fwd_wy


class Run(Protocol):
    """Executes one stage."""

    def __call__(self, stage: Stage, **tensors: Any) -> Sequence[Any]:
        """Returns the outputs in the order the stage declares them."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One way to compute a pass.

    Attributes:
        name: as stored in plans.
        direction: "fwd" or "bwd".
        stages: in launch order.
        compute: ``(run, tensors) -> outputs``; forward outputs are o, ht and h.
    """

    name: str
    direction: str
    stages: tuple[Stage, ...]
    compute: Callable[[Run, Mapping[str, Any]], dict[str, Any]]


def staged_forward(run: Run, x: Mapping[str, Any]) -> dict[str, Any]:
    """Five stages through memory: runs on every target, and each step can be looked at."""
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
    del Akk, rstd
    h, v_new, ht = run(fwd_state.STAGE, w=w, u=u, kg=kg, g_cumsum=g_cumsum, h0=x["h0"], seq_chunks=x["seq_chunks"])
    del w, u, kg, g_cumsum
    (o,) = run(fwd_output.STAGE, qg=qg, h=h, Aqk=Aqk, v_new=v_new, chunk_tokens=chunks)
    return {"o": o, "ht": ht, "h": h}


PIPELINES: dict[str, Pipeline] = {
    "staged": Pipeline(
        name="staged",
        direction="fwd",
        stages=(fwd_gate.STAGE, fwd_intra.STAGE, fwd_wy.STAGE, fwd_state.STAGE, fwd_output.STAGE),
        compute=staged_forward,
    ),
}
