"""Lengths and cu_seqlens on a device: taken as they are, never read back, refused where their form is wrong."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cupy import FakeArray, pretended_gpus
from refusal import refused
from warm_calls import expected, inputs, same, there

import cuflash
from cuflash import warm

F16 = np.dtype(np.float16)
WIDTHS = (np.int32, np.int64)


@pytest.fixture
def gpu(monkeypatch):
    warm.launches.clear()
    with pretended_gpus(monkeypatch) as fake:
        yield fake
    warm.launches.clear()


def index(values, width=np.int32, device_id=0):
    return there(np.array(values, width), device_id)


@pytest.mark.parametrize("width", WIDTHS)
def test_lengths_are_read_where_they_are(gpu, width):
    """Also by calls that are warm: of other arrays, and of the same arrays with other numbers in them."""
    for lengths, start in (([3, 7], None), ([0, 5], None), (None, [2, 0]), (None, [7, 1]), ([3, 6], [3, 1]), ([7, 2], [0, 2])):
        for seed in range(3):
            a = inputs(seed)
            options = {name: x for name, x in (("kv_lengths", lengths), ("kv_start", start)) if x is not None}
            there_too = {name: index(x, width) for name, x in options.items()}
            same(cuflash.attention(*a, causal=True, return_lse=True, **there_too), expected(a, causal=True, return_lse=True, **options))
            assert all(gpu.launches[-1].params[name] == x.data.ptr for name, x in there_too.items())
            first = next(iter(there_too))
            there_too[first].host[0], options[first] = 1, [1, *options[first][1:]]
            if first == "kv_lengths" and start is not None:
                there_too["kv_start"].host[0], options["kv_start"] = 0, [0, *options["kv_start"][1:]]
            same(cuflash.attention(*a, causal=True, return_lse=True, **there_too), expected(a, causal=True, return_lse=True, **options))
    assert len(warm.launches) == 3 and gpu.waited == 0


def test_widths_may_differ_and_are_part_of_the_signature(gpu):
    a = inputs(0)
    for widths in ((np.int32, np.int64), (np.int64, np.int32), (np.int32, np.int32), (np.int32, np.int64)):
        options = {"kv_lengths": [5, 6], "kv_start": [2, 3]}
        moved = {name: index(x, w) for (name, x), w in zip(options.items(), widths, strict=True)}
        same(cuflash.attention(*a, **moved), expected(a, **options))


def test_a_plan_refers_to_them(gpu):
    a, lengths = inputs(0), index([3, 7])
    p = cuflash.plan(*a, kv_lengths=lengths)
    for first in (3, 1, 5):
        lengths.host[0] = first
        same(p.run(*a), expected(a, kv_lengths=[first, 7]))
        out = FakeArray((2, 5, 4, 16), F16)
        same(p.run(*a, out=out), expected(a, kv_lengths=[first, 7]))


def test_host_and_device_lengths_mix(gpu):
    a = inputs(0)
    same(cuflash.attention(*a, kv_lengths=[5, 6], kv_start=index([2, 3])), expected(a, kv_lengths=[5, 6], kv_start=[2, 3]))
    same(cuflash.attention(*a, kv_lengths=index([5, 6]), kv_start=[2, 3]), expected(a, kv_lengths=[5, 6], kv_start=[2, 3]))
    assert not warm.launches, "what was copied for a call is gone afterwards"
    same(cuflash.decode(*a, index([5, 6])), expected(a, kv_lengths=[5, 6]))


def test_they_can_be_captured(gpu):
    a = inputs(0)
    gpu.capturing = True
    same(cuflash.attention(*a, kv_lengths=index([5, 6])), expected(a, kv_lengths=[5, 6]))
    with pytest.raises(RuntimeError, match="cannot be captured"):
        cuflash.attention(*a, kv_lengths=index([5, 6]), kv_start=[1, 1])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("longest", [None, 6, 9])
def test_packed_sequences(gpu, width, longest):
    rng = np.random.default_rng(0)
    q, k, v = (there(rng.standard_normal((n, h, 16)).astype(F16)) for n, h in ((11, 4), (13, 2), (13, 2)))
    cu_q, cu_k = [0, 4, 4, 9], [0, 5, 7, 13]
    want = cuflash.attention_varlen(q.host, k.host, v.host, cu_q, cu_k, causal=True, return_lse=True, backend="reference")
    for on_device in ((True, True), (True, False), (False, True)):
        moved = [index(cu, width) if there_ else cu for cu, there_ in zip((cu_q, cu_k), on_device, strict=True)]
        for turn in range(3):
            got = cuflash.attention_varlen(q, k, v, *moved, max_seqlen_q=longest, causal=True, return_lse=True)
            same(got, want)
            if turn == 1 and all(on_device):  # a warm call looks at the numbers where they are
                moved[0].host[3], moved[1].host[3] = 6, 9
                changed = [[0, 4, 4, 6], [0, 5, 7, 9]]
                got = cuflash.attention_varlen(q, k, v, *moved, max_seqlen_q=longest, causal=True, return_lse=True)
                same(got, cuflash.attention_varlen(q.host, k.host, v.host, *changed, causal=True, return_lse=True, backend="reference"))
                moved[0].host[3], moved[1].host[3] = 9, 13
    names = [x.name for x in gpu.launches]
    assert sum("clear" in name for name in names) == 4 + 3 and len(names) == 10 + 7 and gpu.waited == 0
    assert any("flat" in name for name in names) == (longest is None) and len(warm.launches) == 1


def test_every_option_of_a_packed_call_is_part_of_its_signature(gpu):
    rng = np.random.default_rng(0)
    q, k, v = (there(rng.standard_normal((11, 2, 16)).astype(F16)) for _ in range(3))
    cu = [0, 4, 11]
    changes = [
        {}, {"causal": True}, {"window": (2, 0)}, {"scale": 0.3}, {"softcap": 2.0}, {"return_lse": True}, {"max_seqlen_q": 7},
        {"max_seqlen_k": 11}, {"kv_lengths": [3, 5]}, {"kv_start": [1, 2]}, {"bias": None}, {"sinks": [0.5, 1.0]},
    ]
    for _ in range(2):
        for change in changes:
            moved = {name: index(x) if name.startswith("kv") else x for name, x in change.items()}
            got = cuflash.attention_varlen(q, k, v, index(cu), index(cu, np.int64), **moved)
            want = cuflash.attention_varlen(q.host, k.host, v.host, cu, cu, backend="reference", **change)
            if "sinks" not in change:  # the fake knows none
                same(got, want)
    with refused(TypeError, "has no option 'casual'"):
        cuflash.attention_varlen(q, k, v, index(cu), index(cu), casual=True)
    with refused(TypeError, "causal:"):
        cuflash.attention_varlen(q, k, v, index(cu), index(cu), causal=1)
    with refused(TypeError, "max_seqlen_q:"):
        cuflash.attention_varlen(q, k, v, index(cu), index(cu), max_seqlen_q=True)
    assert len(warm.launches) == 10


def test_rows_of_no_sequence_are_cleared(gpu):
    q, k, v = (there(np.ones((11, 2, 16), F16)) for _ in range(3))
    out, lse = FakeArray((11, 2, 16), F16), FakeArray((2, 11), np.float32)
    cuflash.attention_varlen(q, k, v, index([0, 4]), index([0, 4]), out=out, lse=lse)
    assert not out.host[4:].any() and (out.host[:4] == 1).all() and np.isneginf(lse.host[:, 4:]).all()
    out.fill(np.nan)
    lse.fill(np.nan)
    cuflash.attention_varlen(q, k, v, index([0]), index([0]), out=out, lse=lse)
    assert not out.host.any() and np.isneginf(lse.host).all()


def test_forms_that_are_refused(gpu):
    a = inputs(0)
    for name in ("kv_lengths", "kv_start"):
        for bad, error, words in (
            (index([1.0, 2.0], np.float32), TypeError, "int32 or int64"),
            (index([1, 2], np.uint8), TypeError, "int32 or int64"),
            (index([1, 2, 3]), ValueError, "(2,)"),
            (index([[1, 2]]), ValueError, "(2,)"),
            (index(3), ValueError, "(2,)"),
            (index([1, 2], device_id=1), ValueError, "on one device"),
            (index([1, 9, 2])[::2], ValueError, "contiguous"),
        ):
            with refused(error, f"{name}:", words):
                cuflash.attention(*a, **{name: bad})
        with refused(TypeError, f"{name}:", "of one kind"):
            cuflash.attention(*(np.asarray(x.host) for x in a), **{name: index([1, 2])})
    flat = [there(np.ones((4, 2, 16), F16)) for _ in range(3)]
    with refused(ValueError, "cu_seqlens_k:", "3 entries", "2"):
        cuflash.attention_varlen(*flat, index([0, 4]), index([0, 2, 4]))
    with refused(ValueError, "cu_seqlens_q:", "(batch + 1,)"):
        cuflash.attention_varlen(*flat, index([]), index([0, 4]))
    with refused(ValueError, "max_seqlen_q:", "-1"):
        cuflash.attention_varlen(*flat, index([0, 4]), index([0, 4]), max_seqlen_q=-1)
    with pytest.raises(cuflash.NoBackendError, match="cuda/naive: kv_lengths on the device; it needs the numbers on the host"):
        cuflash.attention(*a, kv_lengths=index([6, 7]), kernel="naive", backend="cuda")
    with pytest.raises(ValueError, match="kv_lengths: on the device"):
        cuflash.explain(*a, kv_lengths=index([6, 7]))
    assert not gpu.launches


def test_results_over_them_are_refused_cold_and_warm(gpu):
    a = inputs(0)
    whole = FakeArray((2, 5, 4, 16), F16)
    lengths = FakeArray((), host=whole.host.reshape(-1)[8:12].view(np.int32), device_id=0)
    for turn in range(2):
        lengths.host[...] = 5, 6
        with refused(ValueError, "out:", "overlaps kv_lengths"):
            cuflash.attention(*a, out=whole, kv_lengths=lengths)
        if turn == 0:
            cuflash.attention(*a, out=FakeArray((2, 5, 4, 16), F16), kv_lengths=index([5, 6]))
    assert len(gpu.launches) == 1


def test_numbers_are_checked_on_request(gpu, monkeypatch):
    a = inputs(0)
    flat = [there(np.ones((4, 2, 16), F16)) for _ in range(3)]
    cuflash.attention(*a, kv_lengths=index([5, 6]))
    assert gpu.waited == 0
    monkeypatch.setenv("CUFLASH_CHECK", "1")
    for bad in ({"kv_lengths": [5, 8]}, {"kv_lengths": [-1, 2]}, {"kv_start": [8, 0]}, {"kv_lengths": [3, 3], "kv_start": [2, 4]}):
        with refused(ValueError, list(bad)[-1] + ":", "it must be from 0 to"):
            cuflash.attention(*a, **{name: index(x) for name, x in bad.items()})
    for cu, options, words in (
        ([0, 5], {}, "ends at 5"), ([1, 4], {}, "starts at 1"), ([0, 3, 2], {}, "falls"),
        ([0, 4], {"max_seqlen_q": 3}, "the longest sequence has 4"),
    ):
        with pytest.raises(ValueError, match=words):
            cuflash.attention_varlen(*flat, index(cu), index(cu), **options)
    assert gpu.waited >= 8
    launched, waited = len(gpu.launches), gpu.waited
    cuflash.attention(*a, kv_lengths=index([5, 6]))
    assert len(gpu.launches) == launched + 1 and gpu.waited > waited
    gpu.capturing, waited = True, gpu.waited
    cuflash.attention(*a, kv_lengths=index([5, 6]))
    assert gpu.waited == waited
