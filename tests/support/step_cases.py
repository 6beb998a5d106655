"""Calls of the recurrent operators: drawn as engines make them, in poisoned memory, and judged.

:func:`draw_step` draws a call: tokens, and the states of one of ``KINDS``. :func:`assert_right` makes it, on the device
that its tensors are on, and compares results with the judge, and all other memory with what it was before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from support.cases import TORCH, bounds_of
from support.decode_cases import TOKENS, Args, ints, normal, uniform
from torch import Tensor

from kda_tl.ops.recurrent_gated_delta_rule import fused_recurrent_gated_delta_rule
from kda_tl.ops.recurrent_kda import fused_recurrent_kda
from kda_tl.reference import l2norm, relative_error
from kda_tl.reference_decode import DecodeResult, decode_reference

OPERATORS: dict[str, Callable[..., Any]] = {
    "kda": fused_recurrent_kda,
    "gdn": fused_recurrent_gated_delta_rule,
}
# Relative to the norm. fp32: a few sums of up to 256 products; others: results are rounded once to their type
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 3e-3}
# What fills states that no call may read or write: large enough to be seen in any sum, and a number of every type
UNTOUCHED = {torch.float32: 1e30, torch.bfloat16: 1e30, torch.float16: 6e4}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = (
    "fresh",  # no state before the first token
    "rows",  # a state a sequence, given and returned
    "rows in place",
    "pool",
    "columns",  # a slot a token, read by how many were accepted
    "split pool",  # read from one slot, written to another
    "split columns",
    "verify",  # no state is written but those after every token, to a buffer
    "keep",  # both
    "tree",
    "fresh tree",
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of tokens: heads, channels of an odd number, and which gates and steps there are."""

    H: int = 2
    HV: int = 4
    K: int = 19
    V: int = 13
    gate: str = "softplus"
    beta: str = "sigmoid"
    l2norm: bool = True
    wide_beta: bool = False
    key_gate: bool = False
    value_gate: bool = False
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Types:
    """Element types by their short names, and where tensors lie."""

    io: str = "fp32"
    gates: str = "fp32"
    beta: str = "fp32"
    state: str = "fp32"
    index: torch.dtype = torch.int32
    device: str = "cpu"


def draw_tokens(rng: random.Random, name: str, B: int, T: int, shape: Shape = Shape(), types: Types = Types()) -> Args:
    """Arguments for B sequences of T tokens of an operator, without states. Decays are slow enough to remember."""
    s, scalar = shape, name == "gdn"
    io, gates, steps = TORCH[types.io], TORCH[types.gates], TORCH[types.beta]
    raw = s.gate != "log"
    width = [] if scalar else [s.K]
    k = normal(rng, B, T, s.H, s.K)
    g = normal(rng, B, T, s.HV, *width) - 1 if raw else -0.3 * uniform(rng, B, T, s.HV, *width)
    beta = (B, T, s.HV, s.V) if s.wide_beta else (B, T, s.HV)
    tokens = {
        "q": normal(rng, B, T, s.H, s.K).to(io),
        "k": (k if s.l2norm else l2norm(k)).to(io),
        "v": normal(rng, B, T, s.HV, s.V).to(io),
        "g": g.to(gates),
        "beta": (uniform(rng, *beta) if s.beta == "plain" else normal(rng, *beta)).to(steps),
    }
    if s.key_gate:
        tokens["gk"] = (-0.3 * uniform(rng, B, T, s.HV, s.K)).to(gates)
    if s.value_gate:
        tokens["gv"] = (-0.3 * uniform(rng, B, T, s.HV, s.V)).to(gates)
    flags: Args = {
        "scale": rng.choice((None, 0.7)),
        "use_qk_l2norm_in_kernel": s.l2norm,
        "use_gate_in_kernel": raw,
        "use_beta_sigmoid_in_kernel": s.beta != "plain",
        "allow_neg_eigval": s.beta == "sigmoid2",
    }
    if raw:
        flags["A_log"] = normal(rng, s.HV).float() - 1
        flags["dt_bias"] = normal(rng, s.HV * (1 if scalar else s.K)).float() if s.bias else None
    if s.gate == "safe":
        flags["lower_bound"] = -rng.uniform(0.1, 5)
    return move(tokens | flags, types.device)


def move(a: Args, device: str) -> Args:
    """The same arguments on a device."""
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def pack(a: Args, lengths: Sequence[int], padding: int = 0, dtype: torch.dtype = torch.int32) -> Args:
    """A batch of one as packed sequences; tokens after them hold NaN."""
    tokens = {name: a[name].clone() for name in TOKENS if a.get(name) is not None}
    bounds = bounds_of(lengths)
    for x in tokens.values():
        assert x.shape[:2] == (1, bounds[-1] + padding)
        x[:, bounds[-1] :] = torch.nan
    return a | tokens | {"cu_seqlens": ints(*bounds, dtype=dtype).to(a["q"].device)}


def fuse(a: Args, align: int = 1) -> Args:
    """Tokens as views of projections, one of each dtype, in which NaN lies between them; they begin at multiples."""
    dtypes = dict.fromkeys(a[name].dtype for name in TOKENS if a.get(name) is not None)
    views = {}
    for dtype in dtypes:
        names = [name for name in TOKENS if a.get(name) is not None and a[name].dtype == dtype]
        B, T = a[names[0]].shape[:2]
        sizes = [a[name].shape[2:].numel() for name in names]
        room = [-(-(size + 3) // align) * align for size in sizes]
        whole = torch.full((B, T, sum(room)), torch.nan, dtype=dtype, device=a["q"].device)
        first = 0
        for name, size, step in zip(names, sizes, room, strict=True):
            view = whole[:, :, first : first + size]
            view.copy_(a[name].flatten(2))
            views[name] = view.unflatten(2, a[name].shape[2:])
            first += step
    return a | views


def draw_pool(
    rng: random.Random, a: Args, slots: int, read: Sequence[int], types: Types, *, v_first: bool, gap: int = 7
) -> Tensor:
    """States of drawn values in the slots that are read, a number that no call may meet in the others, NaN between."""
    HV, V, K = *a["v"].shape[2:], a["q"].shape[3]
    dims = (HV, V, K) if v_first else (HV, K, V)
    dtype, size = TORCH[types.state], HV * K * V
    memory = torch.full((slots * (size + gap),), torch.nan, dtype=dtype, device=types.device)
    pool = memory.as_strided((slots, *dims), (size + gap, dims[1] * dims[2], dims[2], 1))
    pool.fill_(UNTOUCHED[dtype])
    for slot in read:
        pool[slot] = normal(rng, *dims).to(dtype).to(types.device)
    return pool


def draw_step(
    rng: random.Random,
    name: str,
    kind: str,
    *,
    N: int = 4,
    T: int | None = None,
    lengths: Sequence[int] | None = None,
    padding: int = 0,
    shape: Shape = Shape(),
    types: Types = Types(),
    v_first: bool = False,
    pad: int = -1,
    null: Sequence[int] | None = None,
    accepted: Sequence[int] | None = None,
    placed: bool | None = None,
    fused: bool = True,
    align: int = 1,
    gap: int = 7,
    width: int | None = None,
    final: bool | None = None,
) -> Args:
    """Arguments of a call of some kind; lengths make it one of packed sequences, otherwise each of N has T tokens.

    Of sequences that read a slot of a pool some are null, a quarter unless given, and have stale slots beside it.
    """
    if lengths is None:
        T = rng.randint(1, 4) if T is None else T
        a, longest = draw_tokens(rng, name, N, T, shape, types), T
    else:
        N, longest = len(lengths), max(lengths, default=0)
        a = draw_tokens(rng, name, 1, sum(lengths) + padding, shape, types)
        a = pack(a, lengths, padding, types.index)
    a |= {"state_v_first": v_first, "output_final_state": rng.random() < 0.5 if final is None else final}
    if fused:
        a = fuse(a, align)

    def put(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=types.index).to(types.device)

    if kind in ("rows", "rows in place"):
        a["initial_state"] = draw_pool(rng, a, N, range(N), types, v_first=v_first, gap=gap)
        a["inplace_final_state"] = kind == "rows in place"
        a["output_final_state"] |= kind == "rows"
    elif not kind.startswith("fresh"):
        a |= draw_slots(rng, a, kind, N, longest, types, put, v_first, pad, null, accepted, gap, width)
    if kind in ("verify", "keep", "tree", "fresh tree"):
        placed = rng.random() < 0.5 if placed is None else placed
        rows, steps = N + 2, width or longest + rng.randint(0, 1)
        a["intermediate_states"] = draw_pool(rng, a, rows * max(steps, 1), (), types, v_first=v_first, gap=0).unflatten(
            0, (rows, max(steps, 1))
        )
        if placed:
            order = [-1 if rng.random() < 0.2 else row for row in rng.sample(range(rows), N)]
            a["intermediate_state_indices"] = put(order)
    if kind.endswith("tree"):
        parents = [
            [rng.randrange(-1, t) if t else rng.choice((-1, 0, longest)) for t in range(longest)] for _ in range(N)
        ]
        a |= {"retrieve_parent_token": put(parents).view(N, longest), "disable_state_update": True}
    return a


def draw_slots(
    rng: random.Random,
    a: Args,
    kind: str,
    N: int,
    longest: int,
    types: Types,
    put: Callable[[Any], Tensor],
    v_first: bool,
    pad: int,
    null: Sequence[int] | None,
    accepted: Sequence[int] | None,
    gap: int,
    width: int | None,
) -> Args:
    """A pool, and who reads and writes which slot of it."""
    W = (width or max(longest, 1) + rng.randint(0, 1)) if "columns" in kind else 1
    slots = 2 * N * W + 2
    order = torch.tensor(rng.sample(range(pad + 1, slots), 2 * N * W)).view(2, N, W)
    source, target = order[0].clone(), order[1].clone()
    counts = [rng.choice((0, 1, W, W + 3, rng.randint(1, W))) for _ in range(N)] if accepted is None else accepted
    column = [min(max(count, 1), W) - 1 for count in counts]
    if null is None:
        null = [n for n in range(N) if rng.random() < 0.25]
    for n in range(N):
        if n in null:
            source[n, column[n]] = pad - rng.choice((0, 1, 7))
        elif W > 1 and rng.random() < 0.3:  # a state that goes nowhere
            other = rng.choice([j for j in range(W) if j != column[n]])
            (target if "split" in kind else source)[n, other] = pad
    read = [int(source[n, column[n]]) for n in range(N) if n not in null]
    found: Args = {
        "initial_state": draw_pool(rng, a, slots, read, types, v_first=v_first, gap=gap),
        "ssm_state_indices": put(source) if W > 1 or "columns" in kind else put(source[:, 0]),
        "pad_slot_id": pad,
        "inplace_final_state": kind in ("pool", "columns", "keep")
        or (kind in ("split pool", "verify") and rng.random() < 0.5),
    }
    if "columns" in kind:
        found["num_accepted_tokens"] = put(counts)
    if "split" in kind:
        found["output_state_indices"] = put(target) if "columns" in kind else put(target[:, 0])
    if kind == "verify":
        found["disable_state_update"] = True
    return found


def truth(a: Args) -> DecodeResult:
    """What a call computes, in float64."""
    given = {name: x for name, x in a.items() if isinstance(x, Tensor) and name != "out"}
    safe = a.get("lower_bound") is not None
    writes = a.get("inplace_final_state") or a.get("output_state_indices") is not None
    return decode_reference(
        **{"g": None, "beta": None} | given,
        scale=a.get("scale"),
        gate="log" if not a.get("use_gate_in_kernel") else "safe" if safe else "softplus",
        lower_bound=a.get("lower_bound"),
        beta_mode="sigmoid2"
        if a.get("allow_neg_eigval")
        else "sigmoid"
        if a.get("use_beta_sigmoid_in_kernel")
        else "plain",
        use_l2norm=bool(a.get("use_qk_l2norm_in_kernel")),
        state_v_first=bool(a.get("state_v_first")),
        pad_slot_id=a.get("pad_slot_id", -1),
        update=bool(writes and not a.get("disable_state_update")),
    )


def memory_of(x: Tensor) -> Tensor:
    """The bits of all the memory that a tensor is a view of."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    return whole.view(_BITS[x.element_size()])


def assert_only_there(x: Tensor, before: Tensor, changed: Tensor) -> None:
    """Of all the memory around a tensor nothing changed but these elements of it."""
    after = memory_of(x)
    may = torch.zeros(after.shape, dtype=torch.bool, device=x.device)
    may.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(changed)
    moved = (after != before) & ~may
    assert not moved.any(), f"{int(moved.sum())} elements were written to that should not be"


def assert_states(x: Tensor, before: Tensor, was: Tensor, expected: Tensor, what: str) -> None:
    """States that a call wrote are right, and all other memory has the bits of before."""
    changed = (expected != was.to(expected)).flatten(2 if x.dim() == 5 else 1).any(-1)
    changed = changed.view(*changed.shape, *[1] * (x.dim() - changed.dim())).expand(x.shape)
    assert_only_there(x, before, changed)
    if changed.any():
        error = relative_error(x[changed], expected[changed])
        assert error < TOLERANCE[x.dtype], f"{what}: {error}"


def assert_right(
    name: str, a: Args, tolerance: float | None = None, by_kernel: bool = True, meant: Args | None = None
) -> tuple[Tensor, Tensor | None]:
    """A call gives what the judge says, and leaves all other memory alone. Returns what it returns.

    The judge is told of ``meant`` in the place of the arguments, where the call rounds some of them.

    A tree reads states back that were rounded to the buffer's type, some of them to the other neighbour. On the CPU
    target the kernel has a buffer of fp32, which is rounded in the end; what serves without a compiler has not.
    """
    judged, rounded = move(meant or a, "cpu"), 0.0
    if "retrieve_parent_token" in a and a["q"].is_cpu and by_kernel:
        judged["intermediate_states"] = judged["intermediate_states"].float()
    elif "retrieve_parent_token" in a:
        rounded = TOLERANCE[a["intermediate_states"].dtype]
    expected = DecodeResult(*(None if x is None else x.to(a["q"].device) for x in truth(judged)))
    given = {key: x for key, x in a.items() if isinstance(x, Tensor)}
    before = {key: memory_of(x).clone() for key, x in given.items()}
    was = {key: given[key].clone() for key in ("initial_state", "intermediate_states") if key in given}
    o, state = OPERATORS[name](**a)
    assert o.dtype == a["v"].dtype and o.shape == a["v"].shape and o.is_contiguous()
    assert o is a["out"] if "out" in a else o.data_ptr() not in [x.data_ptr() for x in given.values()] or not o.numel()
    assert not o[expected.o == 0].any(), "zeros of null sequences and of padding"
    error = relative_error(o, expected.o)
    assert error < max(tolerance or TOLERANCE[o.dtype], rounded), f"o: {error}"
    if a.get("inplace_final_state"):
        assert state is a["initial_state"]
    elif a.get("output_final_state"):
        assert state is not None and state.dtype == torch.float32 and state.is_contiguous()
        assert not state[expected.final_state == 0].any(), "zeros of null sequences"
        error = relative_error(state, expected.final_state)
        assert error < max(TOLERANCE[torch.float32], rounded), f"final state: {error}"
    else:
        assert state is None
    for key, x in given.items():
        if key in was:
            result = expected.pool if key == "initial_state" else expected.intermediate_states
            assert result is not None
            assert_states(x, before[key], was[key], result, key)
        elif key != "out":
            assert torch.equal(memory_of(x), before[key]), f"{key} was written to"
    return o, state


def cut_tokens(a: Args, first: int, end: int) -> Args:
    """Some tokens of every sequence."""
    return a | {name: a[name][:, first:end] for name in TOKENS if a.get(name) is not None}


def unpack(a: Args, x: Tensor) -> list[Tensor]:
    """What tokens have, sequence by sequence."""
    return [x[0, first:end] for first, end in pairwise(a["cu_seqlens"].tolist())]
