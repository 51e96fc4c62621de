"""The float64 oracle: attention and its gradients as plainly as NumPy can say them.

Every other backend is judged by this file, so it is written to be read rather than to be fast. Attention of one
query row against the keys of its sequence is four steps,

    scores   how well the query fits each key                        :func:`scores`, :func:`softcapped`, ...
    weights  exp(score), normalised to sum 1 over the visible keys   :func:`softmax`
    output   the weighted mean of the values                         :func:`weighted_sum`
    LSE      log of the normaliser, so that partial results can be merged later

and :func:`backward` walks the same steps in reverse. Both work on a :class:`Block`: a few query rows of one sequence
and one head against all keys of that sequence, so that the score matrix stays small however long the sequence is.

Two rules shape the code. An invisible key weighs exactly 0, and whatever bytes lie there (NaN, infinity) must not
matter; since 0 * NaN is NaN, weights alone cannot hide a key, and ``np.where(visible, ...)`` stands wherever one could
leak. A row that sees no key at all has output 0 and LSE -inf, and passes no gradient on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .modifiers import modified_mask, modified_scores
from .types import UNBOUNDED, ArrayView, Gradients, Problem, Sequence

BLOCK_ELEMENTS = 1 << 20  # of one score matrix: eight to ten of 8 MB are alive at a time


# --- which rows and keys belong together --------------------------------------------------------------------------


class Block(NamedTuple):
    """Consecutive query rows of one sequence and one query head, and where their operands lie."""

    sequence: Sequence
    head: int  # query head
    rows: slice  # query rows within the sequence
    keys: slice  # keys within the sequence that are not padding: kv_start .. kv_length
    i: np.ndarray  # (rows, 1) positions of the queries
    j: np.ndarray  # (1, keys) positions of the keys
    query_index: tuple  # q[query_index] is (rows, D); the same for out and dout
    lse_index: tuple  # lse[lse_index] is (rows,)
    key_index: tuple  # k[key_index] is (keys, D); the same for v

    @property
    def plane(self) -> tuple[int, int]:
        """Where this block's (rows, keys) matrix lies in an array such as the bias: batch and head."""
        return self.sequence.index, self.head


def blocks(problem: Problem) -> Iterator[Block]:
    """All blocks of a problem: every query row of every sequence and head exactly once."""
    for sequence in problem.sequences():
        j = np.arange(sequence.kv_start, sequence.kv_length, dtype=np.int64)
        step = max(1, BLOCK_ELEMENTS // max(1, j.size))
        for head in range(problem.heads_q):
            for first in range(0, sequence.q_length, step):
                yield _block(problem, sequence, head, first, min(first + step, sequence.q_length), j)


def _block(problem: Problem, sequence: Sequence, head: int, first: int, last: int, j: np.ndarray) -> Block:
    rows = slice(first, last)
    query_index: tuple
    lse_index: tuple
    if problem.varlen:
        packed = slice(sequence.q_begin + first, sequence.q_begin + last)
        query_index, lse_index = (packed, head), (head, packed)
    else:
        query_index, lse_index = (sequence.index, rows, head), (sequence.index, head, rows)
    return Block(
        sequence=sequence,
        head=head,
        rows=rows,
        keys=slice(sequence.kv_start, max(sequence.kv_start, sequence.kv_length)),
        i=np.arange(first, last, dtype=np.int64)[:, None] + sequence.position,
        j=j[None, :],
        query_index=query_index,
        lse_index=lse_index,
        key_index=key_index(problem, sequence, j, head // problem.group_size),
    )


def key_index(problem: Problem, sequence: Sequence, j: np.ndarray, head_kv: int) -> tuple:
    """The index that picks keys ``j`` of a sequence out of k or v, as (keys, D), in each of the three storages."""
    if problem.page_table is not None:
        return problem.page_table[sequence.index, j // problem.page_size], j % problem.page_size, head_kv
    if problem.cu_seqlens_k is not None:
        return sequence.k_begin + j, head_kv
    return sequence.index, j, head_kv


def widened(array: np.ndarray) -> np.ndarray:
    """The same values in float64."""
    return array.astype(np.float64)


def dequantized(a: ArrayView, scale: ArrayView | None, key_index: tuple) -> np.ndarray:
    """Keys or values (keys, D) in float64, times their scales if they have some."""
    rows = widened(a.array[key_index])
    return rows if scale is None else rows * widened(scale.array[key_index])[:, None]


# --- from queries and keys to logits -------------------------------------------------------------------------------


def scores(problem: Problem, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scaled scores (rows, keys) of q (rows, D) and k (keys, D)."""
    if problem.score == "dot":
        return (q @ k.T) * problem.scale
    # Subtract, then square: |q|^2 - 2 q.k + |k|^2 would cancel when q and k are large and close.
    result = np.zeros((len(q), len(k)))
    for scale, difference in _differences(problem, q, k):
        result -= scale * difference**2
    return result


def _differences(problem: Problem, q: np.ndarray, k: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """For each of the D features: its scale and q - k as (rows, keys)."""
    scale = np.broadcast_to(np.asarray(problem.scale, np.float64), q.shape[1:])
    for d in range(q.shape[1]):
        yield scale[d], q[:, d, None] - k[None, :, d]


def softcapped(problem: Problem, s: np.ndarray) -> np.ndarray:
    """Scores squeezed smoothly into (-softcap, softcap)."""
    return problem.softcap * np.tanh(s / problem.softcap) if problem.softcap else s


def biased(problem: Problem, block: Block, s: np.ndarray) -> np.ndarray:
    """Scores with the additive bias and the linear distance penalty of ALiBi."""
    if problem.bias is not None:
        s = s + bias_of(problem, block)
    if problem.alibi_slopes is not None:
        s = s - problem.alibi_slopes[block.plane] * np.abs(block.i - block.j)
    return s


def bias_of(problem: Problem, block: Block) -> np.ndarray:
    """The bias of a block, (rows, keys)."""
    assert problem.bias is not None
    return widened(problem.bias.array[block.plane][block.rows, block.keys])


def modified(problem: Problem, block: Block, s: np.ndarray) -> np.ndarray:
    """Scores after the user's score_mod, a function of the score and the positions, element by element."""
    if problem.score_mod is None:
        return s
    return modified_scores(problem, s, *block.plane, block.i, block.j)


def visibility(problem: Problem, block: Block) -> np.ndarray:
    """Which keys each row may see: a bool matrix (rows, keys)."""
    i, j = block.i, block.j
    visible = np.ones((len(i), j.shape[1]), bool)
    left, right = problem.window  # a causal mask is a window with right = 0
    if left != UNBOUNDED:
        visible &= j >= i - left
    if right != UNBOUNDED:
        visible &= j <= i + right
    if problem.mask is not None:
        visible &= mask_of(problem, block)
    if problem.mask_mod is not None:
        visible &= modified_mask(problem, *block.plane, i, j)
    if problem.bias is not None:
        visible &= bias_of(problem, block) != -np.inf
    return visible


def mask_of(problem: Problem, block: Block) -> np.ndarray:
    """The boolean mask of a block, (rows, keys)."""
    assert problem.mask is not None
    rows_of_mask = problem.mask.array[block.plane][block.rows]
    if not problem.mask_is_tail:
        return rows_of_mask[:, block.keys]
    # Column c stands for the key of query row c, the last keys of the sequence; keys before those are visible.
    column = block.j[0] - (block.sequence.kv_length - block.sequence.q_length)
    return (column < 0) | rows_of_mask[:, np.maximum(column, 0)]


# --- from logits to weights and outputs ----------------------------------------------------------------------------


class Softmax(NamedTuple):
    weights: np.ndarray  # (rows, keys), exactly 0 where invisible
    lse: np.ndarray  # (rows,) natural log of the sum of exp(logit), the sink's included
    sink_weight: np.ndarray  # (rows,) the share of the attention sink, which has no value to contribute


def softmax(logits: np.ndarray, visible: np.ndarray, sink: float) -> Softmax:
    """Softmax over the visible keys and one more logit, the sink (-inf: none), which only takes weight away.

    A logit of +inf, or NaN, makes the weights and the LSE of its row NaN.
    """
    logits = np.where(visible, logits, -np.inf)
    peak = logits.max(axis=1, initial=sink)
    # Subtracting the maximum changes nothing but keeps exp in range; a row without any key has no maximum.
    shift = np.where(peak == -np.inf, 0.0, peak)
    weights = np.exp(logits - shift[:, None])
    sink_weight = np.exp(sink - shift)
    total = weights.sum(axis=1) + sink_weight
    lse = shift + np.log(total)
    weights = np.where(visible, weights / total[:, None], 0.0)
    return Softmax(weights, lse, np.where(total == 0, 0.0, sink_weight / total))


def weighted_sum(weights: np.ndarray, visible: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights (n, m) @ values (m, D), where a row of values reaches only those who see it, whatever it holds."""
    finite = np.isfinite(values).all(axis=1)
    result = weights[:, finite] @ values[finite]
    for m in np.flatnonzero(~finite):
        seen = visible[:, m]
        result[seen] += weights[seen, m, None] * values[m]
    return result


class Attended(NamedTuple):
    """A block on its way from operands to weights, with what the backward pass needs of each step."""

    q: np.ndarray  # (rows, D)
    k: np.ndarray  # (keys, D)
    v: np.ndarray  # (keys, Dv)
    scores: np.ndarray  # scaled
    biased: np.ndarray  # after softcap, bias and ALiBi: what score_mod sees
    visible: np.ndarray
    softmax: Softmax


def attend(problem: Problem, block: Block) -> Attended:
    """Weights of one block: the steps of the forward pass in their order."""
    q = widened(problem.q.array[block.query_index])
    k = dequantized(problem.k, problem.k_scale, block.key_index)
    v = dequantized(problem.v, problem.v_scale, block.key_index)
    scaled = scores(problem, q, k)
    before_mod = biased(problem, block, softcapped(problem, scaled))
    logits = modified(problem, block, before_mod)
    # A final logit of -inf, wherever it comes from, is a key that is not seen.
    visible = visibility(problem, block) & (logits != -np.inf)
    sink = -np.inf if problem.sinks is None else problem.sinks[block.head]
    return Attended(q, k, v, scaled, before_mod, visible, softmax(logits, visible, sink))


def forward(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Parameters
    ----------
    problem : Problem
        A canonical problem; only the arrays of its views are read. ``score_mod`` and ``mask_mod`` are Python
        callables on NumPy arrays, and score_mod sees float64 scores whatever the dtype of q.

    Returns
    -------
    out : ndarray, float64
        Shape ``problem.out_shape``. Rows without a visible key, and packed rows of no sequence, are 0.
    lse : ndarray, float64
        Shape ``problem.lse_shape``: natural log-sum-exp of the final logits, sinks included; -inf for a row without a
        visible key (its sink where there are sinks) and for packed rows of no sequence.
    """
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.lse_shape, -np.inf)
    with np.errstate(all="ignore"):  # infinities and NaN are answers here, not accidents
        for block in blocks(problem):
            attended = attend(problem, block)
            out[block.query_index] = weighted_sum(attended.softmax.weights, attended.visible, attended.v)
            lse[block.lse_index] = attended.softmax.lse
    return out, lse


def attention_weights(problem: Problem) -> np.ndarray:
    """Softmax weights in float64, or their mean over the query heads: ``problem.weights_shape``."""
    result = np.zeros(problem.weights_shape)
    with np.errstate(all="ignore"):
        for block in blocks(problem):
            weights = attend(problem, block).softmax.weights
            if problem.reduce is None:
                result[block.plane][block.rows, block.keys] = weights
            else:
                result[block.sequence.index, 0, block.rows, block.keys] += weights / problem.heads_q
    return result


# --- the same steps in reverse -------------------------------------------------------------------------------------


def softmax_gradient(attended: Attended, dout: np.ndarray, dlse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the logits (rows, keys) and of the sink's logit (rows,), from those of the output and the LSE.

    With output o = sum_j p_j v_j and d p_j = p_j (d s_j - sum_l p_l d s_l), the gradient of logit j is
    p_j (dout . v_j - delta + dlse) with delta = sum_l p_l (dout . v_l); the sink is one more logit with value 0.
    """
    weights, _, sink_weight = attended.softmax
    dweights = np.where(attended.visible, dout @ attended.v.T, 0.0)
    # Equal to dout . out, but this form leaves a NaN in dout of a row without keys behind.
    delta = (weights * dweights).sum(axis=1)
    dlogits = weights * (dweights + (dlse - delta)[:, None])
    return np.where(attended.visible, dlogits, 0.0), sink_weight * (dlse - delta)


def score_mod_gradient(problem: Problem, block: Block, s: np.ndarray) -> np.ndarray:
    """d score_mod / d s, element by element, by central differences.

    The step is the cube root of the float64 epsilon times max(1, |s|), where the errors of truncation and of rounding
    balance: about 1e-10 of the function's own scale. At a kink it is the mean of both slopes.
    """
    step = np.cbrt(np.finfo(np.float64).eps) * np.maximum(1.0, np.abs(s))
    above, below = s + step, s - step
    return (modified(problem, block, above) - modified(problem, block, below)) / (above - below)


def softcap_gradient(problem: Problem, scaled: np.ndarray) -> np.ndarray:
    """Derivative of c * tanh(x / c): from the scores themselves, so that saturated entries give 0 and not NaN."""
    return 1.0 - np.tanh(scaled / problem.softcap) ** 2


def score_gradient(problem: Problem, attended: Attended, ds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of q (rows, D) and k (keys, D) from those of the scaled scores."""
    q, k, visible = attended.q, attended.k, attended.visible
    if problem.score == "dot":
        dq = problem.scale * weighted_sum(ds, visible, k)
        dk = problem.scale * weighted_sum(ds.T, visible.T, q)
        return dq, dk
    dq, dk = np.zeros(q.shape), np.zeros(k.shape)
    for d, (scale, difference) in enumerate(_differences(problem, q, k)):
        slope = np.where(visible, -2.0 * scale * difference * ds, 0.0)
        dq[:, d] = slope.sum(axis=1)
        dk[:, d] = -slope.sum(axis=0)
    return dq, dk


def reduced(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an array of ``shape`` that was broadcast to the gradient's shape: sums over what was repeated."""
    padded = (1,) * (gradient.ndim - len(shape)) + tuple(shape)
    repeated = tuple(axis for axis, size in enumerate(padded) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axis=repeated, keepdims=True).reshape(shape)


def backward(problem: Problem) -> Gradients:
    """Gradients of attention in float64, everything recomputed from q, k and v.

    Parameters
    ----------
    problem : Problem
        With ``dout``, the gradient of the loss by the output, and optionally ``dlse``, that by the LSE.

    Returns
    -------
    Gradients
        float64 arrays in the canonical axis order and the shapes of q, k and v: ``dk`` and ``dv`` are summed over the
        query heads that share a key/value head and, for paged storage, over all sequences that read a page.
        ``dbias`` has the shape of the bias before it was broadcast, ``dsinks`` is (Hq,); None without bias or sinks.
        Exact to rounding, but for ``score_mod``, whose derivative is good to about 1e-10.
    """
    assert problem.dout is not None
    dq = np.zeros(problem.q.shape)
    dk = np.zeros(problem.k.shape)
    dv = np.zeros(problem.v.shape)
    dbias = np.zeros(problem.bias.shape) if problem.bias is not None else None
    dsinks = np.zeros(problem.heads_q) if problem.sinks is not None else None
    with np.errstate(all="ignore"):
        for block in blocks(problem):
            attended = attend(problem, block)
            dout = widened(problem.dout.array[block.query_index])
            dlse = widened(problem.dlse.array[block.lse_index]) if problem.dlse is not None else np.zeros(len(dout))
            ds, dsink = softmax_gradient(attended, dout, dlse)
            if dsinks is not None:
                dsinks[block.head] += dsink.sum()
            if problem.score_mod is not None:
                ds = np.where(attended.visible, ds * score_mod_gradient(problem, block, attended.biased), 0.0)
            if dbias is not None:
                dbias[block.plane][block.rows, block.keys] = ds
            if problem.softcap:
                ds = np.where(attended.visible, ds * softcap_gradient(problem, attended.scores), 0.0)
            dq[block.query_index], dkeys = score_gradient(problem, attended, ds)
            dvalues = weighted_sum(attended.softmax.weights.T, attended.visible.T, dout)
            # Added, since heads and pages are shared; unbuffered, since a table may even list one page twice.
            np.add.at(dk, block.key_index, dkeys)
            np.add.at(dv, block.key_index, dvalues)
    if dbias is not None and problem.bias_shape is not None:
        dbias = reduced(dbias, problem.bias_shape)
    return Gradients(dq, dk, dv, dbias, dsinks)
