"""Under DistributedDataParallel: parameters of the gate get the mean of the gradients of the processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import SMALL, draw_backward, draw_call, operator_arguments
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kda_tl.core.device import cpu_device, find_compiler
from kda_tl.ops.kda import chunk_kda

pytestmark = [
    pytest.mark.skipif(find_compiler(cpu_device()) is None, reason="no C++ compiler: install g++ or clang++"),
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch has no gloo"
    ),
]
RANKS = 2
PARAMETERS = ("A_log", "dt_bias")


class Layer(nn.Module):
    """A call of chunk_kda whose gate has parameters."""

    def __init__(self, disable_recompute: bool) -> None:
        super().__init__()
        arguments = operator_arguments(draw_call(SMALL, (70,), 0, varlen=False))
        self.A_log, self.dt_bias = (nn.Parameter(arguments[name].clone()) for name in PARAMETERS)
        self.disable_recompute = disable_recompute

    def forward(self, arguments: dict[str, Any]) -> Tensor:
        own = {name: getattr(self, name) for name in PARAMETERS}
        o, ht = chunk_kda(**arguments | own, disable_recompute=self.disable_recompute)
        return (o * arguments["v"]).sum() + ht.square().sum()


def gradients(module: nn.Module, layer: Layer, seed: int) -> list[Tensor]:
    """Of a rank's own tokens, which its seed draws."""
    arguments = operator_arguments(draw_backward(draw_call(SMALL, (70,), seed, varlen=False), seed))
    layer.zero_grad()
    module(arguments).backward()
    return [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


def train(rank: int, seed: int, folder: str) -> None:
    """What one process does: a step that computes intermediates again, and one that keeps them."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = []
    for disable_recompute in (False, True):
        layer = Layer(disable_recompute)
        found.append(gradients(DistributedDataParallel(layer), layer, seed + rank))
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.barrier()  # a rank that leaves while another still talks to it may abort as it ends
    torch.distributed.destroy_process_group()


@pytest.mark.rest
def test_ranks_get_the_mean_of_their_gradients(seed: int, tmp_path: Path) -> None:
    layer = Layer(disable_recompute=False)
    alone = [gradients(layer, layer, seed + rank) for rank in range(RANKS)]  # compiles, before the others want kernels
    work = "import json, sys, test_ddp; test_ddp.train(*json.loads(sys.argv[1]))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", work, json.dumps([rank, seed, str(tmp_path)])],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    means = [sum(grads) / RANKS for grads in zip(*alone, strict=True)]
    assert len(means) == len(PARAMETERS) and all(mean.any() for mean in means)
    for rank in range(RANKS):
        for found in torch.load(tmp_path / f"{rank}.pt"):
            torch.testing.assert_close(found, means, rtol=1e-6, atol=0)
