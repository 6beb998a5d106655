"""kda_tl: TileLang kernels for Kimi Delta Attention, tuned per GPU and dispatched at call time."""

from kda_tl.chunk import chunk_kda, explain
from kda_tl.db import use
from kda_tl.dispatch import pin
from kda_tl.errors import (
    CompileError,
    DatabaseError,
    DeviceError,
    InputError,
    KdaTlError,
    KdaTlWarning,
    UnsupportedError,
    WrongResultError,
)

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DatabaseError",
    "DeviceError",
    "InputError",
    "KdaTlError",
    "KdaTlWarning",
    "UnsupportedError",
    "WrongResultError",
    "__version__",
    "chunk_kda",
    "explain",
    "pin",
    "use",
]
