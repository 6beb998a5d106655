"""Profiles the training step of a KDA language model of FLA that runs on kda_tl: what share of it the operator takes.

    FLA_TILELANG=0 python profile_step.py profile_step.json    # needs a GPU, FLA 0.6 and transformers

Four layers of 16 heads with 128 channels, 8192 tokens, bf16 autocast; forward, backward and AdamW. Times are sums over
GPU kernels, means of three steps after three that compile and autotune.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOKENS, VOCABULARY, STEPS = 8192, 8192, 3
MODEL = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_heads": 16,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "fuse_cross_entropy": False,
}
LISTED = 15  # kernels of others that are written down, longest first


def main(file: Path) -> None:
    """Profiles and writes kernels, sums and versions."""
    import fla
    import torch
    from fla.models import KDAConfig, KDAForCausalLM
    from torch.profiler import ProfilerActivity, profile

    import kda_tl.fla
    from kda_tl.db import provenance
    from kda_tl.templates import names

    kda_tl.fla.register()
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**MODEL)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (1, TOKENS), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    times = {e.key: e.device_time_total / STEPS for e in recorded.key_averages() if e.device_time_total > 0}
    ours = {name: us for name, us in times.items() if name.removesuffix("_kernel") in names()}
    if not ours:
        raise SystemExit("no kernel of kda_tl ran: is FLA 0.6 installed, and KDA_TL_FLA not 0?")
    others = sorted(((us, name[:80]) for name, us in times.items() if name not in ours), reverse=True)
    found: dict[str, Any] = {
        "about": {**provenance(), "gpu": torch.cuda.get_device_name(), "fla": fla.__version__, "model": MODEL},
        "tokens": TOKENS,
        "step_us": sum(times.values()),
        "operator_us": sum(ours.values()),
        "operator_share": sum(ours.values()) / sum(times.values()),
        "operator": ours,
        "longest of the others": {name: us for us, name in others[:LISTED]},
    }
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps({name: found[name] for name in ("step_us", "operator_us", "operator_share", "operator")}, indent=1)
    )


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        sys.exit(__doc__)
