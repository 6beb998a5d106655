"""Trains a small KDA language model of FLA with its own kernels and with ours, and plots the loss curves.

    FLA_TILELANG=0 python train_curve.py train train_curve.json    # needs a GPU, FLA 0.6 and transformers
    python train_curve.py plot train_curve.json train_curve.png    # needs matplotlib

The data is made on the spot: half of the tokens follow from the one before, by a permutation; three in ten repeat the
one 16 before; the others are random, so that the model first learns pairs, then to look back.
On the same batches, FLA and FLA's model with ``kda_tl.fla.register()`` each train from the same sets of weights: one as
initialised, the others disturbed by 2^-9 of their size, one rounding to bf16. Kernels that round differently cannot
agree better than that, so FLA's own curves show how far apart two right runs are.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STEPS, BATCH, TOKENS, VOCABULARY = 200, 16, 512, 64
BACK = 16  # tokens between a token and its copy
MODEL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_heads": 4,
    "head_dim": 64,
    "hidden_ratio": 2,
    "vocab_size": VOCABULARY,
    "fuse_cross_entropy": False,
}
OPERATORS = ("FLA", "kda_tl")
WEIGHTS = 6  # sets of weights each operator starts from
SMOOTHED = 10  # steps
LAST = 20  # steps over which a run's final loss is averaged


def train_all(file: Path) -> None:
    """Runs everything and writes losses, versions and differences."""
    shorten_autotuning()
    import fla
    import torch

    import kda_tl
    from kda_tl.database.store import provenance

    kda_tl.fla.register()
    train("FLA", 0)  # compiles and autotunes
    losses: dict[str, list[list[float]]] = {operator: [] for operator in OPERATORS}
    for weights in range(WEIGHTS):
        for operator in OPERATORS:
            start = time.perf_counter()
            losses[operator].append(train(operator, weights))
            first, last = losses[operator][-1][0], losses[operator][-1][-1]
            print(f"{operator} {weights}: {first:.4f} -> {last:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    about = {**provenance(), "gpu": torch.cuda.get_device_name(), "fla": fla.__version__}
    about["settings"] = {"steps": STEPS, "batch": BATCH, "tokens": TOKENS, "model": MODEL, "smoothed": SMOOTHED}
    about["found"] = compare(losses)
    file.write_text(json.dumps({"about": about, "losses": losses}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(about["found"], indent=1))


def shorten_autotuning() -> None:
    """Two configs a kernel of FLA instead of up to a hundred: speed is not what is compared here."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_short(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        make(self, fn, arg_names, configs[:2], *rest, **named)

    Autotuner.__init__ = make_short


def train(operator: str, weights: int) -> list[float]:
    """Losses of all steps from the given set of weights."""
    import torch
    from fla.models import KDAConfig, KDAForCausalLM

    import kda_tl.fla

    os.environ["KDA_TL_FLA"] = "1" if operator == "kda_tl" else "0"
    served = count_calls(kda_tl.fla)
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**MODEL)).cuda()
    torch.manual_seed(weights)
    if weights:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + 2**-9 * torch.randn_like(weight))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    batches = draw_batches()
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        tokens = batches[step]
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    expected = STEPS * MODEL["num_hidden_layers"] if operator == "kda_tl" else 0
    if served.calls != expected:
        raise SystemExit(f"{operator}: kda_tl served {served.calls} calls, expected {expected}")
    return torch.stack(losses).tolist()


def draw_batches() -> Any:
    """Tokens of all steps: [STEPS, BATCH, TOKENS]."""
    import torch

    rng = torch.Generator(device="cuda").manual_seed(1)
    successor = torch.randperm(VOCABULARY, generator=rng, device="cuda")
    tokens = torch.randint(VOCABULARY, (STEPS, BATCH, TOKENS), generator=rng, device="cuda")
    kind = torch.rand(tokens.shape, generator=rng, device="cuda")
    for t in range(BACK, TOKENS):
        follows = torch.where(kind[..., t] < 0.8, tokens[..., t - BACK], tokens[..., t])
        tokens[..., t] = torch.where(kind[..., t] < 0.5, successor[tokens[..., t - 1]], follows)
    return tokens


def count_calls(module: Any) -> Any:
    """Counts the calls of FLA that reach us."""
    serve = getattr(module.chunk_kda, "serve", module.chunk_kda)

    def counted(**arguments: Any) -> Any:
        counted.calls += 1
        return serve(**arguments)

    counted.calls, counted.serve = 0, serve
    module.chunk_kda = counted
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
    top.set_title(f"KDA language model of FLA {about['fla']}, {about['gpu']}, {about['date'][:10]}")
    bottom.set_ylabel(f"loss less the mean of FLA's,\nmeans over {SMOOTHED} steps")
    bottom.set_xlabel("step")
    bottom.grid(alpha=0.3)
    top.grid(alpha=0.3)
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "train":
        train_all(Path(sys.argv[2]))
    elif len(sys.argv) == 4 and sys.argv[1] == "plot":
        plot(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(__doc__)
