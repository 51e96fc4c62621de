"""What decode() does before it attends, as one launch on the GPU: kv_append.cu. For any backend that works on arrays of CuPy.

Keys and values go into the caches, a rotary embedding turns keys and queries. The lengths and the page table may be where only the
device can read them; a warm call waits for nothing, reads nothing back, and can be captured.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import device, jit, launch, structs
from ..types import E4M3, Append, ArrayView, Problem, name_of
from .cuda_instance import CUDA_TYPES, SHORT_TYPES

_SHORT, _TYPES = SHORT_TYPES | {E4M3: "e4m3"}, CUDA_TYPES | {E4M3: "E4m3"}
THREADS = 128  # of a block, APPEND_THREADS in kv_append.cu
ROW = 32  # threads that quantize a row of at most
MOST_COLUMNS = 256  # numbers, MOST_COLUMNS in kv_append.cu
MOST_THREADS = 2**31 - THREADS  # of a launch: the kernel counts them in 32 bits

# AppendParams of kv_append.cu.
PARAMS = np.dtype(
    [
        *((name, np.uint64) for name in (
            "q", "k_new", "v_new", "cos", "sin", "lengths", "page_table", "q_turned", "k", "v", "lengths_after", *structs.SCALES,
        )),
        *((f"{name}_stride", structs.STRIDES) for name in ("q", "k_new", "v_new", "k", "v", *structs.SCALES)),
        *((name, np.int64) for name in ("cos_row", "cos_column", "sin_row", "sin_column")),
        *((name, np.uint32) for name in ("k_units", "v_units", "q_units", "k_total", "v_total", "q_total", "lengths_total")),
        *((name, np.int32) for name in (
            "q_rows", "new_keys", "heads_q", "heads_kv", "head_dim", "head_dim_v", "pairs", "interleaved", "table_float",
            "positions", "upper_left", "k_vector", "v_vector", "q_vector", "lengths_i32", "capacity", "page_size", "max_pages", "pages",
        )),
        ("page_magic", np.uint32), ("page_shift", np.int32), ("k_by_token", np.int32), ("v_by_token", np.int32),
        ("k_factor", np.float32), ("v_factor", np.float32),
    ],
    align=True,
)


@functools.cache
def source(dtype: str, kv: str = "") -> jit.Source:
    """The kernel for arrays of a dtype, and caches of ``kv`` if that is another; one for all sizes, strides, dense and paged caches."""
    dtypes = [d for d in (dtype, kv) if d]
    name, types = "_".join(("kv_append", *(_SHORT[d] for d in dtypes))), ", ".join(_TYPES[d] for d in dtypes)
    stub = (
        f'static_assert(sizeof(AppendParams) == {PARAMS.itemsize}, "cuda_append.py mirrors the struct");\n'
        f'static_assert(APPEND_THREADS == {THREADS} && MOST_COLUMNS == {MOST_COLUMNS}, "as cuda_append.py has it");\n'
        f'extern "C" __global__ void __launch_bounds__(APPEND_THREADS) {name}(const __grid_constant__ AppendParams p) {{\n'
        f"    kv_append<{types}>(p);\n"
        "}\n"
    )
    return jit.Source("kv_append.cu", stub, name)


def instances(arch: str) -> Iterator[jit.Source]:
    """Every instance for an architecture: for precompilation."""
    number = int(jit.exact(arch).removeprefix("sm_").rstrip("af"))
    dtypes = [dtype for dtype in CUDA_TYPES if number >= 80 or dtype != "bfloat16"]
    yield from (source(dtype) for dtype in (*dtypes, E4M3))
    yield from (source(dtype, E4M3) for dtype in dtypes if dtype != "float64")


def source_for(problem: Problem, new: Append) -> jit.Source:
    """The kernel of a call."""
    dtype, kv = name_of(problem.q.dtype), name_of(problem.k.dtype)
    return source(kv) if new.rope is None and not new.quantizes else source(dtype, kv if new.quantizes else "")


def decline(problem: Problem, new: Append) -> str | None:
    """Why the kernel cannot append, or None."""
    reason = jit.why_unusable()
    if reason is not None:
        return reason
    info = device.probe(problem.q.device)
    dtype = name_of(problem.q.dtype)
    needed = (8, 0) if dtype == "bfloat16" else (7, 5)
    if info.cc < needed:
        return f"{dtype} needs compute capability {needed[0]}.{needed[1]}, {info.name} has {info.cc[0]}.{info.cc[1]}"
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > structs.LONGEST:
        return f"sequences of {longest:,} rows; it takes at most {structs.LONGEST:,}"
    keys, rows = problem.batch * new.count * problem.heads_kv, problem.batch * problem.seqlen_q * problem.heads_q
    if new.quantizes and max(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS:
        return f"head sizes {problem.head_dim} and {problem.head_dim_v}; it quantizes up to {MOST_COLUMNS} numbers a head"
    threads = keys * max(2 * ROW, problem.head_dim + problem.head_dim_v) + rows * problem.head_dim + problem.batch  # at most
    if threads > MOST_THREADS and (threads := sum(units(problem, new)[1])) > MOST_THREADS:
        return f"{threads:,} threads; a launch has at most {MOST_THREADS:,}"
    return None


@contextlib.contextmanager
def appended(problem: Problem, new: Append) -> Iterator[Problem]:
    """Append on CuPy's current stream; inside, the problem that attention is left with.

    Its q is turned, and its kv_lengths count the new keys: on the device they are others than the user's, which stay as they are. What
    these lie in lives until the block ends, in the stream's order.
    """
    place = problem.q.device
    function = jit.function(source_for(problem, new), place)
    small = {name: a for name, a in structs.small_arrays(problem).items() if name in structs.SCALES}
    if isinstance(new.lengths, np.ndarray):
        small["lengths"] = np.ascontiguousarray(new.lengths)
    if isinstance(problem.page_table, np.ndarray):
        small["page_table"] = structs.page_entries(problem.page_table)
    with contextlib.ExitStack() as stack:
        pointers = stack.enter_context(launch.uploaded(small))
        fresh: dict[str, Any] = {}
        if new.rope is not None:
            fresh["q"] = stack.enter_context(launch.scratch(problem.q.shape, problem.q.dtype, place))
        if isinstance(new.lengths, ArrayView) and new.count:
            fresh["kv_lengths"] = stack.enter_context(launch.scratch((problem.batch,), np.dtype(np.int32), place))
        threads, params = pack(problem, new, fresh.get("q"), fresh.get("kv_lengths"), pointers)
        if threads:
            launch.launch(step(function, threads, place), params, launch.stream_pointer(None))
        yield problem.replace(**fresh) if fresh else problem


def step(function: Any, threads: int, ordinal: int) -> launch.Step:
    """The kernel with so many threads."""
    return launch.Step(function, -(-threads // THREADS), THREADS, early=launch.launches_early(ordinal))


def prepare(problem: Problem, new: Append, ready: Problem) -> launch.Prepared | None:
    """The launch for calls that differ in addresses alone, where lengths and page table are on the device; None if it has no threads.

    It takes the first members of the struct, up to the addresses of scales. ``ready`` is the problem that `appended` left.
    """
    threads, params = pack(
        problem, new, None if ready.q is problem.q else ready.q, None if ready.kv_lengths is problem.kv_lengths else ready.kv_lengths, {},
    )
    if not threads:
        return None
    function = jit.function(source_for(problem, new), problem.q.device)
    return launch.Prepared([step(function, threads, problem.q.device)], params, addresses=13)


def quantize(x: ArrayView, codes: ArrayView, scale: ArrayView | float) -> None:
    """Write x (B, S, H, D) to ``codes`` as new keys are written to an empty cache; see `pack_quantize`."""
    threads, params = pack_quantize(x, codes, scale)
    if threads > MOST_THREADS:
        raise ValueError(f"x: {threads // ROW:,} rows; a launch has at most {MOST_THREADS // ROW:,}, pass it in parts")
    if threads:
        function = jit.function(source(name_of(x.dtype), E4M3), x.device)
        launch.launch(step(function, threads, x.device), params, launch.stream_pointer(None))


def pack_quantize(x: ArrayView, codes: ArrayView, scale: ArrayView | float) -> tuple[int, np.ndarray]:
    """Threads and struct of `quantize`. scale: a number, an array (B, S, H) that is written, or one that repeats the scales of heads."""
    p = np.zeros(1, PARAMS)
    batch, keys, heads, size = x.shape
    values: dict[str, Any] = {
        "k_new": x.pointer, "k_new_stride": structs.element_strides(x, "brhc"), "k": codes.pointer,
        "k_stride": structs.element_strides(codes, "brhc"), "new_keys": keys, "heads_kv": heads, "head_dim": size,
        "capacity": keys, "k_total": batch * keys * heads * ROW,
    }
    if isinstance(scale, ArrayView):
        values |= {"k_scale": scale.pointer, "k_scale_stride": structs.element_strides(scale, "brh"), "k_by_token": scale.by_token}
    else:
        values["k_factor"] = scale
    for name, value in values.items():
        p[0][name] = value
    return batch * keys * heads * ROW, p


def units(problem: Problem, new: Append) -> tuple[dict[str, int], list[int]]:
    """How rows are cut, as fields of the struct; and the threads for keys, values, queries and lengths."""
    pairs = 0 if new.rope is None else new.rope.cos.shape[1]
    count = new.count
    fields: dict[str, int] = {}
    totals = []
    for name, arrays, columns, rows, turned in (
        ("k", (new.k_new, problem.k), problem.head_dim, problem.batch * count * problem.heads_kv, pairs),
        ("v", (new.v_new, problem.v), problem.head_dim_v, problem.batch * count * problem.heads_kv, 0),
        ("q", (problem.q,), problem.head_dim, problem.batch * problem.seqlen_q * problem.heads_q if pairs else 0, pairs),
    ):
        if new.quantizes and name != "q":
            totals.append(rows * ROW)
            continue
        in_vector = 16 // arrays[-1].dtype.itemsize
        inside = turned > 0 and new.rope is not None and new.rope.interleaved  # a pair lies in one piece of 16 bytes
        vector = rows > 0 and structs.copy_bytes(arrays) == 16 and (inside or turned % in_vector == 0)  # type: ignore[arg-type]
        width = in_vector if vector else 1
        fields[f"{name}_vector"] = vector
        fields[f"{name}_units"] = columns // width - (0 if vector and inside else turned // width)
        totals.append(rows * fields[f"{name}_units"])
    totals.append(problem.batch if isinstance(new.lengths, ArrayView) and count else 0)
    return fields, totals


def pack(
    problem: Problem, new: Append, q_turned: ArrayView | None, lengths_after: ArrayView | None, pointers: dict[str, int],
) -> tuple[int, np.ndarray]:
    """Threads, and the struct of the launch. ``pointers``: device addresses of lengths and page table that came from the host."""
    p = np.zeros(1, PARAMS)
    fields, totals = units(problem, new)
    values: dict[str, Any] = dict(fields)
    values |= dict(zip(("k_total", "v_total", "q_total", "lengths_total"), totals, strict=True))
    for name, a in (("q", problem.q), ("k", problem.k), ("v", problem.v), ("k_new", new.k_new), ("v_new", new.v_new)):
        if a is not None:
            values[name], values[f"{name}_stride"] = a.pointer, structs.element_strides(a, "brhc")
    for name, a in (("lengths", new.lengths), ("page_table", problem.page_table), ("q_turned", q_turned), ("lengths_after", lengths_after)):
        if isinstance(a, ArrayView):
            values[name] = a.pointer
    if new.rope is not None:
        for name, a in (("cos", new.rope.cos), ("sin", new.rope.sin)):
            values[name] = a.pointer
            values[f"{name}_row"], values[f"{name}_column"] = structs.element_strides(a, "rc")[1::2]
        values |= {
            "positions": new.rope.cos.shape[0], "pairs": new.rope.cos.shape[1], "interleaved": new.rope.interleaved,
            "table_float": new.rope.cos.dtype == np.float32,
        }
    values |= {
        "q_rows": problem.seqlen_q, "new_keys": new.count, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "upper_left": problem.align == "upper_left",
        "lengths_i32": new.lengths.dtype == np.int32, "capacity": problem.seqlen_k,
    }
    if new.quantizes:
        values |= structs.scale_values(problem, pointers)
        values |= {f"{name[0]}_by_token": (a := getattr(problem, name)) is not None and a.by_token for name in structs.SCALES}
    if problem.paged:
        values |= {"page_size": problem.page_size, "max_pages": problem.page_table.shape[1], "pages": problem.k.shape[0]}
        values["page_magic"], values["page_shift"] = structs.page_divisor(problem.page_size)
    for name, value in {**values, **pointers}.items():
        p[0][name] = value
    return sum(totals), p
