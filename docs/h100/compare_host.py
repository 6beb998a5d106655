"""A warm call's host time in two or more checkouts: ``python compare_host.py OUT.json NAME=TREE NAME=TREE ...``.

A process calls ``chunk_kda`` with the packaged plan (T64, 32 heads, bf16, a safe gate, everything in the kernel).
Blocks of 40 calls are timed by turns, so that all trees share a spell of a busy host. A process keeps the addresses
it began with, which move its times by some us: every tree has several processes, and its time is the median of theirs.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PROCESSES, BLOCKS, CALLS = 5, 80, 40

CHILD = f"""
import gc, sys, time
import torch
import kda_tl
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
q, k, v, g = (make(1, 64, 32, 128) for _ in range(4))
beta = make(1, 64, 32)
options = dict(A_log=torch.rand(32, device="cuda"), dt_bias=torch.rand(32 * 128, device="cuda"), safe_gate=True,
               lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
def block():
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range({CALLS}):
        kda_tl.chunk_kda(q, k, v, g, beta, **options)
    return 1e6 * (time.perf_counter() - start) / {CALLS}
for _ in range(10):
    block()
gc.collect()
gc.freeze()
print(kda_tl.__file__, flush=True)
for _ in sys.stdin:
    print(block(), flush=True)
"""


def start(tree: str) -> subprocess.Popen[str]:
    """A process that imports ``kda_tl`` from ``tree``."""
    path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
    child = [sys.executable, "-c", CHILD]
    return subprocess.Popen(
        child, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def race(trees: dict[str, str]) -> dict[str, list[float]]:
    """Times of ``BLOCKS`` blocks of one process of every tree, us a call."""
    children = {name: start(tree) for name, tree in trees.items()}
    for name, child in children.items():
        file = child.stdout.readline().strip()
        if not file.startswith(trees[name]):
            sys.exit(f"{name} imported {file or 'nothing'}, not {trees[name]}")
    samples: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(BLOCKS):
        for name in sorted(trees, key=lambda name: (list(trees).index(name) + turn) % len(trees)):
            children[name].stdin.write("\n")
            children[name].stdin.flush()
            samples[name].append(float(children[name].stdout.readline()))
    for child in children.values():
        child.stdin.close()
        child.wait()
    return samples


def main() -> None:
    out, trees = Path(sys.argv[1]), dict(argument.split("=", 1) for argument in sys.argv[2:])
    races = [race(trees) for _ in range(PROCESSES)]
    import torch

    results = {}
    for name in trees:
        medians = sorted(statistics.median(samples[name]) for samples in races)
        least = sorted(min(samples[name]) for samples in races)
        results[name] = {"median": statistics.median(medians), "medians": medians, "least": least}
        print(f"{name:14} median {results[name]['median']:5.1f}  of processes", *(f"{x:5.1f}" for x in medians), end="")
        print("  least", *(f"{x:5.1f}" for x in least))
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
    sizes = {"processes": PROCESSES, "blocks": BLOCKS, "calls": CALLS}
    out.write_text(json.dumps(where | sizes | {"us": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
