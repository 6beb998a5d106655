"""Trains a small language model of FLA's layers with its own kernels and with ours, and plots the loss curves.

    FLA_TILELANG=0 python train_curve.py train train_curve.json    # needs a GPU, FLA 0.6 and transformers
    python train_curve.py train train_gdn.json --operator chunk_gated_delta_rule    # no transformers
    python train_curve.py plot train_curve.json train_curve.png    # needs matplotlib

For ``chunk_kda``, the default, it is FLA's KDA language model; for ``chunk_gated_delta_rule`` layers of Gated DeltaNet
as FLA makes them unless told otherwise, K = 256 and V = 512, in a stack of our own.

The data is made on the spot: half of the tokens follow from the one before, by a permutation; three in ten repeat the
one 16 before; the others are random, so that the model first learns pairs, then to look back.
On the same batches, FLA and FLA's model with ``kda_tl.fla.register()`` each train from the same sets of weights: one as
initialised, the others disturbed by 2^-9 of their size, one rounding to bf16. Kernels that round differently cannot
agree better than that, so FLA's own curves show how far apart two right runs are.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS, VOCABULARY = 512, 64
BACK = 16  # tokens between a token and its copy
OPERATORS = ("FLA", "kda_tl")
WARMING = 3  # steps before all others: they compile and autotune
SMOOTHED = 10  # steps
LAST = 20  # steps over which a run's final loss is averaged


@dataclass(frozen=True)
class Task:
    """What is trained: a model, and how long."""

    operator: str
    title: str
    make: Callable[[dict[str, Any]], Any]  # from ``model``: a module, and what makes logits of it and of tokens
    model: dict[str, Any]
    steps: int
    batch: int
    sets: int  # of weights each operator starts from

    @property
    def layers(self) -> int:
        return int(self.model["num_hidden_layers"])


def make_kda(model: dict[str, Any]) -> Any:
    """FLA's language model."""
    from fla.models import KDAConfig, KDAForCausalLM

    module = KDAForCausalLM(KDAConfig(**model))
    return module, lambda tokens: module(input_ids=tokens, use_cache=False).logits


def make_gdn(model: dict[str, Any]) -> Any:
    """FLA's layers, each before a small perceptron, between an embedding and a projection."""
    from torch import nn

    layer, width = import_gdn_layer(), model["hidden_size"]

    class Block(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
            self.mixer = layer(hidden_size=width, num_heads=model["num_heads"], layer_idx=n)
            inner = model["hidden_ratio"] * width
            self.perceptron = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))

        def forward(self, x: Any) -> Any:
            x = x + self.mixer(self.before(x))[0]
            return x + self.perceptron(self.between(x))

    blocks = [Block(n) for n in range(model["num_hidden_layers"])]
    head = nn.Linear(width, VOCABULARY, bias=False)
    module = nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.RMSNorm(width, eps=1e-6), head)
    return module, module


def import_gdn_layer() -> Any:
    """``fla.layers.GatedDeltaNet``: the package of all layers wants transformers, which this one's module does not."""
    import fla

    try:
        importlib.import_module("fla.layers")
    except ModuleNotFoundError:
        package = types.ModuleType("fla.layers")
        package.__path__ = [f"{path}/layers" for path in fla.__path__]
        sys.modules["fla.layers"] = package
    return importlib.import_module("fla.layers.gated_deltanet").GatedDeltaNet


_SHARED = {"hidden_size": 256, "hidden_ratio": 2, "vocab_size": VOCABULARY}
TASKS = {
    task.operator: task
    for task in (
        Task(
            operator="chunk_kda",
            title="KDA language model of FLA",
            make=make_kda,
            model={
                **_SHARED,
                "num_hidden_layers": 4,
                "num_heads": 4,
                "head_dim": 64,
                "fuse_cross_entropy": False,
            },
            steps=200,
            batch=16,
            sets=6,
        ),
        Task(
            operator="chunk_gated_delta_rule",
            title="Gated DeltaNet layers of FLA",
            make=make_gdn,
            model={**_SHARED, "num_hidden_layers": 2, "num_heads": 2},
            steps=300,
            batch=8,
            sets=3,
        ),
    )
}


def train_all(task: Task, file: Path) -> None:
    """Runs everything and writes losses, versions and differences."""
    shorten_autotuning()
    import fla
    import torch

    import kda_tl
    from kda_tl.database.store import provenance

    kda_tl.fla.register()
    for operator in OPERATORS:
        start = time.perf_counter()
        train(task, operator, 0, WARMING)
        print(f"{operator}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    losses: dict[str, list[list[float]]] = {operator: [] for operator in OPERATORS}
    for weights in range(task.sets):
        for operator in OPERATORS:
            start = time.perf_counter()
            losses[operator].append(train(task, operator, weights, task.steps))
            first, last = losses[operator][-1][0], losses[operator][-1][-1]
            print(f"{operator} {weights}: {first:.4f} -> {last:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    about = {**provenance(), "gpu": torch.cuda.get_device_name(), "fla": fla.__version__}
    sizes = {"steps": task.steps, "batch": task.batch, "tokens": TOKENS, "model": task.model, "smoothed": SMOOTHED}
    about["settings"] = {"operator": task.operator, **sizes}
    about["found"] = compare(losses)
    report = {"about": about, "losses": losses, "mean of kda_tl less that of FLA": differences(losses)}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(about["found"], indent=1))


def shorten_autotuning() -> None:
    """Two configs a kernel of FLA instead of up to a hundred: speed is not what is compared here."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_short(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        make(self, fn, arg_names, configs[:2], *rest, **named)

    Autotuner.__init__ = make_short


def train(task: Task, operator: str, weights: int, steps: int) -> list[float]:
    """Losses of so many steps from the given set of weights."""
    import torch

    import kda_tl.fla

    os.environ["KDA_TL_FLA"] = "1" if operator == "kda_tl" else "0"
    served = count_calls(kda_tl.fla)
    torch.manual_seed(0)
    model, find_logits = task.make(task.model)
    model.cuda()
    torch.manual_seed(weights)
    if weights:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 2**-9 * torch.randn_like(weight))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    batches = draw_batches(task)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        tokens = batches[step]
        with torch.autocast("cuda", torch.bfloat16):
            logits = find_logits(tokens)
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    expected = steps * task.layers if operator == "kda_tl" else 0
    if served.calls != expected:
        raise SystemExit(f"{operator}: kda_tl served {served.calls} calls, expected {expected}")
    return torch.stack(losses).tolist()


def draw_batches(task: Task) -> Any:
    """Tokens of all steps: [steps, batch, TOKENS]."""
    import torch

    rng = torch.Generator(device="cuda").manual_seed(1)
    successor = torch.randperm(VOCABULARY, generator=rng, device="cuda")
    tokens = torch.randint(VOCABULARY, (task.steps, task.batch, TOKENS), generator=rng, device="cuda")
    kind = torch.rand(tokens.shape, generator=rng, device="cuda")
    for t in range(BACK, TOKENS):
        follows = torch.where(kind[..., t] < 0.8, tokens[..., t - BACK], tokens[..., t])
        tokens[..., t] = torch.where(kind[..., t] < 0.5, successor[tokens[..., t - 1]], follows)
    return tokens


def count_calls(module: Any) -> Any:
    """Counts the calls of FLA that reach us."""
    serve = getattr(module._serve, "serve", module._serve)

    def counted(*arguments: Any) -> Any:
        counted.calls += 1
        return serve(*arguments)

    counted.calls, counted.serve = 0, serve
    module._serve = counted
    return counted


def smooth(losses: list[float]) -> list[float]:
    """Means over the last steps."""
    return [sum(losses[max(0, n - SMOOTHED + 1) : n + 1]) / min(n + 1, SMOOTHED) for n in range(len(losses))]


def compare(losses: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Worst distances of smoothed curves, among FLA's runs and between ours and FLA's, and the final losses.

    If operators made no difference, half of all splits of the curves would be farther apart than FLA's from ours.
    """
    fla, ours = ([smooth(run) for run in losses[operator]] for operator in OPERATORS)
    among = [distance(one, other) for n, one in enumerate(fla) for other in fla[:n]]
    between = [distance(one, other) for one in ours for other in fla]
    final = {operator: [sum(run[-LAST:]) / LAST for run in losses[operator]] for operator in OPERATORS}
    curves = fla + ours
    apart = [[distance(one, other) for other in curves] for one in curves]
    splits = [mean_between(apart, half) for half in itertools.combinations(range(len(curves)), len(fla))]
    found = mean_between(apart, range(len(fla)))
    return {
        "worst distance among FLA's runs": {"median": statistics.median(among), "largest": max(among)},
        "worst distance between ours and FLA's": {"median": statistics.median(between), "largest": max(between)},
        "share of all splits of the curves in two halves that are at least as far apart": statistics.mean(
            split >= found for split in splits
        ),
        "final loss": {
            name: {"mean": statistics.mean(x), "deviation": statistics.stdev(x)} for name, x in final.items()
        },
    }


def differences(losses: dict[str, list[list[float]]]) -> list[float]:
    """Of the means over the runs, by step."""
    fla, ours = ([statistics.fmean(step) for step in zip(*losses[operator], strict=True)] for operator in OPERATORS)
    return [round(b - a, 6) for a, b in zip(fla, ours, strict=True)]


def mean_between(apart: list[list[float]], half: Sequence[int]) -> float:
    """Mean distance of curves of one half from those of the other."""
    others = [n for n in range(len(apart)) if n not in half]
    return statistics.fmean(apart[a][b] for a in half for b in others)


def distance(one: list[float], other: list[float]) -> float:
    """How far apart two curves are where they are farthest apart."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def plot(file: Path, image: Path) -> None:
    """Draws the curves above, and below their distances from the mean of FLA's runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = json.loads(file.read_text(encoding="utf-8"))
    losses, about = found["losses"], found["about"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1), layout="constrained")
    middle = [statistics.mean(values) for values in zip(*map(smooth, losses["FLA"]), strict=True)]
    for operator, color, line in zip(OPERATORS, ("C0", "C3"), ("-", "--"), strict=True):
        for n, run in enumerate(losses[operator]):
            label = f"{operator}, {len(losses[operator])} runs" if n == 0 else None
            top.plot(run, color=color, linestyle=line, linewidth=0.8, label=label)
            apart = [a - b for a, b in zip(smooth(run), middle, strict=True)]
            bottom.plot(apart, color=color, linestyle=line, linewidth=0.8)
    top.set_ylabel("loss (nats a token)")
    top.legend()
    title = TASKS[about["settings"].get("operator", "chunk_kda")].title
    top.set_title(f"{title} {about['fla']}, {about['gpu']}, {about['date'][:10]}")
    bottom.set_ylabel(f"loss less the mean of FLA's,\nmeans over {SMOOTHED} steps")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    top.grid(alpha=0.3)
    figure.savefig(image, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="run everything, write losses")
    training.add_argument("file", type=Path)
    training.add_argument("--operator", choices=tuple(TASKS), default="chunk_kda")
    plotting = commands.add_parser("plot", help="draw what was written")
    plotting.add_argument("file", type=Path)
    plotting.add_argument("image", type=Path)
    args = parser.parse_args()
    if args.command == "train":
        train_all(TASKS[args.operator], args.file)
    else:
        plot(args.file, args.image)


if __name__ == "__main__":
    main()
