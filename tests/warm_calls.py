"""Calls on pretended GPUs for the tests of warm calls: arrays, right results, and fixtures."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from fake_cupy import FakeArray, pretended_gpus

import cuflash
from cuflash import planner, warm, warm_decode

F16 = np.dtype(np.float16)


@pytest.fixture(autouse=True)
def nothing_kept():
    def forget():
        for kept in (warm.problems, warm.launches, warm_decode.launches):
            kept.clear()

    forget()
    yield
    forget()


@pytest.fixture
def gpu(monkeypatch):
    with pretended_gpus(monkeypatch) as fake:
        yield fake


@pytest.fixture
def choices(monkeypatch):
    """The problems on a GPU that a plan was chosen for: none by a warm call. The fake chooses for the host."""
    made = []
    choose = planner.choose

    def counted(problem):
        made.extend([problem] * (problem.q.device >= 0))
        return choose(problem)

    monkeypatch.setattr(planner, "choose", counted)
    return made


def there(host: np.ndarray, device_id: int = 0) -> FakeArray:
    a = FakeArray(host.shape, host.dtype, device_id=device_id)
    a.host[...] = host
    return a


def inputs(seed: int, shape=(2, 5, 4, 16), heads_kv=2, dtype=F16, keys=7, device_id=0):
    rng = np.random.default_rng(seed)
    axes = [shape, (shape[0], keys, heads_kv, shape[3]), (shape[0], keys, heads_kv, shape[3])]
    return [there(rng.standard_normal(s).astype(dtype), device_id) for s in axes]


def expected(arrays, **options):
    for name in ("kernel", "backend"):
        options.pop(name, None)
    return cuflash.attention(*(np.ascontiguousarray(a.host) for a in arrays), backend="reference", **options)


def same(result, want):
    if isinstance(want, tuple):
        assert isinstance(result, tuple) and len(result) == len(want)
        for r, w in zip(result, want, strict=True):
            same(r, w)
        return
    assert type(result) is FakeArray and result.dtype == want.dtype and result.shape == want.shape
    # The scale has gone through float32, which may turn a rounding.
    rtol, atol = 4 * float(ml_dtypes.finfo(want.dtype).eps), 8 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(result.host.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=atol)


def wrong_in_threads(gpu, wants, call):
    """Which of the threads, each on a stream of its own, get something else from call(n) than wants[n]."""
    wrong = []

    def loop(n: int) -> None:
        with gpu.using(device=0, stream=n):
            for _ in range(5):
                # Results of size 1 in float16, by other sums: what belongs to another thread's call is further away.
                if not np.allclose(call(n).get().astype(float), wants[n].astype(float), atol=4e-3):
                    wrong.append(n)

    threads = [threading.Thread(target=loop, args=(n,)) for n in range(len(wants))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
