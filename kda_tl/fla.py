"""Our operators under flash-linear-attention: its layers and models run on it, unchanged.

    import kda_tl
    kda_tl.fla.register()

Source: FLA v0.6.0 ``fla/backends.py`` (the registry), ``fla/ops/*/chunk.py`` and ``fla/ops/kda/fused_recurrent.py``
(the arguments).
"""

import importlib
import inspect
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.toolchain import explain_missing
from kda_tl.errors import KdaTlError, KdaTlWarning, UnsupportedError
from kda_tl.ops import load_all
from kda_tl.ops.call import pose
from kda_tl.ops.entry import needs_gradients, settle
from kda_tl.ops.operator import Args, Operator
from kda_tl.ops.recurrent import RecurrentOperator
from kda_tl.ops.recurrent_call import bind_step
from kda_tl.ops.recurrent_entry import RECURRENT
from kda_tl.runtime.dispatch import select_cached

BACKEND = "kda_tl"
SWITCH = "KDA_TL_FLA"
PRIORITY = 1  # lower is asked first: whoever registers us wants us before FlashKDA (3)
AnyOperator = Operator | RecurrentOperator


def register() -> None:
    """Offers our operators to flash-linear-attention as backends of its functions of the same names.

    From then on FLA asks us first, at every call, whether we serve it. A call that we decline goes to FLA's other
    backends, then to its own kernels: arguments of FLA's that we do not have (cp_context, use_graph=True), unknown
    keywords, intermediate states of a call that needs gradients, whatever the operator refuses (dtypes, K above 256,
    V above 512, a lower_bound outside [-5, 0)), and all calls on a GPU for which no compiler is found. FLA logs the
    first reason for declining, and the first call that we serve, at level INFO of the logger ``fla.backends``.
    Intermediate states are, as FLA's, of 64 tokens unless chunk_size is given.

    FLA asks about ``fused_recurrent_kda`` inside: it calls ``fla.ops.kda.fused_recurrent.fused_recurrent_kda_fwd``,
    which engines call too, with slots of a pool. That takes all keywords of :func:`kda_tl.fused_recurrent_kda`; calls
    that need gradients are declined. About ``fused_recurrent_gated_delta_rule`` FLA 0.6.0 asks nobody: call
    :func:`kda_tl.fused_recurrent_gated_delta_rule`, which has its arguments.

    The environment variable ``KDA_TL_FLA=0``, read at every call, turns us off, unless FLA's own
    ``FLA_KDA_TL=1`` overrides it. To register twice is to register once.

    Raises:
        UnsupportedError: FLA cannot be imported, or its version has no registry or other arguments.

    Source: FLA v0.6.0 ``fla/backends.py``.
    """
    for name, operator in list_served().items():
        base, add, entry_point, version = _import_registry(operator)
        service = Service(operator, tuple(inspect.signature(entry_point).parameters))
        if not service.knows_arguments():
            raise UnsupportedError(
                f"FLA {version} takes other arguments than FLA 0.6.0, which kda_tl was written for: install"
                f" flash-linear-attention 0.6.0, or call kda_tl.{operator.name}."
            )
        # FLA finds both by the name of its function
        functions = {name: staticmethod(service.run), f"{name}_verifier": staticmethod(service.verify)}
        backend = type("KdaTlBackend", (base,), {"backend_type": BACKEND, "priority": PRIORITY, **functions})
        try:
            add(operator.fla.registry or entry_point, env_var=SWITCH)(backend)
        except KeyError as error:
            raise _no_registry(version, operator.name) from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        message = "FLA_DISABLE_BACKEND_DISPATCH=1 makes FLA ask no backend, so not kda_tl either: unset it"
        warnings.warn(f"{message} before fla is imported.", KdaTlWarning, stacklevel=2)


def list_served() -> dict[str, AnyOperator]:
    """The operators that FLA asks about, by the names of its functions."""
    operators: list[AnyOperator] = [*load_all().values(), *RECURRENT.values()]
    return {operator.fla.name or operator.name: operator for operator in operators if operator.fla.asks}


def _import_registry(operator: AnyOperator) -> tuple[Any, Any, Any, str]:
    """FLA's base class of backends, its function that registers one, its function of that name, and its version."""
    version = "of this version"
    try:
        import fla

        version = getattr(fla, "__version__", version)
        from fla.backends import BaseBackend
        from fla.backends import register as add

        entry_point = getattr(importlib.import_module(operator.fla.module), operator.fla.name or operator.name)
    except ImportError as error:
        if error.name == "fla":
            raise UnsupportedError(
                "flash-linear-attention is not installed: `pip install flash-linear-attention`, or call"
                f" kda_tl.{operator.name} itself, which needs no FLA."
            ) from error
        if error.name is not None and error.name.startswith("fla."):
            raise _no_registry(version, operator.name) from error
        raise UnsupportedError(f"FLA {version} cannot be imported ({error}): install what it needs.") from error
    return BaseBackend, add, entry_point, version


def _no_registry(version: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"FLA {version} has no registry of backends for {name}: install flash-linear-attention 0.6.0, or call"
        f" kda_tl.{name}."
    )


@dataclass(frozen=True)
class Service:
    """An operator under FLA: takes the arguments of FLA's function, positional ones in FLA's ``order`` of names."""

    operator: AnyOperator
    order: tuple[str, ...]

    def knows_arguments(self) -> bool:
        """Whether FLA's arguments are those that we take, or know to decline; further keywords are the rest of ours.

        The order counts only where FLA's function has the operator's name: another one is none that users call.
        """
        ours = self.operator.signature.parameters
        positional = tuple(name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
        theirs = set(self.order) - {"kwargs"}
        same = set(positional) <= theirs if self.operator.fla.name else self.order[: len(positional)] == positional
        return same and theirs - set(ours) == set(self.operator.fla.declined)

    def verify(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        """Whether we serve a call of FLA's function, and if not, why. About 25 us; reads nothing back."""
        try:
            reason = self._find_reason(self._name_arguments(args, kwargs))
        except KdaTlError as error:
            reason = str(error)
        return reason is None, reason

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A call of FLA's function that :meth:`verify` accepted."""
        return _serve(self.operator, self._pick_ours(self._name_arguments(args, kwargs)))

    def _pick_ours(self, given: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in given.items() if name not in self.operator.fla.declined}

    def _name_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What was given, by name; raises UnsupportedError for what no function would take."""
        given = dict(zip(self.order, args, strict=False)) | kwargs
        if len(given) != len(args) + len(kwargs):
            raise UnsupportedError("there are too many positional arguments, or one is given a second time by name.")
        return {**self.operator.fla.defaults, **given}

    def _find_reason(self, given: dict[str, Any]) -> str | None:
        """Why we decline a call, or None; what the operator would refuse is raised."""
        operator, ours = self.operator, self._pick_ours(given)
        unknown = ours.keys() - set(operator.arguments)
        if unknown:
            return f"kda_tl does not know the keywords {', '.join(sorted(unknown))}."
        for name, reason in operator.fla.declined.items():
            if reason and given.get(name) not in (None, False):
                return reason
        if isinstance(operator, RecurrentOperator):
            return _find_recurrent_reason(operator, operator.bind(**ours))
        a = settle(operator, operator.bind(**ours))
        problem, device, chunk_size = pose(operator, a, operator.assume_bounds(a))
        if needs_gradients(operator, a) and problem.intermediate_states:
            return "kda_tl's intermediate states carry no gradient: call it under torch.no_grad()."
        on_gpu = operator.pick_operands(a)[0].is_cuda  # on the CPU FLA has no kernels either
        if on_gpu and select_cached(problem, device, chunk_size).plan is None:
            return f"kda_tl has no kernels for this GPU: {explain_missing(device)} (see `kda-tl doctor`)."
        return None


def _find_recurrent_reason(operator: RecurrentOperator, a: Args) -> str | None:
    """Why we decline a call of a recurrent operator, or None; what it would refuse is raised.

    The plan is found here, and remembered for the call.
    """
    bound = bind_step(operator, a)
    given = [x for name in operator.tensors if (x := getattr(a, name)) is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return f"kda_tl's {operator.name} carries no gradient: call it under torch.no_grad()."
    if a.q.is_cuda and bound.compute is None:
        return f"kda_tl has no kernels for this GPU: {bound.choice.reason} (see `kda-tl doctor`)."
    return None


def _serve(operator: AnyOperator, arguments: dict[str, Any]) -> Any:
    return operator.call(**arguments)
