"""TileLang's language as templates write it, imported when the first kernel is built.

What a stage declares, its tensors, space, defaults and costs, needs no TileLang: a process that only looks plans up, or
loads kernels that were built elsewhere, does not wait for its import (3 s, and 1.5 s more for rewriting the macros).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kda_tl.core.toolchain import import_tilelang


class _Language:
    """``tilelang.language``: its names are looked up there when they are first used."""

    def __getattr__(self, name: str) -> Any:
        import_tilelang()
        import tilelang.language

        found = getattr(tilelang.language, name)
        setattr(self, name, found)
        return found

    @functools.cached_property
    def BY_ROWS(self) -> Any:
        """Warps of a product side by side along its rows."""
        return self.GemmWarpPolicy.FullRow

    @functools.cached_property
    def BY_COLUMNS(self) -> Any:
        """Warps of a product side by side along its columns."""
        return self.GemmWarpPolicy.FullCol

    @staticmethod
    def macro(function: Callable[..., Any]) -> Callable[..., Any]:
        """``tilelang.language.macro``, which rewrites the function when it is first called."""

        @functools.cache
        def rewrite() -> Callable[..., Any]:
            import tilelang.language

            rewritten: Callable[..., Any] = tilelang.language.macro(function)
            return rewritten

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return rewrite()(*args, **kwargs)

        return call


T: Any = _Language()
