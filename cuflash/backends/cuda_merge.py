"""Merging partial results on the GPU as one launch: merge_states.cu. For any backend that works on arrays of CuPy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import device, jit, launch, structs
from ..types import ArrayView, name_of
from .cuda_instance import CUDA_TYPES, SHORT_TYPES

PARTS, THREADS = 16, 128  # MERGE_PARTS and MERGE_THREADS in merge_states.cu

# MergeParams of merge_states.cu.
PARAMS = np.dtype(
    [
        *((name, (np.uint64, PARTS)) for name in ("outs", "lses")), *((name, np.uint64) for name in ("out", "lse", "shared", "lengths")),
        *((name, (structs.STRIDES, PARTS)) for name in ("out_strides", "lse_strides")),
        *((name, structs.STRIDES) for name in ("out_stride", "lse_stride")),
        *((name, (np.int64, PARTS)) for name in ("out_groups", "lse_groups")),
        *((name, np.int32) for name in ("parts", "batch", "rows", "heads", "head_dim", "group", "least", "shared_i32", "lengths_i32")),
    ],
    align=True,
)


class Shared(NamedTuple):
    """Which sequences part 0 is for: addresses on the device of index arrays (batch,), and whether they are int32."""

    lengths: int  # keys of part 0 that a sequence has: 0, or as many as sequence 0
    lengths_i32: bool
    all_lengths: int  # keys that it has altogether
    all_lengths_i32: bool
    least: int  # of these, behind those of part 0; with fewer, its own or of sequence 0, its rows become NaN


@functools.cache
def source(dtype: str) -> jit.Source:
    """The kernel for outputs of a dtype."""
    name = f"merge_states_{SHORT_TYPES[dtype]}"
    real = "Exact64" if dtype == "float64" else "Exact32"
    stub = (
        f'static_assert(sizeof(MergeParams) == {PARAMS.itemsize}, "cuda_merge.py mirrors the struct");\n'
        f'static_assert(MERGE_PARTS == {PARTS} && MERGE_THREADS == {THREADS}, "as cuda_merge.py has them");\n'
        f'extern "C" __global__ void __launch_bounds__(MERGE_THREADS) {name}(const __grid_constant__ MergeParams p) {{\n'
        f"    merge_states<{CUDA_TYPES[dtype]}, {real}>(p);\n"
        "}\n"
    )
    return jit.Source("merge_states.cu", stub, name)


def instances(arch: str) -> Iterator[jit.Source]:
    """Every instance for an architecture: for precompilation."""
    number = int(jit.exact(arch).removeprefix("sm_").rstrip("af"))
    yield from (source(dtype) for dtype in CUDA_TYPES if number >= 80 or dtype != "bfloat16")


def decline(dtype: np.dtype, ordinal: int, parts: int, compute: np.dtype) -> str | None:
    """Why the kernel cannot merge so many outputs of a dtype with LSEs of ``compute``, or None."""
    name = name_of(dtype)
    if name not in CUDA_TYPES or compute != (np.float64 if name == "float64" else np.float32):
        return f"{name} outputs with {compute} statistics"
    if parts > PARTS:
        return f"{parts} parts; it takes at most {PARTS}"
    reason = jit.why_unusable()
    if reason is None and name == "bfloat16" and device.probe(ordinal).cc < (8, 0):
        reason = "bfloat16 needs compute capability 8.0"
    return reason


def pack(
    outs: Sequence[ArrayView], lses: Sequence[ArrayView], out: ArrayView, lse: ArrayView | None, axes: tuple[str, str],
    shared: Shared | None = None,
) -> tuple[int, np.ndarray]:
    """Blocks, and the struct of the launch.

    ``axes`` names those of out and lse by their initials, such as "brhc" and "bhr". The parts have the same, or in place of the heads two:
    groups, and the heads of a group.
    """
    p = np.zeros(1, PARAMS)
    r: Any = p[0]
    size = dict(zip(axes[0], out.shape, strict=True))
    batch, rows, heads = (size.get(axis, 1) for axis in "brh")
    r["parts"], r["batch"], r["rows"], r["heads"], r["head_dim"], r["group"] = len(outs), batch, rows, heads, size["c"], 1
    for name, parts, order in (("out", outs, axes[0]), ("lse", lses, axes[1])):
        for n, a in enumerate(parts):
            if len(a.shape) > len(order):
                at = order.index("h")
                r["group"], r[f"{name}_groups"][n] = a.shape[at + 1], a.strides[at] // a.dtype.itemsize
                order_of_a = order.replace("h", "gh")
            else:
                order_of_a = order
                r[f"{name}_groups"][n] = structs.element_strides(a, order)[2]
            r[f"{name}s"][n], r[f"{name}_strides"][n] = a.pointer, structs.element_strides(a, order_of_a)
    r["out"], r["out_stride"] = out.pointer, structs.element_strides(out, axes[0])
    if lse is not None:
        r["lse"], r["lse_stride"] = lse.pointer, structs.element_strides(lse, axes[1])
    if shared is not None:
        r["shared"], r["shared_i32"], r["lengths"], r["lengths_i32"], r["least"] = shared
    return -(-batch * rows * heads * 32 // THREADS), p


def run(
    outs: Sequence[ArrayView], lses: Sequence[ArrayView], out: ArrayView, lse: ArrayView | None, axes: tuple[str, str],
    shared: Shared | None = None,
) -> None:
    """Merge on CuPy's current stream; out and lse may be of the arrays that come in, but must not overlap them otherwise."""
    index = (0, 0) if shared is None else (shared.lengths, shared.all_lengths)
    at = addresses([a.pointer for a in outs], [a.pointer for a in lses], out.pointer, 0 if lse is None else lse.pointer, *index)
    if 0 not in out.shape[:-1]:  # rows without columns have a log-sum-exp nevertheless
        prepare(outs, lses, out, lse, axes, shared)(*at)


def prepare(
    outs: Sequence[ArrayView], lses: Sequence[ArrayView], out: ArrayView, lse: ArrayView | None, axes: tuple[str, str],
    shared: Shared | None = None,
) -> launch.Prepared:
    """The launch of `run` for calls that differ in addresses alone: those of ``addresses``."""
    forms = tuple(None if a is None else (a.shape, a.strides, a.dtype) for a in (out, lse, *outs, *lses))
    return merge_launch(forms, axes, None if shared is None else shared._replace(lengths=0, all_lengths=0), out.device)


@functools.lru_cache(maxsize=256)
def merge_launch(forms: tuple, axes: tuple[str, str], shared: Shared | None, ordinal: int) -> launch.Prepared:
    views: list[Any] = [None if form is None else ArrayView(None, 0, form[0], form[1], form[2], "cupy", ordinal) for form in forms]
    out, lse, *parts = views
    half = len(parts) // 2
    blocks, params = pack(parts[:half], parts[half:], out, lse, axes, shared)
    function = jit.function(source(name_of(out.dtype)), ordinal)
    return launch.Prepared([launch.Step(function, blocks, THREADS)], params, 2 * PARTS + 4)


def addresses(outs: Sequence[int], lses: Sequence[int], out: int, lse: int, shared: int, lengths: int) -> tuple[int, ...]:
    """The first members of the struct."""
    rest = (0,) * (PARTS - len(outs))
    return (*outs, *rest, *lses, *rest, out, lse, shared, lengths)
