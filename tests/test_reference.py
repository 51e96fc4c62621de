"""The float64 oracle against a scalar definition of attention and central finite differences, in every storage of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from small import with_gradients

from cuflash import reference
from cuflash.problem import build_attention, build_varlen
from cuflash.types import Problem

INF = math.inf


# --- a scalar definition, one number at a time, sharing no code with the oracle ---------------------------------------


def define(q, k, v, *, causal=False, window=None, scale=None, softcap=0.0, bias=None, mask=None, alibi_slopes=None,
           sinks=None, score="dot", score_mod=None, mask_mod=None, mod_args=None, kv_lengths=None, kv_start=None):
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    full = (batch, heads, seqlen_q, seqlen_k)
    scale = scale if scale is not None else 1.0 if score == "sqdist" else dim**-0.5
    scale = np.broadcast_to(scale, dim)
    bias = None if bias is None else np.broadcast_to(bias, full)
    out, lse = np.zeros((batch, seqlen_q, heads, v.shape[3])), np.zeros((batch, heads, seqlen_q))
    for b, h, row in np.ndindex(batch, heads, seqlen_q):
        length = seqlen_k if kv_lengths is None else kv_lengths[b]
        i = row if causal == "upper_left" else row + length - seqlen_q
        logits = {}
        for j in range(0 if kv_start is None else kv_start[b], length):
            left, right = window or (-1, -1)
            right = 0 if causal else right
            if (left >= 0 and j < i - left) or (right >= 0 and j > i + right):
                continue
            if mask is not None:
                columns = mask.shape[-1]
                column = j - (length - columns) if columns != seqlen_k else j
                if column >= 0 and not np.broadcast_to(mask, (*full[:3], columns))[b, h, row, column]:
                    continue
            args = mod_args or {}
            if mask_mod is not None and not mask_mod(b, h, i, j, **args):
                continue
            key = k[b, j, h // group]
            if score == "dot":
                s = math.fsum(q[b, row, h] * key) * scale[0]
            else:
                s = -math.fsum(scale * (q[b, row, h] - key) ** 2)
            if softcap:
                s = softcap * math.tanh(s / softcap)
            if bias is not None:
                s += bias[b, h, row, j]
            if alibi_slopes is not None:
                s -= np.broadcast_to(alibi_slopes, (batch, heads))[b, h] * abs(i - j)
            if score_mod is not None:
                s = float(score_mod(s, b, h, i, j, **args))
            if s != -INF:
                logits[j] = s
        sink = -INF if sinks is None else sinks[h]
        peak = max([sink, *logits.values()])
        if peak == -INF:
            lse[b, h, row] = -INF
            continue
        total = math.fsum(math.exp(s - peak) for s in [sink, *logits.values()])
        lse[b, h, row] = peak + math.log(total)
        for j, s in logits.items():
            out[b, row, h] += math.exp(s - peak) / total * v[b, j, h // group]
    return out, lse


# --- the options as data: each is checked forward against the definition and backward by finite differences -----------


@dataclass
class Case:
    operands: dict[str, np.ndarray]  # what is differentiated: q, k, v and perhaps bias, sinks
    options: dict
    build: Callable[..., Problem] = build_attention

    def problem(self, **changed: np.ndarray) -> Problem:
        return self.build(**{**self.operands, **changed}, **self.options)


def dense(seed, *, batch=2, seqlen_q=3, seqlen_k=4, heads_q=2, heads_kv=1, dim=3, dim_v=2, bias=None, sinks=False, **options):
    rng = np.random.default_rng(seed)
    operands = {
        "q": rng.standard_normal((batch, seqlen_q, heads_q, dim)),
        "k": rng.standard_normal((batch, seqlen_k, heads_kv, dim)),
        "v": rng.standard_normal((batch, seqlen_k, heads_kv, dim_v)),
    }
    if bias is not None:
        operands["bias"] = rng.standard_normal(bias)
    if sinks:
        operands["sinks"] = rng.standard_normal(heads_q)
    return Case(operands, options)


def bend(s, b, h, i, j, slope):
    """A score_mod that uses everything it is given: bends the score and adds what depends on the place."""
    return s + slope[b] * np.sin(s) + 0.1 * h - 0.05 * (i - 2 * j)


def checker(b, h, i, j, **_):
    return (i + 2 * j + b + h) % 3 != 0


MASK = np.random.default_rng(7).random((2, 1, 3, 4)) < 0.6
TAIL = np.tril(np.ones((3, 3), bool)) & ~np.eye(3, k=-1, dtype=bool)  # row 2 sees columns 0 and 2

CASES = {
    "plain": dense(0),
    "no broadcasting of heads": dense(1, heads_q=2, heads_kv=2),
    "groups of 3": dense(2, heads_q=6, heads_kv=2),
    "causal": dense(3, causal=True),
    "causal, one short": dense(4, causal=True, seqlen_q=2, seqlen_k=5, heads_q=4, heads_kv=2),
    "causal, empty rows": dense(5, causal=True, seqlen_q=5, seqlen_k=3),
    "causal from the upper left": dense(6, causal="upper_left", seqlen_q=3, seqlen_k=5),
    "window": dense(7, window=(1, 1), seqlen_q=4, seqlen_k=5),
    "window to the left only": dense(8, window=(0, -1), seqlen_q=4, seqlen_k=5),
    "window with empty rows": dense(9, window=(0, 0), seqlen_q=5, seqlen_k=2),
    "causal window from the upper left": dense(10, causal="upper_left", window=(1, 1), seqlen_q=3, seqlen_k=5),
    "scale": dense(11, scale=-0.7),
    "scale 0": dense(12, scale=0.0),
    "softcap": dense(13, softcap=0.8),
    "bias": dense(14, bias=(2, 2, 3, 4)),
    "bias over batch and heads": dense(15, bias=(3, 4)),
    "bias over rows": dense(16, bias=(2, 1, 4)),
    "bias over everything but batch": dense(17, bias=(2, 1, 1, 1)),
    "bias a key": dense(18, bias=(4,)),
    "mask": dense(19, mask=MASK),
    "mask of the last keys": dense(20, mask=TAIL, seqlen_k=5),
    "mask of the last keys, lengths": dense(21, mask=TAIL, seqlen_k=5, kv_lengths=[4, 3]),
    "ALiBi": dense(22, alibi_slopes=np.array([0.5, 0.25]), seqlen_k=5),
    "ALiBi a batch": dense(23, alibi_slopes=np.array([[0.5, 0.25], [1.0, -0.5]]), causal="upper_left"),
    "sinks": dense(24, sinks=True),
    "sinks with empty rows": dense(25, sinks=True, causal=True, seqlen_q=4, seqlen_k=2),
    "sqdist": dense(26, score="sqdist"),
    "sqdist, a scale a feature": dense(27, score="sqdist", scale=np.array([0.3, 1.2, -0.4]), causal=True),
    "score_mod": dense(28, score_mod=bend, mod_args={"slope": np.array([0.3, -0.4])}),
    "mask_mod": dense(29, mask_mod=checker),
    "lengths": dense(30, kv_lengths=[4, 2], causal=True),
    "lengths with an empty sequence": dense(31, kv_lengths=[0, 3]),
    "padding on the left": dense(32, kv_start=[1, 3], causal=True),
    "padding on the left, lengths": dense(33, kv_start=[2, 0], kv_lengths=[3, 1]),
    "many at once": dense(
        34,
        seqlen_q=4,
        seqlen_k=6,
        heads_q=4,
        heads_kv=2,
        bias=(4, 1, 6),
        sinks=True,
        softcap=1.5,
        window=(3, 2),
        mask_mod=checker,
        score_mod=bend,
        mod_args={"slope": np.array([0.2, 0.4])},
        alibi_slopes=np.array([0.1, 0.2, 0.3, 0.4]),
        kv_lengths=[6, 4],
    ),
    "many at once, sqdist": dense(35, score="sqdist", softcap=2.0, bias=(2, 3, 4), sinks=True, causal=True, kv_start=[0, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_is_the_definition(name):
    case = CASES[name]
    out, lse = reference.forward(case.problem())
    expected_out, expected_lse = define(**case.operands, **case.options)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


def varlen_case(seed: int, **options) -> Case:
    rng = np.random.default_rng(seed)
    operands = {"q": rng.standard_normal((9, 4, 3)), "k": rng.standard_normal((8, 2, 3)), "v": rng.standard_normal((8, 2, 2))}
    return Case(
        operands, {"cu_seqlens_q": [0, 3, 3, 5, 8], "cu_seqlens_k": [0, 2, 3, 6, 6], "max_seqlen_q": 4, **options}, build_varlen
    )


def paged_case(seed: int, **options) -> Case:
    """Two sequences that share page 2; sequence 0 lists page 0 twice. Unused entries are wild."""
    rng = np.random.default_rng(seed)
    operands = {
        "q": rng.standard_normal((2, 3, 4, 3)),
        "k": rng.standard_normal((5, 2, 2, 3)),
        "v": rng.standard_normal((5, 2, 2, 2)),
    }
    table = [[2, 0, 0, 10**9], [2, 4, -1, -7]]
    return Case(operands, {"page_table": np.array(table), "kv_lengths": [5, 3], **options})


STORAGES = {
    "varlen": varlen_case(40),
    "varlen, causal": varlen_case(41, causal=True),
    "varlen, bias": varlen_case(42, causal="upper_left"),
    "paged": paged_case(43),
    "paged, causal": paged_case(44, causal=True, kv_start=[1, 0]),
}
STORAGES["varlen, bias"].operands["bias"] = np.random.default_rng(1).standard_normal((4, 4, 3))


def numerical_gradient(case: Case, name: str, dout: np.ndarray, dlse: np.ndarray) -> np.ndarray:
    """d (dout . out + dlse . lse) / d operand by central differences."""
    step = 1e-5
    array = case.operands[name]
    gradient = np.zeros(array.shape)
    for index in np.ndindex(array.shape):
        losses = []
        for sign in (1, -1):
            moved = array.copy()
            moved[index] += sign * step
            out, lse = reference.forward(case.problem(**{name: moved}))
            losses.append((dout * out).sum() + (dlse * np.where(lse == -INF, 0.0, lse)).sum())
        gradient[index] = (losses[0] - losses[1]) / (2 * step)
    return gradient


@pytest.mark.parametrize("name", [*CASES, *STORAGES])
def test_gradients_are_those_of_finite_differences(name):
    case = {**CASES, **STORAGES}[name]
    problem = case.problem()
    rng = np.random.default_rng(99)
    dout, dlse = rng.standard_normal(problem.out_shape), rng.standard_normal(problem.lse_shape)
    gradients = reference.backward(with_gradients(problem, dout, dlse))
    for operand, array in case.operands.items():
        exact = getattr(gradients, "d" + operand)
        assert exact.shape == array.shape and exact.dtype == np.float64
        # The step leaves an error of order step**2 plus eps / step, both about 1e-10.
        np.testing.assert_allclose(exact, numerical_gradient(case, operand, dout, dlse), rtol=1e-6, atol=2e-9, err_msg=operand)
    assert ("bias" in case.operands) == (gradients.dbias is not None)
    assert ("sinks" in case.operands) == (gradients.dsinks is not None)


def test_without_dlse_it_counts_as_zero():
    problem = CASES["many at once"].problem()
    dout = np.random.default_rng(1).standard_normal(problem.out_shape)
    left = reference.backward(with_gradients(problem, dout))
    right = reference.backward(with_gradients(problem, dout, np.zeros(problem.lse_shape)))
    for name in ("dq", "dk", "dv", "dbias", "dsinks"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize(
    "name", ["many at once", "many at once, sqdist", "mask of the last keys, lengths", "sinks with empty rows"]
)
def test_blocks_of_rows_change_nothing(name, monkeypatch):
    case = CASES[name]
    # Without score_mod, whose difference quotients would turn a last bit of the score into 1e-10 of the gradient.
    problem = case.problem().replace(score_mod=None)
    problem = with_gradients(problem, np.random.default_rng(2).standard_normal(problem.out_shape))
    whole, gradients = reference.forward(problem), reference.backward(problem)
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1)  # one row at a time
    for left, right in zip(whole, reference.forward(problem), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-13)
    by_rows = reference.backward(problem)
    for operand in case.operands:
        np.testing.assert_allclose(getattr(by_rows, "d" + operand), getattr(gradients, "d" + operand), rtol=1e-11, atol=1e-13)


# --- where sequences lie -----------------------------------------------------------------------------------------------


def test_varlen_is_every_sequence_on_its_own():
    case = varlen_case(50, causal=True)
    out, lse = reference.forward(case.problem())
    cu_q, cu_k = case.options["cu_seqlens_q"], case.options["cu_seqlens_k"]
    for b in range(4):
        q_rows, k_rows = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        q, k, v = case.operands["q"][q_rows], case.operands["k"][k_rows], case.operands["v"][k_rows]
        alone_out, alone_lse = reference.forward(build_attention(q, k, v, causal=True))
        np.testing.assert_allclose(out[q_rows], alone_out[0], rtol=1e-13)
        np.testing.assert_allclose(lse[:, q_rows], alone_lse[0], rtol=1e-13)


def test_case_23_rows_beyond_the_last_sequence_are_empty():
    case = varlen_case(51)  # 9 rows of q for sequences that end at 8; 8 rows of k for sequences that end at 6
    problem = case.problem()
    out, lse = reference.forward(problem)
    assert (out[8:] == 0).all() and (lse[:, 8:] == -INF).all()
    gradients = reference.backward(with_gradients(problem, np.full(problem.out_shape, np.nan), np.ones(problem.lse_shape)))
    assert (gradients.dq[8:] == 0).all() and (gradients.dk[6:] == 0).all() and (gradients.dv[6:] == 0).all()


def test_case_22_empty_queries_between_single_ones():
    v = np.random.default_rng(3).standard_normal((8, 3, 64))
    q, k = np.zeros((2, 9, 64)), np.zeros((8, 3, 64))
    out, lse = reference.forward(build_varlen(q, k, v, [0, 0, 1, 1, 2], [0, 0, 3, 3, 8]))
    expected = np.stack([v[:3].mean(axis=0), v[3:].mean(axis=0)]).repeat(3, axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log([3, 5]), (9, 2)), rtol=1e-15)


@pytest.mark.parametrize("causal", [False, True, "upper_left"])
def test_paged_is_the_dense_cache(causal):
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((2, 2, 4, 3)), rng.standard_normal((2, 7, 2, 3)), rng.standard_normal((2, 7, 2, 5))
    lengths = np.array([7, 4])
    table = np.array([[5, 1, 3], [0, 4, 10**9]])
    pages_k, pages_v = np.full((6, 3, 2, 3), np.nan), np.full((6, 3, 2, 5), np.nan)
    for b in range(2):
        for j in range(lengths[b]):
            pages_k[table[b, j // 3], j % 3] = k[b, j]
            pages_v[table[b, j // 3], j % 3] = v[b, j]
    paged = build_attention(q, pages_k, pages_v, page_table=table, kv_lengths=lengths, causal=causal)
    plain = build_attention(q, k, v, kv_lengths=lengths, causal=causal)
    for left, right in zip(reference.forward(paged), reference.forward(plain), strict=True):
        np.testing.assert_array_equal(left, right)


def test_case_14_garbage_in_unwritten_slots_of_a_page():
    rng = np.random.default_rng(5)
    k, v = np.full((3, 16, 1, 8), np.nan), np.full((3, 16, 1, 8), np.nan)
    k[1, :5], v[1, :5] = rng.standard_normal((2, 5, 1, 8))
    q = rng.standard_normal((1, 1, 1, 8))
    results = []
    for pages_k, pages_v in ((k, v), (np.nan_to_num(k), np.nan_to_num(v))):
        problem = build_attention(q, pages_k, pages_v, page_table=[[1]], kv_lengths=[5])
        results.append([*reference.forward(problem), reference.backward(with_gradients(problem, np.ones((1, 1, 1, 8)))).dq])
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left, right)


def test_case_36_strides_do_not_matter():
    rng = np.random.default_rng(6)
    q = rng.standard_normal((3, 1, 5, 2)).T[:, ::-1]  # (2, 5, 1, 3)
    k = rng.standard_normal((2, 8, 1, 6))[:, ::2, :, ::-2]
    v = np.broadcast_to(rng.standard_normal((2, 4, 1, 1)), (2, 4, 1, 3))
    dout = np.broadcast_to(1.0, (2, 5, 1, 3))
    results = []
    for operands in ((q, k, v), tuple(np.ascontiguousarray(x) for x in (q, k, v))):
        problem = with_gradients(build_attention(*operands, causal=True), dout)
        gradients = reference.backward(problem)
        results.append([*reference.forward(problem), gradients.dq, gradients.dk, gradients.dv])
    for left, right in zip(*results, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-15)
