"""PagedKVCache: what it refuses, in which words, and that nothing has changed then."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from caches import check_pages, make, state, tokens

from cuflash import CacheFullError


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
        with pytest.raises(ValueError, match=f"seq: {seq} is not in the cache; it was freed"):
            call(seq)
        with pytest.raises(ValueError, match="seq: 99 is not in the cache; no such id"):
            call(99)
        with pytest.raises(ValueError, match="seq: got -1; it must be at least 0"):
            call(-1)
        with pytest.raises(TypeError, match="seq: got 1.0; it must be an integer"):
            call(1.0)
        with pytest.raises(TypeError, match="seq: got True; it must be an integer"):
            call(True)
    with pytest.raises(ValueError, match=f"seqs: {other} comes more than once"):
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
        (k[:, :1], v, ValueError, r"k: shape \(5, 1, 8\); it must be \(n, 2, 8\)"),
        (k, v[..., :2], ValueError, r"v: shape \(5, 2, 2\); it must be \(n, 2, 3\)"),
        (k[None], v, ValueError, r"k: shape \(1, 5, 2, 8\); it must be \(n, 2, 8\)"),
        (k, tokens(cache, 6)[1], ValueError, "v: 6 tokens; they must be as many as those of k, 5"),
        (k.astype(np.float64), v, TypeError, "k: dtype float64; it must be float32"),
        (k, v.astype(np.float16), TypeError, "v: dtype float16; it must be float32"),
        (k.tolist(), v, TypeError, "k: got list; allowed are arrays of NumPy"),
    ]:
        with pytest.raises(kind, match=message):
            cache.append(seq, bad_k, bad_v)
    assert state(cache) == before
    with pytest.raises(ValueError, match=r"k: shape \(5, 2, 8\); it must be \(1, n, 2, 8\)"):
        cache.append([seq], k, v)
    with pytest.raises(ValueError, match=r"k: shape \(5, 2, 8\); it must be \(2, n, 8\)"):
        _append_first(make(layout="BHSD"), k, v)
    bf16 = make(dtype=ml_dtypes.bfloat16)
    k, v = tokens(bf16, 2)
    with pytest.raises(TypeError, match="k: dtype uint16; it must be bfloat16"):
        _append_first(bf16, k.view(np.uint16), v.view(np.uint16))
    layers = make(num_layers=2)
    with pytest.raises(ValueError, match=r"k: shape \(5, 2, 8\); it must be \(2, n, 2, 8\)"):
        _append_first(layers, *tokens(cache, 5))
    with pytest.raises(ValueError, match="layer: got 2; it must be at most 1"):
        layers.write(0, *tokens(cache, 0), layer=2)


def _append_first(cache, k, v):
    cache.append(cache.new_sequence(), k, v)


def test_write_needs_a_reservation():
    cache = make()
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 5))
    before = state(cache)
    for position in (4, 5):
        with pytest.raises(ValueError, match=f"seq {seq}: 2 tokens at position {position} lie outside its 5 tokens"):
            cache.write(seq, *tokens(cache, 2), position=position)
    with pytest.raises(ValueError, match="position: got -1; it must be at least 0"):
        cache.write(seq, *tokens(cache, 2), position=-1)
    with pytest.raises(ValueError, match="6 tokens at position -1 lie outside"):
        cache.write(seq, *tokens(cache, 6))
    for length, allowed in ((6, "at most 5"), (-1, "at least 0")):
        with pytest.raises(ValueError, match=f"length: got {length}; it must be {allowed}"):
            cache.truncate(seq, length)
        with pytest.raises(ValueError, match=f"length: got {length}; it must be {allowed}"):
            cache.fork(seq, length)
    with pytest.raises(ValueError, match="n: got -1; it must be at least 0"):
        cache.reserve(seq, -1)
    assert state(cache) == before


SIZES = ["num_pages", "page_size", "heads_kv", "head_dim", "head_dim_v", "num_layers", "max_pages_per_seq"]


@pytest.mark.parametrize("name", SIZES)
def test_constructor_sizes(name):
    with pytest.raises(ValueError, match=f"{name}: got 0; it must be at least 1"):
        make(**{name: 0})
    with pytest.raises(TypeError, match=f"{name}: got 2.0; it must be an integer"):
        make(**{name: 2.0})


def test_constructor_kinds():
    for dtype in (None, "nonsense", np.uint16, np.int8):
        with pytest.raises(TypeError, match="dtype: "):
            make(dtype=dtype)
    with pytest.raises(NotImplementedError, match="dtype: float8_e5m2 arrays are not supported yet"):
        make(dtype=ml_dtypes.float8_e5m2)
    with pytest.raises(TypeError, match="dtype: got 'nonsense', which is no dtype; allowed are .*float64, float8_e4m3fn"):
        make(dtype="nonsense")
    with pytest.raises(ValueError, match="layout: got 'SBHD'; allowed are 'BSHD', 'BHSD'"):
        make(layout="SBHD")
    assert make(head_dim_v=None).v_pages.shape[-1] == 8


def test_a_failed_copy_takes_the_append_back(monkeypatch):
    cache = make()
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 3))
    before = state(cache)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(cache._stored, "write", fail)
    with pytest.raises(MemoryError):
        cache.append(seq, *tokens(cache, 9))
    assert state(cache)[:3] == before[:3] and state(cache)[5:] == before[5:]
    check_pages(cache)
