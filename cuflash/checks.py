"""Checks of single arguments. Each raises in the user's words (argument, what came, what is allowed) or returns the clean value."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import arrays
from .types import UNBOUNDED, ArrayView, Problem


def choice(value: Any, name: str, allowed: tuple[str, ...]) -> None:
    """``value`` must be one of a few words."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")


def flag(value: Any, name: str) -> None:
    """``value`` must be a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}; allowed are True and False")


def integer(value: Any, name: str, low: int) -> int:
    """``value`` must be an integer of at least ``low``; a bool is not one."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {value!r}; it must be an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}; it must be an integer") from None
    if number < low:
        raise ValueError(f"{name}: got {number}; it must be at least {low}")
    return number


def real(value: Any, name: str) -> float:
    """``value`` must be a finite real number (a 0-d array counts)."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, np.bool_)) or not (isinstance(value, numbers.Real) or isinstance(value, np.generic) and arrays.is_float(value.dtype)):
        raise TypeError(f"{name}: got {value!r}; it must be a real number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {number}; it must be finite")
    return number


def same_place_and_dtype(**named: Any) -> list[ArrayView]:
    """Arrays of one library, on one device, of one floating dtype; the first is the one the others are held against."""
    views = {name: arrays.view(array, name) for name, array in named.items()}
    (first, head), *rest = views.items()
    arrays.check_float_dtype(head.dtype, first)
    for name, a in rest:
        same_place(a, name, head, first)
        if a.dtype != head.dtype:
            raise TypeError(f"{name}: dtype {a.dtype} differs from {first}'s {head.dtype}; convert one of them, nothing is cast silently")
    return list(views.values())


def same_place(a: ArrayView, name: str, other: ArrayView, other_name: str) -> None:
    """Two arrays must be of one kind and on one device."""
    if a.kind != other.kind:
        raise TypeError(f"{name}: in {arrays.where(a)}, but {other_name} is in {arrays.where(other)}; all arrays must be of one kind")
    if a.device != other.device:
        raise ValueError(f"{name}: on {arrays.where(a)}, but {other_name} is on {arrays.where(other)}; all arrays must be on one device")


def array_like(array: Any, name: str, other: ArrayView) -> ArrayView:
    """An array that must be of the kind and on the device of q."""
    a = arrays.view(array, name)
    same_place(a, name, other, "q")
    return a


def same_rank(**named: ArrayView) -> None:
    """Dense arrays must have the same number of axes."""
    (first, head), *rest = named.items()
    for name, a in rest:
        if len(a.shape) != len(head.shape):
            raise ValueError(f"{name}: shape {a.shape} has {len(a.shape)} axes, but {first} has {len(head.shape)} ({head.shape})")


def heads_and_dims(q: ArrayView, k: ArrayView, v: ArrayView, layout: str) -> None:
    """Head counts, head sizes and key counts of canonical arrays must fit together."""
    order = f"shapes in axis order (..., seqlen, heads, head size): q {q.shape}, k {k.shape}, v {v.shape}; layout={layout!r}"
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v: {v.shape[:-1]} differs from k's {k.shape[:-1]}; all but the head size must be equal ({order})")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: head size {k.shape[-1]} differs from q's {q.shape[-1]} ({order})")
    for name, a in (("q", q), ("v", v)):
        if a.shape[-1] < 1:
            raise ValueError(f"{name}: head size {a.shape[-1]}; it must be at least 1 ({order})")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if heads_q and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"k: {heads_kv} heads under {heads_q} query heads; the query heads must be a whole multiple of them ({order})")


def cu_seqlens(value: Any, name: str, total: int, array: str) -> np.ndarray:
    """Cumulative sequence lengths: (B + 1,), from 0, never falling, ending within the packed array."""
    cu = arrays.host_index(value, name)
    if cu.ndim != 1 or cu.size < 1:
        raise ValueError(f"{name}: shape {cu.shape}; it must be (batch + 1,)")
    if cu[0] != 0:
        raise ValueError(f"{name}: starts at {cu[0]}; it must start at 0")
    falls = np.flatnonzero(np.diff(cu) < 0)
    if falls.size:
        at = falls[0]
        raise ValueError(f"{name}: falls from {cu[at]} to {cu[at + 1]} at index {at + 1}; it must never decrease")
    if cu[-1] > total:
        raise ValueError(f"{name}: ends at {cu[-1]}, but {array} has {total} rows")
    return cu


def max_seqlen(value: Any, name: str, cu: np.ndarray) -> int:
    """The longest sequence; a value that the user gives may be larger, never smaller."""
    longest = int(np.diff(cu).max(initial=0))
    if value is None:
        return longest
    value = integer(value, name, low=0)
    if value < longest:
        raise ValueError(f"{name}: got {value}, but the longest sequence has {longest} rows")
    return value


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


def used_pages(problem: Problem) -> None:
    """Page table entries below each sequence's length must name pages that exist; the others are never read."""
    table, pages = problem.page_table, problem.k.shape[0]
    assert table is not None and problem.kv_lengths is not None
    used = -(-problem.kv_lengths // problem.page_size)
    is_used = np.arange(table.shape[1])[None, :] < used[:, None]
    bad = np.argwhere(is_used & ((table < 0) | (table >= pages)))
    if bad.size:
        b, slot = bad[0]
        raise ValueError(
            f"page_table: entry [{b}, {slot}] is {table[b, slot]}, but there are {pages} pages (0 to {pages - 1}) "
            f"and kv_lengths {problem.kv_lengths[b]} uses {used[b]} entries"
        )


def pages_distinct(problem: Problem, lengths: np.ndarray) -> None:
    """Pages that an append writes to must belong to one sequence and one slot only."""
    assert problem.page_table is not None and problem.kv_lengths is not None
    written: dict[int, int] = {}
    for b in range(problem.batch):
        first, last = int(lengths[b]) // problem.page_size, -(-int(problem.kv_lengths[b]) // problem.page_size)
        for page in problem.page_table[b, first:last].tolist():
            if page in written:
                raise ValueError(f"page_table: page {page} would take new keys of sequence {written[page]} and of sequence {b}")
            written[page] = b


def new_keys(k_new: ArrayView, v_new: ArrayView, k_cache: ArrayView, v_cache: ArrayView, batch: int) -> None:
    """k_new and v_new must fit each other, the caches and the batch."""
    if k_new.shape[:-1] != v_new.shape[:-1]:
        raise ValueError(f"v_new: {v_new.shape[:-1]} differs from k_new's {k_new.shape[:-1]} in axis order (batch, seqlen, heads)")
    if k_new.shape[0] != batch:
        raise ValueError(f"k_new: batch {k_new.shape[0]} differs from q's {batch}")
    for name, new, cache in (("k_new", k_new, k_cache), ("v_new", v_new, v_cache)):
        if new.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name}: (heads, head size) {new.shape[-2:]} differs from the cache's {cache.shape[-2:]}")


def append_fits(lengths: np.ndarray, new: int, capacity: int) -> None:
    """Old length plus new keys must stay within the capacity of every sequence."""
    if lengths.size and (lengths + new).max() > capacity:
        b = int((lengths + new).argmax())
        raise ValueError(f"kv_lengths: {lengths.flat[b]} keys of sequence {b} plus {new} new ones exceed the cache's capacity of {capacity}")


def writeable(a: ArrayView, name: str) -> None:
    """An array that is written to must allow it and must not fold onto itself."""
    if a.kind == "numpy" and not a.array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only")
    if arrays.overlaps_itself(a):
        raise ValueError(f"{name}: several elements share one address (shape {a.shape}, strides {a.strides}); it cannot be written to")


def causal(value: Any) -> tuple[bool, str]:
    """causal=False, True, "bottom_right" or "upper_left"."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value), "bottom_right"
    choice(value, "causal", ("bottom_right", "upper_left"))
    return True, value


def window(value: Any, is_causal: bool) -> tuple[int, int]:
    """window=(left, right), inclusive, -1 unbounded; causal caps the right side at 0."""
    if value is None:
        sides = [UNBOUNDED, UNBOUNDED]
    else:
        try:
            sides = list(value)
        except TypeError:
            raise TypeError(f"window: got {value!r}; it must be (left, right) or None") from None
        if len(sides) != 2:
            raise ValueError(f"window: got {value!r}; it must have two entries, (left, right)")
        sides = [integer(s, "window", low=UNBOUNDED) for s in sides]
    if is_causal:
        sides[1] = 0
    return sides[0], sides[1]


def scale(value: Any, score: str, head_dim: int) -> float | np.ndarray:
    """The softmax scale: 1/sqrt(D) for dot products (Vaswani et al. 2017, eq. 1), 1 for squared distances, by default."""
    if value is None:
        return 1.0 if score == "sqdist" else 1.0 / math.sqrt(head_dim)
    if np.ndim(value) == 0:
        return real(value, "scale")
    vector = arrays.host_floats(value, "scale")
    if score != "sqdist":
        raise ValueError(f"scale: shape {vector.shape}; an array (D,) is allowed only with score='sqdist'")
    if vector.shape != (head_dim,):
        raise ValueError(f"scale: shape {vector.shape}; it must be a number or ({head_dim},), one factor an element of the head")
    if not np.isfinite(vector).all():
        raise ValueError("scale: every factor must be finite")
    return vector


def softcap(value: Any) -> float:
    """softcap > 0, or None for no cap."""
    if value is None:
        return 0.0
    cap = real(value, "softcap")
    if cap <= 0:
        raise ValueError(f"softcap: got {cap}; it must be above 0, or None for no cap")
    return cap


def modifier(value: Any, name: str) -> str | Callable | None:
    """score_mod or mask_mod: a Python callable (host backends) or a CUDA expression (CUDA backends)."""
    if value is None or isinstance(value, str) or callable(value):
        return value
    raise TypeError(f"{name}: got {value!r}; it must be a callable on NumPy arrays, a CUDA expression as str, or None")


def mod_args(value: Any, score_mod: Any, mask_mod: Any) -> Mapping[str, Any]:
    """mod_args: names that score_mod and mask_mod may use."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"mod_args: got {type(value).__qualname__}; it must be a dict from name to number or array")
    if score_mod is None and mask_mod is None:
        raise ValueError("mod_args: given without score_mod or mask_mod")
    for key in value:
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"mod_args: {key!r} is not a name")
        if key in ("s", "b", "h", "i", "j"):
            raise ValueError(f"mod_args: {key!r} is taken by the arguments of score_mod and mask_mod (s, b, h, i, j)")
    return dict(value)


def alibi(value: Any, problem: Problem) -> np.ndarray | None:
    """ALiBi slopes (Hq,) or (B, Hq), as (B, Hq) float64."""
    if value is None:
        return None
    slopes = arrays.host_floats(value, "alibi_slopes")
    if slopes.shape not in ((problem.heads_q,), (problem.batch, problem.heads_q)):
        raise ValueError(f"alibi_slopes: shape {slopes.shape}; it must be ({problem.heads_q},) or ({problem.batch}, {problem.heads_q})")
    if not np.isfinite(slopes).all():
        raise ValueError("alibi_slopes: every slope must be finite")
    return np.ascontiguousarray(np.broadcast_to(slopes, (problem.batch, problem.heads_q)))


def sinks(value: Any, heads_q: int) -> np.ndarray | None:
    """Attention sinks (Hq,): one extra logit a head that has no value. -inf means none."""
    if value is None:
        return None
    logits = arrays.host_floats(value, "sinks")
    if logits.shape != (heads_q,):
        raise ValueError(f"sinks: shape {logits.shape}; it must be ({heads_q},), one logit a query head")
    if np.isnan(logits).any() or (logits == np.inf).any():
        raise ValueError("sinks: every logit must be finite or -inf")
    return logits


def out_dtype(value: Any, q_dtype: np.dtype) -> np.dtype:
    """The dtype of out: q's, or another floating dtype on request."""
    if value is None:
        return q_dtype
    try:
        dtype = np.dtype(value)
    except TypeError:
        raise TypeError(f"out_dtype: {value!r} is no dtype") from None
    arrays.check_float_dtype(dtype, "out_dtype")
    return dtype


def backend_takes(backend: str | None, q: ArrayView) -> None:
    """A backend must be able to reach the memory that the arrays are in; nothing is moved silently."""
    if backend is None:
        return
    on_gpu = q.device != arrays.HOST
    if on_gpu and backend in ("cpu", "reference"):
        raise TypeError(f"backend: {backend!r} takes NumPy arrays, but q is in {arrays.where(q)}; convert by cupy.asnumpy(x)")
    if not on_gpu and backend in ("cuda", "numba-cuda"):
        raise TypeError(f"backend: {backend!r} takes GPU arrays, but q is in {arrays.where(q)}; convert by cupy.asarray(x)")


def bias(value: Any, problem: Problem) -> tuple[ArrayView, tuple[int, ...]]:
    """Additive bias, float32 or q's dtype, broadcast to (B, Hq, Sq, Sk)."""
    a = array_like(value, "bias", problem.q)
    if a.dtype not in (np.dtype(np.float32), problem.q.dtype):
        allowed = "float32" if problem.q.dtype == np.float32 else f"float32 and {problem.q.dtype} (q's)"
        hint = "; a boolean array is a mask: pass mask=" if a.dtype == np.bool_ else ""
        raise TypeError(f"bias: dtype {a.dtype}; allowed are {allowed}{hint}")
    return broadcast_rows(a, "bias", problem, columns=problem.seqlen_k), a.shape


def mask(value: Any, problem: Problem) -> tuple[ArrayView, bool]:
    """Boolean mask, True = visible, broadcast to (B, Hq, Sq, Sk), or with Sq columns for the last Sq keys.

    Returns the view and whether it covers the last Sq keys only.
    """
    a = array_like(value, "mask", problem.q)
    if a.dtype != np.bool_:
        hint = "; an additive mask is a bias: pass bias=" if a.dtype.kind == "f" else ""
        raise TypeError(f"mask: dtype {a.dtype}; it must be bool, True = visible{hint}")
    columns = a.shape[-1] if a.shape else 1
    is_tail = columns == problem.seqlen_q and columns not in (1, problem.seqlen_k)
    if is_tail:
        if problem.varlen:
            raise ValueError(f"mask: {columns} columns; with cu_seqlens it must have 1 or {problem.seqlen_k} (the longest key sequence)")
        lengths = problem.kv_lengths
        shortest = problem.seqlen_k if lengths is None else int(lengths.min(initial=problem.seqlen_k))
        if columns > shortest:
            raise ValueError(f"mask: {columns} columns cover the last {columns} keys, but a sequence has only {shortest}")
    return broadcast_rows(a, "mask", problem, columns=columns if is_tail else problem.seqlen_k), is_tail


def broadcast_rows(a: ArrayView, name: str, problem: Problem, columns: int) -> ArrayView:
    """Broadcast a bias or mask to (B, Hq, Sq, columns)."""
    target = (problem.batch, problem.heads_q, problem.seqlen_q, columns)
    shape = (1,) * (4 - len(a.shape)) + a.shape
    if len(a.shape) > 4 or any(n not in (1, t) for n, t in zip(shape, target, strict=True)):
        what = "(B, Hq, max_seqlen_q, max_seqlen_k)" if problem.varlen else "(B, Hq, Sq, Sk)"
        raise ValueError(f"{name}: shape {a.shape} does not broadcast to {target}, {what}")
    return arrays.broadcast(a, target)


def output(value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype, problem: Problem) -> ArrayView:
    """A buffer for a result: exact shape and dtype, any strides, no element shared with an input or with itself."""
    a = array_like(value, name, problem.q)
    if a.shape != shape:
        raise ValueError(f"{name}: shape {a.shape}; it must be {shape}")
    if a.dtype != dtype:
        raise TypeError(f"{name}: dtype {a.dtype}; it must be {dtype}")
    writeable(a, name)
    for other_name in ("q", "k", "v", "bias", "mask"):
        other = getattr(problem, other_name)
        if other is not None and arrays.overlap(a, other):
            raise ValueError(f"{name}: overlaps {other_name} in memory; results need a buffer of their own")
    return a
