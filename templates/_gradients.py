"""Parts of bwd_gradients: gradients of the gate, the end of those of q and k, and all of them for gates of any size.

Rows of q (and dO) and of k (and dX) are one tile, 8 by 8: the two rows of a thread in the matrix unit's order, 8 apart,
belong to one token, so what they have in common is taken once. As loaded, and their factors, they lie 16 by 16, as in
fwd_prep.
"""

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kda_tl.templates._exact import row_of_q
from kda_tl.templates._prep import load_gates
from kda_tl.templates._rows import BC, BY_EIGHT, NB
from kda_tl.templates._slopes import Slopes

HALF = BC // 2
BT = 64  # tokens a chunk
PAD = 8  # elements a row in shared memory that the matrix unit does not read: banks of neighbouring rows differ


token_of, is_key = BY_EIGHT.token_of, BY_EIGHT.is_key

# TileLang's words for a loop that becomes cp.async, whose end is waited for later
ASYNC = {"parallel_prefer_async": True, "parallel_async_without_async_commit_wait": True}


@dataclass(frozen=True)
class Rows:
    """Sub-chunks of a tile as one tile of rows."""

    tile: Any

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and channels."""
        sub_chunks, rows, channels = self.tile.shape
        return sub_chunks * rows, channels

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.tile.dtype

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        r, c = at
        return self.tile[r // self.tile.shape[1], r % self.tile.shape[1], c]


@T.macro
def ask_rows(x, start, count, i_h, rows, place):
    """A chunk's rows on their way to shared memory, each to its place; zeros past the chunk's end."""
    K = x.shape[2]
    for i, j in T.Parallel(BT, K, annotations=ASYNC):
        rows[place(i), j] = T.if_then_else(i < count, x[start + i, i_h, j], 0)


@T.macro
def ask_operands(q, k, start, count, i_h, rows):
    """The same of q and k: a sub-chunk's 16 of one above 16 of the other."""
    K = q.shape[2]
    for i, j in T.Parallel(BT, K, annotations=ASYNC):
        rows[i // BC, i % BC, j] = T.if_then_else(i < count, q[start + i, i_h, j], 0)
    for i, j in T.Parallel(BT, K, annotations=ASYNC):
        rows[i // BC, BC + i % BC, j] = T.if_then_else(i < count, k[start + i, i_h, j], 0)


@T.macro
def put_operands(factor, local, middle, above, rows, keys):
    """Rows of q and k, and keys, relative to the anchors of their sub-chunks, and the exponents from there.

    Args:
        factor: of their norms, and of the scale.
        local: cumsums inside the sub-chunks.
        middle: anchors, from the start of each.
        above: exponents; written.
        rows: rows of q above those of k, 16 by 16; becomes the operands, 8 by 8.
        keys: written.
    """
    KP, io, f32 = local.shape[2], rows.dtype, "float32"
    q_raw = T.alloc_fragment((BC, NB, KP), io)
    k_raw = T.alloc_fragment((BC, NB, KP), io)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            q_raw[i, s, j] = rows[s, i, j]
        for s, j in T.Parallel(NB, KP):
            k_raw[i, s, j] = rows[s, BC + i, j]
    T.sync_threads()
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            exponent = local[i, s, j] - middle[s, j]
            row = T.cast(k_raw[i, s, j], f32) * factor[s * 2 * BC + BC + i]
            query = T.cast(q_raw[i, s, j], f32) * factor[s * 2 * BC + i]
            above[s * BC + i, j] = exponent
            rows[s, BY_EIGHT.row_of(i), j] = T.cast(query * T.exp2(exponent), io)
            rows[s, HALF + BY_EIGHT.row_of(i), j] = T.cast(row * T.exp2(exponent), io)
            keys[s, i, j] = T.cast(row * T.exp2(-exponent), io)


@T.macro
def mask_pairs(pair, db):
    """dAqk and dKK from products of rows of dO and dX with all values; that of dX with its own value goes to db."""
    for r, j in T.Parallel(*pair.shape):
        if (token_of(r) == j) & (is_key(r) == 1):
            db[j] = pair[r, j]
    for r, j in T.Parallel(*pair.shape):
        sign = T.if_then_else(is_key(r) == 0, 1.0, -1.0)
        pair[r, j] = T.if_then_else(token_of(r) - j >= is_key(r), sign * pair[r, j], 0.0)


@T.macro
def sum_rows_after(dG_row, keys, of_key, of_keys, of_states, last, totals, suffix):
    """The gradient of each row's decay, which is that of G summed from the row to the chunk's end.

    Args:
        dG_row: what rows of q and of k give dG.
        keys: relative to their anchors.
        of_key: what their product takes from dG.
        of_keys: what kg gives the last row, in parts that belong to sub-chunks.
        of_states: the products of state and gradient, in such parts.
        last: cumsum of the chunk.
        totals: sums of sub-chunks, in shared memory; written.
        suffix: written.
    """
    KP, f32 = suffix.shape[2], "float32"
    run = T.alloc_fragment((NB, KP), f32)
    after = T.alloc_fragment((NB, KP), f32)
    parts = T.alloc_shared((NB, KP), f32)
    T.clear(run)
    T.sync_threads()
    for n in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            i = BC - 1 - n
            own = T.cast(keys[s, i, j], f32) * of_key[s * BC + i, j]
            run[s, j] = run[s, j] + (dG_row[s * BC + i, j] - own)
        for s, j in T.Parallel(NB, KP):
            suffix[BC - 1 - n, s, j] = run[s, j]
    for s, j in T.Parallel(NB, KP):
        parts[s, j] = of_keys[s, j] + T.exp2(last[s, j]) * of_states[s, j]
    for s, j in T.Parallel(NB, KP):
        totals[s, j] = run[s, j]
    T.sync_threads()
    for s, j in T.Parallel(NB, KP):
        after[s, j] = parts[0, j] + parts[1, j] + parts[2, j] + parts[3, j]
    for n in T.unroll(NB):
        for s, j in T.Parallel(NB, KP):
            after[s, j] = after[s, j] + T.if_then_else(n > s, totals[n, j], 0.0)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            suffix[i, s, j] = suffix[i, s, j] + after[s, j]


@T.macro
def take_gate(p, g, raw, bias, A_log, lower_bound, at, totals, suffix, dA_log_part, ddt_bias_part):
    """Gradients of the raw gate from those of its decay, and the chunk's part of those of its parameters.

    Args:
        p: the problem, whose gate has an activation.
        g: raw gates.
        raw: room for the chunk's in registers.
        bias: dt_bias.
        A_log: of all heads.
        lower_bound: of the safe gate.
        at: chunk, head, first token and number of tokens.
        totals: room in shared memory.
        suffix: gradients of decays; becomes those of raw gates.
        dA_log_part: written.
        ddt_bias_part: written.
    """
    i_t, i_h, start, count = at
    KP, f32 = suffix.shape[2], "float32"
    slopes = Slopes(p, fast=True)
    rate = T.alloc_fragment((1,), f32)
    of_slope = T.alloc_fragment((NB, KP), f32)
    of_bias = T.alloc_fragment((NB, KP), f32)
    rate[0] = T.exp(A_log[i_h]) if p.has_A_log else 1.0
    T.clear(of_slope)
    T.clear(of_bias)
    load_gates(g, p.K, start, count, i_h, raw)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            x = T.cast(raw[i, s, j], f32) + bias[s, j]
            d = T.if_then_else((s * BC + i < count) & (j < p.K), suffix[i, s, j], 0.0)
            dx = d * slopes.gate(x, rate[0], lower_bound)
            if p.has_A_log:
                own = slopes.A_log(x, rate[0], dx if p.gate == "safe" else d)
                of_slope[s, j] = of_slope[s, j] + own
            of_bias[s, j] = of_bias[s, j] + dx
            suffix[i, s, j] = dx
    if p.has_A_log:
        of_heads = T.alloc_fragment((NB,), f32)
        head_parts = T.alloc_shared((NB,), f32)
        T.reduce_sum(of_slope, of_heads, dim=1)
        T.copy(of_heads, head_parts)
        T.sync_threads()
        if T.get_thread_binding() == 0:
            dA_log_part[i_t, i_h] = head_parts[0] + head_parts[1] + head_parts[2] + head_parts[3]
    if p.has_dt_bias:
        T.sync_threads()
        for s, j in T.Parallel(NB, KP):
            totals[s, j] = of_bias[s, j]
        T.sync_threads()
        for j in T.Parallel(KP):
            ddt_bias_part[i_t, i_h, j] = totals[0, j] + totals[1, j] + totals[2, j] + totals[3, j]


@T.macro
def put_gradients(p, rows, above, of_key, row_sum, factor, dot, scale, start, count, i_hv, written):
    """Gradients of q and k from the sums of a chunk, by way of shared memory.

    Args:
        p: the problem.
        rows: of q, scaled, and of k, relative to their anchors.
        above: the exponents that they are taken with.
        of_key: what keys add to the gradient of k, relative to their anchors.
        row_sum: what rows add, relative to the same anchors, in registers.
        factor: of the norms, and of the scale.
        dot: of normalised rows and their gradients.
        scale: of q.
        start: the first token.
        count: of tokens.
        i_hv: the value head.
        written: gradients of q and of k, or the value heads' parts of them. Not unpacked: in a macro a tensor gets
            a new name, here that of another parameter, whose shape launches would check (TileLang 0.1.15).
    """
    R, KP = row_sum.shape
    done = T.alloc_shared((R, KP + PAD), rows.dtype)
    for r, c in T.Parallel(R, KP):
        up = T.exp2(above[token_of(r), c])
        down = T.exp2(-above[token_of(r), c])
        own = up * row_sum[r, c]
        without_scale = T.if_then_else(is_key(r) == 0, 1.0 / scale, 1.0)
        found = T.if_then_else(is_key(r) == 0, scale * own, own + down * of_key[token_of(r), c])
        if p.l2norm:
            unit = T.cast(rows[r // (2 * BC), r % (2 * BC), c], "float32") * (without_scale * down)
            row_sum[r, c] = factor[row_of_q(token_of(r)) + BC * is_key(r)] * without_scale * (found - unit * dot[r])
        else:
            row_sum[r, c] = found
    for r, c in T.Parallel(R, KP):
        done[r, c] = T.cast(row_sum[r, c], rows.dtype)
    T.sync_threads()
    for r, c in T.Parallel(R, KP):
        if token_of(r) < count:
            if is_key(r) == 0:
                written[0][start + token_of(r), i_hv, c] = done[r, c]
            else:
                written[1][start + token_of(r), i_hv, c] = done[r, c]
