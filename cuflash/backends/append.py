"""Writing new keys and values into caches, dense or paged, where they lie (on CuPy's current stream)."""

from __future__ import annotations

import numpy as np

from ..types import ArrayView, Problem


def append(problem: Problem, k_new: ArrayView, v_new: ArrayView) -> None:
    """Write k_new and v_new (B, n, Hkv, D or Dv) behind the keys that were there.

    ``problem`` is the decode problem after the append: its kv_lengths count the new keys. Everything has been checked.
    """
    assert problem.kv_lengths is not None
    n = k_new.shape[1]
    for b in range(problem.batch):
        j = np.arange(problem.kv_lengths[b] - n, problem.kv_lengths[b])
        for cache, new in ((problem.k.array, k_new.array), (problem.v.array, v_new.array)):
            if problem.page_table is None:
                cache[b, j] = new[b]
            else:
                cache[problem.page_table[b, j // problem.page_size], j % problem.page_size] = new[b]
