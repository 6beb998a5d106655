"""What a bundle says of its kernels: a JSON file beside the binaries, read as data, never run.

A kernel is found by what it was built for (:func:`specialisation`), and serves only if the templates that made it are
those of today (``sources``) and its binary is the one that the manifest names (``sha256``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kda_tl.core.files import read_regular
from kda_tl.core.stage import Case, Config, Stage
from kda_tl.errors import BundleError

SCHEMA = 1
NAME = "manifest.json"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One kernel.

    Attributes:
        stage: name of its template.
        built_for: see :func:`specialisation`.
        sources: :func:`kda_tl.templates.fingerprint` of the stage when it was built.
        cuda: :func:`kda_tl.runtime.compile.hash_kernel`.
        binary, sha256, bytes: a shared library's file name, hash and size.
        parameters, launch: how the device function is called, as ``launcher.c`` reads them.
        arch: architecture of the device code, ``sm_90a``.
        source: file name of its CUDA; empty if the bundle leaves sources out.
        block, smem_bytes: threads of a block by dimension, and its dynamic shared memory.
        registers, local_bytes: what a thread takes; None if the binary does not tell.
        tools: versions of TileLang and nvcc.
    """

    stage: str
    built_for: Mapping[str, Any]
    sources: str
    cuda: str
    binary: str
    sha256: str
    bytes: int
    parameters: str
    launch: str
    arch: str = ""
    source: str = ""
    block: Sequence[int] = ()
    smem_bytes: int = 0
    registers: int | None = None
    local_bytes: int | None = None
    tools: Mapping[str, str] = field(default_factory=dict)


def specialisation(stage: Stage, case: Case, config: Config) -> dict[str, Any]:
    """What a kernel is built for: what it depends on of problem and device, chunk sizes and config."""
    problem, device = stage.fields_of(case.problem), stage.fields_of_device(case.device)
    return {"problem": problem, "device": device, "BT": case.BT, "BC": case.BC, "config": config.as_dict()}


def digest(stage: str, built_for: Mapping[str, Any]) -> str:
    """A key of a kernel, and the name of its file."""
    text = json.dumps([stage, built_for], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _hash(kernels: Any) -> str:
    """Tells a manifest that was altered by accident, and would name a kernel for what it was not built for."""
    return hashlib.sha256(json.dumps(kernels, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write(folder: Path, entries: list[Entry], versions: Mapping[str, str]) -> None:
    """Writes a manifest: the same entries give the same bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.stage, digest(entry.stage, entry.built_for)))
    kernels = [asdict(entry) for entry in ordered]
    values = {"schema": SCHEMA, "versions": dict(versions), "kernels": kernels, "sha256": _hash(kernels)}
    part = folder / f"{NAME}.part"
    part.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
    part.replace(folder / NAME)


def read(folder: Path) -> dict[str, Entry]:
    """Entries by :func:`digest`. Raises BundleError for what is no manifest, or one of a newer schema."""
    path = folder / NAME
    try:
        values = json.loads(read_regular(path, MAX_BYTES))
        schema = values["schema"]
        if schema > SCHEMA:
            raise BundleError(f"{path} has schema {schema}, this kda_tl reads up to {SCHEMA}: install a newer kda_tl.")
        if values["sha256"] != _hash(values["kernels"]):
            raise BundleError(f"{path} was altered since it was written: make the bundle anew.")
        entries = [Entry(**value) for value in values["kernels"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path} cannot be used ({type(error).__name__}: {error}): make the bundle anew.") from error
    return {digest(entry.stage, entry.built_for): entry for entry in entries}
