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


# By the larger of the two padded head sizes. The comment gives shared memory at D = Dv, and blocks a multiprocessor. A thread holds, in
# 32-bit registers, N (D + Dv) / threads numbers of dK and dV, and 2 M N / threads scores and their gradients, then M D / threads of dQ.
BACKWARD_FA2: dict[str, dict[int, BackwardTile]] = {
    # 227 KiB a block, 228 a multiprocessor
    "sm_90": {
        32: BackwardTile(64, 128, 4, 2, 4, 4, 2),  # 65 KiB, 2
        64: BackwardTile(32, 128, 4, 2, 4, 2, 2),  # 64 KiB, 2
        96: BackwardTile(64, 128, 8, 2, 4, 4),  # 129 KiB, 1
        128: BackwardTile(64, 128, 8, 2, 4, 2),  # 161 KiB, 1
        160: BackwardTile(64, 64, 8, 2, 4, 4),  # 137 KiB, 1
        192: BackwardTile(64, 64, 8, 2, 2, 2),  # 161 KiB, 1
        256: BackwardTile(64, 64, 8, 2, 2, 2),  # 209 KiB, 1
    },
    # 163 KiB a block, 164 a multiprocessor
    "sm_80": {
        32: BackwardTile(64, 128, 4, 2, 4, 4, 2),
        64: BackwardTile(32, 128, 4, 2, 4, 2, 2),
        96: BackwardTile(64, 128, 8, 2, 4, 4),
        128: BackwardTile(64, 128, 8, 2, 4, 2),
        160: BackwardTile(64, 64, 8, 2, 4, 4),
        192: BackwardTile(64, 64, 8, 2, 2, 2),
        256: BackwardTile(64, 64, 8, 1, 2, 2),  # 145 KiB, 1
    },
    # 99 KiB a block, 100 a multiprocessor
    "sm_86": {
        32: BackwardTile(32, 128, 4, 2, 4, 2, 2),  # 41 KiB, 2
        64: BackwardTile(32, 64, 4, 2, 2, 2, 2),  # 41 KiB, 2
        96: BackwardTile(32, 128, 8, 2, 4, 2),  # 89 KiB, 1
        128: BackwardTile(32, 128, 8, 1, 4, 2),  # 96 KiB, 1
        160: BackwardTile(32, 64, 4, 2, 4, 2),  # 89 KiB, 1
        192: BackwardTile(32, 64, 4, 1, 2, 2),  # 80 KiB, 1
        256: BackwardTile(32, 32, 4, 1, 1, 2, keys=16),  # 68 KiB, 1
    },
    # 64 KiB a block and a multiprocessor
    "sm_75": {
        32: BackwardTile(32, 128, 4, 1, 4, 2),  # 36 KiB, 1
        64: BackwardTile(32, 128, 8, 1, 4, 2),  # 56 KiB, 1
        96: BackwardTile(32, 64, 4, 1, 2, 2),  # 44 KiB, 1
        128: BackwardTile(32, 64, 4, 1, 4, 2),  # 56 KiB, 1
        160: BackwardTile(32, 32, 4, 1, 2, 2, keys=16),  # 44 KiB, 1
        192: BackwardTile(32, 32, 4, 1, 2, 2, keys=16),  # 52 KiB, 1
        256: BackwardTile(16, 32, 4, 1, 1, 1, keys=16),  # 50 KiB, 1
    },
}
BACKWARD_FA2["sm_100"] = BACKWARD_FA2["sm_90"]  # not measured


def backward_fa2(d: int, dv: int, info: DeviceInfo) -> BackwardTile | None:
    """The tile for padded head sizes; None if its shared memory does not fit the device."""
    tile = BACKWARD_FA2[tiles.family(info)][max(d, dv)]
    return tile if tile.shared_memory(d, dv) <= info.shared_memory_block else None
