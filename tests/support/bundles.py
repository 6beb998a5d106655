"""Bundles whose binaries are no libraries: all but loading works as with real ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from kda_tl import templates
from kda_tl.aot.plans import KernelSpec
from kda_tl.bundle.manifest import Entry
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.database.gpus import known_device

TOOLS = {"nvcc": "13.0.88", "tilelang": "0.1.15"}
HOPPER = known_device("nvidia_h200")
PROBLEM = Problem(H=8, HV=8, K=128, V=128, tokens=0, gate="safe", has_A_log=True, has_dt_bias=True)


def make_kernel(name: str = "fwd_segment", V: int = 128) -> KernelSpec:
    """A kernel for Hopper; another V makes another one."""
    case = Case(problem=replace(PROBLEM, V=V), device=HOPPER, BT=64, BC=16)
    stage = templates.load(name)
    return KernelSpec(stage=stage, case=case, config=stage.default(case))


def content_of(kernel: KernelSpec) -> bytes:
    """What stands for its binary."""
    return f"binary of {kernel.digest}\n".encode()


def build_fake(kernel: KernelSpec, folder: Path, *, keep_source: bool = False) -> Entry:
    """What :func:`kda_tl.runtime.binary.build_binary` does, without a compiler."""

    def store(content: bytes, suffix: str) -> str:
        name = f"{kernel.stage.name}-{hashlib.sha256(content).hexdigest()[:32]}{suffix}"
        (folder / name).write_bytes(content)
        return name

    content = content_of(kernel)
    return Entry(
        stage=kernel.stage.name,
        built_for=kernel.built_for,
        sources=templates.fingerprint(kernel.stage.name),
        cuda=hashlib.sha256(b"cuda").hexdigest(),
        binary=store(content, ".so"),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        parameters="pi",
        launch="03",
        arch=kernel.case.device.arch,
        source=store(b"// " + content, ".cu") if keep_source else "",
        block=[128, 1, 1],
        smem_bytes=1024,
        registers=168,
        local_bytes=0,
        tools=TOOLS,
    )
