"""explain(): FLOPs and bytes, and the pairs that masks by position leave, against counting them one by one."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from refusal import refused

from cuflash import explain, planner, problem
from cuflash.explanation import account, size, visible_pairs
from cuflash.types import Problem


def test_the_matrix_that_naive_attention_stores():
    e = explain(seqlen=2048, heads=32, dim=128, backend="reference")
    assert e.scores_per_head == 16 * 2**20 and e.scores_total == 512 * 2**20
    assert e.pairs == 32 * 2048**2 and e.flops == 4 * 128 * 32 * 2048**2
    assert e.inputs_and_outputs == 4 * 2048 * 32 * 128 * 4
    assert "16 MiB a head, 512 MiB in all" in str(e) and "0 B" in str(e) and "reference" in str(e)


def test_causal_is_half_and_narrow_dtypes_have_wide_scores():
    full, causal = (explain(seqlen=64, dtype=ml_dtypes.bfloat16, causal=c, backend="reference") for c in (False, True))
    assert (full.pairs, causal.pairs) == (64 * 64, 64 * 65 // 2)
    assert full.scores_per_head == causal.scores_per_head == 4 * 64 * 64 and full.inputs_and_outputs == 4 * 64 * 64 * 2
    assert explain(seqlen=64, dtype="float64", backend="reference").scores_per_head == 8 * 64 * 64
    mixed = explain(seqlen=64, dtype=np.float16, out_dtype=np.float32, backend="reference")
    assert mixed.inputs_and_outputs == 64 * 64 * (3 * 2 + 4)


def test_sizes_and_arrays_say_the_same():
    q, k, v = np.ones((2, 6, 12, 8), np.float32), np.ones((2, 2, 20, 8), np.float32), np.ones((2, 2, 20, 5), np.float32)
    options = {"layout": "BHSD", "window": (3, 1), "backend": "reference"}
    by_arrays = explain(q, k, v, **options)
    assert by_arrays == explain(batch=2, seqlen=12, seqlen_k=20, heads=6, heads_kv=2, dim=8, dim_v=5, **options)
    assert by_arrays.flops == 2 * (8 + 5) * by_arrays.pairs
    assert by_arrays.inputs_and_outputs == q.nbytes + k.nbytes + v.nbytes + 4 * 2 * 6 * 12 * 5


def brute_force(p: Problem) -> int:
    """Visible (query, key) pairs of one head, by the definition of the window."""
    left, right = p.window
    count = 0
    for s in p.sequences():
        for row, j in itertools.product(range(s.q_length), range(s.kv_length)):
            i = row + s.position
            count += (left < 0 or j >= i - left) and (right < 0 or j <= i + right) and j >= s.kv_start
    return count


WINDOWS = [(-1, -1), (0, 0), (3, -1), (-1, 2), (2, 1), (100, 100)]


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
@pytest.mark.parametrize("window", WINDOWS)
def test_pairs_of_dense_varlen_and_paged_problems(window, causal):
    options = {"window": window, "causal": causal}
    x = np.ones((3, 9, 2, 4), np.float32)
    packed = np.ones((20, 2, 4), np.float32)
    for rows, keys in ((9, 9), (9, 4), (4, 9), (1, 9), (9, 0), (0, 9)):
        p = problem.build_attention(x[:, :rows], x[:, :keys], x[:, :keys], **options)
        assert visible_pairs(p) == brute_force(p), (rows, keys)
    problems = [
        problem.build_attention(x, x, x, kv_lengths=[9, 4, 0], kv_start=[2, 4, 0], **options),
        problem.build_varlen(packed, packed, packed, [0, 5, 5, 18], [0, 2, 10, 20], **options),
        problem.build_attention(x, x, x, page_table=[[0], [2], [1]], kv_lengths=[7, 9, 1], **options),
        problem.build_decode(x[:, :2], x.copy(), x.copy(), [7, 0, 3], k_new=x[:, :2].copy(), v_new=x[:, :2].copy(), **options)[0],
    ]
    for p in problems:
        assert visible_pairs(p) == brute_force(p)
        p = p.replace(backend="reference")
        e = account(p, planner.choose(p))
        assert e.pairs == 2 * brute_force(p) and e.flops == 16 * e.pairs
        assert e.scores_per_head == max(4 * s.q_length * s.kv_length for s in p.sequences())
        assert e.scores_total == sum(8 * s.q_length * s.kv_length for s in p.sequences())


def test_nothing_costs_nothing():
    for sizes in ({"batch": 0, "seqlen": 4}, {"seqlen": 0}, {"seqlen": 4, "seqlen_k": 0}):
        e = explain(**sizes, backend="reference")
        assert (e.flops, e.pairs, e.scores_per_head, e.scores_total) == (0, 0, 0, 0)


def test_no_memory_is_taken_by_sizes_alone():
    e = explain(seqlen=10**6, heads=128, dim=256, causal=True, backend="reference")
    assert e.pairs == 128 * 10**6 * (10**6 + 1) // 2 and e.scores_per_head == 4 * 10**12


def test_what_explain_does_not_take():
    x = np.ones((2, 4), np.float32)
    with refused(ValueError, "v: missing", "all of q, k and v"):
        explain(x, x)
    with refused(ValueError, "seqlen: missing", "q, k and v"):
        explain()
    with refused(ValueError, "seqlen: got 7", "q, k and v"):
        explain(x, x, x, seqlen=7)
    with refused(ValueError, "heads: got 0", "at least 1"):
        explain(seqlen=4, heads=0)
    with refused(TypeError, "dim: got 2.0", "integer"):
        explain(seqlen=4, dim=2.0)
    with refused(TypeError, "dtype:", "int32", "float32"):
        explain(seqlen=4, dtype=np.int32)
    with refused(ValueError, "layout:", "'SBHD'", "'BSHD', 'BHSD'"):
        explain(seqlen=4, layout="SBHD")
    with refused(ValueError, "k:", "3 heads", "4 query heads", "whole multiple"):
        explain(seqlen=4, heads=4, heads_kv=3)


@pytest.mark.parametrize(
    ("n", "words"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**24, "16 MiB"), (2**61, "2048 PiB")]
)
def test_bytes_in_words(n, words):
    assert size(n) == words
