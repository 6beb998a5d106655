"""Binaries: the same everywhere, small, and without needs that an older system does not meet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from support.bundles import HOPPER, make_kernel

from kda_tl.bundle import manifest
from kda_tl.bundle.manifest import NAME, Entry, write
from kda_tl.core.device import find_compiler
from kda_tl.errors import BundleError, CompileError
from kda_tl.runtime import binary
from kda_tl.runtime.binary import build_binary
from kda_tl.runtime.compile import hash_kernel
from kda_tl.runtime.nvcc import find_versions

needs_nvcc = pytest.mark.skipif(find_compiler(HOPPER) is None, reason="no nvcc: pip install 'kda-tl[cuda-compiler]'")
KERNEL = make_kernel("fwd_prep")  # its file has names of its own, which nvcc makes from the path
ELSEWHERE = """
import sys
from pathlib import Path
from support.bundles import make_kernel
from kda_tl.runtime.binary import build_binary
kernel = make_kernel("fwd_prep")
build_binary(kernel.stage, kernel.case, kernel.config, Path(sys.argv[1]), keep_source=True)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Entry]:
    folder = tmp_path_factory.mktemp("bundle")
    return folder, build_binary(KERNEL.stage, KERNEL.case, KERNEL.config, folder, keep_source=True)


@needs_nvcc
@pytest.mark.rest
def test_another_process_in_another_folder_makes_the_same_bytes(built: tuple[Path, Entry], tmp_path: Path) -> None:
    folder, entry = built
    path = f"import sys; sys.path[:] = {sys.path!r}\n"
    subprocess.run([sys.executable, "-c", path + ELSEWHERE, str(tmp_path)], check=True, cwd=tmp_path)
    files = [{path.name: path.read_bytes() for path in each.iterdir()} for each in (folder, tmp_path)]
    assert files[0] == files[1] and files[0].keys() == {entry.binary, entry.source}


@needs_nvcc
@pytest.mark.rest
def test_a_binary_tells_no_paths_and_needs_an_old_libc_only(built: tuple[Path, Entry]) -> None:
    folder, entry = built
    content = (folder / entry.binary).read_bytes()
    assert entry.bytes == len(content) < 110_000
    for word in (b"/tmp", b"site-packages", str(Path.cwd()).encode(), b"nv_debug"):
        assert word not in content, word
    objdump = shutil.which("objdump")
    assert objdump is not None, "binutils come with gcc"
    told = subprocess.run([objdump, "-Tp", str(folder / entry.binary)], capture_output=True, text=True, check=True)
    versions = re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", told.stdout)
    assert versions and all(name == "GLIBC" for name, _ in versions)
    assert max(tuple(map(int, number.split("."))) for _, number in versions) <= (2, 17)
    assert re.findall(r"NEEDED +(\S+)", told.stdout) == ["libc.so.6"]


@needs_nvcc
@pytest.mark.rest
def test_an_entry_says_how_the_kernel_is_launched_and_what_it_takes(built: tuple[Path, Entry], tmp_path: Path) -> None:
    _, entry = built
    assert entry.cuda == hash_kernel(KERNEL.stage, KERNEL.case, KERNEL.config)
    assert entry.tools == find_versions(HOPPER) and entry.arch == "sm_90a"
    assert entry.block[1:] == [1, 1] and entry.block[0] % 128 == 0 and 48 << 10 < entry.smem_bytes <= 227 << 10
    assert entry.registers is not None and 32 < entry.registers <= 255 and entry.local_bytes is not None
    write(tmp_path, [entry], {"kda_tl": "1"})
    schema = json.loads((Path(manifest.__file__).parent / "schema.json").read_text())
    jsonschema.validate(json.loads((tmp_path / NAME).read_text()), schema)
    assert json.loads((tmp_path / NAME).read_text())["kernels"][0].keys() == asdict(entry).keys()


@needs_nvcc
def test_what_cannot_run_or_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(KERNEL.case, problem=replace(KERNEL.case.problem, dtype="fp32"))
    with pytest.raises(CompileError, match="fwd_prep cannot run with"):
        build_binary(KERNEL.stage, odd, KERNEL.config, tmp_path)
    with pytest.raises(BundleError, match="cannot be written .No such file"):
        binary._store(tmp_path / "gone", "fwd_prep.so", b"x")
    assert not list(tmp_path.iterdir())
