"""What the compiled backward pass is told beyond cpu_params: gradients, workspace, and how the work is cut up.

A *unit* is one sequence with one key/value head. Its packed rows (see cpu_params.TASK) have consecutive lanes in the
workspace, from a whole panel on. A task of the key phase is a unit against a range of keys: it owns dK and dV of these
keys, and adds up its share of the unit's dQ in a *slot* of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..types import Problem
from .cpu_params import CODES, F64, I64, TASK, _fill, _portions

WORKSPACE = (  # addresses; numbers of the compute dtype, then int64
    "qt", "dot", "dqt", "slope", "lse", "factor", "delta", "position", "first", "last", "bias", "mask", "refine", "limits", "strange",
)  # fmt: skip

GRADIENTS = np.dtype(
    [
        *((f"{name}_{field}", I64) for name in ("dout", "dq", "dk", "dv") for field in ("address", "b", "s", "h", "d", "code")),
        *((f"dlse_{field}", I64) for field in ("address", "b", "h", "s", "code")),  # address 0: none
        # address 0: none; wide: float64 sums; lost: from a sum to what its additions lost, 0 if that is not kept
        *((f"dbias_{field}", I64) for field in ("address", "b", "h", "s", "c", "wide", "lost")),
        *((f"{name}_at", I64) for name in WORKSPACE),
        ("rounded", I64),  # out has fewer digits than the compute dtype
        ("few_keys", I64),  # see cpu_backward.py
        ("few_rows", I64),
        ("large_lse", F64),
    ],
    align=True,
)

UNIT = np.dtype([(f, I64) for f in ("lane", "lanes", "rows", "dq_lane", "slots")], align=True)


class Sizes(NamedTuple):
    """Padded sizes that kernels and workspace agree on."""

    panel: int  # query rows of a panel
    columns: int  # elements of a row of K, dK and Q: whole vectors and whole micro-kernels
    columns_v: int
    tile_keys: int


@dataclass(frozen=True, slots=True)
class GradientWork:
    """A backward pass cut up."""

    sequences: np.ndarray  # (B,) SEQUENCE
    units: np.ndarray  # (B * Hkv,) UNIT
    rows: np.ndarray  # TASK: row blocks, for the phases before and after
    row_portions: list[tuple[int, int]]
    keys: np.ndarray  # TASK: key ranges, most expensive first
    key_portions: list[tuple[int, int]]
    lanes: int
    dq_lanes: int
    threads: int
    sizes: Sizes

    def workspace(self, problem: Problem) -> int:
        """Bytes that all threads share."""
        numbers = self.lanes * (problem.head_dim + problem.head_dim_v + 4) + self.dq_lanes * self.sizes.columns
        return numbers * problem.compute_dtype.itemsize + 8 * (6 * self.lanes + 5 * (self.lanes // self.sizes.panel))


class Sharing(NamedTuple):
    """Which tasks of the key phase add to the same numbers, and so must follow each other in one thread."""

    batches: bool
    heads: bool
    keys: bool


def sharing(problem: Problem) -> Sharing:
    """Broadcast axes of the bias, whose gradient is summed, and pages that several sequences read."""
    batches = heads = keys = False
    if problem.bias is not None:
        b, h, _, c = bias_sizes(problem)
        batches, heads, keys = b < problem.batch, h < problem.heads_q, c < problem.seqlen_k
    if problem.paged and pages_are_shared(problem):
        batches = keys = True
    return Sharing(batches, heads, keys)


def bias_sizes(problem: Problem) -> tuple[int, ...]:
    """The four axes of the bias before it was broadcast."""
    shape = problem.bias.shape if problem.bias_shape is None else problem.bias_shape
    return (1,) * (4 - len(shape)) + tuple(shape)


def pages_are_shared(problem: Problem) -> bool:
    used = [problem.page_table[s.index, : -(-s.kv_length // problem.page_size)] for s in problem.sequences()]
    used = np.concatenate([np.zeros(0, I64), *used])
    return len(np.unique(used)) < len(used)


def plan_work(problem: Problem, sequences: np.ndarray, sizes: Sizes, threads: int, block_rows: int, thread_cost: float) -> GradientWork:
    """Units, row blocks and key ranges."""
    heads = problem.heads_kv
    packed = np.repeat(sequences["q_length"] * problem.group_size, heads)
    units = np.zeros(len(packed), UNIT)
    units["rows"], units["lanes"] = packed, -(-packed // sizes.panel) * sizes.panel
    units["lane"] = np.cumsum(units["lanes"]) - units["lanes"]
    rows = _row_tasks(sequences, units, heads, block_rows)
    keys, cost = _key_tasks(problem, sequences, units, sizes, threads)
    units["slots"] = np.bincount(keys["batch"] * heads + keys["kv_head"], minlength=len(units)) if len(keys) else 0
    units["dq_lane"] = np.cumsum(units["lanes"] * units["slots"]) - units["lanes"] * units["slots"]
    order, key_portions = _in_portions(keys, cost, sharing(problem), sizes, threads, thread_cost)
    total = float(cost.sum())
    row_cost = rows["rows"].astype(F64)
    return GradientWork(
        sequences=sequences,
        units=units,
        rows=rows,
        row_portions=_portions(row_cost, max(1.0, float(row_cost.sum()) / (8 * threads))),
        keys=keys[order],
        key_portions=key_portions,
        lanes=int(units["lanes"].sum()),
        dq_lanes=int((units["lanes"] * units["slots"]).sum()),
        threads=max(1, min(threads, int(total / thread_cost))),
        sizes=sizes,
    )


def _row_tasks(sequences: np.ndarray, units: np.ndarray, heads: int, block_rows: int) -> np.ndarray:
    """Blocks of packed rows of every unit, which see all the keys of their sequence."""
    blocks = -(-units["rows"] // block_rows)
    unit = np.repeat(np.arange(len(units)), blocks)
    tasks = np.zeros(len(unit), TASK)
    tasks["batch"], tasks["kv_head"] = (unit // heads, unit % heads) if heads else (0, 0)
    tasks["first"] = (np.arange(len(unit)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block_rows
    tasks["rows"] = np.minimum(block_rows, units["rows"][unit] - tasks["first"])
    tasks["k_begin"], tasks["k_end"] = sequences["kv_start"][tasks["batch"]], sequences["kv_length"][tasks["batch"]]
    return tasks


def _key_tasks(problem: Problem, sequences: np.ndarray, units: np.ndarray, sizes: Sizes, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Key ranges of every unit, of whole tiles, and what each costs."""
    heads, tile = problem.heads_kv, sizes.tile_keys
    first = np.repeat(sequences["kv_start"], heads) // tile
    tiles = np.maximum(-(-np.repeat(sequences["kv_length"], heads) // tile) - first, 0)
    tiles[units["rows"] == 0] = 0
    cost = units["rows"] * tiles.astype(F64)
    # As few ranges as keep the threads busy: every range of a unit has a dQ of its own.
    parts = np.minimum(np.ceil(cost * 2 * threads / max(float(cost.sum()), 1.0)).astype(I64), tiles)
    if threads == 1:
        parts = np.minimum(tiles, 1)
    step = -(-tiles // np.maximum(parts, 1))
    shared = sharing(problem)
    if shared.batches or shared.heads:  # ranges of the same keys, so that those of one range can follow each other
        first[:] = 0
        tiles = np.where(units["rows"] > 0, -(-np.repeat(sequences["kv_length"], heads) // tile), 0)
        step[:] = -(-int(tiles.max(initial=1)) // (2 * threads)) if threads > 1 else max(1, int(tiles.max(initial=1)))
    parts = np.where(tiles > 0, -(-tiles // np.maximum(step, 1)), 0)
    unit = np.repeat(np.arange(len(units)), parts)
    slot = np.arange(len(unit)) - np.repeat(np.cumsum(parts) - parts, parts)
    tasks = np.zeros(len(unit), TASK)
    tasks["batch"], tasks["kv_head"] = (unit // heads, unit % heads) if heads else (0, 0)
    tasks["rows"], tasks["slot"] = units["rows"][unit], slot
    s = sequences[tasks["batch"]]
    begin = (first[unit] + slot * step[unit]) * tile
    tasks["k_begin"] = np.minimum(np.maximum(begin, s["kv_start"]), s["kv_length"])
    tasks["k_end"] = np.maximum(tasks["k_begin"], np.minimum(begin + step[unit] * tile, s["kv_length"]))
    return tasks, _key_cost(problem, s, tasks)


def _key_cost(problem: Problem, s: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Multiply-adds of each range, going by the rows that some of its keys are visible to."""
    left, right = problem.window
    low, high = np.zeros(len(tasks), I64), s["q_length"]
    if right >= 0:
        low = np.maximum(low, tasks["k_begin"] + np.maximum(tasks["k_end"] - 1 - tasks["k_begin"], 0) // 2 - right - s["position"])
    if left >= 0:
        high = np.minimum(high, tasks["k_end"] - 1 + left + 1 - s["position"])
    rows = np.maximum(high - low, 0) * problem.group_size + 8.0
    return (tasks["k_end"] - tasks["k_begin"] + 16.0) * rows * (3 * problem.head_dim + 2 * problem.head_dim_v + 32)


def _in_portions(
    tasks: np.ndarray, cost: np.ndarray, shared: Sharing, sizes: Sizes, threads: int, thread_cost: float
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Order of the tasks and the ranges to hand out: expensive ones first, and such that no two threads add to one number."""
    if not any(shared):
        order = np.argsort(-cost, kind="stable")
        return order, _portions(cost[order], max(thread_cost / 4, float(cost.sum()) / (16 * threads)))
    groups = np.stack([
        np.zeros_like(tasks["batch"]) if shared.batches else tasks["batch"],
        np.zeros_like(tasks["batch"]) if shared.heads else tasks["kv_head"],
        np.zeros_like(tasks["batch"]) if shared.keys else tasks["slot"],
    ])  # fmt: skip
    order = np.lexsort(groups)  # stable: within a group in the order of batch, head and keys
    edges = np.flatnonzero(np.diff(groups[:, order], axis=1).any(axis=0)) + 1
    edges = [0, *edges.tolist(), len(tasks)] if len(tasks) else [0]
    portions = list(itertools.pairwise(edges))
    portions.sort(key=lambda p: -cost[order[p[0] : p[1]]].sum())
    return order, portions


def gradient_record(problem: Problem) -> np.ndarray:
    """The incoming gradients; results and workspace are filled in by the caller."""
    record = np.zeros(1, GRADIENTS)
    g = record[0]
    _fill_rows(g, "dout", problem.dout)
    if problem.dlse is not None:
        strides = (0, *problem.dlse.strides) if problem.varlen else problem.dlse.strides
        _fill(g, "dlse", problem.dlse, ("b", "h", "s"), strides)
    g["rounded"] = problem.out.dtype.itemsize < problem.compute_dtype.itemsize
    return record


def _fill_rows(g: np.void, name: str, view) -> None:
    _fill(g, name, view, ("b", "s", "h", "d"), (0, *view.strides) if len(view.shape) == 3 else view.strides)


def fill_result(g: np.void, name: str, array: np.ndarray) -> None:
    """Where dq, dk or dv lies."""
    g[f"{name}_address"], g[f"{name}_code"] = array.ctypes.data, CODES[array.dtype]
    strides = (0, *array.strides) if array.ndim == 3 else array.strides
    for axis, stride in zip(("b", "s", "h", "d"), strides, strict=True):
        g[f"{name}_{axis}"] = stride
