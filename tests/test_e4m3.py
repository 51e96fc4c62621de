"""Keys and values in float8_e4m3fn with scales: quantize_kv(), and attention and decode() over such arrays on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import compare
import ml_dtypes
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32, F64
from refusal import refused

import cuflash
from cuflash import problem as problems

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TINY = np.finfo(F32).tiny


def codes(seed: int, *shape: int) -> np.ndarray:
    """Numbers up to 448 in float8_e4m3fn."""
    return np.clip(np.random.default_rng(seed).standard_normal(shape) * 100, -448, 448).astype(E4M3)


def scales(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.005, 0.03, shape).astype(F32)


def close(found: tuple[np.ndarray, np.ndarray], problem: problems.Problem) -> None:
    want = compare.expect([problem])
    compare.assert_close(found[0], want.out[0], want.out_bound, "out")
    compare.assert_close(found[1], want.lse[0], want.lse_bound, "lse")


# ---- quantize_kv ------------------------------------------------------------------------------------------------------


def test_numbers_are_rounded_to_the_nearest_and_saturate():
    """Case 43: what is beyond the range becomes the largest number, not NaN; denormals are kept."""
    x = np.array([448, 449, 463.9, 464, 465, 1e4, -1e4, np.inf, -np.inf, 0.0017, 2.0**-10, 1.5 * 2.0**-9, 17, 19, -0.0], F32)
    got, scale = cuflash.quantize_kv(x.reshape(1, 1, -1), 1.0)
    assert got.dtype == E4M3 and scale == 1.0
    assert got.astype(F32).ravel().tolist() == [448] * 5 + [448, -448, 448, -448, 2.0**-9, 0, 2 * 2.0**-9, 16, 20, -0.0]
    assert np.signbit(got.astype(F32).ravel()[-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_and_head_gets_its_scale(dtype):
    x = np.random.default_rng(0).standard_normal((2, 7, 3, 20)).astype(dtype)
    got, scale = cuflash.quantize_kv(x)
    assert got.shape == x.shape and scale.shape == x.shape[:-1] and scale.dtype == F32
    number, wide = got.astype(F64), scale[..., None].astype(F64)
    assert (np.abs(number).max(axis=-1) == 448).all()
    assert (np.abs(number * wide - x.astype(F64)) <= np.maximum(np.abs(x.astype(F64)) / 16, 2.0**-10 * wide) * (1 + 2.0**-20)).all()
    turned, its_scale = cuflash.quantize_kv(x.swapaxes(1, 2), layout="BHSD")
    compare.assert_same_bits(np.ascontiguousarray(turned.swapaxes(1, 2)), got)
    compare.assert_same_bits(np.ascontiguousarray(its_scale.swapaxes(1, 2)), scale)


def test_rows_of_zeros_tiny_numbers_and_what_is_not_finite():
    """Case 42: a row of zeros has a scale that divides; NaN stays where it is, an infinity makes its row NaN."""
    x = np.ones((1, 5, 1, 8), F32)
    x[0, 0], x[0, 1], x[0, 2, 0, 3], x[0, 3, 0, 5] = 0, 1e-44, np.nan, np.inf
    got, scale = cuflash.quantize_kv(x)
    with np.errstate(invalid="ignore"):  # a scale of NaN
        number = got.astype(F32)[0, :, 0] * scale[0, :, 0, None]
    assert scale[0, 0, 0] == scale[0, 1, 0] == TINY and (number[0] == 0).all() and np.isfinite(number[1]).all()
    assert np.isnan(number[2]).tolist() == [n == 3 for n in range(8)]
    assert np.isnan(number[3]).all()
    assert (number[4] == 1).all()


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_one_scale_for_each_head(layout):
    x = np.random.default_rng(1).standard_normal((4, 3, 8)).astype(F32)
    by_head = np.array([0.01, 0.02, 0.04], F32)
    got, _ = cuflash.quantize_kv(x if layout == "BSHD" else x.swapaxes(0, 1), by_head, layout=layout)
    want = (x / by_head[:, None]).astype(E4M3)
    compare.assert_same_bits(np.ascontiguousarray(got if layout == "BSHD" else got.swapaxes(0, 1)), want)


def test_what_quantize_kv_does_not_take():
    x = np.ones((4, 2, 8), F32)
    with refused(ValueError, "scale:", "(3,)", "(2,)"):
        cuflash.quantize_kv(x, [1.0, 2.0, 3.0])
    for bad in (0.0, -1.0, np.nan, np.inf):
        with refused(ValueError, "scale:", "finite and above 0"):
            cuflash.quantize_kv(x, bad)
    with refused(ValueError, "x:", "(2, 8)"):
        cuflash.quantize_kv(x[0])
    with refused(NotImplementedError, "x:", "float8_e4m3fn"):
        cuflash.quantize_kv(x.astype(E4M3))
    with refused(TypeError, "x:", "int64"):
        cuflash.quantize_kv(np.ones((4, 2, 8), np.int64))
    with refused(ValueError, "layout:", "'SBHD'"):
        cuflash.quantize_kv(x, layout="SBHD")


# ---- attention over them ----------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    "token": lambda *shape: (scales(5, *shape), scales(6, *shape)),
    "head": lambda *shape: (scales(5, shape[-1]), scales(6, shape[-1]).tolist()),
    "tensor": lambda *shape: (0.01, np.float32(0.02)),
    "mixed": lambda *shape: (0.01, scales(6, *shape)),
    "none": lambda *shape: (None, None),
}
ENGINES = (("reference", "naive"), ("cpu", "fa2"), ("cpu", "decode"), ("cpu", "naive"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "kernel"), ENGINES)
def test_dense(dtype, kind, backend, kernel):
    q = np.random.default_rng(0).standard_normal((2, 3, 4, 24)).astype(dtype)
    k, v = codes(1, 2, 90, 2, 24), codes(2, 2, 90, 2, 40)
    if kind == "none":
        k = (k.astype(F32) / 100).astype(E4M3)
    k_scale, v_scale = KINDS[kind](2, 90, 2)
    for a in (k, v, k_scale, v_scale):  # behind the lengths lies what was never written
        if isinstance(a, np.ndarray) and a.ndim > 2:
            a[1, 70:] = np.nan
    options: dict[str, Any] = {"kv_lengths": [90, 70], "causal": True, "k_scale": k_scale, "v_scale": v_scale}
    found = cuflash.attention(q, k, v, return_lse=True, backend=backend, kernel=kernel, **options)
    close(found, problems.build_attention(q, k, v, **options))


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize(("backend", "kernel"), ENGINES)
def test_pages(layout, backend, kernel):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 2, 4, 16)).astype(F16)
    pages, page = 20, 8
    stored = [codes(1, pages, page, 2, 16), codes(2, pages, page, 2, 16), scales(3, pages, page, 2), scales(4, pages, page, 2)]
    table = rng.permutation(pages).reshape(2, 10)
    q, k, v, k_scale, v_scale = ((a if layout == "BSHD" else np.ascontiguousarray(a.swapaxes(1, 2))) for a in (q, *stored))
    options: dict[str, Any] = {"page_table": table, "kv_lengths": [80, 33], "layout": layout, "k_scale": k_scale, "v_scale": v_scale}
    out, lse = cuflash.attention(q, k, v, return_lse=True, backend=backend, kernel=kernel, causal=True, **options)
    close((out if layout == "BSHD" else out.swapaxes(1, 2), lse), problems.build_attention(q, k, v, causal=True, **options))


def test_the_same_as_dequantized_arrays():
    """Scores use q . (k * k_scale), outputs v * v_scale: so does an ordinary call on the products."""
    q = np.random.default_rng(0).standard_normal((1, 4, 4, 16))
    k, v, k_scale, v_scale = codes(1, 1, 30, 2, 16), codes(2, 1, 30, 2, 16), scales(3, 1, 30, 2), scales(4, 1, 30, 2)
    wide = [a.astype(F64) * s[..., None] for a, s in ((k, k_scale), (v, v_scale))]
    options: dict[str, Any] = {"causal": True, "softcap": 5.0, "alibi_slopes": [0.1, 0.2, 0.3, 0.4], "sinks": [0.0, 1.0, 2.0, 3.0]}
    want = cuflash.attention(q, *wide, **options)
    np.testing.assert_allclose(cuflash.attention(q, k, v, k_scale=k_scale, v_scale=v_scale, **options), want, rtol=1e-12, atol=1e-12)
    weights = cuflash.attention_weights(q, k, k_scale=k_scale, causal=True)
    np.testing.assert_allclose(weights, cuflash.attention_weights(q, wide[0], causal=True), rtol=1e-12, atol=1e-12)
    packed = cuflash.attention_varlen(q[0], k[0], v[0], [0, 4], [0, 30], k_scale=k_scale[0], v_scale=[0.1, 0.2])
    want = cuflash.attention(q, wide[0], v.astype(F64) * np.array([0.1, 0.2], F32)[:, None])
    np.testing.assert_allclose(packed, want[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("backend", "kernel"), ENGINES)
def test_nan_is_seen_by_those_who_see_it(backend, kernel):
    """Both codes of NaN, and NaN in a scale; a key that nobody may see does not matter."""
    q = np.ones((1, 4, 1, 16), F16)
    for which, index in itertools.product(range(3), (0, 2, 5)):
        k, v, k_scale, v_scale = codes(1, 1, 6, 1, 16), codes(2, 1, 6, 1, 16), scales(3, 1, 6, 1), scales(4, 1, 6, 1)
        if which == 2:
            k_scale[0, index] = np.nan
        else:
            (k, v)[which].view(np.uint8)[0, index, 0, 3] = (0x7F, 0xFF)[which]
        out = cuflash.attention(
            q, k, v, k_scale=k_scale, v_scale=v_scale, causal=True, kv_lengths=[5], backend=backend, kernel=kernel,
        )
        rows = np.isnan(out[0, :, 0].astype(F32)).any(axis=-1)
        assert rows.tolist() == [r + 1 >= index for r in range(4)] if index < 5 else not rows.any()


# ---- decode() appends -------------------------------------------------------------------------------------------------


def test_new_keys_and_values_are_quantized_as_they_are_written():
    rng = np.random.default_rng(0)
    new = [rng.standard_normal((2, 3, 2, 16)).astype(F16) for _ in range(2)]
    q = rng.standard_normal((2, 3, 4, 16)).astype(F16)
    for kind in ("token", "head", "tensor", "none"):
        k, v = codes(1, 2, 10, 2, 16), codes(2, 2, 10, 2, 16)
        k_scale, v_scale = KINDS[kind](2, 10, 2)
        before = [np.array(a) for a in (k, v)]
        given = [None if kind == "token" else 1.0 if s is None else s for s in (k_scale, v_scale)]
        want = [cuflash.quantize_kv(x, s) for x, s in zip(new, given, strict=True)]
        out = cuflash.decode(
            q, k, v, [4, 7], k_new=new[0], v_new=new[1], k_scale=k_scale, v_scale=v_scale, causal=True,
        )
        for a, old, (numbers, _) in zip((k, v), before, want, strict=True):
            for b, n in ((0, 4), (1, 7)):
                old[b, n : n + 3] = numbers[b]
            compare.assert_same_bits(a, old)
        if kind == "token":
            for scale, (_, found) in zip((k_scale, v_scale), want, strict=True):
                assert (scale[0, 4:7] == found[0]).all() and (scale[1, 7:] == found[1]).all()
        again = cuflash.decode(q, k, v, [7, 10], k_scale=k_scale, v_scale=v_scale, causal=True)
        compare.assert_same_bits(out, again)


def test_numbers_that_are_quantized_already_are_copied():
    q, k, v = np.ones((1, 1, 2, 16), BF16), codes(1, 1, 8, 2, 16), codes(2, 1, 8, 2, 16)
    k_new, v_new, scale = codes(3, 1, 1, 2, 16), codes(4, 1, 1, 2, 16), scales(5, 1, 8, 2)
    before = scale.copy()
    cuflash.decode(q, k, v, [5], k_new=k_new, v_new=v_new, k_scale=scale, v_scale=scale)
    compare.assert_same_bits(np.ascontiguousarray(k[:, 5:6]), k_new)
    compare.assert_same_bits(np.ascontiguousarray(v[:, 5:6]), v_new)
    compare.assert_same_bits(scale, before)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_a_rotary_embedding_comes_before_the_rounding(style):
    rng = np.random.default_rng(0)
    q, k_new, v_new = (rng.standard_normal((1, 2, h, 16)).astype(F16) for h in (4, 2, 2))
    angle = rng.uniform(0, 6, (8, 4)).astype(F32)
    rope = (np.cos(angle), np.sin(angle), style)
    plain = [np.zeros((1, 8, 2, 16), F16) for _ in range(2)]
    cuflash.decode(q, *plain, [3], k_new=k_new, v_new=v_new, rope=rope)
    caches, found = [codes(n, 1, 8, 2, 16) for n in (1, 2)], [scales(n, 1, 8, 2) for n in (3, 4)]
    cuflash.decode(q, *caches, [3], k_new=k_new, v_new=v_new, rope=rope, k_scale=found[0], v_scale=found[1])
    for a, cache, scale in zip(plain, caches, found, strict=True):
        numbers, its = cuflash.quantize_kv(a[:, 3:5])
        compare.assert_same_bits(np.ascontiguousarray(cache[:, 3:5]), numbers)
        assert (scale[:, 3:5] == its).all()


@pytest.mark.parametrize("page", [0, 4])
def test_a_shared_prefix_has_scales_as_well(page):
    rng = np.random.default_rng(0)
    q, new = rng.standard_normal((3, 1, 4, 16)).astype(F32), rng.standard_normal((3, 1, 2, 16)).astype(F32)
    stored = (21, page) if page else (3, 28)
    k, v, k_scale, v_scale = codes(1, *stored, 2, 16), codes(2, *stored, 2, 16), scales(3, *stored, 2), scales(4, *stored, 2)
    options: dict[str, Any] = {"k_new": new, "v_new": new}
    if page:
        options["page_table"] = np.concatenate([np.repeat([[20, 19, 18]], 3, 0), np.arange(12).reshape(3, 4)], 1)
    else:
        for a in (k, v, k_scale, v_scale):
            a[1:, :12] = a[0, :12]
    caches = [a.copy() for a in (k, v, k_scale, v_scale)]
    want = cuflash.decode(q, *caches[:2], [12, 17, 20], k_scale=caches[2], v_scale=caches[3], return_lse=True, **options)
    found = cuflash.decode_shared_prefix(
        q, k, v, [12, 17, 20], 12, k_scale=k_scale, v_scale=v_scale, return_lse=True, **options,
    )
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for a, b in zip((k, v, k_scale, v_scale), caches, strict=True):
        compare.assert_same_bits(a, b)


@pytest.mark.torch
def test_tensors_of_pytorch():
    """Codes and scales go to and fro as torch.float8_e4m3fn and torch.float32, and the caches of a call are written to."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    q, new = rng.standard_normal((1, 2, 4, 16)).astype(F16), rng.standard_normal((1, 2, 2, 16)).astype(F16)
    numbers, scale = cuflash.quantize_kv(torch.from_numpy(new))
    want, its_scale = cuflash.quantize_kv(new)
    assert numbers.dtype is torch.float8_e4m3fn
    compare.assert_same_bits(numbers.view(torch.uint8).numpy(), want.view(np.uint8))
    compare.assert_same_bits(scale.numpy(), its_scale)
    k, v, k_scale, v_scale = codes(1, 1, 8, 2, 16), codes(2, 1, 8, 2, 16), scales(3, 1, 8, 2), scales(4, 1, 8, 2)
    there = [torch.from_numpy(a.view(np.uint8).copy()).view(torch.float8_e4m3fn) for a in (k, v)]
    its = [torch.from_numpy(a.copy()) for a in (k_scale, v_scale)]
    x = torch.from_numpy(new)
    out = cuflash.decode(torch.from_numpy(q), *there, [3], k_new=x, v_new=x, k_scale=its[0], v_scale=its[1])
    compare.assert_same_bits(out.numpy(), cuflash.decode(q, k, v, [3], k_new=new, v_new=new, k_scale=k_scale, v_scale=v_scale))
    for a, b in zip((*there, *its), (k, v, k_scale, v_scale), strict=True):
        compare.assert_same_bits(a.view(torch.uint8).numpy(), np.ascontiguousarray(b).view(np.uint8))


# ---- what is refused --------------------------------------------------------------------------------------------------


def test_what_is_refused():
    q, k, v = np.ones((1, 2, 4, 16), F16), codes(1, 1, 8, 2, 16), codes(2, 1, 8, 2, 16)
    with refused(NotImplementedError, "q:", "float8_e4m3fn", "not supported yet", "keys and values"):
        cuflash.attention(codes(0, 1, 2, 4, 16), k, v)
    with refused(TypeError, "v:", "float16", "float8_e4m3fn"):
        cuflash.attention(q, k, v.astype(F16))
    with refused(TypeError, "k:", "float8_e5m2"):
        cuflash.attention(q, k.astype(ml_dtypes.float8_e5m2), v.astype(ml_dtypes.float8_e5m2))
    for shape in ((3,), (1, 8, 3), (1, 2, 8), (2, 8, 2), (1, 8, 2, 1)):
        with refused(ValueError, "k_scale:", str(shape), "(2,)", "(1, 8, 2)"):
            cuflash.attention(q, k, v, k_scale=np.ones(shape, F32))
    with refused(TypeError, "v_scale:", "float64", "float32"):
        cuflash.attention(q, k, v, v_scale=np.ones((1, 8, 2)))
    for bad in (0.0, -1.0, np.nan, [1.0, np.inf]):
        with refused(ValueError, "k_scale:", "finite and above 0"):
            cuflash.attention(q, k, v, k_scale=bad)
    with refused(TypeError, "k_scale:", "float16", "float8_e4m3fn"):
        cuflash.attention(q, q, q, k_scale=1.0)
    with refused(NotImplementedError, "q_scale:", "float8"):
        cuflash.attention(q, k, v, q_scale=1.0)
    with refused(TypeError, "k:", "float8_e4m3fn", "gradients"):
        cuflash.attention_backward(q, q, k, v, q, np.zeros((1, 4, 2), F32))


def test_appends_that_are_refused():
    q, k, v = np.ones((1, 2, 4, 16), F16), codes(1, 1, 8, 2, 16), codes(2, 1, 8, 2, 16)
    new, scale = np.ones((1, 2, 2, 16), F16), scales(3, 1, 8, 2)
    before = k.copy(), v.copy(), scale.copy()
    with refused(TypeError, "v_new:", "float16", "float8_e4m3fn", "one dtype"):
        cuflash.decode(q, k, v, [1], k_new=new.astype(E4M3), v_new=new)
    with refused(TypeError, "k_new:", "float8_e4m3fn", "k_cache", "float16"):
        cuflash.decode(q, *[np.zeros((1, 8, 2, 16), F16)] * 2, [1], k_new=new.astype(E4M3), v_new=new.astype(E4M3))
    with refused(TypeError, "rope:", "float8_e4m3fn", "float16"):
        cuflash.decode(
            q, k, v, [1], k_new=new.astype(E4M3), v_new=new.astype(E4M3), rope=(np.ones((9, 4), F32), np.ones((9, 4), F32), "half"),
        )
    with refused(ValueError, "k_scale:", "overlaps", "v_scale"):
        cuflash.decode(q, k, v, [1], k_new=new, v_new=new, k_scale=scale, v_scale=scale)
    fixed = scale.copy()
    fixed.flags.writeable = False
    with refused(ValueError, "v_scale:", "read-only"):
        cuflash.decode(q, k, v, [1], k_new=new, v_new=new, k_scale=scale, v_scale=fixed)
    with refused(ValueError, "kv_lengths:", "capacity of 8", "nothing was written"):
        cuflash.decode(q, k, v, [7], k_new=new, v_new=new, k_scale=scale, v_scale=scale.copy())
    for a, old in zip((k, v, scale), before, strict=True):
        compare.assert_same_bits(a, old)
