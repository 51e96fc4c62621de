"""Lengths and cu_seqlens on the host or on a device. What lies on a device is not read: the kernels clamp it.

Host arrays are checked, always, by checks.py. With ``CUFLASH_CHECK=1`` so are device arrays: they are then read back, which waits
for the device; a stream capture cannot wait, and is left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, checks, host
from .types import Append, ArrayView, Problem

TYPES = (np.dtype(np.int32), np.dtype(np.int64))


def view(value: Any, name: str, q: ArrayView, length: int | None, what: str) -> ArrayView:
    """A device array of integers, one axis without gaps, where q is; of this length, ``what`` in words, unless that is None."""
    a = checks.array_like(value, name, q)
    if a.dtype not in TYPES:
        raise TypeError(f"{name}: dtype {a.dtype}; an index array on a device must be int32 or int64")
    if len(a.shape) != 1 or (length is not None and a.shape[0] != length) or a.shape[0] < (length is None):
        raise ValueError(f"{name}: shape {a.shape}; it must be {what}")
    return contiguous(a, name)


def contiguous(a: ArrayView, name: str) -> ArrayView:
    """An index array on a device must have no gaps."""
    expected = a.dtype.itemsize
    for n, stride in zip(reversed(a.shape), reversed(a.strides), strict=True):
        if n > 1 and stride != expected:
            raise ValueError(f"{name}: strides {a.strides}; an index array on a device must be contiguous: pass cupy.ascontiguousarray(x)")
        expected *= n
    return a


def page_table(value: Any, name: str, batch: int, q: ArrayView, axes: int = 2) -> np.ndarray | ArrayView:
    """A page table (batch, max_pages), or with one axis (batch,), on the host or on a device; its entries are not looked at."""
    what = "(batch, max_pages)" if axes == 2 else "(batch,)"
    on_device = arrays.on_device(value)
    table = checks.array_like(value, name, q) if on_device else arrays.host_index(value, name)
    if on_device and table.dtype != np.int32:
        raise TypeError(f"{name}: dtype {table.dtype}; on a device it must be int32")
    if len(table.shape) != axes or table.shape[0] != batch:
        raise ValueError(f"{name}: shape {table.shape}; it must be {what} with batch {batch}")
    return contiguous(table, name) if on_device else table


def numbers(*index_arrays: Any) -> list[Any] | None:
    """The numbers of index arrays (or None) that are on the host, or that CUFLASH_CHECK asks for; None if not all are to be had."""
    return to_check(*index_arrays) if any(isinstance(a, ArrayView) for a in index_arrays) else list(index_arrays)


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


def used_pages(problem: Problem, lengths: np.ndarray | ArrayView) -> None:
    """As checks.used_pages, where the numbers are known."""
    found = numbers(problem.page_table, lengths)
    if found is not None:
        checks.used_pages(problem.replace(page_table=found[0]), found[1])


def lengths_after(lengths: np.ndarray | ArrayView, count: int, problem: Problem) -> np.ndarray | ArrayView:
    """Lengths once ``count`` new keys are in the cache. Those on a device stay what they were: the device adds them up."""
    found = numbers(lengths)
    if found is not None:
        checks.append_fits(found[0], count, problem.seqlen_k)
    return lengths if isinstance(lengths, ArrayView) else lengths + count


def append(problem: Problem, new: Append) -> None:
    """What is left to check of an append: pages that are written, and positions that a rotary embedding must have."""
    found = numbers(new.lengths)
    if found is None:
        return
    before = found[0]
    known = problem.replace(kv_lengths=before + new.count)
    if new.rope is not None:
        checks.positions_exist(known, new.rope, before)
    table = numbers(problem.page_table)
    if problem.paged and new.count and table is not None:
        checks.written_pages(known.replace(page_table=table[0]), before)
