"""A training step: a small attention layer on kda_tl's kernels, forward, loss, backward and optimizer.

    python examples/train_step.py
    python examples/train_step.py --operator chunk_gated_delta_rule

Three sequences of different lengths are packed into one batch. The script prints the plan that the first call runs
and the loss after every step, which goes down. It runs on a CUDA GPU if there is one, else on the CPU.
"""

import argparse

import torch
from torch import nn

import kda_tl

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
LENGTHS, HEADS, DIM = ((1500, 500, 2096), 16, 128) if ON_GPU else ((40, 7, 49), 2, 32)
STEPS = 5


class DeltaAttention(nn.Module):
    """Projections around an operator; gate, step size and normalisation are computed inside its kernels."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.operator = operator
        width = HEADS * DIM
        gates = width if operator == "chunk_kda" else HEADS  # a gate a channel, or one a head
        self.project = nn.Linear(width, 3 * width + gates + HEADS, bias=False)
        self.sizes = (width, width, width, gates, HEADS)
        self.out = nn.Linear(width, width, bias=False)
        self.A_log = nn.Parameter(torch.empty(HEADS).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.zeros(gates))

    def prepare(self, x: torch.Tensor, bounds: torch.Tensor) -> dict:
        """The arguments of the operator for hidden states of the shape [1, tokens, width]."""
        q, k, v, g, beta = self.project(x).split(self.sizes, dim=-1)
        heads = (1, x.shape[1], HEADS, DIM)
        return {
            "q": q.reshape(heads),
            "k": k.reshape(heads),
            "v": v.reshape(heads),
            "g": g.reshape(heads) if self.operator == "chunk_kda" else g,
            "beta": beta,
            "A_log": self.A_log.float(),
            "dt_bias": self.dt_bias.float(),
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": bounds.to(x.device),
            "cu_seqlens_cpu": bounds,  # the same on the host: nothing is read back from the GPU
        }

    def forward(self, x: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        o, _ = getattr(kda_tl, self.operator)(**self.prepare(x, bounds))
        return self.out(o.flatten(2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small layer for a few steps.")
    parser.add_argument("--operator", choices=("chunk_kda", "chunk_gated_delta_rule"), default="chunk_kda")
    operator = parser.parse_args().operator

    torch.manual_seed(0)
    bounds = torch.tensor((0, *LENGTHS)).cumsum(0).int()  # where each sequence starts, and where the last one ends
    layer = DeltaAttention(operator).to(DEVICE, DTYPE)
    x, target = torch.randn(2, 1, sum(LENGTHS), HEADS * DIM, device=DEVICE, dtype=DTYPE)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)

    print(kda_tl.explain(operator=operator, **layer.prepare(x, bounds)))
    for step in range(STEPS):
        loss = nn.functional.mse_loss(layer(x, bounds), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
