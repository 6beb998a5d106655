"""What a chunk of Gated DeltaNet does alone, for a recurrence that reads the caller's q and k.

    powers = rk 2^G, scale rq 2^G, rk 2^(G_last - G), 2^G_last, G, scale rq, rk        a number a token each
    Aqk[i, j] = scale 2^(G_i - G_j) <q_i, k_j>   j <= i
    A = (I + L)^-1 diag(beta),   L[i, j] = beta_i 2^(G_i - G_j) <k_i, k_j>   j < i

    bounds = G_last + sum_i log2 max(1, |1 - beta_i rk_i^2 |k_i|^2|)

with rq = 1 / |q| and rk = 1 / |k|, or 1 without norms. The body is fwd_gdn_prep's, but for the factors of rows: a
token's are one number times its row, and the recurrence multiplies with it what comes out of its products. 2 KiB a
chunk and head go to memory instead of 48. A bound is the log2 of how much a state, or its gradient, grows in a chunk at
most: a token's transition has the eigenvalues 1 and 1 - beta |k|^2, times its decay.

Value heads that share a query/key head share its rows, norms and products, which stay in registers while a block makes
the pairs of one after the other; two warps sum the gates of the next meanwhile. Where that would leave blocks without
work they part a head's value heads.

Blocks that all run at once take chunks in turn, the first of all heads first, and say which are in memory: a recurrence
begins with the first while later ones are made, see ready. Blocks that have all registers say it at their end.
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
from kda_tl.templates.common.heads import Heads, divide
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FORGOTTEN, L2NORM_EPS, RCP_LN2, prim_func
from kda_tl.templates.sm90 import fwd_prep
from kda_tl.templates.sm90.blocks import STORES
from kda_tl.templates.sm90.factors import KEYS, QUERIES, Factors, await_rows, find_query_norms
from kda_tl.templates.sm90.fwd_gdn_prep import (
    GdnPrepConfig,
    Part,
    alloc_pairs,
    await_pairs,
    issue_pairs,
    load_rows,
    prepare_cost,
    scale_pairs,
    store_queries,
    write_pairs,
)
from kda_tl.templates.sm90.fwd_prep import DEPENDS, TOLERANCE
from kda_tl.templates.sm90.gates import Gate, find_step, sum_decays
from kda_tl.templates.sm90.hopper import BOUNDS, GIVEN, PAIRS, READY, SCALARS, TABLES
from kda_tl.templates.sm90.inverse import begin_inverse, finish_inverse, invert_block
from kda_tl.templates.sm90.powers import END, GATE, KEY_GATE, KEY_NORM, LAST, QUERY, QUERY_NORM, START
from kda_tl.templates.sm90.prep import WARPGROUP
from kda_tl.templates.sm90.ready import announce, announce_all, overlap, withdraw
from kda_tl.templates.sm90.turns import BOARD_BYTES, Shares, Turns, chunk_of, find_turn, share_work, take_turn
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
def store_powers(G, factors, at, written):
    """The powers of a chunk, to memory, a token a thread; G with norms of keys if pairs of queries are made of it."""
    BT, powers = G.shape[0], written.powers
    i = T.get_thread_binding()
    last = T.exp2(G[BT - 1])
    own = T.exp2(G[i])
    powers[at.i_t, at.i_hv, START, i] = factors.of_key(i) * own
    powers[at.i_t, at.i_hv, QUERY, i] = factors.of_query(i) * own
    powers[at.i_t, at.i_hv, END, i] = factors.of_key(i) * T.exp2(G[BT - 1] - G[i])
    powers[at.i_t, at.i_hv, LAST, i] = last
    powers[at.i_t, at.i_hv, GATE, i] = G[i]
    powers[at.i_t, at.i_hv, QUERY_NORM, i] = factors.of_query(i)
    if "Aqk" in vars(written):
        powers[at.i_t, at.i_hv, KEY_NORM, i] = factors.of_key(i)
    else:
        powers[at.i_t, at.i_hv, KEY_GATE, i] = G[i] if factors.known else G[i] - T.log2(factors.of_key(i))


@T.macro
def store_bound(keys, last, at, written):
    """The chunk's bound, by the last warp; ``last`` is its last G, the diagonal of pairs of keys is beta |k|^2."""
    lane, growth = T.get_thread_binding() - (WARPGROUP - 32), T.alloc_local((1,), "float32")
    if lane >= 0:
        growth[0] = 0.0
        for n in T.unroll(2):
            kept = T.abs(1.0 - keys.of_key(lane + 32 * n, lane + 32 * n))
            growth[0] += T.if_then_else(kept <= 1.0, 0.0, T.log2(kept))  # a maximum would lose what is no number
        sum_warp(growth, 0)
        if lane == 0:
            bound = last[0] + growth[0]
            written.bounds[at.i_t, at.i_hv] = T.if_then_else(bound < ENDLESS, bound, ENDLESS)  # of what is no number


@dataclass(frozen=True)
class Numbers:
    """What is known of a chunk's tokens, in one tensor: factors of rows, and of a value head step sizes and sums."""

    factor: Any
    tokens: int

    @classmethod
    def alloc(cls, BT: int) -> "Numbers":
        """The tensor."""
        return cls(T.alloc_shared((5 * BT + 1,), "float32"), BT)

    def steps(self, turn: Any) -> Part:
        """Step sizes. Those of the next value head are made while these are read: they lie here by turns."""
        return Part(self.factor, (2 + turn) * self.tokens, self.tokens)

    @property
    def sums(self) -> Part:
        """Sums of gates. Before the next are made all have been read."""
        return Part(self.factor, 4 * self.tokens, self.tokens)

    @property
    def half(self) -> int:
        """Where the sum of the first 32 tokens is."""
        return 5 * self.tokens


@T.macro
def read_head(x, at, BT, raw_gate, raw_step):
    """Gates and steps of a value head, a token a thread, before they are needed."""
    i = T.get_thread_binding()
    T.assume(0 <= at.i_hv)
    T.assume(at.i_hv < x.g.shape[1])
    if i < BT:
        raw_gate[0] = T.if_then_else(i < at.count, x.g[at.start + i, at.i_hv, 0], 0)
        raw_step[0] = T.if_then_else(i < at.count, x.beta[at.start + i, at.i_hv], 0)


@T.macro
def prepare_head(p, x, at, lower_bound, raw_gate, raw_step, numbers, turn, total):
    """Step sizes of a value head, and sums of 32 tokens each, by the threads that have read it."""
    factor, steps = numbers.factor, numbers.steps(turn)
    i = T.get_thread_binding()
    factor[steps.first + i] = T.if_then_else(i < at.count, find_step(p, raw_step[0]), 0.0)
    sum_decays(Gate(p), raw_gate[0], x.A_log, x.dt_bias, lower_bound, at, i, total)
    if i == 31:
        factor[numbers.half] = total[0]


@T.macro
def finish_sums(numbers, total):
    """Sums of all tokens, by the same threads, once these know that of the first 32 and nobody reads the last sums."""
    i, factor = T.get_thread_binding(), numbers.factor
    if i < numbers.tokens:
        factor[numbers.sums.first + i] = total[0] + T.if_then_else(i >= 32, factor[numbers.half], 0.0)


@T.macro
def make_pairs(case, x, shares, turns, blocks, chunk_tokens, scalars, written, ready):
    """A turn: pairs of value heads that share a query/key head; each is announced where there is ``ready``.

    What the next turn begins with is asked for ahead, but for its rows.
    """
    each, p, BT, KP = shares.each, case.problem, case.BT, case.problem.KP
    scale, lower_bound = scalars
    of = (QUERIES, KEYS) if "Aqk" in vars(written) else (KEYS,)
    thread = T.get_thread_binding()
    first = chunk_of(turns.here, 0, x)
    held = (QUERIES, KEYS) if QUERIES in of or p.l2norm else (KEYS,)
    rows = T.alloc_shared((len(held), BT, KP), "bfloat16")
    for m in held:
        load_rows((x.q, x.k)[m], first.start, first.count, first.i_h, rows, held.index(m))
    numbers = Numbers.alloc(BT)
    factors = Factors(numbers.factor, scale, p.l2norm, early=QUERIES in of)
    total = T.alloc_local((1,), "float32")
    if thread < BT:
        prepare_head(p, x, first, lower_bound, turns.gate, turns.step, numbers, 0, total)
    await_rows(rows, factors)
    finish_sums(numbers, total)
    if len(held) > len(of):  # behind the products, TileLang 0.1.15 would not give the place of rows to what follows
        find_query_norms(rows, factors)
    tiles = issue_pairs(rows, of)
    await_pairs(tiles, factors)
    scale_pairs(tiles, factors)
    queries, keys = alloc_pairs(BT, of)  # in the place of rows
    turn = T.alloc_var("int32")
    last = T.alloc_local((1,), "float32")
    for m in T.serial(each):
        at = chunk_of(turns.here, m, x)
        following = chunk_of(turns.here, m + 1, x)
        turn = m % 2
        G, b_factor = numbers.sums, numbers.steps(turn)
        if m + 1 < each:
            read_head(x, following, BT, turns.gate, turns.step)
        write_pairs(tiles, G, b_factor, queries, keys)
        if m == 0:
            find_turn(shares, chunk_tokens, turns.here[5] + blocks, turns.board)
        inverse = begin_inverse(BT, written.A.dtype)
        invert_block(keys, b_factor, inverse, thread // 32)
        last[0] = G[BT - 1]
        if thread < BT:
            store_powers(G, factors, at, written)
            if m + 1 < each:
                prepare_head(p, x, following, lower_bound, turns.gate, turns.step, numbers, 1 - turn, total)
        if QUERIES in of:
            store_queries(queries, at, written.Aqk)
        T.sync_threads()
        keys.keep()
        if "bounds" in vars(written):
            store_bound(keys, last, at, written)
        if m + 1 < each:
            finish_sums(numbers, total)
        else:
            read_head(x, chunk_of(turns.board, 0, x), BT, turns.gate, turns.step)
        finish_inverse(keys, b_factor, inverse, at, written.A)
        if ready is not None:
            announce(ready, at.i_t, at.i_hv)
        else:
            T.sync_threads()  # the next head's inverse comes where this one's is read


@T.macro
def take_turns(case, x, shares, i_block, blocks, chunk_tokens, scalars, written, ready):
    """A block's turns."""
    turns = Turns.alloc(x)
    find_turn(shares, chunk_tokens, i_block, turns.board)
    T.sync_threads()
    take_turn(turns)
    read_head(x, chunk_of(turns.here, 0, x), case.BT, turns.gate, turns.step)
    while turns.here[5] >= 0:
        make_pairs(case, x, shares, turns, blocks, chunk_tokens, scalars, written, ready)
        take_turn(turns)


@dataclass(frozen=True, kw_only=True)
class PairsConfig(GdnPrepConfig):
    """blocks: whose registers a multiprocessor has; resident: that take chunks in turn on each."""

    blocks: int = tunable(4, 1, 2, 3, 4)
    resident: int = tunable(2, 1, 2, 3, 4)

    @property
    def is_alone(self) -> bool:
        """Whether it leaves no registers to another kernel."""
        return self.resident == self.blocks

    def smem_bytes(self, case: Case) -> int:
        """As the base, and the next turn."""
        return BOARD_BYTES + super().smem_bytes(case)

    def reject(self, case: Case) -> str | None:
        """As the base, and blocks that do not run all at once."""
        if self.resident > self.blocks:
            return f"resident={self.resident} are more than blocks={self.blocks}, those that have registers"
        return super().reject(case)

    @classmethod
    def default(cls, case: Case) -> Config:
        """Two on a multiprocessor run beside a recurrence, if it can; in a backward nothing does."""
        if case.problem.direction == "bwd" or not overlap(case):
            return cls.alone(case)
        return first_valid(case, *(cls(blocks=n) for n in (4, 3, 2)))

    @classmethod
    def alone(cls, case: Case) -> Config:
        """As many blocks as have room: what comes next waits for the last chunk."""
        return first_valid(case, *(cls(blocks=n, resident=n) for n in (4, 3, 2)))


def build(case: Case, config: PairsConfig) -> Any:
    """The kernel: thread blocks take (chunk, query/key head) in turn, or a part of its value heads."""
    p, heads = case.problem, Heads.of(case.problem)
    tokens, NT = T.dynamic("tokens"), T.dynamic("NT")
    most = case.device.num_sms * config.resident

    @prim_func(case, INPUTS | OUTPUTS, tokens=tokens, NT=NT, **heads.sizes)
    def fwd_gdn_pairs(q, k, g, beta, A_log, dt_bias, chunk_tokens, A, Aqk, powers, bounds, ready, scale, lower_bound):
        blocks = T.min(NT * heads.HV, most)
        with T.Kernel(blocks, threads=WARPGROUP, prelude=STORES) as i_block:
            T.annotate_min_blocks_per_sm(config.blocks)
            given = SimpleNamespace(q=q, k=k, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias)
            written = SimpleNamespace(A=A, Aqk=Aqk, powers=powers, bounds=bounds)
            shares = share_work(heads, NT, blocks) if p.grouped else Shares(NT, heads.HV)
            turns, _ = divide(NT * shares.units - i_block + blocks - 1, (blocks,))
            withdraw(ready, shares, i_block, blocks, turns)
            T.pdl_trigger()
            told, scalars = None if config.is_alone else ready, (scale, lower_bound)
            take_turns(case, given, shares, i_block, blocks, chunk_tokens, scalars, written, told)
            if config.is_alone:
                announce_all(ready, shares, i_block, blocks, turns)

    return fwd_gdn_pairs


default = PairsConfig.default


def cost(case: Case, sizes: Mapping[str, int]) -> Cost:
    """Every tensor once; two products over K, an inverse."""
    return prepare_cost(case, sizes, INPUTS | OUTPUTS)


def passes(case: Case) -> dict[str, bool]:
    """As fwd_gdn_prep's; tiles of a turn lie where others lay before them."""
    names = "disable_thread_storage_sync", "disable_buffer_init_check", "enable_aggressive_shared_memory_merge"
    return {f"tl.{name}": True for name in names}


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
