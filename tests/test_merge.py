"""Merging of partial results: hand-computed values, agreement with attention over all keys, buffers and errors."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import merge_softmax_stats, merge_states, reference
from cuflash.problem import build_attention

INF = math.inf


def state(out: float, lse: float, dtype: type = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """One row, (S, D) and (S,)."""
    return np.full((1, 1), out, dtype), np.full(1, lse, np.float64 if dtype == np.float64 else np.float32)


def merged(*states: tuple[np.ndarray, np.ndarray], **options) -> tuple[np.ndarray, np.ndarray]:
    outs, lses = zip(*states, strict=True)
    return merge_states(outs, lses, **options)


def parts_of_attention(parts, *, dtype=np.float64, heads=2, **options):
    """Attention over all keys, and over each range of keys, as float64 (B, S, H, D) and (B, H, S)."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, heads, 4)).astype(dtype)
    k, v = rng.standard_normal((2, 2, sum(parts), heads, 4)).astype(dtype)
    ends = np.cumsum(parts)
    ranges = [slice(end - n, end) for n, end in zip(parts, ends, strict=True)]
    pieces = [reference.forward(build_attention(q, k[:, r], v[:, r], **options)) for r in ranges]
    return reference.forward(build_attention(q, k, v, **options)), pieces


@pytest.mark.parametrize("parts", [(5,), (3, 4), (1, 0, 6), (0, 0, 2), (1,) * 40])
def test_parts_merge_into_the_whole(parts):
    (out, lse), pieces = parts_of_attention(parts)
    got_out, got_lse = merged(*pieces)
    assert got_out.dtype == got_lse.dtype == np.float64
    np.testing.assert_allclose(got_out, out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_dtypes_are_merged_in_float32(dtype):
    (_, _), pieces = parts_of_attention((3, 4, 2))
    narrow = [(out.astype(dtype), lse.astype(np.float32)) for out, lse in pieces]
    exact_out, exact_lse = merged(*((out.astype(np.float64), lse.astype(np.float64)) for out, lse in narrow))
    out, lse = merged(*narrow)
    assert out.dtype == dtype and lse.dtype == np.float32
    # A handful of float32 roundings, then one to the dtype of the output.
    eps, narrow_eps = np.finfo(np.float32).eps, float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), exact_out, rtol=narrow_eps, atol=8 * eps * np.abs(exact_out).max())
    np.testing.assert_allclose(lse, exact_lse, rtol=8 * eps, atol=8 * eps)


def test_float64_statistics_raise_the_precision_of_the_lse():
    out, lse = merge_states([np.ones((1, 1), np.float32)] * 2, [np.full(1, 1e6, np.float64)] * 2)
    assert out.dtype == np.float32 and lse.dtype == np.float64
    assert lse[0] == 1e6 + math.log(2)


def test_layouts_and_numbers_of_axes_agree():
    (_, _), pieces = parts_of_attention((3, 4))
    out, lse = merged(*pieces)
    heads_first, lse_4d = merged(*((o.transpose(0, 2, 1, 3), s) for o, s in pieces), layout="BHSD")
    np.testing.assert_array_equal(heads_first.transpose(0, 2, 1, 3), out)
    np.testing.assert_array_equal(lse_4d, lse)
    out_3d, lse_3d = merged(*((o[1], s[1]) for o, s in pieces))
    np.testing.assert_array_equal(out_3d, out[1])
    np.testing.assert_array_equal(lse_3d, lse[1])
    out_3d, _ = merged(*((o[1].transpose(1, 0, 2), s[1]) for o, s in pieces), layout="BHSD")
    np.testing.assert_array_equal(out_3d.transpose(1, 0, 2), out[1])
    for layout in ("BSHD", "BHSD"):
        out_2d, lse_2d = merged(*((o[1, :, 1], s[1, 1]) for o, s in pieces), layout=layout)
        np.testing.assert_array_equal(out_2d, out[1, :, 1])
        np.testing.assert_array_equal(lse_2d, lse[1, 1])


def test_stacked_arrays_are_as_good_as_sequences():
    (_, _), pieces = parts_of_attention((3, 4, 1))
    outs, lses = (np.stack(x) for x in zip(*pieces, strict=True))
    for left, right in zip(merge_states(outs, lses), merged(*pieces), strict=True):
        np.testing.assert_array_equal(left, right)


def test_order_and_grouping_do_not_matter():
    (_, _), (a, b, c) = parts_of_attention((3, 4, 1))
    expected = merged(a, b, c)
    for result in (merged(c, a, b), merged(merged(a, b), c), merged(a, merged(b, c))):
        for left, right in zip(result, expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-15)


def test_one_part_is_returned_as_it_is():
    (_, _), (part,) = parts_of_attention((5,))
    out, lse = merged(part)
    np.testing.assert_array_equal(out, part[0])
    np.testing.assert_array_equal(lse, part[1])
    assert not np.shares_memory(out, part[0]) and not np.shares_memory(lse, part[1])


def test_no_rows_at_all():
    out, lse = merge_states(np.ones((2, 0, 3, 4), np.float32), np.ones((2, 3, 0), np.float32))
    assert out.shape == (0, 3, 4) and lse.shape == (3, 0)


# --- empty, infinite and NaN ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("garbage", [0.0, 7.0, INF, np.nan])
def test_an_empty_part_contributes_nothing(dtype, garbage):
    for states in ([state(3, -2, dtype), state(garbage, -INF, dtype)], [state(garbage, -INF, dtype), state(3, -2, dtype)]):
        out, lse = merged(*states)
        assert out[0, 0] == 3 and lse[0] == -2
    out, lse = merged(state(garbage, -INF, dtype), state(garbage, -INF, dtype))
    assert out[0, 0] == 0 and lse[0] == -INF
    out, lse = merged(state(garbage, -INF, dtype))
    assert out[0, 0] == 0 and lse[0] == -INF


@pytest.mark.parametrize("bad", [INF, np.nan])
@pytest.mark.parametrize("other", [0.0, -INF, INF, -1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_15_infinite_or_nan_statistics_make_the_row_nan(bad, other, dtype):
    """merge((1, 0), (7, +inf)): some libraries write +inf for an empty row; that must never pass silently as 7."""
    for states in ([state(1, other, dtype), state(7, bad, dtype)], [state(7, bad, dtype), state(1, other, dtype)]):
        out, lse = merged(*states)
        assert np.isnan(out[0, 0]) and np.isnan(lse[0])


def test_a_bad_row_spoils_no_other():
    outs = np.array([[[1.0], [1.0], [1.0]], [[7.0], [7.0], [7.0]]])
    lses = np.array([[0.0, 0.0, 0.0], [0.0, INF, -INF]])
    out, lse = merge_states(outs, lses)
    np.testing.assert_array_equal(out[:, 0], [4, np.nan, 1])
    np.testing.assert_allclose(lse, [math.log(2), np.nan, 0], rtol=1e-15)


def test_nan_of_a_part_that_saw_keys_is_kept():
    out, lse = merged(state(np.nan, 0.0), state(1, 0.0))
    assert np.isnan(out[0, 0]) and lse[0] == np.float32(math.log(2))


def test_case_16_natural_logarithms():
    out, lse = merged(state(0, math.log(3072), np.float64), state(1, math.log(64), np.float64))
    np.testing.assert_allclose(out[0, 0], 0.0204082, atol=5e-8)
    np.testing.assert_allclose(out[0, 0], 64 / 3136, rtol=1e-14)
    np.testing.assert_allclose(lse[0], 8.0507034, atol=5e-8)


@pytest.mark.parametrize("lse", [-61440.0, 88.9, 32768.0, float(np.finfo(np.float32).min)])
def test_statistics_far_from_zero_stay_in_range(lse):
    out, got = merged(state(1, lse), state(5, lse))
    assert out[0, 0] == 3
    np.testing.assert_allclose(got, [lse + math.log(2)], rtol=np.finfo(np.float32).eps)


def test_large_outputs_do_not_overflow_on_the_way():
    out, _ = merge_states(np.full((40, 1, 1), 3e38, np.float32), np.zeros((40, 1), np.float32))
    np.testing.assert_allclose(out, [[3e38]], rtol=8 * np.finfo(np.float32).eps)


# --- buffers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [80, 96, 192])
@pytest.mark.parametrize("target", [0, 1])
def test_case_17_in_place_is_out_of_place(dim, target):
    rng = np.random.default_rng(1)
    outs = rng.standard_normal((2, 1000, 3, dim)).astype(np.float32)
    lses = rng.standard_normal((2, 3, 1000)).astype(np.float32)
    lses[0, 0, ::7], lses[1, 1, ::5] = -INF, -INF
    out, lse = merge_states(outs, lses)
    returned = merge_states(outs, lses, out=outs[target], lse=lses[target])
    assert np.shares_memory(returned[0], outs) and np.shares_memory(returned[1], lses)
    np.testing.assert_array_equal(outs[target], out)
    np.testing.assert_array_equal(lses[target], lse)


def test_buffers_of_any_strides_are_filled_and_inputs_left_alone():
    (_, _), pieces = parts_of_attention((3, 4))
    copies = [(out.copy(), lse.copy()) for out, lse in pieces]
    out = np.full((4, 2, 3, 4), np.nan).transpose(1, 2, 3, 0)[:, :, ::-2]
    lse = np.full((2, 2, 6), np.nan)[..., ::2]
    returned = merged(*pieces, out=out, lse=lse)
    assert returned[0] is out and returned[1] is lse
    for left, right in zip((out, lse), merged(*pieces), strict=True):
        np.testing.assert_array_equal(left, right)
    for before, after in zip(copies, pieces, strict=True):
        np.testing.assert_array_equal(before[0], after[0])
        np.testing.assert_array_equal(before[1], after[1])


# --- errors --------------------------------------------------------------------------------------------------------------

OUT, LSE = np.ones((3, 2, 4), np.float32), np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("error", "argument", "call"),
    [
        (ValueError, "outs", lambda: merge_states([], [])),
        (ValueError, "lses", lambda: merge_states([OUT, OUT], [LSE])),
        (TypeError, "outs", lambda: merge_states(3.0, [LSE])),
        (TypeError, r"outs\[0\]", lambda: merge_states([[1.0]], [LSE])),
        (TypeError, r"outs\[0\].*int64", lambda: merge_states([np.ones((3, 4), np.int64)], [np.ones(3)])),
        (TypeError, r"lses\[0\].*int64", lambda: merge_states([OUT], [np.ones((2, 3), np.int64)])),
        (TypeError, r"outs\[0\]", lambda: merge_states([np.ma.masked_array(OUT)], [LSE])),
        (TypeError, r"outs\[1\].*float64", lambda: merge_states([OUT, OUT.astype(np.float64)], [LSE, LSE])),
        (ValueError, r"outs\[1\]", lambda: merge_states([OUT, OUT[:2]], [LSE, LSE])),
        (ValueError, r"lses\[0\]", lambda: merge_states([OUT], [LSE.T])),
        (ValueError, r"lses\[1\]", lambda: merge_states([OUT, OUT], [LSE, LSE[:1]])),
        (ValueError, r"lses\[0\].*BHSD", lambda: merge_states([OUT], [LSE], layout="BHSD")),
        (ValueError, r"outs\[0\]", lambda: merge_states([np.ones(3)], [np.ones(())])),
        (ValueError, "layout", lambda: merge_states([OUT], [LSE], layout="SBHD")),
        (ValueError, "out: shape", lambda: merge_states([OUT], [LSE], out=OUT[:2].copy())),
        (TypeError, "out: dtype", lambda: merge_states([OUT], [LSE], out=OUT.astype(np.float16))),
        (TypeError, "out: got list", lambda: merge_states([OUT], [LSE], out=[1.0])),
        (ValueError, "lse: shape", lambda: merge_states([OUT], [LSE], lse=LSE.T.copy())),
        (TypeError, "lse: dtype", lambda: merge_states([OUT], [LSE], lse=LSE.astype(np.float64))),
        (TypeError, "m2", lambda: merge_softmax_stats(1.0, 1.0, "5", 1.0)),
        (TypeError, "l1", lambda: merge_softmax_stats(1.0, 1j, 5.0, 1.0)),
        (TypeError, "l2", lambda: merge_softmax_stats(1.0, 1.0, 5.0, np.ones(2, complex))),
    ],
)
def test_errors_name_the_argument(error, argument, call):
    with pytest.raises(error, match=argument):
        call()


# --- running maximum and sum ---------------------------------------------------------------------------------------------


def test_softmax_stats_by_hand():
    m, total = merge_softmax_stats(2, 3, 5, 1)
    assert type(m) is float and type(total) is float
    assert m == 5 and round(total, 6) == 1.149361
    assert merge_softmax_stats(5, 1, 2, 3) == (m, total)


@pytest.mark.parametrize("garbage", [0.0, np.nan])
def test_the_empty_state_is_neutral(garbage):
    assert merge_softmax_stats(-INF, garbage, 2.0, 3.0) == (2, 3)
    assert merge_softmax_stats(2.0, 3.0, -INF, garbage) == (2, 3)
    assert merge_softmax_stats(-INF, 0.0, -INF, 0.0) == (-INF, 0)


@pytest.mark.parametrize("bad", [INF, np.nan])
@pytest.mark.parametrize("other", [0.0, INF, -INF])
def test_an_infinite_or_nan_maximum_makes_the_state_nan(bad, other):
    for states in ((bad, 1.0, other, 1.0), (other, 1.0, bad, 1.0)):
        m, total = merge_softmax_stats(*states)
        assert math.isnan(m) and math.isnan(total)


def test_softmax_stats_of_arrays_broadcast_and_keep_their_precision():
    m, total = merge_softmax_stats(np.array([2, -INF, 1], np.float32), np.array([3, 0, 2], np.float32), 5, 1)
    assert m.dtype == total.dtype == np.float32
    np.testing.assert_array_equal(m, [5, 5, 5])
    np.testing.assert_allclose(total, [1.149361, 1, 1 + 2 * math.exp(-4)], rtol=1e-6)
    m, total = merge_softmax_stats(np.zeros((2, 1)), np.ones((2, 1)), np.zeros(3), np.ones(3))
    assert m.shape == total.shape == (2, 3) and total.dtype == np.float64 and (total == 2).all()
    assert merge_softmax_stats(*np.float16([0, 1, 0, 1]))[1].dtype == np.float32


FINITE = st.floats(-1e4, 1e4)
LOGITS = st.lists(st.one_of(FINITE, st.just(-INF)), max_size=12)


def stats_of(logits: list[float]) -> tuple[float, float]:
    m = max(logits, default=-INF)
    return m, math.fsum(math.exp(x - m) for x in logits) if m > -INF else 0.0


@given(LOGITS, LOGITS)
def test_softmax_stats_of_a_union(first, second):
    m, total = merge_softmax_stats(*stats_of(first), *stats_of(second))
    expected_m, expected = stats_of(first + second)
    assert m == expected_m
    np.testing.assert_allclose(total, expected, rtol=1e-14)


@given(st.lists(st.tuples(FINITE | st.just(-INF), FINITE), min_size=1, max_size=8))
def test_states_are_a_weighted_mean(pairs):
    """A part with one key has its value for output and its logit for LSE."""
    logits, values = zip(*pairs, strict=True)
    out, lse = merge_states([np.full((1, 1), v) for v in values], [np.full(1, x) for x in logits])
    m, total = stats_of(list(logits))
    if m == -INF:
        assert out[0, 0] == 0 and lse[0] == -INF
        return
    mean = math.fsum(math.exp(x - m) * v for x, v in pairs) / total
    np.testing.assert_allclose(out[0, 0], mean, rtol=1e-13, atol=1e-14 * max(abs(v) for v in values))
    np.testing.assert_allclose(lse[0], m + math.log(total), rtol=1e-14, atol=1e-14)
