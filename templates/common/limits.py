"""What a launch needs and what it may not exceed: bytes that it must move; warps, registers and shared memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from kda_tl.core.stage import Case, Config, Cost, TensorSpec, static_sizes

Sizes = Mapping[str, int]  # of a launch, by name: tokens, NT, N
LAUNCH_FIELDS = "threads", "num_stages", "registers"  # of configs: how a GPU runs a kernel, nothing to the C target


def io_bytes(case: Case) -> int:
    """Bytes of an element of the io dtype."""
    return 4 if case.problem.dtype == "fp32" else 2


def cost_of(case: Case, sizes: Sizes, tensors: Mapping[str, str], flops: int) -> Cost:
    """The cost of a launch that moves each of some tensors, given as specs by name, once."""
    p, all_sizes = case.problem, {**static_sizes(case), **sizes}
    specs = [spec for spec in map(TensorSpec.parse, tensors.values()) if spec.present(p)]
    moved = sum(math.prod(s.shape(all_sizes)) * (4 if s.element(p) in ("fp32", "i32") else 2) for s in specs)
    return Cost(bytes=moved, flops=flops)


def find_misfit(
    case: Case, config: Config, *products: tuple[int, int, int], smem: int = 0, registers: int = 0, room: int = 200
) -> str | None:
    """Why a kernel that works in tiles cannot run a case, or None: what many stages' configs reject alike.

    BK and BV divide the padded dimensions. On the CPU only tiles are a choice. On a GPU every warp has a 16 x 8 tile of
    each product, threads have registers for their sums, and the tiles fit shared memory.

    Args:
        case: what the kernel is built for.
        config: of the stage. It may have fields BK, BV, threads (128 if it has none), num_stages and registers.
        products: rows, columns and inner dimension. On CUDA :meth:`Tile.gemm` keeps rests of fp32 operands in shared
            memory. Where their lives allow it TileLang lays rests over one another, so their sum is an upper bound.
        smem: bytes of shared memory for all else.
        registers: what a thread keeps of results and sums.
        room: registers that are left for them.
    """
    p, chosen = case.problem, config.as_dict()
    for name, padded in (("BK", p.KP), ("BV", p.VP)):
        if padded % chosen.get(name, 1):
            return f"{name}={chosen[name]} does not divide the padded head dimension {padded}"
    if case.device.kind == "cpu":
        idle = (f.name for f in fields(config) if f.name in LAUNCH_FIELDS and chosen[f.name] != f.default)
        return next((f"{name} has no meaning on the CPU target" for name in idle), None)
    threads, tiles = chosen.get("threads", 128), ", ".join(f"{name}={value}" for name, value in chosen.items())
    for rows, columns, inner in products:
        smem += 4 * inner * (rows + columns) if p.dtype == "fp32" else 0
        if threads // 32 > rows // 16 * (columns // 8):
            return f"{threads} threads are more warps than a {rows} x {columns} product has 16 x 8 tiles"
    if registers > room:
        return f"{tiles} keeps {registers} registers of sums a thread, there is room for {room}: use smaller tiles"
    if smem > case.device.smem_bytes:
        return f"{tiles} needs {smem} bytes of shared memory, the device has {case.device.smem_bytes}"
    return None
