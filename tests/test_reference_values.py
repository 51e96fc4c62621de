"""The float64 oracle against hand-computed values, on inputs that are not finite, and as a backend."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from small import forward_1d, rows, view, with_gradients, zeros

from cuflash import reference
from cuflash.backends import reference as backend
from cuflash.problem import build_attention, build_varlen
from cuflash.types import Problem

INF = math.inf
FLOAT32_MIN = float(np.finfo(np.float32).min)


# --- hand-computed values ------------------------------------------------------------------------------------------------


def empty_rows_problem() -> Problem:
    return build_attention(zeros(4, dim=16), zeros(2, dim=16), rows(1, 3, dim=16), causal=True)


def test_case_1_more_queries_than_keys():
    out, lse = forward_1d(empty_rows_problem())
    np.testing.assert_array_equal(out, [0, 0, 1, 2])
    np.testing.assert_allclose(lse, [-INF, -INF, 0, 0.6931472], atol=1e-7)
    dout = np.random.default_rng(0).standard_normal((1, 4, 1, 16))
    gradients = reference.backward(with_gradients(empty_rows_problem(), dout))
    # q = k = 0: scores and their slopes vanish.
    assert (gradients.dq == 0).all() and (gradients.dk == 0).all()
    np.testing.assert_allclose(gradients.dv[0, 0], dout[0, 2] + dout[0, 3] / 2, rtol=1e-15)
    np.testing.assert_allclose(gradients.dv[0, 1], dout[0, 3] / 2, rtol=1e-15)


@pytest.mark.parametrize("garbage", [1e4, INF, np.nan])
@pytest.mark.parametrize("options", [{}, {"softcap": 0.5}, {"score": "sqdist"}, {"score_mod": lambda s, b, h, i, j: s * s}])
def test_case_5_empty_rows_pass_nothing_on(garbage, options):
    rng = np.random.default_rng(8)
    q, k, v, dout = (rng.standard_normal((1, n, 1, 4)) for n in (4, 2, 2, 4))
    dlse = rng.standard_normal((1, 1, 4))
    dout[:, :2], dlse[..., :2] = garbage, garbage
    all_rows = reference.backward(with_gradients(build_attention(q, k, v, causal=True, **options), dout, dlse))
    seeing = build_attention(q[:, 2:], k, v, causal=True, **options)
    seeing = reference.backward(with_gradients(seeing, dout[:, 2:], dlse[..., 2:]))
    assert (all_rows.dq[:, :2] == 0).all()
    for left, right in ((all_rows.dq[:, 2:], seeing.dq), (all_rows.dk, seeing.dk), (all_rows.dv, seeing.dv)):
        np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-15)


def test_case_2_no_keys_at_all():
    problem = build_attention(np.ones((3, 2, 4)), np.ones((0, 2, 4)), np.ones((0, 2, 5)))
    out, lse = reference.forward(problem)
    assert out.shape == (1, 3, 2, 5) and (out == 0).all()
    assert lse.shape == (1, 2, 3) and (lse == -INF).all()
    gradients = reference.backward(with_gradients(problem, np.ones((1, 3, 2, 5))))
    assert (gradients.dq == 0).all()
    assert gradients.dk.shape == (1, 0, 2, 4) and gradients.dv.shape == (1, 0, 2, 5)


def test_case_3_a_mask_row_without_a_key():
    problem = build_attention(zeros(2), zeros(2), rows(1, 3), mask=np.array([[False, False], [True, True]]))
    out, lse = forward_1d(problem)
    np.testing.assert_array_equal(out, [0, 2])
    np.testing.assert_allclose(lse, [-INF, math.log(2)], rtol=1e-15)
    gradients = reference.backward(with_gradients(problem, rows(5, 7)))
    assert all(np.isfinite(g).all() for g in (gradients.dq, gradients.dk, gradients.dv))
    np.testing.assert_array_equal(gradients.dv[0, :, 0, 0], [3.5, 3.5])


@pytest.mark.parametrize("q", [0.0, 1.0])
def test_case_4_the_finite_minimum_is_a_constant_bias(q):
    bias = np.full((1, 4), FLOAT32_MIN, np.float32)
    operands = rows(q, dtype=np.float32), rows(3, 1, 4, 1, dtype=np.float32), rows(1, 2, 3, 6, dtype=np.float32)
    problem = build_attention(*operands, bias=bias)
    out, lse = forward_1d(problem)
    np.testing.assert_allclose(out, [3.0], rtol=1e-15)
    np.testing.assert_allclose(lse, [FLOAT32_MIN], rtol=1e-15)
    gradients = reference.backward(with_gradients(problem, rows(1, dtype=np.float32)))
    np.testing.assert_allclose(gradients.dv[0, :, 0, 0], [0.25] * 4, rtol=1e-15)
    assert np.isfinite(gradients.dbias).all() and gradients.dbias.shape == (1, 4)


def test_bias_of_minus_infinity_masks_like_an_invisible_key():
    k, v, bias = rows(1, np.nan, 2), rows(4, np.nan, 8), np.array([[0, -INF, 0]])
    problem = with_gradients(build_attention(rows(0.5), k, v, bias=bias), rows(1))
    without = with_gradients(build_attention(rows(0.5), k[:, ::2], v[:, ::2], bias=bias[:, ::2]), rows(1))
    for left, right in zip(reference.forward(problem), reference.forward(without), strict=True):
        np.testing.assert_array_equal(left, right)
    left, right = reference.backward(problem), reference.backward(without)
    np.testing.assert_array_equal(left.dq, right.dq)
    np.testing.assert_array_equal(left.dk[0, :, 0, 0], [right.dk[0, 0, 0, 0], 0, right.dk[0, 1, 0, 0]])
    np.testing.assert_array_equal(left.dbias, [[right.dbias[0, 0], 0, right.dbias[0, 1]]])
    out, lse = forward_1d(build_attention(rows(0.5), k, v, bias=np.full((1, 3), -INF)))
    assert out[0] == 0 and lse[0] == -INF


def test_score_mod_may_hide_a_key_by_minus_infinity():
    def hide(s, b, h, i, j):
        return np.where(j == 1, -INF, s)

    out, lse = forward_1d(build_attention(rows(0), rows(1, 1, 1), rows(1, np.nan, 5), score_mod=hide))
    assert out[0] == 3 and lse[0] == math.log(2)


def test_case_6_many_causal_queries_over_one_key_each():
    rng = np.random.default_rng(9)
    q, k, v, dout = (rng.standard_normal((n, 1, 32)).astype(np.float16) for n in (256, 3, 3, 256))
    problem = build_varlen(q, k, v, [0, 76, 110, 256], [0, 1, 2, 3], causal=True)
    out, lse = reference.forward(problem)
    seeing = np.array([75, 109, 255])
    blind = np.setdiff1d(np.arange(256), seeing)
    np.testing.assert_array_equal(out[seeing], v)
    logits = (q[seeing, 0].astype(np.float64) * k[:, 0]).sum(axis=1) / math.sqrt(32)
    np.testing.assert_allclose(lse[0, seeing], logits, rtol=1e-12)
    assert (out[blind] == 0).all() and (lse[0, blind] == -INF).all()
    gradients = reference.backward(with_gradients(problem, dout))
    np.testing.assert_array_equal(gradients.dv, dout[seeing])
    # One key has weight 1 whatever its score.
    assert (gradients.dq[blind] == 0).all()
    np.testing.assert_allclose(gradients.dq[seeing], 0, atol=1e-14)
    np.testing.assert_allclose(gradients.dk, 0, atol=1e-14)


@pytest.mark.parametrize("logit", [-300.0, -49152.0, -53248.0, -61440.0, -1e30])
def test_case_8_logits_far_below_any_sentinel(logit):
    out, lse = forward_1d(build_attention(rows(1), np.full((1, 363, 1, 1), logit), np.ones((1, 363, 1, 1)), scale=1.0))
    np.testing.assert_allclose(out, [1], rtol=1e-13)
    np.testing.assert_allclose(lse, [logit + math.log(363)], rtol=1e-15)
    if logit == -61440:
        assert round(float(lse[0]), 4) == -61434.1056


def test_case_9_large_logits():
    x = np.full((1, 1, 1, 64), 133120, ml_dtypes.bfloat16)
    out, lse = reference.forward(build_attention(x, x, x))
    assert (out == 133120).all()
    np.testing.assert_allclose(lse, [[[1.417674752e11]]], rtol=1e-9)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(65, 65), (129, 129), (704, 704), (1, 128)])
def test_case_10_all_logits_minus_120(seqlen_q, seqlen_k):
    q, k = zeros(seqlen_q, dim=64), zeros(seqlen_k, dim=64)
    q[..., 0], k[..., 0] = 1, -120 * math.sqrt(64)
    rng = np.random.default_rng(10)
    v, dout = rng.standard_normal((1, seqlen_k, 1, 64)), rng.standard_normal((1, seqlen_q, 1, 64))
    problem = with_gradients(build_attention(q, k, v), dout)
    _, lse = reference.forward(problem)
    np.testing.assert_allclose(lse, -120 + math.log(seqlen_k), rtol=1e-14)
    gradients = reference.backward(problem)
    # dq would be the mean of the equal keys times a sum of score gradients that is 0.
    np.testing.assert_allclose(gradients.dq, 0, atol=1e-12)
    np.testing.assert_allclose(
        gradients.dv, np.broadcast_to(dout.sum(axis=1, keepdims=True) / seqlen_k, v.shape), rtol=1e-11, atol=1e-14
    )


def test_case_11_raw_scores_beyond_float16():
    q, k = np.full((1, 1, 1, 64), 64, np.float16), np.full((1, 2, 1, 64), 64, np.float16)
    k[:, 1] = 60
    v = np.array([1, 5], np.float16)[None, :, None, None] * np.ones((1, 2, 1, 64), np.float16)
    out, lse = reference.forward(build_attention(q, k, v))
    assert (out == 1).all() and lse[0, 0, 0] == 32768


def test_case_12_scale_negative_or_zero():
    out, lse = forward_1d(build_attention(rows(1), rows(0, 1000), rows(1, 5), scale=-1.0))
    assert out[0] == 1 and lse[0] == 0
    out, lse = forward_1d(build_attention(rows(1, 1), rows(0, 1000), rows(1, 5), scale=-1.0, causal=True))
    np.testing.assert_array_equal(out, [1, 1])
    np.testing.assert_array_equal(lse, [0, 0])
    problem = build_attention(rows(1, 1), rows(0, 1000), rows(1, 5), scale=0.0, causal=True)
    out, lse = forward_1d(problem)
    np.testing.assert_array_equal(out, [1, 3])
    np.testing.assert_allclose(lse, [0, math.log(2)], rtol=1e-15)
    gradients = reference.backward(with_gradients(problem, rows(1, 1)))
    assert (gradients.dq == 0).all() and (gradients.dk == 0).all()


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((1, 0), [0, 0.5, 1.5, 2.5, 3.5]),
        ((0, 0), [0, 1, 2, 3, 4]),
        ((2, 0), [0, 0.5, 1, 2, 3]),
        ((0, 1), [0.5, 1.5, 2.5, 3.5, 4]),
    ],
)
def test_case_27_windows_include_both_ends(window, expected):
    out, _ = forward_1d(build_attention(zeros(5), zeros(5), rows(0, 1, 2, 3, 4), window=window))
    np.testing.assert_allclose(out, expected, rtol=1e-15, atol=0)


def test_case_28_windows_as_wide_as_the_sequence():
    rng = np.random.default_rng(11)
    q, k, v = rng.standard_normal((3, 1, 16, 2, 4))
    options = [
        {"causal": True},
        {"window": (-1, 0)},
        {"window": (16, 0)},
        {"window": (15, 0)},
        {"causal": True, "window": (16, 0)},
    ]
    results = [reference.forward(build_attention(q, k, v, **option)) for option in options]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    assert (results[0][0] != reference.forward(build_attention(q, k, v))[0]).any()


def test_case_30_softcap_comes_before_the_mask():
    out, _ = forward_1d(build_attention(zeros(2), zeros(2), rows(0, 1), softcap=1.0, causal=True))
    np.testing.assert_array_equal(out, [0, 0.5])


def test_case_31_slope_of_the_softcap():
    problem = build_attention(rows(1), rows(6, 0), rows(1, 0), scale=1.0, softcap=2.0)
    np.testing.assert_allclose(reference.softcap_gradient(problem, np.array([6.0])), [0.00986604], rtol=1e-6)
    # dq = p (1 - p) * dcap * k for values 1 and 0, with p the weight of the first key.
    p = 1 / (1 + math.exp(-2 * math.tanh(3)))
    gradients = reference.backward(with_gradients(problem, rows(1)))
    np.testing.assert_allclose(gradients.dq[0, 0, 0, 0], p * (1 - p) * (1 - math.tanh(3) ** 2) * 6, rtol=1e-12)
    saturated = build_attention(rows(1), rows(2000, -2000), rows(1, 0), scale=1.0, softcap=50.0)
    gradients = reference.backward(with_gradients(saturated, rows(1)))
    assert (gradients.dq == 0).all() and (gradients.dk == 0).all() and np.isfinite(gradients.dv).all()


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(10, 2), (6, 1), (14, 2), (12, 1), (16, 1), (32, 1), (64, 1), (71, 1), (7, 1)])
def test_cases_33_and_34_groups_of_any_size(heads_q, heads_kv):
    rng = np.random.default_rng(12)
    q, dout = rng.standard_normal((2, 1, 3, heads_q, 4))
    k, v = rng.standard_normal((2, 1, 5, heads_kv, 4))
    group = heads_q // heads_kv
    shared = with_gradients(build_attention(q, k, v), dout)
    own = with_gradients(build_attention(q, k.repeat(group, axis=2), v.repeat(group, axis=2)), dout)
    for left, right in zip(reference.forward(shared), reference.forward(own), strict=True):
        np.testing.assert_array_equal(left, right)
    left, right = reference.backward(shared), reference.backward(own)
    np.testing.assert_array_equal(left.dq, right.dq)
    for name in ("dk", "dv"):
        summed = getattr(right, name).reshape(1, 5, heads_kv, group, 4).sum(axis=3)
        np.testing.assert_allclose(getattr(left, name), summed, rtol=1e-11, atol=1e-13)


def test_case_64_two_logits_that_nearly_tie_at_high_scale():
    dim = 16
    q, k = zeros(1, dim=dim, dtype=np.float16), zeros(2, dim=dim, dtype=np.float16)
    q[..., :2] = 1
    k[0, 0, 0, :2], k[0, 1, 0, :2] = 76, 76.246
    v, dout = rows(1, 2, dim=dim, dtype=np.float16), rows(1, dim=dim, dtype=np.float16)
    problem = with_gradients(build_attention(q, k, v, scale=0.5), dout)
    low, high = (float(k[0, j, 0, 0]) for j in (0, 1))
    p = 1 / (1 + math.exp(low - high))  # weight of the second key; logits are low and high
    slope = p * (1 - p) * dim  # d loss / d (difference of the logits): dout . (v1 - v0) = dim
    exact = reference.backward(problem)
    np.testing.assert_allclose(exact.dq[0, 0, 0, :2], 0.5 * slope * (high - low), rtol=1e-10)
    np.testing.assert_allclose(exact.dk[0, :, 0, 0], [-0.5 * slope, 0.5 * slope], rtol=1e-11)
    np.testing.assert_allclose(exact.dv[0, :, 0, 0], [1 - p, p], rtol=1e-13)
    rounded = backend.run_backward(backend.plan(problem, "naive"), problem)
    for name in ("dq", "dk", "dv"):
        assert getattr(rounded, name).dtype == np.float16
        np.testing.assert_allclose(getattr(rounded, name), getattr(exact, name), rtol=2.0**-11)


# --- what is not finite --------------------------------------------------------------------------------------------------


def test_case_65_nan_in_a_query_stays_in_its_row():
    rng = np.random.default_rng(13)
    q, k, v, dout = rng.standard_normal((4, 1, 3, 1, 4))
    clean = build_attention(q, k, v)
    q = q.copy()
    q[0, 1, 0, 2] = np.nan
    problem = build_attention(q, k, v)
    (out, lse), (clean_out, clean_lse) = reference.forward(problem), reference.forward(clean)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])
    np.testing.assert_array_equal(out[0, ::2], clean_out[0, ::2])
    np.testing.assert_array_equal(lse[..., ::2], clean_lse[..., ::2])
    gradients, clean_gradients = (reference.backward(with_gradients(p, dout)) for p in (problem, clean))
    assert np.isnan(gradients.dq[0, 1]).all()
    np.testing.assert_allclose(gradients.dq[0, ::2], clean_gradients.dq[0, ::2], rtol=1e-14)


@pytest.mark.parametrize("garbage", [np.nan, INF, -INF])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.0}, {"score": "sqdist"}, {"alibi_slopes": [0.5]}, {"score_mod": lambda s, b, h, i, j: 2 * s}]
)
def test_invisible_keys_never_matter(garbage, options):
    """Causal: the last key is seen by the last row alone, so that all other rows must not notice what it holds."""
    rng = np.random.default_rng(14)
    q, k, v, dout = rng.standard_normal((4, 1, 4, 1, 3))
    dout[:, -1] = 0
    clean = with_gradients(build_attention(q, k, v, causal=True, **options), dout)
    k, v = k.copy(), v.copy()
    k[:, -1], v[:, -1] = garbage, garbage
    dirty = with_gradients(build_attention(q, k, v, causal=True, **options), dout)
    (out, lse), (clean_out, clean_lse) = reference.forward(dirty), reference.forward(clean)
    np.testing.assert_allclose(out[:, :-1], clean_out[:, :-1], rtol=1e-14)
    np.testing.assert_allclose(lse[..., :-1], clean_lse[..., :-1], rtol=1e-14)
    left, right = reference.backward(dirty), reference.backward(clean)
    np.testing.assert_allclose(left.dq[:, :-1], right.dq[:, :-1], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("extra", [{}, {"softcap": 1.0}, {"score": "sqdist"}, {"score_mod": lambda s, b, h, i, j: 2 * s}])
@pytest.mark.parametrize("where", ["kv_start", "kv_lengths", "mask"])
def test_keys_that_no_row_sees_never_matter(where, extra):
    rng = np.random.default_rng(15)
    q, k, v, dout = rng.standard_normal((4, 1, 4, 1, 3))
    option = {"kv_start": [1], "kv_lengths": [3], "mask": np.array([True, False, True, True])}[where]
    hidden = {"kv_start": 0, "kv_lengths": 3, "mask": 1}[where]
    results = []
    for garbage in (0, np.nan):
        k, v = k.copy(), v.copy()
        k[:, hidden], v[:, hidden] = garbage, garbage
        problem = with_gradients(build_attention(q, k, v, **{where: option}, **extra), dout)
        gradients = reference.backward(problem)
        assert (gradients.dk[:, hidden] == 0).all() and (gradients.dv[:, hidden] == 0).all()
        results.append([*reference.forward(problem), gradients.dq, gradients.dk, gradients.dv])
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-15)


def test_nan_in_a_visible_value_reaches_its_feature_and_no_lse():
    v = np.ones((1, 2, 1, 2))
    v[0, 1, 0, 1] = np.nan
    out, lse = reference.forward(build_attention(zeros(2), zeros(2), v, causal=True))
    np.testing.assert_array_equal(out[0, :, 0], [[1, 1], [1, np.nan]])
    np.testing.assert_allclose(lse[0, 0], [0, math.log(2)], rtol=1e-15)


def test_infinite_logits():
    out, lse = forward_1d(build_attention(rows(1, 1), rows(0, INF), rows(1, 2), causal=True))
    np.testing.assert_array_equal(out, [1, np.nan])
    np.testing.assert_array_equal(lse, [0, np.nan])
    out, lse = forward_1d(build_attention(rows(1), rows(0, 0), rows(1, 2), bias=np.array([[0, INF]])))
    assert np.isnan(out[0]) and np.isnan(lse[0])


def test_sinks_take_weight_and_give_nothing():
    problem = build_attention(zeros(2), zeros(2), rows(3, 6), sinks=[math.log(2)], mask=np.array([[True, True], [False, False]]))
    out, lse = forward_1d(problem)
    np.testing.assert_allclose(out, [2.25, 0], rtol=1e-15)  # (3 + 6) / 4
    np.testing.assert_allclose(lse, [math.log(4), math.log(2)], rtol=1e-15)
    # dsink = weight of the sink * (dlse - dout . out): 1/2 * (0 - 2.25), and nothing of the empty row.
    gradients = reference.backward(with_gradients(problem, rows(1, np.nan)))
    np.testing.assert_allclose(gradients.dsinks, [-1.125], rtol=1e-15)
    none = build_attention(zeros(2), zeros(2), rows(3, 6), sinks=[-INF], mask=np.array([[True, True], [False, False]]))
    out, lse = forward_1d(none)
    np.testing.assert_allclose(out, [4.5, 0], rtol=1e-15)
    np.testing.assert_allclose(lse, [math.log(2), -INF], rtol=1e-15)
    np.testing.assert_array_equal(reference.backward(with_gradients(none, rows(1, 1))).dsinks, [0])


def test_squared_distances_of_large_close_points():
    """|q|^2 - 2 q.k + |k|^2 has no correct digit here."""
    q, k = rows(1e9 + 1), rows(1e9, 1e9 + 3)
    _, lse = forward_1d(build_attention(q, k, rows(0, 1), score="sqdist"))
    np.testing.assert_allclose(lse, [math.log(math.exp(-1) + math.exp(-4))], rtol=1e-14)


# --- the backend ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_backend_writes_every_element_of_strided_results(dtype):
    rng = np.random.default_rng(16)
    q, k, v = (rng.standard_normal((2, n, 2, 3)).astype(dtype) for n in (5, 3, 3))
    problem = build_attention(q, k, v, causal=True)
    out = np.full((3, 2, 5, 4), np.nan, dtype).transpose(1, 2, 3, 0)[:, ::-1, ::2]
    lse = np.full((2, 2, 10), np.nan, problem.compute_dtype)[..., ::2]
    problem = problem.replace(out=view(out), lse=view(lse))
    assert backend.decline(problem, "naive") is None
    plan = backend.plan(problem, "naive")
    assert (plan.kernel, plan.backend, plan.threads) == ("naive", "reference", 1) and plan.workspace > 0
    backend.run(plan, problem)
    exact_out, exact_lse = reference.forward(problem)
    np.testing.assert_array_equal(out, exact_out.astype(dtype))
    np.testing.assert_array_equal(lse, exact_lse.astype(lse.dtype))
    backend.run(plan, problem.replace(lse=None))


@pytest.mark.parametrize(("dtype", "statistics"), [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64)])
def test_backend_gradients_have_the_dtypes_of_their_operands(dtype, statistics):
    rng = np.random.default_rng(17)
    q, k, v, dout = rng.standard_normal((4, 1, 3, 2, 4)).astype(dtype)
    bias = rng.standard_normal((3, 3)).astype(statistics)
    problem = with_gradients(build_attention(q, k, v, bias=bias, sinks=[0.5, 1.0]), dout)
    gradients, exact = backend.run_backward(backend.plan(problem, "naive"), problem), reference.backward(problem)
    expected = {"dq": dtype, "dk": dtype, "dv": dtype, "dbias": statistics, "dsinks": statistics}
    for name, kind in expected.items():
        assert getattr(gradients, name).dtype == kind
        np.testing.assert_array_equal(getattr(gradients, name), getattr(exact, name).astype(kind))


def test_backend_declines_what_it_cannot_do():
    problem = build_attention(zeros(2), zeros(2), zeros(2))
    assert "fa2" in backend.decline(problem, "fa2")
    assert "score_mod" in backend.decline(problem.replace(score_mod="s * 2.0f"), "naive")
    assert "mask_mod" in backend.decline(problem.replace(mask_mod="i > j"), "naive")
