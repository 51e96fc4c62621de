"""PagedKVCache: where tokens lie, forks that share pages and copy them on write."""

from __future__ import annotations

import numpy as np
import pytest
from caches import DTYPES, LAYOUTS, assert_equal, check_pages, make, tokens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_append_then_gather(layout, dtype, page_size):
    cache = make(num_pages=20, page_size=page_size, dtype=dtype, layout=layout)
    axis = 0 if layout == "BSHD" else 1
    seq, parts = cache.new_sequence(), []
    for step, n in enumerate((5, 0, 1, 1, 7)):
        parts.append(tokens(cache, n, seed=step))
        assert cache.append(seq, *parts[-1]) == sum(p[0].shape[axis] for p in parts[:-1])
    assert cache.lengths == {seq: 14}
    for got, want in zip(cache.gather(seq), zip(*parts, strict=True), strict=True):
        assert_equal(got, np.concatenate(want, axis))
        assert got.flags.c_contiguous and not np.shares_memory(got, cache.k_pages)
    check_pages(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_page_table_says_where_tokens_lie(layout):
    cache = make(layout=layout, page_size=3)
    seqs = [cache.new_sequence() for _ in range(3)]
    for step, n in enumerate((4, 2, 3)):  # interleaved, so that pages do not lie in order
        for seq in seqs[:2]:
            cache.append(seq, *tokens(cache, n, seed=10 * step + seq))
        cache.truncate(seqs[0], cache.lengths[seqs[0]] - 1)
    batch = cache.batch(seqs)
    assert batch.page_table.dtype == batch.kv_lengths.dtype == np.int32
    assert batch.kv_lengths.tolist() == [6, 9, 0] and batch.page_table.shape == (3, 3)
    assert batch.page_table[2].tolist() == [-1, -1, -1] and batch.page_table[0, 2] == -1
    assert batch.k_pages is cache.k_pages and batch.v_pages is cache.v_pages and batch.layout == layout
    assert cache.k_pages.shape == ((8, 3, 2, 8) if layout == "BSHD" else (8, 2, 3, 8))
    assert cache.v_pages.shape == ((8, 3, 2, 3) if layout == "BSHD" else (8, 2, 3, 3))
    for b, seq in enumerate(seqs):
        k, v = (x if layout == "BSHD" else x.swapaxes(0, 1) for x in cache.gather(seq))
        for j in range(batch.kv_lengths[b]):
            page, row = batch.page_table[b, j // 3], j % 3
            at = (page, row) if layout == "BSHD" else (page, slice(None), row)
            assert_equal(cache.k_pages[at], k[j])
            assert_equal(cache.v_pages[at], v[j])
    assert cache.page_table(seqs, max_pages=5).shape == (3, 5)
    assert cache.page_table([]).shape == (0, 1) and cache.kv_lengths([]).shape == (0,)
    with pytest.raises(ValueError, match="max_pages: got 2; it must be at least 3"):
        cache.page_table(seqs, max_pages=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_append_equals_one_by_one(layout):
    cache = make(num_pages=16, layout=layout)
    first = [cache.new_sequence() for _ in range(3)]
    second = [cache.new_sequence() for _ in range(3)]
    for i, seq in enumerate(first + second):
        cache.append(seq, *tokens(cache, i % 3, seed=i % 3))
    for step in range(4):
        k, v = tokens(cache, 2, seed=20 + step, batch=3)
        positions = cache.append(first, k, v)
        assert positions.dtype == np.int32 and positions.tolist() == [2 * step, 2 * step + 1, 2 * step + 2]
        for b, seq in enumerate(second):
            cache.append(seq, k[b], v[b])
    for a, b in zip(first, second, strict=True):
        assert_equal(cache.gather(a)[0], cache.gather(b)[0])
        assert_equal(cache.gather(a)[1], cache.gather(b)[1])
    check_pages(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_share_one_table(layout):
    cache = make(num_layers=3, layout=layout)
    assert cache.k_pages.shape[0] == cache.v_pages.shape[0] == 3
    axis = 1 if layout == "BSHD" else 2
    seq = cache.new_sequence()
    k0, v0 = tokens(cache, 5, seed=1, layers=True)
    k1, v1 = tokens(cache, 2, seed=2, layers=True)
    cache.append(seq, k0, v0)  # all layers at once
    assert cache.reserve(seq, 2) == 5  # one layer after the other
    for i in range(3):
        cache.write(seq, k1[i], v1[i], layer=i)
        assert np.isfinite(cache.gather(seq, layer=i)[0]).all()
        assert np.isnan(cache.gather(seq, layer=2)[0]).any() == (i < 2)
    k, v = np.concatenate([k0, k1], axis), np.concatenate([v0, v1], axis)
    assert_equal(cache.gather(seq)[0], k)
    assert_equal(cache.gather(seq)[1], v)
    for i in range(3):
        assert_equal(cache.gather(seq, layer=i)[1], v[i])
        view = cache.batch([seq]).layer(i)
        assert np.shares_memory(view.k_pages, cache.k_pages) and view.k_pages.shape == cache.k_pages.shape[1:]
        np.testing.assert_array_equal(view.k_pages, cache.k_pages[i])
        assert view.page_table.shape == (1, 2) and view.kv_lengths.tolist() == [7]
    cache.write(seq, k1[:, :, :1] if layout == "BHSD" else k1[:, :1], v1[:, :, :1] if layout == "BHSD" else v1[:, :1], position=0)
    assert_equal(np.take(cache.gather(seq)[0], 0, axis), np.take(k1, 0, axis))
    assert_equal(np.take(cache.gather(seq)[0], 1, axis), np.take(k0, 1, axis))


def test_one_layer_with_an_axis_and_without():
    assert make(num_layers=1).k_pages.shape == (1, 8, 4, 2, 8)
    assert make().k_pages.shape == (8, 4, 2, 8)
    with pytest.raises(ValueError, match="no axis of layers"):
        make().batch().layer(0)
    with pytest.raises(ValueError, match="without num_layers"):
        cache = make()
        cache.gather(cache.new_sequence(), layer=0)
    with pytest.raises(ValueError, match="layer: got 1; it must be at most 0"):
        make(num_layers=1).batch().layer(1)


def test_reserve_for_each_its_own_count():
    cache = make()
    seqs = [cache.new_sequence() for _ in range(3)]
    assert cache.reserve(seqs, [1, 0, 9]).tolist() == [0, 0, 0]
    assert cache.reserve(np.array(seqs), 2).tolist() == [1, 0, 9]
    assert cache.kv_lengths(seqs).tolist() == [3, 2, 11]
    k, v = tokens(cache, 2, batch=3)
    cache.write(seqs, k, v)
    cache.write(seqs, k, v, position=[0, 0, 1])
    assert_equal(cache.gather(seqs[2])[0][1:3], k[2])
    assert_equal(cache.gather(seqs[2])[0][9:], k[2])
    with pytest.raises(ValueError, match="n: 2 entries for 3 sequences"):
        cache.reserve(seqs, [1, 2])
    with pytest.raises(ValueError, match="position: 2 entries for 3 sequences"):
        cache.write(seqs, k, v, position=[0, 0])
    check_pages(cache)


def test_freed_pages_keep_stale_data_that_is_not_seen():
    cache = make(num_pages=2)
    first = cache.new_sequence()
    cache.append(first, *(np.full_like(x, np.nan) for x in tokens(cache, 8)))
    cache.free(first)
    assert cache.free_pages == 2 and cache.lengths == {}
    second = cache.new_sequence()
    k, v = tokens(cache, 5)
    cache.append(second, k, v)
    assert np.isnan(cache.k_pages).any()  # the tail of the last page
    assert_equal(cache.gather(second)[0], k)
    assert_equal(cache.gather(second)[1], v)


def test_truncate_returns_whole_pages_only():
    cache = make()
    seq = cache.new_sequence()
    k, v = tokens(cache, 10)
    cache.append(seq, k, v)
    for length, pages in ((10, 3), (9, 3), (8, 2), (5, 2), (4, 1), (1, 1), (0, 0)):
        cache.truncate(seq, length)
        assert cache.free_pages == 8 - pages
        assert_equal(cache.gather(seq)[0], k[:length])
    cache.append(seq, k, v)
    assert_equal(cache.gather(seq)[1], v)


def test_strided_and_overlapping_tokens():
    cache = make(num_pages=3)
    seq = cache.new_sequence()
    k, v = tokens(cache, 12)
    cache.append(seq, k[::-2], v[::-2])
    assert_equal(cache.gather(seq)[0], k[::-2])
    cache.append(seq, np.broadcast_to(k[:1], (2, 2, 8)), v[:2])
    assert_equal(cache.gather(seq)[0][6:], np.repeat(k[:1], 2, 0))
    # The tokens handed in are the pages about to be overwritten, shifted by one row either way.
    for source, target in ((1, 0), (0, 1)):
        stale = [p.reshape(-1, *p.shape[2:])[source : source + 7] for p in (cache.k_pages, cache.v_pages)]
        want = [x.copy() for x in stale]
        cache.write(seq, *stale, position=target)
        assert_equal(cache.gather(seq)[0][target : target + 7], want[0])
        assert_equal(cache.gather(seq)[1][target : target + 7], want[1])


# ---- sharing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fork_copies_on_write(layout):
    cache = make(layout=layout, num_layers=2)
    take = (lambda x, n: x[:, :n]) if layout == "BSHD" else (lambda x, n: x[:, :, :n])
    parent = cache.new_sequence()
    k, v = tokens(cache, 6, seed=1, layers=True)
    cache.append(parent, k, v)
    child, prefix = cache.fork(parent), cache.fork(parent, 5)
    assert cache.free_pages == 6 and cache.lengths == {parent: 6, child: 6, prefix: 5}
    np.testing.assert_array_equal(cache.page_table([parent]), cache.page_table([child]))

    k2, v2 = tokens(cache, 1, seed=2, layers=True)
    cache.append(child, k2, v2)
    assert cache.free_pages == 5  # the partial page alone was copied
    tables = cache.page_table([parent, child])
    assert tables[0, 0] == tables[1, 0] and tables[0, 1] != tables[1, 1]
    assert_equal(take(cache.gather(child)[0], 6), k)
    assert_equal(cache.gather(parent)[0], k)
    assert_equal(cache.gather(prefix)[1], take(v, 5))

    cache.write(parent, k2, v2, position=0)  # the full shared page
    assert_equal(take(cache.gather(child)[0], 6), k)
    assert_equal(cache.gather(prefix)[0], take(k, 5))
    assert_equal(take(cache.gather(parent)[0], 1), k2)
    check_pages(cache)
    cache.free([parent, child])
    assert_equal(cache.gather(prefix)[0], take(k, 5))
    cache.free(prefix)
    assert cache.free_pages == 8
    check_pages(cache)


def test_fork_between_reserve_and_write():
    cache = make()
    parent = cache.new_sequence()
    k, v = tokens(cache, 3)
    cache.append(parent, k, v)
    cache.reserve(parent, 1)
    child = cache.fork(parent, 3)
    cache.write(parent, *tokens(cache, 1, seed=5))
    cache.reserve(child, 1)
    cache.write(child, *tokens(cache, 1, seed=6))
    for seq, seed in ((parent, 5), (child, 6)):
        assert_equal(cache.gather(seq)[0], np.concatenate([k, tokens(cache, 1, seed=seed)[0]]))


def test_the_last_holder_needs_no_copy():
    """Three forks that together hold a partial page append in one call: two copies, not three."""
    cache = make(num_pages=3)
    first = cache.new_sequence()
    cache.append(first, *tokens(cache, 3))
    seqs = [first, cache.fork(first), cache.fork(first)]
    k, v = tokens(cache, 1, batch=3, seed=4)
    cache.append(seqs, k, v)
    assert cache.free_pages == 0
    for b, seq in enumerate(seqs):
        assert_equal(cache.gather(seq)[0], np.concatenate([tokens(cache, 3)[0], k[b]]))
    check_pages(cache)
