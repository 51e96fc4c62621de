"""PagedKVCache in float8_e4m3fn: tokens are quantized as they come or come with their scales, which go wherever their tokens go."""

from __future__ import annotations

import compare
import ml_dtypes
import numpy as np
import pytest
from caches import LAYOUTS, check_pages, make, state, tokens

import cuflash
from cuflash import PagedKVCache

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        compare.assert_same_bits(np.ascontiguousarray(a), np.ascontiguousarray(b))


def quantized(k, v, layout="BSHD"):
    """In the order of gather."""
    (k, k_scale), (v, v_scale) = (cuflash.quantize_kv(x, layout=layout) for x in (k, v))
    return k, v, k_scale, v_scale


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32], ids=str)
@pytest.mark.parametrize("page_size", [1, 3])
def test_tokens_are_quantized_as_by_quantize_kv(page_size, dtype, layout, layers):
    cache = make(num_pages=24, page_size=page_size, dtype=E4M3, layout=layout, num_layers=layers)
    seqs = [cache.new_sequence() for _ in range(2)]
    parts = [tokens(cache, n, seed=n, batch=2, layers=layers is not None, dtype=dtype) for n in (5, 1, 2)]
    for k, v in parts:
        cache.append(seqs, k, v)
    axis = 0 if layout == "BSHD" else 1
    for b, seq in enumerate(seqs):
        for layer in range(layers or 1):
            at = (layer, b) if layers else (b,)
            k, v = (np.concatenate([pair[n][at] for pair in parts], axis) for n in range(2))
            got = cache.gather(seq, layer=layer if layers else None)
            assert [a.dtype for a in got] == [E4M3, E4M3, np.float32, np.float32] and all(a.flags.c_contiguous for a in got)
            same(got, quantized(k, v, layout))
    check_pages(cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_gathered_can_be_appended(layout):
    cache = make(dtype=E4M3, layout=layout, num_layers=2)
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 7, layers=True, dtype=np.float16))
    found = cache.gather(seq)
    other = make(dtype=E4M3, layout=layout, num_layers=2, page_size=3)
    copy = other.new_sequence()
    k, v, k_scale, v_scale = found
    other.append(copy, k, v, k_scale=k_scale, v_scale=v_scale)
    same(other.gather(copy), found)
    other.reserve(copy, 7)
    for layer in (1, 0):
        other.write(copy, k[layer], v[layer], k_scale=k_scale[layer], v_scale=v_scale[layer], layer=layer)
    axis = 1 if layout == "BSHD" else 2
    same(other.gather(copy), [np.concatenate([a, a], axis) for a in found])


def test_scales_are_copied_on_write_and_moved():
    cache = make(num_pages=6, dtype=E4M3)
    first, second = cache.new_sequence(), cache.new_sequence()
    cache.append(first, *tokens(cache, 4, dtype=np.float32))
    k, v = tokens(cache, 6, seed=1, dtype=np.float32)
    cache.append(second, k, v)
    fork = cache.fork(second)
    new = tuple(1000 * x for x in tokens(cache, 1, seed=2, dtype=np.float32))  # of other scales
    cache.append(fork, *new)
    want = [quantized(k, v), quantized(*(np.concatenate(x) for x in zip((k, v), new, strict=True)))]
    for seq, numbers in zip((second, fork), want, strict=True):
        same(cache.gather(seq), numbers)
    cache.free(first)
    assert cache.defragment() == 1
    for seq, numbers in zip((second, fork), want, strict=True):
        same(cache.gather(seq), numbers)
    cache.truncate(fork, 3)
    same(cache.gather(fork), [a[:3] for a in want[0]])
    check_pages(cache)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_reads_and_writes_pages_and_scales(layout, backend):
    """As over the dense sequences that gather gives."""
    cache = make(num_pages=16, page_size=3, dtype=E4M3, layout=layout, num_layers=2, head_dim_v=8)
    seqs = [cache.new_sequence() for _ in range(3)]
    for n, seq in enumerate(seqs):
        cache.append(seq, *tokens(cache, 3 * n + 2, seed=n, layers=True, dtype=np.float32))
    cache.reserve(seqs, 2)
    batch = cache.batch(seqs, reserved=2)
    k_new, v_new = tokens(cache, 2, seed=9, batch=3, dtype=np.float32)
    q = np.random.default_rng(0).standard_normal((3, 2, 4, 8) if layout == "BSHD" else (3, 4, 2, 8)).astype(np.float32)
    options = {"causal": True, "layout": layout, "backend": backend}
    for layer in (0, 1):
        b = batch.layer(layer)
        assert b.k_scales.shape == b.k_pages.shape[:-1] and np.shares_memory(b.v_scales, cache.v_scales)
        before = [cache.gather(seq, layer=layer) for seq in seqs]
        scales = {"k_scale": b.k_scales, "v_scale": b.v_scales}
        out = cuflash.decode(
            q, b.k_pages, b.v_pages, b.kv_lengths, page_table=b.page_table, k_new=k_new, v_new=v_new, **scales, **options,
        )
        axis = 0 if layout == "BSHD" else 1
        for row, seq in enumerate(seqs):
            new = quantized(k_new[row], v_new[row], layout)
            length = cache.lengths[seq] - 2
            want = [np.concatenate([np.take(a, range(length), axis), x], axis) for a, x in zip(before[row], new, strict=True)]
            k, v, k_scale, v_scale = dense = cache.gather(seq, layer=layer)
            same(dense, want)
            k, v = (a.astype(np.float64) * s.astype(np.float64)[..., None] for a, s in ((k, k_scale), (v, v_scale)))
            one = q[row : row + 1].astype(np.float64), k[None], v[None]
            exact = cuflash.attention(*one, causal=True, layout=layout, backend="reference")
            np.testing.assert_allclose(out[row], exact[0], rtol=1e-4, atol=1e-4 * np.abs(v).max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_that_exist(layout):
    cache = make(dtype=E4M3, layout=layout)
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 9, dtype=np.float16))
    scales = {"k_scales": cache.k_scales, "v_scales": cache.v_scales}
    again = PagedKVCache.from_pages(cache.k_pages, cache.v_pages, layout=layout, **scales)
    assert again.k_scales is cache.k_scales and again.nbytes == cache.nbytes == 8 * 4 * 2 * (8 + 3 + 2 * 4)
    (copy,) = again.import_csr(*cache.export_csr())
    same(again.gather(copy), cache.gather(seq))


def test_pages_of_one_token_whose_axis_has_no_stride():
    pages = (np.zeros((4, 1, 2, 8), np.uint8).view(E4M3) for _ in "kv")
    k_scales, v_scales = (np.zeros((4, 2), np.float32)[:, None] for _ in "kv")
    assert k_scales.strides[1] == 0
    cache = PagedKVCache.from_pages(*pages, k_scales=k_scales, v_scales=v_scales)
    seq = cache.new_sequence()
    k, v = (np.random.default_rng(n).standard_normal((3, 2, 8)).astype(np.float16) for n in range(2))
    cache.append(seq, k[:2], v[:2])
    cache.reserve(seq, 1)
    b = cache.batch(seq, reserved=1)
    cuflash.decode(
        k[None, :1], b.k_pages, b.v_pages, b.kv_lengths, page_table=b.page_table, k_scale=b.k_scales, v_scale=b.v_scales,
        k_new=k[None, 2:], v_new=v[None, 2:], backend="reference",
    )
    same(cache.gather(seq), quantized(k, v))


def test_other_dtypes_have_no_scales():
    cache = make()
    assert cache.k_scales is cache.v_scales is cache.batch().k_scales is cache.batch().v_scales is None
    assert len(cache.gather(cache.new_sequence())) == 2


def test_what_is_refused():
    cache = make(dtype=E4M3)
    seq = cache.new_sequence()
    k, v, k_scale, v_scale = quantized(*tokens(cache, 2, dtype=np.float32))
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    before = state(cache)
    for error, match, args, options in (
        (TypeError, "k_scale: got None beside tokens in float8_e4m3fn; float8_e4m3fn has scales", (k, v), {}),
        (TypeError, "v_scale: got None beside tokens in float8_e4m3fn", (k, v), {"k_scale": k_scale}),
        (TypeError, "k_scale: got numpy.ndarray beside tokens in float32", tokens(cache, 2, dtype=np.float32), scales),
        (TypeError, "k: dtype float64; it must be one of float16, bfloat16, float32, or float8_e4m3fn with scales",
         tokens(cache, 2, dtype=np.float64), {}),
        (TypeError, "v: dtype float8_e4m3fn; it must be float16", (k.astype(np.float16), v), {}),
        (TypeError, "v_scale: dtype float64; it must be float32", (k, v), {**scales, "v_scale": v_scale.astype(np.float64)}),
        (TypeError, "k_scale: got float", (k, v), {**scales, "k_scale": 1.0}),
        (ValueError, r"k_scale: shape \(2, 2, 1\); it must be \(n, 2\)", (k, v), {**scales, "k_scale": k_scale[..., None]}),
        (ValueError, "v_scale: 1 tokens; they must be as many as those of k, 2", (k, v), {**scales, "v_scale": v_scale[:1]}),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            cache.append(seq, *args, **options)
    assert state(cache) == before
    plain = make()
    with pytest.raises(TypeError, match="k_scale: got numpy.ndarray beside tokens in float32; float8_e4m3fn has scales, others have none"):
        plain.append(plain.new_sequence(), *tokens(plain, 2), **scales)


def test_pages_that_are_refused():
    cache, plain = make(dtype=E4M3), make()
    pages = cache.k_pages, cache.v_pages
    own = {"k_scales": cache.k_scales, "v_scales": cache.v_scales}
    shared = np.zeros((8, 4, 2), np.float32)
    for error, match, given, scales in (
        (TypeError, "k_scales: got None beside pages in float8_e4m3fn", pages, {}),
        (TypeError, "v_scales: got None beside pages in float8_e4m3fn", pages, {"k_scales": cache.k_scales}),
        (TypeError, "k_scales: got numpy.ndarray beside pages in float32", (plain.k_pages, plain.v_pages), own),
        (TypeError, "v_pages: dtype float32 differs from k_pages's float8_e4m3fn", (cache.k_pages, plain.v_pages), own),
        (TypeError, "k_scales: dtype float64; it must be float32", pages, {**own, "k_scales": shared.astype(np.float64)}),
        (ValueError, r"v_scales: shape \(8, 4\); it must be \(8, 4, 2\)", pages, {**own, "v_scales": shared[..., 0]}),
        (ValueError, "v_scales: overlaps k_scales in memory", pages, {"k_scales": shared, "v_scales": shared}),
    ):
        with pytest.raises(error, match=match):
            PagedKVCache.from_pages(*given, **scales)
    frozen = shared.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="k_scales: the array is read-only"):
        PagedKVCache.from_pages(*pages, k_scales=frozen, v_scales=shared)


def test_an_append_that_does_not_fit_changes_nothing():
    cache = make(num_pages=2, dtype=E4M3)
    seq = cache.new_sequence()
    cache.append(seq, *tokens(cache, 5, dtype=np.float16))
    other = cache.new_sequence()
    before = state(cache)
    with pytest.raises(cuflash.CacheFullError):
        cache.append(other, *tokens(cache, 1, dtype=np.float16))
    assert state(cache) == before
