"""decode(): attention of a few queries over a cache, with the append in the same call."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import backends, launch, planner, warm, warm_decode
from . import problem as problems
from .api import takes_options
from .types import HOST


@takes_options
def decode(
    q: Any, k_cache: Any, v_cache: Any, kv_lengths: Any, *, page_table: Any = None, k_new: Any = None, v_new: Any = None,
    rope: Any = None, cache_batch_index: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False,
    layout: str = "BSHD", **options: Any,
) -> Any:
    """Attention of a few new queries over a key/value cache, appending to the cache in the same call.

    Parameters
    ----------
    q : ndarray, shape (B, Sq, Hq, D)
        Sq is small: one new token, or a few.
    k_cache, v_cache : ndarray, shape (B, Smax, Hkv, D) and (B, Smax, Hkv, Dv), or (pages, page_size, Hkv, D) with ``page_table``
    kv_lengths : array_like of int, shape (B,), or int
        Keys that each sequence has in the cache *before* the new ones. Not modified. It may be on the GPU, see `attention`.
    page_table : array_like of int, shape (B, max_pages), optional
        May be on the GPU as int32. With kv_lengths there as well, a captured CUDA graph follows both.
    k_new, v_new : ndarray, shape (B, n, Hkv, D) and (B, n, Hkv, Dv), optional
        Written to the cache behind the keys that are there; the queries see them (with ``causal=True`` up to their own
        position). Where they do not fit, ValueError is raised and nothing is written. Of kv_lengths on a GPU that cannot be told: a
        sequence without room for all of them, or of negative length, gets none, and its queries see the keys that it has.
        For caches in float8_e4m3fn they are either of that dtype and copied, or of q's and quantized: by the scale of the tensor or
        head in ``k_scale`` and ``v_scale``; where these hold one for each token and head, by the row's own, which is written there.
    rope : (ndarray, ndarray, {"interleaved", "half"}), optional
        Rotary embedding: (cos, sin, style), tables of shape (positions, rot / 2) in float32 or q's dtype with rot <= D. Turns k_new as
        it is written, the key that becomes key j by row j, and q by its position i (see ``causal``; -n turns the other way). The first
        rot features are turned in pairs: (0, 1), (2, 3), ... in style "interleaved", else (0, rot / 2), (1, rot / 2 + 1), ...
        Keys in the cache are taken as they are. A position beyond the tables is a ValueError, or NaN where only the GPU knows it.
    cache_batch_index : array_like of int, shape (B,), optional
        Sequence b is entry cache_batch_index[b] of caches (C, Smax, Hkv, D), C of any size. Entries that take new keys must be
        distinct. May be on the GPU as int32. Not with ``page_table``, which has a row for each sequence.
    **options
        As for `attention`; a few queries of one sequence usually want ``causal=True``, which for Sq = 1 changes nothing.

    Returns
    -------
    out, lse
        As `attention`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`; ValueError also if the cache is too small, read-only or shares memory with q, k_new or v_new.

    References
    ----------
    Dao et al., "Flash-Decoding for long-context inference", 2023 (split keys, then an exact merge).
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", arXiv:2309.06180.
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> k_cache, v_cache = (np.zeros((1, 64, 2, 16), np.float32) for _ in range(2))
    >>> length = 0
    >>> for _ in range(3):  # one token after the other; the caller counts
    ...     q, k, v = (np.ones((1, 1, 2, 16), np.float32) for _ in range(3))
    ...     out = cuflash.decode(q, k_cache, v_cache, [length], k_new=k, v_new=v)
    ...     length += 1
    >>> out.shape, k_cache[0, :4, 0, 0].tolist()
    ((1, 1, 2, 16), [1.0, 1.0, 1.0, 0.0])
    """
    signed = warm_decode.signature(
        q, k_cache, v_cache, kv_lengths, page_table, layout, options, k_new=k_new, v_new=v_new, rope=rope,
        cache_batch_index=cache_batch_index,
    )
    if signed is not None:
        results = warm_decode.run(signed, out, lse, return_lse, options.get("stream"))
        if results is not None:
            return results
    key, given = None, (out, lse)
    if page_table is None and rope is None and cache_batch_index is None:
        key = warm.decode_key(q, k_cache, v_cache, k_new, v_new, layout, options)
    stream, known = options.get("stream"), warm.problems.get(key)
    if known is not None and (stream is None or known.q.device != HOST):
        problem, append = problems.decode_again(known, q, k_cache, v_cache, kv_lengths, k_new, v_new, layout, stream)
    else:
        problem, append = problems.build_decode(
            q, k_cache, v_cache, kv_lengths, page_table=page_table, k_new=k_new, v_new=v_new, rope=rope,
            cache_batch_index=cache_batch_index, layout=layout, **options,
        )
        warm.keep_problem(key, problem)
    with launch.place(problem.q.device, problem.stream):
        problem, out, lse = problems.with_outputs(problem, out, lse, return_lse, layout, np.ndim(q), append)
        plan = planner.choose(problem)  # before the append: a call that cannot run leaves the cache as it was
        with backends.appended(plan, problem, append) as ready:
            if signed is not None:
                warm_decode.keep(signed, plan, problem, append, ready, (out, lse, return_lse), given)
            warm.execute(plan, ready, None)
    return (out, lse) if return_lse else out
