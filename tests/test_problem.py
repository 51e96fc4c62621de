"""Every option is checked before anything runs, and the message says which argument, what came and what is allowed."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from refusal import refused

import cuflash
from cuflash import problem
from cuflash.types import Problem

NAN, INF = math.nan, math.inf
BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 2, 3, 5, 4, 2, 8, 6


def ones(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def attention(q_shape=(BATCH, ROWS, HEADS, DIM), k_shape=(BATCH, KEYS, HEADS_KV, DIM), v_shape=None, **options) -> Problem:
    v_shape = (*k_shape[:-1], DIM_V) if v_shape is None else v_shape
    return problem.build_attention(ones(*q_shape), ones(*k_shape), ones(*v_shape), **options)


def paged(table=((3, 0), (1, 2)), lengths=(7, 5), pages=4, page_size=4, **options) -> Problem:
    cache = ones(pages, page_size, HEADS_KV, DIM)
    return problem.build_attention(ones(BATCH, ROWS, HEADS, DIM), cache, cache, page_table=table, kv_lengths=lengths, **options)


def varlen(cu_q=(0, 2, 2, 5), cu_k=(0, 3, 4, 6), rows=6, keys=7, **options) -> Problem:
    kv = ones(keys, HEADS_KV, DIM)
    return problem.build_varlen(ones(rows, HEADS, DIM), kv, kv, cu_q, cu_k, **options)


SHAPES = {
    "1 axis": ({"q_shape": (8,), "k_shape": (8,), "v_shape": (8,)}, ("q:", "(8,)", "1 axes", "(B, S, H, D)", "(S, D)")),
    "no axis": ({"q_shape": (), "k_shape": (), "v_shape": ()}, ("q:", "()", "0 axes", "(S, D)")),
    "5 axes": ({"q_shape": (1,) * 5, "k_shape": (1,) * 5, "v_shape": (1,) * 5}, ("q:", "5 axes", "(S, H, D)")),
    "ranks": ({"k_shape": (KEYS, HEADS_KV, DIM)}, ("k:", "3 axes", "q (2, 3, 4, 8) has 4", "equal")),
    "batch": ({"k_shape": (3, KEYS, HEADS_KV, DIM)}, ("k:", "batch 3", "q's 2", "(3, 5, 2, 8)")),
    "k without batch of q": ({"k_shape": (1, KEYS, HEADS_KV, DIM)}, ("k:", "batch 1", "q's 2")),
    "more rows of v": ({"v_shape": (BATCH, 6, HEADS_KV, DIM)}, ("v:", "(2, 6, 2)", "k's (2, 5, 2)", "equal")),
    "heads of v": ({"v_shape": (BATCH, KEYS, 1, DIM)}, ("v:", "(2, 5, 1)", "k's (2, 5, 2)")),
    "head size": ({"k_shape": (BATCH, KEYS, HEADS_KV, 7)}, ("k:", "head size 7", "q's 8", "equal")),
    "head size 0": ({"q_shape": (2, 3, 4, 0), "k_shape": (2, 5, 2, 0)}, ("q:", "head size 0", "at least 1")),
    "head size 0 of v": ({"v_shape": (BATCH, KEYS, HEADS_KV, 0)}, ("v:", "head size 0", "at least 1")),
    "GQA 7/2": ({"q_shape": (2, 3, 7, 8)}, ("k:", "2 heads", "7 query heads", "whole multiple")),
    "GQA 2/4": ({"q_shape": (2, 3, 2, 8), "k_shape": (2, 5, 4, 8)}, ("k:", "4 heads", "2 query heads", "whole multiple")),
    "no key heads": ({"k_shape": (2, 5, 0, 8)}, ("k:", "0 heads", "4 query heads", "whole multiple")),
    "layout": ({"layout": "BHSD", "q_shape": (2, 3, 4, 8)}, ("k:", "5 heads", "3 query heads", "layout='BHSD'")),
}


@pytest.mark.parametrize(("shapes", "pieces"), SHAPES.values(), ids=SHAPES)
def test_shapes_that_do_not_fit(shapes, pieces):
    with refused(ValueError, *pieces):
        attention(**shapes)


@pytest.mark.parametrize("heads", [(5, 1), (6, 1), (7, 1), (12, 1), (16, 1), (32, 2), (64, 1), (71, 1), (12, 4), (3, 3)])
def test_every_whole_ratio_of_heads(heads):
    built = attention((1, 2, heads[0], 4), (1, 2, heads[1], 4))
    assert built.group_size == heads[0] // heads[1]


def test_sizes_of_the_three_forms():
    full = attention()
    assert (full.batch, full.seqlen_q, full.seqlen_k, full.heads_q, full.heads_kv) == (2, 3, 5, 4, 2)
    assert (full.head_dim, full.head_dim_v) == (8, 6)
    assert full.lse_shape == (2, 4, 3)
    three = attention((3, 4, 8), (5, 2, 8), layout="BSHD")
    assert three.q.shape == (1, 3, 4, 8) and three.k.shape == (1, 5, 2, 8)
    heads_first = attention((4, 3, 8), (2, 5, 8), layout="BHSD")
    assert heads_first.q.shape == (1, 3, 4, 8) and heads_first.k.shape == (1, 5, 2, 8)
    two = attention((3, 8), (5, 8), layout="BHSD")
    assert two.q.shape == (1, 3, 1, 8) and two.v.shape == (1, 5, 1, 6)


NOTHING = [(0, 3, 5, 4, 2), (2, 0, 5, 4, 2), (2, 3, 0, 4, 2), (2, 3, 5, 0, 0), (2, 3, 5, 0, 2), (0, 0, 0, 0, 0)]


@pytest.mark.parametrize("sizes", NOTHING)
def test_nothing_is_a_valid_amount(sizes):
    batch, rows, keys, heads, heads_kv = sizes
    built = attention((batch, rows, heads, DIM), (batch, keys, heads_kv, DIM), causal=True, bias=ones(1, 1))
    assert built.out_shape == (batch, rows, heads, DIM_V)
    assert len(list(built.sequences())) == batch
    assert built.bias is not None and built.bias.shape == (batch, heads, rows, keys)


OPTIONS = {
    "layout word": ({"layout": "SBHD"}, ValueError, ("layout:", "'SBHD'", "'BSHD', 'BHSD'")),
    "layout kind": ({"layout": None}, TypeError, ("layout:", "None", "'BSHD'")),
    "causal number": ({"causal": 1}, TypeError, ("causal:", "got 1", "False, True", "'upper_left'")),
    "causal word": ({"causal": "lower"}, ValueError, ("causal:", "'lower'", "False, True", "'bottom_right'")),
    "causal None": ({"causal": None}, TypeError, ("causal:", "None", "False, True")),
    "window number": ({"window": 3}, TypeError, ("window:", "got 3", "(left, right)")),
    "window of 3": ({"window": (1, 2, 3)}, ValueError, ("window:", "(1, 2, 3)", "two entries")),
    "window -5": ({"window": (-5, 3)}, ValueError, ("window:", "-5", "at least -1")),
    "window -2": ({"window": (3, -2)}, ValueError, ("window:", "-2", "at least -1")),
    "window float": ({"window": (1.0, 0)}, TypeError, ("window:", "1.0", "integer")),
    "window bool": ({"window": (True, 0)}, TypeError, ("window:", "True", "integer")),
    "window word": ({"window": "ab"}, TypeError, ("window:", "'a'", "integer")),
    "scale NaN": ({"scale": NAN}, ValueError, ("scale:", "nan", "finite")),
    "scale inf": ({"scale": -INF}, ValueError, ("scale:", "-inf", "finite")),
    "scale word": ({"scale": "1"}, TypeError, ("scale:", "'1'", "real number")),
    "scale complex": ({"scale": 1j}, TypeError, ("scale:", "1j", "real number")),
    "scale bool": ({"scale": np.True_}, TypeError, ("scale:", "True", "real number")),
    "scale too large": ({"scale": 10**400}, ValueError, ("scale:", "inf", "finite")),
    "scale ragged": ({"scale": [[1], [1, 2]]}, ValueError, ("scale:", "not a rectangular array")),
    "scale of many": ({"scale": [1.0] * DIM}, ValueError, ("scale:", "(8,)", "score='sqdist'")),
    "scale of 7": ({"scale": np.ones(7), "score": "sqdist"}, ValueError, ("scale:", "(7,)", "(8,)")),
    "scale array NaN": ({"scale": [NAN] * DIM, "score": "sqdist"}, ValueError, ("scale:", "nan", "finite")),
    "softcap 0": ({"softcap": 0}, ValueError, ("softcap:", "0.0", "above 0", "None")),
    "softcap -1": ({"softcap": -1.0}, ValueError, ("softcap:", "-1.0", "above 0")),
    "softcap inf": ({"softcap": INF}, ValueError, ("softcap:", "inf", "finite")),
    "softcap word": ({"softcap": "x"}, TypeError, ("softcap:", "'x'", "real number")),
    "score": ({"score": "cos"}, ValueError, ("score:", "'cos'", "'dot', 'sqdist'")),
    "kernel": ({"kernel": "fa4"}, ValueError, ("kernel:", "'fa4'", "'auto'", "'fa2'", "'decode'")),
    "backend": ({"backend": "gpu"}, ValueError, ("backend:", "'gpu'", "'cuda'", "'cpu'", "'reference'")),
    "backend cuda": ({"backend": "cuda"}, TypeError, ("backend:", "'cuda'", "GPU arrays", "host memory")),
    "backend numba-cuda": ({"backend": "numba-cuda"}, TypeError, ("backend:", "'numba-cuda'", "GPU arrays", "host memory")),
    "precision": ({"precision": "fp16"}, ValueError, ("precision:", "'fp16'", "'tf32'")),
    "stream": ({"stream": 1}, TypeError, ("stream:", "got 1", "host memory", "None")),
    "splits 0": ({"num_splits": 0}, ValueError, ("num_splits:", "0", "at least 1")),
    "splits float": ({"num_splits": 2.0}, TypeError, ("num_splits:", "2.0", "integer")),
    "splits bool": ({"num_splits": True}, TypeError, ("num_splits:", "True", "integer")),
    "batch_invariant": ({"batch_invariant": 1}, TypeError, ("batch_invariant:", "got 1", "True and False")),
    "out_dtype int": ({"out_dtype": int}, TypeError, ("out_dtype:", "int64", "float16, bfloat16, float32, float64")),
    "out_dtype word": ({"out_dtype": "half-ish"}, TypeError, ("out_dtype:", "'half-ish'", "bfloat16")),
    "out_dtype list": ({"out_dtype": ["x"]}, TypeError, ("out_dtype:", "['x']", "bfloat16")),
    "score_mod": ({"score_mod": 3}, TypeError, ("score_mod:", "got 3", "callable", "None")),
    "mask_mod": ({"mask_mod": True}, TypeError, ("mask_mod:", "True", "callable")),
    "mod_args alone": ({"mod_args": {"w": 1}}, ValueError, ("mod_args:", "w", "score_mod or mask_mod")),
    "mod_args list": ({"mod_args": [1], "score_mod": "s"}, TypeError, ("mod_args:", "list", "dict")),
    "mod_args i": ({"mod_args": {"i": 1}, "score_mod": "s"}, ValueError, ("mod_args:", "'i'", "s, b, h, i and j")),
    "mod_args space": ({"mod_args": {"a b": 1}, "score_mod": "s"}, ValueError, ("mod_args:", "'a b'", "name")),
    "mod_args keyword": ({"mod_args": {"for": 1}, "score_mod": "s"}, ValueError, ("mod_args:", "'for'", "name")),
    "mod_args number": ({"mod_args": {1: 1}, "score_mod": "s"}, ValueError, ("mod_args:", "1", "name")),
    "slopes of 3": ({"alibi_slopes": [1, 2, 3]}, ValueError, ("alibi_slopes:", "(3,)", "(4,)", "(2, 4)")),
    "slopes NaN": ({"alibi_slopes": [NAN] * 4}, ValueError, ("alibi_slopes:", "nan", "finite")),
    "slopes complex": ({"alibi_slopes": [1j] * 4}, TypeError, ("alibi_slopes:", "complex128", "real number")),
    "sinks of 2": ({"sinks": [0, 0]}, ValueError, ("sinks:", "(2,)", "(4,)")),
    "sinks inf": ({"sinks": [INF] * 4}, ValueError, ("sinks:", "inf", "finite or -inf")),
    "sinks NaN": ({"sinks": [NAN] * 4}, ValueError, ("sinks:", "nan", "finite or -inf")),
    "sinks bool": ({"sinks": [True] * 4}, TypeError, ("sinks:", "bool", "real number")),
    "kv_lengths 6": ({"kv_lengths": [5, 6]}, ValueError, ("kv_lengths:", "6 at index 1", "from 0 to 5", "keys of k")),
    "kv_lengths -1": ({"kv_lengths": [-1, 2]}, ValueError, ("kv_lengths:", "-1 at index 0", "from 0 to 5")),
    "kv_lengths of 3": ({"kv_lengths": [1, 2, 3]}, ValueError, ("kv_lengths:", "(3,)", "(2,)")),
    "kv_lengths float": ({"kv_lengths": [1.0, 2.0]}, TypeError, ("kv_lengths:", "float64", "integer")),
    "kv_lengths ragged": ({"kv_lengths": [[1], [1, 2]]}, ValueError, ("kv_lengths:", "rectangular")),
    "kv_lengths 2**63": ({"kv_lengths": np.array([1, 2**63], np.uint64)}, ValueError, ("kv_lengths:", str(2**63))),
    "kv_start": ({"kv_start": [0, 4], "kv_lengths": [3, 3]}, ValueError, ("kv_start:", "4 at index 1", "from 0 to 3")),
    "q_scale": ({"q_scale": 1.0}, NotImplementedError, ("q_scale:", "float8")),
    "k_scale": ({"k_scale": 1.0}, TypeError, ("k_scale:", "float", "float32", "float8_e4m3fn")),
    "v_scale": ({"v_scale": 1.0}, TypeError, ("v_scale:", "float", "float32", "float8_e4m3fn")),
    "bias list": ({"bias": [[0.0]]}, TypeError, ("bias:", "got list", "NumPy", "numpy.asarray")),
    "bias shape": ({"bias": ones(3, 4)}, ValueError, ("bias:", "(3, 4)", "(2, 4, 3, 5)", "(B, Hq, Sq, Sk)")),
    "bias 5 axes": ({"bias": ones(1, 1, 1, 1, 1)}, ValueError, ("bias:", "(1, 1, 1, 1, 1)", "(B, Hq, Sq, Sk)")),
    "bias dtype": ({"bias": ones(3, 5, dtype=np.float16)}, TypeError, ("bias:", "float16", "float32")),
    "bias bool": ({"bias": ones(3, 5, dtype=bool)}, TypeError, ("bias:", "bool", "float32", "mask=")),
    "mask float": ({"mask": ones(3, 5)}, TypeError, ("mask:", "float32", "bool", "bias=")),
    "mask bf16": ({"mask": ones(3, 5, dtype=ml_dtypes.bfloat16)}, TypeError, ("mask:", "bfloat16", "bool", "bias=")),
    "mask int": ({"mask": ones(3, 5, dtype=np.int8)}, TypeError, ("mask:", "int8", "bool", "astype(bool)")),
    "mask shape": ({"mask": ones(2, 5, dtype=bool)}, ValueError, ("mask:", "(2, 5)", "(2, 4, 3, 5)")),
    "tail mask": ({"mask": ones(3, 3, dtype=bool), "kv_lengths": [5, 2]}, ValueError, ("mask:", "3 columns", "only 2")),
}


@pytest.mark.parametrize(("options", "error", "pieces"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_are_not_allowed(options, error, pieces):
    with refused(error, *pieces):
        attention(**options)


SCALARS = [
    2, 2.0, np.int64(2), np.uint8(2), np.float16(2), np.float64(2), np.array(2), np.array(2.0, np.float32), Fraction(2),
    ml_dtypes.bfloat16(2), np.array(2, ml_dtypes.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__}-{np.asarray(value).dtype}")
def test_numbers_of_all_kinds(value):
    built = attention(scale=value, softcap=value)
    assert (built.scale, built.softcap) == (2.0, 2.0) and type(built.scale) is float


@pytest.mark.parametrize("two", [2, np.int64(2), np.uint8(2), np.array(2)], ids=lambda value: type(value).__name__)
def test_integers_of_all_kinds(two):
    built = attention(window=[two, two], num_splits=two, kv_lengths=two, kv_start=two)
    assert built.window == (2, 2) and built.num_splits == 2 and type(built.num_splits) is int
    assert built.kv_lengths.tolist() == built.kv_start.tolist() == [2, 2]


def test_flags_of_numpy():
    built = attention(causal=np.True_, batch_invariant=np.False_)
    assert built.causal is True and built.batch_invariant is False


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, (-1, -1)), ((-1, -1), False, (-1, -1)), ((-1, 0), False, (-1, 0)), ((None, 2), False, (-1, 2)),
        ((0, 0), False, (0, 0)), (None, True, (-1, 0)), ((3, 7), True, (3, 0)), ((3, -1), "upper_left", (3, 0)),
        (np.array([4, 1]), False, (4, 1)), ((10**30, 10**30), False, (-1, -1)),
    ],
)  # fmt: skip
def test_window_and_causal_become_one_window(window, causal, expected):
    assert attention(window=window, causal=causal).window == expected


def test_defaults():
    built = attention()
    assert built.scale == 1 / math.sqrt(DIM) and built.softcap == 0 and built.window == (-1, -1) and built.align == "bottom_right"
    assert attention(score="sqdist").scale == 1 and attention(causal="upper_left").align == "upper_left"
    assert built.out_dtype == np.float32 and attention(out_dtype="bfloat16").out_dtype == ml_dtypes.bfloat16


def test_positions_are_bottom_right_of_the_keys_that_exist():
    assert [s.position for s in attention(kv_lengths=[5, 1], kv_start=[2, 0]).sequences()] == [2, -2]
    assert [s.position for s in attention(kv_lengths=[5, 1], causal="upper_left").sequences()] == [0, 0]


def test_tail_mask_has_as_many_columns_as_there_are_queries():
    assert attention(mask=ones(ROWS, ROWS, dtype=bool)).mask_is_tail
    assert not attention(mask=ones(ROWS, KEYS, dtype=bool)).mask_is_tail
    assert not attention(mask=ones(ROWS, 1, dtype=bool)).mask_is_tail
    assert not attention(k_shape=(BATCH, ROWS, HEADS_KV, DIM), mask=ones(ROWS, ROWS, dtype=bool)).mask_is_tail


@pytest.mark.parametrize("name", ["kv_lengths", "kv_start", "alibi_slopes", "sinks", "scale"])
def test_small_arrays_are_copied(name):
    """A problem, or a plan, does not change when the user's array does."""
    given = {"kv_lengths": np.array([3, 3]), "kv_start": np.array([1, 1]), "scale": np.ones(DIM)}.get(name, np.ones(HEADS))
    built = attention(**{name: given}, **({"score": "sqdist"} if name == "scale" else {}))
    before = np.array(getattr(built, name))
    given[...] = 0
    assert np.array_equal(getattr(built, name), before)


CU = {
    "start": ({"cu_q": [1, 2, 3, 4]}, ValueError, ("cu_seqlens_q:", "starts at 1", "0")),
    "falls": ({"cu_k": [0, 4, 3, 6]}, ValueError, ("cu_seqlens_k:", "from 4 to 3", "index 2", "never decrease")),
    "wraps around": ({"cu_q": [0, 2**63 - 1, -2, 5]}, ValueError, ("cu_seqlens_q:", "never decrease")),
    "end of q": ({"cu_q": [0, 2, 2, 7]}, ValueError, ("cu_seqlens_q:", "ends at 7", "q has 6 rows")),
    "end of k": ({"cu_k": [0, 3, 20, 20]}, ValueError, ("cu_seqlens_k:", "ends at 20", "k has 7 rows")),
    "2 axes": ({"cu_q": [[0, 2]]}, ValueError, ("cu_seqlens_q:", "(1, 2)", "(batch + 1,)")),
    "empty": ({"cu_q": []}, ValueError, ("cu_seqlens_q:", "(0,)", "(batch + 1,)")),
    "float": ({"cu_q": [0.0, 1.0]}, TypeError, ("cu_seqlens_q:", "float64", "integer")),
    "bool": ({"cu_q": [False, True]}, TypeError, ("cu_seqlens_q:", "bool", "integer")),
    "None": ({"cu_q": None}, TypeError, ("cu_seqlens_q:", "None", "integers")),
    "None keys": ({"cu_k": None}, TypeError, ("cu_seqlens_k:", "None", "integers")),
    "batches": ({"cu_k": [0, 3]}, ValueError, ("cu_seqlens_k:", "2 entries", "cu_seqlens_q has 4", "(batch + 1,)")),
    "max q": ({"max_seqlen_q": 2}, ValueError, ("max_seqlen_q:", "got 2", "3 rows", "at least")),
    "max k": ({"max_seqlen_k": 1}, ValueError, ("max_seqlen_k:", "got 1", "3 rows")),
    "max kind": ({"max_seqlen_k": 3.0}, TypeError, ("max_seqlen_k:", "3.0", "integer")),
    "max negative": ({"max_seqlen_q": -1}, ValueError, ("max_seqlen_q:", "-1", "at least 0")),
    "kv_lengths": ({"kv_lengths": [3, 2, 2]}, ValueError, ("kv_lengths:", "2 at index 1", "from 0 to 1", "sequence's keys")),
    "bias": ({"bias": ones(3, 7)}, ValueError, ("bias:", "(3, 7)", "(3, 4, 3, 3)", "max_seqlen_q, max_seqlen_k")),
    "tail mask": ({"max_seqlen_k": 4, "mask": ones(3, 3, dtype=bool)}, ValueError, ("mask:", "3 columns", "1 or 4")),
}


@pytest.mark.parametrize(("options", "error", "pieces"), CU.values(), ids=CU)
def test_varlen_that_does_not_fit(options, error, pieces):
    with refused(error, *pieces):
        varlen(**options)


def test_varlen_arrays_have_three_axes():
    q = ones(1, 6, HEADS, DIM)
    with refused(ValueError, "q:", "4 axes", "(total, H, D)", "'BSHD'"):
        problem.build_varlen(q, q, q, [0, 6], [0, 6])
    with refused(ValueError, "q:", "4 axes", "(H, total, D)", "'BHSD'"):
        problem.build_varlen(q, q, q, [0, 6], [0, 6], layout="BHSD")


def test_varlen_sizes():
    built = varlen(max_seqlen_q=np.int32(9))
    assert (built.batch, built.seqlen_q, built.seqlen_k, built.lse_shape) == (3, 9, 3, (HEADS, 6))
    lengths = [(s.q_begin, s.q_length, s.k_begin, s.kv_length) for s in built.sequences()]
    assert lengths == [(0, 2, 0, 3), (2, 0, 3, 1), (2, 3, 4, 2)]
    assert varlen([0], [0]).batch == 0 and list(varlen([0], [0]).sequences()) == []
    heads_first = problem.build_varlen(ones(HEADS, 6, DIM), *[ones(HEADS_KV, 7, DIM)] * 2, [0, 6], [0, 7], layout="BHSD")
    assert heads_first.q.shape == (6, HEADS, DIM) and heads_first.k.shape == (7, HEADS_KV, DIM)


PAGES = {
    "kind": ({"table": [[0.5, 1], [1, 2]]}, TypeError, ("page_table:", "float64", "integer")),
    "1 axis": ({"table": [0, 1]}, ValueError, ("page_table:", "(2,)", "(batch, max_pages)", "batch 2")),
    "batch": ({"table": [[0, 1]]}, ValueError, ("page_table:", "(1, 2)", "batch 2")),
    "ragged": ({"table": [[0], [0, 1]]}, ValueError, ("page_table:", "rectangular")),
    "no lengths": ({"lengths": None}, ValueError, ("kv_lengths:", "required", "page_table")),
    "capacity": ({"lengths": [9, 1]}, ValueError, ("kv_lengths:", "9 at index 0", "from 0 to 8", "capacity")),
    "bad used page": ({"table": [[3, 4], [1, 2]]}, ValueError, ("page_table:", "[0, 1] is 4", "4 pages", "0 to 3", "7")),
    "negative used page": ({"table": [[3, 0], [-1, 2]]}, ValueError, ("page_table:", "[1, 0] is -1", "0 to 3")),
    "page size 0": ({"page_size": 0}, ValueError, ("k:", "(4, 0, 2, 8)", "page size must be at least 1")),
}


@pytest.mark.parametrize(("options", "error", "pieces"), PAGES.values(), ids=PAGES)
def test_pages_that_do_not_fit(options, error, pieces):
    with refused(error, *pieces):
        paged(**options)


def test_pages_beyond_the_length_may_be_anything():
    built = paged(table=[[2, -1, 10**9], [0, 10**18, -(2**63)]], lengths=[4, 0])
    assert built.seqlen_k == 12 and built.page_size == 4
    assert paged(table=np.empty((2, 0), np.int32), lengths=0).seqlen_k == 0


def test_pages_have_four_axes():
    q, pages = ones(ROWS, HEADS, DIM), ones(4, HEADS_KV, DIM)
    with refused(ValueError, "k:", "3 axes", "(pages, page_size, H, D)"):
        problem.build_attention(q, pages, pages, page_table=[[0]], kv_lengths=[1])
    with refused(ValueError, "k:", "3 axes", "(pages, H, page_size, D)"):
        problem.build_varlen(q, pages, pages, [0, 3], None, page_table=[[0]], kv_lengths=[1], layout="BHSD")


@pytest.mark.parametrize("name", ["cu_seqlens_k", "max_seqlen_k"])
def test_paged_varlen_takes_its_key_lengths_from_kv_lengths(name):
    q, pages = ones(6, HEADS, DIM), ones(4, 4, HEADS_KV, DIM)
    given = {"cu_seqlens_k": None, name: [0, 1] if name == "cu_seqlens_k" else 4}
    with refused(ValueError, f"{name}:", "None with page_table", "kv_lengths"):
        problem.build_varlen(q, pages, pages, [0, 6], page_table=[[0]], kv_lengths=[1], **given)


@pytest.mark.parametrize(
    ("option", "value"), [("scale", 1e39), ("alibi_slopes", [1e39]), ("sinks", [1e39]), ("softcap", 1e-50)], ids=str
)
def test_numbers_beyond_the_range_of_the_arithmetic_are_refused(option, value):
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(ValueError, match=rf"^{option}: got .*float32"):
        cuflash.attention(q, q, q, **{option: value})
    assert np.isfinite(cuflash.attention(*[q.astype(np.float64)] * 3, **{option: value})).all()


def test_a_softcap_beyond_every_number_caps_nothing():
    q = np.arange(8, dtype=np.float32).reshape(1, 2, 1, 4)
    assert (cuflash.attention(q, q, q, softcap=1e39) == cuflash.attention(q, q, q)).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("option", "returned", "error", "words"),
    [
        ("score_mod", None, TypeError, "score_mod: returned None; it must return real numbers"),
        ("score_mod", 1j, TypeError, "score_mod: returned dtype complex128"),
        ("score_mod", np.zeros(3), ValueError, r"score_mod: returned shape \(3,\).*\(2, 2\)"),
        ("mask_mod", None, TypeError, "mask_mod: returned None; it must return bool"),
        ("mask_mod", 1.0, TypeError, "mask_mod: returned dtype float64"),
        ("mask_mod", np.zeros(3, bool), ValueError, r"mask_mod: returned shape \(3,\)"),
    ],
    ids=str,
)
def test_what_a_modifier_returns_is_checked(option, returned, error, words, backend):
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(error, match=words):
        cuflash.attention(q, q, q, backend=backend, **{option: lambda *_: returned})
