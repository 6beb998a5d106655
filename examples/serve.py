"""Serve a KDA layer: prompts with chunk_kda, then token by token with fused_recurrent_kda on a pool of states.

    python examples/serve.py

Requests arrive and finish while others run. A request holds one slot of the pool from its prompt to its last token, and
the next request gets that slot. A step decodes a token of every running request in one call of a fixed batch; rows of
the batch that nobody needs have the slot NULL, and touch no state. On a CUDA GPU the step is a CUDA graph, which is
replayed with other tokens and other slots; on the CPU the same function is called.

In place of a model the requests bring random projections: the keys, queries, values, gates and step sizes of all their
tokens. So the script can check at its end that what was decoded equals one call of chunk_kda over the whole sequence.
"""

import sys
from dataclasses import dataclass, field

import torch

import kda_tl

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
HEADS, DIM, SCALE = (32, 128, 100) if ON_GPU else (4, 16, 1)  # SCALE: how much longer than below the prompts are
BATCH, SLOTS, NULL = 4, 3, -1  # rows of the step that is captured, states in the pool, and the slot of a row to spare
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[DTYPE]  # of relative errors: a few roundings

WIDTHS = (HEADS * DIM, HEADS * DIM, HEADS * DIM, HEADS * DIM, HEADS)  # of q, k, v, g and beta in a projection's output
LAYER = {
    "A_log": torch.linspace(0, 2, HEADS, device=DEVICE),
    "dt_bias": torch.zeros(HEADS * DIM, device=DEVICE),
    "lower_bound": -5.0,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "state_v_first": True,  # states are [V, K], as serving engines keep them
}


@dataclass
class Request:
    """What arrives at a step: tokens of a prompt, and how many are to be decoded after it."""

    arrives: int
    prompt: int
    decoded: int
    slot: int = NULL
    steps: list[int] = field(default_factory=list)  # at which it ran
    outputs: list[torch.Tensor] = field(default_factory=list)  # of decoded tokens, [HEADS, DIM] each

    def __post_init__(self) -> None:
        self.prompt *= SCALE
        self.rows = torch.randn(1, self.prompt + self.decoded, sum(WIDTHS), device=DEVICE, dtype=DTYPE)

    def next_row(self) -> torch.Tensor:
        """The projection's output for the token that is decoded next."""
        return self.rows[0, self.prompt + len(self.outputs)]


def split(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the operators as views of a projection's output, [B, T, sum(WIDTHS)]: nothing is copied."""
    q, k, v, g, beta = rows.split(WIDTHS, dim=-1)
    heads = {name: x.unflatten(-1, (HEADS, DIM)) for name, x in (("q", q), ("k", k), ("v", v), ("g", g))}
    return heads | {"beta": beta}


class Decoder:
    """The decode step of a fixed batch. Its inputs stay where they are in memory, and so does its output."""

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        self.rows = torch.zeros(BATCH, 1, sum(WIDTHS), device=DEVICE, dtype=DTYPE)
        self.slots = torch.full((BATCH,), NULL, device=DEVICE, dtype=torch.int32)
        self.out = torch.empty(BATCH, 1, HEADS, DIM, device=DEVICE, dtype=DTYPE)
        self.compute()  # the first call compiles the kernel; every slot is NULL, so no state changes
        self.graph = torch.cuda.CUDAGraph() if ON_GPU else None
        if self.graph is not None:
            with torch.cuda.graph(self.graph):
                self.compute()

    def compute(self) -> None:
        """Reads rows and slots; writes out, and the states of the pool in place."""
        kda_tl.fused_recurrent_kda(
            **split(self.rows),
            **LAYER,
            initial_state=self.pool,
            inplace_final_state=True,
            ssm_state_indices=self.slots,
            pad_slot_id=NULL,
            out=self.out,
        )

    def step(self, running: list[Request]) -> torch.Tensor:
        """Decodes a token of each running request. Returns their outputs, [len(running), HEADS, DIM]."""
        slots = [request.slot for request in running]
        self.slots.copy_(torch.tensor(slots + [NULL] * (BATCH - len(slots)), dtype=torch.int32))
        self.rows[: len(running), 0] = torch.stack([request.next_row() for request in running])
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute()
        return self.out[: len(running), 0].clone()  # the next step writes there again


def prefill(request: Request, pool: torch.Tensor) -> None:
    """The prompt in one call; its final state goes into the request's slot."""
    prompt = request.rows[:, : request.prompt]
    _, state = kda_tl.chunk_kda(**split(prompt), **LAYER, output_final_state=True)
    pool[request.slot] = state[0]


def serve(requests: list[Request]) -> None:
    """Runs all requests to their end."""
    pool = torch.full((SLOTS, HEADS, DIM, DIM), torch.nan, device=DEVICE)  # fp32; nobody reads a slot before its prompt
    decoder, free, waiting, running, step = Decoder(pool), list(range(SLOTS)), list(requests), [], 0
    while waiting or running:
        while waiting and waiting[0].arrives <= step and free:
            request = waiting.pop(0)
            request.slot = free.pop()
            prefill(request, pool)
            running.append(request)
        if running:
            for request, output in zip(running, decoder.step(running), strict=True):
                request.outputs.append(output)
                request.steps.append(step)
        free += [request.slot for request in running if len(request.outputs) == request.decoded]
        running = [request for request in running if len(request.outputs) < request.decoded]
        step += 1


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    requests = [Request(0, 40, 6), Request(0, 7, 3), Request(1, 19, 8), Request(2, 33, 2), Request(4, 5, 4)]
    serve(requests)
    print("request  prompt  decoded  slot  steps   relative error")
    for number, request in enumerate(requests):
        whole, _ = kda_tl.chunk_kda(**split(request.rows), **LAYER)
        expected, found = whole[0, request.prompt :].double(), torch.stack(request.outputs).double()
        error = ((found - expected).norm() / expected.norm()).item()
        steps = f"{request.steps[0]}-{request.steps[-1]}"
        print(f"{number:7}  {request.prompt:6}  {request.decoded:7}  {request.slot:4}  {steps:6}  {error:.1e}")
        if not error <= TOLERANCE:
            sys.exit(f"request {number} differs from one call of chunk_kda over its whole sequence")


if __name__ == "__main__":
    main()
