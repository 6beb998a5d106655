"""Errors of kda_tl and its peers against the float64 recurrence, on the same tensors, for three gates.

    FLA_TILELANG=0 python accuracy.py accuracy.json    # needs a GPU, and the peers that shall be compared

Relative errors: norm of the difference over norm. Medians of SEEDS draws of every workload, cut to TOKENS tokens.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from kda_tl.bench.workloads import Workload, select
from kda_tl.cli._peers import find_peers, find_versions
from kda_tl.database.store import provenance
from kda_tl.ops.kda import chunk_kda
from kda_tl.reference import recurrent_kda, relative_error

WORKLOADS = ("safe-T8192-H32", "slow-T8192-H32", "softplus-T8192-H32")
TOKENS, SEEDS = 4096, 3


def measure(workload: Workload, where: torch.device) -> dict[str, dict[str, float]]:
    """Errors of o and of the final state by implementation."""
    operators: dict[str, Any] = {"kda_tl": lambda inputs: chunk_kda(**inputs), **find_peers(workload, where)[0]}
    found: dict[str, dict[str, list[float]]] = {name: {"o": [], "ht": []} for name in operators}
    for seed in range(SEEDS):
        inputs = workload.inputs(where, seed)
        truth = recurrent_kda(**workload.declaration.recurrence(workload.declaration.bind(**inputs)))
        for name, operator in operators.items():
            for tensor, result, right in zip(("o", "ht"), operator(inputs), truth, strict=True):
                same = right.mT if name == "cudnn" and tensor == "ht" else right  # its states are [V, K]
                found[name][tensor].append(relative_error(result.view(same.shape), same))
    return {name: {x: statistics.median(all_) for x, all_ in errors.items()} for name, errors in found.items()}


def main(file: Path) -> None:
    """Prints a table, and writes it with versions."""
    where, errors = torch.device("cuda", 0), {}
    with torch.no_grad():
        for workload in select(WORKLOADS):
            cut = dataclasses.replace(workload, name=f"{workload.name}-cut", T=TOKENS, tags=())
            errors[workload.name] = measure(cut, where)
            for name, row in errors[workload.name].items():
                print(workload.name, name, *(f"{tensor} {error:.2e}" for tensor, error in row.items()), flush=True)
    about = {**provenance(), **find_versions(), "gpu": torch.cuda.get_device_name(), "tokens": TOKENS, "seeds": SEEDS}
    file.write_text(json.dumps({"about": about, "errors": errors}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
