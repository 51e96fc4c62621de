"""Attention with a Python score_mod or mask_mod on the CPU: the same tiles, in NumPy.

The functions get whole tiles, so they cost little; memory stays O(N), as in the compiled kernels. They run in the
calling thread, because nobody promised that they may run in several.
"""

from __future__ import annotations

import numpy as np

from ..types import Plan, Problem
from . import cpu_numpy

ROWS, KEYS = 256, 512


def plan(problem: Problem, kernel: str, backend: str) -> Plan:
    """Tile and workspace of the NumPy path."""
    itemsize = problem.compute_dtype.itemsize
    width = problem.head_dim + 3 * problem.head_dim_v
    return Plan(
        kernel=kernel,
        backend=backend,
        reason="score_mod or mask_mod is a Python function: NumPy tiles, one thread and BLAS",
        tile=(ROWS, KEYS),
        workspace=4 * ROWS * KEYS * 8 + (ROWS + KEYS) * width * itemsize,
    )


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.out`` and, unless it is None, ``problem.lse``."""
    rows_per_block, keys_per_tile = plan.tile
    with np.errstate(all="ignore"):  # infinities and NaN are answers here, not accidents
        for s in problem.sequences():
            for head in range(problem.heads_q):
                for first in range(0, s.q_length, rows_per_block):
                    _block(problem, s, head, slice(first, min(first + rows_per_block, s.q_length)), keys_per_tile)


def _block(problem: Problem, s, head: int, rows: slice, keys_per_tile: int) -> None:
    q = cpu_numpy.query_rows(problem, s, head, rows)
    state = cpu_numpy.State(rows.stop - rows.start, problem.head_dim_v, problem.compute_dtype)
    begin, end = cpu_numpy.key_range(problem, s, rows)
    for at in range(begin, end, keys_per_tile):
        keys = slice(at, min(at + keys_per_tile, end))
        k = cpu_numpy.key_rows(problem, "k", s, head, keys)
        v = cpu_numpy.key_rows(problem, "v", s, head, keys)
        state.update(cpu_numpy.logits(problem, s, head, rows, keys, q, k), v)
    out, lse = state.finish(cpu_numpy.sink_of(problem, head))
    cpu_numpy.store(problem.out.array, cpu_numpy.row_index(problem, s, head, rows), out)
    if problem.lse is not None:
        cpu_numpy.store(problem.lse.array, cpu_numpy.lse_index(problem, s, head, rows), lse)
