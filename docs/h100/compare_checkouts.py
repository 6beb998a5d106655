"""Two or more checkouts beside each other: ``python compare_checkouts.py host OUT.json NAME=TREE NAME=TREE ...``.

``host``: a warm call's host time, of ``chunk_kda`` with the packaged plan (T64, 32 heads, bf16, a safe gate, everything
in the kernel). ``8192:64`` in its place: the time on the GPU, as a CUDA graph with a cold L2, of as many tokens and
heads. Blocks of calls are timed by turns, so that all trees share a spell of a busy host or a warm card. A process
keeps the addresses it began with, which move its times: every tree has several, and its time is the median of theirs.
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
what = sys.argv[1]
tokens, heads = (64, 32) if what == "host" else map(int, what.split(":"))
make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
q, k, v, g = (make(1, tokens, heads, 128) for _ in range(4))
beta = make(1, tokens, heads)
options = dict(A_log=torch.rand(heads, device="cuda"), dt_bias=torch.rand(heads * 128, device="cuda"), safe_gate=True,
               lower_bound=-5.0, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
call = lambda: kda_tl.chunk_kda(q, k, v, g, beta, **options)
def host_block():
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range({CALLS}):
        call()
    return 1e6 * (time.perf_counter() - start) / {CALLS}
def gpu_block():
    times = []
    for _ in range({CALLS} // 4):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]
block = host_block
call()
if what != "host":
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    graph, block = torch.cuda.CUDAGraph(), gpu_block
    with torch.cuda.graph(graph):
        call()
for _ in range(10):
    block()
gc.collect()
gc.freeze()
print(kda_tl.__file__, flush=True)
for _ in sys.stdin:
    print(block(), flush=True)
"""


def start(what: str, tree: str) -> subprocess.Popen[str]:
    """A process that imports ``kda_tl`` from ``tree``."""
    path = os.pathsep.join(filter(None, (tree, os.environ.get("PYTHONPATH"))))
    child = [sys.executable, "-c", CHILD, what]
    return subprocess.Popen(
        child, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def race(what: str, trees: dict[str, str]) -> dict[str, list[float]]:
    """Times of ``BLOCKS`` blocks of one process of every tree, us a call."""
    children = {name: start(what, tree) for name, tree in trees.items()}
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
    what, out, trees = sys.argv[1], Path(sys.argv[2]), dict(argument.split("=", 1) for argument in sys.argv[3:])
    races = [race(what, trees) for _ in range(PROCESSES)]
    import torch

    results = {}
    for name in trees:
        medians = sorted(statistics.median(samples[name]) for samples in races)
        least = sorted(min(samples[name]) for samples in races)
        results[name] = {"median": statistics.median(medians), "medians": medians, "least": least}
        print(f"{name:14} median {results[name]['median']:6.1f}  of processes", *(f"{x:6.1f}" for x in medians), end="")
        print("  least", *(f"{x:6.1f}" for x in least))
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": str(datetime.date.today())}
    sizes = {"what": what, "processes": PROCESSES, "blocks": BLOCKS, "calls": CALLS}
    out.write_text(json.dumps(where | sizes | {"us": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
