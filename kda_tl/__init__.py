"""kda_tl: TileLang kernels for Kimi Delta Attention and its family, tuned per GPU and dispatched at call time."""

import importlib
from typing import TYPE_CHECKING, Any

from kda_tl.errors import (
    BundleError,
    CompileError,
    DatabaseError,
    DeviceError,
    InputError,
    KdaTlError,
    KdaTlWarning,
    LaunchError,
    PackageError,
    UnsupportedError,
    WrongResultError,
)

if TYPE_CHECKING:
    from kda_tl import fla
    from kda_tl.bundle.sources import use_kernels
    from kda_tl.database.store import use
    from kda_tl.ops.entry import explain
    from kda_tl.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gdn
    from kda_tl.ops.kda import chunk_kda
    from kda_tl.ops.memory import workspace_bytes
    from kda_tl.ops.packed_decode import packed_decode
    from kda_tl.ops.recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule, fused_recurrent_gdn
    from kda_tl.ops.recurrent_kda import fused_recurrent_kda
    from kda_tl.ops.warmup import warmup
    from kda_tl.runtime.compile import no_compile
    from kda_tl.runtime.dispatch import pin

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "CompileError",
    "DatabaseError",
    "DeviceError",
    "InputError",
    "KdaTlError",
    "KdaTlWarning",
    "LaunchError",
    "PackageError",
    "UnsupportedError",
    "WrongResultError",
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "explain",
    "fla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "no_compile",
    "packed_decode",
    "pin",
    "use",
    "use_kernels",
    "warmup",
    "workspace_bytes",
]

# Loaded at first use, so that `kda-tl --help` and the submodules without tensors do not wait for torch.
_LAZY = {
    "chunk_gated_delta_rule": "kda_tl.ops.gated_delta_rule",
    "chunk_gdn": "kda_tl.ops.gated_delta_rule",
    "chunk_kda": "kda_tl.ops.kda",
    "explain": "kda_tl.ops.entry",
    "fused_recurrent_gated_delta_rule": "kda_tl.ops.recurrent_gated_delta_rule",
    "fused_recurrent_gdn": "kda_tl.ops.recurrent_gated_delta_rule",
    "fused_recurrent_kda": "kda_tl.ops.recurrent_kda",
    "no_compile": "kda_tl.runtime.compile",
    "packed_decode": "kda_tl.ops.packed_decode",
    "pin": "kda_tl.runtime.dispatch",
    "use": "kda_tl.database.store",
    "use_kernels": "kda_tl.bundle.sources",
    "warmup": "kda_tl.ops.warmup",
    "workspace_bytes": "kda_tl.ops.memory",
}


def __getattr__(name: str) -> Any:
    if name == "fla":
        return importlib.import_module("kda_tl.fla")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
