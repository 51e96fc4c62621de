"""The same random walk through a cache on the host and one on a GPU: they must hold the same bytes in the same pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from caches import check_pages, tokens

from cuflash import CacheFullError, PagedKVCache

FORMS = {  # options of a cache
    "plain": {"dtype": np.float16, "head_dim": 8, "head_dim_v": 8},
    "layers": {"dtype": ml_dtypes.bfloat16, "num_layers": 3, "head_dim_v": 16},
    "heads first": {"dtype": np.float32, "layout": "BHSD", "head_dim_v": 3},
    "layers, heads first": {"dtype": np.float64, "layout": "BHSD", "num_layers": 2, "head_dim": 5, "head_dim_v": 2},
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
            try:
                results.append(getattr(cache, name)(*given, **options))
            except CacheFullError as error:
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
        return tokens(self.host, n, int(self.rng.integers(2**31)), batch, self.layered and not layer)

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
        what = self.rng.integers(9)
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

    def check(self) -> None:
        """Bookkeeping and bytes are the same."""
        check_pages(self.host)
        assert self.host.lengths == self.device.lengths
        for mine, theirs in ((self.host.k_pages, self.device.k_pages), (self.host.v_pages, self.device.v_pages)):
            assert self.back(theirs).tobytes() == mine.tobytes()
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
    again = PagedKVCache.from_pages(cache.k_pages, cache.v_pages, layout=cache.layout)
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
    assert twins.host.lengths == twins.device.lengths == {seq: 0}
