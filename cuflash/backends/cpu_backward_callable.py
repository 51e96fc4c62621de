"""Gradients of attention with a Python score_mod or mask_mod on the CPU: tiles in NumPy, in the calling thread.

Two passes over the keys of a block of rows, so that memory stays O(N): the first finds the log-sum-exp and delta (the sum of
weight times dweight), the second the gradients. Nothing is taken from out and lse.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import reference
from ..modifiers import modified_scores
from ..types import Gradients, Plan, Problem, Sequence
from . import cpu_numpy
from .cpu_backward import Results

ROWS, KEYS = 256, 512


def plan(problem: Problem, kernel: str, backend: str) -> Plan:
    """Tile and workspace of the NumPy path."""
    itemsize = problem.compute_dtype.itemsize
    width = problem.head_dim + problem.head_dim_v
    return Plan(
        kernel=kernel,
        backend=backend,
        reason="gradients; score_mod or mask_mod is a Python function: NumPy tiles, one thread and BLAS",
        tile=(ROWS, KEYS),
        workspace=10 * ROWS * KEYS * 8 + (3 * ROWS + 2 * KEYS + problem.seqlen_k) * width * itemsize,
    )


class Rows(NamedTuple):
    """A block of query rows of one sequence and one query head."""

    sequence: Sequence
    head: int
    rows: slice
    q: np.ndarray  # (rows, D)
    dout: np.ndarray  # (rows, Dv)
    dlse: np.ndarray  # (rows,)


class Tile(NamedTuple):
    """A block against some keys."""

    keys: slice
    k: np.ndarray  # (keys, D)
    v: np.ndarray  # (keys, Dv)
    before_mod: np.ndarray  # (rows, keys), as are the next three: the logits that score_mod sees
    logits: np.ndarray
    visible: np.ndarray
    dp: np.ndarray  # gradient of the weights, 0 where not visible


def run(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    results = Results(problem)
    rows_per_block, keys_per_tile = plan.tile
    with np.errstate(all="ignore"):  # infinities and NaN are answers here, not accidents
        for s in problem.sequences():
            for head_kv in range(problem.heads_kv):
                _unit(problem, s, head_kv, results, rows_per_block, keys_per_tile)
    return results.finished()


def _unit(problem: Problem, s: Sequence, head_kv: int, results: Results, rows_per_block: int, keys_per_tile: int) -> None:
    """One sequence and key/value head: the heads of the group add to one dK and dV."""
    length = max(s.kv_length, 0)
    dk = np.zeros((length, problem.head_dim), problem.compute_dtype)
    dv = np.zeros((length, problem.head_dim_v), problem.compute_dtype)
    for head in range(head_kv * problem.group_size, (head_kv + 1) * problem.group_size):
        for first in range(0, s.q_length, rows_per_block):
            rows = slice(first, min(first + rows_per_block, s.q_length))
            block = _rows(problem, s, head, rows)
            index = cpu_numpy.row_index(problem, s, head, rows)
            results.dq[index] = _block(problem, block, results, dk, dv, keys_per_tile).astype(results.dq.dtype)
    where = reference.key_index(problem, s, np.arange(length), head_kv)
    for target, part in ((results.dk, dk), (results.dv, dv)):
        if problem.paged:  # pages may be shared, and a table may even list one twice
            np.add.at(target, where, part)
        else:
            target[where] = part.astype(target.dtype)


def _rows(problem: Problem, s: Sequence, head: int, rows: slice) -> Rows:
    kind = problem.compute_dtype
    dout = problem.dout.array[cpu_numpy.row_index(problem, s, head, rows)].astype(kind)
    dlse = np.zeros(len(dout), kind)
    if problem.dlse is not None:
        dlse = problem.dlse.array[cpu_numpy.lse_index(problem, s, head, rows)].astype(kind)
    return Rows(s, head, rows, cpu_numpy.query_rows(problem, s, head, rows), dout, dlse)


def _tiles(problem: Problem, block: Rows, keys_per_tile: int):
    """The tiles of a block, with logits and dweights."""
    s, head, rows, q, dout, _ = block
    begin, end = cpu_numpy.key_range(problem, s, rows)
    for at in range(begin, end, keys_per_tile):
        keys = slice(at, min(at + keys_per_tile, end))
        k = cpu_numpy.key_rows(problem, "k", s, head, keys)
        v = cpu_numpy.key_rows(problem, "v", s, head, keys)
        before_mod, hidden = cpu_numpy.additive(problem, s, head, rows, keys, q, k)
        logits = cpu_numpy.final(problem, s, head, rows, keys, before_mod.copy(), hidden)
        visible = logits != -np.inf
        yield Tile(keys, k, v, before_mod, logits, visible, np.where(visible, dout @ v.T, 0))


def _block(problem: Problem, block: Rows, results: Results, dk: np.ndarray, dv: np.ndarray, keys_per_tile: int) -> np.ndarray:
    """dQ of a block; adds to everything else."""
    s, head, rows, q, dout, dlse = block
    kind = problem.compute_dtype
    lse, delta, sink_weight = _statistics(problem, block, keys_per_tile)
    if results.dsinks is not None:
        results.dsinks[head] += (sink_weight * (dlse - delta)).sum()
    dq = np.zeros(q.shape, kind)
    for tile in _tiles(problem, block, keys_per_tile):
        keys, visible = tile.keys, tile.visible
        p = np.where(visible, np.exp(tile.logits - lse[:, None]), 0).astype(kind)
        ds = np.where(visible, p * (tile.dp + (dlse - delta)[:, None]), 0).astype(kind)
        if problem.score_mod is not None:
            ds = np.where(visible, ds * _slope(problem, block, tile), 0).astype(kind)
        if results.dbias is not None:
            _add_bias(problem, s, head, rows, keys, ds, results.dbias)
        if problem.softcap:
            t = np.tanh(cpu_numpy.scores(problem, q, tile.k) / kind.type(problem.softcap))
            ds = np.where(visible, ds * (1 - t * t), 0)
        dq_part, dk_part = _score_gradient(problem, q, tile, ds)
        dq += dq_part
        dk[keys] += dk_part
        dv[keys] += cpu_numpy.weighted_sum(p.T, visible.T, dout)
    return dq


def _statistics(problem: Problem, block: Rows, keys_per_tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-sum-exp (float64), delta and the weight of the sink, of every row."""
    kind = problem.compute_dtype
    sink = cpu_numpy.sink_of(problem, block.head)
    top = np.full(len(block.q), -np.inf)
    total, weighted = np.zeros(len(top)), np.zeros(len(top))
    for tile in _tiles(problem, block, keys_per_tile):
        x = tile.logits
        new = np.fmax(top, np.fmax.reduce(x, axis=1, initial=-np.inf))  # NaN is passed over, it shows in the sum
        base = np.where(new == -np.inf, 0, new)
        p = np.where(tile.visible, np.exp(x - base[:, None].astype(kind)), 0)
        shrink = np.exp(top - base)
        total = total * shrink + p.sum(axis=1)
        weighted = weighted * shrink + np.where(tile.visible, p * tile.dp, 0).sum(axis=1)
        top = new
    peak = np.maximum(top, sink)
    base = np.where(peak == -np.inf, 0, peak)
    shrink, sink_part = np.exp(top - base), np.exp(sink - base)
    whole = total * shrink + sink_part
    seen = total != 0
    delta = np.where(seen, weighted * shrink / whole, 0)
    return base + np.log(whole), delta.astype(kind), np.where(whole == 0, 0, sink_part / whole)


def _slope(problem: Problem, block: Rows, tile: Tile) -> np.ndarray:
    """d score_mod / d s by central differences in float64; see reference.score_mod_gradient for the step."""
    s = tile.before_mod.astype(np.float64)
    step = np.cbrt(np.finfo(np.float64).eps) * np.maximum(1.0, np.abs(s))
    i, j = cpu_numpy.positions(block.sequence, block.rows, tile.keys)
    ends = [modified_scores(problem, x, block.sequence.index, block.head, i, j) for x in (s + step, s - step)]
    return (ends[0] - ends[1]) / ((s + step) - (s - step))


def _add_bias(problem: Problem, s: Sequence, head: int, rows: slice, keys: slice, ds: np.ndarray, dbias: np.ndarray) -> None:
    """Add dS to dbias, summed over the axes along which the bias was broadcast."""
    b, h, sq, sk = dbias.shape
    if sq == 1 and problem.seqlen_q != 1:
        ds = ds.sum(axis=0, keepdims=True, dtype=dbias.dtype)
    if sk == 1 and problem.seqlen_k != 1:
        ds = ds.sum(axis=1, keepdims=True, dtype=dbias.dtype)
    dbias[s.index if b > 1 else 0, head if h > 1 else 0, rows if sq > 1 else slice(0, 1), keys if sk > 1 else slice(0, 1)] += ds


def _score_gradient(problem: Problem, q: np.ndarray, tile: Tile, ds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of dQ (rows, D) and dK (keys, D) from the gradient of the scaled scores."""
    k, visible, kind = tile.k, tile.visible, problem.compute_dtype.type
    if problem.score == "dot":
        scale = kind(problem.scale)
        return scale * cpu_numpy.weighted_sum(ds, visible, k), scale * cpu_numpy.weighted_sum(ds.T, visible.T, q)
    scale = np.broadcast_to(np.asarray(problem.scale, kind), q.shape[1:])
    dq, dk = np.zeros(q.shape, kind), np.zeros(k.shape, kind)
    for d in range(q.shape[1]):
        slope = np.where(visible, kind(-2) * scale[d] * (q[:, d, None] - k[None, :, d]) * ds, 0)
        dq[:, d], dk[:, d] = slope.sum(axis=1), -slope.sum(axis=0)
    return dq, dk
