"""FLA on the GPU that is here: its functions and layers run on us, and return the numbers of its own kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.fla_stub import SMALL, arguments_of, assert_same, record_served, registered, why_not_importable

from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import relative_error

# On a GPU, the real FLA


@pytest.fixture
def real() -> Iterator[Callable[..., Any]]:
    if reason := why_not_importable():
        pytest.skip(reason)
    with registered() as function:
        yield function


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    return record_served(monkeypatch)


BF16 = replace(SMALL, H=2, HV=4, K=128, V=128, dtype="bf16")
PEERS_AGREE = 2e-2  # each is within 6e-3 of the recurrence


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", ((200,), (130, 70)), ids=("dense", "packed"))
def test_fla_returns_our_numbers(
    real: Callable[..., Any],
    lengths: tuple[int, ...],
    served: list[Any],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = arguments_of(BF16, seed, lengths, "cuda")
    arguments["A_log"].requires_grad_()
    if arguments["cu_seqlens"] is not None:
        arguments["cu_seqlens"] = arguments["cu_seqlens"].long()
    with torch.no_grad():
        ours = chunk_kda(**arguments)
        assert_same(real(**arguments), ours)
        assert len(served) == 1
        monkeypatch.setenv("KDA_TL_FLA", "0")
        own = real(**arguments)
    assert len(served) == 1
    assert max(relative_error(a, b.double()) for a, b in zip(own, ours, strict=True)) < PEERS_AGREE


@pytest.mark.gpu
@pytest.mark.parametrize("disable_recompute", (False, True), ids=("recomputed", "kept"))
def test_fla_trains_on_us(
    real: Callable[..., Any],
    disable_recompute: bool,
    served: list[Any],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLA_TILELANG", "0")  # its Triton kernels; those in TileLang want a tilelang of their own
    arguments = arguments_of(BF16, seed, (200,), "cuda") | {"disable_recompute": disable_recompute}
    leaves = [arguments[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def gradients() -> tuple[torch.Tensor, ...]:
        o, _ = real(**arguments)
        return torch.autograd.grad(o, leaves, torch.linspace(-1, 1, o.numel(), device="cuda").view_as(o).to(o.dtype))

    ours = gradients()
    assert len(served) == 1
    monkeypatch.setenv("KDA_TL_FLA", "0")
    own = gradients()
    assert len(served) == 1
    assert max(relative_error(a, b.double()) for a, b in zip(own, ours, strict=True)) < 2 * PEERS_AGREE


def assert_layer_runs_on_us(layer: torch.nn.Module, served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of FLA's calls us, and returns what it returns by FLA's own kernels."""
    layer = layer.to("cuda", torch.bfloat16).eval()
    x = torch.randn(2, 130, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ours, *_ = layer(x)
        assert len(served) == 1
        monkeypatch.setenv("KDA_TL_FLA", "0")
        own, *_ = layer(x)
    assert len(served) == 1 and relative_error(ours, own.double()) < PEERS_AGREE


@pytest.mark.gpu
@pytest.mark.parametrize("state_v_first", (False, True), ids=("kv", "vk"))
def test_fla_decodes_on_us(
    real: Callable[..., Any], state_v_first: bool, served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines call it: packed sequences of a token each, on slots of a pool."""
    torch.manual_seed(seed)
    N, H, D = 5, 4, 128
    q, k, v, g = torch.randn(4, 1, N, H, D, device="cuda", dtype=torch.bfloat16)
    arguments = {
        "beta": torch.randn(1, N, H, device="cuda", dtype=torch.bfloat16),
        "A_log": torch.rand(H, device="cuda"),
        "dt_bias": torch.randn(H * D, device="cuda"),
        "cu_seqlens": torch.arange(N + 1, device="cuda", dtype=torch.int32),
        "ssm_state_indices": torch.randperm(3 * N, device="cuda")[:N].int(),
        "state_v_first": state_v_first,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    pool = torch.randn(3 * N, H, D, D, device="cuda")
    pools = (pool, pool.clone())
    decode = sys.modules["fla.ops.kda.fused_recurrent"].fused_recurrent_kda_fwd
    with torch.no_grad():
        ours, _ = decode(q, k, v, g, initial_state=pools[0], **arguments)
        assert len(served) == 1
        monkeypatch.setenv("KDA_TL_FLA", "0")
        own, _ = decode(q, k, v, g, initial_state=pools[1], **arguments)
    assert len(served) == 1 and relative_error(own, ours.double()) < PEERS_AGREE
    assert relative_error(pools[1], pools[0].double()) < PEERS_AGREE


@pytest.mark.gpu
@pytest.mark.parametrize("safe", (False, True), ids=("softplus", "safe"))
def test_fla_layer_runs_on_us(
    real: Callable[..., Any], safe: bool, served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("fla.layers", reason="FLA's layers need transformers", exc_type=ImportError)
    torch.manual_seed(seed)
    gate = {"safe_gate": True, "lower_bound": -5.0} if safe else {}
    layer = layers.KimiDeltaAttention(hidden_size=256, head_dim=128, num_heads=2, layer_idx=0, **gate)
    assert_layer_runs_on_us(layer, served, monkeypatch)


@pytest.mark.gpu
def test_fla_layer_of_gated_deltanet_runs_on_us(
    real: Callable[..., Any], served: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("fla.layers", reason="FLA's layers need transformers", exc_type=ImportError)
    torch.manual_seed(seed)
    layer = layers.GatedDeltaNet(hidden_size=256, head_dim=64, num_heads=2, layer_idx=0)
    assert_layer_runs_on_us(layer, served, monkeypatch)
