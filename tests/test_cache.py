"""PagedKVCache: bookkeeping against a plain dictionary, contents, sharing, errors that change nothing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.cache import PagedKVCache, _PagePool
from cuflash.types import CacheFullError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
LAYOUTS = ["BSHD", "BHSD"]


def make(poison=True, **options):
    """A small cache whose pages hold NaN, so that a token never written shows up."""
    cache = PagedKVCache(**{"num_pages": 8, "page_size": 4, "heads_kv": 2, "head_dim": 8, "head_dim_v": 3, **options})
    if poison:
        cache.k_pages[...] = np.nan
        cache.v_pages[...] = np.nan
    return cache


def tokens(cache, n, seed=0, batch=None, layers=False):
    """Random (k, v) of n tokens in the shapes that append and write take."""
    rng = np.random.default_rng(seed)
    lead = (*((cache.num_layers,) if layers else ()), *(() if batch is None else (batch,)))
    axes = (n, cache.heads_kv) if cache.layout == "BSHD" else (cache.heads_kv, n)
    return tuple(
        rng.standard_normal((*lead, *axes, size)).astype(cache.dtype) for size in (cache.head_dim, cache.head_dim_v)
    )


def state(cache):
    """Everything a failed call must leave as it was."""
    return (
        cache.lengths,
        cache.page_table().tolist(),
        cache.free_pages,
        list(cache._pool.free),
        list(cache._pool.holders),
        cache.k_pages.tobytes(),
        cache.v_pages.tobytes(),
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
    free = cache._pool.free
    assert len(set(free)) == len(free) == cache.free_pages
    assert set(free) | set(held) == set(range(cache.num_pages)) and not set(free) & set(held)
    assert cache._pool.holders == [held.get(page, 0) for page in range(cache.num_pages)]


def assert_equal(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(got, want)


# ---- single operations


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
    with pytest.raises(ValueError, match="max_pages is 2, allowed: at least 3"):
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
    with pytest.raises(ValueError, match="no layer axis"):
        make().batch().layer(0)
    with pytest.raises(ValueError, match="without num_layers"):
        cache = make()
        cache.gather(cache.new_sequence(), layer=0)
    with pytest.raises(ValueError, match="layer is 1, allowed: 0 to 0"):
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
    with pytest.raises(ValueError, match="n has 2 entries for 3 sequences"):
        cache.reserve(seqs, [1, 2])
    with pytest.raises(ValueError, match="position has 2 entries for 3 sequences"):
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


# ---- errors


def test_out_of_pages_loses_nothing():
    cache = make(num_pages=5, num_layers=2)
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.append(a, *tokens(cache, 7, layers=True))
    cache.append(b, *tokens(cache, 4, seed=1, layers=True))
    before = state(cache)
    with pytest.raises(CacheFullError, match="append wants 3 pages .* 2 of 5 are free; nothing was changed"):
        cache.append(a, *tokens(cache, 10, layers=True))
    with pytest.raises(CacheFullError, match="wants 3 pages"):
        cache.append([a, b], *tokens(cache, 5, batch=2, layers=True))  # a alone would fit
    with pytest.raises(CacheFullError, match="wants 4 pages"):
        cache.reserve([b, a], [4, 10])
    assert state(cache) == before
    cache.append(a, *tokens(cache, 9, layers=True))
    assert cache.free_pages == 0
    fork = cache.fork(b)
    before = state(cache)
    with pytest.raises(CacheFullError, match="write wants 1 pages .1 of them copies of shared pages., 0 of 5 are free"):
        cache.write(fork, *tokens(cache, 1, layers=True), position=2)
    assert state(cache) == before
    cache.free(b)  # now the fork is the page's only holder
    cache.write(fork, *tokens(cache, 1, layers=True), position=2)
    check_pages(cache)


def test_capacity_of_a_sequence():
    """Length 32 of capacity 32, one more token: an error, and the neighbours are unchanged."""
    cache = make(num_pages=4, page_size=16, max_pages_per_seq=2)
    seq, neighbour = cache.new_sequence(), cache.new_sequence()
    cache.append(seq, *tokens(cache, 32))
    cache.append(neighbour, *tokens(cache, 16))
    before = state(cache)
    for call in (
        lambda: cache.append(seq, *tokens(cache, 1)),
        lambda: cache.reserve([neighbour, seq], 1),
        lambda: cache.append(neighbour, *tokens(cache, 17)),
    ):
        with pytest.raises(ValueError, match=r"capacity of 32 \(2 pages of 16\)"):
            call()
    assert state(cache) == before


def test_unknown_and_freed_ids_are_named():
    cache = make()
    seq = cache.new_sequence()
    cache.free(seq)
    other = cache.new_sequence()
    assert other != seq
    k, v = tokens(cache, 1)
    calls = [
        lambda s: cache.append(s, k, v),
        lambda s: cache.reserve([other, s], 1),
        lambda s: cache.write(s, k, v),
        lambda s: cache.gather(s),
        lambda s: cache.truncate(s, 0),
        lambda s: cache.free([other, s]),
        lambda s: cache.fork(s),
        lambda s: cache.batch([s]),
        lambda s: cache.export_csr([s]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"seq {seq} is not in the cache: it was freed"):
            call(seq)
        with pytest.raises(ValueError, match="seq 99 is not in the cache: no such id"):
            call(99)
        with pytest.raises(ValueError, match="seq -1 is not in the cache: no such id"):
            call(-1)
        with pytest.raises(TypeError, match="seq must be an integer, got"):
            call(1.0)
        with pytest.raises(TypeError, match="seq must be an integer, got"):
            call(True)
    with pytest.raises(ValueError, match=f"names seq {other} more than once"):
        cache.reserve([other, other], 1)
    with pytest.raises(ValueError, match="more than once"):
        cache.free([other, other])
    assert cache.lengths == {other: 0}


def test_wrong_tokens_name_the_argument():
    cache = make()
    seq = cache.new_sequence()
    k, v = tokens(cache, 5)
    before = state(cache)
    for bad_k, bad_v, kind, message in [
        (k[:, :1], v, ValueError, r"k has shape \(5, 1, 8\), expected \(n, 2, 8\)"),
        (k, v[..., :2], ValueError, r"v has shape \(5, 2, 2\), expected \(n, 2, 3\)"),
        (k[None], v, ValueError, r"k has shape \(1, 5, 2, 8\), expected \(n, 2, 8\)"),
        (k, tokens(cache, 6)[1], ValueError, "v holds 6 tokens, k holds 5"),
        (k.astype(np.float64), v, TypeError, "k is float64, the cache holds float32"),
        (k, v.astype(np.float16), TypeError, "v is float16, the cache holds float32"),
        (k.tolist(), v, TypeError, "k must be a numpy.ndarray, got builtins.list"),
    ]:
        with pytest.raises(kind, match=message):
            cache.append(seq, bad_k, bad_v)
    assert state(cache) == before
    with pytest.raises(ValueError, match=r"k has shape \(5, 2, 8\), expected \(1, n, 2, 8\)"):
        cache.append([seq], k, v)
    with pytest.raises(ValueError, match=r"k has shape \(5, 2, 8\), expected \(2, n, 8\)"):
        _append_first(make(layout="BHSD"), k, v)
    bf16 = make(dtype=ml_dtypes.bfloat16)
    k, v = tokens(bf16, 2)
    with pytest.raises(TypeError, match="k is uint16, the cache holds bfloat16"):
        _append_first(bf16, k.view(np.uint16), v.view(np.uint16))
    layers = make(num_layers=2)
    with pytest.raises(ValueError, match=r"k has shape \(5, 2, 8\), expected \(2, n, 2, 8\)"):
        _append_first(layers, *tokens(cache, 5))
    with pytest.raises(ValueError, match="layer is 2, allowed: 0 to 1"):
        layers.write(0, *tokens(cache, 0), layer=2)


def _append_first(cache, k, v):
    cache.append(cache.new_sequence(), k, v)


def test_write_needs_a_reservation():
    cache = make()
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 5))
    before = state(cache)
    for position in (4, 5, -1):
        with pytest.raises(ValueError, match=f"write of 2 tokens at position {position} of seq {seq}, which has 5 tokens"):
            cache.write(seq, *tokens(cache, 2), position=position)
    with pytest.raises(ValueError, match="position -1"):
        cache.write(seq, *tokens(cache, 6))
    for length in (6, -1):
        with pytest.raises(ValueError, match=f"length is {length}, allowed: 0 to 5"):
            cache.truncate(seq, length)
        with pytest.raises(ValueError, match=f"length is {length}, allowed: 0 to 5"):
            cache.fork(seq, length)
    with pytest.raises(ValueError, match="n is -1, allowed: at least 0"):
        cache.reserve(seq, -1)
    assert state(cache) == before


@pytest.mark.parametrize("name", ["num_pages", "page_size", "heads_kv", "head_dim", "head_dim_v", "num_layers", "max_pages_per_seq"])
def test_constructor_sizes(name):
    with pytest.raises(ValueError, match=f"{name} is 0, allowed: "):
        make(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an integer, got float"):
        make(**{name: 2.0})


def test_constructor_kinds():
    for dtype in (None, "nonsense", np.uint16, np.int8, ml_dtypes.float8_e4m3fn):
        with pytest.raises(TypeError, match="dtype is .*, allowed: float16, bfloat16, float32, float64"):
            make(dtype=dtype)
    with pytest.raises(ValueError, match="layout is 'SBHD', allowed: 'BSHD', 'BHSD'"):
        make(layout="SBHD")
    assert make(head_dim_v=None).v_pages.shape[-1] == 8


def test_a_failed_copy_takes_the_append_back(monkeypatch):
    cache = make()
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 3))
    before = state(cache)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(cache, "_scatter", fail)
    with pytest.raises(MemoryError):
        cache.append(seq, *tokens(cache, 9))
    assert state(cache)[:3] == before[:3] and state(cache)[5:] == before[5:]
    check_pages(cache)


# ---- export and import


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
        ([[2, -1, 10**9]], [17], "page_table of sequence 0 names page -1, allowed: 0 to 7"),
        ([[0, 1], [2, 8]], [32, 32], "page_table of sequence 1 names page 8, allowed: 0 to 7"),
        ([[0, 1]], [33], r"lengths\[0\] is 33, allowed: 0 to 32"),
        ([[0, 1]], [-1], r"lengths\[0\] is -1, allowed: 0 to 32"),
        ([[0, 0]], [32], "names a page more than once"),
        ([[0, 1, 2, 3]], [64], "sequence 0 has 64 tokens, its capacity is 48"),
        ([[0, 1]], [1, 2], "page_table has 1 rows, lengths has 2 entries"),
        ([0, 1], [1], r"page_table has shape \(2,\), expected 2 axes"),
    ],
)
def test_import_refuses_bad_tables(table, lengths, message):
    cache = make(page_size=16, max_pages_per_seq=3)
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        cache.import_table(table, lengths)
    with pytest.raises(TypeError, match="lengths must hold integers, got float64"):
        cache.import_table([[0]], [1.0])
    assert state(cache) == before


@pytest.mark.parametrize(
    ("indptr", "indices", "last", "message"),
    [
        ([0, 1], [0], [17], r"last_page_len\[0\] is 17 with 1 pages, allowed: 1 to 16"),
        ([0, 1], [0], [0], r"last_page_len\[0\] is 0 with 1 pages, allowed: 1 to 16"),
        ([0, 0], [], [1], r"last_page_len\[0\] is 1 with 0 pages, allowed: 0 to 0"),
        ([0, 2], [0], [1], "indptr must rise from 0 to the 1 entries of indices"),
        ([1, 1], [0], [0], "indptr must rise from 0"),
        ([0, 2, 1], [0], [1, 1], "indptr must rise from 0"),
        ([0, 1], [0], [1, 1], "indptr has 2 entries for 2 sequences, expected 3"),
        ([0, 1], [8], [1], "indices of sequence 0 names page 8, allowed: 0 to 7"),
        ([], [], [], "indptr has 0 entries for 0 sequences, expected 1"),
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
        ((k, v[:3]), ValueError, r"v_pages has shape \(3, 2, 1, 3\), k_pages \(4, 2, 1, 8\)"),
        ((k[0], v[0]), ValueError, r"k_pages has shape \(2, 1, 8\), expected 4 axes"),
        ((k, v.astype(np.float64)), TypeError, "v_pages is float64, k_pages is float32"),
        ((k.astype(np.int32), v), TypeError, "k_pages is int32, allowed"),
        ((k, k[::-1]), ValueError, "overlap"),
        ((np.broadcast_to(k[:1], k.shape), v), ValueError, "k_pages is read-only"),
    ]:
        with pytest.raises(kind, match=message):
            PagedKVCache.from_pages(*bad)


# ---- attention over the pages


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
        dense = [(q[row], *cache.gather(seq, layer=i), layout) for row, seq in enumerate(seqs)]
        exact = np.stack([plain_attention(*one, np.longdouble, np.longdouble) for one in dense])
        compute = np.float64 if dtype == np.float64 else np.float32
        naive = np.stack([plain_attention(*one, compute, cache.dtype) for one in dense])
        bound = 2 * abs(naive - exact).max() + 2 * float(ml_dtypes.finfo(cache.dtype).eps) * abs(exact).max()
        assert out.dtype == cache.dtype and out.shape == exact.shape
        assert abs(out.astype(np.longdouble) - exact).max() <= bound  # a NaN fails too


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


def plain_attention(q, k, v, layout, compute, stored):
    """Attention of one sequence as its formula says: arithmetic in one dtype, intermediate results kept in another."""
    if layout == "BHSD":
        q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    q, k, v = (x.astype(compute) for x in (q, k, v))
    out = np.zeros((*q.shape[:2], v.shape[2]), compute)
    for h in range(q.shape[1] if len(k) else 0):
        kv = h // (q.shape[1] // k.shape[1])
        s = (q[:, h] @ k[:, kv].T / np.sqrt(compute(q.shape[2]))).astype(stored).astype(compute)
        p = np.exp(s - s.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True)).astype(stored).astype(compute)
        out[:, h] = p @ v[:, kv]
    out = out.astype(stored).astype(np.longdouble)
    return out if layout == "BSHD" else out.swapaxes(0, 1)


# ---- threads


def test_threads_share_a_cache(monkeypatch):
    def with_pauses(method):
        def paused(*args):
            time.sleep(1e-5)  # lets another thread in, unless the lock keeps it out
            return method(*args)

        return paused

    for name in ("take", "share", "release"):
        monkeypatch.setattr(_PagePool, name, with_pauses(getattr(_PagePool, name)))
    monkeypatch.setattr(PagedKVCache, "_slots", with_pauses(PagedKVCache._slots))
    cache = make(num_pages=9, poison=False)  # so few that some calls are refused

    def work(seed):
        k, v = tokens(cache, 9, seed=seed)
        done = 0
        for step in range(40):
            seqs = [cache.new_sequence()]
            try:
                cache.append(seqs[0], k[:5], v[:5])
                seqs.append(cache.fork(seqs[0]))
                cache.append(seqs[1], k[5:], v[5:])
                cache.truncate(seqs[0], step % 6)
                np.testing.assert_array_equal(cache.gather(seqs[1])[0], k)
                np.testing.assert_array_equal(cache.gather(seqs[0])[1], v[: step % 6])
                done += 1
            except CacheFullError:
                pass
            cache.free(seqs)
        return done

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(work, range(6))) > 0  # raises what a worker raised
    assert cache.free_pages == 9 and not cache.lengths
    check_pages(cache)


# ---- a random walk against a plain dictionary


@dataclass
class Walk:
    """A cache beside the model it must equal: {id: (k, v)} of dense arrays with the layers in front, tokens next."""

    cache: PagedKVCache
    rng: np.random.Generator

    def __post_init__(self):
        self.model = {}
        self.refused = 0

    def draw(self, n, batch=None):
        k, v = tokens(self.cache, n, seed=int(self.rng.integers(2**31)), batch=batch, layers=self.layered)
        return k, v

    @property
    def layered(self):
        return self.cache.num_layers is not None

    def canonical(self, x, layered=None):
        """(..., tokens, heads, size) with a layer axis."""
        x = x.swapaxes(-3, -2) if self.cache.layout == "BHSD" else x
        return x if (self.layered if layered is None else layered) else x[None]

    def some(self):
        return int(self.rng.choice(list(self.model)))

    def expect(self, spans):
        """The pages that writing tokens begin to end of each sequence takes, counted from public tables alone."""
        table = {seq: self.cache.page_table([seq])[0].tolist() for seq in self.model}
        size, wanted = self.cache.page_size, 0
        for page_lists in table.values():
            while page_lists and page_lists[-1] == -1:
                page_lists.pop()
        for seq, begin, end in spans:
            for j in range(begin // size, -(-end // size) if end > begin else begin // size):
                pages = table[seq]
                if j >= len(pages):
                    wanted += 1
                    pages.append(None)
                elif pages[j] is not None and sum(pages[j] in p for p in table.values()) > 1:
                    wanted += 1
                    pages[j] = None
        return wanted

    def attempt(self, call, spans):
        """Run a call that takes pages; it must be refused exactly when they run out. True if it was carried out."""
        wanted, free = self.expect(spans), self.cache.free_pages
        if wanted <= free:
            call()
            assert self.cache.free_pages == free - wanted
            return True
        before = state(self.cache)
        with pytest.raises(CacheFullError):
            call()
        assert state(self.cache) == before
        self.refused += 1
        return False

    def length(self, seq):
        return self.model[seq][0].shape[1]

    def op_new(self):
        if len(self.model) < 8:
            seq = self.cache.new_sequence()
            assert seq not in self.model
            self.model[seq] = tuple(self.canonical(x) for x in self.draw(0))
            return [seq]

    def op_append(self):
        seq = self.some()
        n = int(self.rng.choice([0, 1, 1, 2, 5, self.cache.page_size, 2 * self.cache.page_size + 1]))
        k, v = self.draw(n)
        if self.attempt(lambda: self.cache.append(seq, k, v), [(seq, self.length(seq), self.length(seq) + n)]):
            self.extend(seq, self.canonical(k), self.canonical(v))
            return [seq]

    def op_append_batch(self):
        seqs = [int(s) for s in self.rng.permutation(list(self.model))[: self.rng.integers(1, 5)]]
        n = int(self.rng.integers(1, 4))
        k, v = self.draw(n, batch=len(seqs))
        spans = [(s, self.length(s), self.length(s) + n) for s in seqs]
        if self.attempt(lambda: self.cache.append(seqs, k, v), spans):
            for b, seq in enumerate(seqs):
                self.extend(seq, *(self.canonical(x[:, b] if self.layered else x[b]) for x in (k, v)))
            return seqs

    def op_layer_by_layer(self):
        seq, n = self.some(), int(self.rng.integers(1, 4))
        k, v = self.draw(n)
        begin = self.length(seq)
        if self.attempt(lambda: self.cache.reserve(seq, n), [(seq, begin, begin + n)]):
            for i in range(self.cache.num_layers or 1):
                if self.layered:
                    self.cache.write(seq, k[i], v[i], layer=i)
                else:
                    self.cache.write(seq, k, v, position=begin)
            self.extend(seq, self.canonical(k), self.canonical(v))
            return [seq]

    def op_overwrite(self):
        seq = self.some()
        begin, end = sorted(int(x) for x in self.rng.integers(0, self.length(seq) + 1, 2))
        k, v = self.draw(end - begin)
        if self.attempt(lambda: self.cache.write(seq, k, v, position=begin), [(seq, begin, end)]):
            kept = tuple(x.copy() for x in self.model[seq])
            for x, new in zip(kept, (k, v), strict=True):
                x[:, begin:end] = self.canonical(new)
            self.model[seq] = kept
            return [seq]

    def op_truncate(self):
        seq = self.some()
        length = int(self.rng.integers(0, self.length(seq) + 1))
        self.cache.truncate(seq, length)
        self.model[seq] = tuple(x[:, :length] for x in self.model[seq])
        return [seq]

    def op_fork(self):
        if len(self.model) < 8:
            seq = self.some()
            length = int(self.rng.integers(0, self.length(seq) + 1)) if self.rng.integers(2) else None
            free = self.cache.free_pages
            child = self.cache.fork(seq, length)
            assert self.cache.free_pages == free and child not in self.model
            self.model[child] = tuple(x[:, :length] for x in self.model[seq])
            return [seq, child]

    def op_free(self):
        seq = self.some()
        self.cache.free(seq)
        del self.model[seq]

    def op_import(self):
        if len(self.model) < 8:
            seq = self.some()
            if self.rng.integers(2):
                (new,) = self.cache.import_csr(*self.cache.export_csr([seq]))
            else:
                batch = self.cache.batch([seq], max_pages=self.cache.num_pages)
                (new,) = self.cache.import_table(batch.page_table, batch.kv_lengths)
            self.model[new] = self.model[seq]
            return [new]

    def extend(self, seq, k, v):
        self.model[seq] = tuple(np.concatenate(pair, 1) for pair in zip(self.model[seq], (k, v), strict=True))

    def check(self, seqs):
        for seq in seqs:
            for got, want in zip(self.cache.gather(seq), self.model[seq], strict=True):
                assert np.array_equal(self.canonical(got), want), f"seq {seq}"

    def run(self, steps):
        names = ["new", "append", "append_batch", "layer_by_layer", "overwrite", "truncate", "fork", "free", "import"]
        weights = np.array([2, 4, 4, 2, 2, 1, 3, 1, 1]) / 20
        for step in range(steps):
            name = self.rng.choice(names, p=weights) if self.model else "new"
            self.check(getattr(self, f"op_{name}")() or [])
            if step % 16 == 0 or step == steps - 1:
                assert self.cache.lengths == {seq: self.length(seq) for seq in self.model}
                self.check(self.model)
                check_pages(self.cache)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_walk_equals_a_dictionary(page_size, dtype, layout, layers):
    pages = {1: 40, 3: 16, 16: 7}[page_size]
    options = {"num_pages": pages, "page_size": page_size, "dtype": dtype, "layout": layout, "num_layers": layers}
    cache = make(heads_kv=2, head_dim=4, head_dim_v=3, **options)
    walk = Walk(cache, np.random.default_rng([page_size, DTYPES.index(dtype), LAYOUTS.index(layout), layers or 0]))
    walk.run(2100)  # 48 walks, 100,800 operations
    assert walk.refused > 20  # the pool did run out
    cache.free(list(walk.model))
    assert cache.free_pages == cache.num_pages
    check_pages(cache)
