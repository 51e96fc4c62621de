"""Tile tables of prefill_fp, the raw CUDA kernel for float32 and float64: data, and the choice of the first that fits."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo
from .tiles import RESERVED_SHARED_MEMORY

# Kinds of arithmetic, as in fp_mma.cuh and fp_products.cuh.
SIMT, TF32, TF32X3, DMMA = "Simt", "Tf32", "Tf32x3", "Dmma"


class FpTile(NamedTuple):
    """How a block of prefill_fp works.

    Attributes
    ----------
    m, n : int
        Query rows of the block, keys of a step.
    warps : int
        They share the rows, 16 or 32 each.
    stages : int
        Tiles of K and of V in shared memory. 2: the next tile is loaded during a whole step, with one barrier a step.
        1: K is loaded while V is used and the other way round.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    columns : int
        The most value columns of a block. Wider values are done by several blocks, each of which computes the scores anew.
    """

    m: int
    n: int
    warps: int
    stages: int
    resident: int
    columns: int = 128

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def slice(self, dv: int) -> int:
        """Value columns of a block, for a padded number of value columns: a whole number of 32."""
        slices = -(-dv // self.columns)
        return -(-dv // slices // 32) * 32

    def shared_memory(self, itemsize: int, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; PrefillFp::SMEM_BYTES counts the same."""
        tiles = itemsize * (self.m * d + self.stages * self.n * (d + self.slice(dv)))
        return tiles + (8 * self.m if itemsize == 4 else 0)  # two numbers of each row that are saved in float32


# By arithmetic and the largest padded head size that a line is for, in order of preference. The first choices are the fastest of those
# measured on an H200 that keep to their registers; the comments give its TFLOP/s at 8,192 keys.
_NARROW, _LAST = FpTile(32, 16, 2, 1, 1), FpTile(16, 16, 1, 1, 1)  # where little shared memory is left
TILES: dict[str, dict[int, tuple[FpTile, ...]]] = {
    TF32X3: {
        64: (FpTile(128, 32, 4, 2, 2),),  # 59
        128: (FpTile(128, 32, 8, 2, 1),),  # 53; 59 with 32 rows a warp, (128, 32, 4, 1, 2), which spills some registers
        256: (FpTile(128, 32, 8, 1, 1), FpTile(64, 32, 4, 1, 1)),  # 36
    },
    TF32: {
        64: (FpTile(128, 64, 4, 2, 2), FpTile(128, 32, 4, 1, 2)),  # 141
        128: (FpTile(128, 32, 4, 1, 2), FpTile(64, 32, 4, 1, 1)),  # 139
        256: (FpTile(128, 32, 8, 1, 1), FpTile(64, 32, 4, 1, 1), FpTile(64, 16, 4, 1, 1)),  # 70
    },
    DMMA: {
        64: (FpTile(64, 16, 4, 2, 3), FpTile(64, 16, 4, 1, 1)),  # 34
        128: (FpTile(128, 32, 8, 1, 1), FpTile(128, 16, 8, 1, 1), FpTile(64, 16, 4, 1, 1)),  # 40
        256: (FpTile(128, 16, 8, 1, 1), FpTile(64, 16, 4, 1, 1), _NARROW, _LAST),  # 17 at 256, with the second
    },
    "Simt float32": {
        64: (FpTile(128, 64, 4, 2, 2), FpTile(128, 32, 4, 1, 2)),  # 35
        128: (FpTile(128, 32, 4, 1, 2), FpTile(128, 32, 4, 1, 1), FpTile(64, 16, 2, 1, 1)),  # 36
        256: (FpTile(128, 16, 4, 1, 1), FpTile(64, 16, 2, 1, 1), FpTile(32, 16, 1, 1, 1)),  # 20
    },
    "Simt float64": {  # of GPUs with a 32nd of the rate
        128: (_NARROW, _LAST),
        256: (FpTile(16, 8, 1, 1, 1, 64),),
    },
}

# Of calls that have at most so many rows a block, where a warp has the block to itself. Reading is what takes the time, and many small
# blocks hide it best: with 32 keys, or two stages, there are fewer of them, which on an H200 took up to 1.9 times as long.
FEW_ROWS = 16
FEW_KEYS = 16, 8  # of a step, in order of preference
FEW_RESIDENT = 8  # blocks of a multiprocessor at most: more would take registers from them

# Tried first where both a bias and a mask array are added, whose addresses need registers.
BOTH_ARRAYS: dict[str, dict[int, FpTile]] = {
    TF32X3: {64: FpTile(128, 32, 8, 2, 1)},
    TF32: {128: FpTile(128, 32, 8, 1, 1)},
    DMMA: {64: FpTile(64, 16, 4, 2, 2)},
}


def arithmetic(dtype: str, precision: str | None, info: DeviceInfo) -> str:
    """Which pipeline multiplies: tensor cores where they are faster at the accuracy that is asked for."""
    if info.cc < (8, 0):
        return SIMT
    if dtype == "float64":
        return DMMA  # also where it is emulated by the few ordinary units: no slower than those
    if precision == "tf32":
        return TF32
    # Three products of TF32 against one of float32: chips for graphics have TF32 at half of the rate of float32.
    return TF32X3 if info.cc[1] == 0 and info.cc[0] in (8, 9, 10) else SIMT


def few_rows(kind: str, dtype: str, d: int, dv: int, info: DeviceInfo) -> FpTile | None:
    """The tile for few rows, with as many blocks as the GPU's shared memory holds; None if it holds none. Arguments as of `prefill_fp`."""
    reserved = RESERVED_SHARED_MEMORY if info.cc >= (8, 0) else 0
    for n in FEW_KEYS:
        tile = FpTile(FEW_ROWS, n, 1, 1, 1, 64 if kind == SIMT and dtype == "float64" else 128)
        need = tile.shared_memory(8 if dtype == "float64" else 4, d, dv)
        if need <= info.shared_memory_block:
            return tile._replace(resident=min(FEW_RESIDENT, info.shared_memory_sm // (need + reserved)))
    return None


def prefill_fp(kind: str, dtype: str, d: int, dv: int, info: DeviceInfo, both_arrays: bool = False) -> FpTile | None:
    """The first tile of the table whose resident blocks fit the GPU's shared memory, or else one block; None if none does.

    ``d`` and ``dv`` are padded head sizes; ``both_arrays``: there are a bias and a mask.
    """
    table = TILES[f"{kind} {dtype}" if kind == SIMT else kind]
    size = next(size for size in table if max(d, dv) <= size)
    tiles = table[size]
    if both_arrays and size in BOTH_ARRAYS.get(kind, {}):
        tiles = (BOTH_ARRAYS[kind][size], *tiles)
    needs = [tile.shared_memory(8 if dtype == "float64" else 4, d, dv) for tile in tiles]
    reserved = RESERVED_SHARED_MEMORY if info.cc >= (8, 0) else 0
    fit = [tile for tile, need in zip(tiles, needs, strict=True) if need <= info.shared_memory_block]
    together = (
        tile for tile, need in zip(tiles, needs, strict=True) if tile in fit and tile.resident * (need + reserved) <= info.shared_memory_sm
    )
    return next(together, fit[0] if fit else None)
