"""Calls on host arrays whose signature is known, and those of decode(): the problem is kept, everything else is looked at every time."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from warm_calls import gpu, inputs, nothing_kept, there  # noqa: F401  fixtures among them

import cuflash
from cuflash import warm


@pytest.mark.parametrize("backend", [None, "cpu", "reference"])
def test_host_arrays_take_the_kept_problem(backend):
    rng = np.random.default_rng(3)
    for layout, shape in (("BSHD", (2, 5, 4, 16)), ("BHSD", (2, 4, 5, 16)), ("BSHD", (5, 4, 16)), ("BHSD", (4, 5, 16)), ("BSHD", (5, 16))):
        calls = [[rng.standard_normal(shape).astype(np.float32) for _ in range(3)] for _ in range(3)]
        options = {"causal": True, "return_lse": True, "layout": layout, "backend": backend}
        warm.problems.clear()
        first = cuflash.attention(*calls[2], **options)
        for a in calls:
            out, lse = cuflash.attention(*a, **options)
        assert len(warm.problems) == 1
        assert np.array_equal(out, first[0]) and np.array_equal(lse, first[1])
        fixed = np.empty_like(out)
        fixed.setflags(write=False)
        with pytest.raises(ValueError, match="read-only"):
            cuflash.attention(*calls[0], out=fixed, **options)
        with pytest.raises(ValueError, match="out: overlaps q"):
            cuflash.attention(*calls[0], out=calls[0][0], **options)
        with pytest.raises(TypeError, match="stream"):
            cuflash.attention(*calls[0], stream=0, **options)


def test_host_arrays_and_a_simulator_that_goes_away(monkeypatch):
    a = [np.ones((1, 2, 1, 8), np.float32)] * 3
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    for _ in range(2):
        with pytest.raises(TypeError, match="takes GPU arrays"):
            cuflash.attention(*a, backend="numba-cuda")
    assert not warm.problems


def test_subclasses_and_others_have_no_signature(gpu):
    a = [np.ones((1, 2, 1, 8), np.float32)] * 3
    masked = [np.ma.masked_array(x) for x in a]
    cuflash.attention(*a)
    with pytest.raises(TypeError, match="masked"):
        cuflash.attention(*masked)
    with pytest.raises(TypeError, match="of one kind"):
        cuflash.attention(a[0], a[1], there(a[2]))
    with pytest.raises(ValueError, match="on one device"):
        cuflash.attention(*inputs(0)[:2], inputs(0, device_id=1)[2])
    assert "cupy" in sys.modules


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_decode_looks_at_lengths_and_caches_every_time(layout):
    """Its problem is kept without lengths; what a first call refuses, a later one does."""
    rng = np.random.default_rng(5)

    def turned(a):
        return np.ascontiguousarray(a.transpose(0, 2, 1, 3)) if layout == "BHSD" else a

    caches = [turned(rng.standard_normal((2, 32, 2, 8)).astype(np.float32)) for _ in range(2)]
    copies = [a.copy() for a in caches]
    lengths = np.array([3, 0])
    for step in range(4):
        q, k, v = (turned(rng.standard_normal((2, 3, h, 8)).astype(np.float32)) for h in (4, 2, 2))
        out, lse = cuflash.decode(q, *caches, lengths, k_new=k, v_new=v, causal=True, layout=layout, return_lse=True)
        warm.problems.clear()
        want = cuflash.decode(q, *copies, lengths, k_new=k, v_new=v, causal=True, layout=layout, return_lse=True)
        assert np.array_equal(out, want[0]) and np.array_equal(lse, want[1])
        assert all(np.array_equal(a, b) for a, b in zip(caches, copies, strict=True))
        assert len(warm.problems) == 1
        lengths += 3 + step
    options = {"causal": True, "layout": layout}
    before = [a.copy() for a in caches]
    for bad, error, words in (
        ([30, 1], ValueError, "exceed the cache's capacity"), ([-1, 1], ValueError, "must be from 0"), ([1, 2, 3], ValueError, "shape"),
        ([0.5, 1], TypeError, "integer"), (None, TypeError, "got None"),
    ):
        with pytest.raises(error, match=words):
            cuflash.decode(q, *caches, bad, k_new=k, v_new=v, **options)
    with pytest.raises(ValueError, match="k_cache: overlaps v_cache"):
        cuflash.decode(q, caches[0], caches[0], [1, 2], k_new=k, v_new=v, **options)
    with pytest.raises(ValueError, match="k_cache: overlaps q"):
        cuflash.decode(_inside(caches[0], q), *caches, [1, 2], k_new=k, v_new=v, **options)
    with pytest.raises(ValueError, match="v_new: missing"):
        cuflash.decode(q, *caches, [1, 2], k_new=k, **options)
    with pytest.raises(TypeError, match="stream"):
        cuflash.decode(q, *caches, [1, 2], k_new=k, v_new=v, stream=0, **options)
    caches[1].setflags(write=False)
    with pytest.raises(ValueError, match="v_cache: the array is read-only"):
        cuflash.decode(q, *caches, [1, 2], k_new=k, v_new=v, **options)
    assert all(np.array_equal(a, b) for a, b in zip(caches, before, strict=True))
    same_without = cuflash.decode(q, *caches, [5, 6], **options)  # nothing is written: a read-only cache will do
    assert np.array_equal(same_without, cuflash.attention(q, *caches, kv_lengths=[5, 6], kernel="decode", **options))


def _inside(cache: np.ndarray, like: np.ndarray) -> np.ndarray:
    """An array of the shape and strides of another, in the memory of a cache."""
    return cache.reshape(-1)[: like.size].reshape(like.shape)
