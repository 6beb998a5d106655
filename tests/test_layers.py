"""Imports point down. Read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (  # part of kda_tl; "__init__" is kda_tl itself, which only gathers the public names
    "problem device errors files packages plain toolchain reference tuning_db",
    "stage pipeline layout db db_file records staleness lookup validation gpus journal",
    "templates",
    "kernel ffi replay program dispatch measure isolate worker",
    "ops call autograd opaque fla __init__",
    "workloads bench trial contest crew progress tuner screening forecast search propose stage_search plan_search"
    " static",
    "cli",
)
LAYER = {part: layer for layer, parts in enumerate(LAYERS) for part in parts.split()}
COMPILES = {"kernel", "toolchain"}  # may import tilelang, inside a function

PACKAGES = {"kda_tl": "kda_tl", "kda_tl/ops": "kda_tl.ops"} | {
    name: f"kda_tl.{name}" for name in ("templates", "tuning_db", "cli")
}
TREES = {
    f"{package}.{path.stem}".removesuffix(".__init__"): ast.parse(path.read_text(), str(path))
    for folder, package in PACKAGES.items()
    for path in sorted((ROOT / folder).glob("*.py"))
}


def part_of(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def imports(*nodes: ast.AST) -> set[str]:
    """Modules that import statements name; in ``from kda_tl import x``, x may be a module."""
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in TREES else f"{node.module}" for name in full}
    return names


IMPORTS = {module: {n for n in imports(*ast.walk(tree)) if n in TREES} - {module} for module, tree in TREES.items()}


def test_imports_point_down() -> None:
    unknown = {part_of(module) for module in TREES} - set(LAYER)
    assert not unknown, f"put these modules into LAYERS of tests/test_layers.py: {', '.join(sorted(unknown))}"
    for module, names in IMPORTS.items():
        for name in names:
            a, b = part_of(module), part_of(name)
            assert LAYER[a] >= LAYER[b], f"{module} imports {name}, which is above it"
    library = {module: names for module, names in IMPORTS.items() if part_of(module) != "cli"}
    TopologicalSorter(library).prepare()  # raises CycleError: modules of one layer may not import in a circle


def test_only_templates_import_tilelang() -> None:
    for module, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        lazy = {node for function in functions for node in ast.walk(function)}
        strict = [node for node in ast.walk(tree) if part_of(module) not in COMPILES or node not in lazy]
        found = {name.split(".")[0] for name in imports(*strict)} & {"tilelang", "tvm"}
        assert not found or part_of(module) == "templates", f"{module} imports tilelang"


def test_library_neither_asserts_nor_prints() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            asserts = isinstance(node, ast.Assert)
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not asserts, f"{module}:{node.lineno} asserts: raise an error of kda_tl.errors"
            assert not prints or part_of(module) == "cli", f"{module}:{node.lineno} prints: only cli/ does"
