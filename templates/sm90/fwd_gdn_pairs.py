"""What a chunk of Gated DeltaNet does alone, for a recurrence that reads the caller's q and k.

    powers = rk 2^G, scale rq 2^G, rk 2^(G_last - G), 2^G_last, G, scale rq, rk        a number a token each
    Aqk[i, j] = scale 2^(G_i - G_j) <q_i, k_j>   j <= i
    A = (I + L)^-1 diag(beta),   L[i, j] = beta_i 2^(G_i - G_j) <k_i, k_j>   j < i

    bounds = G_last + sum_i log2 max(1, |1 - beta_i rk_i^2 |k_i|^2|)

with rq = 1 / |q| and rk = 1 / |k|, or 1 without norms. The body is fwd_gdn_prep's, but for the factors of rows: a
token's are one number times its row, and the recurrence multiplies with it what comes out of its products. 2 KiB a
chunk and head go to memory instead of 48. A bound is the log2 of how much a state, or its gradient, grows in a chunk at
most: a token's transition has the eigenvalues 1 and 1 - beta |k|^2, times its decay.

Blocks that all run at once take chunks in turn, the first of all heads first, and say which are in memory: a recurrence
begins with the first while later ones are made, see ready.
Source: as fwd_gdn_prep.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.reference import activate_beta, activate_gate
from kda_tl.templates.common.chunks import first_rows, share_heads, split_chunks
from kda_tl.templates.common.heads import Heads, divide, split_block
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FORGOTTEN, L2NORM_EPS, RCP_LN2, prim_func
from kda_tl.templates.sm90 import fwd_prep
from kda_tl.templates.sm90.fwd_gdn_prep import GdnPrepConfig, prepare, prepare_cost
from kda_tl.templates.sm90.fwd_prep import DEPENDS, TOLERANCE
from kda_tl.templates.sm90.gates import Chunk
from kda_tl.templates.sm90.gdn_gradients import at_k, at_q
from kda_tl.templates.sm90.hopper import BOUNDS, GIVEN, PAIRS, READY, SCALARS, TABLES
from kda_tl.templates.sm90.powers import GATE, KEY_NORM, QUERY_NORM
from kda_tl.templates.sm90.prep import WARPGROUP
from kda_tl.templates.sm90.ready import announce, withdraw
from kda_tl.templates.sm90.warp import sum_warp

INPUTS = {**GIVEN, "chunk_tokens": TABLES["chunk_tokens"]}
ENDLESS = 1e30
OUTPUTS = {**PAIRS, **BOUNDS, **READY}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: fwd_prep's pairs, and numbers that do not need them; no token decays further than to nothing."""
    p, BT = case.problem, case.BT
    made = fwd_prep.reference(case, x)
    decays = activate_gate(x.g, gate=p.gate, A_log=x.A_log, dt_bias=x.dt_bias, lower_bound=x.lower_bound) * RCP_LN2
    decays = split_chunks(decays.clamp(min=FORGOTTEN), x.chunk_tokens, BT, width=p.GP)
    G = torch.where(first_rows(BT, p.rank, x.g.device), decays, 0.0).cumsum(dim=2)[..., 0]
    norms = []
    for y in (x.q, x.k):
        tiles = share_heads(split_chunks(y.to(G.dtype), x.chunk_tokens, BT), p.group)
        norms.append((tiles.square().sum(-1) + L2NORM_EPS).rsqrt() if p.l2norm else torch.ones_like(G))
    last = G[..., -1:]
    powers = (
        norms[1] * G.exp2(),
        x.scale * norms[0] * G.exp2(),
        norms[1] * (last - G).exp2(),
        last.exp2().expand_as(G),
        G,
        x.scale * norms[0],
        norms[1],
    )
    steps = split_chunks(activate_beta(x.beta.to(G.dtype), p.beta), x.chunk_tokens, BT)
    keys = share_heads(split_chunks(x.k.to(G.dtype), x.chunk_tokens, BT), p.group) * norms[1][..., None]
    growth = (1 - steps * keys.square().sum(-1)).abs().clamp(min=1).log2().sum(-1)
    found = {"powers": torch.stack(powers, 2), "bounds": last[..., 0] + growth, "ready": torch.ones_like(G[..., 0])}
    return {"A": made["A"], "Aqk": made["Aqk"], **found}


@T.macro
def store_powers(rows, G, factor, at, written):
    """The powers of a chunk, to memory."""
    BT = G.shape[0]
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, 0, i] = factor[at_k(i)] * T.exp2(G[i])
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, 1, i] = factor[at_q(i)] * T.exp2(G[i])
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, 2, i] = factor[at_k(i)] * T.exp2(G[BT - 1] - G[i])
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, 3, i] = T.exp2(G[BT - 1])
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, GATE, i] = G[i]
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, QUERY_NORM, i] = factor[at_q(i)]
    for i in T.Parallel(BT):
        written.powers[at.i_t, at.i_hv, KEY_NORM, i] = factor[at_k(i)]


@T.macro
def store_bound(keys, G, at, written):
    """The chunk's bound, by the first warp; the diagonal of pairs of keys is beta |k|^2."""
    lane, growth = T.get_thread_binding(), T.alloc_local((1,), "float32")
    if lane < 32:
        growth[0] = 0.0
        for n in T.unroll(2):
            kept = T.abs(1.0 - keys[lane + 32 * n, lane + 32 * n])
            growth[0] += T.if_then_else(kept <= 1.0, 0.0, T.log2(kept))  # a maximum would lose what is no number
        sum_warp(growth, 0)
        if lane == 0:
            bound = G[G.shape[0] - 1] + growth[0]
            written.bounds[at.i_t, at.i_hv] = T.if_then_else(bound < ENDLESS, bound, ENDLESS)  # of what is no number


@dataclass(frozen=True, kw_only=True)
class PairsConfig(GdnPrepConfig):
    """blocks: whose registers a multiprocessor has; resident: that take chunks in turn on each."""

    blocks: int = tunable(4, 1, 2, 3, 4)
    resident: int = tunable(2, 1, 2, 3, 4)

    def reject(self, case: Case) -> str | None:
        """As the base, and blocks that do not run all at once."""
        if self.resident > self.blocks:
            return f"resident={self.resident} are more than blocks={self.blocks}, those that have registers"
        return super().reject(case)

    @classmethod
    def default(cls, case: Case) -> Config:
        """Two on a multiprocessor run beside a recurrence; in a backward nothing does."""
        if case.problem.direction == "bwd":
            return cls.alone(case)
        return first_valid(case, *(cls(blocks=n) for n in (4, 3, 2)))

    @classmethod
    def alone(cls, case: Case) -> Config:
        """As many blocks as have room: what comes next waits for the last chunk."""
        return first_valid(case, *(cls(blocks=n, resident=n) for n in (4, 3, 2)))


def build(case: Case, config: PairsConfig) -> Any:
    """The kernel: thread blocks take (chunk, value head) in turn."""
    heads = Heads.of(case.problem)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_gdn_pairs(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, Aqk, powers, bounds, ready, scale, lower_bound):
        blocks = T.min(NT * heads.HV, case.device.num_sms * config.resident)
        with T.Kernel(blocks, threads=WARPGROUP) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            given = SimpleNamespace(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
            written = SimpleNamespace(A=A, Aqk=Aqk, powers=powers, bounds=bounds)
            turns, _ = divide(NT * heads.HV - i_block + blocks - 1, (blocks,))
            withdraw(ready, (NT, heads.HV), i_block, blocks, turns)
            T.pdl_trigger()
            for n in T.serial(turns):
                i_t, i_hv, _ = split_block(i_block + n * blocks, (NT, heads.HV))
                at = Chunk(i_t, i_hv, heads.of_keys(i_hv), chunk_tokens[i_t, 0], chunk_tokens[i_t, 1])
                prepare(case, given, at, (scale, lower_bound), (store_powers, store_bound), written)
                announce(ready, i_t, i_hv)

    return fwd_gdn_pairs


default = PairsConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; two products over K, an inverse."""
    return prepare_cost(case, sizes, INPUTS | OUTPUTS)


def passes(case: Case) -> dict[str, bool]:
    """As fwd_gdn_prep's; tiles of a turn lie where others lay before them."""
    return {"tl.disable_thread_storage_sync": True, "tl.enable_aggressive_shared_memory_merge": True}


STAGE = Stage(
    "fwd_gdn_pairs",
    INPUTS,
    OUTPUTS,
    PairsConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(*DEPENDS, "num_sms"),
    scalars=SCALARS,
    passes=passes,
)
