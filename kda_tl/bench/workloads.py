"""Named problems with seeded inputs: what is tuned, benchmarked and verified. A workload is one line with tags."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from kda_tl.core.problem import Problem
from kda_tl.errors import InputError
from kda_tl.ops import find_declaration
from kda_tl.ops.operator import Declaration

DECAYS = ("steep", "slow")
# Fields of which operators say what they may be, and what such a value is called
_OF_OPERATORS = {"gate": "gate", "direction": "pass", "state_dtype": "states", "state_use": "use of states"}
_GRADIENT_SEEDS = 1 << 31  # away from the seeds of inputs: do would else be the very numbers of q; a CPU keeps 32 bits


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One pass of an operator with a name: l2norm and gate in the kernels, final state written.

    H, HV, K, V, beta, initial_state, state_v_first and operator are as :class:`~kda_tl.core.problem.Problem` has them.
    Raises InputError if a field is outside its range.
    """

    name: str  # unique, as passed to ``--workload``
    B: int = 1  # sequences of T tokens each; 1 for packed sequences
    T: int = 0  # tokens a sequence; the sum of ``lengths`` for packed sequences
    H: int
    HV: int = 0  # H unless given
    K: int = 128
    V: int = 128
    dtype: str = "bf16"  # element type of q, k, v, g and beta: bf16, fp16 or fp32
    gate: str = "safe"  # "log", "softplus" or "safe" (lower_bound -5)
    decay: str = "steep"  # "steep" (about -3.5 nats a token) or "slow" (a state survives thousands of tokens)
    lengths: tuple[int, ...] = ()  # tokens of each packed sequence; empty for a dense batch
    beta: str = "sigmoid"
    initial_state: bool = False
    state_v_first: bool = False
    state_dtype: str = "fp32"  # of a recurrent operator, as the next: how its states are kept
    state_use: str = ""  # see kda_tl.ops.recurrent_draws.STATE_USES; the operator's usual one unless given
    operator: str = "chunk_kda"
    direction: str = ""  # of the operator's passes, the first unless given; "bwd" for the gradients of the same call
    # Groups it belongs to: "tune", "bench", "cpu"; "forward", "small" and "wide" (K = V = 256) to compare with other
    # implementations; "train" and "train-cpu" for the backward; "gdn" and "gdn-train" of Gated DeltaNet; "decode" and
    # "decode-cpu" of recurrent operators
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "HV", self.HV or self.H)
        object.__setattr__(self, "direction", self.direction or self.declaration.directions[0])
        object.__setattr__(self, "state_use", self.state_use or self.declaration.state_uses[0])
        if self.lengths:
            object.__setattr__(self, "T", sum(self.lengths))
        if self.decay not in DECAYS:
            raise InputError(f"decay must be one of {', '.join(DECAYS)}, got {self.decay!r}.")
        if self.lengths and self.B != 1:
            raise InputError(f"packed sequences need B=1, got B={self.B}.")
        if self.B < 1 or self.T < 1:
            raise InputError(f"{self.name} needs at least one token: pass B and T, or lengths.")
        for name, what in _OF_OPERATORS.items():
            choices: tuple[str, ...] = getattr(self.declaration, f"{name}s")
            if getattr(self, name) not in choices:
                self._refuse(name, what, choices)
        self.problem()

    def _refuse(self, name: str, what: str, choices: tuple[str, ...]) -> None:
        choice = " or ".join(choices) or "an operator that has"
        raise InputError(f"{self.operator} has no {getattr(self, name)} {what}: choose {choice}.")

    @property
    def tokens(self) -> int:
        """Total tokens."""
        return self.B * self.T

    @property
    def bounds(self) -> tuple[int, ...]:
        """Token bounds of the sequences, the batch flattened into the tokens."""
        lengths = self.lengths or (self.T,) * self.B
        return tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))

    @property
    def declaration(self) -> Declaration:
        """The operator."""
        return find_declaration(self.operator)

    def problem(self) -> Problem:
        """What the operator makes of :meth:`inputs`, in its forward or its backward."""
        shared: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Problem) if hasattr(self, f.name)}
        shared |= {"sequences": len(self.lengths) or self.B, "longest": max(self.lengths, default=self.T)}
        shared |= {"varlen": bool(self.lengths), "scalar_gate": self.declaration.scalar_gate}
        return Problem(**shared | self.declaration.modes(self))

    def inputs(self, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments for the operator, drawn on the device."""
        return self.declaration.draw(self, torch.Generator(device=torch.device(device)).manual_seed(seed))

    def trimmed(self, tokens: int) -> Workload:
        """A twin of at most about ``tokens`` tokens that the same kernels serve, for checks against slow references."""
        twin: Workload = self.declaration.trim(self, tokens)
        return twin


def draw_gradients(o: torch.Tensor, ht: torch.Tensor | None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``do`` and ``dht``, N(0, 1), in the shapes and dtypes of the results, whose values do not matter."""
    generator = torch.Generator(device=o.device).manual_seed(seed + _GRADIENT_SEEDS)

    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)

    return draw(o), None if ht is None else draw(ht)


_PACKED = (1300, 547, 2048, 963, 271, 3063)
_EVEN = (1024,) * 8
_SOFTPLUS: dict[str, Any] = {"gate": "softplus", "decay": "slow"}
_ON_CPU: dict[str, Any] = {"T": 192, "H": 2, "dtype": "fp32"}
# Decode as engines call it: states V first, in slots; Kimi Linear's heads, and Qwen3-Next's in pairs
_KDA: dict[str, Any] = {"operator": "fused_recurrent_kda", "H": 32}
_GDN: dict[str, Any] = {"operator": "fused_recurrent_gated_delta_rule", "H": 16, "HV": 32}
_DECODE: dict[str, Any] = {"state_v_first": True, **_SOFTPLUS}
_DECODE_ON_CPU: dict[str, Any] = {**_DECODE, "T": 1, "H": 2, "HV": 2, "K": 32, "V": 32, "dtype": "fp32"}

# A line makes a workload of each gate that keeps one of its tags; "train" makes one of each gate's backward
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "T512-H32": ("small", {"T": 512, "H": 32}),
    "T1024-H8": ("tune", {"T": 1024, "H": 8}),
    "T1024-H32": ("tune small", {"T": 1024, "H": 32}),
    "T1024-H64": ("tune", {"T": 1024, "H": 64}),
    "T1024-H96": ("tune", {"T": 1024, "H": 96}),
    "T8192-H8": ("tune", {"T": 8192, "H": 8}),
    "T8192-H32": ("tune bench forward train", {"T": 8192, "H": 32}),
    "T8192-H64": ("tune bench forward train", {"T": 8192, "H": 64}),
    "T8192-H96": ("tune bench forward train", {"T": 8192, "H": 96}),
    "T32768-H8": ("tune forward train", {"T": 32768, "H": 8}),
    "packed-8x1024-H32": ("train", {"lengths": _EVEN, "H": 32}),
    "packed-H64": ("tune forward", {"lengths": _PACKED, "H": 64}),
    "B8-T1024-H96": ("tune forward", {"B": 8, "T": 1024, "H": 96}),
    "packed-8x1024-H96": ("tune forward", {"lengths": _EVEN, "H": 96}),
}
# Tags that it keeps, tags of its backward, fields. Slow decays are another measurement of the safe gate's plans
_GATES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "safe": ("tune bench forward small", ("train", "training"), {}),
    "slow": ("bench forward", ("training",), {"decay": "slow"}),
    "softplus": ("tune bench forward", ("train", "training"), _SOFTPLUS),
}

# Gated DeltaNet: FlashQLA's shapes, with gates and step sizes as it takes them, and as FLA's layer passes them
_GATED_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "T8192-H32": ("fwd bwd", {"T": 8192, "H": 32}),
    "T8192-H16-HV32": ("fwd bwd", {"T": 8192, "H": 16, "HV": 32}),
    "T8192-H16-HV64": ("fwd bwd", {"T": 8192, "H": 16, "HV": 64}),
    "T32768-H2-HV8": ("fwd", {"T": 32768, "H": 2, "HV": 8}),
    "T32768-H4-HV8": ("bwd", {"T": 32768, "H": 4, "HV": 8}),
    "T32768-H16-HV32": ("fwd bwd", {"T": 32768, "H": 16, "HV": 32}),
    "B4-T2048-H16-HV64": ("fwd", {"B": 4, "T": 2048, "H": 16, "HV": 64}),
    "B8-T1024-H16-HV64": ("fwd", {"B": 8, "T": 1024, "H": 16, "HV": 64}),
    "packed-8x1024-H16-HV64": ("fwd bwd", {"lengths": _EVEN, "H": 16, "HV": 64}),
}
_GATED: dict[str, dict[str, Any]] = {
    "gdn-log": {"gate": "log", "beta": "plain", "initial_state": True},
    "gdn-softplus": _SOFTPLUS,
}

WORKLOADS: tuple[Workload, ...] = (
    *(
        Workload(name=f"{gate}-{name}", tags=tags, **fields, **shape)
        for gate, (kept, _, fields) in _GATES.items()
        for name, (groups, shape) in _SHAPES.items()
        if (tags := tuple(tag for tag in groups.split() if tag in kept.split()))
    ),
    Workload(name="safe-T8192-H16-K256", T=8192, H=16, K=256, V=256, tags=("wide",)),
    Workload(name="softplus-T8192-H16-K256", T=8192, H=16, K=256, V=256, **_SOFTPLUS, tags=("wide",)),
    Workload(name="cpu-safe-K32", K=32, V=32, tags=("cpu",), **_ON_CPU),
    Workload(name="cpu-softplus-K64", K=64, V=64, gate="softplus", tags=("cpu",), **_ON_CPU),
    *(
        Workload(name=f"train-{gate}-{name}".replace("-safe", ""), direction="bwd", tags=tags, **fields, **shape)
        for gate, (_, tags, fields) in _GATES.items()
        for name, (groups, shape) in _SHAPES.items()
        if "train" in groups.split()
    ),
    Workload(name="train-packed-H64", lengths=_PACKED, H=64, direction="bwd", tags=("train",)),
    Workload(name="train-cpu-safe-K32", K=32, V=32, direction="bwd", tags=("train-cpu",), **_ON_CPU),
    Workload(
        name="train-cpu-softplus-K64", K=64, V=64, gate="softplus", direction="bwd", tags=("train-cpu",), **_ON_CPU
    ),
    *(
        Workload(
            name=f"{prefix}{kind}-{name}",
            tags=(tag,),
            operator="chunk_gated_delta_rule",
            direction=direction,
            **fields,
            **shape,
        )
        for direction, tag, prefix in (("fwd", "gdn", ""), ("bwd", "gdn-train", "train-"))
        for kind, fields in _GATED.items()
        for name, (passes, shape) in _GATED_SHAPES.items()
        if direction in passes.split()
    ),
    *(
        Workload(name=f"{kind}-decode-B{B}-{state}", B=B, T=1, state_dtype=state, tags=("decode",), **heads, **_DECODE)
        for kind, heads in (("kda", _KDA), ("gdn", _GDN))
        for state in ("fp32", "bf16")
        for B in (1, 8, 32, 128, 256)
    ),
    *(
        Workload(
            name=f"{kind}-verify-B32-T4-{state}",
            B=32,
            T=4,
            state_dtype=state,
            state_use="verify",
            tags=("decode",),
            **heads,
            **_DECODE,
        )
        for kind, heads in (("kda", _KDA), ("gdn", _GDN))
        for state in ("fp32", "bf16")
    ),
    *(
        Workload(name=f"{kind}-decode-cpu", B=8, tags=("decode-cpu",), **{**heads, **_DECODE_ON_CPU})
        for kind, heads in (("kda", _KDA), ("gdn", _GDN))
    ),
    Workload(
        name="kda-verify-cpu",
        **{**_KDA, **_DECODE_ON_CPU, "B": 4, "T": 4, "state_dtype": "bf16", "state_use": "verify"},
        tags=("decode-cpu",),
    ),
)


def select(names_or_tags: Iterable[str]) -> tuple[Workload, ...]:
    """The workloads of some names and tags, each once, in the order of the table.

    Raises InputError for a word that is neither, with the nearest names, the tags, and where all names are listed.
    """
    wanted = set(names_or_tags)
    tags = sorted({tag for w in WORKLOADS for tag in w.tags})
    known = [*tags, *(w.name for w in WORKLOADS)]
    unknown = sorted(wanted.difference(known))
    if unknown:
        near = dict.fromkeys(name for word in unknown for name in difflib.get_close_matches(word, known))
        meant = f"did you mean {' or '.join(near)}? The" if near else "the"
        what = f"{meant} tags are {', '.join(tags)}; `kda-tl show --workloads` lists the names"
        raise InputError(f"unknown workload {', '.join(unknown)}: {what}.")
    return tuple(w for w in WORKLOADS if wanted & {w.name, *w.tags})
