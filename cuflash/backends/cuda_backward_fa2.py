"""Instances of backward_fa2, the backward pass with mma.sync for every GPU from sm_75 on: what it declines, its tiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import jit, structs, tiles, tiles_backward
from ..device import DeviceInfo
from ..types import Problem, name_of
from .cuda_instance import (
    CUDA_TYPES, MASK_ARRAY, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_ALIBI, SCORE_BIAS, SCORE_BIAS32, SCORE_PLAIN, SCORE_SCALED,
    SCORE_SOFTCAP, SHORT_TYPES, PrefillInstance, backward_stub, mask_kind, score_kind,
)

TYPES = ("float16", "bfloat16")
CONVERT_ROWS, CONVERT_THREADS = 32, 256  # as backward_convert_rows.cu has them
SINKS_THREADS = 256  # as backward_sinks.cu has them


@dataclass(frozen=True)
class QueriesInstance(PrefillInstance):
    """What is fixed when backward_fa2_dq is compiled."""

    finds_delta: bool = False  # it replaces row_delta by more precise numbers, before the products; else it computes dq after them

    KERNEL, TILES, PARAMS = "backward_fa2_dq", "tiles_backward.py", "BackwardParams"

    @property
    def factor_left(self) -> bool:
        return self.score in (SCORE_PLAIN, SCORE_SOFTCAP)

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        return [f"m{t.m}n{t.n}w{t.warps}s{t.stages}", *["delta"] * self.finds_delta]

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.m, t.n, t.warps, t.stages, self.load, self.mask, self.score]
        return [CUDA_TYPES[self.dtype], *numbers, self.finds_delta]

    def blocks(self, problem: Problem, tile_rows: int) -> int:
        """Of the grid, where tiles between the launches have so many rows."""
        rows = -(-problem.seqlen_q // tile_rows) * tile_rows
        return problem.batch * problem.heads_q * -(-rows // self.tile.m)


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when backward_fa2 is compiled."""

    deterministic: bool = False
    delta: QueriesInstance | None = None  # a kernel that comes before it, where results show more digits of delta than O has
    queries: QueriesInstance | None = None  # the one to which it leaves dQ, if deterministic

    KERNEL, TILES, PARAMS = "backward_fa2", "tiles_backward.py", "BackwardParams"

    @property
    def factor_left(self) -> bool:
        return self.score in (SCORE_PLAIN, SCORE_SOFTCAP)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in the arrays that the launches hand to each other: a multiple of those of a step."""
        return max(self.tile.m, tiles_backward.LEAST_ROWS)

    @property
    def dq_columns(self) -> int:
        """Of the sums for dQ between the launches, which are rows; 0 where there are none, and no kernel that converts them."""
        return 0 if self.deterministic else self.d

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.tile.n

    @property
    def threads(self) -> int:
        return self.tile.threads

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        return [f"m{t.m}n{t.n}w{t.warps}s{t.stages}", *["without_dq"] * self.deterministic]

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.m, t.n, t.warps, t.stages, t.keys, t.key_warps, t.row_warps, self.load, self.mask, self.score]
        return [CUDA_TYPES[self.dtype], *numbers, not self.deterministic]


def decline(problem: Problem) -> str | None:
    """Why it does not differentiate this call, or None; beside what every raw kernel declines."""
    dtype = name_of(problem.q.dtype)
    if dtype not in TYPES:
        return f"{dtype} arrays; it multiplies 16-bit numbers"
    if problem.deterministic and problem.bias_is_shared:
        return "deterministic=True with a broadcast bias: its gradient is added up in no fixed order"
    if problem.paged:
        return "page_table: it writes gradients of keys and values that lie in one piece; backend='numba-cuda' takes pages"
    if problem.dout is not None and problem.dout.dtype != problem.q.dtype:
        return f"dout: {name_of(problem.dout.dtype)} beside queries of {dtype}, and it multiplies numbers of one type"
    sizes = problem.head_dim, problem.head_dim_v
    if not all(1 <= size <= tiles.LARGEST_HEAD for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}; it takes 1 to {tiles.LARGEST_HEAD}"
    return None


def instance(problem: Problem, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    arrays = (problem.q, problem.k, problem.v, problem.dout)
    load = structs.copy_bytes(tuple(a for a in arrays if a is not None))
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    mask, score = mask_kind(problem), score_kind(problem)
    # Sums over keys cancel but for errors of delta, and the gradient of a sink is a sum of deltas.
    precise = bool(score & SCORE_BIAS32) or problem.bias_is_shared or problem.sinks is not None
    return make(name_of(problem.q.dtype), d, dv, info, mask, score, load, problem.deterministic, precise)


def make(
    dtype: str, d: int, dv: int, info: DeviceInfo, mask: int = MASK_LENGTH, score: int = SCORE_PLAIN, load: int = 16,
    deterministic: bool = False, precise: bool = False,
) -> Instance | None:
    """The instance for padded head sizes, or None if no tile fits the GPU. ``precise``: with the kernel that finds delta."""
    lean = score != SCORE_PLAIN or load < 16 or deterministic
    arrays = bool(mask & MASK_ARRAY or score & (SCORE_BIAS | SCORE_BIAS32))
    tile = tiles_backward.backward_fa2(d, dv, lean, arrays, info)
    if tile is None:
        return None
    others: list[QueriesInstance | None] = [None, None]
    for n, wanted in enumerate((precise, deterministic)):
        if wanted:
            own = tiles_backward.backward_fa2_dq(d, dv, info)
            if own is None:
                return None
            others[n] = QueriesInstance(dtype, dtype, d, dv, own, mask, score, load, n == 0)
    return Instance(dtype, dtype, d, dv, tile, mask, score, load, deterministic, *others)


def dbias_dtype(problem: Problem) -> np.dtype:
    """Of the gradient of the bias as the kernels leave it: sums over what shares an element are made in float64."""
    return np.dtype(np.float64 if problem.bias_is_shared else np.float32)


@functools.cache
def convert_source(dtype: str, vector: bool) -> jit.Source:
    """The kernel that turns sums for dQ into rows of this dtype; ``vector``: which can be written 16 bytes at a time."""
    name = f"backward_convert_rows_{SHORT_TYPES[dtype]}" + "_strided" * (not vector)
    call = f"backward_convert_rows<{CUDA_TYPES[dtype]}, {str(vector).lower()}>"
    stub = backward_stub(name, call, CONVERT_THREADS, CONVERT_ROWS=CONVERT_ROWS, CONVERT_THREADS=CONVERT_THREADS)
    return jit.Source("backward_convert_rows.cu", stub, name)


def sinks_source() -> jit.Source:
    """The kernel of the gradient of the sinks."""
    name = "backward_sinks_of_heads"
    return jit.Source("backward_sinks.cu", backward_stub(name, "backward_sinks", SINKS_THREADS, SINKS_THREADS=SINKS_THREADS), name)


def launches(problem: Problem, chosen: Instance, blocks: int, dq_vector: bool) -> list[tuple[jit.Source, int, int, int]]:
    """What follows backward_prepare: source, blocks, threads, bytes of shared memory.

    ``blocks``: of the kernel that has the tiles of keys. ``dq_vector``: rows of dq can be written 16 bytes at a time.
    """
    places = problem.heads_q * structs.places(problem, chosen.tile_rows)

    def of_rows(kernel: QueriesInstance) -> tuple[jit.Source, int, int, int]:
        return kernel.source, kernel.blocks(problem, chosen.tile_rows), kernel.threads, kernel.shared_memory

    found = [of_rows(chosen.delta)] if chosen.delta is not None else []
    if problem.sinks is not None:
        found.append((sinks_source(), problem.heads_q, SINKS_THREADS, 0))
    found.append((chosen.source, blocks, chosen.threads, chosen.shared_memory))
    if chosen.queries is not None:
        found.append(of_rows(chosen.queries))
    else:
        found.append((convert_source(chosen.dtype, dq_vector), places // CONVERT_ROWS, CONVERT_THREADS, 0))
    return found


def sources(chosen: Instance) -> Iterator[jit.Source]:
    """What an instance launches."""
    yield from (kernel.source for kernel in (chosen.delta, chosen, chosen.queries) if kernel is not None)
    if chosen.delta is not None:
        yield sinks_source()
    if chosen.queries is None:
        yield convert_source(chosen.dtype, True)


@functools.cache
def common(info: DeviceInfo) -> tuple[Instance, ...]:
    """Equal head sizes, full and causal, aligned arrays; and one of each rarer kind."""
    return tuple(_common(info))


def _common(info: DeviceInfo) -> Iterator[Instance]:
    for d in tiles.HEAD_CLASSES:
        for dtype in TYPES if info.cc >= (8, 0) else TYPES[:1]:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                made = make(dtype, d, d, info, mask)
                assert made is not None
                yield made
    for d in (64, 128):
        rarer = [make("float16", d, d, info, mask) for mask in (MASK_RIGHT | MASK_LEFT, MASK_ARRAY)]
        rarer += [make("float16", d, d, info, mask, deterministic=True) for mask in (MASK_LENGTH, MASK_RIGHT)]
        rarer += [make("float16", d, d, info, MASK_RIGHT, load=load) for load in (8, 4, 2)]
        rarer += [make("float16", d, d, info, MASK_RIGHT, score) for score in (SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI)]
        rarer += [make("float16", d, d, info, MASK_LENGTH, score, precise=True) for score in (SCORE_BIAS, SCORE_BIAS32)]
        yield from (made for made in rarer if made is not None)
