"""decode over the pages of a PagedKVCache equals attention over dense keys."""

from __future__ import annotations

import compare
import numpy as np
import pytest
from caches import DTYPES, LAYOUTS, assert_equal, make, tokens

import cuflash
from cuflash.problem import build_attention


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_decode_over_pages_equals_attention_over_dense_keys(backend, page_size, dtype, layout):
    """Pages in disorder, forks, an empty sequence, NaN in every slot that no sequence uses."""
    options = {"num_pages": 96, "page_size": page_size, "dtype": dtype, "layout": layout, "num_layers": 2}
    cache = make(heads_kv=2, head_dim=16, head_dim_v=8, **options)
    seqs = [cache.new_sequence() for _ in range(4)]
    for step, counts in enumerate(((5, 17, 3), (1, 1, 9), (16, 2, 1))):
        for seq, n in zip(seqs, counts, strict=False):
            cache.append(seq, *tokens(cache, n, seed=7 * step + seq, layers=True))
    cache.truncate(seqs[1], 4)
    fork = cache.fork(seqs[0], 20)
    cache.append(fork, *tokens(cache, 2, seed=90, layers=True))
    seqs.append(fork)

    queries = np.random.default_rng(1).standard_normal((len(seqs), 1, 4, 16)).astype(cache.dtype)
    q = queries if layout == "BSHD" else queries.swapaxes(1, 2)
    batch = cache.batch(seqs)
    for i in range(2):
        b = batch.layer(i)
        out = cuflash.decode(
            q, b.k_pages, b.v_pages, b.kv_lengths, page_table=b.page_table, layout=b.layout, backend=backend
        )
        dense = [[x[None] for x in (q[row], *cache.gather(seq, layer=i))] for row, seq in enumerate(seqs)]
        want = compare.expect([build_attention(*one, layout=layout) for one in dense])
        exact = np.concatenate(want.out)
        compare.assert_close(out, exact if layout == "BSHD" else exact.swapaxes(1, 2), want.out_bound)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_decode_writes_into_reserved_pages(backend, page_size, layout):
    """k_new and v_new of decode land where write would put them, and forks keep what they shared."""
    cache = make(num_pages=60, page_size=page_size, heads_kv=2, head_dim=16, head_dim_v=8, layout=layout)
    parent = cache.new_sequence()
    cache.append(parent, *tokens(cache, 7))
    seqs = [parent, cache.fork(parent), cache.fork(parent, 5)]
    before = [cache.gather(seq) for seq in seqs]
    k, v = tokens(cache, 2, batch=3, seed=1)
    q = np.random.default_rng(2).standard_normal((3, 2, 4, 16) if layout == "BSHD" else (3, 4, 2, 16)).astype(np.float32)
    positions = cache.reserve(seqs, 2)
    b = cache.batch(seqs)
    pages = {"page_table": b.page_table, "layout": layout, "causal": True, "backend": backend}
    out = cuflash.decode(q, b.k_pages, b.v_pages, positions, k_new=k, v_new=v, **pages)
    axis = 0 if layout == "BSHD" else 1
    for row, seq in enumerate(seqs):
        for got, old, new in zip(cache.gather(seq), before[row], (k, v), strict=True):
            assert_equal(got, np.concatenate([old, new[row]], axis))
    after_write = cuflash.decode(q, b.k_pages, b.v_pages, b.kv_lengths, **pages)
    assert_equal(out, after_write)
