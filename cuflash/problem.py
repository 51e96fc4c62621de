"""Arguments -> Problem. Every argument error of the API is raised here, in options.py or in checks.py, before anything runs."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from . import arrays, checks, indices
from . import options as opts
from .types import LAYOUTS, Append, ArrayView, Gradients, Problem

KERNELS = ("auto", "naive", "fa1", "fa2", "fa3", "decode")
BACKENDS = ("cuda", "numba-cuda", "cpu", "reference")
MOST_SPLITS = 2**31 - 1  # more than keys of any sequence


def build_attention(q: Any, k: Any, v: Any, *, layout: str = "BSHD", page_table: Any = None, **options: Any) -> Problem:
    """Problem of attention(): dense arrays of 4, 3 or 2 axes, or dense q over paged k and v."""
    checks.choice(layout, "layout", LAYOUTS)
    named = checks.queries_keys_values(q=q, k=k, v=v)
    return with_options(dense("attention", named, layout, page_table), layout=layout, **options)


def dense(op: Literal["attention", "decode"], named: dict[str, ArrayView], layout: str, page_table: Any) -> Problem:
    """Arrays and sizes of a call on dense q and dense or paged keys and values, under the user's names for the three."""
    q_name, k_name, v_name = named
    canon = canonical_pages
    q = canonical(named[q_name], layout, q_name)
    if page_table is None:
        checks.same_rank(**named)
        canon = canonical
    k, v = canon(named[k_name], layout, k_name), canon(named[v_name], layout, v_name)
    checks.heads_and_dims({q_name: q, k_name: k, v_name: v}, layout)
    if page_table is None and k.shape[0] != q.shape[0]:
        shapes = f"shapes {q_name} {named[q_name].shape}, {k_name} {named[k_name].shape}, layout={layout!r}"
        raise ValueError(f"{k_name}: batch {k.shape[0]} differs from {q_name}'s {q.shape[0]} ({shapes})")
    keys = {"seqlen_k": k.shape[1]} if page_table is None else pages(page_table, q.shape[0], k.shape[1], q)
    return Problem(
        q=q, k=k, v=v, batch=q.shape[0], heads_q=q.shape[2], heads_kv=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3],
        seqlen_q=q.shape[1], op=op, **keys,
    )


def build_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, layout: str = "BSHD", page_table: Any = None, **options: Any,
) -> Problem:
    """Problem of attention_varlen(): sequences packed along one axis, (total, H, D), or (H, total, D) for layout BHSD."""
    checks.choice(layout, "layout", LAYOUTS)
    named = checks.queries_keys_values(q=q, k=k, v=v)
    canon = canonical_packed if page_table is None else canonical_pages
    q3, k3, v3 = canonical_packed(named["q"], layout, "q"), canon(named["k"], layout, "k"), canon(named["v"], layout, "v")
    checks.heads_and_dims({"q": q3, "k": k3, "v": v3}, layout)
    cu_q = indices.cu_seqlens(cu_seqlens_q, "cu_seqlens_q", q3.shape[0], "q", q3)
    problem = Problem(
        q=q3, k=k3, v=v3, batch=cu_q.shape[0] - 1, heads_q=q3.shape[1], heads_kv=k3.shape[-2], head_dim=q3.shape[2],
        head_dim_v=v3.shape[-1], seqlen_q=indices.max_seqlen(max_seqlen_q, "max_seqlen_q", cu_q, q3.shape[0]), cu_seqlens_q=cu_q,
    )
    if page_table is not None:
        for name, value in (("cu_seqlens_k", cu_seqlens_k), ("max_seqlen_k", max_seqlen_k)):
            if value is not None:
                raise ValueError(f"{name}: must be None with page_table; the key lengths of a paged cache are kv_lengths")
        return with_options(problem.replace(**pages(page_table, problem.batch, k3.shape[1], q3)), layout=layout, **options)
    cu_k = indices.cu_seqlens(cu_seqlens_k, "cu_seqlens_k", k3.shape[0], "k", q3)
    if cu_k.shape != cu_q.shape:
        raise ValueError(f"cu_seqlens_k: {cu_k.shape[0]} entries, but cu_seqlens_q has {cu_q.shape[0]}; both must be (batch + 1,)")
    longest = indices.max_seqlen(max_seqlen_k, "max_seqlen_k", cu_k, k3.shape[0])
    return with_options(problem.replace(cu_seqlens_k=cu_k, seqlen_k=longest), layout=layout, **options)


def build_decode(
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, *, page_table: Any = None, k_new: Any = None, v_new: Any = None,
    rope: Any = None, cache_batch_index: Any = None, layout: str = "BSHD", **options: Any,
) -> tuple[Problem, Append | None]:
    """Problem of decode() over the cache as it will be after the append; and what is to be done before, if anything.

    Lengths on a device are those before the append: the device itself will add the new keys.
    """
    if (k_new is None) != (v_new is None):
        missing, given = ("k_new", "v_new") if k_new is None else ("v_new", "k_new")
        raise ValueError(f"{missing}: missing; {given} was given, and the two are appended together")
    checks.choice(layout, "layout", LAYOUTS)
    new = {} if k_new is None else {"k_new": k_new, "v_new": v_new}
    named = checks.queries_keys_values(q=q, k_cache=k_cache, v_cache=v_cache, **new)
    if cache_batch_index is not None:
        if page_table is not None:
            raise ValueError("cache_batch_index: must be None with page_table, which has a row for each sequence: pass page_table[index]")
        page_table = whole_caches(cache_batch_index, named, bool(new))
    problem = dense("decode", {name: named[name] for name in ("q", "k_cache", "v_cache")}, layout, page_table)
    lengths = decode_lengths(kv_lengths, problem)
    turned = opts.rope(rope, problem)
    if not new:
        problem = with_options(problem, kv_lengths=lengths, layout=layout, **options)
        append = None if turned is None else Append(lengths, rope=turned)
        if append is not None:
            indices.append(problem, append)
        return problem, append
    checks.same_rank(**{name: named[name] for name in ("q", "k_new", "v_new")})
    quantizes = problem.e4m3 and named["k_new"].dtype == problem.q.dtype
    append = Append(lengths, *(canonical(named[name], layout, name) for name in new), rope=turned, quantizes=quantizes)
    count = checks.new_keys(append.k_new, append.v_new, problem)
    if problem.e4m3 and turned is not None and not quantizes:
        raise TypeError(f"rope: turns k_new, which is {problem.k.dtype}; that must be {problem.q.dtype} (q's), to be quantized afterwards")
    problem = with_options(problem, kv_lengths=indices.lengths_after(lengths, count, problem), layout=layout, **options)
    checks.caches_can_be_written(problem, append.inputs, quantizes)
    indices.append(problem, append)
    return problem, append


def whole_caches(index: Any, named: dict[str, ArrayView], writes: bool) -> Any:
    """cache_batch_index as a page table: each entry of the caches' batch is a page, and each sequence has one."""
    for name in ("k_cache", "v_cache"):
        if len(named[name].shape) != 4 or 0 in named[name].shape[1:3]:
            came = f"shape {named[name].shape}"
            raise ValueError(f"{name}: {came}; with cache_batch_index it must have 4 axes, and room for a key")
    q = named["q"]
    if len(q.shape) != 4:
        raise ValueError(f"q: shape {q.shape}; with cache_batch_index it must have 4 axes")
    entries = indices.page_table(index, "cache_batch_index", q.shape[0], q, axes=1)
    found = indices.numbers(entries)
    if found is not None:
        checks.distinct_entries(found[0], named["k_cache"].shape[0], writes)
    return index[:, None] if isinstance(entries, ArrayView) else entries[:, None]


def decode_again(
    known: Problem, q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, k_new: Any, v_new: Any, layout: str, stream: Any,
) -> tuple[Problem, Append | None]:
    """As `build_decode`, from a problem on arrays and options of the same signature: what is left to check are values."""
    named = {"q": (q, "q"), "k": (k_cache, "k_cache"), "v": (v_cache, "v_cache")}
    fresh = {field: canonical(arrays.view(a, name), layout, name) for field, (a, name) in named.items()}
    lengths = decode_lengths(kv_lengths, known)
    if k_new is None:
        return known.replace(**fresh, kv_lengths=lengths, stream=stream), None
    new = (canonical(arrays.view(a, name), layout, name) for name, a in (("k_new", k_new), ("v_new", v_new)))
    append = Append(lengths, *new, quantizes=known.e4m3 and k_new.dtype == known.q.dtype)
    problem = known.replace(**fresh, kv_lengths=indices.lengths_after(lengths, append.count, known), stream=stream)
    checks.caches_can_be_written(problem, append.inputs, append.quantizes)
    return problem, append


def decode_lengths(kv_lengths: Any, problem: Problem) -> Any:
    """Checked kv_lengths of decode(): what is in the cache, before new keys."""
    if kv_lengths is None:
        raise TypeError("kv_lengths: got None; decode() needs the number of keys that each sequence has in the cache")
    return indices.per_sequence(kv_lengths, "kv_lengths", problem, *indices.capacity(problem))


def build_weights(
    q: Any, k: Any, *, reduce: str | None = None, layout: str = "BSHD", out_dtype: Any = None, **options: Any
) -> Problem:
    """Problem of attention_weights(). Its results are in the compute dtype unless the user says otherwise, as the LSE is."""
    if reduce is not None:
        checks.choice(reduce, "reduce", ("head_mean",))
    problem = build_attention(q, k, no_values(k), layout=layout, out_dtype=out_dtype, **options)
    dtype = problem.compute_dtype if out_dtype is None else problem.out_dtype
    return problem.replace(op="weights", reduce=reduce, out_dtype=dtype)


def no_values(k: Any) -> Any:
    """Values of head size 1 for functions of the scores alone, in the memory of one element."""
    key = arrays.view(k, "k")
    return arrays.zeros((*key.shape[:-1], 1), key).array


def build_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, deterministic: bool = False,
    varlen: tuple | None = None, layout: str = "BSHD", **options: Any,
) -> Problem:
    """Problem of attention_backward(), or of attention_varlen_backward() with ``varlen=(cu_q, cu_k, max_q, max_k)``."""
    if varlen is None:
        problem = build_attention(q, k, v, layout=layout, **options)
    else:
        cu_q, cu_k, max_q, max_k = varlen
        problem = build_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, layout=layout, **options)
    if problem.e4m3:
        raise TypeError(f"k: dtype {problem.k.dtype}; gradients are of floating arrays, it must be {problem.q.dtype} (q's)")
    checks.flag(deterministic, "deterministic")
    ndim = np.ndim(q)
    given = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    views = {name: checks.array_like(x, name, problem.q) for name, x in given.items() if x is not None or name != "dlse"}
    out_shape, lse_shape = user_out_shape(problem, layout, ndim), user_lse_shape(problem, ndim)
    for name, a in views.items():
        checks.shape(a, name, out_shape if name in ("dout", "out") else lse_shape)
        if name in ("dout", "out"):
            arrays.check_float_dtype(a.dtype, name)
            views[name] = canonical_out(a, layout, problem)
        else:
            checks.dtype(a, name, problem.compute_dtype)
            views[name] = canonical_lse(a, problem)
    return problem.replace(op="backward", deterministic=bool(deterministic), **views)


def pages(page_table: Any, batch: int, page_size: int, q: ArrayView) -> dict[str, Any]:
    """The fields of a problem on a paged cache; the table's used entries are checked once the lengths are known."""
    table = indices.page_table(page_table, "page_table", batch, q)
    return {"page_table": table, "page_size": page_size, "seqlen_k": table.shape[1] * page_size}


def with_options(
    problem: Problem, *, causal: bool | str = False, window: Any = None, scale: Any = None, softcap: float | None = None,
    bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sinks: Any = None, score: str = "dot", score_mod: Any = None,
    mask_mod: Any = None, mod_args: Any = None, kv_lengths: Any = None, kv_start: Any = None, q_scale: Any = None,
    k_scale: Any = None, v_scale: Any = None, precision: str | None = None, num_splits: int | None = None,
    batch_invariant: bool = False, out_dtype: Any = None, kernel: str = "auto", backend: str | None = None, stream: Any = None,
    layout: str = "BSHD",
) -> Problem:
    """Check every option that is not an array of the result and fold it into the problem."""
    if q_scale is not None:
        raise NotImplementedError("q_scale: it belongs to queries in float8, which are not supported yet")
    checks.choice(score, "score", ("dot", "sqdist"))
    checks.choice(kernel, "kernel", KERNELS)
    if backend is not None:
        checks.choice(backend, "backend", BACKENDS)
        opts.backend_takes(backend, problem.q)
    if precision is not None:
        checks.choice(precision, "precision", ("tf32",))
    opts.stream(stream, problem.q)
    if num_splits is not None:
        num_splits = min(checks.integer(num_splits, "num_splits", low=1), MOST_SPLITS)
    checks.flag(batch_invariant, "batch_invariant")
    is_causal, align = opts.causal(causal)
    mod_args = opts.mod_args(mod_args, score_mod, mask_mod)
    opts.fits_arguments(score_mod, "score_mod", 5, mod_args)
    opts.fits_arguments(mask_mod, "mask_mod", 4, mod_args)
    changes: dict[str, Any] = with_lengths(problem, kv_lengths, kv_start)
    for name, value, a in (("k_scale", k_scale, problem.k), ("v_scale", v_scale, problem.v)):
        changes[name] = opts.kv_scale(value, name, a, problem.q, layout)
    if bias is not None:
        changes["bias"], changes["bias_shape"] = opts.bias(bias, problem)
    if mask is not None:
        changes["mask"], changes["mask_is_tail"] = opts.mask(mask, problem, changes["kv_lengths"])
    return problem.replace(
        causal=is_causal, align=align, window=opts.window(window, is_causal), score=score,
        scale=opts.scale(scale, score, problem), softcap=opts.softcap(softcap, problem),
        score_mod=opts.modifier(score_mod, "score_mod"), mask_mod=opts.modifier(mask_mod, "mask_mod"),
        mod_args=mod_args, alibi_slopes=opts.alibi(alibi_slopes, problem),
        sinks=opts.sinks(sinks, problem), precision=precision, num_splits=num_splits,
        batch_invariant=bool(batch_invariant),
        out_dtype=problem.q.dtype if out_dtype is None else opts.dtype(out_dtype, "out_dtype"), kernel=kernel, backend=backend,
        stream=stream, **changes,
    )


def with_lengths(problem: Problem, kv_lengths: Any, kv_start: Any) -> dict[str, Any]:
    """Checked kv_lengths and kv_start, and the page table entries that they make used."""
    limit, what = indices.capacity(problem)
    if kv_lengths is not None:
        kv_lengths = indices.per_sequence(kv_lengths, "kv_lengths", problem, limit, what)
    elif problem.paged:
        raise ValueError("kv_lengths: required with page_table; it says how many keys of each sequence exist")
    if kv_start is not None:
        kv_start = indices.start(kv_start, problem, limit, kv_lengths)
    if problem.paged:
        indices.used_pages(problem, kv_lengths)
    return {"kv_lengths": kv_lengths, "kv_start": kv_start}


def with_outputs(
    problem: Problem, out: Any, lse: Any, return_lse: bool, layout: str, ndim: int, append: Append | None = None,
) -> tuple[Problem, Any, Any]:
    """Check or allocate the results; returns the problem and the arrays to hand back, in the user's shape.

    ``ndim`` is the number of axes of the user's q; ``append`` has inputs that the problem does not hold.
    """
    inputs = {} if append is None else append.inputs
    checks.flag(return_lse, "return_lse")
    out_shape = user_out_shape(problem, layout, ndim)
    if out is None:
        out = arrays.empty(out_shape, problem.out_dtype, problem.q)
        out_view = arrays.view(out, "out")
    else:
        out_view = checks.output(out, "out", out_shape, problem.out_dtype, problem, inputs)
    lse_view = None
    if lse is not None:
        lse_view = checks.output(lse, "lse", user_lse_shape(problem, ndim), problem.compute_dtype, problem, inputs)
        if arrays.overlap(lse_view, out_view):
            raise ValueError("lse: overlaps out in memory; results need a buffer of their own")
    elif return_lse:
        lse = arrays.empty(user_lse_shape(problem, ndim), problem.compute_dtype, problem.q)
        lse_view = arrays.view(lse, "lse")
    problem = problem.replace(
        out=canonical_out(out_view, layout, problem), lse=None if lse_view is None else canonical_lse(lse_view, problem),
    )
    return problem, out, lse


def with_weights(problem: Problem, out: Any, ndim: int) -> tuple[Problem, Any]:
    """Check or allocate the result of attention_weights(); returns the problem and the array to hand back, in the user's shape."""
    shape = user_weights_shape(problem, ndim)
    if out is None:
        out = arrays.empty(shape, problem.out_dtype, problem.q)
        a = arrays.view(out, "out")
    else:
        a = checks.output(out, "out", shape, problem.out_dtype, problem, {})
    if problem.reduce is not None:  # the axis of the heads, which the user does not see
        a = arrays.expand(a, len(shape) - 2)
    while len(a.shape) < 4:
        a = arrays.expand(a, 0)
    return problem.replace(weights=a), out


def with_arrays(problem: Problem, q: Any, k: Any, v: Any, layout: str, ndim: int, stream: Any) -> Problem:
    """The same problem on other arrays of the same signature (Plan.run)."""
    fresh: dict[str, ArrayView] = {}
    for name, array, planned in (("q", q, problem.q), ("k", k, problem.k), ("v", v, problem.v)):
        a = arrays.view(array, name)
        paged = problem.paged and name != "q"
        axes = 4 if paged else ndim
        if len(a.shape) != axes:
            raise ValueError(f"{name}: shape {a.shape}; this plan was made for an array of {axes} axes")
        a = canonical_pages(a, layout, name) if paged else canonical(a, layout, name)
        if a.layout_key != planned.layout_key:
            raise ValueError(
                f"{name}: shape {a.shape}, strides {a.strides}, {a.dtype}, {arrays.where(a)}; this plan was made for "
                f"shape {planned.shape}, strides {planned.strides}, {planned.dtype}, {arrays.where(planned)}"
            )
        fresh[name] = a
    opts.stream(stream, problem.q)
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
    if ndim not in (3, 4):
        forms = "(B, S, H, D), (S, H, D)" if layout == "BSHD" else "(B, H, S, D), (H, S, D)"
        raise ValueError(f"{name}: shape {a.shape} has {ndim} axes; allowed are {forms} or (S, D) for layout {layout!r}")
    if ndim == 3:
        a = arrays.expand(a, 0)
    return a if layout == "BSHD" else arrays.transpose(a, (0, 2, 1, 3))


def canonical_packed(a: ArrayView, layout: str, name: str) -> ArrayView:
    """A varlen array in axis order (total, H, D)."""
    if len(a.shape) != 3:
        form = "(total, H, D)" if layout == "BSHD" else "(H, total, D)"
        raise ValueError(f"{name}: shape {a.shape} has {len(a.shape)} axes; it must be {form} for layout {layout!r}")
    return a if layout == "BSHD" else arrays.transpose(a, (1, 0, 2))


def canonical_pages(a: ArrayView, layout: str, name: str) -> ArrayView:
    """A paged cache in axis order (pages, page_size, H, D)."""
    form = "(pages, page_size, H, D)" if layout == "BSHD" else "(pages, H, page_size, D)"
    if len(a.shape) != 4:
        came = f"shape {a.shape} has {len(a.shape)} axes"
        raise ValueError(f"{name}: {came}; with page_table it must be {form} for layout {layout!r}")
    turned = a if layout == "BSHD" else arrays.transpose(a, (0, 2, 1, 3))
    if turned.shape[1] < 1:
        raise ValueError(f"{name}: shape {a.shape}, {form} for layout {layout!r}; the page size must be at least 1")
    return turned


def canonical_out(a: ArrayView, layout: str, problem: Problem) -> ArrayView:
    """An array of the user's out shape in axis order (B, S, H, Dv), or (total_q, H, Dv) for varlen."""
    return (canonical_packed if problem.varlen else canonical)(a, layout, "out")


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
    return problem.lse_shape if problem.varlen else problem.lse_shape[4 - ndim :]


def user_weights_shape(problem: Problem, ndim: int) -> tuple[int, ...]:
    """Shape of attention weights, or of their mean over the heads, for the number of axes that q came in."""
    b, h, sq, sk = problem.weights_shape
    if problem.reduce is not None:
        return (b, sq, sk) if ndim == 4 else (sq, sk)
    return (b, h, sq, sk)[4 - ndim :]
