"""The raw CUDA kernel for float32 and float64: which instance a problem needs. cuda.py asks it for such problems and launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .. import structs, tiles, tiles_fp
from ..device import DeviceInfo
from ..types import Problem, name_of
from .cuda_instance import (
    CUDA_TYPES, ITEMSIZE, MASK_ARRAY, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_ALIBI, SCORE_BIAS, SCORE_BIAS32, SCORE_SCALED,
    SCORE_SOFTCAP, PrefillInstance,
)

_REALS = {"float32": "Exact32", "float64": "Exact64"}


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when prefill_fp is compiled. ``load`` is 16 or, for any strides, the size of one number."""

    paged: bool = False
    kind: str = field(kw_only=True)  # of arithmetic, see tiles_fp

    KERNEL, TILES = "prefill_fp", "tiles_fp.py"

    @property
    def slices(self) -> int:  # type: ignore[override]
        return -(-self.dv // self.tile.slice(self.dv))

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(ITEMSIZE[self.dtype], self.d, self.dv)

    @property
    def tile_words(self) -> list[str]:
        t = self.tile
        return [f"m{t.m}n{t.n}w{t.warps}s{t.stages}", *[f"by{self.slices}"] * (self.slices > 1)]

    @property
    def kernel_words(self) -> list[str]:
        return [self.kind.lower()]

    @property
    def page_words(self) -> list[str]:
        return ["paged"] * self.paged

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        real = "Fast32" if self.kind == tiles_fp.TF32 else _REALS[self.dtype]
        numbers = [self.d, t.slice(self.dv), self.slices, t.m, t.n, t.warps, t.stages, self.load == 16, self.mask, self.score]
        return [self.kind, real, CUDA_TYPES[self.out], *numbers, *[True] * self.paged]


def instance(problem: Problem, mask: int, score: int, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    dtype = name_of(problem.q.dtype)
    kind = tiles_fp.arithmetic(dtype, problem.precision, info)
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    load = width(structs.copy_bytes((problem.q, problem.k, problem.v)), dtype)
    tile = tiles_fp.prefill_fp(kind, dtype, d, dv, info, problem.bias is not None and problem.mask is not None)
    if tile is None:
        return None
    return Instance(dtype, name_of(problem.out_dtype), d, dv, tile, mask, score, load, problem.paged, kind=kind)


def width(copy_bytes: int, dtype: str) -> int:
    """Bytes of one copy: 16 where all rows allow it, else those of one number."""
    return 16 if copy_bytes == 16 else ITEMSIZE[dtype]


def with_load(chosen: Instance, load: int) -> Instance:
    """The instance for arrays that allow copies of ``load`` bytes."""
    return dataclasses.replace(chosen, load=width(load, chosen.dtype))


def why(chosen: Instance) -> str:
    """In words, what computes."""
    how = {
        tiles_fp.SIMT: "fused multiply-adds", tiles_fp.TF32: "tensor cores (TF32)", tiles_fp.DMMA: "tensor cores (float64)",
        tiles_fp.TF32X3: "tensor cores (three TF32 products for one of float32)",
    }
    return how[chosen.kind]


def common(info: DeviceInfo) -> Iterator[Instance]:
    """Equal head sizes, full and causal, aligned arrays; and one of each rarer kind."""
    def make(
        dtype: str, d: int, mask: int, load: int = 16, score: int = 0, out: str | None = None, precision: str | None = None,
        paged: bool = False,
    ) -> Instance:
        kind = tiles_fp.arithmetic(dtype, precision, info)
        tile = tiles_fp.prefill_fp(kind, dtype, d, d, info, bool(mask & MASK_ARRAY) and score >= SCORE_BIAS)
        assert tile is not None
        return Instance(dtype, out or dtype, d, d, tile, mask, score, load, paged, kind=kind)

    for d in tiles.HEAD_CLASSES:
        for dtype in _REALS:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield make(dtype, d, mask)
        if info.cc >= (8, 0):
            yield make("float32", d, MASK_RIGHT, precision="tf32")
    for dtype in _REALS:
        yield make(dtype, 64, MASK_RIGHT | MASK_LEFT)
        yield make(dtype, 128, MASK_RIGHT, load=ITEMSIZE[dtype])
        for score in (SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_SOFTCAP | SCORE_ALIBI):
            yield make(dtype, 128, MASK_RIGHT, score=score)
        for d in (64, 128):
            yield make(dtype, d, MASK_LENGTH, score=SCORE_BIAS)
            yield make(dtype, d, MASK_LENGTH | MASK_ARRAY)
            yield make(dtype, d, MASK_RIGHT, paged=True)
            rarest = SCORE_SOFTCAP | SCORE_ALIBI | (SCORE_BIAS32 if dtype == "float64" else SCORE_BIAS)
            yield make(dtype, d, MASK_RIGHT | MASK_LEFT | MASK_ARRAY, score=rarest, paged=True)
    yield make("float32", 64, MASK_LENGTH, out="float16")
