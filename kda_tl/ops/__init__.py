"""Operators: one file each. The folder is the registry."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

from kda_tl.errors import InputError

if TYPE_CHECKING:
    from kda_tl.ops.operator import Declaration, Operator
    from kda_tl.ops.recurrent import RecurrentOperator


@functools.cache
def load_all() -> dict[str, Operator]:
    """The operators of whole sequences by name: what the modules here publish."""
    from kda_tl.ops.operator import OPERATORS

    _import_all()
    return OPERATORS


@functools.cache
def load_recurrent() -> dict[str, RecurrentOperator]:
    """The recurrent operators by name."""
    from kda_tl.ops.recurrent_entry import RECURRENT

    _import_all()
    return RECURRENT


@functools.cache
def load_declarations() -> dict[str, Declaration]:
    """The operators of both kinds by name."""
    return {**load_all(), **load_recurrent()}


def find_declaration(name: str) -> Declaration:
    """The operator of a name, of either kind. Raises InputError if there is none."""
    operators = load_declarations()
    if name not in operators:
        raise InputError(f"there is no operator {name!r}: choose one of {', '.join(operators)}.")
    return operators[name]


def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def find_operator(name: str) -> Operator:
    """The operator of whole sequences of a name. Raises InputError if there is none."""
    if name not in load_all():
        raise InputError(f"there is no operator {name!r}: choose one of {', '.join(load_declarations())}.")
    return load_all()[name]
