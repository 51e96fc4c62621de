"""The raw CUDA kernel for float32 and float64: which instance a problem needs. cuda.py asks it for such problems and launches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from .. import jit, launch, tiles, tiles_fp
from ..device import DeviceInfo
from ..tiles_fp import FpTile
from ..types import Problem, name_of

SHORT_TYPES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
_OUT_TYPES = {"float32": "float", "float64": "double", "float16": "Fp16", "bfloat16": "Bf16"}
_REALS = {"float32": "Exact32", "float64": "Exact64"}
_ITEMSIZE = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Instance:
    """What is fixed when prefill_fp is compiled. ``kind`` is one of tiles_fp; ``load`` 16 or, for any strides, one number's size."""

    kind: str
    dtype: str
    out: str
    d: int  # padded head sizes
    dv: int
    tile: FpTile
    mask: int
    score: int
    load: int = 16
    paged: bool = False

    flat = False  # which the 16-bit kernel has

    @property
    def factor_left(self) -> bool:
        """Whether the exponential has the scale."""
        return self.score == 0

    @property
    def slices(self) -> int:
        """Blocks that share the value columns of the same rows."""
        return -(-self.dv // self.tile.slice(self.dv))

    @property
    def name(self) -> str:
        from . import cuda

        heads = f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}"
        t = self.tile
        words = ["prefill_fp", SHORT_TYPES[self.dtype], self.kind.lower(), heads, f"m{t.m}n{t.n}w{t.warps}s{t.stages}"]
        if self.slices > 1:
            words.append(f"by{self.slices}")
        if self.out != self.dtype:
            words.append(f"to_{SHORT_TYPES[self.out]}")
        words += cuda.kind_words(self.mask, self.score)
        words += ["paged"] * self.paged
        if self.load != 16:
            words.append("strided")
        return "_".join(words)

    @property
    def shared_memory(self) -> int:
        return self.tile.shared_memory(_ITEMSIZE[self.dtype], self.d, self.dv)

    @functools.cached_property
    def source(self) -> jit.Source:
        t = self.tile
        real = "Fast32" if self.kind == tiles_fp.TF32 else _REALS[self.dtype]
        numbers = (
            self.d, t.slice(self.dv), self.slices, t.m, t.n, t.warps, t.stages, str(self.load == 16).lower(), self.mask, self.score,
            *("true",) * self.paged,
        )
        stub = (
            f"using Instance = PrefillFp<{self.kind}, {real}, {_OUT_TYPES[self.out]}, {', '.join(map(str, numbers))}>;\n"
            f'static_assert(sizeof(PrefillParams) == {launch.PREFILL_PARAMS.itemsize}, "launch.py mirrors params.cuh");\n'
            f'static_assert(Instance::SMEM_BYTES == {self.shared_memory}, "tiles_fp.py counts shared memory as the kernel does");\n'
            f'extern "C" __global__ void __launch_bounds__(Instance::THREADS, {t.resident}) {self.name}('
            "const __grid_constant__ PrefillParams p) {\n"
            "    extern __shared__ __align__(1024) unsigned char smem[];\n"
            "    prefill_fp<Instance>(p, smem);\n"
            "}\n"
        )
        return jit.Source("prefill_fp.cu", stub, self.name)


def instance(problem: Problem, mask: int, score: int, info: DeviceInfo) -> Instance | None:
    """The kernel instance for these arrays, or None if no tile fits the GPU."""
    dtype = name_of(problem.q.dtype)
    kind = tiles_fp.arithmetic(dtype, problem.precision, info)
    d, dv = tiles.head_class(problem.head_dim), tiles.head_class(problem.head_dim_v)
    load = width(launch.copy_bytes((problem.q, problem.k, problem.v)), dtype)
    tile = tiles_fp.prefill_fp(kind, dtype, d, dv, info, problem.bias is not None and problem.mask is not None)
    if tile is None:
        return None
    return Instance(kind, dtype, name_of(problem.out_dtype), d, dv, tile, mask, score, load, problem.paged)


def width(copy_bytes: int, dtype: str) -> int:
    """Bytes of one copy: 16 where all rows allow it, else those of one number."""
    return 16 if copy_bytes == 16 else _ITEMSIZE[dtype]


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
    from . import cuda

    def make(
        dtype: str, d: int, mask: int, load: int = 16, score: int = 0, out: str | None = None, precision: str | None = None,
        paged: bool = False,
    ) -> Instance:
        kind = tiles_fp.arithmetic(dtype, precision, info)
        tile = tiles_fp.prefill_fp(kind, dtype, d, d, info, bool(mask & cuda.MASK_ARRAY) and score >= cuda.SCORE_BIAS)
        assert tile is not None
        return Instance(kind, dtype, out or dtype, d, d, tile, mask, score, load, paged)

    for d in tiles.HEAD_CLASSES:
        for dtype in _REALS:
            for mask in (cuda.MASK_LENGTH, cuda.MASK_RIGHT):
                yield make(dtype, d, mask)
        if info.cc >= (8, 0):
            yield make("float32", d, cuda.MASK_RIGHT, precision="tf32")
    for dtype in _REALS:
        yield make(dtype, 64, cuda.MASK_RIGHT | cuda.MASK_LEFT)
        yield make(dtype, 128, cuda.MASK_RIGHT, load=_ITEMSIZE[dtype])
        for score in (cuda.SCORE_SCALED, cuda.SCORE_SOFTCAP, cuda.SCORE_ALIBI, cuda.SCORE_SOFTCAP | cuda.SCORE_ALIBI):
            yield make(dtype, 128, cuda.MASK_RIGHT, score=score)
        for d in (64, 128):
            yield make(dtype, d, cuda.MASK_LENGTH, score=cuda.SCORE_BIAS)
            yield make(dtype, d, cuda.MASK_LENGTH | cuda.MASK_ARRAY)
            yield make(dtype, d, cuda.MASK_RIGHT, paged=True)
            rarest = cuda.SCORE_SOFTCAP | cuda.SCORE_ALIBI | (cuda.SCORE_BIAS32 if dtype == "float64" else cuda.SCORE_BIAS)
            yield make(dtype, d, cuda.MASK_RIGHT | cuda.MASK_LEFT | cuda.MASK_ARRAY, score=rarest, paged=True)
    yield make("float32", 64, cuda.MASK_LENGTH, out="float16")
