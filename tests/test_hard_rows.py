"""Hard cases on empty rows, masks, windows and extreme logits. The number in a test's name is the case's."""

from __future__ import annotations

import math

import compare
import devices
import numpy as np
import pytest
from case import BF16, DTYPES, F16, F32, F64
from cases import Target
from hard import (
    along_keys,
    assert_result,
    assert_values,
    attend,
    every_dtype,
    every_target,
    log_counts,
    normal,
    running_mean,
    small_integers,
    zeros,
)

import cuflash
from cuflash.problem import build_attention

HEADS = ((1, 1), (6, 2))


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), HEADS)
@pytest.mark.parametrize(("sq", "sk"), [(4, 2), (130, 65), (65, 64), (64, 1), (300, 128), (129, 129), (257, 2)])
def test_case_1_causal_with_more_queries_than_keys(sq: int, sk: int, hq: int, hkv: int, dtype: np.dtype, target: Target) -> None:
    values = np.array([1.0, 3.0]) if sk == 2 else small_integers(sk)
    q, k, v = zeros(dtype, 1, sq, hq, 16), zeros(dtype, 1, sk, hkv, 16), along_keys(values, (1, sk, hkv, 16), dtype)
    visible = np.arange(sq) + sk - sq + 1
    out, lse = attend(target, q, k, v, causal=True)
    assert_result((out, lse), running_mean(values, visible)[None, :, None, None], log_counts(visible), sk)
    assert not out[:, : sq - sk].view(f"u{dtype.itemsize}").any(), "rows without keys must be +0, bit for bit"
    if (sq, sk) == (4, 2):
        assert_result((out, lse), np.array([0, 0, 1, 2])[None, :, None, None], [-np.inf, -np.inf, 0, math.log(2)])


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), HEADS)
def test_case_2_no_key_at_all(hq: int, hkv: int, dtype: np.dtype, target: Target) -> None:
    q = normal(0, (2, 3, hq, 16), dtype)
    empty = zeros(dtype, 2, 0, hkv, 16)
    for options in ({}, {"causal": True}, {"softcap": 1.0}, {"window": (1, 1)}):
        assert_result(attend(target, q, empty, empty, **options), 0, -np.inf)
    cache = np.full((2, 70, hkv, 16), np.nan, dtype)
    cache[1, :5] = 0
    cache_v = cache.copy()
    cache_v[1, :5] = 2
    want_lse = np.array([-np.inf, math.log(5)])[:, None, None]
    assert_result(
        attend(target, q, cache, cache_v, [0, 5], function=cuflash.decode), np.array([0, 2])[:, None, None, None], want_lse
    )


@every_target
@every_dtype
@pytest.mark.parametrize("keys", [2, 64, 65, 300])
def test_case_3_a_mask_row_without_a_true(keys: int, dtype: np.dtype, target: Target) -> None:
    values = np.array([1.0, 3.0]) if keys == 2 else small_integers(keys)
    q, k, v = zeros(dtype, 1, 2, 2, 16), zeros(dtype, 1, keys, 1, 16), along_keys(values, (1, keys, 1, 16), dtype)
    mask = np.zeros((2, keys), bool)
    mask[1] = True
    hidden = np.where(mask, 0.0, -np.inf).astype(dtype)
    want = (np.array([0, values.mean()])[None, :, None, None], np.array([-np.inf, math.log(keys)]))
    for options in (
        {"mask": mask},
        {"bias": hidden},
        {"mask_mod": lambda b, h, i, j: (i > keys - 2) & (j >= 0)},
        {"score_mod": lambda s, b, h, i, j: np.where(i > keys - 2, s, -np.inf)},
    ):
        assert_result(attend(target, q, k, v, **options), *want, keys)


@every_target
@pytest.mark.parametrize(("dtype", "bias_dtype"), [(d, F32) for d in DTYPES] + [(d, d) for d in DTYPES if d != F32], ids=str)
@pytest.mark.parametrize("keys", [4, 64, 132])
def test_case_4_finite_minimum_as_bias(keys: int, dtype: np.dtype, bias_dtype: np.dtype, target: Target) -> None:
    """A constant bias, however low, changes no weight; next to it a row with two ordinary keys."""
    lowest = float(np.finfo(bias_dtype).min) if bias_dtype != BF16 else float(compare.ml_dtypes.finfo(BF16).min)
    values = np.tile([1.0, 2.0, 3.0, 6.0], keys // 4)
    q, k, v = zeros(dtype, 1, 3, 2, 16), zeros(dtype, 1, keys, 1, 16), along_keys(values, (1, keys, 1, 16), dtype)
    bias = np.zeros((3, keys), bias_dtype)
    bias[0] = lowest
    bias[1, :-1] = lowest
    for options in ({}, {"window": (-1, 3)}, {"softcap": 3.0}):
        out, lse = attend(target, q, k, v, bias=bias, **options)
        assert_values(out, np.array([3.0, 6.0, 3.0])[None, :, None, None], "out", keys)
        assert_values(lse[..., :1], lowest + math.log(keys), "lse of the low row")
        assert_values(lse[..., 1:], [0.0, math.log(keys)], "lse")


@every_target
def test_case_7_results_in_used_memory(target: Target) -> None:
    """Results that the call allocates itself, in memory that held NaN and infinity a moment ago."""
    for _ in range(5):
        for filler in (np.nan, np.inf):
            spoiled = [np.full(n, filler, F32) for n in (4 * 16, 4, 64, 16, 3 * 16, 1 << 14, 1 << 18)]
            del spoiled
            q, k = zeros(F32, 1, 4, 1, 16), zeros(F32, 1, 2, 1, 16)
            out, lse = devices.run(
                target, cuflash.attention, q, k, along_keys([1, 3], k.shape, F32), causal=True, return_lse=True
            )
            assert_result((out, lse), np.array([0, 0, 1, 2])[None, :, None, None], [-np.inf, -np.inf, 0, math.log(2)])
            out, lse = devices.run(target, cuflash.attention, q, k, k, mask=np.zeros((4, 2), bool), return_lse=True)
            assert not out.view(np.uint32).any() and (lse == -np.inf).all()
            out, lse = devices.run(target, cuflash.attention_varlen, q[0], k[0], k[0], [0, 1], [0, 1], return_lse=True)
            assert not out.view(np.uint32).any() and (lse[:, 1:] == -np.inf).all()


@every_target
@pytest.mark.parametrize(
    ("dtype", "logit"),
    [(d, x) for d in DTYPES for x in (-300.0, -49152.0, -53248.0, -61440.0)]
    + [(BF16, -1e30), (F32, -1e30), (F64, -1e30), (F64, -1e300)],
    ids=str,
)
@pytest.mark.parametrize("keys", [1, 64, 363])
def test_case_8_logits_below_every_sentinel(dtype: np.dtype, logit: float, keys: int, target: Target) -> None:
    logit = float(np.float64(logit).astype(dtype))
    q, k = zeros(dtype, 1, 2, 1, 16), zeros(dtype, 1, keys, 1, 16)
    q[..., 0], k[..., 0] = 1, logit
    v = np.ones_like(k)
    for causal, visible in ((False, [keys, keys]), (True, [keys - 1, keys])):
        want = np.array([logit + math.log(n) if n else -np.inf for n in visible])
        assert_result(attend(target, q, k, v, scale=1.0, causal=causal), np.isfinite(want)[None, :, None, None], want, keys)


@every_target
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("keys", [1, 65, 130])
def test_case_9_large_logits(keys: int, dtype: np.dtype, target: Target) -> None:
    q, k = np.full((1, 1, 1, 64), 133120, dtype), np.full((1, keys, 1, 64), 133120, dtype)
    assert_result(attend(target, q, k, k), 133120, 141767475200 + math.log(keys), keys)
    k[:, 1:] = -133120
    assert_result(attend(target, q, k, k), 133120, 141767475200)


@every_target
@every_dtype
@pytest.mark.parametrize(("sq", "length"), [(65, 65), (129, 129), (704, 704), (1, 128), (1, 65)])
def test_case_10_all_logits_minus_120(sq: int, length: int, dtype: np.dtype, target: Target) -> None:
    q, k = zeros(dtype, 1, sq, 1, 64), zeros(dtype, 1, length, 1, 64)
    q[..., 0], k[..., 0] = 1, -120 * 8
    values = small_integers(length)
    result = attend(target, q, k, along_keys(values, k.shape, dtype))
    assert_result(result, values.mean(), -120 + math.log(length), length)


@every_target
@every_dtype
def test_case_11_raw_score_beyond_float16(dtype: np.dtype, target: Target) -> None:
    q, k = np.full((1, 3, 2, 64), 64, dtype), np.full((1, 2, 1, 64), 64, dtype)
    k[:, 1] = 60
    assert_result(attend(target, q, k, along_keys([1, 5], k.shape, dtype)), 1, 32768)
    assert_result(attend(target, q, k[:, ::-1], along_keys([5, 1], k.shape, dtype)), 1, 32768)


@every_target
@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_case_12_negative_and_zero_scale(causal: bool, dtype: np.dtype, target: Target) -> None:
    q, k, v = np.ones((1, 1, 1, 1), dtype), along_keys([0, 1000], (1, 2, 1, 1), dtype), along_keys([1, 5], (1, 2, 1, 1), dtype)
    assert_result(attend(target, q, k, v, scale=-1.0, causal=causal), 1, 0)
    assert_result(attend(target, q, k[:, ::-1], v[:, ::-1], scale=-1.0, causal=causal), 1, 0)
    values = small_integers(130)
    q, k = normal(1, (1, 70, 2, 16), dtype), normal(2, (1, 130, 1, 16), dtype)
    visible = np.arange(70) + 61 if causal else np.full(70, 130)
    want = running_mean(values, visible)[None, :, None, None], log_counts(visible)
    assert_result(attend(target, q, k, along_keys(values, k.shape, dtype), scale=0.0, causal=causal), *want, 130)


@every_target
@every_dtype
def test_case_27_window_includes_both_ends(dtype: np.dtype, target: Target) -> None:
    q = zeros(dtype, 1, 5, 1, 16)
    v = along_keys(range(5), q.shape, dtype)
    for window, want in {
        (1, 0): [0, 0.5, 1.5, 2.5, 3.5],
        (0, 0): [0, 1, 2, 3, 4],
        (2, 0): [0, 0.5, 1, 2, 3],
        (0, 1): [0.5, 1.5, 2.5, 3.5, 4],
        (1, 1): [0.5, 1, 2, 3, 3.5],
    }.items():
        assert_values(attend(target, q, q, v, window=window)[0], np.array(want)[None, :, None, None], f"window {window}")


@every_target
@pytest.mark.parametrize("length", [63, 64, 65, 128, 129, 300])
@pytest.mark.parametrize("window", [(0, 0), (1, 0), (63, 0), (64, 0), (65, 0), (127, 1), (128, 64), (0, 63), (0, 64)])
def test_case_27_windows_at_tile_edges(window: tuple[int, int], length: int, target: Target) -> None:
    q = zeros(F32, 1, length, 1, 8)
    values = small_integers(length)
    low, high = np.maximum(np.arange(length) - window[0], 0), np.minimum(np.arange(length) + window[1] + 1, length)
    sums = np.concatenate([[0], np.cumsum(values)])
    want = (sums[high] - sums[low]) / (high - low)
    assert_result(
        attend(target, q, q, along_keys(values, q.shape, F32), window=window), want[None, :, None, None], np.log(high - low), 129
    )


@every_target
@every_dtype
@pytest.mark.parametrize("length", [16, 64, 129])
def test_case_28_windows_as_long_as_the_sequence(length: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = (normal(n, (1, length, 2, 16), dtype) for n in range(3))
    windows = ({"window": (-1, 0)}, {"window": (length, 0)}, {"window": (length - 1, 0)}, {"causal": True, "window": (length, 0)})
    results = [attend(target, q, k, v, **options) for options in ({"causal": True}, *windows)]
    for out, lse in results[1:]:
        assert_result((out, lse), *(a.astype(np.float64) for a in results[0]))


@every_target
def test_case_29_minus_one_is_unbounded(target: Target) -> None:
    q, k, v = (normal(n, (1, 66, 2, 16), F32) for n in range(3))
    whole, causal = attend(target, q, k, v), attend(target, q, k, v, causal=True)
    for options, want in (
        ({"window": (-1, -1)}, whole),
        ({"window": None}, whole),
        ({"window": (-1, 0)}, causal),
        ({"window": (-1, 66)}, whole),
    ):
        assert_result(attend(target, q, k, v, **options), *(a.astype(np.float64) for a in want))
    for window in ((-5, 3), (3, -2), (-2, -2)):
        with pytest.raises(ValueError, match="window"):
            attend(target, q, k, v, window=window)


@every_target
@every_dtype
def test_case_30_softcap_comes_before_the_mask(dtype: np.dtype, target: Target) -> None:
    q, v = zeros(dtype, 1, 2, 1, 16), along_keys([0, 1], (1, 2, 1, 16), dtype)
    hidden = np.array([[0, -np.inf], [0, 0]]).astype(dtype)
    for options in ({"causal": True}, {"mask": np.tri(2, dtype=bool)}, {"bias": hidden}, {"mask_mod": lambda b, h, i, j: j <= i}):
        assert_result(attend(target, q, q, v, softcap=1.0, **options), np.array([0, 0.5])[None, :, None, None], [0, math.log(2)])


@every_target
@pytest.mark.parametrize("heads", [6, 12, 3])
def test_case_32_alibi_when_heads_are_no_power_of_two(heads: int, target: Target) -> None:
    slopes = cuflash.alibi_slopes(heads)
    if heads == 6:
        assert slopes.tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    q = zeros(F32, 1, 1, heads, 8)
    k, v = zeros(F32, 1, 2, heads, 8), along_keys([0, 1], (1, 2, heads, 8), F32)
    far = np.exp(-np.asarray(slopes))  # weight of the key at distance 1 against the one at 0
    assert_result(
        attend(target, q, k, v, alibi_slopes=slopes), (1 / (1 + far))[None, None, :, None], np.log1p(far)[None, :, None]
    )


@every_target
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
@pytest.mark.parametrize("keys", [2, 65, 130])
def test_case_63_masked_weight_is_zero(keys: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = zeros(dtype, 1, 1, 1, 16), zeros(dtype, 1, keys, 1, 16), np.ones((1, keys, 1, 16), dtype)
    v[:, keys // 2] = 3e38
    visible = np.arange(keys) != keys // 2
    bias = np.where(visible, 0, -np.inf).astype(dtype)
    for options in (
        {"mask": visible},
        {"bias": bias},
        {"mask_mod": lambda b, h, i, j: j != keys // 2},
        {"score_mod": lambda s, b, h, i, j: np.where(j == keys // 2, -np.inf, s)},
    ):
        assert_result(attend(target, q, k, v, **options), 1, math.log(keys - 1), keys)


@every_target
@pytest.mark.parametrize(
    ("dtype", "tiny", "keys"),
    [
        (F16, 6e-8, 1),
        (F16, 6e-8, 64),
        (BF16, 1e-40, 1),
        (BF16, 1e-40, 64),
        (F32, 1.5e-45, 1),
        (F32, 1e-40, 2),
        (F32, 1e-40, 64),
        (F64, 5e-324, 1),
        (F64, 1e-310, 64),
    ],
    ids=str,
)
def test_case_63_subnormal_values_are_kept(dtype: np.dtype, tiny: float, keys: int, target: Target) -> None:
    q, k = zeros(dtype, 1, 1, 2, 16), zeros(dtype, 1, keys, 1, 16)
    v = np.full(k.shape, tiny, dtype)
    assert v[0, 0, 0, 0] != 0
    out, _ = attend(target, q, k, v)
    spacing = 0.0 if dtype.itemsize == 2 else float(np.finfo(dtype).smallest_subnormal)  # 16-bit values are summed in float32
    compare.assert_close(out, np.full(out.shape, float(v[0, 0, 0, 0])), (keys - 1) * spacing, "out")


@every_target
@pytest.mark.parametrize(("dtype", "logit", "big"), [(F32, -100.0, 1e38), (F64, -730.0, 1e308)], ids=str)
def test_case_63_subnormal_weights_are_kept(dtype: np.dtype, logit: float, big: float, target: Target) -> None:
    q, k = np.ones((1, 1, 1, 1), dtype), along_keys([0, logit], (1, 2, 1, 1), dtype)
    out, lse = attend(target, q, k, along_keys([0, big], (1, 2, 1, 1), dtype), scale=1.0)
    spacing = float(np.finfo(dtype).smallest_subnormal)  # of the weight
    compare.assert_close(out, np.full(out.shape, math.exp(logit) * big), 2 * spacing * big, "out")
    assert_values(lse, 0, "lse")


@every_target
@every_dtype
@pytest.mark.parametrize("length", [4, 66, 130])
def test_case_65_nan_in_a_query_stays_in_its_row(length: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = (normal(n, (1, length, 2, 16), dtype) for n in range(3))
    for options in ({}, {"causal": True}, {"softcap": 2.0}, {"sinks": [0.0, 1.0]}, {"score": "sqdist", "scale": 0.1}):
        clean = attend(target, q, k, v, **options)
        spoiled = q.copy()
        spoiled[0, 1, 1, 3] = np.nan
        out, lse = attend(target, spoiled, k, v, **options)
        assert np.isnan(out[0, 1, 1]).all() and np.isnan(lse[0, 1, 1])
        rest = np.ones(lse.shape, bool)
        rest[0, 1, 1] = False
        assert_values(lse[rest], clean[1][rest].astype(np.float64), "lse of the other rows")
        assert_values(
            out.transpose(0, 2, 1, 3)[rest], clean[0].transpose(0, 2, 1, 3)[rest].astype(np.float64), "out of the other rows"
        )


@every_target
@every_dtype
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("filler", [np.nan, np.inf])
@pytest.mark.parametrize("at", [3, 64, 100])
def test_case_65_nan_in_a_key_reaches_who_sees_it(at: int, filler: float, where: str, dtype: np.dtype, target: Target) -> None:
    """Under a causal mask: rows before the key are exact, rows from it on are NaN (an infinite value is infinite)."""
    length = 130
    q, k, v = (np.abs(normal(n, (1, length, 2, 16), dtype)) for n in range(3))
    clean = attend(target, q, k, v, causal=True)
    array = k if where == "k" else v
    array[0, at, :, 5] = filler
    out, lse = attend(target, q, k, v, causal=True)
    assert_values(out[:, :at], clean[0][:, :at].astype(np.float64), "rows that do not see it")
    assert_values(lse[..., :at], clean[1][..., :at].astype(np.float64), "lse of rows that do not see it")
    if where == "k":  # a logit of NaN or +inf
        assert np.isnan(out[:, at:]).all() and np.isnan(lse[..., at:]).all()
        return
    features = np.arange(16) != 5
    assert_values(lse, clean[1].astype(np.float64), "lse")
    spoiled = out[:, at:, :, 5].astype(np.float64)
    assert (np.isnan(spoiled) if np.isnan(filler) else ~np.isfinite(spoiled)).all()
    if target.kernel == "naive" or not np.isnan(filler):
        assert_values(out[..., features], clean[0][..., features].astype(np.float64), "the other features")


@every_target
@every_dtype
@pytest.mark.parametrize("filler", [np.nan, np.inf])
@pytest.mark.parametrize("how", ["mask", "bias", "mask_mod", "score_mod"])
def test_case_65_nan_in_a_value_that_half_of_the_rows_see(how: str, filler: float, dtype: np.dtype, target: Target) -> None:
    """Rows that see the key are spoiled; the rows between them, in the same tile, are exact."""
    q, k, v = normal(0, (1, 66, 4, 16), dtype), normal(1, (1, 130, 2, 16), dtype), normal(2, (1, 130, 2, 16), dtype)
    rows, at = np.arange(66), 70
    visible = np.ones((66, 130), bool)
    visible[1::2, at] = False
    options = {
        "mask": {"mask": visible}, "bias": {"bias": np.where(visible, 0, -np.inf).astype(dtype)},
        "mask_mod": {"mask_mod": lambda b, h, i, j: (j != at) | (i % 2 == 0)},  # position 64 is that of row 0
        "score_mod": {"score_mod": lambda s, b, h, i, j: np.where((j != at) | (i % 2 == 0), s, -np.inf)},
    }[how]
    clean = attend(target, q, k, v, **options)
    want = compare.expect([build_attention(q, k, v.copy(), **options)])
    v[0, at] = filler
    out, lse = attend(target, q, k, v, **options)
    if target.name == "cuda/fa2" and dtype in (F32, F64):  # which does such rows again, in another order
        compare.assert_close(out[:, 1::2], want.out[0][:, 1::2], want.out_bound, "rows that do not see it")
    else:
        assert_values(out[:, 1::2], clean[0][:, 1::2].astype(np.float64), "rows that do not see it")
    assert_values(lse, clean[1].astype(np.float64), "lse")
    assert not np.isfinite(out[:, rows % 2 == 0].astype(np.float64)).any()


@every_target
@pytest.mark.parametrize(("dtype", "sink", "big"), [(F32, 100.0, 1e38), (F64, 730.0, 1e308)], ids=str)
def test_a_sink_far_above_every_logit_leaves_its_share(dtype: np.dtype, sink: float, big: float, target: Target) -> None:
    """The keys' share of the weight is below the smallest normal number, their values are large: the product is neither 0 nor NaN."""
    q, v = zeros(dtype, 1, 1, 1, 4), np.full((1, 1, 1, 4), big, dtype)
    out, lse = attend(target, q, q, v, sinks=[sink])
    share = np.exp(np.longdouble(-sink))  # subnormal in float64, where the weight itself has few digits
    bound = 4 * compare.eps(dtype) * float(share) * big + float(np.finfo(np.float64).smallest_subnormal) * big
    compare.assert_close(out, np.full(out.shape, float(share * np.longdouble(v[0, 0, 0, 0]))), bound, "out")
    assert lse.item() == sink
