"""Tiles of the raw decode kernel: data, and the choice of the first that fits."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo
from .tiles import RESERVED_SHARED_MEMORY


class DecodeTile(NamedTuple):
    """How a block of decode works.

    Attributes
    ----------
    m, n : int
        Rows (query heads of a key/value head, times queries) of the block, keys of a step.
    warps, row_warps : int
        ``row_warps`` of the warps share the rows, the others the keys, 16 or more each.
    stages : int
        Tiles of K and V in shared memory; all but one are under way.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    q_registers : bool
        Keep the queries in registers instead of reading them from shared memory in every step.
    """

    m: int
    n: int
    warps: int
    row_warps: int
    stages: int
    resident: int = 1
    q_registers: bool = True

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; Decode::SMEM_BYTES counts the same."""
        stage = 2 * (self.n * (d + dv) + self.m * d)
        return self.stages * (stage + 64) + 8 * self.warps // self.row_warps * self.m + 16


LARGEST_ROWS = 64  # of a block; more are done by several
MOST_STAGES = 4  # three tiles of 32 KiB under way, of which 36 KiB would do: on an H200 as fast as more, or 1 to 3 % faster

# By the largest padded head size that a line is for: tiles of 16, 32 and 64 rows. A warp holds 16 rows of all value columns in registers.
# The second choices are for little shared memory. Stages are as many as fit.
DECODE: dict[int, dict[int, tuple[DecodeTile, ...]]] = {
    64: {
        16: (DecodeTile(16, 128, 4, 1, 0), DecodeTile(16, 64, 4, 1, 0)),
        32: (DecodeTile(32, 128, 8, 2, 0), DecodeTile(32, 64, 8, 2, 0)),
        64: (DecodeTile(64, 128, 8, 4, 0), DecodeTile(64, 64, 8, 4, 0)),
    },
    128: {
        16: (DecodeTile(16, 64, 4, 1, 0), DecodeTile(32, 32, 4, 2, 0)),
        32: (DecodeTile(32, 64, 8, 2, 0), DecodeTile(32, 32, 4, 2, 0)),
        64: (DecodeTile(64, 64, 8, 4, 0), DecodeTile(64, 32, 4, 4, 0), DecodeTile(64, 16, 4, 4, 0)),
    },
    256: {
        16: (DecodeTile(16, 64, 4, 1, 0, 1, False), DecodeTile(32, 32, 4, 2, 0, 1, False), DecodeTile(64, 16, 4, 4, 0, 1, False)),
        32: (DecodeTile(32, 32, 4, 2, 0, 1, False), DecodeTile(64, 16, 4, 4, 0, 1, False)),
        64: (DecodeTile(64, 32, 4, 4, 0, 1, False), DecodeTile(64, 16, 4, 4, 0, 1, False)),
    },
}


def stages(tile: DecodeTile, d: int, dv: int, memory: int) -> int:
    """Stages that fit so many bytes of shared memory, at most MOST_STAGES."""
    fixed = tile._replace(stages=0).shared_memory(d, dv)
    return min(MOST_STAGES, (memory - fixed) // (tile._replace(stages=1).shared_memory(d, dv) - fixed))


def decode(rows: int, d: int, dv: int, info: DeviceInfo) -> DecodeTile | None:
    """The tile for so many rows and padded head sizes: the first of the table of which two stages fit the GPU; None if there is none."""
    table = next(table for size, table in DECODE.items() if max(d, dv) <= size)
    for tile in table[next((m for m in table if rows <= m), LARGEST_ROWS)]:
        reserved = RESERVED_SHARED_MEMORY if info.cc >= (8, 0, 1, False) else 0
        memory = min(info.shared_memory_block, info.shared_memory_sm // tile.resident - reserved)
        merging = 4 * 32 * tile.m * tile.warps // tile.row_warps  # the fewest columns at a time, in the place of K and V
        if (fit := stages(tile, d, dv, memory)) >= 2 and merging <= 2 * tile.n * (d + dv):
            return tile._replace(stages=fit)
    return None
