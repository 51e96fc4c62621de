"""Attention as the formula has it, on the CPU: the whole score matrix of a head, softmax, product. The baseline.

It does what NumPy users write by hand, with every option, in the compute dtype: one N x N matrix per head in memory.
"""

from __future__ import annotations

import os

import numpy as np

from ..types import Plan, Problem
from . import cpu_numpy

MATRICES = 3  # scores, visibility and a temporary are alive at a time, about


def matrix_bytes(problem: Problem) -> int:
    """Bytes of the score matrix of one batch entry and head."""
    longest = max((s.q_length * (s.kv_length - s.kv_start) for s in problem.sequences()), default=0)
    return longest * problem.compute_dtype.itemsize


def available_bytes() -> int:
    """Memory that can be had without swapping, as the system says it."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**63


def decline(problem: Problem) -> str | None:
    """Why the score matrix cannot be materialised, or None."""
    wanted, available = MATRICES * matrix_bytes(problem), available_bytes()
    if wanted > available:
        return (
            f"naive materialises the scores: {wanted:,} bytes for one head of "
            f"{problem.seqlen_q} queries and {problem.seqlen_k} keys, but {available:,} are available; kernel='fa2' needs O(N)"
        )
    return None


def plan(problem: Problem, backend: str) -> Plan:
    """The workspace is the point of it."""
    return Plan(
        kernel="naive",
        backend=backend,
        reason="materialises the N x N scores of each head with NumPy: the baseline",
        tile=(problem.seqlen_q, problem.seqlen_k),
        workspace=MATRICES * matrix_bytes(problem),
    )


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.out`` and, unless it is None, ``problem.lse``."""
    assert problem.out is not None
    with np.errstate(all="ignore"):  # infinities and NaN are answers here, not accidents
        for s in problem.sequences():
            rows, keys = slice(0, s.q_length), slice(s.kv_start, max(s.kv_start, s.kv_length))
            for head in range(problem.heads_q):
                q = cpu_numpy.query_rows(problem, s, head, rows)
                k = cpu_numpy.key_rows(problem, "k", s, head, keys)
                v = cpu_numpy.key_rows(problem, "v", s, head, keys)
                x = cpu_numpy.logits(problem, s, head, rows, keys, q, k)
                state = cpu_numpy.State(s.q_length, problem.head_dim_v, problem.compute_dtype)
                state.update(x, v)
                out, lse = state.finish(cpu_numpy.sink_of(problem, head))
                cpu_numpy.store(problem.out.array, cpu_numpy.row_index(problem, s, head, rows), out)
                if problem.lse is not None:
                    cpu_numpy.store(problem.lse.array, cpu_numpy.lse_index(problem, s, head, rows), lse)
