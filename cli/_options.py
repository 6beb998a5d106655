"""Every option of every command as data, imported without anything that takes time: ``--help`` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from kda_tl import templates
from kda_tl.core.problem import BETAS, DTYPES, GATES, PASSES
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES

# Seconds a workload: the tag cpu then takes under three minutes, the tag tune on a GPU under 50.
TIMEOUT_S = {"cpu": 75, "cuda": 120}
SHOWN_WORKLOAD = {  # of `source` and `show --pipeline`, by pass and kind of device
    "fwd": {"cpu": "cpu-safe-K32", "cuda": "safe-T8192-H32"},
    "bwd": {"cpu": "train-cpu-safe-K32", "cuda": "train-T8192-H32"},
    "step": {"cpu": "kda-decode-cpu", "cuda": "kda-decode-B32-fp32"},
}


class Option(NamedTuple):
    """One option or positional argument: its word, what argparse takes, and the text of its group, if it has one."""

    word: str
    settings: dict[str, Any]
    group: str = ""

    @property
    def dest(self) -> str:
        """The name of its value among the parsed arguments."""
        return str(self.settings.get("dest", self.word.lstrip("-").replace("-", "_")))


def _value(word: str, metavar: str | None, text: str, **more: Any) -> Option:
    return Option(word, {"help": text, **({"metavar": metavar} if metavar else {}), **more})


def _flag(word: str, text: str, **more: Any) -> Option:
    return Option(word, {"action": "store_true", "default": False, "help": text, **more})


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")


# The numbers of a problem: the name of an option's value is that of the number
NUMBERS = (
    _value("--operator", "NAME", "the operator (chunk_kda)"),
    _value("--heads", "H", "query/key heads", type=int, dest="H"),
    _value("--value-heads", "HV", "value heads, a multiple of the heads", type=int, dest="HV"),
    _value("--K", None, "key head dimension (128)", type=int),
    _value("--V", None, "value head dimension (128)", type=int),
    _value("--tokens", "N", "tokens of all sequences (one each, of recurrent operators)", type=int),
    _value("--sequences", "N", "number of sequences (1)", type=int),
    _value("--longest", "N", "tokens of the longest packed sequence", type=int),
    _flag("--varlen", "sequences are packed", default=None),
    _value("--dtype", None, "element type (bf16)", choices=DTYPES),
    _value("--gate", None, "gate mode (safe, or softplus where the operator has no safe gate)", choices=GATES),
    _value("--beta", None, "step size (sigmoid)", choices=BETAS),
    _flag("--initial-state", "there is a state before the first token", default=None),
    _flag("--state-v-first", "states are [V, K]", default=None),
    _value("--state-dtype", None, "element type of a recurrent operator's states (fp32)", choices=DTYPES),
    _value(
        "--state-use",
        "HOW",
        "where a recurrent operator's states are: pool (in slots, in place), columns (a slot a token), verify (nothing"
        " goes to the slots) or rows (given and returned) (pool)",
    ),
    _value(
        "--pass",
        None,
        "forward, backward, or step, the only one of recurrent operators (fwd)",
        choices=PASSES,
        dest="direction",
    ),
)
NOT_IN_KEYS = ("--sequences", "--beta", "--initial-state")  # keys of plans do not have these


def _problem(
    default: str, *, leave_out: Sequence[str] = (), alone: str = "--heads and --tokens describe one"
) -> tuple[Option, ...]:
    """``--workload``, and the options that describe a problem or change those of the workloads.

    For the help: ``default`` is what the command works on if nothing is given, ``alone`` what the options do without
    ``--workload``.
    """
    text = f"workload or tag, may be repeated (default: {default}); `kda-tl show --workloads` lists them"
    group = f"with --workload these change its problems; without it {alone}"
    numbers = (option._replace(group=group) for option in NUMBERS if option.word not in leave_out)
    stray = Option("stray", {"nargs": "*", "help": argparse.SUPPRESS})
    return (_value("--workload", "NAME|TAG", text, action="append"), stray, *numbers)


_GPU = _value(
    "--gpu",
    "NAME",
    "auto (the GPU here, else the CPU), cpu, h100, h200, ..., or a product's slug (default: auto)",
    default="auto",
)
OPTIONS: dict[str, tuple[Option, ...]] = {
    "tune": (
        _GPU,
        *_problem("the tag cpu on the CPU, else tune"),
        _value("--stage", "NAME", "only this stage, at the default chunk sizes; stores no plan"),
        _value(
            "--pipeline",
            "NAME",
            "only this pipeline, against its own default plan; what wins is stored even where another is faster: pass"
            " a --db of its own",
        ),
        _value(
            "--objective",
            "WHAT",
            "a backward may begin with results that the forward keeps in memory: if that is faster (time), if it saves"
            " as large a share of time as it adds of memory (balanced, the default), or never (memory)",
        ),
        _value("--budget", "N", "most trials a stage and chunk size", type=_positive),
        _value(
            "--timeout",
            "S",
            "most seconds a workload; the default plan of each pipeline is timed all the same"
            f" (default: {TIMEOUT_S['cpu']} on the CPU, {TIMEOUT_S['cuda']} on a GPU)",
            type=_positive,
        ),
        _value("--seed", "N", "of inputs and sampler (default: 0)", type=int, default=0),
        _value("--jobs", "N", "processes that compile (default: one a core)", type=_positive),
        _flag("--static", "compile and rank only, no GPU needed; nothing is stored"),
        _flag("--stale", "only workloads whose stored plan is stale"),
        _value("--db", "DIR", "database to write (default: $KDA_TL_DB, else the user's)"),
        _value("--journal", "DIR", "where trials are kept (default: beside the plans)"),
        _flag("--json", "the result as JSON"),
    ),
    "show": (
        _value("--gpu", "NAME", "only plans of this GPU: cpu, h100, h200, ..., or a slug"),
        _value("--source", "NAME", "only this database: overlay, '$KDA_TL_DB', user, packaged"),
        _value("--db", "DIR", "the database in this directory instead of the usual ones"),
        *_problem("all", leave_out=NOT_IN_KEYS, alone="they choose among plans"),
        _flag("--workloads", "the workloads and their tags instead of plans"),
        _value("--pipeline", "NAME", "how tensors flow through a pipeline instead of plans"),
        _flag("--stale", "only plans whose templates changed since"),
        _flag("--json", "everything that is stored, as JSON"),
    ),
    "explain": (
        _GPU,
        *_problem("none, say which"),
        _value("--db", "DIR", "ask this database first"),
        _value("--chunk-size", None, "as passed to the operator", type=int, choices=sorted(BT_CHOICES)),
        _flag("--json", "the choices as JSON"),
    ),
    "bench": (
        _GPU,
        *_problem("the tag cpu on the CPU, else bench"),
        _flag("--peers", "also FLA, FlashQLA, FlashInfer and cuDNN, where they can be imported"),
        _flag("--calls-only", "whole calls, no stages"),
        _value("--reps", "N", "repetitions a round (default: 30, on the CPU 3)", type=int),
        _value("--rounds", "N", "interleaved rounds (default: 5)", type=int, default=5),
        _value("--db", "DIR", "take plans from this database first"),
        _value("--json", "FILE", "everything as JSON, on stdout or into a file", nargs="?", const=True),
        _value("--chart", "FILE", "draw the times of whole calls into a .svg or .png file"),
        _value("--from", "FILE", "measure nothing: show and draw what --json FILE wrote", dest="source"),
    ),
    "verify": (
        _GPU,
        *_problem("all plans that are shipped"),
        _flag(
            "--static",
            "compile only, for a device that need not be here; records whose kernels are the same get today's hashes",
        ),
        _flag("--time", "also fail where a stored plan is slower than the default"),
        _value("--db", "DIR", "plans of this database instead of the packaged one"),
        _flag("--allow-stale", "report stale plans, but do not fail for them"),
        _value("--jobs", "N", "processes that compile (default: one a core)", type=int),
        _flag("--json", "every check as JSON"),
    ),
    "source": (
        _value("stage", "STAGE", f"one of {', '.join(templates.names())}"),
        _GPU,
        *_problem("a usual one of the stage's pass"),
        _value("--config", "FIELD=VALUE", "change the plan's config", nargs="+", action="extend"),
        _value("--BT", None, "tokens a chunk (default: the plan's)", type=int, choices=sorted(BT_CHOICES)),
        _value("--BC", None, "tokens a sub-chunk (default: the plan's)", type=int, choices=sorted(BC_CHOICES)),
        _value("--db", "DIR", "take the plan from this database first"),
        _flag("--ptx", "the PTX of the binary instead of the source"),
        _flag("--sass", "the instructions in the binary; needs cuobjdump or nvdisasm"),
        _flag("--registers", "registers, local memory, shared memory and size of the binary"),
        _flag("--json", "stage, config and source as JSON"),
    ),
    "compile": (
        _GPU,
        *_problem("none, say which"),
        _flag("--packaged", "the packaged plans, and the defaults of usual calls: what a wheel holds"),
        _value("--out", "DIR", "the bundle: a new folder, or a bundle that gets what it lacks"),
        _value("--list", "DIR", "show what a bundle holds, and build nothing"),
        _flag("--no-source", "do not keep the generated CUDA beside the binaries"),
        _flag("--prune", "remove the bundle's other kernels"),
        _value("--db", "DIR", "take plans from this database first"),
        _value("--jobs", "N", "processes that build (default: one a core)", type=_positive),
        _flag("--json", "the result as JSON"),
    ),
    "doctor": (_flag("--no-kernel", "do not compile and run a kernel"), _flag("--json", "every check as JSON")),
    "db validate": (
        _value("paths", "PATH", "files or directories (default: all databases in use)", nargs="*"),
        _flag("--json", "the problems as JSON"),
    ),
    "db export": (
        _value("destination", "DIR", "directory that takes the records"),
        _value("--from", "DIR", "database to read (default: where `tune` writes)", dest="origin"),
        _flag("--json", "the files written as JSON"),
    ),
}
ACTIONS = {
    "validate": "check files against the schema, the rules of the database and the templates",
    "export": "merge the records of one database into another, as from the user's into tuning_db/",
}


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Declares the options of a command, or its actions with theirs."""
    if command == "db":
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
        for name, text in ACTIONS.items():
            add_arguments(
                f"db {name}", actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
            )
        return
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for word, settings, group in OPTIONS[command]:
        if group not in groups:
            groups[group] = parser.add_argument_group("problem", group)
        groups[group].add_argument(word, **settings)
