"""decode_shared_prefix: keys that all sequences of a batch begin with are read once for the whole batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import arrays, backends, checks, decoding, indices, launch, merge, planner, staging, warm_decode
from . import problem as problems
from .api import takes_options
from .backends import cuda_merge, cuda_pages
from .types import HOST, UNBOUNDED, ArrayView, NoBackendError, Plan, Problem

AXES = "brhc", "bhr"  # of outputs and log-sum-exps
# Options by which a logit depends on where a query stands, which differs between the sequences that share keys.
NOT_SHARED = ("window", "bias", "alibi_slopes", "score_mod", "mask_mod", "kv_start")
INT32_MAX = 2**31 - 1


@takes_options
def decode_shared_prefix(
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, prefix_lengths: Any, *, page_table: Any = None, k_new: Any = None,
    v_new: Any = None, rope: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False, layout: str = "BSHD", **options: Any,
) -> Any:
    """`decode` for sequences that begin with the same keys, such as a system prompt: the batch reads these once.

    All queries of the batch attend to the prefix as the rows of one problem, each to its own keys by `decode`, and the two results are
    merged exactly. Prefix and own keys then cost what the longest of them costs, and not their sum times the batch.

    Parameters
    ----------
    q, k_cache, v_cache, kv_lengths, page_table, k_new, v_new, rope, out, lse, return_lse, layout
        As for `decode`. kv_lengths and page_table are those of the whole sequences, prefix and all.
    prefix_lengths : int, or array_like of int, shape (B,)
        How many keys a sequence has in common with sequence 0, from the first on: one number for the whole batch, or for each sequence
        this number or 0, if it shares none. They are read where sequence 0 has them, and all who share them must have them before k_new
        is appended. Like kv_lengths it may be on the GPU, and is then followed by a captured CUDA graph: rows that share another number
        than sequence 0, or a prefix that they or sequence 0 lack keys of, become NaN.
        Numbers of the host are copied to the GPU with each call, which can then not be captured.
    **options
        As for `attention`, but for those by which a logit depends on the position of a query: window, bias, alibi_slopes, score_mod,
        mask_mod; kv_start; a mask that covers more than the last Sq keys; ``causal="upper_left"``; ``batch_invariant=True``.

    Returns
    -------
    out, lse
        As `decode`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `decode`; ValueError also where prefix_lengths on the host do not fit the sequences, or their page tables differ there.

    See Also
    --------
    PagedKVCache.batch : finds out what sequences share.

    References
    ----------
    Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", arXiv:2402.05099.
    Ye et al., "FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving", arXiv:2501.01005 (cascades).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> pages, q = np.ones((4, 16, 2, 8), np.float32), np.ones((2, 1, 2, 8), np.float32)
    >>> table = [[0, 1], [0, 2]]  # both begin with page 0
    >>> cuflash.decode_shared_prefix(q, pages, pages, [20, 30], 16, page_table=table).shape
    (2, 1, 2, 8)
    """
    _refuse(options)
    arrays.kind_of(q, "q")
    if q.ndim != 4:
        raise ValueError(f"q: {q.ndim} axes; it must have 4, the first one for the sequences")
    number, starts = None, prefix_lengths
    if not arrays.on_device(prefix_lengths) and arrays.host_index(prefix_lengths, "prefix_lengths").ndim == 0:
        number = checks.integer(prefix_lengths, "prefix_lengths", 0, INT32_MAX)
        starts = prefix_lengths = np.full(q.shape[0], number, np.int32)
        if q.shape[0] and arrays.on_device(q) and arrays.on_device(kv_lengths):  # with all others there, the call can be warm
            starts = _brought(starts, q, options.get("stream"))
    given, index_options = (out, lse), {**options, "kv_start": starts}
    signed = warm_decode.signature(
        q, k_cache, v_cache, kv_lengths, page_table, layout, index_options, k_new=k_new, v_new=v_new, rope=rope,
    )
    if signed is not None and signed.lengths is not None:  # `Call.prepare` wants them on the device
        signed = None
    if signed is not None:
        signed = signed._replace(key=("shared prefix", number, signed.key))  # a number is checked when it comes for the first time
        results = warm_decode.run(signed, out, lse, return_lse, options.get("stream"))
        if results is not None:
            return results
    problem, append = problems.build_decode(
        q, k_cache, v_cache, kv_lengths, page_table=page_table, k_new=k_new, v_new=v_new, rope=rope, layout=layout, **options,
    )
    problem = problem.replace(kv_start=indices.per_sequence(prefix_lengths, "prefix_lengths", problem, *indices.capacity(problem)))
    new = 0 if append is None else append.count
    least = max(_least(problem, options.get("mask")), new)  # new keys are nobody else's
    _check(problem, new, least)
    if 0 in problem.q.shape[:3]:  # there is nothing to share
        rest = {"k_new": k_new, "v_new": v_new, "rope": rope, "out": out, "lse": lse, "return_lse": return_lse, "layout": layout}
        return decoding.decode(q, k_cache, v_cache, kv_lengths, page_table=page_table, **rest, **options)
    if arrays.on_device(starts):
        problem = problem.replace(kv_start=arrays.view(starts, "prefix_lengths"))
    with launch.place(problem.q.device, problem.stream), contextlib.ExitStack() as stack:
        if problem.q.device != HOST and not isinstance(problem.kv_start, ArrayView):
            launch.refuse_capture(launch.copied({"prefix_lengths": problem.kv_start}))
        problem, out, lse = problems.with_outputs(problem, out, lse, return_lse, layout, np.ndim(q), append)
        call = Call(stack, problem, least)
        with backends.appended(call.plan, problem, append) as ready:
            if signed is not None:
                warm_decode.keep(signed, call.plan, problem, append, ready, (out, lse, return_lse), given, call.prepare)
            call.run(ready)
    return (out, lse) if return_lse else out


def _brought(numbers: np.ndarray, q: Any, stream: Any) -> Any:
    """Numbers of the host as an array where q is."""
    like = arrays.view(q, "q")
    with launch.place(like.device, stream):
        launch.refuse_capture(launch.copied({"prefix_lengths": numbers}))
        array = arrays.empty(numbers.shape, numbers.dtype, like)
        staging.copy(numbers, array.data.ptr, like.device)
        return array


def _refuse(options: dict[str, Any]) -> None:
    """Raise for options that a shared prefix does not go with."""
    for name in NOT_SHARED:
        if options.get(name) is not None:
            why = "decode_shared_prefix() has one problem for queries at different positions"
            raise ValueError(f"{name}: must be None; {why}, use decode()")
    if options.get("causal") == "upper_left":
        raise ValueError("causal: 'upper_left' puts queries at the first keys; allowed are False, True and 'bottom_right'")
    if options.get("batch_invariant"):
        raise ValueError("batch_invariant: must be False; what is computed for a sequence depends on what it shares, use decode()")


def _least(problem: Problem, mask: Any) -> int:
    """Keys that a sequence needs behind the prefix, so that all its queries see all of that; ``mask`` as the user has it."""
    if problem.mask is not None:
        if not problem.mask_is_tail:
            rows, came = problem.seqlen_q, f"shape {np.shape(mask)} is for all {problem.seqlen_k} keys"
            tail = f"have {rows} columns, for the last {rows} keys" if rows > 1 else "be None where there is one query row"
            raise ValueError(f"mask: {came}; with a shared prefix it must {tail}")
        return problem.seqlen_q
    return problem.seqlen_q - 1 if problem.causal else 0


def _check(problem: Problem, new: int, least: int) -> None:
    """What is known on the host of prefix_lengths must fit lengths and page table; ``new`` keys are not in lengths on a device."""
    found = indices.numbers(problem.kv_start, problem.kv_lengths)
    if found is None:
        return
    shares, lengths = found
    lengths = lengths + new * isinstance(problem.kv_lengths, ArrayView)
    table = indices.numbers(problem.page_table) if problem.paged else None
    for b, (own, length) in enumerate(zip(shares.tolist(), lengths.tolist(), strict=True)):
        if own not in (0, shares[0]):
            raise ValueError(f"prefix_lengths: {own} at index {b}; it must be that of sequence 0, {shares[0]}, or 0")
        if own and length - own < least or own > length:
            keys = f"{length} keys" + f", {new} of them new," * bool(new)
            raise ValueError(f"prefix_lengths: {own} at index {b}; of the sequence's {keys} at least {least} must come behind it")
        if own and table is not None:
            columns = own // problem.page_size
            if not np.array_equal(table[0][b, :columns], table[0][0, :columns]):
                raise ValueError(f"page_table: row {b} does not begin with the {columns} pages of row 0 that prefix_lengths says it shares")


class Call:
    """The passes of a call: all queries over the prefix, each sequence over its own keys, and the merge.

    In the first pass the rows that attend to a key/value head are its query heads, of all queries of all sequences: R of them. They are
    copied to lie one behind the other, (Hkv, R, D), which is one query of many heads, or many queries of one head each.

    Parameters
    ----------
    stack : ExitStack
        Holds the memory of intermediate results.
    problem : Problem
        That of the whole call, with results.
    least : int
        Keys that a sequence needs behind the prefix.
    """

    def __init__(self, stack: contextlib.ExitStack, problem: Problem, least: int):
        self.least = least
        if problem.q.device != HOST:
            reason = cuda_merge.decline(problem.out_dtype, problem.q.device, 2, problem.compute_dtype)
            if reason is not None:
                raise NoBackendError(f"decode_shared_prefix() merges two results by a kernel that cannot run: {reason}")
        rows = problem.batch * problem.seqlen_q * problem.group_size
        self.shape = problem.heads_kv, rows
        like = problem.q
        self.q = _buffer(stack, (*self.shape, problem.head_dim), like.dtype, like)
        self.out = _buffer(stack, (*self.shape, problem.head_dim_v), problem.out_dtype, like)
        self.lse = _buffer(stack, self.shape, problem.compute_dtype, like)
        self.own_lse = problem.lse or _buffer(stack, problem.lse_shape, problem.compute_dtype, like)
        self.plan = _choose(problem, "kv_start")  # of the second pass
        self.prefix_plan, self.prefix = self._of_prefix(problem)
        backend: Any = backends.load(self.prefix_plan.backend)
        if hasattr(backend, "make_ready"):
            backend.make_ready(self.prefix_plan, self.prefix)

    def _of_prefix(self, problem: Problem) -> tuple[Plan, Problem]:
        """Plan and problem of the first pass, over the keys where sequence 0 has them."""
        keys = {"page_table": _first(problem.page_table)} if problem.paged else {"k": _first(problem.k), "v": _first(problem.v)}
        whole = problem.replace(
            batch=1, causal=False, window=(UNBOUNDED, UNBOUNDED), mask=None, mask_is_tail=False, sinks=None, kv_start=None,
            kv_lengths=_first(problem.kv_start), **keys,
        )
        heads, rows = self.shape
        if problem.kernel in ("auto", "decode"):  # which splits the keys: there is one sequence, and many of them
            shape = (1, 1, heads * rows)
            views = {"q": _as(self.q, (*shape, -1)), "out": _as(self.out, (*shape, -1)), "lse": _as(self.lse, (1, heads * rows, 1))}
            one = whole.replace(seqlen_q=1, heads_q=heads * rows, kernel="decode", **views)
            with contextlib.suppress(NoBackendError):
                return _choose(one, "kv_lengths"), one
        q, out = (arrays.transpose(_as(a, (1, heads, rows, -1)), (0, 2, 1, 3)) for a in (self.q, self.out))
        many = whole.replace(seqlen_q=rows, heads_q=heads, q=q, out=out, lse=_as(self.lse, (1, heads, rows)))
        return _choose(many, "kv_lengths"), many

    def _moved(self, own: Problem) -> tuple[ArrayView, ArrayView]:
        """Queries as they came and as the first pass has them, both (B, Hkv, Sq, G, D)."""
        heads, group = self.shape[0], own.group_size
        old = arrays.transpose(_split_heads(own.q, 2, group), (0, 2, 1, 3, 4))
        new = _as(self.q, (heads, own.batch, own.seqlen_q, group, own.head_dim))
        return old, arrays.transpose(new, (1, 0, 2, 3, 4))

    def _merged(self, own: Problem) -> tuple[list[ArrayView], list[ArrayView]]:
        """Outputs (B, Sq, Hkv, G, Dv) and log-sum-exps (B, Hkv, G, Sq) of the two passes."""
        assert own.out is not None and own.lse is not None
        group = own.group_size
        lead = (self.shape[0], own.batch, own.seqlen_q, group)
        outs = [arrays.transpose(_as(self.out, (*lead, own.head_dim_v)), (1, 2, 0, 3, 4)), _split_heads(own.out, 2, group)]
        return outs, [arrays.transpose(_as(self.lse, lead), (1, 0, 3, 2)), _split_heads(own.lse, 1, group)]

    def run(self, ready: Problem) -> None:
        """Write ready.out, and ready.lse unless it is None."""
        own = ready.replace(lse=self.own_lse)
        old, new = self._moved(own)
        if own.q.device == HOST:
            new.array[...] = old.array
        else:
            cuda_pages.rearrange(old, new)
        for plan, problem in ((self.prefix_plan, self.prefix), (self.plan, own)):
            backends.load(plan.backend).run(plan, problem)  # type: ignore[union-attr]
        outs, lses = self._merged(own)
        assert own.out is not None and own.lse is not None
        if own.q.device == HOST:
            out, lse = own.out.array, own.lse.array
            lses[0].array[own.kv_start == 0] = -np.inf
            parts = [a.array.reshape(out.shape) for a in outs], [a.array.reshape(lse.shape) for a in lses]
            lse[...] = merge.merge_states(*parts, out=out)[1]  # of float64 outputs it is float64
            return
        with _addresses(own) as known:
            cuda_merge.run(outs, lses, own.out, own.lse, AXES, self._shared(own, known))

    def _shared(self, own: Problem, known: dict[str, int]) -> cuda_merge.Shared:
        narrow = {name: getattr(own, name).dtype == np.int32 for name in known}
        return cuda_merge.Shared(known["kv_start"], narrow["kv_start"], known["kv_lengths"], narrow["kv_lengths"], self.least)

    def prepare(self, ready: Problem) -> Callable | None:
        """The launches of ``run`` for calls that differ in addresses alone, with all index arrays on the device; see warm_decode.Launch."""
        own = ready.replace(lse=self.own_lse)
        assert own.out is not None
        passes: list[Any] = []
        for plan, problem in ((self.prefix_plan, self.prefix), (self.plan, own)):
            backend: Any = backends.load(plan.backend)
            passes.append(backend.prepare(plan, problem) if hasattr(backend, "prepare") else None)
        if None in passes:
            return None
        over_prefix, over_own = passes
        move = cuda_pages.prepare(*self._moved(own))
        join = cuda_merge.prepare(*self._merged(own), own.out, own.lse, AXES, self._shared(own, {"kv_start": 0, "kv_lengths": 0}))
        device, places, total = own.q.device, [], 0
        for a in (self.q, self.out, self.lse, self.own_lse):
            places.append(total)
            total += -(-math.prod(a.shape) * a.dtype.itemsize // warm_decode.SCRATCH_ALIGNMENT) * warm_decode.SCRATCH_ALIGNMENT

        def attend(q: int, k: int, v: int, out: int, lse: int, *indices: int) -> None:
            with launch.scratch((total,), np.dtype(np.uint8), device) as memory:
                q_moved, prefix_out, prefix_lse, own_lse = (memory.pointer + place for place in places)
                lse = lse or own_lse
                lengths, start, rest = indices[2], indices[3], indices[4:]  # behind the indices come scales, if any
                move(q, 0, q_moved, 0)
                over_prefix(q_moved, k, v, prefix_out, prefix_lse, 0, 0, start, 0, *rest)
                over_own(q, k, v, out, lse, *indices)
                join(*cuda_merge.addresses((prefix_out, out), (prefix_lse, lse), out, lse, start, lengths))

        return attend


def _choose(problem: Problem, name: str) -> Plan:
    """The plan of a pass; where there is none, the error speaks of prefix_lengths, which the pass has by the ``name`` of another index."""
    try:
        return planner.choose(problem)
    except NoBackendError as error:
        raise NoBackendError(str(error).replace(name, "prefix_lengths")) from None


def _as(a: ArrayView, shape: tuple[int, ...]) -> ArrayView:
    """Contiguous memory by another shape, whose -1 stands for the last axis."""
    shape = tuple(a.shape[-1] if n == -1 else n for n in shape)
    return arrays.strided(a, shape, tuple(a.dtype.itemsize * math.prod(shape[n + 1 :]) for n in range(len(shape))))


def _split_heads(a: ArrayView, axis: int, group: int) -> ArrayView:
    """Query heads as key/value heads, and those of a group."""
    heads, stride = a.shape[axis], a.strides[axis]
    shape = (*a.shape[:axis], heads // group, group, *a.shape[axis + 1 :])
    return arrays.strided(a, shape, (*a.strides[:axis], group * stride, stride, *a.strides[axis + 1 :]))


def _first(a: Any) -> Any:
    """The first entry of an array, with its axis."""
    return arrays.strided(a, (1, *a.shape[1:]), a.strides) if isinstance(a, ArrayView) else a[:1]


def _buffer(stack: contextlib.ExitStack, shape: tuple[int, ...], dtype: np.dtype, like: ArrayView) -> ArrayView:
    """Memory until the stack closes."""
    if like.device == HOST:
        return arrays.wrap(np.empty(shape, dtype), "numpy")
    return stack.enter_context(launch.scratch(shape, dtype, like.device))


@contextlib.contextmanager
def _addresses(problem: Problem) -> Iterator[dict[str, int]]:
    """Device addresses of kv_start and kv_lengths."""
    given = {name: getattr(problem, name) for name in ("kv_start", "kv_lengths")}
    with launch.uploaded({name: a for name, a in given.items() if not isinstance(a, ArrayView)}) as pointers:
        yield {**{name: a.pointer for name, a in given.items() if isinstance(a, ArrayView)}, **pointers}
