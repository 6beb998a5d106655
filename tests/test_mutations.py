"""The table of mutations fits the code and the tests as they are; what the breaks do, ``make mutants`` says."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from mutants import TABLE, Mutation, find_misfits, read_table
from support.trees import ROOT

MUTATIONS = read_table(TABLE.read_text())
PARAMETERS = (ROOT / "templates" / "pipelines.py").read_text()  # of many tests: names of stages and pipelines


@cache
def names_of(file: str) -> list[str]:
    """Names of a file's tests."""
    functions = (node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef))
    return [node.name for node in functions if node.name.startswith("test_")]


def find_missing(mutation: Mutation) -> list[str]:
    """Tests that a row asks for and that are not there: files, names, and words that choose nothing in a file."""
    files, _, chosen = " ".join(mutation.tests).partition(" -k ")
    wanted, missing = re.findall(r"\w+", re.sub(r"\b(and|or|not)\b", "", chosen)), []
    texts = {}
    for file, _, name in (test.partition("::") for test in files.split()):
        if not (ROOT / file).exists() or (name and name.partition("[")[0] not in names_of(file)):
            missing.append(f"{file} {name}")
            continue
        texts[file] = (ROOT / file).read_text() + PARAMETERS
        if wanted and not any(word in texts[file] for word in wanted):
            missing.append(f"{file} -k {chosen}")
    return missing + [word for word in wanted if not any(word in text for text in texts.values())]


def test_every_row_is_a_break_of_the_code_as_it_is() -> None:
    assert len(MUTATIONS) > 150 and not find_misfits(MUTATIONS)


def test_every_row_names_tests_that_are_there() -> None:
    assert {m.title: missing for m in MUTATIONS if (missing := find_missing(m))} == {}


@pytest.mark.parametrize(
    "tests",
    [
        ("tests/test_gone.py",),
        ("tests/test_parts.py::test_gone",),
        ("tests/test_parts.py", "-k", "gone or alone"),
        ("tests/test_parts.py", "tests/test_layers.py", "-k", "name_alone"),
    ],
)
def test_tests_that_are_gone_are_noticed(tests: tuple[str, ...]) -> None:
    sound = Mutation("a.py", ("tests/test_parts.py", "-k", "name_alone and not gone_or_so"), "a", "b")
    assert find_missing(Mutation("a.py", tests, "a", "b")) and find_missing(sound) == ["gone_or_so"]
