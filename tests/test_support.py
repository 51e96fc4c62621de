"""The support table asks about every option, and a kernel does what it accepts there."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import cuflash
from cuflash import planner, problem, reference, support

COLUMNS = {f"{backend.NAME} {kernel}": (backend, kernel) for backend, kernel in support.columns()}

# How a call is made or where its results go, not what is computed.
NO_ROW = {"q", "k", "v", "k_cache", "v_cache", "kernel", "backend", "stream", "out", "lse", "return_lse", "mod_args", "options"}


@pytest.mark.parametrize("function", [cuflash.attention, cuflash.decode])
def test_every_option_has_a_row(function):
    rows = " ".join(support.ROWS)
    missing = [name for name in inspect.signature(function).parameters if name not in NO_ROW and name not in rows]
    assert not missing, f"give {missing} a row in cuflash/support.py"


def test_every_kernel_has_a_column():
    assert {"cpu fa2", "cpu decode", "cpu naive", "reference naive"} <= COLUMNS.keys()
    heads = support.table().splitlines()[0].strip("| ").split(" | ")
    assert heads == ["option", *COLUMNS]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", support.ROWS)
def test_what_a_kernel_accepts_it_runs(row, column):
    backend, kernel = COLUMNS[column]
    names = []
    for name, dtype in support.DTYPES.items():
        try:
            asked = support.ROWS[row](support.Arrays(dtype, rows=1 if kernel == "decode" else 4))
        except NotImplementedError as error:
            assert str(error).split(":")[0] in row
            assert support.cell(support.ROWS[row], backend, kernel) == support.LATER
            return
        reason = planner.decline(backend, asked, kernel)
        if reason is not None:
            assert len(reason) > 10
            continue
        names.append(name)
        if backend.NAME not in ("cuda", "numba-cuda"):  # those need a GPU, where the conformance suite runs them
            run(asked, backend, kernel)
    cell = support.cell(support.ROWS[row], backend, kernel)
    assert names == {support.ALL: list(support.DTYPES), support.NONE: []}.get(cell, cell.split())


def run(asked, backend, kernel):
    """Run one tiny problem into results filled with NaN, and compare with the oracle."""
    plan = backend.plan(asked, kernel)
    assert (plan.backend, plan.kernel) == (backend.NAME, kernel)
    if asked.op == "weights":
        asked, weights = problem.with_weights(asked, None, asked.q.array.ndim)
        weights.fill(np.nan)
        backend.run_weights(plan, asked)
        np.testing.assert_allclose(weights, reference.attention_weights(asked), rtol=4 * np.finfo(weights.dtype).eps)
        return
    if asked.op == "backward":
        gradients = backend.run_backward(plan, asked)
        assert all(np.isfinite(g.astype(np.float32)).all() for g in (gradients.dq, gradients.dk, gradients.dv))
        return
    asked, out, lse = problem.with_outputs(asked, None, None, True, "BSHD", asked.q.array.ndim)
    out.fill(np.nan)
    lse.fill(np.nan)
    backend.run(plan, asked)
    exact_out, exact_lse = reference.forward(asked)
    assert out.dtype == asked.out_dtype
    np.testing.assert_array_equal(out.astype(np.float64), exact_out)  # v is zero
    np.testing.assert_allclose(lse, exact_lse, rtol=4 * np.finfo(lse.dtype).eps)
