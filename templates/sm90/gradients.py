"""Parts of bwd_gradients: gradients of the gate, the end of those of q and k, and all of them for gates of any size.

Rows of q (and dO) and of k (and dX) are one tile, 8 by 8: the two rows of a thread in the matrix unit's order, 8 apart,
belong to one token, so what they have in common is taken once. As loaded, and their factors, they lie 16 by 16, as in
fwd_prep.
"""

from dataclasses import dataclass
from typing import Any

from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.sm90.exact import row_of_q
from kda_tl.templates.sm90.gates import find_anchors, find_steepest, sum_gates
from kda_tl.templates.sm90.rows import BC, BY_EIGHT, NB

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
def issue_rows(x, start, count, i_h, rows, place):
    """A chunk's rows on their way to shared memory, each to its place, all of an index but the last; 0 past the end."""
    K, own = x.shape[2], HeadRows.of(x, start, i_h)
    for i, j in T.Parallel(BT, K, annotations=ASYNC):
        rows[(*place(i), j)] = T.if_then_else(i < count, own.rows[i, j], 0)


@T.macro
def store_operands(factor, local, middle, above, rows, keys):
    """Rows of q and k, and keys, relative to the anchors of their sub-chunks, and the exponents from there, ``above``.

    ``rows`` of q above those of k, 16 by 16, to be multiplied with ``factor``, become the operands, 8 by 8. Cumsums are
    ``local`` to sub-chunks, and ``middle`` those at their anchors.
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
def sum_chunk(gate, raw, count, slope, decay_scale, bias):
    """Cumsums and anchors of a chunk as in fwd_prep, and powers of two between anchors.

    Returns:
        Sums inside the sub-chunks; anchors from the start of each; the chunk's sum; in shared memory room for
        exponents, the powers from the chunk's start by all anchors to its end, see Gate.link, those from each anchor to
        the end, and the least exponents of a gate without a bound.
    """
    KP, f32, steepest = raw.shape[2], "float32", None
    local = T.alloc_fragment((BC, NB, KP), f32)
    middle = T.alloc_fragment((NB, KP), f32)
    total = T.alloc_fragment((NB, KP), f32)
    before = T.alloc_fragment((NB, KP), f32)
    last = T.alloc_fragment((NB, KP), f32)
    anchor = T.alloc_fragment((NB, KP), f32)
    sums = T.alloc_shared((NB, KP), f32)
    following = T.alloc_fragment((NB, KP), f32)
    above = T.alloc_shared((BT, KP + PAD), f32)
    links = T.alloc_shared((NB + 1, KP), f32)
    tails = T.alloc_shared((NB, KP), f32)
    sum_gates(gate, raw, count, slope[0], decay_scale[0], bias, local, middle, total)
    if not gate.p.bounded_gate:
        steepest = T.alloc_shared((NB,), f32)
        find_steepest(middle, total, steepest)
    find_anchors(gate, middle, total, sums, before, last, anchor)
    for s, j in T.Parallel(NB, KP):
        links[s, j] = anchor[s, j]
        if s == NB - 1:
            links[NB, j] = last[s, j]
    for s, j in T.Parallel(NB, KP):
        following[s, j] = links[s + 1, j]
    for s, j in T.Parallel(NB, KP):
        links[s + 1, j] = gate.link(following[s, j] - anchor[s, j])
        if s == 0:
            links[0, j] = T.exp2(anchor[s, j])
    for s, j in T.Parallel(NB, KP):
        tails[s, j] = T.exp2(last[s, j] - anchor[s, j])
    return local, middle, last, above, links, tails, steepest


@T.macro
def compute_pairs(slopes, outer, value_shared, pairs, columns, b_factor, beta, dbeta, at):
    """dAqk and dKK, rounded, whole and by 16 ``columns`` each in registers, and the gradients of step sizes.

    ``outer`` are rows of dO and dX, ``b_factor`` step sizes, ``beta`` what they came from.
    """
    pair = T.alloc_fragment((2 * BT, BT), "float32")
    db = T.alloc_shared((BT,), "float32")
    T.gemm(outer, value_shared, pair, clear_accum=True, policy=T.BY_ROWS)
    mask_pairs(pair, db)
    T.copy(pair, pairs)
    for a, column in enumerate(columns):
        for r, j in T.Parallel(2 * BT, BC):
            column[r, j] = pairs[r, a * BC + j]
    for i in T.Parallel(BT):
        if i < at.count:
            step = b_factor[i]
            dbeta[at.start + i, at.i_hv] = T.cast(
                db[i] / (step * step) * slopes.beta(beta[at.start + i, at.i_hv]), dbeta.dtype
            )


@T.macro
def sum_rows(gate, outer, state_shared, columns, keys, links, row_sum):
    """What rows of q and of k add: the product with the state, and all keys before them, from anchor to anchor."""
    KP = row_sum.shape[1]
    T.gemm(outer, state_shared, row_sum, clear_accum=True, policy=T.BY_ROWS)
    for r, c in T.Parallel(2 * BT, KP):
        row_sum[r, c] = row_sum[r, c] * T.if_then_else(is_key(r) == 0, links[0, c], -links[0, c])
    for a, column in enumerate(columns):
        T.gemm(column, keys[a, :, :], row_sum, policy=T.BY_ROWS)
        if a < NB - 1:
            for r, c in T.Parallel(2 * BT, KP):
                row_sum[r, c] = gate.move(row_sum[r, c], T.if_then_else(r // (2 * BC) > a, links[a + 1, c], 1.0))


@T.macro
def sum_keys(gate, known, pairs, rows, keys, links, tails, key_sum, of_keys, of_states):
    """What keys add: the product with the state's gradient, and all rows after them, from anchor to anchor.

    ``key_sum`` is relative to the anchor of each key. ``of_keys`` is what kg gives the last row of dG, by sub-chunk,
    ``of_states`` what the states give it, in as many parts. Returns room in shared memory.
    """
    KP, f32 = key_sum.shape[1], "float32"
    grown = T.alloc_shared((BT, KP + PAD), f32)
    T.gemm(known.values, known.dstate, key_sum, transpose_A=True, clear_accum=True, policy=T.BY_COLUMNS)
    for i, c in T.Parallel(BT, KP):
        grown[i, c] = key_sum[i, c] * T.cast(keys[i // BC, i % BC, c], f32) * tails[i // BC, c]
    T.clear(of_states)
    for v in T.serial(known.values.shape[0] // NB):
        for s, j in T.Parallel(NB, KP):
            product = T.cast(known.state[v * NB + s, j], f32) * T.cast(known.dstate[v * NB + s, j], f32)
            of_states[s, j] = of_states[s, j] + product
    T.clear(of_keys)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            of_keys[s, j] = of_keys[s, j] + grown[s * BC + i, j]
    for b in tuple(reversed(range(NB))):
        for i, c in T.Parallel(BT, KP):
            key_sum[i, c] = gate.move(key_sum[i, c], T.if_then_else(i // BC < b + 1, links[b + 1, c], 1.0))
        T.gemm(pairs[b * 2 * BC : (b + 1) * 2 * BC, :], rows[b, :, :], key_sum, transpose_A=True, policy=T.BY_COLUMNS)
    return grown


@T.macro
def sum_gradients(p, rows, keys, row_sum, key_sum, of_key, dG_row):
    """dG of rows, ``dG_row``, and ``of_key``, which is key_sum in shared memory.

    Returns the products of rows with the gradients of q and k, if there are norms, which need them.
    """
    KP, f32 = key_sum.shape[1], "float32"
    along = T.alloc_fragment((2 * BT, KP), f32)
    dot = T.alloc_fragment((2 * BT,), f32)
    by_token = T.alloc_fragment((BT // HALF, 2, HALF, KP), f32)
    dG_of = T.alloc_fragment((BT // HALF, HALF, KP), f32)
    for r, c in T.Parallel(2 * BT, KP):
        along[r, c] = T.cast(rows[r // (2 * BC), r % (2 * BC), c], f32) * row_sum[r, c]
    for n, part, h, c in T.Parallel(BT // HALF, 2, HALF, KP):
        by_token[n, part, h, c] = along[n * BC + part * HALF + h, c]
    T.reduce_sum(by_token, dG_of, dim=1)
    for n, h, c in T.Parallel(BT // HALF, HALF, KP):
        dG_row[n * HALF + h, c] = dG_of[n, h, c]
    for i, c in T.Parallel(BT, KP):
        of_key[i, c] = key_sum[i, c]
    if p.l2norm:
        T.sync_threads()
        for r, c in T.Parallel(2 * BT, KP):
            of_own_key = T.cast(keys[r // (2 * BC), token_of(r) % BC, c], f32) * of_key[token_of(r), c]
            along[r, c] = along[r, c] + T.if_then_else(is_key(r) == 1, of_own_key, 0.0)
        T.reduce_sum(along, dot, dim=1)
    return dot


@T.macro
def store_gradients(p, rows, above, of_key, row_sum, factor, dot, scale, at, written):
    """Gradients of q and k from the sums of a chunk, by way of shared memory.

    ``above`` are the exponents of rows relative to their anchors, as are ``row_sum`` and ``of_key``, what rows and keys
    add; ``dot`` products of normalised rows and their gradients. ``written`` are gradients of q and of k, or the value
    heads' parts of them. Not unpacked: in a macro a tensor gets a new name, here that of another parameter, whose shape
    launches would check (TileLang 0.1.15).
    """
    R, KP = row_sum.shape
    done = T.alloc_shared((R, KP + PAD), rows.dtype)
    dq, dk = (HeadRows.of(x, at.start, at.i_hv) for x in written)
    for r, c in T.Parallel(R, KP):
        up = T.exp2(above[token_of(r), c])
        down = T.exp2(-above[token_of(r), c])
        own = up * row_sum[r, c]
        without_scale = T.if_then_else(is_key(r) == 0, 1.0 / scale, 1.0)
        found = T.if_then_else(is_key(r) == 0, scale * own, own + down * of_key[token_of(r), c])
        if p.l2norm:
            x_hat = T.cast(rows[r // (2 * BC), r % (2 * BC), c], "float32") * (without_scale * down)
            row_sum[r, c] = factor[row_of_q(token_of(r)) + BC * is_key(r)] * without_scale * (found - x_hat * dot[r])
        else:
            row_sum[r, c] = found
    for r, c in T.Parallel(R, KP):
        done[r, c] = T.cast(row_sum[r, c], rows.dtype)
    T.sync_threads()
    for r, c in T.Parallel(R, KP):
        if token_of(r) < at.count:
            if is_key(r) == 0:
                dq.rows[token_of(r), c] = done[r, c]
            else:
                dk.rows[token_of(r), c] = done[r, c]
