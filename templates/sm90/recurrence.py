"""Recurrence on Hopper: what the stages share that walk chunks with the transposed state in registers.

A warp keeps chunks coming through the tensor memory accelerator, one or two warpgroups multiply. Values are

    V'^T = (V^T + S^T k_neg^T) A^T

in the registers of those that multiply, which spares prep a product.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kda_tl.core.stage import Case, Operands, tunable
from kda_tl.templates.common.chunks import unpack_lower
from kda_tl.templates.common.heads import HeadRows
from kda_tl.templates.common.language import T
from kda_tl.templates.common.tile import FP32_TOLERANCE, at_state
from kda_tl.templates.sm90.hopper import HopperConfig

WARPGROUP = 128
ROWS = 64  # of the transposed state that a warpgroup multiplies
PRODUCER = 32  # threads of the warp that loads
OUTPUT_PAD = 8  # elements a row of the transposed output: banks of four rows differ

# states, values and results rounded to io a chunk; the recurrence, either way, contracts, so errors do not grow
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3, "fp32": FP32_TOLERANCE}


@dataclass(frozen=True, kw_only=True)
class RecurrenceConfig(HopperConfig):
    """BV: value channels a block owns, rows of the transposed state, 64 for each warpgroup that multiplies; num_stages:
    chunks loaded ahead.
    """

    WIDTHS: ClassVar[tuple[int, ...]] = (64, 128)  # channels of a key that the stage is written for
    registers: ClassVar[int | None] = None  # of a thread that multiplies; None for all there are
    loader_registers: ClassVar[int | None] = None  # of one that loads; None for as many as it needs
    BV: int = tunable(64, 64, 128)
    num_stages: int = tunable(2, 2, 3)

    def reject(self, case: Case) -> str | None:
        """Hopper, 16-bit operands, dimensions in whole tiles of the matrix unit, and shared memory."""
        p = case.problem
        if reason := super().reject(case):
            return reason
        if case.BT != 64:
            return f"it is written for BT=64, not BT={case.BT}"
        if p.dtype == "fp32":
            return "fp32 operands are refused: the matrix unit would round them to tf32"
        if p.KP not in self.WIDTHS:
            return f"K={p.K} is not {' or '.join(map(str, self.WIDTHS))} channels, which its tiles are"
        if p.V % self.BV:
            return f"BV={self.BV} does not divide V={p.V}"
        smem = self.smem_bytes(case)
        if smem > case.device.smem_bytes:
            return f"BV={self.BV}, num_stages={self.num_stages} need {smem} bytes of {case.device.smem_bytes} shared"
        return None

    @property
    def consumers(self) -> int:
        """Threads that multiply."""
        return WARPGROUP * self.BV // ROWS

    def smem_bytes(self, case: Case) -> int:
        """The tiles of every stage, the output's, an identity, and three barriers a stage."""
        BT, KP = case.BT, case.problem.KP
        stage = BT * (self.BV + 2 * BT + 3 * KP) * 2 + KP * 4 + 24
        return self.num_stages * stage + BT * (self.BV + BT) * 2


def step_reference(x: Operands, t: int, values: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New values [HV, BT, rows] of chunk t, and the transposed state [HV, rows, KP] after it, in the dtype of that.

    ``x`` is what prep made, by name; values are of all chunks, [NT, HV, BT, rows].
    """
    A, k_neg, kg, decay = (y[t].to(state.dtype) for y in (x.A, x.k_neg, x.kg, x.decay))
    v_new = unpack_lower(A) @ (values[t] + k_neg @ state.mT)
    return v_new, state * decay[:, None] + v_new.mT @ kg


def read_state(case: Case, h0: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """The transposed state [HV, V, KP] that a sequence starts from, of the dtype and on the device of ``like``."""
    p = case.problem
    if h0 is None:
        return like.new_zeros((p.HV, p.V, p.KP))
    given = h0[n] if p.state_v_first else h0[n].mT
    return torch.nn.functional.pad(given.to(like.dtype), (0, p.KP - p.K))


@T.macro
def find_chunks(segments, chunk_tokens, i_s):
    """A segment's first chunk, their number, its first token and the one past its end."""
    first = segments[i_s, 0]
    chunks = segments[i_s, 1]
    last = T.max(first + chunks - 1, 0)
    start = chunk_tokens[T.min(first, last), 0]
    end = chunk_tokens[last, 0] + chunk_tokens[last, 1]
    return first, chunks, start, end


@T.macro
def load_values(v, v_shared, full, slot, first, end, i_h, v0):
    """Values of a chunk to shared memory by one warp, zeros past the sequence's end."""
    _, BT, BV = v_shared.shape
    if first + BT <= end:
        T.tma_copy(v[first : first + BT, i_h, v0 : v0 + BV], v_shared[slot, :, :], barrier=full[slot])
    else:  # rows of the next sequence would enter as 0 * v, and may be infinite
        own, at_once = HeadRows.of(v, first, i_h), PRODUCER * 8 // BV  # 16 bytes a thread
        for n in T.unroll(BT // at_once, unroll_factor=1):  # or addresses of all rows wait in registers
            for i, j in T.Parallel(at_once, BV):
                row = n * at_once + i
                v_shared[slot, row, j] = T.if_then_else(first + row < end, own.rows[row, v0 + j], 0)
        T.fence_proxy_async()


def name_tiles(name: str, tiles: list[Any]) -> list[Any]:
    """Gives each of some tiles a name of its own.

    Where names are equal TileLang 0.1.15 lays tiles into shared memory in an order that changes from build to build.
    """
    from tilelang import tvm

    for m, tile in enumerate(tiles):
        tvm.script.ir_builder.IRBuilder.name(f"{name}_{m}", tile)
    return tiles


def layout_lower(*tiles: Any) -> dict[Any, Any]:
    """Layouts of tiles ``[stages, BT, BT]`` whose halves are loaded apart: each is 32 columns of 64 bytes a row."""
    from tilelang.layout import make_half_bank_swizzled_layout

    return {tile: make_half_bank_swizzled_layout(tile) for tile in tiles}


def layout_values(*tiles: Any) -> dict[Any, Any]:
    """Layouts of tiles ``[stages, BT, 64]`` whose rows no two of eight meet in a bank, as products take them too."""
    from tilelang.layout import make_full_bank_swizzled_layout

    return {tile: make_full_bank_swizzled_layout(tile) for tile in tiles}


def layout_transposed(taken: Any) -> Any:
    """Layout ``[BT, BV]`` of registers that hold the transpose ``[BV, BT]`` as a product's result."""
    from tilelang.layout import Fragment

    return Fragment(
        taken.shape,
        forward_thread_fn=lambda j, i: i // 16 * 32 + i % 8 * 4 + j % 8 // 2,
        forward_index_fn=lambda j, i: j // 8 * 4 + i % 16 // 8 * 2 + j % 2,
    )


def find_eights(n: int, lane: Any, warp: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Of the n-th 16 tokens, by 4 matrices of 8 x 8: a lane's row in a tile ``[tokens, channels]`` that 4 warps take
    or give transposed, and the first of its pairs in registers, as :func:`layout_transposed` counts.
    """
    tile = n * 16 + lane // 16 * 8 + lane % 8, warp * 16 + lane // 8 % 2 * 8
    return tile, (n * 16 + lane % 4 * 2, warp * 16 + lane // 4)


@T.macro
def take_transposed(tile, slot):
    """What a slot holds ``[BT, BV]``, to the registers that hold its transpose ``[BV, BT]`` as a product's result.

    TileLang 0.1.15 makes four instructions (ldmatrix) of the copy only if pairs of rows are side by side in registers.
    """
    taken = T.alloc_fragment(tile.shape[1:], tile.dtype)
    T.annotate_layout({taken: layout_transposed(taken)})
    lane, warp = T.get_thread_binding() % 32, T.get_thread_binding() % (2 * tile.shape[2]) // 32
    for n in T.unroll(tile.shape[1] // 16):
        place, pairs = find_eights(n, lane, warp)
        T.call_extern(
            *("handle", "tl::ptx_ldmatrix_x4_trans"),
            *(T.access_ptr(tile[(slot, *place)], "r", extent=8), T.address_of(taken[pairs])),
        )
    return taken


@T.macro
def load_lower(x, i_t, i_h, tile, slot, full):
    """A lower triangular matrix to shared memory. What lies above its left half's diagonal block is never written."""
    half = tile.shape[1] // 2
    T.tma_copy(x[i_t, i_h, : 2 * half, :], tile[slot, :, :half], barrier=full[slot])
    T.tma_copy(x[i_t, i_h, 2 * half :, :], tile[slot, half:, half:], barrier=full[slot])


@T.macro
def load_parts(x, i_t, i_h, tiles, slot, full):
    """A chunk's rows to shared memory, some channels a tile."""
    width = tiles[0].shape[2]
    for m in list(range(len(tiles))):  # of numbers: a loop over tiles gives all of them its variable's name
        T.tma_copy(x[i_t, i_h, :, m * width : (m + 1) * width], tiles[m][slot, :, :], barrier=full[slot])


@T.macro
def store_constants(triangles, identity=None, made=None):
    """Zeros where triangles are never loaded or made, and an identity, in shared memory, by all threads."""
    for m in list(range(len(triangles))):  # of numbers, see load_parts
        stages, BT, _ = triangles[m].shape
        for s, i, j in T.Parallel(stages, BT // 2, BT // 2):
            triangles[m][s, i, BT // 2 + j] = 0
    if made is not None:
        for s, i, j in T.Parallel(*made.shape):
            made[s, i, j] = 0
    if identity is not None:
        for i, j in T.Parallel(*identity.shape):
            identity[i, j] = T.if_then_else(i == j, 1.0, 0.0)
    T.fence_proxy_async()
    T.sync_threads()


@T.macro
def issue_transposed(v_shared, identity, slot, value):
    """V^T of the chunk in a slot, under way: what shared memory holds, read transposed, times one."""
    rows = T.GemmWarpPolicy.FullRow
    T.wgmma_gemm(
        v_shared[slot, :, :], identity, value, transpose_A=True, transpose_B=True, clear_accum=True, policy=rows
    )


@T.macro
def finish_values(value, value_io):
    """Waits for all products, and rounds the values."""
    T.wait_wgmma(0)
    T.warpgroup_fence_operand(value, num_regs=value.shape[1] // 2)
    T.copy(value, value_io)


# A prelude: TileLang 0.1.15 calls its own by name with registers one by one, and knows no pairs of them
STORES = r"""
static __device__ __forceinline__ void store_transposed(void* shared, const void* values) {
  const unsigned* pairs = reinterpret_cast<const unsigned*>(values);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
                  "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}
"""


@T.macro
def round_output(output, dtype):
    """A chunk's output ``[ROWS, BT]``, rounded, before the next products are on their way.

    While they are, ptxas (CUDA 13.0) would wait for them to put pairs where sums were. The loop is over the output:
    over what is rounded TileLang 0.1.15 leaves it out in a second warpgroup, whose threads that layout does not name.
    """
    rounded = T.alloc_fragment((output.shape[1], output.shape[0]), dtype)
    T.annotate_layout({rounded: layout_transposed(rounded)})
    for i, j in T.Parallel(*output.shape):
        rounded[j, i] = T.cast(output[i, j], dtype)
    return rounded


@dataclass(frozen=True)
class Start:
    """The state before a segment, of ROWS channels from v0 on."""

    states: Any
    segments: Any
    i_s: Any
    i_h: Any
    v0: Any
    tile: Any  # a warpgroup's in shared memory, if products have one for it
    barrier: Any  # a named one, the warpgroup's own


@dataclass(frozen=True)
class Output:
    """Where a chunk's output goes, by one warpgroup."""

    tile: Any  # on the way, in shared memory
    o: Any
    first: Any  # token of the chunk
    start: Any  # of the sequence
    end: Any
    i_h: Any
    v0: Any
    barrier: Any  # a named one, the warpgroup's own


@T.macro
def put_transposed(rounded, tile, find):
    """To shared memory by four instructions (stmatrix), where elements one by one are 32; ``find`` gives addresses."""
    thread = T.get_thread_binding()
    lane, warp = thread % 32, thread % WARPGROUP // 32
    for n in T.unroll(tile.shape[0] // 16):
        place, pairs = find_eights(n, lane, warp)
        T.call_extern("handle", "store_transposed", find(tile[place]), T.address_of(rounded[pairs]))


@T.macro
def _put(rounded, x):
    """To shared memory, for a copy by the same warpgroup."""
    T.tma_store_wait(0)  # the last chunk's output has been read
    T.sync_threads(x.barrier, WARPGROUP)
    put_transposed(rounded, x.tile, T.address_of)
    T.fence_proxy_async()
    T.sync_threads(x.barrier, WARPGROUP)


@T.macro
def _send(x):
    """All rows of a chunk from there to memory."""
    BT, BV = x.tile.shape
    rows = x.o[x.first : x.first + BT, x.i_h, x.v0 : x.v0 + BV]
    T.tma_copy(x.tile, rows, leader_scope_threads=WARPGROUP)


@T.macro
def store_rows(x):
    """Those rows of a chunk that are its sequence's, from there to memory, by a warpgroup's threads."""
    BT, BV = x.tile.shape
    own = HeadRows.of(x.o, x.first, x.i_h)
    for i, j in T.Parallel(BT, BV):
        if x.first + i < x.end:
            own.rows[i, x.v0 + j] = x.tile[i, j]


@T.macro
def store_output(rounded, x):
    """A chunk's output, while the values of the next are multiplied; chunks that others follow are whole.

    Before the first chunk there is nothing to store. The tile is read later: T.tma_store_wait.
    """
    if x.first >= x.start:
        _put(rounded, x)
        _send(x)


@T.macro
def store_last(rounded, x):
    """The same of a last chunk: what follows it may be another sequence's."""
    BT, _ = x.tile.shape
    if x.first >= x.start:
        _put(rounded, x)
        if x.first + BT <= x.end:
            _send(x)
        else:
            store_rows(x)


@T.macro
def store_state(parts, h_shared, h, i_t, i_h, v0):
    """The state before a chunk, as it was multiplied, by way of shared memory, which transposes it."""
    for m, part in enumerate(parts):
        BV, width = part.shape
        for i, j in T.Parallel(BV, width):
            h_shared[j, i] = T.cast(part[i, j], h.dtype)
        for j, i in T.Parallel(width, BV):
            h[i_t, i_h, m * width + j, v0 + i] = h_shared[j, i]


@T.macro
def store_final(p, state, ht, segments, i_s, i_h, v0):
    """The state after a segment that ends its sequence."""
    ends = segments[i_s, 3]
    for m, part in enumerate(state):
        width = part.shape[1]
        for i, j in T.Parallel(*part.shape):
            if (ends >= 0) & (m * width + j < p.K):
                ht[at_state(p, ends, i_h, m * width + j, v0 + i)] = part[i, j]
