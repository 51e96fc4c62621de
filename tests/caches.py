"""Small paged caches, tokens to put in them, and what must hold of every cache."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cuflash import PagedKVCache

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
LAYOUTS = ["BSHD", "BHSD"]


def make(poison=True, **options):
    """A small cache whose pages hold NaN, so that a token never written shows up."""
    cache = PagedKVCache(**{"num_pages": 8, "page_size": 4, "heads_kv": 2, "head_dim": 8, "head_dim_v": 3, **options})
    if poison:
        cache.k_pages[...] = np.nan
        cache.v_pages[...] = np.nan
    return cache


def tokens(cache, n, seed=0, batch=None, layers=False, dtype=None):
    """Random (k, v) of n tokens in the shapes that append and write take; in the cache's dtype if not given another."""
    rng = np.random.default_rng(seed)
    lead = (*((cache.num_layers,) if layers else ()), *(() if batch is None else (batch,)))
    axes = (n, cache.heads_kv) if cache.layout == "BSHD" else (cache.heads_kv, n)
    return tuple(
        rng.standard_normal((*lead, *axes, size)).astype(dtype or cache.dtype) for size in (cache.head_dim, cache.head_dim_v)
    )


def state(cache):
    """Everything a failed call must leave as it was."""
    return (
        cache.lengths,
        cache.page_table().tolist(),
        cache.free_pages,
        list(cache._sequences.pool.free),
        list(cache._sequences.pool.holders),
        *(pages.tobytes() for pages in (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales) if pages is not None),
    )


def check_pages(cache):
    """No page leaked, none both free and held, and each sequence holds exactly the pages its length needs."""
    held = {}
    for seq, length in cache.lengths.items():
        row = cache.page_table([seq])[0].tolist()
        need = -(-length // cache.page_size)
        assert row[need:] == [-1] * (len(row) - need)
        assert len(set(row[:need])) == need
        for page in row[:need]:
            assert 0 <= page < cache.num_pages
            held[page] = held.get(page, 0) + 1
    free = cache._sequences.pool.free
    assert len(set(free)) == len(free) == cache.free_pages
    assert set(free) | set(held) == set(range(cache.num_pages)) and not set(free) & set(held)
    assert cache._sequences.pool.holders == [held.get(page, 0) for page in range(cache.num_pages)]


def assert_equal(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)
