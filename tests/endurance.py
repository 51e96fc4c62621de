"""A server's life in short: thousands of requests over one paged cache, with results checked against recomputation all the way.

Requests fork prompts that they share, or start afresh; they are prefilled, decode together, roll tokens back, fork themselves, are
cancelled or end. Afterwards no page, memory, module or handle may be left over. On a GPU the decoding is two CUDA graphs, captured once.

    python tests/endurance.py [--requests 20000] [--seed 1] [--device cpu|cuda] [--seconds 300]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import CacheFullError, PagedKVCache, checks, decode, decode_shared_prefix, jit

HEADS, HEADS_KV, D, PAGE = 8, 2, 64, 16
PAGES, ROWS, LONGEST = 110, 32, 640  # of the pool, of a batch, of a sequence
DTYPE = np.dtype(np.float16)
EPS = float(np.finfo(DTYPE).eps)


@dataclass
class Request:
    """A sequence of the cache, what it holds, and how many steps are left."""

    seq: int
    left: int
    tokens: list[np.ndarray] = field(default_factory=lambda: [np.empty((LONGEST, HEADS_KV, D), DTYPE) for _ in "kv"])
    length: int = 0

    def extend(self, k: np.ndarray, v: np.ndarray) -> None:
        for mine, new in zip(self.tokens, (k, v), strict=True):
            mine[self.length : self.length + len(new)] = new
        self.length += len(k)


class OnHost:
    """Decoding on the CPU."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache

    there = staticmethod(lambda a: a)
    back = staticmethod(lambda a: a)

    def step(self, seqs: list[int], shared: bool, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        b = self.cache.batch(seqs, reserved=1)
        options = {"page_table": b.page_table, "k_new": k, "v_new": v}
        if shared:
            return decode_shared_prefix(q, b.k_pages, b.v_pages, b.kv_lengths, b.prefix_lengths, **options)
        return decode(q, b.k_pages, b.v_pages, b.kv_lengths, **options)


class OnGpu:
    """Decoding by graphs over one batch that is refreshed."""

    def __init__(self, cache: PagedKVCache) -> None:
        import cupy

        self.cupy, self.cache = cupy, cache
        self.batch = b = cache.batch([], max_sequences=ROWS, max_pages=LONGEST // PAGE)
        self.q, self.k, self.v = (cupy.zeros((ROWS, 1, h, D), DTYPE) for h in (HEADS, HEADS_KV, HEADS_KV))
        self.out = cupy.empty_like(self.q)
        options = {"page_table": b.page_table, "k_new": self.k, "v_new": self.v, "out": self.out}
        calls = (
            lambda: decode(self.q, b.k_pages, b.v_pages, b.kv_lengths, **options),
            lambda: decode_shared_prefix(self.q, b.k_pages, b.v_pages, b.kv_lengths, b.prefix_lengths, **options),
        )
        self.stream = cupy.cuda.get_current_stream()
        self.graphs = []
        for call in calls:
            call()  # no sequence is in the batch: it compiles
            self.stream.synchronize()
            self.stream.begin_capture()
            call()
            self.graphs.append(self.stream.end_capture())

    def there(self, a: np.ndarray) -> Any:
        return self.cupy.asarray(a)

    def back(self, a: Any) -> np.ndarray:
        return a.get()

    def step(self, seqs: list[int], shared: bool, *values: np.ndarray) -> np.ndarray:
        n = len(seqs)
        for target, new in zip((self.q, self.k, self.v), values, strict=True):
            target[:n].set(new)
        self.cache.refresh(self.batch, seqs, reserved=1)
        self.graphs[shared].launch(self.stream)
        return self.out[:n].get()


class Server:
    """Requests over a cache that is always nearly full."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.cache = PagedKVCache(
            num_pages=PAGES, page_size=PAGE, heads_kv=HEADS_KV, head_dim=D, dtype=DTYPE, max_pages_per_seq=LONGEST // PAGE,
            device=None if device == "cpu" else device,
        )
        self.engine = OnHost(self.cache) if device == "cpu" else OnGpu(self.cache)
        self.prompts: list[Request] = []
        self.active: list[Request] = []
        self.counts = dict.fromkeys(("requests", "steps", "shared", "forks", "truncations", "cancellations", "full", "moved", "checked"), 0)
        self.worst = 0.0  # error by its bound

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32).astype(DTYPE)

    def chance(self, percent: float) -> bool:
        return self.rng.random() * 100 < percent

    def append(self, r: Request, n: int) -> None:
        k, v = self.normal(n, HEADS_KV, D), self.normal(n, HEADS_KV, D)
        self.cache.append(r.seq, self.engine.there(k), self.engine.there(v))
        r.extend(k, v)

    def fork(self, parent: Request, length: int) -> Request:
        r = Request(self.cache.fork(parent.seq, length), int(self.rng.integers(1, 13)))
        r.extend(*(a[:length] for a in parent.tokens))
        self.counts["forks"] += 1
        return r

    def end(self, r: Request) -> None:
        self.cache.free(r.seq)
        self.active.remove(r)

    def admit(self) -> None:
        """One more request, if there is room for it."""
        if not self.prompts or self.chance(0.2):  # a prompt that many share
            if len(self.prompts) == 3:
                self.cache.free(self.prompts.pop(0).seq)
            prompt = Request(self.cache.new_sequence(), 0)
            self.prompts.append(prompt)
            self.with_room(lambda: self.append(prompt, int(self.rng.integers(100, 300))))
        if self.active and self.chance(5):
            parent = self.pick()
            r = self.fork(parent, parent.length)
        elif self.chance(80):
            parent = self.prompts[int(self.rng.integers(len(self.prompts)))]
            whole = self.chance(60)
            r = self.fork(parent, parent.length if whole else int(self.rng.integers(0, parent.length + 1)))
        else:
            r = Request(self.cache.new_sequence(), int(self.rng.integers(1, 13)))
        self.active.append(r)
        self.counts["requests"] += 1
        self.with_room(lambda: self.append(r, int(self.rng.integers(1, 60))))

    def with_room(self, call: Any) -> None:
        """Carry a call out, cancelling requests for as long as the cache is full."""
        while True:
            try:
                return call()
            except CacheFullError:
                self.counts["full"] += 1
                victims = self.active[:-1] or self.active
                self.cancel(victims[int(self.rng.integers(len(victims)))])

    def cancel(self, r: Request) -> None:
        self.end(r)
        self.counts["cancellations"] += 1

    def pick(self) -> Request:
        return self.active[int(self.rng.integers(len(self.active)))]

    def step(self) -> None:
        """A token for every request; then some of them end, others are rolled back or cancelled."""
        self.with_room(lambda: self.cache.reserve([r.seq for r in self.active], 1))
        b, shared = len(self.active), bool(self.rng.integers(2))
        if not b:
            return
        q, k, v = self.normal(b, 1, HEADS, D), self.normal(b, 1, HEADS_KV, D), self.normal(b, 1, HEADS_KV, D)
        out = self.engine.step([r.seq for r in self.active], shared, q, k, v)
        for r, one_k, one_v in zip(self.active, k, v, strict=True):
            r.extend(one_k, one_v)
            r.left -= 1
        row = int(self.rng.integers(b))
        self.check(self.active[row], q[row, 0], out[row, 0])
        self.counts["steps"] += 1
        self.counts["shared"] += shared
        for r in [r for r in self.active if r.left <= 0 or r.length > LONGEST - 80]:
            self.end(r)
        if self.active and self.chance(30):  # drafted tokens that were refused
            r = self.pick()
            r.length -= int(self.rng.integers(0, min(8, r.length)))
            self.cache.truncate(r.seq, r.length)
            self.counts["truncations"] += 1
        if self.active and self.chance(10):
            self.cancel(self.pick())
        if self.chance(3):
            self.counts["moved"] += self.cache.defragment()
        if self.active and self.chance(5):
            self.check_tokens(self.pick())

    def check(self, r: Request, q: np.ndarray, out: np.ndarray) -> None:
        """A row of the result against the same in float64."""
        k, v = (a[: r.length].astype(np.float64).repeat(HEADS // HEADS_KV, 1) for a in r.tokens)
        x = np.einsum("hd,nhd->hn", q.astype(np.float64), k) / np.sqrt(D)
        p = np.exp(x - x.max(1, keepdims=True))
        want = np.einsum("hn,nhd->hd", p / p.sum(1, keepdims=True), v)
        # Weights and results are rounded to DTYPE, the two parts of a shared prefix as well.
        error = float(np.abs(out.astype(np.float64) - want).max()) / (2 * EPS * float(np.abs(v).max()))
        assert error <= 1, f"request {r.seq} of {r.length} tokens: {error:.2f} times the error that rounding explains"
        self.worst = max(self.worst, error)
        self.counts["checked"] += 1

    def check_tokens(self, r: Request) -> None:
        """What the cache holds, bit for bit."""
        for mine, stored in zip(r.tokens, self.cache.gather(r.seq), strict=True):
            assert np.array_equal(self.engine.back(stored).view(np.uint16), mine[: r.length].view(np.uint16)), f"tokens of request {r.seq}"

    def run(self, requests: int, until: float) -> None:
        while self.counts["requests"] < requests and time.monotonic() < until:
            while len(self.active) < ROWS and self.counts["requests"] < requests and not self.chance(15):
                self.admit()
            self.step()

    def close(self) -> None:
        """End everything: all pages must be back."""
        self.cache.free([r.seq for r in (*self.active, *self.prompts)])
        self.active.clear()
        self.prompts.clear()
        pool = self.cache._sequences.pool
        assert len(self.cache) == 0 and self.cache.free_pages == PAGES and not any(pool.holders), "pages were lost"
        assert sorted(pool.free) == list(range(PAGES)), "pages were given back twice"


def usage(device: str, alone: bool) -> dict[str, int]:
    """What this process holds: memory in MiB, handles, threads, kernels; and what a GPU lacks, if nobody else uses it."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if os.path.exists("/proc/self/statm") else 0
    handles = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    found = {"host MiB": pages * os.sysconf("SC_PAGE_SIZE") >> 20, "handles": handles, "threads": threading.active_count()}
    if device != "cpu":
        import cupy

        cupy.cuda.Device().synchronize()
        found |= {"pool MiB": cupy.get_default_memory_pool().total_bytes() >> 20, "kernels": len(jit._functions)}
        if alone:
            free, total = cupy.cuda.runtime.memGetInfo()
            found["GPU MiB"] = (total - free) >> 20
    return found


ALLOWED = {"host MiB": 12, "GPU MiB": 2, "pool MiB": 1}  # growth: of Python's own heap, of a driver that rounds up


def endure(requests: int, seed: int = 1, device: str = "cpu", seconds: float = 300, alone: bool = False) -> dict[str, Any]:
    """Serve so many requests; returns what happened. AssertionError if a result is wrong or something is left over.

    ``alone``: no other process uses the GPU.
    """
    checks.integer(requests, "requests", 1)
    begin = time.monotonic()
    server = Server(seed, device)
    early = max(requests // 5, min(requests // 2, 1000), 1)  # by then all has happened once
    server.run(early, begin + seconds)
    before = usage(device, alone)
    server.run(requests, begin + seconds)
    after = usage(device, alone)
    server.close()
    for name, held in before.items():
        assert after[name] <= held + ALLOWED.get(name, 0), f"{name}: {held} after {early} requests, {after[name]} in the end"
    counts = server.counts
    assert counts["requests"] == requests, f"{counts['requests']} of {requests} requests in {seconds} seconds"
    return {**counts, "worst error by its bound": round(server.worst, 3), "seconds": round(time.monotonic() - begin, 1), "held": after}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--seconds", type=float, default=300, help="no request is begun after so many")
    given = parser.parse_args(arguments)
    stream: Any = contextlib.nullcontext()
    if given.device != "cpu":
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)  # the default one cannot be captured
    with stream:
        print(json.dumps(endure(given.requests, given.seed, given.device, given.seconds, alone=True)))


if __name__ == "__main__":
    sys.exit(main())
