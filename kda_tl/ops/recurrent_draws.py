"""Drawn calls of recurrent operators: states in a pool of slots, as serving engines keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kda_tl.core.dtypes import TORCH_DTYPE
from kda_tl.ops.draws import draw_tokens

Tensor = torch.Tensor
# How workloads use states, the usual way first, and the options that such calls have beside gates and step sizes
STATE_USES: dict[str, tuple[str, ...]] = {
    "pool": ("pooled", "updates"),  # each sequence has a slot, whose state changes in place
    "columns": ("pooled", "accepted", "updates", "each_token"),  # a slot a token: drafts of which some were accepted
    "verify": ("pooled", "snapshots"),  # the pool is read only; states after each token go to a buffer
    "rows": (),  # a state a sequence is given, and a new one returned
}
_MAX_TRIMMED_SEQUENCES = 8


def find_modes(workload: Any) -> dict[str, Any]:
    """Fields of a workload's problem that the workload does not have itself."""
    w, computed, sequences = workload, workload.gate != "log", len(workload.lengths) or workload.B
    ragged = ("ragged",) if w.lengths else ()
    return {
        "has_A_log": computed,
        "has_dt_bias": computed,
        "l2norm": True,
        "longest": -(-w.T // sequences) if w.lengths else w.T,  # the host does not know lengths
        "initial_state": True,
        "final_state": w.state_use == "rows",
        "options": ("has_g", "has_beta", *ragged, *STATE_USES[w.state_use]),
    }


def draw_step(workload: Any, generator: torch.Generator, *, scalar_gate: bool, bounded: bool) -> dict[str, Any]:
    """Arguments of a recurrent operator: tokens as those of whole sequences, states N(0, 1).

    Slots are drawn without order. Of a slot a token, one token or more of the last call were accepted.
    """
    w, device, options = workload, generator.device, STATE_USES[workload.state_use]
    N, W, places = _count_slots(w)
    shape = (w.HV, w.V, w.K) if w.state_v_first else (w.HV, w.K, w.V)
    states = torch.randn(places, *shape, generator=generator, device=device).to(TORCH_DTYPE[w.state_dtype])
    inputs = draw_tokens(w, generator, scalar_gate=scalar_gate, bounded=bounded)
    inputs |= {"initial_state": states, "state_v_first": w.state_v_first, "output_final_state": w.state_use == "rows"}
    if w.lengths:
        inputs["cu_seqlens"] = torch.tensor(w.bounds, dtype=torch.int32).to(device)
    if "pooled" in options:
        slots = torch.randperm(places, generator=generator, device=device)[: N * W].to(torch.int32)
        inputs["ssm_state_indices"] = slots.view(N, W) if "each_token" in options else slots
    if "accepted" in options:
        drawn = torch.randint(1, W + 1, (N,), generator=generator, device=device)
        inputs["num_accepted_tokens"] = drawn.to(torch.int32)
    inputs["inplace_final_state"] = "updates" in options
    if "snapshots" in options:
        inputs["disable_state_update"] = True
        inputs["intermediate_states"] = states.new_zeros(N, max(w.lengths, default=w.T), *shape)
    return inputs


def _count_slots(w: Any) -> tuple[int, int, int]:
    """Sequences, slots of each, and slots of the pool, one of which is nobody's."""
    N, options = len(w.bounds) - 1, STATE_USES[w.state_use]
    W = max(w.lengths, default=w.T) if "each_token" in options else 1
    return N, W, N * W + 1 if "pooled" in options else N


def find_sizes(workload: Any, BT: int, segments: int) -> dict[str, int]:
    """What kernels are launched with for :func:`draw_step`, all tensors dense; there are no chunks."""
    w, (N, W, places) = workload, _count_slots(workload)
    values, options = w.HV * w.V, STATE_USES[w.state_use]
    rows = {"q": w.H * w.K, "k": w.H * w.K, "v": values, "g": w.HV * w.problem().G, "beta": w.HV}
    sizes = {"tokens": w.tokens, "N": N} | {f"{name}_row": size for name, size in rows.items()}
    sizes |= dict.fromkeys(
        (f"{name}_step" for name in ("bounds", "slots", "accepted", "targets", "placed", "parents")), 1
    )
    sizes |= {"slots_row": W, "targets_row": 1, "parents_row": 1, "pool_slots": places, "pool_row": values * w.K}
    if "snapshots" in options:
        sizes |= {"buffer_rows": N, "snapshot_row": max(w.lengths, default=w.T) * values * w.K}
    return sizes


def trim_sequences(workload: Any, tokens: int) -> Any:
    """A twin of a few sequences: they are what costs memory."""
    w = workload
    if len(w.bounds) - 1 <= _MAX_TRIMMED_SEQUENCES:
        return w
    if w.lengths:
        return replace(w, name=f"{w.name}-trimmed", lengths=w.lengths[:_MAX_TRIMMED_SEQUENCES])
    return replace(w, name=f"{w.name}-trimmed", B=_MAX_TRIMMED_SEQUENCES)
