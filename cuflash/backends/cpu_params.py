"""What the compiled CPU kernels are told: a problem as one record of addresses and strides, and a list of tasks.

Everything a call can vary lies in these records, so a new shape, stride or option never compiles anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ..types import ArrayView, Problem

I64, F64 = np.int64, np.float64

# dtype codes of read_row and store_row
_DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
CODES = {np.dtype(t): code for code, t in enumerate(_DTYPES)}

PARAMS = np.dtype(
    [
        *((f"{name}_{field}", I64) for name in ("q", "k", "v", "out") for field in ("address", "b", "s", "h", "d", "code")),
        *((f"{name}_{field}", I64) for name in ("k_scale", "v_scale") for field in ("address", "b", "s", "h")),  # address 0: none
        *((f"lse_{field}", I64) for field in ("address", "b", "h", "s", "code")),  # address 0: not wanted
        *((f"bias_{field}", I64) for field in ("address", "b", "h", "s", "c", "code")),  # address 0: none
        *((f"mask_{field}", I64) for field in ("address", "b", "h", "s", "c", "tail")),
        ("heads_q", I64),
        ("group", I64),
        ("head_dim", I64),
        ("head_dim_v", I64),
        ("left", I64),  # window sides, -1 unbounded
        ("right", I64),
        ("page_size", I64),  # 0: not paged
        ("max_pages", I64),
        ("distance", I64),  # score="sqdist"
        ("alibi", I64),
        ("sinks", I64),
        ("tile_keys", I64),
        ("block_rows", I64),
        ("scale", F64),
        ("softcap", F64),  # 0: none
    ],
    align=True,
)

SEQUENCE = np.dtype(
    [(f, I64) for f in ("q_begin", "q_length", "k_begin", "kv_length", "kv_start", "position")], align=True
)

# A task is a few *packed rows* of one sequence and one key/value head, against keys k_begin <= j < k_end. Packed row t
# is query row t // group of head kv_head * group + t % group: the heads that share keys share the packed tiles, too.
TASK = np.dtype([(f, I64) for f in ("batch", "kv_head", "first", "rows", "k_begin", "k_end", "slot")], align=True)
# Partial results of slots slot .. slot + slots - 1 become the rows of one task.
MERGE = np.dtype([(f, I64) for f in ("batch", "kv_head", "first", "rows", "slot", "slots")], align=True)


@dataclass(frozen=True, slots=True)
class Tables:
    """The arrays that a problem is turned into; they own nothing of the user's and keep nothing of it alive."""

    params: np.ndarray  # (1,) PARAMS
    sequences: np.ndarray  # (B,) SEQUENCE
    pages: np.ndarray  # (B * max_pages,) int64
    slopes: np.ndarray  # (B * Hq,) float64
    sinks: np.ndarray  # (Hq,) float64
    weights: np.ndarray  # (D,) compute dtype: the scale of each squared difference


def sequence_table(problem: Problem) -> np.ndarray:
    """``problem.sequences()`` as an array."""
    table = np.array([sequence[1:] for sequence in problem.sequences()], SEQUENCE).reshape(problem.batch)
    return table


def tables(problem: Problem, sequences: np.ndarray, tile_keys: int, block_rows: int) -> Tables:
    """Everything but the tasks; ``block_rows`` is the most rows that a task has."""
    params = np.zeros(1, PARAMS)
    p = params[0]
    for name in ("q", "k", "v", "out"):
        view: ArrayView = getattr(problem, name)
        packed = len(view.shape) == 3
        strides = (0, *view.strides) if packed else view.strides
        _fill(p, name, view, ("b", "s", "h", "d"), strides)
    for name in ("k_scale", "v_scale"):
        scale: ArrayView | None = getattr(problem, name)
        if scale is not None:
            p[f"{name}_address"] = scale.pointer
            for axis, stride in zip("bsh"[-len(scale.shape):], scale.strides, strict=True):
                p[f"{name}_{axis}"] = stride
    if problem.lse is not None:
        strides = (0, *problem.lse.strides) if problem.varlen else problem.lse.strides
        _fill(p, "lse", problem.lse, ("b", "h", "s"), strides)
    if problem.bias is not None:
        _fill(p, "bias", problem.bias, ("b", "h", "s", "c"), problem.bias.strides)
    if problem.mask is not None:
        p["mask_address"] = problem.mask.pointer
        for field, stride in zip(("b", "h", "s", "c"), problem.mask.strides, strict=True):
            p[f"mask_{field}"] = stride
        p["mask_tail"] = problem.mask_is_tail
    p["heads_q"], p["group"] = problem.heads_q, problem.group_size
    p["head_dim"], p["head_dim_v"] = problem.head_dim, problem.head_dim_v
    p["left"], p["right"] = problem.window
    p["distance"] = problem.score == "sqdist"
    p["tile_keys"], p["block_rows"] = tile_keys, block_rows
    p["softcap"] = problem.softcap
    empty = np.zeros(0)
    slopes = sinks = empty
    pages = np.zeros(0, I64)
    if problem.page_table is not None:
        pages = np.ascontiguousarray(problem.page_table, I64).reshape(-1)
        p["page_size"], p["max_pages"] = problem.page_size, problem.page_table.shape[1]
    if problem.alibi_slopes is not None:
        slopes = np.ascontiguousarray(problem.alibi_slopes, F64).reshape(-1)
        p["alibi"] = 1
    if problem.sinks is not None:
        sinks = np.ascontiguousarray(problem.sinks, F64)
        p["sinks"] = 1
    weights = np.ones(problem.head_dim, problem.compute_dtype)
    if problem.score == "sqdist":
        weights *= np.asarray(problem.scale, problem.compute_dtype)
        p["scale"] = 1.0
    else:
        p["scale"] = problem.scale
    return Tables(params, sequences, pages, slopes, sinks, weights)


def _fill(p: np.void, name: str, view: ArrayView, axes: tuple[str, ...], strides: tuple[int, ...]) -> None:
    p[f"{name}_address"] = view.pointer
    p[f"{name}_code"] = CODES[view.dtype]
    for axis, stride in zip(axes, strides, strict=True):
        p[f"{name}_{axis}"] = stride


@dataclass(frozen=True, slots=True)
class Tasks:
    """Work in the order in which it should start, and where to cut it into portions."""

    tasks: np.ndarray  # (n,) TASK, most expensive first
    portions: list[tuple[int, int]]  # index ranges worth handing to a thread
    merges: np.ndarray  # (m,) MERGE
    slots: int  # partial results
    cost: float  # multiply-adds, about


def block_ranges(problem: Problem, sequences: np.ndarray, block_rows: int) -> dict[str, np.ndarray]:
    """The row blocks of every sequence and the keys that some row of each block can see."""
    group = problem.group_size
    packed = sequences["q_length"] * group
    blocks = -(-packed // block_rows)
    batch = np.repeat(np.arange(len(sequences)), blocks)
    within = np.arange(len(batch)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    s = sequences[batch]
    first = within * block_rows
    rows = np.minimum(block_rows, packed[batch] - first)
    left, right = problem.window
    low, high = s["kv_start"], s["kv_length"]
    if left >= 0:
        low = np.maximum(low, first // group + s["position"] - left)
    if right >= 0:
        high = np.minimum(high, (first + rows - 1) // group + s["position"] + right + 1)
    return dict(batch=batch, first=first, rows=rows, low=low, high=np.maximum(low, high))


def plan_tasks(
    problem: Problem, sequences: np.ndarray, block_rows: int, splits: np.ndarray, portions: int, portion_cost: float
) -> Tasks:
    """Cut a problem into tasks.

    ``splits`` says into how many parts the keys of each sequence are cut. Tasks are handed out in portions of at least
    ``portion_cost``, about ``portions`` of them if the tasks are small.
    """
    blocks = block_ranges(problem, sequences, block_rows)
    heads = np.tile(np.arange(problem.heads_kv), len(blocks["batch"]))
    blocks = {name: np.repeat(values, problem.heads_kv) for name, values in blocks.items()}
    parts = splits[blocks["batch"]]
    owner = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(parts) - parts, parts)
    low, high = blocks["low"][owner], blocks["high"][owner]
    step = -(-(high - low) // parts[owner])  # keys of a part, rounded up
    tasks = np.zeros(len(owner), TASK)
    tasks["batch"], tasks["kv_head"] = blocks["batch"][owner], heads[owner]
    tasks["first"], tasks["rows"] = blocks["first"][owner], blocks["rows"][owner]
    tasks["k_begin"] = np.minimum(low + part * step, high)
    tasks["k_end"] = np.minimum(tasks["k_begin"] + step, high)
    split = parts[owner] > 1
    slots = int(np.count_nonzero(split))
    tasks["slot"] = np.where(split, np.cumsum(split) - 1, -1)
    merged = np.flatnonzero(parts > 1)
    merges = np.zeros(len(merged), MERGE)
    merges["batch"], merges["kv_head"] = blocks["batch"][merged], heads[merged]
    merges["first"], merges["rows"] = blocks["first"][merged], blocks["rows"][merged]
    merges["slots"] = parts[merged]
    merges["slot"] = np.cumsum(merges["slots"]) - merges["slots"]

    width = problem.head_dim + problem.head_dim_v
    cost = (tasks["k_end"] - tasks["k_begin"] + 16.0) * (tasks["rows"] + 8.0) * (width + 16)
    order = np.argsort(-cost, kind="stable")
    total = float(cost.sum())
    return Tasks(tasks[order], _portions(cost[order], max(portion_cost, total / portions)), merges, slots, total)


def _portions(cost: np.ndarray, portion_cost: float) -> list[tuple[int, int]]:
    """Consecutive tasks that together cost about ``portion_cost``; expensive tasks stay alone."""
    if not len(cost):
        return []
    bins = (np.cumsum(cost) - cost) // portion_cost
    edges = [0, *(np.flatnonzero(np.diff(bins)) + 1).tolist(), len(cost)]
    return list(zip(edges[:-1], edges[1:], strict=True))
