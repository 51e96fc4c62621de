"""FlashAttention-1 as a raw CUDA kernel: which instance a problem needs. cuda.py asks it for kernel="fa1" and launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import tiles, tiles_fa1
from ..device import DeviceInfo
from ..types import Problem, name_of
from .cuda_instance import CUDA_TYPES, MASK_LEFT, MASK_LENGTH, MASK_RIGHT, SCORE_SCALED, PrefillInstance


@dataclass(frozen=True)
class Instance(PrefillInstance):
    """What is fixed when prefill_fa1 is compiled."""

    KERNEL, TILES = "prefill_fa1", "tiles_fa1.py"

    @property
    def arguments(self) -> list[Any]:
        t = self.tile
        numbers = [self.d, self.dv, t.m, t.n, t.warps, self.load, self.mask, self.score]
        return [CUDA_TYPES[self.dtype], CUDA_TYPES[self.out], *numbers]


def instance(problem: Problem, mask: int, score: int, load: int, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if its tile does not fit the GPU."""
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    tile = tiles_fa1.prefill_fa1(d, dv, info)
    if tile is None:
        return None
    return Instance(name_of(problem.q.dtype), name_of(problem.out_dtype), d, dv, tile, mask, score, load)


def decline(problem: Problem) -> str | None:
    """What of a problem is left to kernel="fa2", in words, or None."""
    dtype = name_of(problem.q.dtype)
    if dtype not in ("float16", "bfloat16"):
        return f"{dtype} arrays; it takes float16 and bfloat16, kernel='fa2' all four"
    asked = {
        "softcap": problem.softcap, "alibi_slopes": problem.alibi_slopes is not None, "sinks": problem.sinks is not None,
        "bias": problem.bias is not None, "mask": problem.mask is not None, "page_table": problem.paged,
    }
    name = next((name for name, there in asked.items() if there), None)
    return f"it has no {name}, being there to be read and compared; kernel='fa2' has it" if name else None


def common(info: DeviceInfo) -> Iterator[Instance]:
    """Equal head sizes, full and causal, aligned arrays; and one of each rarer kind."""
    def make(dtype: str, d: int, mask: int, load: int = 16, score: int = 0, out: str | None = None) -> Instance:
        tile = tiles_fa1.prefill_fa1(d, d, info)
        assert tile is not None
        return Instance(dtype, out or dtype, d, d, tile, mask, score, load)

    dtypes = ("float16",) if info.cc < (8, 0) else ("float16", "bfloat16")
    for d in tiles.HEAD_CLASSES:
        for dtype in dtypes:
            for mask in (MASK_LENGTH, MASK_RIGHT):
                yield make(dtype, d, mask)
    for d in (64, 128):
        yield make("float16", d, MASK_RIGHT | MASK_LEFT)
        yield make("float16", d, MASK_RIGHT, score=SCORE_SCALED)
        for load in (8, 4, 2):
            yield make("float16", d, MASK_RIGHT, load=load)
    if "bfloat16" in dtypes:
        yield make("float16", 64, MASK_LENGTH, out="bfloat16")
