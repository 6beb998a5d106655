"""The tile vocabulary: one template text for CUDA and for TileLang's C target on the CPU.

TileLang 0.1.15's C target knows neither fragments nor shared memory, thread-parallel loops, software pipelines,
``T.cumsum`` or 16-bit floats. Templates therefore ask a :class:`Tile` for tiles and loops; everything else in a
template is the same for every target.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kda_tl.core.problem import Problem
from kda_tl.core.stage import Case, TensorSpec, built_sizes
from kda_tl.templates.common.language import T

RCP_LN2 = 1.4426950408889634  # gates are kept in log2 units: exp(x) = 2^(x / ln 2), and exp2 is one instruction
# In fp32 2^-150 is 0: a token that decays more forgets everything all the same, and its size would only take the
# digits of the gentle decays after it in the sum (1e-3 off with -1e4 nats here and there). NaN stays NaN.
FORGOTTEN = -150.0
# Of a stage in fp32: split products leave out 2^-20, and exponents of up to 64 * 7.2 are held to 2^-16
FP32_TOLERANCE = 1e-4
L2NORM_EPS = 1e-6  # FLA's epsilon, added to the sum of squares

TL_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "i32": "int32"}


@dataclass(frozen=True)
class Tile:
    """Where a kernel's tiles live and how its loops run."""

    cpu: bool  # the C target: tiles are stack arrays and loops are serial
    io: str  # TileLang dtype of the matrix operands: the problem's io dtype, float32 on the CPU

    @classmethod
    def of(cls, case: Case) -> Tile:
        """The vocabulary for a case."""
        cpu = case.device.kind == "cpu"
        return cls(cpu=cpu, io="float32" if cpu else TL_DTYPE[case.problem.dtype])

    def kernel(self, *grid: Any, threads: int) -> Any:
        """Launch frame over a grid. The first extent may exceed 65535, the others may not (CUDA's limit)."""
        return T.Kernel(*grid) if self.cpu else T.Kernel(*grid, threads=threads)

    def fragment(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        """A tile spread over the registers of the thread block."""
        return T.alloc_local(shape, dtype) if self.cpu else T.alloc_fragment(shape, dtype)

    def shared(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """A tile every thread of the block can read, of the io dtype unless told."""
        return T.alloc_local(shape, dtype or self.io) if self.cpu else T.alloc_shared(shape, dtype or self.io)

    def clear(self, *tiles: Any) -> None:
        """Sets tiles to zero."""
        for each in tiles:
            T.evaluate(T.clear(each))

    def gemm(self, a: Any, b: Any, c: Any, transpose_A: bool = False, transpose_B: bool = False, **flags: Any) -> Any:
        """``c += a b``, or ``c = a b`` with ``clear_accum=True``; operands in shared memory, the sum in registers.

        fp32 operands are multiplied in fp32 on every target: the matrix unit would round them to tf32, 2^-11.
        """
        if self.cpu or self.io != "float32":
            return T.gemm(a, b, c, transpose_A=transpose_A, transpose_B=transpose_B, **flags)
        return _multiply_fp32(a, b, c, transpose_A, transpose_B, **flags)

    def load_cumsum(self, g_cumsum: Any, i_t: Any, i_hv: Any, i_k: Any, g_shared: Any) -> Any:
        """Channel tile ``i_k`` of a chunk's cumsum into shared memory; a scalar gate's is that of every channel."""
        if int(g_cumsum.shape[3]) == 1:
            return _spread_cumsum(self, g_cumsum, i_t, i_hv, g_shared)
        BK = g_shared.shape[1]
        return T.copy(g_cumsum[i_t, i_hv, :, i_k * BK : (i_k + 1) * BK], g_shared)

    def fragments(self, number: int, shape: tuple[int, ...], dtype: str = "float32") -> list[Any]:
        """Several fragments alike."""
        return [self.fragment(shape, dtype) for _ in range(number)]

    def shareds(self, number: int, shape: tuple[int, ...], dtype: str | None = None) -> list[Any]:
        """Several shared tiles alike."""
        return [self.shared(shape, dtype) for _ in range(number)]

    def parallel(self, *extents: int) -> Any:
        """A loop nest whose iterations are independent."""
        return T.grid(*extents) if self.cpu else T.Parallel(*extents)

    def pipelined(self, extent: Any, num_stages: int) -> Any:
        """A loop whose loads run ``num_stages`` iterations ahead."""
        return T.serial(extent) if self.cpu else T.Pipelined(extent, num_stages=num_stages)


@T.macro
def _multiply_fp32(a, b, c, transpose_A, transpose_B, clear_accum=False):
    """A product of fp32 tiles by the matrix unit, which reads only the upper 19 bits of its operands (tf32).

    With a = a' + ra and b = b' + rb, primed what the unit reads: a' b' + ra b' + a' rb. What is left out, ra rb, and
    the bits of ra and rb that the unit does not read, are 2^-20 of the product.
    """
    a_rest = T.alloc_shared(a.shape, "float32")
    b_rest = T.alloc_shared(b.shape, "float32")
    for i, j in T.Parallel(a.shape[0], a.shape[1]):
        a_rest[i, j] = a[i, j] - _read_tf32(a[i, j])
    for i, j in T.Parallel(b.shape[0], b.shape[1]):
        b_rest[i, j] = b[i, j] - _read_tf32(b[i, j])
    T.gemm(a, b, c, transpose_A=transpose_A, transpose_B=transpose_B, clear_accum=clear_accum)
    T.gemm(a_rest, b, c, transpose_A=transpose_A, transpose_B=transpose_B)
    T.gemm(a, b_rest, c, transpose_A=transpose_A, transpose_B=transpose_B)


@T.macro
def _spread_cumsum(tile, g_cumsum, i_t, i_hv, g_shared):
    for i, j in tile.parallel(g_shared.shape[0], g_shared.shape[1]):
        g_shared[i, j] = g_cumsum[i_t, i_hv, i, 0]


def _read_tf32(x):
    return T.reinterpret(T.bitwise_and(T.reinterpret(x, "uint32"), T.uint32(0xFFFFE000)), "float32")


def avoid_wgmma(case: Case) -> dict[str, Any]:
    """Settings of TileLang's passes for a kernel that has a product with K rows.

    Hopper's wgmma takes rows in groups of 64. TileLang 0.1.15 chooses it for every 16-bit product of 64 rows and more,
    then stops at "No valid warp partition" where 64 does not divide them (K = 96, 160, 224). Such kernels use mma.
    """
    return {"tl.disable_wgmma": True} if case.problem.KP > 64 and case.problem.KP % 64 else {}


def prim_func(case: Case, tensors: Mapping[str, str], **dynamic: Any) -> Callable[[Callable[..., None]], Any]:
    """Makes a TileLang kernel of a function whose parameters are a stage's tensors, by name; others are fp32 numbers.

    An absent optional tensor becomes a one-element placeholder of the same dtype. On the CPU every float tensor is
    float32: the launcher casts at the boundary.

    Args:
        case: what the kernel is built for.
        tensors: specs by name. ``do`` is a word of C, and its parameter is ``d_o``.
        dynamic: sizes known at the launch, by name; those of a spec's that are not here are named by the spec.

    Raises:
        TypeError: the parameters do not begin with the tensors in the order of their specs, in which they are launched.
    """
    p, sizes = case.problem, {**built_sizes(case), **dynamic}

    def annotate(spec: TensorSpec) -> Any:
        element = spec.element(p)
        dtype = TL_DTYPE["fp32" if case.device.kind == "cpu" and element != "i32" else element]
        if not spec.present(p):
            return T.Tensor((1,), dtype)
        dims = ("N", "HV", "V", "K") if p.state_v_first and spec.is_state else spec.dims
        for dim in dims:
            if not dim.isdigit() and dim not in sizes:
                sizes[dim] = T.dynamic(dim)
        return T.Tensor(tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in dims), dtype)

    def make(function: Callable[..., None]) -> Any:
        specs = {"d_o" if name == "do" else name: TensorSpec.parse(text) for name, text in tensors.items()}
        names = list(inspect.signature(function).parameters)
        if names[: len(specs)] != list(specs):
            raise TypeError(f"{function.__name__} takes {', '.join(names)}, but is launched with {', '.join(specs)}")
        function.__annotations__ = {name: annotate(specs[name]) if name in specs else T.float32 for name in names}
        return T.prim_func(function)

    return make


def at_state(problem: Problem, i_n: Any, i_h: Any, i_k: Any, i_v: Any) -> tuple[Any, Any, Any, Any]:
    """Where an element of a sequence's state is, in a caller's tensor of states."""
    return (i_n, i_h, i_v, i_k) if problem.state_v_first else (i_n, i_h, i_k, i_v)


def has_gate(problem: Problem, i: Any, count: Any) -> Any:
    """Whether row i of a chunk of ``count`` rows holds a gate: a token's decay comes before the first of its rows."""
    return i < count if problem.rank == 1 else (i < count) & (i % problem.rank == 0)


def sees(problem: Problem, i: Any, j: Any) -> Any:
    """Whether what row j wrote is in the state that row i corrects: rows of one token do not see each other."""
    return i > j if problem.rank == 1 else i // problem.rank > j // problem.rank


def beta_factor(problem: Problem, raw: Any) -> Any:
    """The step size of one token from the caller's beta: as given, sigmoid, or 2 * sigmoid."""
    x = T.cast(raw, "float32")
    if problem.beta == "plain":
        return x
    return (2.0 if problem.beta == "sigmoid2" else 1.0) / (1.0 + T.exp2(-RCP_LN2 * x))
