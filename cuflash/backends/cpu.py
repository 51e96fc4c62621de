"""The CPU backend: plans in words and numbers, and the way from a problem to the compiled kernels.

Kernels: "fa2" (tiles of query rows by tiles of keys), "decode" (the same, with the keys of a sequence split over the
threads and the parts merged) and "naive" (naive.py; attention_weights: cpu_weights.py). A Python score_mod or mask_mod runs
on tiles in NumPy (cpu_callable.py). Numba is imported at the first run, not before.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import numpy as np

from ..types import Gradients, Plan, Problem
from . import cpu_backward, cpu_threads, cpu_weights, naive
from .cpu_params import Tasks, plan_tasks, sequence_table, tables

NAME = "cpu"
KERNELS = TAKES_E4M3 = ("fa2", "decode", "naive")

SHORT_ROWS = 32  # packed query rows (rows x heads of a group) up to which "auto" decodes
INVARIANT_ROWS = 128  # of a block, and
INVARIANT_KEYS = 2048  # keys of a split when a sequence's result must not depend on its neighbours
SPLIT_KEYS = 512  # a split of fewer keys is not worth a thread
THREAD_COST = 2e6  # multiply-adds for which waking a thread pays
LEAST_ROWS, MOST_ROWS = 64, 1024  # of a block
BLOCKS_PER_THREAD = 8
PORTIONS = 16  # per thread: small tasks are handed out in portions


def auto_kernels(problem: Problem) -> tuple[str, ...]:
    """Kernels for kernel="auto", best first."""
    if problem.op == "backward":
        return (cpu_backward.KERNEL,)
    if problem.op == "weights":
        return (cpu_weights.KERNEL,)
    short = problem.op == "decode" or problem.seqlen_q * problem.group_size <= SHORT_ROWS
    return ("decode", "fa2") if short else ("fa2",)


def decline(problem: Problem, kernel: str) -> str | None:
    """Why the CPU cannot do this, or None."""
    for name in ("score_mod", "mask_mod"):
        if isinstance(getattr(problem, name), str):
            return f"{name} is a CUDA expression; the CPU backend takes a Python callable on NumPy arrays"
    if problem.op == "backward" and kernel != cpu_backward.KERNEL:
        return f"the backward pass of the CPU backend is kernel {cpu_backward.KERNEL!r}"
    if problem.op == "weights":
        return cpu_weights.decline(problem, kernel)
    if kernel == "naive":
        return naive.decline(problem)
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0") and not _has_callable(problem):
        return "the environment variable NUMBA_DISABLE_JIT forbids to compile its kernels; unset it, or ask for kernel='naive'"
    return None


def tile_keys(problem: Problem) -> int:
    """Keys of a tile. They follow from head size and dtype alone, because they group the sums of a row."""
    return 128 if max(problem.head_dim, problem.head_dim_v) * problem.compute_dtype.itemsize <= 1024 else 64


def block_rows(problem: Problem, sequences: np.ndarray) -> int:
    """Packed query rows of a block; no result depends on them.

    Keys and values are packed once per block, so blocks are as large as they can be without leaving a thread idle. Their
    queries and outputs need not fit a cache: they stream by, panel after panel.
    """
    if problem.batch_invariant:  # the rows of a block share their splits and how they treat a NaN in V
        return INVARIANT_ROWS
    packed = sequences["q_length"] * problem.group_size
    enough = BLOCKS_PER_THREAD * cpu_threads.thread_count()
    rows = MOST_ROWS
    while rows > LEAST_ROWS and int((-(-packed // rows)).sum()) * problem.heads_kv < enough:
        rows //= 2
    return rows


def _has_callable(problem: Problem) -> bool:
    return problem.score_mod is not None or problem.mask_mod is not None


def _splits(problem: Problem, kernel: str, sequences: np.ndarray, rows: int) -> np.ndarray:
    """Parts that the keys of each sequence are cut into."""
    lengths = np.maximum(sequences["kv_length"] - sequences["kv_start"], 1)
    packed = sequences["q_length"] * problem.group_size
    if problem.num_splits is not None:
        return np.minimum(problem.num_splits, -(-lengths // tile_keys(problem)))  # a part is at least a tile
    if problem.batch_invariant:  # by the sequence's own lengths alone
        return np.where(packed <= SHORT_ROWS, -(-lengths // INVARIANT_KEYS), 1)
    if kernel != "decode":
        return np.ones_like(lengths)
    cost = float((lengths * packed).sum()) * problem.heads_kv * (problem.head_dim + problem.head_dim_v)
    threads = min(cpu_threads.thread_count(), int(cost / THREAD_COST))
    items = int((-(-packed // rows)).sum()) * problem.heads_kv
    if threads <= 1 or items >= 4 * threads or not items:
        return np.ones_like(lengths)
    # Few tasks: so many parts that the threads share the work evenly, but none too short.
    return np.clip(-(-2 * threads // items), 1, -(-lengths // SPLIT_KEYS))


class Work(NamedTuple):
    """A problem cut up."""

    sequences: np.ndarray  # SEQUENCE
    tasks: Tasks
    threads: int  # worth using
    rows: int  # of a block, at most

    @property
    def most_rows(self) -> int:
        """Rows of the largest task."""
        return int(self.tasks.tasks["rows"].max(initial=0))

    @property
    def tables_bytes(self) -> int:
        return self.tasks.tasks.nbytes + self.tasks.merges.nbytes + self.sequences.nbytes

    def partial_numbers(self, problem: Problem) -> int:
        """Numbers that the partial results of split sequences need."""
        return self.tasks.slots * self.most_rows * (problem.head_dim_v + 2)


def cut_up(problem: Problem, kernel: str) -> Work:
    """Sequences, tasks and the number of threads worth using."""
    sequences = sequence_table(problem)
    rows = block_rows(problem, sequences)
    splits = _splits(problem, kernel, sequences, rows)
    threads = cpu_threads.thread_count()
    tasks = plan_tasks(problem, sequences, rows, splits, threads * PORTIONS, THREAD_COST / 4)
    return Work(sequences, tasks, max(1, min(threads, len(tasks.portions), int(tasks.cost / THREAD_COST))), rows)


# Plans of the last calls: the layers of a model ask for the same one again and again, and making one costs as much as
# the attention of a short sequence.
_recent: dict[tuple, Plan] = {}
_MOST_RECENT, _LARGEST_RECENT = 64, 1 << 18  # plans, bytes of a plan's tables


def plan(problem: Problem, kernel: str) -> Plan:
    """Tile, splits, threads and workspace."""
    if problem.op == "backward":
        return cpu_backward.plan(problem, kernel)
    if problem.op == "weights":
        return cpu_weights.plan(problem, NAME)
    if kernel == "naive":
        return naive.plan(problem, NAME)
    if _has_callable(problem):
        from . import cpu_callable

        return cpu_callable.plan(problem, kernel, NAME)
    key = (kernel, cpu_threads.thread_count(), *_plan_depends_on(problem))
    known = _recent.get(key)
    if known is None:
        known = _make_plan(problem, kernel)
        if known.extra.tables_bytes > _LARGEST_RECENT:
            return known
        if len(_recent) >= _MOST_RECENT:
            _recent.clear()
        _recent[key] = known
    return known


def _plan_depends_on(problem: Problem) -> tuple:
    """Everything of a problem that its plan is made from: sizes and lengths, no addresses, strides or contents."""
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, problem.kv_lengths, problem.kv_start)
    return (
        problem.batch, problem.seqlen_q, problem.seqlen_k, problem.heads_q, problem.heads_kv, problem.head_dim, problem.head_dim_v,
        problem.compute_dtype.itemsize, problem.window, problem.align, problem.num_splits, problem.batch_invariant,
        *(None if a is None else a.tobytes() for a in lengths),
    )


def _make_plan(problem: Problem, kernel: str) -> Plan:
    work = cut_up(problem, kernel)
    itemsize = problem.compute_dtype.itemsize
    rows, keys = _padded(work.most_rows), tile_keys(problem) + 8
    width = problem.head_dim + problem.head_dim_v + 8
    scratch = (rows * (width + 3) + keys * (width + 2 * 64) + 512) * itemsize + 48 * rows
    splits = int(work.tasks.merges["slots"].max(initial=1))
    return Plan(
        kernel=kernel,
        backend=NAME,
        reason=_reason(problem, kernel, work.threads, splits),
        tile=(work.rows, tile_keys(problem)),
        num_splits=splits,
        threads=work.threads,
        workspace=work.threads * scratch + work.partial_numbers(problem) * itemsize + work.tables_bytes,
        extra=work,
    )


def _padded(rows: int) -> int:
    return -(-rows // 64) * 64


def _reason(problem: Problem, kernel: str, threads: int, splits: int) -> str:
    text = f"{problem.compute_dtype} arithmetic in tiles on {threads} thread{'s' if threads > 1 else ''}"
    if splits > 1:
        text += f", keys of a sequence in up to {splits} parts"
    if kernel == "decode":
        text += "; few query rows per key/value head, so the heads that share keys share the tiles"
    return text


@functools.cache
def _kernels():
    from . import cpu_kernels

    return cpu_kernels


def run(plan: Plan, problem: Problem) -> None:
    """Write ``problem.out`` and, unless it is None, ``problem.lse``."""
    _clear_unowned_rows(problem)
    if plan.kernel == "naive":
        naive.run(plan, problem)
        return
    if _has_callable(problem):
        from . import cpu_callable

        cpu_callable.run(plan, problem)
        return
    _attend(problem, plan.extra)


def run_weights(plan: Plan, problem: Problem) -> None:
    """Write ``problem.weights``."""
    cpu_weights.run(plan, problem)


def run_backward(plan: Plan, problem: Problem) -> Gradients:
    """Gradients in canonical axis order, each in the dtype of what it belongs to."""
    return cpu_backward.run(plan, problem)


def _clear_unowned_rows(problem: Problem) -> None:
    """Packed rows of no sequence, and everything if there is no sequence: O = 0 and LSE = -inf."""
    if not problem.varlen:
        return
    end = int(problem.cu_seqlens_q[-1])
    problem.out.array[end:] = 0
    if problem.lse is not None:
        problem.lse.array[:, end:] = -np.inf


def _attend(problem: Problem, work: Work) -> None:
    sequences, tasks, threads = work.sequences, work.tasks, work.threads
    if not len(tasks.tasks):
        return
    itemsize = problem.compute_dtype.itemsize
    attend = _kernels().compiled_attend(itemsize)
    keys, rows = tile_keys(problem), work.most_rows
    t = tables(problem, sequences, keys, rows)
    one = problem.compute_dtype.type(1)
    partials = np.empty(work.partial_numbers(problem), problem.compute_dtype)
    weights_at, partials_at = t.weights.ctypes.data, partials.ctypes.data
    numbers, integers = _kernels().scratch_sizes(problem.head_dim, problem.head_dim_v, rows, keys, itemsize)
    no_merge = tasks.merges[:0]

    def worker():
        scratch = np.empty(numbers * itemsize + 8 * integers + 64, np.uint8)
        work_at = -(-scratch.ctypes.data // 64) * 64
        iwork_at = work_at + numbers * itemsize

        # The kernel sees addresses only: the function that calls it holds what lies there.
        def portion(bounds: tuple[int, int], merges: np.ndarray = no_merge, keep: tuple = (scratch, partials, problem)) -> None:
            attend(
                one, tasks.tasks, *bounds, merges, t.params, sequences, t.pages, t.slopes, t.sinks,
                weights_at, work_at, iwork_at, partials_at,
            )

        return portion

    cpu_threads.run(worker, tasks.portions, threads)
    if len(tasks.merges):
        worker()((0, 0), tasks.merges)
