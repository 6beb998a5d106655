"""Imports point down. Read from the source of every module, imports inside functions included."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Folders and modules of kda_tl, lowest first; those of one floor do not import each other
ROOMS = "errors | core tuning_db | reference | reference_decode | database templates | bundle | runtime"
ROOMS += " | ops | fla | kda_tl | aot bench | tune | cli"
TEMPLATES = "common | portable | sm90 | templates pipelines"
# may import tilelang, inside a function
COMPILES = {f"kda_tl.runtime.{name}" for name in ("compile", "lower", "binary", "nvcc")} | {"kda_tl.core.toolchain"}

FOLDERS = {"kda_tl": "kda_tl"} | {name: f"kda_tl.{name}" for name in ("templates", "tuning_db", "cli")}
TREES = {
    ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): ast.parse(
        path.read_text(), str(path)
    )
    for folder, package in FOLDERS.items()
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def room_of(module: str, depth: int = 1) -> str:
    """A folder or module directly in a package; the package itself for its ``__init__``."""
    return module.split(".")[: depth + 1][-1]


def points_down(a: str, b: str, order: str, depth: int) -> bool:
    """Whether a's room is b's, or above it."""
    floors = {room: floor for floor, rooms in enumerate(order.split("|")) for room in rooms.split()}
    a, b = room_of(a, depth), room_of(b, depth)
    return a == b or floors[a] > floors[b]


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
    for module, names in IMPORTS.items():
        for name in names:
            assert points_down(module, name, ROOMS, 1), f"{module} imports {name}, which is above it"
            if room_of(module) == room_of(name) == "templates":
                assert points_down(module, name, TEMPLATES, 2), f"{module} imports {name}, which is above it"
    library = {module: names for module, names in IMPORTS.items() if room_of(module) != "cli"}
    TopologicalSorter(library).prepare()  # raises CycleError: modules of one room may not import in a circle


def test_the_public_face_is_small() -> None:
    assert len(list((ROOT / "kda_tl").glob("*.py"))) <= 6, "put the module into a room"


def test_tilelang_is_imported_when_a_kernel_is_built() -> None:
    for module, tree in TREES.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        lazy = {node for function in functions for node in ast.walk(function)}
        may = module in COMPILES or room_of(module) == "templates"
        strict = [node for node in ast.walk(tree) if not may or node not in lazy]
        found = {name.split(".")[0] for name in imports(*strict)} & {"tilelang", "tvm"}
        assert not found, f"{module} imports tilelang"


def test_a_plan_is_found_without_what_only_tuning_and_compiling_need() -> None:
    code = """
import json, sys
from kda_tl.bench.workloads import select
from kda_tl.database.gpus import known_device
from kda_tl.database.store import sources
from kda_tl.runtime.dispatch import select_plan
(workload,) = select(["train-T8192-H32"])
choice = select_plan(workload.problem(), known_device("nvidia_h200"), sources())
print(json.dumps([choice.step, choice.stale, sorted(sys.modules)]))
"""
    step, stale, modules = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert (step, stale) == ("exact bucket", [])
    assert not {"tilelang", "tvm", "optuna", "scipy", "sqlalchemy", "rich"} & set(modules)


def test_library_neither_asserts_nor_prints() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            asserts = isinstance(node, ast.Assert)
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not asserts, f"{module}:{node.lineno} asserts: raise an error of kda_tl.errors"
            assert not prints or room_of(module) == "cli", f"{module}:{node.lineno} prints: only cli/ does"
