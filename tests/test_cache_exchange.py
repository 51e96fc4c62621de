"""PagedKVCache over pages that exist already: page tables in and out."""

from __future__ import annotations

import numpy as np
import pytest
from caches import LAYOUTS, assert_equal, check_pages, make, state, tokens
from numpy.lib.stride_tricks import as_strided

from cuflash import PagedKVCache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["table", "csr"])
@pytest.mark.parametrize("layers", [None, 2])
def test_export_and_import(layout, form, layers):
    cache = make(layout=layout, num_layers=layers)
    seqs = [cache.new_sequence() for _ in range(4)]
    for seq, n in zip(seqs, (5, 0, 8, 1), strict=True):
        cache.append(seq, *tokens(cache, n, seed=seq, layers=layers is not None))
    fork = cache.fork(seqs[2])
    other = PagedKVCache.from_pages(cache.k_pages, cache.v_pages, layout=layout)
    if form == "table":
        batch = cache.batch()
        ids = other.import_table(batch.page_table, batch.kv_lengths)
    else:
        indptr, indices, last = cache.export_csr()
        assert indptr.dtype == indices.dtype == last.dtype == np.int32
        assert indptr.tolist() == [0, 2, 2, 4, 5, 7] and last.tolist() == [1, 0, 4, 1, 4]
        ids = other.import_csr(indptr, indices, last)
    for new, old in zip(ids, [*seqs, fork], strict=True):
        assert_equal(other.gather(new)[0], cache.gather(old)[0])
        assert_equal(other.gather(new)[1], cache.gather(old)[1])
    np.testing.assert_array_equal(other.page_table(), cache.page_table())
    assert other.free_pages == cache.free_pages
    check_pages(other)
    assert other.k_pages is cache.k_pages  # no copy
    want = other.gather(ids[4])
    other.append(ids[2], *tokens(cache, 3, layers=layers is not None))
    other.write(ids[2], *tokens(cache, 5, layers=layers is not None), position=1)
    assert_equal(other.gather(ids[4])[0], want[0])
    other.free(ids)
    assert other.free_pages == 8
    check_pages(other)


def test_import_into_the_same_cache_shares_pages():
    cache = make()
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 6))
    (again,) = cache.import_csr(*cache.export_csr([seq]))
    k, _ = cache.gather(seq)
    cache.append(again, *tokens(cache, 1, seed=3))
    assert_equal(cache.gather(seq)[0], k)
    assert_equal(cache.gather(again)[0][:6], k)
    check_pages(cache)


def test_import_never_looks_at_unused_entries():
    cache = make(page_size=16)
    (seq,) = cache.import_table([[2, -1, 10**9]], [16])
    assert cache.page_table([seq]).tolist() == [[2]]
    check_pages(cache)


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        ([[2, -1, 10**9]], [17], "page_table: sequence 0 uses page -1; there are pages 0 to 7"),
        ([[0, 1], [2, 8]], [32, 32], "page_table: sequence 1 uses page 8; there are pages 0 to 7"),
        ([[0, 1]], [33], "lengths: 33 at index 0; it must be from 0 to 32"),
        ([[0, 1]], [-1], "lengths: -1 at index 0; it must be from 0 to 32"),
        ([[0, 0]], [32], "sequence 0 uses a page more than once"),
        ([[0, 1, 2, 3]], [64], "sequence 0 has 64 tokens; the capacity of a sequence is 48"),
        ([[0, 1]], [1, 2], r"lengths: shape \(2,\); it must be \(1,\)"),
        ([0, 1], [1], r"page_table: shape \(2,\); it must have 2 axes"),
    ],
)
def test_import_refuses_bad_tables(table, lengths, message):
    cache = make(page_size=16, max_pages_per_seq=3)
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        cache.import_table(table, lengths)
    with pytest.raises(TypeError, match="lengths: dtype float64 is not an integer type"):
        cache.import_table([[0]], [1.0])
    assert state(cache) == before


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 1], [0], [17], "last_page_len: 17 at index 0; it must be from 1 to 16"),
        ([0, 1], [0], [0], "last_page_len: 0 at index 0; it must be from 1 to 16"),
        ([0, 0], [], [1], "last_page_len: 1 at index 0; it must be from 0 to 0"),
        ([0, 2], [0], [1], "indptr: ends at 2, but indices has 1 rows"),
        ([0, 1], [0, 1], [1], "indptr: ends at 1; it must end at 2"),
        ([1, 1], [0], [0], "indptr: starts at 1; it must start at 0"),
        ([0, 2, 1], [0], [1, 1], "indptr: falls from 2 to 1 at index 2"),
        ([0, 1], [0], [1, 1], "indptr: 2 entries; last_page_len has 2, it must have one more"),
        ([0, 1], [8], [1], "indices: sequence 0 uses page 8; there are pages 0 to 7"),
        ([], [], [], r"indptr: shape \(0,\); it must be"),
    ],
)
def test_import_refuses_bad_csr(indptr, indices, last, message):
    cache = make(page_size=16)
    with pytest.raises(ValueError, match=message):
        cache.import_csr(indptr, indices, last)
    assert cache.lengths == {} and cache.free_pages == 8


def test_from_pages_checks():
    k, v = np.zeros((4, 2, 1, 8), np.float32), np.zeros((4, 2, 1, 3), np.float32)
    combined = np.zeros((4, 2, 2, 1, 8), np.float32)
    PagedKVCache.from_pages(combined[:, 0], combined[:, 1])  # interleaved, but apart
    for bad, kind, message in [
        ((k, v[:3]), ValueError, r"v_pages: shape \(3, 2, 1, 3\); it must be that of k_pages, \(4, 2, 1, 8\)"),
        ((k[0], v[0]), ValueError, r"k_pages: shape \(2, 1, 8\); it must have 4 axes"),
        ((k, v.astype(np.float64)), TypeError, "v_pages: dtype float64 differs from k_pages's float32"),
        ((k.astype(np.int32), v), TypeError, "k_pages: dtype int32 is not supported"),
        ((k, k[::-1]), ValueError, "v_pages: overlaps k_pages"),
        ((np.broadcast_to(k[:1], k.shape), v), ValueError, "k_pages: the array is read-only"),
    ]:
        with pytest.raises(kind, match=message):
            PagedKVCache.from_pages(*bad)


def test_from_pages_refuses_strides_too_involved_to_decide():
    """Strides with nothing in common over a wide stretch of memory: NumPy's exact test gives up."""
    memory, rng = np.empty(40_000_000, np.float16), np.random.default_rng(1)  # never touched
    k, v = (as_strided(part, (5,) * 5, 2 * rng.integers(10**5, 10**6, 5)) for part in (memory, memory[101:]))
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(k, v, max_work=100_000)
    with pytest.raises(ValueError, match="too involved to rule it out"):
        PagedKVCache.from_pages(k, v)
