"""Tile tables of the raw CUDA kernels, per architecture and head size: data, and the choice of the first that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .device import DeviceInfo

HEAD_CLASSES = (32, 64, 96, 128, 160, 192, 256)  # a head size is padded to the next one, inside the kernel
LARGEST_HEAD = HEAD_CLASSES[-1]
RESERVED_SHARED_MEMORY = 1024  # bytes that the driver takes of each resident block, from compute capability 8.0


class Tile(NamedTuple):
    """How a block of prefill_fa2 works.

    Attributes
    ----------
    m, n : int
        Query rows of the block, keys of a step.
    warps : int
        They share the rows; 32 rows a warp halve the traffic of shared memory against 16.
    stages : int
        Tiles of K and of V in shared memory. 2: the next tile is loaded during a whole step, with one barrier a step.
        1: K is loaded while V is used and the other way round.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    groups : int
        Warps that share their rows: each takes every group's part of the keys and of the value columns, so that keys and values are
        read for as many more rows at a time; weights and row maxima go through shared memory.
    q_registers : bool
        Keep the queries in registers instead of reading them from shared memory in every step.
    """

    m: int
    n: int
    warps: int
    stages: int
    resident: int
    groups: int = 1
    q_registers: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_memory(self, d: int, dv: int, page_rows: int = 0) -> int:
        """Bytes of dynamic shared memory for padded head sizes; PrefillFa2::SMEM_BYTES counts the same. ``page_rows``: its PAGE_ROWS."""
        pipeline = 2 * (self.m * d + self.stages * self.n * (d + dv))
        if self.groups > 1:
            pipeline += 2 * self.m * self.n + 4 * self.groups * self.m
        if page_rows:
            pipeline += self._addresses(d, dv, page_rows)
        return max(pipeline, 2 * self.m * dv)  # the rows of out pass through the same memory

    def _addresses(self, d: int, dv: int, page_rows: int) -> int:
        """Bytes of what says where the keys of two spans of tiles lie; KeysValues::BYTES counts the same."""
        runs = self.n // page_rows
        slots, size = 2, 32
        if page_rows > 1:
            slots, size = 2 << (self.threads // 2 // runs).bit_length() - 1, 4 * self.threads + 32
        for columns in (d, dv):
            abreast = max(1, self.threads // (8 if columns % 64 == 0 else 4) // page_rows)
            size += slots * 16 * abreast * -(-runs // (2 * abreast))  # a thread reads the addresses two by two
        return size


@dataclass(frozen=True)
class Choice:
    """Tiles in order of preference: without and with a band mask (causal, window), and for kernels that need more registers
    than those: score kinds other than the plain one, copies of less than 16 bytes, any strides, and windows over pages or over packed
    sequences of which the longest is not known."""

    full: tuple[Tile, ...]
    band: tuple[Tile, ...]
    lean: tuple[Tile, ...]


def _both(*tiles: Tile, lean: tuple[Tile, ...] = ()) -> Choice:
    return Choice(tiles, tiles, lean or tiles)


# For the larger of the two padded head sizes. The comment gives shared memory at D = Dv, and blocks a multiprocessor.
PREFILL_FA2: dict[str, dict[int, Choice]] = {
    # 227 KiB a block, 228 a multiprocessor; chosen by measurement on an H200
    "sm_90": {
        32: _both(Tile(128, 128, 4, 2, 2)),  # 40 KiB, 2
        64: _both(Tile(128, 128, 4, 1, 2), lean=(Tile(128, 64, 4, 2, 2),)),  # 48 KiB, 2
        96: _both(Tile(128, 64, 4, 2, 2)),  # 72 KiB, 2
        128: Choice((Tile(128, 64, 4, 1, 2),), (Tile(128, 64, 4, 2, 2),), (Tile(128, 32, 4, 2, 2),)),  # 64, 96, 64 KiB, 2
        160: Choice((Tile(128, 32, 4, 2, 2),), (Tile(128, 32, 4, 1, 2),), (Tile(128, 64, 8, 2, 1),)),  # 80, 60 KiB, 2; 120 KiB, 1
        192: _both(Tile(64, 96, 4, 1, 2, 2), lean=(Tile(128, 64, 8, 2, 1),)),  # 109 KiB, 2; lean 144 KiB, 1
        256: _both(Tile(64, 64, 4, 1, 2, 2), lean=(Tile(64, 64, 4, 1, 2),)),  # 105 KiB, 2; lean 96 KiB, 2
    },
    # as sm_90, but its compiler needs some more registers; not measured
    "sm_100": {
        32: _both(Tile(128, 128, 4, 2, 2)),
        64: _both(Tile(128, 64, 4, 2, 2)),
        96: _both(Tile(128, 64, 4, 2, 2)),
        128: _both(Tile(128, 32, 4, 2, 2)),
        160: _both(Tile(128, 64, 8, 2, 1)),
        192: _both(Tile(128, 64, 8, 2, 1)),
        256: _both(Tile(64, 64, 4, 1, 2)),
    },
    # 163 KiB a block, 164 a multiprocessor
    "sm_80": {
        32: _both(Tile(128, 128, 4, 2, 2)),
        64: _both(Tile(128, 128, 4, 1, 2), lean=(Tile(128, 64, 4, 2, 2),)),  # 48 KiB, 2
        96: _both(Tile(128, 64, 4, 2, 2)),  # 72 KiB, 2
        128: _both(Tile(128, 32, 4, 2, 2)),  # 64 KiB, 2
        160: _both(Tile(128, 64, 8, 2, 1)),  # 120 KiB, 1
        192: _both(Tile(128, 64, 8, 2, 1)),  # 144 KiB, 1
        256: _both(Tile(128, 64, 8, 1, 1)),  # 128 KiB, 1
    },
    # 99 KiB a block, 100 a multiprocessor
    "sm_86": {
        32: _both(Tile(128, 64, 4, 2, 2)),
        64: _both(Tile(128, 64, 4, 2, 2)),  # 48 KiB, 2
        96: _both(Tile(128, 64, 4, 1, 2)),  # 48 KiB, 2
        128: _both(Tile(128, 32, 4, 1, 2), lean=(Tile(64, 64, 4, 1, 2),)),  # 48 KiB, 2
        160: _both(Tile(64, 64, 4, 1, 1)),  # 60 KiB, 1
        192: _both(Tile(64, 64, 4, 1, 1)),  # 72 KiB, 1
        256: _both(Tile(64, 64, 4, 1, 1)),  # 96 KiB, 1
    },
    # 64 KiB a block and a multiprocessor
    "sm_75": {
        32: _both(Tile(128, 64, 4, 1, 2)),
        64: _both(Tile(128, 64, 4, 1, 2)),  # 32 KiB, 2
        96: _both(Tile(128, 64, 4, 1, 1)),  # 48 KiB, 1
        128: _both(Tile(64, 32, 4, 1, 2)),  # 32 KiB, 2
        160: _both(Tile(64, 32, 4, 1, 1)),  # 40 KiB, 1
        192: _both(Tile(64, 32, 4, 1, 1)),  # 48 KiB, 1
        256: _both(Tile(64, 32, 4, 1, 1)),  # 64 KiB, 1
    },
}

# Where a softcap alone, with copies of 16 bytes and sequences without pages, need not take the tile of `lean`.
PREFILL_FA2_SOFTCAP: dict[str, dict[int, Tile]] = {
    "sm_90": {64: Tile(128, 96, 4, 1, 2), 96: Tile(128, 64, 4, 1, 2), 128: Tile(128, 48, 4, 1, 2)},  # 40, 48, 56 KiB, 2
}

# Where a bias or mask, whose share of a tile waits in registers, needs other tiles than `lean`: for a mask or a 16-bit bias alone; and for
# more (a float32 bias, both, or one of them with pages or narrow copies).
PREFILL_FA2_ARRAYS: dict[str, dict[int, tuple[Tile, Tile]]] = {
    "sm_90": {
        32: (Tile(128, 64, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        64: (Tile(128, 64, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        96: (Tile(128, 32, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        128: (Tile(128, 32, 4, 2, 2), Tile(64, 64, 4, 2, 2)),
        256: (Tile(64, 64, 4, 1, 2), Tile(64, 32, 4, 2, 2)),
    },
    "sm_80": {
        32: (Tile(128, 64, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        64: (Tile(128, 32, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        96: (Tile(128, 32, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        128: (Tile(128, 32, 4, 2, 2), Tile(64, 64, 4, 2, 2)),
        256: (Tile(128, 64, 8, 1, 1), Tile(128, 32, 8, 1, 1)),
    },
    "sm_86": {
        32: (Tile(128, 64, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        64: (Tile(128, 32, 4, 2, 2), Tile(128, 32, 4, 2, 2)),
        96: (Tile(128, 32, 4, 1, 2), Tile(128, 32, 4, 1, 2)),
        256: (Tile(64, 64, 4, 1, 1), Tile(64, 32, 4, 1, 1)),
    },
    "sm_75": {
        32: (Tile(128, 64, 4, 1, 2), Tile(128, 32, 4, 1, 2)),
        64: (Tile(128, 32, 4, 1, 2), Tile(128, 32, 4, 1, 2)),
        96: (Tile(128, 32, 4, 1, 1), Tile(128, 32, 4, 1, 1)),
    },
}
# not measured: B200's compiler needs the tiles of sm_80, but its shared memory is that of sm_90
PREFILL_FA2_ARRAYS["sm_100"] = {**PREFILL_FA2_ARRAYS["sm_80"], 256: PREFILL_FA2_ARRAYS["sm_90"][256]}

# Where the addresses of rows in pages would cost a resident block, or the only one: without and with a bias or mask.
PREFILL_FA2_PAGED: dict[str, dict[int, tuple[Tile | None, Tile | None]]] = {
    "sm_80": {128: (None, Tile(64, 64, 4, 1, 2))},
    "sm_86": {64: (Tile(128, 64, 4, 1, 2), None), 96: (Tile(128, 32, 4, 1, 2), None), 128: (Tile(64, 48, 4, 1, 2), Tile(64, 32, 4, 1, 2))},
    "sm_75": {
        64: (Tile(128, 32, 4, 1, 2), None),
        128: (Tile(64, 16, 4, 1, 2), Tile(64, 32, 4, 1, 1)),
        256: (Tile(64, 16, 4, 1, 1), Tile(32, 32, 2, 1, 1)),
    },
}


def family(info: DeviceInfo) -> str:
    """Row of the table: by shared memory, which is what tells the generations apart for this kernel."""
    if info.cc < (8, 0):
        return "sm_75"
    if info.shared_memory_block >= 227 * 1024:
        return "sm_90" if info.cc < (10, 0) else "sm_100"
    return "sm_80" if info.shared_memory_block >= 163 * 1024 else "sm_86"


def head_class(size: int) -> int:
    """The padded head size, at least 1 and at most LARGEST_HEAD before."""
    return next(c for c in HEAD_CLASSES if size <= c)


def prefill_fa2(
    d: int, dv: int, band: bool, lean: bool, info: DeviceInfo, arrays: int = 0, softcap: bool = False, page_rows: int = 0,
) -> Tile | None:
    """The first tile of the table whose shared memory fits the device, for padded head sizes; None if none does.

    ``arrays`` is 1 for a column of PREFILL_FA2_ARRAYS, 2 for the other, 0 where there is neither bias nor mask; ``softcap`` and
    ``page_rows`` (0 without pages) say that PREFILL_FA2_SOFTCAP and PREFILL_FA2_PAGED are to be asked first.
    """
    if softcap and (own := PREFILL_FA2_SOFTCAP.get(family(info), {}).get(max(d, dv))) is not None:
        return own
    if page_rows and (own := PREFILL_FA2_PAGED.get(family(info), {}).get(max(d, dv), (None, None))[arrays > 0]) is not None:
        return own
    choice = PREFILL_FA2[family(info)][max(d, dv)]
    column = choice.lean if lean or arrays else choice.band if band else choice.full
    special = PREFILL_FA2_ARRAYS[family(info)].get(max(d, dv))
    for tile in column if not arrays or special is None else special[arrays - 1 :]:
        if tile.shared_memory(d, dv, page_rows) <= info.shared_memory_block:
            return tile
    return None
