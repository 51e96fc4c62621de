"""Tensor maps: what the copy engine of sm_90 must know of an array to load boxes of it (CUtensorMap of CUDA's driver).

A kernel gets them by value, as members of its parameters. The driver alone knows their bits: it makes one from a description of the array
and the box, and it can move one that is there to another address, which takes it less.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import driver

BYTES = 128  # of a map, in the kernel's parameters at a multiple of ALIGNMENT
ALIGNMENT = 64
MOST_RANK, MOST_SIZE, MOST_STRIDE, MOST_BOX = 5, 1 << 32, 1 << 40, 256
# CUtensorMapDataType, by the bytes of a number: the copy engine asks for no more to copy.
_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
_NO_INTERLEAVE, _L2_PROMOTION_256B, _ZEROS = 0, 3, 0


def why_not(
    itemsize: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 128, address: int = 0,
) -> str | None:
    """Why there is no tensor map of such an array, in words; None if there is one. Arguments as for :class:`TensorMap`."""
    if itemsize not in _TYPES:
        return f"numbers of {itemsize} bytes; there are maps of {', '.join(map(str, _TYPES))}"
    if not 1 <= len(shape) <= MOST_RANK or len(box) != len(shape) or len(strides) != len(shape) - 1:
        return (
            f"{len(shape)} dimensions, {len(strides)} strides, a box of {len(box)}; there are 1 to {MOST_RANK} dimensions, "
            "with strides of all but the first"
        )
    if not all(1 <= n <= MOST_SIZE for n in shape):
        return f"a shape of {tuple(shape)}; dimensions have 1 to {MOST_SIZE} elements"
    if not all(1 <= n <= MOST_BOX for n in box):
        return f"a box of {tuple(box)}; dimensions of boxes have 1 to {MOST_BOX} elements"
    if not all(0 < stride < MOST_STRIDE and stride % 16 == 0 for stride in strides):
        return f"strides of {tuple(strides)} bytes; they must be positive multiples of 16 bytes below 2^40"
    if swizzle not in _SWIZZLES:
        return f"a swizzle of {swizzle} bytes; there are {', '.join(map(str, _SWIZZLES))}"
    row = box[0] * itemsize
    if row % 16 or (swizzle and row > swizzle):
        return f"rows of {row} bytes in a box; they must be multiples of 16" + f", at most {swizzle}" * (swizzle > 0)
    if address % 16:
        return f"address {address:#x}; it must be a multiple of 16"
    return None


def there_are() -> bool:
    """Whether the driver makes tensor maps."""
    return hasattr(driver.library(), "cuTensorMapReplaceAddress")


class TensorMap:
    """Tensor maps of arrays that differ in their address alone.

    Parameters
    ----------
    itemsize : int
        Bytes of an element: 1, 2, 4 or 8.
    shape : sequence of int
        Elements of each dimension, the innermost one first, in which elements are neighbours.
    strides : sequence of int
        Bytes from one element to the next, of all dimensions but the innermost one.
    box : sequence of int
        Elements of a box in each dimension; those outside the array arrive as 0.
    swizzle : int
        0, or the bytes (32, 64, 128) within which 16-byte pieces of a box change places in shared memory.

    Raises
    ------
    ValueError
        If there is no such map.
    """

    def __init__(self, itemsize: int, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int = 128):
        reason = why_not(itemsize, shape, strides, box, swizzle)
        if reason is not None:
            raise ValueError(f"a tensor map cannot describe {reason}")
        rank = len(shape)
        words, halves = ctypes.c_uint64, ctypes.c_uint32
        self._before = ctypes.c_int(_TYPES[itemsize]), halves(rank)
        self._behind = (
            (words * rank)(*shape), (words * max(1, rank - 1))(*strides), (halves * rank)(*box), (halves * rank)(*[1] * rank),
            *map(ctypes.c_int, (_NO_INTERLEAVE, _SWIZZLES[swizzle], _L2_PROMOTION_256B, _ZEROS)),
        )

    def at(self, address: int) -> bytes:
        """The map of the array at this device address, a multiple of 16.

        Raises
        ------
        ValueError
            If the driver does not take it.
        RuntimeError
            If the driver is older than CUDA 12.0.
        """
        memory = aligned(bytes(BYTES))
        encode = _function("cuTensorMapEncodeTiled")
        _check(encode(ctypes.c_void_p(memory.ctypes.data), *self._before, ctypes.c_void_p(address), *self._behind), address)
        return memory.tobytes()


@functools.lru_cache(maxsize=256)
def tensor_map(
    itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int = 128,
) -> TensorMap:
    """The :class:`TensorMap` of these arguments, one for all who ask."""
    return TensorMap(itemsize, shape, strides, box, swizzle)


class Follower:
    """Tensor maps in a parameter struct that follow their arrays from call to call. Not for two threads at a time.

    Parameters
    ----------
    places : sequence of int
        Host addresses of the maps, multiples of ALIGNMENT.
    """

    __slots__ = ("_address", "_at", "_move", "_places")

    def __init__(self, places: Sequence[int]):
        self._places = tuple(map(ctypes.c_void_p, places))
        self._at: tuple[int, ...] = ()
        self._address = ctypes.c_void_p()
        self._move = _function("cuTensorMapReplaceAddress")

    def __call__(self, addresses: tuple[int, ...]) -> None:
        """Move the maps to the first of these device addresses, unless they are those of the call before.

        Raises
        ------
        ValueError
            If the driver does not take one.
        """
        at = addresses[: len(self._places)]
        if at == self._at:
            return
        self._at = ()  # if the driver refuses one, some have moved and some have not: the next call moves them all
        for place, address in zip(self._places, at, strict=True):
            self._address.value = address
            if status := self._move(place, self._address):
                _check(status, address)
        self._at = at


def aligned(params: bytes) -> np.ndarray:
    """A copy of a parameter struct, uint8, at a multiple of ALIGNMENT."""
    memory = np.empty(len(params) + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    memory[first : first + len(params)] = np.frombuffer(params, np.uint8)
    return memory[first : first + len(params)]


def _function(name: str) -> Any:
    found = getattr(driver.library(), name, None)
    if found is None:
        raise RuntimeError(f"tensor maps need the driver of CUDA 12.0 or later; there is no {name} in it")
    return found


def _check(status: int, address: int) -> None:
    if status != 0:
        must = "the address must be one on a device, a multiple of 16"
        raise ValueError(f"no tensor map of an array at {address:#x}: {driver.error(status)}; {must}")
