"""Vocabulary of the templates: configs whose space is their type, stages with named tensors, plans.

Everything here is frozen data; nothing imports torch or tilelang.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, TypeVar

from kda_tl.core.device import Device
from kda_tl.core.problem import OPTIONS, Problem
from kda_tl.errors import InputError

ConfigT = TypeVar("ConfigT", bound="Config")

# What a stage's reference is given, by name: tensors, None where the problem lacks one, and numbers
Operands = SimpleNamespace

BT_CHOICES = (64, 32, 16)
BC_CHOICES = (16, 8)


def tunable(default: Any, *choices: Any) -> Any:
    """Declares one tunable field of a config: the default first, then every choice."""
    if default not in choices:
        raise ValueError(f"default {default!r} is not among the choices {choices!r}")
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a stage's kernel is built for: a problem (kernels ignore its lengths), a device and the chunk sizes.

    A chunk has BT tokens, a sub-chunk BC, which divides BT; both are 0 for a step, which has no chunks.
    """

    problem: Problem
    device: Device
    BT: int
    BC: int

    def __post_init__(self) -> None:
        if (self.BT, self.BC) == (0, 0):
            return
        if self.BT not in BT_CHOICES or self.BC not in BC_CHOICES or self.BT % self.BC:
            raise InputError(f"BT={self.BT}, BC={self.BC}: BT must be one of {BT_CHOICES}, BC of {BC_CHOICES}.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One point of a stage's search space. Subclasses declare fields with :func:`tunable`."""

    @classmethod
    def axes(cls) -> dict[str, tuple[Any, ...]]:
        """Choices by field name."""
        return {f.name: f.metadata["choices"] for f in fields(cls)}

    @classmethod
    def space(cls: type[ConfigT]) -> Iterator[ConfigT]:
        """Every point of the space, valid or not, in a fixed order."""
        axes = cls.axes()
        for values in itertools.product(*axes.values()):
            yield cls(**dict(zip(axes, values, strict=True)))

    @classmethod
    def size(cls) -> int:
        """Number of points in the space."""
        return math.prod(len(choices) for choices in cls.axes().values())

    @classmethod
    def from_dict(cls: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
        """A config from stored values. Raises InputError if a field is missing, unknown, or not among its choices."""
        axes = cls.axes()
        if set(values) != set(axes):
            raise InputError(f"{cls.__name__} has the fields {sorted(axes)}, got {sorted(values)}.")
        for name, value in values.items():
            if not any(type(value) is type(choice) and value == choice for choice in axes[name]):  # 1.0 is no 1
                raise InputError(f"{cls.__name__}.{name} must be one of {axes[name]}, got {value!r}.")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Field values, for records."""
        return asdict(self)

    def neighbours(self: ConfigT) -> Iterator[ConfigT]:
        """Every config that differs in exactly one field."""
        for name, choices in self.axes().items():
            for choice in choices:
                if choice != getattr(self, name):
                    yield type(self)(**{**asdict(self), name: choice})

    def reject(self, case: Case) -> str | None:
        """A sentence that says why this config cannot run the case, or None. The one statement of constraints."""
        return None


def first_valid(case: Case, *configs: ConfigT) -> ConfigT:
    """The first of some configs that the case does not reject, else the first of their space, else the first."""
    valid = (config for config in (*configs, *type(configs[0]).space()) if config.reject(case) is None)
    return next(valid, configs[0])


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and presence of one named tensor of a stage.

    Written as ``"NT HV BT KP : f32 ? l2norm"``: dimensions, the dtype (``io``, ``g``, ``beta``, ``state``, ``f32``,
    ``bf16``, ``i32``), and, after ``?``, the field of :class:`Problem` that must be true for the tensor to exist, or
    one of its options, or ``not`` and the field that must be false.
    """

    dims: tuple[str, ...]
    dtype: str
    when: str | None
    holds: bool = True

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Parses the notation above."""
        body, _, when = text.partition("?")
        dims, _, dtype = body.partition(":")
        *negation, field_name = when.split() or [""]
        return cls(dims=tuple(dims.split()), dtype=dtype.strip(), when=field_name or None, holds=not negation)

    @property
    def is_state(self) -> bool:
        """Whether these are states as a caller has them, [K, V] or [V, K]."""
        return self.dims == ("N", "HV", "K", "V")

    def fields(self, problem: Problem) -> set[str]:
        """What of a problem decides the type that a kernel's parameter has: names as in :attr:`Stage.depends`."""
        when = "options" if self.when in OPTIONS else self.when
        found = {name for name in (when, _FIELD_OF_DTYPE.get(self.dtype)) if name}
        if self.present(problem):
            found |= {name for dim in self.dims for name in _fields_of_dim(dim, problem)}
            found |= {"state_v_first"} if self.is_state else set()
        return found

    def present(self, problem: Problem) -> bool:
        """Whether the tensor exists for a problem."""
        if self.when in OPTIONS:
            return (self.when in problem.options) is self.holds
        return self.when is None or bool(getattr(problem, self.when)) is self.holds

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(dim_size(dim, sizes) for dim in self.dims)

    def element(self, problem: Problem) -> str:
        """Element type: bf16, fp16, fp32 or i32."""
        name = _FIELD_OF_DTYPE.get(self.dtype)
        return getattr(problem, name) if name else _FIXED[self.dtype]


_FIELD_OF_DTYPE = {"io": "dtype", "g": "g_dtype", "beta": "beta_dtype", "state": "state_dtype"}
_FIXED = {"f32": "fp32", "bf16": "bf16", "i32": "i32"}


def _fields_of_dim(dim: str, problem: Problem) -> tuple[str, ...]:
    """Fields of a problem that a dimension follows from. Numbers of heads are known at the call, not their relation."""
    of_gates = ("scalar_gate",) if problem.scalar_gate else ("scalar_gate", "K")
    by_dim = {"H": ("grouped",), "K": ("K",), "KP": ("K",), "V": ("V",), "VP": ("V",), "G": of_gates, "GP": of_gates}
    return by_dim.get(dim, ())


def dim_size(dim: str, sizes: Mapping[str, int]) -> int:
    """Size of a dimension of a spec: a number, a name, or ``name+1``."""
    if dim.isdigit():
        return int(dim)
    name, _, extra = dim.partition("+")
    return sizes[name] + (int(extra) if extra else 0)


def built_sizes(case: Case) -> dict[str, int]:
    """Dimensions known when a kernel is built. LOWER HALF: a lower triangle's two halves, see ``pack_lower``."""
    p = case.problem
    widths = {"K": p.K, "V": p.V, "G": p.G, "KP": p.KP, "VP": p.VP, "GP": p.GP}
    return widths | {"BT": case.BT, "BC": case.BC, "HALF": case.BT // 2, "LOWER": case.BT + case.BT // 2}


def static_sizes(case: Case) -> dict[str, int]:
    """Dimensions that all calls of a problem share: those of its kernels, and heads, which kernels are told."""
    return {"H": case.problem.H, "HV": case.problem.HV} | built_sizes(case)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Floors of one launch: what must move through device memory, and what must be computed."""

    bytes: int
    flops: int


def no_passes(case: Case) -> dict[str, Any]:
    """Of a kernel that needs no settings of its own; a function with a name, since stages are pickled."""
    return {}


_OF_DEVICE = {"num_sms"}  # fields of a device that kernels may depend on, beside its architecture

# What kernels that ignore these fields see of them; other fields have their defaults
_ANY_PROBLEM: dict[str, Any] = {
    "K": 128,
    "V": 128,
    "tokens": 0,
    "dtype": "bf16",
    "g_dtype": "bf16",
    "beta_dtype": "bf16",
}


@dataclass(frozen=True)
class Stage:
    """One kernel launch in a pass.

    Attributes:
        name: file name of the template.
        inputs: tensor name -> spec notation, in the order of the kernel's parameters.
        outputs: the same, for what the stage writes; they follow the inputs.
        config: the search space.
        build: ``(case, config) -> tilelang PrimFunc``.
        reference: plain PyTorch twin, ``(case, operands) -> outputs by name``.
        default: ``case -> config`` when nothing is tuned.
        cost: ``(case, sizes) -> Cost`` with sizes holding those of a layout as well.
        tolerance: relative error (norm of the difference over norm) each output may have, by element type of io.
        depends: fields of the problem that ``build`` and ``passes`` ask for, beside those that its tensors name by
            their dimensions, their dtypes and what they exist for; and ``num_sms`` if they ask the device for it.
            Kernels see no other field, see :meth:`specialise`.
        scalars: float parameters, last.
        rms_floor: root mean square of an output below which its error is taken relative to this instead: what uses
            it would not notice.
        passes: ``case -> settings`` of TileLang's passes that its CUDA kernel needs, beside everyone's.
        adds: outputs that begin as zeros, to which thread blocks add, by the field of the problem that must be true.
        replaces: outputs of which each may lie where an input of the same spec lies, by output: the kernel has read an
            element of the one before it writes that element of the other.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    config: type[Config]
    build: Callable[[Case, Any], Any]
    reference: Callable[[Case, Operands], dict[str, Any]]
    default: Callable[[Case], Config]
    cost: Callable[[Case, Mapping[str, int]], Cost]
    tolerance: Mapping[str, float]
    _: KW_ONLY
    depends: tuple[str, ...]
    scalars: tuple[str, ...] = ()
    rms_floor: Mapping[str, float] = field(default_factory=dict)
    passes: Callable[[Case], Mapping[str, Any]] = no_passes
    adds: Mapping[str, str] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(self.outputs[new] != self.inputs[old] for new, old in self.replaces.items()):
            raise ValueError(f"{self.name}: an output replaces an input of another spec")
        if unknown := set(self.depends) - {f.name for f in fields(Problem)} - _OF_DEVICE:
            raise ValueError(f"{self.name} depends on {sorted(unknown)}, which neither problem nor device has")

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Parsed specs of all tensors, inputs first."""
        return {name: TensorSpec.parse(text) for name, text in {**self.inputs, **self.outputs}.items()}

    def tensors_of(self, problem: Problem) -> tuple[list[str], list[str]]:
        """Names of the tensors that it reads and of those that it writes, but for what the problem lacks."""
        present = [name for name, spec in self.specs.items() if spec.present(problem)]
        return [name for name in present if name in self.inputs], [name for name in present if name in self.outputs]

    def fields_of(self, problem: Problem) -> dict[str, Any]:
        """What of a problem its kernels are built for, by name: fields, and whether value heads share other heads.

        Fields of tensors that the problem lacks do not count.
        """
        names = set(self.depends).union(*(spec.fields(problem) for spec in self.specs.values())) - _OF_DEVICE
        return {name: getattr(problem, name) for name in sorted(names)}

    def fields_of_device(self, device: Device) -> dict[str, Any]:
        """What of a device its kernels are built for, by name."""
        return {"arch": device.arch} | {name: getattr(device, name) for name in self.depends if name in _OF_DEVICE}

    def specialise(self, case: Case) -> Case:
        """The case that its kernels for another are built for: the same for all cases whose kernels are the same.

        All that kernels do not depend on has one value, which a config of the case may reject.
        """
        known = {**_ANY_PROBLEM, **self.fields_of(case.problem)}
        grouped, parted = known.pop("grouped", False), known.pop("parted", False)
        heads = {"H": 1, "HV": 3 if parted else 2 if grouped else 1}
        device = replace(case.device, **({"num_sms": 1} | self.fields_of_device(case.device)))
        return replace(case, problem=Problem(**(known | heads)), device=device)

    def candidates(self, case: Case) -> Iterator[Config]:
        """Every config of the space that the case does not reject."""
        return (config for config in self.config.space() if config.reject(case) is None)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs: a pipeline by its name, tokens a chunk and a sub-chunk (0 for a step), and one config a stage.

    Attributes:
        stages: (stage name, config) pairs in launch order.
        kept: of a backward: it begins from the forward's residuals, wherever that made the same ones.
    """

    pipeline: str
    BT: int
    BC: int
    stages: tuple[tuple[str, Config], ...]
    kept: bool = False

    @property
    def label(self) -> str:
        """Pipeline and chunk sizes, for people."""
        chunks = f", BT={self.BT}, BC={self.BC}" if self.BT else ""
        return self.pipeline + chunks + (", kept" if self.kept else "")

    def config(self, stage: str) -> Config:
        """The config of one stage."""
        return dict(self.stages)[stage]

    def as_dict(self) -> dict[str, Any]:
        """The form stored in the database."""
        return {
            "pipeline": self.pipeline,
            "BT": self.BT,
            "BC": self.BC,
            "stages": {name: config.as_dict() for name, config in self.stages},
        } | ({"kept": True} if self.kept else {})
