"""decode() on a GPU, beyond the shared suites: lengths and tables that only the device knows, and graphs that follow them."""

from __future__ import annotations

from typing import Any

import compare
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32

import cuflash
from cuflash.problem import build_attention

pytestmark = pytest.mark.gpu

CAPACITY = 96


def normal(seed: int, *shape: int, dtype: np.dtype = F16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tables() -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(CAPACITY)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    return np.cos(angles).astype(F32), np.sin(angles).astype(F32)


def put(target: Any, values: np.ndarray) -> None:
    """Host numbers into a device array, by their bits."""
    import cupy

    bits = f"u{target.dtype.itemsize}"
    target.view(bits)[...] = cupy.asarray(np.ascontiguousarray(values).view(bits))


class Serving:
    """Four sequences, in pages or in a dense cache, and what a step of them needs."""

    def __init__(self, cupy, page: int, dtype: np.dtype = F16, new: int = 1):
        self.cupy, self.page, self.dtype, self.new = cupy, page, dtype, new
        self.stored = (4 * CAPACITY // page + 2, page) if page else (4, CAPACITY)
        self.caches = [cupy.asarray(normal(n, *self.stored, 2, 64, dtype=dtype)) for n in (1, 2)]
        self.q = cupy.asarray(normal(3, 4, new, 8, 64, dtype=dtype))
        self.k_new, self.v_new = (cupy.asarray(normal(n, 4, new, 2, 64, dtype=dtype)) for n in (4, 5))
        self.out = cupy.empty_like(self.q)
        self.rope = (*map(cupy.asarray, tables()), "half")
        self.table = self.shuffled(0) if page else None

    def shuffled(self, seed: int):
        order = np.random.default_rng(seed).permutation(self.stored[0])[: 4 * CAPACITY // self.page]
        return self.cupy.asarray(order.reshape(4, -1).astype(np.int32))

    def decode(self, lengths, caches=None, table=None, **changed):
        table = self.table if table is None else table
        options = {"k_new": self.k_new, "v_new": self.v_new, "rope": self.rope, "out": self.out, "page_table": table, "causal": True}
        return cuflash.decode(self.q, *(caches or self.caches), lengths, backend="cuda", **{**options, **changed})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("width", [np.int32, np.int64])
def test_lengths_on_the_device_are_those_of_the_host(width, page, dtype):
    import cupy

    s = Serving(cupy, page, dtype, new=3)
    lengths = [0, 17, CAPACITY - 3, 40]
    theirs = [x.copy() for x in s.caches]
    table = None if s.table is None else s.table.get()
    want = s.decode(lengths, theirs, table, out=cupy.empty_like(s.out))
    before = [x.get() for x in s.caches]
    on_device = cupy.asarray(lengths, width)
    for turn in ("first", "warm", "warm, other addresses"):
        s.caches = [cupy.asarray(x) for x in before]
        if turn.endswith("addresses"):
            s.q, s.k_new, s.v_new, s.out = (x.copy() for x in (s.q, s.k_new, s.v_new, s.out))
        put(s.out, np.full(s.out.shape, np.nan, dtype))
        got = s.decode(on_device)
        compare.assert_same_bits(got.get(), want.get(), f"out, {turn}")
        for mine, other in zip(s.caches, theirs, strict=True):
            compare.assert_same_bits(mine.get(), other.get(), f"cache, {turn}")
    assert on_device.get().tolist() == lengths


@pytest.mark.parametrize("page", [0, 16])
def test_a_graph_appends_where_the_lengths_say(page):
    """Lengths that the graph itself counts up, a table that changes, slots that are empty or full; pool memory is spoilt meanwhile."""
    import cupy

    s = Serving(cupy, page, BF16)
    live = cupy.asarray([1, 1, 0, 1], np.int32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        before = [x.get() for x in s.caches]
        lengths = cupy.asarray([0, 30, -1, CAPACITY - 2], np.int32)
        s.decode(lengths)
        lengths += live
        lengths -= live
        for cache, old in zip(s.caches, before, strict=True):
            put(cache, old)
        stream.synchronize()
        stream.begin_capture()
        s.decode(lengths)
        lengths += live
        graph = stream.end_capture()
        known = np.array([0, 30, -1, CAPACITY - 2])
        theirs = [x.copy() for x in s.caches]
        for step in range(5):
            put(s.q, normal(10 + step, 4, 1, 8, 64, dtype=BF16))
            put(s.k_new, normal(20 + step, 4, 1, 2, 64, dtype=BF16))
            if page and step == 3:  # pages move: so do their keys
                old, new = s.table.get().ravel(), s.shuffled(9).get().ravel()
                for cache in (*s.caches, *theirs):
                    moved = cache.get()
                    moved[new] = moved[old]
                    put(cache, moved)
                put(s.table, new.reshape(4, -1))
            spoilt = [cupy.full(1 << n, 0xFF, np.uint8) for n in range(8, 16) for _ in range(8)]
            s.out.view(np.uint16)[...] = 0x7FFF
            del spoilt
            graph.launch(stream)
            got = s.out.get().astype(F32)
            stream.synchronize()
            fits = [0, 1, 3] if known[3] < CAPACITY else [0, 1]
            table = None if s.table is None else s.table.get()[fits]
            q, k_new, v_new = (cupy.asarray(x.get()[fits]) for x in (s.q, s.k_new, s.v_new))
            caches = theirs if page else [cupy.asarray(x.get()[fits]) for x in theirs]
            want = cuflash.decode(
                q, *caches, known[fits], k_new=k_new, v_new=v_new, rope=s.rope, causal=True, page_table=table, backend="cuda",
            )
            if not page:
                for cache, part in zip(theirs, caches, strict=True):
                    whole = cache.get()
                    whole[fits] = part.get()
                    put(cache, whole)
            wanted = want.get().astype(np.float64)  # of other splits, so that sums are rounded otherwise
            compare.assert_close(got[fits], wanted, 2 * compare.eps(BF16) * np.abs(wanted).max(), "out")
            assert not got[2].any() and np.isfinite(got[3]).all()
            for mine, other in zip(s.caches, theirs, strict=True):
                compare.assert_same_bits(mine.get(), other.get(), "cache")
            known += [1, 1, 0, 1]
        assert lengths.get().tolist() == known.tolist()


@pytest.mark.parametrize("page", [0, 16])
def test_lengths_of_the_host_in_calls_that_wait_for_the_gpu(page):
    """None are overwritten by those of a later call before they were read."""
    import cupy

    s = Serving(cupy, page, BF16)
    alone = {"k_new": None, "v_new": None, "rope": None}
    steps = np.random.default_rng(0).integers(0, CAPACITY + 1, (300, 4))
    outs = [cupy.empty_like(s.out) for _ in steps]
    s.decode(steps[0].tolist(), **alone)
    busy = cupy.ones((8192, 8192), F32)
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        busy = busy @ busy
    for lengths, out in zip(steps, outs, strict=True):
        s.decode(lengths.tolist(), out=out, **alone)
    for n, (lengths, out) in enumerate(zip(steps, outs, strict=True)):
        want = s.decode(cupy.asarray(lengths, np.int32), **alone)
        compare.assert_same_bits(out.get(), want.get(), f"call {n}")


@pytest.mark.parametrize("rows", [1, 70])
def test_attention_over_pages_again(rows):
    """Lengths and table on the host or on the device, other ones in each call; one query, and so many that another kernel runs."""
    import cupy

    s = Serving(cupy, 16, new=rows)
    for turn in range(4):
        lengths, table = [turn, 96, 17, 70 + turn], s.shuffled(turn)
        want = cuflash.attention(s.q, *s.caches, kv_lengths=lengths, page_table=table.get(), causal=True, backend="cuda").get()
        for known in (lengths, cupy.asarray(lengths, np.int32)):
            for out in (None, s.out):
                got = cuflash.attention(s.q, *s.caches, kv_lengths=known, page_table=table, causal=True, backend="cuda", out=out)
                compare.assert_same_bits(got.get(), want, f"turn {turn}, lengths in a {type(known).__name__}")


def test_a_warm_call_allocates_results_alone():
    import cupy

    s = Serving(cupy, 16)
    lengths = cupy.asarray([5, 6, 7, 8], np.int32)
    for _ in range(3):  # the first call plans, the next finds its launch and asks for memory in another order
        s.decode(lengths)
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    held = pool.total_bytes()
    for _ in range(20):
        s.decode(lengths)
    assert pool.total_bytes() == held


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("keys, heads", [(8192, (32, 8)), (700, (8, 2)), (512, (128, 1))], ids=["split", "short", "combined"])
def test_each_call_waits_for_the_one_before(keys, heads, captured):
    """Each reads what a kernel has just written, another one's or cuflash's: queries, keys, lengths; and partial results are shared."""
    import cupy

    rng = np.random.default_rng(0)
    (hq, hk), steps = heads, 6
    stored = [cupy.asarray(rng.standard_normal((1, keys, hk, 128)).astype(F16)) for _ in range(2 * steps)]
    new = [cupy.asarray(rng.standard_normal((1, 1, hk, 128)).astype(F16)) for _ in range(2 * steps)]
    first = cupy.asarray(rng.standard_normal((1, 1, hq, 128)).astype(F16))
    counts = [cupy.asarray([keys - 3 * n - 1], np.int32) for n in range(steps)]

    def chain(between):
        q, k, v, lengths = first.copy(), cupy.empty_like(stored[0]), cupy.empty_like(stored[0]), counts[0].copy()
        outs = [cupy.empty_like(q) for _ in range(2 * steps)]

        def run():
            for n in range(steps):
                cupy.add(stored[2 * n], 0, out=k), cupy.add(stored[2 * n + 1], 0, out=v), cupy.add(counts[n], 0, out=lengths)
                between()
                cuflash.decode(q, k, v, lengths, k_new=new[2 * n], v_new=new[2 * n + 1], out=outs[2 * n])
                between()
                cuflash.attention(outs[2 * n], k, v, kernel="decode", out=outs[2 * n + 1])
                between()
                cupy.multiply(outs[2 * n + 1], 8, out=q)
                between()

        return run, outs, q

    wait = cupy.cuda.Device().synchronize
    run, want, _ = chain(wait)
    run()
    run, got, q = chain(lambda: None)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(2):
            run()
            q[...] = first
        if captured:
            stream.begin_capture()
            run()
            graph = stream.end_capture()
            for out in got:
                out.fill(np.nan)
            graph.launch(stream)
        else:
            run()
        stream.synchronize()
    for n, (mine, others) in enumerate(zip(got, want, strict=True)):
        assert bool((mine.view(np.uint16) == others.view(np.uint16)).all()), f"call {n}"


@pytest.mark.parametrize("d", [64, 128])
def test_two_blocks_merge_in_their_shared_memory(d):
    """As many sequences as there are pairs of multiprocessors, each cut into two equal parts; rows and keys left over."""
    import cupy

    batch = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"] // 2
    host = [normal(n, batch, *shape, d) for n, shape in enumerate(((1, 70), (333, 1), (333, 1)))]
    want = compare.expect([build_attention(*host)])
    for _ in range(2):  # the second call is warm, with other addresses
        q, k, v = (cupy.asarray(a) for a in host)
        out, lse = cuflash.attention(q, k, v, kernel="decode", backend="cuda", return_lse=True)
        compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
        compare.assert_close(lse.get(), want.lse[0], want.lse_bound, "lse")
