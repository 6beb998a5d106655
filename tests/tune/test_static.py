"""The compile-only check: kernels are compiled, nothing is measured, and binaries tell what they need."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from kda_tl.bench.workloads import Workload
from kda_tl.core.device import cpu_device
from kda_tl.core.isolate import WorkerFailure
from kda_tl.database.gpus import known_device
from kda_tl.errors import InputError
from kda_tl.runtime.defaults import default_plan
from kda_tl.runtime.resources import read_resources
from kda_tl.tune import compile_only
from kda_tl.tune.compile_only import Compiled, compile_static
from kda_tl.tune.plan_search import default_plans, list_kernels
from kda_tl.tune.screening import list_variants
from kda_tl.tune.session import Run

WORKLOAD = Workload(name="tiny", T=40, H=1, K=32, V=32, dtype="fp32")


def test_static_check_compiles_without_measuring() -> None:
    done: list[Compiled] = []
    compiled = compile_static(
        WORKLOAD, cpu_device(), stages=["fwd_gate"], BT=16, budget=1, jobs=1, on_compiled=done.append
    )
    assert [(c.stage, c.status, c.measured) for c in compiled] == [("fwd_gate", "ok", False)]
    assert tuple(done) == compiled and asdict(compiled[0])["config"] == compiled[0].config.as_dict()
    with pytest.raises(InputError, match="fwd_state"):
        compile_static(WORKLOAD, cpu_device(), stages=["fwd_nothing"])
    with pytest.raises(InputError, match="fwd_prep has no config for tiny on .*sm_90"):
        compile_static(WORKLOAD, cpu_device(), stages=["fwd_prep"])


def test_stages_of_every_pipeline_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compile_none(target: str, work: list[compile_only.StaticJob], **options: Any) -> Iterator[tuple[int, Any]]:
        asked.extend(job.stage.name for job in work)
        return iter(())

    monkeypatch.setattr(compile_only, "map_pool", compile_none)
    workload = Workload(name="w", T=1024, H=8)
    assert compile_static(workload, known_device("nvidia_h200"), budget=1) == ()
    staged = ["fwd_gate", "fwd_intra", "fwd_wy", "fwd_state", "fwd_output"]
    assert asked == [*staged, "fwd_prep", "fwd_recurrence", "fwd_segment", "fwd_merge", "fwd_resume"]
    asked.clear()
    compile_static(workload, cpu_device(), budget=1)
    assert asked == staged


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_what_a_search_begins_with_is_compiled(direction: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default plans of all pipelines, of which some have configs of their own."""
    work: list[Any] = []
    monkeypatch.setattr(compile_only, "map_pool", lambda target, asked, **options: iter(work.extend(asked) or ()))
    given: dict[str, Any] = {"operator": "chunk_gated_delta_rule", "gate": "log", "beta": "plain"}
    workload = Workload(name="w", T=8192, H=32, direction=direction, **given)
    on_gpu = replace(run, device=known_device("nvidia_h200"))
    variants = [variant for variant in list_variants(on_gpu, workload) if (variant.BT, variant.BC) == (64, 16)]
    kernels = list_kernels(on_gpu, workload, default_plans(on_gpu, workload, variants))
    compile_static(workload, on_gpu.device, budget=1)
    begun = {(job.stage.name, job.config) for job in kernels}
    assert len(begun) > 8 and begun <= {(job.stage.name, job.config) for job in work}


def test_resources_are_read_from_an_embedded_cubin() -> None:
    names = b"\0.nv.info\0.nv.info.kernel\0"
    info = struct.pack("<BBHII", 4, 0x2F, 8, 1, 168) + struct.pack("<BBHII", 4, 0x11, 8, 1, 48)
    sections = [(0, 0), (1, len(info)), (10, 12)]
    offsets = [0, 64 + len(names), 64 + len(names)]
    head = bytearray(64)
    head[:4] = b"\x7fELF"
    struct.pack_into("<H", head, 18, 190)
    struct.pack_into("<Q", head, 40, 64 + len(names) + len(info))
    struct.pack_into("<HHH", head, 58, 64, 4, 3)
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 0, 0, 0, offset, size, 0, 0, 0, 0)
        for (name, size), offset in zip(sections, offsets, strict=True)
    ) + struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 0, 0)
    host = b"\x7fELF" + bytes(14) + struct.pack("<H", 62) + bytes(100)
    cubin = bytes(head) + names + info + table
    assert read_resources(host + cubin) == {"registers": 168, "local_bytes": 48}
    assert read_resources(host) == {"registers": None, "local_bytes": None}


def test_verify_fails_the_plans_whose_kernels_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from kda_tl.cli import _kernels
    from kda_tl.cli._subjects import Subject

    device = known_device("nvidia_h200")
    workloads = [Workload(name=f"K{K}", T=64, H=1, K=K) for K in (64, 128)]
    subjects = [Subject(name=w.name, workload=w, plan=default_plan(w.problem(), device)) for w in workloads]
    failure = WorkerFailure("nvcc said no.")
    monkeypatch.setattr(_kernels, "_run", lambda kernels, *_: {next(iter(kernels)): failure})
    pairs = [(device, subject) for subject in subjects]
    found = list(_kernels.check_compiles(pairs, 1, None, static=True))  # type: ignore[arg-type]
    assert [(f.subject, f.passed, f.detail) for f in found] == [("K64", False, "nvcc said no."), ("K128", True, "")]
