"""Logits of one block of queries against some keys in plain NumPy, for naive.py and for Python score and mask functions.

Everything is computed in the problem's compute dtype. A block is ``rows`` of one sequence and one query head; keys are a
range of that sequence.
"""

from __future__ import annotations

import numpy as np

from ..modifiers import modified_mask, modified_scores
from ..types import UNBOUNDED, Problem, Sequence


def query_rows(problem: Problem, s: Sequence, head: int, rows: slice) -> np.ndarray:
    """q of a block, (rows, D), in the compute dtype."""
    return problem.q.array[row_index(problem, s, head, rows)].astype(problem.compute_dtype)


def row_index(problem: Problem, s: Sequence, head: int, rows: slice) -> tuple:
    """Where the block lies in q and out."""
    packed = slice(s.q_begin + rows.start, s.q_begin + rows.stop)
    return (packed, head) if problem.varlen else (s.index, rows, head)


def lse_index(problem: Problem, s: Sequence, head: int, rows: slice) -> tuple:
    """Where the block lies in lse."""
    packed = slice(s.q_begin + rows.start, s.q_begin + rows.stop)
    return (head, packed) if problem.varlen else (s.index, head, rows)


def key_rows(problem: Problem, name: str, s: Sequence, head: int, keys: slice) -> np.ndarray:
    """"k" or "v" of a key range as the query head sees it, (keys, D), in the compute dtype; times its scales."""
    index: tuple
    head_kv = head // problem.group_size
    if problem.paged:
        j = np.arange(keys.start, keys.stop)
        index = problem.page_table[s.index, j // problem.page_size], j % problem.page_size, head_kv
    elif problem.cu_seqlens_k is not None:
        index = slice(s.k_begin + keys.start, s.k_begin + keys.stop), head_kv
    else:
        index = s.index, keys, head_kv
    rows = getattr(problem, name).array[index].astype(problem.compute_dtype)
    scale = getattr(problem, f"{name}_scale")
    if scale is not None:
        rows *= scale.array[index][:, None]
    return rows


def key_range(problem: Problem, s: Sequence, rows: slice) -> tuple[int, int]:
    """The keys between the first and the last that some row of the block can see, going by position alone."""
    left, right = problem.window
    begin, end = s.kv_start, s.kv_length
    if left != UNBOUNDED:
        begin = max(begin, rows.start + s.position - left)
    if right != UNBOUNDED:
        end = min(end, rows.stop - 1 + s.position + right + 1)
    return begin, max(begin, end)


def positions(s: Sequence, rows: slice, keys: slice) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the queries (rows, 1) and of the keys (1, keys)."""
    i = np.arange(rows.start, rows.stop, dtype=np.int64)[:, None] + s.position
    return i, np.arange(keys.start, keys.stop, dtype=np.int64)[None, :]


def logits(problem: Problem, s: Sequence, head: int, rows: slice, keys: slice, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Final logits (rows, keys) of q (rows, D) and k (keys, D); -inf where a key is not visible."""
    x, hidden = additive(problem, s, head, rows, keys, q, k)
    return final(problem, s, head, rows, keys, x, hidden)


def additive(
    problem: Problem, s: Sequence, head: int, rows: slice, keys: slice, q: np.ndarray, k: np.ndarray
) -> tuple[np.ndarray, np.ndarray | bool]:
    """The logits that score_mod sees, (rows, keys), and which of them the bias hides."""
    kind = problem.compute_dtype.type
    i, j = positions(s, rows, keys)
    x = scores(problem, q, k)
    if problem.softcap:
        cap = kind(problem.softcap)
        x = np.tanh(x / cap) * cap
    hidden: np.ndarray | bool = False
    if problem.bias is not None:
        bias = problem.bias.array[s.index, head, rows, keys].astype(kind)
        x += bias
        hidden = bias == -np.inf  # whatever the score or score_mod makes of it
    if problem.alibi_slopes is not None:
        x -= kind(problem.alibi_slopes[s.index, head]) * np.abs(i - j).astype(kind)
    return x, hidden


def final(
    problem: Problem, s: Sequence, head: int, rows: slice, keys: slice, x: np.ndarray, hidden: np.ndarray | bool
) -> np.ndarray:
    """Final logits from those of ``additive``, whose array may be overwritten."""
    i, j = positions(s, rows, keys)
    if problem.score_mod is not None:
        x = modified_scores(problem, x, s.index, head, i, j)
    x[np.broadcast_to(hidden, x.shape)] = -np.inf
    return _hide(problem, s, head, rows, i, j, x)


def scores(problem: Problem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scaled scores (rows, keys) of q (rows, D) and k (keys, D)."""
    kind = problem.compute_dtype.type
    if problem.score == "dot":
        x = q @ k.T
        x *= kind(problem.scale)
        return x
    # Subtract, then square: expanding the square would cancel where q and k are large and close.
    scale = np.broadcast_to(np.asarray(problem.scale, kind), q.shape[1:])
    x = np.zeros((len(q), len(k)), kind)
    for d in range(q.shape[1]):
        x -= scale[d] * np.square(q[:, d, None] - k[None, :, d])
    return x


def _hide(problem: Problem, s: Sequence, head: int, rows: slice, i: np.ndarray, j: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Set the logits of invisible keys to -inf, whatever they are."""
    left, right = problem.window
    hidden = -np.inf
    if left != UNBOUNDED:
        x[j < i - left] = hidden
    if right != UNBOUNDED:
        x[j > i + right] = hidden
    if problem.mask is not None:
        mask = problem.mask.array[s.index, head, rows]
        if problem.mask_is_tail:  # column c is key c + kv_length - q_length; earlier keys are visible
            column = j[0] - (s.kv_length - s.q_length)
            x[~mask[:, np.maximum(column, 0)] & (column >= 0)] = hidden
        else:
            x[~mask[:, j[0]]] = hidden
    if problem.mask_mod is not None:
        x[~modified_mask(problem, s.index, head, i, j)] = hidden
    return x


def weighted_sum(p: np.ndarray, visible: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p (rows, keys) @ v (keys, Dv), where infinities and NaN in v reach only the rows that see them."""
    strange = np.flatnonzero(~np.isfinite(v).all(axis=1))
    if not len(strange):
        return p @ v
    tame = v.copy()
    tame[strange] = 0
    out = p @ tame
    for n in strange:
        seen = visible[:, n]
        out[seen] += p[seen, n, None] * v[n]
    return out


class State:
    """The online softmax of one block: running maximum and sum (rows,) and the unnormalised output (rows, Dv)."""

    def __init__(self, rows: int, width: int, dtype: np.dtype):
        self.top = np.full(rows, -np.inf, dtype)
        self.total = np.zeros(rows, dtype)
        self.out = np.zeros((rows, width), dtype)

    def update(self, x: np.ndarray, v: np.ndarray) -> None:
        """Take in logits (rows, keys), which become exp(x - maximum), and the values (keys, Dv)."""
        visible = x != -np.inf
        top = np.fmax(self.top, np.fmax.reduce(x, axis=1, initial=-np.inf))  # NaN is passed over, it shows in the sum
        base = np.where(top == -np.inf, 0, top).astype(x.dtype)
        shrink = np.exp(self.top - base)
        x -= base[:, None]
        p = np.exp(x, out=x)
        self.total = self.total * shrink + p.sum(axis=1)
        self.out = self.out * shrink[:, None] + weighted_sum(p, visible, v)
        self.top = top

    def share(self, sink: float) -> tuple[np.ndarray, np.ndarray]:
        """The share of the weight that the keys have beside the sink, and the LSE, the sink included; (rows,), float64."""
        peak = np.maximum(self.top.astype(np.float64), sink)
        base = np.where(peak == -np.inf, 0, peak)
        shrink = np.exp(self.top - base)
        whole = self.total * shrink + np.exp(sink - base)
        # In float64, where a large sink leaves a share below the range of float32; without a sink, exactly 1.
        return self.total * shrink / whole, base + np.log(whole)

    def finish(self, sink: float) -> tuple[np.ndarray, np.ndarray]:
        """Output (rows, Dv) and LSE (rows,), the sink included."""
        share, lse = self.share(sink)
        out = np.where((self.total == 0)[:, None], 0, self.out / self.total.astype(np.float64)[:, None] * share[:, None])
        return out, lse


def softmax(x: np.ndarray, sink: float) -> np.ndarray:
    """Weights (rows, keys) of logits, which are overwritten; the sink takes its share. Exactly 0 where a key is not seen."""
    hidden = x == -np.inf
    state = State(len(x), 0, x.dtype)
    state.update(x, np.empty((x.shape[1], 0), x.dtype))  # leaves exp(x - maximum) in x
    x /= state.total[:, None]  # one division, so that equal weights are the nearest numbers to 1/n
    weights = x if sink == -np.inf else x * state.share(sink)[0][:, None]
    weights[hidden] = 0
    return weights


def store(target: np.ndarray, index: tuple, values: np.ndarray) -> None:
    """Round values into a part of a result."""
    target[index] = values.astype(target.dtype)


def sink_of(problem: Problem, head: int) -> float:
    return -np.inf if problem.sinks is None else float(problem.sinks[head])
