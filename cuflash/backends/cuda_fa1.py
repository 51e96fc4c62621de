"""FlashAttention-1 as a raw CUDA kernel: which instance a problem needs. cuda.py asks it for kernel="fa1" and launches."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from .. import jit, launch, tiles, tiles_fa1
from ..device import DeviceInfo
from ..tiles_fa1 import Fa1Tile
from ..types import Problem, name_of


@dataclass(frozen=True)
class Instance:
    """What is fixed when prefill_fa1 is compiled. ``load`` is the width of its copies in bytes, 2 for any strides."""

    dtype: str
    out: str
    d: int  # padded head sizes
    dv: int
    tile: Fa1Tile
    mask: int = 0
    score: int = 0
    load: int = 16

    paged = flat = False  # which prefill_fa2 has
    slices = 1  # blocks that share the value columns of the same rows

    @property
    def factor_left(self) -> bool:
        """Whether the exponential has the scale."""
        return self.score == 0

    @property
    def name(self) -> str:
        from . import cuda

        heads = f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}"
        t = self.tile
        words = ["prefill_fa1", cuda.SHORT_TYPES[self.dtype], heads, f"m{t.m}n{t.n}w{t.warps}"]
        if self.out != self.dtype:
            words.append(f"to_{cuda.SHORT_TYPES[self.out]}")
        words += cuda.kind_words(self.mask, self.score)
        if self.load != 16:
            words.append("strided" if self.load == 2 else f"load{self.load}")
        return "_".join(words)

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(self.d, self.dv)

    @functools.cached_property
    def source(self) -> jit.Source:
        from . import cuda

        t = self.tile
        numbers = (self.d, self.dv, t.m, t.n, t.warps, self.load, self.mask, self.score)
        stub = (
            f"using Instance = PrefillFa1<{cuda.TYPES[self.dtype]}, {cuda.TYPES[self.out]}, {', '.join(map(str, numbers))}>;\n"
            f'static_assert(sizeof(PrefillParams) == {launch.PREFILL_PARAMS.itemsize}, "launch.py mirrors params.cuh");\n'
            f'static_assert(Instance::SMEM_BYTES == {self.shared_memory}, "tiles_fa1.py counts shared memory as the kernel does");\n'
            f'extern "C" __global__ void __launch_bounds__(Instance::THREADS, {t.resident}) {self.name}('
            "const __grid_constant__ PrefillParams p) {\n"
            "    extern __shared__ __align__(1024) unsigned char smem[];\n"
            "    prefill_fa1<Instance>(p, smem);\n"
            "}\n"
        )
        return jit.Source("prefill_fa1.cu", stub, self.name)


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
    from . import cuda

    def make(dtype: str, d: int, mask: int, load: int = 16, score: int = 0, out: str | None = None) -> Instance:
        tile = tiles_fa1.prefill_fa1(d, d, info)
        assert tile is not None
        return Instance(dtype, out or dtype, d, d, tile, mask, score, load)

    dtypes = ("float16",) if info.cc < (8, 0) else ("float16", "bfloat16")
    for d in tiles.HEAD_CLASSES:
        for dtype in dtypes:
            for mask in (cuda.MASK_LENGTH, cuda.MASK_RIGHT):
                yield make(dtype, d, mask)
    for d in (64, 128):
        yield make("float16", d, cuda.MASK_RIGHT | cuda.MASK_LEFT)
        yield make("float16", d, cuda.MASK_RIGHT, score=cuda.SCORE_SCALED)
        for load in (8, 4, 2):
            yield make("float16", d, cuda.MASK_RIGHT, load=load)
    if "bfloat16" in dtypes:
        yield make("float16", 64, cuda.MASK_LENGTH, out="bfloat16")
