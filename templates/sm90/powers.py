"""What stages of Gated DeltaNet share that read the caller's q and k, and of each token the powers of fwd_gdn_pairs.

    k_neg = -diag(start) k      qg = diag(query) q      kg = diag(end) k      decay = last

Gradients also take what these are made of: G, scale rq and rk. A number a token multiplies columns of what products
leave in registers, so that the matrix unit reads rows as they came, and value heads find those that they share in the
L2.
"""

from __future__ import annotations

import torch

from kda_tl.core.stage import Case, Operands
from kda_tl.templates.common.chunks import share_heads, split_chunks
from kda_tl.templates.common.language import T

POWERS = 7
START, QUERY, END, LAST, GATE, QUERY_NORM, KEY_NORM = range(POWERS)  # which
KEY_GATE = KEY_NORM  # in its place for fwd_gdn_attend: H = G - log2 rk, which is rounded by 5e-4 at G = -9600
MULTIPLIED = 4  # of these, what a recurrence multiplies with
GIVEN_ROWS = {"q": "tokens H K : io", "k": "tokens H K : io"}


def make_factors(case: Case, x: Operands) -> Operands:
    """The same operands, and the factors that rows and powers stand for, in the dtype of powers; q may be missing."""
    p = case.problem

    def split(y: torch.Tensor) -> torch.Tensor:
        return share_heads(split_chunks(y.to(x.powers.dtype), x.chunk_tokens, case.BT, width=p.KP), p.group)

    start, query, end, decay = (y[..., None] for y in x.powers[:, :, :MULTIPLIED].unbind(2))
    k = split(x.k)
    factors = {"k_neg": -start * k, "kg": end * k, "decay": decay[:, :, 0].expand(-1, -1, p.KP)}
    if "q" in vars(x):
        factors["qg"] = query * split(vars(x)["q"])
    return Operands(**{**vars(x), **factors})


def reject_rows(case: Case, widths: tuple[int, ...]) -> str | None:
    """Why no kernel reads a case's rows as they came: they are not padded, and a row of them has one power."""
    p = case.problem
    if not p.scalar_gate or p.rank > 1:
        return "it takes one gate a head and one row a token"
    if p.K != p.KP:
        return f"K={p.K} is not {' or '.join(map(str, widths))} channels, which its tiles are"
    return None


@T.macro
def take_powers(like, powers, slot, m):
    """Powers of a chunk's tokens, one a column of ``like``, to registers before that is waited for."""
    taken = T.alloc_fragment(like.shape, "float32")
    for i, j in T.Parallel(*like.shape):
        taken[i, j] = powers[slot, m, j]
    return taken
