"""The backward pass of the CPU backend: plan, workspace, and the three phases of cpu_backward_kernels.py.

A Python score_mod or mask_mod runs on tiles in NumPy (cpu_backward_callable.py).
"""

from __future__ import annotations

import functools

import numpy as np

from ..types import Gradients, Plan, Problem
from . import cpu_threads
from .cpu_backward_params import (
    GradientWork,
    Sizes,
    bias_sizes,
    fill_result,
    gradient_record,
    plan_work,
)
from .cpu_params import sequence_table, tables

NAME = "cpu"
KERNEL = "fa2"
THREAD_COST = 2e6  # multiply-adds for which waking a thread pays

# Where the LSE and O that were given are too coarse, another pass over a row's keys finds maximum, normaliser and delta again.
# The allowed error is 2 |error of the naive computation| + 2 eps |largest gradient|, eps being 2 units of rounding.
#
# LSE. It is rounded to half its last place: eps 2^k / 2 for 2^k <= |LSE| < 2^(k + 1). In P = exp(S - LSE) that is a relative
# error, the same for all weights of a row, and so it passes to the row of dQ and to the row's share of dK and dV. The naive
# computation divides by the sum and has nothing like it; where its logits are exact (q = 0, a constant bias), nothing but
# the 2 eps is there to pay for it. So 2^k / 2 <= 2, k <= 2. Equal logits with an LSE of 15 and of 26 exceed the bound 1.4 and
# 2.7 times if this is 32. Maximum and normaliser alone cost one product on top of five.
LARGE_LSE = 8.0
# O, when it has as many digits as the compute dtype; rows with fewer always take the pass. delta = dO . O errs by up to
# eps / 2 sum |dO_d O_d|, the naive sum of P_j dP_j hardly where one key has nearly all of the weight; and there every
# dP_j - delta that matters is small. Among many rows that does not show, because the largest gradient is one of a row whose
# weights are spread. There O is a mean of n values, 1/sqrt(n) of their size, and with it the error: 1/16 from 256 keys on.
# Measured on random calls (1 to 300 rows, 1 to 1000 keys, scales 0.25 to 100): with both limits no call exceeds the bound that
# would not if all its rows took the pass; without that of the rows, calls of one row reach 4 times the bound, without either 67.
FEW_ROWS = 64  # of a sequence and key/value head
FEW_KEYS = 256  # that a row can see by its position


def plan(problem: Problem, kernel: str) -> Plan:
    """Tile, threads and workspace."""
    if problem.score_mod is not None or problem.mask_mod is not None:
        from . import cpu_backward_callable

        return cpu_backward_callable.plan(problem, kernel, NAME)
    sizes = padded_sizes(problem)
    kernels = _kernels()
    work = plan_work(problem, sequence_table(problem), sizes, cpu_threads.thread_count(), kernels.BLOCK_ROWS, THREAD_COST)
    itemsize = problem.compute_dtype.itemsize
    tables_bytes = work.keys.nbytes + work.rows.nbytes
    s = "s" if work.threads > 1 else ""
    return Plan(
        kernel=kernel,
        backend=NAME,
        reason=f"gradients by recomputation, {problem.compute_dtype} arithmetic in tiles on {work.threads} thread{s}",
        tile=(sizes.panel, sizes.tile_keys),
        threads=work.threads,
        workspace=work.workspace(problem) + work.threads * _scratch_numbers(problem, sizes) * itemsize + tables_bytes,
        extra=work,
    )


def padded_sizes(problem: Problem) -> Sizes:
    """Sizes of panels, tiles and rows; they follow from dtype, head sizes and machine alone."""
    from . import cpu_simd

    panel = cpu_simd.panel_rows(problem.compute_dtype.itemsize)
    least = max(panel, cpu_simd.UNROLL)
    columns, columns_v = (-(-n // least) * least for n in (problem.head_dim, problem.head_dim_v))
    keys = 128 if max(problem.head_dim, problem.head_dim_v) * problem.compute_dtype.itemsize <= 1024 else 64
    return Sizes(panel, columns, columns_v, keys)


def _scratch_numbers(problem: Problem, sizes: Sizes) -> int:
    return _kernels().scratch_sizes(sizes.panel, sizes.columns, sizes.columns_v, sizes.tile_keys)


@functools.cache
def _kernels():
    from . import cpu_backward_kernels

    return cpu_backward_kernels


def run(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    if problem.score_mod is not None or problem.mask_mod is not None:
        from . import cpu_backward_callable

        return cpu_backward_callable.run(plan, problem)
    results = Results(problem)
    if len(plan.extra.rows):
        _differentiate(problem, plan.extra, results)
    return results.finished()


class Results:
    """The gradients while they are summed: pages and a broadcast bias are summed in more digits than they are returned in."""

    def __init__(self, problem: Problem):
        self.problem = problem
        sums = problem.compute_dtype if problem.paged else None
        self.dq = np.zeros_like(problem.q.array)  # in the memory order of q: what the user sees is contiguous if q is
        self.dk, self.dv = (np.zeros_like(a.array, dtype=sums) for a in (problem.k, problem.v))
        self.dbias: np.ndarray | None = None
        self.lost: np.ndarray | None = None  # what the additions of a float64 sum lost
        self.dsinks: np.ndarray | None = None
        if problem.bias is not None:
            sizes = bias_sizes(problem)
            summed = sizes != problem.bias.shape
            self.dbias = np.zeros(sizes, np.float64 if summed else problem.compute_dtype)
            if summed and problem.compute_dtype == np.float64:
                self.lost = np.zeros(sizes)
        if problem.sinks is not None:
            self.dsinks = np.zeros(problem.heads_q)

    def bias_strides(self) -> list[int]:
        """Byte strides of dbias over (B, Hq, Sq, Sk), 0 where the bias was broadcast."""
        return [stride if n > 1 else 0 for n, stride in zip(self.dbias.shape, self.dbias.strides, strict=True)]

    def finished(self) -> Gradients:
        p = self.problem
        dbias = self.dbias
        if dbias is not None and self.lost is not None:
            dbias = np.where(np.isfinite(dbias), dbias + self.lost, dbias)
        if dbias is not None:
            assert p.bias is not None
            dbias = _rounded(dbias, p.bias.dtype).reshape(p.bias.shape if p.bias_shape is None else p.bias_shape)
        dsinks = None if self.dsinks is None else _rounded(self.dsinks, p.compute_dtype)
        return Gradients(self.dq, _rounded(self.dk, p.k.dtype), _rounded(self.dv, p.v.dtype), dbias, dsinks)


def _rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):  # beyond the range of a narrow dtype lies infinity
        return array.astype(dtype, copy=False)


class Workspace:
    """What the phases hand on: packed panels, row statistics and the slots of dQ. Kept alive while they run."""

    def __init__(self, problem: Problem, work: GradientWork, g: np.void):
        kind, sizes = problem.compute_dtype, work.sizes
        panels = work.lanes // sizes.panel
        self.arrays = {
            # Micro-kernels read whole groups of rows of a panel, also behind the last one.
            "qt": np.empty(work.lanes * problem.head_dim + sizes.columns * sizes.panel, kind),
            "dot": np.empty(work.lanes * problem.head_dim_v, kind),
            "dqt": np.empty(work.dq_lanes * sizes.columns, kind),
            **{name: np.empty(work.lanes, kind) for name in ("slope", "lse", "factor", "delta")},
            **{name: np.empty(work.lanes, np.int64) for name in ("position", "first", "last", "bias", "mask", "refine")},
            "limits": np.empty(4 * panels, np.int64),
            "strange": np.empty(panels, np.int64),
        }
        for name, array in self.arrays.items():
            g[f"{name}_at"] = array.ctypes.data


def _differentiate(problem: Problem, work: GradientWork, results: Results) -> None:
    itemsize = problem.compute_dtype.itemsize
    kernels = _kernels()
    differentiate = kernels.compiled_differentiate(itemsize)
    gradients = gradient_record(problem)
    g = gradients[0]
    workspace = Workspace(problem, work, g)
    g["few_keys"], g["few_rows"], g["large_lse"] = FEW_KEYS, FEW_ROWS, LARGE_LSE
    for name in ("dq", "dk", "dv"):
        fill_result(g, name, getattr(results, name))
    if results.dbias is not None:
        g["dbias_address"], g["dbias_wide"] = results.dbias.ctypes.data, results.dbias.dtype == np.float64
        for axis, stride in zip("bhsc", results.bias_strides(), strict=True):
            g[f"dbias_{axis}"] = stride
        if results.lost is not None:
            g["dbias_lost"] = results.lost.ctypes.data - results.dbias.ctypes.data
    t = tables(problem, work.sequences, work.sizes.tile_keys, kernels.BLOCK_ROWS)
    one = problem.compute_dtype.type(1)
    scratch_bytes = _scratch_numbers(problem, work.sizes) * itemsize + 64

    def phase(number: int, tasks: np.ndarray, portions: list[tuple[int, int]]) -> None:
        def worker():
            scratch = np.empty(scratch_bytes, np.uint8)
            at = -(-scratch.ctypes.data // 64) * 64

            # The kernel sees addresses only: the function that calls it holds what lies there.
            def portion(bounds: tuple[int, int], keep: tuple = (scratch, workspace, results, problem)) -> None:
                differentiate(
                    one, number, tasks, *bounds, t.params, gradients, work.units, work.sequences, t.pages, t.slopes, t.sinks,
                    t.weights.ctypes.data, at,
                )

            return portion

        cpu_threads.run(worker, portions, work.threads)

    phase(kernels.ROWS, work.rows, work.row_portions)
    phase(kernels.KEYS, work.keys, work.key_portions)
    phase(kernels.FINISH, work.rows, work.row_portions)
    if results.dsinks is not None:
        _add_sinks(problem, work, workspace, results.dsinks)


def _add_sinks(problem: Problem, work: GradientWork, workspace: Workspace, dsinks: np.ndarray) -> None:
    """The sink is one more logit, whose value is 0: its gradient is its weight times -delta."""
    lse, factor, delta = (workspace.arrays[name].astype(np.float64) for name in ("lse", "factor", "delta"))
    group = problem.group_size
    for n, unit in enumerate(work.units):
        heads = slice(n % problem.heads_kv * group, n % problem.heads_kv * group + group)
        rows = slice(unit["lane"], unit["lane"] + unit["rows"])
        with np.errstate(all="ignore"):
            weight = np.exp(np.tile(problem.sinks[heads], unit["rows"] // group) - lse[rows]) * factor[rows]
            weight[lse[rows] == -np.inf] = 0
            shares = np.ascontiguousarray((weight * -delta[rows]).reshape(-1, group).T)
            dsinks[heads] += shares.sum(axis=1)  # along memory NumPy sums in pairs, which keeps more digits
