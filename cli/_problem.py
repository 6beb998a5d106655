"""What a command works on: workloads by name or tag, changed by options, or a problem that options describe."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kda_tl.cli._options import NUMBERS
from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.bench.workloads import Workload

_SHAPE = ("tokens", "sequences", "longest", "varlen")
_KINDS = {("safe", "slow"): "slow", ("softplus", "steep"): "softplus-steep", ("log", "slow"): "log-slow"}


def read_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """What the options say of a problem, by the names of its numbers.

    Raises InputError if a count is below 1, or a word was given where only options are taken.
    """
    if args.stray:
        word, *_ = args.stray
        command = shlex.join(["kda-tl", *(w for w in args.words if w not in args.stray), "--workload", word])
        raise InputError(f"{word!r} is no option: if it is a workload, run `{command}`.")
    values = {option.dest: getattr(args, option.dest, None) for option in NUMBERS}
    given: dict[str, Any] = {number: value for number, value in values.items() if value is not None}
    for number in ("tokens", "sequences", "longest"):
        if given.get(number, 1) < 1:
            raise InputError(f"--{number} must be at least 1, got {given[number]}.")
    return given


def read_workloads(args: argparse.Namespace, default: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads that were named, changed as asked, or the one that is described, or the command's own.

    These are meant by the names and tags in ``default``; without, something must be given. Raises InputError if there
    is no such workload, a size is missing, or sizes do not fit each other.
    """
    from kda_tl.bench.workloads import Workload, select

    given = read_numbers(args)
    if args.workload or (default and not given):
        workloads = select(args.workload or default)
        return tuple(dict.fromkeys(change_workload(w, given) for w in workloads)) if given else workloads
    if default:
        given = {"operator": select(default)[0].operator} | given
    needed = {"--heads": "H"} if _find_length(given) else {"--heads": "H", "--tokens": "tokens"}
    missing = [option for option, number in needed.items() if number not in given]
    if missing:
        raise InputError(
            f"say which problem: name one with --workload (`kda-tl show --workloads` lists them), or describe it, "
            f"{' and '.join(missing)} missing."
        )
    return (change_workload(Workload(name="described", T=_find_length(given) or 1, H=1), given),)


def _find_length(given: Mapping[str, Any]) -> int | None:
    """Tokens of a sequence that need not be given."""
    from kda_tl.ops import find_declaration

    return find_declaration(given.get("operator", "chunk_kda")).length


def read_one_workload(args: argparse.Namespace, default: Sequence[str] = ()) -> Workload:
    """The only workload of :func:`read_workloads`; raises InputError if there are several, and as there."""
    workloads = read_workloads(args, default)
    if len(workloads) > 1:
        some = ", ".join(w.name for w in workloads[:3])
        raise InputError(f"`kda-tl {args.command}` takes one workload, not {len(workloads)}: pass one of {some}, ...")
    return workloads[0]


def require_pass(workload: Workload, direction: str, what: str) -> Workload:
    """The workload in the pass that a stage or a pipeline, ``what``, is of.

    Raises InputError if its operator has no such pass.
    """
    if direction not in workload.declaration.directions:
        raise InputError(
            f"{what} is of the pass {direction}, which {workload.operator} does not have: name another operator with"
            " --operator, or a workload of one."
        )
    return replace(workload, direction=direction)


def change_workload(workload: Workload, given: Mapping[str, Any]) -> Workload:
    """A workload with the numbers of :func:`read_numbers` and what follows from them, under a name that tells them.

    Raises InputError if the numbers do not fit each other.
    """
    from kda_tl.bench.workloads import WORKLOADS
    from kda_tl.ops import find_declaration

    changes = {number: value for number, value in given.items() if number not in _SHAPE}
    if "H" in given:
        changes.setdefault("HV", given["H"] * (workload.HV // workload.H))
    operator = find_declaration(given.get("operator", workload.operator))
    if workload.gate not in operator.gates:
        changes.setdefault("gate", "softplus")
    if workload.direction not in operator.directions:
        changes.setdefault("direction", operator.directions[0])
    if workload.state_use not in operator.state_uses:
        changes.setdefault("state_use", operator.state_uses[0])
    if workload.state_dtype not in operator.state_dtypes:
        changes.setdefault("state_dtype", operator.state_dtypes[0])
    if changes.get("gate", workload.gate) != workload.gate:  # the decay that workloads of this gate have
        changes["decay"] = "slow" if changes["gate"] == "softplus" else "steep"
    if not given.keys().isdisjoint(_SHAPE):
        before = len(workload.bounds) - 1
        sequences = given.get("sequences", before)
        kept = workload.tokens if operator.length is None else sequences * workload.tokens // before  # lengths stay
        changes |= _cut_tokens(
            given.get("tokens", kept),
            sequences,
            given.get("longest"),
            packed=bool(workload.lengths) or "varlen" in given,
        )
    changed = replace(workload, tags=(), **changes)
    known = (each for each in WORKLOADS if replace(each, name=changed.name, tags=()) == changed)
    return next(known, replace(changed, name=_name(changed)))


def _cut_tokens(tokens: int, sequences: int, longest: int | None, *, packed: bool) -> dict[str, Any]:
    """Tokens as sequences: of one length in a batch, else of about one length except the longest."""
    if not packed:
        if tokens % sequences or longest not in (None, tokens // sequences):
            of = "" if longest is None else f", the longest of {longest},"
            raise InputError(
                f"{sequences} sequences{of} of {tokens} tokens in all are no batch, whose sequences are of one length: "
                "pass --varlen to pack them, or a multiple of --sequences as --tokens."
            )
        return {"B": sequences, "T": tokens // sequences, "lengths": ()}
    longest = -(-tokens // sequences) if longest is None else longest
    rest, others = tokens - longest, sequences - 1
    if not 0 <= rest <= others * longest:
        raise InputError(
            f"{sequences} sequences, the longest of {longest} tokens, cannot have {tokens} tokens in all: "
            "change --tokens, --sequences or --longest."
        )
    return {"B": 1, "lengths": (longest, *(rest * (n + 1) // others - rest * n // others for n in range(others)))}


def _name(w: Workload) -> str:
    """A name in the style of the table's: ``train-slow-T4096-H16-fp16``."""
    shape = f"B{w.B}-T{w.T}" if w.B > 1 else f"T{w.T}"
    if w.lengths:
        count, longest = len(w.lengths), max(w.lengths)
        shape = f"packed-{count}x{longest}" if count * longest == w.T else f"packed-{count}-T{w.T}-longest{longest}"
    parts = {
        w.operator: w.operator != "chunk_kda",
        "train": w.direction == "bwd",
        _KINDS.get((w.gate, w.decay), w.gate): True,
        shape: True,
        f"H{w.H}": True,
        f"HV{w.HV}": w.HV != w.H,
        f"K{w.K}": w.K != 128,
        f"V{w.V}": w.V != w.K,
        w.dtype: w.dtype != "bf16",
        w.beta: w.beta != "sigmoid",
        "h0": w.initial_state,
        "vk": w.state_v_first,
        w.state_use: w.state_use not in ("", "pool"),
        f"state-{w.state_dtype}": w.state_dtype != "fp32",
    }
    return "-".join(part for part, told in parts.items() if told)


def describe_workload(w: Workload) -> str:
    """Shape, type and gate in one line."""
    tokens = f"{len(w.lengths)} packed sequences, {w.T} tokens" if w.lengths else f"B{w.B} T{w.T}"
    heads = f"H{w.H}" if w.HV == w.H else f"H{w.H} HV{w.HV}"
    rest = [f"{w.beta} beta"] if w.beta != "sigmoid" else []
    rest += ["initial state"] if w.initial_state else []
    rest += ["states [V, K]"] if w.state_v_first else []
    rest += [f"{w.state_use} of {w.state_dtype} states"] if w.state_use else []
    return ", ".join([f"{tokens} {heads} K{w.K} V{w.V} {w.dtype}", f"{w.gate} gate", f"{w.decay} decay", *rest])
