"""Warm calls over caches on a GPU: decode(), and attention() with a page table or with lengths of the host.

Caches are dense or paged, with or without new keys and a rotary embedding; a page table is on the device. Scales of float8 are there
too, or numbers. As warm.py keeps the launch of a plain attention(), this keeps the two of such a call: the one that appends and turns,
and the attention over what is then in the caches. A further call of the same signature looks at addresses alone, and at lengths that
come from the host, which it copies.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import arrays, backends, device, host, launch, staging, structs, warm
from .types import HOST, Append, ArrayView, Plan, Problem

NUMBERS = (int, float, np.float32, np.float64)
launches: warm.Kept = warm.Kept(warm.MOST)  # (signature, signature of the results) -> Launch
SCRATCH_ALIGNMENT = 256
CHANGING = 3  # of the arrays in Given: new with each step of a model, while the others stay


class Given(NamedTuple):
    """The arrays of a call, in the order in which kv_append.cu has their addresses where it has them; None where there is none."""

    q: Any
    k_new: Any
    v_new: Any
    cos: Any
    sin: Any
    kv_lengths: Any
    page_table: Any  # or cache_batch_index
    kv_start: Any
    k_scale: Any  # or a number, which is part of the signature
    v_scale: Any
    k: Any
    v: Any


class Signed(NamedTuple):
    """A call: its signature, its arrays, and its lengths if they come from the host (there is then no such array)."""

    key: tuple
    given: Given
    lengths: Any = None


def signature(
    q: Any, k: Any, v: Any, kv_lengths: Any, page_table: Any, layout: Any, options: dict[str, Any], *, k_new: Any = None,
    v_new: Any = None, rope: Any = None, cache_batch_index: Any = None, op: str = "decode",
) -> Signed | None:
    """A call that may be warm; None if more than its lengths is not on a device, or if it has options that have no signature.

    Scales of heads that come from the host are more: a kept launch would have to keep a copy of them on the device, and that as long as
    any graph that was captured with it. Once the user puts them there, calls are warm.
    """
    if not arrays.on_device(q) or kv_lengths is None or (k_new is None) is not (v_new is None) or host.checks():
        return None
    own = warm.key_of(q, k, v, layout, options, ("kv_start", "stream", *structs.SCALES))
    if own is None or own[0][0] == HOST or (page_table is not None and cache_batch_index is not None):
        return None
    cos = sin = style = None
    if rope is not None:
        if type(rope) not in (tuple, list) or len(rope) != 3 or type(rope[2]) is not str:
            return None
        cos, sin, style = rope
    table = cache_batch_index if page_table is None else page_table
    lengths, of_host = (kv_lengths, None) if arrays.on_device(kv_lengths) else (None, kv_lengths)
    k_scale, v_scale, numbers = options.get("k_scale"), options.get("v_scale"), None
    if k_scale is not None or v_scale is not None:
        numbers = tuple(x if type(x) in NUMBERS else None for x in (k_scale, v_scale))
        k_scale, v_scale = (x if number is None else None for x, number in zip((k_scale, v_scale), numbers, strict=True))
    given = Given(q, k_new, v_new, cos, sin, lengths, table, options.get("kv_start"), k_scale, v_scale, k, v)
    lie = []
    for a in given[1:-2]:
        lies = None if a is None else arrays.key(a)
        if a is not None and (lies is None or lies[0] == HOST):
            return None
        lie.append(lies)
    # How wide the kernel's copies are depends on the address of each; `key_of` has the three in one.
    aligned = tuple(a.data.ptr % arrays.ALIGNMENT for a in (q, k, v))
    return Signed((op, own, style, page_table is None, aligned, numbers, *lie), given, of_host)


def run(signed: Signed | None, out: Any, lse: Any, return_lse: Any, stream: Any) -> Any:
    """The results of a call whose launches are kept; None if they are not, or if something asks for the ordinary way."""
    if signed is None or os.environ.get("CUFLASH_LOG"):
        return None
    found = launches.get((signed.key, warm.results_key(out, lse, return_lse)))
    if found is None or device.pretended() is not None:
        return None
    lengths = None
    if signed.lengths is not None:
        lengths = found.checked(signed.lengths)
        if lengths is None:
            return None
    return found.run(signed.given, lengths, out, lse, stream)


def keep(
    signed: Signed | None, plan: Plan, problem: Problem, new: Append | None, ready: Problem, user: tuple[Any, Any, bool],
    given: tuple[Any, Any], prepare: Callable[[Problem], Callable | None] | None = None,
) -> None:
    """Keep the launches of a call for others of its signature, if its backend can prepare them.

    ``problem`` is that before the append and ``ready`` the one that is left, ``user`` the results (out, lse, return_lse), of which
    ``given`` (out, lse) came from the user; ``prepare`` is asked in place of the backend, where the attention is more than one pass.
    """
    if signed is None or device.pretended() is not None:
        return
    results = warm.results_key(*given, user[2])
    backend: Any = backends.load(plan.backend)
    if results is None or not hasattr(backend, "prepare"):
        return
    if signed.lengths is not None:
        if plan.kernel not in backend.TAKES_DEVICE_INDICES:
            return
        problem, new, ready = with_lengths_on_device(problem, new, ready)
    attend = backend.prepare(plan, ready) if prepare is None else prepare(ready)
    if attend is None:
        return
    append = None
    if new is not None:
        from .backends import cuda_append

        if cuda_append.decline(problem, new) is not None:
            return
        append = cuda_append.prepare(problem, new, ready)
    launches.keep((signed.key, results), Launch(attend, append, problem, new, ready, user, signed.lengths is not None))


def with_lengths_on_device(problem: Problem, new: Append | None, ready: Problem) -> tuple[Problem, Append | None, Problem]:
    """The same with lengths of which the device alone will know, as if they had come from there."""
    before, after = (
        ArrayView(None, 0, (problem.batch,), (dtype.itemsize,), dtype, "cupy", problem.q.device)
        for dtype in (np.dtype(np.int64), np.dtype(np.int32))
    )
    if new is not None:
        new = dataclasses.replace(new, lengths=before)
    return problem.replace(kv_lengths=before), new, ready.replace(kv_lengths=after if new is not None and new.count else before)


LENGTHS = Given._fields.index("kv_lengths")


def bounds(problem: Problem, new: Append | None) -> tuple[int, int]:
    """Lengths before the append from which and up to which every check of lengths passes, whatever the others are.

    Shorter ones may pass as well: with an embedding that ends before the first queries' positions, far before the keys.
    """
    count = 0 if new is None else new.count
    lowest, highest = 0, problem.seqlen_k - count
    if new is not None and new.rope is not None:
        known, rows = new.rope.cos.shape[0], problem.seqlen_q
        highest = min(highest, known - count)
        if problem.align == "bottom_right":
            lowest = max(lowest, rows - count - known + 1)
        elif rows > known:
            lowest = highest + 1
    return lowest, highest


class Launch:
    """The launches of one signature, with what is left to do for every call. Immutable but for what it remembers; thread-safe.

    Parameters
    ----------
    attend : callable
        Takes the addresses of q, k, v, out, lse and of the arrays of `structs.index_views` and `structs.scale_views`, and launches on
        CuPy's current device and stream.
    append : callable, optional
        Takes the first addresses of the struct of kv_append.cu, and launches likewise; None if there is nothing to append or turn.
    problem, new, ready, user
        See `keep`.
    of_host : bool
        Whether lengths come from the host.
    """

    def __init__(
        self, attend: Callable, append: Callable | None, problem: Problem, new: Append | None, ready: Problem, user: tuple, of_host: bool,
    ):
        self.attend, self.append, self.device = attend, append, problem.q.device
        out, lse, self.return_lse = user
        self.current_device = launch.device_getter()
        self.out = (tuple(out.shape), problem.out_dtype)
        self.lse = (() if lse is None else tuple(lse.shape), problem.compute_dtype)
        self.writes = new is not None and new.count > 0  # to the caches
        # What the kernels get beyond the user's arrays: lengths of the host, and shared by the two, lengths and queries.
        self.turns, self.counts = ready.q is not problem.q, ready.kv_lengths is not problem.kv_lengths
        sizes = (
            8 * problem.batch if of_host else 0, 4 * problem.batch if self.counts else 0,
            int(np.prod(problem.q.shape)) * problem.q.dtype.itemsize if self.turns else 0,
        )
        _, self.after_at, self.q_at, self.scratch = itertools.accumulate(
            (-(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for size in sizes), initial=0,
        )
        self.batch, (self.lowest, self.highest) = problem.batch, bounds(problem, new)
        self.indices, scales = len(structs.index_views(ready)), structs.scale_views(ready)
        self.scaled = bool(scales)
        k_scale, v_scale = scales or (None, None)
        rope = None if new is None else new.rope
        views = Given(
            problem.q, None if new is None else new.k_new, None if new is None else new.v_new, rope and rope.cos, rope and rope.sin,
            problem.kv_lengths, problem.page_table, problem.kv_start, k_scale, v_scale, problem.k, problem.v,
        )
        by_token = [name for name in structs.SCALES if (a := getattr(views, name)) is not None and a.by_token]
        self.found = [Given._fields.index(name) for name in by_token if self.writes and new is not None and new.quantizes]
        self.spans = [(0, 0) if a is None else warm.span(a) for a in views]
        self.out_span, self.lse_span = (None if a is None else warm.span(a) for a in (problem.out, problem.lse))
        self.apart = problem.v.pointer - problem.k.pointer  # as keys and values were found not to share an element
        self.known: list[int] = []  # addresses behind the first CHANGING of arrays that lie apart from the caches
        self.allocate = launch.allocator()

    def checked(self, lengths: Any) -> np.ndarray | None:
        """Lengths of the host as int64 (B,), if they are what they must be; None if the ordinary way has to say what they are not."""
        try:
            numbers = arrays.host_index(lengths, "kv_lengths")
        except (TypeError, ValueError, NotImplementedError):
            return None
        if numbers.ndim == 0:
            numbers = np.full(self.batch, numbers)
        fits = numbers.shape == (self.batch,) and self.lowest <= numbers.min() and numbers.max() <= self.highest
        return numbers if fits else None

    def run(self, given: Given, lengths: np.ndarray | None, out: Any, lse: Any, stream: Any, placed: bool = False) -> Any:
        """Launch on these arrays, whose signatures are those of the first call; None if the ordinary way has to decide."""
        if not placed and (stream is not None or self.current_device() != self.device):
            with launch.place(self.device, stream):
                return self.run(given, lengths, out, lse, None, True)
        at = [0 if a is None else a.data.ptr for a in given]
        if not self._apart(at, out, lse):
            return None
        kind = type(given.q)
        if out is None:
            out = kind(*self.out)
            if out.data.ptr % arrays.ALIGNMENT:  # an allocator of the user's
                return None
        if lse is None and self.return_lse:
            lse = kind(*self.lse)
        results = out.data.ptr, 0 if lse is None else lse.data.ptr
        if not self.scratch:
            self._launch(at, *results, 0)
        elif launch.is_capturing():
            if lengths is not None:
                return None
            with launch.scratch((self.scratch,), np.dtype(np.uint8), self.device) as memory:
                self._launch(at, *results, memory.pointer)
        else:  # as `launch.scratch`, in a quarter of the time
            pooled = self.allocate(self.scratch)
            if lengths is not None:
                staging.copy(lengths, pooled.ptr, self.device)
                at[LENGTHS] = pooled.ptr
            self._launch(at, *results, pooled.ptr)
        return (out, lse) if self.return_lse else out

    def _launch(self, at: list[int], out: int, lse: int, scratch: int) -> None:
        q, k_new, v_new, cos, sin, lengths, table, start, k_scale, v_scale, k, v = at
        turned, after = (scratch + self.q_at if self.turns else 0), (scratch + self.after_at if self.counts else 0)
        if self.append is not None:
            self.append(q, k_new, v_new, cos, sin, lengths, table, turned, k, v, after, k_scale, v_scale)
        rest = (0, 0, after or lengths, start, 0, 0, 0, 0, 0, table)
        scales = (k_scale, v_scale) if self.scaled else ()
        self.attend(turned or q, k, v, out, lse, *rest[: self.indices], *scales)

    def _apart(self, at: list[int], out: Any, lse: Any) -> bool:
        """Whether what is written lies apart from everything else: its bytes from the first to the last."""
        if self.writes:
            # The arrays that stay the same from call to call need be looked at once.
            stay = at[CHANGING:]
            read = 3 if stay == self.known else len(at) - 2
            ranges = [(first + a, last + a) for (first, last), a in zip(self.spans[:read], at, strict=False)]
            (k0, k1), (v0, v1) = self.spans[-2:]
            k, v = at[-2:]
            k0, k1, v0, v1 = k0 + k, k1 + k, v0 + v, v1 + v
            if v - k != self.apart and k0 < v1 and v0 < k1:
                return False
            for begin, end in ranges:
                if (k0 < end and begin < k1) or (v0 < end and begin < v1):
                    return False
            for n in self.found:  # scales that are written as well
                first, last = self.spans[n][0] + at[n], self.spans[n][1] + at[n]
                for other, (begin, end) in enumerate(ranges):
                    if other != n and first < end and begin < last:
                        return False
            self.known = stay
        if out is None and lse is None:
            return True
        ranges = [(first + a, last + a) for (first, last), a in zip(self.spans, at, strict=True)]
        for result, span in ((out, self.out_span), (lse, self.lse_span)):
            if result is not None and span is not None:
                first, last = span[0] + result.data.ptr, span[1] + result.data.ptr
                for begin, end in ranges:
                    if first < end and begin < last:
                        return False
                ranges.append((first, last))
        return True

