"""Comparing results: the oracle's values, the error that is allowed around them, and a message that shows the worst element.

The allowed error is that of the numerics contract,

    max|err| <= 2 * max|err of the naive computation in the same dtype| + 2 * eps(dtype of the result) * max|ref|,

for the output, the log-sum-exp (whose dtype is float32, or float64 for float64 inputs) and each gradient. The naive
computation materialises every score in the compute dtype and rounds its results to their dtypes. One such run of a small
problem can be exact by luck, so it is repeated with the features and the keys in other orders, and with the sum over the
keys in turn by BLAS and in a plain loop. That changes nothing but the roundings; the largest error of all runs counts. The
smaller the result, the more runs, up to about a thousand elements.
"""

from __future__ import annotations

import math
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from cuflash import reference
from cuflash.types import Gradients, Problem

FEWEST_RUNS, MOST_RUNS, ELEMENTS = 4, 32, 1024  # of the naive computation


def eps(dtype: np.dtype) -> float:
    """Distance from 1 to the next number of a dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


# --- comparing -----------------------------------------------------------------------------------------------------


def assert_close(got: np.ndarray, want: np.ndarray, bound: float, name: str = "result") -> None:
    """NaN and infinities must lie where they should; everything else must be within ``bound``.

    ``want`` is float64; where it is beyond the range of got's dtype, got must be infinite.
    """
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    with np.errstate(over="ignore"):
        want_seen = want.astype(got.dtype).astype(np.float64)
    got_seen = got.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got_seen) != test(want_seen))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise AssertionError(
                f"{name}: {kind} at other places than expected, {len(wrong)} of {got.size}; first {_element(at, got_seen, want)}"
            )
    finite = np.isfinite(want_seen)
    error = np.where(finite, np.abs(np.where(finite, got_seen, 0.0) - np.where(finite, want, 0.0)), 0.0)
    if error.size and error.max() > bound:
        at = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
        count = int((error > bound).sum())
        worst = f"{_element(at, got_seen, want)}, error {error[at]:.4g}, bound {bound:.4g}"
        raise AssertionError(f"{name}: {count} of {got.size} elements off; worst {worst}")


def assert_same_bits(first: np.ndarray, second: np.ndarray, name: str = "result") -> None:
    """Two arrays must agree bit for bit."""
    assert first.shape == second.shape and first.dtype == second.dtype
    if first.tobytes() == second.tobytes():
        return
    bits = np.dtype(f"u{first.dtype.itemsize}")
    differ = np.argwhere(np.ascontiguousarray(first).view(bits) != np.ascontiguousarray(second).view(bits))
    at = tuple(map(int, differ[0]))
    raise AssertionError(
        f"{name}: {len(differ)} of {first.size} elements differ in their bits; first index {at}: {first[at]!r} and {second[at]!r}"
    )


def _element(at: tuple[int, ...], got: np.ndarray, want: np.ndarray) -> str:
    return f"index {at}: got {got[at]:.9g}, want {want[at]:.9g}"


def error_bound(want: Sequence[np.ndarray], naive: Sequence[Sequence[np.ndarray]], dtype: np.dtype) -> float:
    """The bound of the contract for one result that comes in parts (sequences); ``naive`` holds such parts for each run."""
    largest = max((float(np.abs(w)[np.isfinite(w)].max(initial=0.0)) for w in want), default=0.0)
    worst = 0.0
    for run in naive:
        for n, w in zip(run, want, strict=True):
            finite = np.isfinite(w) & np.isfinite(w.astype(dtype).astype(np.float64))
            worst = np.maximum(worst, np.abs(n.astype(np.float64)[finite] - w[finite]).max(initial=0.0))  # NaN stays NaN
    bound = float(2 * worst + 2 * eps(dtype) * largest)
    assert np.isfinite(bound), "the naive computation is not finite where the oracle is; this case needs a bound of its own"
    return bound


# --- what to expect ------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """Results of some problems (the sequences of one call) in float64, and the allowed errors over all of them."""

    out: list[np.ndarray]
    lse: list[np.ndarray]
    out_bound: float
    lse_bound: float


def expect(problems: Sequence[Problem], out_dtype: np.dtype | None = None, runs: Sequence[Run] | None = None) -> Expected:
    """Oracle and bounds for a call that computes these problems, by these runs of the naive computation (default: naive_runs())."""
    head = problems[0]
    out_dtype = head.out_dtype if out_dtype is None else out_dtype
    exact = [reference.forward(p) for p in problems]
    done = [[naive(p, run) for p in problems] for run in runs or naive_runs(sum(o.size for o, _ in exact))]
    outs, lses = [o for o, _ in exact], [lse for _, lse in exact]
    with np.errstate(over="ignore"):
        return Expected(
            outs,
            lses,
            error_bound(outs, [[o.astype(out_dtype) for o, _ in run] for run in done], out_dtype),
            error_bound(lses, [[lse for _, lse in run] for run in done], head.compute_dtype),
        )


def expect_precisely(problems: Sequence[Problem]) -> Expected:
    """The same by more runs: for tests with so many problems that some try the luck of the naive computation.

    It runs more often the fewer rows there are, also with plain loops over the features, and for 16-bit arrays with sums as tensor cores
    make them; and where it computes in float64, the oracle has long doubles: else its own rounding would count as none, as it is the same.
    """
    runs = precise_runs(problems)
    if problems[0].compute_dtype != np.float64:
        return expect(problems, runs=runs)
    with unittest.mock.patch.object(reference, "widened", lambda a: a.astype(np.longdouble)):
        slopes = [p.alibi_slopes for p in problems]
        wide = [p if a is None else p.replace(alibi_slopes=a.astype(np.longdouble)) for p, a in zip(problems, slopes, strict=True)]
        return expect(wide, runs=runs)


def precise_runs(problems: Sequence[Problem]) -> list[Run]:
    """Very many runs of the naive computation where there are few rows, by loops and by BLAS."""
    rows = sum(math.prod(p.lse_shape) for p in problems)
    count = min(512, max(FEWEST_RUNS, 16384 // max(rows, 1)))
    small = problems[0].q.dtype.itemsize == 2
    runs = [Run(np.arange, loop=False)]
    runs += [
        Run(np.random.default_rng(n).permutation, loop=n % 2 == 1, loop_features=n % 4 > 1, chop=small and n % 4 == 3)
        for n in range(1, count)
    ]
    return runs


class ExpectedGradients(NamedTuple):
    """Gradients by name, as parts like the results, with their bounds."""

    parts: dict[str, list[np.ndarray]]
    bounds: dict[str, float]


def exact_gradients(problem: Problem) -> Gradients:
    """The oracle's gradients; for float64 computed in long double, where that has more digits.

    A gradient is often a small difference of large sums. There the oracle's own rounding would decide who passes.
    """
    if problem.compute_dtype != np.float64:
        return reference.backward(problem)
    with unittest.mock.patch.object(reference, "widened", lambda a: a.astype(np.longdouble)):
        return reference.backward(problem)


def expect_gradients(problems: Sequence[Problem]) -> ExpectedGradients:
    """Oracle and bounds for the gradients of a call that computes these problems."""
    exact = [exact_gradients(p) for p in problems]
    runs = [[naive_gradients(p, run) for p in problems] for run in naive_runs(sum(g.dq.size for g in exact))]
    head = problems[0]
    dtypes = {"dq": head.q.dtype, "dk": head.q.dtype, "dv": head.q.dtype, "dsinks": head.compute_dtype}
    if head.bias is not None:
        dtypes["dbias"] = head.bias.dtype
    parts, bounds = {}, {}
    for name, dtype in dtypes.items():
        want = [getattr(g, name) for g in exact]
        if want[0] is not None:
            parts[name] = want
            bounds[name] = error_bound(want, [[getattr(g, name).astype(dtype) for g in run] for run in runs], dtype)
    return ExpectedGradients(parts, bounds)


def expect_weights(problem: Problem) -> tuple[np.ndarray, float]:
    """Attention weights, or their mean over the heads, in float64, and the allowed error."""
    exact = reference.attention_weights(problem)
    runs = [[naive_weights(problem, run)] for run in naive_runs(exact.size)]
    return exact, error_bound([exact], runs, problem.out_dtype)


# --- the naive computation in the same dtype -----------------------------------------------------------------------

class Run(NamedTuple):
    """How one run of the naive computation adds up."""

    order: Callable[[int], np.ndarray]  # an order of n things
    loop: bool  # over the keys one by one, not by BLAS
    loop_features: bool = False  # likewise over the features, in the scores
    chop: bool = False  # and there sums are rounded toward zero, as tensor cores do it
    short: bool = False  # weights and gradients of scores are rounded to q's dtype before products, as 16-bit kernels do it


def naive_runs(elements: int) -> Iterator[Run]:
    """The runs that a result of so many elements needs."""
    yield Run(np.arange, loop=False)
    for seed in range(1, min(max(ELEMENTS // max(elements, 1), FEWEST_RUNS), MOST_RUNS)):
        yield Run(np.random.default_rng(seed).permutation, loop=seed % 2 == 1)


class _Naive(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scores: np.ndarray
    before_mod: np.ndarray
    visible: np.ndarray
    weights: np.ndarray
    sink_weight: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    scale: np.ndarray | float
    logits: np.ndarray


def _blocks(problem: Problem, run: Run) -> Iterator[tuple[reference.Block, np.ndarray]]:
    """The oracle's blocks with their keys in another order, and an order of the features."""
    for block in reference.blocks(problem):
        j = block.j[0][run.order(block.j.size)]
        where = reference.key_index(problem, block.sequence, j, block.head // problem.group_size)
        yield block._replace(j=j[None, :], keys=j, key_index=where), run.order(problem.head_dim)


def _naive_block(
    problem: Problem, block: reference.Block, features: np.ndarray, loop: bool, loop_features: bool = False, chop: bool = False,
) -> _Naive:
    """Attention of one block, every step in the compute dtype."""
    c = problem.compute_dtype.type
    q = problem.q.array[block.query_index].astype(c)[:, features]
    k, v = (a.array[block.key_index].astype(c) for a in (problem.k, problem.v))
    if problem.k_scale is not None:
        k *= problem.k_scale.array[block.key_index].astype(c)[:, None]
    if problem.v_scale is not None:
        v *= problem.v_scale.array[block.key_index].astype(c)[:, None]
    k = k[:, features]
    scale = c(problem.scale) if np.ndim(problem.scale) == 0 else np.asarray(problem.scale).astype(c)[features]
    if problem.score == "dot":
        scores = (_chopped(q, k.T) if chop else _loop(q, k.T) if loop_features else q @ k.T) * scale
    else:
        weights = np.broadcast_to(scale, q.shape[1:])
        scores = -sum(
            (weights[d] * (q[:, d, None] - k[None, :, d]) ** 2 for d in range(q.shape[1])), np.zeros((len(q), len(k)), c)
        )
    s = scores if not problem.softcap else c(problem.softcap) * np.tanh(scores / c(problem.softcap))
    if problem.bias is not None:
        s = s + problem.bias.array[block.plane][block.rows, block.keys].astype(c)
    if problem.alibi_slopes is not None:
        s = s - c(problem.alibi_slopes[block.plane]) * np.abs(block.i - block.j).astype(c)
    before_mod = s
    if problem.score_mod is not None:
        s = np.broadcast_to(
            np.asarray(problem.score_mod(s, *block.plane, block.i, block.j, **problem.mod_args)).astype(c), s.shape
        )
    visible = reference.visibility(problem, block) & (s != -np.inf)
    s = np.where(visible, s, c(-np.inf))
    sink = c(-np.inf) if problem.sinks is None else c(problem.sinks[block.head])
    peak = s.max(axis=1, initial=sink)
    shift = np.where(peak == -np.inf, c(0), peak)
    p = np.where(visible, np.exp(s - shift[:, None]), c(0))
    sink_weight = np.exp(sink - shift)
    total = (p.cumsum(axis=1)[:, -1] if loop and p.shape[1] else p.sum(axis=1)) + sink_weight
    divisor = np.where(total == 0, c(1), total)
    out = (_loop(p, v) if loop and np.isfinite(v).all() else reference.weighted_sum(p, visible, v)) / divisor[:, None]
    return _Naive(
        q, k, v, scores, before_mod, visible, np.where(visible, p / divisor[:, None], c(0)), sink_weight / divisor, out,
        shift + np.log(total), scale, s,
    )


def _loop(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p (rows, keys) @ v (keys, Dv), key by key; or q (rows, D) @ k.T (D, keys), feature by feature."""
    result = np.zeros((len(p), v.shape[1]), p.dtype)
    for weights, values in zip(p.T, v, strict=True):
        result += weights[:, None] * values
    return result


def _chopped(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q (rows, D) @ k (D, keys), four features at once, then the sum is rounded toward zero; for what 16-bit arrays hold."""
    total = np.zeros((len(q), k.shape[1]), np.float32)
    for d in range(0, q.shape[1], 4):
        exact = total + q[:, d : d + 4].astype(np.float64) @ k[d : d + 4].astype(np.float64)
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def naive(problem: Problem, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Output, still in the compute dtype, and LSE of the naive computation."""
    out = np.zeros(problem.out_shape, problem.compute_dtype)
    lse = np.full(problem.lse_shape, -np.inf, problem.compute_dtype)
    with np.errstate(all="ignore"):
        for block, features in _blocks(problem, run):
            done = _naive_block(problem, block, features, run.loop, run.loop_features, run.chop)
            out[block.query_index] = done.out
            lse[block.lse_index] = done.lse
    return out, lse


def naive_weights(problem: Problem, run: Run) -> np.ndarray:
    """All weights in the compute dtype, and then, if so wanted, their mean over the heads."""
    weights = np.zeros((problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k), problem.compute_dtype)
    with np.errstate(all="ignore"):
        for block, features in _blocks(problem, run):
            weights[block.plane][block.rows, block.keys] = _naive_block(problem, block, features, run.loop).weights
    if problem.reduce is not None:
        weights = weights.mean(axis=1, keepdims=True)
    return weights.astype(problem.out_dtype)


def naive_gradients(problem: Problem, run: Run) -> Gradients:
    """Gradients in the compute dtype, from materialised weights."""
    c = problem.compute_dtype.type
    dq, dk, dv = (np.zeros(a.shape, c) for a in (problem.q, problem.k, problem.v))
    dbias = np.zeros(problem.bias.shape, c) if problem.bias is not None else None
    dsinks = np.zeros(problem.heads_q, c) if problem.sinks is not None else None
    with np.errstate(all="ignore"):
        for block, features in _blocks(problem, run):
            f = _naive_block(problem, block, features, run.loop)
            empty = ~f.visible.any(axis=1)
            dout = np.where(empty[:, None], c(0), problem.dout.array[block.query_index].astype(c))
            dlse = np.zeros(len(dout), c) if problem.dlse is None else problem.dlse.array[block.lse_index].astype(c)
            dp, weights = dout @ f.v.T, f.weights
            if run.loop_features:  # as others compute it: else nothing is lost where one key has all the weight
                order = run.order(problem.head_dim_v)
                dp = _loop(dout[:, order], f.v.T[order])
                weights = np.where(f.visible, np.exp(f.logits - f.lse[:, None]), c(0))
            delta = (dout * f.out).sum(axis=1) if run.loop_features and run.loop else (weights * dp).sum(axis=1)
            ds = np.where(f.visible, weights * (dp + (dlse - delta)[:, None]), c(0))
            if dsinks is not None:
                dsinks[block.head] += (f.sink_weight * (dlse - delta)).sum()
            if problem.score_mod is not None:
                ds = ds * reference.score_mod_gradient(problem, block, f.before_mod.astype(np.float64)).astype(c)
            if dbias is not None:
                dbias[block.plane][block.rows, block.keys] = ds
            if problem.softcap:
                ds = ds * (1 - np.tanh(f.scores / c(problem.softcap)) ** 2)
            if run.short:
                weights, ds = (a.astype(problem.q.dtype).astype(c) for a in (weights, ds))
            back = np.argsort(features)
            if problem.score == "dot":
                ds = ds * f.scale
                dq[block.query_index] = (ds @ f.k)[:, back]
                dkeys = (ds.T @ f.q)[:, back]
            else:
                slope = -2 * f.scale * np.einsum("rk,rkd->rkd", ds, f.q[:, None] - f.k[None])
                dq[block.query_index] = slope.sum(axis=1)[:, back]
                dkeys = -slope.sum(axis=0)[:, back]
            np.add.at(dk, block.key_index, dkeys)
            np.add.at(dv, block.key_index, weights.T @ dout)
    if dbias is not None:
        dbias = reference.reduced(dbias, problem.bias.shape if problem.bias_shape is None else problem.bias_shape)
    return Gradients(dq, dk, dv, dbias, dsinks)
