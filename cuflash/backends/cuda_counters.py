"""Counters by which the blocks of a kernel learn who is the last: memory that is 0 before and after, also in graphs that are replayed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from typing import Any

import numpy as np

from .. import launch


def capture_id(stream: int) -> int | None:
    """A number of the capture that CuPy's current stream, this one, takes part in; None if it is not being captured."""
    if not launch.is_capturing():
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    with contextlib.suppress(OSError, AttributeError):  # the driver has another name, or lacks the function
        driver = ctypes.CDLL("libcuda.so.1")  # CuPy has no such function
        if driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None) == 0:
            return number.value
    return next(_unknown_captures)


_unknown_captures = itertools.count(-1, -1)


class Counters:
    """Memory that is 0 before a kernel and after it.

    A call gets it from CuPy's pool, in the order of the stream, and sets it to 0. What a captured call gets is kept for good, as the graph
    may be replayed at any time; the calls that one capture takes from one stream run one after the other and share it, so that it is set
    to 0 once in a replay.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], list[Any]] = {}  # the last one is in use
        self._lock = threading.Lock()

    def take(self, size: int) -> Any:
        """So many bytes on CuPy's current device and stream, as an array to be kept until the kernel is launched."""
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        capture = capture_id(stream)
        if capture is None:
            memory = cupy.empty(size, np.uint8)
            cupy.cuda.runtime.memsetAsync(memory.data.ptr, 0, size, stream)
            return memory
        with self._lock:
            kept = self._kept.setdefault((cupy.cuda.runtime.getDevice(), stream, capture), [])
            if not kept or kept[-1].size < size:
                memory = cupy.empty(size, np.uint8)
                cupy.cuda.runtime.memsetAsync(memory.data.ptr, 0, size, stream)
                kept.append(memory)
            return kept[-1]
