"""Lengths and cu_seqlens on the host or on a device. What lies on a device is not read: the kernels clamp it.

Host arrays are checked, always, by checks.py. With ``CUFLASH_CHECK=1`` so are device arrays: they are then read back, which waits
for the device; a stream capture cannot wait, and is left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, checks, host
from .types import ArrayView, Problem

TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def view(value: Any, name: str, q: ArrayView, length: int | None, what: str) -> ArrayView:
    """A device array of integers, one axis without gaps, where q is; of this length, ``what`` in words, unless that is None."""
    a = checks.array_like(value, name, q)
    if a.dtype not in TYPES:
        raise TypeError(f"{name}: dtype {a.dtype}; an index array on a device must be int32 or int64")
    if len(a.shape) != 1 or (length is not None and a.shape[0] != length) or a.shape[0] < (length is None):
        raise ValueError(f"{name}: shape {a.shape}; it must be {what}")
    if a.shape[0] > 1 and a.strides[0] != a.dtype.itemsize:
        raise ValueError(f"{name}: strides {a.strides}; an index array on a device must be contiguous: pass cupy.ascontiguousarray(x)")
    return a


def to_check(*index_arrays: Any) -> list[np.ndarray | None] | None:
    """The numbers of index arrays if CUFLASH_CHECK asks for a look at those on a device, else None."""
    if not host.checks():
        return None
    on_host = [arrays.read_back(a) if isinstance(a, ArrayView) else a for a in index_arrays]
    return None if any(a is not None and b is None for a, b in zip(index_arrays, on_host, strict=True)) else on_host


def cu_seqlens(value: Any, name: str, total: int, array: str, q: ArrayView) -> np.ndarray | ArrayView:
    """Cumulative sequence lengths (B + 1,)."""
    if not arrays.on_device(value):
        return checks.cu_seqlens(value, name, total, array)
    cu = view(value, name, q, None, "(batch + 1,)")
    found = to_check(cu)
    if found is not None:
        checks.cu_seqlens(found[0], name, total, array)
    return cu


def max_seqlen(value: Any, name: str, cu: np.ndarray | ArrayView, total: int) -> int:
    """The longest sequence. Of a device array it is not known: it is what the user says, else all rows that there are."""
    if not isinstance(cu, ArrayView):
        return checks.max_seqlen(value, name, cu)
    found = to_check(cu)
    if found is not None:
        checks.max_seqlen(value, name, found[0])  # type: ignore[arg-type]
    return total if value is None else checks.integer(value, name, low=0)


def capacity(problem: Problem) -> tuple[np.ndarray, str]:
    """As checks.capacity; where only the device knows the lengths of the sequences, a limit that is right for all of them."""
    if not isinstance(problem.cu_seqlens_k, ArrayView):
        return checks.capacity(problem)
    found = to_check(problem.cu_seqlens_k)
    if found is None:
        return np.full(problem.batch, problem.k.shape[-3]), "all keys that there are"
    return np.diff(found[0]), "the sequence's keys"  # type: ignore[arg-type]


def per_sequence(value: Any, name: str, problem: Problem, limit: np.ndarray, what: str) -> np.ndarray | ArrayView:
    """Lengths (B,), each between 0 and its limit."""
    if isinstance(value, ArrayView):  # checked before
        return value
    if not arrays.on_device(value):
        return checks.per_sequence(value, name, problem.batch, limit, what)
    if problem.paged:
        raise NotImplementedError(f"{name}: on the device beside page_table it is not supported yet; pass cupy.asnumpy(x)")
    lengths = view(value, name, problem.q, problem.batch, f"({problem.batch},), one entry a sequence")
    found = to_check(lengths)
    if found is not None:
        checks.per_sequence(found[0], name, problem.batch, limit, what)
    return lengths


def start(value: Any, problem: Problem, limit: np.ndarray, kv_lengths: np.ndarray | ArrayView | None) -> np.ndarray | ArrayView:
    """kv_start (B,), each at most the keys of its sequence."""
    keys = "the keys of the sequence"
    if not isinstance(kv_lengths, ArrayView):
        return per_sequence(value, "kv_start", problem, limit if kv_lengths is None else kv_lengths, keys)
    found = to_check(kv_lengths)
    return per_sequence(value, "kv_start", problem, limit if found is None else found[0], keys)  # type: ignore[arg-type]
