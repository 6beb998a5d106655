"""A model of flash-linear-attention (FLA) that runs on kda_tl's kernels, without a change to its layers.

    pip install flash-linear-attention==0.6.0
    python examples/fla_model.py

After `kda_tl.fla.register()` FLA asks kda_tl first at every call of its `chunk_kda`. The script trains a stack of FLA's
KDA layers for a few steps and prints the losses. On a CUDA GPU the layers are as FLA makes them. FLA's short
convolutions and its gated norm are Triton kernels, which need a GPU: on the CPU the convolutions are left out, and
PyTorch computes the norm.
"""

import sys

import torch
from torch import nn

import kda_tl

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
TOKENS, HEADS, DIM, LAYERS = (4096, 16, 128, 4) if ON_GPU else (80, 2, 32, 2)
STEPS = 3


class GatedNorm(nn.RMSNorm):
    """What FLA's FusedRMSNormGated computes, in PyTorch."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * gate.sigmoid()


class Model(nn.Module):
    """Layers of FLA with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        from fla.layers import KimiDeltaAttention

        size = {"hidden_size": HEADS * DIM, "head_dim": DIM, "num_heads": HEADS}
        self.layers = nn.ModuleList(
            KimiDeltaAttention(**size, use_short_conv=ON_GPU, layer_idx=i) for i in range(LAYERS)
        )
        if not ON_GPU:
            for layer in self.layers:
                layer.o_norm = GatedNorm(DIM, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def main() -> None:
    try:
        kda_tl.fla.register()
        import fla.layers  # noqa: F401
    except kda_tl.UnsupportedError as error:  # says what to install
        sys.exit(str(error))
    except ModuleNotFoundError as error:  # FLA's layers need more than its kernels, transformers for one
        sys.exit(f"FLA's layers need the package {error.name}: `pip install {error.name}`.")

    torch.manual_seed(0)
    model = Model().to(DEVICE, DTYPE)
    x, target = torch.randn(2, 1, TOKENS, HEADS * DIM, device=DEVICE, dtype=DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
