"""What a kernel needs beside its arrays, also in graphs that are replayed: partial results, counters by which blocks learn who is last."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import driver, launch
from ..driver import library

SEMAPHORE_BYTES = 64  # more than any C library's sem_t has
NO_DESTRUCTOR_SYNC, MOVE = 1, 1  # flags of the two functions below
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_...
COUNTER_BYTES = 16


def capture(stream: int) -> tuple[int, int] | None:
    """The capture that CuPy's current stream, this one, takes part in: a number and the graph, 0 if unknown; None if it is not captured."""
    if not launch.is_capturing():
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    ask = getattr(library(), "cuStreamGetCaptureInfo_v2", None)
    if ask and ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None) == 0:
        return number.value, graph.value or 0
    return next(_unknown_captures), 0


_unknown_captures = itertools.count(-1, -1)


@contextlib.contextmanager
def allocating() -> Iterator[None]:
    """Let the thread allocate memory outside of a graph while a stream is captured, in whatever mode."""
    exchange = getattr(library(), "cuThreadExchangeStreamCaptureMode", None)
    mode = ctypes.c_int(RELAXED)
    if exchange:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange:
            exchange(ctypes.byref(mode))


class End:
    """Tells when a graph is gone with all that was instantiated from it, and has run for the last time.

    CUDA calls a function then, on any of its threads, where neither CUDA nor Python may be used: it is the C library's sem_post. The
    semaphore is in the C library's memory, as that may happen after Python has ended.
    """

    def __init__(self, graph: int):
        self._semaphore: ctypes.c_void_p | None = None
        if not graph or not all(hasattr(library(), name) for name in ("cuUserObjectCreate", "cuGraphRetainUserObject")):
            return
        self._libc = ctypes.CDLL(None)
        self._libc.malloc.restype = ctypes.c_void_p
        semaphore, made = ctypes.c_void_p(self._libc.malloc(SEMAPHORE_BYTES)), ctypes.c_void_p()
        self._libc.sem_init(semaphore, 0, 0)
        post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        if library().cuUserObjectCreate(ctypes.byref(made), semaphore, post, 1, NO_DESTRUCTOR_SYNC) == 0:
            # Where the graph does not take it, nobody will ever post.
            library().cuGraphRetainUserObject(ctypes.c_void_p(graph), made, 1, MOVE)
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


class GraphMemory:
    """Memory for what a call needs while it runs; with ``zeroed``, it is 0 before a kernel, which leaves it so.

    A call gets it from CuPy's pool, in the order of the stream. What a captured call gets is kept as long as the graph, which may be
    replayed at any time; the calls that one capture takes from one stream run one after the other and share it, so that it is set to 0
    once in a replay, and nothing stands in the graph between one kernel and the next.
    """

    def __init__(self, zeroed: bool) -> None:
        self._zeroed = zeroed
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> Any:
        """So many bytes on CuPy's current device and stream, as an array to be kept until the kernel is launched."""
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        captured = capture(stream)
        if captured is None:
            return self._new(size, stream)
        number, graph = captured
        key = (cupy.cuda.runtime.getDevice(), stream, number)
        with self._lock:
            if key not in self._kept:
                for old in [old for old, kept in self._kept.items() if kept.end.come()]:
                    del self._kept[old]
                self._kept[key] = Kept(End(graph))
            arrays = self._kept[key].arrays
            if not arrays or arrays[-1].size < size:
                with allocating():
                    arrays.append(self._new(size, stream))
            return arrays[-1]

    def _new(self, size: int, stream: int) -> Any:
        import cupy

        memory = cupy.empty(size, np.uint8)
        if self._zeroed:
            cupy.cuda.runtime.memsetAsync(memory.data.ptr, 0, size, stream)
        return memory


class Counter:
    """A counter on the device, uint32, for a launch inside."""

    __slots__ = ("address", "array")

    def __init__(self, array: Any):
        self.array, self.address = array, int(array.data.ptr)

    def __enter__(self) -> int:
        return self.address

    def __exit__(self, *_: Any) -> None:
        pass


class StreamCounters:
    """A counter of each stream, which is 0 before a kernel; the kernel leaves it so.

    Kernels on one stream run one after the other, so that they share it, and it is set to 0 once. Streams are told apart by their
    numbers: CUDA gives the handle of a stream that is gone to another one while kernels of the first may still run. A captured call
    gets a counter of its graph.
    """

    MOST = 1024  # streams

    def __init__(self) -> None:
        self._memory, self._of_streams = GraphMemory(zeroed=True), dict[tuple[int, int], Counter]()

    def taker(self, ordinal: int) -> Callable[[], Counter]:
        """The function that gives the counter of CuPy's current stream on its current device, which is then to be this one."""
        stream, is_capturing = launch.stream_getter(), launch.capture_asker()

        def take() -> Counter:
            current = stream().ptr
            if is_capturing(current):
                return Counter(self._memory.take(COUNTER_BYTES))
            key = ordinal, stream_number(current)
            found = self._of_streams.get(key)
            if found is None:
                if len(self._of_streams) >= self.MOST:
                    self._of_streams = {}
                # If another thread that uses the stream puts in one as well, both are right.
                found = self._of_streams[key] = Counter(self._memory.take(COUNTER_BYTES))
            return found

        return take


def stream_number(stream: int) -> int:
    """What CUDA numbers a stream by, of its current context: no other stream ever has the same."""
    number = ctypes.c_uint64()
    status = library().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number))
    if status == driver.INVALID_CONTEXT:  # a thread that has not used CUDA yet
        driver.use_device()
        status = library().cuStreamGetId(ctypes.c_void_p(stream), ctypes.byref(number))
    if status:
        raise RuntimeError(f"CUDA does not tell a stream's number: {driver.error(status)}")
    return number.value
