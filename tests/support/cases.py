"""Random problems, their tensors and their truths: what the tests of templates, operator and GPU share."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_tl import templates
from kda_tl.core.layout import make_layout
from kda_tl.core.problem import BETAS, GATES, LOWER_BOUND_RANGE, Problem
from kda_tl.core.stage import Case, Plan
from kda_tl.database.records import Check, Timing, VsDefault
from kda_tl.database.store import Entry, Key
from kda_tl.ops import call as call_module
from kda_tl.ops import load_all
from kda_tl.reference import gradient_name, l2norm, recurrent_gradients, recurrent_kda, relative_error
from kda_tl.runtime import dispatch
from kda_tl.runtime.dispatch import numerics_class

F64 = torch.float64
LOWEST = LOWER_BOUND_RANGE[0]  # nats a token, of the safe gate
SEQUENCES = ("q", "k", "v", "g", "beta")
# Everything a call can have, small
SMALL = Problem(
    H=1,
    HV=2,
    K=32,
    V=16,
    tokens=0,
    dtype="fp32",
    gate="safe",
    has_A_log=True,
    has_dt_bias=True,
    beta="sigmoid",
    l2norm=True,
    initial_state=True,
    final_state=True,
)


OPERATOR = load_all()["chunk_kda"]
TENSORS = OPERATOR.tensors
# What chunk_kda takes of all that the stages do
KDA: dict[str, Any] = {"scalar_gate": False, "rank": 1}
GDN: dict[str, Any] = {"scalar_gate": True, "rank": 1, "operator": "chunk_gated_delta_rule"}


def family_of(name: str) -> dict[str, Any]:
    """What problems are that a stage or a pipeline for Hopper takes, by its name."""
    return GDN if "gdn" in name else KDA


def random_of_run(name: str) -> random.Random:
    """The same draws wherever a run asks by this name; its seed is in the run's first lines."""
    return random.Random(f"{os.environ['KDA_TL_TEST_SEED']}/{name}")


def draw_problem(rng: random.Random, **fixed: Any) -> Problem:
    """A problem without lengths; fields that are not given are drawn."""
    gate = fixed.get("gate") or rng.choice(GATES)
    H = rng.choice((1, 2))
    drawn = {
        "H": H,
        "HV": fixed.get("H", H) * rng.choice((1, 2, 3)),
        "K": rng.choice((16, 32, 60, 64, 100)),
        "V": rng.choice((16, 32, 60, 64, 100)),
        "dtype": "fp32",
        "gate": gate,
        "has_A_log": gate == "softplus" or gate == "safe" and rng.random() < 0.7,
        "has_dt_bias": gate != "log" and rng.random() < 0.6,
        "beta": rng.choice(BETAS),
        "l2norm": rng.random() < 0.5,
        "initial_state": rng.random() < 0.6,
        "final_state": rng.random() < 0.8,
        "state_v_first": rng.random() < 0.5,
        "intermediate_states": rng.random() < 0.5,
        "tokens": 0,
        "scalar_gate": rng.random() < 0.3,
        "rank": rng.choice((1, 1, 2, 4)),
    }
    return Problem(**{**drawn, **fixed})


def draw_lengths(rng: random.Random, most: int = 150) -> tuple[int, ...]:
    """Lengths of packed sequences, in any order: an empty one, one of a single token, and others."""
    lengths = [0, 1, *(rng.choice((0, 1, rng.randrange(2, 40), rng.randrange(2, most))) for _ in range(3))]
    rng.shuffle(lengths)
    return tuple(lengths)


def bounds_of(lengths: Iterable[int]) -> tuple[int, ...]:
    """Token bounds of packed sequences."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(bounds)


def slope_terms(problem: Problem, g: Tensor, dt_bias: Tensor | None, dg: Tensor) -> Tensor:
    """What each token and channel adds to dA_log, from the gradient of the raw gate: [tokens, HV, K]."""
    x = g if dt_bias is None else g + dt_bias
    if problem.gate == "safe":
        return x * dg
    softplus_over_slope = torch.where(x < -30, 1.0, torch.logaddexp(x, torch.zeros_like(x)) / x.sigmoid())
    return softplus_over_slope * dg


@dataclass(frozen=True, eq=False)
class Call:
    """Tensors of a problem in float64, the batch flattened into the tokens, as pipelines take them."""

    problem: Problem
    bounds: tuple[int, ...]
    x: dict[str, Any]

    def case(self, device: Any, BT: int, BC: int) -> Case:
        """The stages' case."""
        return Case(problem=self.problem, device=device, BT=BT, BC=BC)

    def tensors(self, BT: int, segments: int = 1) -> dict[str, Any]:
        """The inputs of a pipeline that cuts so many segments, for chunks of BT tokens."""
        return {**self.x, **make_layout(self.bounds, BT, self.x["q"].device, segments).tables}

    def scan(self, first: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The recurrence over some tokens of one sequence, from a state [1, HV, ...] or None."""
        p, x = self.problem, self.x
        return recurrent_kda(
            *(x[name][None, first:end] for name in SEQUENCES),
            scale=x["scale"],
            initial_state=state,
            gate=p.gate,
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            lower_bound=x["lower_bound"],
            beta_mode=p.beta,
            use_l2norm=p.l2norm,
            state_v_first=p.state_v_first,
            rank=p.rank,
        )

    def truth(self, BT: int = 64) -> tuple[Tensor, Tensor, Tensor]:
        """The recurrence in float64: o [tokens, HV, V], final states [N, ...], states before chunks [NT, ...]."""
        p, x = self.problem, self.x
        shape = (1, p.HV, p.V, p.K) if p.state_v_first else (1, p.HV, p.K, p.V)
        o, ht, h = [x["v"].new_zeros((0, p.HV, p.V))], [], [x["v"].new_zeros((0, *shape[1:]))]
        for n, (first, end) in enumerate(pairwise(self.bounds)):
            state = x["v"].new_zeros(shape) if x["h0"] is None else x["h0"][n : n + 1]
            for start in range(first, end, BT):
                h.append(state)
                out, state = self.scan(start, min(start + BT, end), state)
                o.append(out[0])
            ht.append(state)
        return torch.cat(o), torch.cat(ht), torch.cat(h)

    def gradients(self) -> dict[str, Tensor | None]:
        """Autograd through the recurrence in float64, from do and dht; None where the problem lacks the tensor."""
        p, x = self.problem, self.x
        arguments = {
            **{name: x[name][None] for name in SEQUENCES},
            "scale": x["scale"],
            "initial_state": x["h0"],
            "gate": p.gate,
            "A_log": x["A_log"],
            "dt_bias": x["dt_bias"],
            "lower_bound": x["lower_bound"],
            "beta_mode": p.beta,
            "use_l2norm": p.l2norm,
            "state_v_first": p.state_v_first,
            "cu_seqlens": torch.tensor(self.bounds, device=x["q"].device),
            "rank": p.rank,
        }
        found = recurrent_gradients(arguments, x["do"][None], x["dht"])
        flat = {f"d{name}": found[f"d{name}"][0] for name in SEQUENCES}
        return flat | {name: found.get(name) for name in ("dh0", "dA_log", "ddt_bias")}

    def slope_terms(self, dg: Tensor) -> Tensor:
        """What each token and channel adds to dA_log, from the gradient of the raw gate: [tokens, HV, K]."""
        return slope_terms(self.problem, self.x["g"], self.x["dt_bias"], dg)

    def value_terms(self) -> tuple[Tensor, Tensor]:
        """What each value channel adds to the gradients of beta and of the raw gate: [tokens, HV, V] and [..., V, K].

        The columns of a state never meet, so a head of V value channels is V heads of one, each with a beta and a gate
        of its own. A gate that a head's channels share becomes one a channel too.
        """
        p, x = replace(self.problem, scalar_gate=False), dict(self.x)
        if self.problem.scalar_gate:
            x["g"] = x["g"].expand(-1, -1, p.K)
            x["dt_bias"] = None if x["dt_bias"] is None else x["dt_bias"].expand(-1, p.K)
        for name in ("g", "beta"):
            x[name] = x[name].repeat_interleave(p.V, dim=1)
        for name in ("A_log", "dt_bias"):
            x[name] = None if x[name] is None else x[name].repeat_interleave(p.V, dim=0)
        for name in ("v", "do"):
            x[name] = x[name].flatten(1)[..., None]
        for name in ("h0", "dht"):
            if x[name] is not None:
                x[name] = (x[name] if p.state_v_first else x[name].mT).flatten(1, 2)[..., None, :]
                x[name] = x[name] if p.state_v_first else x[name].mT
        split = Call(replace(p, HV=p.HV * p.V, V=1), self.bounds, x).gradients()
        dbeta, dg = split["dbeta"], split["dg"]
        assert dbeta is not None and dg is not None
        return dbeta.unflatten(1, (p.HV, p.V)), dg.unflatten(1, (p.HV, p.V))

    def size_of_terms(self, name: str) -> float:
        """How large the gradient of beta, the gate, A_log or dt_bias would be if its terms did not cancel."""
        dbeta, dg = self.value_terms()
        if name in ("beta", "g"):
            return float((dbeta if name == "beta" else dg).norm())
        sizes = dg.square().sum(2).sqrt()
        return float((self.slope_terms(sizes).abs() if name == "A_log" else sizes).sum(0).norm())

    def gradient_errors(self, found: Mapping[str, Tensor | None], tolerance: float) -> dict[str, float]:
        """Relative error of each gradient, by the name of its tensor; those the problem lacks must be None.

        The gradients of beta and of the gate are sums over value channels of terms of either sign, and so are those of
        A_log and dt_bias, which sum the gate's over tokens. Where they cancel, the size of the sum says nothing of how
        exact it can be: every term has the rounding of the operands that it is a product of. An error above the
        tolerance is therefore judged relative to the terms: of dbeta and dg their norm; of dA_log and ddt_bias the norm
        of each channel's sum, over tokens, of the terms' norm, since dg is a running sum with errors of one sign.
        A model that rounds what passes between stages to bf16 gives 1e-3 to 3e-2 of |dg| with slow gates, and 2e-3 to
        6e-3 of its terms.
        """
        truth, errors = self.gradients(), {}
        for name, grad in found.items():
            expected = truth[gradient_name(name)]
            assert (grad is None) == (expected is None), f"d{name} of {self.problem.key}"
            if grad is None or expected is None:
                continue
            errors[name] = relative_error(grad.flatten(), expected.flatten())
            if name in ("beta", "g", "A_log", "dt_bias") and tolerance <= errors[name] < inf:
                size, terms = float(expected.norm()), self.size_of_terms(name)
                errors[name] *= (size or 1.0) / (max(size, terms) or 1.0)
        return errors


def draw_call(
    problem: Problem,
    lengths: Sequence[int],
    seed: int,
    *,
    varlen: bool = True,
    device: str = "cpu",
    lower_bound: float | None = None,
    **given: Tensor,
) -> Call:
    """Inputs of a problem over sequences of some lengths, filled up to whole tokens if those have several rows.

    Channels differ in their decay, from none to steep. Keys are short enough for the recurrence to stay bounded.
    Values are first rounded to the problem's dtypes, so that every path gets the same numbers.

    Args:
        problem: its lengths are replaced.
        lengths: rows of each sequence; a token has one unless the problem says otherwise.
        seed: of the draw.
        varlen: the sequences are packed, not a dense batch.
        device: where the tensors live.
        lower_bound: of the safe gate; drawn unless given, the lowest at times.
        given: tensors to use instead of drawn ones.
    """
    lengths = [-(-length // problem.rank) * problem.rank for length in lengths]
    bounds = bounds_of(lengths)
    tokens, N = bounds[-1], len(lengths)
    p = replace(problem, tokens=tokens, sequences=N, longest=max(lengths), varlen=varlen)
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=F64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, dtype=F64)

    slope = 10 ** (3 * uniform(p.HV, p.G) - 2.3)  # 0.005 to 5
    g = -slope * uniform(tokens, p.HV, p.G) if p.gate == "log" else 2 * normal(tokens, p.HV, p.G) + slope.log()
    k = normal(tokens, p.H, p.K)
    beta = uniform(tokens, p.HV) if p.beta == "plain" else 2 * normal(tokens, p.HV)
    state = (p.V, p.K) if p.state_v_first else (p.K, p.V)
    x: dict[str, Any] = {
        "q": normal(tokens, p.H, p.K),
        "k": k if p.l2norm else l2norm(k),
        "v": normal(tokens, p.HV, p.V),
        "g": g,
        "beta": beta,
        "A_log": uniform(p.HV) if p.has_A_log else None,
        "dt_bias": normal(p.HV, p.G) if p.has_dt_bias else None,
        "h0": normal(N, p.HV, *state) if p.initial_state else None,
    }
    x |= given
    for name, tensor in x.items():
        if tensor is not None:
            short = {"q": p.dtype, "k": p.dtype, "v": p.dtype, "g": p.g_dtype, "beta": p.beta_dtype}.get(name, "fp32")
            x[name] = tensor.to(TORCH[short]).to(F64).to(device)
    if lower_bound is None:
        lower_bound = float(torch.tensor(LOWEST * min(1.0, 0.1 + 1.2 * float(uniform(1))), dtype=torch.float32))
    return Call(p, bounds, {**x, "scale": 0.7 * p.K**-0.5, "lower_bound": lower_bound})


def draw_extreme(kind: str, seed: int, **changes: Any) -> Call:
    """A call of 130 tokens whose gate saturates: everywhere, or ("mixed") in a tenth of the places, slow elsewhere."""
    gate, _, limit = kind.partition(" ")
    shape = (130, 2, 1 if changes.get("scalar_gate") else 32)
    rng = torch.Generator().manual_seed(seed)
    here = torch.rand(shape, generator=rng) < 0.1
    slow = torch.full(shape, -4.0, dtype=F64) if gate != "log" else -0.05 * torch.rand(shape, generator=rng, dtype=F64)
    steepest = -1e4 if gate == "log" else 1e4
    wild = 1e4 * torch.randn(shape, generator=rng, dtype=F64)
    g = {
        "steep": torch.full(shape, steepest, dtype=F64),
        "flat": torch.full(shape, 0.0 if gate == "log" else -1e4, dtype=F64),
        "mixed": torch.where(here, steepest, slow),
        "wild": -wild.abs() if gate == "log" else wild,
    }[limit]
    fixed = {"H": 1, "HV": 2, "K": 32, "V": 32, "l2norm": True, "initial_state": True, "final_state": True, **KDA}
    fixed |= changes
    problem = draw_problem(
        random.Random(0), gate=gate, has_A_log=gate != "log", has_dt_bias=False, beta="sigmoid", **fixed
    )
    given = {"g": g, "A_log": torch.tensor([0.0, 5.0])} if gate != "log" else {"g": g}
    return draw_call(problem, (65, 1, 64), seed, lower_bound=LOWEST, **given)


def draw_backward(call: Call, seed: int) -> Call:
    """The call's backward: with gradients of o, and of the final states where the problem has them."""
    p, rng = replace(call.problem, direction="bwd"), torch.Generator().manual_seed(seed)
    state = (p.V, p.K) if p.state_v_first else (p.K, p.V)
    do = torch.randn(p.tokens, p.HV, p.V, generator=rng, dtype=F64).to(TORCH[p.dtype]).to(call.x["q"])
    dht = torch.randn(p.sequences, p.HV, *state, generator=rng, dtype=F64).to(torch.float32).to(do)
    return Call(p, call.bounds, {**call.x, "do": do, "dht": dht if p.final_state else None})


TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def forget_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without compilers, and as if nothing had been called before."""
    monkeypatch.setattr(dispatch, "_can_compile", lambda device: False)
    monkeypatch.setattr(dispatch, "_select", functools.cache(dispatch._select.__wrapped__))
    monkeypatch.setattr(call_module, "_bound_calls", {})
    monkeypatch.setattr(call_module, "_warn_reference", functools.cache(call_module._warn_reference.__wrapped__))


def operator_arguments(call: Call, batch: int = 1) -> dict[str, Any]:
    """Keyword arguments of the problem's operator for a call, in the problem's dtypes."""
    p, x, known = call.problem, call.x, load_all()[call.problem.operator].arguments
    dtypes = {"g": TORCH[p.g_dtype], "beta": TORCH[p.beta_dtype]}
    arguments: dict[str, Any] = {
        name: x[name].to(dtypes.get(name, TORCH[p.dtype])).unflatten(0, (batch, x[name].shape[0] // batch))
        for name in SEQUENCES
    }
    if p.scalar_gate:
        arguments["g"] = arguments["g"].squeeze(-1)
    gated = p.gate != "log"
    arguments |= {
        "scale": x["scale"],
        "initial_state": None if x["h0"] is None else x["h0"].float(),
        "output_final_state": p.final_state,
        "use_qk_l2norm_in_kernel": p.l2norm,
        "use_gate_in_kernel": gated,
        "use_beta_sigmoid_in_kernel": p.beta != "plain",
        "allow_neg_eigval": p.beta == "sigmoid2",
        "safe_gate": p.gate == "safe",
        "lower_bound": x["lower_bound"] if p.gate == "safe" else None,
        "A_log": None if x["A_log"] is None else x["A_log"].float(),
        "dt_bias": None if x["dt_bias"] is None else x["dt_bias"].float().flatten(),
        "state_v_first": p.state_v_first,
        "cu_seqlens": torch.tensor(call.bounds, dtype=torch.int32).to(x["q"].device) if p.varlen else None,
    }
    return {name: x for name, x in arguments.items() if name in known}


def make_entry(problem: Problem, plan: Plan, ratio: float = 1.2, stale: bool = False, **key: Any) -> Entry:
    """A database entry for a problem's bucket (or a key that differs from it), as if the plan had been measured."""
    return Entry(
        key=Key.of(problem)._replace(**key),
        plan=plan.as_dict(),
        numerics=numerics_class(plan),
        time_us=Timing(median=100.0, mad=1.0, reps=100, rounds=5),
        vs_default=VsDefault(ratio=ratio, ci95=(ratio, ratio)),
        check=Check(max_rel_err=1e-3, tolerance=6e-3),
        templates={name: "0" * 64 if stale else templates.fingerprint(name) for name, _ in plan.stages},
        provenance={"date": "2026-01-01"},
    )
