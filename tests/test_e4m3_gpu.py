"""Keys and values in float8_e4m3fn on a GPU: decode over them, appends that quantize, quantize_kv(), graphs."""

from __future__ import annotations

from typing import Any

import compare
import ml_dtypes
import numpy as np
import pytest
from case import BF16, F16, F32
from refusal import refused

import cuflash
from cuflash import problem as problems

pytestmark = pytest.mark.gpu
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def to_gpu(a: np.ndarray) -> Any:
    """An array of any dtype, by its bits."""
    import cupy

    bits = f"u{a.dtype.itemsize}"
    return cupy.asarray(np.ascontiguousarray(a).view(bits)).view(a.dtype)


def to_host(a: Any) -> np.ndarray:
    return a.view(f"u{a.dtype.itemsize}").get().view(a.dtype)


def duplicate(a: Any) -> Any:
    return a.view(f"u{a.dtype.itemsize}").copy().view(a.dtype)


def codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.clip(rng.standard_normal(shape) * 100, -448, 448).astype(E4M3)


def arrays(rng: np.random.Generator, dtype: np.dtype, queries: int, heads: tuple[int, int], d: int, *cache: int) -> list[np.ndarray]:
    """q for two sequences, and caches of any kind with their scales."""
    q = rng.standard_normal((2, queries, heads[0], d)).astype(dtype)
    scales = [rng.uniform(0.005, 0.03, (*cache, heads[1])).astype(F32) for _ in range(2)]
    return [q, codes(rng, *cache, heads[1], d), codes(rng, *cache, heads[1], d), *scales]


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    ("queries", "heads", "d"),
    [(1, (8, 2), 128), (1, (16, 1), 128), (1, (32, 1), 64), (3, (20, 1), 128), (1, (128, 1), 64), (2, (4, 2), 256), (5, (4, 4), 72)],
    ids=str,
)
@pytest.mark.parametrize("page", [0, 1, 16])
def test_decode(cupy, dtype, queries, heads, d, page):
    rng = np.random.default_rng(d + queries)
    keys = 700
    stored = (2 * -(-keys // page), page) if page else (2, keys)
    q, k, v, k_scale, v_scale = arrays(rng, dtype, queries, heads, d, *stored)
    options: dict[str, Any] = {"kv_lengths": [keys, 301], "causal": True}
    if page:
        options["page_table"] = rng.permutation(stored[0]).reshape(2, -1)
    for a in (k, v, k_scale, v_scale):
        if not page:
            a[1, 301:] = np.nan
    by_head = np.linspace(0.005, 0.02, heads[1], dtype=F32)
    for given in ({"k_scale": k_scale, "v_scale": v_scale}, {"k_scale": by_head, "v_scale": 0.02}, {}):
        if not given:
            k = (k.astype(F32) / 100).astype(E4M3)
        there = {name: to_gpu(a) if np.ndim(a) > 1 else a for name, a in given.items()}
        out, lse = cuflash.attention(*map(to_gpu, (q, k, v)), backend="cuda", kernel="decode", return_lse=True, **options, **there)
        want = compare.expect([problems.build_attention(q, k, v, **options, **given)])
        compare.assert_close(to_host(out), want.out[0], want.out_bound, "out")
        compare.assert_close(to_host(lse), want.lse[0], want.lse_bound, "lse")


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("on_device", [False, True], ids=["lengths from the host", "lengths on the device"])
def test_appends_are_those_of_numpy(cupy, dtype, page, on_device):
    rng = np.random.default_rng(1)
    stored = (8, page) if page else (2, 64)
    q, k, v, k_scale, v_scale = arrays(rng, dtype, 2, (4, 2), 64, *stored)
    k_new, v_new = (rng.standard_normal((2, 2, 2, 64)).astype(dtype) for _ in range(2))
    angle = rng.uniform(0, 6, (70, 16)).astype(F32)
    rope = np.cos(angle), np.sin(angle)
    table = rng.permutation(8).reshape(2, 4).astype(np.int32) if page else None
    gpu = [to_gpu(a) for a in (q, k, v, k_scale, v_scale, k_new, v_new, *rope)]
    lengths = np.array([5, 40], np.int32)
    out = cuflash.decode(
        *gpu[:3], cupy.asarray(lengths) if on_device else lengths, k_new=gpu[5], v_new=gpu[6], rope=(*gpu[7:], "half"), causal=True,
        k_scale=gpu[3], v_scale=gpu[4], page_table=table if table is None or not on_device else cupy.asarray(table),
    )
    want = cuflash.decode(
        q, k, v, lengths, k_new=k_new, v_new=v_new, rope=(*rope, "half"), causal=True, k_scale=k_scale, v_scale=v_scale, page_table=table,
    )
    for name, there, here in zip(("k", "v", "k_scale", "v_scale"), gpu[1:5], (k, v, k_scale, v_scale), strict=True):
        compare.assert_same_bits(to_host(there), here, name)
    difference = np.abs(to_host(out).astype(F32) - want.astype(F32)).max()
    assert difference <= 4 * compare.eps(dtype) * np.abs(want.astype(F32)).max()


def test_codes_are_copied(cupy):
    rng = np.random.default_rng(2)
    q, k, v, k_scale, v_scale = map(to_gpu, arrays(rng, BF16, 1, (4, 2), 64, 2, 32))
    new = codes(rng, 2, 1, 2, 64)
    cuflash.decode(q, k, v, [3, 30], k_new=to_gpu(new), v_new=to_gpu(new), k_scale=k_scale, v_scale=v_scale)
    for a in (k, v):
        compare.assert_same_bits(to_host(a)[[0, 1], [3, 30]], new[:, 0])


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_quantize_kv(cupy, dtype, layout):
    x = np.random.default_rng(0).standard_normal((2, 50, 3, 72)).astype(dtype)
    x[0, 1], x[1, 2, 0, 3] = 0, np.nan
    x = x if layout == "BSHD" else np.ascontiguousarray(x.swapaxes(1, 2))
    for scale in (None, 0.01, [0.01, 0.02, 0.03]):
        numbers, found = cuflash.quantize_kv(to_gpu(x), scale, layout=layout)
        want, its_scale = cuflash.quantize_kv(x, scale, layout=layout)
        there = to_host(numbers)
        nan = np.isnan(want.astype(F32))
        assert (np.isnan(there.astype(F32)) == nan).all()
        assert (there.view(np.uint8) == want.view(np.uint8))[~nan].all()
        if scale is None:
            compare.assert_same_bits(to_host(found), its_scale)


def test_a_captured_step_follows_lengths_and_writes_scales(cupy):
    """One graph for every token: it appends, finds the scales, and attends to what is there."""
    rng = np.random.default_rng(3)
    q, k, v, k_scale, v_scale = map(to_gpu, arrays(rng, BF16, 1, (8, 2), 128, 2, 400))
    k_new, v_new = (to_gpu(rng.standard_normal((2, 1, 2, 128)).astype(BF16)) for _ in range(2))
    lengths, out = cupy.asarray([300, 7], np.int32), cupy.empty_like(q)

    def step(caches, at, to):
        cuflash.decode(q, *caches[:2], at, k_new=k_new, v_new=v_new, k_scale=caches[2], v_scale=caches[3], out=to)

    caches = [k, v, k_scale, v_scale]
    other, warm = ([duplicate(a) for a in caches] for _ in range(2))
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        step(warm, lengths, out)
        stream.synchronize()
        stream.begin_capture()
        step(caches, lengths, out)
        graph = stream.end_capture()
        for n in ([300, 7], [301, 8], [0, 399]):
            lengths[...] = cupy.asarray(n, np.int32)
            graph.launch(stream)
            stream.synchronize()
            want = cupy.empty_like(q)
            step(other, cupy.asarray(n, np.int32), want)
            stream.synchronize()
            for a, b in zip((out, *caches), (want, *other), strict=True):
                compare.assert_same_bits(to_host(a), to_host(b))


def test_what_a_gpu_declines(cupy):
    q, k, v, k_scale, v_scale = map(to_gpu, arrays(np.random.default_rng(4), F16, 1, (4, 2), 64, 2, 32))
    for kernel in ("fa2", "fa1", "naive"):
        with refused(cuflash.NoBackendError, "float8_e4m3fn", "kernel='decode'"):
            cuflash.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, kernel=kernel, backend="cuda")
    with refused(cuflash.NoBackendError, "float8_e4m3fn"):
        cuflash.attention(q, k, v, backend="numba-cuda")
    with refused(cuflash.NoBackendError, "columns must be contiguous"):
        cuflash.attention(q[..., ::2], k[..., ::2], v[..., ::2])
    with refused(TypeError, "k_scale:", "NumPy"):
        cuflash.attention(q, k, v, k_scale=to_host(k_scale))
