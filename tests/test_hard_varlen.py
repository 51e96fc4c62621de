"""Hard cases on packed sequences: empty ones, spare rows, lengths of one. Numbers are the cases'."""

from __future__ import annotations

import math

import compare
import numpy as np
import pytest
from case import BF16, F16, F32
from cases import Target
from hard import assert_only_value, assert_result, attend, every_dtype, every_target, normal, zeros

import cuflash
from cuflash.problem import build_attention

PACKED = {"function": cuflash.attention_varlen}


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (4, 2)])
def test_case_6_many_causal_queries_over_one_key(hq: int, hkv: int, dtype: np.dtype, target: Target) -> None:
    q, k, v = normal(0, (256, hq, 32), dtype), normal(1, (3, hkv, 32), dtype), normal(2, (3, hkv, 32), dtype)
    out, lse = attend(target, q, k, v, [0, 76, 110, 256], [0, 1, 2, 3], causal=True, **PACKED)
    full = np.array([75, 109, 255])
    k_seen = k.astype(np.float64).repeat(hq // hkv, 1)
    logits = (q[full].astype(np.float64) * k_seen).sum(axis=-1) / math.sqrt(32)
    want = compare.expect([build_attention(q[None, r:r + 1], k[None, n:n + 1], v[None, n:n + 1]) for n, r in enumerate(full)])
    compare.assert_close(lse[:, full].T, logits, want.lse_bound, "lse")
    assert_only_value(out[full], v.repeat(hq // hkv, 1), target)
    rest = np.ones(256, bool)
    rest[full] = False
    assert not out[rest].view(f"u{dtype.itemsize}").any() and (lse[:, rest] == -np.inf).all()


@every_target
@every_dtype
@pytest.mark.parametrize(("hq", "hkv", "d"), [(9, 3, 64), (21, 7, 120), (1, 1, 16)])
def test_case_22_single_and_empty_queries(hq: int, hkv: int, d: int, dtype: np.dtype, target: Target) -> None:
    """q = 0: the mean of the keys of the right sequence. max_seqlen_q = 1 must not make total_q rows a batch."""
    k = normal(0, (8, hkv, d), dtype)
    v = np.array(np.broadcast_to(np.arange(1.0, 9.0)[:, None, None], k.shape)).astype(dtype)
    means = np.array([2.0, 6.0])[:, None, None]
    for more in (
        {},
        {"max_seqlen_q": 1},
        {"max_seqlen_q": 1, "max_seqlen_k": 5},
        {"max_seqlen_q": 7, "max_seqlen_k": 99},
        {"causal": True},
    ):
        result = attend(target, zeros(dtype, 2, hq, d), k, v, [0, 0, 1, 1, 2], [0, 0, 3, 3, 8], **more, **PACKED)
        assert_result(result, means, [math.log(3), math.log(5)], 5)
    result = attend(target, zeros(dtype, 1, hq, d), k, v, [0, 0, 0, 1, 1], [0, 2, 3, 8, 8], **PACKED)
    assert_result(result, 6, math.log(5), 5)
    result = attend(target, zeros(dtype, 1, hq, d), k, v, [0, 0, 0, 1, 1], [0, 2, 8, 8, 8], **PACKED)
    assert_result(result, 0, -np.inf)


@every_target
@every_dtype
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sinks": [0.0, 1.0]}, {"score_mod": lambda s, b, h, i, j: s + h}],
    ids=lambda o: "+".join(o) or "plain"
)
def test_case_23_rows_behind_the_last_sequence(options: dict, dtype: np.dtype, target: Target) -> None:
    q, k, v = (normal(n, (946, 2, 16), dtype) for n in range(3))
    for a in (q, k, v):
        a[944:] = np.nan
    cu = [0, 144, 432, 944]
    out, lse = attend(target, q, k, v, cu, cu, **options, **PACKED)
    assert not out[944:].view(f"u{dtype.itemsize}").any() and (lse[:, 944:] == -np.inf).all()
    assert np.isfinite(out.astype(np.float64)).all() and np.isfinite(lse[:, :944]).all()
    last = [a[None, 432:944] for a in (q, k, v)]
    want = compare.expect([build_attention(*last, **options)])
    compare.assert_close(out[None, 432:944], want.out[0], want.out_bound, "out")
    compare.assert_close(lse[None, :, 432:944], want.lse[0], want.lse_bound, "lse")


@every_target
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("lengths", [(3,), (70, 1, 130), (0, 0, 200), (1,) * 40])
def test_case_24_nothing_is_read_behind_cu_seqlens(lengths: tuple[int, ...], dtype: np.dtype, target: Target) -> None:
    """cu_seqlens as slices of longer arrays, with numbers behind them that would show."""
    cu = np.concatenate([[0], np.cumsum(lengths), [10**9, -5, 3]]).astype(np.int32)
    total = int(cu[len(lengths)])
    q, k, v = (normal(n, (total, 2, 16), dtype) for n in range(3))
    out, lse = attend(target, q, k, v, cu[: len(lengths) + 1], cu[: len(lengths) + 1], causal=True, **PACKED)
    spans = [slice(a, b) for a, b in zip(cu[:-4], cu[1:-3], strict=True)]
    want = compare.expect([build_attention(q[None, s], k[None, s], v[None, s], causal=True) for s in spans])
    for b, s in enumerate(spans):
        compare.assert_close(out[None, s], want.out[b], want.out_bound, f"out of sequence {b}")
        compare.assert_close(lse[None, :, s], want.lse[b], want.lse_bound, f"lse of sequence {b}")


@every_target
@pytest.mark.parametrize("rows", [[0, 1, 1, 2], [0, 2], [0, 0, 0]])
def test_case_22_tokens_of_a_serving_step(rows: list[int], target: Target) -> None:
    """Every packed result equals that of the sequence on its own."""
    k = normal(1, (300, 2, 16), F32)
    q, v = normal(0, (rows[-1], 4, 16), F32), normal(2, (300, 2, 16), F32)
    cu_k = np.linspace(0, 300, len(rows)).astype(int)
    out, lse = attend(target, q, k, v, rows, cu_k, causal=True, **PACKED)
    for b in range(len(rows) - 1):
        mine, keys = slice(rows[b], rows[b + 1]), slice(cu_k[b], cu_k[b + 1])
        want = compare.expect([build_attention(q[None, mine], k[None, keys], v[None, keys], causal=True)])
        compare.assert_close(out[None, mine], want.out[0], want.out_bound, "out")
        compare.assert_close(lse[None, :, mine], want.lse[0], want.lse_bound, "lse")
