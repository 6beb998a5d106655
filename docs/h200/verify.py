"""Times the verification of four drafts beside one token, in one run: ``python verify.py OUT.json [--tokens 4] ...``.

``fused_recurrent_*`` of 32 sequences and a few tokens of each, HV = H = 32, K = V = 128, as in ``../h100/decode.py``,
whose measure this is: CUDA graphs, a cold L2, medians, us. "in place" writes the state after the last token to its
slot. "nothing written" is ``disable_state_update`` without ``intermediate_states``: the pool is only read, and o is all
that comes back. With ``intermediate_states`` the state after each token goes to a buffer, and nothing to the pool.
"T4 / T1" is "T4, nothing written" over "T1, packed_decode", which updates its states in place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kda_tl
from kda_tl.database.store import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "h100"))
from decode import STATES, Call, K, Step, V, time_us

ROUNDS, REPS = 5, 60


def run(step: Step, *, inplace: bool = False, buffer: torch.Tensor | None = None) -> Any:
    """A call on the step's tensors, which updates the pool in place or does not."""
    q, k, v = step.parts
    call = kda_tl.fused_recurrent_gated_delta_rule if step.scalar else kda_tl.fused_recurrent_kda
    shape = (step.B, step.tokens, step.HV)
    return call(
        q, k, v, g=step.a.view(*shape, *([] if step.scalar else [K])), beta=step.b.view(shape), A_log=step.A_log,
        dt_bias=step.dt_bias, initial_state=step.pool, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, state_v_first=True, inplace_final_state=inplace,
        disable_state_update=not inplace, intermediate_states=buffer, ssm_state_indices=step.indices, pad_slot_id=0,
        out=step.out.view(*shape, V),
    )  # fmt: skip


def compare(B: int, HV: int, tokens: int, dtype: torch.dtype, scalar: bool, flush: torch.Tensor) -> dict[str, Any]:
    """Medians of rounds that take turns, and whether verification leaves the pool and gives what in place gives."""
    one, some = (Step(B, HV, dtype, scalar, t) for t in (1, tokens))
    buffer = torch.empty(B, tokens, HV, V, K, dtype=dtype, device="cuda")
    calls: dict[str, Call] = {
        "T1, packed_decode": one.ours,
        "T1, in place": partial(run, one, inplace=True),
        "T1, nothing written": partial(run, one),
        f"T{tokens}, in place": partial(run, some, inplace=True),
        f"T{tokens}, nothing written": partial(run, some),
        f"T{tokens}, intermediate_states": partial(run, some, buffer=buffer),
    }
    pool = some.pool.clone()
    run(some)
    o, same = some.out.double(), torch.equal(pool, some.pool)
    run(some, inplace=True)
    off = float((some.out.double() - o).norm() / o.norm())
    some.pool.copy_(pool)
    rounds = [{name: time_us(call, flush, REPS) for name, call in calls.items()} for _ in range(ROUNDS)]
    row: dict[str, Any] = {name: round(statistics.median(each[name] for each in rounds), 2) for name in calls}
    row |= {"rounds": rounds, "pool unchanged": same, "o against in place": off}
    ratio = row[f"T{tokens}, nothing written"] / row["T1, packed_decode"]
    return row | {f"T{tokens} / T1": round(ratio, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4, help="of a sequence")
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    tiny = torch.zeros(1, device="cuda")
    found: dict[str, Any] = {
        "about": provenance() | {"gpu": torch.cuda.get_device_name()},
        "smallest kernel": time_us(lambda: tiny.add_(1), flush),
    }
    for operator in ("kda", "gdn"):
        for state, dtype in STATES.items():
            row = compare(args.batch, args.heads, args.tokens, dtype, operator == "gdn", flush)
            found[f"{operator} {state} B{args.batch}"] = row
            print(operator, state, {name: value for name, value in row.items() if name != "rounds"}, flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
