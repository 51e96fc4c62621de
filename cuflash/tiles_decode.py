"""Tiles of the raw decode kernel: data, and the choice of the first that fits."""

from __future__ import annotations

from typing import NamedTuple

from . import tiles
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
    wgmma : bool
        Four warps multiply together, by instructions that sm_90a alone has; rows must not see different keys.
    """

    m: int
    n: int
    warps: int
    row_warps: int
    stages: int
    resident: int = 1
    q_registers: bool = True
    wgmma: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps + (128 if self.wgmma else 0)

    def shared_memory(self, d: int, dv: int, itemsize: int = 2) -> int:
        """Bytes of dynamic shared memory for padded head sizes; Decode::SMEM_BYTES counts the same. ``itemsize``: of keys and values."""
        queries = 2 * max(self.m, 16) * d  # each stage has a place for them, unless warpgroups multiply
        scales, factors = (8 * self.n, 4 * self.m) if itemsize == 1 else (0, 0)
        stage = itemsize * self.n * (d + dv) + scales + 64 + (16 if self.wgmma else queries)
        return self.stages * stage + queries * self.wgmma + 8 * self.warps // self.row_warps * self.m + 16 + factors


MOST_STAGES = 4  # three tiles of 32 KiB under way, of which 36 KiB would do: on an H200 as fast as more, or 1 to 3 % faster


def _lean(m: int, n: int, warps: int, row_warps: int, resident: int = 1) -> DecodeTile:
    """A tile with the queries in shared memory: value columns or rows take the registers."""
    return DecodeTile(m, n, warps, row_warps, 0, resident, False)


# By the largest padded head size that a line is for: tiles of 16 rows and more, of which a call with more than the largest takes several.
# A warp holds 16 rows, or 32 of the largest tiles, of all value columns in registers. Further choices are for little shared memory. Stages
# are as many as fit.
DECODE: dict[int, dict[int, tuple[DecodeTile, ...]]] = {
    64: {
        16: (DecodeTile(16, 128, 4, 1, 0), DecodeTile(16, 64, 4, 1, 0)),
        32: (DecodeTile(32, 128, 8, 2, 0), DecodeTile(32, 64, 8, 2, 0)),
        64: (DecodeTile(64, 128, 8, 4, 0), DecodeTile(64, 64, 8, 4, 0)),
        128: (DecodeTile(128, 64, 8, 8, 0, wgmma=True),),
    },
    128: {
        16: (DecodeTile(16, 64, 4, 1, 0), DecodeTile(32, 32, 4, 2, 0)),
        32: (DecodeTile(32, 64, 8, 2, 0), DecodeTile(32, 32, 4, 2, 0)),
        64: (DecodeTile(64, 64, 8, 4, 0), DecodeTile(64, 32, 4, 4, 0), DecodeTile(64, 16, 4, 4, 0)),
        # Here it is products that take the time; without wgmma, two blocks, of which one is at its softmax.
        128: (DecodeTile(128, 64, 8, 8, 0, wgmma=True), _lean(128, 32, 4, 4, 2)),
    },
    256: {
        16: (_lean(16, 64, 4, 1), _lean(32, 32, 4, 2), _lean(64, 16, 4, 4)),
        32: (_lean(32, 32, 4, 2), _lean(64, 16, 4, 4)),
        64: (_lean(64, 32, 4, 4), _lean(64, 16, 4, 4)),
    },
}

# The same for keys and values in 8 bits: a step costs the warps as much as one of 16 bits, so it must be of more keys. Tiles of 8 rows have
# those as columns of their products.
E4M3: dict[int, dict[int, tuple[DecodeTile, ...]]] = {
    64: {
        8: (DecodeTile(8, 256, 8, 1, 0), DecodeTile(8, 128, 8, 1, 0)),
        16: (DecodeTile(16, 256, 8, 1, 0), DecodeTile(16, 128, 8, 1, 0)),
        32: (DecodeTile(32, 128, 8, 2, 0), DecodeTile(32, 64, 8, 2, 0)),
        64: (DecodeTile(64, 128, 8, 4, 0), DecodeTile(64, 64, 8, 4, 0)),
    },
    128: {
        8: (DecodeTile(8, 256, 8, 1, 0), DecodeTile(8, 128, 8, 1, 0), DecodeTile(8, 64, 4, 1, 0)),
        16: (DecodeTile(16, 256, 8, 1, 0), DecodeTile(16, 128, 8, 1, 0), DecodeTile(16, 64, 4, 1, 0)),
        32: (DecodeTile(32, 128, 8, 2, 0), DecodeTile(32, 64, 8, 2, 0), DecodeTile(32, 32, 4, 2, 0)),
        64: (DecodeTile(64, 128, 8, 4, 0), DecodeTile(64, 64, 8, 4, 0), DecodeTile(64, 32, 4, 4, 0)),
    },
    256: {
        8: (DecodeTile(8, 128, 8, 1, 0), DecodeTile(8, 64, 4, 1, 0), DecodeTile(8, 32, 2, 1, 0)),
        32: (_lean(32, 32, 4, 2), _lean(64, 16, 4, 4)),
        64: (_lean(64, 32, 4, 4), _lean(64, 16, 4, 4)),
    },
}

# Tried first where keys lie in pages, whose addresses take a warp so long that two of them must share a scheduler.
PAGED: dict[int, DecodeTile] = {64: DecodeTile(16, 128, 8, 1, 0), 128: DecodeTile(16, 128, 8, 1, 0)}


def head_class(size: int, e4m3: bool) -> int:
    """The padded head size; in 8 bits, rows of shared memory are whole blocks of 64 numbers."""
    padded = tiles.head_class(size)
    return -(-padded // 64) * 64 if e4m3 else padded


def stages(tile: DecodeTile, d: int, dv: int, memory: int, itemsize: int = 2) -> int:
    """Stages that fit so many bytes of shared memory, at most MOST_STAGES."""
    fixed = tile._replace(stages=0).shared_memory(d, dv, itemsize)
    most = MOST_STAGES + 2 * tile.wgmma  # of which the workers hold two
    return min(most, (memory - fixed) // (tile._replace(stages=1).shared_memory(d, dv, itemsize) - fixed))


def fit(tile: DecodeTile, d: int, dv: int, info: DeviceInfo, itemsize: int = 2) -> DecodeTile | None:
    """The tile with as many stages as fit the GPU; None if they are too few, or the GPU lacks the instructions."""
    if tile.wgmma and info.cc != (9, 0):
        return None
    reserved = RESERVED_SHARED_MEMORY if info.cc >= (8, 0) else 0
    memory = min(info.shared_memory_block, info.shared_memory_sm // tile.resident - reserved)
    merging = 4 * 32 * tile.m * tile.warps // tile.row_warps  # the fewest columns at a time, in the place of K and V
    count = stages(tile, d, dv, memory, itemsize)
    enough = count >= (5 if tile.wgmma else 2) and merging <= itemsize * tile.n * (d + dv)
    return tile._replace(stages=count) if enough else None


def decode(
    rows: int, d: int, dv: int, info: DeviceInfo, paged: bool = False, one: bool = True, strided: bool = False, itemsize: int = 2,
) -> DecodeTile | None:
    """The tile for so many rows and padded head sizes: the first of the table that fits the GPU, of fewer rows if need be; or None.

    ``one``: there is one query. With several the largest tile would not keep to its registers, nor any of the widest heads where the
    compiler needs some more. ``strided``: numbers are copied one by one, by more registers than are left to those who load beside wgmma.
    ``itemsize``: bytes of a key's or value's number.
    """
    if not one and max(d, dv) > 160 and info.cc >= (10, 0):
        return None
    size, table = next((size, table) for size, table in (E4M3 if itemsize == 1 else DECODE).items() if max(d, dv) <= size)
    most = next((m for m in table if rows <= m), max(table))
    most = most if one else min(most, 64)
    choices = [tile for m in sorted(table, reverse=True) if m <= most for tile in table[m] if not (tile.wgmma and strided)]
    if paged and itemsize == 2 and most == 16 and size in PAGED:
        choices.insert(0, PAGED[size])
    return next(filter(None, (fit(tile, d, dv, info, itemsize) for tile in choices)), None)
