"""Tile table of prefill_fa1, the raw CUDA kernel whose warps share the keys: data, and the choice of the first that fits."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo
from .tiles import LARGEST_HEAD, family


class Fa1Tile(NamedTuple):
    """How a block of prefill_fa1 works.

    Attributes
    ----------
    m, n : int
        Query rows of the block, keys of a step.
    warps : int
        They share the keys of a step, a whole number of 16 each; every warp has all rows.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    """

    m: int
    n: int
    warps: int
    resident: int

    stages = 1  # tiles of K and of V in shared memory

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; PrefillFa1::SMEM_BYTES counts the same."""
        partial_results = 4 * self.warps * self.m * dv  # they take the place of keys and values
        return 2 * self.m * d + max(2 * self.n * (d + dv), partial_results) + 8 * self.warps * self.m


# By the family of tiles.py and the largest padded head size that a line is for. A warp holds its partial output, M x Dv in float32, in
# registers: 32 rows up to Dv = 128, 16 above. The comment gives shared memory at D = Dv.
TILES: dict[str, dict[int, Fa1Tile]] = {
    "sm_90": {
        64: Fa1Tile(32, 256, 4, 2),  # 69 KiB
        128: Fa1Tile(32, 128, 4, 2),  # 73 KiB
        LARGEST_HEAD: Fa1Tile(16, 128, 4, 1),  # 136.5 KiB
    },
    "sm_80": {
        64: Fa1Tile(32, 256, 4, 2),
        128: Fa1Tile(32, 128, 4, 2),
        LARGEST_HEAD: Fa1Tile(16, 64, 4, 2),
    },
    "sm_86": {
        64: Fa1Tile(32, 128, 4, 2),  # 37 KiB
        96: Fa1Tile(16, 128, 4, 1),  # 51.5 KiB
        128: Fa1Tile(16, 64, 4, 2),  # 36.5 KiB
        LARGEST_HEAD: Fa1Tile(16, 64, 4, 1),  # 72.5 KiB
    },
    "sm_75": {
        64: Fa1Tile(16, 64, 4, 2),  # 18.5 KiB
        128: Fa1Tile(16, 64, 4, 1),  # 36.5 KiB
        192: Fa1Tile(16, 64, 4, 1),  # 54.5 KiB
        LARGEST_HEAD: Fa1Tile(16, 32, 2, 1),  # 40.25 KiB
    },
}
# not measured; B200's compiler needs some more registers than 32 rows leave it
TILES["sm_100"] = {**TILES["sm_90"], 128: Fa1Tile(16, 128, 4, 2)}


def prefill_fa1(d: int, dv: int, info: DeviceInfo) -> Fa1Tile | None:
    """The tile for padded head sizes; None if its shared memory does not fit the device."""
    table = TILES[family(info)]
    tile = table[next(size for size in table if max(d, dv) <= size)]
    return tile if tile.shared_memory(d, dv) <= info.shared_memory_block else None
