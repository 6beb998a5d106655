"""The guides: links lead somewhere, what they name exists, README's example runs, its table is what the code does."""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import shlex
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chunked import CHUNKED

from kda_tl import cli
from kda_tl.cli._options import add_arguments
from kda_tl.core.device import Device, cpu_device, find_compiler
from kda_tl.core.problem import DTYPES, GATES, Problem
from kda_tl.database.gpus import known_device, resolve_gpu
from kda_tl.errors import InputError
from kda_tl.ops import load_all
from kda_tl.runtime.defaults import default_plan
from kda_tl.templates.pipelines import PIPELINES

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "docs", "docs/h100", "docs/h200", "examples", "tests", "tuning_db")
PAGES = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.md"))}
GUIDES = [name for name in PAGES if name != "CHANGELOG.md" and not name.startswith("docs/h")]  # of today, not histories
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
needs_compiler = pytest.mark.skipif(
    find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++"
)


def read(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def list_python(page: str) -> list[str]:
    """Its blocks of Python."""
    return [block for language, block in FENCED.findall(read(page)) if language == "python"]


def prose(page: str) -> str:
    """A page without its code."""
    return INLINE.sub("", FENCED.sub("", read(page)))


def find_anchors(page: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", read(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def list_code(page: str) -> list[str]:
    """Lines of code blocks, continued ones joined, and code in the text."""
    text = read(page)
    blocks = [found[2] for found in FENCED.finditer(text)] + INDENTED.findall(FENCED.sub("", text))
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return lines + [" ".join(code.split()) for code in INLINE.findall(FENCED.sub("", text))]


@functools.cache
def list_options(command: str) -> set[str]:
    """All options of a command of kda-tl, those of its actions too."""
    parser = argparse.ArgumentParser()
    add_arguments(command, parser)
    parsers, options = [parser], set[str]()
    for each in parsers:
        options |= each._option_string_actions.keys()
        nested = [action for action in each._actions if isinstance(action, argparse._SubParsersAction)]
        parsers += [one for action in nested for one in action.choices.values()]
    return options


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short_and_links_lead_somewhere(page: str) -> None:
    wide = [number for number, line in enumerate(read(page).splitlines(), 1) if len(line) > 120]
    assert not wide, f"{page}: lines {wide} have more than 120 columns"
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (PAGES[page].parent / file).resolve() if file else PAGES[page]
        assert target.exists() and target.is_relative_to(ROOT), f"{page}: {link} leads nowhere"
        if anchor:
            assert anchor in find_anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for code in list_code(page):
        for target in re.findall(r"(?:^|\s)make ([a-z-]+)", code.partition("#")[0]):
            assert target in targets, f"{page}: make {target}"
        for words in re.findall(r"(?:^|\s|/)kda-tl ([^#]+)", code):
            command, *rest = words.split()
            if command.startswith("-"):
                continue
            assert command in cli.COMMANDS, f"{page}: kda-tl {command}"
            unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - list_options(command)
            assert not unknown, f"{page}: kda-tl {command} has no {', '.join(unknown)}"


@pytest.mark.parametrize("page", GUIDES)
def test_commands_of_blocks_can_be_parsed_and_files_exist(page: str) -> None:
    for language, block in FENCED.findall(read(page)):
        for line in block.splitlines() if language == "sh" else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kda-tl"]:
                cli._parse(words[1:])  # exits where it cannot
    for code in INLINE.findall(FENCED.sub("", read(page))):
        if re.fullmatch(r"[\w.-]+/[\w./-]*\.(?:py|json|md|txt)", code):
            roots = (ROOT, ROOT / "kda_tl", PAGES[page].parent)
            assert any((root / code).exists() for root in roots), f"{page}: there is no {code}"


@needs_compiler
def test_the_examples_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The second one, decode, takes names of the first one."""
    first, decode, _ = list_python("README.md")
    assert len([line for line in first.splitlines() if line]) == 8
    large, small = re.search(r'= ([\d, ]+, "cuda")  # without a GPU: (.*)', first).groups()  # type: ignore[union-attr]
    names: dict[str, Any] = {}
    exec(first.replace(large, small), names)
    q, o, state = names["q"], names["o"], names["state"]
    assert all(isinstance(x, torch.Tensor) and x.isfinite().all() for x in (o, state)) and o.shape == q.shape
    assert "pipeline staged" in capsys.readouterr().out
    exec(decode, names)
    assert names["o"].isfinite().all() and not torch.equal(names["pool"][3], state[0]) and not names["pool"][0].any()


@needs_compiler
@pytest.mark.rest
def test_the_examples_of_serving_run() -> None:
    """One after the other: later ones take names of earlier ones."""
    names: dict[str, Any] = {}
    for block in list_python("docs/serving.md"):
        exec(block, names)
    assert names["o"].isfinite().all()
    assert torch.equal(names["pool"][names["slots"][:2]], names["states"][:2, 2]) and names["states"][:2].all()


@needs_compiler
@pytest.mark.rest
def test_the_commands_that_check_a_new_operator_pass() -> None:
    commands = [shlex.split(code)[1:] for code in list_code("docs/new-operator.md") if code.startswith("kda-tl verify")]
    assert [cli.main([*words, "--jobs", "1"]) for words in commands if "--pass" in words] == [0]


# The table of what runs where

Point = tuple[str, str, str, str, int, int, str, str]  # GPU, operator, pass, dtype, K, V, gate, dtype of g
DIMS = (1, 32, 33, 64, 65, 96, 97, 128, 129, 160, 161, 192, 224, 225, 256)  # around every limit
DIMS_V = (*DIMS, 257, 320, 500, 512)
DRAWS = 14000


def list_numbers(cell: str, among: Iterable[int]) -> list[int]:
    """Those that a cell names, as "33-64, 128" or "by 64" does."""
    if cell.startswith("by "):
        return [n for n in among if n % int(cell[3:]) == 0]
    parts = [tuple(map(int, part.split("-"))) for part in cell.split(",")]
    return [n for n in among if any(part[0] <= n <= part[-1] for part in parts)]


def read_table() -> Iterator[tuple[str, Point]]:
    """What README's table says: pipelines and the points that they run."""
    table = read("README.md").partition("| GPU | operator |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        gpus, who, direction, dtypes, *dims, gates, names = (cell.strip() for cell in row.strip("|").split("|"))
        K, V = list_numbers(dims[0], DIMS), list_numbers(dims[1], DIMS_V)
        kinds = [kind for kind in DTYPES if kind != "fp32" or "16-bit g" not in gates]
        for operator in load_all() if who == "both" else (who,):
            modes = load_all()[operator].gates if gates.startswith("any") else ("safe",)
            for name in names.replace("_N", "_8").split(", "):
                for gpu, dtype in product(gpus.split(", "), dtypes.split(", ")):
                    for k, v, gate, kind in product(K, V, modes, kinds):
                        yield name, (gpu, operator, direction, dtype, k, v, gate, kind)


def runs(name: str, device: Device, point: Point) -> bool:
    _, operator, direction, dtype, K, V, gate, kind = point
    scalar = load_all()[operator].scalar_gate
    fixed = {"H": 2, "HV": 4, "tokens": 256, "l2norm": True, "has_A_log": gate != "log", "scalar_gate": scalar}
    problem = Problem(operator=operator, direction=direction, dtype=dtype, K=K, V=V, gate=gate, g_dtype=kind, **fixed)
    try:
        return bool(default_plan(problem, device, pipeline=name))
    except InputError:
        return False


def test_the_support_table_is_what_stages_reject(seed: int) -> None:
    said: dict[str, set[Point]] = {}
    for name, point in read_table():
        said.setdefault(name, set()).add(point)
    names = [name for name in CHUNKED if not re.search("_(2|4|16)$", name)]
    assert said.keys() == set(names)
    gpus = sorted({point[0] for points in said.values() for point in points})
    grid = list(product(names, gpus, load_all(), DTYPES, DIMS, (1, 64, 128, 192, 500, 512), GATES, ("bf16", "fp32")))
    wrong: list[tuple[str, Point]] = []
    for name, gpu, operator, dtype, K, V, gate, kind in random.Random(seed).sample(grid, DRAWS):
        if gate in load_all()[operator].gates:
            point = (gpu, operator, PIPELINES[name].direction, dtype, K, V, gate, kind)
            if runs(name, known_device(resolve_gpu(gpu)[0]), point) is not (point in said[name]):
                wrong.append((name, point))
    assert not wrong, f"{len(wrong)} points, the first {wrong[:5]}"


def test_the_packaged_plans_are_counted_right() -> None:
    text = " ".join(read("README.md").split())
    counts = (
        r"H200 (\d+) forward and (\d+) backward, H100 (\d+) and (\d+); of `chunk_gated_delta_rule` H200 (\d+) and (\d+)"
    )
    said = re.search(counts, text)
    files = [f"{gpu}/chunk_kda_{p}.json" for gpu in ("nvidia_h200", "nvidia_h100_80gb_hbm3") for p in ("fwd", "bwd")]
    files += [f"nvidia_h200/chunk_gated_delta_rule_{p}.json" for p in ("fwd", "bwd")]
    assert {str(path.relative_to(ROOT / "tuning_db")) for path in (ROOT / "tuning_db").glob("*/*.json")} == set(files)
    entries = [json.loads((ROOT / "tuning_db" / file).read_text())["entries"] for file in files]
    assert said is not None and [int(n) for n in said.groups()] == [len(each) for each in entries]
    assert {(e["key"]["K"], e["key"]["V"], e["key"]["dtype"]) for each in entries for e in each} == {(128, 128, "bf16")}
