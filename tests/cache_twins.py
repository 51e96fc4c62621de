"""The same random walk through a cache on the host and one on a GPU: they must hold the same bytes in the same pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import check_pages, tokens

import cuflash
from cuflash import CacheFullError, PagedKVCache

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
PARTS = ("k_pages", "v_pages", "k_scales", "v_scales")
FORMS = {  # options of a cache
    "plain": {"dtype": np.float16, "head_dim": 8, "head_dim_v": 8},
    "layers": {"dtype": ml_dtypes.bfloat16, "num_layers": 3, "head_dim_v": 16},
    "heads first": {"dtype": np.float32, "layout": "BHSD", "head_dim_v": 3},
    "layers, heads first": {"dtype": np.float64, "layout": "BHSD", "num_layers": 2, "head_dim": 5, "head_dim_v": 2},
    "float8": {"dtype": E4M3, "num_layers": 2, "head_dim": 16, "head_dim_v": 5},
    "float8, heads first": {"dtype": E4M3, "layout": "BHSD", "page_size": 1, "num_pages": 24, "head_dim_v": 16},
    "pages of one": {"dtype": np.float16, "page_size": 1, "num_pages": 24, "num_layers": 2},
}


class Twins:
    """Two caches and the calls that both get; ``there`` and ``back`` move arrays between the host and the GPU."""

    def __init__(self, there: Callable, back: Callable, seed: int, **options: Any) -> None:
        options = {"num_pages": 8, "page_size": 4, "heads_kv": 2, "head_dim": 8, "head_dim_v": 3, **options}
        self.host, self.device = PagedKVCache(**options), PagedKVCache(**options, device="cuda")
        self.there, self.back, self.rng = there, back, np.random.default_rng(seed)
        self.layered = self.host.num_layers is not None
        self.refused = 0

    def both(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of both; the results must agree, errors as well."""
        results = []
        for cache, move in ((self.host, lambda x: x), (self.device, self.there)):
            given = [move(x) if isinstance(x, np.ndarray) else x for x in args]
            named = {key: move(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
            try:
                results.append(getattr(cache, name)(*given, **named))
            except CacheFullError as error:
                results.append(str(error))
            except ValueError as error:  # nor can a sequence be longer than the pool
                if "exceed its capacity" not in str(error):
                    raise
                results.append(str(error))
        here, there = results
        if isinstance(here, str):
            assert here == there
            self.refused += 1
            return None
        assert type(here) is type(there)
        np.testing.assert_array_equal(here, there)
        return here

    def tokens(self, n: int, batch: int | None = None, layer: bool = False) -> tuple[np.ndarray, np.ndarray]:
        dtype = None
        if self.host.dtype == E4M3:
            dtype = (np.float16, ml_dtypes.bfloat16, np.float32)[self.rng.integers(3)]
        return tokens(self.host, n, int(self.rng.integers(2**31)), batch, self.layered and not layer, dtype)

    def some(self) -> int:
        return int(self.rng.choice(list(self.host.lengths)))

    def step(self) -> None:
        """One random call."""
        lengths = self.host.lengths
        if not lengths or (len(lengths) < 6 and self.rng.random() < 0.2):
            self.both("new_sequence")
            return
        seq = self.some()
        cut = int(self.rng.integers(0, lengths[seq] + 1))
        what = self.rng.integers(9 if self.host.dtype != E4M3 else 10)
        if what <= 1:
            self.both("append", seq, *self.tokens(int(self.rng.integers(0, 10))))
        elif what == 2:
            seqs = list(lengths)[:3]
            self.both("append", seqs, *self.tokens(int(self.rng.integers(1, 4)), len(seqs)))
        elif what == 3 and len(lengths) < 6:
            self.both("fork", seq, cut)
        elif what == 4:
            self.both("truncate", seq, cut)
        elif what == 5 and self.both("reserve", seq, 2) is not None:
            for layer in range(self.host.num_layers or 1):
                self.both("write", seq, *self.tokens(2, layer=True), **({"layer": layer} if self.layered else {}))
        elif what == 6:
            self.both("write", seq, *self.tokens(lengths[seq] - cut), position=cut)
        elif what == 7:
            self.both("free", seq)
        elif what == 8:
            self.both("defragment")
        elif what == 9 and lengths[seq]:  # numbers of one sequence, with their scales, to the end of another
            k, v, k_scale, v_scale = self.host.gather(seq)
            self.both("append", self.some(), k, v, k_scale=k_scale, v_scale=v_scale)

    def check(self) -> None:
        """Bookkeeping and bytes are the same."""
        check_pages(self.host)
        assert self.host.lengths == self.device.lengths
        for mine, theirs in ((getattr(cache, name) for cache in (self.host, self.device)) for name in PARTS):
            assert (theirs is None) is (mine is None)
            assert mine is None or self.back(theirs).tobytes() == mine.tobytes()
        mine, theirs = self.host.batch(), self.device.batch()
        for name in ("page_table", "kv_lengths", "prefix_lengths"):
            np.testing.assert_array_equal(self.back(getattr(theirs, name)), getattr(mine, name))
        if self.host.lengths:
            seq = self.some()
            for layer in (None, *range(self.host.num_layers or 0)):
                for a, b in zip(self.host.gather(seq, layer=layer), self.device.gather(seq, layer=layer), strict=True):
                    b = self.back(b)
                    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def walk(twins: Twins, steps: int) -> None:
    for _ in range(steps):
        twins.step()
        twins.check()
    assert twins.refused  # the pool was full now and then


def exchange(twins: Twins) -> None:
    """Page tables out of one cache and into another over the same pages, by arrays where the pages are and by lists."""
    for n in (5, 0, 8, 1):
        seq = twins.both("new_sequence")
        twins.both("append", seq, *twins.tokens(n))
    twins.both("fork", seq)
    cache = twins.device
    scales = {"k_scales": cache.k_scales, "v_scales": cache.v_scales}
    again = PagedKVCache.from_pages(cache.k_pages, cache.v_pages, layout=cache.layout, **scales)
    assert again.device == cache.device and again.k_pages is cache.k_pages
    csr = cache.export_csr()
    for got, want in zip(csr, twins.host.export_csr(), strict=True):
        np.testing.assert_array_equal(twins.back(got), want)
    ids = again.import_csr(*csr)
    assert again.lengths == dict(zip(ids, cache.lengths.values(), strict=True)) and again.free_pages == cache.free_pages
    again.free(ids)
    ids = again.import_table(cache.page_table(), twins.back(cache.kv_lengths()).tolist())
    np.testing.assert_array_equal(twins.back(again.page_table()), twins.host.page_table())
    for a, b in zip(again.gather(ids[2]), twins.host.gather(2), strict=True):
        assert twins.back(a).tobytes() == b.tobytes()


def refuses(twins: Twins) -> None:
    """Tokens of the other kind, by name."""
    seq = twins.both("new_sequence")
    k, v = twins.tokens(2)
    with pytest.raises(TypeError, match=r"k: in host memory \(NumPy\); the cache is in cupy, GPU 0"):
        twins.device.append(seq, k, v)
    with pytest.raises(TypeError, match=r"v: in host memory"):
        twins.device.append(seq, twins.there(k), v)
    with pytest.raises(TypeError, match=r"k: in cupy, GPU 0; the cache is in host memory \(NumPy\)"):
        twins.host.append(seq, twins.there(k), twins.there(v))
    with pytest.raises(TypeError, match="v_pages: in host memory"):
        PagedKVCache.from_pages(twins.device.k_pages, twins.host.v_pages)
    if twins.host.dtype == E4M3:
        pages = twins.device.k_pages, twins.device.v_pages
        with pytest.raises(TypeError, match="v_scales: in host memory"):
            PagedKVCache.from_pages(*pages, k_scales=twins.device.k_scales, v_scales=twins.host.v_scales)
    assert twins.host.lengths == twins.device.lengths == {seq: 0}


def decodes_float8(there: Callable, back: Callable, shared: bool) -> None:
    """Scales come with the pages, and those of new tokens are written, layer by layer; by the host's cache and the GPU's."""
    t = Twins(there, back, 0, dtype=E4M3, num_layers=2, head_dim=16, head_dim_v=8, num_pages=16)
    prompt = t.both("new_sequence")
    t.both("append", prompt, *t.tokens(9))
    seqs = [prompt, t.both("fork", prompt), t.both("fork", prompt, 8)]
    for seq in seqs[1:]:
        t.both("append", seq, *t.tokens(2))
    t.both("reserve", seqs, 1)
    function = cuflash.decode_shared_prefix if shared else cuflash.decode
    for layer in range(2):
        q, k, v = (t.rng.standard_normal((3, 1, h, d)).astype(np.float16) for h, d in ((4, 16), (2, 16), (2, 8)))
        found = []
        for cache, move, backend in ((t.host, lambda x: x, "reference"), (t.device, there, None)):
            b = cache.batch(seqs, reserved=1).layer(layer)
            lengths = (b.kv_lengths, b.prefix_lengths) if shared else (b.kv_lengths,)
            options = {"page_table": b.page_table, "k_scale": b.k_scales, "v_scale": b.v_scales, "backend": backend}
            found.append(function(move(q), b.k_pages, b.v_pages, *lengths, k_new=move(k), v_new=move(v), **options))
        np.testing.assert_allclose(back(found[1]).astype(np.float32), found[0].astype(np.float32), atol=4e-3)
        codes, scale = cuflash.quantize_kv(k[2])
        for cache, take in ((t.host, lambda x: x), (t.device, back)):
            dense, _, its, _ = map(take, cache.gather(seqs[2], layer=layer))
            assert dense[-1].tobytes() == codes.tobytes() and its[-1].tobytes() == scale.tobytes()
    t.check()
