"""attention_weights(): against the float64 oracle, the hard cases that apply, its memory and its errors."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import tracemalloc
from types import SimpleNamespace
from typing import Any

import compare
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32, F64
from refusal import refused

import cuflash
from cuflash import planner
from cuflash.backends import cpu_weights, naive
from cuflash.problem import build_weights

weights = cuflash.attention_weights
every_backend = pytest.mark.parametrize("backend", ["cpu", "reference"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
both = pytest.mark.parametrize("reduce", [None, "head_mean"], ids=["all", "mean"])


def normal(*shape: int, seed: int = 0, dtype: Any = F32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(b: int = 2, sq: int = 37, sk: int = 53, hq: int = 6, hkv: int = 2, d: int = 16, dtype: Any = F32) -> tuple[np.ndarray, ...]:
    return normal(b, sq, hq, d, seed=1, dtype=dtype), normal(b, sk, hkv, d, seed=2, dtype=dtype)


def assert_oracle(q: np.ndarray, k: np.ndarray, **options: Any) -> np.ndarray:
    """Into a buffer full of NaN; the oracle sees the same options. Returns the weights."""
    backend = options.pop("backend", "cpu")
    problem = build_weights(q, k, **options)
    exact, bound = compare.expect_weights(problem)
    if problem.reduce is not None:
        exact = exact[:, 0]
    exact = exact.reshape(exact.shape[4 - q.ndim :] if problem.reduce is None or q.ndim == 4 else exact.shape[1:])
    out = np.full(exact.shape, np.nan, problem.out_dtype)
    assert weights(q, k, out=out, backend=backend, **options) is out
    compare.assert_close(out, exact, bound, "weights")
    return out


def shift(s: Any, b: int, h: int, i: Any, j: Any, step: float = 0.25) -> Any:
    return s - step * abs(i - j) + 0.1 * h


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "upper left": {"causal": "upper_left"},
    "window": {"window": (5, 2)},
    "scale": {"scale": -0.7},
    "softcap": {"softcap": 0.8, "causal": True},
    "bias": {"bias": np.where(np.arange(53) % 7 == 3, -np.inf, normal(6, 37, 53, seed=3)).astype(F32)},
    "mask": {"mask": np.random.default_rng(4).random((2, 1, 37, 53)) < 0.6},
    "tree mask": {"mask": np.tril(np.ones((37, 37), bool))},
    "alibi": {"alibi_slopes": cuflash.alibi_slopes(6), "causal": True},
    "sinks": {"sinks": np.array([-np.inf, -3.0, 0.0, 2.0, 50.0, 300.0])},
    "sqdist": {"score": "sqdist", "scale": np.linspace(0.01, 0.2, 16)},
    "score_mod": {"score_mod": shift, "mod_args": {"step": 0.5}, "softcap": 2.0},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != h % 3, "sinks": np.zeros(6)},
    "lengths": {"kv_lengths": [53, 20], "kv_start": [7, 20], "causal": True},
    "precision": {"precision": "tf32", "batch_invariant": True, "num_splits": 3},
}


@both
@every_dtype
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, dtype, reduce):
    assert_oracle(*operands(dtype=dtype), reduce=reduce, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_mean_is_the_mean_and_rows_add_up(name):
    q, k = operands()
    all_heads, mean = (weights(q, k, reduce=reduce, **OPTIONS[name]) for reduce in (None, "head_mean"))
    assert all_heads.dtype == mean.dtype == F32 and mean.shape == (2, 37, 53)
    np.testing.assert_allclose(mean, all_heads.mean(axis=1, dtype=F64), rtol=0, atol=compare.eps(F32))
    lse = cuflash.logsumexp(q, k, **OPTIONS[name]).astype(F64)
    sinks = OPTIONS[name].get("sinks", np.full(6, -np.inf))
    with np.errstate(invalid="ignore", over="ignore"):
        share = np.where(lse == -np.inf, 0, -np.expm1(np.minimum(sinks[None, :, None] - lse, 0)))
    allowed = 53 * compare.eps(F32) * max(1, np.abs(lse[lse > -np.inf]).max())
    np.testing.assert_allclose(all_heads.sum(axis=-1, dtype=F64), share, rtol=0, atol=allowed)


@every_dtype
@every_backend
def test_dtypes_of_results(dtype, backend):
    q, k = operands(dtype=dtype)
    assert weights(q, k, backend=backend).dtype == (F64 if dtype == F64 else F32)
    for wanted in (F16, BF16, F32, F64):
        assert weights(q, k, out_dtype=wanted, backend=backend).dtype == wanted
        assert_oracle(q, k, out_dtype=wanted, backend=backend)


@both
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("ndim", [4, 3, 2])
def test_layouts_and_numbers_of_axes(ndim, layout, reduce):
    q, k = operands() if ndim > 2 else operands(hq=1, hkv=1)
    want = weights(q[:1], k[:1], causal=True, reduce=reduce)
    q, k = {4: (q[:1], k[:1]), 3: (q[0], k[0]), 2: (q[0, :, 0], k[0, :, 0])}[ndim]
    if layout == "BHSD" and ndim > 2:
        q, k = q.swapaxes(-2, -3), k.swapaxes(-2, -3)
    got = weights(q, k, causal=True, layout=layout, reduce=reduce)
    assert got.shape == {4: want.shape, 3: want.shape[1:], 2: (37, 53)}[ndim]
    compare.assert_same_bits(got, want.reshape(got.shape))


def test_any_strides():
    q, k = operands()
    want = weights(q, k, bias=normal(37, 53))
    wide = np.full((53, 2, 6, 2, 37), np.nan, F32)
    out = wide[:, :, :, 1].transpose(1, 2, 3, 0)
    got = weights(q[:, ::-1].copy()[:, ::-1], np.asfortranarray(k), bias=np.asfortranarray(normal(37, 53)), out=out)
    assert got is out
    np.testing.assert_allclose(got, want, rtol=0, atol=4 * compare.eps(F32))
    assert np.isnan(wide[:, :, :, 0]).all()


@both
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_pages(layout, reduce):
    q, k = operands(sk=50)
    table, lengths = np.array([[4, 1, 3, 0, -1], [7, 2, 6, 5, 9]]), [50, 33]
    pages = np.full((10, 13, 2, 16), np.nan, F32)
    for b, length in enumerate(lengths):
        for j in range(length):
            pages[table[b, j // 13], j % 13] = k[b, j]
    if layout == "BHSD":
        q, pages = q.swapaxes(1, 2), pages.swapaxes(1, 2)
    got = weights(q, pages, page_table=table, kv_lengths=lengths, causal=True, layout=layout, reduce=reduce)
    dense = np.zeros((*got.shape[:-1], 65), F32)
    dense[..., :50] = weights(*operands(sk=50), kv_lengths=lengths, causal=True, reduce=reduce)
    np.testing.assert_allclose(got, dense, rtol=0, atol=4 * compare.eps(F32))
    assert not got[1, ..., 33:].any()


@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)], ids=str)
@both
@every_backend
def test_sizes_of_zero(shape, reduce, backend):
    b, sq, sk, h = shape
    got = weights(np.ones((b, sq, h, 8), F32), np.ones((b, sk, h, 8), F32), reduce=reduce, backend=backend)
    assert got.shape == ((b, h, sq, sk) if reduce is None else (b, sq, sk)) and not got.any()


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (40, 3)}, {"score_mod": shift}], ids=["causal", "window", "mod"])
def test_more_blocks_and_tiles_than_one(options, monkeypatch):
    q, k = operands(1, 300, 700, 2, 1, 8)
    want = weights(q, k, **options)
    monkeypatch.setattr(cpu_weights, "WEIGHTS", 1000)
    monkeypatch.setattr(cpu_weights, "KEYS", 64)
    assert planner.choose(build_weights(q, k, **options)).tile == (1, 700)
    np.testing.assert_allclose(assert_oracle(q, k, **options), want, rtol=0, atol=8 * compare.eps(F32))


# --- hard cases ----------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
def test_rows_without_keys_are_zero(backend, dtype):
    q, k = np.zeros((1, 4, 1, 16), dtype), np.zeros((1, 2, 1, 16), dtype)
    got = functools.partial(weights, backend=backend)
    assert got(q, k, causal=True)[0, 0].tolist() == [[0, 0], [0, 0], [1, 0], [0.5, 0.5]]
    mask = np.array([[False, False], [True, True]])
    assert got(q[:, :2], k, mask=mask)[0, 0].tolist() == [[0, 0], [0.5, 0.5]]
    third = got(q, k).dtype.type(1 / 3)
    assert got(q[:, :2], k, mask=mask, sinks=[0.0], reduce="head_mean")[0].tolist() == [[0, 0], [third, third]]
    assert not got(q, k, kv_lengths=[0], sinks=[1.0]).any()


@every_backend
def test_a_finite_mask_over_a_whole_row_is_a_constant(backend):
    q, k = np.zeros((1, 1, 1, 16), F32), np.zeros((1, 4, 1, 16), F32)
    assert weights(q, k, bias=np.full((1, 4), np.finfo(F32).min), backend=backend).ravel().tolist() == [0.25] * 4


@every_backend
@pytest.mark.parametrize("dtype,least", [(F16, -61440.0), (BF16, -61440.0), (BF16, -1e30), (F32, -53248.0), (F32, -1e30)])
def test_logits_far_below_zero(dtype, least, backend):
    q, k = np.zeros((1, 1, 1, 16), dtype), np.zeros((1, 363, 1, 16), dtype)
    q[..., 0], k[..., 0] = 1, least
    assert (weights(q, k, scale=1, backend=backend) == F32.type(1 / 363)).all()


@every_backend
def test_a_logit_far_above_zero(backend):
    x = np.full((1, 1, 1, 64), 133120, BF16)
    assert weights(x, x, backend=backend).tolist() == [[[[1.0]]]]


@every_backend
def test_signs_of_the_scale(backend):
    q, k = np.ones((1, 1, 1, 1), F32), np.array([0, 1000], F32).reshape(1, 2, 1, 1)
    assert weights(q, k, scale=-1, backend=backend).ravel().tolist() == [1, 0]
    assert weights(q, k, scale=0, backend=backend).ravel().tolist() == [0.5, 0.5]
    assert weights(q.repeat(2, 1), k, scale=0, causal=True, backend=backend)[0, 0].tolist() == [[1, 0], [0.5, 0.5]]


@every_backend
def test_the_mask_comes_after_the_softcap(backend):
    x = np.zeros((1, 2, 1, 16), F32)
    assert weights(x, x, softcap=1, causal=True, backend=backend)[0, 0].tolist() == [[1, 0], [0.5, 0.5]]


@every_backend
@pytest.mark.parametrize("what", ["q", "k"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_poison_reaches_the_rows_that_see_it_and_no_other(what, poison, backend):
    q, k = operands(1, 9, 9, 2, 1, 8)
    clean = weights(q, k, causal=True, backend=backend)
    q, k = q.copy(), k.copy()
    (q if what == "q" else k)[0, 4] = poison
    got = assert_oracle(q, k, causal=True, backend=backend)
    rows = [4] if what == "q" else [4, 5, 6, 7, 8]
    rest = [r for r in range(9) if r not in rows]
    compare.assert_same_bits(got[:, :, rest], clean[:, :, rest])
    visible = np.tril(np.ones((9, 9), bool))
    assert np.isnan(got[:, :, rows][:, :, visible[rows]]).all() or np.isinf(poison)
    assert not got[:, :, ~visible].any()
    mean = weights(q, k, causal=True, backend=backend, reduce="head_mean")
    assert (np.isnan(mean) == np.isnan(got).any(axis=1)).all() and np.isfinite(mean[:, rest]).all()


def test_small_weights_are_kept():
    """float32 has subnormal numbers; float16 results are float32 because it would lose these."""
    q, k = np.ones((1, 1, 1, 1), F16), np.array([0, -98.0], F16).reshape(1, 2, 1, 1)
    first, second = weights(q, k, scale=1).ravel()
    assert first == 1 and 0 < second < np.finfo(F32).tiny


# --- memory --------------------------------------------------------------------------------------------------------


def peak(call: Any) -> int:
    """Bytes that NumPy and Python held at a time during a call, beyond what there was."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"causal": True, "sinks": np.zeros(16)}, {"score_mod": shift}], ids=["plain", "sinks", "mod"])
def test_the_mean_needs_no_memory_for_the_heads(options):
    q, k = operands(1, 2048, 2048, 16, 16, 8)
    workspace = planner.choose(build_weights(q, k, reduce="head_mean", **options)).workspace
    result = 2048 * 2048 * 4
    used = peak(lambda: weights(q, k, reduce="head_mean", **options))
    assert result < used < result + workspace + (1 << 20) < 16 * result / 3


@both
def test_memory_is_the_result_and_a_block(reduce):
    used, results = [], []
    for n in (1024, 4096):
        q, k = operands(1, n, 2048, 2, 1, 8)
        problem = build_weights(q, k, reduce=reduce)
        results.append(int(np.prod(problem.weights_shape)) * 4)
        used.append(peak(lambda q=q, k=k: weights(q, k, reduce=reduce)))
    assert used[1] - used[0] < results[1] - results[0] + (1 << 20)


def test_the_oracle_as_a_backend_needs_no_memory_for_the_heads():
    q, k = operands(1, 512, 512, 64, 64, 4)
    assert peak(lambda: weights(q, k, reduce="head_mean", backend="reference")) < 64 * 512 * 512 * 8 / 2


def test_a_result_that_does_not_fit_says_what_it_would_take(monkeypatch):
    monkeypatch.setattr(naive, "available_bytes", lambda: 1 << 20)
    q, k = operands(1, 512, 512, 8, 8, 8)
    with refused(cuflash.NoBackendError, "8,388,608 bytes", "1,048,576", "head_mean"):
        weights(q, k)
    assert weights(q, k, reduce="head_mean").shape == (1, 512, 512)
    out = np.empty((1, 8, 512, 512), F32)  # may lie in a file
    assert weights(q, k, out=out) is out


def test_it_loads_no_numba_and_starts_no_thread():
    code = """
        import sys, threading, json, numpy as np, cuflash
        x = np.ones((1, 64, 2, 8), np.float32)
        cuflash.attention_weights(x, x, causal=True)
        print(json.dumps(["numba" in sys.modules, threading.active_count()]))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [False, 1]


# --- errors --------------------------------------------------------------------------------------------------------


def test_errors():
    q, k = operands()
    for error, pieces, options in (
        (ValueError, ("reduce:", "'mean'", "head_mean"), {"reduce": "mean"}),
        (TypeError, ("reduce:", "True", "head_mean"), {"reduce": True}),
        (ValueError, ("out:", "(2, 37, 53)", "(2, 6, 37, 53)"), {"out": np.empty((2, 37, 53), F32)}),
        (ValueError, ("out:", "(2, 6, 37, 53)", "(2, 37, 53)"), {"out": np.empty((2, 6, 37, 53), F32), "reduce": "head_mean"}),
        (TypeError, ("out:", "float64", "float32"), {"out": np.empty((2, 6, 37, 53))}),
        (ValueError, ("layout:", "'SBHD'"), {"layout": "SBHD"}),
        (ValueError, ("mask:", "(5, 5)"), {"mask": np.ones((5, 5), bool)}),
        (cuflash.NoBackendError, ("cpu/fa2", "naive", "stores"), {"kernel": "fa2"}),
        (cuflash.NoBackendError, ("cpu/naive", "score_mod", "CUDA expression", "callable"), {"score_mod": "s"}),
        (TypeError, ("backend:", "'cuda'", "NumPy", "host"), {"backend": "cuda"}),
        (TypeError, ("attention_weights()", "'casual'", "causal", "reduce"), {"casual": True}),
        (TypeError, ("attention_weights()", "'return_lse'"), {"return_lse": True}),
        (TypeError, ("k_scale:", "float32", "float8_e4m3fn"), {"k_scale": 1.0}),
    ):
        with refused(error, *pieces):
            weights(q, k, **options)
    with refused(ValueError, "k:", "batch 1", "q's 2"):
        weights(q, k[:1])
    with refused(TypeError, "k:", "float64", "float32"):
        weights(q, k.astype(F64))
    with refused(TypeError, "q:", "list", "NumPy"):
        weights(q.tolist(), k)
    shared = np.empty((2, 6, 37, 53), F32)
    with refused(ValueError, "out:", "overlaps bias"):
        weights(q, k, bias=shared, out=shared)


def test_a_backend_that_stores_no_weights_is_named(monkeypatch):
    """As for arrays on a GPU."""
    other = SimpleNamespace(KERNELS=("fa1",), auto_kernels=lambda problem: ("fa1",), decline=lambda problem, kernel: None)
    monkeypatch.setattr(planner, "candidates", lambda problem: ("numba-cuda",))
    monkeypatch.setattr(planner.backends, "load", lambda name: other)
    with refused(cuflash.NoBackendError, "weights call", "numba-cuda/fa1: it never stores", "NumPy arrays"):
        weights(*operands())
