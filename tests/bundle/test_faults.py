"""Whatever happens to a file of a bundle, a kernel that is found is the one that was built for the call."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tvm_ffi
from support.bundles import build_fake, content_of, make_kernel

from kda_tl.bundle import manifest
from kda_tl.bundle.load import Bundle, link_binary
from kda_tl.bundle.manifest import NAME, SCHEMA, read, write
from kda_tl.errors import BundleError

KERNELS = [make_kernel(V=V) for V in (64, 96, 128)]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    write(folder, [build_fake(kernel, folder) for kernel in KERNELS], {"kda_tl": "1"})
    monkeypatch.setattr(tvm_ffi, "load_module", lambda path: {"main": Path(path).read_bytes()})
    return folder


def call_all(folder: Path) -> Iterator[str]:
    """What becomes of a call of each kernel."""
    for kernel in KERNELS:
        try:
            opened = Bundle(folder)
            entry = opened.find(kernel.stage, kernel.case, kernel.config)
            found: Any = link_binary(opened.check(entry)) if entry is not None else None
        except BundleError:
            yield "refused"
            continue
        yield "absent" if found is None else "right" if found == content_of(kernel) else "wrong"


def list_faults(content: bytes, others: list[bytes]) -> Iterator[tuple[str, bytes | None]]:
    """Contents that a file may have instead of its own; None if it is removed."""
    for place in range(len(content)):
        yield "flipped", content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    for place in range(0, len(content), 31):
        yield "truncated", content[:place]
    yield "longer", content + b"\0"
    yield "removed", None
    for other in others:
        yield "swapped", other


def test_no_fault_gives_a_wrong_kernel(bundle: Path) -> None:
    assert list(call_all(bundle)) == ["right"] * len(KERNELS)
    files = {path: path.read_bytes() for path in sorted(bundle.iterdir())}
    counted: Counter[tuple[str, str]] = Counter()
    for path, content in files.items():
        others = [other for each, other in files.items() if each != path]
        for fault, changed in list_faults(content, others):
            path.unlink() if changed is None else path.write_bytes(changed)
            results = list(call_all(bundle))
            assert "wrong" not in results, f"{path.name} {fault}: {results}"
            counted.update((fault, result) for result in results)
            if path.name != NAME:
                assert results.count("right") == len(KERNELS) - 1, f"{path.name} {fault}: {results}"
            path.write_bytes(content)
    assert sum(counted.values()) > 8500 and {result for _, result in counted} == {"right", "refused"}, counted


def test_binaries_that_changed_places_are_refused(bundle: Path) -> None:
    binaries = sorted(bundle.glob("*.so"))
    contents = [path.read_bytes() for path in binaries]
    for order in permutations(contents):
        for path, content in zip(binaries, order, strict=True):
            path.write_bytes(content)
        moved = sum(a != b for a, b in zip(order, contents, strict=True))
        assert sorted(call_all(bundle)) == ["refused"] * moved + ["right"] * (len(KERNELS) - moved)


def test_a_manifest_of_a_newer_schema_is_refused(bundle: Path) -> None:
    values = json.loads((bundle / NAME).read_text())
    (bundle / NAME).write_text(json.dumps(values | {"schema": SCHEMA + 1}))
    with pytest.raises(BundleError, match="install a newer kda_tl"):
        read(bundle)


def test_manifests_follow_the_schema_and_do_not_tell_the_order_of_work(bundle: Path) -> None:
    schema = json.loads((Path(manifest.__file__).parent / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    text = (bundle / NAME).read_text()
    jsonschema.validate(json.loads(text), schema)
    assert schema["properties"]["schema"] == {"const": SCHEMA}
    write(bundle, list(read(bundle).values())[::-1], {"kda_tl": "1"})
    assert (bundle / NAME).read_text() == text
    strange = json.loads(text)
    strange["kernels"][0]["made_on"] = "Monday"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(strange, schema)
