"""Parts of bwd_gradients: the end of what q and k get, and gradients for gates of any size."""

import tilelang.language as T

from kda_tl.templates._prep import BC
from kda_tl.templates._prep import _read as read_row
from kda_tl.templates.fwd_gate import FORGOTTEN


@T.macro
def put_gradients(p, rows, above, of_key, row_sum, factor, dot, scale, start, count, i_h, dq, dk):
    """Gradients of q and k from the sums of a chunk, by way of shared memory.

    Args:
        p: the problem.
        rows: of q, scaled, and of k, relative to their anchors, sub-chunk by sub-chunk.
        above: the exponents that they are taken with.
        of_key: what keys add to the gradient of k, relative to their anchors.
        row_sum: what rows add, relative to the same anchors, in registers.
        factor: of the norms, and of the scale.
        dot: of normalised rows and their gradients.
        scale: of q.
        start: the first token.
        count: of tokens.
        i_h: the head.
        dq: gradient of q; written.
        dk: gradient of k; written.
    """
    R, KP = row_sum.shape
    K = dq.shape[2]
    done = T.alloc_shared((R, KP), dq.dtype)
    for r, c in T.Parallel(R, KP):
        i = r // (2 * BC) * BC + r % BC
        own = T.exp2(above[i, c]) * row_sum[r, c]
        of_own_key = T.exp2(-above[i, c]) * of_key[i, c]
        row_sum[r, c] = T.if_then_else(r // BC % 2 == 0, scale * own, own + of_own_key)
    if p.l2norm:
        for r, c in T.Parallel(R, KP):
            without_scale = T.if_then_else(r // BC % 2 == 0, 1.0 / scale, 1.0)
            unit = T.cast(rows[r // (2 * BC), r % (2 * BC), c], "float32") * without_scale
            unit_here = unit * T.exp2(-above[r // (2 * BC) * BC + r % BC, c])
            row_sum[r, c] = factor[r] * without_scale * (row_sum[r, c] - unit_here * dot[r])
    T.copy(row_sum, done)
    T.sync_threads()
    for r, c in T.Parallel(R, KP):
        i = r // (2 * BC) * BC + r % BC
        if (i < count) & ((c < K) if K < KP else (r >= 0)):
            if r // BC % 2 == 0:
                dq[start + i, i_h, c] = done[r, c]
            else:
                dk[start + i, i_h, c] = done[r, c]


@T.macro
def take_gradients_exactly(gate, tensors, at, factors, sums):
    """A chunk's gradients for decays of any size: no exponent above 0, no anchor. A thread walks rows of a channel.

    Every pair of rows has its own exponential: slow, for the rare chunk that decays below 2^-110 within eight tokens.

    Args:
        gate: the problem's.
        tensors: q, k, g, dt_bias, values, states, do, dv, dstates.
        at: chunk, head, first token and number of tokens.
        factors: of rows of q and k and the pairs of dAqk and dKK, sub-chunk by sub-chunk, in shared memory; unit and
            slope of the gate; scale.
        sums: cumsums, gradients of keys, keys and dG of rows in shared memory, what kg adds to its last row in
            registers, and the gradients of q and k; written. Of dG, the keys' part is then 0 and the rows' part all.
    """
    q, k, g, dt_bias, values, states, d_o, dv, dstates = tensors
    i_t, i_h, start, count = at
    factor, pairs, unit, slope, scale = factors
    G, dG, keys, found, of_keys, dq, dk = sums
    (BT, KP), K, V = keys.shape, gate.p.K, gate.p.V
    lanes = 256 // KP
    thread = T.get_thread_binding()
    c = thread % KP
    grown = T.alloc_shared((4, KP), "float32")
    run = T.alloc_var("float32")
    of_query = T.alloc_var("float32")
    of_row = T.alloc_var("float32")
    of_key = T.alloc_var("float32")
    T.sync_threads()
    if thread < KP:
        run = 0.0
        for i in T.serial(BT):
            step = gate.log2_decay(read_row(g, start, count, i, i_h, c, K), unit, slope, gate.bias(dt_bias, i_h, c))
            clamped = T.if_then_else(step < FORGOTTEN, FORGOTTEN, step)
            run = run + T.if_then_else((i < count) & (c < K), clamped, 0.0)
            G[i, c] = run
    T.sync_threads()
    run = 0.0
    for n in T.serial(BT // lanes):
        i = n * lanes + thread // KP
        r = i // BC * 2 * BC + i % BC
        of_query = 0.0
        of_row = 0.0
        of_key = 0.0
        for v in T.serial(V):
            state = T.cast(states[i_t, i_h, v, c], "float32")
            of_query = of_query + read_row(d_o, start, count, i, i_h, v, V) * state
            of_row = of_row - read_row(dv, start, count, i, i_h, v, V) * state
            of_key = of_key + T.cast(values[i_t, i_h, v, i], "float32") * T.cast(dstates[i_t, i_h, v, c], "float32")
        query = read_row(q, start, count, i, i_h, c, K) * factor[r]
        row = read_row(k, start, count, i, i_h, c, K) * factor[r + BC]
        of_query = of_query * T.exp2(G[i, c])
        of_row = of_row * T.exp2(G[i, c])
        of_key = of_key * T.exp2(G[BT - 1, c] - G[i, c])
        run = run + row * of_key
        for j in T.serial(BT):
            m = j // BC * 2 * BC + j % BC
            other = read_row(k, start, count, j, i_h, c, K) * factor[m + BC]
            if j <= i:
                weight = T.exp2(G[i, c] - G[j, c]) * other
                of_query = of_query + T.cast(pairs[r, j], "float32") * weight
                of_row = of_row + T.cast(pairs[r + BC, j], "float32") * weight
            if j >= i:
                asking = read_row(q, start, count, j, i_h, c, K) * factor[m]
                back = T.cast(pairs[m, i], "float32") * asking + T.cast(pairs[m + BC, i], "float32") * other
                of_key = of_key + T.exp2(G[j, c] - G[i, c]) * back
        found[r, c] = scale * of_query
        found[r + BC, c] = of_row + of_key
        dG[i, c] = query * of_query + row * (of_row - of_key)
    grown[thread // KP, c] = run
    T.sync_threads()
    for s, j in T.Parallel(*of_keys.shape):
        of_keys[s, j] = T.if_then_else(s < lanes, grown[s, j], 0.0)
    if thread < 2 * BT:
        run = 0.0
        r = thread
        i = r // (2 * BC) * BC + r % BC
        if gate.p.l2norm:
            for n in T.serial(K):
                if r // BC % 2 == 0:
                    run = run + read_row(q, start, count, i, i_h, n, K) * found[r, n] * (factor[r] / scale)
                else:
                    run = run + read_row(k, start, count, i, i_h, n, K) * found[r, n] * factor[r]
        if i < count:
            for n in T.serial(K):
                if r // BC % 2 == 0:
                    rstd = factor[r] / scale if gate.p.l2norm else 1.0
                    unit_q = read_row(q, start, count, i, i_h, n, K) * rstd
                    dq[start + i, i_h, n] = T.cast(rstd * (found[r, n] - unit_q * run), dq.dtype)
                else:
                    rstd_k = factor[r] if gate.p.l2norm else 1.0
                    unit_k = read_row(k, start, count, i, i_h, n, K) * rstd_k
                    dk[start + i, i_h, n] = T.cast(rstd_k * (found[r, n] - unit_k * run), dk.dtype)
    T.sync_threads()
    for r, j in T.Parallel(2 * BT, KP):
        found[r, j] = T.if_then_else(r // BC % 2 == 0, dG[r // (2 * BC) * BC + r % BC, j], 0.0)
    T.sync_threads()
    for i, j in T.Parallel(BT, KP):
        dG[i, j] = 0.0
    for i, j in T.Parallel(BT, KP):
        keys[i, j] = 0
    T.sync_threads()
