"""Which problem ``explain`` and ``source`` are about: a workload by name, or one described by options."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from kda_tl.errors import InputError
from kda_tl.problem import BETAS, DTYPES, GATES, Problem

_FIELDS = {
    "heads": "H",
    "value_heads": "HV",
    "K": "K",
    "V": "V",
    "tokens": "tokens",
    "sequences": "sequences",
    "longest": "longest",
    "dtype": "dtype",
    "gate": "gate",
    "beta": "beta",
}
_FLAGS = ("varlen", "initial_state", "state_v_first")


def add_problem_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options that describe a problem, or change the one of a workload."""
    group = parser.add_argument_group("problem", "these describe a problem, or change that of the workload")
    group.add_argument("--heads", type=int, metavar="H", help="query/key heads")
    group.add_argument("--value-heads", type=int, metavar="HV", help="value heads, a multiple of the heads")
    group.add_argument("--K", type=int, help="key head dimension (128)")
    group.add_argument("--V", type=int, help="value head dimension (128)")
    group.add_argument("--tokens", type=int, metavar="N", help="tokens of all sequences")
    group.add_argument("--sequences", type=int, metavar="N", help="number of sequences (1)")
    group.add_argument("--longest", type=int, metavar="N", help="tokens of the longest sequence")
    group.add_argument("--dtype", choices=DTYPES, help="element type (bf16)")
    group.add_argument("--gate", choices=GATES, help="gate mode (safe)")
    group.add_argument("--beta", choices=BETAS, help="step size (sigmoid)")
    group.add_argument("--varlen", action="store_true", help="sequences are packed")
    group.add_argument("--initial-state", action="store_true", help="there is a state before the first token")
    group.add_argument("--state-v-first", action="store_true", help="states are [V, K]")


def read_problem(args: argparse.Namespace, workload: str | None) -> Problem:
    """The problem that the arguments describe.

    Raises:
        InputError: there is no such workload, a size is missing, or sizes do not fit each other.
    """
    given: dict[str, Any] = {
        field: getattr(args, name) for name, field in _FIELDS.items() if getattr(args, name) is not None
    }
    given |= {flag: True for flag in _FLAGS if getattr(args, flag)}
    for name in ("tokens", "sequences", "longest"):
        if given.get(name, 1) < 1:
            raise InputError(f"--{name} must be at least 1, got {given[name]}.")
    if workload is not None:
        return _change(_find(workload), given)
    missing = [f"--{name}" for name in ("heads", "tokens") if getattr(args, name) is None]
    if missing:
        raise InputError(f"name a workload, or describe a problem: {' and '.join(missing)} missing.")
    computed = given.get("gate") != "log"
    base = {"HV": given["H"], "K": 128, "V": 128, "gate": "safe", "has_A_log": computed, "has_dt_bias": computed}
    return Problem(**{**base, "beta": "sigmoid", "l2norm": True, "final_state": True, **given})


def _find(name: str) -> Problem:
    from kda_tl.workloads import select

    found = select([name])
    if len(found) > 1:
        raise InputError(f"{name!r} is a tag: pass one of its workloads, {', '.join(w.name for w in found)}.")
    return found[0].problem()


def _change(problem: Problem, given: dict[str, Any]) -> Problem:
    """The problem with other numbers, and what follows from them."""
    follows: dict[str, Any] = {}
    if "H" in given:
        follows["HV"] = given["H"] * problem.group
    if given.keys() & {"tokens", "sequences"}:
        follows["longest"] = 0
    if "dtype" in given:
        follows |= {"g_dtype": "", "beta_dtype": ""}
    if "gate" in given:
        follows |= {"has_A_log": given["gate"] != "log", "has_dt_bias": given["gate"] != "log"}
    return replace(problem, **{**follows, **given})
