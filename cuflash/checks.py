"""Checks of numbers, arrays, lengths, caches and results.

Each raises in the user's words (which argument, what came, what is allowed) or returns the clean value.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from . import arrays
from .types import ArrayView, Problem, Rope


def choice(value: Any, name: str, allowed: tuple[str, ...]) -> None:
    """``value`` must be one of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")


def flag(value: Any, name: str) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {value!r}; allowed are True and False")


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """``value`` must be an integer of at least ``low`` and at most ``high``; a bool is not one."""
    if isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}: got {value!r}; it must be an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}; it must be an integer") from None
    if number < low:
        raise ValueError(f"{name}: got {number}; it must be at least {low}")
    if high is not None and number > high:
        raise ValueError(f"{name}: got {number}; it must be at most {high}")
    return number


def real(value: Any, name: str) -> float:
    """``value`` must be a finite real number (a 0-d array counts)."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, numbers.Real) or (isinstance(value, np.generic) and arrays.is_float(value.dtype))
    if isinstance(value, bool | np.bool_) or not is_number:
        raise TypeError(f"{name}: got {value!r}; it must be a real number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {number}; it must be finite")
    return number


def same_place_and_dtype(**named: Any) -> dict[str, ArrayView]:
    """Arrays of one library, on one device, of one floating dtype or all float8_e4m3fn; the others are held against the first."""
    return _of_one_place(named, first_e4m3=True)


def queries_keys_values(**named: Any) -> dict[str, ArrayView]:
    """The same for q, keys, values and perhaps new keys and values: those may both be float8_e4m3fn, new ones only beside such."""
    views = _of_one_place(named, others_e4m3=True)
    (first, head), *rest = views.items()
    for (k_name, k), (v_name, v) in zip(rest[::2], rest[1::2], strict=True):
        if k.dtype != v.dtype:
            raise TypeError(f"{v_name}: dtype {v.dtype} differs from {k_name}'s {k.dtype}; keys and values must be of one dtype")
        if arrays.is_e4m3(k.dtype) and k.dtype != rest[0][1].dtype:
            raise TypeError(f"{k_name}: dtype {k.dtype}, but {rest[0][0]} is {rest[0][1].dtype}; it must be {first}'s {head.dtype}")
    return views


def _of_one_place(named: dict[str, Any], first_e4m3: bool = False, others_e4m3: bool = False) -> dict[str, ArrayView]:
    views = {name: arrays.view(array, name) for name, array in named.items()}
    (first, head), *rest = views.items()
    if not (first_e4m3 and arrays.is_e4m3(head.dtype)):
        arrays.check_float_dtype(head.dtype, first)
    for name, a in rest:
        same_place(a, name, head, first)
        if a.dtype != head.dtype and not (others_e4m3 and arrays.is_e4m3(a.dtype)):
            came = f"dtype {a.dtype} differs from {first}'s {head.dtype}"
            raise TypeError(f"{name}: {came}; they must be equal, convert one of them (nothing is cast silently)")
    return views


def same_place(a: ArrayView, name: str, other: ArrayView, other_name: str) -> None:
    """Two arrays must be of one kind and on one device."""
    if a.device == other.device and a.kind == other.kind:
        return
    error, same = (TypeError, "of one kind") if a.kind != other.kind else (ValueError, "on one device")
    raise error(f"{name}: in {arrays.where(a)}, but {other_name} is in {arrays.where(other)}; all arrays must be {same}")


def array_like(array: Any, name: str, q: ArrayView) -> ArrayView:
    """An array that must be of the kind and on the device of q."""
    a = arrays.view(array, name)
    same_place(a, name, q, "q")
    return a


def shape(a: ArrayView, name: str, expected: tuple[int, ...]) -> None:
    """``a`` must have exactly this shape."""
    if a.shape != expected:
        raise ValueError(f"{name}: shape {a.shape}; it must be {expected}")


def dtype(a: ArrayView, name: str, expected: np.dtype) -> None:
    """``a`` must have exactly this dtype."""
    if a.dtype != expected:
        raise TypeError(f"{name}: dtype {a.dtype}; it must be {expected}")


def same_rank(**named: ArrayView) -> None:
    """Dense arrays must have the same number of axes."""
    (first, head), *rest = named.items()
    for name, a in rest:
        if len(a.shape) != len(head.shape):
            axes = f"{len(a.shape)} axes, but {first} {head.shape} has {len(head.shape)}"
            raise ValueError(f"{name}: shape {a.shape} has {axes}; the numbers must be equal")


def heads_and_dims(named: dict[str, ArrayView], layout: str) -> None:
    """Head counts, head sizes and key counts of canonical q, k and v must fit together."""
    (q_name, q), (k_name, k), (v_name, v) = ((name, a.shape) for name, a in named.items())
    heads_q, heads_kv = q[-2], k[-2]
    if k[:-1] != v[:-1]:
        problem = f"{v_name}: {v[:-1]} differs from {k_name}'s {k[:-1]}; all but the head size must be equal"
    elif q[-1] != k[-1]:
        problem = f"{k_name}: head size {k[-1]} differs from {q_name}'s {q[-1]}; they must be equal"
    elif q[-1] < 1 or v[-1] < 1:
        problem = f"{q_name if q[-1] < 1 else v_name}: head size 0; it must be at least 1"
    elif heads_q and (heads_kv == 0 or heads_q % heads_kv):
        problem = f"{k_name}: {heads_kv} heads under {heads_q} query heads; the query heads must be a whole multiple of them"
    else:
        return
    order = f"shapes in axis order (..., seqlen, heads, head size): {q_name} {q}, {k_name} {k}, {v_name} {v}; layout={layout!r}"
    raise ValueError(f"{problem} ({order})")


def cu_seqlens(value: Any, name: str, total: int, array: str) -> np.ndarray:
    """Cumulative sequence lengths: (B + 1,), from 0, never falling, ending within the packed array."""
    cu = arrays.host_index(value, name)
    if cu.ndim != 1 or cu.size < 1:
        raise ValueError(f"{name}: shape {cu.shape}; it must be (batch + 1,)")
    if cu[0] != 0:
        raise ValueError(f"{name}: starts at {cu[0]}; it must start at 0")
    falls = np.flatnonzero(cu[1:] < cu[:-1])  # not by np.diff, which wraps around
    if falls.size:
        at = falls[0]
        raise ValueError(f"{name}: falls from {cu[at]} to {cu[at + 1]} at index {at + 1}; it must never decrease")
    if cu[-1] > total:
        raise ValueError(f"{name}: ends at {cu[-1]}, but {array} has {total} rows; it must end within them")
    return cu


def max_seqlen(value: Any, name: str, cu: np.ndarray) -> int:
    """The longest sequence; a value that the user gives may be larger, never smaller."""
    longest = int(np.diff(cu).max(initial=0))
    if value is None:
        return longest
    value = integer(value, name, low=0)
    if value < longest:
        raise ValueError(f"{name}: got {value}, but the longest sequence has {longest} rows; it must be at least that")
    return value


def capacity(problem: Problem) -> tuple[np.ndarray, str]:
    """How many keys each sequence has room for, (B,), and in words what that is."""
    if problem.cu_seqlens_k is not None:
        return np.diff(problem.cu_seqlens_k), "the sequence's keys"
    name = "the capacity of its page table row" if problem.paged else f"the keys of {user_name(problem, 'k')}"
    return np.full(problem.batch, problem.seqlen_k), name


def per_sequence(value: Any, name: str, batch: int, limit: np.ndarray, what: str) -> np.ndarray:
    """Lengths (B,) or one length for all, each between 0 and its limit."""
    lengths = arrays.host_index(value, name)
    if lengths.ndim == 0:
        lengths = np.full(batch, lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"{name}: shape {lengths.shape}; it must be ({batch},), one entry a sequence")
    bad = np.flatnonzero((lengths < 0) | (lengths > limit))
    if bad.size:
        b = bad[0]
        raise ValueError(f"{name}: {lengths[b]} at index {b}; it must be from 0 to {limit[b]} ({what})")
    return lengths


def used_entries(problem: Problem, lengths: np.ndarray) -> np.ndarray:
    """Which page table entries (B, max_pages) hold keys of sequences of these lengths."""
    assert problem.page_table is not None
    return np.arange(problem.page_table.shape[1]) < -(-lengths // problem.page_size)[:, None]


def used_pages(problem: Problem, lengths: np.ndarray) -> None:
    """Page table entries below each sequence's length must name pages that exist; the others are never read."""
    table, pages = problem.page_table, problem.k.shape[0]
    assert table is not None
    bad = np.argwhere(used_entries(problem, lengths) & ((table < 0) | (table >= pages)))
    if bad.size:
        b, slot = bad[0]
        raise ValueError(
            f"page_table: entry [{b}, {slot}] is {table[b, slot]}, but there are {pages} pages (0 to {pages - 1}) "
            f"and kv_lengths {lengths[b]} makes use of that entry"
        )


def written_pages(problem: Problem, before: np.ndarray) -> None:
    """A page that new keys go to must be used by one table entry alone, or the keys of another sequence would change."""
    table, after = problem.page_table, problem.kv_lengths
    assert table is not None and after is not None
    used = used_entries(problem, after)
    written = used & (np.arange(table.shape[1]) >= (before // problem.page_size)[:, None])
    uses = np.bincount(table[used], minlength=1)  # of each page; used entries are pages that exist
    shared = np.argwhere(written & (uses[np.where(used, table, 0)] > 1))
    if shared.size:
        b, slot = shared[0]
        page = table[b, slot]
        others = [(int(x), int(y)) for x, y in np.argwhere(used & (table == page)) if (x, y) != (b, slot)]
        raise ValueError(
            f"page_table: entry [{b}, {slot}] is page {page}, which would take new keys, but entry {list(others[0])} uses it "
            "too; a page that is written to must belong to one entry"
        )


def new_keys(k_new: ArrayView, v_new: ArrayView, problem: Problem) -> int:
    """k_new and v_new must fit each other, the caches and the batch; returns how many keys they add to each sequence."""
    if k_new.shape[:-1] != v_new.shape[:-1]:
        order = "in axis order (batch, seqlen, heads)"
        raise ValueError(f"v_new: {v_new.shape[:-1]} differs from k_new's {k_new.shape[:-1]} {order}; they must be equal")
    if k_new.shape[0] != problem.batch:
        raise ValueError(f"k_new: batch {k_new.shape[0]} differs from q's {problem.batch}; they must be equal")
    for name, new, cache in (("k_new", k_new, problem.k), ("v_new", v_new, problem.v)):
        if new.shape[-2:] != cache.shape[-2:]:
            came = f"(heads, head size) {new.shape[-2:]} differs from the cache's {cache.shape[-2:]}"
            raise ValueError(f"{name}: {came}; they must be equal")
    return k_new.shape[1]


def append_fits(lengths: np.ndarray, new: int, room: int) -> None:
    """Old length plus new keys must stay within the capacity of every sequence."""
    full = np.flatnonzero(lengths > room - new)
    if full.size:
        b = full[0]
        came = f"{lengths[b]} keys at index {b} plus {new} of k_new"
        raise ValueError(f"kv_lengths: {came} exceed the cache's capacity of {room}; nothing was written")


def positions_exist(problem: Problem, rope: Rope, before: np.ndarray) -> None:
    """A rotary embedding must know all positions of sequences that have keys; -n as well as n."""
    after, rows, known = problem.kv_lengths, problem.seqlen_q, rope.cos.shape[0]
    assert after is not None
    first = np.minimum(before, after - rows) if problem.align == "bottom_right" else np.minimum(before, 0)
    last = np.maximum(after, rows) - 1 if problem.align == "upper_left" else after - 1
    reached = np.where(after > 0, np.maximum(-first, last), -1)
    if reached.max(initial=-1) >= known:
        b = int(reached.argmax())
        raise ValueError(
            f"rope: cos and sin have {known} positions (0 to {known - 1}), but sequence {b} reaches {reached[b]} "
            f"({before[b]} keys before, {after[b]} with the new ones, {rows} query rows)"
        )


def distinct_entries(entries: np.ndarray, count: int, writes: bool) -> None:
    """cache_batch_index must name entries that the caches have, each once if they are written to."""
    bad = np.flatnonzero((entries < 0) | (entries >= count))
    if bad.size:
        raise ValueError(f"cache_batch_index: {entries[bad[0]]} at index {bad[0]}; it must be from 0 to {count - 1} (the batch of k_cache)")
    values, uses = np.unique(entries, return_counts=True)
    if writes and (uses > 1).any():
        twice = values[uses > 1][0]
        at = np.flatnonzero(entries == twice)
        raise ValueError(f"cache_batch_index: {twice} at index {at[0]} and again at {at[1]}; entries that take new keys must be distinct")


def caches_can_be_written(problem: Problem, new: dict[str, ArrayView], quantizes: bool) -> None:
    """Caches that take new keys must be writeable and must share no element with each other or with another input.

    So must scales of tokens, where the new keys and values get theirs as they are written (``quantizes``).
    """
    on_device = {name: getattr(problem, name) for name in problem.indices_on_device}
    others = {"q": problem.q, **new, "bias": problem.bias, "mask": problem.mask, **on_device, "v_cache": problem.v}
    reaches = {name: (a, arrays.byte_range(a)) for name, a in others.items() if a is not None}
    written = {"k_cache": problem.k, "v_cache": problem.v}
    if quantizes:
        scales = {"k_scale": problem.k_scale, "v_scale": problem.v_scale}
        written |= {name: a for name, a in scales.items() if a is not None and a.by_token}
        reaches |= {name: (a, arrays.byte_range(a)) for name, a in scales.items() if a is not None}
    for name, cache in written.items():
        writeable(cache, name)
        first, last = arrays.byte_range(cache)
        for other_name, (other, (begin, end)) in reaches.items():
            if other is not cache and first < end and begin < last and arrays.overlap(cache, other):
                raise ValueError(f"{name}: overlaps {other_name} in memory; new keys and values are written to {name}")


def writeable(a: ArrayView, name: str) -> None:
    """An array that is written to must allow it and must not fold onto itself."""
    if a.kind == "numpy" and not a.array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only; it must be writeable")
    if arrays.overlaps_itself(a):
        came = f"several elements share one address (shape {a.shape}, strides {a.strides})"
        raise ValueError(f"{name}: {came}; each must have its own, since they are written to")


_READ = ("q", "k", "v", "k_scale", "v_scale", "bias", "mask")


def user_name(problem: Problem, field: str) -> str:
    """What the user calls the array in a field of the problem."""
    return f"{field}_cache" if problem.op == "decode" and field in ("k", "v") else field


def output(
    value: Any, name: str, expected_shape: tuple[int, ...], expected_dtype: np.dtype, problem: Problem,
    inputs: dict[str, ArrayView],
) -> ArrayView:
    """A buffer for a result: exact shape and dtype, any strides, no element shared with an input or with itself."""
    a = array_like(value, name, problem.q)
    shape(a, name, expected_shape)
    dtype(a, name, expected_dtype)
    writeable(a, name)
    fields = {user_name(problem, field): getattr(problem, field) for field in _READ + problem.indices_on_device}
    for other_name, other in {**fields, **inputs}.items():
        if other is not None and arrays.overlap(a, other):
            raise ValueError(f"{name}: overlaps {other_name} in memory; results need a buffer of their own")
    return a
