"""What instances of the raw prefill kernels have in common: their readable names, and the stubs that fix what is fixed at compile time."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from .. import jit, launch, structs
from ..types import UNBOUNDED, Problem

MASK_LENGTH, MASK_RIGHT, MASK_LEFT, MASK_ARRAY = 0, 1, 2, 4  # as in mask.cuh
SCORE_PLAIN, SCORE_SCALED, SCORE_SOFTCAP, SCORE_ALIBI, SCORE_BIAS, SCORE_BIAS32 = 0, 1, 2, 4, 8, 16  # as in score.cuh
SHORT_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
CUDA_TYPES = {"float16": "Fp16", "bfloat16": "Bf16", "float32": "float", "float64": "double"}
LARGEST_GRID = 2**31 - 1  # blocks
CLEAR_ROWS = 128  # of a block of clear_rows.cu
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class PrefillInstance:
    """What is fixed when a kernel is compiled. ``load`` is the width of its copies in bytes; that of one number for any strides."""

    dtype: str
    out: str
    d: int  # padded head sizes
    dv: int
    tile: Any  # of the kernel's own table
    mask: int = MASK_LENGTH
    score: int = SCORE_PLAIN
    load: int = 16

    KERNEL: ClassVar[str]  # "prefill_fa2", of prefill_fa2.cu
    TILES: ClassVar[str]  # the file that counts shared memory as the kernel does
    PARAMS: ClassVar[str] = "PrefillParams"
    flat = False  # which prefill_fa2 has as a field
    slices = 1  # blocks that share the value columns of the same rows
    paired = False  # two blocks in a row are a cluster
    packed = False  # rows of a tile are queries of all heads that share a key/value head

    @property
    def factor_left(self) -> bool:
        """Whether the scores of this kind leave a factor to the exponential."""
        return self.score == SCORE_PLAIN

    @property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        return self.tile.shared_memory(self.d, self.dv)

    @property
    def kernel_words(self) -> list[str]:
        """What names say of the kernel, beside its dtype."""
        return []

    @property
    def page_words(self) -> list[str]:
        """What names say of pages."""
        return []

    @property
    def tile_words(self) -> list[str]:
        """What names say of the tile."""
        t = self.tile
        return [f"m{t.m}n{t.n}w{t.warps}"]

    @property
    def preamble(self) -> str:
        """What stands before the stub."""
        return ""

    @property
    def arguments(self) -> list[Any]:
        """What the stub gives to the kernel's template."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Of the compiled function: "prefill_fa2_bf16_d128_m128n64w4s2_causal"."""
        heads = f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}"
        words = [self.KERNEL, SHORT_TYPES[self.dtype], *self.kernel_words, heads, *self.tile_words]
        words += [f"to_{SHORT_TYPES[self.out]}"] * (self.out != self.dtype)
        words += kind_words(self.mask, self.score)
        words += self.page_words + ["flat"] * self.flat
        if self.load != 16:
            words.append("strided" if self.load == ITEMSIZE[self.dtype] else f"load{self.load}")
        return "_".join(words)

    @functools.cached_property
    def source(self) -> jit.Source:
        """The kernel's file, with a stub that defines the function of this name."""
        template = "".join(word.capitalize() for word in self.KERNEL.split("_"))
        arguments = (str(x).lower() if isinstance(x, bool) else str(x) for x in self.arguments)
        cluster = "__cluster_dims__(2, 1, 1) " if self.paired else ""
        stub = self.preamble + (
            f"using Instance = {template}<{', '.join(arguments)}>;\n"
            f'static_assert(sizeof({self.PARAMS}) == {structs.PARAMS[self.PARAMS].itemsize}, "structs.py mirrors it");\n'
            f'static_assert(Instance::SMEM_BYTES == {self.shared_memory}, "{self.TILES} counts shared memory as the kernel does");\n'
            f'extern "C" __global__ void {cluster}__launch_bounds__(Instance::THREADS, {self.tile.resident}) {self.name}('
            f"const __grid_constant__ {self.PARAMS} p) {{\n"
            "    extern __shared__ __align__(1024) unsigned char smem[];\n"
            f"    {self.KERNEL}<Instance>(p, smem);\n"
            "}\n"
        )
        return jit.Source(f"{self.KERNEL}.cu", stub, self.name)


def mask_kind(problem: Problem) -> int:
    """What masks have for the window (causal included) and a boolean array."""
    left, right = (side != UNBOUNDED for side in problem.window)
    kind = MASK_RIGHT | MASK_LEFT if left else MASK_RIGHT if right else MASK_LENGTH
    return kind | (MASK_ARRAY if problem.mask is not None else 0)


def score_kind(problem: Problem) -> int:
    """SCORE_PLAIN where the scale can be folded into the exponential, else what the logits need."""
    kind = (SCORE_SOFTCAP if problem.softcap else 0) | (SCORE_ALIBI if problem.alibi_slopes is not None else 0)
    if problem.bias is not None:
        kind |= SCORE_BIAS if problem.bias.dtype == problem.q.dtype else SCORE_BIAS32
    foldable = 1e-30 < float(problem.scale) * structs.LOG2E < 1e30  # type: ignore[arg-type]
    return kind if kind or foldable else SCORE_SCALED


def backward_stub(name: str, call: str, threads: int, **constants: int) -> str:
    """The function of this name, which only calls another with BackwardParams p. ``constants``: which kernel and host must have alike."""
    same = "".join(f'static_assert({constant} == {value}, "as the host has it");\n' for constant, value in constants.items())
    return (
        f'static_assert(sizeof(BackwardParams) == {structs.BACKWARD_PARAMS.itemsize}, "structs.py mirrors it");\n{same}'
        f'extern "C" __global__ void __launch_bounds__({threads}) {name}(const __grid_constant__ BackwardParams p) {{\n'
        f"    {call}(p);\n"
        "}\n"
    )


def kind_words(mask: int, score: int) -> list[str]:
    """Words of an instance's name for its mask and score kinds."""
    words = ["window" if mask & MASK_LEFT else "causal"] if mask & (MASK_LEFT | MASK_RIGHT) else []
    words += ["mask"] * bool(mask & MASK_ARRAY)
    for bit, word in (
        (SCORE_SCALED, "scaled"), (SCORE_SOFTCAP, "softcap"), (SCORE_ALIBI, "alibi"), (SCORE_BIAS, "bias"), (SCORE_BIAS32, "bias32"),
    ):
        words += [word] * bool(score & bit)
    return words


@functools.cache
def clear_source(out_bytes: int, lse_bytes: int, flat: bool) -> jit.Source:
    """The kernel that clears the rows which others leave, where cu_seqlens_q is on the device; for elements of so many bytes."""
    name = f"clear_rows_out{8 * out_bytes}_lse{8 * lse_bytes}" + "_flat" * flat
    stub = (
        f'static_assert(sizeof(PrefillParams) == {structs.PREFILL_PARAMS.itemsize}, "structs.py mirrors params.cuh");\n'
        f'static_assert(CLEAR_ROWS == {CLEAR_ROWS}, "as cuda_instance.py has it");\n'
        f'extern "C" __global__ void __launch_bounds__(CLEAR_ROWS) {name}(const __grid_constant__ PrefillParams p) {{\n'
        f"    clear_rows<u{8 * out_bytes}, {'double' if lse_bytes == 8 else 'float'}, {str(flat).lower()}>(p);\n"
        "}\n"
    )
    return jit.Source("clear_rows.cu", stub, name)


def loaded(kernels: Iterable[tuple[jit.Source, int, int, int]], place: int, early: bool = False) -> list[launch.Step]:
    """Launches on a device: of kernels with their blocks, threads and bytes of shared memory; those without blocks are left out."""
    return [
        launch.Step(jit.function(source, place, shared), grid, threads, shared, early) for source, grid, threads, shared in kernels if grid
    ]
