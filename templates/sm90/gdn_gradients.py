"""Parts of bwd_gdn_gradients and of bwd_gdn_walk: pairs, products of rows with their gradients, and all ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.common.slopes import Slopes
from kda_tl.templates.sm90.gates import find_step
from kda_tl.templates.sm90.gradients import ASYNC
from kda_tl.templates.sm90.rows import BC, BY_SUB_CHUNK
from kda_tl.templates.sm90.warp import sum_following, sum_warp

GROUPS = 2  # warpgroups, which have half of the channels each
ROWS_AT_ONCE = 16  # of a state that is read again


def at_q(i: Any) -> Any:
    """Where the norm of q of a token lies."""
    return BY_SUB_CHUNK.row_of(i)


def at_k(i: Any) -> Any:
    """Where that of k lies."""
    return BY_SUB_CHUNK.row_of(i) + BC


@dataclass(frozen=True)
class Interleaved:
    """Rows of q and of k, one tile after the other, as rows in the order BY_SUB_CHUNK."""

    tile: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels."""
        return self.tile.shape[0] * self.tile.shape[1], self.tile.shape[2]

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.tile.dtype

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        r, c = at
        return self.tile[BY_SUB_CHUNK.is_key(r), BY_SUB_CHUNK.token_of(r), c]


@T.macro
def issue_rows(x, start, count, i_head, rows, n):
    """A chunk's rows on their way to tile n; 0 past the end."""
    own = HeadRows.of(x, start, i_head)
    for i, j in T.Parallel(*rows.shape[1:], annotations=ASYNC):
        rows[n, i, j] = T.if_then_else(i < count, own.rows[i, j], 0)


@T.macro
def multiply_values(outer, value_shared, G, factor, scale, db):
    """P and R, rounded, and what P loses by that, from products of dO and dX with all values.

    That of dX with its own value goes to db, with that of dO times what :func:`store_lost` left there.
    """
    BT, f32 = G.shape[0], "float32"
    of_q = T.alloc_fragment((BT, BT), f32)
    of_k = T.alloc_fragment((BT, BT), f32)
    pairs = [T.alloc_fragment((BT, BT), outer.dtype) for _ in range(3)]
    T.wgmma_gemm(outer[0, :, :], value_shared, of_q, clear_accum=True, policy=T.BY_COLUMNS)
    T.wgmma_gemm(outer[1, :, :], value_shared, of_k, clear_accum=True, policy=T.BY_COLUMNS)
    wait_for(of_q, of_k)
    for i, j in T.Parallel(BT, BT):
        if i == j:
            db[i] = of_k[i, j] + db[i] * of_q[i, j]
    for i, j in T.Parallel(BT, BT):
        decay = T.if_then_else(i >= j, T.exp2(G[i] - G[j]), 0.0)
        of_q[i, j] = of_q[i, j] * (scale * factor[at_q(i)] * factor[at_k(j)]) * decay
    for i, j in T.Parallel(BT, BT):
        pairs[0][i, j] = T.cast(of_q[i, j], outer.dtype)
    for i, j in T.Parallel(BT, BT):
        pairs[2][i, j] = T.cast(of_q[i, j] - T.cast(pairs[0][i, j], f32), outer.dtype)
    for i, j in T.Parallel(BT, BT):
        decay = T.if_then_else(i > j, T.exp2(G[i] - G[j]), 0.0)
        pairs[1][i, j] = T.cast(of_k[i, j] * (-factor[at_k(i)] * factor[at_k(j)]) * decay, outer.dtype)
    return pairs


@T.macro
def wait_for(*tiles):
    """The end of all products, whose results are read next."""
    T.wait_wgmma(0)
    for tile in tiles:
        T.warpgroup_fence_operand(tile, num_regs=tile.shape[0] * tile.shape[1] // (128 * GROUPS))


@T.macro
def dot(rows, n, x, sums, m):
    """Products of rows of tile n and of x, to sums[m], those of a warpgroup's channels each."""
    BT, KP = x.shape
    product = T.alloc_fragment((GROUPS, BT, KP // GROUPS), "float32")
    total = T.alloc_fragment((GROUPS, BT), "float32")
    for w, i, c in T.Parallel(GROUPS, BT, KP // GROUPS):
        own = T.cast(rows[n, i, w * (KP // GROUPS) + c], "float32")
        product[w, i, c] = own * x[i, w * (KP // GROUPS) + c]
    T.reduce_sum(product, total, dim=2)
    for w, i in T.Parallel(GROUPS, BT):
        sums[m, w, i] = total[w, i]


@T.macro
def store_lost(p, rows, factor, scale, beta, at, lost):
    """What a token's own pair in Aqk lost by its rounding, times the step size: dX lacks that times dO."""
    _, BT, KP = rows.shape
    product = T.alloc_fragment((BT, KP), "float32")
    total = T.alloc_fragment((BT,), "float32")
    for i, c in T.Parallel(BT, KP):
        product[i, c] = T.cast(rows[0, i, c], "float32") * T.cast(rows[1, i, c], "float32")
    T.reduce_sum(product, total, dim=1)
    for i in T.Parallel(BT):
        pair = total[i] * (scale * factor[at_q(i)] * factor[at_k(i)])
        raw = T.if_then_else(i < at.count, beta[at.start + i, at.i_hv], 0)
        lost[i] = (pair - T.cast(T.cast(pair, rows.dtype), "float32")) * find_step(p, raw)


@T.macro
def dot_states(states, at, dstate_shared, parts):
    """The product of a chunk's state, read again, with its gradient, in parts."""
    V, KP = dstate_shared.shape
    own = T.alloc_fragment((ROWS_AT_ONCE, KP), dstate_shared.dtype)
    product = T.alloc_fragment((ROWS_AT_ONCE, KP), "float32")
    total = T.alloc_fragment((ROWS_AT_ONCE,), "float32")
    T.clear(product)
    for n in T.serial(V // ROWS_AT_ONCE):
        for s, j in T.Parallel(ROWS_AT_ONCE, KP):
            own[s, j] = states[at.i_t, at.i_hv, n * ROWS_AT_ONCE + s, j]
        for s, j in T.Parallel(ROWS_AT_ONCE, KP):
            gradient = T.cast(dstate_shared[n * ROWS_AT_ONCE + s, j], "float32")
            product[s, j] = product[s, j] + T.cast(own[s, j], "float32") * gradient
    T.reduce_sum(product, total, dim=1)
    for s in T.Parallel(ROWS_AT_ONCE):
        parts[s] = total[s]


@T.macro
def store_beta(p, beta, dbeta, db, at):
    """Gradients of the raw step sizes."""
    slopes = Slopes(p)
    for i in T.Parallel(db.shape[0]):
        if i < at.count:
            raw = beta[at.start + i, at.i_hv]
            step = find_step(p, raw)
            dbeta[at.start + i, at.i_hv] = T.cast(db[i] / (step * step) * slopes.beta(raw), dbeta.dtype)


@T.macro
def store_gate(p, x, lower_bound, at, sums, parts, last):
    """Gradients of the raw gate and the chunk's part of its parameters', by the first warp, two tokens a thread.

    The gradient of a decay is that of G summed from its token to the chunk's end, where states add theirs. ``sums`` are
    products of q, of k as rows, of k as keys, and of k with what states give them; ``last`` is the chunk's decay.
    """
    lane, f32 = T.get_thread_binding(), "float32"
    slopes = Slopes(p, fast=True)
    early = T.alloc_local((1,), f32)
    late = T.alloc_local((1,), f32)
    of_all = T.alloc_local((2,), f32)  # what states add; then of A_log and dt_bias
    halves = [early, late]
    if lane < 32:
        of_all[0] = T.if_then_else(lane < ROWS_AT_ONCE, last * parts[lane % ROWS_AT_ONCE], 0.0)
        for n, half in enumerate(halves):
            i = lane + 32 * n
            of_all[0] += sums[3, 0, i] + sums[3, 1, i]
            half[0] = sums[0, 0, i] + sums[0, 1, i] + sums[1, 0, i] + sums[1, 1, i] - (sums[2, 0, i] + sums[2, 1, i])
        sum_warp(of_all, 0)
        for half in halves:
            sum_following(half)
        late[0] += of_all[0]
        of_all[1] = late[0]
        early[0] += T.shfl_sync(of_all[1], 0)
        T.clear(of_all)
        for n, half in enumerate(halves):
            i = lane + 32 * n
            d = T.alloc_local((2,), f32)
            d[0] = T.if_then_else(i < at.count, half[0], 0.0)
            if p.gate != "log":
                rate = T.exp(x.A_log[at.i_hv]) if p.has_A_log else 1.0
                raw = T.cast(T.if_then_else(i < at.count, x.g[at.start + i, at.i_hv, 0], 0), f32)
                if p.has_dt_bias:
                    raw = raw + x.dt_bias[at.i_hv, 0]
                d[1] = d[0] * slopes.gate(raw, rate, lower_bound)
                of_all[0] += slopes.A_log(raw, rate, d[1] if p.gate == "safe" else d[0])
                of_all[1] += d[1]
                d[0] = d[1]
            if i < at.count:
                x.dg[at.start + i, at.i_hv, 0] = T.cast(d[0], x.dg.dtype)
        if p.gate != "log":
            for n in range(2):
                sum_warp(of_all, n)
            if lane == 0:
                if p.has_A_log:
                    x.dA_log_part[at.i_t, at.i_hv] = of_all[0]
                if p.has_dt_bias:
                    x.ddt_bias_part[at.i_t, at.i_hv, 0] = of_all[1]


def along(sums: Any, n: int, i: Any) -> Any:
    """The product of a token's q, or k, with its gradient."""
    of = range(1) if n == 0 else range(1, 3)
    return sum(sums[m, w, i] for m in of for w in range(GROUPS))


@T.macro
def take_norms(p, rows, slot, x, sums, n, norm):
    """Gradients of q, or k, less what norms take; ``norm`` is a function of the token."""
    if p.l2norm:
        for i, c in T.Parallel(*x.shape):
            x[i, c] = x[i, c] - norm(i) * norm(i) * along(sums, n, i) * T.cast(rows[slot, i, c], "float32")


@T.macro
def round_rows(x, rows, slot):
    """What registers hold of a chunk's rows to shared memory."""
    for i, c in T.Parallel(*x.shape):
        rows[slot, i, c] = T.cast(x[i, c], rows.dtype)


@T.macro
def store_rows(rows, slot, at, written):
    """Rows of a chunk from shared memory."""
    own = HeadRows.of(written, at.start, at.i_hv)
    for i, c in T.Parallel(*rows.shape[1:]):
        if i < at.count:
            own.rows[i, c] = rows[slot, i, c]
