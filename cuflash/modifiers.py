"""The user's score_mod and mask_mod on a tile of NumPy arrays, with what they return checked. A leaf."""

from __future__ import annotations

from typing import Any

import numpy as np

from .types import Problem


def modified_scores(problem: Problem, s: np.ndarray, b: int, h: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Scores (rows, keys) of batch b and head h after score_mod, in a new array of s's dtype.

    Raises
    ------
    TypeError, ValueError
        If score_mod returns something else than real numbers, or of a shape that does not broadcast to (rows, keys).
    """
    assert callable(problem.score_mod)
    result = np.asarray(problem.score_mod(s, b, h, i, j, **problem.mod_args))
    if result.dtype.kind not in "fiu":
        raise TypeError(f"score_mod: returned {_what(result)}; it must return real numbers")
    return np.array(_broadcast(result, s.shape, "score_mod"), s.dtype)


def modified_mask(problem: Problem, b: int, h: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """What mask_mod lets batch b and head h see: bool (rows, keys), read-only.

    Raises
    ------
    TypeError, ValueError
        If mask_mod returns something else than bool, or of a shape that does not broadcast to (rows, keys).
    """
    assert callable(problem.mask_mod)
    result = np.asarray(problem.mask_mod(b, h, i, j, **problem.mod_args))
    if result.dtype != np.bool_:
        raise TypeError(f"mask_mod: returned {_what(result)}; it must return bool, True = visible")
    return _broadcast(result, (len(i), j.shape[1]), "mask_mod")


def _broadcast(result: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    try:
        return np.broadcast_to(result, shape)
    except ValueError:
        raise ValueError(f"{name}: returned shape {result.shape}, which does not broadcast to {shape}, (rows, keys)") from None


def _what(result: Any) -> str:
    return "None" if result.dtype == object and result.ndim == 0 and result.item() is None else f"dtype {result.dtype}"
