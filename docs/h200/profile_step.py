"""Where the time of a KDA model's training step goes: FLA's language model with its own operator and with ours.

    FLA_TILELANG=0 python profile_step.py profile_step.json    # needs a GPU, FLA 0.6 and transformers

A step is forward, loss and backward under bf16 autocast, without the optimizer. "step" is the median of whole steps by
events, "busy" what all kernels of one take by the profiler; ours are counted by the names of their templates.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

TOKENS, VOCABULARY = 8192, 32000
MODEL = {"hidden_size": 2048, "num_hidden_layers": 4, "num_heads": 16, "head_dim": 128, "vocab_size": VOCABULARY}
OPERATORS = ("kda_tl", "FLA")
WARM, TIMED, PROFILED = 3, 7, 3


def main(file: Path) -> None:
    """Measures both operators and writes what it found."""
    import fla
    import torch
    from fla.models import KDAConfig, KDAForCausalLM

    import kda_tl
    from kda_tl.database.store import provenance

    kda_tl.fla.register()
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**MODEL)).cuda()
    tokens = torch.randint(VOCABULARY, (1, TOKENS), device="cuda")
    about = {**provenance(), "gpu": torch.cuda.get_device_name(), "fla": fla.__version__, "model": MODEL}
    found: dict[str, Any] = {}
    results = {"about": about, "tokens": TOKENS, "found": found}
    for operator in OPERATORS:  # FLA's autotuning takes minutes: what came before it is kept
        os.environ["KDA_TL_FLA"] = "1" if operator == "kda_tl" else "0"
        found[operator] = measure(model, tokens)
        print(operator, json.dumps(found[operator]), flush=True)
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(model: Any, tokens: Any) -> dict[str, Any]:
    """Milliseconds of a step, of its kernels and of ours among them, the share of ours, and the memory it peaks at."""
    import torch

    from kda_tl import templates

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        model.zero_grad(set_to_none=True)
        loss.backward()

    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in profile.events():
        kernels[event.name] = kernels.get(event.name, 0.0) + event.device_time / 1e3 / PROFILED
    ours = {name: kernels[f"{name}_kernel"] for name in templates.names() if f"{name}_kernel" in kernels}
    busy = sum(kernels.values())
    largest = dict(sorted(kernels.items(), key=lambda item: -item[1])[:12])
    return {
        "step_ms": round(statistics.median(times), 3),
        "busy_ms": round(busy, 3),
        "ours_ms": round(sum(ours.values()), 3),
        "share_of_busy": round(sum(ours.values()) / busy, 4),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "ours": {name: round(ms, 4) for name, ms in ours.items()},
        "largest": {name[:80]: round(ms, 4) for name, ms in largest.items()},
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
