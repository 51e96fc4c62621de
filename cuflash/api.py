"""attention(), its packed form and its plan: docstrings and the order of the steps, no arithmetic."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arrays, checks, device, edges, host, launch, planner, structs, warm, warm_decode
from . import problem as problems
from .types import HOST, Plan, Problem


def attention(
    q: Any, k: Any, v: Any, *, causal: bool | str = False, window: tuple[int, int] | None = None, scale: Any = None,
    softcap: float | None = None, bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sinks: Any = None,
    score: str = "dot", score_mod: Callable | str | None = None, mask_mod: Callable | str | None = None,
    mod_args: dict[str, Any] | None = None, kv_lengths: Any = None, kv_start: Any = None, page_table: Any = None,
    q_scale: Any = None, k_scale: Any = None, v_scale: Any = None, precision: str | None = None, num_splits: int | None = None,
    batch_invariant: bool = False, out_dtype: Any = None, layout: str = "BSHD", kernel: str = "auto",
    backend: str | None = None, out: Any = None, lse: Any = None, return_lse: bool = False, stream: Any = None,
) -> Any:
    """Exact attention: softmax(scale * q k^T + bias) v, in tiles, never storing the score matrix.

    Parameters
    ----------
    q : ndarray, shape (B, Sq, Hq, D), (Sq, Hq, D) or (Sq, D)
        Queries; float16, bfloat16 (ml_dtypes), float32 or float64, any strides. With ``layout="BHSD"``: (B, Hq, Sq, D), ...
        An array of NumPy or CuPy, or of another library (PyTorch, JAX, DLPack, ``__cuda_array_interface__``: docs/arrays.md).
    k : ndarray, shape (B, Sk, Hkv, D) or with as many axes as q; paged: (pages, page_size, Hkv, D)
        Keys, of q's dtype and library. Hq must be a whole multiple of Hkv (grouped-query attention). Keys and values may both be
        float8_e4m3fn (ml_dtypes; in CuPy a uint8 array seen by ``.view``) under q of another dtype: see ``k_scale``.
    v : ndarray, shape (B, Sk, Hkv, Dv); paged: (pages, page_size, Hkv, Dv)
        Values; Dv may differ from D.
    causal : bool or {"bottom_right", "upper_left"}, default False
        Query row r sits at position i = r + kv_length - Sq (bottom right, also for True) or i = r (upper left), and sees
        keys j <= i.
    window : (int, int), optional
        (left, right), inclusive: keys i - left <= j <= i + right; -1 is unbounded.
    scale : float, optional
        Softmax scale, default 1/sqrt(D); for ``score="sqdist"`` default 1, and an array (D,) is allowed.
    softcap : float, optional
        Logits become softcap * tanh(logit / softcap).
    bias : ndarray, optional
        Added to the logits; float32 or q's dtype, broadcast to (B, Hq, Sq, Sk); -inf hides a key.
    mask : ndarray of bool, optional
        True = visible, broadcast to (B, Hq, Sq, Sk). One with Sq (not Sk) columns covers the last Sq keys; earlier ones are
        visible (tree attention).
    alibi_slopes : array_like, shape (Hq,) or (B, Hq), optional
        Adds -slope * abs(i - j); see `alibi_slopes`.
    sinks : array_like, shape (Hq,), optional
        One extra logit a head (natural, unscaled) that takes weight and has no value; counted in the log-sum-exp.
    score : {"dot", "sqdist"}
        "sqdist": logits -scale * sum((q - k)**2), by subtracting first, so that near points keep their digits.
    score_mod, mask_mod : callable or str, optional
        ``score_mod(s, b, h, i, j, **mod_args)`` returns changed logits, ``mask_mod(b, h, i, j, **mod_args)`` what is visible.
        On NumPy arrays both are called on tiles: s (rows, keys), ints b and h, positions i (rows, 1) and j (1, keys).
        A str is a CUDA expression, which no backend of this version runs.
    mod_args : dict, optional
        Further keyword arguments for the two.
    kv_lengths : array_like of int, shape (B,), optional
        Keys that exist in each sequence, at most Sk. Beside arrays on a GPU it may be there as well, as int32 or int64: it is then
        never read back but clamped by the kernel, so that a CUDA graph follows it. CUFLASH_CHECK=1 reads it and checks it.
    kv_start : array_like of int, shape (B,), optional
        Keys before this one are padding (left padding). Positions do not change. On a GPU as kv_lengths.
    page_table : array_like of int, shape (B, max_pages), optional
        k and v are pages; key j of sequence b is row j % page_size of page page_table[b, j // page_size]. Needs kv_lengths. On a GPU
        as kv_lengths, in int32: rows that see a key of a page that there is not become NaN.
    q_scale : not supported yet (scales of float8 queries)
    k_scale, v_scale : float, array_like (Hkv,), or ndarray (B, Sk, Hkv), optional
        What keys and values in float8_e4m3fn are multiplied by: one number, one a head, or float32 for each token and head, in k's shape
        without the head size ((pages, page_size, Hkv), or heads first with ``layout="BHSD"``). `quantize_kv` makes them. Default 1. Those
        of tokens lie where q does, the others anywhere; of keys that are visible they must be finite.
    precision : {None, "tf32"}
        "tf32" permits a GPU to multiply float32 in TF32; it changes nothing elsewhere.
    num_splits : int, optional
        Number of parts that the keys are split into (Flash-Decoding); chosen by cuflash when None.
    batch_invariant : bool, default False
        A sequence's result is the same bit for bit whatever else is in the batch.
    out_dtype : dtype, optional
        Default q's.
    layout : {"BSHD", "BHSD"}
        Axis order of q, k, v, out and of caches.
    kernel : {"auto", "naive", "fa1", "fa2", "fa3", "decode"}
        The algorithm; "auto" takes the best that the backend has for the call. "fa3" is for GPUs of compute capability 9.0.
    backend : {None, "cuda", "numba-cuda", "cpu", "reference"}
        The engine; None picks the first that can, where the arrays are.
    out, lse : ndarray, optional
        Buffers for the results, exact shape and dtype, any strides, sharing no element with an input.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits, natural logarithm.
    stream : optional
        For arrays on a GPU: a stream of CuPy or PyTorch, a pointer, or anything with ``__cuda_stream__``. By default CuPy's current
        one; for tensors of PyTorch that of PyTorch.

    Returns
    -------
    out : ndarray
        Shape of q with head size Dv, of q's library. Rows that see no key are 0.
    lse : ndarray, shape (B, Hq, Sq), (Hq, Sq) or (Sq,)
        Only with ``return_lse``; float32, or float64 for float64 inputs; -inf for rows that see no key.

    Raises
    ------
    TypeError
        A kind of array, dtype or type of argument that is not allowed; arrays of several libraries.
    ValueError
        Shapes, values or devices that do not fit.
    NotImplementedError
        An option that cuflash does not have yet.
    NoBackendError
        Every backend declines; the message lists why.

    References
    ----------
    Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", arXiv:2205.14135.
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", arXiv:2307.08691.
    Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", arXiv:2407.08608.
    Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 8, 2, 16), np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (1, 8, 2, 16)
    """
    if edges.of(q) is not None:
        return edges.call(attention, locals())
    key = signed = None
    plain = (
        bias is None and mask is None and alibi_slopes is None and sinks is None and score_mod is None and mask_mod is None
        and mod_args is None and q_scale is None
    )
    scaled = k_scale is not None or v_scale is not None
    if plain and (page_table is not None or scaled or not (kv_lengths is None or arrays.on_device(kv_lengths))):
        signed = warm_decode.signature(
            q, k, v, kv_lengths, page_table, layout,
            {
                "causal": causal, "window": window, "scale": scale, "softcap": softcap, "score": score, "precision": precision,
                "num_splits": num_splits, "batch_invariant": batch_invariant, "out_dtype": out_dtype, "kernel": kernel,
                "backend": backend, "kv_start": kv_start, "k_scale": k_scale, "v_scale": v_scale,
            },
            op="attention",
        )
        results = warm_decode.run(signed, out, lse, return_lse, stream)
        if results is not None:
            return results
    elif plain:
        key = warm.key(
            q, k, v, causal, window, scale, softcap, score, precision, num_splits, batch_invariant, out_dtype, layout, kernel, backend,
        )
        indices: tuple[int, ...] = ()
        if kv_lengths is not None or kv_start is not None:
            key, indices = warm.with_lengths(key, None, None, kv_lengths, kv_start)
        if key is not None:
            results = warm.attention(key, q, k, v, out, lse, return_lse, stream, indices)
            if results is not None:
                return results
            problem = warm.problem(key, q, k, v, layout, stream)
            if problem is not None:
                return _execute(problem, out, lse, return_lse, layout, np.ndim(q), key)
    problem = problems.build_attention(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask, alibi_slopes=alibi_slopes,
        sinks=sinks, score=score, score_mod=score_mod, mask_mod=mask_mod, mod_args=mod_args, kv_lengths=kv_lengths,
        kv_start=kv_start, page_table=page_table, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, precision=precision,
        num_splits=num_splits, batch_invariant=batch_invariant, out_dtype=out_dtype, layout=layout, kernel=kernel,
        backend=backend, stream=stream,
    )
    if kv_lengths is None and kv_start is None:
        warm.keep_problem(key, problem)
    return _execute(problem, out, lse, return_lse, layout, np.ndim(q), key, signed)


def takes_options(function: Callable) -> Callable:
    """Let ``**options`` of a public function be the options of `attention`, in its signature and in its error message.

    And let it take the arrays that `attention` takes.
    """
    own = inspect.signature(function)
    names = [n for n, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD]
    place_of_q = names.index("q")
    excluded = {*names, "out", "lse", "return_lse"}
    options = {n: p for n, p in inspect.signature(attention).parameters.items() if p.kind is p.KEYWORD_ONLY and n not in excluded}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in options and name not in names:
                raise TypeError(f"{function.__name__}() has no option {name!r}; allowed are {', '.join([*names, *options])}")
        q = args[place_of_q] if len(args) > place_of_q else kwargs.get("q")
        if edges.of(q) is not None:
            given = own.bind(*args, **kwargs).arguments
            return edges.call(function, given | given.pop("options", {}))
        return function(*args, **kwargs)

    shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    checked.__signature__ = own.replace(parameters=[*shown, *options.values()])  # type: ignore[attr-defined]
    return checked


@takes_options
def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, out: Any = None, lse: Any = None, return_lse: bool = False, layout: str = "BSHD",
    **options: Any,
) -> Any:
    """Exact attention over sequences of different lengths, packed along one axis.

    Parameters
    ----------
    q : ndarray, shape (total_q, Hq, D); layout "BHSD": (Hq, total_q, D)
    k, v : ndarray, shape (total_k, Hkv, D) and (total_k, Hkv, Dv), or pages with ``page_table``
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (B + 1,)
        Sequence b has rows cu[b] to cu[b + 1]. From 0, never falling; rows behind the last entry give O = 0, LSE = -inf.
        ``cu_seqlens_k`` is None with ``page_table``. On a GPU as kv_lengths of `attention`.
    max_seqlen_q, max_seqlen_k : int, optional
        At least the longest sequence; found from cu_seqlens when None. Of arrays on a GPU it cannot be found: a kernel that needs
        none then runs, a little slower; and rows beyond a ``max_seqlen_q`` that is too small may be left at O = 0, LSE = -inf.
        bias and mask broadcast to (B, Hq, max_seqlen_q, max_seqlen_k), with indices counted within each sequence.
    **options
        As for `attention`.

    Returns
    -------
    out : ndarray, shape (total_q, Hq, Dv)
    lse : ndarray, shape (Hq, total_q)
        Only with ``return_lse``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`; ValueError also for cu_seqlens that do not start at 0, fall, or end beyond the array.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((7, 2, 16), np.float32)  # sequences of 3 and 4 tokens, one behind the other
    >>> cuflash.attention_varlen(q, k, v, [0, 3, 7], [0, 3, 7], causal=True).shape
    (7, 2, 16)
    """
    key, indices = warm.varlen_key(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, layout, options)
    if key is not None:
        results = warm.attention(key, q, k, v, out, lse, return_lse, options.get("stream"), indices)
        if results is not None:
            return results
    problem = problems.build_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, layout=layout, **options,
    )
    return _execute(problem, out, lse, return_lse, layout, np.ndim(q), key)


@takes_options
def attention_streamed(q: Any, k: Any, v: Any, *, device: int = 0, workspace_limit: int | None = None, **options: Any) -> Any:
    """Attention over host arrays that are larger than a GPU's memory. Not supported yet.

    Raises
    ------
    NotImplementedError
    """
    raise NotImplementedError("attention_streamed: not supported yet; on host arrays attention() already needs only O(N) memory")


@takes_options
def plan(q: Any, k: Any, v: Any, *, return_lse: bool = False, layout: str = "BSHD", **options: Any) -> Plan:
    """Make all checks and choices of an `attention` call once, for hot loops.

    Parameters
    ----------
    q, k, v : ndarray
        Arrays of the shapes, strides, dtypes and place that ``Plan.run`` will get. Their values do not matter.
    return_lse : bool, default False
        Whether ``run`` returns (out, lse).
    **options
        As for `attention`. Small host arrays among them (kv_lengths, page_table, slopes, sinks) are copied now; bias, mask and
        lengths on a device are referred to.

    Returns
    -------
    Plan
        Immutable and thread-safe; printing it shows the kernel, the tile, the splits and why.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`. ``Plan.run`` raises ValueError for arrays of another signature.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((1, 8, 2, 16), np.float32)
    >>> p = cuflash.plan(q, k, v, causal=True)
    >>> p.run(q, k, v).shape
    (1, 8, 2, 16)
    """
    checks.flag(return_lse, "return_lse")
    problem = problems.build_attention(q, k, v, layout=layout, **options)
    ndim, planned_stream = np.ndim(q), problem.stream
    chosen = planner.choose(problem)
    q, k, v = (arrays.signature(a) for a in (problem.q, problem.k, problem.v))
    problem = problem.replace(q=q, k=k, v=v, stream=None)
    indices = structs.index_addresses(problem)
    launches = None if problem.q.device == HOST else warm.Kept(64)
    latest: warm.Again | None = None

    def run(self: Plan, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None, stream: Any = None) -> Any:
        nonlocal latest
        if stream is None:
            stream = planned_stream
        if indices and host.checks() and edges.of(q) is None:  # the numbers on the device may be others than when this plan was made
            problems.build_attention(q, k, v, layout=layout, **options)
        again = latest
        if again is not None and stream is lse is None and again.run(q, k, v, out):
            return out
        key = None
        if launches is not None:
            key = (arrays.keys(q, k, v), warm.results_key(out, lse, return_lse))
            found = launches.get(key)
            if found is not None and device.pretended() is None:
                results = found.run(q, k, v, out, lse, stream, indices)
                if results is not None:
                    if out is not None and lse is None and not return_lse:
                        latest = warm.Again(found, q, k, v, out, indices)
                    return results
        if edges.of(q) is not None:
            given = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "stream": stream}
            return edges.call(functools.partial(run, self), given, name="run")
        fresh = problems.with_arrays(problem, q, k, v, layout, ndim, stream)
        with launch.place(fresh.q.device, fresh.stream):
            fresh, out, lse = problems.with_outputs(fresh, out, lse, return_lse, layout, ndim)
            prepared = None if launches is None else warm.prepare(launches, key, self, fresh, out, lse, return_lse)
            warm.execute(self, fresh, prepared)
        return (out, lse) if return_lse else out

    return chosen.bind(run)


def _execute(
    problem: Problem, out: Any, lse: Any, return_lse: bool, layout: str, ndim: int, key: tuple | None = None,
    signed: warm_decode.Signed | None = None,
) -> Any:
    """Results, plan, run; and the launch kept for further calls of the same signature ``key``, or ``signed``, if there is one."""
    results, given = warm.results_key(out, lse, return_lse), (out, lse)
    with launch.place(problem.q.device, problem.stream):
        problem, out, lse = problems.with_outputs(problem, out, lse, return_lse, layout, ndim)
        chosen = planner.choose(problem)
        prepared = None
        if key is not None and problem.q.device != HOST:
            prepared = warm.prepare(warm.launches, (key, results), chosen, problem, out, lse, return_lse)
        warm_decode.keep(signed, chosen, problem, None, problem, (out, lse, return_lse), given)
        warm.execute(chosen, problem, prepared)
    return (out, lse) if return_lse else out

