"""Small problems for the oracle, built and run in one line."""

from __future__ import annotations

import numpy as np

from cuflash import arrays, reference
from cuflash.types import Problem


def view(array: np.ndarray) -> arrays.ArrayView:
    return arrays.view(array, "array")


def with_gradients(problem: Problem, dout: np.ndarray, dlse: np.ndarray | None = None) -> Problem:
    return problem.replace(op="backward", dout=view(dout), dlse=None if dlse is None else view(dlse))


def rows(*values: float, heads: int = 1, dim: int = 1, dtype: type = np.float64) -> np.ndarray:
    """One value a row, (1, S, heads, dim)."""
    column = np.array(values, dtype)[None, :, None, None]
    return np.broadcast_to(column, (1, len(values), heads, dim)).copy()


def zeros(length: int, heads: int = 1, dim: int = 1, dtype: type = np.float64) -> np.ndarray:
    return np.zeros((1, length, heads, dim), dtype)


def forward_1d(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """First feature of every output row, and the LSE, of a problem with one batch and head."""
    out, lse = reference.forward(problem)
    return out[0, :, 0, 0], lse[0, 0]
