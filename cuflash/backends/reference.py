"""The float64 oracle as a backend, so that it can be asked for like any other and runs in the same suite."""

from __future__ import annotations

import numpy as np

from .. import reference
from ..types import Gradients, Plan, Problem

NAME = "reference"
KERNELS = TAKES_E4M3 = ("naive",)
_MATRICES = 10  # float64 score matrices of a block alive at a time, at most


def auto_kernels(problem: Problem) -> tuple[str, ...]:
    """Kernels for kernel="auto", best first."""
    return KERNELS


def decline(problem: Problem, kernel: str) -> str | None:
    """Why the reference cannot do this, or None."""
    if kernel not in KERNELS:
        return f"the reference has no kernel {kernel!r}, only {', '.join(map(repr, KERNELS))}"
    if problem.q.kind != "numpy":
        return f"the reference takes NumPy arrays, these are {problem.q.kind}"
    for name in ("score_mod", "mask_mod"):
        if isinstance(getattr(problem, name), str):
            return f"{name} is a CUDA expression; the reference takes a Python callable on NumPy arrays"
    return None


def plan(problem: Problem, kernel: str) -> Plan:
    """The one plan there is: a block of rows against all keys, in float64, on one thread."""
    keys = max(1, problem.seqlen_k)
    rows = min(max(1, problem.seqlen_q), max(1, reference.BLOCK_ELEMENTS // keys))
    shapes = (problem.weights_shape,) if problem.op == "weights" else (problem.out_shape, problem.lse_shape)
    results = sum(int(np.prod(shape)) for shape in shapes)
    return Plan(
        kernel=kernel,
        backend=NAME,
        reason="float64 oracle, written to be read: exact and slow",
        tile=(rows, keys),
        workspace=8 * (_MATRICES * rows * keys + results),
    )


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.out`` and, unless it is None, ``problem.lse``."""
    assert problem.out is not None
    out, lse = reference.forward(problem)
    _store(problem.out.array, out)
    if problem.lse is not None:
        _store(problem.lse.array, lse)


def run_weights(plan: Plan, problem: Problem) -> None:
    """Write ``problem.weights``."""
    assert problem.weights is not None
    _store(problem.weights.array, reference.attention_weights(problem))


def run_backward(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    exact = reference.backward(problem)
    return Gradients(
        dq=_cast(exact.dq, problem.q.dtype),
        dk=_cast(exact.dk, problem.k.dtype),
        dv=_cast(exact.dv, problem.v.dtype),
        dbias=None if exact.dbias is None or problem.bias is None else _cast(exact.dbias, problem.bias.dtype),
        dsinks=None if exact.dsinks is None else _cast(exact.dsinks, problem.compute_dtype),
    )


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):  # beyond the range of a narrow dtype lies infinity
        return array.astype(dtype)


def _store(target: np.ndarray, array: np.ndarray) -> None:
    target[...] = _cast(array, target.dtype)
