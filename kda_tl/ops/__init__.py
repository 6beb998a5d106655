"""Operators: one file each. The folder is the registry."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kda_tl.ops.operator import Operator


@functools.cache
def load_all() -> dict[str, Operator]:
    """The operators by name: what the modules here publish."""
    from kda_tl.ops.operator import OPERATORS

    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return OPERATORS
