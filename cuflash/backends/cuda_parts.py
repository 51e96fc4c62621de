"""Keys split over the grid in float32 and float64: when, into how many parts, and the launches of prefill_fp.cu and combine_fp.cu.

cuda_decode.py is the same for 16 bits, with a kernel of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import jit, launch, structs, tiles, tiles_fp
from ..device import DeviceInfo
from ..types import UNBOUNDED, ArrayView, Plan, Problem, name_of
from . import cuda_decode, cuda_fp
from .cuda_instance import CUDA_TYPES, ITEMSIZE, LARGEST_GRID, MASK_ARRAY, MASK_RIGHT, SHORT_TYPES, loaded

MOST_PARTS = 128  # of a sequence, unless num_splits says so
LEAST_TILES = 4  # of keys, of a part
# What decides on the number of parts, in the time that a warp takes for a tile of keys: what a block, and what a part more, cost beside
# their keys; and how much longer tiles take where a scheduler has but one warp. From measurements on an H200.
START, MERGE, ALONE = 2, 1 / 32, 1.4
SCHEDULERS = 4  # of a multiprocessor
COMBINE_THREADS = 128  # of a block


@dataclass(frozen=True)
class Instance(cuda_fp.Instance):
    """What is fixed when prefill_fp is compiled for parts, whose results are of the type that is computed in: ``out`` is ``dtype``."""

    PARAMS = "PartParams"

    @property
    def tile_words(self) -> list[str]:
        return [*super().tile_words, "parts"]

    @property
    def arguments(self) -> list[Any]:
        return [*super().arguments, *[False] * (not self.paged), True]


@dataclass(frozen=True)
class Split:
    """How keys are split."""

    parts: int  # of a sequence, at most
    least: int  # tiles of a part, at least
    blocks: int  # of one part of all sequences
    out: str  # dtype of the results

    @property
    def grid(self) -> int:
        return self.blocks * self.parts


def packs(problem: Problem) -> bool:
    """Whether the rows of a block are the query heads of a key/value head: nothing must tell those apart but their queries and sinks."""
    return problem.seqlen_q == 1 and all(a is None for a in (problem.alibi_slopes, problem.bias, problem.mask))


def _rows(problem: Problem) -> int:
    """Rows of results, each of which a block merges."""
    return problem.batch * problem.heads_q * problem.seqlen_q


def few(problem: Problem) -> bool:
    """Whether a block has so few rows that reading keys and values takes the time, and not products."""
    return (problem.group_size if packs(problem) else problem.seqlen_q) <= tiles_fp.FEW_ROWS


def instance(problem: Problem, mask: int, score: int, info: DeviceInfo) -> Instance | None:
    """The kernel instance, or None if the keys are better left whole, or cannot be split."""
    if problem.varlen or _rows(problem) > LARGEST_GRID:
        return None
    dtype = name_of(problem.q.dtype)
    kind = tiles_fp.arithmetic(dtype, problem.precision, info)
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    if few(problem):
        tile = tiles_fp.few_rows(kind, dtype, d, dv, info)
    else:
        tile = tiles_fp.prefill_fp(kind, dtype, d, dv, info, problem.bias is not None and problem.mask is not None)
    if tile is None:
        return None
    if problem.seqlen_q == 1:
        mask &= MASK_ARRAY  # what one position sees is known before
    load = cuda_fp.width(structs.copy_bytes((problem.q, problem.k, problem.v)), dtype)
    chosen = Instance(dtype, dtype, d, dv, tile, mask, score, load, problem.paged, kind=kind)
    return chosen if _wanted(problem, chosen, info) else None


def _wanted(problem: Problem, chosen: Instance, info: DeviceInfo) -> bool:
    if problem.num_splits is not None:
        return problem.num_splits > 1 or few(problem)
    if problem.batch_invariant:  # the batch must not decide; and attention() has the bits of attention_varlen(), whose keys stay whole
        return problem.op == "decode" and problem.seqlen_q <= cuda_decode.MOST_QUERIES
    full = blocks(problem, chosen) >= info.multiprocessors * chosen.tile.resident
    if full and key_tiles(problem, chosen) <= LEAST_TILES:
        return False  # to merge the one part would take longer than its keys
    return few(problem) or packs(problem) or _idles(problem, chosen, info)


def _idles(problem: Problem, chosen: cuda_fp.Instance, info: DeviceInfo) -> bool:
    """Whether half of the GPU would have nothing to do while blocks go through many keys."""
    idle = 2 * blocks(problem, chosen) <= info.multiprocessors * chosen.tile.resident
    return idle and key_tiles(problem, chosen) >= 2 * LEAST_TILES


def why_whole(problem: Problem, chosen: cuda_fp.Instance, info: DeviceInfo) -> str:
    """In words, why keys are not split though that would help; "" if it would not."""
    if problem.num_splits is not None or not _idles(problem, chosen, info):
        return ""
    if problem.varlen:
        return "; keys of packed sequences are not split"
    return f"; keys are not split, as batch_invariant splits those of decode() with at most {cuda_decode.MOST_QUERIES} queries"


def blocks(problem: Problem, chosen: cuda_fp.Instance) -> int:
    """Blocks of one part of all sequences."""
    heads, rows = (problem.heads_kv, problem.group_size) if packs(problem) else (problem.heads_q, problem.seqlen_q)
    return problem.batch * heads * -(-rows // chosen.tile.m) * chosen.slices


def key_tiles(problem: Problem, chosen: cuda_fp.Instance) -> int:
    """Tiles of keys that the rows of a sequence see together, at most."""
    n, (left, right) = chosen.tile.n, problem.window
    tiles_of_all = max(1, -(-problem.seqlen_k // n))
    if UNBOUNDED in (left, right):
        return tiles_of_all
    return min(tiles_of_all, -(-(left + right + problem.seqlen_q) // n) + 1)


def split(problem: Problem, chosen: Instance, info: DeviceInfo) -> Split:
    """How the keys are split; of lengths it knows no more than what they are at most."""
    in_part, total, least = max(1, blocks(problem, chosen)), key_tiles(problem, chosen), 1
    if problem.num_splits is not None:
        parts = min(problem.num_splits, total)
    elif problem.batch_invariant:
        least = max(1, cuda_decode.INVARIANT_KEYS // chosen.tile.n)
        parts = min(cuda_decode.INVARIANT_PARTS, -(-total // least))
    else:
        least, warps = LEAST_TILES, chosen.tile.threads // 32

        def time(parts: int) -> float:
            each = -(-in_part * parts * warps // (info.multiprocessors * SCHEDULERS))  # warps of a scheduler, one after the other
            alone = min(each, chosen.tile.resident * warps // SCHEDULERS) < 2
            return each * (-(-total // parts) + START) * (ALONE if alone else 1) + MERGE * parts

        parts = min(range(1, max(1, min(MOST_PARTS, total // least)) + 1), key=time)
    parts = max(1, min(parts, LARGEST_GRID // in_part))
    return Split(parts, least, blocks(problem, chosen), name_of(problem.out_dtype))


def plan(problem: Problem, chosen: Instance, info: DeviceInfo) -> Plan:
    """How the keys are split."""
    t, how = chosen.tile, split(problem, chosen, info)
    shared = f"the {problem.group_size} query heads of a key/value head" if packs(problem) else f"the queries ({problem.seqlen_q})"
    cut = "cut by its own length alone, " if problem.batch_invariant and problem.num_splits is None else ""
    why = (
        f"{cuda_fp.why(chosen)}, {t.m} rows x {t.n} keys a block for {shared}; {cut}keys of a sequence in at most {how.parts} parts over "
        f"{how.grid} blocks, brought together by a second kernel, on {info.name}"
    )
    return Plan(
        kernel="fa2", backend="cuda", reason=why, tile=(t.m, t.n), num_splits=how.parts, threads=t.threads,
        workspace=sum(workspace(problem, how)), extra=(chosen, how),
    )


def workspace(problem: Problem, how: Split) -> tuple[int, int]:
    """Bytes of the parts' results, and of their references and sums."""
    rows = how.parts * _rows(problem)
    return -(-rows * problem.head_dim_v * problem.compute_dtype.itemsize // 16) * 16, 16 * rows


@functools.cache
def combine_source(dtype: str, out: str) -> jit.Source:
    """The kernel that merges the parts."""
    name = f"combine_fp_{SHORT_TYPES[dtype]}" + f"_to_{SHORT_TYPES[out]}" * (out != dtype)
    stub = (
        f'static_assert(sizeof(PartParams) == {structs.PART_PARAMS.itemsize}, "structs.py mirrors it");\n'
        f'static_assert(COMBINE_THREADS == {COMBINE_THREADS}, "as cuda_parts.py has it");\n'
        f'extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 4) {name}(const __grid_constant__ PartParams p) {{\n'
        f"    combine_fp<{'Exact64' if dtype == 'float64' else 'Exact32'}, {CUDA_TYPES[out]}>(p);\n"
        "}\n"
    )
    return jit.Source("combine_fp.cu", stub, name)


def steps(problem: Problem, chosen: Instance, how: Split) -> Iterator[tuple[jit.Source, int, int, int]]:
    """What is launched, one after the other: kernel, blocks, threads, bytes of shared memory."""
    yield chosen.source, how.grid, chosen.tile.threads, chosen.shared_memory
    yield combine_source(chosen.dtype, how.out), _rows(problem), COMBINE_THREADS, 0


def pack(problem: Problem, chosen: Instance, how: Split, pointers: dict[str, int], memory: tuple[int, int] = (0, 0)) -> np.ndarray:
    """The struct of both launches; ``memory`` has the addresses of the workspace, the rest is as for structs.pack_prefill."""
    p = np.zeros(1, structs.PART_PARAMS)
    rows = _heads_as_rows(problem) if packs(problem) else problem
    p["prefill"] = structs.pack_prefill(rows, chosen.tile.m, 1, chosen.factor_left, pointers)
    p["part_out"], p["part_state"] = memory
    p["parts"], p["least"], p["queries"] = how.parts, how.least, problem.seqlen_q
    return p


def _heads_as_rows(problem: Problem) -> Problem:
    """The same memory, with the query heads of a key/value head as the queries of one head."""
    heads, group = problem.heads_kv, problem.group_size

    def seen(a: ArrayView | None, axis: int) -> ArrayView | None:
        """``axis``: that of the heads, which becomes two; the one of length 1 is where the other one was or comes."""
        if a is None:
            return None
        between = a.strides[axis]
        sizes = {"h": (heads, group * between), "r": (group, between), "b": (a.shape[0], a.strides[0])}
        order = "brh" if axis == 2 else "bhr"
        last = list(zip(a.shape[3:], a.strides[3:], strict=True))
        shape, strides = zip(*[*(sizes[name] for name in order), *last], strict=True)
        return ArrayView(None, a.pointer, shape, strides, a.dtype, a.kind, a.device)

    return problem.replace(q=seen(problem.q, 2), out=seen(problem.out, 2), lse=seen(problem.lse, 1), heads_q=heads, seqlen_q=group)


def launches(plan: Plan, problem: Problem) -> tuple[Instance, Split, list[launch.Step]]:
    """The planned instance for the arrays of this run, which may be aligned otherwise than those of the plan; and what is launched."""
    chosen, how = plan.extra
    ready = dataclasses.replace(chosen, load=cuda_fp.width(structs.copy_bytes((problem.q, problem.k, problem.v)), chosen.dtype))
    return ready, how, loaded(steps(problem, ready, how), problem.q.device)


def run(plan: Plan, problem: Problem, pointers: Callable[[Problem], AbstractContextManager[dict[str, int]]]) -> None:
    """Write problem.out, and problem.lse unless it is None; ``pointers`` brings the small arrays to the device."""
    ready, how, todo = launches(plan, problem)
    if not todo:
        return
    outs, states = workspace(problem, how)
    with pointers(problem) as known, launch.workspace(outs + states, problem.q.device) as memory:
        params = pack(problem, ready, how, known, (memory, memory + outs))
        for step in todo:
            launch.launch(step, params, launch.stream_pointer(None))


def prepare(plan: Plan, problem: Problem) -> launch.Prepared | None:
    """The launches of ``run`` for calls that differ in addresses alone; each call gets a workspace of its own."""
    ready, how, todo = launches(plan, problem)
    if not todo:
        return None
    (outs, states), device = workspace(problem, how), problem.q.device
    offset = structs.PART_PARAMS.fields["part_out"][1]  # type: ignore[index]
    write = struct.Struct("=2Q").pack_into

    @contextlib.contextmanager
    def fill(params: memoryview) -> Iterator[None]:
        with launch.workspace(outs + states, device) as memory:
            write(params, offset, memory, memory + outs)
            yield

    count = 5 + len(structs.index_addresses(problem))
    return launch.Prepared(todo, pack(problem, ready, how, {}), count, fill)


def common(info: DeviceInfo) -> Iterator[Instance]:
    """One query and several, each head size, aligned arrays; and one of each rarer kind."""
    def make(dtype: str, d: int, mask: int = 0, load: int = 16, score: int = 0, paged: bool = False) -> Instance:
        kind = tiles_fp.arithmetic(dtype, None, info)
        tile = tiles_fp.few_rows(kind, dtype, d, d, info)
        assert tile is not None
        return Instance(dtype, dtype, d, d, tile, mask, score, load, paged, kind=kind)

    for dtype in ("float32", "float64"):
        for d in tiles.HEAD_CLASSES:
            for mask in (0, MASK_RIGHT):
                yield make(dtype, d, mask)
            yield make(dtype, d, paged=True)
        yield make(dtype, 128, load=ITEMSIZE[dtype])


def instances(info: DeviceInfo) -> Iterator[jit.Source]:
    """For precompilation: the `common` ones, and the kernels that merge."""
    yield from (chosen.source for chosen in common(info))
    yield from (combine_source(dtype, dtype) for dtype in ("float32", "float64"))
