"""Attention as the formula has it, on a GPU: scores by cuBLAS, a row softmax in place, and cuBLAS again. The honest baseline.

The scores of all heads of a sequence are materialised in float32 (float64 for float64 inputs), one sequence after the other.
q, k and v are never copied: cuBLAS reads them through their strides, or the kernel declines. Weights are rounded to the
dtype of v, as cuBLAS wants both factors alike.

A product knows no mask: a value that is not finite reaches every row, as zero times infinity is NaN, and a row that sees no
key gets a zero of either sign. So a last kernel looks at the output, and computes again, key by key, what is not finite there.
The softmax has told it by the sign of zero weights which keys a row does not see, and marked rows that see none with -infinity.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import device, jit, launch
from ..types import HOST, ArrayView, Plan, Problem, Sequence
from . import packed
from .cuda_instance import CUDA_TYPES, SHORT_TYPES

THREADS = 128  # of a block of the two kernels
REPAIR_ROWS = 16  # that a block of naive_repair.cu looks at
SCALE_FP16 = 2.0**-14  # of fp16 weights, which the softmax kernel stores 2^14 times as large
COLUMNS = 8  # rows of scores are padded to a multiple of it, so that they can be read 16 bytes at a time

# NaiveSoftmaxParams of naive_softmax.cu.
PARAMS = np.dtype(
    [(name, np.uint64) for name in ("scores", "lse", "bias", "mask")]
    + [(name, np.int64) for name in ("lse_head", "lse_row", "bias_head", "bias_row", "bias_column")]
    + [(name, np.int64) for name in ("mask_head", "mask_row", "mask_column", "ld")]
    + [("softcap", np.float64)]
    + [(name, np.int32) for name in ("rows", "keys", "first_key", "position", "window_left", "window_right", "mask_first", "unused")]
)

# NaiveRepairParams of naive_repair.cu.
REPAIR_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("out", "weights", "v")]
    + [(name, np.int64) for name in ("out_head", "out_row", "v_head", "v_key", "v_column", "ld")]
    + [("factor", np.float64)]
    + [(name, np.int32) for name in ("rows_total", "rows", "keys", "columns", "group", "unused")]
)

# Values of cuBLAS's and CUDA's enumerations, which belong to their stable interfaces.
_CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
_FULL_PRECISION_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


# ---- what it can do ---------------------------------------------------------------------------------------------------


def decline(problem: Problem) -> str | None:
    """Why this problem cannot be computed so, or None."""
    reason = _unsupported(problem)
    if reason is not None or problem.q.device == HOST or jit.why_unusable() is not None:
        return reason
    reason = _no_cublas()
    if reason is not None:
        return reason
    if problem.q.dtype.name == "bfloat16" and device.probe(problem.q.device).cc < (8, 0):
        return "bfloat16 products need compute capability 8.0"
    wanted, available = workspace(problem), available_bytes(problem.q.device)
    if wanted > available:
        return (
            f"naive materialises the scores: {wanted:,} bytes for {problem.heads_q} heads of {problem.seqlen_q} queries and "
            f"{problem.seqlen_k} keys, but {available:,} are free on GPU {problem.q.device}; kernel='fa2' needs O(N)"
        )
    return None


def _unsupported(problem: Problem) -> str | None:
    """What of the call the kernel does not have."""
    if problem.op == "backward":
        return "the naive kernel has no backward pass"
    if problem.score != "dot":
        return f"the naive kernel has no score={problem.score!r}"
    for name in ("page_table", "alibi_slopes", "sinks", "score_mod", "mask_mod"):
        if getattr(problem, name) is not None:
            return f"the naive kernel has no {name}"
    for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_start"):
        if not isinstance(getattr(problem, name), np.ndarray | None):
            return f"{name} is on the device; the naive kernel needs it on the host"
    if problem.compute_dtype.type(problem.scale) == 0:
        return "the naive kernel has no scale of 0: cuBLAS does not read what it multiplies by 0, and a NaN in q or k would not show"
    if problem.out_dtype != problem.q.dtype:
        return f"the naive kernel rounds its weights to {problem.q.dtype}, and its results likewise, not to {problem.out_dtype}"
    if problem.heads_q * problem.seqlen_q >= 2**31:
        return f"{problem.heads_q} heads of {problem.seqlen_q} queries are more than 2**31 - 1 rows"
    for name, rows in (("q", problem.seqlen_q), ("k", problem.seqlen_k), ("v", problem.seqlen_k)):
        view: ArrayView = getattr(problem, name)
        if view.shape[-2] and rows and _operand(view, rows) is None:
            return (
                f"{name}: cuBLAS needs rows or columns that are contiguous and apart, and whole elements; got shape {view.shape} with "
                f"strides {view.strides} in bytes"
            )
    return None


@functools.cache
def _no_cublas() -> str | None:
    """Why cuBLAS cannot be used, or None."""
    try:
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except Exception as error:  # noqa: BLE001  CuPy raises several kinds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f"the naive kernel needs cuBLAS; pip install 'cuflash[cuda13-full]' (or cuda12-full) brings it ({first})"
    return None


def available_bytes(ordinal: int) -> int:
    """Memory of a GPU that an allocation through CuPy can get."""
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(ordinal):
        return int(cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())


def workspace(problem: Problem) -> int:
    """Bytes of the scores of the largest sequence."""
    sizes = (s.q_length * _padded(_visible_keys(problem, s)) for s in problem.sequences())
    return problem.heads_q * max(sizes, default=0) * problem.compute_dtype.itemsize


def plan(problem: Problem, backend: str) -> Plan:
    """The workspace is the point of it."""
    return Plan(
        kernel="naive",
        backend=backend,
        reason="materialises the N x N scores of all heads: cuBLAS, softmax, cuBLAS; the baseline",
        tile=(problem.seqlen_q, problem.seqlen_k),
        threads=THREADS,
        workspace=workspace(problem),
    )


# ---- how cuBLAS sees the arrays ---------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """A (batch, row, head, column) array; strides in elements."""

    pointer: int
    itemsize: int
    cuda_type: int
    batch: int
    row: int
    head: int
    column_major: bool  # of the (row, column) matrix of one head
    ld: int  # its leading dimension

    def at(self, batch: int, row: int, head: int) -> int:
        """Address of a matrix."""
        return self.pointer + (batch * self.batch + row * self.row + head * self.head) * self.itemsize


def _operand(view: ArrayView, rows: int) -> _Operand | None:
    """The array as cuBLAS can read it, ``rows`` of it at most at a time, or None."""
    size = view.dtype.itemsize
    if any(stride % size for stride in view.strides):
        return None
    batch, row, head, column = (stride // size for stride in (view.strides if len(view.strides) == 4 else (0, *view.strides)))
    columns = view.shape[-1]
    if view.shape[-2] > 1 and head < 0:
        return None
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        column_major, ld = False, max(row, columns)
    elif (row == 1 or rows == 1) and column >= rows:
        column_major, ld = True, column
    else:
        return None
    if ld >= 2**31:
        return None
    return _Operand(view.pointer, size, _CUDA_TYPES[view.dtype.name], batch, row, head, column_major, ld)


def _visible_keys(problem: Problem, s: Sequence) -> range:
    """Keys of a sequence that some row may see by length and window; what lies outside is never read."""
    first, last = s.kv_start, s.kv_length
    left, right = problem.window
    if left >= 0:
        first = max(first, s.position - left)
    if right >= 0:
        last = min(last, s.position + s.q_length + right)
    return range(first, max(first, last))


def _padded(keys: range) -> int:
    """Elements from one row of scores to the next."""
    return -(-len(keys) // COLUMNS) * COLUMNS


def _head_groups(problem: Problem) -> Iterator[tuple[int, int, int, int, int]]:
    """Which heads one strided-batched product does: first query head, step, first k/v head, step, count; as few as can be."""
    group, heads_kv = problem.group_size, problem.heads_kv
    if group <= heads_kv:
        for g in range(group):
            yield g, group, 0, 1, heads_kv
    else:
        for h in range(heads_kv):
            yield h * group, 1, h, 0, group


# ---- running ----------------------------------------------------------------------------------------------------------


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.out`` and, unless it is None, ``problem.lse``."""
    compute(problem, Gpu(problem, launch.stream_pointer(None)))


def compute(problem: Problem, engine: Any) -> None:
    """The four steps for each sequence. ``engine`` allocates, multiplies and launches, so that tests can do it on the host."""
    assert problem.out is not None
    if 0 in problem.out.shape[:-1]:  # no query head or no row; a launch of no block is not one
        return
    q, k, v = _operand(problem.q, problem.seqlen_q), _operand(problem.k, problem.seqlen_k), _operand(problem.v, problem.seqlen_k)
    scores = engine.empty((workspace(problem),), np.dtype(np.uint8))
    if problem.varlen:
        packed.clear_slack(problem)
    for s in problem.sequences():
        rows = s.q_length
        out_rows: Any = slice(s.q_begin, s.q_begin + rows) if problem.varlen else s.index
        keys = _visible_keys(problem, s)
        if rows == 0:
            continue
        if not keys:
            packed.clear_rows(problem, out_rows)
            continue
        _scores(problem, engine, s, keys, q, k, scores)
        engine.softmax(_params(problem, s, keys, engine.pointer(scores)))
        target = problem.out.array[out_rows]  # (rows, heads, Dv)
        direct = _unit_rows(target)
        out = target if direct else engine.empty(target.shape, target.dtype)
        _products(problem, engine, s, keys, v, scores, out)
        if problem.head_dim_v:
            engine.repair(_repair_params(problem, s, keys, v, engine.pointer(scores), out.strides, engine.pointer(out)))
        if not direct:
            target[...] = out


def _unit_rows(a: Any) -> bool:
    """Whether the (row, column) matrices of a (row, head, column) array are row-major for cuBLAS."""
    rows, heads, columns = a.shape
    row, head, column = (stride // a.dtype.itemsize for stride in a.strides)
    return (column == 1 or columns == 1) and columns <= row < 2**31 and (head > 0 or heads == 1)


def _batch_of(a: ArrayView, s: Sequence, begin: int) -> tuple[int, int]:
    """Batch index and first row of a sequence in an array."""
    return (s.index, 0) if len(a.shape) == 4 else (0, begin)


def _scores(problem: Problem, engine: Any, s: Sequence, keys: range, q: Any, k: Any, scores: Any) -> None:
    """scores (heads, rows, padded keys) = scale * q k^T. cuBLAS counts by columns and sees all of it transposed."""
    ld = _padded(keys)
    matrix = s.q_length * ld
    q_batch, q_row = _batch_of(problem.q, s, s.q_begin)
    k_batch, k_row = _batch_of(problem.k, s, s.k_begin)
    real = problem.compute_dtype
    for q_head, q_step, k_head, k_step, count in _head_groups(problem):
        engine.gemm(
            not k.column_major, q.column_major, len(keys), s.q_length, problem.head_dim, float(problem.scale),
            k.at(k_batch, k_row + keys.start, k_head), k.cuda_type, k.ld, k_step * k.head,
            q.at(q_batch, q_row, q_head), q.cuda_type, q.ld, q_step * q.head,
            engine.pointer(scores) + q_head * matrix * real.itemsize, _CUDA_TYPES[real.name], ld, q_step * matrix, count,
        )  # fmt: skip


def _weights(problem: Problem, keys: range) -> tuple[int, float]:
    """Elements from one row of weights to the next, each beginning where its row of scores began; and by what to multiply them."""
    narrow = problem.v.dtype
    return _padded(keys) * (problem.compute_dtype.itemsize // narrow.itemsize), SCALE_FP16 if narrow.name == "float16" else 1.0


def _products(problem: Problem, engine: Any, s: Sequence, keys: range, v: Any, scores: Any, out: Any) -> None:
    """out (rows, heads, Dv) = weights v, again transposed."""
    narrow = problem.v.dtype
    ld, alpha = _weights(problem, keys)
    matrix = s.q_length * ld
    v_batch, v_row = _batch_of(problem.v, s, s.k_begin)
    row, head, _ = (stride // out.dtype.itemsize for stride in out.strides)
    for q_head, q_step, v_head, v_step, count in _head_groups(problem):
        engine.gemm(
            v.column_major, False, problem.head_dim_v, s.q_length, len(keys), alpha,
            v.at(v_batch, v_row + keys.start, v_head), v.cuda_type, v.ld, v_step * v.head,
            engine.pointer(scores) + q_head * matrix * narrow.itemsize, v.cuda_type, ld, q_step * matrix,
            engine.pointer(out) + q_head * head * out.dtype.itemsize, _CUDA_TYPES[out.dtype.name], max(row, problem.head_dim_v),
            q_step * head, count,
        )  # fmt: skip


def _params(problem: Problem, s: Sequence, keys: range, scores: int) -> np.ndarray:
    """What the softmax kernel gets for one sequence."""
    p = np.zeros(1, PARAMS)
    p["scores"], p["ld"], p["softcap"] = scores, _padded(keys), problem.softcap
    p["rows"], p["keys"], p["first_key"], p["position"] = s.q_length, len(keys), keys.start, s.position
    p["window_left"], p["window_right"] = (min(side, 2**31 - 1) for side in problem.window)
    for name, view in (("bias", problem.bias), ("mask", problem.mask)):
        if view is not None:
            batch, *others = (stride // view.dtype.itemsize for stride in view.strides)
            p[name] = view.pointer + s.index * batch * view.dtype.itemsize
            p[f"{name}_head"], p[f"{name}_row"], p[f"{name}_column"] = others
    if problem.mask is not None and problem.mask_is_tail:
        p["mask_first"] = s.kv_length - problem.mask.shape[3]
    if problem.lse is not None:
        size = problem.lse.dtype.itemsize
        strides = [stride // size for stride in problem.lse.strides]
        p["lse_head"], p["lse_row"] = strides[-2:]
        offset = s.q_begin * strides[-1] if problem.varlen else s.index * strides[0]
        p["lse"] = problem.lse.pointer + offset * size
    return p


def _repair_params(problem: Problem, s: Sequence, keys: range, v: Any, weights: int, strides: tuple[int, ...], out: int) -> np.ndarray:
    """What the repair kernel gets for one sequence, whose (rows, heads, Dv) output at ``out`` has contiguous columns."""
    p = np.zeros(1, REPAIR_PARAMS)
    p["out"], p["weights"] = out, weights
    p["out_row"], p["out_head"] = (stride // problem.out_dtype.itemsize for stride in strides[:2])
    p["ld"], p["factor"] = _weights(problem, keys)
    batch, row = _batch_of(problem.v, s, s.k_begin)
    p["v"] = v.at(batch, row + keys.start, 0)
    p["v_head"], p["v_key"], p["v_column"] = v.head, v.row, v.ld if v.column_major else 1
    p["rows"], p["rows_total"] = s.q_length, s.q_length * problem.heads_q
    p["keys"], p["columns"], p["group"] = len(keys), problem.head_dim_v, problem.group_size
    return p


class Gpu:
    """Memory, products and launches of one call, on CuPy's current device and stream."""

    def __init__(self, problem: Problem, stream: int):
        from cupy_backends.cuda.libs import cublas

        self.cupy, self.cublas, self.problem = sys.modules["cupy"], cublas, problem
        self.stream = stream
        self.handle = self.cupy.cuda.device.get_cublas_handle()
        self.compute = _COMPUTE_64F if problem.compute_dtype == np.float64 else _COMPUTE_32F
        if problem.precision == "tf32" and problem.q.dtype == np.float32:
            self.compute = _COMPUTE_TF32

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        return self.cupy.empty(shape, dtype)

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def gemm(
        self, transpose_a: bool, transpose_b: bool, m: int, n: int, k: int, alpha: float,
        a: int, a_type: int, a_ld: int, a_step: int, b: int, b_type: int, b_ld: int, b_step: int,
        c: int, c_type: int, c_ld: int, c_step: int, count: int,
    ) -> None:  # fmt: skip
        """C = alpha op(A) op(B) by columns, ``count`` of them at strides of ``step`` elements."""
        factors = np.array([alpha, 0.0], self.problem.compute_dtype)  # cuBLAS reads them before it returns
        mode = self.cublas.getMathMode(self.handle)
        self.cublas.setMathMode(self.handle, _FULL_PRECISION_SUMS)
        try:
            self.cublas.gemmStridedBatchedEx(
                self.handle, int(transpose_a), int(transpose_b), m, n, k, factors.ctypes.data,
                a, a_type, a_ld, a_step, b, b_type, b_ld, b_step, factors.ctypes.data + factors.itemsize,
                c, c_type, c_ld, c_step, count, self.compute, _ALGORITHM,
            )  # fmt: skip
        finally:
            self.cublas.setMathMode(self.handle, mode)

    def softmax(self, params: np.ndarray) -> None:
        function = jit.function(source(self.problem), self.problem.q.device)
        launch.launch(launch.Step(function, self.problem.heads_q * int(params["rows"][0]), THREADS), params, self.stream)

    def repair(self, params: np.ndarray) -> None:
        function = jit.function(repair_source(self.problem.v.dtype.name), self.problem.q.device)
        launch.launch(launch.Step(function, repair_blocks(params), THREADS), params, self.stream)


# ---- the kernels ------------------------------------------------------------------------------------------------------


def source(problem: Problem) -> jit.Source:
    """The instance of the softmax that a problem needs."""
    options = bool(problem.softcap) or problem.bias is not None or problem.mask is not None
    return _instance(problem.q.dtype.name, options, problem.q.dtype.name if problem.bias is None else problem.bias.dtype.name)


@functools.cache
def _instance(dtype: str, options: bool, bias: str) -> jit.Source:
    name = f"naive_softmax_{SHORT_TYPES[dtype]}" + (f"_options_bias_{SHORT_TYPES[bias]}" if options else "")
    number = "double" if dtype == "float64" else "float"
    blocks = 4 if number == "double" else 8  # at least so many resident ones: bounds the registers
    stub = f"""static_assert(sizeof(NaiveSoftmaxParams) == {PARAMS.itemsize}, "its mirror in naive_cuda.py differs");
extern "C" __global__ void __launch_bounds__(THREADS, {blocks})
{name}(const __grid_constant__ NaiveSoftmaxParams p) {{
    softmax_row<{number}, {CUDA_TYPES[dtype]}, {CUDA_TYPES[bias]}, {str(options).lower()}>(p);
}}
"""
    return jit.Source("naive_softmax.cu", stub, name)


@functools.cache
def repair_source(dtype: str) -> jit.Source:
    """The instance of the repair for a dtype of v."""
    name = f"naive_repair_{SHORT_TYPES[dtype]}"
    number = "double" if dtype == "float64" else "float"
    stub = f"""static_assert(sizeof(NaiveRepairParams) == {REPAIR_PARAMS.itemsize}, "its mirror in naive_cuda.py differs");
static_assert(ROWS == {REPAIR_ROWS}, "naive_cuda.py counts blocks by it");
extern "C" __global__ void __launch_bounds__(THREADS, 8)
{name}(const __grid_constant__ NaiveRepairParams p) {{
    repair_rows<{number}, {CUDA_TYPES[dtype]}>(p);
}}
"""
    return jit.Source("naive_repair.cu", stub, name)


def repair_blocks(params: np.ndarray) -> int:
    """How many blocks look at all rows."""
    return -(-int(params["rows_total"][0]) // REPAIR_ROWS)


def instances(arch: str) -> Iterator[jit.Source]:
    """Every instance for an architecture."""
    for dtype in CUDA_TYPES:
        if dtype == "bfloat16" and int(jit.exact(arch)[3:].rstrip("af")) < 80:
            continue
        yield repair_source(dtype)
        yield _instance(dtype, False, dtype)
        for bias in dict.fromkeys((dtype, "float32")):
            yield _instance(dtype, True, bias)
