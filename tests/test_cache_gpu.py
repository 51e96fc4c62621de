"""PagedKVCache, decode_shared_prefix and merge_states on a GPU: the same as on the host, graphs that follow a batch, streams, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cache_twins
import compare
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32
from test_shared_prefix import CASES, PREFIX, Batch

import cuflash
from cuflash import PagedKVCache

pytestmark = pytest.mark.gpu


def there(a: np.ndarray) -> Any:
    """A copy on the GPU, by its bits."""
    import cupy

    return cupy.asarray(np.ascontiguousarray(a).view(f"u{a.dtype.itemsize}")).view(a.dtype) if a.size else cupy.empty(a.shape, a.dtype)


def back(a: Any) -> np.ndarray:
    return a.view(f"u{a.dtype.itemsize}").get().view(a.dtype) if a.size else np.empty(a.shape, a.dtype)


@pytest.mark.parametrize("form", cache_twins.FORMS)
def test_the_same_as_on_the_host(form):
    for seed in (1, 2):
        cache_twins.walk(cache_twins.Twins(there, back, seed, **cache_twins.FORMS[form]), 150)


@pytest.mark.parametrize("form", cache_twins.FORMS)
def test_exchange_and_kinds(form):
    cache_twins.exchange(cache_twins.Twins(there, back, 0, **cache_twins.FORMS[form]))
    cache_twins.refuses(cache_twins.Twins(there, back, 0, **cache_twins.FORMS[form]))


@pytest.mark.parametrize("shared", [False, True])
def test_decode_over_a_batch_of_float8(shared):
    cache_twins.decodes_float8(there, back, shared)


class Sequences:
    """Sequences in a cache on the GPU, and their keys and values on the host."""

    def __init__(self, dtype: np.dtype = BF16, pages: int = 64):
        self.cache = PagedKVCache(num_pages=pages, page_size=16, heads_kv=2, head_dim=64, dtype=dtype, device="cuda")
        self.rng, self.dtype = np.random.default_rng(0), dtype
        self.known: dict[int, list[np.ndarray]] = {}

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def new(self, n: int) -> int:
        seq = self.cache.new_sequence()
        self.known[seq] = [self.normal(0, 2, 64) for _ in "kv"]
        self.append(seq, n)
        return seq

    def append(self, seq: int, n: int) -> None:
        tokens = [self.normal(n, 2, 64) for _ in "kv"]
        self.cache.append(seq, *map(there, tokens))
        self.extend(seq, tokens)

    def extend(self, seq: int, tokens: list[np.ndarray]) -> None:
        self.known[seq] = [np.concatenate([a, b]) for a, b in zip(self.known[seq], tokens, strict=True)]

    def fork(self, seq: int, length: int) -> int:
        new = self.cache.fork(seq, length)
        self.known[new] = [a[:length] for a in self.known[seq]]
        return new

    def expect(self, seq: int, q: np.ndarray) -> tuple[np.ndarray, float]:
        k, v = (a.astype(F32) for a in self.known[seq])
        return cuflash.attention(q.astype(F32), k, v, backend="reference"), np.abs(v).max(initial=0)


@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared prefix"])
def test_a_graph_follows_a_batch(shared):
    """Growth, forks, truncation, other sequences, fewer of them, and pages that move; captured once."""
    import cupy

    function = cuflash.decode_shared_prefix if shared else cuflash.decode
    with cupy.cuda.Stream(non_blocking=True) as stream:
        s = Sequences()
        first = s.new(100)
        q, new = there(s.normal(4, 1, 8, 64)), [there(s.normal(4, 1, 2, 64)) for _ in "kv"]
        out = cupy.empty_like(q)
        batch = s.cache.batch([first], max_sequences=4, max_pages=12)
        extra = (batch.prefix_lengths,) if shared else ()

        def call() -> None:
            options = {"page_table": batch.page_table, "k_new": new[0], "v_new": new[1], "out": out}
            function(q, batch.k_pages, batch.v_pages, batch.kv_lengths, *extra, **options)

        s.cache.reserve(first, 1)
        s.cache.refresh(batch, [first], reserved=1)
        call()  # compiles
        s.cache.truncate(first, 100)
        stream.synchronize()
        stream.begin_capture()
        call()
        graph = stream.end_capture()

        def step(seqs: list[int]) -> None:
            tokens = [s.normal(4, 1, 2, 64) for _ in "kv"]
            queries = s.normal(4, 1, 8, 64)
            for target, values in ((q, queries), (new[0], tokens[0]), (new[1], tokens[1])):
                target.view(np.uint16)[...] = cupy.asarray(values.view(np.uint16))
            out.view(np.uint16)[...] = 0x7FFF
            s.cache.reserve(seqs, 1)
            s.cache.refresh(batch, seqs, reserved=1)
            graph.launch(stream)
            got = back(out).astype(F32)
            for b, seq in enumerate(seqs):
                s.extend(seq, [a[b] for a in tokens])
                want, largest = s.expect(seq, queries[b])
                compare.assert_close(got[b], want.astype(np.float64), 2 * compare.eps(BF16) * largest, f"row {b}")
                for mine, other in zip(s.cache.gather(seq), s.known[seq], strict=True):
                    compare.assert_same_bits(back(mine), other, "tokens")

        step([first])
        forks = [s.fork(first, n) for n in (101, 96, 64)]
        step([first, *forks])
        step([first, *forks])
        s.cache.truncate(first, 40)
        s.known[first] = [a[:40] for a in s.known[first]]
        other = s.new(17)
        step([other, first])
        s.cache.free(forks[:2])
        s.cache.defragment()
        step([forks[2], first, other])
        step([first])
        assert s.cache.batch([first, forks[2]]).prefix_lengths.get().tolist() == [32, 32]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_shared_prefix(case, dtype):
    batch = Batch(dtype=dtype, **CASES[case])
    reference, _ = batch.plain(backend="reference")
    naive, _ = batch.plain(backend="cpu", kernel="naive")
    on_device = ["k_new", "v_new", "mask"]
    args = [*map(there, batch.arrays), *(there(np.array(x, np.int32)) for x in (batch.lengths, [PREFIX] * len(batch.lengths)))]
    options = {name: there(x) if name in [*on_device, "page_table"] else x for name, x in batch.options.items()}
    if "rope" in options:
        options["rope"] = (*map(there, options["rope"][:2]), options["rope"][2])
    for lengths in ("of the device", "again", "of the host"):
        args[1:3] = map(there, batch.arrays[1:])
        if lengths == "of the host":
            args[3], args[4] = batch.lengths, PREFIX
        results = cuflash.decode_shared_prefix(*args, return_lse=True, **options)
        for name, mine, exact, other in zip(("out", "lse"), results, reference, naive, strict=True):
            exact, other = exact.astype(np.float64), other.astype(np.float64)
            finite = np.isfinite(exact)
            error, largest = np.abs(other - exact)[finite].max(initial=0), np.abs(exact)[finite].max(initial=0)
            compare.assert_close(back(mine), exact, 2 * error + 2 * compare.eps(back(mine).dtype) * largest, f"{name}, {lengths}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 16, 17])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_merge_states(n, dtype, layout):
    """As on the host, empty parts, infinities and NaN included; into fresh arrays, into inputs, and beside them in memory."""
    rng = np.random.default_rng(n)
    real = np.float64 if dtype == np.float64 else F32
    outs = [rng.standard_normal((2, 3, 3, 80)).astype(dtype) for _ in range(n)]
    lses = [(4 * rng.standard_normal((2, 3, 3))).astype(real) for _ in range(n)]
    for lse in lses:
        lse[1, 0, 2] = -np.inf
    if n > 1:
        lses[0][0], outs[0][0], lses[1][1, 2, 0], lses[2][1, 1, 1] = -np.inf, np.nan, np.inf, np.nan
    want = cuflash.merge_states(outs, lses, layout=layout)
    given = [there(a) for a in outs], [there(a) for a in lses]
    got = cuflash.merge_states(*given, layout=layout)
    for mine, other in zip(got, want, strict=True):
        exact = other.astype(np.float64)
        compare.assert_close(back(mine), exact, 8 * compare.eps(other.dtype) * np.abs(exact[np.isfinite(exact)]).max(), "merged")
    memory = there(np.concatenate([outs[0].ravel(), np.zeros(80, dtype)]))
    shifted = memory[:-80].reshape(outs[0].shape), memory[80:].reshape(outs[0].shape)
    for parts, out, lse in (
        ([shifted[0], *given[0][1:]], shifted[1], None), (given[0], given[0][-1], given[1][0]),
    ):  # fmt: skip
        again = cuflash.merge_states(parts, given[1], out=out, lse=lse, layout=layout)
        assert again[0] is out and (lse is None or again[1] is lse)
        for mine, other in zip(again, got, strict=True):
            compare.assert_same_bits(back(mine), back(other), "in place")


def test_threads_share_a_cache():
    """Each on its own sequences and on the default stream; every token ends where it belongs."""
    cache = PagedKVCache(num_pages=128, page_size=4, heads_kv=1, head_dim=8, dtype=F16, device="cuda")

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            seq, k, v = cache.new_sequence(), *(rng.standard_normal((n, 1, 8)).astype(F16) for n in (0, 0))
            for _ in range(5):
                a, b = (rng.standard_normal((3, 1, 8)).astype(F16) for _ in "kv")
                cache.append(seq, there(a), there(b))
                k, v = np.concatenate([k, a]), np.concatenate([v, b])
            fork = cache.fork(seq, 7)
            cache.append(fork, there(k[:2]), there(v[:2]))
            for got, want in zip((*cache.gather(seq), *cache.gather(fork)), (k, v, np.r_[k[:7], k[:2]], np.r_[v[:7], v[:2]]), strict=True):
                compare.assert_same_bits(back(got), want, "tokens")
            cache.free([seq, fork])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))
    assert cache.free_pages == 128


def test_streams_that_are_ordered_by_events():
    """Tokens that one stream still computes; pages that another stream reads are freed and written again behind its event."""
    import cupy

    cache = PagedKVCache(num_pages=4, page_size=16, heads_kv=1, head_dim=64, dtype=F16, device="cuda")
    a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    for turn in range(20):
        with a:
            slow = cupy.ones((1 << 22,), F32)
            for _ in range(20):
                slow = slow * 1.0
            k = (slow[: 64 * 64] * turn).astype(F16).reshape(64, 1, 64)
            seq = cache.new_sequence()
            cache.append(seq, k, k)
            ready = a.record()
        with b:
            b.wait_event(ready)
            got = cache.gather(seq)[0]
            done = b.record()
        a.wait_event(done)
        with a:
            cache.free(seq)
        b.synchronize()
        assert (got.get() == turn).all()
