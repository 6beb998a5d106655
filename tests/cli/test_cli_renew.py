"""``kda-tl verify --static``: records are of kernels. What makes the same ones makes no plan stale, all else does."""

from __future__ import annotations

import errno
import importlib.resources
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli_cases import CPU, SMALL, Run, make_entry, spawn, store

from kda_tl import templates
from kda_tl.cli import _kernels
from kda_tl.core.stage import Case, Stage
from kda_tl.database import store as db
from kda_tl.database.gpus import known_device
from kda_tl.runtime import compile as compile_module
from kda_tl.runtime import lower as lower_module
from kda_tl.tune.requests import HashJob

HASH = """
from test_cli_renew import hash_all
print(*hash_all())
"""
Edit = Callable[[str, str], None]


def hash_all() -> list[str]:
    """Of a CPU kernel and of one for Hopper."""
    found = []
    for name, device, BT in (("fwd_gate", CPU, 16), ("bwd_heads", known_device("nvidia_h200"), 64)):
        stage = templates.load(name)
        workload = replace(SMALL, dtype="fp32" if device is CPU else "bf16")
        case = Case(problem=workload.problem(), device=device, BT=BT, BC=16)
        found.append(compile_module.hash_kernel(stage, case, stage.default(case)))
    return found


def test_hashes_are_the_same_in_every_process(tmp_path: Path) -> None:
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = spawn(sys.executable, "-c", HASH, env={"PYTHONHASHSEED": seed}, cwd=tmp_path)
    assert done.stdout.split() == hash_all(), done.stderr
    assert len(set(hash_all())) == 2


def test_a_hash_is_of_the_text_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered or compiled; of no lengths, which kernels take at the call."""
    stage = templates.load("fwd_gate")
    case = Case(problem=SMALL.problem(), device=CPU, BT=16, BC=16)
    monkeypatch.setattr(compile_module, "_kernels", {})
    monkeypatch.setattr(compile_module, "_binaries", {})
    lowered = compile_module.hash_kernel(stage, case, stage.default(case))
    compiled = compile_module.compile_stage(stage, case, stage.default(case))
    assert compile_module._kernels and lowered == compile_module.hash_kernel(stage, case, stage.default(case))
    assert compiled.source == lower_module.generate_source(stage, case, stage.default(case))
    longer = replace(case, problem=replace(SMALL, T=1000).problem())
    assert compile_module.hash_kernel(stage, longer, stage.default(case)) == lowered
    wider = replace(case, problem=replace(SMALL, K=SMALL.K * 2).problem())
    assert compile_module.hash_kernel(stage, wider, stage.default(case)) != lowered
    monkeypatch.setattr(compile_module, "pass_configs", lambda stage, case: {"tl.enable_fast_math": False})
    assert compile_module.hash_kernel(stage, case, stage.default(case)) != lowered


KERNEL = """#include <tl_templates/cuda/gemm.h>
extern "C" __global__ void __launch_bounds__(128, 1) step_kernel(const float* __restrict__ x, float* __restrict__ y) {
  extern __shared__ __align__(1024) uchar buf_dyn_shmem[];
  void* a_shared = ((void*)((char*)buf_dyn_shmem + 0));
  void* tile = ((void*)((char*)buf_dyn_shmem + 1024));
  void* tile_1 = ((void*)((char*)buf_dyn_shmem + 2048));
  __shared__ __align__(16) uint64_t ready_mem[2];
  auto ready = reinterpret_cast<Barrier*>(ready_mem);
  float sum[64];
  for (int i = 0; i < 64; ++i) {
    sum[i] = exp2f(((float*)a_shared)[i]) + ((float*)tile)[i] * x[i];
  }
  ready[0].wait(1);
  tl::store(tile_1, sum, y);
}
"""


def swap(text: str, one: str, other: str) -> str:
    return re.sub(rf"\b({one}|{other})\b", lambda found: other if found[0] == one else one, text)


def test_kernels_are_compared_by_what_their_variables_do() -> None:
    number = lower_module.number_names
    renamed = re.sub(r"\bsum\b", "total", KERNEL.replace("ready", "full").replace("a_shared", "q_shared"))
    assert number(renamed) == number(KERNEL) and "total" in renamed and "full_mem" in renamed
    head, body = KERNEL[: KERNEL.index("  __shared__")], KERNEL[KERNEL.index("  __shared__") :]
    # TileLang lays out tiles of one name by their addresses in the process, so their numbers are drawn anew each time
    assert number(head + swap(body, "tile", "tile_1")) == number(KERNEL)
    others = [
        head + swap(body, "a_shared", "tile"),
        swap(KERNEL, "x", "y").replace("y, float* __restrict__ x", "x, float* __restrict__ y"),
        KERNEL.replace("exp2f", "log2f"),
        KERNEL.replace("wait(1)", "wait(0)"),
        KERNEL.replace("sum[64]", "sum[32]"),
        KERNEL.replace("tile_1, sum, y", "tile, sum, y"),
        KERNEL.replace("float sum", "half_t sum"),
        KERNEL.replace("shmem + 1024", "shmem + 4096"),
    ]
    for other in others:
        assert number(other) != number(KERNEL), other


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs run here instead of in processes, and nothing is compiled: stages whose kernels were lowered."""
    found: list[str] = []

    def run_here(target: str, payloads: list[Any], **_: Any) -> Iterator[tuple[int, Any]]:
        for index, job in enumerate(payloads):
            if isinstance(job, HashJob):
                found.append(job.stage.name)
            yield index, job.run() if isinstance(job, HashJob) else 1.0

    monkeypatch.setattr(_kernels, "map_pool", run_here)
    monkeypatch.setattr(compile_module, "_kernels", {})
    monkeypatch.setattr(compile_module, "_binaries", {})
    return found


@pytest.fixture
def edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Edit]:
    """Replaces text of a template's source, as fingerprints see it."""
    folder, find = tmp_path / "templates", importlib.resources.files
    shutil.copytree(Path(templates.__file__).parent, folder)
    monkeypatch.setattr("importlib.resources.files", lambda name: folder if name == "kda_tl.templates" else find(name))

    def edit(old: str, new: str) -> None:
        file = folder / "portable/fwd_gate.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        templates.fingerprint.cache_clear()

    yield edit
    monkeypatch.undo()
    templates.fingerprint.cache_clear()


@pytest.fixture
def old_file(own_database: Path) -> Path:
    """A file of schema 1 with one plan."""
    path = store(own_database, CPU, make_entry(SMALL, CPU))
    values = json.loads(path.read_text())
    values["schema"] = "kda_tl.tuning/1"
    del values["entries"][0]["kernels"]
    path.write_text(json.dumps(values))
    return path


ARGV = ("verify", "--gpu", "cpu", "--static", "--workload", SMALL.name, "--db")
STAGES = ["fwd_gate", "fwd_intra", "fwd_wy", "fwd_state", "fwd_output"]


def is_stale(directory: Path) -> bool:
    (file,) = db.Database.load(directory, "test").files.values()
    return any(db.stale_stages(entry, templates.fingerprints()) for entry in file.entries.values())


def test_an_edited_comment_makes_no_plan_stale(
    run: Run, own_database: Path, old_file: Path, lowered: list[str], edit: Edit
) -> None:
    code, out, _ = run(*ARGV, own_database)
    assert code == 0 and "1 plan runs the kernels that were measured: today's hashes of sources and kernels" in out
    assert f"are written to {old_file}." in out and lowered == STAGES
    filled = json.loads(old_file.read_text())
    (hashes,) = filled["entries"][0]["kernels"].values()
    assert filled["schema"] == "kda_tl.tuning/2" and sorted(hashes) == sorted(STAGES)
    lowered.clear()
    code, out, _ = run(*ARGV, own_database)
    assert code == 0 and lowered == [] and "written" not in out, "nothing changed, nothing is lowered"

    edit("\n\n", "\n# A comment.\n")
    assert is_stale(own_database)
    code, out, _ = run(*ARGV, own_database)
    assert code == 0 and "are written to" in out and lowered == ["fwd_gate"]
    assert not is_stale(own_database)
    (entry,) = json.loads(old_file.read_text())["entries"]
    assert entry["kernels"] == filled["entries"][0]["kernels"]
    assert {name for name in STAGES if entry["templates"][name] != filled["entries"][0]["templates"][name]} == {
        "fwd_gate"
    }


def test_a_changed_kernel_fails(
    run: Run, own_database: Path, old_file: Path, lowered: list[str], edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*ARGV, own_database)
    before, load = old_file.read_text(), templates.load

    def changed(name: str) -> Stage:
        stage = load(name)
        return replace(stage, build=lambda case, config: stage.build(case, replace(config, BK=16)))

    monkeypatch.setattr(templates, "load", changed)
    edit("\n\n", "\n# Another kernel.\n")
    code, out, _ = run(*ARGV, own_database)
    assert code == 1 and "1 of 1 plans are stale (fwd_gate changed): their kernels differ" in out
    assert "kda-tl tune --stale" in out and old_file.read_text() == before
    assert run(*ARGV, own_database, "--allow-stale")[0] == 0 and old_file.read_text() == before


def test_without_a_hash_changed_sources_are_stale(
    run: Run, own_database: Path, old_file: Path, lowered: list[str], edit: Edit
) -> None:
    before = old_file.read_text()
    edit("\n\n", "\n# A comment.\n")
    code, out, _ = run(*ARGV, own_database)
    assert code == 1 and "(fwd_gate changed): their kernels differ, or no hash tells what they were" in out
    assert lowered == [] and old_file.read_text() == before


def test_a_database_that_may_not_be_written_stays_as_it_is(
    run: Run, own_database: Path, old_file: Path, lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    before = old_file.read_text()
    monkeypatch.setattr(db, "write_atomically", refuse)
    code, out, _ = run(*ARGV, own_database)
    assert code == 0 and "are not written, as kda_tl cannot write the tuning database" in out
    assert "Permission denied" in out and lowered == STAGES and old_file.read_text() == before


def test_only_files_of_the_architecture_are_judged(
    run: Run, own_database: Path, lowered: list[str], edit: Edit
) -> None:
    """Another GPU's plans are told of by the command for that GPU, which can lower their kernels."""
    store(own_database, CPU, make_entry(SMALL, CPU))
    store(own_database, known_device("nvidia_h200"), make_entry(SMALL, CPU))
    edit("\n\n", "\n# A comment.\n")
    checks = json.loads(run(*ARGV, own_database, "--json")[1])["checks"]
    assert [(c["subject"], c["passed"]) for c in checks if c["check"] == "current"] == [("cpu/chunk_kda_fwd", False)]
