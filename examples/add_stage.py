"""Add a stage: everything that kda_tl asks of a kernel, for the smallest one that is worth having.

    python examples/add_stage.py

The stage writes scale * g. The script builds its kernel for the GPU of this machine, or for the CPU, compares every
config with the PyTorch twin, and prints the first lines of its CUDA for an H200, which needs no GPU.
In the library a stage is one file in templates/; a pipeline names it in templates/pipelines.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.device import current_device
from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, tunable
from kda_tl.database.gpus import known_device
from kda_tl.reference import relative_error
from kda_tl.runtime.compile import compile_stage
from kda_tl.runtime.lower import generate_source
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import Tile, prim_func

# Names, shapes and dtypes: `g` is the dtype of the problem's gate, f32 is fp32. They type the kernel's parameters too.
INPUTS = {"g": "tokens HV K : g"}
OUTPUTS = {"scaled": "tokens HV K : f32"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """The PyTorch twin: it defines what is right."""
    return {"scaled": x.scale * x.g}


@dataclass(frozen=True, kw_only=True)
class ScaleConfig(Config):
    """The search space. BK: channels a thread block; threads: threads a block."""

    BK: int = tunable(32, 32, 64, 128)
    threads: int = tunable(32, 32, 64)

    def reject(self, case: Case) -> str | None:
        """The one statement of what cannot run."""
        if case.problem.K % self.BK:
            return f"BK={self.BK} does not divide K={case.problem.K}"
        return f"threads={self.threads} exceeds BK={self.BK}" if self.threads > self.BK else None


def build(case: Case, config: ScaleConfig) -> Any:
    """The kernel: one thread block a (token, head, BK channels). ``tile`` hides the CPU target's differences.

    Numbers of tokens and of heads are known at the launch, so one kernel serves them all.
    """
    p, BK, tile, heads = case.problem, config.BK, Tile.of(case), Heads.of(case.problem)
    blocks = p.K // BK
    tokens = T.dynamic("tokens")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, **heads.sizes)
    def scale_gate(g, scaled, scale):
        with tile.kernel(tokens * heads.HV * blocks, threads=config.threads) as i_block:
            i_t, i_h, i_k = split_block(i_block, (tokens, heads.HV), blocks)
            for j in tile.parallel(BK):
                scaled[i_t, i_h, i_k * BK + j] = T.cast(g[i_t, i_h, i_k * BK + j], "float32") * scale

    return scale_gate


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """The floor: g in, fp32 out, one product an element."""
    elements = sizes["tokens"] * case.problem.HV * case.problem.K
    width = 4 if case.problem.g_dtype == "fp32" else 2
    return Cost(bytes=elements * (width + 4), flops=elements)


def default(case: Case) -> ScaleConfig:
    """What runs when nothing is tuned."""
    return ScaleConfig()


TOLERANCE = {"bf16": 1e-6, "fp16": 1e-6, "fp32": 1e-6}  # one rounding to fp32
STAGE = Stage(
    "example_scale",
    INPUTS,
    OUTPUTS,
    ScaleConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(),  # of a problem `build` asks for K alone, which the tensors name
    scalars=("scale",),
)


def main() -> None:
    problem = Problem(H=2, HV=2, K=64, V=64, tokens=40, dtype="fp32")
    sizes, scale = {"tokens": problem.tokens}, 0.5
    case = Case(problem=problem, device=current_device(), BT=64, BC=16)
    where = torch.device("cuda" if case.device.kind == "cuda" else "cpu")
    g = torch.randn(problem.tokens, problem.HV, problem.K, device=where)
    expected = STAGE.reference(case, Operands(g=g.double(), scale=scale))["scaled"]
    for config in STAGE.candidates(case):
        (found,) = compile_stage(STAGE, case, config)({"g": g, "scale": scale}, sizes, where)
        error = relative_error(found, expected)
        print(f"{case.device.slug}: {config}: relative error {error:.1e}, floor {STAGE.cost(case, sizes)}")
        if not error <= STAGE.tolerance[problem.dtype]:
            raise SystemExit(f"{config} differs from the reference")

    h200 = Case(problem=problem, device=known_device("nvidia_h200"), BT=64, BC=16)
    source = generate_source(STAGE, h200, STAGE.default(h200))
    kernel = source[source.index('extern "C" __global__') :]  # behind the includes
    print("CUDA for an H200:", *kernel.splitlines()[:12], sep="\n")


if __name__ == "__main__":
    main()
