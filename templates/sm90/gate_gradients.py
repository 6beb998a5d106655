"""The end of bwd_gradients: gradients of decays from those of G, then of raw gates and of the gate's parameters."""

from kda_tl.templates.common.language import T
from kda_tl.templates.common.slopes import Slopes
from kda_tl.templates.sm90.rows import BC, NB


@T.macro
def sum_rows_after(dG_row, keys, of_key, of_keys, of_states, last, totals, suffix):
    """The gradient of each row's decay, ``suffix``, which is that of G summed from the row to the chunk's end.

    ``dG_row`` is what rows of q and of k give dG; keys are relative to their anchors, ``of_key`` what their product
    takes from dG. The last row gets ``of_keys`` from kg, and the products of state and gradient, ``of_states`` times
    2^last, either in parts that belong to sub-chunks. ``totals``, sums of sub-chunks, is room in shared memory.
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
def compute_gate(p, gates, raw, bias, A_log, lower_bound, at, totals, suffix, dA_log_part, ddt_bias_part):
    """Gradients of the raw gate from those of its decay, and the chunk's part of those of its parameters.

    The gate has an activation, ``gates`` are its rows in shared memory; ``raw`` and ``totals`` are room in registers
    and in shared memory; ``suffix`` holds gradients of decays, and becomes those of raw gates.
    """
    KP, f32 = suffix.shape[2], "float32"
    slopes = Slopes(p, fast=True)
    rate = T.alloc_fragment((1,), f32)
    of_slope = T.alloc_fragment((NB, KP), f32) if p.has_A_log else None
    of_bias = T.alloc_fragment((NB, KP), f32)
    rate[0] = T.exp(A_log[at.i_hv]) if p.has_A_log else 1.0
    if p.has_A_log:
        T.clear(of_slope)
    T.clear(of_bias)
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            raw[i, s, j] = gates[s * BC + i, j]
    for i in T.unroll(BC):
        for s, j in T.Parallel(NB, KP):
            x = T.cast(raw[i, s, j], f32) + bias[s, j]
            d = T.if_then_else((s * BC + i < at.count) & (j < p.K), suffix[i, s, j], 0.0)
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
            dA_log_part[at.i_t, at.i_hv] = head_parts[0] + head_parts[1] + head_parts[2] + head_parts[3]
    if p.has_dt_bias:
        T.sync_threads()
        for s, j in T.Parallel(NB, KP):
            totals[s, j] = of_bias[s, j]
        T.sync_threads()
        for j in T.Parallel(KP):
            ddt_bias_part[at.i_t, at.i_hv, j] = totals[0, j] + totals[1, j] + totals[2, j] + totals[3, j]
