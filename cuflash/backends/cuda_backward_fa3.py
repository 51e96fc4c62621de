"""Instances of backward_fa3, the backward pass on Hopper: what it declines, its tiles, its launch parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import structs, tensor_map, wgmma
from ..device import DeviceInfo
from ..types import Problem, name_of
from . import cuda_fa3
from .cuda_instance import CUDA_TYPES, MASK_LENGTH, MASK_RIGHT, PrefillInstance

TYPES = ("float16", "bfloat16")
LARGEST_HEAD = 256


class Tile(NamedTuple):
    """Queries of a step, and stages of queries and of dO."""

    m: int
    stages: int

    n: int = 128  # keys of a block
    dout_stages: int = 2

    threads = 384
    warps = 12
    resident = 1

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; BackwardFa3::SMEM_BYTES counts the same."""
        wide, stages = d > 128, self.stages + self.dout_stages
        tiles = 2 * self.n * (d + dv) + 2 * self.m * (self.stages * d + self.dout_stages * dv) + (8 if wide else 4) * self.n * self.m
        return tiles + 4 * stages * self.m + 4 * self.m * min(d, 128) + 16 * (stages + 3) + 64 + 1024


# By the padded head size; a thread has 232 registers for its sums.
TILES = {64: Tile(128, 2), 128: Tile(64, 2), 256: Tile(64, 2, 64, 1)}


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when backward_fa3 is compiled."""

    in_order: bool = False  # tiles of keys add to dq one after the other

    KERNEL, TILES, PARAMS = "backward_fa3", "cuda_backward_fa3.py", "BackwardFa3Params"

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in the arrays that the launches hand to each other."""
        return self.tile.m

    @property
    def dq_columns(self) -> int:
        """Of the sums for dQ between the launches."""
        return self.d

    @property
    def tile_words(self) -> list[str]:
        return [f"m{self.tile.m}n{self.tile.n}s{self.tile.stages}", *["in_order"] * self.in_order]

    @property
    def preamble(self) -> str:
        m, wide = self.tile.m, self.d > 128
        queries, dq_queries, columns = (m // 2 if wide else m), (m // 2 if self.d == 64 else m), min(self.d, 128)
        return wgmma.backward_products(CUDA_TYPES[self.dtype], queries, columns, dq_queries, not wide)

    @property
    def arguments(self) -> list[Any]:
        return [CUDA_TYPES[self.dtype], self.d, self.dv, self.tile.m, self.tile.stages, self.mask, self.in_order]


def decline(problem: Problem) -> str | None:
    """Why it does not differentiate this call, or None; beside what every raw kernel declines."""
    if name_of(problem.q.dtype) not in TYPES:
        return f"{problem.q.dtype} arrays; it multiplies 16-bit numbers, kernel='fa2' others"
    absent = {
        "softcap": problem.softcap, "bias": problem.bias is not None, "mask": problem.mask is not None,
        "alibi_slopes": problem.alibi_slopes is not None, "page_table": problem.paged,
        "sinks": problem.sinks is not None,  # whose gradient needs more digits of delta than O has in 16 bits
    }
    for name, asked in absent.items():
        if asked:
            return f"{name}: kernel='fa2' has it"
    sizes = problem.head_dim, problem.head_dim_v
    if max(sizes) > LARGEST_HEAD or any(size % 8 for size in sizes):
        return f"head sizes {sizes[0]} and {sizes[1]}; it takes multiples of 8 up to {LARGEST_HEAD}"
    if problem.dout is not None and problem.dout.dtype != problem.q.dtype:
        return f"dout: {problem.dout.dtype} beside queries of {problem.q.dtype}; it multiplies numbers of one type"
    arrays = (("q", problem.q), ("k", problem.k), ("v", problem.v))
    return next(filter(None, (cuda_fa3.why_no_map(name, a) for name, a in arrays)), None)


def copies_dout(problem: Problem) -> bool:
    """Whether dO lies so that the copy engine cannot read it, such as a number that is broadcast: then a copy of it is read."""
    return problem.dout is not None and cuda_fa3.why_no_map("dout", problem.dout) is not None


def instance(problem: Problem, mask: int) -> Instance:
    """The kernel instance for these arrays: heads of queries and of values are padded to one size."""
    d = next(size for size in TILES if size >= max(problem.head_dim, problem.head_dim_v))
    dtype = name_of(problem.q.dtype)
    return Instance(dtype, dtype, d, d, TILES[d], mask, in_order=problem.deterministic)


def pack(problem: Problem, chosen: Instance, backward: np.ndarray) -> np.ndarray:
    """The struct of the launch, with that of the others in it."""
    p = tensor_map.aligned(bytes(structs.BACKWARD_FA3_PARAMS.itemsize)).view(structs.BACKWARD_FA3_PARAMS)
    p["backward"] = backward
    m, n = chosen.tile.m, chosen.tile.n
    boxes = ((problem.q, m), (problem.k, n), (problem.v, n), (problem.dout, m))
    for name, (a, n) in zip(structs.BACKWARD_MAPS, boxes, strict=True):
        p[name] = np.void(tensor_map.tensor_map(*cuda_fa3._box(a, n)).at(a.pointer))
    return p


@functools.cache
def common(info: DeviceInfo) -> tuple[Instance, ...]:
    """Instances of both types, full and causal; and one whose results are the same in every run."""
    return tuple(_common(info))


def _common(info: DeviceInfo) -> Iterator[Instance]:
    if info.cc != (9, 0):
        return
    for d in TILES:
        for dtype in TYPES:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield Instance(dtype, dtype, d, d, TILES[d], mask)
        yield Instance("bfloat16", "bfloat16", d, d, TILES[d], MASK_RIGHT, in_order=True)
