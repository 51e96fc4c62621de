"""PagedKVCache under load: a random walk beside a plain dictionary, and threads that share a cache."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from caches import DTYPES, LAYOUTS, check_pages, make, state, tokens

from cuflash import CacheFullError, PagedKVCache
from cuflash.pages import PagePool, Sequences


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


# ---- threads


def test_threads_share_a_cache(monkeypatch):
    def with_pauses(method):
        def paused(*args):
            time.sleep(1e-5)  # lets another thread in, unless the lock keeps it out
            return method(*args)

        return paused

    for name in ("take", "share", "release"):
        monkeypatch.setattr(PagePool, name, with_pauses(getattr(PagePool, name)))
    monkeypatch.setattr(Sequences, "held", with_pauses(Sequences.held))
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
