"""The Numba CUDA backend beyond the shared suites: what it declines, what it asks of an installation, streams and memory."""

from __future__ import annotations

import builtins
import importlib.metadata
import itertools
import math

import compare
import devices
import numpy as np
import pytest
from case import BF16, F32, F64

import cuflash
from cuflash import planner
from cuflash.backends import numba_cuda
from cuflash.backends.numba_cuda_modifiers import STAND_INS, modifier
from cuflash.problem import build_attention, build_backward

Q = np.zeros((1, 4, 2, 16), np.float32)


class Callable:
    def __call__(self, s, b, h, i, j):
        return s


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"score_mod": "s + h"}, "score_mod is a CUDA expression"),
        ({"mask_mod": "i > j"}, "mask_mod is a CUDA expression"),
        ({"score_mod": Callable()}, "score_mod is a Callable"),
        ({"mask_mod": lambda b, h, i, j, **more: j < i}, "mask_mod takes *args or **kwargs"),
    ],
)
def test_what_it_declines(options, words):
    assert words in numba_cuda.decline(build_attention(Q, Q, Q, **options), "fa1")


def test_head_sizes_beyond_the_largest():
    wide = np.zeros((1, 1, 1, 513), np.float32)
    assert "513" in numba_cuda.decline(build_attention(Q[:, :1, :1], Q[:, :1, :1], wide), "fa1")
    assert numba_cuda.decline(build_attention(wide[..., :512], wide[..., :512], wide[..., :512]), "fa1") is None


def test_what_it_declines_in_backward():
    out, lse = np.zeros_like(Q), np.zeros((1, 2, 4), np.float32)
    broadcast = build_backward(Q, Q, Q, Q, out, lse, bias=np.zeros((4, 4), np.float32), deterministic=True)
    assert "no fixed order" in numba_cuda.decline(broadcast, "fa1")
    assert "fa1 has" in numba_cuda.decline(build_backward(Q, Q, Q, Q, out, lse), "decode")
    q, pages, out, lse = (np.zeros(shape, np.float32) for shape in ((2, 1, 2, 16), (2, 4, 2, 16), (2, 1, 2, 16), (2, 2, 1)))
    shared = build_backward(q, q, pages, pages, out, lse, page_table=[[0], [0]], kv_lengths=[3, 2])
    assert "share a page" in numba_cuda.decline(shared, "fa1")


def fresh_reason() -> str | None:
    numba_cuda.unusable.cache_clear()
    try:
        return numba_cuda.unusable()
    finally:
        numba_cuda.unusable.cache_clear()


@pytest.mark.skipif(devices.SIMULATED, reason="the simulator needs nothing")
def test_reasons_name_the_command_that_mends_them(monkeypatch):
    real_import = builtins.__import__

    def without_numba_cuda(name, *args, **kwargs):
        if name == "numba_cuda":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_numba_cuda)
        assert "pip install 'cuflash[cuda13-full]'" in fresh_reason()

    def with_numba_cuda(name, *args, **kwargs):
        return None if name == "numba_cuda" else real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", with_numba_cuda)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.4")
    monkeypatch.delattr(np, "row_stack", raising=False)  # as in NumPy 2.5
    assert "pip install 'numpy<2.5'" in fresh_reason()


@pytest.mark.skipif(devices.SIMULATED or devices.gpu_wanted(), reason="it works here")
def test_a_missing_installation_is_a_reason_and_no_failure():
    assert numba_cuda.decline(build_attention(Q, Q, Q), "fa1") is None  # the kernel could
    assert planner.unusable(numba_cuda)  # the installation cannot


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_stand_ins_compute_what_numpy_does(name):
    values = (-3.5, -1.0, -0.0, 0.0, 0.25, 2.0, 7.0)
    arguments = {
        "where": [(c, x, y) for c in (True, False) for x, y in itertools.product(values, values)],
        "clip": [(x, -1.0, 2.0) for x in (*values, math.nan)],
        "mod": [(x, y) for x in values for y in (-2.0, 1.5)],
        "remainder": [(x, y) for x in values for y in (-2.0, 1.5)],
        "power": [(abs(x), y) for x in values for y in (0.5, 2.0)],
        "sqrt": [(abs(x),) for x in values],
        "log1p": [(abs(x),) for x in values],
        "isfinite": [(x,) for x in (*values, math.nan, math.inf, -math.inf)],
        "sign": [(x,) for x in (*values, math.nan, math.inf)],
    }.get(name, [(x,) for x in values])
    for given in arguments:
        np.testing.assert_allclose(STAND_INS[name](*given), getattr(np, name)(*given), rtol=4 * np.finfo(np.float64).eps)


def test_a_lambda_made_anew_is_the_same_device_function():
    def make(width, bound=3):
        return lambda s, b, h, i, j, *, limit=2.0: s * width + bound

    same = [modifier(make(4), "s, b, h, i, j", ()) for _ in range(3)]
    assert same[0] is same[1] is same[2]
    others = [make(5), make(4.0), make(4, True), make(np.zeros(3))]
    assert len({id(modifier(f, "s, b, h, i, j", ())) for f in others} | {id(same[0])}) == 5
    assert modifier(make(4), "s, b, h, i, j", ("limit",)) is not same[0]


def test_a_changed_global_is_another_device_function(monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 1)
    first = modifier(uses_a_global, "s, b, h, i, j", ())
    monkeypatch.setitem(globals(), "WIDTH", 2)
    assert modifier(uses_a_global, "s, b, h, i, j", ()) is not first


def uses_a_global(s, b, h, i, j):
    return s * WIDTH  # noqa: F821


@pytest.mark.skipif(not devices.SIMULATED, reason="only in the simulator; on a GPU see below")
def test_defaults_and_lists_in_the_simulator():
    check_defaults_and_lists(Q[:, :2, :1, :3] + 1)


def check_defaults_and_lists(q):
    """Parameters with defaults keep them, and a list is an array."""
    options = {"score_mod": lambda s, b, h, i, j, w=2.0, *, table: s * w + table[j], "mod_args": {"table": [0.5, -1.0]}}
    got = cuflash.attention(q, q, q, backend="numba-cuda", kernel="fa1", **options)
    host = q if isinstance(q, np.ndarray) else q.get()
    want = compare.expect([build_attention(host, host, host, score_mod=lambda s, b, h, i, j: s * 2.0 + np.array([0.5, -1.0])[j])])
    compare.assert_close(got if isinstance(got, np.ndarray) else got.get(), want.out[0], want.out_bound, "out")


# --- on a GPU ------------------------------------------------------------------------------------------------------

SLOW = 1 << 28  # elements of a kernel that keeps a stream busy for about a millisecond


def inputs(cupy, dtype=F32):
    return [cupy.asarray(np.random.default_rng(n).standard_normal((2, 65, 4, 16)).astype(dtype)) for n in range(3)]


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["current", "stream", "pointer", "protocol"])
def test_case_53_it_runs_on_the_callers_stream(form):
    """A slow producer in front of it and a consumer behind it, on one non-blocking stream, and nothing synchronises."""
    import cupy

    q, k, v = inputs(cupy)
    want = cuflash.attention(q, k, v, causal=True, backend="numba-cuda", kernel="fa1").get()
    stream = cupy.cuda.Stream(non_blocking=True)
    given = {"stream": stream, "pointer": stream.ptr, "protocol": Protocol(stream)}
    busy, late, out = cupy.zeros(SLOW, F32), cupy.full_like(q, np.nan), cupy.full_like(q, np.nan)
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        with stream:
            for _ in range(4):
                busy += 1
            late[...] = q
            if form == "current":
                cuflash.attention(late, k, v, causal=True, backend="numba-cuda", kernel="fa1", out=out)
        if form != "current":
            cuflash.attention(late, k, v, causal=True, backend="numba-cuda", kernel="fa1", out=out, stream=given[form])
        with stream:
            result = out + 0
            late.fill(np.nan)
            out.fill(np.nan)
        stream.synchronize()
        compare.assert_same_bits(result.get(), want, "out")


class Protocol:
    """A stream of another library."""

    def __init__(self, stream):
        self.stream = stream

    def __cuda_stream__(self):
        return 0, self.stream.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fa1", "decode"])
def test_scratch_follows_the_stream_as_well(kernel):
    """Splits and gradients have scratch that must not be reused by another stream while they still run."""
    import cupy

    q, k, v = inputs(cupy)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out, lse = cuflash.attention(q, k, v, backend="numba-cuda", kernel=kernel, num_splits=3, return_lse=True, stream=stream)
        g = cuflash.attention_backward(q, q, k, v, out, lse, backend="numba-cuda", kernel="fa1", stream=stream)
        stream.synchronize()
    host = [a.get() for a in (q, k, v)]
    want = compare.expect([build_attention(*host)])
    compare.assert_close(out.get(), want.out[0], want.out_bound, "out")
    gradients = compare.expect_gradients([build_backward(host[0], *host, out.get(), lse.get())])
    for name, (exact,) in gradients.parts.items():
        compare.assert_close(getattr(g, name).get(), exact, gradients.bounds[name], name)


@pytest.mark.gpu
def test_memory_does_not_grow_with_the_score_matrix():
    import cupy

    pool = cupy.get_default_memory_pool()
    q, k, v = (cupy.zeros((1, 65536, 1, 16), F32) for _ in range(3))
    out = cupy.empty_like(q)
    cuflash.attention(q[:, :64], k[:, :64], v[:, :64], backend="numba-cuda", kernel="fa1")  # small constants stay
    before = pool.total_bytes()
    cuflash.attention(q, k, v, backend="numba-cuda", kernel="fa1", out=out)  # 16 GiB of scores
    assert pool.total_bytes() - before < out.nbytes


@pytest.mark.gpu
def test_other_sizes_and_strides_compile_nothing():
    import cupy

    q, k, v = inputs(cupy, BF16)
    for rows in (1, 64):  # a tile for a few queries, and the usual one
        cuflash.attention(q[:, :rows], k, v, backend="numba-cuda", kernel="fa1")
    before = numba_cuda._compiled.cache_info().misses
    for n in range(1, 65, 7):
        cuflash.attention(q[:, ::-1][:, :n], k[:, :n], v[:, :n, ::-1], causal=True, backend="numba-cuda", kernel="fa1")
    assert numba_cuda._compiled.cache_info().misses == before


@pytest.mark.gpu
def test_functions_of_numpy_in_a_score_mod():
    import cupy

    q, k, v = inputs(cupy, F64)

    def bend(s, b, h, i, j, *, limit):
        inner = np.clip(s, -1.0, 1.0) + np.log1p(np.square(s))
        return np.where(np.abs(s) < limit, inner, np.sqrt(np.exp(np.minimum(s, 3.0)))) - np.floor(j / 7)

    def hide(b, h, i, j, *, limit):
        return np.logical_or(np.isfinite(j * limit) & (np.mod(j, 3) != 1), np.sign(i - j) > 0)

    options = {"score_mod": bend, "mask_mod": hide, "mod_args": {"limit": 0.8}}
    got = cuflash.attention(q, k, v, backend="numba-cuda", kernel="fa1", **options)
    want = compare.expect([build_attention(q.get(), k.get(), v.get(), **options)])
    compare.assert_close(got.get(), want.out[0], want.out_bound, "out")


@pytest.mark.gpu
def test_defaults_and_lists():
    import cupy

    check_defaults_and_lists(cupy.ones((1, 2, 1, 3), F32))


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_an_append_goes_to_the_callers_stream(paged):
    """The new keys are written where the kernel that reads them runs, and after what the stream was given before."""
    import cupy

    q, k_new, v_new = (a[:, :1] for a in inputs(cupy))
    k, v = (cupy.zeros((2, 8, 4, 16), F32) for _ in range(2))
    more = {"page_table": [[0], [1]]} if paged else {}
    want = cuflash.decode(q, k.copy(), v.copy(), [0, 3], k_new=k_new, v_new=v_new, backend="numba-cuda", **more).get()
    stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.zeros(SLOW, F32)
    late = [cupy.full_like(a, np.nan) for a in (k_new, v_new)]
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(4):
            busy += 1
        for there, a in zip(late, (k_new, v_new), strict=True):
            there[...] = a
    out = cuflash.decode(q, k, v, [0, 3], k_new=late[0], v_new=late[1], backend="numba-cuda", stream=stream, **more)
    stream.synchronize()
    compare.assert_same_bits(out.get(), want, "out")
