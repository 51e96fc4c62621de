"""attention_weights() on the CPU: the softmax weights of a block of query rows after the other, in NumPy.

A block is a few rows of one head against all the keys that they can see, so its softmax needs no second pass. Beside the
result there is only the memory of a block: the mean over the heads is added up block by block, too.
"""

from __future__ import annotations

import math

import numpy as np

from ..types import Plan, Problem, Sequence
from . import cpu_numpy, naive

KERNEL = "naive"  # which is what storing them amounts to
WEIGHTS = 1 << 20  # of a block; more only where one row has more keys
KEYS = 8192  # of a product: the threads of BLAS meet after each, which costs more than small products do
_MATRICES = 4  # of a block are alive at a time, at most, in float64: sinks and means are computed in it


def decline(problem: Problem, kernel: str) -> str | None:
    """Why the weights cannot be materialised, or None."""
    if kernel != KERNEL:
        return f"attention weights are materialised, which is kernel {KERNEL!r}; kernel {kernel!r} never stores them"
    wanted, available = math.prod(problem.weights_shape) * problem.out_dtype.itemsize, naive.available_bytes()
    if problem.weights is None and wanted > available:
        hint = "" if problem.reduce or problem.heads_q == 1 else "; reduce='head_mean' stores one matrix instead of one a head"
        return f"the weights take {wanted:,} bytes, but {available:,} are available{hint}"
    return None


def plan(problem: Problem, backend: str) -> Plan:
    """Rows of a block, and what it needs."""
    keys = max(1, problem.seqlen_k)
    rows = max(1, min(problem.seqlen_q, WEIGHTS // keys))
    return Plan(
        kernel=KERNEL,
        backend=backend,
        reason="materialises the softmax weights with NumPy" + (", as a mean over the heads" if problem.reduce else ""),
        tile=(rows, keys),
        workspace=8 * (_MATRICES * rows * keys + (rows + 2 * KEYS) * problem.head_dim),
    )


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.weights``."""
    step = plan.tile[0]
    with np.errstate(all="ignore"):  # infinities and NaN are answers here, not accidents
        for s in problem.sequences():
            for first in range(0, s.q_length, step):
                _block(problem, s, slice(first, min(first + step, s.q_length)))


def _block(problem: Problem, s: Sequence, rows: slice) -> None:
    """The weights of some rows, of all heads or of their mean."""
    assert problem.weights is not None
    begin, end = cpu_numpy.key_range(problem, s, rows)
    target = problem.weights.array[s.index, :, rows]  # (heads, rows, Sk)
    target[..., :begin] = 0
    target[..., end:] = 0
    if problem.reduce is None:
        for head in range(problem.heads_q):
            cpu_numpy.store(target, (head, slice(None), slice(begin, end)), _weights(problem, s, head, rows, begin, end))
        return
    total = np.zeros((rows.stop - rows.start, end - begin))
    for head in range(problem.heads_q):
        total += _weights(problem, s, head, rows, begin, end)
    cpu_numpy.store(target, (0, slice(None), slice(begin, end)), total / max(1, problem.heads_q))


def _weights(problem: Problem, s: Sequence, head: int, rows: slice, begin: int, end: int) -> np.ndarray:
    """Weights (rows, keys) of one head."""
    q = cpu_numpy.query_rows(problem, s, head, rows)
    x = np.empty((len(q), end - begin), problem.compute_dtype)
    for at in range(begin, end, KEYS):
        keys = slice(at, min(at + KEYS, end))
        k = cpu_numpy.key_rows(problem, "k", s, head, keys)
        x[:, at - begin : keys.stop - begin] = cpu_numpy.logits(problem, s, head, rows, keys, q, k)
    return cpu_numpy.softmax(x, cpu_numpy.sink_of(problem, head))
