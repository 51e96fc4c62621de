"""What decode() does before it attends, in NumPy: a rotary embedding, and new keys and values into caches, dense or paged; quantized, if
the caches are float8_e4m3fn and they are not.

For arrays on a GPU this is what is left where the kernel of cuda_append.py cannot run: lengths from the host, no embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from .. import launch
from ..types import HOST, Append, ArrayView, NoBackendError, Problem, Rope

LARGEST = 448.0  # number of float8_e4m3fn


@contextlib.contextmanager
def appended(problem: Problem, new: Append, why: str = "") -> Iterator[Problem]:
    """The problem that is left once ``new`` is in the caches and q is turned.

    ``problem`` is the decode problem after the append: its kv_lengths count the new keys. Everything has been checked. ``why`` says
    what keeps a GPU from doing it all by itself.
    """
    if problem.q.device != HOST and (new.rope is not None or problem.indices_on_device or problem.e4m3):
        asked = {"rope": new.rope is not None, f"caches in {problem.k.dtype}": problem.e4m3}
        asked |= {f"{name} on the device": True for name in problem.indices_on_device}
        what = ", ".join(name for name, there in asked.items() if there)
        raise NoBackendError(f"{what}: decode() needs the kernel that appends, which cannot run: {why}")
    if problem.q.device != HOST:
        launch.refuse_capture(launch.copied({"kv_lengths": new.lengths}))
    position = np.array([s.position for s in problem.sequences()], np.int64).reshape(-1, 1)
    if new.k_new is not None and new.v_new is not None:
        places = new.lengths[:, None] + np.arange(new.count)
        keys = new.k_new.array if new.rope is None else turned(new.k_new.array, places, new.rope, problem.compute_dtype)
        for a, scale, values in ((problem.k, problem.k_scale, keys), (problem.v, problem.v_scale, new.v_new.array)):
            if new.quantizes:
                by_token = scale is not None and scale.by_token
                values, found = quantized(values, None if by_token else head_scales(scale, problem.heads_kv))
                if scale is not None and by_token:
                    write(scale.array, found, places, problem)
            write(a.array, values, places, problem)
    if new.rope is None:
        yield problem
        return
    q = turned(problem.q.array, position + np.arange(problem.seqlen_q), new.rope, problem.compute_dtype)
    yield problem.replace(q=ArrayView(q, q.__array_interface__["data"][0], q.shape, q.strides, q.dtype, "numpy", HOST))


def head_scales(scale: ArrayView | None, heads: int) -> np.ndarray:
    """Scales that are the same for all tokens: (Hkv,)."""
    return np.ones(heads, np.float32) if scale is None or not scale.array.size else scale.array.reshape(-1, heads)[0]


def quantized(x: np.ndarray, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """x (..., D) in float8_e4m3fn, and the scales (...): given ones, or those with which the largest number of each row becomes 448."""
    numbers = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    if scale is None:
        top = np.fmax.reduce(np.abs(numbers), axis=-1, initial=0)  # NaN is passed over: it becomes NaN by itself
        with np.errstate(over="ignore"):
            scale = np.maximum((top / numbers.dtype.type(LARGEST)).astype(np.float32), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = np.clip(numbers / scale[..., None], -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale


def write(cache: Any, values: Any, places: np.ndarray, problem: Problem) -> None:
    """Values (B, n, Hkv, D), or (B, n, Hkv), to the keys ``places`` (B, n) of their sequences."""
    for b, j in enumerate(places):
        if problem.page_table is None:
            cache[b, j] = values[b]
        else:
            cache[problem.page_table[b, j // problem.page_size], j % problem.page_size] = values[b]


def turned(x: np.ndarray, positions: np.ndarray, rope: Rope, compute_dtype: np.dtype) -> np.ndarray:
    """x (B, n, H, D), row [b, t] turned by the angles of positions[b, t]; computed in ``compute_dtype`` and rounded once."""
    row = np.abs(positions)
    known = row < rope.cos.shape[0]
    cos, sin = (
        np.where(known[..., None], table.array[np.where(known, row, 0)].astype(compute_dtype), np.nan)[:, :, None]
        if rope.cos.shape[0] else np.full((*row.shape, 1, rope.cos.shape[1]), np.nan, compute_dtype)
        for table in (rope.cos, rope.sin)
    )
    sin = np.where(positions[..., None, None] < 0, -sin, sin)
    rot = 2 * rope.cos.shape[1]
    first, second = (slice(0, rot, 2), slice(1, rot, 2)) if rope.interleaved else (slice(0, rot // 2), slice(rot // 2, rot))
    result = np.array(x, order="C")
    a, b = x[..., first].astype(compute_dtype), x[..., second].astype(compute_dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        result[..., first] = (a * cos - b * sin).astype(x.dtype)
        result[..., second] = (b * cos + a * sin).astype(x.dtype)
    return result
