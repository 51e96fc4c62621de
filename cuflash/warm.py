"""Warm calls: what a call was found to be is kept under everything that the finding depends on, so that it is found once.

Two things are kept. The checked problem, without its arrays: a call of the same signature takes it with its own arrays in it.
And the launch, where a backend can prepare one (``prepare``): a call of the same signature then only looks at what may differ
from call to call, the addresses, and launches.

A signature holds types, shapes, strides, dtypes, device and alignment of the arrays and the options that are plain values. Calls
with options that are arrays or callables have none and go the ordinary way; no launch is kept or used under ``device.pretend``.
No kept thing refers to an array of a user.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arrays, backends, device, host, launch, structs
from .problem import canonical
from .types import HOST, ArrayView, Plan, Problem

MOST = 1024  # signatures; a loop over growing slices makes a new one every time

# Options whose type is one of these, exactly: equal numbers mean the same whatever their type, but True is no number.
_NUMBERS = {type(None), float, int, np.float64, np.float32}
_INTEGERS = {type(None), int, np.int64, np.int32}
_WORDS = {type(None), str}
ON_HOST = ("cpu", "reference")  # whether another backend takes host arrays depends on the environment


class Kept(dict):
    """A dict that forgets everything rather than grow beyond ``most`` entries."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def keep(self, key: Any, value: Any) -> None:
        if len(self) >= self.most:
            self.clear()
        self[key] = value


problems: Kept = Kept(MOST)  # signature -> problem without arrays
launches: Kept = Kept(MOST)  # (signature, signature of the results) -> Launch


def key(
    q: Any, k: Any, v: Any, causal: Any, window: Any, scale: Any, softcap: Any, score: Any, precision: Any, num_splits: Any,
    batch_invariant: Any, out_dtype: Any, layout: Any, kernel: Any, backend: Any,
) -> tuple | None:
    """Signature of an attention call; None if something about it cannot be told by equality of plain values.

    What the checks tell apart, such as True and 1, has different signatures or none.
    """
    if not (
        (causal is False or causal is True or type(causal) is str)
        and type(scale) in _NUMBERS
        and (scale is None or scale)  # 0.0 and -0.0 are equal
        and type(softcap) in _NUMBERS
        and type(num_splits) in _INTEGERS
        and (batch_invariant is False or batch_invariant is True)
        and (out_dtype is None or isinstance(out_dtype, np.dtype) or (isinstance(out_dtype, type) and issubclass(out_dtype, np.generic)))
        and type(score) is type(layout) is type(kernel) is str
        and type(precision) in _WORDS
        and type(backend) in _WORDS
    ):
        return None
    if window is not None:
        if type(window) not in (tuple, list) or not all(type(side) in _INTEGERS for side in window):
            return None
        window = tuple(window)
    lie = arrays.keys(q, k, v)
    if lie is None or (lie[0] == HOST and backend is not None and backend not in ON_HOST):
        return None
    return (lie, causal, window, scale, softcap, score, precision, num_splits, batch_invariant, out_dtype, layout, kernel, backend)


def with_lengths(key: tuple | None, *indices: Any) -> tuple[tuple | None, tuple[int, ...]]:
    """The signature of a call with these index arrays (None: not given), and their addresses; (None, ()) unless all are on a device.

    They are cu_seqlens_q, cu_seqlens_k, kv_lengths and kv_start.
    """
    if key is None or host.checks():
        return None, ()
    lie = [None if a is None else (arrays.key(a) if arrays.on_device(a) else None) or () for a in indices]
    if () in lie:
        return None, ()
    return (*key, *lie), tuple(0 if a is None else a.data.ptr for a in indices)


def varlen_key(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, layout: Any,
    options: dict[str, Any],
) -> tuple[tuple | None, tuple[int, ...]]:
    """As `key` and `with_lengths`, for a call on packed sequences."""
    if not arrays.on_device(cu_seqlens_q) or cu_seqlens_k is None:
        return None, ()
    own = key_of(q, k, v, layout, options, ("kv_lengths", "kv_start", "stream"))
    if own is None or type(max_seqlen_q) not in _INTEGERS or type(max_seqlen_k) not in _INTEGERS:
        return None, ()
    own = (*own, "varlen", max_seqlen_q, max_seqlen_k)
    return with_lengths(own, cu_seqlens_q, cu_seqlens_k, options.get("kv_lengths"), options.get("kv_start"))


def decode_key(q: Any, k: Any, v: Any, k_new: Any, v_new: Any, layout: Any, options: dict[str, Any]) -> tuple | None:
    """As `key`, for a call of decode() on dense caches; kv_lengths are no part of it."""
    own = key_of(q, k, v, layout, options, ("stream",))
    if own is None or (k_new is None) != (v_new is None):
        return None
    if k_new is None:
        return (*own, "decode")
    new = arrays.key(k_new), arrays.key(v_new)
    return None if None in new else (*own, "decode", *new)


def key_of(q: Any, k: Any, v: Any, layout: Any, options: dict[str, Any], apart: tuple[str, ...]) -> tuple | None:
    """`key` with its options by name; None if there are others than those looked at ``apart``."""
    plain = dict(_DEFAULTS)
    for name, value in options.items():
        if name in plain:
            plain[name] = value
        elif value is not None and name not in apart:
            return None
    return key(q, k, v, layout=layout, **plain)


# Options of `key` that other functions than attention() have by name, with their defaults.
_DEFAULTS: dict[str, Any] = {
    "causal": False, "window": None, "scale": None, "softcap": None, "score": "dot", "precision": None, "num_splits": None,
    "batch_invariant": False, "out_dtype": None, "kernel": "auto", "backend": None,
}


def results_key(out: Any, lse: Any, return_lse: Any) -> Any:
    """Signature of the buffers for results, of which None are cuflash's to allocate."""
    if return_lse is not True and return_lse is not False:
        return None
    if out is None and lse is None:
        return return_lse
    out_key = None if out is None else arrays.key(out)
    lse_key = None if lse is None else arrays.key(lse)
    if (out_key is None) is not (out is None) or (lse_key is None) is not (lse is None):
        return None  # what was given is no array; the checks say so
    return (return_lse, out_key, lse_key)


def keep_problem(key: tuple | None, problem: Problem) -> None:
    """Keep a checked problem, without its arrays."""
    if key is not None and device.pretended() is None:
        q, k, v = (arrays.signature(a) for a in (problem.q, problem.k, problem.v))
        problems.keep(key, problem.replace(q=q, k=k, v=v, kv_lengths=None, stream=None))


def problem(key: tuple, q: Any, k: Any, v: Any, layout: str, stream: Any) -> Problem | None:
    """The checked problem of this signature on these arrays, or None if there is none."""
    known = problems.get(key)
    if known is None or (stream is not None and known.q.device == HOST):
        return None
    fresh = {name: canonical(arrays.view(a, name), layout, name) for name, a in (("q", q), ("k", k), ("v", v))}
    return known.replace(stream=stream, **fresh)


def attention(
    key: tuple, q: Any, k: Any, v: Any, out: Any, lse: Any, return_lse: Any, stream: Any, indices: tuple[int, ...],
) -> Any:
    """The results of a call whose launch is kept; None if it is not, or if something asks for the ordinary way."""
    if key[0][0] == HOST or os.environ.get("CUFLASH_LOG"):
        return None
    found = launches.get((key, results_key(out, lse, return_lse)))
    if found is None or device.pretended() is not None:
        return None
    return found.run(q, k, v, out, lse, stream, indices)


class Launch:
    """One prepared launch with what is left to do for every call. Immutable but for the launch's own memory; thread-safe.

    Parameters
    ----------
    prepared : callable
        Takes the addresses of q, k, v, out and lse, and of the index arrays if they are on the device (0: none), and launches on
        CuPy's current device and stream.
    problem : Problem
        With the arrays of the call that it was prepared for.
    out_shape, lse_shape : tuple[int, ...]
        As the user sees the results.
    return_lse : bool
    """

    __slots__ = ("current_device", "device", "index_bytes", "lse", "out", "prepared", "return_lse", "spans")

    def __init__(
        self, prepared: Callable, problem: Problem, out_shape: tuple[int, ...], lse_shape: tuple[int, ...], return_lse: bool,
    ):
        self.prepared, self.device, self.return_lse = prepared, problem.q.device, return_lse
        self.current_device = launch.device_getter()
        self.out = (out_shape, problem.out_dtype)
        self.lse = (lse_shape, problem.compute_dtype)
        views = (problem.q, problem.k, problem.v, problem.out, problem.lse)
        indices = structs.index_views(problem)
        self.index_bytes = tuple(0 if a is None else math.prod(a.shape) * a.dtype.itemsize for a in indices)
        self.spans = tuple(edge for a in views for edge in ((0, 0) if a is None else span(a)))

    def run(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, stream: Any, indices: tuple[int, ...] = (), placed: bool = False,
    ) -> Any:
        """Launch on these arrays, whose signatures are those it was prepared for; None if the ordinary way has to decide."""
        if not placed and (stream is not None or self.current_device() != self.device):
            with launch.place(self.device, stream):
                return self.run(q, k, v, out, lse, None, indices, True)
        at_q, at_k, at_v, at_lse = q.data.ptr, k.data.ptr, v.data.ptr, 0
        kind = type(q)
        if out is None:
            out = kind(*self.out)
            at_out = out.data.ptr
            if at_out % arrays.ALIGNMENT:  # an allocator of the user's
                return None
        else:
            # Where the bytes from a result's first to its last meet those of another array, the two may overlap.
            at_out = out.data.ptr
            q0, q1, k0, k1, v0, v1, first, last, _, _ = self.spans
            first += at_out
            last += at_out
            if (
                (first < q1 + at_q and q0 + at_q < last) or (first < k1 + at_k and k0 + at_k < last)
                or (first < v1 + at_v and v0 + at_v < last) or (indices and self._meets_an_index(first, last, indices))
            ):
                return None
        if lse is not None:
            at_lse = lse.data.ptr
            q0, q1, k0, k1, v0, v1, out0, out1, first, last = self.spans
            first += at_lse
            last += at_lse
            if (
                (first < q1 + at_q and q0 + at_q < last) or (first < k1 + at_k and k0 + at_k < last)
                or (first < v1 + at_v and v0 + at_v < last) or (first < out1 + at_out and out0 + at_out < last)
                or (indices and self._meets_an_index(first, last, indices))
            ):
                return None
        elif self.return_lse:
            lse = kind(*self.lse)
            at_lse = lse.data.ptr
        self.prepared(at_q, at_k, at_v, at_out, at_lse, *indices)
        return (out, lse) if self.return_lse else out

    def _meets_an_index(self, first: int, last: int, indices: tuple[int, ...]) -> bool:
        return any(first < at + size and at < last for at, size in zip(indices, self.index_bytes, strict=True) if size)


class Again:
    """A launch on the very arrays of the call before, as in a loop over the same buffers.

    Nothing about a CuPy array can be set but its shape: the same object with the same shape lies where it lay. It is told by weak
    references, so that no array lives longer for it.
    """

    __slots__ = ("addresses", "current_device", "device", "prepared", "refs", "shapes")

    def __init__(self, launch: Launch, q: Any, k: Any, v: Any, out: Any, indices: tuple[int, ...]):
        self.prepared, self.device, self.current_device = launch.prepared, launch.device, launch.current_device
        ref = weakref.ref
        self.refs = (ref(q), ref(k), ref(v), ref(out))
        self.shapes = (q.shape, k.shape, v.shape, out.shape)
        self.addresses = (q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0, *indices)

    def run(self, q: Any, k: Any, v: Any, out: Any) -> bool:
        """Launch, if the arrays and the current device are the same; whether they were."""
        q_ref, k_ref, v_ref, out_ref = self.refs
        q_shape, k_shape, v_shape, out_shape = self.shapes
        if not (
            q_ref() is q and k_ref() is k and v_ref() is v and out_ref() is out
            and q.shape == q_shape and k.shape == k_shape and v.shape == v_shape and out.shape == out_shape
            and self.current_device() == self.device and device.pretended() is None
        ):
            return False
        self.prepared(*self.addresses)
        return True


def span(a: ArrayView) -> tuple[int, int]:
    """First byte and one past the last, from the array's address."""
    first, last = arrays.byte_range(a)
    return first - a.pointer, last - a.pointer


def prepare(kept: Kept, key: Any, plan: Plan, problem: Problem, out: Any, lse: Any, return_lse: bool) -> Callable | None:
    """The launch that the backend prepares for this call; kept under (signature of q, k, v; that of the results). None if it does not."""
    if key[0] is None or key[1] is None or problem.bias is not None or problem.mask is not None or device.pretended() is not None:
        return None  # bias and mask: a result may overlap them
    backend = backends.load(plan.backend)
    prepared = backend.prepare(plan, problem) if hasattr(backend, "prepare") else None
    if prepared is not None:
        lse_shape = () if lse is None else tuple(lse.shape)
        kept.keep(key, Launch(prepared, problem, tuple(out.shape), lse_shape, return_lse))
    return prepared


def execute(plan: Plan, problem: Problem, prepared: Callable | None) -> None:
    """Run a plan, by its prepared launch if there is one."""
    if prepared is None:
        backend: Any = backends.load(plan.backend)
        backend.run(plan, problem)
        return
    views = (problem.q, problem.k, problem.v, problem.out, problem.lse)
    prepared(*(0 if a is None else a.pointer for a in views), *structs.index_addresses(problem))
