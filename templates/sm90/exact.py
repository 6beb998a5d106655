"""A chunk of fwd_prep and of bwd_gradients for gates of any size, in fp32 and without anchors, and a token alone.

Every pair of rows has its own exponentials, none above 1: slow, for the rare chunk that decays below 2^-110 within
eight tokens.
"""

from __future__ import annotations

from typing import Any

from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FORGOTTEN
from kda_tl.templates.sm90.rows import BC, BY_EIGHT, BY_SUB_CHUNK

BT = 64  # tokens a chunk
HALF = BC // 2
PART = 64  # channels whose pairs are taken at once
row_of, row_of_q = BY_EIGHT.row_of, BY_SUB_CHUNK.row_of


def read_row(x: HeadRows, count: Any, i: Any, c: Any, K: int) -> Any:
    """Channel c of the chunk's row i in fp32, 0 past its end and in padded channels; ``x`` begins with the chunk."""
    return T.cast(T.if_then_else((i < count) & (c < K), x.rows[i, c], 0), "float32")


@T.macro
def exact_pairs(gate, tensors, at, factors, both, scalars):
    """A chunk's factors and pairs for decays of any size, in place of what overflowed.

    Args:
        gate: the problem's.
        tensors: q, k, g, dt_bias; k_neg, qg, kg and decay, which are written.
        at: the chunk.
        factors: of rows of q and k, sub-chunk by sub-chunk, and beta, in shared memory.
        both: rows of Aqk above rows of L, sub-chunk by sub-chunk; written.
        scalars: decay_scale and slope of the gate.
    """
    q, k, g, dt_bias, k_neg, qg, kg, decay = tensors
    i_t, i_hv, count = at.i_t, at.i_hv, at.count
    q, k, g = (HeadRows.of(x, at.start, i_head) for x, i_head in ((q, at.i_h), (k, at.i_h), (g, i_hv)))
    factor, b_factor = factors
    decay_scale, slope = scalars
    K, BT, KP = gate.p.K, kg.shape[2], kg.shape[3]
    io = kg.dtype
    total = T.alloc_shared((BT, PART), "float32")
    run = T.alloc_fragment((PART,), "float32")
    weight = T.alloc_fragment((BT, PART), "float32")
    product = T.alloc_fragment((BT, PART), "float32")
    dot = T.alloc_fragment((BT,), "float32")
    for part in T.serial(KP // PART):
        T.clear(run)
        for i in T.serial(BT):
            for j in T.Parallel(PART):
                c = part * PART + j
                raw, bias = read_row(g, count, i, c, K), gate.bias(dt_bias, i_hv, c)
                step = gate.log2_decay(raw, decay_scale, slope, bias)
                clamped = T.if_then_else(step < FORGOTTEN, FORGOTTEN, step)
                run[j] = run[j] + T.if_then_else((i < count) & (c < K), clamped, 0.0)
                total[i, j] = run[j]
        T.sync_threads()
        for j in T.Parallel(PART):
            decay[i_t, i_hv, part * PART + j] = T.exp2(total[BT - 1, j])
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            qg[i_t, i_hv, i, c] = T.cast(read_row(q, count, i, c, K) * factor[row_of_q(i)] * T.exp2(total[i, j]), io)
        for i, j in T.Parallel(BT, PART):
            c = part * PART + j
            row = read_row(k, count, i, c, K) * factor[row_of_q(i) + BC]
            kg[i_t, i_hv, i, c] = T.cast(row * T.exp2(total[BT - 1, j] - total[i, j]), io)
            k_neg[i_t, i_hv, i, c] = T.cast(-row * T.exp2(total[i, j]), io)
        for n in T.serial(BT):
            for i, j in T.Parallel(BT, PART):
                key = read_row(k, count, n, part * PART + j, K) * factor[row_of_q(n) + BC]
                weight[i, j] = key * T.exp2(T.min(total[i, j] - total[n, j], 0.0))
            for x, below in ((q, 0), (k, BC)):
                for i, j in T.Parallel(BT, PART):
                    product[i, j] = read_row(x, count, i, part * PART + j, K) * weight[i, j]
                T.reduce_sum(product, dot, dim=1)
                T.sync_threads()
                for i in T.Parallel(BT):
                    beta = T.if_then_else(i // BC == n // BC, b_factor[i], 1.0)
                    keep = beta if below else T.if_then_else(i >= n, 1.0, 0.0)
                    before = T.if_then_else(part > 0, both[row_of_q(i) + below, n], 0.0)
                    both[row_of_q(i) + below, n] = before + dot[i] * factor[row_of_q(i) + below] * keep
                T.sync_threads()


@T.macro
def compute_lone(q, k, KP, start, i_h, factor, i_t, i_hv, Aqk):
    """The pair of a token that is alone in its chunk, from q and k as they came."""
    K, q, k = q.shape[2], HeadRows.of(q, start, i_h), HeadRows.of(k, start, i_h)
    product = T.alloc_fragment((1, KP), "float32")
    dot = T.alloc_fragment((1,), "float32")
    for i, c in T.Parallel(1, KP):
        product[i, c] = read_row(q, 1, i, c, K) * read_row(k, 1, i, c, K)
    T.reduce_sum(product, dot, dim=1)
    for i in T.Parallel(1):
        Aqk[i_t, i_hv, i, 0] = T.cast(dot[i] * factor[0] * factor[BC], Aqk.dtype)


@T.macro
def exact_gradients(gate, tensors, at, factors, sums, threads):
    """A chunk's gradients for decays of any size. A thread walks rows of a channel.

    Args:
        gate: the problem's.
        tensors: q, k, g, dt_bias, values, states, do, dv, dstates.
        at: the chunk.
        factors: of rows of q and k, and the pairs of dAqk and dKK, in shared memory; decay_scale and slope of the gate;
            scale.
        sums: cumsums in shared memory, the last in registers, dG of rows, keys, room for sums of q and of k in shared
            memory, what kg adds to the last row of dG in registers, and ``written`` as in :func:`store_gradients`. Of
            dG, the keys' part is then 0 and the rows' part all.
        threads: of the block.
    """
    q, k, g, dt_bias, values, states, d_o, dv, dstates = tensors
    i_t, i_hv, count = at.i_t, at.i_hv, at.count
    q, k = HeadRows.of(q, at.start, at.i_h), HeadRows.of(k, at.start, at.i_h)
    g, d_o, dv, dq, dk = (HeadRows.of(x, at.start, i_hv) for x in (g, d_o, dv, *sums[-1]))
    factor, pairs, decay_scale, slope, scale = factors
    G, last, dG, keys, of_q, of_k, of_keys, _ = sums
    K, V = gate.p.K, gate.p.V
    lanes = min(of_keys.shape[0], threads // K)
    thread = T.get_thread_binding()
    c = thread % K
    grown = T.alloc_shared((lanes, K), "float32")
    run = T.alloc_var("float32")
    of_query = T.alloc_var("float32")
    of_row = T.alloc_var("float32")
    of_key = T.alloc_var("float32")
    T.sync_threads()
    if thread < K:
        run = 0.0
        for i in T.serial(BT):
            step = gate.log2_decay(read_row(g, count, i, c, K), decay_scale, slope, gate.bias(dt_bias, i_hv, c))
            clamped = T.if_then_else(step < FORGOTTEN, FORGOTTEN, step)
            run = run + T.if_then_else(i < count, clamped, 0.0)
            G[i, c] = run
    T.sync_threads()
    run = 0.0
    if thread < lanes * K:
        for n in T.serial(BT // lanes):
            i = n * lanes + thread // K
            of_query = 0.0
            of_row = 0.0
            of_key = 0.0
            for v in T.serial(V):
                state = T.cast(states[i_t, i_hv, v, c], "float32")
                of_query = of_query + read_row(d_o, count, i, v, V) * state
                of_row = of_row - read_row(dv, count, i, v, V) * state
                of_key = of_key + T.cast(values[i_t, i_hv, v, i], "float32") * T.cast(
                    dstates[i_t, i_hv, v, c], "float32"
                )
            query = read_row(q, count, i, c, K) * factor[row_of_q(i)]
            row = read_row(k, count, i, c, K) * factor[row_of_q(i) + BC]
            of_query = of_query * T.exp2(G[i, c])
            of_row = of_row * T.exp2(G[i, c])
            of_key = of_key * T.exp2(G[BT - 1, c] - G[i, c])
            run = run + row * of_key
            for j in T.serial(BT):
                other = read_row(k, count, j, c, K) * factor[row_of_q(j) + BC]
                if j <= i:
                    weight = T.exp2(G[i, c] - G[j, c]) * other
                    of_query = of_query + T.cast(pairs[row_of(i), j], "float32") * weight
                    of_row = of_row + T.cast(pairs[row_of(i) + HALF, j], "float32") * weight
                if j >= i:
                    asking = read_row(q, count, j, c, K) * factor[row_of_q(j)]
                    of_asking = T.cast(pairs[row_of(j), i], "float32") * asking
                    of_other = T.cast(pairs[row_of(j) + HALF, i], "float32") * other
                    of_key = of_key + T.exp2(G[j, c] - G[i, c]) * (of_asking + of_other)
            of_q[i, c] = scale * of_query
            of_k[i, c] = of_row + of_key
            dG[i, c] = query * of_query + row * (of_row - of_key)
        grown[thread // K, c] = run
    T.sync_threads()
    for s, j in T.Parallel(*of_keys.shape):
        of_keys[s, j] = T.if_then_else(s < lanes, grown[T.min(s, lanes - 1), j], 0.0)
    for s, j in T.Parallel(*last.shape):
        last[s, j] = G[BT - 1, j]
    if thread < 2 * BT:
        i = thread // 2
        run = 0.0
        if thread % 2 == 0:
            rstd = factor[row_of_q(i)] / scale if gate.p.l2norm else 1.0
            if gate.p.l2norm:
                for n in T.serial(K):
                    run = run + read_row(q, count, i, n, K) * of_q[i, n] * rstd
            if i < count:
                for n in T.serial(K):
                    unit_q = read_row(q, count, i, n, K) * rstd
                    dq.rows[i, n] = T.cast(rstd * (of_q[i, n] - unit_q * run), keys.dtype)
        else:
            rstd_k = factor[row_of_q(i) + BC] if gate.p.l2norm else 1.0
            if gate.p.l2norm:
                for n in T.serial(K):
                    run = run + read_row(k, count, i, n, K) * of_k[i, n] * rstd_k
            if i < count:
                for n in T.serial(K):
                    unit_k = read_row(k, count, i, n, K) * rstd_k
                    dk.rows[i, n] = T.cast(rstd_k * (of_k[i, n] - unit_k * run), keys.dtype)
    T.sync_threads()
    for i, j in T.Parallel(BT, K):
        of_k[i, j] = 0.0
    for s, i, j in T.Parallel(*keys.shape):
        keys[s, i, j] = 0
    T.sync_threads()
