"""Warm calls of decode() on a GPU: lengths on the device, caches dense or paged, with or without new keys and a rotary embedding.

As warm.py keeps the launch of attention(), this keeps the two of such a call: the one that appends and turns, and the attention over
what is then in the caches. A further call of the same signature looks at addresses alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import arrays, backends, device, host, launch, warm
from .types import HOST, Append, Plan, Problem

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
    k: Any
    v: Any


def signature(
    q: Any, k: Any, v: Any, kv_lengths: Any, page_table: Any, k_new: Any, v_new: Any, rope: Any, cache_batch_index: Any, layout: Any,
    options: dict[str, Any],
) -> tuple[tuple, Given] | None:
    """Signature and arrays of a call; None if it is not all on a device, or has options that have no signature."""
    if not arrays.on_device(kv_lengths) or (k_new is None) is not (v_new is None) or host.checks():
        return None
    own = warm.key_of(q, k, v, layout, options, ("kv_start", "stream"))
    if own is None or own[0][0] == HOST or (page_table is not None and cache_batch_index is not None):
        return None
    cos = sin = style = None
    if rope is not None:
        if type(rope) not in (tuple, list) or len(rope) != 3 or type(rope[2]) is not str:
            return None
        cos, sin, style = rope
    table = cache_batch_index if page_table is None else page_table
    given = Given(q, k_new, v_new, cos, sin, kv_lengths, table, options.get("kv_start"), k, v)
    lie = []
    for a in given[1:-2]:
        lies = None if a is None else arrays.key(a)
        if a is not None and (lies is None or lies[0] == HOST):
            return None
        lie.append(lies)
    # How wide the kernel's copies are depends on the address of each; `key_of` has the three in one.
    aligned = tuple(a.data.ptr % arrays.ALIGNMENT for a in (q, k, v))
    return (own, style, page_table is None, aligned, *lie), given


def run(signed: tuple[tuple, Given] | None, out: Any, lse: Any, return_lse: Any, stream: Any) -> Any:
    """The results of a call whose launches are kept; None if they are not, or if something asks for the ordinary way."""
    if signed is None or os.environ.get("CUFLASH_LOG"):
        return None
    found = launches.get((signed[0], warm.results_key(out, lse, return_lse)))
    if found is None or device.pretended() is not None:
        return None
    return found.run(signed[1], out, lse, stream)


def keep(
    signed: tuple[tuple, Given] | None, plan: Plan, problem: Problem, new: Append | None, ready: Problem, user: tuple[Any, Any, bool],
    given: tuple[Any, Any],
) -> None:
    """Keep the launches of a call for others of its signature, if its backend can prepare them.

    ``problem`` is that before the append and ``ready`` the one that is left, ``user`` the results (out, lse, return_lse), of which
    ``given`` (out, lse) came from the user.
    """
    results = warm.results_key(*given, user[2])
    backend: Any = backends.load(plan.backend)
    if signed is None or results is None or device.pretended() is not None or not hasattr(backend, "prepare"):
        return
    attend = backend.prepare(plan, ready)
    if attend is None:
        return
    append = None
    if new is not None:
        from .backends import cuda_append

        append = cuda_append.prepare(problem, new, ready)
    launches.keep((signed[0], results), Launch(attend, append, problem, new, ready, user))


class Launch:
    """The launches of one signature, with what is left to do for every call. Immutable but for what it remembers; thread-safe.

    Parameters
    ----------
    attend : callable
        Takes the addresses of q, k, v, out, lse and of the index arrays of `launch.index_views`, and launches on CuPy's current device
        and stream.
    append : callable, optional
        Takes the first addresses of the struct of kv_append.cu, and launches likewise; None if there is nothing to append or turn.
    problem, new, ready, user
        See `keep`.
    """

    def __init__(self, attend: Callable, append: Callable | None, problem: Problem, new: Append | None, ready: Problem, user: tuple):
        self.attend, self.append, self.device = attend, append, problem.q.device
        out, lse, self.return_lse = user
        self.current_device = launch.device_getter()
        self.out = (tuple(out.shape), problem.out_dtype)
        self.lse = (() if lse is None else tuple(lse.shape), problem.compute_dtype)
        self.writes = new is not None and new.count > 0  # to the caches
        # What the two kernels share beyond the user's arrays: lengths, then queries.
        self.turns, self.counts = ready.q is not problem.q, ready.kv_lengths is not problem.kv_lengths
        self.q_at = -(-4 * problem.batch // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT if self.counts else 0
        turned = int(np.prod(problem.q.shape)) * problem.q.dtype.itemsize if self.turns else 0
        self.scratch = self.q_at + turned
        self.indices = len(launch.index_views(ready))
        rope = None if new is None else new.rope
        views = Given(
            problem.q, None if new is None else new.k_new, None if new is None else new.v_new, rope and rope.cos, rope and rope.sin,
            problem.kv_lengths, problem.page_table, problem.kv_start, problem.k, problem.v,
        )
        self.spans = [(0, 0) if a is None else warm.span(a) for a in views]
        self.out_span, self.lse_span = (None if a is None else warm.span(a) for a in (problem.out, problem.lse))
        self.apart = problem.v.pointer - problem.k.pointer  # as keys and values were found not to share an element
        self.known: list[int] = []  # addresses behind the first CHANGING of arrays that lie apart from the caches
        self.allocate = launch.allocator()

    def run(self, given: Given, out: Any, lse: Any, stream: Any, placed: bool = False) -> Any:
        """Launch on these arrays, whose signatures are those of the first call; None if the ordinary way has to decide."""
        if not placed and (stream is not None or self.current_device() != self.device):
            with launch.place(self.device, stream):
                return self.run(given, out, lse, None, True)
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
            with launch.scratch((self.scratch,), np.dtype(np.uint8), self.device) as memory:
                self._launch(at, *results, memory.pointer)
        else:  # as `launch.scratch`, in a quarter of the time
            pooled = self.allocate(self.scratch)
            self._launch(at, *results, pooled.ptr)
        return (out, lse) if self.return_lse else out

    def _launch(self, at: list[int], out: int, lse: int, scratch: int) -> None:
        q, k_new, v_new, cos, sin, lengths, table, start, k, v = at
        turned, after = (scratch + self.q_at if self.turns else 0), (scratch if self.counts else 0)
        if self.append is not None:
            self.append(q, k_new, v_new, cos, sin, lengths, table, turned, k, v, after)
        rest = (0, 0, after or lengths, start, 0, 0, 0, 0, 0, table)
        self.attend(turned or q, k, v, out, lse, *rest[: self.indices])

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

