"""The judge of the recurrent decode operators: a pool of states, read and written by index, in plain PyTorch.

    S <- exp(g + gk + gv) * S;    S <- S + k (step * (v - S^T k))^T;    o = scale * S^T q        S: [K, V], a value head

Slow on purpose, and in float64, as :mod:`kda_tl.reference` is: one sequence and one token after the other. What a call
would write in place goes into copies, and every sequence reads the pool as it was before the call.

Source: recurrence, gates and layouts as in flash-linear-attention v0.6.0 (``fla/ops/kda/fused_recurrent.py``,
``fla/ops/gated_delta_rule/fused_recurrent.py``); indices, accepted tokens and null rows as in vLLM and SGLang.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_tl.errors import InputError
from kda_tl.reference import activate_beta, activate_gate, l2norm


class DecodeResult(NamedTuple):
    """What a decode call computes, in new tensors of the dtype that it is computed in.

    Attributes:
        o: [B, T, HV, V], zeros for null sequences and for tokens after the last sequence.
        final_state: [N, HV, K, V], or [N, HV, V, K] if state_v_first: the state after each sequence's last token, its
            initial state if it has no tokens, zeros if it is null.
        pool: a copy of initial_state after the call; None without initial_state.
        intermediate_states: a copy of intermediate_states after the call; None where none was given.
    """

    o: Tensor
    final_state: Tensor
    pool: Tensor | None
    intermediate_states: Tensor | None


@torch.no_grad()
def decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    gate: str = "log",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_mode: str = "plain",
    use_l2norm: bool = False,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int = -1,
    update: bool = True,
    intermediate_states: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> DecodeResult:
    """What a recurrent decode call returns and writes (formula: this module's first lines).

    Float inputs may have any dtype and are cast to ``dtype`` first; index tensors hold integers. All may lie on any one
    device. Nothing is written into them, and no gradient flows.

    Args:
        q: queries, [B, T, H, K].
        k: keys, [B, T, H, K].
        v: values, [B, T, HV, V]; HV is a multiple of H, and value head j uses query/key head ``j // (HV // H)``.
        g: raw gate, [B, T, HV, K], or [B, T, HV] for all channels; the log decay in nats a token if gate is "log".
            None means no decay.
        beta: raw step size, [B, T, HV], or [B, T, HV, V] for one a value channel; None means a step of 1.
        gk: log decay of key channels in nats, [B, T, HV, K], added to the activated g; None means 0.
        gv: log decay of value channels in nats, [B, T, HV, V], added likewise; None means 0.
        scale: factor on o; None means ``K ** -0.5``.
        gate: see :func:`kda_tl.reference.activate_gate`, as for A_log, dt_bias and lower_bound.
        A_log: [HV].
        dt_bias: [HV * K], or [HV] if g has one gate a head.
        lower_bound: nats a token.
        beta_mode: see :func:`kda_tl.reference.activate_beta`.
        use_l2norm: q and k go through :func:`kda_tl.reference.l2norm`.
        initial_state: [N, HV, K, V], the state before each sequence's first token; None means zeros. With
            ssm_state_indices a pool, [slots, HV, K, V].
        state_v_first: states are [V, K] instead of [K, V], all of them.
        cu_seqlens: [N + 1], bounds of packed sequences in a batch of one; without it N is B.
        ssm_state_indices: slot that a sequence reads, [N] or [N, W], where column 0 is read. A sequence whose slot is
            null, at most pad_slot_id, has zeros for results and writes nothing at all.
        output_state_indices: slots to write, [N] or [N, W], in place of ssm_state_indices. Without either, sequence n
            writes row n.
        num_accepted_tokens: [N]: column ``clamp(accepted - 1, 0, W - 1)`` of ssm_state_indices is read.
        pad_slot_id: the largest index that stands for no slot.
        update: the pool is written: at slots [N] the state after the last token, or the initial one if there is none;
            at slots [N, W] the state after each token t, in column t. Null slots are left out.
        intermediate_states: [rows, steps, HV, K, V]: the state after token t goes to [row, t].
        intermediate_state_indices: row of a sequence, [N]; below 0 none is written. Without it sequence n has row n.
        retrieve_parent_token: tree of tokens, [N, T]: token t > 0 starts from the state after token ``parent < t``, or
            from the initial one if that is below 0; so does token 0. The state after a parent is read back from
            intermediate_states, and so is rounded to the dtype given there: give it as ``dtype`` for none of that.
            A sequence without a row is null here.
        dtype: what everything is computed in.

    Returns:
        o, the final states, and copies of the pool and of the intermediate states with what the call writes. Only
        states read back in a tree are rounded to less than dtype.

    Raises:
        InputError: a shape, a mode, cu_seqlens or an index does not fit, or an argument lacks what it belongs to.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[-2:]
    if HV % H:
        raise InputError(f"HV={HV} value heads cannot share H={H} query/key heads: make HV a multiple of H.")
    bounds = [n * T for n in range(B + 1)] if cu_seqlens is None else _read_bounds(cu_seqlens, B, T)
    N, longest = len(bounds) - 1, max((end - first for first, end in pairwise(bounds)), default=0)
    pooled, tree = ssm_state_indices is not None, retrieve_parent_token is not None
    targets = ssm_state_indices if output_state_indices is None else output_state_indices
    if initial_state is None and targets is not None:
        raise InputError("slots are those of a pool: pass initial_state of shape [slots, HV, K, V].")
    if intermediate_states is None and (tree or intermediate_state_indices is not None):
        raise InputError("retrieve_parent_token and intermediate_state_indices need intermediate_states.")
    if tree and (cu_seqlens is not None or update):
        raise InputError("a tree is only verified: pass update=False, and no cu_seqlens.")
    if update and targets is not None and targets.dim() == 2 and targets.shape[1] < longest:
        raise InputError(f"{targets.shape[1]} slots cannot take the states after {longest} tokens: pass as many.")
    head, state = (B, T, HV), (HV, V, K) if state_v_first else (HV, K, V)
    _check_shape("k", k, (B, T, H, K))
    _check_shape("v", v, (*head, V))
    _check_shape("g", g, head, (*head, K))
    _check_shape("beta", beta, head, (*head, V))
    _check_shape("gk", gk, (*head, K))
    _check_shape("gv", gv, (*head, V))
    _check_shape("initial_state", initial_state, (None if pooled else N, *state))
    _check_shape("intermediate_states", intermediate_states, (None, None, *state))
    read = _read_sources(ssm_state_indices, num_accepted_tokens, N)
    write = _read_indices("output_state_indices", targets, (N,), (N, None))
    rows = _read_indices("intermediate_state_indices", intermediate_state_indices, (N,)) or range(N)
    parents = _read_indices("retrieve_parent_token", retrieve_parent_token, (N, T))

    # Absent gates and steps change nothing. A head of a token is columns q and k, [K, 1], and a row v, [1, V].
    q, k = (l2norm(x.to(dtype)) if use_l2norm else x.to(dtype) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q * (K**-0.5 if scale is None else scale), k))
    A_log, dt_bias = (None if x is None else x.to(dtype) for x in (A_log, dt_bias))
    g, gk, gv, beta = (
        None if x is None else (x if x.dim() == 4 else x[..., None]).to(dtype) for x in (g, gk, gv, beta)
    )
    if g is not None:
        g = activate_gate(g, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    zero = v.new_zeros((*head, 1), dtype=dtype)
    g, gk, gv = (zero if x is None else x for x in (g, gk, gv))
    step = zero + 1 if beta is None else activate_beta(beta, beta_mode)
    columns = (x[..., :, None].flatten(0, 1) for x in (q, k, g + gk))
    tokens = (*columns, *(x[..., None, :].flatten(0, 1) for x in (v.to(dtype), gv, step)))

    o = v.new_zeros((B * T, HV, V), dtype=dtype)
    final_state = v.new_zeros((N, *state), dtype=dtype)
    pool = None if initial_state is None else initial_state.to(dtype, copy=True)
    kept = None if intermediate_states is None else intermediate_states.to(dtype, copy=True)

    def take(states: Tensor, *place: int) -> Tensor:
        """A view [HV, K, V] of the states at a slot, or at a row and a step; none is counted from the end."""
        if any(not 0 <= index < size for index, size in zip(place, states.shape, strict=False)):
            raise InputError(f"there is no place {list(place)} among {list(states.shape[: len(place)])} for states.")
        return states[place].mT if state_v_first else states[place]

    for n, (first, end) in enumerate(pairwise(bounds)):
        if (pooled and read[n] <= pad_slot_id) or (tree and rows[n] < 0):
            continue
        slots = n if write is None else write[n]
        initial = take(final_state if initial_state is None else initial_state, read[n]).to(dtype, copy=True)
        S = initial
        for t in range(end - first):
            if parents is not None and kept is not None and intermediate_states is not None:
                parent = parents[n][t] if t else -1
                if parent >= t:
                    raise InputError(f"the parent of token {t} must be below {t}, got {parent}.")
                S = initial if parent < 0 else take(kept, rows[n], parent).to(intermediate_states.dtype).to(dtype)
            o[first + t], S = _advance(S, *(x[first + t] for x in tokens))
            if kept is not None and rows[n] >= 0:
                take(kept, rows[n], t).copy_(S)
            if pool is not None and update and isinstance(slots, list) and slots[t] > pad_slot_id:
                take(pool, slots[t]).copy_(S)
        take(final_state, n).copy_(S)
        if pool is not None and update and not isinstance(slots, list) and (write is None or slots > pad_slot_id):
            take(pool, slots).copy_(S)
    return DecodeResult(o.view(B, T, HV, V), final_state, pool, kept)


def _advance(
    S: Tensor, q: Tensor, k: Tensor, key_decay: Tensor, v: Tensor, value_decay: Tensor, step: Tensor
) -> tuple[Tensor, Tensor]:
    """The output [HV, V] of a token and the states [HV, K, V] after it, from those before it."""
    S = (key_decay + value_decay).exp() * S
    S = S + k @ (step * (v - k.mT @ S))
    return (q.mT @ S).squeeze(-2), S


def _read_sources(indices: Tensor | None, accepted: Tensor | None, N: int) -> list[int]:
    """The slot or row that each sequence reads; null ones as they are."""
    slots = _read_indices("ssm_state_indices", indices, (N,), (N, None)) or list(range(N))
    counts = _read_indices("num_accepted_tokens", accepted, (N,)) or [1] * N
    if accepted is not None and (indices is None or indices.dim() != 2):
        raise InputError("num_accepted_tokens chooses a column: pass ssm_state_indices of shape [N, W].")
    return [
        row[min(max(count - 1, 0), len(row) - 1)] if isinstance(row, list) else row
        for row, count in zip(slots, counts, strict=True)
    ]


def _read_bounds(cu_seqlens: Tensor, B: int, T: int) -> list[int]:
    if B != 1:
        raise InputError(f"cu_seqlens needs packed sequences, B=1, got B={B}: flatten the batch into the tokens.")
    bounds = _read_indices("cu_seqlens", cu_seqlens, (None,)) or [-1]
    if bounds[0] != 0 or bounds[-1] > T or sorted(bounds) != bounds:
        raise InputError(f"cu_seqlens must start at 0, never decrease and end at most at T={T}, got {bounds}.")
    return bounds


def _read_indices(name: str, tensor: Tensor | None, *shapes: tuple[int | None, ...]) -> list[Any] | None:
    _check_shape(name, tensor, *shapes)
    if tensor is not None and tensor.is_floating_point():
        raise InputError(f"{name} must hold integers, got {tensor.dtype}.")
    return None if tensor is None else tensor.tolist()


def _check_shape(name: str, tensor: Tensor | None, *shapes: tuple[int | None, ...]) -> None:
    """A tensor that is given must have one of the shapes, in which None is any size."""
    if tensor is None:
        return
    for shape in shapes:
        if tensor.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True)):
            return
    wanted = " or ".join(str(list(shape)) for shape in shapes).replace("None", "any")
    raise InputError(f"{name} must have the shape {wanted}, got {list(tensor.shape)}.")
