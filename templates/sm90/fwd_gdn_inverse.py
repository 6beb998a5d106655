"""What a chunk of Gated DeltaNet does alone, for a recurrence that makes the pairs of queries itself: fwd_gdn_attend.

    powers, A    as fwd_gdn_pairs makes them, but G - log2 rk for rk

The body is fwd_gdn_pairs's without queries, which leaves registers for a fifth block on a multiprocessor. Rows of q are
read for their norms alone; norms of keys are the diagonal of their pairs. The recurrence begins after all chunks, so
there are no flags.
Source: as fwd_gdn_prep.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kda_tl.core.stage import Case, Config, Cost, Operands, Stage, first_valid, tunable
from kda_tl.templates.common.heads import Heads
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import prim_func
from kda_tl.templates.sm90 import fwd_gdn_pairs
from kda_tl.templates.sm90.blocks import STORES, Blocks
from kda_tl.templates.sm90.fwd_gdn_pairs import INPUTS as GIVEN_PAIRS
from kda_tl.templates.sm90.fwd_gdn_pairs import passes, take_turns
from kda_tl.templates.sm90.fwd_gdn_prep import GdnPrepConfig, prepare_cost
from kda_tl.templates.sm90.fwd_prep import DEPENDS, TOLERANCE
from kda_tl.templates.sm90.hopper import PAIRS, SCALARS
from kda_tl.templates.sm90.inverse import Inverse
from kda_tl.templates.sm90.powers import GATE, KEY_GATE, KEY_NORM
from kda_tl.templates.sm90.prep import WARPGROUP
from kda_tl.templates.sm90.turns import BOARD_BYTES, Shares, share_work

INPUTS = GIVEN_PAIRS | {"q": GIVEN_PAIRS["q"] + " ? l2norm"}
OUTPUTS = {name: PAIRS[name] for name in ("A", "powers")}


def reference(case: Case, x: Operands) -> dict[str, torch.Tensor]:
    """PyTorch twin: two results of fwd_gdn_pairs's, norms of keys as a part of their G."""
    made = fwd_gdn_pairs.reference(case, Operands(**vars(x) | {"q": x.k if x.q is None else x.q}))
    powers = made["powers"]
    powers[:, :, KEY_GATE] = powers[:, :, GATE] - powers[:, :, KEY_NORM].log2()
    return {name: made[name] for name in OUTPUTS}


@dataclass(frozen=True, kw_only=True)
class InverseConfig(GdnPrepConfig):
    """blocks: whose registers and shared memory a multiprocessor has; they take chunks in turn."""

    blocks: int = tunable(5, 2, 3, 4, 5)

    def smem_bytes(self, case: Case) -> int:
        """Rows, or in their place L and the inverse, and numbers of rows."""
        BT, p = case.BT, case.problem
        rows = BT * p.KP * 2 * (1 + p.l2norm)
        return BOARD_BYTES + max(rows, Blocks.size(BT) + Inverse.size(BT)) + 6 * BT * 4

    @classmethod
    def default(cls, case: Case) -> Config:
        """As many blocks as have room."""
        return first_valid(case, *(cls(blocks=n) for n in (5, 4, 3, 2)))


def build(case: Case, config: InverseConfig) -> Any:
    """The kernel: thread blocks take (chunk, query/key head) in turn, or a part of its value heads."""
    p, heads = case.problem, Heads.of(case.problem)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")
    most = case.device.num_sms * config.blocks

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_gdn_inverse(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, powers, scale, lower_bound):
        blocks = T.min(NT * heads.HV, most)
        with T.Kernel(blocks, threads=WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            given = SimpleNamespace(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
            written = SimpleNamespace(A=A, powers=powers)
            shares = share_work(heads, NT, blocks) if p.grouped else Shares(NT, heads.HV)
            T.pdl_trigger()
            scalars = scale, lower_bound
            take_turns(case, given, shares, i_block, blocks, chunk_tokens, scalars, written, None)

    return fwd_gdn_inverse


default = InverseConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; a product over K, an inverse."""
    return prepare_cost(case, sizes, INPUTS | OUTPUTS, products=1)


STAGE = Stage(
    "fwd_gdn_inverse",
    INPUTS,
    OUTPUTS,
    InverseConfig,
    build,
    reference,
    default,
    cost,
    TOLERANCE,
    depends=(*DEPENDS, "num_sms"),
    scalars=SCALARS,
    passes=passes,
)
