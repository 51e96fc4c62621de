"""FlashAttention-3 as a raw CUDA kernel for sm_90a: which instance a problem needs, its tensor maps, its launch. cuda.py asks it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import launch, structs, tensor_map, tiles, tiles_fa3, wgmma
from ..device import DeviceInfo
from ..tiles_fa3 import Fa3Tile
from ..types import ArrayView, Problem, name_of
from .cuda_instance import (
    CUDA_TYPES, LARGEST_GRID, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_PLAIN, SCORE_SCALED, SCORE_SOFTCAP, PrefillInstance,
)
from .cuda_memory import Counter, StreamCounters

BOX_COLUMNS = 64  # of a box: rows of 128 bytes, the widest swizzle
WARPGROUP_ROWS = 64
LEAST_PAGE_ROWS = 16  # of a box of keys
MOST_USED = (64, 128, 256)  # head sizes
BATCH = "entries of the batch"  # what the first axis of an array counts that has no pages
LARGEST_TILES = LARGEST_GRID - (1 << 16)  # a block's next tile is numbered from the tiles on by the blocks, all in 32 bits


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when prefill_fa3 is compiled."""

    page_rows: int = 0  # rows of a box of keys, which surely lie in one page: a divisor of page sizes; 0 without pages
    flat: bool = False  # the longest of the packed sequences is not known
    packed: bool = False

    KERNEL, TILES, PARAMS = "prefill_fa3", "tiles_fa3.py", "Fa3Params"

    @property
    def factor_left(self) -> bool:
        return self.score in (SCORE_PLAIN, SCORE_SOFTCAP)

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        words = [f"m{t.m}n{t.n}s{t.stages}", *["turns"] * t.turns, *["wait"] * t.one_wait]
        return words + ["packed"] * self.packed

    @property
    def page_words(self) -> list[str]:
        return [f"paged{self.page_rows}"] * (self.page_rows > 0)

    @property
    def preamble(self) -> str:
        return wgmma.products(CUDA_TYPES[self.dtype], self.tile.n, self.dv)

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.warpgroups, t.n, t.stages, t.turns, t.one_wait, self.mask, self.score]
        return [CUDA_TYPES[self.dtype], CUDA_TYPES[self.out], *numbers, self.page_rows, self.flat, self.packed]


def decline(problem: Problem) -> str | None:
    """What of a problem is left to kernel="fa2", in words, or None."""
    dtype = name_of(problem.q.dtype)
    if dtype not in ("float16", "bfloat16"):
        return f"{dtype} arrays; it takes float16 and bfloat16, kernel='fa2' all four"
    asked = {"bias": problem.bias, "mask": problem.mask, "alibi_slopes": problem.alibi_slopes}
    name = next((name for name, value in asked.items() if value is not None), None)
    if name is not None:
        return f"it has no {name}; kernel='fa2' has it"
    if problem.paged and problem.page_size % LEAST_PAGE_ROWS:
        least = f"it loads boxes of {LEAST_PAGE_ROWS} keys or a multiple"
        return f"page_table: pages of {problem.page_size} keys, and {least}; kernel='fa2' takes pages of any size"
    return why_not_these(problem)


def why_not_these(problem: Problem) -> str | None:
    """Why arrays that lie so are left to kernel="fa2", in words, or None."""
    return why_not_out(problem) or why_no_maps(problem)


def why_not_out(problem: Problem) -> str | None:
    """Why results cannot be stored 16 bytes at a time, in words, or None. Those that are yet to be made are contiguous."""
    if problem.out is None and problem.head_dim_v * problem.out_dtype.itemsize % 16:
        return f"head size {problem.head_dim_v} of v: it stores 16 bytes at a time, 8 numbers; kernel='fa2' stores rows of any size"
    if problem.out is not None and (bytes_at_once := structs.copy_bytes((problem.out,))) < 16:
        return f"out: strides or addresses that allow {bytes_at_once} bytes at once, and it stores 16; kernel='fa2' takes any strides"
    return None


def why_not_on(info: DeviceInfo) -> str | None:
    """Why it does not run on a GPU, or None."""
    if info.cc != (9, 0):
        return f"{info.name} has compute capability {info.cc[0]}.{info.cc[1]}; its instructions are those of 9.0 alone"
    if not tensor_map.there_are():
        return "tensor maps need the driver of CUDA 12.0 or later"
    return None


def why_no_maps(problem: Problem) -> str | None:
    """Which array there is no tensor map of, and why, in words; or None."""
    of_keys = "pages" if problem.paged else BATCH
    arrays = ("q", problem.q, BATCH), ("k", problem.k, of_keys), ("v", problem.v, of_keys)
    return next(filter(None, itertools.starmap(why_no_map, arrays)), None)


def why_no_map(name: str, a: ArrayView, first_axis: str = BATCH) -> str | None:
    """Why there is no tensor map of an array, in words, which call its first axis so; or None."""
    if 0 in a.shape:
        return f"{name} has no elements, and it loads boxes of them; kernel='fa2' takes such arrays"
    if a.shape[-1] > 1 and a.strides[-1] != a.dtype.itemsize:
        return f"{name}: columns {a.strides[-1]} bytes apart, and it loads boxes of neighbours; kernel='fa2' takes any strides"
    for axis, n, stride in zip((first_axis, "rows", "heads")[-len(a.shape) + 1 :], a.shape, a.strides, strict=False):
        if n > 1 and (stride <= 0 or stride % 16):
            why = "it loads boxes, whose strides are positive multiples of 16"
            return f"{name}: {axis} {stride} bytes apart, and {why}; kernel='fa2' takes any strides"
    reason = tensor_map.why_not(*_box(a, 1), address=a.pointer)
    if reason is not None:
        return f"{name}: it loads boxes by tensor maps, which cannot describe {reason}; kernel='fa2' takes any strides"
    return None


_Box = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _box(a: ArrayView, rows: int) -> _Box:
    """An array and a box of so many rows of a head, as tensor_map.py wants to know of them; Fa3Params has the order of the dimensions."""
    batch, row, head, column = range(-4, 0)
    shape, strides = (1, *a.shape)[-4:], (0, *a.strides)[-4:]  # packed sequences have no batch axis
    order = (row, head, batch)
    item = a.dtype.itemsize
    steps = tuple(strides[axis] if shape[axis] > 1 else item * BOX_COLUMNS for axis in order)
    return item, (shape[column], *(shape[axis] for axis in order)), steps, (BOX_COLUMNS, rows, 1, 1)


def _packed_box(a: ArrayView, group: int) -> _Box:
    """The same of queries whose heads come in groups: a box has the rows of a warpgroup, all heads of a query one after the other."""
    item, (columns, rows, heads, batch), (row, head, entry), _ = _box(a, 1)
    shape, steps = (columns, group, rows, heads // group, batch), (head, row, head * group, entry)
    return item, shape, steps, (BOX_COLUMNS, group, WARPGROUP_ROWS // group, 1, 1)


def instance(problem: Problem, mask: int, score: int, flat: bool, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if the GPU has no instructions for it."""
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    find = functools.partial(tiles_fa3.prefill_fa3, d, dv, mask, score != SCORE_PLAIN, problem.paged, info=info)
    # By the queries of the longest sequence, as far as they are known; the tile decides on the order of sums.
    by_length = not problem.batch_invariant
    queries = 0 if not by_length else problem.q.shape[-3] // problem.batch if flat else problem.seqlen_q
    tile, packed = find(rows=queries), False
    if tile is None:
        return None
    if by_length and not flat and (whole := find(rows=problem.group_size * queries)) is not None and packs(problem, tile, whole):
        tile, packed = whole, True
    types = name_of(problem.q.dtype), name_of(problem.out_dtype)
    return Instance(*types, d, dv, tile, mask, score, 16, math.gcd(problem.page_size, tile.n) if problem.paged else 0, flat, packed)


def packs(problem: Problem, alone: Fa3Tile, together: Fa3Tile) -> bool:
    """Whether the heads that share a key/value head come together in tiles, as there are fewer rows without a query then."""
    group, queries = problem.group_size, problem.seqlen_q
    if group & (group - 1) or not 1 < group <= WARPGROUP_ROWS:
        return False
    rows, rows_together = (-(-n // tile.m) * tile.m for n, tile in ((queries, alone), (group * queries, together)))
    return 10 * rows_together <= 9 * group * rows


def blocks(count: int, info: DeviceInfo) -> int:
    """Blocks of the grid for so many tiles: each takes one after the other."""
    return min(count, info.multiprocessors)


def pack(
    problem: Problem, chosen: Instance, section: int, count: int, pointers: dict[str, int], counter: int = 0,
) -> np.ndarray:
    """The struct of one launch of so many tiles; the rest is as for structs.pack_prefill."""
    p = tensor_map.aligned(bytes(structs.FA3_PARAMS.itemsize)).view(structs.FA3_PARAMS)
    group = problem.group_size if chosen.packed else 1
    p["prefill"] = structs.pack_prefill(problem, chosen.tile.m // group, section, chosen.factor_left, pointers, chosen.flat)
    q, k, v, keys = problem.q, problem.k, problem.v, chosen.page_rows or chosen.tile.n
    of_q = _packed_box(q, group) if chosen.packed else _box(q, WARPGROUP_ROWS)
    for name, a, box in zip(structs.MAPS, (q, k, v), (of_q, _box(k, keys), _box(v, keys)), strict=True):
        p[name] = np.void(tensor_map.tensor_map(*box).at(a.pointer))
    p["tiles"], p["counter"] = count, counter
    return p


_counters = StreamCounters()


def counter(device: int) -> Counter:
    """That of CuPy's current stream on its current device, which is this one."""
    return _counters.taker(device)()


def prepare(steps: list[launch.Step], params: np.ndarray, addresses: int, device: int) -> launch.Prepared:
    """The launches with this struct for calls that differ in addresses alone."""
    fields: Any = structs.FA3_PARAMS.fields
    write, offset, take = struct.Struct("=Q").pack_into, fields["counter"][1], _counters.taker(device)

    def fill(memory: memoryview) -> contextlib.AbstractContextManager[Any]:
        taken = take()
        write(memory, offset, taken.address)
        return taken

    return launch.Prepared(steps, params, addresses, fill, maps_at=[fields[name][1] for name in structs.MAPS])


@functools.cache
def common(info: DeviceInfo) -> tuple[Instance, ...]:
    """Equal head sizes, full, causal and windowed; and one of each rarer kind."""
    return tuple(dict.fromkeys(_common(info)))


def _common(info: DeviceInfo) -> Iterator[Instance]:
    if info.cc != (9, 0):
        return

    def make(
        dtype: str, d: int, mask: int, score: int = SCORE_PLAIN, dv: int | None = None, out: str | None = None, page_size: int = 0,
        flat: bool = False, packed: bool = False,
    ) -> Iterator[Instance]:
        for tile in tiles_fa3.starts(d, dv or d, mask, score != SCORE_PLAIN, page_size > 0).values():
            rows = math.gcd(page_size, tile.n) if page_size else 0
            yield Instance(dtype, out or dtype, d, dv or d, tile, mask, score, 16, rows, flat, packed)

    for d in tiles.HEAD_CLASSES:
        for dtype in ("float16", "bfloat16") if d in MOST_USED else ("bfloat16",):
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield from make(dtype, d, mask)
        yield from make("bfloat16", d, MASK_RIGHT | MASK_LEFT)
        yield from make("float16", d, MASK_RIGHT | MASK_LEFT, SCORE_SOFTCAP)
    for mask in (MASK_LENGTH, MASK_RIGHT):
        yield from make("bfloat16", 192, mask, dv=128)
    for d in (64, 128):
        yield from make("float16", d, MASK_RIGHT, SCORE_SCALED)
        yield from make("bfloat16", d, MASK_RIGHT, SCORE_SOFTCAP)
        yield from make("float16", d, MASK_RIGHT, flat=True)
        yield from make("bfloat16", d, MASK_RIGHT, page_size=16)
        for mask in (MASK_LENGTH, MASK_RIGHT):
            yield from make("bfloat16", d, mask, packed=True)
        yield from make("float16", d, MASK_RIGHT | MASK_LEFT, SCORE_SOFTCAP, page_size=64, packed=True)
    for d in MOST_USED:
        yield from make("bfloat16", d, MASK_RIGHT, page_size=64)
        yield from make("float16", d, MASK_RIGHT | MASK_LEFT, SCORE_SOFTCAP, page_size=64)
    yield from make("float16", 64, MASK_LENGTH, out="bfloat16")
