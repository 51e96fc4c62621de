"""decode_shared_prefix: keys that all sequences of a batch begin with are read once for the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import api, arrays, backends, checks, indices, launch, merge, planner
from . import problem as problems
from .backends import cuda_merge
from .types import HOST, UNBOUNDED, ArrayView, NoBackendError, Plan, Problem

# Options by which a logit depends on where a query stands, which differs between the sequences that share keys.
NOT_SHARED = ("window", "bias", "alibi_slopes", "score_mod", "mask_mod", "kv_start")


@api.takes_options
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
        this number or 0, if it shares none. They are read where sequence 0 has them. Like kv_lengths it may be on the GPU, and is then
        followed by a captured CUDA graph: rows that share another number than sequence 0, or lack keys of the prefix, become NaN.
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
    if np.ndim(q) != 4:
        raise ValueError(f"q: {np.ndim(q)} axes; it must have 4, the first one for the sequences")
    if np.ndim(prefix_lengths) == 0 and not arrays.on_device(prefix_lengths):
        prefix_lengths = np.full(q.shape[0], checks.integer(prefix_lengths, "prefix_lengths", 0))
    problem, append = problems.build_decode(
        q, k_cache, v_cache, kv_lengths, page_table=page_table, k_new=k_new, v_new=v_new, rope=rope, layout=layout, **options,
    )
    prefix_lengths = indices.per_sequence(prefix_lengths, "prefix_lengths", problem, *indices.capacity(problem))
    problem = problem.replace(kv_start=prefix_lengths)
    least = _least(problem)
    _check(problem, 0 if append is None else append.count, least)
    with launch.place(problem.q.device, problem.stream), contextlib.ExitStack() as stack:
        problem, out, lse = problems.with_outputs(problem, out, lse, return_lse, layout, np.ndim(q), append)
        if problem.batch == 0 or problem.seqlen_q == 0:
            return (out, lse) if return_lse else out
        own_lse = problem.lse or _buffer(stack, problem.lse_shape, problem.compute_dtype, problem.q)
        problem = problem.replace(lse=own_lse)
        prefix = _of_prefix(stack, problem)
        plans = planner.choose(problem), _plan_prefix(prefix)
        _make_ready(plans[1], prefix)
        with backends.appended(plans[0], problem, append) as ready:
            backends.load(plans[1].backend).run(plans[1], prefix.replace(q=_rows(ready.q)))  # type: ignore[union-attr]
            backends.load(plans[0].backend).run(plans[0], ready)  # type: ignore[union-attr]
            _merge(prefix, ready, least)
    return (out, lse) if return_lse else out


def _refuse(options: dict[str, Any]) -> None:
    """Raise for options that a shared prefix does not go with."""
    for name in NOT_SHARED:
        if options.get(name) is not None:
            raise ValueError(f"{name}: must be None; decode_shared_prefix() has one problem for queries at different positions, use decode()")
    if options.get("causal") == "upper_left":
        raise ValueError("causal: 'upper_left' puts queries at the first keys; allowed are False, True and 'bottom_right'")
    if options.get("batch_invariant"):
        raise ValueError("batch_invariant: must be False; what is computed for a sequence depends on what it shares, use decode()")


def _least(problem: Problem) -> int:
    """Keys that a sequence needs behind the prefix, so that all its queries see all of that."""
    if problem.mask is not None:
        if not problem.mask_is_tail:
            columns = f"{problem.mask.shape[-1]} columns"
            raise ValueError(f"mask: {columns}; with a shared prefix it must have those of the last {problem.seqlen_q} keys")
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
            raise ValueError(f"prefix_lengths: {own} at index {b}; of the sequence's {length} keys at least {least} must come behind it")
        if own and table is not None:
            columns = own // problem.page_size
            if not np.array_equal(table[0][b, :columns], table[0][0, :columns]):
                raise ValueError(f"page_table: row {b} does not begin with the {columns} pages of row 0 that prefix_lengths says it shares")


def _rows(q: ArrayView) -> ArrayView:
    """The queries (B, Sq, Hq, D) of all sequences as those of one, (1, B * Sq, Hq, D)."""
    b, rows, *last = q.shape
    batch, row, *rest = q.strides
    if b > 1 and rows > 1 and batch != rows * row:
        raise ValueError(f"q: strides {q.strides}; with several queries each they must lie one behind the other, as in layout 'BSHD'")
    step = row if rows > 1 else batch
    return arrays.strided(q, (1, b * rows, *last), (0, step, *rest))


def _of_prefix(stack: contextlib.ExitStack, problem: Problem) -> Problem:
    """All queries over the keys of the prefix, where sequence 0 has them."""
    rows = problem.batch * problem.seqlen_q
    changes: dict[str, Any] = {
        "q": _rows(problem.q), "out": _buffer(stack, (1, rows, problem.heads_q, problem.head_dim_v), problem.out_dtype, problem.q),
        "lse": _buffer(stack, (1, problem.heads_q, rows), problem.compute_dtype, problem.q), "kv_lengths": _first(problem.kv_start),
    }
    if problem.paged:
        changes["page_table"] = _first(problem.page_table)
    else:
        changes |= {"k": _first(problem.k), "v": _first(problem.v)}
    return problem.replace(
        batch=1, seqlen_q=rows, causal=False, window=(UNBOUNDED, UNBOUNDED), mask=None, mask_is_tail=False, sinks=None, kv_start=None, **changes,
    )


def _first(a: Any) -> Any:
    """The first entry of an array, with its axis."""
    if not isinstance(a, ArrayView):
        return a[:1]
    return arrays.strided(a, (1, *a.shape[1:]), a.strides)


def _buffer(stack: contextlib.ExitStack, shape: tuple[int, ...], dtype: np.dtype, like: ArrayView) -> ArrayView:
    """Memory until the stack closes."""
    if like.device == HOST:
        return arrays.wrap(np.empty(shape, dtype), "numpy")
    return stack.enter_context(launch.scratch(shape, dtype, like.device))


def _plan_prefix(prefix: Problem) -> Plan:
    """Kernels that split the keys are asked first: there is one sequence, and many keys."""
    if prefix.kernel == "auto":
        with contextlib.suppress(NoBackendError):
            return planner.choose(prefix.replace(kernel="decode"))
    return planner.choose(prefix)


def _make_ready(plan: Plan, problem: Problem) -> None:
    backend: Any = backends.load(plan.backend)
    if hasattr(backend, "make_ready"):
        backend.make_ready(plan, problem)


def _merge(prefix: Problem, own: Problem, least: int) -> None:
    """Merge the results of the prefix into those of the sequences' own keys."""
    parts, lses = _by_sequence(prefix, own)
    if own.q.device == HOST:
        lses.array[own.kv_start == 0] = -np.inf
        merge.merge_states([parts.array, own.out.array], [lses.array, own.lse.array], out=own.out.array, lse=own.lse.array)
        return
    with _addresses(own) as known:
        narrow = {name: getattr(own, name).dtype == np.int32 for name in known}
        shared = cuda_merge.Shared(known["kv_start"], narrow["kv_start"], known["kv_lengths"], narrow["kv_lengths"], least)
        cuda_merge.run([parts, own.out], [lses, own.lse], own.out, own.lse, ("brhc", "bhr"), shared)


def _by_sequence(prefix: Problem, own: Problem) -> tuple[ArrayView, ArrayView]:
    """Results of the prefix in the axis order of the sequences' own, (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
    b, rows, heads, d = own.out_shape
    out, lse = prefix.out, prefix.lse
    item = lse.dtype.itemsize
    return (
        arrays.strided(out, (b, rows, heads, d), (rows * out.strides[1], *out.strides[1:])),
        arrays.strided(lse, (b, heads, rows), (rows * item, b * rows * item, item)),
    )


@contextlib.contextmanager
def _addresses(problem: Problem) -> Iterator[dict[str, int]]:
    """Device addresses of kv_start and kv_lengths."""
    given = {name: getattr(problem, name) for name in ("kv_start", "kv_lengths")}
    with launch.uploaded({name: a for name, a in given.items() if not isinstance(a, ArrayView)}) as pointers:
        yield {**{name: a.pointer for name, a in given.items() if isinstance(a, ArrayView)}, **pointers}
