"""Counters by which the blocks of a kernel learn who is the last: memory that is 0 before and after, also in graphs that are replayed."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import launch

SEMAPHORE_BYTES = 64  # more than any C library's sem_t has
NO_DESTRUCTOR_SYNC, MOVE = 1, 1  # flags of the two functions below


@functools.cache
def driver() -> Any:
    """CUDA's driver, for functions that CuPy does not have; an object without any where it has another name."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return object()


def capture(stream: int) -> tuple[int, int] | None:
    """The capture that CuPy's current stream, this one, takes part in: a number and the graph, 0 if unknown; None if it is not captured."""
    if not launch.is_capturing():
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    ask = getattr(driver(), "cuStreamGetCaptureInfo_v2", None)
    if ask and ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None) == 0:
        return number.value, graph.value or 0
    return next(_unknown_captures), 0


_unknown_captures = itertools.count(-1, -1)


class End:
    """Tells when a graph is gone with all that was instantiated from it, and has run for the last time.

    CUDA calls a function then, on any of its threads, where neither CUDA nor Python may be used: it is the C library's sem_post. The
    semaphore is in the C library's memory, as that may happen after Python has ended.
    """

    def __init__(self, graph: int):
        self._semaphore: ctypes.c_void_p | None = None
        if not graph or not all(hasattr(driver(), name) for name in ("cuUserObjectCreate", "cuGraphRetainUserObject")):
            return
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        semaphore, made = ctypes.c_void_p(self._libc.malloc(SEMAPHORE_BYTES)), ctypes.c_void_p()
        self._libc.sem_init(semaphore, 0, 0)
        post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        if driver().cuUserObjectCreate(ctypes.byref(made), semaphore, post, 1, NO_DESTRUCTOR_SYNC) == 0:
            # Where the graph does not take it, nobody will ever post.
            driver().cuGraphRetainUserObject(ctypes.c_void_p(graph), made, 1, MOVE)
            self._semaphore = semaphore

    def come(self) -> bool:
        """Whether it is; never, where CUDA cannot tell it. Not to be asked again once it was."""
        if self._semaphore is None or self._libc.sem_trywait(self._semaphore) != 0:
            return False
        self._libc.free(self._semaphore)
        return True


@dataclass
class Kept:
    """What one capture has taken on one stream; the last array is in use."""

    end: End
    arrays: list[Any] = field(default_factory=list)


class Counters:
    """Memory that is 0 before a kernel and after it.

    A call gets it from CuPy's pool, in the order of the stream, and sets it to 0. What a captured call gets is kept as long as the graph,
    which may be replayed at any time; the calls that one capture takes from one stream run one after the other and share it, so that it
    is set to 0 once in a replay.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Any:
        """So many bytes on CuPy's current device and stream, as an array to be kept until the kernel is launched."""
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        captured = capture(stream)
        if captured is None:
            memory = cupy.empty(size, np.uint8)
            cupy.cuda.runtime.memsetAsync(memory.data.ptr, 0, size, stream)
            return memory
        number, graph = captured
        key = (cupy.cuda.runtime.getDevice(), stream, number)
        with self._lock:
            if key not in self._kept:
                for old in [old for old, kept in self._kept.items() if kept.end.come()]:
                    del self._kept[old]
                self._kept[key] = Kept(End(graph))
            arrays = self._kept[key].arrays
            if not arrays or arrays[-1].size < size:
                memory = cupy.empty(size, np.uint8)
                cupy.cuda.runtime.memsetAsync(memory.data.ptr, 0, size, stream)
                arrays.append(memory)
            return arrays[-1]
