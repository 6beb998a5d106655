"""A kernel of a bundle, called without a GPU: a driver that only takes notes gets what the device would get."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kda_tl import templates
from kda_tl.bundle.load import Bundle, link_binary
from kda_tl.bundle.manifest import Entry, write
from kda_tl.core.device import find_compiler
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case
from kda_tl.database.gpus import known_device
from kda_tl.errors import BundleError
from kda_tl.runtime.binary import build_binary
from kda_tl.runtime.ffi import Arguments, Headers, prepare_call, take_error
from kda_tl.runtime.kernel import slots_of

HOPPER = known_device("nvidia_h200")
GATE = {"gate": "safe", "has_A_log": True, "has_dt_bias": True}
CASE = Case(problem=Problem(H=8, HV=8, K=128, V=128, tokens=0, **GATE), device=HOPPER, BT=64, BC=16)
STAGE = templates.load("fwd_segment")  # tensor maps, pointers and sizes
CONFIG = STAGE.default(CASE)
SIZES = {"tokens": 640, "NT": 10, "N": 1, "NS": 4, "NC": 3}

OVERLAPPING = [("fwd_gdn_pairs", "03456n", 100, 0), ("fwd_gdn_recurrence", "03456e", 0, 1)]

pytestmark = [
    pytest.mark.rest,  # the kernel takes 10 s
    pytest.mark.skipif(find_compiler(HOPPER) is None, reason="no nvcc: pip install 'kda-tl[cuda-compiler]'"),
]


class Noted(ctypes.Structure):
    _fields_ = (
        ("extent", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64 * 64),
        ("launches", ctypes.c_int),
        ("modules", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("carveout", ctypes.c_int),
        ("early", ctypes.c_int),
        ("refuse", ctypes.c_int),
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    found = ctypes.CDLL(str(library))  # what is loaded under this name is what dlopen finds
    found.fake_noted.restype = ctypes.POINTER(Noted)
    found.fake_function.restype = ctypes.c_char_p
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    write(folder, [build_binary(STAGE, CASE, CONFIG, folder)], {})
    return folder


def find(folder: Path) -> tuple[Bundle, Entry]:
    found = Bundle(folder)
    entry = found.find(STAGE, CASE, CONFIG)
    assert entry is not None
    return found, entry


def test_the_driver_gets_what_the_kernel_needs(driver: ctypes.CDLL, bundle: Path) -> None:
    opened, entry = find(bundle)
    slots = slots_of(STAGE, CASE)
    headers = Headers([(slot.shape(SIZES), slot.dtype) for slot in slots], torch.device("cuda", 0))
    headers.addresses[:] = [4096 * (i + 1) for i in range(len(slots))]
    function, block = link_binary(opened.check(entry)), Arguments([headers.address(i) for i in range(len(slots))], 0)
    call = prepare_call(function, block)
    noted = driver.fake_noted().contents
    for count in (1, 2):
        assert call() == 0, take_error()
        assert noted.launches == count and noted.modules == 1, "loaded once"
    assert driver.fake_function().decode() == "fwd_segment_kernel"
    address = {slot.name: int(headers.addresses[i]) for i, slot in enumerate(slots)}
    names = ["A", "A", "chunk_tokens", "decay", "k_neg", "kg", "local", "segments", "transition", "v", "v"]
    assert entry.parameters == "ttptttpppptiiiii" and entry.launch == "03456"
    assert list(noted.parameters)[:11] == [address[name] for name in names]
    assert list(noted.parameters)[11:16] == [CASE.problem.HV, *(SIZES[name] for name in ("NC", "NS", "NT", "tokens"))]
    assert list(noted.extent)[1:6] == [1, 1, 384, 1, 1] and noted.extent[0] % 3 == 0
    assert noted.extent[6] == noted.shared_bytes > 48 << 10
    assert (noted.carveout, noted.early) == (0, 0), "it neither leaves room for the next kernel nor starts early"
    noted.refuse = 700
    assert call() != 0 and take_error() == "fwd_segment_kernel: the kernel was not launched: the fake driver said no"
    noted.refuse = 0


@pytest.mark.parametrize(("name", "launch", "carveout", "early"), OVERLAPPING)
def test_kernels_that_overlap_leave_room_and_start_early(
    driver: ctypes.CDLL, tmp_path: Path, name: str, launch: str, carveout: int, early: int
) -> None:
    """A multiprocessor's memory is not parted anew while a block runs there, so the first of two kernels decides."""
    stage = templates.load(name)
    problem = Problem(
        H=4, HV=8, K=128, V=128, tokens=0, operator="chunk_gated_delta_rule", scalar_gate=True, gate="log"
    )
    case = Case(problem=problem, device=HOPPER, BT=64, BC=16)
    entry = build_binary(stage, case, stage.default(case), tmp_path)
    slots = slots_of(stage, case)
    sizes = {"tokens": 640, "NT": 10, "N": 1, "NS": 1, "H": 4, "HV": 8}
    headers = Headers([(slot.shape(sizes), slot.dtype) for slot in slots], torch.device("cuda", 0))
    headers.addresses[:] = [4096 * (i + 1) for i in range(len(slots))]
    block = Arguments([headers.address(i) for i in range(len(slots))], len(stage.scalars))
    driver.fake_noted().contents.carveout = 0
    assert prepare_call(link_binary(tmp_path / entry.binary), block)() == 0, take_error()
    noted = driver.fake_noted().contents
    assert entry.launch == launch and (noted.carveout, noted.early) == (carveout, early)


@pytest.mark.parametrize("fault", ["flipped", "truncated", "removed", "swapped"])
def test_a_binary_that_is_not_the_one_of_the_manifest_is_refused(bundle: Path, tmp_path: Path, fault: str) -> None:
    opened, entry = find(bundle)
    content = bytearray((bundle / entry.binary).read_bytes())
    write(tmp_path, [entry], {})
    if fault == "flipped":
        content[len(content) // 2] ^= 1
    elif fault == "truncated":
        del content[-1:]
    elif fault == "swapped":
        content = bytearray(b"\177ELF")
    if fault != "removed":
        (tmp_path / entry.binary).write_bytes(content)
    with pytest.raises(BundleError, match="make the bundle anew"):
        Bundle(tmp_path).check(entry)


def test_other_templates_and_other_problems_find_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, _ = find(bundle)
    more_heads = replace(CASE, problem=replace(CASE.problem, H=16, HV=32))
    assert opened.find(STAGE, more_heads, CONFIG) is not None
    other = replace(CASE, problem=replace(CASE.problem, V=64))
    assert opened.find(STAGE, other, CONFIG) is None
    monkeypatch.setattr(templates, "fingerprint", lambda name: "edited")
    assert opened.find(STAGE, CASE, CONFIG) is None
