"""How long a fresh process waits for its first call: ``python first_call.py 32:forward 32:train 48:train``.

Times are seconds until the GPU is done, each of B1 T8192, K = V = 128, a safe gate, everything in the kernel; the first
one begins after torch was imported. What is compiled is told by the logger ``kda_tl``. With a bundle: a wheel of
``make wheel`` installed without dependencies, apache-tvm-ffi beside it, and ``KDA_TL_JIT=0``. Without: an empty
``TILELANG_CACHE_DIR``.
"""

import logging
import sys
import time

import torch

TOKENS = 8192

logging.basicConfig(level=logging.INFO, format="  %(name)s: %(message)s", stream=sys.stdout)
start = time.perf_counter()
import kda_tl  # noqa: E402 - its import is a part of what is timed

torch.zeros(1, device="cuda")
torch.cuda.synchronize()
print(f"after import torch: kda_tl and CUDA's context {time.perf_counter() - start:.2f} s")

for argument in sys.argv[1:]:
    heads, what = argument.split(":")
    shape = (1, TOKENS, int(heads))
    options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": what == "train"}
    q, k, v, g = (torch.randn(*shape, 128, **options) for _ in range(4))
    beta, do = torch.randn(*shape, **options), torch.randn(*shape, 128, device="cuda", dtype=torch.bfloat16)
    parameters = {
        "A_log": torch.rand(int(heads), device="cuda"),
        "dt_bias": torch.rand(int(heads) * 128, device="cuda"),
    }
    torch.cuda.synchronize()
    begin = time.perf_counter()
    o, _ = kda_tl.chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        **{name: x.requires_grad_(what == "train") for name, x in parameters.items()},
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=-5.0,
    )
    if what == "train":
        (o * do).sum().backward()  # with o.backward(do) torch 2.11 imports sympy, for 2.4 s
    torch.cuda.synchronize()
    print(f"H={heads} {what}: {time.perf_counter() - begin:.2f} s", flush=True)

print("loaded:", [name for name in ("tilelang", "tvm", "optuna", "scipy", "rich") if name in sys.modules])
