"""From the declaration of an operator to the function that is called."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from kda_tl.core.dtypes import NAME_OF_DTYPE
from kda_tl.core.plain import is_plain, needs_operator
from kda_tl.errors import InputError
from kda_tl.ops import custom_op, find_operator, load_recurrent
from kda_tl.ops.autograd import run_differentiable
from kda_tl.ops.call import bind_call, pose, run_forward, run_reference
from kda_tl.ops.operator import OPERATORS, Args, Operator
from kda_tl.ops.recurrent_call import explain_step
from kda_tl.runtime.dispatch import PlanSelection, select_cached

Tensor = torch.Tensor
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Arguments go from the caller's frame into a record without a list of them that somebody would have to keep right
_SOURCE = """
def {name}{signature}:
    if _is_compiling():
        return _run_compiled({arguments})
    _a = _Arguments({arguments})
    if {renamed}:
        _rename(_operator, _a)
    return _run_call(_operator, _a, _is_plain(({tensors},)))
"""


def publish(declare: Callable[[FunctionT], Operator]) -> Callable[[FunctionT], FunctionT]:
    """A decorator: makes an operator of a signature and a docstring, and of these the function that calls it."""

    def decorate(function: FunctionT) -> FunctionT:
        operator = OPERATORS[function.__name__] = declare(function)
        made = _make_function(operator, function)
        object.__setattr__(operator, "call", made)
        return made

    return decorate


def _make_function(operator: Operator, function: FunctionT) -> FunctionT:
    """The function that calls an operator: with the signature and docstring of its declaration."""
    namespace: dict[str, Any] = {
        "_is_compiling": torch.compiler.is_compiling,
        "_run_compiled": _make_compiled(operator, custom_op.register(operator)),
        "_rename": _rename,
        "_is_plain": is_plain,
        "_run_call": _run_call,
        "_operator": operator,
        "_Arguments": operator.Arguments,
    }
    source = _SOURCE.format(
        name=operator.name,
        signature=operator.signature,
        arguments=", ".join(operator.arguments),
        renamed=" or ".join(f"{old} is not None" for old in operator.renamed) or "False",
        tensors=", ".join(operator.all_tensors),
    )
    exec(compile(source, f"<{operator.name}>", "exec"), namespace)
    return cast(FunctionT, functools.update_wrapper(namespace[operator.name], function))


def _rename(operator: Operator, a: Args) -> None:
    """Puts what came by an old name where it belongs, and warns."""
    for old in _settle_names(operator, a):
        text = f"{old} is the old name of {operator.renamed[old]}: pass that."
        warnings.warn(text, DeprecationWarning, stacklevel=3)


def _settle_names(operator: Operator, a: Args) -> list[str]:
    """Puts what came by old names where it belongs. Returns these names."""
    used = [old for old in operator.renamed if getattr(a, old) is not None]
    for old in used:
        new = operator.renamed[old]
        setattr(a, new, _find_renamed(old, new, getattr(a, old), getattr(a, new)))
    return used


def _run_call(operator: Operator, a: Args, plain: bool) -> Any:
    """An eager call."""
    if not plain and needs_operator(name_tensors(operator, a)):
        return _run_watched(operator, cast_as_autocast(operator, a))
    if torch._C._is_any_autocast_enabled():
        a = cast_as_autocast(operator, a)
    bound = bind_call(operator, a)
    if bound.compute is None:
        if not bound.problem.tokens and needs_gradients(operator, a):  # those of parameters are zeros, not None
            return _run_watched(operator, a)
        return run_reference(bound, a)
    run = run_differentiable if needs_gradients(operator, a) else run_forward
    if bound.gpu is not None and torch.cuda.current_device() != bound.gpu:
        with torch.cuda.device(bound.gpu):
            return run(bound, bound.compute, a)
    return run(bound, bound.compute, a)


def _run_watched(operator: Operator, a: Args) -> Any:
    """A call as one node of a graph, checked first; of symbolic sizes nothing is asked, and values are not read."""
    operator.check(a)
    sizes = [size for x in operator.pick_operands(a) if x is not None for size in x.shape]
    if all(isinstance(size, int) for size in sizes):
        operator.pose(a, operator.assume_bounds(a))
    o, ht, h = custom_op.forwards[operator.name](*(getattr(a, name) for name in operator.schema))
    final = ht if a.output_final_state else None
    return (o, final, h) if a.return_intermediate_states else (o, final)


def _make_compiled(operator: Operator, run_custom_op: Callable[..., Any]) -> Callable[..., Any]:
    """A call inside ``torch.compile``, which traces it: it is checked when it runs. No more than tracers understand."""
    arguments, schema, renamed = operator.arguments, tuple(operator.schema), tuple(operator.renamed.items())
    same_dtype = operator.same_dtype

    def run_compiled(*values: Any) -> Any:
        a = dict(zip(arguments, values, strict=True))
        for old, new in renamed:
            if a[old] is not None:
                a[new] = _find_renamed(old, new, a[old], a[new])
        dtype = _find_autocast([a[name] for name in same_dtype])
        if dtype is not None:
            for name in same_dtype:
                a[name] = a[name].to(dtype)
        o, ht, h = run_custom_op(*[a[name] for name in schema])
        final = ht if a["output_final_state"] else None
        return (o, final, h) if a.get("return_intermediate_states") else (o, final)

    return run_compiled


def _find_renamed(old: str, new: str, value: Any, present: Any) -> Any:
    """What an argument is, whose old name was used. Raises InputError if both are."""
    if present:
        raise InputError(f"pass {new} without {old}, its old name.")
    return value


def _find_autocast(tensors: list[Any]) -> torch.dtype | None:
    """The dtype to which ``torch.autocast`` brings tensors of different dtypes, as it would those of a product."""
    if not all(isinstance(x, Tensor) and x.dtype in NAME_OF_DTYPE for x in tensors):
        return None
    kind = tensors[0].device.type
    if all(x.dtype == tensors[0].dtype for x in tensors) or kind not in ("cpu", "cuda"):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast_as_autocast(operator: Operator, a: Args) -> Args:
    """The arguments under ``torch.autocast``: those that must have one dtype get autocast's if they have several.

    Everything else stays as it is: the kernels take any mixture. Gradients come back in the dtype that was given.
    """
    dtype = _find_autocast([getattr(a, name) for name in operator.same_dtype])
    if dtype is None:
        return a
    return dataclasses.replace(a, **{name: getattr(a, name).to(dtype) for name in operator.same_dtype})


def name_tensors(operator: Operator, a: Args) -> Mapping[str, Any]:
    """The tensors of a call by name."""
    return {name: getattr(a, name) for name in operator.all_tensors}


def needs_gradients(operator: Operator, a: Args) -> bool:
    """Whether autograd must record the call."""
    if torch.is_grad_enabled():
        for x in operator.pick_operands(a):
            if x is not None and x.requires_grad:
                return True
    return False


def settle(operator: Operator, a: Args) -> Args:
    """Arguments as an eager call would see them: by their present names, cast and of kinds that can be used."""
    a = cast_as_autocast(operator, a)
    needs_operator(name_tensors(operator, a))  # or it refuses them
    _settle_names(operator, a)
    operator.check(a)
    return a


def explain(*args: Any, operator: str = "chunk_kda", **kwargs: Any) -> PlanSelection:
    """Which plan a call of an operator with these arguments runs, where it comes from and why.

    Nothing is compiled or run. ``print`` the result, or read its ``plan``, ``step``, ``source`` and ``reason``.

    Args:
        args: positional arguments of the operator.
        operator: its name.
        kwargs: arguments of the operator by name.

    Raises:
        InputError: as the operator; or there is no operator of that name.
    """
    if recurrent := load_recurrent().get(operator):
        return explain_step(recurrent, recurrent.bind(*args, **kwargs))
    declared = find_operator(operator)
    a = settle(declared, declared.bind(*args, **kwargs))
    return select_cached(*pose(declared, a, declared.find_bounds(a)))
