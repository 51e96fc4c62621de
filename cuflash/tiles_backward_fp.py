"""Tile tables of backward_fp, the raw backward pass in float32 and float64: data, and the choice of the first that fits."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo
from .tiles import RESERVED_SHARED_MEMORY
from .tiles_fp import DMMA, SIMT


class BackwardTile(NamedTuple):
    """How a block of one of the two kernels of backward_fp works.

    Attributes
    ----------
    m, n : int
        Query rows or keys that a block owns; those of the others in a step.
    warps : int
        They share what the block owns, 16 or 32 each.
    stages : int
        Tiles of the others in shared memory. 2: the next one is loaded during a whole step.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    columns : int
        The most columns that a block has of a gradient. More are done by several blocks, each of which computes the scores anew.
    """

    m: int
    n: int
    warps: int
    stages: int
    resident: int
    columns: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def warp_rows(self) -> int:
        return self.m // self.warps

    def slices(self, columns: int) -> int:
        """Blocks that share so many columns."""
        return -(-columns // self.columns)

    def shared_memory(self, itemsize: int, d: int, dv: int, of_keys: bool) -> int:
        """Bytes of dynamic shared memory for padded head sizes; BackwardFp::SMEM_BYTES counts the same."""
        return itemsize * ((self.m + self.stages * self.n) * (d + dv) + 4 * self.stages * self.n * of_keys)


# By arithmetic, dtype and the largest padded head size that a line is for, in order of preference; of the two kernels.
ROWS: dict[str, dict[int, tuple[BackwardTile, ...]]] = {
    "Simt float32": {
        64: (BackwardTile(128, 32, 4, 1, 2, 64), BackwardTile(64, 32, 4, 1, 2, 64), BackwardTile(64, 32, 4, 1, 1, 64)),
        128: (BackwardTile(64, 32, 4, 1, 2, 128), BackwardTile(32, 16, 2, 1, 1, 128)),
        256: (BackwardTile(64, 16, 4, 1, 1, 128), BackwardTile(32, 16, 2, 1, 1, 128), BackwardTile(16, 8, 1, 1, 1, 128)),
    },
    "Dmma float64": {
        64: (BackwardTile(64, 16, 4, 1, 2, 64), BackwardTile(32, 16, 2, 1, 1, 64)),
        128: (BackwardTile(64, 16, 4, 1, 1, 128), BackwardTile(32, 16, 2, 1, 1, 128)),
        256: (BackwardTile(32, 16, 2, 1, 1, 128), BackwardTile(16, 16, 1, 1, 1, 128)),
    },
    "Simt float64": {  # of GPUs with a 32nd of the rate
        128: (BackwardTile(32, 16, 2, 1, 1, 64), BackwardTile(16, 8, 1, 1, 1, 64)),
        256: (BackwardTile(16, 8, 1, 1, 1, 64),),
    },
}
KEYS: dict[str, dict[int, tuple[BackwardTile, ...]]] = {
    "Simt float32": {
        64: (BackwardTile(128, 16, 4, 2, 2, 64), BackwardTile(64, 32, 4, 1, 2, 64), BackwardTile(64, 32, 4, 1, 1, 64)),
        128: (BackwardTile(64, 16, 4, 2, 2, 128), BackwardTile(32, 16, 2, 1, 1, 128)),
        256: (BackwardTile(64, 16, 4, 1, 1, 128), BackwardTile(32, 16, 2, 1, 1, 128), BackwardTile(16, 8, 1, 1, 1, 128)),
    },
    "Dmma float64": {
        64: (BackwardTile(64, 16, 4, 1, 2, 64), BackwardTile(32, 16, 2, 1, 1, 64)),
        128: (BackwardTile(64, 16, 4, 1, 1, 64), BackwardTile(32, 16, 2, 1, 1, 64)),
        256: (BackwardTile(32, 16, 2, 1, 1, 64), BackwardTile(16, 16, 1, 1, 1, 64)),
    },
    "Simt float64": {
        128: (BackwardTile(32, 16, 2, 1, 1, 32), BackwardTile(16, 8, 1, 1, 1, 32)),
        256: (BackwardTile(16, 8, 1, 1, 1, 32),),
    },
}


def backward_fp(
    dtype: str, d: int, dv: int, info: DeviceInfo, more: bool = False,
) -> tuple[str, BackwardTile, BackwardTile] | None:
    """The kind of arithmetic, the tile of rows and that of keys for padded head sizes; None if the GPU has too little shared memory.

    ``more``: there are a softcap, ALiBi, a bias or a mask array, whose numbers need registers; then no warp has 32 rows.

    float32 is multiplied in float32: products of three TF32 ones have 22 bits, of which differences such as dP - delta leave fewer.
    float64 takes the tensor cores that prefill_fp takes, unless only tiles without them fit.
    """
    for kind in (DMMA, SIMT) if dtype == "float64" and info.cc >= (8, 0) else (SIMT,):
        rows, keys = (
            _first(table[f"{kind} {dtype}"], dtype, d, dv, info, more, of_keys) for table, of_keys in ((ROWS, False), (KEYS, True))
        )
        if rows is not None and keys is not None:
            return kind, rows, keys
    return None


def _first(
    table: dict[int, tuple[BackwardTile, ...]], dtype: str, d: int, dv: int, info: DeviceInfo, more: bool, of_keys: bool,
) -> BackwardTile | None:
    """The first tile whose resident blocks fit the GPU's shared memory, or else one block; None if none does."""
    tiles = [tile for tile in table[next(size for size in table if max(d, dv) <= size)] if tile.warp_rows == 16 or not more]
    reserved = RESERVED_SHARED_MEMORY if info.cc >= (8, 0) else 0
    needs = {tile: tile.shared_memory(8 if dtype == "float64" else 4, d, dv, of_keys) for tile in tiles}
    fit = [tile for tile in tiles if needs[tile] <= info.shared_memory_block]
    together = (tile for tile in fit if tile.resident * (needs[tile] + reserved) <= info.shared_memory_sm)
    return next(together, fit[0]._replace(resident=1) if fit else None)
