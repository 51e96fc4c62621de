"""Arrays between two pages that nobody may touch, so that what reads or writes past an end is seen."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from typing import Literal

import numpy as np
from cuflash import arrays
from cuflash.types import ArrayView

Side = Literal["start", "end"]
PAGE = mmap.PAGESIZE
_NONE, _READ = 0, 1  # PROT_NONE and PROT_READ
_FILL = 0xFF  # NaN in every type, and an index that is out of range


class Guarded:
    """A copy of an array's memory, from its first to its last element, with the same strides.

    Parameters
    ----------
    array : ArrayView
        Of NumPy.
    side : {"start", "end"}
        Which end of the array lies at a page without access. At the other one, up to a page around the array holds 0xff.
    writable : bool
        Else a write is a fault as well.
    aligned : bool
        Its address remains what it was modulo 16, though its size is not of whole 16-byte pieces.
    """

    def __init__(self, array: ArrayView, side: Side, writable: bool = False, aligned: bool = False):
        self.original = array
        first, last = arrays.byte_range(array)
        size = last - first
        pages = max(1, -(-(size + 16) // PAGE))
        self._map = mmap.mmap(-1, (pages + 2) * PAGE)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.memory[:] = _FILL
        # Memory of whole 16-byte pieces keeps its alignment; of anything else, no kernel can expect more than its size has.
        aligned = aligned or size % 16 == 0
        off, at = first % 16 * aligned, (pages + 1) * PAGE - size
        at = PAGE + off if side == "start" else at - (at - off) % 16 * aligned
        ctypes.memmove(self.memory.ctypes.data + at, first, size)
        base = self.memory.ctypes.data
        self.begin, self.end = base + at, base + at + size
        self._offset = at + array.pointer - first
        self.view = dataclasses.replace(array, pointer=base + self._offset, array=self._elements(self.memory))
        self._before = self.memory.copy() if writable else None
        self._protect(0, 1, _NONE)
        self._protect(pages + 1, 1, _NONE)
        if not writable:
            self._protect(1, pages, _READ)
        self._pages = slice(PAGE, (pages + 1) * PAGE)

    def _elements(self, memory: np.ndarray) -> np.ndarray:
        """The array's elements in memory laid out like this."""
        a = self.original
        return np.ndarray(a.shape, a.dtype, memory, self._offset, a.strides)

    def _protect(self, first: int, pages: int, access: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.memory.ctypes.data + first * PAGE), ctypes.c_size_t(pages * PAGE), access) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def write_back(self) -> None:
        """Copy the elements to the original array.

        Raises
        ------
        AssertionError
            If something was written around or between them.
        """
        assert self._before is not None
        belongs = np.zeros_like(self._before)
        if self.view.array.size:
            marked = np.ndarray((*self.view.shape, self.view.dtype.itemsize), np.uint8, belongs, self._offset, (*self.view.strides, 1))
            marked[...] = 1
        changed = (self.memory[self._pages] != self._before[self._pages]) & (belongs[self._pages] == 0)
        if changed.any():
            at = int(changed.argmax()) + PAGE - self._offset
            raise AssertionError(f"{int(changed.sum())} bytes beside the elements were written; first {at} bytes from the first element")
        self.original.array[...] = self.view.array
