"""Times decode steps beside peers in one run: ``python decode.py OUT.json [--peers FLA vLLM SGLang] [--heads 32] ...``.

Packed decode of one token a sequence, HV = H heads, K = V = 128, q, k and v in bf16, gate and sigmoid in the kernel,
l2norm, V-first states in a pool with drawn slots. CUDA graphs, a cold L2, medians of 30 replays, us. The floor moves
each state in and out, at the bandwidth of an elementwise kernel that is measured in the same run. Of one sequence the
host's time for a call is measured too, without a graph.

Kernels of vLLM (0.33.0) and of SGLang (0.5.23) are taken from their wheels, if packages ``vllm`` and ``sglang`` with
them can be imported: Triton, and "SGLang CUDA", which its function for KDA takes in their place with fp32 states and 8
sequences or more. FLA's ``fused_recurrent_*`` has no pool and writes states elsewhere, so it moves as many bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kda_tl
from kda_tl.database.store import provenance

K = V = 128
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Call = Callable[[], Any]


def time_us(function: Call, flush: torch.Tensor, reps: int = 30) -> float:
    """Median of replays of a CUDA graph, each after the L2 was overwritten."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(reps)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(1000 * statistics.median(start.elapsed_time(end) for start, end in pairs), 2)


def measure_host(function: Call, calls: int = 500) -> float:
    """The host's time for a call that finds everything ready, us."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return round(1e6 * took / calls, 1)


def measure_bandwidth(flush: torch.Tensor) -> float:
    """Bytes a us that a product with a number reads and writes, of 512 MiB in fp32.

    ``copy_`` is cudaMemcpyAsync, which the driver runs in another way in a graph: at 2.7 TB/s on an H200, this at 4.2.
    """
    source = torch.empty(128 << 20, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_us(lambda: torch.mul(source, 2.0, out=target), flush)


class Step:
    """The tensors of one decode step, packed as projections leave them."""

    def __init__(self, B: int, HV: int, dtype: torch.dtype, scalar: bool, tokens: int = 1) -> None:
        rng = torch.Generator("cuda").manual_seed(B)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng, device="cuda")

        self.B, self.HV, self.scalar, self.tokens = B, HV, scalar, tokens
        self.mixed = normal(B * tokens, 2 * HV * K + HV * V).bfloat16()
        self.a = normal(B * tokens, HV if scalar else HV * K).bfloat16()
        self.b = normal(B * tokens, HV).bfloat16()
        self.A_log, self.dt_bias = normal(HV) * 0.5, normal(HV if scalar else HV * K)
        slots = B + 8
        self.pool = 0.1 * normal(slots, HV, V, K).to(dtype)
        self.indices = (torch.randperm(slots - 1, generator=rng, device="cuda")[:B] + 1).int()
        self.state = self.pool[self.indices.long()].float()  # in order: FLA's public function knows no pool
        self.out = torch.empty(B * tokens, 1, HV, V, dtype=torch.bfloat16, device="cuda")

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """q, k and v as views, [B, T, heads, channels]."""
        parts = self.mixed.split((self.HV * K, self.HV * K, self.HV * V), dim=-1)
        return tuple(x.view(self.B, self.tokens, self.HV, -1) for x in parts)

    def ours(self) -> Any:
        return kda_tl.packed_decode(
            self.mixed, self.a, self.b, self.A_log, self.dt_bias, None, self.pool, self.out, self.indices,
            use_qk_l2norm_in_kernel=True, pad_slot_id=0,
        )  # fmt: skip

    def verified(self) -> Any:
        """Several tokens of each sequence, in place: o of each, and the state after the last one goes to its slot."""
        q, k, v = self.parts
        call = kda_tl.fused_recurrent_gated_delta_rule if self.scalar else kda_tl.fused_recurrent_kda
        shape = (self.B, self.tokens, self.HV)
        return call(
            q, k, v, g=self.a.view(*shape, *([] if self.scalar else [K])), beta=self.b.view(shape), A_log=self.A_log,
            dt_bias=self.dt_bias, initial_state=self.pool, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, state_v_first=True, inplace_final_state=True,
            ssm_state_indices=self.indices, pad_slot_id=0, out=self.out.view(self.B, self.tokens, self.HV, V),
        )  # fmt: skip

    def fla(self) -> Any:
        q, k, v = self.parts
        shape = (self.B, self.tokens, self.HV)
        shared = {"A_log": self.A_log, "dt_bias": self.dt_bias, "output_final_state": True, "state_v_first": True}
        shared |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        shared |= {"initial_state": self.state, "beta": self.b.view(shape)}
        if self.scalar:
            from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

            return fused_recurrent_gated_delta_rule(q, k, v, g=self.a.view(shape), **shared)
        from fla.ops.kda import fused_recurrent_kda

        return fused_recurrent_kda(q, k, v, g=self.a.view(*shape, K), **shared)

    def vllm(self) -> Any:
        if self.scalar:
            from vllm.third_party.flash_linear_attention.ops import fused_recurrent as ops

            return ops.fused_recurrent_gated_delta_rule_packed_decode(
                self.mixed, self.a, self.b, self.A_log, self.dt_bias, K**-0.5, self.pool, self.out, self.indices, True
            )
        from vllm.kda import fused_recurrent as ops

        return ops.fused_recurrent_kda_packed_decode(
            self.mixed, self.a.view(1, self.B, self.HV, K), self.b[None], self.A_log, self.dt_bias, None, self.pool,
            self.indices, K**-0.5, self.out.view(1, self.B, self.HV, V),
        )  # fmt: skip

    def sglang(self) -> Any:
        """The kernels in Triton, also where it would take the one in CUDA."""
        from sglang.kernels.ops.attention import kda_packed_decode
        from sglang.kernels.ops.attention.fla import fused_recurrent as ops

        kda_packed_decode.covered = lambda *_: False
        name = "fused_recurrent_gated_delta_rule" if self.scalar else "fused_recurrent_kda"
        return getattr(ops, f"{name}_packed_decode")(
            mixed_qkv=self.mixed, a=self.a, b=self.b, A_log=self.A_log, dt_bias=self.dt_bias, scale=K**-0.5,
            initial_state=self.pool, out=self.out, ssm_state_indices=self.indices, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    def sglang_cuda(self) -> Any:
        from sglang.kernels.ops.attention.kda_packed_decode import kda_packed_decode

        return kda_packed_decode(
            self.mixed, self.a, self.b, self.A_log, self.dt_bias, K**-0.5, self.pool, self.out, self.indices, self.HV
        )


def list_calls(step: Step, peers: list[str]) -> Iterator[tuple[str, Call]]:
    yield "kda_tl", step.ours if step.tokens == 1 else step.verified
    if "vLLM" in peers and step.tokens == 1:
        yield "vLLM", step.vllm
    if "SGLang" in peers and step.tokens == 1:
        yield "SGLang", step.sglang
        if not step.scalar and step.pool.dtype == torch.float32 and step.B >= 8:
            yield "SGLang CUDA", step.sglang_cuda
    if "FLA" in peers and step.pool.dtype == torch.float32:
        yield "FLA", step.fla


def compare(step: Step, peers: list[str], flush: torch.Tensor, floor: float) -> dict[str, Any]:
    """Times of a step by all, and how far their results are from ours."""
    row: dict[str, Any] = {"floor": round(floor, 2)}
    pool, results = step.pool.clone(), {}
    for name, call in list_calls(step, peers):
        try:
            step.pool.copy_(pool)
            step.out.fill_(float("nan"))
            made = call()
            results[name] = (made[0] if name == "FLA" else step.out).clone().flatten()
            row[name] = time_us(call, flush)
            if step.B == 1:
                row[f"host, {name}"] = measure_host(call)
        except Exception as error:  # a peer that does not run here
            row[name] = None
            row[f"{name} says"] = f"{type(error).__name__}: {str(error)[:200]}"
    step.pool.copy_(pool)
    ours = results["kda_tl"].double()
    for name, result in results.items():
        row[f"off, {name}"] = float(f"{float((result.double() - ours).norm() / ours.norm()):.2g}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", nargs="*", choices=("FLA", "vLLM", "SGLang"), default=[])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--operators", nargs="+", choices=("kda", "gdn"), default=["kda", "gdn"])
    parser.add_argument("--states", nargs="+", choices=tuple(STATES), default=list(STATES))
    parser.add_argument("--tokens", type=int, default=1, help="of a sequence")
    args = parser.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    bandwidth = measure_bandwidth(flush)
    tiny = torch.zeros(1, device="cuda")
    found: dict[str, Any] = {
        "about": provenance() | {"gpu": torch.cuda.get_device_name()},
        "elementwise, bytes a us": round(bandwidth),
        "smallest kernel": time_us(lambda: tiny.add_(1), flush),
    }
    print(f"elementwise: {bandwidth / 1e6:.2f} TB/s, smallest kernel: {found['smallest kernel']} us")
    for operator in args.operators:
        for state in args.states:
            for B in args.batches:
                step = Step(B, args.heads, STATES[state], operator == "gdn", args.tokens)
                moved = 2 * B * args.heads * K * V * STATES[state].itemsize
                row = compare(step, args.peers, flush, moved / bandwidth)
                found[f"{operator} {state} B{B} T{args.tokens}"] = row
                print(operator, state, B, args.tokens, row, flush=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
