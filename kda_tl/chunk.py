"""The operator ``chunk_kda``: arguments in, validated problem, plan, kernels, results."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from kda_tl.arguments import TENSORS, check_flags, check_gradients, check_tensors, parse_problem
from kda_tl.device import Device
from kda_tl.dispatch import Choice, choose, context, prepare
from kda_tl.errors import InputError, KdaTlWarning, UnsupportedError
from kda_tl.layout import dense_bounds, make_layout, packed_bounds
from kda_tl.problem import Problem
from kda_tl.program import Compute
from kda_tl.reference import recurrent_kda

Tensor = torch.Tensor


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    return_intermediate_states: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi Delta Attention over whole sequences, chunk by chunk.

        S_t = (I - beta_t k_t k_t^T) diag(exp g_t) S_{t-1} + beta_t k_t v_t^T,    o_t = scale * S_t^T q_t

    Args:
        q: queries, [B, T, H, K], bf16, fp16 or fp32; K at most 256.
        k: keys, like q.
        v: values, [B, T, HV, V], dtype of q; V at most 256, HV a multiple of H.
        g: log decay in nats, [B, T, HV, K], bf16, fp16 or fp32; with ``use_gate_in_kernel`` the raw gate.
        beta: step size, [B, T, HV], bf16, fp16 or fp32; with ``use_beta_sigmoid_in_kernel`` its logit.
        scale: factor of q, K ** -0.5 unless given.
        initial_state: fp32 [N, HV, K, V] ([N, HV, V, K] with ``state_v_first``), N sequences; zeros unless given.
        output_final_state: also return the state after the last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) over K.
        use_gate_in_kernel: log decay = -exp(A_log) * softplus(g + dt_bias), or, with ``lower_bound``,
            lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        use_beta_sigmoid_in_kernel: step size = sigmoid(beta).
        allow_neg_eigval: step size = 2 * sigmoid(beta).
        safe_gate: the caller promises log decays in [-5, 0); needs ``lower_bound`` if the gate is computed here.
        lower_bound: of the log decay in nats, in [-5, 0).
        A_log: [HV] float; may be missing if ``lower_bound`` is given.
        dt_bias: [HV * K] or [HV, K] float, zero unless given.
        state_v_first: states are [V, K].
        cu_seqlens: int32 or int64 [N + 1], bounds of packed sequences, which may be empty; B must be 1.
        cu_seqlens_cpu: the same on the host; without it, a device ``cu_seqlens`` is read back once, when first seen.
        return_intermediate_states: also return the state before each chunk, in the dtype of q, with chunks of
            ``chunk_size`` (64 unless given) tokens.
        chunk_size: tokens a chunk, 16, 32 or 64; the plan decides unless given.

    Returns:
        (o, final_state), and the intermediate states third if asked for. o: [B, T, HV, V], dtype of q.
        final_state: fp32, like initial_state, or None. Intermediate states: [B, chunks, HV, K, V]
        ([B, chunks, HV, V, K] with ``state_v_first``), B = 1 and all sequences' chunks in order if packed.

    Raises:
        InputError: an argument cannot be used; the message says what to pass instead.
        UnsupportedError: gradients are needed: there is no backward yet.
        CompileError: a kernel does not compile on this device.

    Source: Kimi Linear, arXiv:2510.26692; names and semantics of FLA v0.6.0 ``fla.ops.kda.chunk_kda``.
    """
    arguments = locals()
    ready = _prepare(arguments)
    if ready.compute is None:
        return _run_reference(ready, arguments)
    if q.is_cuda and torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):
            return _run(ready, ready.compute, arguments)
    return _run(ready, ready.compute, arguments)


def explain(*args: Any, **kwargs: Any) -> Choice:
    """Which plan a call of :func:`chunk_kda` with these arguments runs, where it comes from and why.

    Nothing is compiled or run. ``print`` the result, or read its ``plan``, ``step``, ``source`` and ``reason``.

    Raises:
        InputError: as chunk_kda.
    """
    import inspect

    bound = inspect.signature(chunk_kda).bind(*args, **kwargs)
    bound.apply_defaults()
    check_tensors(bound.arguments)
    bounds = _token_bounds(bound.arguments)
    problem, device, chunk_size = parse_problem(bound.arguments, bounds)
    return choose(problem, device, chunk_size)


class _Ready(NamedTuple):
    """What a call needs besides its tensors; the same for all calls of one signature."""

    problem: Problem
    choice: Choice
    compute: Compute | None  # None: the reference path
    bounds: tuple[int, ...]
    constants: dict[str, Any]  # what pipelines take besides the caller's tensors


_FLAGS = (
    "scale",
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "lower_bound",
    "state_v_first",
    "return_intermediate_states",
    "chunk_size",
)
_ready: dict[tuple[Any, ...], _Ready] = {}
_READY_LIMIT = 4096


def _prepare(a: dict[str, Any]) -> _Ready:
    """Validates and plans a call, or finds the plan of an earlier call with the same signature."""
    try:
        tensors = [None if a[name] is None else (a[name].shape, a[name].dtype, a[name].device) for name in TENSORS]
        flags = [a[name] for name in _FLAGS]
        key = (*tensors, *flags, a["cu_seqlens"] is None, _token_bounds(a), context())
        found = _ready.get(key)
    except (AttributeError, TypeError):  # not a tensor, not hashable: let the checks say it
        check_tensors(a)
        check_flags(a)
        raise
    if found is None:
        problem, device, chunk_size = parse_problem(a, key[-2])
        found = _make_ready(a, problem, device, chunk_size, key[-2])
        if len(_ready) >= _READY_LIMIT:
            _ready.clear()
        _ready[key] = found
    if torch.is_grad_enabled():
        check_gradients(a)
    return found


def _make_ready(
    a: dict[str, Any], problem: Problem, device: Device, chunk_size: int | None, bounds: tuple[int, ...]
) -> _Ready:
    """Chooses a plan and compiles it."""
    choice, program = prepare(problem, device, chunk_size)
    scale = problem.K**-0.5 if a["scale"] is None else float(a["scale"])
    lower_bound = -5.0 if a["lower_bound"] is None else float(a["lower_bound"])
    constants: dict[str, Any] = {"scale": scale, "lower_bound": lower_bound}
    compute: Compute | None = None
    if program is not None and problem.tokens:
        where = a["q"].device
        layout = make_layout(bounds, program.plan.BT, where)
        constants |= {"chunk_tokens": layout.chunk_tokens, "seq_chunks": layout.seq_chunks}
        sizes = {"tokens": problem.tokens, "NT": layout.NT, "N": layout.N}
        compute = program.bind(sizes, where, () if a["return_intermediate_states"] else ("h",))
    return _Ready(problem=problem, choice=choice, compute=compute, bounds=bounds, constants=constants)


def _token_bounds(a: dict[str, Any]) -> tuple[int, ...]:
    """Where sequences begin and end among the flattened tokens."""
    if a["cu_seqlens"] is None:
        if a["cu_seqlens_cpu"] is not None:
            raise InputError("cu_seqlens_cpu is only the host's copy: pass cu_seqlens too.")
        return dense_bounds(a["q"].shape[0], a["q"].shape[1])
    check_tensors(a)
    if a["q"].shape[0] != 1:
        raise InputError(f"cu_seqlens needs B=1, got B={a['q'].shape[0]}: flatten the batch into the tokens.")
    return packed_bounds(a["cu_seqlens"], a["cu_seqlens_cpu"], a["q"].shape[1])


def _run(ready: _Ready, compute: Compute, a: dict[str, Any]) -> Any:
    """Launches the kernels; nothing here waits for the device."""
    q, p = a["q"], ready.problem
    tensors: dict[str, Any] = {name: _aligned(a[name]) for name in ("q", "k", "v", "g", "beta")}
    if not q.is_cuda:  # replays read addresses, for which the batch is flat already
        tensors = {name: x.flatten(0, 1) for name, x in tensors.items()}
    tensors["A_log"] = _parameter(a["A_log"]).view(p.HV) if p.has_A_log else None
    tensors["dt_bias"] = _parameter(a["dt_bias"]).view(p.HV, p.K) if p.has_dt_bias else None
    tensors["h0"] = _aligned(a["initial_state"]) if p.initial_state else None
    out = compute(tensors | ready.constants)
    o = out["o"].view(a["v"].shape)
    if o.dtype != q.dtype:  # the CPU target computes in fp32
        o = o.to(q.dtype)
    if not a["return_intermediate_states"]:
        return o, out["ht"]
    h = out["h"].to(q.dtype).unflatten(0, (q.shape[0], -1))[..., : p.K, : p.V]
    return o, out["ht"], h.transpose(-1, -2) if p.state_v_first else h


def _run_reference(ready: _Ready, a: dict[str, Any]) -> Any:
    """The recurrence in plain PyTorch: where no compiler was found, and for calls without tokens."""
    p = ready.problem
    if ready.choice.plan is None:
        _warn_reference(ready.choice.reason)
    if a["return_intermediate_states"] and p.tokens:
        raise UnsupportedError(
            "the reference path has no chunks, so no intermediate states: install a compiler (see `kda-tl doctor`)."
        )
    o, state = recurrent_kda(
        *(a[name] for name in ("q", "k", "v", "g", "beta")),
        scale=ready.constants["scale"],
        initial_state=a["initial_state"],
        gate=p.gate,
        A_log=a["A_log"] if p.has_A_log else None,
        dt_bias=a["dt_bias"] if p.has_dt_bias else None,
        lower_bound=ready.constants["lower_bound"],
        beta_mode=p.beta,
        use_l2norm=p.l2norm,
        state_v_first=p.state_v_first,
        cu_seqlens=torch.tensor(ready.bounds) if p.varlen else None,
        dtype=torch.float32,
    )
    o, ht = o.to(a["q"].dtype), state if p.final_state else None
    if not a["return_intermediate_states"]:
        return o, ht
    return o, ht, o.new_empty((a["q"].shape[0], 0, *state.shape[1:]))


_warned: set[str] = set()


def _warn_reference(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"chunk_kda is slow here: {reason}.", KdaTlWarning, stacklevel=4)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, as vector loads need; a copy only where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _parameter(x: Tensor) -> Tensor:
    return _aligned(x if x.dtype == torch.float32 else x.float())
