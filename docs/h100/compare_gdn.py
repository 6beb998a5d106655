"""Times Gated DeltaNet's pipelines beside each other: ``python compare_gdn.py OUT.json [--peers FLA ...]``.

A part alone: ``--only train``, ``--rows 0 2`` or ``--rows 16/64-2048x4`` (H / HV, tokens x batch), of these or of any
other shape. Gates of a token are log sigmoid(x), x normal, times a factor of ``--gates``; ``layer`` are those that
layers of Gated DeltaNet begin with, -A softplus(x + b), A from 0 to 16 and softplus(b) from .001 to .1, a head each.

FlashQLA's inputs: normalised q and k, a log gate in fp32, initial and final state, K = V = 128, bf16. With ``--norms``
q and k are normalised by the call instead (use_qk_l2norm_in_kernel). CUDA graphs, a cold L2, medians of 20 replays. A
training step is the forward and all gradients; its forward is timed alone too.
FlashInfer has a forward only.
MiB: memory at a call's peak.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import os
import platform
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilelang
import torch

import kda_tl
from kda_tl.core.device import current_device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Plan
from kda_tl.reference import relative_error
from kda_tl.runtime.defaults import pipeline_defaults
from kda_tl.templates.pipelines import PIPELINES as ALL

ROWS = ((32, 32, 8192, 1), (16, 32, 8192, 1), (16, 64, 8192, 1), (2, 8, 32768, 1), (16, 64, 2048, 4), (16, 64, 1024, 8))
TRAINED = ((32, 32, 8192, 1), (16, 32, 8192, 1), (16, 32, 32768, 1), (4, 8, 32768, 1))
PAIRS = {"A", "Aqk", "powers"}
PEERS = ("FLA", "FlashQLA", "FlashInfer")
SHAPES = {"fwd": ROWS, "train": TRAINED}
PIPELINES = {
    "fwd": (
        "gdn_attend",
        "gdn_pairs",
        *(f"gdn_pairs_segments_{n}" for n in (4, 8, 16)),
        "gdn_recurrence",
        "gdn_segments_4",
        "gdn_segments_8",
        "staged",
    ),
    "bwd": (
        *(f"gdn_walk_segments_{n}" for n in (2, 4, 8, 16)),
        "gdn_scan",
        "gdn_scan_segments_4",
        "gdn_scan_segments_8",
        "staged_backward",
    ),
}


Shape = tuple[int, int, int, int]


def choose(only: str | None, rows: list[str] | None) -> dict[str, tuple[Shape, ...]]:
    """The shapes to time of each part; of some rows only, given by their place in a part or by their names.

    Raises ValueError for a row that no part has.
    """
    parts = {part: shapes for part, shapes in SHAPES.items() if only in (None, part)}
    if rows is None:
        return parts
    named: list[Shape] = []
    for row in rows:
        if found := re.fullmatch(r"(\d+)/(\d+)-(\d+)x(\d+)", row):
            H, HV, tokens, batch = map(int, found.groups())
            named.append((H, HV, tokens, batch))
        elif not any(row in map(str, range(len(shapes))) for shapes in parts.values()):
            raise ValueError(f"there is no row {row}: give an index, or a name such as 16/64-2048x4")
    places = [int(row) for row in rows if row.isdigit()]
    return {part: (*(shapes[n] for n in places if n < len(shapes)), *named) for part, shapes in parts.items()}


def plan_of(shape: Shape, direction: str, pipeline: str, norms: bool) -> Plan:
    """The default of a pipeline for a shape."""
    H, HV, tokens, batch = shape
    given = {"scalar_gate": True, "gate": "log", "g_dtype": "fp32", "initial_state": True, "final_state": True}
    given |= {"operator": "chunk_gated_delta_rule", "direction": direction, "l2norm": norms}
    lengths = {"tokens": tokens * batch, "sequences": batch, "longest": tokens}
    problem = Problem(H=H, HV=HV, K=128, V=128, **lengths, **given)
    return pipeline_defaults(pipeline, Case(problem=problem, device=current_device(), BT=64, BC=16))


def draw(
    H: int,
    HV: int,
    tokens: int,
    batch: int,
    gates: str = "1",
    seed: int = 1,
    device: str = "cuda",
    normalised: bool = True,
) -> list[torch.Tensor]:
    """q, k, v, g, beta and the initial state."""
    rng = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    q, k = (normal(batch, tokens, H, 128) for _ in range(2))
    if normalised:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    q, k = q.bfloat16(), k.bfloat16()
    v = normal(batch, tokens, HV, 128).bfloat16()
    g = normal(batch, tokens, HV)
    if gates == "layer":
        A, dt = (torch.rand(HV, generator=rng, device=device) for _ in range(2))
        dt = 1e-3 * 100**dt
        g = -16 * A * torch.nn.functional.softplus(g + dt + torch.log(-torch.expm1(-dt)))
    else:
        g = float(gates) * torch.nn.functional.logsigmoid(g)
    return [q, k, v, g, normal(batch, tokens, HV).sigmoid().bfloat16(), 0.1 * normal(batch, HV, 128, 128)]


def time_us(function: Callable[[], Any], flush: torch.Tensor) -> int:
    """Median of replays of a CUDA graph, each after the L2 was overwritten."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(1000 * statistics.median(start.elapsed_time(end) for start, end in pairs))


def peak_mib(function: Callable[[], Any]) -> int:
    """Memory that a call takes at its peak, what it returns included."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def load_peer(name: str) -> Callable[..., Any]:
    """The operator of another library."""
    if name == "FlashInfer":
        from flashinfer.gdn_prefill import chunk_gated_delta_rule
    elif name == "FlashQLA":
        from flash_qla import chunk_gated_delta_rule
    else:
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # its own kernels, not ours or FlashQLA's through it
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    return chunk_gated_delta_rule


def bind_flashinfer(
    operator: Callable[..., Any], x: list[torch.Tensor], norms: bool
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call of FlashInfer's forward: tokens in a row, gates as factors, states [V, K]; made so before, not in it."""
    batch, tokens, HV, _ = x[2].shape
    q, k, v, g, beta = (y.flatten(0, 1).contiguous() for y in x[:5])
    factors, steps, h0 = g.exp(), beta.float(), x[5].mT.contiguous()
    bounds = torch.arange(0, batch * tokens + 1, tokens, device=q.device)

    def run() -> tuple[torch.Tensor, ...]:
        ht = torch.empty_like(h0)
        options = {"initial_state": h0, "output_final_state": True, "output_state": ht, "max_seqlen": tokens}
        options["use_qk_l2norm_in_kernel"] = norms
        o, ht = operator(q, k, v, factors, steps, cu_seqlens=bounds, **options)
        return o.view(batch, tokens, HV, -1), ht.mT

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[], help="they compile for minutes")
    parser.add_argument("--only", choices=tuple(SHAPES), help="one part instead of both")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="these rows of each part: indices from 0, or names")
    parser.add_argument("--gates", nargs="+", default=["1"], help="factors, or layer")
    parser.add_argument("--norms", action="store_true", help="q and k are normalised by the call")
    parser.add_argument("--pipelines", nargs="+", help="these alone; results are compared with the last one's")
    args = parser.parse_args()
    try:
        chosen = choose(args.only, args.rows)
    except ValueError as error:
        parser.error(str(error))
    ours, peers = kda_tl.chunk_gated_delta_rule, {name: load_peer(name) for name in args.peers}
    versions = {"torch": torch.__version__, "tilelang": tilelang.__version__, "python": platform.python_version()}
    gpu, today = torch.cuda.get_device_name(), str(datetime.date.today())
    report: dict[str, Any] = {"gpu": gpu, **versions, "date": today, "about": __doc__, "norms": args.norms}
    report |= {"fwd": [], "train": []}
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for direction, shapes in chosen.items():
        for (H, HV, tokens, batch), gates in itertools.product(shapes, args.gates):
            x = draw(H, HV, tokens, batch, gates, normalised=not args.norms)
            leaves = [y.requires_grad_(direction == "train") for y in x]
            seeds = [torch.randn_like(x[2]), 0.1 * torch.randn_like(x[5])]

            def call(operator: Callable[..., Any], x: list[Any] = x, **flags: Any) -> Any:
                flags["use_qk_l2norm_in_kernel"] = args.norms
                return operator(*x[:5], initial_state=x[5], output_final_state=True, **flags)

            def forward(operator: Callable[..., Any], leaves: list[Any] = leaves) -> Any:
                return call(operator, leaves)

            def step(
                operator: Callable[..., Any], leaves: list[Any] = leaves, seeds: list[Any] = seeds, **flags: Any
            ) -> Any:
                return torch.autograd.grad(list(call(operator, leaves, **flags)), leaves, seeds)

            run = call if direction == "fwd" else step
            row: dict[str, Any] = {"H": H, "HV": HV, "tokens": tokens, "batch": batch, "gates": gates}
            found = {}
            for name in PIPELINES["fwd" if direction == "fwd" else "bwd"]:
                if args.pipelines and name not in args.pipelines:
                    continue
                shape = (H, HV, tokens, batch)
                plan = plan_of(shape, "fwd" if direction == "fwd" else "bwd", name, args.norms)
                with kda_tl.pin(plan):
                    found[name] = [y.double() for y in run(ours)]
                    row[name] = time_us(lambda run=run: run(ours), flush)
                    row[f"{name} MiB"] = peak_mib(lambda run=run: run(ours))
                    if direction == "train" and set(ALL[name].residuals) >= PAIRS:  # what chunks do alone is kept
                        row[f"{name} kept"] = time_us(lambda run=run: run(ours, disable_recompute=True), flush)
            row["kda_tl"] = time_us(lambda run=run: run(ours), flush)  # what dispatch chooses
            row["kda_tl MiB"] = peak_mib(lambda run=run: run(ours))
            others = {name: peer for name, peer in peers.items() if direction == "fwd" or name != "FlashInfer"}
            first, staged = list(found.values())[0], list(found.values())[-1]
            if direction == "train":  # a step less its forward is the backward
                for name, operator in {"kda_tl": ours, **others}.items():
                    row[f"forward, {name}"] = time_us(
                        lambda operator=operator, forward=forward: forward(operator), flush
                    )
            row["difference"] = max(relative_error(a, b) for a, b in zip(first, staged, strict=True))
            for name, peer in others.items():
                launch = bind_flashinfer(peer, x, args.norms) if name == "FlashInfer" else functools.partial(run, peer)
                try:
                    row[name] = time_us(launch, flush)
                except Exception as error:  # peers raise what they like; the other rows are wanted all the same
                    row[f"{name} failed"] = f"{type(error).__name__}: {error}"
                    continue
                row[f"{name} MiB"] = peak_mib(launch)
                row[f"{name} differs"] = max(
                    relative_error(a.double(), b) for a, b in zip(launch(), staged, strict=True)
                )
            report[direction].append(row)
            print(row, flush=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
