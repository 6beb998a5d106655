"""The vocabulary of the templates, and the contract that every stage's space and default keep."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.chunked import STAGES

from kda_tl import templates
from kda_tl.core.device import Device
from kda_tl.core.problem import DTYPES, Problem
from kda_tl.core.stage import BC_CHOICES, BT_CHOICES, Case, Config, Plan, Stage, TensorSpec, static_sizes, tunable
from kda_tl.database.gpus import known_device
from kda_tl.errors import InputError
from kda_tl.templates.pipelines import PIPELINES
from kda_tl.templates.sm90.powers import make_factors

SLUGS = ("cpu", "nvidia_a100_sxm4_80gb", "nvidia_l4", "nvidia_geforce_rtx_5090", "nvidia_h200", "nvidia_b200")
DEVICES = {slug: known_device(slug) for slug in SLUGS}
DIMS = (32, 60, 64, 100, 128, 256)
WITHOUT_TILES = ("bwd_gate", "bwd_heads", "bwd_qk", "fwd_gate")  # in shared memory
stages = pytest.mark.parametrize("stage", STAGES.values(), ids=lambda s: s.name)
devices = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def make_case(device: Device = DEVICES["nvidia_h200"], BT: int = 64, BC: int = 16, **fields: Any) -> Case:
    problem = Problem(**{"H": 2, "HV": 4, "K": 128, "V": 128, "tokens": 100, **fields})
    return Case(problem=problem, device=device, BT=BT, BC=BC)


def grid(device: Device) -> Iterator[Case]:
    for BT, BC, K, V, dtype in itertools.product(BT_CHOICES, BC_CHOICES, DIMS, DIMS, DTYPES):
        yield make_case(device, BT, BC, K=K, V=V, dtype=dtype)
        if K == V:
            yield make_case(device, BT, BC, K=K, V=V, dtype=dtype, scalar_gate=True, rank=2)


# Config


@dataclass(frozen=True, kw_only=True)
class Toy(Config):
    BK: int = tunable(64, 32, 64)
    merge: str = tunable("io", "io", "tf32", "fp32")
    fast: bool = tunable(True, True, False)


def test_space_is_the_product_of_the_axes() -> None:
    space = list(Toy.space())
    assert len(space) == len(set(space)) == Toy.size() == 12
    assert space == [
        Toy(BK=a, merge=b, fast=c) for a in (32, 64) for b in ("io", "tf32", "fp32") for c in (True, False)
    ]
    assert Toy() in space and Toy().BK == 64


def test_default_must_be_a_choice() -> None:
    with pytest.raises(ValueError, match="default 16 is not among the choices"):
        tunable(16, 32, 64)


def test_neighbours_differ_in_one_field() -> None:
    neighbours = list(Toy().neighbours())
    assert len(neighbours) == len(set(neighbours)) == 1 + 2 + 1
    for other in neighbours:
        assert sum(getattr(other, f.name) != getattr(Toy(), f.name) for f in fields(Toy)) == 1


@pytest.mark.parametrize(
    ("values", "sentence"),
    (
        ({"BK": 64, "merge": "io"}, "has the fields"),
        ({"BK": 64, "merge": "io", "fast": True, "BV": 64}, "has the fields"),
        ({}, "has the fields"),
        ({"BK": 48, "merge": "io", "fast": True}, r"Toy.BK must be one of \(32, 64\), got 48"),
        ({"BK": "64", "merge": "io", "fast": True}, "Toy.BK must be one of"),
        ({"BK": None, "merge": "io", "fast": True}, "Toy.BK must be one of"),
        ({"BK": [64], "merge": "io", "fast": True}, "Toy.BK must be one of"),
        ({"BK": 64, "merge": "IO", "fast": True}, "Toy.merge must be one of"),
    ),
)
def test_stored_values_are_checked(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Toy.from_dict(values)


# TensorSpec


def test_spec_notation() -> None:
    spec = TensorSpec.parse("NT HV 2 BT : f32 ? l2norm")
    assert spec == TensorSpec(("NT", "HV", "2", "BT"), "f32", "l2norm")
    assert spec.shape({"NT": 7, "HV": 4, "BT": 16}) == (7, 4, 2, 16)
    assert TensorSpec.parse("N+1:i32") == TensorSpec(("N+1",), "i32", None)
    assert TensorSpec.parse("N+1 : i32").shape({"N": 3}) == (4,)
    with pytest.raises(KeyError):
        spec.shape({"NT": 7})


def test_spec_presence_and_elements() -> None:
    problem = Problem(H=1, HV=1, K=8, V=8, tokens=1, dtype="fp16", g_dtype="fp32", beta_dtype="bf16")
    optional = TensorSpec.parse("HV : f32 ? has_dt_bias")
    assert not optional.present(problem) and optional.present(replace(problem, has_dt_bias=True))
    assert TensorSpec.parse("HV : f32").present(problem)
    shared = replace(problem, H=1, HV=2)
    for text, here in (("grouped", True), ("not grouped", False)):
        spec = TensorSpec.parse(f"HV : f32 ? {text}")
        assert (spec.present(problem), spec.present(shared)) == (not here, here)
    elements = {role: TensorSpec.parse(f"T : {role}").element(problem) for role in ("io", "g", "beta", "f32", "i32")}
    assert elements == {"io": "fp16", "g": "fp32", "beta": "bf16", "f32": "fp32", "i32": "i32"}


@stages
def test_specs_can_be_allocated(stage: Stage) -> None:
    names = {f.name for f in fields(Problem)}
    case = make_case()
    sizes = {**static_sizes(case), "tokens": 100, "NT": 3, "N": 2, "NS": 4, "NC": 2}
    assert list(stage.specs) == [*stage.inputs, *stage.outputs]
    assert not set(stage.inputs) & set(stage.outputs), "a tensor is either read or written"
    for name, spec in stage.specs.items():
        assert spec.when is None or spec.when in names | {"grouped", "parted"}, (
            f"{name}: Problem has no field {spec.when}"
        )
        assert all(n > 0 for n in spec.shape(sizes)) and spec.element(case.problem)


@stages
def test_reference_reads_what_the_kernel_takes(stage: Stage) -> None:
    """Itself, or by the reference of another stage that takes the same."""
    source = inspect.getsource(stage.reference)
    if "make_factors" in source:
        source += inspect.getsource(make_factors)
    read = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "x"
    }
    others = [templates.load(name) for name in re.findall(r"(\w+)\.reference\(case, x\)", source)]
    assert read or [other.inputs for other in others] == [stage.inputs]
    assert read <= {*stage.inputs, *stage.scalars} and {*stage.scalars} <= {"scale", "lower_bound"}


def test_registry_and_pipelines_know_the_same_stages() -> None:
    listed = {stage.name for pipeline in PIPELINES.values() for stage in pipeline.stages}
    assert listed == set(templates.names())
    for name in templates.names():
        assert templates.load(name).name == name
    for name, pipeline in PIPELINES.items():
        assert pipeline.name == name and len({stage.name for stage in pipeline.stages}) == len(pipeline.stages)
    with pytest.raises(InputError, match="there is no stage 'fwd_gat': choose one of .*fwd_gate"):
        templates.load("fwd_gat")


# The contract of every stage


@stages
def test_space_and_records_agree(stage: Stage) -> None:
    space = list(stage.config.space())
    assert len(set(space)) == stage.config.size() == len(space)
    for config in space:
        assert stage.config.from_dict(config.as_dict()) == config
        assert all(other in space and other != config for other in config.neighbours())
    for name, choices in stage.config.axes().items():
        assert len(set(choices)) == len(choices), f"{name} lists a choice twice"
        assert not any(isinstance(choice, bool) != isinstance(choices[0], bool) for choice in choices)


@pytest.mark.rest(draws=60)
@stages
@devices
def test_default_is_never_rejected(stage: Stage, device: Device) -> None:
    """Wherever anything of the space runs, the default does. Where nothing does, default_plan must avoid the case."""
    space = set(stage.config.space())
    rejected = []
    for case in grid(device):
        config = stage.default(case)
        assert config in space, "a default that is not in the space cannot be stored"
        reason = config.reject(case)
        if reason and next(stage.candidates(case), None):
            p = case.problem
            rejected.append(f"BT={case.BT} BC={case.BC} K={p.K} V={p.V} {p.dtype}: {reason}")
    assert not rejected, f"{len(rejected)} cases, as {rejected[0]}"


@stages
@devices
def test_rejections_are_sentences(stage: Stage, device: Device) -> None:
    """Every comparison is None or one sentence that names a value; parse_plan and compile_stage put the full stop."""
    for BT, BC, K, V, dtype in itertools.product(BT_CHOICES, BC_CHOICES, (60, 128, 256), (100, 256), DTYPES):
        case = make_case(device, BT, BC, K=K, V=V, dtype=dtype)
        reasons = [config.reject(case) for config in stage.config.space()]
        for reason in reasons:
            assert reason is None or isinstance(reason, str) and len(reason.split()) >= 4, reason
            assert reason is None or not reason.endswith(".") and "\n" not in reason, reason
        assert reasons.count(None) == len(list(stage.candidates(case)))


@stages
def test_lengths_do_not_decide(stage: Stage) -> None:
    """A kernel serves all lengths, so neither its default nor what is rejected may depend on them."""
    for device in DEVICES.values():
        case = make_case(device, tokens=100000, sequences=7, varlen=True)
        bare = replace(case, problem=case.problem.without_lengths())
        assert stage.default(case) == stage.default(bare)
        for config in stage.config.space():
            assert config.reject(case) == config.reject(bare)


@stages
def test_shared_memory_is_asked_of_the_device(stage: Stage) -> None:
    """A device with next to none rejects every config of a stage that has tiles there, for that reason."""
    of_all: tuple[dict[str, Any], ...] = ({}, {"gate": "safe", "has_A_log": True}, {"dtype": "fp32", "K": 60, "V": 100})
    for given in (*of_all, {"scalar_gate": True}):
        case = make_case(**{"gate": "log", **given})
        without = replace(case, device=replace(case.device, smem_bytes=16))
        for config in stage.candidates(case):
            reason = config.reject(without)
            assert reason is None if stage.name in WITHOUT_TILES else "shared" in (reason or ""), config


@stages
def test_cost_is_a_floor_that_grows_with_the_work(stage: Stage) -> None:
    gated = {"gate": "safe", "has_A_log": True, "has_dt_bias": True}
    case = make_case(**gated)
    one = stage.cost(case, {"tokens": 640, "NT": 10, "N": 1, "NS": 10, "NC": 5})
    two = stage.cost(case, {"tokens": 1280, "NT": 20, "N": 1, "NS": 20, "NC": 10})
    assert one.bytes > 0 and one.flops > 0
    assert one.bytes < two.bytes <= 2 * one.bytes and two.flops == 2 * one.flops
    wide = stage.cost(make_case(**gated, dtype="fp32"), {"tokens": 640, "NT": 10, "N": 1, "NS": 10, "NC": 5})
    io = {spec.dtype for spec in stage.specs.values()} & {"io", "g", "beta"}
    assert one.bytes < wide.bytes <= 2 * one.bytes if io else one.bytes == wide.bytes


@stages
@pytest.mark.parametrize("scalar_gate", (False, True))
def test_cost_counts_every_tensor(stage: Stage, scalar_gate: bool) -> None:
    """What the specs say must move, but for the cumsum, of which the recurrences read one row a chunk.

    And but for the last segment, which only some stages read.
    """
    gated = {"gate": "softplus", "has_A_log": True, "has_dt_bias": True, "scalar_gate": scalar_gate}
    case = make_case(**gated, l2norm=True, beta="sigmoid")
    sizes = {"tokens": 64 * 90, "NT": 90, "N": 1, "NS": 30, "NC": 29}
    width = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4}
    all_sizes = {**static_sizes(case), **sizes}
    moved = 0
    for name, spec in stage.specs.items():
        if spec.present(case.problem) and (stage.name[4:], name) != ("state", "g_cumsum"):
            count = 1
            for n in spec.shape(all_sizes):
                count *= n
            moved += count * width[spec.element(case.problem)]
    assert stage.cost(case, sizes).bytes == pytest.approx(moved, rel=0.05)


@stages
def test_every_tolerance_is_given(stage: Stage) -> None:
    assert set(stage.tolerance) == set(DTYPES)
    assert all(0 < t <= 8e-3 for t in stage.tolerance.values())


# Case and Plan


def test_gate_width_and_rank_are_part_of_the_problem() -> None:
    kda, scalar, ranked = (make_case(**given).problem for given in ({}, {"scalar_gate": True}, {"rank": 4}))
    assert (kda.G, kda.GP, scalar.G, scalar.GP) == (128, 128, 1, 1)
    assert kda.key == "chunk_kda-fwd-H2-HV4-K128-V128-bf16-log-n1-tokens100"
    assert [p.key for p in (scalar, ranked)] == [kda.key.replace("-n1", f"-{name}-n1") for name in ("scalar", "r4")]
    assert len({p.without_lengths() for p in (kda, scalar, ranked)}) == 3
    with pytest.raises(InputError, match="rank must be one of 1, 2, 4, got 3"):
        make_case(rank=3)
    with pytest.raises(InputError, match="101 rows cannot be tokens of 2 rows"):
        make_case(rank=2, tokens=101)


@pytest.mark.parametrize(("BT", "BC"), ((48, 16), (64, 32), (128, 16), (16, 64), (0, 16), (64, 0), (8, 8)))
def test_chunk_geometry_is_checked(BT: int, BC: int) -> None:
    with pytest.raises(InputError, match=f"BT={BT}, BC={BC}"):
        make_case(BT=BT, BC=BC)


def test_plan_is_stored_by_name() -> None:
    plan = Plan(pipeline="staged", BT=64, BC=16, stages=(("one", Toy()), ("two", Toy(BK=32))))
    assert plan.config("two") == Toy(BK=32)
    assert plan.as_dict()["stages"] == {"one": Toy().as_dict(), "two": Toy(BK=32).as_dict()}
    assert hash(plan) == hash(replace(plan)) and plan != replace(plan, BC=8)


@stages
def test_stage_files_keep_one_order(stage: Stage) -> None:
    """A stage without a config of its own takes one by name, and one without a default that of its config."""
    module = inspect.getmodule(stage.build)
    order = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            order.append(node.name)
        elif isinstance(node, ast.Assign):
            order += [name.id for name in node.targets if isinstance(name, ast.Name)]
    wanted = ["INPUTS", "reference", stage.config.__name__, "build", "default", "cost", "STAGE"]
    shared = {stage.config.__name__, "default"} - {*order}
    assert [name for name in order if name in wanted] == [name for name in wanted if name not in shared]
    assert vars(module)[stage.config.__name__] is stage.config
    assert "default" in order or stage.default == stage.config.default


def read_imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """What a template imports of the templates, wherever it does: a module, and a name of it or None for the whole."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kda_tl.templates."):
            folder, _, module = node.module.removeprefix("kda_tl.templates.").partition(".")
            for alias in node.names:
                yield (f"{folder}/{module}", alias.name) if module else (f"{folder}/{alias.name}", None)
        elif isinstance(node, ast.Import):
            assert not any("kda_tl.templates" in alias.name for alias in node.names), "fingerprints do not see it"


def path_of(stage: str) -> str:
    """Where a stage's template is among the templates, without its ending."""
    return "/".join(templates.load(stage).build.__module__.split(".")[-2:])


def modules_of(name: str, folder: Path) -> set[str]:
    """A stage, and the modules that it imports names from, directly or not."""
    found, wanted = set(), [path_of(name)]
    while wanted:
        module = wanted.pop()
        if module not in found:
            found.add(module)
            wanted += [other for other, what in read_imports(folder / f"{module}.py") if what is not None]
    return found


def test_fingerprint_follows_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the stage and of all that its kernel holds, whichever module it is imported from; and of no other."""
    folder = tmp_path / "copy"
    shutil.copytree(Path(templates.__file__).parent, folder)
    monkeypatch.setattr("importlib.resources.files", lambda package: folder)

    def read() -> dict[str, str]:
        return {name: templates.fingerprint.__wrapped__(name) for name in templates.names()}

    def edit(file: str, text: str = "# edited") -> set[str]:
        """Stages whose fingerprint the edit changes."""
        before = read()
        (folder / file).write_text(f"{(folder / file).read_text()}\n{text}\n")
        return {name for name, now in read().items() if now != before[name]}

    first = read()
    assert len(set(first.values())) == len(first) and read() == first
    holds = {name: modules_of(name, folder) for name in templates.names()}
    for module in sorted(set().union(*holds.values())):
        assert edit(f"{module}.py") == {name for name in holds if module in holds[name]}, module
    users = {"fwd_prep", "fwd_gdn_prep", "fwd_gdn_pairs", "bwd_gradients", "bwd_gdn_gradients", "bwd_gdn_walk"}
    users |= {"fwd_gdn_inverse"}
    assert edit("common/tile.py") == set(holds), "every stage is written in this vocabulary"
    assert edit("sm90/gates.py") == users, "those written with it"
    (folder / "common/deep.py").write_text("")
    edit("sm90/gates.py", "from kda_tl.templates.common.deep import nothing")
    assert edit("common/deep.py") == users, "through another module"
    edit("sm90/fwd_merge.py", "def late():\n    from kda_tl.templates.portable.bwd_qk import reference")
    assert edit("portable/bwd_qk.py") == {"bwd_qk", "fwd_merge"}, "from another stage, inside a function"


def test_stages_take_references_alone_of_stages_that_they_import_whole() -> None:
    """A fingerprint does not cover those modules: a constant or a macro of theirs would go stale unnoticed."""
    folder = Path(templates.__file__).parent
    for path in folder.glob("*/*.py"):
        whole = {module.partition("/")[2] for module, what in read_imports(path) if what is None}
        assert whole <= set(templates.names()), f"{path}: import names of {whole}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
                assert node.attr == "reference", f"{path} takes {node.value.id}.{node.attr}"
