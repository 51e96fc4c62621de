"""Tile table of prefill_fa3, the raw CUDA kernel for sm_90a: data, and its choice."""

from __future__ import annotations

from typing import NamedTuple

from .device import DeviceInfo


class Fa3Tile(NamedTuple):
    """How a block of prefill_fa3 works.

    Attributes
    ----------
    warpgroups : int
        Of 64 query rows each; one more loads.
    n : int
        Keys of a step.
    stages : int
        Tiles of K and of V in shared memory.
    turns : bool
        Warpgroups start products in turn, so that one has its softmax while the others multiply.
    one_wait : bool
        Softmax comes when both products of a step are there; else while the values' still runs. Two warpgroups that take turns cannot.
    """

    warpgroups: int
    n: int
    stages: int = 2
    turns: bool = True
    one_wait: bool = False

    resident = 1  # blocks that shall fit a multiprocessor together

    @property
    def m(self) -> int:
        """Query rows of a block."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def shared_memory(self, d: int, dv: int) -> int:
        """Bytes of dynamic shared memory for padded head sizes; PrefillFa3::SMEM_BYTES counts the same."""
        k_columns, v_columns = (-(-size // 64) * 64 for size in (d, dv))  # boxes are 64 columns wide
        tiles = 2 * (self.m * k_columns + self.stages * self.n * (k_columns + v_columns)) + self.m * 128  # and 64 columns of results
        return tiles + 2 * 32 + 16 * (2 + self.warpgroups + 2 * self.stages + 1)  # slots of the tiles to come, barriers


Starts = dict[int, Fa3Tile]  # query rows of the longest sequence -> the tile from so many on


class Choice(NamedTuple):
    """Tiles without a band mask, with one side of it (causal), with both (window), and for score kinds other than the plain one."""

    full: Starts
    causal: Starts
    window: Starts
    scored: Starts


# By the larger padded head size. A thread holds, of two query rows, N / 2 scores, N / 4 registers of weights and DV / 2 of O: it has 232
# registers of two warpgroups, 160 of three, 112 of four. More rows of a block read K and V less often, and more warpgroups have more to do
# while one of them waits.
#
# They are called by warpgroups x keys; FREE: without turns.
_2X64, _2X96 = Fa3Tile(2, 64), Fa3Tile(2, 96)
_3X64, _3X64_FREE, _3X80, _3X80_FREE = Fa3Tile(3, 64, 4), Fa3Tile(3, 64, 4, False), Fa3Tile(3, 80, 3), Fa3Tile(3, 80, 3, False)
_4X64 = Fa3Tile(4, 64, 4, one_wait=True)
PREFILL_FA3: dict[int, Choice] = {
    32: Choice({0: _4X64}, {0: _4X64}, {0: _4X64}, {0: _3X64}),
    64: Choice({0: _4X64, 1500: Fa3Tile(3, 128, 2, False)}, {0: _4X64}, {0: _4X64}, {0: _3X64}),
    96: Choice({0: _3X80}, {0: _3X80}, {0: _3X64}, {0: _3X64}),
    128: Choice({0: Fa3Tile(2, 128), 1500: _3X80_FREE}, {0: _3X64_FREE, 1500: _3X80_FREE}, {0: _3X64_FREE}, {0: _3X64_FREE}),
    160: Choice({0: _2X96}, {0: _2X96}, {0: _2X96}, {0: Fa3Tile(2, 64, 3)}),
    192: Choice({0: _2X96}, {0: _2X96}, {0: _2X96}, {0: Fa3Tile(2, 64, 3)}),
    256: Choice({0: _2X64}, {0: _2X64}, {0: _2X64}, {0: Fa3Tile(2, 32, 4)}),
}
NARROW_VALUES = {0: Fa3Tile(2, 112)}  # of heads of 192 with values of at most 128


def starts(d: int, dv: int, mask: int, scored: bool, paged: bool) -> Starts:
    """The tiles for padded head sizes and a kind of mask (cuda_instance.py).

    Keys in pages come in boxes of rows that a page and the tile have whole: those of windows suit them.
    """
    if d == 192 and dv <= 128 and not paged:
        return NARROW_VALUES
    choice = PREFILL_FA3[max(d, dv)]
    return choice.scored if scored else choice.window if paged else (choice.full, choice.causal, choice.window, choice.window)[mask]


def prefill_fa3(d: int, dv: int, mask: int, scored: bool, paged: bool, rows: int, info: DeviceInfo) -> Fa3Tile | None:
    """The tile for so many query rows of a sequence, at most; None where the GPU has no instructions for it."""
    if info.cc != (9, 0):
        return None
    found = starts(d, dv, mask, scored, paged)
    return found[max(start for start in found if start <= rows)]
