"""Tile table of backward_fa2, the raw CUDA kernel of the backward pass with mma.sync: data, and its choice."""

from __future__ import annotations

from typing import NamedTuple

from . import tiles
from .device import DeviceInfo

LEAST_ROWS = 32  # of a step, as far as the arrays between launches are concerned: blocks of backward_prepare.cu have so many


class BackwardTile(NamedTuple):
    """How a block of backward_fa2 works.

    Attributes
    ----------
    m, n : int
        Query rows of a step, keys of the block.
    warps : int
        They share the keys whose gradients stay in registers.
    stages : int
        Tiles of queries and of dO in shared memory. 2: the next ones are loaded during a whole step; 1: while dQ is computed.
    key_warps, row_warps : int
        Warps that share the keys of dK and dV, and the rows of dQ; the others share their columns.
    resident : int
        Blocks that shall fit a multiprocessor together; it bounds the registers.
    keys : int
        Keys whose scores a warp has at a time.
    """

    m: int
    n: int
    warps: int
    stages: int
    key_warps: int
    row_warps: int
    resident: int = 1
    keys: int = 32

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; BackwardFa2::SMEM_BYTES counts the same."""
        return 2 * (self.n + self.stages * self.m) * (d + dv) + 4 * self.m * self.n + 8 * self.stages * self.m


class QueriesTile(NamedTuple):
    """How a block of backward_fa2_dq works: query rows, keys of a step, warps that share the rows, tiles of keys in shared memory, and
    blocks that shall fit a multiprocessor together."""

    m: int
    n: int
    warps: int
    stages: int
    resident: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; BackwardFa2Dq::SMEM_BYTES counts the same."""
        return 2 * (self.m + self.stages * self.n) * (d + dv)


class Choice(NamedTuple):
    """Tiles for plain kernels, and for those that need more registers: other score kinds than the plain one, masks, narrow copies."""

    plain: BackwardTile
    lean: BackwardTile


def _both(*tile: int, lean: BackwardTile | None = None, **more: int) -> Choice:
    plain = BackwardTile(*tile, **more)
    return Choice(plain, lean or plain)


# By the larger of the two padded head sizes. The comment gives shared memory at D = Dv, and blocks a multiprocessor. A thread holds, in
# 32-bit registers, N (D + Dv) / threads numbers of dK and dV, and 2 M N / threads scores and their gradients, then M D / threads of dQ.
BACKWARD_FA2: dict[str, dict[int, Choice]] = {
    # 227 KiB a block, 228 a multiprocessor; not measured
    "sm_90": {
        32: _both(64, 128, 4, 2, 4, 4, 2, lean=BackwardTile(32, 128, 4, 2, 4, 2, 2)),  # 65, 41 KiB, 2
        64: _both(32, 128, 4, 2, 4, 2, 2, lean=BackwardTile(64, 128, 8, 2, 4, 4)),  # 64 KiB, 2; 97 KiB, 1
        96: _both(64, 128, 8, 2, 4, 4, lean=BackwardTile(32, 128, 8, 2, 4, 2)),  # 129, 89 KiB, 1
        128: _both(64, 128, 8, 2, 4, 4, lean=BackwardTile(32, 128, 8, 2, 4, 2)),  # 161, 113 KiB, 1
        160: _both(64, 64, 8, 2, 4, 4),  # 137 KiB, 1
        192: _both(64, 64, 8, 2, 2, 2),  # 161 KiB, 1
        256: _both(64, 64, 8, 1, 2, 2, lean=BackwardTile(32, 64, 8, 2, 2, 2, keys=16)),  # 144, 137 KiB, 1
    },
    # 99 KiB a block, 100 a multiprocessor
    "sm_86": {
        32: _both(32, 128, 4, 2, 4, 2, 2),  # 41 KiB, 2
        64: _both(32, 64, 4, 2, 2, 2, 2),  # 41 KiB, 2
        96: _both(32, 128, 8, 2, 4, 2),  # 89 KiB, 1
        128: _both(32, 128, 8, 1, 4, 2),  # 96 KiB, 1
        160: _both(32, 64, 8, 2, 4, 2, keys=16),  # 89 KiB, 1
        192: _both(32, 64, 8, 1, 2, 2, keys=16),  # 80 KiB, 1
        256: _both(32, 32, 4, 1, 1, 2, keys=16),  # 68 KiB, 1
    },
    # 64 KiB a block and a multiprocessor
    "sm_75": {
        32: _both(32, 128, 4, 1, 4, 2),  # 36 KiB, 1
        64: _both(32, 128, 8, 1, 4, 2),  # 56 KiB, 1
        96: _both(32, 64, 4, 1, 2, 2),  # 44 KiB, 1
        128: _both(32, 64, 4, 1, 4, 2),  # 56 KiB, 1
        160: _both(32, 32, 4, 1, 2, 2, keys=16),  # 44 KiB, 1
        192: _both(32, 32, 4, 1, 2, 2, keys=16),  # 52 KiB, 1
        256: _both(16, 32, 4, 1, 1, 1, keys=16),  # 50 KiB, 1
    },
}
BACKWARD_FA2["sm_80"] = BACKWARD_FA2["sm_90"]  # all of these fit the 163 KiB of sm_80
BACKWARD_FA2["sm_100"] = {size: Choice(choice.lean, choice.lean) for size, choice in BACKWARD_FA2["sm_90"].items()}  # else it spills
ARRAY_KEYS = 32  # whose scores a warp has where a mask or bias is read 8 keys at a time


def backward_fa2(d: int, dv: int, lean: bool, arrays: bool, info: DeviceInfo) -> BackwardTile | None:
    """The tile for padded head sizes; None if its shared memory does not fit the device. ``arrays``: there is a mask or a bias."""
    choice = BACKWARD_FA2[tiles.family(info)][max(d, dv)]
    tile = choice.lean if lean or arrays else choice.plain
    if arrays:
        tile = tile._replace(keys=max(tile.keys, ARRAY_KEYS))
    return tile if tile.shared_memory(d, dv) <= info.shared_memory_block else None


# By the larger of the two padded head sizes, up to the next of these. A thread holds M D / threads numbers of dQ, and 2 M N / threads
# scores and their gradients.
BACKWARD_FA2_DQ: dict[str, dict[int, QueriesTile]] = {
    "sm_90": {64: QueriesTile(128, 32, 4, 2, 2), 128: QueriesTile(64, 64, 4, 1, 2), 256: QueriesTile(64, 32, 4, 1)},  # 48, 64, 96 KiB
    "sm_86": {64: QueriesTile(128, 32, 4, 2, 2), 128: QueriesTile(64, 32, 4, 2), 256: QueriesTile(64, 32, 4, 1)},
    "sm_75": {64: QueriesTile(64, 32, 4, 1, 2), 128: QueriesTile(64, 32, 4, 1), 256: QueriesTile(32, 32, 2, 1)},  # 24, 48, 64 KiB
}
BACKWARD_FA2_DQ["sm_80"] = BACKWARD_FA2_DQ["sm_100"] = BACKWARD_FA2_DQ["sm_90"]


def backward_fa2_dq(d: int, dv: int, info: DeviceInfo) -> QueriesTile | None:
    """The tile of backward_fa2_dq for padded head sizes; None if its shared memory does not fit the device."""
    table = BACKWARD_FA2_DQ[tiles.family(info)]
    tile = table[next(size for size in table if max(d, dv) <= size)]
    return tile if tile.shared_memory(d, dv) <= info.shared_memory_block else None
