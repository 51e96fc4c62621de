"""Rows of results that no kernel writes: those that see nothing, and packed rows that belong to no sequence."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..types import Problem


def clear_rows(problem: Problem, rows: Any) -> None:
    """O = 0, LSE = -inf. ``rows``: a batch entry, or packed rows."""
    assert problem.out is not None
    problem.out.array[rows] = 0
    if problem.lse is not None:
        problem.lse.array[(slice(None), rows) if problem.varlen else rows] = -np.inf


def clear_slack(problem: Problem) -> None:
    """Clear the rows behind the last sequence of a varlen call."""
    assert problem.cu_seqlens_q is not None
    end = int(problem.cu_seqlens_q[-1])
    if end < problem.q.shape[0]:
        clear_rows(problem, slice(end, None))
