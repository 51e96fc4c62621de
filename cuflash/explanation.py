"""explain(): what an attention call costs, naive against flash, and which kernel would run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks, planner
from . import options as opts
from . import problem as problems
from .api import takes_options
from .types import LAYOUTS, UNBOUNDED, Plan, Problem

LARGEST_SIZE = 1 << 26  # pairs are counted row by row


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one attention call costs. Bytes are bytes, not MiB."""

    flops: int  # 2 * (D + Dv) for each (query, key) pair that the masks by position leave visible
    pairs: int  # those pairs, over batch and heads
    scores_per_head: int  # N x N scores that naive attention stores in the compute dtype, for one sequence and head
    scores_total: int  # over batch and heads
    inputs_and_outputs: int  # q, k, v, out: what must be stored in any case
    workspace: int  # what the planned kernel stores besides
    kernel: str
    backend: str
    reason: str
    tile: tuple[int, int]
    declined: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"FLOPs                        {self.flops:.4g}",
            f"N x N scores, naive          {size(self.scores_per_head)} a head, {size(self.scores_total)} in all",
            f"N x N scores, flash          0 B; workspace {size(self.workspace)}",
            f"q, k, v and out              {size(self.inputs_and_outputs)}",
            f"kernel                       {self.kernel} on backend {self.backend}, tile {self.tile[0]} x {self.tile[1]}",
            f"why                          {self.reason}",
        ]
        return "\n".join(lines + [f"declined                     {d}" for d in self.declined])


@takes_options
def explain(
    q: Any = None, k: Any = None, v: Any = None, *, batch: int = 1, seqlen: int | None = None, seqlen_k: int | None = None,
    heads: int = 1, heads_kv: int | None = None, dim: int = 64, dim_v: int | None = None, dtype: Any = np.float32,
    layout: str = "BSHD", **options: Any,
) -> Explanation:
    """Say what an attention call costs and which kernel would run, without running it.

    Parameters
    ----------
    q, k, v : ndarray, optional
        As for `attention`, pages included. Without them, the sizes below describe the call and no memory is taken.
    batch, seqlen, seqlen_k, heads, heads_kv, dim, dim_v : int
        Sizes; ``seqlen_k``, ``heads_kv`` and ``dim_v`` default to ``seqlen``, ``heads`` and ``dim``.
    dtype : dtype, default float32
    layout : {"BSHD", "BHSD"}
        Of the arrays.
    **options
        As for `attention`.

    Returns
    -------
    Explanation
        Print it, or read its fields (bytes, FLOPs).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, NoBackendError
        As `attention`.

    Examples
    --------
    >>> import cuflash
    >>> e = cuflash.explain(seqlen=2048, heads=32, dim=128)
    >>> e.scores_per_head // 2**20, e.scores_total // 2**20
    (16, 512)
    """
    missing = [name for name, x in (("q", q), ("k", k), ("v", v)) if x is None]
    if 0 < len(missing) < 3:
        raise ValueError(f"{missing[0]}: missing; explain() takes all of q, k and v, or sizes alone")
    if (seqlen is None) == bool(missing):
        came = "missing" if missing else f"got {seqlen} beside q, k and v"
        raise ValueError(f"seqlen: {came}; explain() takes q, k and v, or sizes from seqlen on")
    if missing:
        sizes = {
            "batch": batch, "seqlen": seqlen, "seqlen_k": seqlen if seqlen_k is None else seqlen_k, "heads": heads,
            "heads_kv": heads if heads_kv is None else heads_kv, "dim": dim, "dim_v": dim if dim_v is None else dim_v,
        }
        q, k, v = shapes_only(sizes, opts.dtype(dtype, "dtype"), layout)
    problem = problems.build_attention(q, k, v, layout=layout, **options)
    return account(problem, planner.choose(problem))


def shapes_only(sizes: dict[str, Any], dtype: np.dtype, layout: str) -> list[np.ndarray]:
    """q, k and v of the given sizes, as broadcast views of one element."""
    may_be_zero = ("batch", "seqlen", "seqlen_k")
    n = {name: checks.integer(size, name, low=0 if name in may_be_zero else 1, high=LARGEST_SIZE) for name, size in sizes.items()}
    checks.choice(layout, "layout", LAYOUTS)
    shapes = [
        (n["batch"], n["seqlen"], n["heads"], n["dim"]),
        (n["batch"], n["seqlen_k"], n["heads_kv"], n["dim"]),
        (n["batch"], n["seqlen_k"], n["heads_kv"], n["dim_v"]),
    ]
    if layout == "BHSD":
        shapes = [(b, h, s, d) for b, s, h, d in shapes]
    return [np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes]


def account(problem: Problem, plan: Plan) -> Explanation:
    """Count FLOPs and bytes of a problem."""
    item = problem.compute_dtype.itemsize
    pairs = problem.heads_q * visible_pairs(problem)
    inputs = sum(math.prod(a.shape) * a.dtype.itemsize for a in (problem.q, problem.k, problem.v))
    matrices = [s.q_length * s.kv_length * item for s in problem.sequences()]  # of one head
    return Explanation(
        flops=2 * pairs * (problem.head_dim + problem.head_dim_v), pairs=pairs,
        scores_per_head=max(matrices, default=0), scores_total=sum(matrices) * problem.heads_q,
        inputs_and_outputs=inputs + math.prod(problem.out_shape) * problem.out_dtype.itemsize,
        workspace=plan.workspace, kernel=plan.kernel, backend=plan.backend, reason=plan.reason, tile=plan.tile,
        declined=plan.declined,
    )


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs of one head that causal, window, kv_lengths and kv_start leave visible."""
    left, right = problem.window
    total = 0
    for s in problem.sequences():
        i = np.arange(s.q_length, dtype=np.int64) + s.position
        low = np.full_like(i, s.kv_start) if left == UNBOUNDED else np.maximum(i - left, s.kv_start)
        high = np.full_like(i, s.kv_length) if right == UNBOUNDED else np.minimum(i + right + 1, s.kv_length)
        total += int(np.maximum(high - low, 0).sum())
    return total


def size(n: int) -> str:
    """Bytes in words: 512 MiB, 1.5 KiB."""
    value, unit = float(n), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
