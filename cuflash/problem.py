"""Arguments -> Problem. Every argument error of the public API is raised here and in checks.py, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import arrays, checks
from .types import ArrayView, Gradients, Problem

# The options of attention(); the other public functions take a subset or add their own.
LAYOUTS = ("BSHD", "BHSD")
KERNELS = ("auto", "naive", "fa1", "fa2", "fa3", "decode")
BACKENDS = ("cuda", "numba-cuda", "cpu", "reference")


def build_attention(q: Any, k: Any, v: Any, *, layout: str = "BSHD", page_table: Any = None, **options: Any) -> Problem:
    """Problem of attention(): dense arrays of 4, 3 or 2 axes, or dense q over paged k and v."""
    checks.choice(layout, "layout", LAYOUTS)
    qv, kv, vv = checks.same_place_and_dtype(q=q, k=k, v=v)
    q4 = canonical(qv, layout, "q")
    paged = page_table is not None
    if paged:
        k4, v4 = canonical_pages(kv, layout, "k"), canonical_pages(vv, layout, "v")
    else:
        checks.same_rank(q=qv, k=kv, v=vv)
        k4, v4 = canonical(kv, layout, "k"), canonical(vv, layout, "v")
        if k4.shape[0] != q4.shape[0]:
            raise ValueError(f"k: batch {k4.shape[0]} differs from q's {q4.shape[0]} (shapes q {qv.shape}, k {kv.shape}, layout {layout})")
    batch, seqlen_q, heads_q, head_dim = q4.shape
    checks.heads_and_dims(q4, k4, v4, layout)
    problem = Problem(
        q=q4, k=k4, v=v4, batch=batch, heads_q=heads_q, heads_kv=k4.shape[-2], head_dim=head_dim, head_dim_v=v4.shape[-1],
        seqlen_q=seqlen_q, seqlen_k=k4.shape[1],
    )
    if paged:
        problem = with_page_table(problem, page_table)
    return with_options(problem, layout=layout, **options)


def build_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, layout: str = "BSHD", page_table: Any = None, **options: Any,
) -> Problem:
    """Problem of attention_varlen(): sequences packed along one axis, (total, H, D), or (H, total, D) for layout BHSD."""
    checks.choice(layout, "layout", LAYOUTS)
    qv, kv, vv = checks.same_place_and_dtype(q=q, k=k, v=v)
    q3 = canonical_packed(qv, layout, "q")
    paged = page_table is not None
    canon = canonical_pages if paged else canonical_packed
    k3, v3 = canon(kv, layout, "k"), canon(vv, layout, "v")
    checks.heads_and_dims(q3, k3, v3, layout)
    cu_q = checks.cu_seqlens(cu_seqlens_q, "cu_seqlens_q", q3.shape[0], "q")
    batch = cu_q.size - 1
    longest_q = checks.max_seqlen(max_seqlen_q, "max_seqlen_q", cu_q)
    cu_k = None
    if paged:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k: must be None with page_table; the key lengths of a paged cache are kv_lengths")
        longest_k = 0
    else:
        if cu_seqlens_k is None:
            raise ValueError("cu_seqlens_k: got None; it is required unless page_table is given")
        cu_k = checks.cu_seqlens(cu_seqlens_k, "cu_seqlens_k", k3.shape[0], "k")
        if cu_k.size != cu_q.size:
            raise ValueError(f"cu_seqlens_k: {cu_k.size} entries, but cu_seqlens_q has {cu_q.size}")
        longest_k = checks.max_seqlen(max_seqlen_k, "max_seqlen_k", cu_k)
    problem = Problem(
        q=q3, k=k3, v=v3, batch=batch, heads_q=q3.shape[1], heads_kv=k3.shape[-2], head_dim=q3.shape[2], head_dim_v=v3.shape[-1],
        seqlen_q=longest_q, seqlen_k=longest_k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
    )
    if paged:
        problem = with_page_table(problem, page_table)
    return with_options(problem, layout=layout, **options)


def build_decode(
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, *, page_table: Any = None, k_new: Any = None, v_new: Any = None,
    rope: Any = None, cache_batch_index: Any = None, layout: str = "BSHD", **options: Any,
) -> tuple[Problem, ArrayView | None, ArrayView | None]:
    """Problem of decode() over the cache as it will be after the append, and the canonical k_new, v_new to append first."""
    for name, value in (("rope", rope), ("cache_batch_index", cache_batch_index)):
        if value is not None:
            raise NotImplementedError(f"{name}: this option of decode() is not supported yet")
    if kv_lengths is None:
        raise TypeError("kv_lengths: got None; decode() needs the number of keys in the cache of each sequence")
    if (k_new is None) != (v_new is None):
        missing, given = ("k_new", "v_new") if k_new is None else ("v_new", "k_new")
        raise ValueError(f"{missing}: missing; {given} was given, and the two are appended together")
    if k_new is None:
        return build_attention(q, k_cache, v_cache, layout=layout, page_table=page_table, kv_lengths=kv_lengths, **options).replace(op="decode"), None, None

    qv, kc, vc, kn, vn = checks.same_place_and_dtype(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    checks.same_rank(q=qv, k_new=kn, v_new=vn)
    kn4, vn4 = canonical(kn, layout, "k_new"), canonical(vn, layout, "v_new")
    lengths = arrays.host_index(kv_lengths, "kv_lengths")
    # The capacity is checked before the problem is built, so that the message can speak of the append.
    canon = canonical if page_table is None else canonical_pages
    kc4, vc4 = canon(kc, layout, "k_cache"), canon(vc, layout, "v_cache")
    checks.new_keys(kn4, vn4, kc4, vc4, canonical(qv, layout, "q").shape[0])
    capacity = kc4.shape[1] if page_table is None else np.shape(page_table)[-1] * kc4.shape[1]
    checks.append_fits(lengths, kn4.shape[1], capacity)
    for name, cache in (("k_cache", kc4), ("v_cache", vc4)):
        checks.writeable(cache, name)
        for other_name, other in (("q", qv), ("k_new", kn), ("v_new", vn), ("v_cache" if name == "k_cache" else "k_cache", vc4 if name == "k_cache" else kc4)):
            if arrays.overlap(cache, other):
                raise ValueError(f"{name}: overlaps {other_name} in memory; the new keys and values are written to {name}")
    options["kv_lengths"] = lengths + kn4.shape[1]
    problem = build_attention(q, k_cache, v_cache, layout=layout, page_table=page_table, **options)
    if problem.paged:
        checks.pages_distinct(problem, lengths)
    return problem.replace(op="decode"), kn4, vn4


def build_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, deterministic: bool = False, varlen: tuple | None = None,
    layout: str = "BSHD", **options: Any,
) -> Problem:
    """Problem of attention_backward(), or of attention_varlen_backward() with ``varlen=(cu_q, cu_k, max_q, max_k)``."""
    if varlen is None:
        problem = build_attention(q, k, v, layout=layout, **options)
    else:
        cu_q, cu_k, max_q, max_k = varlen
        problem = build_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, layout=layout, **options)
    canon = canonical if varlen is None else canonical_packed
    lse_shape = problem.lse_shape if varlen is not None else user_lse_shape(problem, np.ndim(q))
    views = {}
    for name, array in (("dout", dout), ("out", out)):
        a = checks.array_like(array, name, problem.q)
        if a.array.ndim != np.ndim(q):
            raise ValueError(f"{name}: shape {a.shape} has {a.array.ndim} axes, but q has {np.ndim(q)}")
        a = canon(a, layout, name)
        if a.shape != problem.out_shape:
            raise ValueError(f"{name}: shape {a.shape} in axis order (batch, seqlen, heads, head size); it must be {problem.out_shape}")
        arrays.check_float_dtype(a.dtype, name)
        views[name] = a
    for name, array in (("lse", lse), ("dlse", dlse)):
        if array is None and name == "dlse":
            views[name] = None
            continue
        a = checks.array_like(array, name, problem.q)
        if a.shape != lse_shape or a.dtype != problem.compute_dtype:
            raise ValueError(f"{name}: {a.dtype}{list(a.shape)}; it must be {problem.compute_dtype}{list(lse_shape)}")
        views[name] = canonical_lse(a, problem)
    checks.flag(deterministic, "deterministic")
    return problem.replace(
        op="backward", out=views["out"], lse=views["lse"], dout=views["dout"], dlse=views["dlse"], deterministic=bool(deterministic),
    )


def with_page_table(problem: Problem, page_table: Any) -> Problem:
    """Add the page table of a paged cache; its used entries are checked once the lengths are known."""
    table = arrays.host_index(page_table, "page_table")
    if table.ndim != 2 or table.shape[0] != problem.batch:
        raise ValueError(f"page_table: shape {table.shape}; it must be (batch, max_pages) with batch {problem.batch}")
    page_size = problem.k.shape[1]
    if page_size < 1:
        raise ValueError(f"k: pages of {page_size} keys (shape {problem.k.shape}); the page size must be at least 1")
    return problem.replace(page_table=table, page_size=page_size, seqlen_k=table.shape[1] * page_size)


def with_options(
    problem: Problem, *, layout: str, causal: bool | str = False, window: Any = None, scale: Any = None, softcap: float | None = None,
    bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sinks: Any = None, score: str = "dot", score_mod: Any = None,
    mask_mod: Any = None, mod_args: Any = None, kv_lengths: Any = None, kv_start: Any = None, q_scale: Any = None, k_scale: Any = None,
    v_scale: Any = None, precision: str | None = None, num_splits: int | None = None, batch_invariant: bool = False, out_dtype: Any = None,
    kernel: str = "auto", backend: str | None = None, stream: Any = None,
) -> Problem:
    """Check every option that is not an array of the result and fold it into the problem."""
    for name, value in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None:
            raise NotImplementedError(f"{name}: scales belong to float8 arrays, which are not supported yet")
    checks.choice(score, "score", ("dot", "sqdist"))
    checks.choice(kernel, "kernel", KERNELS)
    if backend is not None:
        checks.choice(backend, "backend", BACKENDS)
    checks.backend_takes(backend, problem.q)
    if precision is not None:
        checks.choice(precision, "precision", ("tf32",))
    if stream is not None and problem.q.device == arrays.HOST:
        raise TypeError("stream: the arrays are in host memory, where there are no streams; allowed is None")
    if num_splits is not None:
        num_splits = checks.integer(num_splits, "num_splits", low=1)
    checks.flag(batch_invariant, "batch_invariant")
    is_causal, align = checks.causal(causal)
    problem = problem.replace(
        causal=is_causal, align=align, window=checks.window(window, is_causal), score=score,
        scale=checks.scale(scale, score, problem.head_dim), softcap=checks.softcap(softcap),
        score_mod=checks.modifier(score_mod, "score_mod"), mask_mod=checks.modifier(mask_mod, "mask_mod"),
        mod_args=checks.mod_args(mod_args, score_mod, mask_mod), alibi_slopes=checks.alibi(alibi_slopes, problem),
        sinks=checks.sinks(sinks, problem.heads_q), precision=precision, num_splits=num_splits, batch_invariant=bool(batch_invariant),
        out_dtype=checks.out_dtype(out_dtype, problem.q.dtype), kernel=kernel, backend=backend, stream=stream,
    )
    problem = with_lengths(problem, kv_lengths, kv_start)
    if bias is not None:
        view, shape = checks.bias(bias, problem)
        problem = problem.replace(bias=view, bias_shape=shape)
    if mask is not None:
        view, is_tail = checks.mask(mask, problem)
        problem = problem.replace(mask=view, mask_is_tail=is_tail)
    return problem


def with_lengths(problem: Problem, kv_lengths: Any, kv_start: Any) -> Problem:
    """Check kv_lengths, kv_start and the page table entries that they make used."""
    if problem.cu_seqlens_k is not None:
        limit, what = np.diff(problem.cu_seqlens_k), "the sequence's keys"
    else:
        what = "the capacity of its page table row" if problem.paged else "the keys of k"
        limit = np.full(problem.batch, problem.seqlen_k)
    if kv_lengths is not None:
        kv_lengths = checks.per_sequence(kv_lengths, "kv_lengths", problem.batch, limit, what)
    elif problem.paged:
        raise ValueError("kv_lengths: required with page_table; it says how many keys of each sequence exist")
    if kv_start is not None:
        upper = limit if kv_lengths is None else kv_lengths
        kv_start = checks.per_sequence(kv_start, "kv_start", problem.batch, upper, "the keys of the sequence")
    problem = problem.replace(kv_lengths=kv_lengths, kv_start=kv_start)
    if problem.paged:
        checks.used_pages(problem)
    return problem


def with_outputs(problem: Problem, out: Any, lse: Any, return_lse: bool, layout: str, ndim: int) -> tuple[Problem, Any, Any]:
    """Check or allocate the results; returns the problem and the arrays to hand back, in the user's shape.

    ``ndim`` is the number of axes of the user's q.
    """
    checks.flag(return_lse, "return_lse")
    out_shape = user_out_shape(problem, layout, ndim)
    lse_shape = problem.lse_shape if problem.varlen else user_lse_shape(problem, ndim)
    if out is None:
        out = arrays.empty(out_shape, problem.out_dtype, problem.q)
        out_view = arrays.view(out, "out")
    else:
        out_view = checks.output(out, "out", out_shape, problem.out_dtype, problem)
    canon = canonical_packed if problem.varlen else canonical
    problem = problem.replace(out=canon(out_view, layout, "out"))
    if lse is None and return_lse:
        lse = arrays.empty(lse_shape, problem.compute_dtype, problem.q)
        problem = problem.replace(lse=canonical_lse(arrays.view(lse, "lse"), problem))
    elif lse is not None:
        lse_view = checks.output(lse, "lse", lse_shape, problem.compute_dtype, problem)
        if arrays.overlap(lse_view, out_view):
            raise ValueError("lse: overlaps out in memory")
        problem = problem.replace(lse=canonical_lse(lse_view, problem))
    return problem, out, lse


def with_arrays(problem: Problem, q: Any, k: Any, v: Any, layout: str, ndim: int, stream: Any) -> Problem:
    """The same problem on other arrays of the same signature (Plan.run)."""
    fresh: dict[str, ArrayView] = {}
    for name, array, planned in (("q", q, problem.q), ("k", k, problem.k), ("v", v, problem.v)):
        a = arrays.view(array, name)
        if len(a.shape) != (ndim if name == "q" or not problem.paged else 4):
            raise ValueError(f"{name}: shape {a.shape}; this plan was made for arrays of {ndim} axes")
        a = canonical_pages(a, layout, name) if problem.paged and name != "q" else canonical(a, layout, name)
        if a.layout_key != planned.layout_key:
            raise ValueError(
                f"{name}: shape {a.shape}, strides {a.strides}, {a.dtype}, {arrays.where(a)}; this plan was made for "
                f"shape {planned.shape}, strides {planned.strides}, {planned.dtype}, {arrays.where(planned)}"
            )
        fresh[name] = a
    if stream is not None and problem.q.device == arrays.HOST:
        raise TypeError("stream: the arrays are in host memory, where there are no streams; allowed is None")
    return problem.replace(stream=stream if stream is not None else problem.stream, **fresh)


def user_gradients(g: Gradients, problem: Problem, layout: str, ndim: int) -> Gradients:
    """Gradients of canonical axis order, as the user's q, k and v have it."""

    def user(x: Any, paged: bool) -> Any:
        if problem.varlen and not paged:
            return x if layout == "BSHD" else x.transpose(1, 0, 2)
        if ndim == 2 and not paged:
            return x[0, :, 0]
        if layout == "BHSD":
            x = x.transpose(0, 2, 1, 3)
        return x if paged or ndim == 4 else x[0]

    return Gradients(user(g.dq, False), user(g.dk, problem.paged), user(g.dv, problem.paged), g.dbias, g.dsinks)


def canonical(a: ArrayView, layout: str, name: str) -> ArrayView:
    """A dense array in axis order (B, S, H, D), with axes of length 1 where the user has fewer."""
    ndim = len(a.shape)
    if ndim == 2:
        return arrays.expand(arrays.expand(a, 0), 2)
    if ndim == 3:
        a, ndim = arrays.expand(a, 0), 4
    if ndim != 4:
        forms = "(B, S, H, D), (S, H, D)" if layout == "BSHD" else "(B, H, S, D), (H, S, D)"
        raise ValueError(f"{name}: shape {a.shape} has {ndim} axes; allowed are {forms} or (S, D) for layout {layout}")
    return a if layout == "BSHD" else arrays.transpose(a, (0, 2, 1, 3))


def canonical_packed(a: ArrayView, layout: str, name: str) -> ArrayView:
    """A varlen array in axis order (total, H, D)."""
    if len(a.shape) != 3:
        form = "(total, H, D)" if layout == "BSHD" else "(H, total, D)"
        raise ValueError(f"{name}: shape {a.shape} has {len(a.shape)} axes; it must be {form} for layout {layout}")
    return a if layout == "BSHD" else arrays.transpose(a, (1, 0, 2))


def canonical_pages(a: ArrayView, layout: str, name: str) -> ArrayView:
    """A paged cache in axis order (pages, page_size, H, D)."""
    if len(a.shape) != 4:
        form = "(pages, page_size, H, D)" if layout == "BSHD" else "(pages, H, page_size, D)"
        raise ValueError(f"{name}: shape {a.shape} has {len(a.shape)} axes; with page_table it must be {form} for layout {layout}")
    return a if layout == "BSHD" else arrays.transpose(a, (0, 2, 1, 3))


def canonical_lse(a: ArrayView, problem: Problem) -> ArrayView:
    """A log-sum-exp array in axis order (B, H, S), or (H, total_q) for varlen."""
    while len(a.shape) < len(problem.lse_shape):
        a = arrays.expand(a, 0)
    return a


def user_out_shape(problem: Problem, layout: str, ndim: int) -> tuple[int, ...]:
    """Shape of ``out`` in the layout and number of axes that q came in."""
    shape = problem.out_shape
    if problem.varlen:
        return shape if layout == "BSHD" else (shape[1], shape[0], shape[2])
    b, s, h, d = shape
    full = (b, s, h, d) if layout == "BSHD" else (b, h, s, d)
    return {4: full, 3: full[1:], 2: (s, d)}[ndim]


def user_lse_shape(problem: Problem, ndim: int) -> tuple[int, ...]:
    """Shape of ``lse`` for the number of axes that q came in."""
    return problem.lse_shape[4 - ndim:]


