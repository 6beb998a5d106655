"""Workloads: the table holds what is promised, and inputs are what the operator takes them for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_tl.bench.fixtures import operator_tensors
from kda_tl.bench.workloads import WORKLOADS, Workload, draw_gradients, select
from kda_tl.core.problem import Problem
from kda_tl.core.stage import BT_CHOICES
from kda_tl.errors import InputError
from kda_tl.ops import load_recurrent
from kda_tl.ops.entry import explain
from kda_tl.ops.recurrent import pose
from kda_tl.ops.recurrent_check import check_values
from kda_tl.ops.recurrent_draws import STATE_USES
from kda_tl.reference import activate_gate

LABELS = [w.name for w in WORKLOADS]
CHUNKED = [w for w in WORKLOADS if w.direction != "step"]
STEPS = [w for w in WORKLOADS if w.direction == "step"]


def tagged(tag: str) -> tuple[Workload, ...]:
    return tuple(w for w in WORKLOADS if tag in w.tags)


def log_decay(workload: Workload) -> torch.Tensor:
    x = workload.inputs("cpu", seed=1)
    return activate_gate(
        x["g"].float(),
        gate=workload.gate,
        A_log=x.get("A_log"),
        dt_bias=x.get("dt_bias"),
        lower_bound=x["lower_bound"],
    )


def test_names_are_unique_and_no_tag_is_a_name() -> None:
    assert len(set(LABELS)) == len(LABELS)
    assert not {tag for w in WORKLOADS for tag in w.tags} & set(LABELS)


@pytest.mark.parametrize("gate", ["safe", "softplus"])
def test_gpu_tuning_covers_heads_lengths_and_packed_sequences(gate: str) -> None:
    mine = [w for w in tagged("tune") if w.gate == gate]
    assert all((w.K, w.V, w.dtype) == (128, 128, "bf16") for w in mine)
    dense = {(w.B, w.T, w.H) for w in mine if not w.lengths}
    assert dense == {(1, T, H) for T in (1024, 8192) for H in (8, 32, 64, 96)} | {(1, 32768, 8), (8, 1024, 96)}
    packed = [(w.H, w.lengths) for w in mine if w.lengths]
    assert packed == [(64, (1300, 547, 2048, 963, 271, 3063)), (96, (1024,) * 8)]


def test_bench_covers_steep_slow_and_softplus() -> None:
    found = {(w.B, w.T, w.H, w.decay if w.gate == "safe" else w.gate) for w in tagged("bench")}
    assert found == {(1, 8192, H, kind) for H in (32, 64, 96) for kind in ("steep", "slow", "softplus")}


def test_forward_compares_every_gate_at_every_shape() -> None:
    found = [(w.B, w.T, w.H, w.lengths, w.gate, w.decay) for w in tagged("forward")]
    shapes = [(1, 8192, H, ()) for H in (32, 64, 96)]
    shapes += [(1, 32768, 8, ()), (8, 1024, 96, ()), (1, 8192, 96, (1024,) * 8)]
    shapes += [(1, 8192, 64, (1300, 547, 2048, 963, 271, 3063))]
    gates = [("safe", "steep"), ("safe", "slow"), ("softplus", "slow")]
    assert sorted(found) == sorted((*shape, *gate) for shape in shapes for gate in gates)
    assert {(w.K, w.V, w.dtype) for w in tagged("forward")} == {(128, 128, "bf16")}


def test_small_is_short() -> None:
    assert [(w.B, w.T, w.H, w.gate, w.decay) for w in tagged("small")] == [
        (1, 512, 32, "safe", "steep"),
        (1, 1024, 32, "safe", "steep"),
    ]


@pytest.mark.parametrize("tag", ["gdn", "gdn-train"])
def test_gated_deltanet_has_both_kinds_of_gates_at_every_shape(tag: str) -> None:
    """FlashQLA's, with states it begins from, and those of FLA's layer."""
    mine = tagged(tag)
    assert all((w.operator, w.K, w.V, w.dtype) == ("chunk_gated_delta_rule", 128, 128, "bf16") for w in mine)
    shapes = [[(w.B, w.T, w.H, w.HV, w.lengths) for w in mine if w.gate == gate] for gate in ("log", "softplus")]
    assert shapes[0] == shapes[1] and len(set(shapes[0])) == len(shapes[0]) == len(mine) // 2
    assert (1, 8192, 32, 32, ()) in shapes[0] and (1, 32768, 16, 32, ()) in shapes[0]
    assert {(w.beta, w.initial_state) for w in mine if w.gate == "log"} == {("plain", True)}
    assert {(w.beta, w.initial_state) for w in mine if w.gate == "softplus"} == {("sigmoid", False)}


def test_nothing_has_two_names() -> None:
    assert len({replace(w, name="", tags=()) for w in WORKLOADS}) == len(WORKLOADS)


@pytest.mark.parametrize("workload", CHUNKED, ids=lambda w: w.name)
def test_problem_is_what_the_operator_makes_of_the_inputs(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []
    monkeypatch.setattr("kda_tl.ops.entry.select_cached", lambda problem, *_: seen.append(problem))
    small = workload.trimmed(70)
    explain(operator=workload.operator, **small.inputs("cpu"))
    assert seen == [replace(small.problem(), direction="fwd")]


@pytest.mark.parametrize("workload", CHUNKED, ids=lambda w: w.name)
def test_trimmed_twin_needs_the_same_kernels_and_ends_inside_a_chunk(workload: Workload) -> None:
    twin = workload.trimmed(160)
    assert twin.problem().without_lengths() == workload.problem().without_lengths()
    assert twin.problem().varlen == workload.problem().varlen
    assert 40 < twin.tokens <= 160
    for length in twin.lengths or (twin.T,):
        assert all(length % BT for BT in BT_CHOICES)


def test_small_workloads_stay_whole() -> None:
    workload = Workload(name="small", B=2, T=32, H=1)
    assert workload.trimmed(64) is workload


def test_several_sequences_stay_several() -> None:
    assert Workload(name="batch", B=8, T=100, H=1).trimmed(120).B == 4
    packed = Workload(name="packed", lengths=(1, 500, 2, 300, 7), H=1).trimmed(100)
    assert len(packed.lengths) == 4 and min(packed.lengths) == 1 and packed.bounds[-1] == packed.T


def test_inputs_depend_on_the_seed_only() -> None:
    workload = Workload(name="seeded", T=20, H=2, HV=4, K=16, V=24)
    first, again, other = (workload.inputs("cpu", seed=seed) for seed in (3, 3, 4))
    tensors = [name for name, value in first.items() if isinstance(value, torch.Tensor)]
    assert set(tensors) == {"q", "k", "v", "beta", "g", "A_log", "dt_bias"}
    for name in tensors:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_a_tag_is_of_one_pass() -> None:
    passes = {tag: {w.problem().direction for w in tagged(tag)} for w in WORKLOADS for tag in w.tags}
    forward = {tag: {"fwd"} for tag in ("tune", "bench", "forward", "small", "wide", "cpu", "gdn")}
    backward = {tag: {"bwd"} for tag in ("train", "training", "train-cpu", "gdn-train")}
    assert passes == {**forward, **backward, **{tag: {"step"} for tag in ("decode", "decode-cpu")}}


def test_gradients_depend_on_the_seed_only_and_are_no_input() -> None:
    x = Workload(name="seeded", T=20, H=2, K=16, V=16, dtype="fp32").inputs("cpu", seed=3)
    ht = torch.empty(1, 2, 16, 16)
    (do, dht), again, other = (draw_gradients(x["v"], ht, seed) for seed in (3, 3, 4))
    assert do.shape == x["v"].shape and dht is not None and dht.shape == ht.shape
    assert torch.equal(do, again[0]) and torch.equal(dht, again[1])
    assert not torch.equal(do, other[0]) and not torch.equal(do, x["q"])
    assert draw_gradients(x["v"], None)[1] is None


def test_decays_are_as_named() -> None:
    steep = Workload(name="steep", T=300, H=4, K=64)
    assert log_decay(steep).mean().item() == pytest.approx(-3.5, abs=0.4)
    slow = log_decay(replace(steep, decay="slow"))
    assert -0.05 < slow.mean().item() < -1e-4
    mamba = log_decay(replace(steep, gate="softplus", decay="slow"))
    assert -1.0 < mamba.mean().item() < -0.01
    assert mamba.median().item() > -0.5


def test_log_gate_gets_what_the_safe_gate_makes() -> None:
    safe = Workload(name="safe", T=50, H=2, K=16, dtype="fp32")
    x = replace(safe, gate="log").inputs("cpu", seed=1)
    assert "A_log" not in x and not x["use_gate_in_kernel"]
    torch.testing.assert_close(x["g"], log_decay(safe))


def test_select_takes_names_and_tags_in_the_order_of_the_table() -> None:
    chosen = select(["safe-T8192-H32", "cpu", "safe-T1024-H8"])
    assert [w.name for w in chosen] == ["safe-T1024-H8", "safe-T8192-H32", *(w.name for w in tagged("cpu"))]


def test_unknown_names_are_refused_with_tags_and_near_names() -> None:
    with pytest.raises(InputError) as refused:
        select(["cpu", "nowhere"])
    assert str(refused.value) == (
        "unknown workload nowhere: the tags are bench, cpu, decode, decode-cpu, forward, gdn, "
        "gdn-train, small, train, train-cpu, training, tune, wide; `kda-tl show --workloads` lists the names."
    )
    with pytest.raises(InputError, match="did you mean safe-T8192-H32 or .* The tags are") as refused:
        select(["saf-T8192-H32"])
    assert sum(word.strip(",?;") in LABELS for word in str(refused.value).split()) <= 3


def test_decode_covers_both_operators_batches_and_states() -> None:
    found = [(w.operator, w.B, w.T, w.state_dtype, w.state_use) for w in tagged("decode")]
    names = ("fused_recurrent_kda", "fused_recurrent_gated_delta_rule")
    shapes = [(B, 1, state, "pool") for B in (1, 8, 32, 128, 256) for state in ("fp32", "bf16")]
    shapes += [(32, 4, state, "verify") for state in ("fp32", "bf16")]
    assert sorted(found) == sorted((name, *shape) for name in names for shape in shapes)
    assert {(w.HV, w.K, w.V, w.dtype, w.state_v_first) for w in tagged("decode")} == {(32, 128, 128, "bf16", True)}


@pytest.mark.parametrize("use", STATE_USES)
@pytest.mark.parametrize("workload", STEPS, ids=lambda w: w.name)
def test_problem_of_a_step_is_what_the_operator_makes_of_it(workload: Workload, use: str) -> None:
    for shape in ({"T": min(workload.T, 2)}, {"B": 1, "lengths": (2, 0, 3)}):
        small = replace(workload, H=workload.HV // workload.H, HV=2, state_use=use, **{"B": 3, **shape}).trimmed(1)
        small = replace(small, H=2 // small.H)
        operator = load_recurrent()[small.operator]
        assert pose(operator, operator.bind(**small.inputs("cpu"))) == small.problem()


@pytest.mark.parametrize("use", STATE_USES)
@pytest.mark.parametrize("name", load_recurrent())
def test_drawn_steps_pass_the_checks_of_values(name: str, use: str) -> None:
    """Slots lie apart and within the pool: no drawn call reads what another sequence writes."""
    for lengths in ((), (2, 0, 3)):
        w = Workload(name="small", operator=name, gate="softplus", B=1 if lengths else 4, T=3, H=1, lengths=lengths)
        w = replace(w, K=8, V=8, state_use=use)
        check_values(w.declaration.bind(**w.inputs("cpu")))


@pytest.mark.parametrize("use", STATE_USES)
@pytest.mark.parametrize("name", load_recurrent())
def test_sizes_of_steps_are_told_without_drawing_them(name: str, use: str) -> None:
    for shape in ({"B": 4, "T": 3}, {"lengths": (2, 0, 3)}):
        w = Workload(name="small", operator=name, gate="softplus", H=1, HV=2, K=8, V=24, state_use=use, **shape)
        assert w.declaration.sizes(w, 0, 1) == operator_tensors(w, 0, torch.device("cpu"))[1]


def test_trimmed_steps_keep_their_lengths() -> None:
    twins = [w.trimmed(1) for w in STEPS]
    assert {(twin.B, twin.T) for twin in twins} == {(1, 1), (8, 1), (8, 4), (4, 4)}
    for twin, w in zip(twins, STEPS, strict=True):
        assert twin.problem().without_lengths() == w.problem().without_lengths()
    packed = Workload(name="packed", operator="fused_recurrent_kda", H=1, lengths=(3,) * 20).trimmed(1)
    assert packed.lengths == (3,) * 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": "fast"}, "steep, slow"),
        ({"T": 0}, "token"),
        ({"lengths": (3, 4), "B": 2}, "B=1"),
        ({"K": 300}, "256"),
        ({"direction": "back"}, "fwd or bwd"),
        ({"state_dtype": "bf16"}, "chunk_kda has no bf16 states: choose fp32"),
        ({"state_use": "pool"}, "chunk_kda has no pool use of states"),
        ({"operator": "fused_recurrent_kda", "direction": "fwd"}, "fused_recurrent_kda has no fwd pass: choose step"),
        ({"operator": "fused_recurrent_kda", "state_use": "heap"}, "choose pool or columns or verify or rows"),
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Workload(**({"name": "bad", "T": 8, "H": 1} | change))


def test_bounds_are_of_every_sequence() -> None:
    assert Workload(name="batch", B=3, T=5, H=1).bounds == (0, 5, 10, 15)
    assert Workload(name="packed", lengths=(2, 7, 1), H=1).bounds == (0, 2, 9, 10)
