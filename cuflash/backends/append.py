"""What decode() does before it attends, in NumPy: a rotary embedding, and new keys and values into caches, dense or paged.

For arrays on a GPU this is what is left where the kernel of cuda_append.py cannot run: lengths from the host, no embedding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import launch
from ..types import HOST, Append, ArrayView, NoBackendError, Problem, Rope


@contextlib.contextmanager
def appended(problem: Problem, new: Append, why: str = "") -> Iterator[Problem]:
    """The problem that is left once ``new`` is in the caches and q is turned.

    ``problem`` is the decode problem after the append: its kv_lengths count the new keys. Everything has been checked. ``why`` says
    what keeps a GPU from doing it all by itself.
    """
    if problem.q.device != HOST and (new.rope is not None or problem.indices_on_device):
        what = ", ".join([*["rope"] * (new.rope is not None), *(f"{name} on the device" for name in problem.indices_on_device)])
        raise NoBackendError(f"{what}: decode() needs the kernel that appends, which cannot run: {why}")
    if problem.q.device != HOST:
        launch.refuse_capture(launch.copied({"kv_lengths": new.lengths}))
    position = np.array([s.position for s in problem.sequences()], np.int64).reshape(-1, 1)
    if new.k_new is not None and new.v_new is not None:
        places = new.lengths[:, None] + np.arange(new.count)
        keys = new.k_new.array if new.rope is None else turned(new.k_new.array, places, new.rope, problem.compute_dtype)
        for cache, values in ((problem.k.array, keys), (problem.v.array, new.v_new.array)):
            write(cache, values, places, problem)
    if new.rope is None:
        yield problem
        return
    q = turned(problem.q.array, position + np.arange(problem.seqlen_q), new.rope, problem.compute_dtype)
    yield problem.replace(q=ArrayView(q, q.__array_interface__["data"][0], q.shape, q.strides, q.dtype, "numpy", HOST))


def write(cache: Any, values: Any, places: np.ndarray, problem: Problem) -> None:
    """Values (B, n, Hkv, D) to the keys ``places`` (B, n) of their sequences."""
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
