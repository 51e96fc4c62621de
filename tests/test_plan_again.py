"""Plan.run on the very arrays of the call before: the shortest way, which must see whatever can differ."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from fake_cupy import FakeArray
from warm_calls import expected, gpu, inputs, same, there  # noqa: F401

import cuflash
from cuflash import device, warm


@pytest.fixture
def again(monkeypatch):
    """What the shortest way said, call by call."""
    said = []
    run = warm.Again.run
    monkeypatch.setattr(warm.Again, "run", lambda self, *arrays: said.append(run(self, *arrays)) or said[-1])
    return said


def looped(calls: int = 3, **options):
    """A plan that has run so often on its arrays and one result; the arrays and the result."""
    a, out = inputs(0), FakeArray((2, 5, 4, 16), np.float16)
    p = cuflash.plan(*a, **options)
    for _ in range(calls):
        p.run(*a, out=out)
    return p, a, out


def test_it_launches_on_what_is_in_the_arrays_now(gpu, again):
    p, a, out = looped(causal=True)
    assert again == [True], "the first call prepares, the second finds that, the third repeats it"
    for old, new in zip(a, inputs(1), strict=True):
        old.host[...] = new.host
    out.fill(np.nan)
    assert p.run(*a, out=out) is out and again == [True, True]
    same(out, expected(a, causal=True))
    assert len(gpu.launches) == 4


def test_another_array_in_any_place(gpu, again):
    p, a, out = looped(causal=True)
    other = inputs(1)
    for place in range(3):
        mixed = [*a[:place], other[place], *a[place + 1 :]]
        same(p.run(*mixed, out=out), expected(mixed, causal=True))
    elsewhere = FakeArray((2, 5, 4, 16), np.float16)
    same(p.run(*a, out=elsewhere), expected(a, causal=True))
    assert again == [True, False, False, False, False]


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_shape_that_was_set(name, gpu):
    p, a, out = looped()
    given = dict(zip(("q", "k", "v"), a, strict=True), out=out)
    array = given[name]
    array.host = array.host.reshape(1, -1, *array.shape[2:])
    array.shape, array.strides = array.host.shape, array.host.strides
    with pytest.raises(ValueError, match="this plan was made for|out: "):
        p.run(**given)


def test_the_same_array_as_input_and_result(gpu):
    p, a, _ = looped()
    for _ in range(2):
        with pytest.raises(ValueError, match="out: overlaps q"):
            p.run(*a, out=a[0])


def test_the_device_that_is_current_and_streams(gpu, again):
    p, a, out = looped()
    with gpu.using(device=1):
        p.run(*a, out=out)
    p.run(*a, out=out, stream=7)
    with gpu.using(stream=5):
        p.run(*a, out=out)
    assert [x.device for x in gpu.launches] == [0] * 6 and [x.stream for x in gpu.launches][-2:] == [7, 5]
    assert again == [True, False, True]


def test_lse_and_fresh_results_go_the_other_way(gpu):
    p, a, out = looped()
    fresh = p.run(*a)
    assert fresh is not out
    same(fresh, expected(a))
    lse = FakeArray((2, 4, 5), np.float32)
    p = cuflash.plan(*a, return_lse=True)
    for _ in range(3):
        lse.fill(np.nan)
        same(p.run(*a, out=out, lse=lse), expected(a, return_lse=True))


def test_a_pretended_gpu(gpu, again):
    p, a, out = looped()
    with device.pretend("A100"):
        same(p.run(*a, out=out), expected(a))
    assert again == [True, False]


def test_no_array_lives_longer(gpu):
    p, a, out = looped()
    gone = [weakref.ref(x) for x in (*a, out)]
    gpu.launches.clear()
    del a, out
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4
    a, out = inputs(2), FakeArray((2, 5, 4, 16), np.float16)
    same(p.run(*a, out=out), expected(a))


def test_bad_arrays_are_named(gpu):
    p, a, out = looped()
    with pytest.raises(ValueError, match="this plan was made for"):
        p.run(*inputs(0, keys=6), out=out)
    with pytest.raises(TypeError, match="q"):
        p.run(None, a[1], a[2], out=out)


def test_numbers_on_the_device_are_checked_on_request(gpu, monkeypatch):
    lengths = there(np.array([7, 3], np.int32))
    p, a, out = looped(kv_lengths=lengths)
    lengths.host[:] = 9, 3
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    launched = len(gpu.launches)
    with pytest.raises(ValueError, match="kv_lengths"):
        p.run(*a, out=out)
    assert len(gpu.launches) == launched
    lengths.host[:] = 5, 3
    same(p.run(*a, out=out), expected(a, kv_lengths=[5, 3]))
