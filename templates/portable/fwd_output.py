"""Output: what queries read from the state before the chunk, and from the chunk itself.

    o = qg h + Aqk v_new

Source: Kimi Linear, arXiv:2510.26692, section 3 (as FLA v0.6.0 ``fla/ops/gla/chunk.py``).
"""

from dataclasses import dataclass
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.chunks import join_chunks
from kda_tl.templates.common.heads import Heads, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.limits import Sizes, cost_of, find_misfit, io_bytes
from kda_tl.templates.common.tile import FP32_TOLERANCE, Tile, prim_func

INPUTS = {
    "qg": "NT HV BT KP : io",
    "h": "NT HV KP VP : io",
    "Aqk": "NT HV BT BT : io",
    "v_new": "NT HV BT VP : io",
    "chunk_tokens": "NT 2 : i32",
}
OUTPUTS = {"o": "tokens HV V : io"}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin, in the dtype of qg."""
    o = x.qg @ x.h.to(x.qg.dtype) + x.Aqk.to(x.qg.dtype) @ x.v_new.to(x.qg.dtype)
    tokens = int(x.chunk_tokens[:, 1].sum())
    return {"o": join_chunks(o, x.chunk_tokens, tokens, case.problem.V)}


@dataclass(frozen=True, kw_only=True)
class FwdOutputConfig(Config):
    """BK: key channels a step; BV: value channels a block; threads; num_stages: steps loaded ahead."""

    BK: int = tunable(64, 32, 64, 128)
    BV: int = tunable(64, 32, 64, 128)
    threads: int = tunable(128, 64, 128, 256)
    num_stages: int = tunable(1, 0, 1, 2)

    def reject(self, case: Case) -> str | None:
        """Tiles divide; every warp gets a 16 x 8 tile; the pipelined tiles fit shared memory."""
        BT, BK, BV, steps = case.BT, self.BK, self.BV, case.problem.KP // self.BK
        if self.num_stages and self.threads > 128:
            return "two warpgroups may race on operands outside the pipeline (suspected, tilelang 0.1.15)"
        if self.num_stages > max(steps, 1):
            return f"num_stages={self.num_stages} exceeds the {steps} steps over K"
        smem = (max(self.num_stages, 1) * (BT + BV) * BK + BT * (BT + 2 * BV)) * io_bytes(case)
        return find_misfit(case, self, (BT, BV, BK), (BT, BV, BT), smem=smem)


def build(case: Case, config: FwdOutputConfig) -> Any:
    """The kernel: one thread block a (chunk, value head, BV channels)."""
    p, BT, BK, BV = case.problem, case.BT, config.BK, config.BV
    V, VB, heads = p.V, p.VP // config.BV, Heads.of(p)
    tile = Tile.of(case)

    @prim_func(case, INPUTS | OUTPUTS, **heads.sizes)
    def fwd_output(qg, h, Aqk, v_new, chunk_tokens, o):
        with tile.kernel(chunk_tokens.shape[0] * heads.HV * VB, threads=config.threads) as i_block:
            i_t, i_h, i_v = split_block(i_block, (chunk_tokens.shape[0], heads.HV), VB)
            v0 = i_v * BV
            start, count = chunk_tokens[i_t, 0], chunk_tokens[i_t, 1]
            q_shared = tile.shared((BT, BK))
            h_shared = tile.shared((BK, BV))
            A_shared = tile.shared((BT, BT))
            v_shared = tile.shared((BT, BV))
            o_frag = tile.fragment((BT, BV))
            o_shared = tile.shared((BT, BV))
            T.copy(Aqk[i_t, i_h, :, :], A_shared)
            T.copy(v_new[i_t, i_h, :, v0 : v0 + BV], v_shared)
            T.clear(o_frag)
            for i_k in tile.pipelined(p.KP // BK, num_stages=config.num_stages):
                T.copy(qg[i_t, i_h, :, i_k * BK : (i_k + 1) * BK], q_shared)
                T.copy(h[i_t, i_h, i_k * BK : (i_k + 1) * BK, v0 : v0 + BV], h_shared)
                tile.gemm(q_shared, h_shared, o_frag)
            tile.gemm(A_shared, v_shared, o_frag)
            T.copy(o_frag, o_shared)  # through shared memory: 16-byte writes
            for i, j in tile.parallel(BT, BV):
                if (i < count) & (v0 + j < V):
                    o[start + i, i_h, v0 + j] = o_shared[i, j]

    return fwd_output


def default(case: Case) -> FwdOutputConfig:
    """64 x 64 tiles where the dimensions and shared memory allow."""
    threads = 128 if case.device.kind == "cpu" or case.BT > 16 else 64
    return first_valid(case, *(FwdOutputConfig(BK=BK, BV=BV, threads=threads) for BK in (64, 32) for BV in (64, 32)))


def cost(case: Case, sizes: Sizes) -> Cost:
    """qg, h, Aqk and v_new in, o out; two products."""
    p, chunks = case.problem, sizes["NT"] * case.problem.HV
    return cost_of(case, sizes, INPUTS | OUTPUTS, flops=2 * chunks * case.BT * p.V * (p.K + case.BT // 2))


# operands are given in io; only the result is rounded
TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": FP32_TOLERANCE}
STAGE = Stage("fwd_output", INPUTS, OUTPUTS, FwdOutputConfig, build, reference, default, cost, TOLERANCE, depends=())
