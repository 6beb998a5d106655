"""Our ``chunk_kda`` under flash-linear-attention: its KDA layers and models run on it, unchanged.

    import kda_tl
    kda_tl.fla.register()

Source: FLA v0.6.0 ``fla/backends.py`` (the registry), ``fla/ops/kda/chunk.py`` (the arguments).
"""

from __future__ import annotations

import inspect
import os
import warnings
from typing import Any

from kda_tl.arguments import (
    assume_bounds,
    cast_as_autocast,
    check_tensors,
    find_state_layout,
    needs_gradients,
    parse_problem,
)
from kda_tl.chunk import chunk_kda
from kda_tl.dispatch import choose
from kda_tl.errors import KdaTlError, KdaTlWarning, UnsupportedError
from kda_tl.toolchain import explain_missing

BACKEND = "kda_tl"
SWITCH = "KDA_TL_FLA"
PRIORITY = 1  # lower is asked first: whoever registers us wants us before FlashKDA (3)

# FLA's arguments in order; it takes A_log, dt_bias, chunk_size and the old name of state_v_first as further keywords.
# max_num_seqs is not looked at: it goes with use_graph.
_FLA_ARGUMENTS = (
    "q",
    "k",
    "v",
    "g",
    "beta",
    "scale",
    "initial_state",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
    "cu_seqlens",
    "cu_seqlens_cpu",
    "cp_context",
    "use_graph",
    "max_num_seqs",
)
_OURS = {name: parameter.default for name, parameter in inspect.signature(chunk_kda).parameters.items()}


def register() -> None:
    """Offers :func:`kda_tl.chunk_kda` to flash-linear-attention as a backend of ``fla.ops.kda.chunk_kda``.

    From then on FLA asks us first, at every call, whether we serve it. A call that we decline goes to FLA's other
    backends, then to its own kernels: cp_context, use_graph=True, unknown keywords, intermediate states of a call that
    needs gradients, whatever chunk_kda refuses (dtypes, K or V above 256, a lower_bound outside [-5, 0)), and all calls
    on a GPU for which no compiler is found. FLA logs the first reason for declining, and the first call that we serve,
    at level INFO of the logger ``fla.backends``. Intermediate states are, as FLA's, of 64 tokens unless chunk_size is
    given.

    The environment variable ``KDA_TL_FLA=0``, read at every call, turns us off, unless FLA's own
    ``FLA_KDA_TL=1`` overrides it. To register twice is to register once.

    Raises:
        UnsupportedError: FLA cannot be imported, or its version has no registry or other arguments.

    Source: FLA v0.6.0 ``fla/backends.py``.
    """
    base, add, entry_point, version = _import_registry()
    known = tuple(inspect.signature(entry_point).parameters)[: len(_FLA_ARGUMENTS)]
    if known != _FLA_ARGUMENTS:
        raise UnsupportedError(
            f"FLA {version} takes other arguments than FLA 0.6.0, which kda_tl was written for: install"
            " flash-linear-attention 0.6.0, or call kda_tl.chunk_kda."
        )
    backend = type("KdaTlBackend", (base,), {"backend_type": BACKEND, "priority": PRIORITY})
    try:
        add(entry_point, backend=backend, verifier=_verify, env_var=SWITCH)(_run)
    except KeyError as error:
        raise _no_registry(version) from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        message = "FLA_DISABLE_BACKEND_DISPATCH=1 makes FLA ask no backend, so not kda_tl either: unset it"
        warnings.warn(f"{message} before fla is imported.", KdaTlWarning, stacklevel=2)


def _import_registry() -> tuple[Any, Any, Any, str]:
    """FLA's base class of backends, its function that registers one, its ``chunk_kda``, and its version."""
    version = "of this version"
    try:
        import fla

        version = getattr(fla, "__version__", version)
        from fla.backends import BaseBackend
        from fla.backends import register as add
        from fla.ops.kda.chunk import chunk_kda as entry_point
    except ImportError as error:
        if error.name == "fla":
            raise UnsupportedError(
                "flash-linear-attention is not installed: `pip install flash-linear-attention`, or call"
                " kda_tl.chunk_kda itself, which needs no FLA."
            ) from error
        if error.name is not None and error.name.startswith("fla."):
            raise _no_registry(version) from error
        raise UnsupportedError(f"FLA {version} cannot be imported ({error}): install what it needs.") from error
    return BaseBackend, add, entry_point, version


def _no_registry(version: str) -> UnsupportedError:
    return UnsupportedError(
        f"FLA {version} has no registry of backends for chunk_kda: install flash-linear-attention 0.6.0, or call"
        " kda_tl.chunk_kda."
    )


def _verify(*args: Any, **kwargs: Any) -> tuple[bool, str | None]:
    """Whether we serve a call of FLA's ``chunk_kda``, and if not, why. About 25 us; reads nothing back."""
    try:
        reason = _find_reason(_name_arguments(args, kwargs))
    except KdaTlError as error:
        reason = str(error)
    return reason is None, reason


def _run(*args: Any, **kwargs: Any) -> Any:
    """A call of FLA's ``chunk_kda`` that :func:`_verify` accepted."""
    given = _name_arguments(args, kwargs)
    return chunk_kda(**{name: value for name, value in given.items() if name in _OURS})


def _name_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What was given, by name; raises UnsupportedError for what no function would take."""
    given = dict(zip(_FLA_ARGUMENTS, args, strict=False)) | kwargs
    if len(given) != len(args) + len(kwargs):
        raise UnsupportedError("there are too many positional arguments, or one is given a second time by name.")
    return given


def _find_reason(given: dict[str, Any]) -> str | None:
    """Why we decline a call, or None; what chunk_kda would refuse is raised."""
    unknown = given.keys() - _OURS.keys() - set(_FLA_ARGUMENTS)
    if unknown:
        return f"kda_tl does not know the keywords {', '.join(sorted(unknown))}."
    if given.get("cp_context") is not None:
        return "kda_tl has no context parallelism: leave cp_context out."
    if given.get("use_graph"):
        return (
            "kda_tl makes its chunk tables on the host, so a captured call cannot follow another cu_seqlens:"
            " use_graph=True is FLA's own."
        )
    a = cast_as_autocast(_OURS | given)
    a["state_v_first"] = find_state_layout(a["transpose_state_layout"], a["state_v_first"])
    check_tensors(a)
    problem, device, chunk_size = parse_problem(a, assume_bounds(a))
    if needs_gradients(a) and a["return_intermediate_states"]:
        return "kda_tl's intermediate states carry no gradient: call it under torch.no_grad()."
    if choose(problem, device, chunk_size).plan is None and a["q"].is_cuda:  # on the CPU FLA has no kernels either
        return f"kda_tl has no kernels for this GPU: {explain_missing(device)} (see `kda-tl doctor`)."
    return None
