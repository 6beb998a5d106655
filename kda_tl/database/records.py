"""Records of the tuning database: what a plan is tuned for, and one tuned plan with how it was found."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints

from kda_tl.core.problem import OPTIONS, Problem
from kda_tl.errors import DatabaseError

MIN_TOKENS_BUCKET = 16  # below one chunk every length runs the same launches
# Options of a recurrent call that decide what it moves, or which kernels can run it. With others, as where indices come
# from, the same plan is the fastest
KEY_OPTIONS = ("key_gate", "value_gate", "wide_beta", "updates", "each_token", "snapshots", "tree", "unaligned")
_USUAL_OPTIONS = ("has_g", "has_beta", "pooled")  # what most recurrent calls have besides


def round_heads(heads: int) -> int:
    """Nearest in log2 of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: half octaves, as 96 heads fill a GPU unlike 64 or 128."""
    low = 1 << (max(heads, 1).bit_length() - 1)
    if 2 * heads * heads < 3 * low * low:
        return low
    return 3 * low // 2 if heads * heads < 3 * low * low else 2 * low


def round_tokens(tokens: int, least: int = MIN_TOKENS_BUCKET) -> int:
    """Nearest power of two in log2, at least ``least``, which is one."""
    if tokens <= least:
        return least
    low = 1 << (tokens.bit_length() - 1)
    return low if tokens * tokens < 2 * low * low else 2 * low


class Key(NamedTuple):
    """What a plan is tuned for. The buckets match exactly or nearly, all other fields exactly.

    A named tuple, as it is made on the call path: built and looked up in 1.1 us, against 2.9 as a frozen dataclass
    (Python 3.11, x86 CPU).

    """

    K: int  # this and the next five as :class:`~kda_tl.core.problem.Problem` has them
    V: int
    dtype: str
    gate: str
    group: int
    varlen: bool
    heads_bucket: int  # :func:`round_heads` of the value heads
    tokens_bucket: int  # :func:`round_tokens` of all tokens
    longest_bucket: int  # :func:`round_tokens` of the longest sequence
    scalar_gate: bool = False  # from here on all are of the problem, too; records hold what is not the default
    rank: int = 1
    recurrent: bool = False  # its pass is a step: tokens are then told from one on, and the rest is not left out
    state_dtype: str = "fp32"
    state_v_first: bool = False
    options: tuple[str, ...] = ()  # those of :data:`KEY_OPTIONS`

    @classmethod
    def of(cls, problem: Problem) -> Key:
        """The key of a problem; fields of the problem that do not move the optimum are left out."""
        recurrent = problem.direction == "step"
        least = 1 if recurrent else MIN_TOKENS_BUCKET
        key = cls(
            problem.K,
            problem.V,
            problem.dtype,
            problem.gate,
            problem.HV // problem.H,
            problem.varlen,
            round_heads(problem.HV),
            round_tokens(problem.tokens, least),
            round_tokens(problem.longest, least),
            problem.scalar_gate,
            problem.rank,
        )
        if not recurrent:
            return key
        options = tuple(name for name in problem.options if name in KEY_OPTIONS)
        return cls(*key[:11], True, problem.state_dtype, problem.state_v_first, options)

    @classmethod
    def from_dict(cls, values: Any, where: str = "key") -> Key:
        """Reads a stored key. Raises DatabaseError, as :func:`decode` or for a bucket that is not one."""
        key: Key = decode(cls, values, where)
        if not key.recurrent and key[12:] != (default := tuple(cls._field_defaults.values())[3:]):
            names = ", ".join(cls._fields[12:])
            raise DatabaseError(f"{where} has {names} other than {default}, which only keys with recurrent=true have")
        for name, rounded in (("heads", round_heads), ("tokens", key.round), ("longest", key.round)):
            bucket = getattr(key, f"{name}_bucket")
            if bucket != (nearest := rounded(bucket)):
                raise DatabaseError(
                    f"{where}.{name}_bucket is {bucket}, which is not a bucket: the nearest is {nearest}"
                )
        if key.options != (known := tuple(name for name in OPTIONS if name in KEY_OPTIONS and name in key.options)):
            raise DatabaseError(f"{where}.options must be of {', '.join(KEY_OPTIONS)} in this order, as {list(known)}")
        return key

    def round(self, tokens: int) -> int:
        """The bucket of some tokens in keys of this kind."""
        return round_tokens(tokens, 1 if self.recurrent else MIN_TOKENS_BUCKET)

    def problem(self, operator: str, direction: str) -> Problem:
        """The problem that stands for the key: the heads and tokens of its buckets, and what calls usually have."""
        shared: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Problem) if f.name in self._fields}
        heads, computed = max(1, self.heads_bucket // max(1, self.group)), self.gate != "log"
        if self.recurrent:
            ragged = ("ragged",) if self.varlen else ()
            shared["options"] = (*self.options, *_USUAL_OPTIONS, *ragged)
            shared |= {"sequences": max(1, self.tokens_bucket // self.longest_bucket), "initial_state": True}
        return Problem(
            H=heads,
            HV=heads * self.group,
            tokens=self.tokens_bucket,
            longest=self.longest_bucket,
            has_A_log=computed,
            has_dt_bias=computed,
            beta="sigmoid",
            l2norm=True,
            final_state=not self.recurrent,
            operator=operator,
            direction=direction,
            **shared,
        )

    @property
    def semantic(self) -> tuple[Any, ...]:
        """The fields that must match exactly."""
        return *self[:6], *self[9:]

    @property
    def buckets(self) -> tuple[int, int, int]:
        """The fields that may match nearly: of heads, of tokens, of the longest sequence."""
        return self[6:9]

    @property
    def extents(self) -> tuple[int, ...]:
        """What distances are measured in: the buckets; of a step its states, which run side by side, and its length."""
        if self.recurrent:
            return self.heads_bucket * max(1, self.tokens_bucket // self.longest_bucket), self.longest_bucket
        return self.buckets

    def as_dict(self) -> dict[str, Any]:
        """The stored form: without what has its default, which records of before lack."""
        return {name: x for name, x in self._asdict().items() if x != self._field_defaults.get(name)}

    @property
    def text(self) -> str:
        """Readable form, e.g. ``K128-V128-bf16-safe-group1-heads32-tokens8192-longest8192``."""
        flags = ("-scalar" if self.scalar_gate else "") + (f"-r{self.rank}" if self.rank > 1 else "")
        if self.recurrent:
            flags += "-".join([f"-state_{self.state_dtype}", "vk" if self.state_v_first else "kv", *self.options])
        packed = "-varlen" if self.varlen else ""
        return (
            f"K{self.K}-V{self.V}-{self.dtype}-{self.gate}{flags}-group{self.group}{packed}"
            f"-heads{self.heads_bucket}-tokens{self.tokens_bucket}-longest{self.longest_bucket}"
        )


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Duration of the plan: median and median absolute deviation in microseconds, over reps in interleaved rounds."""

    median: float
    mad: float
    reps: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class VsDefault:
    """Time of the default over the plan's, measured interleaved, with its 95 % interval; above 1 is faster."""

    ratio: float
    ci95: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Largest relative error against the reference, and the tolerance it stayed within."""

    max_rel_err: float
    tolerance: float


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tuned plan and how it was found."""

    key: Key  # what it was tuned for
    plan: Mapping[str, Any] = field(hash=False)  # of :meth:`kda_tl.core.stage.Plan.as_dict`; treat it as read-only
    numerics: str  # numerics class: plans of one class give the same bits
    time_us: Timing
    vs_default: VsDefault  # over the default of the pipeline that ``provenance`` names, if it names one
    check: Check
    # stage name -> SHA-256 of the template's source and space when it was measured
    templates: Mapping[str, str] = field(hash=False)
    # where, when and with which versions; see :func:`kda_tl.database.store.provenance`
    provenance: Mapping[str, Any] = field(hash=False)
    # version of TileLang -> stage name -> :func:`kda_tl.runtime.compile.hash_kernel` of what was measured, built for
    # :meth:`Key.problem`. Another version generates other text, of which a hash says nothing. Empty in records of
    # schema 1 until ``kda-tl verify --static`` has seen them.
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)

    @classmethod
    def from_dict(cls, values: Any, where: str = "entry") -> Entry:
        """Reads a stored entry. Raises DatabaseError, as :meth:`Key.from_dict`."""
        entry: Entry = decode(cls, values, where)
        decode(_PlanShape, entry.plan, f"{where}.plan")
        Key.from_dict(entry.key.as_dict(), f"{where}.key")
        return entry

    def as_dict(self) -> dict[str, Any]:
        """The stored form."""
        return asdict(self) | {"key": self.key.as_dict()}


class _PlanShape(NamedTuple):
    pipeline: str
    BT: int
    BC: int
    stages: Mapping[str, Mapping[str, Any]]
    kept: bool = False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300  # false for NaN and for integers that no float holds


def _is_object(value: Any, of: Callable[[Any], bool] = lambda item: True) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and of(value[name]) for name in value)


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer of at least 0", lambda v: type(v) is int and v >= 0),
    float: ("a finite number of at least 0", _is_number),
    str: ("a string that is not empty", lambda v: isinstance(v, str) and v != ""),
    bool: ("true or false", lambda v: isinstance(v, bool)),
    tuple[float, float]: (
        "two numbers",
        lambda v: isinstance(v, (list, tuple)) and len(v) == 2 and all(map(_is_number, v)),
    ),
    list[Any]: ("a list", lambda v: isinstance(v, list)),
    tuple[str, ...]: (
        "a list of strings",
        lambda v: isinstance(v, (list, tuple)) and all(isinstance(item, str) for item in v),
    ),
    Mapping[str, Any]: ("an object", _is_object),
    Mapping[str, str]: ("an object of strings", lambda v: _is_object(v, lambda item: isinstance(item, str))),
    Mapping[str, Mapping[str, Any]]: ("an object of objects", lambda v: _is_object(v, _is_object)),
    Mapping[str, Mapping[str, str]]: (
        "an object of objects of strings",
        lambda v: _is_object(v, lambda item: _is_object(item, lambda text: isinstance(text, str))),
    ),
}


@functools.cache
def _hints(record: Any) -> dict[str, Any]:
    return get_type_hints(record)


def decode(kind: Any, value: Any, where: str) -> Any:
    """Checks a JSON value against a field's type; a record has the fields it declares, those with a default perhaps.

    Raises DatabaseError if a field is missing, unknown or of the wrong type.
    """
    if kind in _KINDS:
        description, accepts = _KINDS[kind]
        if not accepts(value):
            raise DatabaseError(f"{where} must be {description}, got {reprlib.repr(value)}")
        return tuple(value) if kind in (tuple[float, float], tuple[str, ...]) else value
    hints = _hints(kind)
    if not isinstance(value, Mapping):
        raise DatabaseError(f"{where} must be an object, got {reprlib.repr(value)}")
    missing = sorted(hints.keys() - value.keys() - getattr(kind, "_field_defaults", {}).keys())
    if missing or value.keys() - hints.keys():
        unknown = sorted(value.keys() - hints.keys())
        raise DatabaseError(f"{where} lacks the fields {missing} and has the unknown fields {unknown}")
    return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items() if name in value})
