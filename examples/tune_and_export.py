"""Tune a shape of your own into a database of your own, run with it, and export it for others.

    python examples/tune_and_export.py

The script searches plans on the GPU of this machine, or on its CPU, for one shape. Then it prints which plan a call
runs with the new database, calls the operator, and prints the files that it exported. The two folders are made in
the current directory: `my_plans` holds the database and the trials, `export` only what others need.
The same steps in a shell are `kda-tl tune --db my_plans ...` and `kda-tl db export export --from my_plans`.
"""

import sys

import torch

import kda_tl
from kda_tl.cli import main as kda_tl_command

ON_GPU = torch.cuda.is_available()
DEVICE, GPU = ("cuda", "auto") if ON_GPU else ("cpu", "cpu")
TOKENS, HEADS, DIM, DTYPE = (8192, 24, 128, "bf16") if ON_GPU else (64, 1, 32, "fp32")
TIMEOUT_S, BUDGET = (60, 20) if ON_GPU else (10, 1)  # let both grow for the fastest plans
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32}[DTYPE]
DONE, NOTHING_BETTER = 0, 5  # exit codes of `kda-tl tune`; 5: the default plan is the fastest, and is stored


def run_command(*words: str, accept: tuple[int, ...] = (DONE,)) -> None:
    """Runs one command of kda-tl in this process."""
    print("$ kda-tl", *words, flush=True)
    code = kda_tl_command(words)
    if code not in accept:
        sys.exit(code)


def main() -> None:
    shape = ["--heads", str(HEADS), "--tokens", str(TOKENS), "--K", str(DIM), "--V", str(DIM), "--dtype", DTYPE]
    limits = ["--timeout", str(TIMEOUT_S), "--budget", str(BUDGET)]
    run_command("tune", "--gpu", GPU, *shape, *limits, "--db", "my_plans", accept=(DONE, NOTHING_BETTER))

    q, k, v, g = torch.randn(4, 1, TOKENS, HEADS, DIM, device=DEVICE, dtype=TORCH_DTYPE)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": torch.randn(1, TOKENS, HEADS, device=DEVICE, dtype=TORCH_DTYPE),
        "A_log": torch.zeros(HEADS, device=DEVICE),
        "dt_bias": torch.zeros(HEADS * DIM, device=DEVICE),
        "lower_bound": -5.0,  # the safe gate, which `kda-tl tune` takes unless --gate says otherwise
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "output_final_state": True,
    }
    with kda_tl.use("my_plans"):  # or set the environment variable KDA_TL_DB for the whole process
        print(kda_tl.explain(**arguments))
        o, state = kda_tl.chunk_kda(**arguments)
    print(f"o: {tuple(o.shape)}, final state: {tuple(state.shape)}")

    run_command("db", "export", "export", "--from", "my_plans")
    run_command("db", "validate", "export")


if __name__ == "__main__":
    main()
