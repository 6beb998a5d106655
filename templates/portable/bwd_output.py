"""Output, backward: gradients of the query-key matrix and of the values that it read.

    dAqk = lower(do v_new^T)          dv_local = Aqk^T do          from o = qg S + Aqk v_new

dAqk holds its diagonal, and zeros above. What o says about qg and S is left to the stages that have both at hand.
Rows past the end of a sequence are zero.
Source: the chain rule on fwd_output, Kimi Linear, arXiv:2510.26692, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import split_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, prim_func

INPUTS = {
    "do": "tokens HV V : io",
    "Aqk": "NT HV BT BT : io",
    "v_new": "NT HV BT VP : io",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {"dAqk": "NT HV BT BT : f32", "dv_local": "NT HV BT VP : io"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of Aqk."""
    dtype = x.Aqk.dtype
    do_tile = split_chunks(x.do.to(dtype), x.chunk_tokens, case.BT, width=case.problem.VP)
    return {"dAqk": (do_tile @ x.v_new.to(dtype).mT).tril(), "dv_local": x.Aqk.mT @ do_tile}


@dataclass(frozen=True, kw_only=True)
class BwdOutputConfig(Config):
    """BV: value channels the products take at once; threads a block."""

    BV: int = tunable(64, 32, 64, 128, 256)
    threads: int = tunable(128, 64, 128, 256)

    def reject(self, case: Case) -> str | None:
        """BV divides; every warp gets a 16 x 8 tile of both products; tiles fit shared memory and registers."""
        BT, BV = case.BT, self.BV
        smem = BT * (BT + 2 * BV) * io_bytes(case)
        registers = BT * (BT + BV) // self.threads
        return find_misfit(case, self, (BT, BT, BV), (BT, BV, BT), smem=smem, registers=registers)


def build(case: Case, config: BwdOutputConfig) -> Any:
    """The kernel: one thread block a (chunk, value head), BV channels at a time."""
    p, BT, BV = case.problem, case.BT, config.BV
    V, tile, heads = p.V, Tile.of(case), Heads.of(p)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def bwd_output(d_o, Aqk, v_new, chunk_tokens, dAqk, dv_local):
        with tile.kernel(chunk_tokens.shape[0] * heads.HV, threads=config.threads) as i_block:
            i_t, i_h, _ = split_block(i_block, (chunk_tokens.shape[0], heads.HV))
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            A_shared = tile.shared((BT, BT))
            do_shared, v_shared = tile.shareds(2, (BT, BV))
            dA_frag = tile.fragment((BT, BT))
            dv_frag = tile.fragment((BT, BV))
            T.copy(Aqk[i_t, i_h, :, :], A_shared)
            T.clear(dA_frag)
            for i_v in T.serial(p.VP // BV):
                T.copy(v_new[i_t, i_h, :, i_v * BV : (i_v + 1) * BV], v_shared)
                for i, j in tile.parallel(BT, BV):
                    inside = (i < count) & (i_v * BV + j < V)
                    do_shared[i, j] = T.if_then_else(inside, d_o[start + i, i_h, i_v * BV + j], 0)
                tile.gemm(do_shared, v_shared, dA_frag, transpose_B=True)
                tile.gemm(A_shared, do_shared, dv_frag, transpose_A=True, clear_accum=True)
                T.copy(dv_frag, v_shared)  # through shared memory: 16-byte writes
                T.copy(v_shared, dv_local[i_t, i_h, :, i_v * BV : (i_v + 1) * BV])
            for i, j in tile.parallel(BT, BT):
                dA_frag[i, j] = T.if_then_else(j <= i, dA_frag[i, j], 0.0)
            T.copy(dA_frag, dAqk[i_t, i_h, :, :])

    return bwd_output


def default(case: Case) -> BwdOutputConfig:
    """64 channels at a time where the dimension allows; two warps where the products are small."""
    threads = 128 if case.device.kind == "cpu" or case.BT > 16 else 64
    return first_valid(case, *(BwdOutputConfig(BV=BV, threads=threads) for BV in (64, 32)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """do, Aqk and v_new in, dAqk and dv_local out; two triangular products."""
    p, chunks = case.problem, sizes["NT"] * case.problem.HV
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops=2 * chunks * case.BT**2 * p.V)


# operands are given in io; only dv_local is rounded
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage("bwd_output", INPUTS, OUTPUTS, BwdOutputConfig, build, reference, default, cost, TOLERANCE, depends=())
