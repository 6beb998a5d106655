"""Tensors of recurrent operators: which sequence has which state, and where its elements are."""

from __future__ import annotations

from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.templates.common.language import T

INPUTS = {
    "q": "tokens q_row : io",
    "k": "tokens k_row : io",
    "v": "tokens v_row : io",
    "g": "tokens g_row : g ? has_g",
    "gk": "tokens gk_row : g ? key_gate",
    "gv": "tokens gv_row : g ? value_gate",
    "beta": "tokens beta_row : beta ? has_beta",
    "A_log": "HV : f32 ? has_A_log",
    "dt_bias": "HV G : f32 ? has_dt_bias",
    "bounds": "N+1 bounds_step : i32",  # read of ragged calls; it says N to all
    "pool": "pool_slots pool_row : state ? initial_state",
    "slots": "N slots_row slots_step : i32 ? pooled",
    "accepted": "N accepted_step : i32 ? accepted",
    "targets": "N targets_row targets_step : i32 ? separate",
    "snapshots": "buffer_rows snapshot_row : state ? snapshots",
    "snapshot_rows": "N placed_step : i32 ? placed",
    "parents": "N parents_row parents_step : i32 ? tree",
}
STATES = ("pool", "snapshots")
INDEX_TENSORS = ("bounds", "slots", "accepted", "targets", "snapshot_rows", "parents")
OUTPUTS = {"o": "tokens HV V : io", "ht": "N HV K V : f32 ? final_state"}
# Whole numbers but for the first two: value heads a head of keys, tokens a sequence where it is not ragged, and columns
# of the tensor of slots
SCALARS = ("scale", "lower_bound", "group", "steps", "pad_slot_id", "slots_width")
DEPENDS = (
    "options",
    "initial_state",
    "final_state",
    "state_v_first",
    "state_dtype",
    "scalar_gate",
    "gate",
    "beta",
    "l2norm",
    "K",
    "V",
)


def at_element(problem: Problem, i_hv: Any, k: Any, v: Any) -> Any:
    """Where an element of a head's state is among those of its slot."""
    K, V = problem.K, problem.V
    return i_hv * (K * V) + (v * K + k if problem.state_v_first else k * V + v)


def is_null(problem: Problem, slot: Any, pad_slot_id: Any) -> Any:
    """Whether an index stands for no slot."""
    return slot <= T.cast(pad_slot_id, "int32") if "pooled" in problem.options else T.bool(False)


@T.macro
def find_tokens(problem, i_n, bounds, steps):
    """A sequence's first token, and how many it has."""
    start = T.alloc_var("int32")
    count = T.alloc_var("int32")
    if "ragged" in problem.options:
        start = bounds[i_n, 0]
        count = bounds[i_n + 1, 0] - start
    else:
        count = T.cast(steps, "int32")
        start = i_n * count
    return start, count


@T.macro
def find_source(problem, i_n, slots, accepted, pad_slot_id, slots_width):
    """The slot in which a sequence's state is, and whether there is none."""
    slot = T.alloc_var("int32")
    column = T.alloc_var("int32")
    slot = i_n
    column = 0
    if "accepted" in problem.options:
        column = T.max(0, T.min(accepted[i_n, 0], T.cast(slots_width, "int32")) - 1)
    if "pooled" in problem.options:
        slot = slots[i_n, column, 0]
    return slot, is_null(problem, slot, pad_slot_id)


@T.macro
def find_target(problem, i_n, i_t, slots, targets, pad_slot_id):
    """The slot to which the state after a token goes, or that after the last one, with i_t = 0; below 0 for none."""
    slot = T.alloc_var("int32")
    slot = i_n
    if "separate" in problem.options:
        slot = T.if_then_else(i_t < targets.shape[1], targets[i_n, i_t, 0], -1)
    elif "pooled" in problem.options:
        slot = T.if_then_else(i_t < slots.shape[1], slots[i_n, i_t, 0], -1)
    if "separate" in problem.options or "pooled" in problem.options:
        if slot <= T.cast(pad_slot_id, "int32"):
            slot = -1  # as of a token for which there is no column
    return slot


@T.macro
def find_snapshot_row(problem, i_n, snapshot_rows):
    """The row of the buffer that a sequence's states go to."""
    row = T.alloc_var("int32")
    row = i_n
    if "placed" in problem.options:
        row = snapshot_rows[i_n, 0]
    return row
