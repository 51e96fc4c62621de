"""Flash-Decoding as a raw CUDA kernel: which instance a problem needs, and how its keys are split. cuda.py asks it and launches."""

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

from .. import jit, launch, structs, tiles, tiles_decode
from ..device import DeviceInfo
from ..tiles_decode import DecodeTile
from ..types import UNBOUNDED, Plan, Problem, name_of
from .cuda_instance import (
    CUDA_TYPES, MASK_ARRAY, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_ALIBI, SCORE_PLAIN, SCORE_SOFTCAP, SHORT_TYPES,
    PrefillInstance, loaded,
)
from .cuda_memory import GraphMemory

MOST_QUERIES = 64  # for which kernel="auto" takes it
MOST_ROWS = 128  # likewise: with more query heads and queries a key/value head, products take longer than reading
INVARIANT_KEYS = 512  # of a part under batch_invariant, at least
INVARIANT_PARTS = 64  # of a sequence under batch_invariant, at most
COMBINE_THREADS, COMBINE_ROWS = 128, 4  # of a block
# Partial results of a (sequence, head) that its last block merges. On an H200 a second kernel takes 2 us more for 32 KiB, and 10 us less
# for 128 KiB.
MERGED_BYTES = 1 << 16
LEAST_TILES = 2  # of a run: what a part more costs takes about as long as reading one


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when decode is compiled."""

    one: bool = True  # one query
    paged: bool = False
    merges: bool = True  # the last block to finish merges, else combine.cu
    e4m3: bool = False  # keys and values in float8_e4m3fn, with scales
    paired: bool = False  # two blocks are a cluster and merge the two parts of a (sequence, head) through their shared memory

    KERNEL, TILES, PARAMS = "decode", "tiles_decode.py", "DecodeParams"

    @property
    def factor_left(self) -> bool:
        return self.score in (SCORE_PLAIN, SCORE_SOFTCAP)

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(self.d, self.dv, 1 if self.e4m3 else 2)

    @property
    def kernel_words(self) -> list[str]:
        return ["e4m3"] * self.e4m3

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        tile = f"m{t.m}n{t.n}w{t.warps}s{t.stages}" + f"r{t.row_warps}" * (t.row_warps > 1)
        return [tile, *["wgmma"] * t.wgmma, *["several"] * (not self.one), *["parts"] * (not self.merges), *["pairs"] * self.paired]

    @property
    def page_words(self) -> list[str]:
        return ["paged"] * self.paged

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.m, t.n, t.warps, t.row_warps, t.stages, self.load, self.mask, self.score]
        kinds = [self.one, self.paged, self.merges, t.q_registers, t.wgmma, *["E4m3"] * self.e4m3]
        if self.paired:
            kinds += [CUDA_TYPES[self.dtype], True]
        return [CUDA_TYPES[self.dtype], CUDA_TYPES[self.out], *numbers, *kinds]

    @functools.cached_property
    def combine_source(self) -> jit.Source:
        """The kernel that merges the parts if this one does not."""
        t, name = self.tile, f"combine_{SHORT_TYPES[self.out]}_d{self.dv}m{self.tile.m}n{self.tile.n}_mask{self.mask}"
        stub = (
            f"using Instance = Combine<{CUDA_TYPES[self.out]}, {self.dv}, {t.m}, {t.n}, {self.mask}, {COMBINE_THREADS}, {COMBINE_ROWS}>;\n"
            f'extern "C" __global__ void __launch_bounds__(Instance::THREADS) {name}(const __grid_constant__ DecodeParams p) {{\n'
            "    combine<Instance>(p);\n"
            "}\n"
        )
        return jit.Source("combine.cu", stub, name)


@dataclass(frozen=True)
class Split:
    """How the keys of all sequences are dealt out; names as in decode_params.cuh."""

    rows: int
    row_blocks: int
    heads_at_once: int
    runs: int
    least: int
    unit_tiles: int
    most_units: int
    slots: int  # for partial results
    parts: int  # of a sequence, about
    paired: bool = False  # two equal parts, of two blocks that run together

    @property
    def grid(self) -> int:
        return self.runs * self.heads_at_once


def decline(problem: Problem) -> str | None:
    """What of a problem is left to kernel="fa2", in words, or None."""
    dtype = name_of(problem.q.dtype)
    if dtype not in ("float16", "bfloat16"):
        return f"{dtype} arrays; it takes float16 and bfloat16, kernel='fa2' all four"
    asked = {"packed sequences": problem.varlen, "bias": problem.bias is not None}
    name = next((name for name, there in asked.items() if there), None)
    if name is not None:
        return f"it has no {name}; kernel='fa2' has"
    if problem.e4m3 and structs.copy_bytes((problem.k, problem.v)) < 4:
        strides = f"head sizes {problem.head_dim} and {problem.head_dim_v}, strides {problem.k.strides} and {problem.v.strides}"
        return f"{problem.k.dtype} arrays of {strides}; columns must be contiguous, all else whole multiples of 4 bytes"
    return None


def suits(problem: Problem) -> bool:
    """Whether reading keys and values is what takes the time, so that this kernel is the better choice."""
    few = 1 <= problem.seqlen_q <= MOST_QUERIES and problem.group_size * problem.seqlen_q <= MOST_ROWS
    return few and decline(problem) is None


def copy_bytes(problem: Problem) -> int:
    """The widest copy, 16, 8, 4 or 2 bytes. With 16, rows in pages are found by their offset, in 32 bits."""
    load = structs.copy_bytes((problem.q, problem.k, problem.v))
    if not problem.paged:
        return load
    scales = [a for a in (problem.k_scale, problem.v_scale) if a is not None and a.by_token]
    for a, unit in ((problem.k, 16), (problem.v, 16), *((a, 4) for a in scales)):
        steps = [(n - 1) * stride for n, stride in zip(a.shape[:3], a.strides, strict=False) if n > 1]
        if min(steps, default=0) < 0 or sum(steps) >= unit << 32:
            return min(load, 8)
    return load


def instance(problem: Problem, info: DeviceInfo, load: int, score: int) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    d, dv = (tiles_decode.head_class(size, problem.e4m3) for size in (problem.head_dim, problem.head_dim_v))
    one, itemsize = problem.seqlen_q == 1, problem.k.dtype.itemsize
    rows, alike = problem.group_size * problem.seqlen_q, one and problem.mask is None
    tile = tiles_decode.decode(rows, d, dv, info, problem.paged, alike, load == 2, itemsize)
    if tile is None:
        return None
    return Instance(
        name_of(problem.q.dtype), name_of(problem.out_dtype), d, dv, tile, mask_kind(problem), score, load, one, problem.paged,
        e4m3=problem.e4m3,
    )


def plan(problem: Problem, chosen: Instance, info: DeviceInfo) -> Plan:
    """How the keys are split, and who merges the parts."""
    how, t = split(problem, chosen.tile, info), chosen.tile
    merges = 4 * how.parts * min(how.rows, t.m) * chosen.dv <= MERGED_BYTES
    chosen = dataclasses.replace(chosen, merges=merges or how.paired, paired=how.paired)
    return Plan(
        kernel="decode", backend="cuda", reason=f"{why(problem, chosen, how)} on {info.name}", tile=(t.m, t.n), num_splits=how.parts,
        threads=t.threads, workspace=workspace(problem, chosen, how).total, extra=(chosen, how),
    )


def mask_kind(problem: Problem) -> int:
    """A single query at the end of its keys sees them all under a causal mask."""
    left, right = (side != UNBOUNDED for side in problem.window)
    if problem.seqlen_q == 1 and problem.align == "bottom_right":
        right = False
    kind = MASK_RIGHT | MASK_LEFT if left else MASK_RIGHT if right else MASK_LENGTH
    return kind | (MASK_ARRAY if problem.mask is not None else 0)


def heads_at_once(heads: int, blocks: int) -> int:
    """Heads whose blocks read the same keys at the same time: a divisor that keeps the GPU busy, the largest of about equal ones."""
    divisors = [h for h in range(1, min(heads, blocks) + 1) if heads % h == 0]
    busy = {h: blocks // h * h for h in divisors}
    return max(h for h in divisors if busy[h] >= 0.96 * max(busy.values()))


def even(runs: int, pairs: int) -> int:
    """At most ``runs``: the most that cut each (sequence, pass) into equal parts, if hardly a block stays idle for it."""
    multiple = runs // max(1, pairs) * pairs
    return multiple if multiple >= 0.96 * runs else runs


def split(problem: Problem, tile: DecodeTile, info: DeviceInfo) -> Split:
    """How the keys are dealt out; of lengths it knows no more than what they are at most."""
    rows = problem.group_size * problem.seqlen_q
    row_blocks = -(-rows // tile.m)
    heads = max(1, problem.heads_kv * row_blocks)
    blocks = info.multiprocessors * tile.resident
    at_once = heads_at_once(heads, blocks)
    longest = max(1, -(-problem.seqlen_k // tile.n))  # in tiles
    unit_tiles, most, units = 1, 0, longest
    if problem.num_splits is not None:
        most = units = min(problem.num_splits, longest)
    elif problem.batch_invariant:
        unit_tiles, most = max(1, INVARIANT_KEYS // tile.n), INVARIANT_PARTS
        units = min(most, -(-longest // unit_tiles))
    pairs = heads // at_once * problem.batch
    alike = problem.kv_lengths is None and problem.kv_start is None
    plain = alike and not most and mask_kind(problem) == MASK_LENGTH
    if tile.wgmma and plain and longest >= 2 * LEAST_TILES and even(blocks // at_once, pairs) == 2 * pairs:
        return Split(rows, row_blocks, at_once, 2 * pairs, 1, 1, 0, 0, 2, True)
    total = max(1, pairs * units)
    least = 1 if most else LEAST_TILES
    runs = max(1, min(blocks // at_once, total // least))
    if not most and alike:
        runs = even(runs, pairs)
    slots = 0 if runs == 1 and not most else 2 * runs if not most else total if units > 1 else 0
    parts = units if most else max(1, round(runs * longest / total))
    return Split(rows, row_blocks, at_once, runs, least, unit_tiles, most, slots * at_once, parts)


def blocks(problem: Problem, how: Split) -> int:
    """Blocks of the grid; 0 if there is nothing to compute."""
    return how.grid if problem.batch and problem.heads_q and problem.seqlen_q else 0


def steps(problem: Problem, chosen: Instance, how: Split) -> Iterator[tuple[jit.Source, int, int, int]]:
    """What is launched, one after the other: kernel, blocks, threads, bytes of shared memory."""
    yield chosen.source, blocks(problem, how), chosen.tile.threads, chosen.shared_memory
    if not chosen.merges and how.slots and blocks(problem, how):
        pairs = problem.batch * problem.heads_kv * how.row_blocks
        yield chosen.combine_source, pairs * chosen.tile.m // COMBINE_ROWS, COMBINE_THREADS, 0


@dataclass(frozen=True)
class Workspace:
    """Bytes of partial results, first the accumulators and then the states, and of the counters of parts."""

    part_out: int
    part_state: int
    arrived: int

    @property
    def total(self) -> int:
        return self.part_out + self.part_state + self.arrived


def workspace(problem: Problem, chosen: Instance, how: Split) -> Workspace:
    rows = how.slots * chosen.tile.m
    counters = problem.batch * problem.heads_kv * how.row_blocks if rows and chosen.merges else 0
    return Workspace(4 * rows * chosen.dv, 8 * rows, -(-4 * counters // 16) * 16)


def pack(
    problem: Problem, chosen: Instance, how: Split, pointers: dict[str, int], memory: tuple[int, int, int] = (0, 0, 0),
) -> np.ndarray:
    """The struct of one launch; ``memory`` has the addresses of the workspace, the rest is as for structs.pack_prefill."""
    p = np.zeros(1, structs.DECODE_PARAMS)
    shared = {name: at for name, at in pointers.items() if name not in structs.SCALES}
    p["prefill"] = structs.pack_prefill(problem, chosen.tile.m, 1, chosen.factor_left, shared)
    p["part_out"], p["part_state"], p["arrived"] = memory
    for name in ("rows", "row_blocks", "heads_at_once", "runs", "least", "unit_tiles", "most_units"):
        p[name] = getattr(how, name)
    p["passes"] = problem.heads_kv * how.row_blocks // how.heads_at_once
    if problem.e4m3:
        for name in ("k_stride", "v_stride"):
            p["prefill"][name] //= 2  # in words of 16 bits
        for name, value in structs.scale_values(problem, pointers).items():
            p[name] = value
    return p


_counters, _parts = GraphMemory(zeroed=True), GraphMemory(zeroed=False)


@contextlib.contextmanager
def _memory(size: Workspace) -> Iterator[tuple[int, int, int]]:
    """Addresses of a workspace: part_out, part_state and arrived."""
    if not size.total:
        yield 0, 0, 0
        return
    parts = _parts.take(size.part_out + size.part_state)
    arrived = _counters.take(size.arrived) if size.arrived else None
    yield parts.data.ptr, parts.data.ptr + size.part_out, 0 if arrived is None else arrived.data.ptr


def launches(plan: Plan, problem: Problem) -> tuple[Instance, Split, list[launch.Step]]:
    """The planned instance for the arrays of this run, which may be aligned otherwise than those of the plan; and what is launched."""
    chosen, how = plan.extra
    load = copy_bytes(problem)
    ready = chosen if load == chosen.load else dataclasses.replace(chosen, load=load)
    return ready, how, loaded(steps(problem, ready, how), problem.q.device, launch.launches_early(problem.q.device))


def run(plan: Plan, problem: Problem, pointers: Callable[[Problem], AbstractContextManager[dict[str, int]]]) -> None:
    """Write problem.out, and problem.lse unless it is None; ``pointers`` brings the small arrays to the device."""
    ready, how, todo = launches(plan, problem)
    if not todo:
        return
    with pointers(problem) as known, _memory(workspace(problem, ready, how)) as memory:
        params = pack(problem, ready, how, known, memory)
        for step in todo:
            launch.launch(step, params, launch.stream_pointer(None))


def prepare(plan: Plan, problem: Problem) -> launch.Prepared | None:
    """The launch of ``run`` for calls that differ in addresses alone; each call gets a workspace of its own."""
    ready, how, todo = launches(plan, problem)
    if not todo:
        return None
    size = workspace(problem, ready, how)
    offset = structs.DECODE_PARAMS.fields["part_out"][1]  # type: ignore[index]
    write = struct.Struct("=3Q").pack_into

    @contextlib.contextmanager
    def fill(params: memoryview) -> Iterator[None]:
        with _memory(size) as memory:
            write(params, offset, *memory)
            yield

    count = 5 + len(structs.index_addresses(problem))
    scales_at = structs.DECODE_PARAMS.fields["k_scale"][1] if structs.scale_views(problem) else None  # type: ignore[index]
    return launch.Prepared(todo, pack(problem, ready, how, {}), count, fill if size.total else None, scales_at)


def why(problem: Problem, chosen: Instance, how: Split) -> str:
    """In words, how the keys are split."""
    shared = f"{how.rows} rows of {problem.group_size} query heads a key/value head" if how.rows > 1 else "1 row a key/value head"
    parts = f"about {how.parts} parts a sequence" if how.parts > 1 else "sequences whole"
    fixed = ", cut by its own length alone" if how.most_units and problem.num_splits is None else ""
    fixed = ", which two blocks merge in their shared memory" if how.paired else fixed
    return f"reading K and V is what takes the time: {shared}, keys over {how.grid} blocks, {parts}{fixed}"


def common(info: DeviceInfo) -> Iterator[Instance]:
    """One query and several, each tile and head size, aligned arrays; and one of each rarer kind."""
    yield from dict.fromkeys(_common(info))  # one tile may serve several numbers of rows


def _common(info: DeviceInfo) -> Iterator[Instance]:
    def make(
        dtype: str, d: int, rows: int, mask: int = 0, score: int = 0, load: int = 16, one: bool = True, paged: bool = False,
        out: str | None = None, merges: bool = True, e4m3: bool = False, paired: bool = False,
    ) -> Iterator[Instance]:
        tile = tiles_decode.decode(rows, d, d, info, paged, one, itemsize=1 if e4m3 else 2)
        if tile is not None:
            yield Instance(dtype, out or dtype, d, d, tile, mask, score, load, one, paged, merges, e4m3, paired)

    dtypes = ("float16",) if info.cc < (8, 0) else ("float16", "bfloat16")
    for d in tiles.HEAD_CLASSES:
        for rows in (16, 32, 64, 128) if d in (64, 128, 256) else (16,):
            yield from make(dtypes[-1], d, rows, merges=rows <= 32)
            if rows <= 64:
                yield from make("float16", d, rows, MASK_RIGHT, one=False, paged=rows == 16)
    for d in (64, 128):
        for dtype in dtypes:
            yield from make(dtype, d, 16, paged=True)
        yield from make("float16", d, 16)
        for load in (8, 2):
            yield from make("float16", d, 16, load=load)
        if info.cc == (9, 0):
            yield from make(dtypes[-1], d, 128, paged=True, merges=False)
            yield from make(dtypes[-1], d, 128, paired=True)
        everything = SCORE_SOFTCAP | SCORE_ALIBI
        for rows in (16, 32, 64):
            yield from make("float16", d, rows, MASK_RIGHT | MASK_LEFT | MASK_ARRAY, everything, one=False, paged=True)
        yield from make("float16", d, 16, MASK_RIGHT | MASK_LEFT, SCORE_SOFTCAP)
        for rows in (8, 16):
            yield from make(dtypes[-1], d, rows, e4m3=True)
            yield from make("float16", d, rows, MASK_RIGHT | MASK_LEFT | MASK_ARRAY, everything, one=False, paged=True, e4m3=True)
        yield from make("float16", d, 8, load=8, e4m3=True)
    for d in (64, 128, 192, 256):
        for rows in (8, 16, 32, 64):
            yield from make(dtypes[-1], d, rows, paged=True, e4m3=True)
