"""From the signature of a recurrent operator to the function that is called.

What it changes in place, PyTorch is told: calls that are not plain, and those inside ``torch.compile``, go through
``torch.ops.kda_tl.*``: operators that return nothing, and write o, the final state, the pool and intermediate states.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch

from kda_tl.core.plain import is_plain, needs_operator
from kda_tl.core.problem import DTYPES, GATES
from kda_tl.errors import UnsupportedError
from kda_tl.ops.draws import prepare_before
from kda_tl.ops.operator import Args, FlaEntry
from kda_tl.ops.recurrent import RecurrentOperator, pose
from kda_tl.ops.recurrent_call import judge_step, lay_out, name_results, new_results, run_step
from kda_tl.ops.recurrent_draws import STATE_USES, draw_step, find_modes, find_sizes, trim_sequences

Tensor = torch.Tensor
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
RECURRENT: dict[str, RecurrentOperator] = {}  # by name, as their modules are imported
_SCHEMA = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float | None": "float?",
    "int": "int",
    "bool": "bool",
}
_WRITTEN = {"initial_state": "Tensor(a!)?", "intermediate_states": "Tensor(b!)?", "out": "Tensor(c!)"}

_SOURCE = """
def {name}{signature}:
    if _is_compiling():
        return _run_custom_op({arguments})
    return _run_call(_operator, _Arguments({arguments}), ({tensors},))
"""


def publish_recurrent(*, scalar_gate: bool, fla: FlaEntry) -> Callable[[FunctionT], FunctionT]:
    """A decorator: makes a recurrent operator of a signature and a docstring, and of these the function that calls it.

    With ``scalar_gate`` a value head has one gate for all its key channels. ``fla`` is what FLA has of the kind.
    """

    def decorate(function: FunctionT) -> FunctionT:
        operator = RECURRENT[function.__name__] = _declare(function, scalar_gate=scalar_gate, fla=fla)
        namespace: dict[str, Any] = {
            "_is_compiling": torch.compiler.is_compiling,
            "_run_custom_op": _register(operator),
            "_run_call": _run_call,
            "_operator": operator,
            "_Arguments": operator.Arguments,
        }
        source = _SOURCE.format(
            name=operator.name,
            signature=operator.signature,
            arguments=", ".join(operator.arguments),
            tensors=", ".join(operator.tensors),
        )
        exec(compile(source, f"<{operator.name}>", "exec"), namespace)
        made = functools.update_wrapper(namespace[operator.name], function)
        object.__setattr__(operator, "call", made)
        return cast(FunctionT, made)

    return decorate


def _declare(function: Callable[..., Any], *, scalar_gate: bool, fla: FlaEntry) -> RecurrentOperator:
    bounded = "lower_bound" in inspect.signature(function).parameters
    return RecurrentOperator(
        function=function,
        scalar_gate=scalar_gate,
        gates=tuple(gate for gate in GATES if bounded or gate != "safe"),
        directions=("step",),
        length=1,
        state_uses=tuple(STATE_USES),
        state_dtypes=DTYPES,
        modes=find_modes,
        draw=functools.partial(draw_step, scalar_gate=scalar_gate, bounded=bounded),
        bare=prepare_before,
        trim=trim_sequences,
        lay_out=lay_out,
        sizes=find_sizes,
        written=tuple(_WRITTEN),
        judge=lambda a: judge_step(RECURRENT[function.__name__], a),
        name_results=name_results,
        fla=fla,
    )


def _run_call(operator: RecurrentOperator, a: Args, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """An eager call; ``tensors`` are those of the arguments."""
    if not is_plain(tensors) and needs_operator({name: getattr(a, name) for name in operator.tensors}):
        pose(operator, a)
        _refuse_functionalize(operator.name)
        result: tuple[Tensor, Tensor | None] = _customs[operator.name](
            *[getattr(a, name) for name in operator.arguments]
        )
        return result
    try:
        o, ht = new_results(a)
    except (AttributeError, IndexError, RuntimeError):  # not a tensor, or of another shape: let the checks say it
        pose(operator, a)
        raise
    run_step(operator, a, o, ht)
    if torch.is_grad_enabled() and (watched := _find_watched(tensors)):
        o = _Refusing.apply(operator.name, o, *watched)  # type: ignore[no-untyped-call]
    return o, a.initial_state if a.inplace_final_state else ht


def _find_watched(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Those that want a gradient."""
    return [x for x in tensors if x is not None and x.requires_grad]


def _refuse_functionalize(name: str) -> None:
    if any(each.key().name == "Functionalize" for each in torch._C._functorch.get_interpreter_stack() or ()):
        raise UnsupportedError(
            f"torch.func.functionalize cannot follow what {name} writes in place: use torch.compile or torch.export."
        )


class _Refusing(torch.autograd.Function):
    """Says in our words, where a gradient is asked for, that there is none."""

    @staticmethod
    def forward(ctx: Any, name: str, o: Tensor, *tensors: Tensor) -> Tensor:
        ctx.name = name
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise _no_backward(ctx.name)


def _no_backward(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} has no backward, it serves: train with the chunk operator, or call it under torch.no_grad()."
    )


# The same for traced calls, as operators: what is traced must not raise before a gradient is asked for


@torch.library.custom_op("kda_tl::without_backward", mutates_args=())
def _without_backward(o: Tensor, watched: Sequence[Tensor], name: str) -> Tensor:
    return o.clone()


@torch.library.custom_op("kda_tl::refuse_gradient", mutates_args=())
def _refuse_gradient(grad: Tensor, x: Tensor, name: str) -> Tensor:
    raise _no_backward(name)


@_without_backward.register_fake
def _(o: Tensor, watched: Sequence[Tensor], name: str) -> Tensor:
    return torch.empty_like(o)


@_refuse_gradient.register_fake
def _(grad: Tensor, x: Tensor, name: str) -> Tensor:
    return torch.empty_like(x)


def _keep_watched(ctx: Any, inputs: tuple[Tensor, Sequence[Tensor], str], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.name = inputs[2]


def _trace_refusal(ctx: Any, grad: Tensor) -> tuple[None, list[Tensor], None]:
    return None, [_refuse_gradient(grad, x, ctx.name) for x in ctx.saved_tensors], None


_without_backward.register_autograd(_trace_refusal, setup_context=_keep_watched)


_customs: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {}


def _register(operator: RecurrentOperator) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Defines the operator that PyTorch sees. Returns the function that calls it with the arguments in order."""
    arguments = operator.arguments
    kinds = {name: _WRITTEN.get(name, _SCHEMA[p.annotation]) for name, p in operator.signature.parameters.items()}
    schema = ", ".join([*(f"{kind} {name}" for name, kind in kinds.items()), "Tensor(d!)? final_state"])

    def run(*values: Any) -> None:
        a = operator.Arguments(**dict(zip(arguments, values[:-1], strict=True)))
        with torch.no_grad():
            run_step(operator, a, a.out, values[-1])

    custom = torch.library.custom_op(
        f"kda_tl::{operator.name}", run, mutates_args=(*_WRITTEN, "final_state"), schema=f"({schema}) -> ()"
    )
    custom.register_fake(lambda *values: None)

    def run_custom_op(*values: Any) -> tuple[Tensor, Tensor | None]:
        a = dict(zip(arguments, values, strict=True))
        v, state, final = a["v"], a["initial_state"], None
        if a["out"] is None:
            a["out"] = torch.empty_like(v, memory_format=torch.contiguous_format)
        if a["output_final_state"] and not a["inplace_final_state"]:
            K, HV, V = a["q"].shape[3], v.shape[2], v.shape[3]
            N = v.shape[0] if a["cu_seqlens"] is None else a["cu_seqlens"].shape[0] - 1
            dims = (V, K) if a["state_v_first"] else (K, V)
            final = v.new_empty((N, HV, *dims), dtype=torch.float32)
        with torch.no_grad():
            custom(*[a[name] for name in arguments], final)
        if torch.is_grad_enabled() and (watched := _find_watched(a[name] for name in operator.tensors)):
            a["out"] = _without_backward(a["out"], watched, operator.name)
        return a["out"], state if a["inplace_final_state"] else final

    _customs[operator.name] = run_custom_op
    return run_custom_op
